# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures and guards of all unit tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import ranks as rank_pools

rank_pools.prepare_environment()  # before any test module imports torch or DeepSpeed

_TEST_TIMEOUT = 120.0  # seconds; a collective that goes wrong hangs


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Guard each test that has no time limit of its own, unless a setting of pytest-timeout does."""
    if not config.pluginmanager.hasplugin("timeout") or config.getoption("timeout") or config.getini("timeout"):
        return
    for item in items:
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TEST_TIMEOUT))


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import DeepSpeed while the first tests run, if any test will need ranks."""
    needed = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.getoption("collectonly"):
        rank_pools.start_fork_server()


@pytest.fixture(scope="session", autouse=True)
def _build_locks() -> Iterator[None]:
    """A build that was killed earlier must not make this session wait forever."""
    with rank_pools.remove_stale_build_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"])):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[rank_pools.RankPools]:
    """Rank processes: ``ranks(4).run(fn, ...)`` runs the module-level function ``fn`` on four ranks."""
    pools = rank_pools.RankPools()
    yield pools
    pools.close()
