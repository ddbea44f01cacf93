# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's source distribution, and the tree with the patches applied."""

from pathlib import Path

import pytest

from scripts.fork import deepspeed_source, patched_tree


@pytest.fixture(scope="session")
def archive() -> Path:
    """The archive, downloaded once; without an index, the tests that need it are skipped."""
    try:
        return deepspeed_source.fetch(deepspeed_source.requirement().version)
    except deepspeed_source.Failed as failed:
        if "(from versions: none)" not in str(failed):  # as pip reports that it reaches no index
            raise
        pytest.skip("DeepSpeed's source distribution cannot be fetched: no index can be reached")


@pytest.fixture(scope="session")
def tree(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """DeepSpeed with the patches in git; the package is the one that is installed."""
    return patched_tree.apply_series(tmp_path_factory.mktemp("patched") / "tree", with_package=False)
