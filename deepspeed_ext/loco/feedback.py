# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Error feedback: each rank keeps the quantization errors of gradients until they are sent.

Note [Bucket errors]
    Each bucket has its own error, in the bucket's layout, so that one pass over memory compensates, quantizes, and
    updates. A bucket is identified by its contents. If buckets are sent between groups once per step, and under IGG,
    their contents are the same in every step. If they are otherwise sent in every micro-batch (g = G), their contents
    are the same as long as the model uses the same parameters in the same order. If contents change, errors move to
    the buckets that now have their elements, which costs a decoding and an encoding.

    An updated error replaces the committed one when its step has been applied to the weights; until then both exist.
    If the step is skipped, or its gradients are dropped, the old error stays. A checkpoint saves the committed error,
    because a run that loads it recomputes the gradients of an unfinished accumulation. An outer optimizer uses a
    reduced fragment in a later step, and a checkpoint saves the fragment. So it commits the error first (``commit``),
    and a checkpoint saves the updated error.

    An error e is a moving average, with weight b of the old one. In later steps it is added to gradients
    b^0 + b^1 + ... = 1/(1-b) times, so the unsent amount is e/(1-b). It stays the same when errors move to settings
    with another b.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import ErrorState
from deepspeed_ext.comm.spans import Contents, ShardSpan, Span
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.loco import reference
from deepspeed_ext.loco.reference import Packing
from deepspeed_ext.loco.sampling import StepReport

T = TypeVar("T")
_Positions = list[tuple[ShardSpan, Span]]  # spans, each with its position in a bucket


def split_rows(flat: Tensor, splits: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """Return the parts of a bucket as rows of as few matrices as possible: one if all are equal, else one for each.

    Args:
        flat: 1D: concatenated parts.
        splits: elements of the bucket's parts; empty parts are left out.
        sizes: elements of ``flat`` for each part.
    """
    if len(set(splits)) == 1:
        return [flat.view(len(sizes), sizes[0])] if splits[0] else []
    return [row.view(1, -1) for row, split in zip(flat.split(list(sizes)), splits, strict=True) if split]


@dataclass
class _Error:
    """The error of one bucket, 1D, uint8 or bf16; None for zeros."""

    splits: Sequence[int]  # elements of the bucket's parts, padding included
    committed: Tensor | None = None
    updated: Tensor | None = None  # replaces ``committed`` when the current step is applied


class _SpanErrors(NamedTuple):
    """Errors of a span that is in no bucket now; in fp32, so that they stay exact until a bucket has the span."""

    span: ShardSpan
    committed: Tensor
    updated: Tensor | None  # as in ``_Error``

    def part(self, span: ShardSpan) -> "_SpanErrors":
        """Return the errors of a span inside this one."""
        window = span.elements.shifted(-self.span.start)
        return _SpanErrors(span, window.of(self.committed), None if self.updated is None else window.of(self.updated))

    def after_step(self, applied: bool) -> "_SpanErrors":
        """Return the errors after a step."""
        return _SpanErrors(self.span, self.updated if applied and self.updated is not None else self.committed, None)


class SpanMap(Generic[T]):
    """A map from disjoint spans to values, in the order of elements.

    It finds overlaps without visiting all spans; at scale there are a million.
    """

    def __init__(self) -> None:
        self._rows: dict[tuple[int, int], list[tuple[ShardSpan, T]]] = {}

    def add(self, span: ShardSpan, value: T) -> None:
        """Add a span that overlaps none of the others; an empty one is ignored."""
        if span.numel:
            row = self._rows.setdefault((span.buffer, span.row), [])
            row.insert(bisect_left(row, span.start, key=_start), (span, value))

    def overlapping(self, span: ShardSpan) -> list[tuple[ShardSpan, T]]:
        """Return the spans that overlap ``span``, with their values."""
        row = self._rows.get((span.buffer, span.row), [])
        return row[slice(*_bounds(row, span))]

    def pop_overlapping(self, span: ShardSpan) -> list[tuple[ShardSpan, T]]:
        """Remove and return the spans that overlap ``span``, with their values."""
        row = self._rows.get((span.buffer, span.row), [])
        bounds = slice(*_bounds(row, span))
        removed = row[bounds]
        del row[bounds]
        return removed

    def clear(self) -> None:
        """Remove all spans."""
        self._rows.clear()

    def __iter__(self) -> Iterator[tuple[ShardSpan, T]]:
        return (pair for row in self._rows.values() for pair in row)


def _start(pair: tuple[ShardSpan, object]) -> int:
    return pair[0].start


def _bounds(row: list[tuple[ShardSpan, T]], span: ShardSpan) -> tuple[int, int]:
    """Return the range of positions in a row with spans that overlap ``span``.

    Of the spans that start before it, only the last can reach into it.
    """
    if not span.numel:
        return 0, 0
    first = bisect_right(row, span.start, key=_start)
    if first and row[first - 1][0].elements.stop > span.start:
        first -= 1
    return first, bisect_left(row, span.elements.stop, lo=first, key=_start)


@dataclass
class ErrorFeedback(ErrorState):
    """The error feedback of one hop: the errors of all its buckets.

    Attributes:
        settings: quantization and averaging of errors.
        device: device of the errors; None for that of the gradients.
        pinned: whether errors on the host are in pinned memory, if gradients are on a device.
        steps: number of applied optimizer steps since the start of training.
        report: reports each step; None for no reports.
    """

    settings: LocoSettings
    device: str | None = None
    pinned: bool = False
    steps: int = 0
    report: StepReport | None = None
    _errors: dict[Contents, _Error] = field(default_factory=dict)
    _buckets_by_span: SpanMap[Contents] = field(default_factory=SpanMap)  # the buckets of ``_errors``, by their spans
    _unassigned: SpanMap[_SpanErrors] = field(default_factory=SpanMap)
    _copy_in_flight: bool = False  # whether a copy to the host may still be running

    def buffers(
        self, contents: Contents, splits: Sequence[int], device: str | torch.device
    ) -> tuple[Tensor | None, Tensor]:
        """Return a bucket's error, and the buffer for its new error; both may be the same tensor.

        Args:
            splits: elements of each part.

        Returns:
            Two 1D tensors, each with concatenated parts of the ``sizes``. The first is None for zeros.
        """
        error = self._errors.get(contents)
        if error is None or list(error.splits) != list(splits):  # loaded from a checkpoint with other padding
            error = self._add_bucket(contents, self._collect(contents, splits))
        # Later micro-batches of a step continue from its own updated error.
        old = error.committed if error.updated is None else error.updated
        target_device = torch.device(device)
        is_offloaded = self.device is not None and torch.device(self.device).type != target_device.type
        if error.updated is None:
            error.updated = self._empty(splits, self.device or device, pinned=is_offloaded and self.pinned)
        # The kernel writes all of the new error, so its buffer may be empty.
        new = self._empty(splits, device) if is_offloaded else error.updated.to(device)
        return None if old is None else old.to(device, non_blocking=is_offloaded), new

    def store(self, contents: Contents, updated: Tensor) -> None:
        """Store the new error, which has been written to the saved tensor of ``buffers``."""
        buffer = self._errors[contents].updated
        # On the device of gradients, the kernel has written into the buffer itself.
        if buffer is not None and buffer.data_ptr() != updated.data_ptr():
            buffer.copy_(updated, non_blocking=True)
            self._copy_in_flight = True

    def _wait_for_copies(self) -> None:
        """Wait for copies to the host. Only reads by the host need it: streams are ordered after the copies."""
        if self._copy_in_flight:
            # Without this, the host could read memory that a non-blocking copy is still filling.
            get_accelerator().synchronize()
        self._copy_in_flight = False

    def finish_step(self, applied: bool) -> None:
        """Keep the new errors if the step was applied; every ``reset_T`` steps, reset all. See ``ErrorState``."""
        self._replace(applied)
        if applied:
            self.steps += 1
            if self.steps % self.settings.reset_T == 0:  # the same on all ranks: none skips a step alone
                self._unassigned.clear()
                for error in self._errors.values():
                    error.committed = None
        if self.report is not None:
            self.report.end_step()

    def commit(self) -> None:
        """See ``ErrorState``."""
        self._replace(True)

    def _replace(self, applied: bool) -> None:
        """Replace committed errors by updated ones if the step was applied, and clear the updated ones."""
        for error in self._errors.values():
            if applied and error.updated is not None:
                error.committed = error.updated
            error.updated = None
        unassigned, self._unassigned = self._unassigned, SpanMap()
        for span, values in unassigned:
            self._unassigned.add(span, values.after_step(applied))

    # Layout ###########################################################################################

    def sizes(self, splits: Sequence[int]) -> list[int]:
        """Return the number of elements of each part in the tensor of an error."""
        packing = Packing(8, self.settings.block_size)
        size = packing.row_bytes if self.settings.error_bits == 8 else packing.padded
        return [size(split) for split in splits]

    def _empty(self, splits: Sequence[int], device: str | torch.device, pinned: bool = False) -> Tensor:
        dtype = torch.uint8 if self.settings.error_bits == 8 else torch.bfloat16
        return torch.empty(sum(self.sizes(splits)), dtype=dtype, device=device, pin_memory=pinned)

    def _decode(self, error: Tensor, splits: Sequence[int]) -> Tensor:
        """Return the errors of a bucket's elements: 1D, fp32."""
        widths = [split for split in splits if split]
        numbers = [
            reference.decode_error(rows, width, self.settings.block_size, self.settings.hadamard).reshape(-1)
            # Not strict: there is a single matrix for all parts if they are equal.
            for rows, width in zip(split_rows(error, splits, self.sizes(splits)), widths, strict=False)
        ]
        return torch.cat(numbers) if numbers else torch.empty(0, device=error.device)

    def _encode(self, numbers: Tensor, splits: Sequence[int]) -> Tensor:
        error = self._empty(splits, numbers.device)
        for part, rows in zip(
            split_rows(numbers, splits, splits), split_rows(error, splits, self.sizes(splits)), strict=True
        ):
            reference.encode_error(part, rows, self.settings.block_size, self.settings.hadamard)
        return error

    # Buckets that have changed #######################################################################

    def _add_bucket(self, contents: Contents, error: _Error) -> _Error:
        """Keep the error of a bucket that shares no element with known buckets."""
        self._errors[contents] = error
        for part in contents:
            for span in part:
                self._buckets_by_span.add(span, contents)
        return error

    def _collect(self, contents: Contents, splits: Sequence[int]) -> _Error:
        """Return the error of a new bucket, assembled from the errors of former buckets with some of its elements."""
        positions = _positions(contents, splits)
        # Unique by identity, since hashing contents takes time for each of their spans.
        for old in {
            id(old): old for span, _ in positions for _, old in self._buckets_by_span.overlapping(span)
        }.values():
            self._dissolve(old)
        errors_of_spans: list[tuple[Span, _SpanErrors]] = []  # errors, each with its position in the bucket
        for span, position in positions:
            for unassigned_span, values in self._unassigned.pop_overlapping(span):
                shared = unassigned_span.common(span)
                errors_of_spans.append((shared.elements.shifted(position.start - span.start), values.part(shared)))
                for rest in unassigned_span.without(shared):  # another bucket may have it
                    self._unassigned.add(rest, values.part(rest))
        if not errors_of_spans:
            return _Error(splits)
        changed = any(values.updated is not None for _, values in errors_of_spans)
        committed, updated = torch.zeros(sum(splits)), torch.zeros(sum(splits)) if changed else None
        for position, values in errors_of_spans:
            position.of(committed).copy_(values.committed)
            if updated is not None:
                position.of(updated).copy_(values.committed if values.updated is None else values.updated)
        return _Error(
            splits, self._encode(committed, splits), None if updated is None else self._encode(updated, splits)
        )

    def _dissolve(self, contents: Contents) -> None:
        """Decode the errors of a bucket that no longer exists, and keep them until another bucket has the elements."""
        error = self._errors.pop(contents)
        positions = _positions(contents, error.splits)
        for span, _ in positions:
            self._buckets_by_span.pop_overlapping(span)
        if error.committed is None and error.updated is None:
            return
        self._wait_for_copies()
        updated = None if error.updated is None else self._decode(error.updated.cpu(), error.splits)
        committed = (
            torch.zeros(sum(error.splits))
            if error.committed is None
            else self._decode(error.committed.cpu(), error.splits)
        )
        for span, position in positions:
            self._unassigned.add(
                span, _SpanErrors(span, position.of(committed), None if updated is None else position.of(updated))
            )

    @property
    def _unsent_scale(self) -> float:
        """Return the ratio of an error to the unsent amount; see Note [Bucket errors]."""
        return 1 - self.settings.err_beta

    # States ###########################################################################################

    @property
    def keeps_errors(self) -> bool:  # type: ignore[override]
        """See ``ErrorState``."""
        return self.settings.error_feedback

    def states(self) -> dict[str, Any]:
        """Return the errors as of the last complete step; see ``ErrorState``."""
        self._wait_for_copies()
        buckets = [
            (
                tuple(tuple(tuple(span) for span in part) for part in contents),
                list(error.splits),
                error.committed.cpu(),
            )
            for contents, error in self._errors.items()
            if error.committed is not None
        ]
        buckets += [
            (((tuple(span),),), [span.numel], self._encode(values.committed, [span.numel]))
            for span, values in self._unassigned
        ]
        return {"settings": self.settings.as_dict(), "steps": self.steps, "messages": buckets}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Load errors, bit for bit if they were kept with the same settings; see ``ErrorState``."""
        self.reset()
        if not states.get("settings"):
            return
        self.steps = int(states["steps"])
        saved = ErrorFeedback(LocoSettings(**states["settings"]))
        same_format = _same_format(saved.settings, self.settings)
        # The unsent amount stays the same, the error does not; see Note [Bucket errors].
        factor = self._unsent_scale / saved._unsent_scale
        for contents, splits, error in states["messages"]:
            contents = tuple(tuple(ShardSpan(*span) for span in part) for part in contents)
            loaded = error.clone() if same_format else self._encode(factor * saved._decode(error, splits), splits)
            self._add_bucket(contents, _Error(splits, loaded if self.device is None else loaded.to(self.device)))

    def load_errors(self, numbers: Mapping[ShardSpan, Tensor], steps: int) -> None:
        """See ``ErrorState``."""
        self.reset()
        self.steps = steps
        for span, values in numbers.items():
            self._unassigned.add(span, _SpanErrors(span, self._unsent_scale * values, None))

    def reset(self) -> None:
        """Reset all errors to zero, and the count of steps."""
        self._errors.clear()
        self._buckets_by_span.clear()
        self._unassigned.clear()
        self.steps = 0

    def offload(self) -> None:
        """Move errors to the host; errors that are updated later are on the device again. See ``ErrorState``."""
        for error in self._errors.values():  # updated errors stay: the current step still writes them
            error.committed = None if error.committed is None else error.committed.cpu()

    def errors_in(self, states: Mapping[str, Any]) -> Iterator[tuple[ShardSpan, Tensor]]:
        """See ``ErrorState``."""
        if not states.get("settings"):
            return
        saved = ErrorFeedback(LocoSettings(**states["settings"]))
        saved.load_states(states)
        for contents, error in saved._errors.items():
            assert error.committed is not None  # loaded errors are committed
            numbers = saved._decode(error.committed, error.splits) / saved._unsent_scale
            for span, position in _positions(contents, error.splits):
                yield span, position.of(numbers)

    def nbytes(self) -> int:
        """Return the bytes that errors take now."""
        tensors = [tensor for error in self._errors.values() for tensor in (error.committed, error.updated)]
        tensors += [tensor for _, values in self._unassigned for tensor in (values.committed, values.updated)]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _same_format(first: LocoSettings, second: LocoSettings) -> bool:
    names = ("block_size", "error_bits", "hadamard", "err_beta")
    return all(getattr(first, name) == getattr(second, name) for name in names)


def _positions(contents: Contents, splits: Sequence[int]) -> _Positions:
    """Return the spans of a bucket, each with its position in the bucket."""
    positions, first = [], 0
    for part, split in zip(contents, splits, strict=True):
        offset = first
        for span in part:
            positions.append((span, Span(offset, span.numel)))
            offset += span.numel
        first += split
    return positions
