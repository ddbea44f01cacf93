# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's source distribution, and a fork made of it."""

from pathlib import Path

import pytest

from deepspeed_ext.integration import fork as forks
from scripts.fork import deepspeed_source, series


@pytest.fixture(scope="session")
def archive() -> Path:
    """Fetched once; without an index, what needs it is skipped."""
    if forks.is_installed():
        pytest.skip("this is the fork")
    try:
        return deepspeed_source.fetch(deepspeed_source.requirement().version)
    except deepspeed_source.Failed as failed:
        if "(from versions: none)" not in str(failed):  # as pip says where it reaches no index
            raise
        pytest.skip("DeepSpeed's source distribution cannot be fetched: no index can be reached")


@pytest.fixture(scope="session")
def fork(archive: Path) -> Path:
    """The Python of an environment with the fork's wheel."""
    return series.environment()


@pytest.fixture(scope="session")
def inside(fork: Path) -> dict[str, str]:
    """The environment variables of a process that runs there."""
    return series.variables(fork)
