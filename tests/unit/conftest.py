# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Fixtures and guards of all unit tests."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.harness import ranks as rank_pools

rank_pools.prepare_environment()  # before any test module imports torch or DeepSpeed

_OF_FIXTURES = {"emulation": "root", "archive": "fork"}  # marks of what needs a fixture


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by what they need; ``quick``, ``deep`` and ``gpu`` stand at the tests."""
    for item in items:
        for name in _OF_FIXTURES.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(_OF_FIXTURES[name])
        if item.path.parent.name == "frameworks":
            item.add_marker("frameworks")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Let the fork server import DeepSpeed while the first tests run, if any test will need ranks."""
    needed = any({"ranks", "run_on_device"} & set(getattr(item, "fixturenames", ())) for item in session.items)
    if needed and not session.config.getoption("collectonly"):
        rank_pools.fork_server()


@pytest.fixture(scope="session", autouse=True)
def _build_locks() -> Iterator[None]:
    """A build that was killed earlier must not make this session wait forever."""
    with rank_pools.remove_stale_build_locks(Path(os.environ["TORCH_EXTENSIONS_DIR"])):
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[rank_pools.RankPool]:
    """Rank processes: ``ranks(4).run(fn, ...)`` runs the module-level function ``fn`` on four ranks."""
    pool = rank_pools.RankPool()
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def kernels(_build_locks: None) -> bool:
    """The kernels of LoCo, built once: ranks then find them. Whether there are any; else its reference is tested."""
    from deepspeed_ext.loco import ops

    return ops.load_kernels()


@pytest.fixture(scope="session")
def emulation() -> None:
    """Skips where this machine cannot emulate a network, as a container may not."""
    from scripts.emulation import network

    if lacks := network.missing():
        pytest.skip(f"needs {'; '.join(lacks)}")
    try:
        with network.Network(1):
            pass
    except RuntimeError as error:
        pytest.skip(f"namespaces and limits are not permitted here: {error}")
