# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest for ``scripts/test``: prints the progress, and which folders of tests exceed their budget."""

import re
import time
from collections import defaultdict

import pytest

from scripts import ROOT
from tests.harness.tiers import folder_of


def budgets() -> dict[str, int]:
    """Return the seconds of each folder of tests, by the list in tests/README.md."""
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    return {name: int(seconds) for name, seconds in re.findall(r"`([^`]+)`\s(\d+)", text.partition("budgets: ")[2])}


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # of pytest-xdist, whose controller has all reports
        config.pluginmanager.register(_Progress(config))


class _Progress:
    def __init__(self, config: pytest.Config) -> None:
        self._seconds, self._done, self._tests, self._begin = defaultdict[str, float](float), 0, 0, time.monotonic()
        self._terminal = config.pluginmanager.getplugin("terminalreporter")
        self._workers = config.getoption("numprocesses", 1) or 1
        chosen = (config.args, config.option.keyword, config.option.markexpr)
        self._budgets = budgets() if chosen == (["tests/unit"], "", "not deep") else {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._tests = len(session.items)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: list[str]) -> None:
        self._tests = len(ids)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[folder_of(report.nodeid)] += report.duration
        tenths = 10 * self._done // self._tests
        self._done += report.when == "teardown"
        if 10 * self._done // self._tests > tenths:
            minutes, part = (time.monotonic() - self._begin) / 60, self._done / self._tests
            expected = sum(self._budgets.values()) / self._workers / 60 or minutes / part
            self._terminal.write(f"\n{100 * part:.0f} %: {minutes:.1f} of about {expected:.0f} min\n")

    def pytest_terminal_summary(self) -> None:
        self._terminal.write_line("seconds: " + ", ".join(f"{name} {s:.0f}" for name, s in self._seconds.items()))
        for name, seconds in self._seconds.items():
            if self._budgets and seconds > self._budgets.get(name, 0):
                self._terminal.write_line(f"over budget: {name} {seconds:.0f} of {self._budgets.get(name, 0)} s")
