# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's source distribution, and a fork made of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import base
import series

from deepspeed_ext.integration import fork as forks


@pytest.fixture(scope="session")
def archive() -> Path:
    """Fetched once; without an index, what needs it is skipped."""
    if forks.is_installed():
        pytest.skip("this is the fork")
    try:
        return base.fetch(base.requirement().version)
    except base.Failed as failed:
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
