# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of ``tests.perf.convergence``: a row for each run of the outer study, and for each method of others."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from tests.perf.lib.records import RESULTS, read_rows
from tests.perf.lib.studies import STUDIES, End, Run, Study, cells, ends_of, planned


def outer_keys(study: Study, run: Run) -> str:
    """Return ``paro_outer_optimizer`` of a run as rows have it."""
    keys = study.methods[run.method].configured(run.optimizer, study.group_size).get("paro_outer_optimizer")
    return json.dumps(keys) if keys else ""


def run_rows(study: Study, runs: Sequence[Run], tokens: int) -> list[dict[str, Any]]:
    """Return a row for each run of the outer study; ``tokens`` are those of a rank's step."""
    return [
        {
            "dtype": "bf16",
            "ranks": run.groups * study.group_size,
            "groups": run.groups,
            "steps": run.steps,
            "optimizer": run.optimizer,
            "method": run.method,
            "strategy": study.methods[run.method].strategy,
            "outer": outer_keys(study, run),
            "seed": run.seed,
            "tokens": run.steps * run.groups * study.group_size * tokens,
            "final_loss": round(run.final_held_out, 6),
            "own_loss": round(run.own_loss, 6),
            "training_loss": round(run.final_loss, 6),
            "inter_bytes": round(run.received),
            "seconds": round(run.seconds, 1),
            "curve": " ".join(f"{step}:{loss:.4f}" for step, loss in run.held_out.items()),
        }
        for run in runs
    ]


def outer_rows() -> list[dict[str, str]]:
    """Return the last row of each run of the outer study with its default settings, in the order of training."""
    study = STUDIES["outer"]
    found = {}
    for row in read_rows(RESULTS / study.file):
        key = row["optimizer"], int(row["groups"]), row["method"], int(row["seed"]), row["outer"], int(row["steps"])
        found[key] = row
    runs = planned(study, study.optimizers, study.groups, range(study.seeds))
    keys = [(run.optimizer, run.groups, run.method, run.seed, outer_keys(study, run), run.steps) for run in runs]
    return [found[key] for key in keys if key in found]


def outer_ends() -> list[End]:
    """Return where these runs ended."""
    columns = ("final_loss", "own_loss", "training_loss", "inter_bytes")
    return [
        End(row["optimizer"], int(row["groups"]), row["method"], int(row["seed"]), *(float(row[c]) for c in columns))
        for row in outer_rows()
    ]


def summary_rows(study: Study, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each optimizer and method: its seeds beside those of ``Method.against``."""
    found = {(run.optimizer, run.method, run.seed): run for run in runs}
    rows = []
    for (optimizer, groups, name), cell in cells(study, ends_of(study, runs)).items():
        mine = [found[optimizer, name, end.seed] for end in cell.ends]
        pairs = [(run, found[optimizer, study.methods[name].against, run.seed]) for run in mine]
        means = [statistics.fmean(run.norms) / statistics.fmean(other.norms) for run, other in pairs]
        each = cell.differences(cell.against)
        rows.append(
            {
                "dtype": "bf16" if study.bf16 else "fp32",
                "ranks": groups * study.group_size,
                "group_size": study.group_size,
                "steps": mine[0].steps,
                "accumulation": 1,
                "seeds": len(mine),
                "optimizer": optimizer,
                "method": name,
                "final_loss": round(cell.loss, 6),
                "seed_spread": round(cell.spread, 6),
                "relative_difference": round(statistics.fmean(each), 6),
                "relative_difference_by_seed": " ".join(f"{difference:.6f}" for difference in each),
                "ratio_of_mean_norms": round(statistics.fmean(means), 5),
                "inter_bytes": round(statistics.fmean(run.received for run in mine)),
                "inter_bytes_formula": round(formula(study, mine[0])),
                "seconds_a_run": round(statistics.fmean(run.seconds for run in mine), 1),
            }
        )
    return rows


def formula(study: Study, run: Run) -> float:
    """Return the bytes that a rank receives between groups in a step, as the planner has them: with Muon the most."""
    method, width = study.methods[run.method], 2 if study.bf16 else 4
    loco, updates = (method.zero.get(key) for key in ("zeropp_loco_param", "paro_quantized_updates"))
    sent = Compression(
        None if loco is None else LocoSettings.parse(loco), None if updates is None else UpdateSettings.parse(updates)
    )
    sizes = GroupSizes(run.groups * study.group_size, study.group_size)
    strategy = parse_strategy(method.strategy)
    states = ModelStates.of(run.elements, parameter_bytes=width, gradient_bytes=width)
    moved = [sent.volume(phase, width, width) for phase in strategy.phases(sizes, states)]
    return sum(volume.inter for volume in [*moved, strategy.exchange(sizes, width * run.matrices)])
