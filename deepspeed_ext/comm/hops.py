# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Hops: reductions of gradients and gathers of parameters over one process group.

Note [Hops and transfers]
    A hop is a reduction or a gather over one process group. Its methods are generators: they start one communication,
    yield its handle, and continue when it is done; the result is the generator's return value. A *transfer* composes
    hops into a redistribution (``redistribution.py``). ``TransferQueue`` runs transfers one at a time, or overlaps
    the first hop of a transfer with the second hop of the one before it.

    A ``ReduceHop`` reduces gradients, a ``GatherHop`` gathers parameters. Replacing a hop between or inside groups
    changes nothing else: its callers do not depend on the data that it sends, nor on its format.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.collectives import Collectives
from deepspeed_ext.comm.packing import fill_up
from deepspeed_ext.comm.spans import Contents, ShardSpan, Spans, split_spans

Transfer = Generator[Any, None, Tensor]  # yields handles with a wait() method


class Update(NamedTuple):
    """Parameters that a step has updated, to be sent to their replicas.

    Attributes:
        updated: returns the updated parameters, 1D.
        replica: the values before the update, identical on all ranks, 1D, of that dtype.
        most_numel: largest number of elements on any rank.
    """

    updated: Callable[[], Tensor]
    replica: Tensor
    most_numel: int


MaxOverRanks = Callable[[Tensor], Tensor]  # elementwise maximum over the ranks that gather


class GradientScale:
    """The factor by which loss scaling multiplies gradients; this one is constant."""

    def value(self) -> float:
        """Return the current factor."""
        return 1.0


class ErrorState:
    """State that a lossy reduction keeps between buckets and between steps; this class keeps none."""

    keeps_errors = False

    @property
    def halves(self) -> set[str]:
        """The halves of an all-reduce that keep errors: "reductions", "sums"."""
        return {"reductions"} if self.keeps_errors else set()

    def finish_step(self, applied: bool) -> None:
        """Called at the end of each step.

        Args:
            applied: whether the step has used the gradients reduced since the last call, or skipped them.
        """

    def commit(self) -> None:
        """Keep the errors of the last reductions, because a later step certainly uses their sums: none is skipped."""

    def states(self) -> dict[str, Any]:
        """Return plain values and CPU tensors for a checkpoint: committed errors only. Errors of gradients that no
        step has used are left out, because a checkpoint has no such gradients either."""
        return {}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Load the states of the same buckets; if empty, all errors are zero."""

    def errors_in(self, states: Mapping[str, Any]) -> Iterable[tuple[ShardSpan, Tensor]]:
        """Return the unsent part of each span in such states of any rank: fp32, 1D."""
        return ()

    def load_errors(self, errors: Mapping[ShardSpan, Tensor], steps: int) -> None:
        """Load the unsent part of each span of other buckets, fp32, 1D, and set the number of steps."""

    def reset(self) -> None:
        """Reset all errors to zero."""

    def offload(self) -> None:
        """Move errors to host memory until the next reduction."""


class CombinedErrorState(ErrorState):
    """Combines error states: of both halves of an all-reduce, and of the hops of several families.

    Args:
        parts: error states by their paths in saved states: keys of nested dictionaries, outermost first. A path that
            ends in ``GATHERED`` belongs to a gather of sums.
        path_of: maps the number of a flat buffer to the path of the part that loads its errors.
    """

    GATHERED = "gathered"

    def __init__(self, parts: Mapping[tuple[str, ...], ErrorState], path_of: Callable[[int], tuple[str, ...]]) -> None:
        self._parts = dict(parts)
        self._path_of = path_of
        self.keeps_errors = any(part.keeps_errors for part in self._parts.values())

    @property
    def halves(self) -> set[str]:
        """See ``ErrorState``."""
        paths = {path for path, part in self._parts.items() if part.keeps_errors}
        return {"sums" if self._is_gathered(path) else "reductions" for path in paths}

    def _is_gathered(self, path: tuple[str, ...]) -> bool:
        return path[-1:] == (self.GATHERED,)

    def finish_step(self, applied: bool) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.finish_step(applied)

    def commit(self) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.commit()

    def states(self) -> dict[str, Any]:
        """See ``ErrorState``; the states of each part are at its path."""
        saved: dict[str, Any] = {}
        steps = 0
        for path, part in self._parts.items():
            states = part.states()
            steps = max(steps, states.get("steps", 0))
            node = saved
            for key in path:
                node = node.setdefault(key, {})
            node.update(states)
        return saved if () in self._parts else {**saved, "steps": steps}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Load the states of each part, of which some may be missing; see ``ErrorState``."""
        for path, part in self._parts.items():
            part.load_states(_at(states, path))

    def errors_in(self, states: Mapping[str, Any]) -> Iterable[tuple[ShardSpan, Tensor]]:
        """Return the errors of all parts: an error of a sum may be sent with a summand instead."""
        for path, part in self._parts.items():
            yield from part.errors_in(_at(states, path))

    def load_errors(self, errors: Mapping[ShardSpan, Tensor], steps: int) -> None:
        """Load errors into the reductions only; see ``ErrorState``."""
        for path, part in self._parts.items():
            if self._is_gathered(path):  # ``errors`` include those of sums: loading them here would send them twice
                part.reset()
            else:
                part_errors = {span: error for span, error in errors.items() if self._path_of(span.buffer) == path}
                part.load_errors(part_errors, steps)

    def reset(self) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.reset()

    def offload(self) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.offload()


def _at(states: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    """Return the states saved at a path; empty if there are none."""
    for key in path:
        states = states.get(key, {})
    return states


class Hop:
    """One step of a redistribution, over one process group.

    Buckets may have any layout. Sending is cheapest if their parts start at multiples of ``multiple`` elements.

    Args:
        group: process group of ``size`` ranks, in which this is rank ``rank``; None for all ranks.
        name: prefix in the comms logger and in profiler traces: intra_all_gather, inter_reduce_scatter, ...

    Attributes:
        pairwise: whether other threads may start communications over the same group; see ``is_pairwise``.
    """

    pairwise = False

    def __init__(self, group: ProcessGroup | None, name: str = "hop") -> None:
        self.collectives = Collectives(group, name)
        self.multiple = self.collectives.multiple
        self.pairwise = self.collectives.pairwise

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.collectives.size

    @property
    def rank(self) -> int:
        """This rank's number in the group."""
        return self.collectives.rank


class Differences(Protocol):
    """Sends updated parameters as differences to the receivers' values.

    ``encode`` computes a code from updates and from the values before them. It is sent by one all-gather per hop.
    ``write`` applies it to these values on all ranks, the owner included, so replicas stay bit-identical.

    Attributes:
        resync_interval: number of updates after which parameters are sent unencoded (resync).
    """

    resync_interval: int

    def encode(self, updates: Sequence[Update], max_over_ranks: MaxOverRanks) -> list[Tensor]:
        """Return the code of each update: uint8, 1D, with the same number of elements on all ranks that gather.

        Args:
            updates: the same number on every rank.
            max_over_ranks: maximum over ranks, for lengths that depend on the values. Collective.
        """

    def write(self, codes: Tensor, replica: Tensor) -> None:
        """Apply received codes.

        Args:
            codes: (parts, elements of a code).
            replica: this rank's values of each part: (parts, elements), rows without gaps; written.
        """

    def finish_step(self) -> None:
        """Called at the end of each step."""


class GatherHop(Hop):
    """A hop of parameters: an all-gather.

    Args:
        group, name: see ``Hop``.
        differences: encodes updates as differences; None to send parameters unencoded.

    Attributes:
        differences: the same.
        exact: whether receivers get the sent bits, so that any other all-gather gives the same result.
    """

    def __init__(self, group: ProcessGroup | None, name: str = "hop", differences: Differences | None = None) -> None:
        super().__init__(group, name)
        self.differences = differences
        self.exact = differences is None

    def all_gather(self, shard: Tensor, out: Tensor | None = None) -> Transfer:
        """All-gather ``shard`` (1D) in rank order into 1D of ``size * shard.numel()`` elements.

        Args:
            shard: 1D.
            out: output buffer, of which ``shard`` may be a view at this rank's position; by default a new tensor.
        """
        # Only codes are uint8.
        encoded = self.differences is not None and shard.dtype == torch.uint8
        return all_gather(self.collectives, shard, out, "difference_all_gather" if encoded else "all_gather")


class SumsGather:
    """All-gathers the sums of an all-reduce, without loss.

    Attributes:
        errors: error state of the gather.
        exact: whether ranks receive the exact sums.
    """

    exact = True

    def __init__(self) -> None:
        self.errors = ErrorState()

    def gather(self, hop: "ReduceHop", sums: Tensor, spans: Spans) -> Transfer:
        """All-gather the sums (1D) of every rank of a hop, in rank order; all ranks get the same bits.

        Args:
            hop: the hop that has reduced them.
            sums: this rank's sums, 1D, with the same number of elements on every rank.
            spans: contents of the sums; if empty, no errors are kept.
        """
        return all_gather(hop.collectives, sums)


class ReduceHop(Hop, ABC):
    """A hop of gradients: a reduction.

    Subclasses implement ``reduce_scatter``, which ``all_reduce`` uses. Sums are taken in rank order in fp32, or as
    the backend does; every rank of the group gets the same bits.

    A reduction may keep errors by the contents of buckets, so its methods take these.

    Attributes:
        errors: error state of the reduction.
        sums: gathers the sums of an all-reduce.
        keeps_zeros: whether sums of zeros are zeros.
        scale: loss scale of the gradients.
    """

    keeps_zeros = True

    def __init__(self, group: ProcessGroup | None, name: str = "hop") -> None:
        super().__init__(group, name)
        self.errors = ErrorState()
        self.sums = SumsGather()
        self.scale = GradientScale()

    def use_scale(self, scale: GradientScale) -> None:
        """Set the loss scale of gradients that are reduced from now on."""
        self.scale = scale

    def drop_errors(self) -> None:
        """Stop keeping errors, and free their memory."""
        self.errors = self.sums.errors = ErrorState()

    @property
    def keeps_errors(self) -> bool:
        """Whether either half of an all-reduce keeps errors."""
        return self.errors.keeps_errors or self.sums.errors.keeps_errors

    def error_states(self) -> dict[tuple[str, ...], ErrorState]:
        """Return the error states of both halves of an all-reduce, as parts of a ``CombinedErrorState``."""
        states: dict[tuple[str, ...], ErrorState] = {(): self.errors}
        if self.sums.errors.keeps_errors:
            states[(CombinedErrorState.GATHERED,)] = self.sums.errors
        return states

    def lengths(self, splits: Sequence[int]) -> list[int]:
        """Return lengths to pad parts to, so that the reduction copies nothing; empty parts may stay empty."""
        return [fill_up(split, self.multiple) for split in splits]

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Reduce-scatter ``flat`` (1D); this rank gets part ``rank``.

        Args:
            flat: 1D, concatenated parts; may be overwritten.
            splits: lengths of the parts, the same on all ranks; parts may have different lengths.
            contents: contents of each part; if empty, no errors of the bucket are kept.

        Returns:
            1D of ``splits[rank]`` elements, dtype of ``flat``.
        """

    def all_reduce(self, flat: Tensor, spans: Spans = ()) -> Transfer:
        """All-reduce ``flat`` (1D), which may be overwritten.

        Args:
            flat: 1D.
            spans: its contents.
        """
        if self.size == 1 or not flat.numel():
            return flat
        part = fill_up(-(-flat.numel() // self.size), self.multiple)
        numel, missing = flat.numel(), part * self.size - flat.numel()
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat  # padding by 0 copies
        splits = [part] * self.size
        contents = split_spans(spans, splits) if spans else ()
        shard = yield from self.reduce_scatter(padded, splits, contents)
        gathered = yield from self.gather_sums(shard, contents[self.rank] if contents else ())
        return gathered[:numel]

    def gather_sums(self, sums: Tensor, spans: Spans = ()) -> Transfer:
        """All-gather the sums (1D) of every rank of the group, in rank order; see ``SumsGather``."""
        return self.sums.gather(self, sums, spans)


def all_gather(
    collectives: Collectives, shard: Tensor, out: Tensor | None = None, operation: str = "all_gather"
) -> Transfer:
    """All-gather without encoding; see ``GatherHop.all_gather``. ``operation``: name in logs and traces."""
    if collectives.size == 1 or not shard.numel():
        return shard
    gathered = shard.new_empty(collectives.size * shard.numel()) if out is None else out
    yield collectives.all_gather(gathered, shard.contiguous(), operation)
    return gathered
