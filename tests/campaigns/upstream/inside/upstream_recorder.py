# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that runs the given tests and records the outcome of each, a line of JSON each. The process that
is started and the workers of pytest-xdist load it. Only the former writes, since workers may die."""

import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

JOB = "UPSTREAM_JOB"  # a file of JSON: tests, record, notes
FORCED = "UPSTREAM_FORCED"  # see upstream_forced.py
_LONGEST = 6000  # characters that are kept of a text, its end

# Ranks are forked from a server that has imported these. Upstream's ranks import all anew, which takes longer than
# what they test; the first ZeRO optimizer of a process imports Muon, and with it torch's compiler.
_PRELOAD = ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "pytest"]

_job: dict[str, Any] = json.loads(Path(os.environ[JOB]).read_text(encoding="utf-8"))
_worker = os.environ.get("PYTEST_XDIST_WORKER", "")
_notes = Path(_job["notes"] + _worker)  # of the ranks of this worker
if FORCED in os.environ:
    os.environ[FORCED] = json.dumps(json.loads(os.environ[FORCED]) | {"notes": str(_notes)})
_reports: dict[str, list[pytest.TestReport]] = {}  # of tests that run


def _write(line: dict[str, Any]) -> None:
    if not _worker:
        with open(_job["record"], "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Fork ranks from a process that has imported their modules; a worker leads a group of all its processes."""
    multiprocessing.set_forkserver_preload(_PRELOAD)
    if _worker:
        os.setsid()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodeready(node: Any) -> None:
    """Ask a worker for its process, which is kept."""
    node.gateway._rinfo()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Kill the ranks that a worker has left running."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(node.gateway._rinfo().pid, signal.SIGKILL)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the job."""
    if _job["tests"] is not None:
        chosen = set(_job["tests"])
        items[:] = [item for item in items if item.nodeid in chosen]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down where DeepSpeed comes from, and which tests there are."""
    results = importlib.util.find_spec("deepspeed")
    location = None if results is None else results.origin
    _write({"deepspeed": location, "collected": [item.nodeid for item in session.items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down which files cannot be imported."""
    if report.failed:
        _write({"uncollected": report.nodeid, "text": report.longreprtext[-_LONGEST:]})


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Forget the optimizers that the ranks of earlier tests have made."""
    _notes.unlink(missing_ok=True)


def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Count the optimizers that the ranks of a test have made."""
    made = len(_notes.read_text(encoding="utf-8").splitlines()) if _notes.is_file() else 0
    item.user_properties.append(("made", made))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep the report of a phase of a test; after its last one, or if its worker has died, write down the outcome."""
    reports = _reports.setdefault(report.nodeid, [])
    reports.append(report)
    if report.when in ("setup", "call"):
        return
    kind, text = "passed", ""
    for phase in _reports.pop(report.nodeid):
        if phase.failed:
            kind = {"call": "failed", "???": "hung"}.get(str(phase.when), "error")
            # What ranks that are no children of a pool print is all that is known of their exceptions.
            text = "\n".join([part[-_LONGEST:] for part in (phase.capstderr, phase.longreprtext) if part])
            break
        if phase.skipped:
            kind = "skipped"
            text = phase.longrepr[2] if isinstance(phase.longrepr, tuple) else phase.longreprtext[-_LONGEST:]
    seconds, made = round(sum(phase.duration for phase in reports), 2), dict(report.user_properties).get("made", 0)
    _write({"test": report.nodeid, "kind": kind, "text": text, "seconds": seconds, "made": made})
