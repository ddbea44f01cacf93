# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``"paro_strategy": "fastest"``: decided once, the same on all ranks, kept, and bounded by what is configured."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES

# Between groups a tenth of what is within, and no latencies.
SLOW_LINKS = Rates(*[HopRates(Rate(0.0, 1e9), Rate(0.0, 1e8))] * 2)
TOP_LEVEL = ("gradient_accumulation_steps", "bf16", "train_micro_batch_size_per_gpu")
FLOPS = 1e12  # a second


def engine_case(zero: dict[str, Any], config: dict[str, Any], rates: Any = SLOW_LINKS, zero_init: bool = False) -> Any:
    """Strategy and stage of an engine where the links are as given (None: they must not be measured), and our lines of
    the log; each rank may be given rates of its own."""
    from unittest import mock

    import torch.distributed as dist

    from deepspeed_ext.planner import probe
    from tests.harness.half_frozen import make_engine
    from tests.harness.logs import is_ours, logged

    mine = rates[dist.get_rank()] if isinstance(rates, list) else rates

    def measure(*_: Any) -> Rates:
        assert mine is not None, "the links were measured"
        return mine

    def flops(*_: Any) -> float:
        assert mine is not None, "compute was measured"
        return FLOPS

    section = {"paro_strategy": "fastest", "paro_group_size": 2, **zero}
    with (
        mock.patch.object(probe, "measure", measure),
        mock.patch.object(probe, "flops", flops),
        logged() as lines,
    ):
        engine = make_engine(section, {"gradient_accumulation_steps": 4, **config}, zero_init)
    found = engine._config.zero_config.paro_strategy, engine.zero_optimization_stage(), type(engine.optimizer).__name__
    engine.destroy()
    return found, [text for level, text in lines if level == "WARNING" and is_ours(text)]


def train_case(folder: str) -> tuple[list[float], list[float]]:
    """Losses under what is decided, and under the same strategy by its name."""
    from unittest import mock

    from deepspeed_ext.planner import probe
    from tests.harness.training import Job, train

    job = Job(accumulation=2)
    with mock.patch.object(probe, "measure", lambda *_: SLOW_LINKS):
        keys = {"paro_group_size": 2, "paro_decision_file": f"{folder}/d.json"}
        fastest = train(job, {"paro_strategy": "fastest", **keys})
    name = json.loads(Path(folder, "d.json").read_text())["decisions"][0]["strategy"]
    return fastest.losses, train(job, {"paro_strategy": name, "paro_group_size": 2}).losses


def probe_case() -> list[dict[str, Any]]:
    """What is measured on this machine, on each rank."""
    import torch.distributed as dist

    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.planner import probe

    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, probe.measure(get_topology(None, 2)).as_dict())
    return found


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "folder" / "decision.json")


def entries(file: str | Path) -> list[dict[str, Any]]:
    """What is kept."""
    return json.loads(Path(file).read_text())["decisions"]


def test_it_is_decided_said_and_kept(ranks: Any, file: str) -> None:
    zero = {"paro_decision_file": file}
    decided = ranks(4).run(engine_case, zero, {})
    assert {found for found, _ in decided} == {("NNG", 1, "Stage12Optimizer")}
    (said,) = decided[0][1]
    assert '"fastest" is NNG: ' in said and "s per step: " in said and "GB on each rank" in said
    assert "compute of a micro-step: 5.2e-08 s, estimated from 5.2e+04 FLOPs at 1e+12 a second" in said
    (written,) = entries(file)
    assert written["strategy"] == "NNG" and len(written["plan"]["predictions"]) == 14
    # The same again: not measured, the strategy stays. It would even if another were faster now.
    written["strategy"] = "NIG"
    Path(file).write_text(json.dumps({"decisions": [written]}))
    kept = ranks(4).run(engine_case, zero, {}, None)
    assert {found for found, _ in kept} == {("NIG", 2, "Stage12Optimizer")}
    assert "stays NIG, as decided on 20" in kept[0][1][0] and not any(lines for _, lines in kept[1:])


@pytest.mark.parametrize(
    "change",
    [
        {"gradient_accumulation_steps": 3},
        {"bf16": {"enabled": True}},
        {"paro_memory_gb": 1},
        {"stage": 2},
        {"reduce_scatter": False},
        {"offload_optimizer": {"device": "cpu"}},
        {"zero_quantized_gradients": True},
        {"stage3_max_reuse_distance": 0},
        {"paro_micro_step_seconds": 0.5},
        {"train_micro_batch_size_per_gpu": 2},
        {"overlap_comm": True},
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_is_decided_anew_for_another_run_and_both_are_kept(ranks: Any, file: str, change: dict[str, Any]) -> None:
    plain: dict[str, Any] = {"paro_decision_file": file}
    ranks(2).run(engine_case, plain, {})
    top_level = {key: value for key, value in change.items() if key in TOP_LEVEL}
    changed = {**plain, **{key: value for key, value in change.items() if key not in top_level}}
    decided = ranks(2).run(engine_case, changed, top_level)
    assert "has no decision for this run: deciding anew" in decided[0][1][0]
    second, first = entries(file)
    if "paro_micro_step_seconds" in change:
        assert "compute of a micro-step: 0.5 s, as paro_micro_step_seconds says" in decided[0][1][-1]
        assert second["plan"]["micro_step_seconds"] == 0.5
    assert second["inputs"] != first["inputs"]
    for zero, config in ((plain, {}), (changed, top_level)):
        assert "stays " in ranks(2).run(engine_case, zero, config, None)[0][1][0]


@pytest.mark.parametrize("content", ['{"strategy": "NI', '{"decisions": [{"strategy": "NIG"}]}', "[]"])
def test_a_broken_file_costs_no_run(ranks: Any, tmp_path: Path, content: str) -> None:
    broken = tmp_path / "decision.json"
    broken.write_text(content)
    lines = ranks(2).run(engine_case, {"paro_decision_file": str(broken)}, {})[0][1]
    assert "cannot be read (" in lines[0]
    assert entries(broken)[0]["strategy"] in STRATEGIES
    assert list(tmp_path.iterdir()) == [broken]


def test_a_folder_that_cannot_be_written_costs_no_run(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    # Below a file, in the place of a folder, and with a name as long as a name can be, which the one aside is not.
    for impossible in (tmp_path / "file" / "below" / "decision.json", tmp_path, tmp_path / ("x" * 255)):
        lines = ranks(2).run(engine_case, {"paro_decision_file": str(impossible)}, {})[0][1]
        assert "the decision is not kept" in lines[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "zero, config, zero_init, expected",
    [
        ({"stage": 2}, {}, False, {"NII", "NIG", "NGG"}),
        ({"stage": 3}, {}, False, {n for n, row in STRATEGIES.items() if row.stage == 3}),
        ({}, {}, True, {n for n, row in STRATEGIES.items() if row.stage == 3}),
        ({"stage3_leaf_bytes": 10**6}, {}, False, {n for n, row in STRATEGIES.items() if row.stage == 3}),
        ({"offload_param": {"device": "cpu"}}, {}, False, {n for n, row in STRATEGIES.items() if row.stage == 3}),
        ({"zeropp_loco_param": {}}, {}, False, set(STRATEGIES)),
        ({"paro_quantized_updates": {}}, {}, False, {n for n, row in STRATEGIES.items() if row.p.name != "G"}),
        ({}, {"gradient_allreduce_op": "sum"}, False, {n for n, row in STRATEGIES.items() if row.stage != 3}),
    ],
)
def test_what_is_configured_bounds_the_choice(
    ranks: Any, file: str, zero: dict[str, Any], config: dict[str, Any], zero_init: bool, expected: set[str]
) -> None:
    decided = ranks(4).run(engine_case, {**zero, "paro_decision_file": file}, config, SLOW_LINKS, zero_init)
    (name,) = {found[0] for found, _ in decided}
    (written,) = entries(file)
    assert set(written["inputs"]["strategies"]) == expected
    assert name in expected
    assert {one["loco"] for one in written["plan"]["predictions"]} == {"zeropp_loco_param" in zero}
    assert {one["updates"] for one in written["plan"]["predictions"]} == {"paro_quantized_updates" in zero}
    assert written["inputs"]["paro_quantized_updates"] == zero.get("paro_quantized_updates")
    (said,) = decided[0][1]
    assert (f'"fastest" is {name} + updates: ' in said) == ("paro_quantized_updates" in zero)


def test_memory_bounds_the_choice(ranks: Any, file: str) -> None:
    """Whole, the model has 40 + 24 + 72 kB; on 4 ranks in groups of 2 NNG holds 82, NIG 70, NGG 64, and IIG 50, GGG
    34, but with all parameters that they gather, which are too small to be given back, 90 and 74."""
    zero = {"paro_decision_file": file}
    for kilobytes, name in ((1000, "NNG"), (75, "NIG"), (65, "NGG")):
        decided = ranks(4).run(engine_case, {**zero, "paro_memory_gb": kilobytes * 1e-6}, {})
        assert {found[0] for found, _ in decided} == {name}
    message = r"fastest: none fits: NGG needs least, 6.4e-05 GB of 1e-05 GB on each rank.* Raise paro_memory_gb"
    for error in ranks(4).run_expect_error(engine_case, {**zero, "paro_memory_gb": 1e-5}, {}):
        assert re.search(message, error.message), error.message


def test_what_is_offloaded_takes_no_memory_of_the_device(ranks: Any, file: str) -> None:
    """NNG holds 40 + 24 kB without the optimizer's states."""
    zero = {"paro_decision_file": file, "paro_memory_gb": 66e-6, "offload_optimizer": {"device": "cpu"}}
    decided = ranks(4).run(engine_case, zero, {})
    assert {found[0] for found, _ in decided} == {"NNG"}
    zero = {"paro_decision_file": file, "paro_memory_gb": 1, "offload_param": {"device": "cpu"}}
    ranks(4).run(engine_case, zero, {})
    assert {one["memory"]["parameters"] for one in entries(file)[0]["plan"]["predictions"]} == {0.0}


def test_muons_matrices_are_counted(ranks: Any, file: str) -> None:
    """Where links are slow, owners inside the group are quicker, and where they are quick, all ranks together."""
    config = {"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-3}}}
    quick = Rates(*[HopRates(Rate(0.0, 1e13), Rate(0.0, 1e12))] * 2)
    for rates, os, micro_step_seconds in ((SLOW_LINKS, "I", 0), (quick, "G", 1e-9)):
        zero = {"paro_decision_file": file, "paro_micro_step_seconds": micro_step_seconds}
        decided = ranks(4).run(engine_case, zero, config, rates)
        assert {found[0][2] for found, _ in decided} == {os}
        assert "plain stages are left out: with Muon they also move whole gradients" in decided[0][1][-1]
        written = entries(file)[0]
        assert written["inputs"]["matrices"] == 4 * 6000 and written["inputs"]["moved"]["optimizer"] == 8 * 6000
        updates = {one["strategy"]: one["busy"]["update"] for one in written["plan"]["predictions"]}
        # A matrix of 60 x 100, orthogonalized by the ranks that share the states, or those of a group.
        flops = 8 * 60**2 * 100 + 28 * 60**3
        assert [updates[name] for name in ("NNN", "NNI", "NNG")] == pytest.approx([flops / 2e12] * 2 + [flops / 4e12])
    decided = ranks(4).run(engine_case, zero, {}, quick)  # with Adam: another run
    assert "deciding anew" in decided[0][1][0] and "matrices" not in entries(file)[0]["inputs"]


def inference_case(zero: dict[str, Any]) -> str:
    """The strategy of an engine without an optimizer."""
    from unittest import mock

    import deepspeed
    import torch

    from deepspeed_ext.planner import probe

    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"paro_strategy": "fastest", **zero}}
    with mock.patch.object(probe, "measure", lambda *_: SLOW_LINKS):
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(40, 50), config=config)
    return engine._config.zero_config.paro_strategy


def test_without_an_optimizer_parameters_are_cut(ranks: Any, file: str) -> None:
    keys = {"paro_group_size": 2, "paro_decision_file": file}
    (name,) = set(ranks(4).run(inference_case, keys))
    assert STRATEGIES[name].stage == 3
    message = "leaves paro_strategy fastest only NNN, NNI, NNG, .*there is no optimizer.* Set stage 3"
    for error in ranks(4).run_expect_error(inference_case, {**keys, "stage": 1}):
        assert re.search(message, error.message), error.message


def test_ranks_that_measure_differently_decide_alike(ranks: Any, file: str) -> None:
    quick = Rates(*[HopRates(Rate(0.0, 1e6), Rate(0.0, 1e12))] * 2)
    rates = [SLOW_LINKS, quick, quick, SLOW_LINKS]
    decided = ranks(4).run(engine_case, {"paro_decision_file": file, "stage": 3}, {}, rates)
    assert len({found for found, _ in decided}) == 1


def test_training_is_that_of_the_strategy(ranks: Any, tmp_path: Path) -> None:
    for fastest, by_name in ranks(4).run(train_case, str(tmp_path)):
        assert fastest == by_name


def test_the_probe_gives_all_ranks_the_same_rates(ranks: Any) -> None:
    found = ranks(4).run(probe_case)[0]
    assert all(one == found[0] for one in found)
    for hops in (found[0]["gather"], found[0]["reduce"]):
        assert all(1e6 < hops[hop]["bandwidth"] < 1e12 for hop in ("intra", "inter"))
    assert 1e8 < found[0]["memory"] < 1e13


def flops_case() -> list[float]:
    """FLOPs of micro-steps of 3 samples: of a plain model, of language models with few and with many positions, and of
    experts of which a token is sent to one; and what this machine reaches, by the rank."""
    from types import SimpleNamespace

    import torch
    import torch.distributed as dist
    from torch import nn

    from deepspeed_ext.planner import probe
    from deepspeed_ext.planner.models import micro_step_flops

    model = nn.Sequential(nn.Embedding(1000, 10), nn.Linear(10, 20, bias=False), nn.Linear(20, 10, bias=False))
    model[2].requires_grad_(False)
    found = [micro_step_flops(model, 3)]
    for config in ({"n_positions": 100}, {"max_position_embeddings": 10**6}):
        model.config = SimpleNamespace(get_text_config=lambda config=config: SimpleNamespace(**config))
        found.append(micro_step_flops(model, 3))
    routed = nn.Module()
    routed.experts = nn.ModuleList(nn.Linear(10, 20, bias=False) for _ in range(4))
    counts = SimpleNamespace(num_local_experts=4, num_experts_per_tok=1)
    routed.config = SimpleNamespace(get_text_config=lambda: counts)
    found.append(micro_step_flops(routed, 3))
    rates: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rates, probe.flops(torch.float32))
    return [*found, *rates]


def test_compute_is_estimated_rather_too_low(ranks: Any) -> None:
    plain, short, long, experts, one, other = ranks(2).run(flops_case)[0]
    assert plain == 3 * (6 * 200 + 4 * 200)
    assert (short, long) == (100 * plain, 2048 * plain)
    assert experts == 3 * 6 * 200
    assert 1e8 < one == other < 1e13


def estimate_case(total: int, largest: int, gpus: int, nodes: int) -> dict[str, Any]:
    """DeepSpeed's estimates, and ours of the same strategies; (host, GPU)."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    from deepspeed_ext.planner.estimate import estimate_paro_model_states_mem_needs as ours

    hardware = {"num_gpus_per_node": gpus, "num_nodes": nodes}
    return {
        "NGG": (
            zero2(total, **hardware, cpu_offload=False),
            ours(STRATEGIES["NGG"], total, largest, **hardware)[:2],
        ),
        "GGG": (
            zero3(total, largest, **hardware, cpu_offload=False, cpu_offload_params=False)[:2],
            ours(STRATEGIES["GGG"], total, largest, **hardware)[:2],
        ),
    }


@pytest.mark.parametrize(
    "total, largest, gpus, nodes", [(7 * 10**9, 10**8, 8, 4), (123_457, 991, 3, 5), (10**6, 1, 1, 1)]
)
def test_estimates_are_those_of_deepspeed(ranks: Any, total: int, largest: int, gpus: int, nodes: int) -> None:
    for name, (stock, ours) in ranks(1).run(estimate_case, total, largest, gpus, nodes)[0].items():
        assert ours == stock, name


def table_case() -> tuple[str, str]:
    """What DeepSpeed prints for a model of a size, and what we do."""
    import contextlib
    import io

    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as stock

    from deepspeed_ext.planner.estimate import estimate_paro_model_states_mem_needs_all_cold as ours

    printed = []
    for estimate in (stock, ours):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            estimate(9_004_000, 6_003_000, num_gpus_per_node=8, num_nodes=2)
        printed.append(out.getvalue())
    return printed[0], printed[1]


def test_the_table_looks_like_deepspeeds(ranks: Any) -> None:
    stock, ours = (text.splitlines() for text in ranks(1).run(table_case)[0])
    assert ours[:2] == stock[:2]
    assert ours[2] == stock[2].replace("layer params.", "layer params, groups of 8.")
    assert ours[3] == stock[3]
    (last,) = (line for line in stock if "offload_optimizer=none, zero_init=1" in line)
    (mine,) = (line for line in ours if "GGG" in line)
    assert mine.rpartition("|")[0] == last.rpartition("|")[0]
    assert len(ours) == 4 + 14
