# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's source distribution, and a fork made of it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "scripts"))

import base
import series


@pytest.fixture(scope="session")
def archive() -> Path:
    """Fetched once; without an index, what needs it is skipped."""
    try:
        return base.fetch(base.requirement().version)
    except base.Failed as failed:
        if "BASE says" in str(failed):
            raise
        pytest.skip(f"DeepSpeed's source distribution cannot be fetched: {str(failed).splitlines()[-1]}")


@pytest.fixture(scope="session")
def fork(archive: Path) -> Path:
    """The Python of an environment with the fork's wheel."""
    return series.environment()


@pytest.fixture(scope="session")
def inside(fork: Path) -> dict[str, str]:
    """The environment variables of a process that runs there."""
    return series.variables(fork)
