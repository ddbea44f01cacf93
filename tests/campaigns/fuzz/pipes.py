# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Compares a pipeline with its oracle; inside rank processes only. The oracle is DeepSpeed's own pipeline with ZeRO-1;
where a stage has nothing to train, which fails there, it is plain torch, without a pipeline."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from deepspeed.runtime.utils import partition_uniform

from tests.campaigns.fuzz import oracles
from tests.campaigns.fuzz.cases import ORACLE, PipeCase
from tests.harness import pipelines, stream_cases
from tests.harness.pipelines import Pipe, Trained
from tests.harness.snapshots import shared_folder
from tests.harness.stream_order import device_with_streams
from tests.harness.training import placed

# Of what is largest of its kind. An ulp or two in what is added up in another order, and what steps make of that.
WEIGHTS = {"fp32": 3e-5, "bf16": 1.5e-2, "fp16": 4e-3}
MOMENTS = {"fp32": 2e-4, "bf16": 6e-2, "fp16": 2e-2}
LOSSES = {"fp32": 2e-5, "bf16": 3e-2, "fp16": 1e-2}


class Verdict(NamedTuple):
    """The result of a case: problems, each a line; and events, for counting."""

    problems: list[str]
    happened: list[str]


def judge_pipe(case: PipeCase) -> Verdict:
    """Run a pipeline and compare. Collective."""
    pipe = Pipe(**{**case.pipe, "zero": case.zero})
    replicas = case.world // pipe.stages
    keys = placed(case.strategy, 2 if replicas % 2 == 0 else 1)
    ours = pipelines.train_pipeline(pipe, keys)
    problems = [] if ours.same else ["copies of weights differ"]
    problems += [f"order: {finding}" for finding in _findings(pipe, keys)]
    if 0 < case.resumed < pipe.steps:
        problems += _resumed(case, pipe, keys, ours)
    print(ORACLE, flush=True)
    oracle = "oracle: torch" if rests(pipe) else "oracle: stage 1"
    try:
        plain = replace(pipe, zero={key: case.zero[key] for key in case.zero if key in oracles.OF_PIPELINES})
        stock = pipelines.train_whole(pipe, replicas) if rests(pipe) else pipelines.train_pipeline(plain, {"stage": 1})
    except Exception as error:
        return Verdict(problems, [f"stock raises {type(error).__name__}: {str(error)[:80]}"])
    if not {"zeropp_loco_param", "paro_quantized_updates"} & case.zero.keys():
        problems += _apart(case, pipe, ours, stock)
    return Verdict(problems, [oracle])


def rests(pipe: Pipe) -> bool:
    """Whether a stage has nothing to train."""
    bounds = itertools.pairwise(partition_uniform(len(pipe.widths) + 2, pipe.stages))
    return any(set(range(first, last)) <= set(pipe.frozen) for first, last in bounds)


def _findings(pipe: Pipe, keys: dict[str, Any]) -> list[str]:
    """Return accesses without an order on a device with streams."""
    with device_with_streams() as order:
        engine = pipelines.make_pipeline(pipe, keys)
        data = pipelines.batches(engine.grid.get_data_parallel_rank())
        with stream_cases.stepping_on_host(engine, order), order.watch():
            for _ in range(pipe.steps):
                engine.train_batch(data)
        engine.destroy()
    return order.findings


def _resumed(case: PipeCase, pipe: Pipe, keys: dict[str, Any], ours: Trained) -> Iterator[str]:
    """Yield where a run that continues in a new engine differs by a bit from an uninterrupted one."""
    engine = pipelines.make_pipeline(pipe, keys)
    data = pipelines.batches(engine.grid.get_data_parallel_rank())
    losses = [float(engine.train_batch(data)) for _ in range(case.resumed)]
    with shared_folder() as folder:
        engine.save_checkpoint(folder, client_state={"steps": case.resumed})
        engine.destroy()
        engine = pipelines.make_pipeline(pipe, keys)
        path, client_state = engine.load_checkpoint(folder)
        assert path is not None and client_state["steps"] == case.resumed
    losses += [float(engine.train_batch(data)) for _ in range(pipe.steps - case.resumed)]
    weights, _ = pipelines.everybodys_weights(engine.module)
    engine.destroy()
    if losses != ours.losses:
        yield f"resumed: other losses: {losses} and {ours.losses}"
    apart = [name for name in ours.weights if not torch.equal(weights[name], ours.weights[name])]
    if apart:
        yield f"resumed: other bits of {len(apart)} of {len(weights)} weights, as {apart[0]}"


def _apart(case: PipeCase, pipe: Pipe, ours: Trained, stock: Trained) -> Iterator[str]:
    apart = pipelines.apart(case.strategy, ours, stock)
    # Losses are summed over stages, and learning rates are larger there.
    bounds = (2 * WEIGHTS[pipe.dtype], 2 * LOSSES[pipe.dtype], 2 * MOMENTS[pipe.dtype])
    for name, results, bound in zip(("weights", "losses", "norms"), apart[1:4], bounds, strict=True):
        if not results <= bound:
            yield f"{name} {results:.1e} apart"
    if ours.applied != stock.applied and not rests(pipe):  # torch skips none
        yield f"steps {ours.applied}, stock's {stock.applied}"
