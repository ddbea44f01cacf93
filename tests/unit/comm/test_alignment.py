# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Messages for NCCL start at multiples of 16 bytes for any number of ranks; otherwise NCCL copies single elements."""

from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_ext.comm import collectives, layout
from deepspeed_ext.comm.packing import align_rows
from deepspeed_ext.comm.spans import Span
from tests.harness import calls, training


@pytest.mark.quick
def test_windows_start_at_multiples_of_16_elements() -> None:
    for rows in range(2, 4097):
        for most in (500_000_000, 1 << 24):
            windows = layout.windows(Span(0, 3 * most // rows + 5), rows, most)
            assert sum(width for _, width in windows) == 3 * most // rows + 5
            assert all(start % 16 == 0 and width * rows <= most for start, width in windows)


@pytest.mark.quick
@pytest.mark.parametrize("windows", [[(0, 32)], [(1, 32)], [(0, 30)], [(0, 7), (9, 25)]], ids=str)
def test_rows_are_padded_to_16_elements(windows: list[tuple[int, int]]) -> None:
    row = torch.arange(1.0, 65.0).view(1, 64)
    pieces = [row[:, start : start + width] for start, width in windows]
    padded, concatenated = align_rows(pieces, torch.float32, "cpu", 16), torch.cat(pieces, dim=1)
    assert padded.is_contiguous() and not padded.storage_offset() % 16 and padded.shape == (1, 32)
    data, padding = padded.tensor_split([concatenated.shape[1]], dim=1)
    assert torch.equal(data, concatenated) and not padding.any()
    assert (padded.data_ptr() == row.data_ptr()) == (windows == [(0, 32)])  # a view where that can be


@pytest.mark.parametrize("names", [training.REPLICATED, training.PARTITIONED], ids=["p=N", "p=I,G"])
def test_message_parts_start_at_multiples_of_16_bytes(ranks: Any, names: tuple[str, ...]) -> None:
    for begins in ranks(6).run(begins_case, names):
        assert begins.keys() == set(names)
        for name, operations in begins.items():
            assert operations and all(not remainders - {0} for remainders in operations.values()), (name, operations)


def begins_case(names: tuple[str, ...]) -> dict[str, dict[str, set[int]]]:
    """Train two groups of three ranks as with NCCL; return by strategy and collective the offsets of the parts in
    their allocations: bytes modulo 16."""
    offsets: dict[str, dict[str, set[int]]] = {}

    def note(group: Any, operation: str, collective: Any, *arguments: Any) -> None:
        tensors = [argument for argument in arguments if isinstance(argument, torch.Tensor)]
        smallest = min(tensor.numel() for tensor in tensors)
        for tensor in tensors:
            assert tensor.is_contiguous() and tensor.numel()
            step = tensor.numel() if operation == "all_reduce" else smallest
            begins = (tensor.storage_offset() + part for part in range(0, tensor.numel(), step))
            offsets[name].setdefault(f"{group.name} {operation}", set()).update(
                begin * tensor.element_size() % 16 for begin in begins
            )

    job = training.Job(dtype="bf16", steps=1, accumulation=2, groups=2, empty=False, zero=training.SMALL)
    with (
        mock.patch.object(collectives, "backend_of", lambda group: "nccl"),
        calls.before(collectives.Collectives, "start", note),
    ):
        for name in names:
            offsets[name] = {}
            training.train(job, training.placed(name, 3))
    return offsets
