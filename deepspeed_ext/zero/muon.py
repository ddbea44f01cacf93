# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Distributed Muon: complete matrices are orthogonalized by owners, under every strategy.

Note [Muon]
    Muon (K. Jordan et al., 2024) replaces the gradient of a matrix by its momentum, orthogonalized by a Newton-Schulz
    iteration. The momentum is elementwise, so it stays on the shards, in ZeRO's layout. Only the iteration needs
    complete matrices, once in a step, on one rank each, its *owner*, as in the distributed Muon of Moonlight
    (arXiv:2502.16982, section 2.3). So after the boundary, with M bytes of matrices:

    1. Each rank updates the momentum of its shard, and computes Nesterov's momentum from it and the gradient.
    2. An all-to-all sends the parts of each matrix to its owner, which orthogonalizes it.
    3. A second all-to-all sends each rank its part of the update, which replaces the gradient.

    Matrices are processed in rounds: while one is orthogonalized, the next one and the updates of the previous one are
    in flight. (A side stream does not suffice: all rounds use one communicator, in the order in which they start, so
    the next round must be sent before a round is orthogonalized.) An owner has elements of the matrix, and owners have
    equal work, as far as complete matrices allow (``comm/owners.py``). A matrix on only one rank is not sent.

    os = G: the ranks of all groups share the states, and a rank gets 2 b M / k bytes from other groups, b = (k-1)/n.
    os = I: the ranks of a group share the states, and each group orthogonalizes all matrices. Nothing is sent between
    groups.
    os = N: every rank has all states. The ranks of a group divide the work, and gather the updates inside it.

    Each family of parameters (``families.py``) has its own owners and rounds, among the ranks that share its states:
    the owner of an expert is a rank that has this expert. All ranks start the rounds of all families in one order,
    dense families first. Ranks with other experts run the same number of rounds, with matrices of the same shapes,
    over other groups.

    The order is that of DeepSpeed's stages: overflow check, Muon, norm and clipping of the updates, step. A skipped
    step does not change the momentum. DeepSpeed's function ``muon_update`` orthogonalizes, with its handling of heads,
    packed experts, kernels, and scales; it is called so that it does not change the momentum again.

    It runs in eager mode. ``torch.compile`` generates other kernels for a shape after it has seen other shapes, and
    none after too many. So its results depend on the matrices that a process has had before. With os = I and N several
    ranks orthogonalize the same matrix, and their replicas must be bitwise identical.

Note [Precision of Muon's messages]
    Parts are sent in fp32 if a gradient of a matrix is sent in fp32, otherwise in bf16: the iteration first divides a
    matrix by its norm and continues in 16 bits. fp16 has too small a range for values without a loss scale. Momentum
    is in fp32, of gradients without the loss scale. (DeepSpeed's momentum, in the dtype of gradients, mixes the scales
    of several steps.)
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed_ext.comm.collectives import Collectives
from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.owners import ROUNDS, Job, assign_owners, rounds
from deepspeed_ext.comm.spans import Span, merge_neighbors
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, Family, family_of
from deepspeed_ext.zero.loss_scale import LossScale
from deepspeed_ext.zero.matrices import Matrices, matrices_of
from deepspeed_ext.zero.shards import FlatShard, Member

MOMENTUM = "momentum_buffer"  # DeepSpeed's name of the state


class FlatShards(Protocol):
    """An optimizer's flat shards, as Muon uses them.

    Attributes:
        optimizer: the torch optimizer that steps.
        gradient_scale: loss scale of this step's gradients.
        unscaled_updates: DeepSpeed's record of shards whose gradient is an update without the loss scale; None if
            DeepSpeed keeps none.
    """

    optimizer: Any
    gradient_scale: LossScale
    unscaled_updates: set[int] | None

    def flat_shards(self) -> list[FlatShard]:
        """Return the contents of the optimizer's flat shards, in one order on all ranks."""

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return the optimizer's weights of a flat shard, 1D: the key of its states."""

    def shard_gradient(self, number: int) -> Tensor:
        """Return the gradient of a flat shard at the accumulation boundary, 1D; may be written."""

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Called after updates have replaced the gradients of these flat shards."""


class _OwnedMatrices(NamedTuple):
    """Matrices that this rank owns, and their spans in received data, or in the shard; in order."""

    shard: FlatShard
    param: nn.Parameter
    matrices: Matrices
    spans: list[Span]


_Assigned = tuple[FlatShard, Member, Matrices, Job, int]  # matrices of a member of a shard, and their owner


class _Round(NamedTuple):
    """A round: elements that this rank sends, and matrices that it owns.

    Attributes:
        parts: elements of this rank's shards, owner by owner; their updates are received in this order.
        collectives: collectives over the ranks that share the states of this family.
        sent: number of elements for each owner; ``received``: number from each rank.
        owned: matrices of this rank.
        widths: elements of each owner, if every rank receives all updates; ``offsets``: offsets of parts in these.
        is_local: whether nothing is sent.
    """

    parts: list[tuple[FlatShard, Span]]
    collectives: Collectives
    sent: list[int]
    received: list[int]
    owned: list[_OwnedMatrices]
    widths: Sequence[int] = ()
    offsets: Sequence[int] = ()
    is_local: bool = False


def uses_muon(optimizer: Any) -> bool:
    """Whether an optimizer is DeepSpeed's Muon, by DeepSpeed's test; it may have no parameter group for Muon."""
    return "muon" in type(optimizer).__name__.lower()  # other optimizers of that name are rejected


class Muon:
    """Muon's part of a step. See Note [Muon]. It has no effect for optimizers without ``use_muon`` groups.

    Args:
        context: shared constants.
        optimizer: the optimizer that steps.
    """

    def __init__(self, context: Context, optimizer: FlatShards) -> None:
        self._context, self._optimizer = context, optimizer
        self._staged_momenta: dict[int, Tensor] = {}  # number of a shard: its momentum if the step is applied
        self._shards: list[FlatShard] = []
        self._rounds: list[_Round] | None = None

    @property
    def _replicated(self) -> bool:
        return self._context.strategy.os == Placement.N

    @torch.no_grad()
    def apply(self) -> None:
        """Replace gradients by updates, once in a step. Collective over the ranks that share the states."""
        if self._staged_momenta:
            return
        if self._rounds is None:
            self._plan()
        for shard in self._shards:
            self._stage_momentum(shard)
        scale, unscaled = self._optimizer.gradient_scale, self._optimizer.unscaled_updates
        factors = {shard.number: scale.update_factor(shard.number, unscaled) for shard in self._shards}
        if self._shards:
            try:
                for step_round in self._rounds or ():
                    self._queue.submit(self._exchange(step_round), partial(self._write_updates, step_round, factors))
                self._queue.drain()
            except BaseException:
                self._queue.drop()  # or another step would continue these rounds
                raise
            self._optimizer.gradients_replaced(self._shards)

    def finish_step(self, applied: bool) -> None:
        """Keep the staged momentum of an applied step, and drop that of a skipped step."""
        for number, staged in self._staged_momenta.items() if applied else ():
            old = self._state(number)[MOMENTUM]
            # Without an overflow check gradients may not be finite, which must not affect later steps.
            torch.where(staged.isfinite().all(), staged, old, out=old)
        self._staged_momenta.clear()

    # On the shards ####################################################################################

    def _state(self, number: int) -> dict[str, Any]:
        state: dict[str, Any] = self._optimizer.optimizer.state[self._optimizer.shard_weights(number)]
        return state

    def _group(self, shard: FlatShard) -> dict[str, Any]:
        group: dict[str, Any] = self._optimizer.optimizer.param_groups[shard.group]
        return group

    def _stage_momentum(self, shard: FlatShard) -> None:
        """Stage the momentum of this step."""
        state, weights = self._state(shard.number), self._optimizer.shard_weights(shard.number)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(weights, dtype=torch.float32, requires_grad=False)
        if state[MOMENTUM].dtype != torch.float32:  # a load of a universal checkpoint rounds it to the weights' dtype
            state[MOMENTUM] = state[MOMENTUM].float()
        old, gradient = state[MOMENTUM], self._optimizer.shard_gradient(shard.number)
        staged = torch.empty_like(old)  # not in place: a skipped step must not change the momentum
        for parts in zip(*(full.split(self._context.reduce_bucket) for full in (staged, old, gradient)), strict=True):
            torch.lerp(parts[1], self._unscaled(parts[2]), 1 - self._group(shard)["momentum"], out=parts[0])
        self._staged_momenta[shard.number] = staged

    def _unscaled(self, gradient: Tensor) -> Tensor:
        scale = self._optimizer.gradient_scale.value()
        return gradient.float() if scale == 1 else gradient.to(torch.float32, copy=True).div_(scale)

    def _nesterov_momentum(self, shard: FlatShard, span: Span) -> Tensor:
        """Return Nesterov's momentum of this rank's elements, on the device."""
        gradient = span.of(self._optimizer.shard_gradient(shard.number))
        staged = span.of(self._staged_momenta[shard.number])
        momentum = torch.lerp(self._unscaled(gradient), staged, self._group(shard)["momentum"])
        return momentum.to(device=get_accelerator().current_device_name(), dtype=self._wire)

    def _write_updates(self, step_round: _Round, factors: dict[int, float], updates: Tensor) -> None:
        """Replace this rank's gradients in a round by updates."""
        starts = step_round.offsets or _offsets([span.numel for _, span in step_round.parts])
        for (shard, span), start in zip(step_round.parts, starts, strict=True):
            update = updates.narrow(0, start, span.numel)
            factor = factors[shard.number]
            target = span.of(self._optimizer.shard_gradient(shard.number))
            target.copy_(update if factor == 1 else update.float() * factor)

    # Between ranks ####################################################################################

    def _exchange(self, step_round: _Round) -> Transfer:
        """Send parts to owners, orthogonalize, and return this rank's parts of updates, for ``_write_updates``."""
        device = get_accelerator().current_device_name()
        if self._replicated:
            rank, ranks = step_round.collectives.rank, step_round.collectives.size
            updates = torch.empty(step_round.widths[rank], dtype=self._wire, device=device)
            self._orthogonalize_own(step_round, updates)
            if step_round.is_local:
                return updates
            gathered = updates.new_empty(sum(step_round.widths))
            # Not all backends have an all-gather of unequal parts.
            yield step_round.collectives.all_to_all(
                gathered, updates.repeat(ranks), [updates.numel()] * ranks, "all_gather", step_round.widths
            )
            return gathered
        momenta = [self._nesterov_momentum(*part) for part in step_round.parts]
        parts = torch.cat(momenta) if momenta else torch.empty(0, dtype=self._wire, device=device)
        del momenta
        if step_round.is_local:
            self._orthogonalize(step_round, parts)
            return parts
        matrices = parts.new_empty(sum(step_round.received))
        yield step_round.collectives.all_to_all(matrices, parts, step_round.sent, "all_to_all", step_round.received)
        self._orthogonalize(step_round, matrices)
        yield step_round.collectives.all_to_all(parts, matrices, step_round.received, "all_to_all", step_round.sent)
        return parts

    def _orthogonalize(self, step_round: _Round, flat: Tensor) -> None:
        """Replace each matrix in received data (1D) by its update."""
        for owned in step_round.owned:
            pieces = [span.of(flat) for span in merge_neighbors(owned.spans)]
            update = self._update(owned, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
            for piece, part in zip(pieces, update.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(part)

    def _orthogonalize_own(self, step_round: _Round, flat: Tensor) -> None:
        """Write the updates of this rank's matrices, whose elements it has, one after the other."""
        offset = 0
        for owned in step_round.owned:
            (span,) = owned.spans  # in the shard
            flat.narrow(0, offset, span.numel).copy_(self._update(owned, self._nesterov_momentum(owned.shard, span)))
            offset += span.numel

    def _update(self, owned: _OwnedMatrices, matrix: Tensor) -> Tensor:
        """Return the update of matrices, 1D, in their dtype. ``matrix``: 1D."""
        from deepspeed.runtime.zero.muon.original_muon import muon_update  # compiles kernels on import

        matrix = matrix.view(owned.matrices.shape)
        # With compiled kernels replicas would differ by rounding; see Note [Muon].
        with torch.compiler.set_stance("force_eager"):
            # With beta = 0 and the matrix as its own momentum, it is unchanged before the iteration.
            update = muon_update(
                matrix,
                matrix,
                beta=0.0,
                nesterov=False,
                ns_method=self._group(owned.shard).get("ns_method", "gram"),
                is_expert_group=getattr(owned.param, "is_expert_group", False),
                num_heads=owned.matrices.heads,
            )
        return update.reshape(-1)

    # Owners and rounds ################################################################################

    def _plan(self) -> None:
        """Choose owners and rounds, from data that is equal on all ranks."""
        if uses_muon(self._optimizer.optimizer):
            self._shards = [
                shard for shard in self._optimizer.flat_shards() if self._group(shard).get("use_muon", False)
            ]
        self._rounds = []
        if not self._shards:
            return
        dtypes = {self._context.message_dtype(member.param) for shard in self._shards for member in shard.members}
        self._wire = torch.float32 if torch.float32 in dtypes else torch.bfloat16
        self._queue = TransferQueue(overlap=True, newest_first=True)
        for name, family in self._context.families.items():  # in one order on all ranks
            shards = [shard for shard in self._shards if shard.members and family_of(shard.members[0].param) == name]
            if shards:
                self._rounds += self._rounds_of(family, shards)

    def _rounds_of(self, family: Family, shards: Sequence[FlatShard]) -> list[_Round]:
        """Return the rounds of a family's matrices."""
        topology, label = family.topology, "muon" if family.name == DENSE else f"{family.name}_muon"
        sharing = topology.intra if self._replicated else topology.shard_group(self._context.strategy.os)
        collectives = Collectives(sharing, label)
        ranks = collectives.size
        entries = list(self._all_matrices(shards, ranks))
        jobs = [Job(matrices.span, member.stripe, matrices.flops) for _, member, matrices in entries]
        owners = assign_owners(jobs, ranks, min(ranks, topology.sizes.group_size))
        elements = [0] * ranks
        for owner, job in zip(owners, jobs, strict=True):
            elements[owner] += job.span.numel
        max_numel = min(self._context.reduce_bucket, -(-max(elements) // ROUNDS))
        result = []
        for numbers in rounds(jobs, owners, max_numel):
            by_owner = sorted(numbers, key=lambda number: (owners[number], number))
            assigned = [(*entries[number], jobs[number], owners[number]) for number in by_owner]
            result.append(
                self._gather_round(collectives, assigned)
                if self._replicated
                else self._exchange_round(collectives, assigned)
            )
        return result

    def _all_matrices(self, shards: Sequence[FlatShard], ranks: int) -> Any:
        """Yield (shard, member, matrices), with a parameter's matrices divided so that other ranks get work, too."""
        candidates = [
            (shard, member, getattr(member.param, "muon_num_heads", None), self._group(shard).get("ns_method", "gram"))
            for shard in shards
            for member in shard.members
            if math.prod(member.shape)
        ]
        total = sum(
            matrices.flops
            for _, member, heads, method in candidates
            for matrices in matrices_of(member.shape, heads, method, float("inf"))
        )
        for shard, member, heads, method in candidates:
            for matrices in matrices_of(member.shape, heads, method, total / ranks):
                yield shard, member, matrices

    def _exchange_round(self, collectives: Collectives, assigned: Sequence[_Assigned]) -> _Round:
        """Return this rank's part of a round. ``assigned``: matrices, owner by owner."""
        rank, ranks = collectives.rank, collectives.size
        sent, received, parts = [0] * ranks, [0] * ranks, []
        for shard, member, _, job, owner in assigned:
            own_span = job.local_span(rank)
            if own_span.numel:
                parts.append((shard, own_span.shifted(member.offset - member.span.start)))
                sent[owner] += own_span.numel
        own = [entry for entry in assigned if entry[-1] == rank]
        # Each rank sends its parts of matrices in the order of the matrices.
        incoming: list[list[tuple[int, Span]]] = []  # for each of ``own``, ranks and spans in their messages
        for _, _, _, job, _ in own:
            incoming.append([])
            for holder in job.holders(ranks):
                numel = job.local_span(holder).numel
                if numel:
                    incoming[-1].append((holder, Span(received[holder], numel)))
                    received[holder] += numel
        begins = _offsets(received)
        owned = [
            _OwnedMatrices(shard, member.param, matrices, [span.shifted(begins[holder]) for holder, span in spans])
            for (shard, member, matrices, _, _), spans in zip(own, incoming, strict=True)
        ]
        return _Round(
            parts, collectives, sent, received, owned, is_local=all(job.is_local for _, _, _, job, _ in assigned)
        )

    def _gather_round(self, collectives: Collectives, assigned: Sequence[_Assigned]) -> _Round:
        """Return a round in which every rank has all elements, and receives all updates."""
        numels = [0] * collectives.size
        places, parts, owned = [], [], []
        for shard, member, matrices, _, owner in assigned:
            span = matrices.span.shifted(member.offset)
            places.append((owner, numels[owner]))
            parts.append((shard, span))
            numels[owner] += span.numel
            if owner == collectives.rank:
                owned.append(_OwnedMatrices(shard, member.param, matrices, [span]))
        begins = _offsets(numels)
        offsets = [begins[owner] + at for owner, at in places]
        return _Round(
            parts, collectives, [], [], owned, widths=numels, offsets=offsets, is_local=collectives.size == 1
        )


def _offsets(numels: Sequence[int]) -> list[int]:
    """Return the offsets of consecutive parts of these lengths."""
    return list(itertools.accumulate(numels, initial=0))[:-1]
