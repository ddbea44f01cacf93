# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks of these tests have a device that is not the host."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.harness.device_on_host import building
from tests.harness.ranks import RankPool

Run = Callable[..., list[Any]]


@pytest.fixture(scope="module")
def run_on_device() -> Iterator[Run]:
    """``run_on_device(case, ...)`` runs ``case(library, ...)`` on four ranks, which no other tests share."""
    if missing := building.missing():
        pytest.skip(f"needs {missing}")
    library, pool = str(building.build_library()), RankPool()
    yield lambda case, *args: pool(4).run(case, library, *args)
    pool.close()
