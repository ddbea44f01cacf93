# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The kernels of LoCo, built once: ranks then find them."""

import pytest

from deepspeed_ext.loco import ops


@pytest.fixture(scope="session", autouse=True)
def kernels(_build_locks: None) -> bool:
    """Whether there are any; without a compiler the reference is tested."""
    return ops.load_kernels()
