# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer between groups: groups train apart, and every so many steps what they have changed is averaged.

Note [Outer steps]
    With an outer optimizer each group is a world of its own: gradients, norms and clipping are the group's, and
    nothing crosses between groups in an *inner step* but whether gradients have overflowed, where DeepSpeed looks for
    that: with fp16, and with bf16 in its stages 1 and 2. Every H inner steps an *outer step* takes, of each element of
    the optimizer's weights θ, the mean over groups of what they have moved away from the *anchor*, what all groups
    agreed on last, for a gradient:

        Δ = mean(anchor - θ);  v = μ v + Δ;  w = w - η (Δ + μ v), or w - η v without Nesterov's

    (DiLoCo, arXiv:2311.08105; the order of PyTorch's SGD). w, the *outer weights*, becomes the anchor, and θ is set to
    that. With os = I a rank has its I-slice of θ, as the ranks of its number in all groups have: Δ is reduced over
    these, each of them has w and v of one row of k, and w is gathered. In 8 and 4 bits the reduction keeps its errors,
    and w is sent as its difference from the anchor; all ranks add the same decoded bits, so anchors are equal to the
    bit, and what the difference lacks comes with the next one, since w is exact.

    In fragments (Streaming DiLoCo, arXiv:2501.18512) the model leaves in parts, each after another inner step of the
    H. One that travels under the next inner steps is used some steps after it left: θ is set to the anchor then, so
    what those steps have moved of the fragment is lost.

    The anchor is rounded to the precision of θ, which may be bf16, as soon as it arrives: θ is set to exactly these
    values, so Δ counts no rounding as movement, and a checkpoint, which saves the anchor as weights, loses nothing of
    it. w stays in fp32.

    A fragment that is sent is always used. So a checkpoint waits for fragments in flight and saves the state after
    their outer step: the new anchor, w, v and the errors of the reduction, together with the step in which θ is set.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduced
from deepspeed_ext.comm.hops import GatherHop, ReduceHop, Transfer, Update
from deepspeed_ext.comm.packing import fill_up, record_on_current_stream
from deepspeed_ext.comm.spans import ShardSpan, Span
from deepspeed_ext.comm.transfer_queue import Started, TransferQueue
from deepspeed_ext.config.settings import MOST_AT_ONCE, OuterSettings
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.shards import FlatShard


class InnerStepsOnly:
    """No outer optimizer: what an optimizer of ours tells of its steps is of no interest."""

    def begin_step(self) -> None:
        """Called before a step.

        Raises:
            RuntimeError: the outer weights are in the place of the group's.
        """

    def after_step(self, number: int) -> None:
        """Called when the optimizer has stepped a flat shard, whose weights may be written."""

    def finish_step(self, applied: bool) -> None:
        """Called at the end of each step. ``applied``: whether it was taken."""

    def offload(self) -> None:
        """Move what is held to the host."""

    def reload(self) -> None:
        """Move it back."""

    def restart(self) -> None:
        """Begin anew from the optimizer's weights, which somebody has set on all ranks."""

    def take(self, number: int, span: Span) -> None:
        """Take over elements of a flat shard that somebody has set on all ranks."""

    def drop(self) -> None:
        """Leave what is on its way: nobody will read it."""

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let the optimizer and the model have the outer weights in this context."""
        yield


@contextmanager
def outer_weights(engine: Any) -> Iterator[None]:
    """Evaluate the outer weights, what all groups agreed on last, in this context, and not those of a group.

    Collective over all ranks. Without an outer optimizer it changes nothing.

    Args:
        engine: DeepSpeed's; no step may be taken in this context.
    """
    outer = getattr(engine.optimizer, "outer", None)
    with outer.in_place() if isinstance(outer, InnerStepsOnly) else nullcontext():
        yield


class OuterShards(Protocol):
    """The optimizer of a group: its flat shards, in which all ranks of one number have the same elements."""

    def flat_shards(self) -> list[FlatShard]: ...
    def shard_weights(self, number: int) -> Tensor: ...  # 1D
    def shard_gradient(self, number: int) -> Tensor: ...  # at the accumulation boundary, 1D; may be written
    def send_parameters(self) -> None: ...  # makes all ranks of the group hold these weights; collective


@dataclass
class Fragment:
    """Elements of a flat shard that cross together.

    Attributes:
        number: of the flat shard.
        span: of the shard.
        offset: after how many inner steps, modulo H, it leaves.
        width: of a row: the elements of one group; filled up.
        anchor: fp32, (k, width), of values that the optimizer's weights can hold: what all groups agreed on last.
        weights: fp32, (width): of this rank's row, exact.
        momentum: the same of the outer optimizer.
        started: on its way, or there.
        stepped: weights and momentum after the outer step of what is on its way, where these are kept on the host.
        due: inner step after which it is used; 0 if it is not on its way.
    """

    number: int
    span: Span
    offset: int
    width: int
    anchor: Tensor
    weights: Tensor
    momentum: Tensor
    started: Started | None = None
    stepped: tuple[Tensor, Tensor] | None = None
    due: int = 0

    @property
    def flat(self) -> Tensor:
        """The anchor of the elements, 1D."""
        return self.anchor.view(-1)[: self.span.numel]

    def rows(self, groups: int) -> list[Span]:
        """Return the elements of the shard that each row has, without padding."""
        whole = Span(0, self.span.numel)
        cut = [Span(row * self.width, self.width).common(whole) for row in range(groups)]
        return [one.shifted(self.span.start) for one in cut]


class OuterOptimizer(InnerStepsOnly):
    """Brings groups together. See Note [Outer steps].

    Args:
        context: constants of the group's optimizer.
        settings: how, and when.
        hops: reduction and gather over the ranks of this number in all groups.
        shards: the group's optimizer.
        report: receives the measures of each outer step; None if nothing is reported.

    Attributes:
        settings: the same.
        topology: process groups of all groups.
        reduce: reduction between groups, with its errors.
        step: inner steps since the beginning, or since ``restart``; those of the warm-up and skipped ones included.
        fragments: in the order in which they leave.
    """

    def __init__(
        self,
        context: Context,
        *,
        settings: OuterSettings,
        hops: tuple[ReduceHop, GatherHop],
        shards: OuterShards,
        report: Callable[[Mapping[str, float]], None] | None = None,
    ) -> None:
        self.settings, self.topology = settings, context.topology.whole
        self.step = 0
        self.reduce, self._gather = hops
        self._shards = shards
        self._report = report
        self._device = get_accelerator().current_device_name()
        self._kept = "cpu" if settings.offload == "cpu" else self._device
        self._queue = TransferQueue(bool(settings.delay), True, all(hop.pairwise for hop in hops), owed=True)
        self._sums: Tensor | None = None  # of squares, of this step's fragments; see ``_observe``
        self._used = False  # whether a fragment has been used in this step
        self._shown: list[Tensor] | None = None  # weights of the group, while the outer ones are in their place
        numbers = [shard.number for shard in shards.flat_shards()]
        self.fragments = list(self._cut([self._weights(number).numel() for number in numbers]))
        self.restart()

    def _cut(self, numels: Sequence[int]) -> Iterator[Fragment]:
        """Divide the shards among fragments of as many elements."""
        total, parts = sum(numels), len(self.settings.offsets)
        for part, offset in enumerate(self.settings.offsets):
            mine = Span.between(part * total // parts, (part + 1) * total // parts)
            before = 0
            for number, numel in enumerate(numels):
                here = Span(before, numel).common(mine)
                before += numel
                for start in range(here.start, here.stop, MOST_AT_ONCE):
                    span = Span(start, min(MOST_AT_ONCE, here.stop - start)).shifted(numel - before)
                    yield self._make(number, span, offset)

    def _make(self, number: int, span: Span, offset: int) -> Fragment:
        groups = self.reduce.size
        width = fill_up(-(-span.numel // groups), max(self.reduce.multiple, self._gather.multiple))
        anchor, weights, momentum = (self._zeros(shape) for shape in ((groups, width), (width,), (width,)))
        return Fragment(number, span, offset, width, anchor=anchor, weights=weights, momentum=momentum)

    def _weights(self, number: int) -> Tensor:
        """Return the optimizer's weights of a flat shard, 1D."""
        return self._shards.shard_weights(number).data  # without a graph, and without counting versions

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        pinned = self._kept == "cpu" != self._device
        made = torch.zeros(*shape, dtype=torch.float32, device=self._kept)
        return get_accelerator().pin_memory(made) if pinned else made

    # When ############################################################################################

    @property
    def warming_up(self) -> bool:
        """Whether the step that runs, or comes next, is one of the warm-up."""
        return self.step < self.settings.warmup_steps

    def begin_step(self) -> None:
        """Refuse a step of outer weights; see ``InnerStepsOnly``."""
        if self._shown is not None:
            raise RuntimeError(
                "The outer weights are in the place of this group's, for evaluation and for files, so no step can be "
                "taken. Leave the context deepspeed_ext.outer_weights before engine.step()."
            )

    def after_step(self, number: int) -> None:
        """Use what is due of a flat shard, and send what leaves; see ``InnerStepsOnly``."""
        step = self.step + 1
        if step < self.settings.warmup_steps:
            return
        for fragment in self._of(number):
            if step == self.settings.warmup_steps:
                self._begin(fragment)
            else:
                self._move(fragment, step)

    def _move(self, fragment: Fragment, step: int) -> None:
        if fragment.due == step:
            self._use(fragment)
        if (step - self.settings.warmup_steps) % self.settings.steps == fragment.offset:
            self._leave(fragment)
            fragment.due = step + self.settings.delay
            if not self.settings.delay:
                self._use(fragment)

    def finish_step(self, applied: bool) -> None:
        """Count a step; see ``InnerStepsOnly``.

        One that was skipped counts, too, for other groups may have taken it: they wait for what leaves after it.
        """
        if not applied:
            for number in self._numbers:
                self.after_step(number)
            if self._used:
                self._shards.send_parameters()
        self.step += 1
        if self._used:
            self.reduce.errors.finish_step(True)
            self._tell()
        self._used = False

    @property
    def _numbers(self) -> list[int]:
        """Of flat shards."""
        return sorted({fragment.number for fragment in self.fragments})

    def _of(self, number: int) -> Iterator[Fragment]:
        return (fragment for fragment in self.fragments if fragment.number == number)

    # What crosses ####################################################################################

    def _leave(self, fragment: Fragment) -> None:
        """Send what this group has changed of a fragment."""
        change = torch.zeros(fragment.anchor.numel(), dtype=torch.float32, device=self._device)
        mine = change[: fragment.span.numel]
        mine.copy_(fragment.flat)
        mine.sub_(fragment.span.of(self._weights(fragment.number)).to(self._device))
        self._observe(0, mine)
        change.div_(self.reduce.size)
        fragment.started = self._queue.start(self._cross(fragment, change))

    def _cross(self, fragment: Fragment, change: Tensor) -> Transfer:
        """Reduce a change, take the outer step of this rank's row, and gather; gives the new anchor, 1D.

        Args:
            change: fp32, (k * width), of this group by k; may be overwritten.
        """
        change = record_on_current_stream(change)  # another stream's memory, which nobody else keeps
        if self.settings.bits == 16:
            change = change.bfloat16()
        mean = yield from self.reduce.reduce_scatter(change, [fragment.width] * self.reduce.size, self._told(fragment))
        weights = self._take_outer_step(fragment, mean.float())
        del change, mean
        if self.reduce.size == 1:
            return weights
        if self._gather.differences is None:
            return (yield from self._gather.all_gather(weights))
        anchor = fragment.anchor.to(self._device, non_blocking=True, copy=True)
        held = anchor[self.reduce.rank].clone()
        (code,) = self._gather.differences.encode([Update(lambda: weights, held, fragment.width)], lambda most: most)
        arrived = yield from self._gather.all_gather(code)
        self._gather.differences.write(arrived.view(self.reduce.size, -1), anchor)
        return anchor.view(-1)

    def _told(self, fragment: Fragment) -> Any:
        """Return what each row holds, for a reduction that keeps errors."""
        if not self.reduce.keeps_errors:
            return ()
        rows = fragment.rows(self.reduce.size)
        return tuple((ShardSpan(fragment.number, row, *span),) for row, span in enumerate(rows))

    def _take_outer_step(self, fragment: Fragment, gradient: Tensor) -> Tensor:
        """Return the outer weights of this rank's row after a step of the outer optimizer; PyTorch's SGD.

        The host must not wait here: what is kept there is written when the fragment has arrived.
        """
        kept = fragment.weights, fragment.momentum
        weights, momentum = (one.to(self._device, non_blocking=True) for one in kept)
        rate, damping = self.settings.lr, self.settings.momentum
        self._observe(1, gradient)
        momentum.mul_(damping).add_(gradient)
        weights.sub_(gradient.add(momentum, alpha=damping) if self.settings.nesterov else momentum, alpha=rate)
        if weights is not fragment.weights:
            fragment.stepped = weights, momentum
        return weights

    def _arrive(self, fragment: Fragment) -> None:
        """Have the anchor of a fragment that is on its way."""
        if fragment.started is not None:
            arrived = self._queue.finish(fragment.started)
            fragment.anchor.view(-1).copy_(arrived.to(self._weights(fragment.number).dtype))
            if fragment.stepped is not None:
                fragment.weights.copy_(record_on_current_stream(fragment.stepped[0]))
                fragment.momentum.copy_(record_on_current_stream(fragment.stepped[1]))
            fragment.started = fragment.stepped = None

    def _use(self, fragment: Fragment) -> None:
        """Set the optimizer's weights to the anchor that has arrived."""
        self._arrive(fragment)
        fragment.span.of(self._weights(fragment.number)).copy_(fragment.flat)
        fragment.due = 0
        self._used = True

    def complete_gradients(self) -> None:
        """Average gradients over groups, in a step of the warm-up. Collective."""
        if not self.warming_up or self.reduce.size == 1:
            return
        for number in self._numbers:
            gradient = self._shards.shard_gradient(number)
            mean = all_reduced(gradient.to(self._device), torch.distributed.ReduceOp.SUM, self.topology.inter)
            gradient.copy_(mean.div_(self.reduce.size))

    # Weights that somebody else has set ################################################################

    def settle(self) -> None:
        """Wait until what is on its way has arrived, with its errors; it is used when it is due."""
        for fragment in self.fragments:
            self._arrive(fragment)
        self.reduce.errors.commit()

    def restart(self) -> None:
        """Begin anew; see ``InnerStepsOnly``."""
        self.settle()
        self.step = 0
        self.reduce.errors.forget()
        for fragment in self.fragments:
            self._begin(fragment)

    def _begin(self, fragment: Fragment) -> None:
        fragment.due = 0
        fragment.momentum.zero_()
        fragment.anchor.zero_()
        fragment.flat.copy_(fragment.span.of(self._weights(fragment.number)))
        fragment.weights.copy_(fragment.anchor[self.reduce.rank])

    def take(self, number: int, span: Span) -> None:
        """Take over elements that were set; see ``InnerStepsOnly``."""
        self.settle()
        for fragment in self._of(number):
            both = fragment.span.common(span)
            if both.numel:
                self._take(fragment, both.shifted(-fragment.span.start))

    def _take(self, fragment: Fragment, mine: Span) -> None:
        """Take over elements of a fragment."""
        here = mine.shifted(fragment.span.start)
        mine.of(fragment.flat).copy_(here.of(self._weights(fragment.number)))
        row = Span(self.reduce.rank * fragment.width, fragment.width)
        own = mine.common(row)
        if own.numel:
            own.shifted(-row.start).of(fragment.weights).copy_(own.of(fragment.flat))

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Show the anchors, which all groups have, instead of the group's weights; see ``InnerStepsOnly``.

        Collective. No step may run in this context.
        """
        if self._shown is not None or self.warming_up:
            yield
            return
        self.settle()
        self._shown = [self._weights(number).clone() for number in self._numbers]
        try:
            for fragment in self.fragments:
                fragment.span.of(self._weights(fragment.number)).copy_(fragment.flat)
            self._shards.send_parameters()  # refused while parameters are offloaded
            yield
        finally:
            for number, weights in zip(self._numbers, self._shown, strict=True):
                self._weights(number).copy_(weights)
            self._shown = None
            self._shards.send_parameters()

    # States ##########################################################################################

    def state(self) -> dict[str, Any]:
        """Return what a run that goes on needs beside the anchors: plain values, and tensors on the host."""
        self.settle()
        fragments = [(one.due, one.weights.cpu().clone(), one.momentum.cpu().clone()) for one in self.fragments]
        return {"step": self.step, "fragments": fragments, "errors": self.reduce.errors.states()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load the same. The optimizer's weights are the anchors."""
        self.restart()
        self.step = state["step"]
        for fragment, (due, weights, momentum) in zip(self.fragments, state["fragments"], strict=True):
            fragment.due = due
            fragment.weights.copy_(weights)
            fragment.momentum.copy_(momentum)
        self.reduce.errors.load_states(state["errors"])

    def described(self) -> dict[str, Any]:
        """Return what must be the same for states to be taken as they are."""
        spans = [(one.number, *one.span, one.offset, one.width) for one in self.fragments]
        return {"groups": self.reduce.size, "rank": self.topology.rank, "fragments": spans, **self.settings.as_dict()}

    def offload(self) -> None:
        """Move anchors and outer states to the host; see ``InnerStepsOnly``."""
        self._move_to("cpu")

    def reload(self) -> None:
        """Move them back; see ``InnerStepsOnly``."""
        self._move_to(self._kept)

    def _move_to(self, device: str) -> None:
        self.settle()
        self.reduce.errors.offload()
        for fragment in self.fragments:
            for name in ("anchor", "weights", "momentum"):
                setattr(fragment, name, getattr(fragment, name).to(device))

    def drop(self) -> None:
        """Leave transfers; see ``InnerStepsOnly``."""
        self._queue.drop()

    # What is reported ################################################################################

    def _observe(self, place: int, values: Tensor) -> None:
        """Add the squares of a group's change (place 0), or of their mean (place 1), if anybody wants to know."""
        if self._report is None:
            return
        if self._sums is None:
            self._sums = torch.zeros(2, device=self._device)
        self._sums[place] += values.square().sum()

    def _tell(self) -> None:
        """Report the norm of the outer gradient, and how far groups are from their mean: collective.

        The mean over groups of |Δj - Δ|² is that of |Δj|², less |Δ|².
        """
        if self._report is None or self._sums is None:
            return
        apart, mean = all_reduced(self._sums, torch.distributed.ReduceOp.SUM, self.topology.world).tolist()
        apart /= self.reduce.size
        self._sums = None
        self._report({"gradient_norm": mean**0.5, "distance_of_groups": max(0.0, apart - mean) ** 0.5})
