# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pictures of what ``emulated_cluster.py`` has found: step time by method, against the link's rate, against memory."""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import figure

from deepspeed_ext.placement import STRATEGIES
from deepspeed_ext.planner.report import pareto

RESULTS = Path(__file__).parent / "results"
OURS, LOCO, PEER = "#d9622b", "#8c2d04", "#7a8ba6"
SHOWN = ("NIG", "IIG", "NIG + LoCo", "ZeRO-1", "ZeRO-3", "hpZ", "DDP", "FSDP2", "HSDP")  # against the rate
Row = dict[str, str]


def read(path: Path, setting: str) -> list[Row]:
    """The last row of each method and rate.

    Raises:
        ValueError: there are none of this setting.
    """
    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["setting"] == setting and "gloo" not in row["method"]]
    if not rows:
        raise ValueError(f"{path} has no rows of the setting {setting}.")
    return list({(row["method"], row["link_mbit"]): row for row in rows}.values())


def color(method: str) -> str:
    """Of a strategy, one with LoCo, or a peer."""
    if method in STRATEGIES:
        return OURS
    return LOCO if method.endswith("LoCo") else PEER


def megabytes(row: Row) -> float:
    """Of model states on a rank."""
    return sum(float(row[f"{state}_bytes"]) for state in ("parameter", "gradient", "optimizer")) / 1e6


def draw_steps(rows: Sequence[Row], title: str) -> Any:
    """A bar for each method, with its spread and its floor."""
    rows = sorted(rows, key=lambda row: float(row["seconds_median"]))
    drawing = figure.Figure(figsize=(11, 5), layout="constrained")
    axes = drawing.subplots()
    for place, row in enumerate(rows):
        low, middle, high = (float(row[f"seconds_{part}"]) for part in ("min", "median", "max"))
        axes.bar(place, middle, color=color(row["method"]), width=0.7)
        axes.vlines(place, low, high, color="black", linewidth=1)
        axes.hlines(float(row["floor_seconds"]), place - 0.35, place + 0.35, color="white", linewidth=2)
    axes.set_xticks(range(len(rows)), [row["method"] for row in rows], rotation=90, fontsize=8)
    axes.set(ylabel="seconds a step", title=title)
    names = (("strategies", OURS), ("with LoCo", LOCO), ("others", PEER))
    handles = [axes.bar(0, 0, color=shade, label=name) for name, shade in names]
    axes.legend(handles=handles, title="white line: compute alone, and the bytes at the link's rate")
    return drawing


def draw_rates(rows: Sequence[Row], title: str) -> Any:
    """A line for each of some methods."""
    drawing = figure.Figure(figsize=(7, 5), layout="constrained")
    axes = drawing.subplots()
    rates = sorted({row["link_mbit"] for row in rows}, key=lambda rate: (rate == "unlimited", len(rate), rate))
    for method in SHOWN:
        found = {row["link_mbit"]: float(row["seconds_median"]) for row in rows if row["method"] == method}
        if set(found) == set(rates):
            style = "--" if color(method) == PEER else "-"
            axes.plot(rates, [found[rate] for rate in rates], style, marker="o", label=method)
    axes.set(xlabel="Mbit/s between nodes", ylabel="seconds a step", yscale="log", title=title)
    axes.legend()
    return drawing


def draw_memory(rows: Sequence[Row], title: str) -> Any:
    """A point for each method, and the front of what is best in both."""
    drawing = figure.Figure(figsize=(8, 5), layout="constrained")
    axes = drawing.subplots()
    for name, shade in (("strategies", OURS), ("with LoCo", LOCO), ("others", PEER)):
        some = [(megabytes(row), float(row["seconds_median"]), row) for row in rows if color(row["method"]) == shade]
        axes.scatter([x for x, *_ in some], [y for _, y, _ in some], color=shade, label=name, s=20)
        front = pareto([(x, y) for x, y, _ in some])
        if shade != PEER:
            axes.step([x for x, _ in front], [y for _, y in front], where="post", color=shade, alpha=0.5)
        for x, y, row in some:
            if shade == PEER or (x, y) in front:
                axes.annotate(row["method"], (x, y), textcoords="offset points", xytext=(4, 3), fontsize=7)
    axes.set(xlabel="MB of model states on a rank", ylabel="seconds a step", yscale="log", title=title)
    axes.legend()
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=RESULTS / "emulated_cluster.csv", help="rows")
    parser.add_argument("--setting", default="2x2-large-4", help="of which launch")
    parser.add_argument("--mbit", default="100", help="at which rate; or unlimited")
    parser.add_argument("--folder", type=Path, default=RESULTS, help="where the pictures go")
    args = parser.parse_args()
    rows = read(args.csv, args.setting)
    some = [row for row in rows if row["link_mbit"] == args.mbit]
    nodes, ranks, size, accumulation = (rows[0][key] for key in ("nodes", "ranks_per_node", "size", "accumulation"))
    where = f"{nodes} nodes of {ranks} ranks, {size} model, accumulation {accumulation}"
    pictures = {
        "steps": draw_steps(some, f"{where}, {args.mbit} Mbit/s"),
        "rates": draw_rates(rows, where),
        "memory": draw_memory(some, f"{where}, {args.mbit} Mbit/s"),
    }
    for name, picture in pictures.items():
        picture.savefig(args.folder / f"emulated_cluster_{name}.png", dpi=120)


if __name__ == "__main__":
    main()
