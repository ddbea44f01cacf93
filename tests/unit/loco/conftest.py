# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""All tests of LoCo need its kernels."""

import pytest


@pytest.fixture(scope="session", autouse=True)
def _kernels(kernels: bool) -> bool:
    return kernels
