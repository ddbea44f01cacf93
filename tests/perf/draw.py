# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws the losses of the long study, from its files: ``python -m tests.perf.draw``."""

from typing import Any

import numpy
from matplotlib import figure

from tests.perf.lib.records import RESULTS
from tests.perf.lib.studies import STUDIES, read_runs

WINDOW = 100  # steps that a point of a training is the mean of


def training() -> Any:
    """Draw losses of the long study, and differences from ZeRO-2, for each seed.

    Updates without loss are dashed: the losses that they equal are below them.
    """
    study = STUDIES["long"]
    runs = read_runs(study)
    seeds = sorted(run.seed for run in runs if run.method == study.reference)
    drawing = figure.Figure(figsize=(12, 4.2 * len(seeds)), layout="constrained")
    for (left, right), seed in zip(drawing.subplots(len(seeds), 2, squeeze=False), seeds, strict=True):
        mean = numpy.full(WINDOW, 1 / WINDOW)
        mine = {run.method: numpy.convolve(run.losses, mean, "valid") for run in runs if run.seed == seed}
        reference = mine[study.reference]
        at = range(WINDOW, WINDOW + len(reference))
        for number, method in enumerate(study.methods):
            if method in mine:
                style = {"color": f"C{number}", "linewidth": 1.0, "linestyle": "--" if "exact" in method else "-"}
                left.plot(at, mine[method], **style, label=method)
                right.plot(at, 100 * (mine[method] / reference - 1), **style)
        left.set(xlabel="step", ylabel="loss", yscale="log", title=f"seed {seed}: training loss")
        right.set(xlabel="step", ylabel=f"loss, % from {study.reference}", title=f"seed {seed}: difference")
    drawing.legend(*left.get_legend_handles_labels(), loc="outside upper center", ncols=4)
    return drawing


if __name__ == "__main__":
    training().savefig(RESULTS / "long_training.png", dpi=110)
