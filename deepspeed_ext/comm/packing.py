# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Packs parts of buckets, padded to lengths that are cheap to send."""

from collections.abc import Iterable, Sequence

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

# Elements that take 16 bytes or more in any dtype. NCCL copies 16 bytes at a time if all its pointers are multiples of
# 16 bytes, else element by element, or byte by byte in a gather. Its pointers are the starts of parts of buckets.
WIDEST_LOAD = 16


def record_on_current_stream(tensor: Tensor) -> Tensor:
    """Return a tensor of another stream; the allocator does not reuse its memory before the current stream has read
    it."""
    if not get_accelerator().is_synchronized_device():
        tensor.record_stream(get_accelerator().current_stream())
    return tensor


def add_to(total: Tensor, part: Tensor) -> None:
    """Add a received part on the device to a total on the device or, with an offloaded optimizer, on the host."""
    if total.device == part.device:
        total.add_(part)
    else:  # adding on the host would be slow
        total.copy_(total.to(part.device, non_blocking=True).add_(part), non_blocking=True)


def fill_up(numel: int, multiple: int) -> int:
    """Return ``numel`` rounded up to a multiple."""
    return -(-numel // multiple) * multiple


def concat_padded(pieces: Iterable[Tensor], lengths: Iterable[int]) -> Tensor:
    """Concatenate pieces (1D, of one dtype), each padded with zeros to its length; by one copy."""
    parts: list[Tensor] = []
    for piece, length in zip(pieces, lengths, strict=True):
        parts.append(piece)
        if length > piece.numel():
            parts.append(piece.new_zeros(1).expand(length - piece.numel()))
    return torch.cat(parts)


def align(flat: Tensor, multiple: int) -> Tensor:
    """Return ``flat`` (1D) padded with zeros to a multiple, and starting at one; copies only if needed."""
    length = fill_up(flat.numel(), multiple)
    if length == flat.numel() and not flat.storage_offset() % multiple:
        return flat
    return concat_padded([flat], [length])


def concat_aligned(windows: Sequence[Tensor], multiple: int) -> Tensor:
    """Return windows side by side, row by row, padded with zeros to a multiple at the end: 1D.

    Args:
        windows: (rows, width) each, of any strides, of one dtype and device.
        multiple: multiple in elements.
    """
    if len(windows) == 1:
        return align(windows[0].reshape(-1), multiple)
    rows = windows[0].shape[0]
    numel = rows * sum(window.shape[1] for window in windows)
    padded = windows[0].new_empty(fill_up(numel, multiple))
    if numel:
        torch.cat(list(windows), dim=1, out=padded[:numel].view(rows, -1))
    padded[numel:].zero_()  # stale numbers could change the scales of quantized blocks
    return padded


def align_rows(windows: Sequence[Tensor], dtype: torch.dtype, device: object, multiple: int) -> Tensor:
    """Return windows side by side, each row padded with zeros to a multiple: contiguous, and a view if possible.

    Args:
        windows: (rows, width) each, of any strides, on any device.
        dtype, device: dtype and device of the result.
        multiple: multiple in elements.
    """
    rows, width = windows[0].shape[0], sum(window.shape[1] for window in windows)
    if len(windows) == 1 and not width % multiple:
        padded = windows[0].to(device=device, dtype=dtype).contiguous()  # type: ignore[call-overload]
        if not padded.storage_offset() % multiple:
            return padded
    padded = torch.empty(rows, fill_up(width, multiple), dtype=dtype, device=device)  # type: ignore[call-overload]
    start = 0
    for window in windows:
        padded[:, start : start + window.shape[1]].copy_(window)
        start += window.shape[1]
    padded[:, width:].zero_()  # stale numbers could change the scales of quantized blocks
    return padded
