# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Makes a report from the records of all ranks, with predictions for the same links; rank 0 writes it."""

import contextlib
import json
import math
import platform
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed import version as deepspeed_version
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups, logger

from deepspeed_ext.comm.agreement import all_gather_texts, broadcast_text
from deepspeed_ext.comm.process_groups import Topology, get_topology, ranks_per_node
from deepspeed_ext.config.keys import OUTER
from deepspeed_ext.config.model import STRATEGY_OF_STAGE
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.compression import COMPRESSIONS, Compression
from deepspeed_ext.planner.costs import Prediction
from deepspeed_ext.planner.engine_model import (
    configured_compression,
    describe_engine,
    gradient_dtype,
    max_over_ranks,
    measure_rates,
)
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import GroupSizes, Placement, StateBytes
from deepspeed_ext.tools.clocks import device_name
from deepspeed_ext.tools.plan import recorded_training
from deepspeed_ext.tools.report import flat_collectives, measures, page
from deepspeed_ext.tools.report.measures import BETWEEN, WITHIN, Step
from deepspeed_ext.version import __version__
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.pace import balance

FORMAT = 1
_STAGES = ("training without ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3")
_EQUAL_SECONDS = 1e-6  # relative difference of predicted seconds that count as equal


def build_report(
    engine: Engine, steps: Sequence[Step], undisturbed: Sequence[float], state_bytes: StateBytes, probes: bool
) -> dict[str, Any] | None:
    """Return the report on rank 0, None on other ranks. Collective over all ranks.

    Args:
        engine: the recorded engine.
        steps: recorded steps of this rank.
        undisturbed: seconds of steps before and after them.
        state_bytes: bytes of model states on this rank.
        probes: whether to measure the links and predict.
    """
    summary = measures.summary(steps)
    summary["held"] = [state_bytes.parameters, state_bytes.gradients, state_bytes.optimizer]
    ranks, groups = _rows_of_ranks(summary), _rows_of_groups(engine, steps)
    # The slowest rank waits least, since the other ranks wait for it.
    slowest = min(ranks, key=lambda row: row["waiting"])["rank"]
    fastest = max(ranks, key=lambda row: row["waiting"])["rank"]
    step = measures.median_step(steps)
    timelines = [_timeline(role, rank, ranks, step) for role, rank in (("slowest", slowest), ("fastest", fastest))]
    measured = json.loads(broadcast_text(json.dumps(summary), slowest))
    sizes, predictions, problems = _predict(engine, measured["parts"][measures.COMPUTE], probes)
    if dist.get_rank() != 0:  # no collectives after this line: they would hang
        return None
    now, planner_input = (None, None) if predictions is None else (predictions.now, predictions.planner_input)
    usual = median(undisturbed) if undisturbed else None
    predicted = {} if now is None else {**now.seconds, measures.OTHER: now.seconds["host"]}
    report = {
        "format": FORMAT,
        "made": _origin(ranks),
        "training": _training(engine, sizes),
        "steps": {
            "first": steps[0].number,
            "seconds": measured["seconds"],
            "undisturbed": usual,
            "overhead": median(measured["seconds"]) / usual - 1 if usual else None,
        },
        "parts": [
            {"part": part, "seconds": measured["parts"][part], "predicted": predicted.get(part)}
            for part in measures.PARTS
        ],
        "hops": [{**row, **_hop_prediction(row["hop"], predictions)} for row in measured["hops"]],
        "operations": measured["operations"],
        "modules": measured["modules"],
        "memory": _memory(measured["held"], now),
        "ranks": ranks,
        "groups": groups,
        "timelines": timelines if slowest != fastest else timelines[:1],
        "choices": [] if predictions is None else predictions.choices(),
        recorded_training.KEY: None if planner_input is None else planner_input.as_dict(),
        "findings": [],
    }
    report["findings"] = page.findings(report) + problems
    report["paragraph"] = page.paragraph(report)
    return report


def _rows_of_ranks(own: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row for each rank. Collective."""
    row = {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "step": median(own["seconds"]),
        "compute": own["parts"][measures.COMPUTE],
        "waiting": own["waiting"],
    }
    return [json.loads(text) for text in all_gather_texts(json.dumps(row))]


def _rows_of_groups(engine: Engine, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return each group's numbers of micro-batches, pace, and wait for the slowest group; empty if groups communicate
    in each micro-batch, or there are fewer than two of either. Collective."""
    optimizer, number = engine.optimizer, engine._config.gradient_accumulation_steps
    row: list[Any] | None = None
    if isinstance(optimizer, ParoOptimizer) and not engine.pipeline_parallelism:
        strategy, sizes, rank = optimizer.strategy, optimizer.topology.sizes, optimizer.topology.rank
        paces = [pace for step in steps if (pace := measures.pace(step, number)) is not None]
        if sizes.groups > 1 and Placement.G not in (strategy.p, strategy.g) and paces:
            row = [rank // sizes.group_size, number, median(paces)]
    rows = [json.loads(text) for text in all_gather_texts(json.dumps(row))]
    if None in rows:
        return []
    # Rows of a group are sorted by pace, so its slowest rank replaces the others.
    slowest = {group: (number, pace) for group, number, pace in sorted(rows)}
    return group_rows(*zip(*slowest.values(), strict=True))


def group_rows(numbers: Sequence[int], paces: Sequence[float]) -> list[dict[str, Any]]:
    """Return each group's row, given its number of micro-batches and its seconds per micro-batch."""
    end = max(number * pace for number, pace in zip(numbers, paces, strict=True))
    return [
        {"pace": pace, "micro_batches": number, "waiting": end - pace * number, "balanced": balanced}
        for number, pace, balanced in zip(numbers, paces, balance(paces, sum(numbers)), strict=True)
    ]


def _timeline(role: str, rank: int, ranks: Sequence[dict[str, Any]], step: Step) -> dict[str, Any]:
    """Return the timeline of one rank on all ranks. Collective."""
    row = {
        "which": role,
        "rank": rank,
        "host": ranks[rank]["host"],
        "step": step.number,
        "seconds": step.seconds,
        "lanes": measures.timeline(step) if rank == dist.get_rank() else [],
    }
    gathered: dict[str, Any] = json.loads(broadcast_text(json.dumps(row), rank))
    return gathered


def _origin(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "when": datetime.now().astimezone().isoformat(timespec="minutes"),
        "versions": {
            "deepspeed_ext": __version__,
            "deepspeed": deepspeed_version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": device_name(),
        "hosts": list(dict.fromkeys(row["host"] for row in ranks)),
        "script": Path(sys.argv[0]).name,
    }


def _training(engine: Engine, sizes: GroupSizes) -> dict[str, Any]:
    config, strategy, sent = engine._config, active_strategy(engine._config), configured_compression(engine._config)
    stage = int(config.zero_config.stage)
    letters = "" if strategy is None else f"p={strategy.p.name}, g={strategy.g.name}, os={strategy.os.name}"
    parameters = list(engine.module.parameters())
    dtype, _ = engine.get_data_types()
    return {
        "strategy": None if strategy is None else strategy.name,
        "called": _STAGES[stage] if strategy is None else f"{strategy}{sent.label} ({letters})",
        "stage": stage,
        "ranks": sizes.ranks,
        "group_size": sizes.group_size,
        "groups": sizes.groups,
        "accumulation": config.gradient_accumulation_steps,
        "parameters": sum(map(numel_of, parameters)),
        "trainable": sum(numel_of(parameter) for parameter in parameters if parameter.requires_grad),
        "dtype": str(dtype).removeprefix("torch."),
        "loco": sent.loco is not None,
        "updates": sent.updates is not None,
    }


def _memory(state_bytes: Sequence[float], now: Prediction | None) -> list[dict[str, Any]]:
    formulas = [None] * 3 if now is None else [now.memory.parameters, now.memory.gradients, now.memory.optimizer]
    rows = zip(("parameters", "gradients", "optimizer states"), state_bytes, formulas, strict=True)
    return [{"state": name, "bytes": nbytes, "formula": formula} for name, nbytes, formula in rows]


# Predictions ######################################################################################


@dataclass(frozen=True)
class Predictions:
    """Predictions with the compute and the links of the running training.

    Attributes:
        rates: measured rates of the links.
        now: prediction of the running strategy; None if it is not predicted.
        all: predictions of every strategy in every form, and of the plain stages; the fastest first.
        planner_input: input of ``plan --from``; None if it does not predict such trainings.
    """

    rates: Rates
    now: Prediction | None
    all: Sequence[Prediction]
    planner_input: recorded_training.PlannerInput | None

    def choices(self) -> list[dict[str, Any]]:
        """Return a row of ``report.json`` for each strategy; only a device has a memory limit."""
        device = get_accelerator()
        limit = None if device.is_synchronized_device() else device.total_memory()
        return [
            {
                "strategy": prediction.name,
                "step": prediction.total_seconds,
                "within": prediction.busy["within"],
                "between": prediction.busy["between"],
                "bytes_between": prediction.volume.inter,
                "gb": prediction.total_memory / 1e9,
                "fits": None if limit is None else prediction.total_memory <= limit,
                "now": prediction is self.now,
            }
            for prediction in self.all
        ]


def _hop_prediction(hop: str, predictions: Predictions | None) -> dict[str, float | None]:
    """Return the predicted values of a hop; None for unknown values.

    DeepSpeed's own collectives are over all ranks, so with several groups all their bytes are between groups.
    """
    row: dict[str, float | None] = {"formula_bytes": None, "predicted_exposed": None, "probed_rate": None}
    if predictions is None:
        return row
    name, rates = {WITHIN: "intra", BETWEEN: "inter"}[hop], predictions.rates
    probed = (getattr(kind, name).bandwidth for kind in (rates.gather, rates.reduce))
    row["probed_rate"] = max((rate for rate in probed if rate != float("inf")), default=None)
    if (now := predictions.now) is not None:
        row["predicted_exposed"], row["formula_bytes"] = now.seconds[hop], getattr(now.volume, name)
        if now.plain and now.volume.inter:
            row["formula_bytes"] = 0.0 if hop == WITHIN else now.volume.intra + now.volume.inter
    return row


def _predict(engine: Engine, compute: float, probes: bool) -> tuple[GroupSizes, Predictions | None, list[str]]:
    """Measure the links and predict. Collective; takes some seconds.

    Args:
        engine: the engine that trains.
        compute: seconds of a step's forward and backward, the same on all ranks.
        probes: whether to measure and predict.

    Returns:
        The groups, the predictions, and the reasons if there are no predictions.
    """
    try:
        current: Topology | None = getattr(engine.optimizer, "topology", None)
        topology = get_topology(groups._get_sequence_data_parallel_group()) if current is None else current.all_groups
        if not probes:
            return topology.sizes, None, []
        model = max_over_ranks(describe_engine(engine, engine.module))
        model = replace(model, compute=compute / model.accumulation)
        rates = measure_rates(engine._config, topology, model)
        sent = configured_compression(engine._config)
        forms = [form for form in COMPRESSIONS if form.label != sent.label]
        planned = plan(topology.sizes, model, rates, None, [*forms, sent])
    except ValueError as error:
        return GroupSizes(dist.get_world_size(), dist.get_world_size()), None, [f"No prediction available: {error}"]
    # If a group is all ranks, some strategies have the same predictions as a plain stage: leave these out.
    twins = {row.strategy: row.total_seconds for row in planned.plain}
    rows = [
        row
        for row in planned.predictions
        if not math.isclose(row.total_seconds, twins.get(row.name, math.nan), rel_tol=_EQUAL_SECONDS)
    ]
    rows = sorted([*rows, *planned.plain], key=lambda row: (row.total_seconds, row.total_memory))
    now = _running_prediction(engine, planned, sent)
    planner_input = _planner_input(engine, now, topology.sizes, model, rates, sent)
    return topology.sizes, Predictions(rates, now, rows, planner_input), []


def _planner_input(
    engine: Engine, now: Prediction | None, sizes: GroupSizes, model: Model, rates: Rates, sent: Compression
) -> recorded_training.PlannerInput | None:
    """Return the input of ``plan --from``; None if it does not predict such trainings. Collective."""
    numbers = getattr(engine._config.zero_config, "paro_micro_batches", None)
    if now is None or engine.pipeline_parallelism or (isinstance(numbers, list) and len(set(numbers)) > 1):
        return None
    # With model parallelism, some of a node's ranks hold other parts of the model, so ``ranks_per_node`` is not used.
    per_node = ranks_per_node() if sizes.ranks == dist.get_world_size() else None
    cluster = recorded_training.Cluster(sizes, per_node or sizes.group_size)
    backend = "gloo" if get_accelerator().is_synchronized_device() else "nccl"  # determines how latencies scale
    flat_rates = flat_collectives.measure(engine._config, gradient_dtype(model))
    return recorded_training.PlannerInput(
        strategy=now.strategy,
        plain=now.plain,
        sent=sent,
        cluster=cluster,
        backend=backend,
        model=model,
        rates=rates,
        flat=flat_rates,
    )


def _running_prediction(engine: Engine, planned: Plan, sent: Compression) -> Prediction | None:
    """Return the prediction of the running strategy or plain stage."""
    if getattr(engine._config.zero_config, OUTER, None) is not None:
        return None  # inner and outer steps differ
    strategy = active_strategy(engine._config)
    if strategy is None:
        name = STRATEGY_OF_STAGE.get(int(engine._config.zero_config.stage), "NNN")
        return next((row for row in planned.plain if row.strategy == name), None)
    return next((row for row in planned.predictions if row.name == strategy.name + sent.label), None)


# Files ############################################################################################


def write_report(report: dict[str, Any], folder: Path) -> None:
    """Write the page, the trace and the JSON report. If that fails, keep the previous files.

    An error is only logged, because the training continues.
    """
    texts = {
        "report.json": json.dumps(report),
        "trace.json": json.dumps(page.chrome_trace(report)),
        "report.html": page.render(report),
    }
    temporary_files = {name: folder / f".{name}.part" for name in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # All files are written before any is replaced, so a failure keeps the previous report complete.
        for name, text in texts.items():
            temporary_files[name].write_text(text, encoding="utf-8")
        for name, path in temporary_files.items():
            path.replace(folder / name)
    except OSError as error:
        logger.error(f"deepspeed_ext: the report could not be written to {folder}: {error}")
        for path in temporary_files.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return
    # A warning, so that it is shown at DeepSpeed's default level: the user has requested the report.
    logger.warning(f"deepspeed_ext: {report['paragraph']} See {folder / 'report.html'}; trace.json is for Perfetto.")
