# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A sampler that gives each rank as many samples of a step as it has micro-batches for."""

from collections.abc import Iterator, Sized
from itertools import accumulate
from typing import Any

import torch
from deepspeed import comm as dist
from torch.utils.data import Sampler


class GroupSampler(Sampler[int]):
    """This rank's indices, for a ``DataLoader`` with a batch size of ``engine.train_micro_batch_size_per_gpu()``.

    The ``engine.train_batch_size()`` samples of each step are divided among ranks by their numbers of micro-batches
    (``zero_optimization.paro_micro_batches``), or equally without that key. So all ranks run the same number of steps,
    and each sample is used once per epoch; the last ones are dropped if they are fewer than a step has. Numbers are
    read when an iteration begins.

    Args:
        dataset: the same samples in the same order on all ranks.
        engine: DeepSpeed's engine. Ranks that share a sequence or tensors get the same samples.
        shuffle: whether samples are in a random order, which depends on ``seed`` and the epoch.
    """

    def __init__(self, dataset: Sized, engine: Any, shuffle: bool = True, seed: int = 0) -> None:
        self._dataset, self._engine, self._shuffle, self._seed, self._epoch = dataset, engine, shuffle, seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, on which the order of shuffled samples depends."""
        self._epoch = epoch

    def __len__(self) -> int:
        """Return the number of this rank's samples in an epoch."""
        first, after = self._own_range()
        return len(self._dataset) // self._engine.train_batch_size() * (after - first)

    def __iter__(self) -> Iterator[int]:
        """Return this rank's indices, by step."""
        (first, after), total, count = self._own_range(), self._engine.train_batch_size(), len(self._dataset)
        order = torch.arange(count)
        if self._shuffle:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(self._seed + self._epoch))
        indices = order[: count // total * total].view(-1, total)[:, first:after]
        return iter(indices.flatten().tolist())

    def _own_range(self) -> tuple[int, int]:
        """Return where this rank's samples of a step begin and end."""
        engine = self._engine
        ranks, rank = engine._config.world_size, dist.get_rank(engine.seq_data_parallel_group)
        numbers = getattr(engine._config.zero_config, "paro_micro_batches", None)
        if not isinstance(numbers, list):
            numbers = [engine.gradient_accumulation_steps()]
        numbers = [number for number in numbers for _ in range(ranks // len(numbers))]
        ends = [0, *accumulate(number * engine.train_micro_batch_size_per_gpu() for number in numbers)]
        index = rank // engine.sequence_parallel_size
        return ends[index], ends[index + 1]
