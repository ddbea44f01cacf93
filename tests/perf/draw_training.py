# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Picture of what ``long_training.py`` has found: the losses of all methods, and how far each is from ZeRO-2."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib import figure

from tests.perf.lib.long_runs import KEPT, LOSSLESS, METHODS, REFERENCE, LongRun, read

WINDOW = 100  # steps that a point is the mean of


def smooth(losses: Sequence[float]) -> Any:
    """Return means over ``WINDOW`` steps, one for each step that has so many before it."""
    return numpy.convolve(losses, numpy.full(WINDOW, 1 / WINDOW), "valid")


def draw(runs: Sequence[LongRun]) -> Any:
    """Draw a line of panels for each seed: losses, and differences from ZeRO-2, of runs that have ended.

    A method has one color. Updates without loss are dashed: what they are exact to is below them.
    """
    runs = [run for run in runs if run.done]
    seeds = sorted(run.seed for run in runs if run.method == REFERENCE)
    drawing = figure.Figure(figsize=(12, 4.2 * len(seeds)), layout="constrained")
    lines = dict[str, Any]()
    for panels, seed in zip(drawing.subplots(len(seeds), 2, squeeze=False), seeds, strict=True):
        mine = {run.method: run for run in runs if run.seed == seed}
        reference = smooth(mine[REFERENCE].losses)
        steps = range(WINDOW, WINDOW + len(reference))
        for number, method in enumerate(METHODS):
            if method not in mine:
                continue
            losses = smooth(mine[method].losses)
            style = {"color": f"C{number}", "linewidth": 1.0, "linestyle": "--" if method == LOSSLESS else "-"}
            (lines[method],) = panels[0].plot(steps, losses, **style)
            panels[1].plot(steps, 100 * (losses / reference - 1), **style)
        on = mine[REFERENCE].device
        panels[0].set(xlabel="step", ylabel="loss", yscale="log", title=f"seed {seed}, on {on}: training loss")
        panels[0].yaxis.set_major_formatter("{x:g}")
        panels[0].yaxis.set_minor_formatter("{x:g}")
        panels[1].set(xlabel="step", ylabel=f"loss, % from {REFERENCE}", title=f"seed {seed}: difference")
    shown = {method: lines[method] for method in METHODS if method in lines}
    drawing.legend(shown.values(), shown.keys(), loc="outside upper center", ncols=4)
    return drawing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, default=KEPT, help="files of runs")
    parser.add_argument("--picture", type=Path, default=KEPT.with_suffix(".png"), help="where it goes")
    args = parser.parse_args()
    runs = read(args.runs)
    if not any(run.done and run.method == REFERENCE for run in runs):
        parser.error(f"{args.runs} has no run of {REFERENCE} that has ended.")
    draw(runs).savefig(args.picture, dpi=110)


if __name__ == "__main__":
    main()
