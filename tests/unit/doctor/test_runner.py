# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A check that raises or hangs on one rank is a finding, and blocks no other rank; missing ranks are named."""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch.distributed import HashStore, PrefixStore
from torch.distributed.distributed_c10d import _get_default_store

from deepspeed_ext.planner import probe
from deepspeed_ext.tools.doctor import links
from deepspeed_ext.tools.doctor.cli import CHECKS, Report, add_arguments, examine, run, run_checks
from deepspeed_ext.tools.doctor.findings import Finding, Level, Section, report_text, worst_level
from deepspeed_ext.tools.doctor.launch import Check, Launch, Options, RendezvousError, connect
from scripts.emulation.launching import free_port
from tests.harness.tiers import with_cases


def test_failures_of_one_rank_are_findings_and_hang_nobody(ranks: Any) -> None:
    first, second, third = ranks(3).run(failing_case)
    findings = {title: [(subject, level, found) for subject, level, found in section] for title, section in first[0]}
    assert findings["good"] == [("answers", "ok", "0, 1, 2")]
    ((subject, level, found), (_, _, finding_for)) = findings["raises"]
    assert (subject.split(" on ")[0], level) == ("rank 1", "wrong") and finding_for == "0, 2"
    assert found == "the check itself failed: OSError: no such disk"
    assert "it did not end within 2 s" in findings["hangs"][0][2] and findings["hangs"][1][2] == "0, 1"
    assert findings["bad judge"] == [(findings["bad judge"][0][0], "wrong", "the check itself failed: KeyError: 7")]
    assert findings["together"][-1] == ("answers", "ok", "0, 1, 2")
    assert "rank 0" in findings["fails together"][0][0]
    assert findings["left out"] == [("skipped", "look", "fails together failed")]
    assert not second[0] and not third[0]
    assert [finding[1] for finding in (first, second, third)] == [False, False, True]  # what hangs is left behind


def failing_case() -> tuple[list[Any], bool]:
    """The findings of the first rank, and whether a check still runs on this rank."""

    rank = dist.get_rank()

    def fail(launch: Launch, number: int, error: Exception) -> None:
        if launch.rank == number:
            raise error

    def listed(answers: Any, launch: Launch) -> list[Finding]:
        return [Finding("answers", Level.OK, ", ".join(map(str, sorted(answers))))]

    def make(examine: Any, collective: bool = False, judge: Any = listed, seconds: float = 60) -> Check:
        return Check(examine, judge, collective, seconds)

    checks = {
        "good": make(lambda launch: launch.rank),
        "raises": make(lambda launch: fail(launch, 1, OSError("no such disk"))),
        "hangs": make(lambda launch: time.sleep(60 if launch.rank == 2 else 0), seconds=0),
        "bad judge": make(lambda launch: None, judge=lambda answers, launch: {}[7]),
        "process groups": replace(links.PROCESS_GROUPS, least_seconds=60),
        "together": make(lambda launch: dist.barrier(), collective=True),
        "fails together": make(lambda launch: fail(launch, 0, RuntimeError("a link is down")), collective=True),
        "left out": make(lambda launch: dist.barrier(), collective=True),
    }
    store, options = PrefixStore("doctor", _get_default_store()), Options(timeout=2, group_size=1)
    run_checks(Launch(rank, rank, ["a", "a", "b"], options, store=store), checks, report := Report())
    plain = [
        (section.title, [(finding.subject, finding.level.word, finding.found) for finding in section.findings])
        for section in report.sections
    ]
    return plain, report.abandoned


def test_nodes_are_measured_over_process_groups(ranks: Any) -> None:
    """Two groups of two ranks on one host, through all that communicates, and the clocks."""
    (first, _), *_ = measured = ranks(4).run(measuring_case)
    assert [others for _, others in measured] == [{1, 2}, {3}, {3}, set()]
    levels = {title: level for title, level, _ in first}
    levels.pop("nodes and links")  # messages are tiny here, so that times are noise
    assert levels == dict.fromkeys(("process groups", "links", "clocks"), "ok")
    text = " ".join(found for *_, found in first)
    assert "1 of 1 round(s) of disjoint pairs, 1 pair(s) of nodes" in text and "of 2 node(s)" in text


def measuring_case() -> tuple[list[tuple[str, str, str]], set[int]]:
    """Title, worst level and findings of each check; and the other rank of each pair that this rank reports."""
    store = PrefixStore("doctor", _get_default_store())
    launch = Launch(dist.get_rank(), dist.get_rank(), ["a"] * 4, Options(timeout=60, group_size=2), store=store)
    with mock.patch.object(probe, "SIZES", (2**12, 2**14)), mock.patch.object(links, "SIZES", (2**12, 2**14)):
        collective = {"process groups": links.PROCESS_GROUPS, "links": links.LINKS}
        collective |= {"nodes and links": links.PAIRS, "clocks": links.CLOCKS}
        run_checks(launch, collective, report := Report())
        reported = {other for rank, other, *_ in links.PAIRS.examine(launch) if rank == launch.rank}
    return [
        (finding.title, worst_level([finding]).word, " ".join(finding.found for finding in finding.findings))
        for finding in report.sections
    ], reported


MISSING = r"ranks 1-2 of 3 are missing: 1 s after rank 0 began to wait at 127.0.0.1:.*: rank 0. Check that the laun"
REFUSED = r"rank 1 on .*could not connect to 127.0.0.1:9 \(MASTER_ADDR:MASTER_PORT\) within 1 s"


@pytest.mark.quick
@with_cases(
    "given, said",
    ({"RANK": "0", "WORLD_SIZE": "3"}, MISSING),
    ({"RANK": "1", "WORLD_SIZE": "3", "MASTER_PORT": "9"}, REFUSED),
    ({"WORLD_SIZE": "3", "MASTER_PORT": ""}, "of which RANK, MASTER_PORT are not set: start it with torchrun or"),
)
def test_ranks_that_do_not_come_are_named(given: dict[str, str], said: str) -> None:
    """With the address, and with advice if nothing listens or no launcher has set the variables."""
    given = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), **given}
    with pytest.raises(RendezvousError, match=said):
        connect({name: value for name, value in given.items() if value}, Options(timeout=1.0))
    assert connect({}, Options()).world == 1  # a rank alone


@pytest.mark.quick
def test_all_ranks_meet_at_the_doctors_own_store(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rank 0 has found none missing; and a hang is reported before a watchdog ends the process."""
    form = mock.Mock(side_effect=InterruptedError)
    monkeypatch.setattr(torch.distributed, "init_process_group", form)
    monkeypatch.setattr(logger, "setLevel", mock.Mock())
    store = HashStore()
    with pytest.raises(InterruptedError):
        links.PROCESS_GROUPS.examine(Launch(1, 0, ["a", "b"], Options(timeout=7), store=store))
    given = form.call_args.kwargs
    assert (given["rank"], given["world_size"], given["timeout"]) == (1, 2, timedelta(seconds=7))
    assert given["store"].underlying_store is store


@pytest.mark.quick
def test_without_process_groups_nothing_communicates(capsys: pytest.CaptureFixture[str]) -> None:
    add_arguments(parser := argparse.ArgumentParser())
    skipped = [f"--skip={title}" for title in CHECKS if title not in ("groups", "links", "clocks")]
    assert "--skip=process groups" in skipped and run(parser.parse_args(skipped), list) == 0
    said = capsys.readouterr().out
    assert said.count("skipped  it needs process groups, which are skipped") == 2
    assert said.count("-> Do not skip them, and run the doctor again.") == 2


@pytest.mark.quick
def test_rank_0_alone_needs_a_place_for_the_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And where it has none, or cannot write, all ranks end with the same status."""

    def statuses(given: Path) -> list[int]:
        add_arguments(parser := argparse.ArgumentParser())
        document, store, hosts = parser.parse_args(["--json", str(given)]).json, HashStore(), ["a", "b"]

        def status(rank: int) -> int:
            return examine(Launch(rank, 0, hosts, Options(timeout=10), store=store), {}, document, Report())

        with ThreadPoolExecutor(2) as ranks:
            return list(ranks.map(status, range(2)))

    assert statuses(tmp_path / "none" / "it.json") == [2, 2]
    assert f"doctor: there is no folder for {tmp_path}/none/it.json on a, where rank 0" in capsys.readouterr().err
    assert statuses(tmp_path) == [2, 2]  # a folder
    assert capsys.readouterr().err.startswith("doctor: the report could not be written: ")
    assert statuses(tmp_path / "it.json") == [0, 0] and json.loads((tmp_path / "it.json").read_text())["ranks"] == 2


@pytest.mark.quick
def test_the_report_is_aligned_and_colored_on_a_terminal_only() -> None:
    findings = (Finding("one", Level.OK, "fine"), Finding("longer", Level.WRONG, "word " * 30, "Do it.", ("plot",)))
    sections = [Section("title", findings, {})]
    plain = report_text(sections, width=80).splitlines()
    assert plain[:2] == ["title", "  ok     one     fine"] and plain[2].startswith("  wrong  longer  word word")
    assert plain[-4:-2] == [" " * 17 + "plot", " " * 17 + "-> Do it."]
    assert plain[-1] == "wrong: 1 ok, 0 look, 1 wrong" and all(len(line) <= 80 for line in plain)
    assert "\033" not in "\n".join(plain) and "\033[31mwrong" in report_text(sections, color=True)
