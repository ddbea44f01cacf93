# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts that are too large for one unit, with experts in a list: fetched window by window.

Note [Windows of listed experts]
    Ranks use different experts, but they must run the same gathers in the same order. So the experts of a block are
    split into windows of consecutive experts that fit the budget; a ``Chunk`` is such a window. Every forward of the
    block gathers every window once, from the first to the last, and every backward from the last to the first. Before
    a rank runs an expert, it gathers the windows up to that expert's, used or not. At the end of the block, it
    gathers the remaining ones. So a pass gathers as many bytes as one unit would, with only one window in memory.

    Forward must run the experts in order, as every loop over experts does. Autograd runs the backward in
    reverse order, so a window is done when an earlier one is entered, and its gradients are reduced
    then. Both orders are checked.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

from torch import nn

_CHUNKS = "paro_chunks"  # attribute of a block: its ``ChunkedModule``
# Numbers in the sets of modules that use a parameter; DeepSpeed numbers modules from 0.
INCOMPLETE = -1  # a module with incomplete gradients; keeps its parameters gathered
_FIRST_ID = -2  # number of the first chunk


class Chunk(nn.Module):
    """A window of consecutive experts. DeepSpeed's coordinator treats it as a leaf module; it is not in the model.

    Args:
        experts: the experts, in the order of a forward.
    """

    experts: tuple[nn.Module, ...]

    def __init__(self, experts: Sequence[nn.Module]) -> None:
        super().__init__()
        self.__dict__["experts"] = tuple(experts)  # not as child modules
        self.ds_id = _FIRST_ID
        self.ds_recompute_parameters: set[Any] = set()
        self._z3_leaf = True

    def __deepcopy__(self, memo: object) -> "Chunk":
        return self  # belongs to the engine, as hooks do

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, Any]]:
        """Return the experts' parameters, each once."""
        seen = dict.fromkeys(param for expert in self.experts for param in expert.parameters())
        return ((str(number), param) for number, param in enumerate(seen))

    def ds_external_parameters(self) -> tuple[tuple[str, Any], ...]:
        """Return none: experts in a window use no parameters of other modules."""
        return ()


class _Pass:
    """One forward or backward of a block.

    Attributes:
        is_last: whether the running backward will not enter the block again.
        opened_count: number of windows opened so far, in the pass's order.
    """

    def __init__(self, forward: bool, last: bool) -> None:
        self.forward = forward
        self.is_last = last
        self.opened_count = 0


class ChunkFetcher(Protocol):
    """Gathers and releases the parameters of windows: DeepSpeed's coordinator."""

    def fetch_chunk(self, chunk: Chunk, forward: bool) -> None:
        """Gather a window."""

    def release_chunk(self, chunk: Chunk, forward: bool) -> None:
        """Release a window."""


class ChunkReducer(Protocol):
    """Reduces the gradients of windows."""

    def is_last_pass(self, block: "ChunkedModule") -> bool:
        """Return whether the running backward, which has just entered a block, will not enter it again."""

    def reduce_chunk(self, chunk: Chunk, last: bool) -> None:
        """Reduce a window's gradients; ``is_last`` if the running backward will not enter its block again."""

    def drop_chunk_gradients(self) -> None:
        """Drop gradients of an interrupted backward."""


class ChunkedModule:
    """A module whose listed experts are fetched in windows. See Note [Windows of listed experts].

    Args:
        module: the block, whose passes begin before those of its experts and end after them.
        chunks: the windows, with all of its experts.

    Attributes:
        fetcher: set by the coordinator.
        reducer: set with an optimizer; None without one.
    """

    fetcher: ChunkFetcher
    reducer: ChunkReducer | None = None

    def __init__(self, module: nn.Module, chunks: Sequence[Chunk]) -> None:
        self.module = module
        self.chunks = tuple(chunks)
        self._passes: list[_Pass] = []  # several, because a recomputation runs inside a backward

    def __deepcopy__(self, memo: object) -> "ChunkedModule":
        return self

    def drop_passes(self) -> None:
        """Drop passes that an exception has interrupted. Called when a new forward of the model begins."""
        had_backward = any(not interrupted.forward for interrupted in self._passes)
        self._passes.clear()
        if had_backward and self.reducer is not None:
            self.reducer.drop_chunk_gradients()

    def begin(self, forward: bool) -> None:
        """Called when a pass of the module begins."""
        while self._passes and (self._passes[-1].forward or not forward):
            self._finish_pass()  # never ended: a checkpoint's recomputation stops after its last needed tensor
        self._passes.append(_Pass(forward, forward or self._is_last()))

    def enter(self, number: int, forward: bool) -> None:
        """Called before an expert of this window runs.

        Raises:
            RuntimeError: a later window has been entered already.
        """
        while self._passes and self._passes[-1].forward and not forward:
            self._finish_pass()
        innermost = self._passes[-1] if self._passes else None
        if (
            forward
            and innermost
            and not innermost.forward
            and self._window_number(innermost, innermost.opened_count - 1) == number
        ):
            return  # an expert under a checkpoint of its own is recomputed in its backward
        if innermost is None or innermost.forward != forward:
            self._passes.append(_Pass(forward, forward or self._is_last()))
        self._open_windows(self._passes[-1], number if forward else len(self.chunks) - 1 - number)

    def end(self, forward: bool) -> None:
        """Called when a pass of the module ends."""
        while self._passes and self._passes[-1].forward != forward:
            self._finish_pass()
        if self._passes:
            self._finish_pass()

    def finish(self) -> None:
        """Called at the end of the model's backward."""
        while self._passes:
            self._finish_pass()

    def _is_last(self) -> bool:
        return self.reducer is None or self.reducer.is_last_pass(self)

    def _finish_pass(self) -> None:
        current = self._passes[-1]
        self._open_windows(current, len(self.chunks) - 1)
        self._close_window(current)
        self._passes.pop()

    def _open_windows(self, current: _Pass, position: int) -> None:
        """Fetch the windows up to this position in the pass's order, and close those before it."""
        if position < current.opened_count - 1:
            raise RuntimeError(
                f"{type(self.module).__name__} does not run its experts in their order, "
                f"{'forward' if current.forward else 'backward'}: window {self._window_number(current, position)} "
                f"of {len(self.chunks)} after window {self._window_number(current, current.opened_count - 1)}. "
                f"Windows are gathered in one order on all ranks: raise zero_optimization.stage3_leaf_bytes until the "
                f"module is one unit."
            )
        while current.opened_count <= position:
            if current.opened_count:
                self._close_window(current)
            self.fetcher.fetch_chunk(self.chunks[self._window_number(current, current.opened_count)], current.forward)
            current.opened_count += 1

    def _close_window(self, current: _Pass) -> None:
        number = self._window_number(current, current.opened_count - 1)
        chunk = self.chunks[number]
        if not current.forward and self.reducer is not None:
            self.reducer.reduce_chunk(chunk, current.is_last)
        outer = self._passes[:-1]
        # An outer pass may still use the window: a recomputation runs inside a backward.
        if not any(
            other.opened_count and self._window_number(other, other.opened_count - 1) == number for other in outer
        ):
            self.fetcher.release_chunk(chunk, current.forward)

    def _window_number(self, current: _Pass, position: int) -> int:
        return position if current.forward else len(self.chunks) - 1 - position


def set_chunks(module: nn.Module, chunks: Sequence[Sequence[nn.Module]]) -> None:
    """Fetch a module's experts, which are leaf modules, in these windows from now on."""
    module.__dict__[_CHUNKS] = ChunkedModule(module, [Chunk(chunk) for chunk in chunks])


def unset_chunks(module: nn.Module) -> bool:
    """Undo ``set_chunks``, and return whether there was anything to undo."""
    return module.__dict__.pop(_CHUNKS, None) is not None


def chunked_modules(model: nn.Module) -> list[ChunkedModule]:
    """Return the chunked modules of a model, in its order, and give each chunk an id for DeepSpeed's records."""
    blocks = [module.__dict__[_CHUNKS] for module in model.modules() if _CHUNKS in module.__dict__]
    chunks = [chunk for block in blocks for chunk in block.chunks]
    for number, chunk in enumerate(chunks):
        chunk.ds_id = _FIRST_ID - number
    return blocks
