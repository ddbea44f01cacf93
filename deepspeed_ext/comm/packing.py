# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parts of buckets, filled up to lengths that are cheap to send."""

from collections.abc import Iterable, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

# Elements that take 16 bytes or more in any dtype. NCCL copies 16 bytes at a time if all its pointers are multiples of
# that, else element by element, or byte by byte in a gather. Pointers are where parts of buckets begin.
WIDEST_LOAD = 16


def record_on_current_stream(tensor: Tensor) -> Tensor:
    """Return a tensor that another stream has made; its memory is not given out again before the current one has read
    it."""
    if not get_accelerator().is_synchronized_device():
        tensor.record_stream(get_accelerator().current_stream())
    return tensor


def add_to(total: Tensor, part: Tensor) -> None:
    """Add what has arrived on the device to what is held there, or of an offloaded optimizer on the host."""
    if total.device == part.device:
        total.add_(part)
    else:  # adding on the host is slow
        total.copy_(total.to(part.device, non_blocking=True).add_(part), non_blocking=True)


def fill_up(numel: int, multiple: int) -> int:
    """Return the smallest multiple that is not below ``numel``."""
    return -(-numel // multiple) * multiple


def joined(pieces: Iterable[Tensor], lengths: Iterable[int]) -> Tensor:
    """Return pieces (1D, of one dtype) one after the other, each filled up with zeros to its length; by one copy."""
    filled: list[Tensor] = []
    for piece, length in zip(pieces, lengths, strict=True):
        filled.append(piece)
        if length > piece.numel():
            filled.append(piece.new_zeros(1).expand(length - piece.numel()))
    return torch.cat(filled)


def aligned(flat: Tensor, multiple: int) -> Tensor:
    """Return ``flat`` (1D) filled up with zeros to a multiple; a copy only where it is needed."""
    length = fill_up(flat.numel(), multiple)
    if length == flat.numel() and not flat.storage_offset() % multiple:
        return flat
    return joined([flat], [length])


def joined_and_aligned(windows: Sequence[Tensor], multiple: int) -> Tensor:
    """Return rows side by side, one row after the other, filled up with zeros to a multiple at the end: 1D.

    Args:
        windows: (rows, width) each, of any strides, of one dtype and device.
        multiple: of elements.
    """
    if len(windows) == 1:
        return aligned(windows[0].reshape(-1), multiple)
    rows = windows[0].shape[0]
    numel = rows * sum(window.shape[1] for window in windows)
    filled = windows[0].new_empty(fill_up(numel, multiple))
    if numel:
        torch.cat(list(windows), dim=1, out=filled[:numel].view(rows, -1))
    filled[numel:].zero_()
    return filled


def aligned_rows(windows: Sequence[Tensor], dtype: torch.dtype, device: object, multiple: int) -> Tensor:
    """Return rows side by side, filled up with zeros, each to a multiple: contiguous, and a view where that can be.

    Args:
        windows: (rows, width) each, of any strides, on any device.
        dtype, device: of the result.
        multiple: of elements.
    """
    rows, width = windows[0].shape[0], sum(window.shape[1] for window in windows)
    if len(windows) == 1 and not width % multiple:
        filled = windows[0].to(device=device, dtype=dtype).contiguous()  # type: ignore[call-overload]
        if not filled.storage_offset() % multiple:
            return filled
    filled = torch.empty(rows, fill_up(width, multiple), dtype=dtype, device=device)  # type: ignore[call-overload]
    start = 0
    for window in windows:
        filled[:, start : start + window.shape[1]].copy_(window)
        start += window.shape[1]
    filled[:, width:].zero_()
    return filled
