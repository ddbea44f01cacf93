# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sentences of a report, and the operations of DeepSpeed that a recorder records."""

import inspect
from typing import Any

import pytest
import torch
from deepspeed.comm.torch import TorchBackend

from deepspeed_ext.tools.report import page
from deepspeed_ext.tools.report.recorder import OPERATIONS

pytestmark = pytest.mark.quick


def choice(strategy: str, step: float, gb: float = 1.0, now: bool = False, fits: bool | None = None) -> dict[str, Any]:
    return {"strategy": strategy, "step": step, "gb": gb, "now": now, "fits": fits}


def hop(name: str, exposed: float, rate: float = 1e8, probed: float = 1e8, nbytes: float = 1e6) -> dict[str, Any]:
    row = {"hop": name, "bytes": nbytes, "formula_bytes": 1e6, "busy": exposed, "exposed": exposed}
    return {**row, "predicted_exposed": exposed, "rate": rate, "probed_rate": probed}


def report(**changed: Any) -> dict[str, Any]:
    """A report without findings, except for the changed values."""
    parts = {"compute": 0.9, "within": 0.02, "between": 0.03, "update": 0.02, "other": 0.03}
    usual: dict[str, Any] = {
        "training": {"called": "N-I-G (p=N, g=I, os=G)", "ranks": 4, "groups": 2, "group_size": 2},
        "steps": {"seconds": [1.0, 1.0], "overhead": 0.001},
        "parts": [{"part": part, "seconds": seconds, "predicted": seconds} for part, seconds in parts.items()],
        "hops": [hop("within", 0.02), hop("between", 0.03)],
        "memory": [{"state": "parameters", "bytes": 100, "formula": 100}],
        "ranks": [{"rank": rank, "host": "node", "compute": 0.9} for rank in range(4)],
        "choices": [choice("NIG", 1.0, now=True), choice("IIG", 1.2)],
        "findings": [],
    }
    return {**usual, **changed}


FASTER = [choice("ZeRO-3", 2.0, now=True), choice("IIG", 1.2, 1.1), choice("NIG", 1.19, 3.0)]
FINDINGS: list[tuple[dict[str, Any], str]] = [
    (
        {"choices": FASTER},
        "I-I-G is predicted to be faster: 1.2 s instead of 2 (1.1 GB of model states on each rank, now 1).",
    ),
    (
        {"choices": [choice("NIG", 1.0, now=True), choice("NIG + LoCo", 0.5)]},
        "N-I-G + LoCo would be faster still, with gradients or updates in 4 bits: 0.5 s instead of 1",
    ),
    (
        {"hops": [hop("within", 0.3, rate=1e7)]},
        "Transfers within groups reach 10 MB/s per rank, but the probe measured 100",
    ),
    ({"hops": [hop("between", 0.3)]}, "The step waits for transfers between groups for 30% of its time."),
    (
        {"hops": [hop("between", 0.0, nbytes=3e6)]},
        "A rank receives 3 MB from other groups in a step; the formula predicts 1.",
    ),
    (
        {"memory": [{"state": "gradients", "bytes": 3e9, "formula": 1e9}]},
        "This rank holds 3 GB of gradients; the strategy needs 1.",
    ),
    (
        {"ranks": [{"rank": r, "host": f"node{r}", "compute": 0.9 + 0.9 * (r == 3)} for r in range(4)]},
        "Rank 3 on node3 computes 2 times as long as the median rank",
    ),
    (
        {"groups": [{"waiting": w, "micro_batches": 2, "balanced": 3 - (w == 0)} for w in (0.0, 0.5)]},
        'Groups wait for the slowest 0, 0.5 s per step: paro_micro_batches "measured", or [2, 3] instead of [2, 2],',
    ),
    ({"steps": {"seconds": [1.0], "overhead": 0.05}}, "Recorded steps took 5.0% longer than other steps"),
    ({"parts": [{"part": "other", "seconds": 0.4, "predicted": None}]}, "40% of the step is unaccounted for; likely"),
]


@pytest.mark.parametrize("changed, said", FINDINGS)
def test_what_stands_out_is_said(changed: dict[str, Any], said: str) -> None:
    row = page.findings(report(**changed))
    assert any(one.startswith(said) for one in row), row


def test_where_nothing_stands_out_it_says_so() -> None:
    for one in (report(), report(choices=[choice("IIG", 2.0, now=True), choice("NIG", 1.0, fits=False)])):
        assert page.findings(one) == ["No strategy is predicted to be faster by more than 5%."]


def test_a_paragraph_has_the_step_its_parts_and_a_prediction() -> None:
    assert page.paragraph(report(findings=["First.", "Second.", "Third."])) == (
        "A step of N-I-G (p=N, g=I, os=G) takes 1 s on 4 ranks in 2 group(s) of 2: 0.9 s compute, 0.02 s exposed "
        "within groups, 0.03 s exposed between groups, 0.02 s the update, and 0.03 s other. The planner "
        "predicts 1 s. First. Second."
    )


def test_operations_have_the_arguments_of_deepspeeds_backend() -> None:
    for name, operation in OPERATIONS.items():
        method = getattr(TorchBackend, name)
        # DeepSpeed's decorator keeps the function that it wraps in its closure.
        inner = inspect.getclosurevars(method).nonlocals.get("func", method)
        assert list(inspect.signature(inner).parameters)[1:] == list(operation.arguments), name


def test_bytes_of_operations_are_those_that_a_rank_receives() -> None:
    full, part = torch.empty(400, dtype=torch.uint8), torch.empty(100, dtype=torch.uint8)

    def received(name: str, *args: Any) -> float:
        return OPERATIONS[name].received(OPERATIONS[name].bind(args, {}), 4)

    assert received("all_gather_into_tensor", full, part) == 300
    assert received("reduce_scatter_tensor", part, full) == 300
    assert received("all_reduce", full) == 600
    assert received("all_gather", [part] * 4, part) == 300
    assert received("broadcast", full, 0) == 300
    assert received("recv", full, 1) == 400 and received("send", full, 1) == 0
