# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts that are too large for one unit: fetched a chunk of experts at a time.

Note [Chunks in one order]
    Ranks use different experts, but what they gather together they must gather in one order. So the experts of a
    block are split into chunks, of consecutive experts that fit the budget, and in every forward of the block all
    chunks are gathered, each once, first to last; in every backward last to first. A rank that enters an expert first
    goes through the chunks before it, used or not; one that leaves the block goes through those that are left. So
    the bytes are those of one unit, and what is gathered at a time are those of a chunk.

    Forward must enter experts in their order: every loop over experts does. Autograd runs backward what was recorded
    last first, so a chunk is done when an earlier one is entered; its gradients are reduced then. Either is checked.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

_CHUNKS = "paro_chunks"  # attribute of a block: its chunks
# Numbers in the sets of modules that use a parameter; DeepSpeed numbers modules from 0.
WAITS = -1  # the gradients of its module are not complete
_FIRST_ID = -2  # of a chunk


class Chunk(nn.Module):
    """Consecutive experts, which are a leaf module to DeepSpeed's coordinator. A chunk is no part of the model.

    Args:
        experts: in the order in which they are entered.
    """

    experts: tuple[nn.Module, ...]

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__["experts"] = tuple(experts)  # not as children
        self.ds_id = _FIRST_ID
        self.ds_recompute_parameters: set[Any] = set()
        self._z3_leaf = True

    def __deepcopy__(self, memo: object) -> "Chunk":
        return self  # of the engine, as hooks are

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Return the experts' parameters, each once."""
        seen = dict.fromkeys(param for expert in self.experts for param in expert.parameters())
        return ((str(number), param) for number, param in enumerate(seen))

    def ds_external_parameters(self) -> tuple[tuple[str, Any], ...]:
        """Return none: experts in chunks have no parameters of other modules."""
        return ()


class _Pass:
    """A forward or a backward of a block: ``at`` is the number of chunks that were opened, in its order; ``last``
    whether the backward that runs will not come to the block again."""

    def __init__(self, forward: bool, last: bool) -> None:
        self.forward = forward
        self.last = last
        self.at = 0


class ChunkedModule:
    """A module with experts in chunks. See Note [Chunks in one order].

    Args:
        module: what is entered and left around its experts.
        chunks: of all of them.
    """

    def __init__(self, module: nn.Module, chunks: Sequence[Chunk]) -> None:
        self.module = module
        self.chunks = tuple(chunks)
        self.fetch: Callable[[Chunk, bool], None]  # set by the coordinator
        self.release: Callable[[Chunk, bool], None]
        self.reduce: Callable[[Chunk, bool], None] = lambda chunk, last: None  # set with an optimizer
        self.is_last: Callable[[], bool] = lambda: True
        self.forget: Callable[[], None] = lambda: None
        self._passes: list[_Pass] = []  # a recomputation is inside of a backward

    def __deepcopy__(self, memo: object) -> "ChunkedModule":
        return self

    def abandon(self) -> None:
        """Give up what is open, which an exception has left: a new forward of the model begins."""
        backward = any(not one.forward for one in self._passes)
        self._passes.clear()
        if backward:
            self.forget()

    def begin(self, forward: bool) -> None:
        """Called when the module is entered."""
        while self._passes and (self._passes[-1].forward or not forward):
            self._finish()  # left without notice: the recomputation of a checkpoint stops when it has what it needs
        self._passes.append(_Pass(forward, forward or self.is_last()))

    def enter(self, number: int, forward: bool) -> None:
        """Called when an expert of this chunk is entered.

        Raises:
            RuntimeError: chunks after it have been entered.
        """
        while self._passes and self._passes[-1].forward and not forward:
            self._finish()
        top = self._passes[-1] if self._passes else None
        if forward and top and not top.forward and self._number(top, top.at - 1) == number:
            return  # a checkpoint of a single expert, which runs backward, recomputes it
        if top is None or top.forward != forward:
            self._passes.append(_Pass(forward, forward or self.is_last()))
        self._go(self._passes[-1], number if forward else len(self.chunks) - 1 - number)

    def end(self, forward: bool) -> None:
        """Called when the module is left."""
        while self._passes and self._passes[-1].forward != forward:
            self._finish()
        if self._passes:
            self._finish()

    def finish(self) -> None:
        """Called when the backward of the model is over."""
        while self._passes:
            self._finish()

    def _finish(self) -> None:
        current = self._passes[-1]
        self._go(current, len(self.chunks) - 1)
        self._close(current)
        self._passes.pop()

    def _go(self, current: _Pass, place: int) -> None:
        """Go on to the chunk at this place of the pass's order."""
        if place < current.at - 1:
            raise RuntimeError(
                f"{type(self.module).__name__} enters its experts in another order than theirs, "
                f"{'forward' if current.forward else 'backward'}: chunk {self._number(current, place)} of "
                f"{len(self.chunks)} after chunk {self._number(current, current.at - 1)}. Chunks are gathered in one "
                f"order on all ranks: raise zero_optimization.stage3_leaf_bytes until the module is one unit."
            )
        while current.at <= place:
            if current.at:
                self._close(current)
            self.fetch(self.chunks[self._number(current, current.at)], current.forward)
            current.at += 1

    def _close(self, current: _Pass) -> None:
        number = self._number(current, current.at - 1)
        chunk = self.chunks[number]
        if not current.forward:
            self.reduce(chunk, current.last)
        outer = self._passes[:-1]
        if not any(one.at and self._number(one, one.at - 1) == number for one in outer):
            self.release(chunk, current.forward)

    def _number(self, current: _Pass, place: int) -> int:
        return place if current.forward else len(self.chunks) - 1 - place


def set_chunks(module: nn.Module, chunks: Sequence[Sequence[nn.Module]]) -> None:
    """Fetch a module's experts, which are leaf modules, in these chunks from now on."""
    module.__dict__[_CHUNKS] = ChunkedModule(module, [Chunk(chunk) for chunk in chunks])


def unset_chunks(module: nn.Module) -> bool:
    """Undo ``set_chunks``, and return whether there was anything to undo."""
    return module.__dict__.pop(_CHUNKS, None) is not None


def chunked_modules(model: nn.Module) -> list[ChunkedModule]:
    """Return the modules of a model that have chunks, in its order, and number the chunks for DeepSpeed."""
    blocks = [module.__dict__[_CHUNKS] for module in model.modules() if _CHUNKS in module.__dict__]
    chunks = [chunk for block in blocks for chunk in block.chunks]
    for number, chunk in enumerate(chunks):
        chunk.ds_id = _FIRST_ID - number
    return blocks
