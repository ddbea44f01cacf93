# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The errors that a rank keeps: what quantization has taken from gradients, until it is sent.

Note [Errors of messages]
    An error is kept for each message, in the message's own layout, so that one pass over memory compensates,
    quantizes and updates. A message is known by its contents. Where the boundary between groups is crossed once a
    step, its contents are the same in every step. Where buckets cross in every micro-batch (g = G) they are the same
    as long as the model uses its parameters in one order; otherwise errors move to the messages that their elements
    are in now, which costs a decoding and an encoding.
    An error that was updated in a step becomes the one that is kept when the step has been applied to the weights;
    until then both are there. If the step is skipped, or its gradients are dropped, the old one stays.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.hops import Contents, Memory, Part, Run
from deepspeed_ext.loco import reference
from deepspeed_ext.loco.packing import Packing
from deepspeed_ext.loco.settings import LocoSettings

_Places = list[tuple[Run, int]]  # runs, and where they start in a message


def cut(flat: Tensor, splits: Sequence[int], sizes: Sequence[int]) -> list[Tensor]:
    """What belongs to the parts of a message, as few matrices: one where parts are equal, else one for each.

    Args:
        flat: 1D.
        splits: elements of the message's parts; what is empty is left out.
        sizes: elements of ``flat`` for each.
    """
    if len(set(splits)) == 1:
        return [flat.view(len(sizes), sizes[0])] if splits[0] else []
    return [row.view(1, -1) for row, split in zip(flat.split(list(sizes)), splits, strict=True) if split]


@dataclass
class _Error:
    """Of one message, 1D, uint8 or bf16; None for zeros."""

    splits: Sequence[int]  # elements of the message's parts, padding included
    kept: Tensor | None = None
    updated: Tensor | None = None  # in this step, not yet applied


class _Waiting(NamedTuple):
    """Errors of a run that no message has, or had, in fp32, so that nothing is lost until one takes them."""

    run: Run
    kept: Tensor
    updated: Tensor | None  # as of ``_Error``

    def part(self, run: Run) -> "_Waiting":
        """Of a part of the run."""
        piece = slice(run.start - self.run.start, run.start - self.run.start + run.numel)
        return _Waiting(run, self.kept[piece], None if self.updated is None else self.updated[piece])

    def copy_to(self, other: "_Waiting", run: Run, at: int) -> None:
        """Copy a part of the run to where another one has it."""
        mine = self.part(run)
        other.kept[at : at + run.numel] = mine.kept
        other.updated[at : at + run.numel] = mine.kept if mine.updated is None else mine.updated

    def settled(self, applied: bool) -> "_Waiting":
        """After a step."""
        return _Waiting(self.run, self.updated if applied and self.updated is not None else self.kept, None)


@dataclass
class ErrorFeedback(Memory):
    """All errors of a rank.

    Attributes:
        settings: how they are kept.
        device: where they are kept; None: where gradients are.
        steps: optimizer steps that were applied, since the start of training.
        on_step: called at the end of each step.
    """

    settings: LocoSettings
    device: Any = None
    steps: int = 0
    on_step: Callable[[], None] | None = None
    _errors: dict[Contents, _Error] = field(default_factory=dict)
    _waiting: list[_Waiting] = field(default_factory=list)

    def buffers(self, contents: Contents, splits: Sequence[int], device: Any) -> tuple[Tensor | None, Tensor]:
        """What is kept of a message, and where to write what is to be kept instead, which may be the same.

        Args:
            contents: of the message.
            splits: elements of each part.
            device: where to have them.

        Returns:
            1D each; rows of parts by ``sizes``. The first one is None for zeros.
        """
        error = self._errors.get(contents)
        if error is None or list(error.splits) != list(splits):  # parts of a checkpoint may have other padding
            error = self._errors[contents] = self._collect(contents, splits)
        old = error.kept if error.updated is None else error.updated
        if error.updated is None:
            error.updated = self._empty(splits, self.device or device)
        return None if old is None else old.to(device), error.updated.to(device)

    def keep(self, contents: Contents, updated: Tensor) -> None:
        """Put what was written to the second one of ``buffers`` where it is kept."""
        kept = self._errors[contents].updated
        if kept is not None and kept.data_ptr() != updated.data_ptr():
            kept.copy_(updated)

    def finish_step(self, applied: bool) -> None:
        """See ``Memory``. A reset, every so many steps, is of all errors at once."""
        if applied:
            self.steps += 1
        reset = applied and self.steps % self.settings.reset_T == 0
        for error in self._errors.values():
            if reset:
                error.kept = None
            elif applied and error.updated is not None:
                error.kept = error.updated
            error.updated = None
        self._waiting = [] if reset else [waiting.settled(applied) for waiting in self._waiting]
        if self.on_step is not None:
            self.on_step()

    # Layout ###########################################################################################

    def sizes(self, splits: Sequence[int]) -> list[int]:
        """Elements of the tensor that keeps an error, for each part."""
        packing = Packing(8, self.settings.block_size)
        size = packing.row_bytes if self.settings.error_bits == 8 else packing.padded
        return [size(split) for split in splits]

    def _empty(self, splits: Sequence[int], device: Any) -> Tensor:
        dtype = torch.uint8 if self.settings.error_bits == 8 else torch.bfloat16
        return torch.empty(sum(self.sizes(splits)), dtype=dtype, device=device)

    def _decode(self, error: Tensor, splits: Sequence[int]) -> Tensor:
        """1D, fp32: the errors of a message's elements."""
        rows = [row.view(1, -1) for row in error.split(self.sizes(splits))]
        return torch.cat(
            [self._decode_row(row, width) for row, width in zip(rows, splits, strict=True)] or [error.new_empty(0)]
        )

    def _decode_row(self, row: Tensor, width: int) -> Tensor:
        if not width:
            return torch.empty(0, device=row.device)
        return reference.decode_error(row, width, self.settings.block_size, self.settings.hadamard)[0]

    def _encode(self, numbers: Tensor, splits: Sequence[int]) -> Tensor:
        error = self._empty(splits, numbers.device)
        rows = error.split(self.sizes(splits))
        for row, part in zip(rows, numbers.split(list(splits)), strict=True):
            if part.numel():
                reference.encode_error(
                    part.view(1, -1), row.view(1, -1), self.settings.block_size, self.settings.hadamard
                )
        return error

    # Messages that have changed #######################################################################

    def _collect(self, contents: Contents, splits: Sequence[int]) -> _Error:
        """The error of a message that is new, out of those of messages that had some of its elements."""
        for old in [old for old in self._errors if _overlap(old, contents)]:
            self._waiting += self._dissolved(old, self._errors.pop(old))
        found = _Waiting(Run(0, 0, 0, sum(splits)), torch.zeros(sum(splits)), torch.zeros(sum(splits)))
        taken, rest = [], []
        for waiting in self._waiting:
            for run, offset in _places(contents, splits):
                common = _common(waiting.run, run)
                if common:
                    waiting.copy_to(found, common, offset + common.start - run.start)
                    taken.append(waiting)
            rest += [waiting.part(piece) for piece in _without(waiting.run, contents)]
        self._waiting = rest
        kept = self._encode(found.kept, splits) if taken else None
        changed = any(waiting.updated is not None for waiting in taken)
        return _Error(splits, kept, self._encode(found.updated, splits) if changed else None)

    def _dissolved(self, contents: Contents, error: _Error) -> list["_Waiting"]:
        if error.kept is None and error.updated is None:
            return []
        updated = None if error.updated is None else self._decode(error.updated.cpu(), error.splits)
        kept = torch.zeros(sum(error.splits)) if error.kept is None else self._decode(error.kept.cpu(), error.splits)
        return [
            _Waiting(
                run,
                kept[offset : offset + run.numel],
                None if updated is None else updated[offset : offset + run.numel],
            )
            for run, offset in _places(contents, error.splits)
        ]

    # States ###########################################################################################

    @property
    def remembers(self) -> bool:  # type: ignore[override]
        """See ``Memory``."""
        return self.settings.error_feedback

    def states(self) -> dict[str, Any]:
        """See ``Memory``. What was updated in a step that is not over is not in it."""
        messages = [
            (tuple(tuple(tuple(run) for run in part) for part in contents), list(error.splits), error.kept.cpu())
            for contents, error in self._errors.items()
            if error.kept is not None
        ]
        messages += [
            (((tuple(run),),), [run.numel], self._encode(kept, [run.numel])) for run, kept, _ in self._waiting
        ]
        return {"settings": self.settings.as_dict(), "steps": self.steps, "messages": messages}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """See ``Memory``; to the bit where errors were kept in the same way."""
        self.forget()
        self.steps = int(states["steps"])
        other = ErrorFeedback(LocoSettings(**states["settings"]))
        same = _kept_alike(other.settings, self.settings)
        for contents, splits, error in states["messages"]:
            contents = tuple(tuple(Run(*run) for run in part) for part in contents)
            kept = error.clone() if same else self._encode(other._decode(error, splits), splits)
            self._errors[contents] = _Error(splits, kept if self.device is None else kept.to(self.device))

    def load_numbers(self, numbers: Mapping[Run, Tensor], steps: int) -> None:
        """See ``Memory``."""
        self.forget()
        self.steps = steps
        self._waiting = [_Waiting(run, values, None) for run, values in numbers.items()]

    def forget(self) -> None:
        """All errors are zero, and the next reset is as far away as in the beginning."""
        self._errors.clear()
        self._waiting.clear()
        self.steps = 0

    def offload(self) -> None:
        """See ``Memory``. What is updated next is on the device again."""
        for error in self._errors.values():
            error.kept = None if error.kept is None else error.kept.cpu()

    def numbers_of(self, states: Mapping[str, Any]) -> Iterator[tuple[Run, Tensor]]:
        """See ``Memory``."""
        saved = ErrorFeedback(LocoSettings(**states["settings"]))
        saved.load_states(states)
        for contents, error in saved._errors.items():
            numbers = saved._decode(error.kept, error.splits)
            for run, offset in _places(contents, error.splits):
                yield run, numbers[offset : offset + run.numel]

    def nbytes(self) -> int:
        """Bytes that are kept now."""
        tensors = [tensor for error in self._errors.values() for tensor in (error.kept, error.updated)]
        tensors += [tensor for waiting in self._waiting for tensor in waiting[1:]]
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _kept_alike(one: LocoSettings, other: LocoSettings) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("block_size", "error_bits", "hadamard"))


def _places(contents: Contents, splits: Sequence[int]) -> _Places:
    """Each run of a message, and where it starts in it."""
    places, first = [], 0
    for part, split in zip(contents, splits, strict=True):
        offset = first
        for run in part:
            places.append((run, offset))
            offset += run.numel
        first += split
    return places


def _common(one: Run, other: Run) -> Run | None:
    if (one.buffer, one.row) != (other.buffer, other.row):
        return None
    start = max(one.start, other.start)
    end = min(one.start + one.numel, other.start + other.numel)
    return Run(one.buffer, one.row, start, end - start) if start < end else None


def _overlap(one: Contents, other: Contents) -> bool:
    runs = [run for part in other for run in part]
    return any(_common(mine, run) for part in one for mine in part for run in runs)


def _without(run: Run, contents: Contents) -> Part:
    """What is left of a run when a message has taken its elements."""
    left = [run]
    for taken in (taken for part in contents for taken in part):
        pieces = []
        for piece in left:
            common = _common(piece, taken)
            if common is None:
                pieces.append(piece)
                continue
            after = common.start + common.numel
            pieces.append(piece._replace(numel=common.start - piece.start))
            pieces.append(piece._replace(start=after, numel=piece.start + piece.numel - after))
        left = [piece for piece in pieces if piece.numel]
    return tuple(left)
