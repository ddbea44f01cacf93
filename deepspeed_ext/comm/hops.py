# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Hops: how bytes travel over one process group: reductions of gradients, and gathers of parameters.

Note [Hops and transfers]
    A hop is a reduction or a gather over one process group. Its methods are generators: they start one communication,
    yield its handle, and go on when it is done; the result is the generator's return value. A *transfer* composes
    them into a redistribution (``redistribution.py``). ``TransferQueue`` runs transfers, one after the other or
    overlapped: the first hop of a transfer is on the wire while the one before it is in its second hop.

    Gradients travel by a ``ReduceHop``, parameters by a ``GatherHop``. Another one between groups, or
    inside them, changes nothing else: a hop's caller knows neither what it sends nor in which form.
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
    """Parameters that a step has changed, on their way to all that hold them.

    Attributes:
        updated: gives them: 1D.
        held: what all ranks hold of them, 1D, of that dtype.
        most: elements that a rank has at most.
    """

    updated: Callable[[], Tensor]
    held: Tensor
    most: int


Agree = Callable[[Tensor], Tensor]  # of each number the largest among the ranks that gather


class GradientScale:
    """The factor by which loss scaling multiplies gradients; this one is constant."""

    def value(self) -> float:
        """Return the factor of the gradients that are reduced now."""
        return 1.0


class ErrorState:
    """What a lossy reduction keeps from bucket to bucket, and from step to step; this one keeps nothing."""

    keeps_errors = False

    @property
    def halves(self) -> set[str]:
        """Of which halves of an all-reduce something is kept: "reductions", "sums"."""
        return {"reductions"} if self.keeps_errors else set()

    def finish_step(self, applied: bool) -> None:
        """Called at the end of each step.

        Args:
            applied: whether the step has used what was reduced since the last call, or skipped it.
        """

    def commit(self) -> None:
        """Keep the errors of what was reduced, since a later step is sure to use it: no step will skip it."""

    def states(self) -> dict[str, Any]:
        """Return plain values, and tensors on the CPU, for a checkpoint: committed errors, without those of gradients
        that no step has used, for a checkpoint has no such gradients either."""
        return {}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Load the states of the same buckets; without any, all errors are zero."""

    def errors_in(self, states: Mapping[str, Any]) -> Iterable[tuple[ShardSpan, Tensor]]:
        """Return what such states, of this rank or another, have not sent yet of each span: fp32, 1D."""
        return ()

    def load_errors(self, errors: Mapping[ShardSpan, Tensor], steps: int) -> None:
        """Load what was not sent yet of other buckets: fp32, 1D, of each span; after so many steps."""

    def forget(self) -> None:
        """Reset all errors to zero."""

    def offload(self) -> None:
        """Move errors to host memory until the next reduction."""


class JointErrorState(ErrorState):
    """Several states as one: of both halves of an all-reduce, and of the hops of several families of parameters.

    Args:
        parts: by their places in what is saved: keys of dictionaries, from the outermost on. A place that ends in
            ``GATHERED`` is that of a gather of sums.
        place_of: gives the place of the part that takes errors of a flat buffer, by its number.
    """

    GATHERED = "gathered"

    def __init__(
        self, parts: Mapping[tuple[str, ...], ErrorState], place_of: Callable[[int], tuple[str, ...]]
    ) -> None:
        self._parts = dict(parts)
        self._place_of = place_of
        self.keeps_errors = any(part.keeps_errors for part in self._parts.values())

    @property
    def halves(self) -> set[str]:
        """See ``ErrorState``."""
        keeping = {place for place, part in self._parts.items() if part.keeps_errors}
        return {"sums" if self._is_gathered(place) else "reductions" for place in keeping}

    def _is_gathered(self, place: tuple[str, ...]) -> bool:
        return place[-1:] == (self.GATHERED,)

    def finish_step(self, applied: bool) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.finish_step(applied)

    def commit(self) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.commit()

    def states(self) -> dict[str, Any]:
        """See ``ErrorState``; those of each part in its place."""
        saved: dict[str, Any] = {}
        steps = 0
        for place, part in self._parts.items():
            states = part.states()
            steps = max(steps, states.get("steps", 0))
            found = saved
            for key in place:
                found = found.setdefault(key, {})
            found.update(states)
        return saved if () in self._parts else {**saved, "steps": steps}

    def load_states(self, states: Mapping[str, Any]) -> None:
        """Load what each part has kept, which may have been saved by some of them alone; see ``ErrorState``."""
        for place, part in self._parts.items():
            part.load_states(_at(states, place))

    def errors_in(self, states: Mapping[str, Any]) -> Iterable[tuple[ShardSpan, Tensor]]:
        """Return those of all parts: what a sum lacks may as well come with a summand."""
        for place, part in self._parts.items():
            yield from part.errors_in(_at(states, place))

    def load_errors(self, errors: Mapping[ShardSpan, Tensor], steps: int) -> None:
        """Give them to the reductions; see ``ErrorState``."""
        for place, part in self._parts.items():
            if self._is_gathered(place):
                part.forget()
            else:
                mine = {span: kept for span, kept in errors.items() if self._place_of(span.buffer) == place}
                part.load_errors(mine, steps)

    def forget(self) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.forget()

    def offload(self) -> None:
        """See ``ErrorState``."""
        for part in self._parts.values():
            part.offload()


def _at(states: Mapping[str, Any], place: Sequence[str]) -> Mapping[str, Any]:
    """Return what is saved in a place; nothing if there is none."""
    for key in place:
        states = states.get(key, {})
    return states


class Hop:
    """One leg of a redistribution, over one process group.

    Any bucket is right. One is cheapest if its parts begin at multiples of ``multiple`` elements.

    Args:
        group: process group of ``size`` ranks, of which this is number ``rank``; None for all ranks.
        name: for the comms logger's records and profilers' traces: intra_all_gather, inter_reduce_scatter, ...

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
        """This rank's number."""
        return self.collectives.rank


class Differences(Protocol):
    """How updated parameters are sent as what receivers lack of them.

    What is sent is made of updates and of what all ranks hold (``encode``), goes through one all-gather, or one for
    each hop, and is written to what is held (``write``): by all ranks alike, so that they hold the same bits, the
    owner included.

    Attributes:
        whole_every: updates after which one travels as it is.
    """

    whole_every: int

    def encode(self, updates: Sequence[Update], agree: Agree) -> list[Tensor]:
        """Return what is sent of each update: uint8, 1D, of as many elements on every rank that gathers.

        Args:
            updates: as many on every rank.
            agree: for lengths that are not the same on all ranks by themselves. Collective.
        """

    def write(self, arrived: Tensor, held: Tensor) -> None:
        """Write what has arrived.

        Args:
            arrived: (parts, elements of what ``encode`` gives).
            held: what this rank holds of each part: (parts, elements), rows without gaps; written.
        """

    def finish_step(self) -> None:
        """Called at the end of each step."""


class GatherHop(Hop):
    """A hop of parameters: an all-gather.

    Args:
        group, name: see ``Hop``.
        differences: how it sends updates as what receivers lack; None if it does not.

    Attributes:
        differences: the same.
        exact: whether what arrives is what was sent, so that any other all-gather would do as well.
    """

    def __init__(self, group: ProcessGroup | None, name: str = "hop", differences: Differences | None = None) -> None:
        super().__init__(group, name)
        self.differences = differences
        self.exact = differences is None

    def all_gather(self, shard: Tensor, out: Tensor | None = None) -> Transfer:
        """Gather every rank's ``shard`` (1D), in rank order: 1D of ``size * shard.numel()`` elements.

        Args:
            shard: 1D.
            out: where to gather, of which ``shard`` may be this rank's part already; by default a new tensor.
        """
        encoded = self.differences is not None and shard.dtype == torch.uint8
        return all_gather(self.collectives, shard, out, "difference_all_gather" if encoded else "all_gather")


class SumsGather:
    """How the sums of an all-reduce come back to all ranks: as they are.

    Attributes:
        errors: what is kept of them.
        exact: whether what comes back are the sums.
    """

    exact = True

    def __init__(self) -> None:
        self.errors = ErrorState()

    def gather(self, hop: "ReduceHop", sums: Tensor, spans: Spans) -> Transfer:
        """Gather the sums (1D) of every rank of a hop, in rank order; all ranks get the same bits.

        Args:
            hop: whose sums they are.
            sums: this rank's, 1D, of as many elements on every rank.
            spans: what they are of; without, nothing is kept.
        """
        return all_gather(hop.collectives, sums)


class ReduceHop(Hop, ABC):
    """A hop of gradients: a reduction.

    ``reduce_scatter`` is the one to implement; ``all_reduce`` is made of it. Sums are taken in rank order in fp32, or
    as the backend does; every rank of the group gets the same bits.

    A reduction may keep something of what it has sent; so it is told what buckets hold.

    Attributes:
        errors: what the reduction keeps.
        sums: how the sums of an all-reduce come back.
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
        """Reduce gradients that loss scaling multiplies by this factor from now on."""
        self.scale = scale

    def drop_errors(self) -> None:
        """Keep no errors from now on, and free the memory of those that are kept."""
        self.errors = self.sums.errors = ErrorState()

    @property
    def keeps_errors(self) -> bool:
        """Whether something is kept, of either half of an all-reduce."""
        return self.errors.keeps_errors or self.sums.errors.keeps_errors

    def error_states(self) -> dict[tuple[str, ...], ErrorState]:
        """Return what is kept, of both halves of an all-reduce, as parts of a ``JointErrorState``."""
        kept: dict[tuple[str, ...], ErrorState] = {(): self.errors}
        if self.sums.errors.keeps_errors:
            kept[(JointErrorState.GATHERED,)] = self.sums.errors
        return kept

    def lengths(self, splits: Sequence[int]) -> list[int]:
        """Return to what lengths parts are best filled up, so that nothing is copied; empty ones may stay so."""
        return [fill_up(split, self.multiple) for split in splits]

    @abstractmethod
    def reduce_scatter(self, flat: Tensor, splits: Sequence[int], contents: Contents = ()) -> Transfer:
        """Sum ``flat`` (1D) over the group; this rank gets part ``rank``.

        Args:
            flat: 1D, the parts one after the other; may be overwritten.
            splits: length of each part, the same on all ranks; they may differ.
            contents: what each part holds; without, nothing is kept of the bucket.

        Returns:
            1D of ``splits[rank]`` elements, dtype of ``flat``.
        """

    def all_reduce(self, flat: Tensor, spans: Spans = ()) -> Transfer:
        """Sum ``flat`` (1D) over the group, on all ranks; ``flat`` may be overwritten.

        Args:
            flat: 1D.
            spans: what it holds.
        """
        if self.size == 1 or not flat.numel():
            return flat
        part = fill_up(-(-flat.numel() // self.size), self.multiple)
        numel, missing = flat.numel(), part * self.size - flat.numel()
        padded = torch.nn.functional.pad(flat, (0, missing)) if missing else flat  # a pad by nothing is a copy
        splits = [part] * self.size
        contents = split_spans(spans, splits) if spans else ()
        mine = yield from self.reduce_scatter(padded, splits, contents)
        gathered = yield from self.gather_sums(mine, contents[self.rank] if contents else ())
        return gathered[:numel]

    def gather_sums(self, sums: Tensor, spans: Spans = ()) -> Transfer:
        """Gather the sums (1D) of every rank of the group, in rank order; see ``SumsGather``."""
        return self.sums.gather(self, sums, spans)


def all_gather(
    collectives: Collectives, shard: Tensor, out: Tensor | None = None, operation: str = "all_gather"
) -> Transfer:
    """Gather as it is; see ``GatherHop.all_gather``. ``operation``: what it is for."""
    if collectives.size == 1 or not shard.numel():
        return shard
    gathered = shard.new_empty(collectives.size * shard.numel()) if out is None else out
    yield collectives.all_gather(gathered, shard.contiguous(), operation)
    return gathered
