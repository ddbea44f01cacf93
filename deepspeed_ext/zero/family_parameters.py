# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters and gradients with p = I or G of several families: each as if it were the only one."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.deepspeed_types import ZeroParameter
from deepspeed_ext.zero.boundary_units import BoundaryUnit
from deepspeed_ext.zero.crossing_spans import CrossingSpan
from deepspeed_ext.zero.families import DENSE, family_of
from deepspeed_ext.zero.parameters import PartitionedParameters
from deepspeed_ext.zero.partitioned_gradients import PartitionedGradients


class FamilyParameters:
    """What the optimizer sees of them; each method is that of ``PartitionedParameters`` for every family it concerns.

    All ranks have all families, so they start what each needs in one order.

    Args:
        members: of each family, by its name.
    """

    def __init__(self, members: Mapping[str, PartitionedParameters]) -> None:
        self.members = dict(members)
        self._family_of: dict[int, PartitionedParameters] = {}  # by number of the sub-group

    def _of(self, param: ZeroParameter) -> PartitionedParameters:
        return self.members[family_of(param)]

    def layout(self, param: ZeroParameter) -> FlatLayout:
        """Return how the parameter is divided into cells."""
        return self._of(param).layout(param)

    @property
    def sliced(self) -> bool:
        """Whether parameters of a family are held as slices of several rows."""
        return any(one.sliced for one in self.members.values())

    @property
    def most_live(self) -> int:
        """Elements of gathered parameters that ever were at most; of each family at any time."""
        return sum(one.most_live for one in self.members.values())

    def on_change(self, changed: Callable[[], None]) -> None:
        """Have somebody called when somebody else than a step has written parameters."""
        for one in self.members.values():
            one.on_change(changed)

    def partitions(self, sub_groups: Sequence[Sequence[ZeroParameter]]) -> list[Tensor]:
        """Return all that is held of the parameters of sub-groups, each of one family."""
        return [part for group in sub_groups for part in self._of(group[0]).partitions([group])]

    def make_blocks(self, buffer: Tensor, sub_groups: Sequence[Sequence[ZeroParameter]]) -> list[Tensor]:
        """Take the flat buffer of ``partitions(sub_groups)`` as blocks; return the flat partition of each."""
        self.forget_blocks()
        offset, flats = 0, []
        for number, group in enumerate(sub_groups):
            self._family_of[number] = self._of(group[0])
            flat, offset = self._family_of[number].make_block(number, buffer, offset, group)
            flats.append(flat)
        return flats

    def place(self, buffer: Tensor, sub_groups: Sequence[Sequence[ZeroParameter]]) -> None:
        """Hold parameters in a flat buffer, wherever it is."""
        offset = 0
        for group in sub_groups:
            offset = self._of(group[0]).place(buffer, [group], offset)

    def forget_blocks(self) -> None:
        """Let go of the buffer of ``make_blocks``."""
        for one in self.members.values():
            one.forget_blocks()

    def complete(self) -> None:
        """Complete all slices after something outside of a step has changed this rank's rows."""
        for one in self.members.values():
            one.complete()

    def gather_updates(self) -> None:
        """Reshard os -> p after a step."""
        for one in self.members.values():
            one.gather_updates()

    def gather_updates_of(self, number: int) -> None:
        """Do so for one sub-group."""
        self._family_of[number].gather_updates_of(number)

    def change(self, number: int, updated: Tensor, held: Tensor) -> None:
        """Take what a step has made of a sub-group, to be sent as what the others lack of it."""
        self._family_of[number].change(number, updated, held)

    def is_whole(self, number: int) -> bool:
        """Whether a sub-group always travels as it is."""
        return self._family_of[number].is_whole(number)

    def forget_changes(self) -> None:
        """Forget what was taken to be sent by a step that has not ended."""
        for one in self.members.values():
            one.forget_changes()

    def drain(self) -> None:
        """Wait for all gathers."""
        for one in self.members.values():
            one.drain()

    def release(self) -> None:
        """Give the parameters back to DeepSpeed."""
        for one in self.members.values():
            one.release()


class FamilyPartitionedGradients:
    """What the optimizer sees of them; each method is that of ``PartitionedGradients`` for every family it concerns.

    What is held of all families is one flat buffer, 1D.

    Args:
        members: of each family, by its name.
    """

    def __init__(self, members: Mapping[str, PartitionedGradients]) -> None:
        self.members = dict(members)
        self.held = torch.empty(0)

    @property
    def rows(self) -> int:
        """The most rows that a family has."""
        return max(one.rows for one in self.members.values())

    @property
    def _numels(self) -> list[int]:
        return [one.rows * one.numel for one in self.members.values()]

    def place(self, held: Tensor) -> dict[int, Tensor]:
        """Hold gradients in this tensor; return for each ds_id the optimizer's chunk of the gradient, a view."""
        self.held = held.reshape(-1)
        chunks: dict[int, Tensor] = {}
        for one, part in zip(self.members.values(), self.held.split(self._numels), strict=True):
            chunks |= one.place(part.view(one.rows, one.numel))
        return chunks

    def make(self, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """Return a tensor for ``place``, of zeros."""
        return torch.zeros(sum(self._numels), dtype=dtype, device=device)

    def make_placeholder(self, dtype: torch.dtype, device: str | torch.device) -> Tensor:
        """One that takes no memory and can be read only."""
        return torch.zeros(1, dtype=dtype, device=device).expand(sum(self._numels))

    @property
    def is_placeholder(self) -> bool:
        """Whether nothing can be added."""
        return any(one.is_placeholder for one in self.members.values())

    @property
    def shard(self) -> Tensor:
        """1D: all that is held; where something of it overflows, the sum does."""
        return self.held

    def shard_of(self, params: Sequence[ZeroParameter]) -> Tensor:
        """Return the optimizer's shard of neighboring parameters, 1D, a view."""
        return self.members[family_of(params[0])].shard_of(params)

    def crossing_spans(self, param: ZeroParameter, name: str) -> Iterator[CrossingSpan]:
        """Return where elements of a parameter are among those of this rank that cross between groups."""
        return self.members[family_of(param)].crossing_spans(param, name)

    @property
    def begun(self) -> bool:
        """Whether something of this accumulation is held."""
        return any(one.begun for one in self.members.values())

    @property
    def has_left(self) -> bool:
        """Whether something of this accumulation is on its way as if it were complete."""
        return any(one.has_left for one in self.members.values())

    def learn(self, largest: Callable[[Tensor], Tensor]) -> None:
        """Learn which parameters rest. Collective, once."""
        for one in self.members.values():
            one.learn(largest)

    def keep(self, param: ZeroParameter, *args: Any) -> list[BoundaryUnit]:
        """Add to what stays until the boundary with g = N."""
        return self.members[family_of(param)].keep(param, *args)

    def reduce(self, gradients: Sequence[tuple[Any, Tensor | None]], *args: Any, **kwargs: Any) -> None:
        """Move a bucket to where it arrives: what it has of each family by itself."""
        for name, one in self.members.items():
            mine = [pair for pair in gradients if family_of(pair[0]) == name]
            if mine:
                one.reduce(mine, *args, **kwargs)

    def reduce_kept(self) -> None:
        """Reduce all parameters that have not left by now, with g = N."""
        for one in self.members.values():
            one.reduce_kept()

    def reduce_units(self, units: Iterable[BoundaryUnit]) -> None:
        """Move what was kept of units to the placement of os, or on the way to it."""
        for unit in units:
            self.members[family_of(unit[0])].reduce_units([unit])

    def end_backward(self) -> None:
        """Hear that all gradients of a backward have been given to ``reduce``."""
        for one in self.members.values():
            one.end_backward()

    def finish(self) -> None:
        """Complete the optimizer's shard."""
        for one in self.members.values():
            one.finish()

    def drain(self) -> None:
        """Wait for all buckets."""
        for one in self.members.values():
            one.drain()

    def forget(self) -> None:
        """Drop what has been accumulated."""
        for one in self.members.values():
            one.forget()

    def drop(self) -> None:
        """Drop what has been accumulated, and what is on the wire."""
        for one in self.members.values():
            one.drop()


Parameters = PartitionedParameters | FamilyParameters
ShardedGradients = PartitionedGradients | FamilyPartitionedGradients


def parameters_of(members: Mapping[str, PartitionedParameters]) -> Parameters:
    """Return the parameters of all families as one."""
    return FamilyParameters(members) if len(members) > 1 else members[DENSE]


def gradients_of(members: Mapping[str, PartitionedGradients]) -> ShardedGradients:
    """Return the gradients of all families as one."""
    return FamilyPartitionedGradients(members) if len(members) > 1 else members[DENSE]
