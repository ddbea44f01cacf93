# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The rows of ``tests.perf.convergence``: one for each optimizer, number of groups and method; and their table."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import GroupSizes, ModelStates, parse_strategy
from tests.perf.lib.records import RESULTS, Table, read_rows
from tests.perf.lib.studies import STUDIES, Run, Study, cells


def rows_of(study: Study, runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each cell: its seeds beside those of ``Method.against`` and of the reference."""
    found = {(run.optimizer, run.groups, run.method, run.seed): run for run in runs}
    rows = []
    for (optimizer, groups, name), cell in cells(study, runs).items():
        against = study.methods[name].against
        pairs = [(run, found.get((optimizer, groups, against, run.seed))) for run in cell.runs]
        norms = [statistics.fmean(run.norms) / statistics.fmean(o.norms) for run, o in pairs if o and run.norms]
        apart = study.held_out and not study.large  # the loss is held out, that of training another one
        each, losses = cell.differences(cell.against), list(cell.losses.values())
        rows.append(
            {
                "dtype": "bf16" if study.bf16 else "fp32",
                "ranks": groups * study.group_size,
                "group_size": study.group_size,
                "steps": cell.runs[0].steps,
                "seeds": len(losses),
                "optimizer": optimizer,
                "method": name,
                "final_loss": _mean(losses),
                "seed_spread": round(statistics.stdev(losses), 6) if len(losses) > 1 else 0.0,
                "relative_difference": _mean(each) if each else "",
                "relative_difference_by_seed": _listed(each),
                "from_reference_by_seed": _listed(cell.differences(cell.reference)),
                "held_out_loss": _mean(run.final_held_out for run in cell.runs) if study.large else "",
                "own_loss": _mean(run.own_loss for run in cell.runs) if study.held_out else "",
                "training_loss": _mean(run.final_loss for run in cell.runs) if apart else "",
                "ratio_of_mean_norms": round(statistics.fmean(norms), 5) if norms else "",
                "inter_bytes": round(statistics.fmean(run.received for run in cell.runs)),
                "inter_bytes_formula": "" if study.held_out else round(formula(study, cell.runs[0])),
                "seconds_a_run": round(statistics.fmean(run.seconds for run in cell.runs), 1),
            }
        )
    return rows


def _mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 6)


def _listed(values: Sequence[float]) -> str:
    return " ".join(f"{value:.6f}" for value in values)


def formula(study: Study, run: Run) -> float:
    """Return the bytes that a rank receives between groups in a step, as the planner has them: with Muon the most."""
    method, width = study.methods[run.method], 2 if study.bf16 else 4
    sent = Compression.parse(*(method.zero.get(key) for key in ("zeropp_loco_param", "paro_quantized_updates")))
    sizes = GroupSizes(run.groups * study.group_size, study.group_size)
    strategy = parse_strategy(method.strategy)
    states = ModelStates.of(run.elements, parameter_bytes=width, gradient_bytes=width)
    moved = [sent.volume(phase, width, width) for phase in strategy.phases(sizes, states)]
    return sum(volume.inter for volume in [*moved, strategy.exchange(sizes, width * run.matrices)])


def read(study: Study) -> list[dict[str, str]]:
    """Return the last row of each cell that a study has today, in the order of its methods."""
    found = {(row["optimizer"], row["ranks"], row["method"]): row for row in read_rows(RESULTS / study.file)}
    at = dict.fromkeys((optimizer, ranks) for optimizer, ranks, _ in found)
    return [found[(*key, name)] for key in at for name in study.methods if (*key, name) in found]


def table(study: Study, rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return a line for each row; columns that are empty in all lines are left out."""
    header = ["inside", "ranks", "method", "loss", "± seeds", "beside", "% apart", "each seed"]
    header += [f"% from {study.reference}", "own weights", "training", "held-out", "kB a step"]
    lines = []
    for row in rows:
        against = study.methods[row["method"]].against
        line = [row["optimizer"], str(row["ranks"]), row["method"], _loss(row["final_loss"])]
        line += [_loss(row["seed_spread"]), against, _percents(str(row["relative_difference"]))]
        line.append(_percents(row["relative_difference_by_seed"]))
        line.append(_percents(row.get("from_reference_by_seed", "")) if against != study.reference else "")
        line += [_loss(row.get(f"{name}_loss")) for name in ("own", "training", "held_out")]
        lines.append([*line, f"{float(row['inter_bytes']) / 1e3:.1f}" if row.get("inter_bytes") else ""])
    shown = [at for at in range(len(header)) if any(line[at] for line in lines)]
    return [header[at] for at in shown], [[line[at] for at in shown] for line in lines]


def _loss(value: Any) -> str:
    return f"{float(value):.4f}" if value else ""


def _percents(listed: str) -> str:
    return ", ".join(f"{100 * float(one):+.2f}" for one in listed.split())


def stored(name: str, *optimizers: str) -> Table:
    """Return the table of a study's rows in the repository, of some optimizers."""
    study = STUDIES[name]
    return table(study, [row for row in read(study) if not optimizers or row["optimizer"] in optimizers])
