# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that write files of optimizer states, and the file that each rank reads.

In DeepSpeed the ranks that share the states of dense parameters write, with files numbered by these ranks. With os = I
or N these are the first group, or the first rank, because every group has all states. Experts may be spread over more
ranks. So the first ranks that together have all states write, and others read the file of a rank with their states.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import groups
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_gather_ints, all_reduce_max
from deepspeed_ext.comm.process_groups import data_parallel_ranks, get_topology
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import DENSE, Families, experts_of


class CheckpointWriters:
    """Chooses the ranks that write an optimizer's files.

    Args:
        shards: for each flat shard, this rank's number among the ranks that share its states.
    """

    def __init__(self, families: Families, strategy: Strategy, shards: Sequence[int]) -> None:
        dense, experts = families[DENSE].topology, experts_of(families)
        self._world_rank = dense.rank
        self._world = dense.world
        self._group: ProcessGroup | None = None
        self._writes_for_first = False  # whether ``write_in_each_group`` makes this rank write
        self._is_first_with_experts = not experts or not all(map(groups._get_expert_data_parallel_rank, experts))
        if not experts or strategy.os == Placement.G:
            return
        numbers = [*shards, *(groups._get_expert_parallel_rank(name) for name in experts)]
        rows = all_gather_ints(numbers, dense.world)
        # The smallest number of ranks after which the assignment of states to ranks repeats.
        divisors = (count for count in range(1, len(rows) + 1) if len(rows) % count == 0)
        count = next(n for n in divisors if all(row == rows[rank % n] for rank, row in enumerate(rows)))
        self._group = get_topology(dense.world, count).intra

    @property
    def is_writer(self) -> bool | None:
        """Whether this rank writes; None if DeepSpeed decides."""
        if self._group is None:
            return None
        return self._writes_for_first or dist.get_rank(group=self._group) == self._world_rank

    def ranks_of_writer(self, ranks: Sequence[int]) -> list[int]:
        """Return the global ranks that correspond to these on the rank that has written this rank's file."""
        if self._group is None:
            return list(ranks)
        world, count = data_parallel_ranks(self._world), dist.get_world_size(group=self._group)
        return [world[world.index(rank) % count] for rank in ranks]

    def is_written_elsewhere(self, path: str) -> bool:
        """Whether another rank writes the same file.

        With experts, all ranks write the model's files in DeepSpeed's stage 3, named by their numbers. Several ranks
        write the same folded experts.
        """
        name = Path(path).name
        if name.startswith("layer_") and "_expert_" in name:
            return not self._is_first_with_experts
        return self.is_writer is False and name.startswith("zero_pp_rank_")

    @contextmanager
    def use_rank_numbers(self, engine: Engine) -> Iterator[Any]:
        """Make an engine write and read the files of these ranks in this context."""
        if self._group is None:
            yield
            return
        with (
            replace_attributes(engine.optimizer, dp_process_group=self._group),
            replace_attributes(engine, save_zero_checkpoint=self.is_writer),
        ):
            yield

    @contextmanager
    def write_in_each_group(self, engine: Engine, between: ProcessGroup) -> Iterator[None]:
        """Make each group write the same files that the first group would, in this context.

        Collective over ``between``, the ranks of this rank's number in all groups.
        """
        flags = [engine.save_zero_checkpoint, engine.save_non_zero_checkpoint, bool(self.is_writer)]
        states, model, own = all_reduce_max(torch.tensor(flags).float(), between).bool().tolist()
        with (
            replace_attributes(engine, save_zero_checkpoint=states, save_non_zero_checkpoint=model),
            replace_attributes(self, _writes_for_first=own),
        ):
            yield
