# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that runs the given tests and records the outcome of each, a line of JSON each.

A line is there when a test starts, and one when it has ended: so the last test of a process that dies or hangs is
    known.
"""

import importlib.util
import json
import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest

JOB = "UPSTREAM_JOB"  # a file of JSON: tests, ranks, record, notes
_LONGEST = 6000  # characters that are kept of a text, its end

# Ranks are forked from a server that has imported these. Upstream's ranks import all anew, which takes longer than
# what they test; the first ZeRO optimizer of a process imports Muon, and with it torch's compiler.
_PRELOAD = ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "pytest"]

_job: dict[str, Any] = json.loads(Path(os.environ[JOB]).read_text(encoding="utf-8"))
_reports: list[pytest.TestReport] = []


def _write(line: dict[str, Any]) -> None:
    with open(_job["record"], "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def _notes() -> int:
    notes = Path(_job["notes"])
    return len(notes.read_text(encoding="utf-8").splitlines()) if notes.is_file() else 0


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    """Fork ranks from a process that has imported their modules."""
    multiprocessing.set_forkserver_preload(_PRELOAD)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the job, and give those that take two ranks as many as it says."""
    if _job["tests"] is not None:
        chosen = set(_job["tests"])
        items[:] = [item for item in items if item.nodeid in chosen]
    for item in items:
        owner = getattr(item, "cls", None)
        if _job["ranks"] and getattr(owner, "is_dist_test", False) and owner.world_size == 2:
            owner.world_size = _job["ranks"]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Write down where DeepSpeed comes from, and which tests there are."""
    results = importlib.util.find_spec("deepspeed")
    location = None if results is None else results.origin
    _write({"deepspeed": location, "collected": [item.nodeid for item in session.items]})


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Write down which files cannot be imported."""
    if report.failed:
        _write({"uncollected": report.nodeid, "text": report.longreprtext[-_LONGEST:]})


def pytest_runtest_logstart(nodeid: str) -> None:
    """Write down that a test starts."""
    _reports.clear()
    _write({"started": nodeid, "made": _notes()})


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Keep what a phase of a test came to."""
    _reports.append(report)


def pytest_runtest_logfinish(nodeid: str) -> None:
    """Write down what a test came to."""
    kind, text = "passed", ""
    for report in _reports:
        if report.failed:
            kind = "failed" if report.when == "call" else "error"
            # What ranks that are no children of a pool print is all that is known of their exceptions.
            text = "\n".join([part[-_LONGEST:] for part in (report.capstderr, report.longreprtext) if part])
            break
        if report.skipped:
            kind = "skipped"
            text = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext[-_LONGEST:]
    seconds = round(sum(report.duration for report in _reports), 2)
    _write({"finished": nodeid, "kind": kind, "text": text, "seconds": seconds, "made": _notes()})
