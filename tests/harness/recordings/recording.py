# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that records the session's tests: ``scripts/test record``. See Note [How tests are recorded]."""

import os
import shutil
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import recorder
from tests.harness.ranks import RankPool
from tests.harness.recordings import selection, store

_SHARED = pytest.StashKey[float]()  # seconds that fixtures took which other tests share
_recorders: list[recorder.Recorder] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--recording", type=Path, default=store.FOLDER, help="the folder that the recording goes into")


def pytest_configure(config: pytest.Config) -> None:
    if not _is_worker(config):
        parts = _parts(config)
        shutil.rmtree(parts, ignore_errors=True)
        parts.mkdir(parents=True)
        store.write_origin(parts, config.invocation_params.args)
        recorder.prepare(parts)
    _recorders.append(recorder.Recorder(_parts(config)))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    if not isinstance(collector, pytest.Module):
        return (yield)
    with _recorders[-1].context(f"{collector.nodeid}#{selection.COLLECTION}"):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session: pytest.Session) -> None:
    """Wait for the fork server, so that its imports are not among the seconds of the first test."""
    needed = any("ranks" in getattr(item, "fixturenames", ()) for item in session.items)
    if needed and not session.config.getoption("collectonly"):
        pool = RankPool()
        pool(1).run(os.getpid)
        pool.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    item.config.stash[_SHARED] = 0.0
    begin = time.monotonic()
    with _recorders[-1].context(item.nodeid):
        result = yield
    seconds = time.monotonic() - begin - item.config.stash[_SHARED]
    fixtures = sorted(getattr(item, "fixturenames", ()))
    _recorders[-1].note(test=item.nodeid, seconds=round(seconds, 3), fixtures=fixtures)
    return result


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, Any, Any]:
    if fixturedef.scope == "function":
        return (yield)
    name = f"{request.node.nodeid}#{fixturedef.argname}"
    begin = time.monotonic()
    with _recorders[-1].context(name):
        result = yield
    seconds = time.monotonic() - begin
    request.config.stash[_SHARED] += seconds
    _recorders[-1].note(shared=name, seconds=round(seconds, 3))
    return result


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    _recorders.pop().stop()
    if not _is_worker(config):
        del os.environ[recorder.FOLDER]
        tests = store.combine(_parts(config), config.getoption("recording"))
        print(f"recorded {tests} tests in {config.getoption('recording')}")


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")  # of pytest-xdist


def _parts(config: pytest.Config) -> Path:
    folder: Path = config.getoption("recording")
    return folder.with_name(folder.name + ".parts").resolve()
