# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The kinds of cases that train, and how those of pipelines and of the planner are drawn; see ``drawing``."""

from typing import Any

from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from tests.campaigns.fuzz.cases import Block, Case, PipeCase, is_lossy
from tests.campaigns.fuzz.drawing import (
    REPLICATED,
    SHARDED,
    Draw,
    blocks,
    cases,
    common_keys,
    maybe,
    one_of,
    seldom,
    sizes,
)


@some.composite
def pipelines(draw: Draw, worlds: tuple[int, ...]) -> PipeCase:
    """A pipeline of two stages."""
    strategy = draw(one_of(*REPLICATED, *SHARDED))
    zero = common_keys(draw)
    zero.pop("round_robin_gradients", None)
    maybe(draw, zero, 8, zeropp_loco_param=some.just({}))
    if strategy[0] != "G":
        maybe(draw, zero, 8, paro_quantized_updates=some.just({}))
    if strategy[0] != "N":
        maybe(draw, zero, 3, stage3_param_persistence_threshold=one_of(0, 100))
    pipe = {
        "micro_batches": draw(some.integers(1, 4)),
        "steps": draw(one_of(2, 3)),
        "tied": draw(some.booleans()),
        "frozen": draw(one_of((), (), (1,), (2, 3), (0, 1, 2), (3, 4, 5))),
        "groups": draw(one_of(1, 2)),
        "two": draw(one_of(None, None, 2)),
        "checkpointing": draw(one_of(0, 0, 1, -1)),
        "dtype": draw(one_of("fp32", "bf16")),
        "optimizer": draw(one_of("SGD", "Adam")),
        "clipping": draw(one_of(0.0, 0.5)),
        "widths": draw(one_of((29, 7, 17, 11), (5, 3), (13, 37, 3))),
    }
    if "paro_quantized_updates" in zero:
        pipe["tied"] = False  # copies of tied weights would differ
    if pipe["optimizer"] == "Adam":
        pipe["groups"] = 1  # the rates of groups are for SGD
    world = draw(one_of(*(world for world in (4, 4, 8, 2) if world <= max(worlds))))
    if len(pipe["frozen"]) > 2:
        without_training(draw, pipe, world)
    elif len(pipe["widths"]) < 3:
        pipe["frozen"], pipe["two"] = (), None
    return PipeCase("pipeline", world, strategy, zero, pipe, draw(one_of(0, 0, 1)))


def without_training(draw: Draw, pipe: dict[str, Any], world: int) -> None:
    """Leave nothing to train on one of two or more stages: the first, the last, or one between."""
    pipe.update(widths=(29, 7, 17, 11), tied=False, two=None, checkpointing=0, dtype="fp32")
    if world > 2 and seldom(draw, 3):
        pipe.update(stages=4, frozen=draw(one_of((2, 3), (0, 1), (4, 5), (4,))))


@some.composite
def planned(draw: Draw, worlds: tuple[int, ...]) -> Case:
    """A case in which the planner chooses the strategy."""
    world, group = sizes(draw, worlds)
    case: dict[str, Any] = {
        "kind": "planner",
        "world": world,
        "dtype": draw(one_of("fp32", "bf16")),
        "optimizer": draw(one_of("Adam", "SGD")),
        "accumulation": draw(some.integers(1, 3)),
        "inputs": draw(one_of(5, 13)),
        "outputs": draw(one_of(3, 7)),
        "zero_init": None,
    }
    drawn = blocks(draw, 2, case["optimizer"])
    case["blocks"] = tuple(block for block in drawn if block.kind != "experts") or (
        Block(),
    )  # leaf modules at stage 3
    zero: dict[str, Any] = {"paro_strategy": "fastest", "paro_group_size": group}
    maybe(draw, zero, 3, stage=one_of(1, 2, 3), overlap_comm=some.booleans(), reduce_bucket_size=one_of(300, 1000))
    maybe(draw, zero, 2, paro_micro_step_seconds=one_of(0.0, 1e-4, 1e-2))
    maybe(draw, zero, 3, paro_memory_gb=one_of(1.0, 1e-4, 3e-5, 1e-5))
    maybe(draw, zero, 8, zeropp_loco_param=some.just({}), paro_quantized_updates=some.just({}))
    if case["optimizer"] == "Adam":
        eps = 1e-3 if case["dtype"] == "fp32" and not is_lossy(zero) else 0.1
        case["config"] = {"optimizer": {"params": {"lr": 1e-2, "eps": eps, "torch_adam": True}}}
    case["streams"] = False
    if seldom(draw, 3):
        case.update(network="RoutedOverTwo", blocks=(Block(), Block(), Block()))
        zero["paro_group_size"] = 2
        zero.pop("stage", None)
    latency, within = draw(one_of(0.0, 1e-5)), draw(one_of(1e9, 1e7))
    case["links"] = latency, within, draw(one_of(1e8, 1e6, 1e9)), draw(one_of(1e12, 1e8))
    return Case(**case, zero=zero)


KINDS = ("replicated", "sharded", "few bits", "windows", "without loss", "experts", "planner", "model-parallel")
KINDS += ("pipeline",)


def of_kind(kind: str, worlds: tuple[int, ...]) -> SearchStrategy[Any]:
    """Cases of a kind, on one of these numbers of ranks where the kind leaves a choice."""
    others = {"pipeline": pipelines, "planner": planned}
    return others[kind](worlds) if kind in others else cases(kind, worlds)
