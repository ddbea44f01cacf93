# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How far predictions are from the steps that the emulated cluster has measured.

    python -m tests.perf.timeline_accuracy

*With compute* (overlap.csv): what the planner's timeline predicted in that run, from rates measured before, against
the median of the steps.

*Without* (emulated_cluster.csv): there the two cores that compute also copy, in 4 or 8 ranks, and nothing runs beside
anything else. So a step is its bytes at the link's rate and what the host does, which grows with what the strategy
moves (``Strategy.phases``): seconds = sum of cost_i x count_i, the counts below, each per core. The costs are fitted
to every fourth row, relative to the step, none below 0, and then predict the other rows. It is one set of costs for
all strategies, sizes, accumulations, numbers of nodes and rates.
"""

import argparse
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deepspeed_ext.strategy import STRATEGIES, Direction, ModelStates, Placement
from tests.perf.lib.cluster_rows import FORMS, MUON, SETTINGS, SIZES, UNLIMITED
from tests.perf.lib.records import RESULTS, latest_rows

WITHIN = 0.1
BLOCKS, MATRICES, BYTES = 4, 2, 4  # of the model that is trained, in fp32
FITTED = 4  # each row of so many
SWEEPS = 5000
FRAME, PAYLOAD = 1538, 1448  # bytes of an Ethernet frame with its gap, of TCP in it


@dataclass(frozen=True)
class Row:
    """A measured step: which, its seconds, and what was counted or predicted of it."""

    setting: str
    mbit: str
    method: str
    seconds: float
    counts: tuple[float, ...] = ()
    predicted: float = 0.0


def counts(row: dict[str, str]) -> tuple[float, ...] | None:
    """Return what a step costs the host, and the link: None for what is no strategy of ours, or has Muon.

    In order: seconds of compute alone, of the bytes on the link; ranks on a core; and for each core bytes of gathers
    and of reductions, within groups and between; bytes that the optimizer changes, that LoCo compresses, and of
    gradients that are packed, and that are added; messages of parameters and of gradients.
    """
    setting = SETTINGS[row["setting"]]
    name, _, form = row["method"].partition(" + ")
    if setting.optimizer == MUON or name not in STRATEGIES:
        return None
    strategy, sent = STRATEGIES[name], FORMS[f" + {form}" if form else ""]
    width, hidden = SIZES[setting.size]
    numel = BLOCKS * MATRICES * width * hidden
    states = ModelStates.of(numel, parameter_bytes=BYTES, gradient_bytes=BYTES, optimizer_bytes=2 * BYTES)
    sizes, steps = setting.sizes, setting.accumulation
    moved: dict[tuple[Direction, str], float] = defaultdict(float)
    for phase in strategy.phases(sizes, states):
        volume = sent.volume(phase, BYTES, float(BYTES))
        moved[phase.kind, "within"] += volume.intra * phase.times(steps)
        moved[phase.kind, "between"] += volume.inter * phase.times(steps)
    share = numel * BYTES / sizes.group_size
    crossings = (steps if strategy.g == Placement.G else 1) * bool(form) + ("updates" in form)
    wire = 0.0
    if row["link_mbit"] != UNLIMITED:
        wire = float(row["formula_bytes"]) * float(row["header_factor"]) * 8e-6 / float(row["link_mbit"])
    sharded, reduced = strategy.p != Placement.N, strategy.g != Placement.N
    per_core = (
        1.0,
        *(moved[kind, hop] for hop in ("within", "between") for kind in Direction),
        3 * numel * BYTES / sizes.shards(strategy.os),
        crossings * share,
        numel * BYTES * (steps if reduced else 1),
        numel * BYTES * steps / sizes.shards(strategy.g),
        2 * steps * BLOCKS * sharded,
        (steps if reduced else 1) * BLOCKS,
    )
    on_a_core = sizes.ranks / 2
    return float(row["compute_seconds"]), wire * FRAME / PAYLOAD, *(on_a_core * count for count in per_core)


def fit(rows: Sequence[Row]) -> Tensor:
    """Return the cost of each count, none below 0: least squares of relative errors, by coordinate descent."""
    weights = 1 / torch.tensor([row.seconds for row in rows], dtype=torch.float64)
    matrix = torch.tensor([row.counts for row in rows], dtype=torch.float64) * weights[:, None]
    scale = matrix.norm(dim=0)
    gram, target = (matrix / scale).T @ (matrix / scale), (matrix / scale).sum(dim=0)
    costs = torch.zeros_like(scale)
    for _ in range(SWEEPS):
        for number in range(len(costs)):
            costs[number] = (costs[number] + target[number] - gram[number] @ costs).clamp(min=0)
    return costs / scale


def without_compute() -> list[Row]:
    """Return the rows that were not fitted, predicted."""
    rows = []
    for row in latest_rows(RESULTS / "emulated_cluster.csv", "setting", "link_mbit", "method"):
        found = counts(row)
        if found is not None:
            seconds = float(row["seconds_median"])
            rows.append(Row(row["setting"], row["link_mbit"], row["method"], seconds, found))
    costs = fit(rows[::FITTED])
    predicted = torch.tensor([row.counts for row in rows], dtype=torch.float64) @ costs
    return [
        Row(row.setting, row.mbit, row.method, row.seconds, predicted=seconds)
        for number, (row, seconds) in enumerate(zip(rows, predicted.tolist(), strict=True))
        if number % FITTED
    ]


def with_compute() -> list[Row]:
    """Return the rows that the planner has predicted."""
    rows = latest_rows(RESULTS / "overlap.csv", "setting", "wire_of_compute", "method", "setup")
    return [
        Row(
            row["setting"],
            f"{float(row['wire_of_compute']):g} x compute",
            row["method"],
            float(row["seconds_median"]),
            predicted=float(row["seconds_predicted"]),
        )
        for row in rows
        if row["seconds_predicted"]
    ]


def table(rows: Sequence[Row], of_kinds: str) -> list[str]:
    """Return lines in Markdown: the share of rows that are close, and the median error, by rate and in all."""
    kinds = [*dict.fromkeys(row.mbit for row in rows), of_kinds]
    lines = []
    for kind in kinds:
        errors = [abs(row.predicted / row.seconds - 1) for row in rows if kind in (row.mbit, of_kinds)]
        close = sum(error <= WITHIN for error in errors)
        lines.append(f"| {kind} | {len(errors)} | {close / len(errors):.0%} | {statistics.median(errors):.1%} |")
    return lines


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    without, with_it = without_compute(), with_compute()
    print(f"| | steps | within {WITHIN:.0%} | median error |\n|---|---|---|---|")
    print("\n".join(table(without, "without compute")))
    print("\n".join(table(with_it, "with compute")))
    print(table([*without, *with_it], "all")[-1])


if __name__ == "__main__":
    main()
