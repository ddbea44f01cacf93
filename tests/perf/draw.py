# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the pages of results, from their rows: ``python -m tests.perf.draw``."""

import argparse
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy
from matplotlib import figure

from deepspeed_ext.planner.report import pareto
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib.records import RESULTS, Row, read, read_rows
from tests.perf.lib.settings import BLOCKS, BOTH, LOCO, NATIVE, rate_name
from tests.perf.lib.studies import STUDIES, cells, read_runs
from tests.perf.lib.study_rows import outer_ends, outer_rows
from tests.perf.predictions import METHODS

OURS, COMPRESSED, FEWEST, PEER = "#d9622b", "#8c2d04", "#3f007d", "#7a8ba6"
SHADES = {"strategies": OURS, "with LoCo": COMPRESSED, "with LoCo and updates": FEWEST, "others": PEER}
SHOWN = ("NIG", "IIG", "NIG" + LOCO, "NIG" + BOTH, "ZeRO-1", "ZeRO-3", "hpZ", "DDP", "FSDP2", "HSDP")  # by rate
SETTING = BLOCKS["2x2-large-4"]
WINDOW = 100  # steps that a point of a training is the mean of


def color(method: str) -> str:
    """Return the color of a strategy, one with LoCo, one with updates in few bits as well, or a peer."""
    if method in STRATEGIES:
        return OURS
    return COMPRESSED if method.endswith(LOCO) else FEWEST if method.endswith(BOTH) else PEER


def cluster_rows() -> list[Row]:
    """Return the rows of the setting that is drawn."""
    return [r for r in read("emulated_cluster.csv") if r.setting == SETTING.name and NATIVE not in r.method]


def steps() -> Any:
    """Draw a bar for each method at 100 Mbit/s, with its spread and its floor."""
    rows = sorted((row for row in cluster_rows() if row.mbit == 100), key=lambda row: row.median)
    drawing = figure.Figure(figsize=(11, 5), layout="constrained")
    axes = drawing.subplots()
    for place, row in enumerate(rows):
        axes.bar(place, row.median, color=color(row.method), width=0.7)
        axes.vlines(place, min(row.steps), max(row.steps), color="black", linewidth=1)
        axes.hlines(row.floor, place - 0.35, place + 0.35, color="white", linewidth=2)
    axes.set_xticks(range(len(rows)), [row.method for row in rows], rotation=90, fontsize=8)
    axes.set(ylabel="seconds per step", title=f"{SETTING.name}, 100 Mbit/s")
    handles = [axes.bar(0, 0, color=shade, label=name) for name, shade in SHADES.items()]
    axes.legend(handles=handles, title="white line: compute alone, and the bytes at the link's rate")
    return drawing


def rates() -> Any:
    """Draw a line for each of some methods, against the link's rate."""
    rows = cluster_rows()
    drawing = figure.Figure(figsize=(7, 5), layout="constrained")
    axes = drawing.subplots()
    known = sorted({row.mbit for row in rows}, key=lambda rate: rate or math.inf)
    for method in SHOWN:
        found = {row.mbit: row.median for row in rows if row.method == method}
        style = "--" if color(method) == PEER else "-"
        axes.plot(
            [rate_name(rate) for rate in known], [found[rate] for rate in known], style, marker="o", label=method
        )
    axes.set(xlabel="Mbit/s between nodes", ylabel="seconds per step", yscale="log", title=SETTING.name)
    axes.legend()
    return drawing


def memory() -> Any:
    """Draw a point for each method at 100 Mbit/s, and the front of those that are best in both."""
    rows = [row for row in cluster_rows() if row.mbit == 100]
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
    axes.set(xlabel="MB of model states on a rank", ylabel="seconds per step", yscale="log", title=SETTING.name)
    axes.legend()
    return drawing


def outer() -> Any:
    """Draw, for each optimizer and number of groups, curves of outer weights, and where each seed ends, from NIG."""
    study, ends, rows = STUDIES["outer"], outer_ends(), outer_rows()
    kinds = list(dict.fromkeys(end[:2] for end in ends))
    drawing = figure.Figure(figsize=(12, 4.2 * len(kinds)), layout="constrained")
    colors = {method: f"C{number}" for number, method in enumerate(study.methods)}
    for (left, right), (optimizer, groups) in zip(drawing.subplots(len(kinds), 2, squeeze=False), kinds, strict=True):
        curves: dict[str, dict[str, dict[int, float]]] = {}
        for row in rows:
            if (row["optimizer"], int(row["groups"])) == (optimizer, groups):
                points = (point.split(":") for point in row["curve"].split())
                curves.setdefault(row["method"], {})[row["seed"]] = {int(step): float(y) for step, y in points}
        exact = curves["NIG"]
        for method, seeds in curves.items():
            known = [seed for seed in seeds if seed in exact]
            at = list(seeds[known[0]])
            apart = [
                statistics.fmean(100 * (seeds[seed][step] / exact[seed][step] - 1) for seed in known) for step in at
            ]
            left.plot(at, apart, marker="o", markersize=3, color=colors[method], label=method)
        found = {
            key[2]: cell.differences(cell.reference)
            for key, cell in cells(study, ends).items()
            if key[:2] == (optimizer, groups)
        }
        for place, (method, differences) in enumerate(found.items()):
            percents = [100 * difference for difference in differences]
            right.scatter([place] * len(percents), percents, color=colors[method], s=20)
            right.hlines(statistics.fmean(percents), place - 0.3, place + 0.3, color=colors[method])
        right.axhline(0.0, color="black", linewidth=0.5)
        right.set_xticks(range(len(found)), list(found), rotation=30, ha="right", fontsize=8)
        where = f"{optimizer}, {groups} groups"
        left.set(xlabel="step", ylabel="loss, % from NIG", title=f"{where}: outer weights on held-out text")
        right.set(ylabel="loss, % from NIG", title=f"{where}: after the last step, a point a seed")
    drawing.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return drawing


def training() -> Any:
    """Draw losses of the long study, and differences from ZeRO-2, for each seed.

    Updates without loss are dashed: the losses that they equal are below them.
    """
    study = STUDIES["long"]
    runs = read_runs(study)
    seeds = sorted(run.seed for run in runs if run.method == study.reference)
    drawing = figure.Figure(figsize=(12, 4.2 * len(seeds)), layout="constrained")
    for (left, right), seed in zip(drawing.subplots(len(seeds), 2, squeeze=False), seeds, strict=True):
        mine = {run.method: _smooth(run.losses) for run in runs if run.seed == seed}
        reference = mine[study.reference]
        for number, method in enumerate(study.methods):
            if method in mine:
                at = range(WINDOW, WINDOW + len(reference))
                style = {"color": f"C{number}", "linewidth": 1.0, "linestyle": "--" if "exact" in method else "-"}
                left.plot(at, mine[method], **style, label=method)
                right.plot(at, 100 * (mine[method] / reference - 1), **style)
        left.set(xlabel="step", ylabel="loss", yscale="log", title=f"seed {seed}: training loss")
        right.set(xlabel="step", ylabel=f"loss, % from {study.reference}", title=f"seed {seed}: difference")
    drawing.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return drawing


def _smooth(losses: Sequence[float]) -> Any:
    return numpy.convolve(losses, numpy.full(WINDOW, 1 / WINDOW), "valid")


def clusters() -> Any:
    """Draw predicted seconds of a step against GPUs, a panel for each cluster and model."""
    rows = read_rows(RESULTS / "predicted_clusters.csv")
    names, models = (list(dict.fromkeys(row[key] for row in rows)) for key in ("cluster", "model"))
    drawing = figure.Figure(figsize=(14, 7), layout="constrained")
    axes = drawing.subplots(len(names), len(models), sharex=True)
    for panel, (cluster, model) in zip(axes.flat, ((c, m) for c in names for m in models), strict=True):
        for method in METHODS:
            some = [r for r in rows if (r["cluster"], r["model"], r["method"]) == (cluster, model, method)]
            fitting = {int(row["ranks"]): float(row["seconds"]) for row in some if row["fits"] == "True"}
            panel.plot(list(fitting), list(fitting.values()), "o-", label=method)
        panel.set(xscale="log", yscale="log", title=f"{model}\n{cluster}, predicted")
        panel.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    drawing.supxlabel("GPUs")
    drawing.supylabel("seconds per step of 16 M tokens (predicted)")
    return drawing


PICTURES: dict[str, Callable[[], Any]] = {
    "emulated_cluster_steps": steps,
    "emulated_cluster_rates": rates,
    "emulated_cluster_memory": memory,
    "outer_convergence": outer,
    "long_training": training,
    "predicted_clusters": clusters,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pictures", nargs="*", metavar="NAME", help=f"all by default: {', '.join(PICTURES)}")
    args = parser.parse_args()
    if unknown := set(args.pictures) - set(PICTURES):
        parser.error(f"pictures must be among {', '.join(PICTURES)}, got {', '.join(sorted(unknown))}")
    for name in args.pictures or PICTURES:
        PICTURES[name]().savefig(RESULTS / f"{name}.png", dpi=110)


if __name__ == "__main__":
    main()
