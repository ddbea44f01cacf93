# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The ranks over which strategies shard and reduce with tensor and sequence parallelism: as with stock, or refused."""

import contextlib
import os
from typing import Any
from unittest import mock

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.sequence_parallel import parallel_state_sp

from deepspeed_ext.strategy import STRATEGIES
from tests.harness.tiers import with_cases
from tests.harness.training import whole_weights

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
    "gradient_clipping": 0.0,  # the default, 1.0, would hide factors of all gradients
    "zero_allow_untested_optimizer": True,
}
ON_MESH = {"data_parallel_size": 2, "sequence_parallel_size": 2}


def make_engine(zero: dict[str, Any], more_config: dict[str, Any], zero_init: bool = False, **arguments: Any) -> Any:
    get_accelerator().is_fp16_supported = lambda: True  # or zero.Init makes bf16 on a CPU
    config = {**CONFIG, **more_config, "zero_optimization": {"stage3_param_persistence_threshold": 0, **zero}}
    torch.manual_seed(3)
    sharded = zero_init and (zero.get("stage") == 3 or zero.get("paro_strategy", "N")[0] != "N")
    with deepspeed.zero.Init(config_dict_or_path=config) if sharded else contextlib.nullcontext():
        model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3))
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config, **arguments)[0]


def train(engine: Any, steps: int = 2) -> Any:
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2 * steps):
        engine.backward(engine(torch.randn(2, 5, generator=generator)).square().sum())
        engine.step()
    weights = whole_weights(engine.module)
    engine.destroy()
    return weights


def differences(strategy: str, uneven: bool = False, **how: Any) -> tuple[float, float]:
    """Return the distance of weights from the weights of stock's stage, and from the first rank's weights."""
    stock = train(make_engine({"stage": STRATEGIES[strategy].stage}, **how))
    ours = train(make_engine({"paro_strategy": strategy, **({} if uneven else {"paro_group_size": 2})}, **how))
    first = ours.clone()
    dist.broadcast(first, 0)
    return (ours - stock).abs().max().item(), (ours - first).abs().max().item()


@with_cases(
    "strategy, beside",
    *(("NIG", "mpu"), ("III", "mpu"), ("IIG", "size alone"), ("IIG", "mesh of one axis")),
    ("IIG", "mesh and mpu"),
    *((name, "uneven nodes") for name in ("NIG", "IIG", "III")),
)
def test_weights_equal_those_of_stock(ranks: Any, strategy: str, beside: str) -> None:
    for from_stock, from_first in ranks(6 if "nodes" in beside else 4).run(parallelism_case, strategy, beside):
        assert from_stock < 1e-6 and from_first == 0


def parallelism_case(strategy: str, parallelism: str) -> tuple[float, float]:
    """See ``differences``. Sequences are shared by two ranks, by all, or by none; or nodes have 4 and 2 ranks."""
    if parallelism == "mpu":
        parallel_state_sp.initialize_sequence_parallel(2)
        return differences(strategy, more_config={"sequence_parallel_size": 2}, mpu=parallel_state_sp, zero_init=True)
    if parallelism == "mesh and mpu":  # which returns the group over both axes
        parallel_state_sp.initialize_sequence_parallel(2)
        return differences(strategy, more_config=ON_MESH, mpu=parallel_state_sp)
    if parallelism == "size alone":  # as HF Trainer writes it; its model is made before there is an mpu
        return differences(strategy, more_config={"sequence_parallel_size": 4}, zero_init=True)
    if parallelism == "uneven nodes":
        os.environ["LOCAL_WORLD_SIZE"] = "444422"[dist.get_rank()]
        return differences(strategy, uneven=True, more_config={})
    return differences(strategy, more_config={"data_parallel_size": 4, "sequence_parallel_size": 1})


IIG = {"paro_strategy": "IIG", "paro_group_size": 2}


@with_cases(
    "given, zero, keys",
    ("config", {"paro_strategy": "NIG", "paro_group_size": 2}, "paro_strategy and paro_group_size"),
    ("config", {"paro_strategy": "fastest"}, "paro_strategy"),
    ("config", {"stage": 3, "stage3_leaf_bytes": True}, "stage3_leaf_bytes"),
    ("config", {"stage": 2, "zeropp_loco_param": {}}, "zeropp_loco_param"),
    ("mesh_param", IIG, "paro_strategy and paro_group_size"),
    ("by an earlier engine", IIG, "paro_strategy and paro_group_size"),
    ids=str,
)
def test_a_mesh_with_sequence_parallelism_is_refused(ranks: Any, given: str, zero: dict[str, Any], keys: str) -> None:
    whose = " of an earlier engine of this process" if given == "by an earlier engine" else ""
    for error in ranks(4).run_expect_error(mesh_case, zero, given):
        assert error.type == "ValueError", error
        assert error.message.startswith(
            f"zero_optimization.{keys.partition(' ')[0]} cannot be combined with a mesh of data_parallel_size 2 and "
            f"sequence_parallel_size 2 (or mesh_param){whose}: DeepSpeed would use 2 of the 4 ranks"
        ), error.message
        assert error.message.endswith(f"or remove {keys}.")


def mesh_case(zero: dict[str, Any], source: str) -> None:
    """Create an engine with two data-parallel ranks of two sequence-parallel ranks, or after one that had them."""
    if source == "by an earlier engine":
        make_engine({"stage": 3}, ON_MESH).destroy()
    mesh: dict[str, Any] = {"mesh_param": (2, 2)} if source == "mesh_param" else {}
    make_engine(zero, ON_MESH if source == "config" else {}, **mesh)


def test_a_stock_engine_reshards_a_model_of_ours(ranks: Any) -> None:
    """It reduces over the ranks of the mesh, as stock does, although its own group is one axis."""
    answers = ranks(4).run(takeover_case)
    assert answers == [answers[0]] * 4 and answers[0] < 1e-6


def takeover_case() -> float:
    """Return how far a stock engine on a mesh, over the model of an engine of ours, is from one over a new model."""
    expected = train(make_engine({"stage": 3}, ON_MESH))
    deepspeed.utils.groups.mesh_device = None  # which DeepSpeed keeps
    engine = make_engine({"paro_strategy": "INI", "paro_group_size": 2}, {})
    model = engine.module
    engine.destroy()
    config = {**CONFIG, **ON_MESH, "zero_optimization": {"stage": 3}}
    stock, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return float((train(stock) - expected).abs().max())


@with_cases(
    "key, value, message",
    ("paro_group_size", 4, "got paro_group_size 4 with 2 data-parallel rank(s)"),
    ("paro_outer_optimizer", {}, "4 ranks share a sequence, and groups have 2, "),
    ("paro_micro_batches", [2, 1], "Set zero_optimization.paro_group_size to a multiple of the sequence-parallel"),
)
def test_groups_that_tensors_or_sequences_cross_raise(ranks: Any, key: str, value: Any, message: str) -> None:
    for error in ranks(4).run_expect_error(crossing_case, key, value):
        assert error.type == "ValueError" and message in error.message, error


def crossing_case(key: str, value: Any) -> None:
    """Create nodes of two ranks, and let four share a sequence; or two a model, as AutoTP does."""
    if key != "paro_group_size":
        os.environ["LOCAL_WORLD_SIZE"] = "2"
        parallel_state_sp.initialize_sequence_parallel(4)
        make_engine({"paro_strategy": "III", key: value}, {"sequence_parallel_size": 4}, mpu=parallel_state_sp)
    with mock.patch.object(dist, "new_group", side_effect=AssertionError("something was communicated")):
        make_engine({"paro_strategy": "IIG", "paro_group_size": 4}, {"tensor_parallel": {"autotp_size": 2}})
