# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Seconds per step over the rate of the link between nodes: the measurement, its table, and its plot."""

import math
from collections.abc import Sequence

from deepspeed_ext.strategy import hyphenate
from tests.perf.lib import plots
from tests.perf.lib.records import RESULTS, Row, Table, read, seconds_of
from tests.perf.lib.settings import BOTH, rate_name

FILE, PLOT = "network.csv", RESULTS / "network.svg"
PEERS = ("ZeRO-3 defaults", "ZeRO-1", "HSDP kept")
OURS = ("NIG", "IIG", "NIG" + BOTH)
METHODS = (*PEERS, *OURS)
NEAR = 1.05  # a gain smaller than this is none


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


def plot() -> str:
    """Return an SVG of the medians over the rate, with the ratio on a second axis below."""
    rows = read(FILE)
    seconds, ratios = medians(rows), communication_ratios(rows)
    curves = {hyphenate(method): points for method, points in seconds.items()}
    drawn = plots.Plot(curves, lambda value: f"{value:g} s", "seconds per step")
    for rate in seconds["NIG"]:
        drawn.add_tick(rate, _rate(rate))
        if rate in ratios:
            text = f"{ratios[rate]:.0f}" if ratios[rate] >= 10 else f"{ratios[rate]:.1f}"
            at = f'x="{drawn.x(rate):.1f}" y="{plots.BASE + 48}"'
            drawn.add(f'<text {at} text-anchor="middle" fill="#666">{text}</text>')
    drawn.add_title(32, "Mbit/s per node (emulated link)")
    drawn.add_title(64, "ZeRO-3: communication time / compute time")
    drawn.add_vertical_title()
    last, gone = end_of_gain(rows)
    if last > 0 and not math.isinf(last):
        begin, end = drawn.x(last), drawn.x(gone)
        drawn.add(
            f'<rect x="{begin:.1f}" y="{plots.TOP}" width="{end - begin:.1f}" height="{plots.BASE - plots.TOP}" '
            'fill="#fff3bf" fill-opacity="0.6"/>'
        )
        middle = f'x="{(begin + end) / 2:.1f}" y="{plots.TOP + 14}"'
        drawn.add(f'<text {middle} text-anchor="middle">gain over baselines ends</text>')
    return drawn.svg()
