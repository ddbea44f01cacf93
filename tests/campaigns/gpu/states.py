# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of experiment T10: states that are offloaded or sent in few bits, and checkpoints, on each of several ranks.
The cases are those of the simulated device; here the device is real, so its bits are not the host's. Values in few
bits are compared with an unrounded run, with wide bounds; all others with stock DeepSpeed."""

import contextlib
from dataclasses import replace
from functools import partial
from typing import Any

from tests.harness import outer_oracle, snapshots, training
from tests.harness.device_on_host import cases
from tests.harness.training import placed

EXACT, ROUNDED = 1e-5, 0.5  # of weights, which are about 1
WHOLE = ("offload_optimizer", "overlap_comm")  # keys that round nothing
OUTER = ("III", "NII", "INI", "NNI")
RESUMED: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    ("Adam", {}, ("NIG", "IIG")),
    ("Adam", {"zeropp_loco_param": {}, **cases.PINNED}, ("NII", "IGG")),
    ("Adam", {"zeropp_loco_param": {}, "paro_quantized_updates": {}}, ("NIG", "ING")),
    ("Muon", cases.PAGEABLE, ("NIG", "GNG")),
)


def check(setup: Any) -> None:
    together = [title for title, provided in cases.OPTIONS.items() if outer_oracle.KEY not in provided.zero]
    for title in together[: 2 if setup.small else None]:
        for name in cases.OPTIONS[title].strategies:
            _train(setup, title, name)
    for name in OUTER[: 1 if setup.small else None]:
        for keys in ({"fragments": 3}, {"fragments": 3, "offload": "cpu"}, {"delay": 1}):
            _train_apart(setup, name, {"steps": 3, **keys})
    for optimizer, zero, names in RESUMED[: 1 if setup.small else None]:
        job = snapshots.job_of("bf16", zero, optimizer)
        for name in names:
            with snapshots.shared_folder() as folder:
                results = cases.resumed(job, folder, name, contextlib.nullcontext, contextlib.nullcontext)
            title = f"{name}, {optimizer} {' '.join(zero)}: resumed is uninterrupted"
            setup.report.check(title, not (results.loaded or results.resumed or results.elsewhere))
    for pinned in (True, False) if setup.cuda else ():
        for name in ("NIG", "IIG"):
            title = f"{name}, {'pinned' if pinned else 'pageable'}: offloaded and reloaded"
            setup.report.check(title, cases.offloaded(name, "Muon", pinned, {}) == (name, True, ("cpu", True), "cuda"))


def _train_apart(setup: Any, name: str, outer: dict[str, Any]) -> None:
    """Train with an outer optimizer, and compare with an oracle of ten lines in one process."""
    (row,) = outer_oracle.beside([name], replace(cases.OPTIONS["outer"].job, optimizer="SGD", steps=7), outer, 2)
    title = f"{name}, outer {outer}"
    setup.report.figure(f"{title}: largest difference of weights", row.weights)
    setup.report.check(title, row.weights <= EXACT and row.anchors and row.together)


def _train(setup: Any, title: str, name: str) -> None:
    provided = cases.OPTIONS[title]
    places: list[tuple[str, str]] = []
    ours = training.train(provided.job, placed(name, **provided.zero), look=partial(cases.look, places))
    full = {key: value for key, value in provided.zero.items() if key in WHOLE}
    # Stock DeepSpeed's Muon is another: it knows no groups.
    oracle = placed("NNN", **full) if provided.job.optimizer == "Muon" else {"stage": 2 + (name[0] != "N"), **full}
    row = training.difference(name, ours, training.train(provided.job, oracle), "")
    setup.report.figure(f"{name}, {title}: largest difference of weights", row.weights)
    near = row.weights <= (EXACT if provided.stock else ROUNDED)  # not of what is not a number
    setup.report.check(f"{name}, {title}", near and row.replicas_equal and row.same_decisions)
    optimizers = "cpu" if "offload_optimizer" in provided.zero else setup.device
    setup.report.check(f"{name}, {title}: places", places == [(setup.device, optimizers)])
