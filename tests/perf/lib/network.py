# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Seconds per step over the rate of the link between nodes: the measurement, its table, and its plot."""

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

from deepspeed_ext.strategy import hyphenate
from tests.perf.lib.records import RESULTS, Row, Table, read, seconds_of
from tests.perf.lib.settings import BOTH, rate_name

FILE, PLOT = "network.csv", RESULTS / "network.svg"
PEERS = ("ZeRO-3 defaults", "ZeRO-1", "HSDP kept")
OURS = ("NIG", "IIG", "NIG" + BOTH)
METHODS = (*PEERS, *OURS)
NEAR = 1.05  # a gain smaller than this is none

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 30, 80
COLORS = ("#444444", "#888888", "#aaaaaa", "#0b6bcb", "#d9480f", "#2b8a3e")


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
    """Return an SVG of the medians over the rate, both logarithmic, with the ratio on a second axis below."""
    rows = read(FILE)
    seconds, ratios = medians(rows), communication_ratios(rows)
    rates = list(seconds["NIG"])
    values = [value for points in seconds.values() for value in points.values()]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    limited = [rate for rate in rates if not math.isinf(rate)]
    span = math.log(limited[-1] / limited[0])

    def x(rate: float) -> float:
        """The unlimited link has a place of its own, to the right of the largest rate."""
        position = 1.12 if math.isinf(rate) else math.log(rate / limited[0]) / span
        return LEFT + position / 1.12 * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return TOP + (high - math.log10(value)) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(low, high + 1):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g} s</text>')
    base = HEIGHT - BOTTOM
    for rate in rates:
        parts.append(f'<path d="M{x(rate):.1f} {TOP}V{base}" stroke="#eeeeee"/>')
        parts.append(f'<text x="{x(rate):.1f}" y="{base + 16}" text-anchor="middle">{_rate(rate)}</text>')
        if rate in ratios:
            text = f"{ratios[rate]:.0f}" if ratios[rate] >= 10 else f"{ratios[rate]:.1f}"
            parts.append(f'<text x="{x(rate):.1f}" y="{base + 48}" text-anchor="middle" fill="#666">{text}</text>')
    center = (LEFT + WIDTH - RIGHT) / 2
    for offset, text in ((32, "Mbit/s per node (emulated link)"), (64, "ZeRO-3: communication time / compute time")):
        parts.append(f'<text x="{center:.0f}" y="{base + offset}" text-anchor="middle">{text}</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}">seconds per step</text>')
    last, gone = end_of_gain(rows)
    if last > 0 and not math.isinf(last):
        begin, end = x(last), x(gone)
        parts.append(
            f'<rect x="{begin:.1f}" y="{TOP}" width="{end - begin:.1f}" height="{base - TOP}" fill="#fff3bf" '
            'fill-opacity="0.6"/>'
        )
        parts.append(
            f'<text x="{(begin + end) / 2:.1f}" y="{TOP + 14}" text-anchor="middle">gain over baselines ends</text>'
        )
    ends = _spread([y(list(points.values())[-1]) for points in seconds.values()])
    for (method, points), color, end in zip(seconds.items(), COLORS, ends, strict=True):
        line = " ".join(f"{x(rate):.1f},{y(value):.1f}" for rate, value in points.items())
        parts.append(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
        parts += [f'<circle cx="{x(r):.1f}" cy="{y(v):.1f}" r="3" fill="{color}"/>' for r, v in points.items()]
        parts.append(
            f'<text x="{WIDTH - RIGHT + 14}" y="{end + 4:.1f}" fill="{color}">{escape(hyphenate(method))}</text>'
        )
    return "\n".join([*parts, "</svg>", ""])


def _spread(heights: list[float], gap: float = 15.0) -> list[float]:
    """Return heights of labels, moved down until they are ``gap`` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, previous = list(heights), -math.inf
    for index in order:
        previous = moved[index] = max(moved[index], previous + gap)
    return moved
