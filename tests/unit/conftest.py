# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures and guards of all unit tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ranks as rank_pools

rank_pools.prepare_environment()  # before any test module imports torch or DeepSpeed


# Folders whose tests share what is costly to make: a wheel of the fork, ranks that have imported the frameworks.
_TOGETHER = ("fork", "frameworks")
_OF_FIXTURES = {"emulation": "root", "archive": "fork"}  # marks of what needs a fixture


@pytest.hookimpl(tryfirst=True)  # pytest-xdist reads the groups in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need, and those that one process must run; ``quick`` and ``gpu`` stand at the tests."""
    for item in items:
        if group := _group(item):
            item.add_marker(pytest.mark.xdist_group(group))
        for name in _OF_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(_OF_FIXTURES[name])
        if item.path.parent.name == "frameworks":
            item.add_marker("frameworks")


def _group(item: pytest.Item) -> str | None:
    """Tests that share a fixture of their module, a folder of ``_TOGETHER``, or the machine's network, are a group."""
    folder = item.path.parent.name
    if folder in _TOGETHER:
        return folder
    info = getattr(item, "_fixtureinfo", None)
    scopes = [definition[-1].scope for definition in info.name2fixturedefs.values()] if info else []
    return item.path.stem if "module" in scopes else None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import DeepSpeed while the first tests run, if any test will need ranks."""
    needed = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.getoption("collectonly"):
        rank_pools.fork_server()


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


@pytest.fixture(scope="session")
def kernels(_build_locks: None) -> bool:
    """The kernels of LoCo, built once: ranks then find them. Whether there are any; else its reference is tested."""
    from deepspeed_ext.loco import ops

    return ops.load_kernels()
