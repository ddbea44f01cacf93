# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Plots of curves over one horizontal axis, both logarithmic."""

import math
from collections.abc import Mapping
from pathlib import Path

from tests.perf.lib.records import Table, markdown

COLORS = ("#444444", "#888888", "#aaaaaa", "#0b6bcb", "#d9480f", "#2b8a3e")
Points = Mapping[float, float]


def draw(
    path: Path,
    curves: Mapping[str, Points],
    ticks: Mapping[float, str],
    labels: tuple[str, str],
    table: Table,
    shade: tuple[float, float, str] | None = None,
) -> None:
    """Draw curves, points by name, as SVG. Infinity has a place of its own, to the right of the largest number.
    ``ticks`` are labels of the horizontal axis, in its order; ``table``, the drawn rows, is the file's description;
    ``shade``, an interval of the horizontal axis, and its name."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    beyond = 4 * max(at for at in ticks if not math.isinf(at))
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": path.name, "font.size": 9}):
        figure = Figure(figsize=(8, 4.4), layout="constrained")
        axes = figure.subplots()
        for (name, points), color in zip(curves.items(), COLORS[-len(curves) :], strict=True):
            at = [min(value, beyond) for value in points]
            axes.loglog(at, list(points.values()), marker="o", color=color, label=name)
        if shade is not None:
            axes.axvspan(shade[0], min(shade[1], beyond), color="#fff3bf", label=shade[2])
        axes.set_xticks([min(value, beyond) for value in ticks], list(ticks.values()), minor=False)
        axes.minorticks_off()
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(alpha=0.3)
        axes.set(xlabel=labels[0], ylabel=labels[1])
        axes.legend(loc="best")
        figure.savefig(path, metadata={"Date": None, "Description": markdown(table)})
