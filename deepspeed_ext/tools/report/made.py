# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A report is made of what all ranks have recorded, and written by rank 0."""

import contextlib
import json
import platform
import socket
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed import version as deepspeed_version
from deepspeed.utils import logger

from deepspeed_ext.clocks import device_name
from deepspeed_ext.comm.agreement import all_gather_texts, broadcast_text
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.planner.described import compression_of
from deepspeed_ext.strategy import GroupSizes, StateBytes
from deepspeed_ext.tools.plan import recorded
from deepspeed_ext.tools.report import measures, told
from deepspeed_ext.tools.report.page import render
from deepspeed_ext.tools.report.predicted import Predicted, predict, topology_of
from deepspeed_ext.tools.report.recording import BETWEEN, WITHIN, Step
from deepspeed_ext.tools.report.trace import chrome_trace
from deepspeed_ext.version import __version__

FORMAT = 1
_STAGES = ("training without ZeRO", "ZeRO-1", "ZeRO-2", "ZeRO-3")


def make(
    engine: Engine, steps: Sequence[Step], undisturbed: Sequence[float], held: StateBytes, probes: bool
) -> dict[str, Any] | None:
    """Return the report, on rank 0; None on others. Collective over all ranks.

    Args:
        engine: that has trained.
        steps: recorded on this rank.
        undisturbed: seconds of steps before and after them.
        held: bytes of model states on this rank.
        probes: whether to measure the links, and predict.
    """
    mine = measures.summary(steps)
    ranks = _of_all_ranks(mine)
    slowest = min(ranks, key=lambda one: one["waiting"])["rank"]
    fastest = max(ranks, key=lambda one: one["waiting"])["rank"]
    shown = measures.middle(steps)
    timelines = [_timeline(which, rank, ranks, shown) for which, rank in (("slowest", slowest), ("fastest", fastest))]
    said = json.loads(
        broadcast_text(json.dumps(mine | {"held": [held.parameters, held.gradients, held.optimizer]}), slowest)
    )
    sizes, predicted, why_not = _predicted(engine, said["parts"][measures.COMPUTE], probes)
    if dist.get_rank() != 0:
        return None
    report = {
        "format": FORMAT,
        "made": _made(ranks),
        "training": _training(engine, sizes),
        "steps": _steps(steps[0].number, said["seconds"], undisturbed),
        "parts": _parts(said["parts"], predicted),
        "hops": _hops(said["hops"], predicted),
        "operations": said["operations"],
        "modules": said["modules"],
        "memory": _memory(said["held"], predicted),
        "ranks": ranks,
        "timelines": timelines if slowest != fastest else timelines[:1],
        "choices": [] if predicted is None else predicted.choices(),
        recorded.KEY: None if predicted is None or predicted.described is None else predicted.described.as_dict(),
        "findings": [],
    }
    report["findings"] = told.findings(report) + why_not
    report["paragraph"] = told.paragraph(report)
    return report


def _of_all_ranks(mine: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a row of each rank. Collective."""
    row = {
        "rank": dist.get_rank(),
        "host": socket.gethostname(),
        "step": median(mine["seconds"]),
        "compute": mine["parts"][measures.COMPUTE],
        "waiting": mine["waiting"],
    }
    return [json.loads(text) for text in all_gather_texts(json.dumps(row))]


def _timeline(which: str, rank: int, ranks: Sequence[dict[str, Any]], step: Step) -> dict[str, Any]:
    """Return the timeline of a rank, on all ranks. Collective."""
    mine = {
        "which": which,
        "rank": rank,
        "host": ranks[rank]["host"],
        "step": step.number,
        "seconds": step.seconds,
        "lanes": measures.timeline(step) if rank == dist.get_rank() else [],
    }
    found: dict[str, Any] = json.loads(broadcast_text(json.dumps(mine), rank))
    return found


def _predicted(engine: Engine, compute: float, probes: bool) -> tuple[GroupSizes, Predicted | None, list[str]]:
    """Return the groups, predictions, and why there are none. Collective."""
    try:
        sizes = topology_of(engine).sizes
        return sizes, predict(engine, compute) if probes else None, []
    except ValueError as error:
        return GroupSizes(dist.get_world_size(), dist.get_world_size()), None, [f"Nothing is predicted: {error}"]


# What rank 0 puts together ########################################################################


def _made(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "when": datetime.now().astimezone().isoformat(timespec="minutes"),
        "versions": {
            "deepspeed_ext": __version__,
            "deepspeed": deepspeed_version,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "device": device_name(),
        "hosts": list(dict.fromkeys(one["host"] for one in ranks)),
        "script": Path(sys.argv[0]).name,
    }


def _training(engine: Engine, sizes: GroupSizes) -> dict[str, Any]:
    config, strategy, sent = engine._config, active_strategy(engine._config), compression_of(engine._config)
    stage = int(config.zero_config.stage)
    letters = "" if strategy is None else f"p={strategy.p.name}, g={strategy.g.name}, os={strategy.os.name}"
    model = list(engine.module.parameters())
    dtype, _ = engine.get_data_types()
    return {
        "strategy": None if strategy is None else strategy.name,
        "called": _STAGES[stage] if strategy is None else f"{strategy.name}{sent.label} ({letters})",
        "stage": stage,
        "ranks": sizes.ranks,
        "group_size": sizes.group_size,
        "groups": sizes.groups,
        "accumulation": config.gradient_accumulation_steps,
        "parameters": sum(map(numel_of, model)),
        "trainable": sum(numel_of(one) for one in model if one.requires_grad),
        "dtype": str(dtype).removeprefix("torch."),
        "loco": sent.loco is not None,
        "updates": sent.updates is not None,
    }


def _steps(first: int, seconds: Sequence[float], undisturbed: Sequence[float]) -> dict[str, Any]:
    usual = median(undisturbed) if undisturbed else None
    return {
        "first": first,
        "seconds": list(seconds),
        "undisturbed": usual,
        "overhead": median(seconds) / usual - 1 if usual else None,
    }


def _parts(found: dict[str, float], predicted: Predicted | None) -> list[dict[str, Any]]:
    now = None if predicted is None else predicted.now
    shares = {} if now is None else {**now.seconds, "other": now.seconds["host"]}
    return [{"part": part, "seconds": found[part], "predicted": shares.get(part)} for part in measures.PARTS]


def _hops(found: Sequence[dict[str, Any]], predicted: Predicted | None) -> list[dict[str, Any]]:
    rows = []
    for hop in found:
        row: dict[str, Any] = {**hop, "formula_bytes": None, "predicted_exposed": None, "probed_rate": None}
        if predicted is not None:
            probed = [getattr(kind, {WITHIN: "intra", BETWEEN: "inter"}[hop["hop"]]) for kind in predicted.kinds]
            finite = [one.bandwidth for one in probed if one.bandwidth != float("inf")]
            row["probed_rate"] = max(finite, default=None)
        if predicted is not None and predicted.now is not None:
            row["predicted_exposed"] = predicted.now.seconds[hop["hop"]]
            row["formula_bytes"] = predicted.formula(hop["hop"])
        rows.append(row)
    return rows


def _memory(held: Sequence[float], predicted: Predicted | None) -> list[dict[str, Any]]:
    now = None if predicted is None else predicted.now
    formula = [None] * 3 if now is None else [now.memory.parameters, now.memory.gradients, now.memory.optimizer]
    names = ("parameters", "gradients", "optimizer states")
    return [
        {"state": name, "bytes": nbytes, "formula": expected}
        for name, nbytes, expected in zip(names, held, formula, strict=True)
    ]


# Files ############################################################################################


def write(report: dict[str, Any], folder: Path) -> None:
    """Write the page, the trace and the figures; where there is no room for them, leave those that are there.

    An error is logged, for the training goes on.
    """
    texts = {
        "report.json": json.dumps(report),
        "trace.json": json.dumps(chrome_trace(report)),
        "report.html": render(report),
    }
    aside = {name: folder / f".{name}.part" for name in texts}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            aside[name].write_text(text, encoding="utf-8")
        for name, path in aside.items():
            path.replace(folder / name)
    except OSError as error:
        logger.error(f"deepspeed_ext: the report could not be written to {folder}: {error}")
        for path in aside.values():
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
        return
    # Shown at DeepSpeed's default level, for somebody has asked for it.
    logger.warning(f"deepspeed_ext: {report['paragraph']} See {folder / 'report.html'}; trace.json is for Perfetto.")
