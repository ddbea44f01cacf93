# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""An outer optimizer between groups: groups train independently, and their changes are averaged every H steps.

Note [Outer steps]
    With an outer optimizer gradients, norms, and clipping are per group. In an *inner step* groups exchange only an
    overflow flag, if DeepSpeed checks for overflows: with fp16, and with bf16 in its stages 1 and 2. Every H inner
    steps, an *outer step* uses the group-averaged drift of the optimizer's weights θ from the *anchor*, the last
    values that are equal in all groups, as its gradient:

        Δ = mean(anchor - θ);  v = μ v + Δ;  w = w - η (Δ + μ v), or w - η v without Nesterov's

    (DiLoCo, arXiv:2311.08105; the order of PyTorch's SGD). w, the *outer weights*, becomes the anchor, and θ is set to
    that. With os = I the ranks of one number in all groups have the same I-slice of θ. Δ is reduced over these ranks,
    each of them has one of k rows of w and v, and w is gathered. In 8 and 4 bits the reduction has error feedback, and
    w is sent as its difference from the anchor. All ranks add the same decoded bits, so anchors are bitwise identical.
    The next difference contains the quantization error, because w is exact.

    In fragments (Streaming DiLoCo, arXiv:2501.18512) parts of the model are sent after different inner steps of the H.
    If a fragment is sent during the next inner steps, it is applied some steps later. θ is set to the anchor then, so
    changes of the fragment in those steps are lost.

    A received anchor is rounded to the precision of θ, which may be bf16. θ is set to exactly these values, so Δ
    contains no rounding, and a checkpoint, which saves the anchor as weights, is exact. w stays in fp32.

    A fragment that is sent is always applied. So a checkpoint waits for fragments in flight and saves the state after
    their outer step: the new anchor, w, v, and the errors of the reduction, together with the step in which θ is set.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.agreement import all_reduce
from deepspeed_ext.comm.hops import GatherHop, ReduceHop, Transfer, Update
from deepspeed_ext.comm.packing import fill_up, record_on_current_stream
from deepspeed_ext.comm.spans import ShardSpan, Span
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue
from deepspeed_ext.config.settings import MAX_TRANSFER_NUMEL, OuterSettings
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.shards import FlatShard


class OuterHooks:
    """Methods that an optimizer calls on its outer optimizer; they do nothing in runs without one."""

    def begin_step(self) -> None:
        """Called before a step.

        Raises:
            RuntimeError: the model holds the outer weights.
        """

    def after_step(self, number: int) -> None:
        """Called when the optimizer has stepped a flat shard, whose weights may be written."""

    def finish_step(self, applied: bool) -> None:
        """Called at the end of each step. ``applied``: whether it was not skipped."""

    def offload(self) -> None:
        """Move states to the host."""

    def reload(self) -> None:
        """Move states back to the device."""

    def restart(self) -> None:
        """Reset to the optimizer's weights, which were set on all ranks."""

    def copy_weights(self, number: int, span: Span) -> None:
        """Copy elements of a flat shard that were set on all ranks."""

    def drop(self) -> None:
        """Abandon transfers in flight."""

    @contextmanager
    def use_outer_weights(self) -> Iterator[None]:
        """Set the optimizer's and the model's weights to the outer weights in this context."""
        yield


@contextmanager
def outer_weights(engine: Any) -> Iterator[None]:
    """Evaluate the outer weights, which are equal in all groups, instead of a group's weights in this context.

    Collective over all ranks. Without an outer optimizer it has no effect.

    Args:
        engine: DeepSpeed's engine; no step may be taken in this context.
    """
    outer = getattr(engine.optimizer, "outer", None)
    with outer.use_outer_weights() if isinstance(outer, OuterHooks) else nullcontext():
        yield


class OuterShards(Protocol):
    """The optimizer of a group, whose flat shards have the same elements on ranks of one number in all groups."""

    def flat_shards(self) -> list[FlatShard]: ...
    def shard_weights(self, number: int) -> Tensor: ...  # 1D
    def shard_gradient(self, number: int) -> Tensor: ...  # at the accumulation boundary, 1D; may be written
    def send_parameters(self) -> None: ...  # sends these weights to all ranks of the group; collective


@dataclass
class Fragment:
    """Elements of a flat shard that are sent together between groups.

    Attributes:
        number: number of the flat shard.
        span: elements of the shard.
        offset: number of inner steps, modulo H, after which it is sent.
        width: elements of a row, which one group owns, with padding.
        anchor: fp32, (k, width): last values that are equal in all groups, representable in the dtype of the weights.
        weights: fp32, (width): exact outer weights of this rank's row.
        momentum: fp32, (width): momentum of this rank's row.
        started: transfer in flight, or received and not yet read.
        stepped: weights and momentum after the outer step of the transfer, if they are kept on the host.
        due: inner step after which the transfer is applied; 0 without a transfer.
    """

    number: int
    span: Span
    offset: int
    width: int
    anchor: Tensor
    weights: Tensor
    momentum: Tensor
    started: ActiveTransfer | None = None
    stepped: tuple[Tensor, Tensor] | None = None
    due: int = 0

    @property
    def flat(self) -> Tensor:
        """The anchor of the elements, 1D."""
        return self.anchor.view(-1)[: self.span.numel]

    def rows(self, groups: int) -> list[Span]:
        """Return the elements of the shard in each row, without padding."""
        unpadded = Span(0, self.span.numel)
        rows = [Span(row * self.width, self.width).common(unpadded) for row in range(groups)]
        return [row.shifted(self.span.start) for row in rows]


class OuterOptimizer(OuterHooks):
    """Averages the changes of groups. See Note [Outer steps].

    Args:
        context: constants of the group's optimizer.
        hops: reduction and gather over the ranks of this number in all groups.
        shards: the group's optimizer.
        report: receives the measures of each outer step; None if nothing is reported.

    Attributes:
        settings: settings of the outer optimizer.
        topology: process groups of all groups.
        reduce: reduction between groups, with its errors.
        step: inner steps since the beginning, or since ``restart``, including warm-up and skipped steps.
        fragments: fragments in the order in which they are sent.
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
        self.settings, self.topology = settings, context.topology.all_groups
        self.step = 0
        self.reduce, self._gather = hops
        self._shards = shards
        self._report = report
        self._device = get_accelerator().current_device_name()
        self._state_device = "cpu" if settings.offload == "cpu" else self._device
        self._queue = TransferQueue(
            bool(settings.delay), True, all(hop.pairwise for hop in hops), finish_before_exit=True
        )
        self._sums: Tensor | None = None  # sums of squares of this step's fragments; see ``_add_squares``
        self._has_applied = False  # whether a fragment has been applied in this step
        self._group_weights: list[Tensor] | None = None  # the group's weights while the model holds the outer weights
        numbers = [shard.number for shard in shards.flat_shards()]
        self.fragments = list(self._split_shards([self._weights(number).numel() for number in numbers]))
        self.restart()

    def _split_shards(self, numels: Sequence[int]) -> Iterator[Fragment]:
        """Divide the shards into parts of equal size, one for each offset, and these into fragments."""
        total, parts = sum(numels), len(self.settings.offsets)
        for part, offset in enumerate(self.settings.offsets):
            elements = Span.between(part * total // parts, (part + 1) * total // parts)
            before = 0
            for number, numel in enumerate(numels):
                common = Span(before, numel).common(elements)
                before += numel
                for start in range(common.start, common.stop, MAX_TRANSFER_NUMEL):
                    span = Span(start, min(MAX_TRANSFER_NUMEL, common.stop - start)).shifted(numel - before)
                    yield self._make_fragment(number, span, offset)

    def _make_fragment(self, number: int, span: Span, offset: int) -> Fragment:
        groups = self.reduce.size
        width = fill_up(-(-span.numel // groups), max(self.reduce.multiple, self._gather.multiple))
        anchor, weights, momentum = (self._zeros(shape) for shape in ((groups, width), (width,), (width,)))
        return Fragment(number, span, offset, width, anchor=anchor, weights=weights, momentum=momentum)

    def _weights(self, number: int) -> Tensor:
        """Return the optimizer's weights of a flat shard, 1D."""
        return self._shards.shard_weights(number).data  # without a graph, and without counting versions

    def _zeros(self, shape: Sequence[int]) -> Tensor:
        pin_memory = self._state_device == "cpu" != self._device
        zeros = torch.zeros(*shape, dtype=torch.float32, device=self._state_device)
        return get_accelerator().pin_memory(zeros) if pin_memory else zeros

    # Schedule ########################################################################################

    @property
    def warming_up(self) -> bool:
        """Whether the current or next step is part of the warm-up."""
        return self.step < self.settings.warmup_steps

    def begin_step(self) -> None:
        """Reject a step of outer weights; see ``OuterHooks``."""
        if self._group_weights is not None:
            raise RuntimeError(
                "Cannot step while the model holds the outer weights. Exit the context deepspeed_ext.outer_weights "
                "before engine.step()."
            )

    def after_step(self, number: int) -> None:
        """Apply the due fragments of a flat shard, and send others; see ``OuterHooks``."""
        step = self.step + 1
        if step < self.settings.warmup_steps:
            return
        for fragment in self._fragments_of(number):
            if step == self.settings.warmup_steps:
                self._reset_fragment(fragment)
            else:
                self._advance_fragment(fragment, step)

    def _advance_fragment(self, fragment: Fragment, step: int) -> None:
        if fragment.due == step:
            self._apply_fragment(fragment)
        if (step - self.settings.warmup_steps) % self.settings.steps == fragment.offset:
            self._send_fragment(fragment)
            fragment.due = step + self.settings.delay
            if not self.settings.delay:
                self._apply_fragment(fragment)

    def finish_step(self, applied: bool) -> None:
        """Count a step; see ``OuterHooks``.

        Skipped steps count, too, because other groups may not have skipped them, and wait for the same fragments.
        """
        if not applied:
            for number in self._numbers:
                self.after_step(number)
            if self._has_applied:
                self._shards.send_parameters()  # a skipped step does not send the new weights
        self.step += 1
        if self._has_applied:
            self.reduce.errors.finish_step(True)
            self._report_norms()
        self._has_applied = False

    @property
    def _numbers(self) -> list[int]:
        """Numbers of flat shards."""
        return sorted({fragment.number for fragment in self.fragments})

    def _fragments_of(self, number: int) -> Iterator[Fragment]:
        return (fragment for fragment in self.fragments if fragment.number == number)

    # Communication ###################################################################################

    def _send_fragment(self, fragment: Fragment) -> None:
        """Start the outer step of a fragment with this group's change."""
        change = torch.zeros(fragment.anchor.numel(), dtype=torch.float32, device=self._device)  # zero in the padding
        unpadded = change[: fragment.span.numel]
        unpadded.copy_(fragment.flat)
        unpadded.sub_(fragment.span.of(self._weights(fragment.number)).to(self._device))
        self._add_squares(0, unpadded)
        change.div_(self.reduce.size)
        fragment.started = self._queue.start(self._exchange_change(fragment, change))

    def _exchange_change(self, fragment: Fragment, change: Tensor) -> Transfer:
        """Reduce a change, take the outer step of this rank's row, and gather; returns the new anchor, 1D.

        Args:
            change: fp32, (k * width), this group's change divided by k; may be overwritten.
        """
        change = record_on_current_stream(change)  # another stream's memory, without other references
        if self.settings.bits == 16:
            change = change.bfloat16()
        mean = yield from self.reduce.reduce_scatter(
            change, [fragment.width] * self.reduce.size, self._error_feedback_spans(fragment)
        )
        weights = self._take_outer_step(fragment, mean.float())
        del change, mean
        if self.reduce.size == 1:
            return weights
        if self._gather.differences is None:
            return (yield from self._gather.all_gather(weights))
        anchor = fragment.anchor.to(self._device, non_blocking=True, copy=True)
        row = anchor[self.reduce.rank].clone()
        (code,) = self._gather.differences.encode([Update(lambda: weights, row, fragment.width)], lambda most: most)
        codes = yield from self._gather.all_gather(code)
        # Also on this rank's row: anchors must be equal on all ranks.
        self._gather.differences.write(codes.view(self.reduce.size, -1), anchor)
        return anchor.view(-1)

    def _error_feedback_spans(self, fragment: Fragment) -> Any:
        """Return the contents of each row for error feedback."""
        if not self.reduce.keeps_errors:
            return ()
        rows = fragment.rows(self.reduce.size)
        return tuple((ShardSpan(fragment.number, row, *span),) for row, span in enumerate(rows))

    def _take_outer_step(self, fragment: Fragment, gradient: Tensor) -> Tensor:
        """Return the outer weights of this rank's row after a step of the outer optimizer; PyTorch's SGD.

        The host must not wait here, so states on the host are written when the fragment has been received.
        """
        states = fragment.weights, fragment.momentum
        weights, momentum = (state.to(self._device, non_blocking=True) for state in states)
        rate, damping = self.settings.lr, self.settings.momentum
        self._add_squares(1, gradient)
        momentum.mul_(damping).add_(gradient)
        weights.sub_(gradient.add(momentum, alpha=damping) if self.settings.nesterov else momentum, alpha=rate)
        if weights is not fragment.weights:
            fragment.stepped = weights, momentum
        return weights

    def _receive_fragment(self, fragment: Fragment) -> None:
        """Wait for a fragment in flight, and write its anchor."""
        if fragment.started is not None:
            anchor = self._queue.finish(fragment.started)
            fragment.anchor.view(-1).copy_(anchor.to(self._weights(fragment.number).dtype))  # rounded
            if fragment.stepped is not None:  # computed on the stream of the transfer
                fragment.weights.copy_(record_on_current_stream(fragment.stepped[0]))
                fragment.momentum.copy_(record_on_current_stream(fragment.stepped[1]))
            fragment.started = fragment.stepped = None

    def _apply_fragment(self, fragment: Fragment) -> None:
        """Set the optimizer's weights to the received anchor."""
        self._receive_fragment(fragment)
        fragment.span.of(self._weights(fragment.number)).copy_(fragment.flat)
        fragment.due = 0
        self._has_applied = True

    def complete_gradients(self) -> None:
        """Average gradients over groups in the warm-up. Collective."""
        if not self.warming_up or self.reduce.size == 1:
            return
        for number in self._numbers:
            gradient = self._shards.shard_gradient(number)
            mean = all_reduce(gradient.to(self._device), torch.distributed.ReduceOp.SUM, self.topology.inter)
            gradient.copy_(mean.div_(self.reduce.size))

    # Weights that were set outside of a step ##########################################################

    def receive_fragments(self) -> None:
        """Receive fragments in flight, and commit their errors; they are applied when they are due."""
        for fragment in self.fragments:
            self._receive_fragment(fragment)
        self.reduce.errors.commit()

    def restart(self) -> None:
        """Reset all states; see ``OuterHooks``."""
        self.receive_fragments()
        self.step = 0
        self.reduce.errors.reset()
        for fragment in self.fragments:
            self._reset_fragment(fragment)

    def _reset_fragment(self, fragment: Fragment) -> None:
        fragment.due = 0
        fragment.momentum.zero_()
        fragment.anchor.zero_()  # with the padding
        fragment.flat.copy_(fragment.span.of(self._weights(fragment.number)))
        fragment.weights.copy_(fragment.anchor[self.reduce.rank])

    def copy_weights(self, number: int, span: Span) -> None:
        """Copy elements that were set; see ``OuterHooks``."""
        self.receive_fragments()
        for fragment in self._fragments_of(number):
            common = fragment.span.common(span)
            if common.numel:
                self._copy_to_fragment(fragment, common.shifted(-fragment.span.start))

    def _copy_to_fragment(self, fragment: Fragment, fragment_span: Span) -> None:
        """Copy elements of a fragment to its anchor and, in this rank's row, to the outer weights."""
        in_shard = fragment_span.shifted(fragment.span.start)
        fragment_span.of(fragment.flat).copy_(in_shard.of(self._weights(fragment.number)))
        row = Span(self.reduce.rank * fragment.width, fragment.width)
        own = fragment_span.common(row)
        if own.numel:
            own.shifted(-row.start).of(fragment.weights).copy_(own.of(fragment.flat))

    @contextmanager
    def use_outer_weights(self) -> Iterator[None]:
        """Replace the group's weights by the anchors, which are equal in all groups; see ``OuterHooks``.

        Collective. No step may run in this context.
        """
        if self._group_weights is not None or self.warming_up:
            yield
            return
        self.receive_fragments()
        self._group_weights = [self._weights(number).clone() for number in self._numbers]
        try:
            for fragment in self.fragments:
                fragment.span.of(self._weights(fragment.number)).copy_(fragment.flat)
            self._shards.send_parameters()  # refused while parameters are offloaded
            yield
        finally:
            for number, weights in zip(self._numbers, self._group_weights, strict=True):
                self._weights(number).copy_(weights)
            self._group_weights = None
            self._shards.send_parameters()

    # States ##########################################################################################

    def state(self) -> dict[str, Any]:
        """Return all states except the anchors: plain values, and tensors on the host."""
        self.receive_fragments()
        fragments = [(part.due, part.weights.cpu().clone(), part.momentum.cpu().clone()) for part in self.fragments]
        return {"step": self.step, "fragments": fragments, "errors": self.reduce.errors.states()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Load states. The optimizer's weights must be the anchors."""
        self.restart()
        self.step = state["step"]
        for fragment, (due, weights, momentum) in zip(self.fragments, state["fragments"], strict=True):
            fragment.due = due
            fragment.weights.copy_(weights)
            fragment.momentum.copy_(momentum)
        self.reduce.errors.load_states(state["errors"])

    def compatibility(self) -> dict[str, Any]:
        """Return values that two runs must share, so that states of one can be loaded in the other."""
        spans = [(part.number, *part.span, part.offset, part.width) for part in self.fragments]
        return {"groups": self.reduce.size, "rank": self.topology.rank, "fragments": spans, **self.settings.as_dict()}

    def offload(self) -> None:
        """Move anchors and outer states to the host; see ``OuterHooks``."""
        self._move_to("cpu")

    def reload(self) -> None:
        """Move anchors and outer states back; see ``OuterHooks``."""
        self._move_to(self._state_device)

    def _move_to(self, device: str) -> None:
        self.receive_fragments()
        self.reduce.errors.offload()
        for fragment in self.fragments:
            for name in ("anchor", "weights", "momentum"):
                setattr(fragment, name, getattr(fragment, name).to(device))

    def drop(self) -> None:
        """Abandon transfers; see ``OuterHooks``."""
        self._queue.drop()

    # Reports #########################################################################################

    def _add_squares(self, index: int, values: Tensor) -> None:
        """Add the squares of a group's change (place 0), or of the mean change (place 1), if there is a report."""
        if self._report is None:
            return
        if self._sums is None:
            self._sums = torch.zeros(2, device=self._device)
        self._sums[index] += values.square().sum()

    def _report_norms(self) -> None:
        """Report the norm of the outer gradient, and the distance of groups from their mean. Collective.

        The mean over groups of |Δj - Δ|² is the mean of |Δj|², less |Δ|².
        """
        if self._report is None or self._sums is None:
            return
        changes, mean = all_reduce(self._sums, torch.distributed.ReduceOp.SUM, self.topology.world).tolist()
        changes /= self.reduce.size
        self._sums = None
        self._report({"gradient_norm": mean**0.5, "distance_of_groups": max(0.0, changes - mean) ** 0.5})
