# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of what ``emulated_cluster.py`` has found: step time by method, against the link's rate, against memory."""

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import figure

from deepspeed_ext.planner.report import pareto
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib.cluster_rows import BOTH, KEPT, LOCO, NATIVE, SETTINGS, MethodRow, rate_name, read
from tests.perf.lib.records import RESULTS

OURS, COMPRESSED, FEWEST, PEER = "#d9622b", "#8c2d04", "#3f007d", "#7a8ba6"
SHADES = {"strategies": OURS, "with LoCo": COMPRESSED, "with LoCo and updates": FEWEST, "others": PEER}
SHOWN = (
    "NIG",
    "IIG",
    "NIG" + LOCO,
    "NIG" + BOTH,
    "ZeRO-1",
    "ZeRO-3",
    "hpZ",
    "DDP",
    "FSDP2",
    "HSDP",
)  # against the rate


def color(method: str) -> str:
    """Return the color of a strategy, one with LoCo, one with updates in few bits as well, or a peer."""
    if method in STRATEGIES:
        return OURS
    return COMPRESSED if method.endswith(LOCO) else FEWEST if method.endswith(BOTH) else PEER


def draw_steps(rows: Sequence[MethodRow], title: str) -> Any:
    """Draw a bar for each method, with its spread and its floor."""
    rows = sorted(rows, key=lambda row: row.median)
    drawing = figure.Figure(figsize=(11, 5), layout="constrained")
    axes = drawing.subplots()
    for place, row in enumerate(rows):
        axes.bar(place, row.median, color=color(row.method), width=0.7)
        axes.vlines(place, min(row.seconds), max(row.seconds), color="black", linewidth=1)
        axes.hlines(row.floor, place - 0.35, place + 0.35, color="white", linewidth=2)
    axes.set_xticks(range(len(rows)), [row.method for row in rows], rotation=90, fontsize=8)
    axes.set(ylabel="seconds per step", title=title)
    handles = [axes.bar(0, 0, color=shade, label=name) for name, shade in SHADES.items()]
    axes.legend(handles=handles, title="white line: compute alone, and the bytes at the link's rate")
    return drawing


def draw_rates(rows: Sequence[MethodRow], title: str) -> Any:
    """Draw a line for each of some methods."""
    drawing = figure.Figure(figsize=(7, 5), layout="constrained")
    axes = drawing.subplots()
    rates = sorted({row.mbit for row in rows}, key=lambda rate: rate or math.inf)
    labels = [rate_name(rate) for rate in rates]
    for method in SHOWN:
        found = {row.mbit: row.median for row in rows if row.method == method}
        if set(found) == set(rates):
            style = "--" if color(method) == PEER else "-"
            axes.plot(labels, [found[rate] for rate in rates], style, marker="o", label=method)
    axes.set(xlabel="Mbit/s between nodes", ylabel="seconds per step", yscale="log", title=title)
    axes.legend()
    return drawing


def draw_memory(rows: Sequence[MethodRow], title: str) -> Any:
    """Draw a point for each method, and the front of what is best in both."""
    drawing = figure.Figure(figsize=(8, 5), layout="constrained")
    axes = drawing.subplots()
    for name, shade in SHADES.items():
        some = [(row.memory / 1e6, row.median, row) for row in rows if color(row.method) == shade]
        axes.scatter([x for x, *_ in some], [y for _, y, _ in some], color=shade, label=name, s=20)
        front = pareto([(x, y) for x, y, _ in some])
        if shade != PEER:
            axes.step([x for x, _ in front], [y for _, y in front], where="post", color=shade, alpha=0.5)
        for x, y, row in some:
            if shade == PEER or (x, y) in front:
                axes.annotate(row.method, (x, y), textcoords="offset points", xytext=(4, 3), fontsize=7)
    axes.set(xlabel="MB of model states on a rank", ylabel="seconds per step", yscale="log", title=title)
    axes.legend()
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=KEPT, help="rows")
    parser.add_argument("--setting", choices=SETTINGS, default="2x2-large-4", help="of which launch")
    parser.add_argument("--mbit", default="100", help="at which rate; or unlimited")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the pictures go")
    args = parser.parse_args()
    setting = SETTINGS[args.setting]
    rows = [row for row in read(args.csv) if row.setting == setting.name and NATIVE not in row.method]
    some = [row for row in rows if rate_name(row.mbit) == args.mbit]
    if not some:
        parser.error(f"{args.csv} has no rows of the setting {setting.name} at {args.mbit} Mbit/s.")
    where = f"{setting.nodes} nodes of {setting.ranks_per_node} ranks, {setting.size} model, "
    where += f"accumulation {setting.accumulation}"
    pictures = {
        "steps": draw_steps(some, f"{where}, {args.mbit} Mbit/s"),
        "rates": draw_rates(rows, where),
        "memory": draw_memory(some, f"{where}, {args.mbit} Mbit/s"),
    }
    for name, picture in pictures.items():
        picture.savefig(args.folder / f"emulated_cluster_{name}.png", dpi=120)


if __name__ == "__main__":
    main()
