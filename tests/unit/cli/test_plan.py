# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext plan``: its output, files and errors."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext import __main__
from deepspeed_ext.strategy import plain_name
from tests.harness import reports
from tests.harness.documents import page
from tests.harness.tiers import with_cases

LINKS = ["--intra-gbps", "800", "--inter-gbps", "100"]
NODES = ["--nodes", "4", "--ranks-per-node", "8"]
SEVEN = ["--params", "7B", *NODES, *LINKS]
EXPERTS = ["--expert-params", "5B", "--expert-parallel", "2"]
Plan = Callable[..., str]


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """A function that runs the command with arguments, and returns its output."""
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)

    def run(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "plan", *arguments])
        __main__.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(plan: Plan, capsys: pytest.CaptureFixture[str]) -> Plan:
    """A function that runs the command with arguments that it refuses, and returns its message."""

    def run(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            plan(*arguments)
        assert ended.value.code == 2
        return capsys.readouterr().err

    return run


def rows_of(output: str) -> dict[str, list[str]]:
    """Return the words of the table's rows by the strategy, which is used as it is; all columns are aligned."""
    titles, *lines = [
        line for line in output.splitlines() if "known as" in line or re.match(r"[NIG]-[NIG]-[NIG]\b|DDP ", line)
    ]
    column = titles.index("known as")
    assert all(line[column - 1] == " " != line[column] for line in lines if ": " not in line)
    words = [line.split() for line in lines if ": " not in line and " + " not in line]
    return {plain_name(row[0]): row for row in words}


def test_a_table_of_all_strategies_and_a_reason(plan: Plan) -> None:
    output = plan(*SEVEN, "--memory-gb", "40", "--accumulation", "4")
    rows = [line for line in output.splitlines() if line[:5] in {"N-N-G", "I-I-G", "G-G-G"} and ":" not in line]
    assert len(rows) == 8  # plain, with LoCo, and with updates in few bits as well, which GGG does not have
    assert "32 ranks in 4 group(s) of 8, 4 micro-step(s) a step, a rank's memory: 40 GB" in output
    assert output.count("<-- choice") == 3 and output.count("(too large)") > 0
    assert "\nwith LoCo and updates in few bits, N-N-G + LoCo + updates: " in output
    # NNG: parameters 14 GB, gradients 14 GB, optimizer 84/32 GB; received between groups 2 b M = 2 x 3/32 x 14 GB.
    row = rows_of(output)["NNG"]
    assert row[1:4] == ["14.00", "14.00", "2.62"] and row[7] == "2.62"
    assert "compute is assumed to take 0 s" in output and "\nZeRO-1 " in output
    # With Muon: master copies and momentum, and matrices to their owners and back, 2 b M / k.
    output = plan(*SEVEN, "--muon", "32")
    row = rows_of(output)["NNG"]
    assert row[3] == "1.75" and float(row[7]) == pytest.approx(2.625 * (1 + 1 / 4), abs=0.01)
    assert float(row[11]) == pytest.approx(32 / 32) and "not compared with plain stages: with Muon" in output
    # Sent in 4 bytes and summed in order: an eighth of two windows of 7e9 / 16 elements. Kept in 2 bytes.
    output = plan(*SEVEN, "--gradient-dtype", "fp32", "--reduce", "ordered")
    row = rows_of(output)["NNG"]
    assert row[2:5] == ["14.00", "2.62", f"{4 * 7 / 32 + 2 * 4 * 7 / 16 / 8:.2f}"] and row[7] == f"{2.625 * 1.5:.2f}"
    assert "LoCo" not in output and "LoCo" in plan(*SEVEN, "--reduce", "ordered_everywhere")
    output = plan(*SEVEN, "--micro-step-seconds", "4", "--overlap-updates")
    assert rows_of(output)["NNG"][8] == "4" and "compute is assumed" not in output


def test_a_table_with_an_outer_optimizer(plan: Plan) -> None:
    where = [*SEVEN, "--memory-gb", "40", "--micro-step-seconds", "0.3"]
    without = plan(*where)
    output = plan(*where, "--outer", "30")
    assert output.startswith(without)  # it is never the choice
    first, note, _, titles, *lines = output.removeprefix(f"{without}\n").splitlines()
    assert first == "with an outer step every 30 steps, in 32 bits; without the steps of a warm-up"
    linked, _, anchor = note.split()[-1].partition("#")
    assert page(linked).text and not anchor
    rows = rows_of("\n".join([titles, *lines]))
    assert set(rows) == {"NNI", "NII", "INI", "III"}
    # 2 b 4 x 7 GB in an outer step, over 12.5 / 8 GB/s; 4 x 7 / 8 + 8 x 7 / 32 GB, and a copy of 2^26 elements.
    assert rows["III"][7] == "0.17" and rows["III"][15:18] == ["5.25", "0.27", "5.25"]
    assert [line[:5] for line in lines if "(too large)" in line] == ["N-N-I"]
    shape = ["30", "bits=4", "fragments=5", "delay=2", "offload=cpu", "lr=0.6"]
    _, _, output = plan(*where, "--outer", *shape).partition("with an outer step ")
    assert output.startswith("every 30 steps, in 4 bits, in 5 fragments, with a delay of 2, kept on the host; without")
    written = json.loads(plan(*where, "--outer", *shape, "--json", "-"))
    assert list(written) == ["exact", "loco", "both", "outer"] and "choice" not in written["outer"]
    settings = written["outer"]["settings"]
    assert [settings[key] for key in ("steps", "bits", "lr", "offload")] == [30, 4, 0.6, "cpu"]
    fits = {entry["strategy"]: entry["fits"] for entry in written["outer"]["predictions"]}
    assert fits == {"III": True, "INI": True, "NII": True, "NNI": False}


def test_json(plan: Plan, tmp_path: Path) -> None:
    size = ["--params", "1e9", "--trainable", "1e6", "--dtype", "fp32", "--group-size", "4"]
    plan(*size, *NODES, *LINKS, "--json", str(tmp_path / "plan.json"))
    text = (tmp_path / "plan.json").read_text()
    written = json.loads(text)
    assert "Infinity" not in text and "NaN" not in text  # which other readers than Python's refuse
    assert written["exact"]["group_size"] == 4 and len(written["loco"]["predictions"]) == 14
    assert list(written) == ["exact", "loco", "both"] and len(written["both"]["predictions"]) == 11
    assert {(entry["loco"], entry["updates"]) for entry in written["both"]["predictions"]} == {(True, True)}
    assert written["exact"]["choice"]["memory"]["optimizer"] == pytest.approx(12e6 / 32)
    assert json.loads(plan(*size, *NODES, *LINKS, "--json", "-")) == written


def test_seconds_of_tokens_and_latencies(plan: Plan) -> None:
    frozen = ["--params", "7B", "--trainable", "1B", *NODES, *LINKS]  # 6e9 parameters of 4 FLOPs, and 1e9 of 6
    assert plan(*frozen, "--tokens", "1000", "--tflops", "100") == plan(*frozen, "--micro-step-seconds", "0.3")
    # 4 groups of nodes: NCCL's PAT, and rings of 8 ranks within; or as given.
    for latency_options, within, between in ((["--latency-us", "15"], "0 us", "15 us"), ([], "32.2 us", "27.2 us")):
        line = f"all-gather +within groups 100 GB/s a rank \\+ {within}, .* {between}\n"
        assert re.search(line, plan(*SEVEN, *latency_options))


def test_what_is_in_host_memory(plan: Plan, tmp_path: Path) -> None:
    size = ["--params", "7B", "--trainable", "1B", *NODES, "--accumulation", "2"]
    offloaded = [*size, "--offload-param", "--offload-optimizer", "--parameter-cache-gb", "0.75"]
    output = plan(*offloaded, *LINKS, "--host-gbps", "10", "--json", str(tmp_path / "plan.json"))
    written = json.loads((tmp_path / "plan.json").read_text())["exact"]
    by_strategy = {entry["strategy"]: entry for entry in written["predictions"]}
    assert by_strategy and not [name for name in by_strategy if name[0] == "N"] and "\nZeRO-1 " not in output
    # Slices of 14/8 GB without the cache, four times; the updated part, 2/8 GB, back; of that 2/32 GB were there.
    assert by_strategy["IIG"]["busy"]["host"] == pytest.approx((4 * (1.75 - 0.75) + 0.25 + 2 / 32) / 10)
    assert "from/to host   10 GB/s" in output and "s: copies" in output
    assert "assumed to take 0 s: give --host-gbps" in plan(*offloaded, *LINKS)
    written = json.loads(plan(*SEVEN, *EXPERTS, "--offload-param", "--json", "-"))["exact"]
    by_strategy = {entry["strategy"]: entry for entry in written["predictions"]}
    # Dense 4 GB among 8 ranks, and 5 GB of experts among the 4 that have the same ones.
    assert by_strategy["IIG"]["memory"]["parameters"] == 0 and by_strategy["IIG"]["host"] == 4e9 / 8 + 5e9 / 4
    row = rows_of(plan(*size, "--offload-optimizer", *LINKS))["NNG"]
    assert row[3] == "0.00" and row[15] == "0.38"  # 12 GB / 32 on the host


def test_how_often_to_save(plan: Plan) -> None:
    fails = ["--mtbf-hours", "24", "--disk-gbps", "2", "--shared-disk-gbps", "10", "--restart-seconds", "300"]
    where = [*SEVEN, "--host-gbps", "10", "--micro-step-seconds", "4"]
    output = plan(*where, *fails)
    for words in ("synchronous saves; the job fails every 24 h and takes 300 s to restart", "all nodes together 10"):
        assert words in output
    # IIG: 84/32 GB of states on each rank, 8 of them to the disk of a node; 84 GB to what all share take less.
    row = rows_of(output)["IIG"]
    blocked = 2.625 / 10 + 21 / 2
    steps = (2 * blocked * 86400) ** 0.5 / float(row[12])
    assert row[15:17] == ["10.8", "0"] and int(row[18]) == pytest.approx(steps, abs=2)
    written = json.loads(plan(*where, *fails, "--async-save", "--outer", "9", "--json", "-"))
    assert " s): asynchronous saves block training for " in written["exact"]["reason"]
    by_strategy = {entry["strategy"]: entry for entry in written["exact"]["predictions"]}
    assert by_strategy["IIG"]["host"] == 2.625e9 and by_strategy["NIG"]["host"] == 14e9 + 2.625e9
    predictions = written["outer"]["predictions"]
    assert {(entry["saves"], entry["host"]) for entry in predictions} == {(None, 0.0)}  # not its own states


# Words beside a size (7 B unless given), nodes and links, and what the message has.
REFUSED = [
    ("--params 7B --model a:b", "--model: not allowed with argument --params"),
    ("--intra-gbps 8 --inter-gbps 0", "--inter-gbps: must be above 0, got 0"),
    ("--params seven", "expected a number of parameters such as 7e9 or 7B, got 'seven'"),
    ("--params 7B --trainable 8B", "--trainable 8000000000 must be at most --params 7000"),
    ("--expert-params 5B", "--expert-params needs --expert-parallel"),
    ("--tokens 9", "--tokens needs --tflops"),
    ("--tokens 9 --tflops 1 --micro-step-seconds 2", "--tokens cannot be combined with --micro-step-seconds: either"),
    ("--model a:b --expert-params 5B --expert-parallel 2", "--expert-params needs --params: of a --model"),
    ("--params 4B --expert-params 5B --expert-parallel 2", "--expert-params 5000000000 must be less than --params"),
    ("--expert-params 5B --expert-parallel 2 --trainable 1B", "cannot be combined with --trainable: all param"),
    ("--latency-us -1", "--latency-us: must be at least 0, got -1.0"),
    ("--group-size 5", "must divide the data-parallel size, got .* 5 w"),
    ("--json /nowhere/plan", "--json: there is no folder for /nowhere"),
    ("--outer ten", "--outer steps must be an integer .*, got 'ten' of type"),
    ("--outer 10 bit=4", "--outer has no key 'bit': .* mean 'bits'?"),
    ("--outer 10 steps=5", "--outer gives steps twice"),
    ("--outer 4 fragments=5", "--outer fragments must be at most --outer steps"),
    ("--parameter-cache-gb 1", "--parameter-cache-gb needs --offload-"),
    ("--reduce ordered --outer 9", "--outer cannot be combined with --reduce: inner steps send nothing"),
    ("--offload-param --outer 9", "--outer cannot be combined with --offload-param: only the outer"),
    ("--mtbf-hours 9", "--mtbf-hours needs --disk-gbps"),
    ("--async-save", "--async-save needs --mtbf-hours"),
    ("--mtbf-hours 9 --disk-gbps 1", "needs the time of a step: give --micro-step-seconds above 0, or --tokens"),
    ("--modules visual.*", "--modules needs --model: names of modules are not known"),
    ("--model a:b --largest-layer 7", "--largest-layer needs --params"),
    ("--model no_such_module:f", "'no_such_module:f' cannot be imported"),
]


@pytest.mark.parametrize("words, message", REFUSED)
def test_bad_arguments_get_clear_errors(refused: Plan, words: str, message: str) -> None:
    size = [] if {"--params", "--model"} & set(words.split()) else ["--params", "7B"]
    assert re.search(message, refused(*size, *NODES, *LINKS, *words.split()))


LACKING = [
    ([*NODES, *LINKS], "one of the arguments --model --params --page --from is required"),
    (["--params", "7B", *LINKS], "expected --nodes and --ranks-per-node"),
    (["--params", "7B", *NODES], "expected --intra-gbps and --inter-gbps"),
    (["--params", "7B", *NODES, "--intra-gbps", "8"], "--intra-gbps needs --inter-gbps"),
    (["--params", "7B", *NODES, "--host-gbps", "1"], "--host-gbps needs --inter-gbps: without it all"),
    (["--page", "x.html", "--nodes", "4"], "no other options, since the page has its own inputs: remove --nodes"),
]


@pytest.mark.parametrize("arguments, message", LACKING)
def test_missing_arguments_get_clear_errors(refused: Plan, arguments: list[str], message: str) -> None:
    assert message in refused(*arguments)


@pytest.fixture
def report(tmp_path: Path) -> Path:
    path, described = tmp_path / "report.json", reports.planner_input("ZeRO-3").as_dict()
    path.write_text(json.dumps(reports.report() | {"planner": described}))
    return path


def test_a_recorded_script_elsewhere(plan: Plan, report: Path) -> None:
    output = plan("--from", str(report))
    assert "4 ranks in 2 group(s) of 2; as in the report, 4 micro-batch(es) of 0.0625 s" in output
    assert re.search(r"\nZeRO-3 .*  <-- now\n", output) and re.search(r"\nN-I-G( +[0-9.]+){7}\n", output)
    assert re.search(r"\nOn this script, N-N-G would take .* a step .*; now ZeRO-3 takes 0.5 s \(predicted: ", output)
    elsewhere = ["--nodes", "4", "--inter-gbps", "0.1", "--accumulation", "2", "--memory-gb", "0.07"]
    output = plan("--from", str(report), *elsewhere)
    assert "8 ranks in 4 group(s) of 2; as in the report, 2 micro" in output
    assert "N-N-N" in output and "(too large)" in output
    assert re.search(r"; ZeRO-3, as now, would take .* s; where it was recorded, it takes 0.5 s \(pre", output)
    written = json.loads(plan("--from", str(report), *elsewhere, "--json", "-"))
    assert written["now"]["name"] == "ZeRO-3" and written["ranks"] == 8 and written["sentence"] in output
    assert {row["gradient_bits"] for row in written["rows"]} == {None, 8, 4}


@with_cases(
    "words, change, message",
    ("--muon", {}, "--muon cannot be combined with --from: only --nodes, "),
    ("--dtype bf16", {}, "--dtype cannot be combined with --from"),
    ("", {"planner": None}, "no inputs for the planner: .* Record again"),
    ("", {"planner": {}}, "'planner' in the report is from another version .* Record again"),
    ("", {"parts": 3}, "expected the report.json of paro_report"),
    ("--nodes 2", {"planner": reports.planner_input(ranks=2).as_dict()}, "give --inter-gbps"),
)
def test_reports_that_cannot_be_used(refused: Plan, report: Path, words: str, change: Any, message: str) -> None:
    report.write_text(json.dumps(json.loads(report.read_text()) | change))
    assert re.search(message, refused("--from", str(report), *words.split()))


MODELS = """
import torch

def half_frozen():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False, device="meta") for _ in range(2)])
    model[0].requires_grad_(False)
    return model

def failing():
    raise ValueError("no such layer")
"""


def test_a_model_is_counted(plan: Plan, refused: Plan, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "some_models.py").write_text(MODELS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "some_models", raising=False)
    model = ["--model", "some_models:half_frozen", *NODES, *LINKS]
    plan(*model, "--dtype", "fp32", "--muon", "6", "--json", "plan.json")
    by_strategy = json.loads(Path("plan.json").read_text())["exact"]
    (replicated,) = (entry for entry in by_strategy["predictions"] if entry["strategy"] == "NNN")
    expected = {"parameters": 4.0 * 128, "gradients": 4.0 * 64, "optimizer": 8 * 64}  # the trained half
    assert {key: replicated["memory"][key] for key in expected} == expected
    assert by_strategy["ranks"] == 32 and by_strategy["plain"] == []
    assert replicated["busy"]["update"] == pytest.approx(6 / 8)
    plan(*model, "--dtype", "fp32", "--modules", "0=I", "1", "--json", "plan.json")
    rows = {entry["strategy"]: entry for entry in json.loads(Path("plan.json").read_text())["exact"]["predictions"]}
    bytes_of = [rows[name]["memory"]["parameters"] for name in ("NIG", "IIG", "GGG")]
    assert bytes_of == [512, 512 / 8 + 256, 256 / 8 + 256 / 32 + 256]
    assert "expected PATTERN, PATTERN=N or PATTERN=I, got '1=G'" in refused(*model, "--modules", "1=G")
    assert "paro_modules: 'tower' matches no module with parameters. Modules: 0, 1." in refused(
        *model, "--modules", "tower"
    )
    with pytest.raises(RuntimeError, match="some_models:failing has failed") as failed:
        plan("--model", "some_models:failing", *NODES, *LINKS)
    assert str(failed.value.__cause__) == "no such layer"


def test_values_of_a_report_are_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--ranks", "--group-size"):
        monkeypatch.setattr(sys, "argv", ["deepspeed_ext", option, "4", "plan", *SEVEN])
        with pytest.raises(SystemExit):
            __main__.main()
        assert "are options of the report without a command: put those of plan" in capsys.readouterr().err


LAUNCHES = [
    ({"WORLD_SIZE": "8"}, [], "8 ranks, and none of LOCAL_WORLD_SIZE, LOCAL_SIZE gives .* Set --ranks-per-node"),
    ({"WORLD_SIZE": "8"}, ["--ranks-per-node", "3"], "8 ranks, of which 3 are on this node"),
    ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, [], "6 ranks, of which 4 are on this node.* Set --ranks-per-node"),
    ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, ["--ranks-per-node", "3,3"], "this one with 4 .*remove"),
    ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, ["--nodes", "3"], r"started 2 node\(s\).*got --nodes 3"),
]


@pytest.mark.parametrize("environment, more, message", LAUNCHES)
def test_a_launch_that_contradicts_the_arguments(
    monkeypatch: pytest.MonkeyPatch, refused: Plan, environment: dict[str, str], more: list[str], message: str
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert re.search(message, refused("--params", "7B", *LINKS, *more))


def test_a_page_loads_nothing_and_the_first_rank_writes_it(
    monkeypatch: pytest.MonkeyPatch, plan: Plan, tmp_path: Path
) -> None:
    assert not plan("--page", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert text.startswith("<!DOCTYPE html>") and "default-src 'none'" in text and " src=" not in text
    for name, value in {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "RANK": "1"}.items():
        monkeypatch.setenv(name, value)
    assert not plan("--params", "7B", *LINKS, "--json", "/nowhere/plan") and not plan("--page", "/nowhere/page.html")
