# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon under every strategy: what its step needs whole.

Note [Muon]
    Muon (K. Jordan et al., 2024) replaces the gradient of a matrix by its momentum, orthogonalized by a Newton-Schulz
    iteration. The momentum is elementwise, so it stays on the shards, in ZeRO's layout. Only the iteration needs whole
    matrices, once in a step, on one rank each, its *owner*, as in the distributed Muon of Moonlight (arXiv:2502.16982,
    section 2.3). So after the boundary, with M bytes of matrices:

    1. Each rank advances the momentum of its shard, and makes of it and the gradient what is to be orthogonalized.
    2. An all-to-all brings the parts of each matrix to its owner, which orthogonalizes it.
    3. An all-to-all back brings each rank its part of the update, which takes the gradient's place.

    Matrices go in rounds: while one is orthogonalized the next is on its way, and so are updates of the one before.
    (No side stream could do that: all rounds travel over one communicator, in the order in which they are started, so
    the next way there has to be started before a round is orthogonalized.) Owners are those that have something of the
    matrix, each with as much to do as the others, as far as whole matrices allow (``comm/owners.py``). A matrix that
    one rank has alone goes nowhere.

    os = G: the ranks of all groups share the states, and a rank gets 2 b M / k bytes from other groups, b = (k-1)/n.
    os = I: those of a group do, and nothing crosses between groups; each orthogonalizes all matrices.
    os = N: every rank has all. The ranks of a group divide the work, and gather the updates inside it.

    Each family of parameters (``families.py``) has owners and rounds of its own, among the ranks that share its
    states: experts go to ranks that have these experts. All ranks start the rounds of all families in one order, dense
    ones first; ranks with other experts have as many rounds of matrices of the same shapes, over other groups.

    The order is that of DeepSpeed's stages: overflow check, Muon, norm and clipping of what it made, step. A step that
    is skipped leaves the momentum as it was. DeepSpeed's own function orthogonalizes (``muon_update``), with all that
    it knows of heads, packed experts, kernels and scales; momentum that is advanced already it leaves as it is.

    It runs in eager mode. ``torch.compile`` generates other kernels for a shape after it has seen other shapes, and
    none after too many. So its results depend on the matrices that a process has had before. With os = I and N several
    ranks orthogonalize the same matrix, and their replicas must be equal to the bit.

Note [What travels in which precision]
    Parts travel in fp32 if a gradient of a matrix is communicated in fp32, otherwise in bf16: the iteration begins by
    dividing a matrix by its norm and goes on in 16 bits; fp16 could not hold what no loss scale multiplies. Momentum
    is in fp32, of gradients without the loss scale. (DeepSpeed's own, in the dtype of gradients, mixes the scales of
    several steps.)
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
from deepspeed_ext.comm.owners import ROUNDS, Job, assign, rounds
from deepspeed_ext.comm.spans import Span, neighbors_joined
from deepspeed_ext.comm.transfer_queue import TransferQueue
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import DENSE, Family, family_of
from deepspeed_ext.zero.loss_scale import LossScale
from deepspeed_ext.zero.matrices import Matrices, matrices_of
from deepspeed_ext.zero.shards import FlatShard, Member

MOMENTUM = "momentum_buffer"  # DeepSpeed's name of the state


class FlatShards(Protocol):
    """An optimizer's flat shards: everything that Muon uses of the optimizer.

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
        """Return which parameters are in the optimizer's flat shards, in one order on all ranks."""

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return the optimizer's weights of a flat shard, 1D: the key of its states."""

    def shard_gradient(self, number: int) -> Tensor:
        """Return the gradient of a flat shard at the accumulation boundary, 1D; may be written."""

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Called after updates have replaced the gradients of these flat shards."""


class _Owned(NamedTuple):
    """Matrices that this rank owns, and where they are in what arrives, or in the shard; in order."""

    shard: FlatShard
    param: nn.Parameter
    matrices: Matrices
    spans: list[Span]


_Assigned = tuple[FlatShard, Member, Matrices, Job, int]  # matrices of a member of a shard, and their owner


class _Round(NamedTuple):
    """What this rank sends and owns in a round.

    Attributes:
        parts: elements of this rank's shards, owner by owner; they come back in this order.
        collectives: of the ranks that share the states of this family.
        sent: how many each owner gets; ``received``: how many each rank sends here.
        owned: matrices of this rank.
        widths: elements of each owner, if every rank gets all of them back; ``back``: where parts are in these.
        stays: whether nothing travels.
    """

    parts: list[tuple[FlatShard, Span]]
    collectives: Collectives
    sent: list[int]
    received: list[int]
    owned: list[_Owned]
    widths: Sequence[int] = ()
    back: Sequence[int] = ()
    stays: bool = False


def uses_muon(optimizer: Any) -> bool:
    """Whether an optimizer is DeepSpeed's Muon, as DeepSpeed tells it; it may have no parameter group for Muon."""
    return "muon" in type(optimizer).__name__.lower()  # others of that name are refused


class Muon:
    """Muon's part of a step. See Note [Muon]. There is nothing to do for optimizers without ``use_muon`` groups.

    Args:
        context: shared constants.
        optimizer: the optimizer whose step it is a part of.
    """

    def __init__(self, context: Context, optimizer: FlatShards) -> None:
        self._context, self._of = context, optimizer
        self._staged: dict[int, Tensor] = {}  # number of a shard: its momentum, if the step is applied
        self._shards: list[FlatShard] = []
        self._rounds: list[_Round] | None = None

    @property
    def _replicated(self) -> bool:
        return self._context.strategy.os == Placement.N

    @torch.no_grad()
    def apply(self) -> None:
        """Put updates in the place of gradients, once in a step. Collective over the ranks that share the states."""
        if self._staged:
            return
        if self._rounds is None:
            self._plan()
        for shard in self._shards:
            self._advance(shard)
        scale, unscaled = self._of.gradient_scale, self._of.unscaled_updates
        factors = {shard.number: scale.of_update(shard.number, unscaled) for shard in self._shards}
        if self._shards:
            try:
                for one in self._rounds or ():
                    self._queue.submit(self._exchange(one), partial(self._take, one, factors))
                self._queue.drain()
            except BaseException:
                self._queue.drop()  # or another step would go on with them
                raise
            self._of.gradients_replaced(self._shards)

    def finish_step(self, applied: bool) -> None:
        """Keep the momentum of a step that has been applied, and forget that of another."""
        for number, staged in self._staged.items() if applied else ():
            old = self._state(number)[MOMENTUM]
            # A step of which nobody has looked at the gradients may not be finite, and the next ones shall be.
            torch.where(staged.isfinite().all(), staged, old, out=old)
        self._staged.clear()

    # On the shards ####################################################################################

    def _state(self, number: int) -> dict[str, Any]:
        state: dict[str, Any] = self._of.optimizer.state[self._of.shard_weights(number)]
        return state

    def _group(self, shard: FlatShard) -> dict[str, Any]:
        group: dict[str, Any] = self._of.optimizer.param_groups[shard.group]
        return group

    def _advance(self, shard: FlatShard) -> None:
        """Stage the momentum of this step."""
        state, weights = self._state(shard.number), self._of.shard_weights(shard.number)
        if MOMENTUM not in state:
            state[MOMENTUM] = torch.zeros_like(weights, dtype=torch.float32, requires_grad=False)
        if state[MOMENTUM].dtype != torch.float32:  # a load of a universal checkpoint rounds it to the weights' dtype
            state[MOMENTUM] = state[MOMENTUM].float()
        old, gradient = state[MOMENTUM], self._of.shard_gradient(shard.number)
        staged = torch.empty_like(old)
        for parts in zip(*(one.split(self._context.reduce_bucket) for one in (staged, old, gradient)), strict=True):
            torch.lerp(parts[1], self._unscaled(parts[2]), 1 - self._group(shard)["momentum"], out=parts[0])
        self._staged[shard.number] = staged

    def _unscaled(self, gradient: Tensor) -> Tensor:
        scale = self._of.gradient_scale.value()
        return gradient.float() if scale == 1 else gradient.to(torch.float32, copy=True).div_(scale)

    def _look_ahead(self, shard: FlatShard, span: Span) -> Tensor:
        """Return what is to be orthogonalized of this rank's elements: Nesterov's momentum, on the device."""
        gradient = span.of(self._of.shard_gradient(shard.number))
        staged = span.of(self._staged[shard.number])
        ahead = torch.lerp(self._unscaled(gradient), staged, self._group(shard)["momentum"])
        return ahead.to(device=get_accelerator().current_device_name(), dtype=self._wire)

    def _take(self, one: _Round, factors: dict[int, float], arrived: Tensor) -> None:
        """Put updates in the place of gradients."""
        starts = one.back or _offsets([span.numel for _, span in one.parts])
        for (shard, span), start in zip(one.parts, starts, strict=True):
            update = arrived.narrow(0, start, span.numel)
            factor = factors[shard.number]
            target = span.of(self._of.shard_gradient(shard.number))
            target.copy_(update if factor == 1 else update.float() * factor)

    # Between ranks ####################################################################################

    def _exchange(self, one: _Round) -> Transfer:
        """Give parts to owners, orthogonalize, and return this rank's parts of updates, in the order of ``_take``."""
        device = get_accelerator().current_device_name()
        if self._replicated:
            rank, ranks = one.collectives.rank, one.collectives.size
            mine = torch.empty(one.widths[rank], dtype=self._wire, device=device)
            self._orthogonalize_own(one, mine)
            if one.stays:
                return mine
            gathered = mine.new_empty(sum(one.widths))
            # Of unequal parts there is no all-gather on all backends.
            yield one.collectives.all_to_all(
                gathered, mine.repeat(ranks), [mine.numel()] * ranks, "all_gather", one.widths
            )
            return gathered
        ahead = [self._look_ahead(*part) for part in one.parts]
        sent = torch.cat(ahead) if ahead else torch.empty(0, dtype=self._wire, device=device)
        del ahead
        if one.stays:
            self._orthogonalize(one, sent)
            return sent
        whole = sent.new_empty(sum(one.received))
        yield one.collectives.all_to_all(whole, sent, one.sent, "all_to_all", one.received)
        self._orthogonalize(one, whole)
        yield one.collectives.all_to_all(sent, whole, one.received, "all_to_all", one.sent)
        return sent

    def _orthogonalize(self, one: _Round, flat: Tensor) -> None:
        """Replace each matrix in what has arrived (1D) by its update."""
        for owned in one.owned:
            pieces = [span.of(flat) for span in neighbors_joined(owned.spans)]
            update = self._update(owned, pieces[0] if len(pieces) == 1 else torch.cat(pieces))
            for piece, part in zip(pieces, update.split([piece.numel() for piece in pieces]), strict=True):
                piece.copy_(part)

    def _orthogonalize_own(self, one: _Round, flat: Tensor) -> None:
        """Write the updates of this rank's matrices, of which it has all elements, one after the other."""
        offset = 0
        for owned in one.owned:
            (span,) = owned.spans  # in the shard
            flat.narrow(0, offset, span.numel).copy_(self._update(owned, self._look_ahead(owned.shard, span)))
            offset += span.numel

    def _update(self, owned: _Owned, matrix: Tensor) -> Tensor:
        """Return the update of matrices, 1D, in their dtype. ``matrix``: 1D."""
        from deepspeed.runtime.zero.muon.original_muon import muon_update  # compiles its kernels when it is imported

        matrix = matrix.view(owned.matrices.shape)
        # Replicas would differ by rounding with compiled kernels; see Note [Muon].
        with torch.compiler.set_stance("force_eager"):
            # As momentum of itself it is advanced by nothing.
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

    # Who does what ####################################################################################

    def _plan(self) -> None:
        """Decide on owners and rounds: from what all ranks know alike."""
        if uses_muon(self._of.optimizer):
            self._shards = [one for one in self._of.flat_shards() if self._group(one).get("use_muon", False)]
        self._rounds = []
        if not self._shards:
            return
        dtypes = {self._context.message_dtype(member.param) for shard in self._shards for member in shard.members}
        self._wire = torch.float32 if torch.float32 in dtypes else torch.bfloat16
        self._queue = TransferQueue(overlap=True, newest_first=True)
        for name, family in self._context.families.items():  # in one order on all ranks
            shards = [one for one in self._shards if one.members and family_of(one.members[0].param) == name]
            if shards:
                self._rounds += self._rounds_of(family, shards)

    def _rounds_of(self, family: Family, shards: Sequence[FlatShard]) -> list[_Round]:
        """Return the rounds of a family's matrices."""
        topology, label = family.topology, "muon" if family.name == DENSE else f"{family.name}_muon"
        sharing = topology.intra if self._replicated else topology.shard_group(self._context.strategy.os)
        collectives = Collectives(sharing, label)
        ranks = collectives.size
        found = list(self._all_matrices(shards, ranks))
        jobs = [Job(matrices.span, member.stripe, matrices.flops) for _, member, matrices in found]
        owners = assign(jobs, ranks, min(ranks, topology.sizes.group_size))
        elements = [0] * ranks
        for owner, job in zip(owners, jobs, strict=True):
            elements[owner] += job.span.numel
        most = min(self._context.reduce_bucket, -(-max(elements) // ROUNDS))
        made = []
        for numbers in rounds(jobs, owners, most):
            by_owner = sorted(numbers, key=lambda number: (owners[number], number))
            some = [(*found[number], jobs[number], owners[number]) for number in by_owner]
            made.append(self._gathers(collectives, some) if self._replicated else self._round(collectives, some))
        return made

    def _all_matrices(self, shards: Sequence[FlatShard], ranks: int) -> Any:
        """Yield (shard, member, matrices), those of a parameter in parts that leave something to other ranks."""
        some = [
            (shard, member, getattr(member.param, "muon_num_heads", None), self._group(shard).get("ns_method", "gram"))
            for shard in shards
            for member in shard.members
            if math.prod(member.shape)
        ]
        total = sum(
            matrices.flops
            for _, member, heads, method in some
            for matrices in matrices_of(member.shape, heads, method, float("inf"))
        )
        for shard, member, heads, method in some:
            for matrices in matrices_of(member.shape, heads, method, total / ranks):
                yield shard, member, matrices

    def _round(self, collectives: Collectives, some: Sequence[_Assigned]) -> _Round:
        """Return this rank's part of a round. ``some``: matrices, owner by owner."""
        rank, ranks = collectives.rank, collectives.size
        sent, received, parts = [0] * ranks, [0] * ranks, []
        for shard, member, _, job, owner in some:
            held = job.held(rank)
            if held.numel:
                parts.append((shard, held.shifted(member.offset - member.span.start)))
                sent[owner] += held.numel
        mine = [one for one in some if one[-1] == rank]
        # Each rank sends what it has of each matrix in their order.
        arriving: list[list[tuple[int, Span]]] = []  # of each of mine the holders, and where it is in what they send
        for _, _, _, job, _ in mine:
            arriving.append([])
            for holder in job.holders(ranks):
                numel = job.held(holder).numel
                if numel:
                    arriving[-1].append((holder, Span(received[holder], numel)))
                    received[holder] += numel
        begins = _offsets(received)
        owned = [
            _Owned(shard, member.param, matrices, [span.shifted(begins[holder]) for holder, span in spans])
            for (shard, member, matrices, _, _), spans in zip(mine, arriving, strict=True)
        ]
        return _Round(parts, collectives, sent, received, owned, stays=all(job.stays for _, _, _, job, _ in some))

    def _gathers(self, collectives: Collectives, some: Sequence[_Assigned]) -> _Round:
        """Return a round in which every rank has all, and gets all updates."""
        filled = [0] * collectives.size
        places, parts, owned = [], [], []
        for shard, member, matrices, _, owner in some:
            span = matrices.span.shifted(member.offset)
            places.append((owner, filled[owner]))
            parts.append((shard, span))
            filled[owner] += span.numel
            if owner == collectives.rank:
                owned.append(_Owned(shard, member.param, matrices, [span]))
        begins = _offsets(filled)
        back = [begins[owner] + at for owner, at in places]
        return _Round(parts, collectives, [], [], owned, widths=filled, back=back, stays=collectives.size == 1)


def _offsets(numels: Sequence[int]) -> list[int]:
    """Return where parts of these lengths begin, one after the other."""
    return list(itertools.accumulate(numels, initial=0))[:-1]
