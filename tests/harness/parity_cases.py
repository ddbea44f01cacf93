# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Runs rows of ``parity_table``; everything here runs inside rank processes."""

import contextlib
from collections.abc import Iterator, Sequence
from unittest import mock

import torch

from deepspeed_ext.comm import collectives
from tests.harness import networks, parity_table, training
from tests.harness.covering import Row
from tests.harness.training import Difference, Job


@contextlib.contextmanager
def nan_until_written(backend: str = "nccl") -> Iterator[None]:
    """Within this context, messages and collectives are as on a backend, and memory is NaN until it is written."""
    torch.use_deterministic_algorithms(True)  # fills it
    try:
        with mock.patch.object(collectives, "backend_of", lambda group: backend):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


def job(kind: str, row: Row) -> Job:
    """Return the job of a row."""
    fields = parity_table.job_fields(kind, row)
    if "network" in fields:
        fields["network"] = getattr(networks, fields["network"])
    return Job(**fields)


def compared(kind: str, row: Row, strategies: Sequence[str]) -> list[Difference]:
    """Train stock and strategies with a row's options; the differences."""
    table, given = parity_table.TABLES[kind], parity_table.merged(kind, row)
    with nan_until_written() if "nan" in given else contextlib.nullcontext():
        stage = {"stage": parity_table.stock_stage(row)}
        oracle = training.stock(job(kind, parity_table.stock_row(kind, row)), stage)
        assert oracle.weights.isfinite().all()
        assert all(oracle.applied) == (row["overflow"] == "finite")
        return [
            training.beside(
                oracle, name, job(kind, table.with_strategy(row, name)), training.placed(name, given["group"])
            )
            for name in strategies
        ]
