# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext plan``: what it prints, writes and refuses."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deepspeed_ext import __main__
from deepspeed_ext.strategy import STRATEGIES
from scripts.emulation.launching import environment as cpu_environment
from scripts.emulation.launching import free_port
from tests.harness.documents import page
from tests.harness.tiers import deep

LINKS = ["--intra-gbps", "800", "--inter-gbps", "100"]
EXPERTS = ["--expert-params", "5B", "--expert-parallel", "2"]
NODES = ["--nodes", "4", "--ranks-per-node", "8"]


def plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "plan", *arguments])
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    __main__.main()


def test_a_table_of_all_strategies_and_a_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan(monkeypatch, "--params", "7B", *NODES, *LINKS, "--memory-gb", "40", "--accumulation", "4")
    said = capsys.readouterr().out
    rows = [line for line in said.splitlines() if line[:3] in {"NNG", "IIG", "GGG"} and ":" not in line]
    assert len(rows) == 8  # as they are, with LoCo, and with updates in few bits as well, which GGG does not have
    assert "32 ranks in 4 group(s) of 8, 4 micro-step(s) a step, a rank's memory: 40 GB" in said
    assert said.count("<-- choice") == 3 and said.count("(too large)") > 0
    assert "\nwith LoCo and updates in few bits, NNG + LoCo + updates: " in said
    titles, *lines = [line for line in said.splitlines() if "known as" in line or line[:3] in {*STRATEGIES, "DDP"}]
    column = titles.index("known as")
    assert all(line[column - 1] == " " != line[column] for line in lines if ": " not in line)
    # NNG: parameters 14 GB, gradients 14 GB, optimizer 84/32 GB; received between groups 2 b M = 2 x 3/32 x 14 GB.
    (row,) = (line.split() for line in rows if line.startswith("NNG") and "LoCo" not in line)
    assert row[1:4] == ["14.00", "14.00", "2.62"] and row[7] == "2.62"
    assert "compute is taken as 0 s" in said and "\nZeRO-1 " in said
    # With Muon: master copies and momentum, and matrices to their owners and back, 2 b M / k.
    plan(monkeypatch, "--params", "7B", *NODES, *LINKS, "--muon", "32")
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith("NNG  "))
    assert row[3] == "1.75" and float(row[7]) == pytest.approx(2.625 * (1 + 1 / 4), abs=0.01)
    assert float(row[11]) == pytest.approx(32 / 32) and "\nZeRO-1 " not in said
    assert "plain stages are left out: with Muon" in said
    # Under 4 s of compute, with updated parameters under the next forward, NNG adds next to nothing to them.
    size = ["--params", "7B", *NODES, "--intra-gbps", "800", "--inter-gbps", "400"]
    plan(monkeypatch, *size, "--micro-step-seconds", "4", "--overlap-updates")
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith("NNG  "))
    assert row[8] == "4" and float(row[12]) < 4.1 and "compute is taken" not in said
    assert float(row[14]) == pytest.approx(2 * 3 / 32 * 14 / (400 / 8 / 8), rel=0.01)  # busy between groups


def test_a_table_with_an_outer_optimizer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    where = ["--params", "7B", *NODES, *LINKS, "--memory-gb", "40", "--micro-step-seconds", "0.3"]
    plan(monkeypatch, *where)
    without = capsys.readouterr().out
    plan(monkeypatch, *where, "--outer", "30")
    said = capsys.readouterr().out
    assert said.startswith(without)  # it is never the choice
    first, note, _, titles, *lines = said.removeprefix(f"{without}\n").splitlines()
    assert first == "with an outer step every 30 steps, in 32 bits; without the steps of a warm-up"
    assert note.startswith("An outer optimizer changes the training, so none of these is a choice: see ")
    linked, _, anchor = note.split()[-1].partition("#")
    assert anchor in page(linked).anchors()
    column = titles.index("known as")
    assert all(line[column - 1] == " " != line[column] for line in lines)
    rows = {line[:3]: line.split() for line in lines}
    assert set(rows) == {"NNI", "NII", "INI", "III"}
    # 2 b 4 x 7 GB in an outer step, over 12.5 / 8 GB/s; 4 x 7 / 8 + 8 x 7 / 32 GB, and a copy of 2^26 elements.
    row = rows["III"]
    assert row[7] == "0.17" and row[15:18] == ["5.25", "0.27", "5.25"]
    assert float(row[18]) == float(row[19]) == pytest.approx(5.25 / (12.5 / 8))
    assert float(row[10]) == float(row[14]) == pytest.approx(3.36 / 30, rel=0.01)
    assert row[8] == "0.3" and float(row[12]) == pytest.approx(sum(map(float, row[8:12])), rel=0.01)
    assert float(row[4]) == pytest.approx(3.5 + 5.25 + 0.27, abs=0.011)  # and fp32 gradients
    assert [line[:3] for line in lines if "(too large)" in line] == ["NNI"]
    # A fifth of the model in 4.125 bits takes 0.09 s both ways, which two steps of 0.3 s hide.
    shape = ["30", "bits=4", "fragments=5", "delay=2", "offload=cpu", "lr=0.6"]
    plan(monkeypatch, *where, "--outer", *shape)
    _, _, said = capsys.readouterr().out.partition("with an outer step ")
    assert said.startswith("every 30 steps, in 4 bits, in 5 fragments, with a delay of 2, kept on the host; without")
    (row,) = (line.split() for line in said.splitlines() if line.startswith("III"))
    assert row[15:19] == ["0.89", "0.88", "0.68", "0"] and float(row[19]) == pytest.approx(0.433, abs=0.001)
    plan(monkeypatch, *where, "--outer", *shape, "--json", "-")
    written = json.loads(capsys.readouterr().out)
    assert list(written) == ["exact", "loco", "both", "outer"]
    settings = written["outer"]["settings"]
    assert [settings[key] for key in ("steps", "bits", "lr", "offload")] == [30, 4, 0.6, "cpu"]
    fits = {one["strategy"]: one["fits"] for one in written["outer"]["predictions"]}
    assert fits == {"III": True, "INI": True, "NII": True, "NNI": False}


def test_json_and_picture_and_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--params", "1e9", "--trainable", "1e6", "--dtype", "fp32", "--group-size", "4"]
    plan(monkeypatch, *size, *NODES, *LINKS, "--json", str(tmp_path / "plan.json"))
    text = (tmp_path / "plan.json").read_text()
    written = json.loads(text)
    assert "Infinity" not in text and "NaN" not in text  # which other readers than Python's refuse
    assert written["exact"]["group_size"] == 4 and len(written["loco"]["predictions"]) == 14
    assert list(written) == ["exact", "loco", "both"] and len(written["both"]["predictions"]) == 11
    assert {(one["loco"], one["updates"]) for one in written["both"]["predictions"]} == {(True, True)}
    assert written["exact"]["choice"]["memory"]["optimizer"] == pytest.approx(12e6 / 32)
    capsys.readouterr()
    plan(monkeypatch, "--params", "1e9", "--largest-layer", "1e7", *NODES, *LINKS, "--estimate")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "paro_strategy=IIG" in line)
    # 2/8 + 2/8 + 14/32 bytes a parameter, and the layer in 4 bytes.
    assert f"{(0.9375e9 + 4e7) / 2**30:6.2f}GB | paro_strategy=IIG, offload_optimizer=none" in line
    plan(monkeypatch, *size, *NODES, *LINKS, "--json", "-")
    assert json.loads(capsys.readouterr().out) == written
    pytest.importorskip("matplotlib")
    plan(monkeypatch, *size, *NODES, *LINKS, "--picture", str(tmp_path / "plan.png"))
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_in_host_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    size = ["--params", "7B", "--trainable", "1B", *NODES, "--accumulation", "2"]
    offloaded = [*size, "--offload-param", "--offload-optimizer", "--parameter-cache-gb", "0.75"]
    plan(monkeypatch, *offloaded, *LINKS, "--host-gbps", "10", "--json", str(tmp_path / "plan.json"))
    said = capsys.readouterr().out
    written = json.loads((tmp_path / "plan.json").read_text())["exact"]
    found = {one["strategy"]: one for one in written["predictions"]}
    assert found and not [name for name in found if name[0] == "N"] and "\nZeRO-1 " not in said
    # Slices of 14/8 GB without the cache, four times; the updated part, 2/8 GB, back; of that 2/32 GB were there.
    assert found["IIG"]["busy"]["host"] == pytest.approx((4 * (1.75 - 0.75) + 0.25 + 2 / 32) / 10)
    assert found["IIG"]["memory"]["parameters"] == 0.75e9 and found["IIG"]["host"] == 1.75e9 + 12e9 / 32
    assert "from/to host   10 GB/s" in said and "s: copies" in said
    path = write_cluster(tmp_path, host_gbps=10, memory_gb=None, latency_us=None)
    plan(monkeypatch, *[one for one in offloaded if one not in NODES], "--nodes", "4", "--cluster", path)
    assert capsys.readouterr().out == said
    plan(monkeypatch, "--params", "7B", *EXPERTS, *NODES, *LINKS, "--offload-param", "--json", "-")
    found = {one["strategy"]: one for one in json.loads(capsys.readouterr().out)["exact"]["predictions"]}
    # Dense 4 GB among 8 ranks, and 5 GB of experts among the 4 that have the same ones.
    assert found["IIG"]["memory"]["parameters"] == 0 and found["IIG"]["host"] == 4e9 / 8 + 5e9 / 4
    plan(monkeypatch, *size, "--offload-optimizer", *LINKS)
    said = capsys.readouterr().out
    (row,) = (line.split() for line in said.splitlines() if line.startswith("NNG  "))
    assert row[3] == "0.00" and row[15] == "0.38" and "give --host-gbps" not in said  # 12 GB / 32 on the host


def test_how_often_to_save(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    fails = ["--mtbf-hours", "24", "--disk-gbps", "2", "--shared-disk-gbps", "10", "--restart-seconds", "300"]
    where = ["--params", "7B", *NODES, *LINKS, "--host-gbps", "10", "--micro-step-seconds", "4"]
    plan(monkeypatch, *where, *fails)
    said = capsys.readouterr().out
    assert (
        "synchronous saves; the job fails every 24 h and takes 300 s to restart; a node writes 2 GB/s, and all nodes "
        "together 10" in said
    )
    titles, *lines = [line for line in said.splitlines() if "known as" in line or line[:3] in {*STRATEGIES, "DDP"}]
    column = titles.index("known as")
    assert all(line[column - 1] == " " != line[column] for line in lines if ": " not in line)
    # IIG: 84/32 GB of states on each rank, 8 of them to the disk of a node; 84 GB to what all share take less.
    (row,) = (line.split() for line in said.splitlines() if line.startswith("IIG  "))
    held, step = 2.625 / 10 + 21 / 2, float(row[12])
    interval = (2 * held * 86400) ** 0.5  # Daly's is 3 s less
    assert row[15:17] == ["10.8", "0"] and float(row[17]) == pytest.approx(interval, abs=3 + step)
    assert int(row[18]) == pytest.approx(interval / step, abs=2)
    assert float(row[19]) == pytest.approx(100 * (held / interval + interval / 2 / 86400 + 300 / 86400), rel=0.03)
    plan(monkeypatch, *where, *fails, "--async-save", "--json", "-")
    written = json.loads(capsys.readouterr().out)
    assert written["exact"]["saves"]["asynchronous"]
    assert " s): asynchronous saves hold training up for " in written["exact"]["reason"]
    found = {one["strategy"]: one for one in written["exact"]["predictions"]}
    assert found["IIG"]["host"] == 2.625e9 and found["NIG"]["host"] == 14e9 + 2.625e9
    assert found["NIG"]["saves"]["asynchronous"]["held"] == pytest.approx(1.4)
    plan(monkeypatch, *where, *fails, "--async-save", "--outer", "9", "--json", "-")
    outer = json.loads(capsys.readouterr().out)["outer"]["predictions"]
    assert {(one["saves"], one["host"]) for one in outer} == {(None, 0.0)}, "its own states are not counted"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*NODES, *LINKS], "one of the arguments --model --params is required"),
        (["--params", "7B", "--model", "a:b", *NODES, *LINKS], "--model: not allowed with argument --params"),
        (["--params", "7B", *LINKS], "expected --nodes and --ranks-per-node"),
        (["--params", "7B", *NODES], "expected --intra-gbps and --inter-gbps"),
        (["--params", "7B", *NODES, "--intra-gbps", "8"], "--intra-gbps and --inter-gbps go together"),
        (
            ["--params", "7B", *NODES, "--intra-gbps", "8", "--inter-gbps", "0"],
            "--inter-gbps: must be above 0, got 0",
        ),
        (["--params", "0", *NODES, *LINKS], "--params: must be above 0, got 0"),
        (["--params", "7B", "--trainable", "8B", *NODES, *LINKS], "--trainable 8000000000 is more than --params 7000"),
        (["--params", "7B", "--expert-params", "5B", *NODES, *LINKS], "--expert-params and --expert-parallel go toge"),
        (["--model", "a:b", *EXPERTS, *NODES, *LINKS], "--expert-params goes with --params"),
        (["--params", "4B", *EXPERTS, *NODES, *LINKS], "--expert-params 5000000000 leaves nothing of --params 4000"),
        (["--params", "7B", *EXPERTS, "--trainable", "1B", *NODES, *LINKS], "all parameters are trained, so it does"),
        (["--params", "7B", *EXPERTS, "--estimate", *NODES, *LINKS], "DeepSpeed's estimators know, no experts"),
        (
            ["--params", "7B", "--expert-params", "5B", "--expert-parallel", "3", *NODES, *LINKS],
            "is a multiple or a divisor of paro_group_size, got 3 with",
        ),
        (["--params", "7B", "--accumulation", "0", *NODES, *LINKS], "--accumulation: must be above 0, got 0"),
        (["--params", "7B", "--memory-gb", "-1", *NODES, *LINKS], "--memory-gb: must be above 0, got -1.0"),
        (["--params", "7B", "--latency-us", "-1", *NODES, *LINKS], "--latency-us: must be at least 0, got -1.0"),
        (
            ["--params", "7B", "--group-size", "5", *NODES, *LINKS],
            "must divide the data-parallel size, got .* 5 w",
        ),
        (["--params", "7B", "--estimate", *NODES, *LINKS], "--estimate needs --largest-layer beside --params"),
        (["--params", "7B", "--estimate", "--dtype", "fp32", *NODES, *LINKS], "16 bits, all parameters trained"),
        (
            ["--params", "7B", "--largest-layer", "1M", "--estimate", "--json", "-", *NODES, *LINKS],
            "--json - writes nothing else",
        ),
        (
            ["--params", "7B", "--json", "/nowhere/plan", *NODES, *LINKS],
            "--json: there is no folder for /nowhere",
        ),
        (
            ["--params", "7B", "--picture", "/nowhere/p", *NODES, *LINKS],
            "--picture: there is no folder for /nowh",
        ),
        (["--params", "7B", *NODES, *LINKS, "--outer"], "--outer: expected at least one argument"),
        (
            ["--params", "7B", *NODES, *LINKS, "--outer", "ten"],
            "--outer steps must be an integer .*, got 'ten' of type",
        ),
        (["--params", "7B", *NODES, *LINKS, "--outer", "10", "bit=4"], "--outer has no key 'bit': .* mean 'bits'?"),
        (["--params", "7B", *NODES, *LINKS, "--outer", "10", "bits=3"], "--outer bits must be 4, 8, 16 or 32, got 3"),
        (["--params", "7B", *NODES, *LINKS, "--outer", "10", "steps=5"], "--outer gives steps twice"),
        (
            ["--params", "7B", *NODES, *LINKS, "--outer", "4", "fragments=5"],
            "--outer fragments must be at most --outer steps",
        ),
        (["--params", "7B", *NODES, *LINKS, "--outer", "9", "delay=9"], "--outer delay must be less than steps / fr"),
        (
            ["--params", "7B", *EXPERTS, *NODES, *LINKS, "--outer", "9"],
            "an outer optimizer takes no experts of expert",
        ),
        (["--params", "7B", "--parameter-cache-gb", "1", *NODES, *LINKS], "--parameter-cache-gb goes with --offload-"),
        (["--params", "7B", "--host-gbps", "1", *NODES], "--host-gbps goes with --intra-gbps and --inter-gbps"),
        (["--params", "7B", "--host-gbps", "0", *NODES, *LINKS], "--host-gbps: must be above 0, got 0"),
        (["--params", "7B", "--offload-param", "--estimate", *NODES, *LINKS], "nothing in host memory"),
        (["--params", "7B", "--offload-param", "--outer", "9", *NODES, *LINKS], "--outer takes nothing in host mem"),
        (["--params", "7B", "--mtbf-hours", "9", *NODES, *LINKS], "--mtbf-hours and --disk-gbps go together"),
        (["--params", "7B", "--async-save", *NODES, *LINKS], "--async-save go with --mtbf-hours and --disk-gbps"),
        (
            ["--params", "7B", "--mtbf-hours", "9", "--disk-gbps", "1", *NODES, *LINKS],
            "--mtbf-hours needs the time of a step: give --micro-step-seconds above 0, or --tokens with --cluster",
        ),
        (["--params", "7B", "--mtbf-hours", "0", *NODES, *LINKS], "--mtbf-hours: must be above 0, got 0.0"),
        (
            ["--params", "7B", "--mtbf-hours", "inf", "--disk-gbps", "1", *NODES, *LINKS, "--micro-step-seconds", "1"],
            "mtbf must be a finite number above 0, got inf",
        ),
        (["--model", "a:b", "--largest-layer", "7", *NODES, *LINKS], "--largest-layer goes with --params"),
        (["--params", "seven", *NODES, *LINKS], "expected a number of parameters such as 7e9 or 7B, got 'seven'"),
        (["--model", "no_such_module:f", *NODES, *LINKS], "'no_such_module:f' cannot be imported"),
        (["--model", "no_such_module", *NODES, *LINKS], "expected PACKAGE.MODULE:FUNCTION, got 'no_such_module'"),
    ],
)
def test_bad_arguments_get_clear_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(monkeypatch, *arguments)
    assert ended.value.code == 2
    assert re.search(message, capsys.readouterr().err)


def test_an_error_of_a_given_function_is_shown_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "failing_maker.py").write_text("def make():\n    raise ValueError('no such layer')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match="failing_maker:make has failed") as failed:
        plan(monkeypatch, "--model", "failing_maker:make", *NODES, *LINKS)
    assert str(failed.value.__cause__) == "no such layer"


def write_cluster(folder: Path, **changed: object) -> str:
    """A file that describes a cluster; None leaves a key out."""
    given = {"ranks_per_node": 8, "intra_gbps": 800, "inter_gbps": 100, "latency_us": 5, "memory_gb": 40, **changed}
    path = folder / "cluster.json"
    path.write_text(json.dumps({key: value for key, value in given.items() if value is not None}))
    return str(path)


def test_a_cluster_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    by_options = [*NODES, *LINKS, "--memory-gb", "40", "--latency-us", "15", "--micro-step-seconds", "0.42"]
    plan(monkeypatch, "--params", "7B", *by_options)
    expected = capsys.readouterr().out
    path = write_cluster(tmp_path, tflops=100)  # 3 steps of a ring of 4 groups; 6 x 7e9 x 1000 / 1e14 s
    plan(monkeypatch, "--params", "7B", "--cluster", path, "--nodes", "4", "--tokens", "1000")
    assert capsys.readouterr().out == expected
    frozen = ["--params", "7B", "--trainable", "1B"]  # 6e9 parameters of 4 FLOPs, and 1e9 of 6
    plan(monkeypatch, *frozen, "--cluster", path, "--nodes", "4", "--tokens", "1000")
    of_frozen = capsys.readouterr().out
    plan(monkeypatch, *frozen, *by_options[:-1], "0.3")
    assert capsys.readouterr().out == of_frozen
    plan(monkeypatch, "--params", "7B", "--cluster", write_cluster(tmp_path, nodes=4), "--micro-step-seconds", "0.42")
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    "changed, arguments, message",
    [
        ({"inter_gbps": None}, [], "lacks inter_gbps; ranks_per_node, intra_gbps, inter_gbps are required."),
        ({"gbps": 4}, [], "has no key 'gbps': its keys are ranks_per_node, intra_gbps, inter_gbps, nodes,"),
        ({"inter_gbps": "100"}, [], "inter_gbps must be a finite number above 0, got '100' of type str."),
        ({"ranks_per_node": 7.5}, [], "ranks_per_node must be a whole number above 0, got 7.5 of type float."),
        ({"latency_us": -1}, [], "latency_us must be a finite number of at least 0, got -1 of type int."),
        ({"intra_gbps": 0}, [], "intra_gbps must be a finite number above 0, got 0 of type int."),
        ({"nodes": 4}, ["--nodes", "4"], "cluster.json has 4 nodes; leave out --nodes 4."),
        ({}, ["--nodes", "4", *LINKS], "describes the cluster; leave out --intra-gbps, --inter-gbps."),
        ({}, ["--nodes", "4", "--tokens", "10"], "--tokens needs tflops in the file of --cluster"),
        ({}, [], "expected --nodes and --ranks-per-node"),
    ],
)
def test_what_is_wrong_with_a_cluster_is_told(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    changed: dict[str, object],
    arguments: list[str],
    message: str,
) -> None:
    with pytest.raises(SystemExit) as ended:
        plan(monkeypatch, "--params", "7B", "--cluster", write_cluster(tmp_path, **changed), *arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ranks", "--group-size"])
def test_what_the_report_takes_is_not_dropped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], option: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["deepspeed_ext", option, "4", "plan", "--params", "7B", *NODES, *LINKS])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "are the report's: put what plan takes after it" in capsys.readouterr().err


MODELS = """
import deepspeed, torch

# Or it would be compiled now, and leave 66 MB a rank in /dev/shm.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False

def half_frozen():
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8, bias=False, device="meta") for _ in range(2)])
    model[0].requires_grad_(False)
    return model
"""
LAUNCHES = {
    "none": [sys.executable, "-m"],
    "torchrun": ["torchrun", "--standalone", "--nproc-per-node", "2", "-m"],
    "deepspeed": ["deepspeed", "--num_accelerators", "2", "--master_port", str(free_port()), "--module"],
}


def plan_a_model(folder: Path, launcher: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    """The command in its own processes, on a model with a frozen first half."""
    (folder / "models.py").write_text(MODELS)
    env = cpu_environment() | {"PYTHONPATH": os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])}
    command = [*LAUNCHES[launcher], "deepspeed_ext", "plan", "--model", "models:half_frozen", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.parametrize("launcher", ["none", *deep("deepspeed", "torchrun")])
def test_a_model_is_counted_under_each_launcher(tmp_path: Path, launcher: str) -> None:
    where = [*NODES, *LINKS] if launcher == "none" else []  # else the launch's, and measured
    muon = ["--muon", "6"] if launcher == "none" else []
    done = plan_a_model(tmp_path, launcher, *where, *muon, "--dtype", "fp32", "--json", str(tmp_path / "plan.json"))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "plan.json").read_text())["exact"]
    assert written["ranks"] == (2 if where == [] else 32)
    (whole,) = (one for one in written["predictions"] if one["strategy"] == "NNN")
    assert {key: whole["memory"][key] for key in ("parameters", "gradients", "optimizer")} == {
        "parameters": 4.0 * 128,
        "gradients": 4.0 * 64,
        "optimizer": (8.0 if muon else 12.0) * 64,  # of the half that is trained, a matrix
    }
    if muon:
        assert whole["busy"]["update"] == pytest.approx(6 / 8) and written["plain"] == []
    if launcher != "none":
        assert written["rates"]["gather"]["intra"]["bandwidth"] > 1e6


def test_deepspeeds_estimators_know_no_frozen_parameters(tmp_path: Path) -> None:
    done = plan_a_model(tmp_path, "none", *NODES, *LINKS, "--estimate")
    assert done.returncode == 2
    assert "all parameters are trained; of models:half_frozen 50.0% are. Leave out --estimate" in done.stderr


@pytest.mark.parametrize(
    "environment, more, message",
    [
        ({"WORLD_SIZE": "8"}, [], "8 ranks, and none of LOCAL_WORLD_SIZE, LOCAL_SIZE says .* Set --ranks-per-node"),
        ({"WORLD_SIZE": "8"}, ["--ranks-per-node", "3"], "8 ranks, of which 3 are on this node"),
        ({"WORLD_SIZE": "6", "LOCAL_WORLD_SIZE": "4"}, [], "6 ranks, of which 4 are on this node"),
        (
            {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"},
            ["--nodes", "3"],
            r"started 2 node\(s\) of 2 .*got --nodes 3",
        ),
    ],
)
def test_a_launch_that_contradicts_the_arguments(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    more: list[str],
    message: str,
) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "plan", "--params", "7B", *LINKS, *more])
    with pytest.raises(SystemExit):
        __main__.main()
    assert re.search(message, capsys.readouterr().err)


def test_ranks_that_write_nothing_need_no_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr(sys, "argv", ["deepspeed_ext", "plan", "--params", "7B", *LINKS, "--json", "/nowhere/plan"])
    __main__.main()
    assert not capsys.readouterr().out
