# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Seconds per step over the rate of the link between nodes: the measurement, its table, and its plot."""

import math
from collections.abc import Sequence
from pathlib import Path

from deepspeed_ext.strategy import hyphenate
from tests.perf.lib import plots
from tests.perf.lib.records import RESULTS, Row, Table, read, seconds_of
from tests.perf.lib.settings import BOTH, rate_name

FILE, PLOT = "network.csv", RESULTS / "network.svg"
PEERS = ("ZeRO-3 defaults", "ZeRO-1", "HSDP kept")
OURS = ("NIG", "IIG", "NIG" + BOTH)
METHODS = (*PEERS, *OURS)
NEAR = 1.05  # a gain smaller than this is none
LABEL = "Mbit/s per node (emulated link), and ZeRO-3's communication time relative to its compute time"


def medians(rows: Sequence[Row]) -> dict[str, dict[float, float]]:
    """Return median seconds per step, by method and rate in Mbit/s (infinity: unlimited)."""
    seconds: dict[str, dict[float, float]] = {method: {} for method in METHODS}
    for row in rows:
        seconds[row.method][row.mbit or math.inf] = row.median
    return {method: dict(sorted(points.items())) for method, points in seconds.items()}


def communication_ratios(rows: Sequence[Row]) -> dict[float, float]:
    """Return the communication time of ZeRO-3, relative to its compute time, at each limited rate."""
    first = [row for row in rows if row.method == METHODS[0]]
    return {row.mbit: (row.floor - row.compute) / row.compute for row in first if row.mbit}


def end_of_gain(rows: Sequence[Row]) -> tuple[float, float]:
    """Return the last rate at which our fastest method beats the fastest baseline by 5 %, and the next rate."""
    seconds = medians(rows)
    rates = list(seconds[METHODS[0]])
    best = [[min(seconds[name][rate] for name in names) for rate in rates] for names in (PEERS, OURS)]
    last = max((index for index, (peer, ours) in enumerate(zip(*best, strict=True)) if peer > NEAR * ours), default=-1)
    return (rates[last] if last >= 0 else 0.0), (rates[last + 1] if last + 1 < len(rates) else math.inf)


def table() -> Table:
    """Return seconds per step of each method, and the ratio of communication to compute, at each rate."""
    rows = read(FILE)
    seconds, ratios = medians(rows), communication_ratios(rows)
    lines = [
        [_rate(rate), *(seconds_of(seconds[method][rate]) for method in METHODS), f"{ratios.get(rate, 0):.1f}"]
        for rate in seconds["NIG"]
    ]
    return ["Mbit/s per node", *map(hyphenate, METHODS), "communication to compute, ZeRO-3"], lines


def _rate(rate: float) -> str:
    return rate_name(None if math.isinf(rate) else rate)


def plot(path: Path = PLOT) -> None:
    """Draw the medians over the rate; the ticks also name the ratio of communication to computation."""
    rows = read(FILE)
    seconds, ratios = medians(rows), communication_ratios(rows)
    rates = list(seconds["NIG"])
    ticks = {rate: f"{_rate(rate)}\n{ratios[rate]:.3g}" if rate in ratios else _rate(rate) for rate in rates}
    last, gone = end_of_gain(rows)
    shade = (last, gone, "gain over baselines ends") if last > 0 and not math.isinf(last) else None
    curves = {hyphenate(method): points for method, points in seconds.items()}
    plots.draw(path, curves, ticks, (LABEL, "seconds per step"), table(), shade)
