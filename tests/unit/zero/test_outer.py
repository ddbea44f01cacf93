# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer between groups trains as a copy of the model for each group, and ten lines, do."""

from dataclasses import replace
from typing import Any

import pytest

from tests.harness import outer_oracle
from tests.harness.training import SMALL, Job

ALL = ("NNI", "NII", "INI", "III")
JOB = Job(steps=7, zero=SMALL, empty=False)


def check(rows: list[Any], bound: float = 2e-6) -> None:
    for row in rows:
        assert row.weights < bound and row.losses < bound and row.anchors and row.together, row


@pytest.mark.parametrize("steps", [1, 3, 10])
def test_it_is_ten_lines(ranks: Any, steps: int) -> None:
    for rows in ranks(4).run(outer_oracle.beside, ALL, JOB, {"steps": steps}, 2):
        check(rows)


ODD = replace(JOB, accumulation=3, optimizer="Adam", groups=2, frozen=(1,), skipped=((4, 0), (10, 2)), empty=True)
CASES = [
    (4, 2, ALL, JOB, {"steps": 2, "nesterov": False, "lr": 1.0}),
    (4, 2, ALL, ODD, {"steps": 3}),
    (6, 2, ("NII", "III"), ODD, {"steps": 2, "warmup_steps": 2}),  # three groups
    (4, 1, ("NNI", "III"), ODD, {"steps": 3}),  # four
    (4, 4, ("NII", "III"), ODD, {"steps": 2}),  # one
    (4, 2, ALL, ODD, {"steps": 4, "fragments": 2}),
    (4, 2, ALL, replace(JOB, steps=12), {"steps": 4, "fragments": 2, "delay": 1}),
    (6, 2, ("INI", "NII"), replace(JOB, steps=12), {"steps": 6, "fragments": 3, "delay": 1, "warmup_steps": 1}),
    (4, 2, ("NII", "III"), replace(JOB, steps=9), {"steps": 4, "delay": 3, "offload": "cpu"}),
]


def named(value: object) -> str | None:
    """Name a case."""
    if isinstance(value, Job):
        return f"{value.optimizer} {value.steps}"
    return None if isinstance(value, int) else " ".join(map(str, value if isinstance(value, tuple) else [value]))


@pytest.mark.parametrize("n, group_size, names, job, outer", CASES, ids=named)
def test_it_is_ten_lines_in_all_cases(
    ranks: Any, n: int, group_size: int, names: tuple[str, ...], job: Job, outer: dict[str, Any]
) -> None:
    for rows in ranks(n).run(outer_oracle.beside, names, job, outer, group_size):
        check(rows)


def test_each_step_with_rate_1_is_the_strategy_alone(ranks: Any) -> None:
    job = replace(JOB, accumulation=2, clipping=0.0)
    outer = {"steps": 1, "lr": 1.0, "momentum": 0.0, "nesterov": False}
    for rows in ranks(4).run(outer_oracle.against, ALL, job, outer, None):
        assert all(row.weights < 2e-6 and row.anchors for row in rows), rows


@pytest.mark.parametrize("bits, bound", [(16, 0.01), (8, 0.02), (4, 0.2)])
def test_few_bits_are_close_and_groups_agree_to_the_bit(ranks: Any, kernels: bool, bits: int, bound: float) -> None:
    outer = {"steps": 2, "fragments": 2}
    for rows in ranks(4).run(outer_oracle.against, ALL, JOB, {**outer, "bits": bits}, outer):
        assert all(0 < row.weights < bound and row.anchors for row in rows), rows


ADAM = replace(JOB, optimizer="Adam")
OUTER = {"steps": 2, "fragments": 2}
KINDS = [  # what is trained, beside what, and how far apart they may be
    (replace(JOB, dtype="bf16"), JOB, 0.05),
    (replace(JOB, dtype="fp16", overflow=((3, 1),)), replace(JOB, overflow=((3, 1),), dtype="fp16"), 0.05),
    (replace(ADAM, zero={**SMALL, "offload_optimizer": {"device": "cpu"}}), ADAM, 2e-6),
    (replace(ADAM, zero={**SMALL, "offload_optimizer": {"device": "cpu"}}, dtype="bf16"), ADAM, 0.2),
]


@pytest.mark.parametrize("job, beside, bound", KINDS, ids=named)
def test_other_precisions_and_places(ranks: Any, job: Job, beside: Job, bound: float) -> None:
    for rows in ranks(4).run(outer_oracle.against, ALL, job, OUTER, OUTER, beside):
        assert all(row.weights < bound and row.anchors and row.finite for row in rows), rows
        skipped = [False] if job.dtype == "fp16" else []
        assert all([taken for taken in row.applied if not taken] == skipped for row in rows), rows


MUON = replace(JOB, optimizer="Muon", accumulation=2)


def test_strategies_are_alike_with_muon(ranks: Any) -> None:
    for rows in ranks(4).run(outer_oracle.alike, ALL, MUON, OUTER):
        assert max(rows.values()) < 1e-2, rows  # it iterates in bf16


@pytest.mark.parametrize("job", [MUON, replace(MUON, optimizer="Adam", dtype="bf16")], ids=named)
def test_before_the_first_outer_step_a_group_trains_as_if_alone(ranks: Any, job: Job) -> None:
    apart = ranks(4).run(outer_oracle.trained, ALL, job, 2, {"steps": 100})
    alone = ranks(2).run(outer_oracle.trained, ALL, job, 2, None)
    assert apart[:2] == alone and apart[2] == apart[3] != apart[0]


@pytest.mark.parametrize("zero_init", ["plain", "config"])
def test_a_model_that_was_built_sharded(ranks: Any, zero_init: str) -> None:
    job = replace(JOB, zero_init=zero_init)
    outer = {"steps": 1, "lr": 1.0, "momentum": 0.0, "nesterov": False}
    for rows in ranks(4).run(outer_oracle.against, ("INI", "III"), replace(job, clipping=0.0), outer, None):
        assert all(row.weights < 2e-6 and row.anchors for row in rows), rows
