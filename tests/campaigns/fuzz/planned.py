# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What ``"paro_strategy": "fastest"`` decides, and what it predicts for that; inside rank processes only.

The planner is told how fast links are. What it says of memory and bytes is compared with formulas that know only the
letters of strategies, its choice with its own predictions, and the training with that of the strategy by its name.
Tests of the planner show its seconds.
"""

import json
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist

from deepspeed_ext.planner import probe
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from tests.campaigns.fuzz import runs
from tests.campaigns.fuzz.cases import Case
from tests.campaigns.fuzz.events import shared_folder
from tests.campaigns.fuzz.formulas import Layout, moves, received
from tests.campaigns.fuzz.run import Run
from tests.campaigns.fuzz.runs import Trained
from tests.harness.parity_table import PARTITIONED, REPLICATED

FLOPS = 1e9  # a second, of a rank
NONE_FITS = "none fits"
OF_PLANNER = ("stage", "paro_memory_gb", "paro_micro_step_seconds")
TIE = 0.03  # as the page says
NEAR = 1e-9
ADAM = 12  # bytes of states an element
OF_STAGES = {None: (*REPLICATED, *PARTITIONED), 1: REPLICATED[:3], 2: REPLICATED[3:], 3: PARTITIONED}


def rates_of(case: Case) -> Rates:
    """Of a case's links; reductions are half as fast as gathers."""
    latency, within, between, memory = case.links
    hops = (HopRates(Rate(latency, within / part), Rate(2 * latency, between / part)) for part in (1, 2))
    return Rates(*hops, memory=memory)


def decided(case: Case) -> tuple[str, list[str]]:
    """The strategy that is chosen for a case, "" if none fits, and what is wrong. Collective."""
    with shared_folder() as folder, mock.patch.object(probe, "flops", lambda *_: FLOPS):
        file = folder / "made" / "decisions.json"
        zero = {**case.zero, "paro_decision_file": str(file)}
        with mock.patch.object(probe, "measure", lambda *_: rates_of(case)):
            try:
                first = runs.train(case, zero, True)
            except ValueError as error:
                if NONE_FITS not in str(error):
                    raise
                return "", []
        dist.barrier()
        plan = json.loads(file.read_text())["decisions"][0]
        dist.barrier()
        with mock.patch.object(probe, "measure", _measured):
            run = Run(case, zero, True)
        kept = run.engine._config.zero_config.paro_strategy
        run.destroy()
        (entry,) = json.loads(file.read_text())["decisions"]
    problems = [] if plan == entry else ["the second engine has changed the decision"]
    if {first.strategy, kept} != {plan["strategy"]}:
        problems.append(f"{plan['strategy']} was decided, {first.strategy} runs, and then {kept}")
    by_name = {key: value for key, value in case.zero.items() if key not in OF_PLANNER}
    named = runs.train(case, by_name | {"paro_strategy": first.strategy}, True)
    for what in ("losses", "norms"):
        if getattr(first, what) != getattr(named, what):
            problems.append(f"other {what} than {first.strategy}: {getattr(first, what)}, {getattr(named, what)}")
    if not torch.equal(first.weights, named.weights):
        problems.append(f"other weights than {first.strategy}")
    return first.strategy, problems + list(_wrong(case, plan["plan"], plan["strategy"], first))


def _measured(*_: Any) -> Rates:
    raise AssertionError("a run that is decided has measured the links")


def _wrong(case: Case, plan: dict[str, Any], name: str, trained: Trained) -> Iterator[str]:
    """What is wrong with a plan."""
    predictions = {one["strategy"]: one for one in plan["predictions"]}
    allowed = set(OF_STAGES[case.zero.get("stage")]) & set(REPLICATED if case.network else (*REPLICATED, *PARTITIONED))
    if "paro_quantized_updates" in case.zero:
        allowed = {one for one in allowed if one[0] != "G"}
    if set(predictions) != allowed:
        yield f"the planner looked at {sorted(predictions)}"
        return
    flops = 2 * (6 * trained.trained + 4 * (trained.elements - trained.trained))
    compute = case.zero.get("paro_micro_step_seconds", flops / FLOPS)
    if not case.network and not _close(plan["micro_step_seconds"], compute):
        yield f"a micro-step computes for {compute} s, not {plan['micro_step_seconds']}"
    budget = case.zero.get("paro_memory_gb")
    fitting = [one for one in predictions.values() if budget is None or one["total_memory"] <= 1e9 * budget]
    quickest = min(one["total_seconds"] for one in fitting)
    close = [one for one in fitting if one["total_seconds"] <= (1 + TIE) * quickest]
    best = min(close, key=lambda one: (one["total_memory"], one["total_seconds"]))["strategy"]
    if best != name:
        yield f"{name} was chosen, by its predictions {best}"
    for one in predictions.values():
        yield from _of(case, one, trained)


def _of(case: Case, one: dict[str, Any], trained: Trained) -> Iterator[str]:
    """What is wrong with the prediction of a strategy."""
    name, layout = one["strategy"], Layout(case.world, case.zero["paro_group_size"])
    width = 4 if case.dtype == "fp32" else 2
    memory = _memory(name, layout, width, trained)
    if any(not _close(one["memory"][kind], memory[kind]) for kind in memory):
        yield f"{name} holds {memory}, predicted are {one['memory']}"
    if not {"zeropp_loco_param", "paro_quantized_updates"} & case.zero.keys() and not trained.experts:
        due = received(moves(name, layout, width * trained.elements, width * trained.trained, case.accumulation, 1))
        if not all(map(_close, one["volume"].values(), due)):
            yield f"{name} receives {due}, predicted are {one['volume']}"


def _memory(name: str, layout: Layout, width: int, trained: Trained) -> dict[str, float]:
    """Bytes that a rank holds: of the experts of two ranks it has a half, as have half of the others."""
    others = Layout(layout.n // 2, max(1, layout.m // 2))
    families = [(layout, trained.elements - trained.experts, trained.trained - trained.experts)]
    families += [(others, trained.experts, trained.experts)] if trained.experts else []
    p, g, os = name
    return {
        "parameters": sum(width * whole / ranks.shards(p) for ranks, whole, _ in families),
        "gradients": sum(width * changed / ranks.shards(g) for ranks, _, changed in families),
        "optimizer": sum(ADAM * changed / ranks.shards(os) for ranks, _, changed in families),
    }


def _close(one: float, other: float) -> bool:
    return abs(one - other) <= NEAR * max(abs(one), abs(other))
