# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Unsupported options of a pipeline are refused on all ranks, before any rank waits for another."""

import os
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule
from deepspeed.runtime.pipe.dualpipev import DualPipeVModule
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam
from torch.distributed import distributed_c10d

from deepspeed_ext.leaf.modules import is_set_by_choice
from deepspeed_ext.pipeline import agreement
from deepspeed_ext.strategy import STRATEGIES
from tests.harness import pipelines
from tests.harness.logs import logged
from tests.harness.snapshots import error_of
from tests.harness.training import placed

NIG = {"paro_strategy": "NIG", "paro_group_size": 1}
DIFFERENT: dict[str, tuple[dict[str, Any], int]] = {
    "paro_strategy": ({**NIG, "paro_strategy": "NNG"}, 2),
    "stage": ({"stage": 1}, 2),
    "paro_group_size": ({**NIG, "paro_group_size": 2}, 2),
    "gradient_accumulation_steps: 2 on ranks [0, 1], 3": (NIG, 3),
}


def test_stages_with_different_configurations_are_refused(ranks: Any) -> None:
    for messages in ranks(4).run(different_case):
        for difference, message in zip(DIFFERENT, messages, strict=True):
            assert "All stages of a pipeline must have the same configuration" in message, (difference, message)
            assert difference in message and "on ranks [0, 1]" in message and "on ranks [2, 3]" in message, message


def different_case() -> list[str]:
    """Return errors of pipelines whose second stage has another section or another number of micro-batches."""
    given = [(NIG, 2) if dist.get_rank() < 2 else second for second in DIFFERENT.values()]
    return [error_of(pipelines.make_pipeline, pipelines.Pipe(micro_batches=number), zero) for zero, number in given]


@pytest.mark.quick
def test_stages_that_exchange_shards_need_equal_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "_gather", lambda module, text: [2, 2, 1, 1])
    for name, tied, refused in (("NII", True, True), ("NIG", True, False), ("NII", False, False)):
        optimizer: Any = mock.Mock(strategy=STRATEGIES[name], **{"topology.sizes.group_size": 2})
        error = error_of(agreement.require_same_groups, None, optimizer, tied)
        assert ("give the sizes 2 on ranks [0, 1], 1 on ranks [2, 3]" in error) == refused == bool(error)


# Keys, the number of ranks, and what the error says.
REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"stage": 3, "zero_hpz_partition_size": 2},
        "zero_hpz_partition_size cannot be combined with zero_optimization.stage 3 in a pipeline",
    ),
    (
        {"paro_strategy": "NIG", "paro_quantized_updates": {}},
        "paro_quantized_updates cannot be combined with tied layers (embedding)",
    ),
    ({"stage": 3}, "cannot be built under deepspeed.zero.Init"),
    ({"stage": 2}, "N-G-G is not supported here: DualPipeVEngine does not run the 1F1B schedule"),
]


def test_options_of_pipelines_are_refused_on_all_ranks(ranks: Any) -> None:
    for errors in ranks(2).run(refused_case):
        for (_, expected), error in zip(REFUSED, errors, strict=True):
            assert expected in error, error
        assert "paro_strategy N-I-G" in errors[1] and "os = I or N" in errors[1], errors[1]


def refused_case() -> list[str]:
    """Return errors of pipelines; the last two are under zero.Init, and with another schedule."""
    errors = [error_of(pipelines.make_pipeline, pipelines.Pipe(), zero) for zero, _ in REFUSED[:2]]
    with deepspeed.zero.Init():
        errors.append(error_of(pipelines.make_pipeline, pipelines.Pipe(), {"stage": 3}))
    pipe = pipelines.Pipe(micro_batches=4, tied=False)
    layers = pipelines.layers_of(pipe)
    module = DualPipeVModule(layers, num_stages=2, loss_fn=pipelines.loss_of, partition_method="uniform")
    config, parameters = pipelines.configuration(pipe, {"stage": 2}), list(module.parameters())
    return [*errors, error_of(deepspeed.initialize, model=module, model_parameters=parameters, config=config)]


def test_plain_stage_3_has_the_units_of_GGG(ranks: Any) -> None:
    answers = [units for _, units in ranks(4).each(units_case, ({"stage": 3}, {"paro_strategy": "GGG"}))]
    assert answers[::2] == answers[1::2] and all(answers), answers


def units_case(zero: dict[str, Any]) -> list[str]:
    engine = pipelines.make_pipeline(pipelines.Pipe(), zero)
    return [name for name, module in engine.module.named_modules() if is_set_by_choice(module)]


def test_unsupported_optimizers_at_plain_stages_get_advice(ranks: Any) -> None:
    for message in ranks(4).run(muon_case, "NorMuon"):
        assert "NorMuon needs whole matrices, but a rank has shards of them. Use DeepSpeed's" in message, message
    assert ranks(4).run(muon_case, "DeepSpeed's") == [""] * 4
    for message in ranks(4).run(experts_case, 3):
        assert "the weights of each layer to a file, which cannot contain sharded experts" in message, message
    assert ranks(4).run(experts_case, 2) == [""] * 4
    for message in ranks(4).run(experts_case, 2, 1):
        assert "expert-parallel sizes of MoE layers: [1] on ranks [0, 1], [] on ranks [2, 3]" in message, message


def muon_case(kind: str) -> str:
    """Return the error of a pipeline at stage 2 with a Muon that only the optimizer object shows; empty if none."""
    pipe = pipelines.Pipe(tied=False)
    module = PipelineModule(pipelines.layers_of(pipe), num_stages=pipe.stages, loss_fn=pipelines.loss_of)
    config = pipelines.configuration(pipe, {"stage": 2})
    del config["optimizer"]
    matrices = [param for param in module.parameters() if param.dim() > 1]
    optimizer: Any = MuonWithAuxAdam([{"params": matrices, "use_muon": True}])
    if kind != "DeepSpeed's":
        optimizer = type(kind, (torch.optim.SGD,), {})(matrices, lr=0.1)
    return error_of(deepspeed.initialize, model=module, optimizer=optimizer, config=config)


def experts_case(stage: int, mixtures: int = 2) -> str:
    """Return the error of a pipeline at a plain stage with MoE layers on this number of stages; empty if none."""
    layers = [LayerSpec(MoE, 4, torch.nn.Linear(4, 4), num_experts=2) for _ in range(mixtures)]
    layers += [LayerSpec(torch.nn.Linear, 4, 4) for _ in range(2 - mixtures)]
    module = PipelineModule(layers, num_stages=2, loss_fn=pipelines.loss_of)
    groups = split_params_into_different_moe_groups_for_optimizer({"params": [*module.parameters()], "name": "all"})
    config = pipelines.configuration(pipelines.Pipe(), {"stage": stage})
    del config["optimizer"]
    return error_of(deepspeed.initialize, model=module, optimizer=torch.optim.Adam(groups), config=config)


@pytest.mark.parametrize("zero", [{"stage": 1}, {"stage": 0}], ids=["ZeRO-1", "none"])
def test_without_a_strategy_the_engine_is_deepspeeds(ranks: Any, zero: dict[str, Any]) -> None:
    assert set(ranks(4).run(stock_case, zero)) == {"PipelineEngine"}


def stock_case(zero: dict[str, Any]) -> str:
    engine, data = pipelines.start(pipelines.Pipe(), zero)
    engine.train_batch(data)
    return type(engine).__name__


def test_destroyed_engines_keep_no_more_groups_than_stock(ranks: Any) -> None:
    numbers = [number for _, number in ranks(4).each(remaining_groups_case, ("1", "NII"))]
    assert numbers[::2] == numbers[1::2] and all(numbers), numbers


def remaining_groups_case(name: str) -> int:
    before = len(distributed_c10d._world.pg_map)
    engine, data = pipelines.start(pipelines.Pipe(), placed(name, 1))
    engine.train_batch(data)
    engine.destroy()
    return len(distributed_c10d._world.pg_map) - before


def test_the_log_explains_one_data_parallel_rank_per_node(ranks: Any) -> None:
    lines = ranks(4).run(layout_case)[0]
    warnings = [message for level, message in lines if level == "WARNING" and "data-parallel rank" in message]
    assert len(warnings) == 1, lines
    assert all(words in warnings[0] for words in ("ranks [0, 2]", "N-I-G is ZeRO-1 here", "PipeDataParallelTopology"))


def layout_case() -> list[tuple[str, str]]:
    topology = ProcessTopology(axes=["data", "pipe"], dims=[2, 2])
    with logged() as lines, mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        pipelines.train_pipeline(pipelines.Pipe(), {"paro_strategy": "NIG"}, topology=topology)
    return lines
