# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Picture of what ``outer_convergence.py`` has found: the losses of outer weights, and where each method ends."""

import argparse
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import figure

from tests.perf.lib.outer_rows import EXACT, KEPT, METHODS, OuterRow, cells, of_defaults, read
from tests.perf.lib.records import RESULTS


def color(method: str) -> str:
    """Return the color of a method."""
    return f"C{list(METHODS).index(method)}"


def draw(rows: Sequence[OuterRow]) -> Any:
    """Draw a line of panels for each optimizer and number of groups: curves, and differences from NIG by seed."""
    kinds = list(dict.fromkeys((row.optimizer, row.groups) for row in rows))
    drawing = figure.Figure(figsize=(12, 4.2 * len(kinds)), layout="constrained")
    lines: tuple[list[Any], list[str]] = [], []
    for panels, (optimizer, groups) in zip(drawing.subplots(len(kinds), 2, squeeze=False), kinds, strict=True):
        some = [row for row in rows if (row.optimizer, row.groups) == (optimizer, groups)]
        _draw_curves(panels[0], some, f"{optimizer}, {groups} groups: outer weights on held-out text")
        _draw_ends(panels[1], some, f"{optimizer}, {groups} groups: after the last step, a point a seed")
        lines = max(lines, panels[0].get_legend_handles_labels(), key=lambda found: len(found[1]))
    drawing.legend(*lines, loc="outside upper center", ncols=4)  # a method has one color, in the order of all of them
    return drawing


def _draw_curves(axes: Any, rows: Sequence[OuterRow], title: str) -> None:
    """Draw the mean over seeds, as far as NIG has the same ones, less NIG's."""
    exact = {row.seed: dict(row.curve) for row in rows if row.method == EXACT}
    for method in dict.fromkeys(row.method for row in rows):
        curves = [row for row in rows if row.method == method and row.seed in exact]
        if curves:
            steps = [step for step, _ in curves[0].curve]
            apart = [
                statistics.fmean(100 * (dict(row.curve)[step] / exact[row.seed][step] - 1) for row in curves)
                for step in steps
            ]
            axes.plot(steps, apart, marker="o", markersize=3, color=color(method), label=method)
    axes.set(xlabel="step", ylabel="loss, % from NIG", title=title)


def _draw_ends(axes: Any, rows: Sequence[OuterRow], title: str) -> None:
    """Draw where each seed ends, and the mean."""
    found = {method: cell.from_exact for (_, _, method), cell in cells(rows).items() if cell.from_exact}
    for place, (method, differences) in enumerate(found.items()):
        percents = [100 * difference for difference in differences]
        axes.scatter([place] * len(percents), percents, color=color(method), s=20)
        axes.hlines(statistics.fmean(percents), place - 0.3, place + 0.3, color=color(method))
    axes.axhline(0.0, color="black", linewidth=0.5)
    axes.set_xticks(range(len(found)), list(found), rotation=30, ha="right", fontsize=8)
    axes.set(ylabel="loss, % from NIG", title=title)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=KEPT, help="rows")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the picture goes")
    args = parser.parse_args()
    rows = of_defaults(read(args.csv))
    if not rows:
        parser.error(f"{args.csv} has no rows of the settings that the program has by default.")
    draw(rows).savefig(args.folder / "outer_convergence.png", dpi=110)


if __name__ == "__main__":
    main()
