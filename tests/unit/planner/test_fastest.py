# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``"paro_strategy": "fastest"``: chosen once, identical on all ranks, stored, and limited by the configuration."""

import json
import re
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from deepspeed.utils import groups

from deepspeed_ext.config.decisions import Decisions
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, hyphenate
from deepspeed_ext.zero.pace import find_numbers
from tests.harness.logs import is_ours, logged
from tests.harness.networks import make_partly_frozen

# Between groups a tenth of what is within, and no latencies.
SLOW_LINKS = Rates(*[HopRates(Rate(0.0, 1e9), Rate(0.0, 1e8))] * 2)
FLOPS = 1e12  # a second


def engine_case(zero: dict[str, Any], config: dict[str, Any], rates: Any = SLOW_LINKS, zero_init: bool = False) -> Any:
    """Return the strategy, stage and optimizer of an engine with keys of ``zero_optimization`` and others, and our
    warnings. ``rates`` are of the links, or those that each rank measures; None if they must not be measured."""
    own_rates = rates[dist.get_rank()] if isinstance(rates, list) else rates

    def measure(*_: Any) -> Rates:
        assert own_rates is not None, "the links were measured"
        return own_rates

    def flops(*_: Any) -> float:
        assert own_rates is not None, "compute was measured"
        return FLOPS

    section = {"paro_strategy": "fastest", "paro_group_size": 2, **zero}
    with (
        mock.patch.object(probe, "measure", measure),
        mock.patch.object(probe, "measure_flops", flops),
        logged() as lines,
    ):
        engine = make_partly_frozen(section, {"gradient_accumulation_steps": 4, **config}, zero_init)
    kind, strategy = type(engine.optimizer).__name__, engine._config.zero_config.paro_strategy
    chosen = (strategy, engine.zero_optimization_stage(), kind)
    engine.destroy()
    return chosen, [text for level, text in lines if level == "WARNING" and is_ours(text)]


def engines_case(cases: list[tuple[Any, ...]]) -> list[Any]:
    return [engine_case(*case) for case in cases]


@pytest.fixture
def file(tmp_path: Path) -> str:
    return str(tmp_path / "folder" / "decision.json")


def entries(file: str | Path) -> list[dict[str, Any]]:
    return json.loads(Path(file).read_text())["decisions"]


def test_it_is_decided_said_and_kept(ranks: Any, file: str) -> None:
    zero = {"paro_decision_file": file}
    decided = ranks(4).run(engine_case, zero, {})
    assert {chosen for chosen, _ in decided} == {("NNG", 1, "Stage12Optimizer")}
    (said,) = decided[0][1]
    assert '"fastest" is N-N-G: ' in said and "s per step: " in said and "GB on each rank" in said
    assert "compute of a micro-step: 5.2e-08 s, estimated from 5.2e+04 FLOPs at 1e+12 a second" in said
    (written,) = entries(file)
    assert written["strategy"] == "NNG" and len(written["plan"]["predictions"]) == 14
    # The same again: not measured, the strategy stays. It would even if another were faster now.
    written["strategy"] = "NIG"
    Path(file).write_text(json.dumps({"decisions": [written]}))
    repeated = ranks(4).run(engine_case, zero, {}, None)
    assert {chosen for chosen, _ in repeated} == {("NIG", 2, "Stage12Optimizer")}
    assert "stays N-I-G, as decided on 20" in repeated[0][1][0] and not any(lines for _, lines in repeated[1:])


OTHER_RUNS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # keys of zero_optimization, and others
    ({}, {"gradient_accumulation_steps": 3}),
    ({}, {"bf16": {"enabled": True}}),
    ({}, {"train_micro_batch_size_per_gpu": 2}),
    ({"paro_memory_gb": 1}, {}),
    ({"stage": 2}, {}),
    ({"reduce_scatter": False}, {}),
    ({"offload_optimizer": {"device": "cpu"}}, {}),
    ({"zero_quantized_gradients": True}, {}),
    ({"stage3_max_reuse_distance": 0}, {}),
    ({"paro_micro_step_seconds": 0.5}, {}),
    ({"overlap_comm": True}, {}),
]


def test_another_run_is_decided_anew_and_all_are_kept(ranks: Any, file: str) -> None:
    runs = [({**zero, "paro_decision_file": file}, config) for zero, config in [({}, {}), *OTHER_RUNS]]
    first, *others = ranks(2).run(engines_case, runs)[0]
    assert len(first[1]) == 1
    for (zero, config), (_, lines) in zip(OTHER_RUNS, others, strict=True):
        assert "has no decision for this run: choosing again" in lines[0], (zero, config)
        if "paro_micro_step_seconds" in zero:
            assert "compute of a micro-step: 0.5 s, from paro_micro_step_seconds" in lines[-1]
    repeated = entries(file)
    assert len({json.dumps(entry["inputs"], sort_keys=True) for entry in repeated}) == len(runs)
    seconds = [entry["plan"]["micro_step_seconds"] for entry in repeated if entry["inputs"]["paro_micro_step_seconds"]]
    assert seconds == [0.5]
    for _, lines in ranks(2).run(engines_case, [(*run, None) for run in runs])[0]:
        assert "stays " in lines[0]


def test_faults_of_the_file_stop_no_run(ranks: Any, tmp_path: Path) -> None:
    broken = [tmp_path / f"broken{number}.json" for number in range(3)]
    for path, content in zip(broken, ('{"strategy": "NI', '{"decisions": [{"strategy": "NIG"}]}', "[]"), strict=True):
        path.write_text(content)
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    # Below a file, in the place of a folder, and with the longest name, with which a temporary file cannot be named.
    impossible = [tmp_path / "file" / "below" / "decision.json", tmp_path / "folder", tmp_path / ("x" * 255)]
    before = sorted(tmp_path.iterdir())
    chosen = ranks(2).run(engines_case, [({"paro_decision_file": str(path)}, {}) for path in broken + impossible])[0]
    for path, (_, lines) in zip(broken, chosen[:3], strict=True):
        assert "cannot be read (" in lines[0]
        assert entries(path)[0]["strategy"] in STRATEGIES
    assert all("the decision could not be written" in lines[-1] for _, lines in chosen[3:])
    assert sorted(tmp_path.iterdir()) == before
    inputs = {"strategies": ["NIG"], "ranks": 4, "group_size": 2, "accumulation": 2}
    for numbers in (3, ["1", "3"], [4, 0], [1, 2], [4]):
        Decisions(tmp_path / "measured").keep("NIG", inputs, {"paro_micro_batches": numbers})
        with logged() as said:
            assert find_numbers(Decisions(tmp_path / "measured"), inputs) == ""
        assert "plan.paro_micro_batches must be 2 integers of at least 1 with the sum 4" in said[-1][1]


SHARDED = {name for name, row in STRATEGIES.items() if row.stage == 3}
BOUNDS: list[tuple[dict[str, Any], dict[str, Any], bool, set[str]]] = [
    ({"stage": 2}, {}, False, {"NII", "NIG", "NGG"}),
    ({"stage": 3}, {}, False, SHARDED),
    ({}, {}, True, SHARDED),
    ({"stage3_leaf_bytes": 10**6}, {}, False, SHARDED),
    ({"offload_param": {"device": "cpu"}}, {}, False, SHARDED),
    ({"zeropp_loco_param": {}}, {}, False, set(STRATEGIES)),
    ({"paro_quantized_updates": {}}, {}, False, {n for n, row in STRATEGIES.items() if row.p.name != "G"}),
    ({}, {"gradient_allreduce_op": "sum"}, False, set(STRATEGIES) - SHARDED),
]


def test_what_is_configured_bounds_the_choice(ranks: Any, tmp_path: Path) -> None:
    files = [str(tmp_path / f"{number}.json") for number in range(len(BOUNDS))]
    cases = [
        ({**zero, "paro_decision_file": file}, config, SLOW_LINKS, zero_init)
        for file, (zero, config, zero_init, _) in zip(files, BOUNDS, strict=True)
    ]
    for (zero, _, _, expected), file, *chosen in zip(BOUNDS, files, *ranks(4).run(engines_case, cases), strict=True):
        (name,) = {strategy for (strategy, *_), _ in chosen}
        (written,) = entries(file)
        assert set(written["inputs"]["strategies"]) == expected
        assert name in expected
        assert {entry["loco"] for entry in written["plan"]["predictions"]} == {"zeropp_loco_param" in zero}
        assert {entry["updates"] for entry in written["plan"]["predictions"]} == {"paro_quantized_updates" in zero}
        assert written["inputs"]["paro_quantized_updates"] == zero.get("paro_quantized_updates")
        (said,) = chosen[0][1]
        assert (f'"fastest" is {hyphenate(name)} + updates: ' in said) == ("paro_quantized_updates" in zero)
        if "offload_param" in zero:
            assert {entry["memory"]["parameters"] for entry in written["plan"]["predictions"]} == {0.0}


def test_memory_bounds_the_choice(ranks: Any, file: str) -> None:
    """Whole, the model has 40 + 24 + 72 kB; on 4 ranks in groups of 2 NNG holds 82, NIG 70, NGG 64, and IIG 50, GGG
    34, but with all parameters that they gather, which are too small to be given back, 90 and 74. Without the
    optimizer's states NNG holds 40 + 24 kB."""
    zero: dict[str, Any] = {"paro_decision_file": file}
    cases = [({**zero, "paro_memory_gb": kilobytes * 1e-6}, {}) for kilobytes in (1000, 75, 65)]
    cases.append(({**zero, "paro_memory_gb": 66e-6, "offload_optimizer": {"device": "cpu"}}, {}))
    for decided in ranks(4).run(engines_case, cases):
        assert [chosen[0] for chosen, _ in decided] == ["NNG", "NIG", "NGG", "NNG"]
    message = r"no strategy fits: N-G-G needs the least memory, 6.4e-05 GB of 1e-05 GB on.* Raise paro_memory_gb"
    for error in ranks(4).run_expect_error(engine_case, {**zero, "paro_memory_gb": 1e-5}, {}):
        assert re.search(message, error.message), error.message


def test_gradients_of_sequence_parallelism_are_in_fp32(ranks: Any, file: str) -> None:
    """It is DeepSpeed's default: ``seq_parallel_communication_data_type``."""
    ranks(2).run(sequence_parallel_case, file)
    assert entries(file)[0]["inputs"]["moved"]["gradients"] == 4 * 6000


def sequence_parallel_case(file: str) -> None:
    parallel_state_sp.initialize_sequence_parallel(2)
    with mock.patch.object(groups, "mpu", parallel_state_sp):
        engine_case({"paro_decision_file": file}, {"bf16": {"enabled": True}, "sequence_parallel_size": 2})


def test_muons_matrices_are_counted(ranks: Any, file: str) -> None:
    """Where links are slow, owners inside the group are quicker, and where they are quick, all ranks together."""
    config = {"optimizer": {"type": "Muon", "params": {"muon_lr": 1e-3}}}
    quick = Rates(*[HopRates(Rate(0.0, 1e13), Rate(0.0, 1e12))] * 2)
    for rates, os, micro_step_seconds in ((SLOW_LINKS, "I", 0), (quick, "G", 1e-9)):
        zero = {"paro_decision_file": file, "paro_micro_step_seconds": micro_step_seconds}
        decided = ranks(4).run(engine_case, zero, config, rates)
        assert {chosen[0][2] for chosen, _ in decided} == {os}
        assert "not compared with plain stages: with Muon they also send full gradients" in decided[0][1][-1]
        written = entries(file)[0]
        assert written["inputs"]["matrices"] == 4 * 6000 and written["inputs"]["moved"]["optimizer"] == 8 * 6000
        updates = {entry["strategy"]: entry["busy"]["update"] for entry in written["plan"]["predictions"]}
        # A matrix of 60 x 100, orthogonalized by the ranks that share the states, or those of a group.
        flops = 8 * 60**2 * 100 + 28 * 60**3
        assert [updates[name] for name in ("NNN", "NNI", "NNG")] == pytest.approx([flops / 2e12] * 2 + [flops / 4e12])
    decided = ranks(4).run(engine_case, zero, {}, quick)  # with Adam: another run
    assert "choosing again" in decided[0][1][0] and "matrices" not in entries(file)[0]["inputs"]


def inference_case(zero: dict[str, Any]) -> str:
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"paro_strategy": "fastest", **zero}}
    with mock.patch.object(probe, "measure", lambda *_: SLOW_LINKS):
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(40, 50), config=config)
    return engine._config.zero_config.paro_strategy


def test_without_an_optimizer_parameters_are_cut(ranks: Any, file: str) -> None:
    keys = {"paro_group_size": 2, "paro_decision_file": file}
    (name,) = set(ranks(4).run(inference_case, keys))
    assert STRATEGIES[name].stage == 3
    message = "allows paro_strategy fastest only N-N-N, N-N-I, N-N-G, .*there is no optimizer.* Set stage 3"
    for error in ranks(4).run_expect_error(inference_case, {**keys, "stage": 1}):
        assert re.search(message, error.message), error.message


def test_ranks_that_measure_differently_decide_alike(ranks: Any, file: str) -> None:
    quick = Rates(*[HopRates(Rate(0.0, 1e6), Rate(0.0, 1e12))] * 2)
    rates = [SLOW_LINKS, quick, quick, SLOW_LINKS]
    decided = ranks(4).run(engine_case, {"paro_decision_file": file, "stage": 3}, {}, rates)
    assert len({chosen for chosen, _ in decided}) == 1
