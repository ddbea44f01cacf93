# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parity of every strategy with stock DeepSpeed: the oracle runs in the same processes.

``harness/parity_table.py`` has the options that are combined; ``test_parity_cases.py`` has cases beyond them.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_ext.comm import collectives
from tests.harness import networks, parity_table, training
from tests.harness.combinations import Row
from tests.harness.training import SMALL, Difference, Job, placed


def rows(tier: str) -> Iterator[Any]:
    """Yield the rows of a tier; rows with all options are quick."""
    everything = {kind: parity_table.row_name(kind, table.everything()) for kind, table in parity_table.TABLES.items()}
    for kind, name, strategies in parity_table.cases(tier):
        marks = [pytest.mark.quick] * (name == everything[kind]) + [pytest.mark.deep] * (tier == "deep")
        yield pytest.param(kind, name, strategies, marks=marks, id=f"{tier}, {kind}: {name}")


@pytest.mark.parametrize("kind, name, strategies", [*rows("first"), *rows("deep")])
def test_parity(ranks: Any, kind: str, name: str, strategies: tuple[str, ...]) -> None:
    row = parity_table.named_row(kind, name)
    world = parity_table.merge_changes(kind, row)["world"]
    training.check(ranks(world).run(compared, kind, row, strategies)[0], **parity_table.bounds(row))


@contextlib.contextmanager
def nan_until_written(backend: str = "nccl") -> Iterator[None]:
    """Use a backend's messages and collectives, and fill memory with NaN until it is written, in this context."""
    torch.use_deterministic_algorithms(True)  # fills it
    try:
        with mock.patch.object(collectives, "backend_of", lambda group: backend):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def job_of(kind: str, row: Row) -> Job:
    fields = parity_table.job_fields(kind, row)
    if "network" in fields:
        fields["network"] = getattr(networks, fields["network"])
    return Job(**fields)


def compared(kind: str, row: Row, strategies: Sequence[str]) -> list[Difference]:
    table, settings = parity_table.TABLES[kind], parity_table.merge_changes(kind, row)
    with nan_until_written() if "nan" in settings else contextlib.nullcontext():
        stage = 3 if row["network"] == "mixture" else 2  # which would wait for parameters that only some ranks use
        stock = training.train(job_of(kind, parity_table.stock_row(kind, row)), {"stage": stage})
        assert stock.weights.isfinite().all()
        assert all(stock.applied) == (row["overflow"] == "finite")
        return [
            training.beside(stock, name, job_of(kind, table.with_strategy(row, name)), placed(name, settings["group"]))
            for name in strategies
        ]


@pytest.mark.parametrize("kind", ["N", "I, G"])
def test_uninitialized_memory_is_never_used(ranks: Any, kind: str) -> None:
    training.check(ranks(6).run(nan_case, parity_table.STRATEGIES[kind][1::2])[0])


def nan_case(names: tuple[str, ...]) -> list[Difference]:
    """Train with memory that is NaN until it is written, and messages as on gloo."""
    with nan_until_written("gloo"):
        return training.compare(Job(accumulation=2, steps=2, zero=SMALL), 3, names)
