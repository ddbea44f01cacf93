# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures DeepSpeed's own collectives over all ranks, for predictions of the plain stages from a report."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import groups
from torch import Tensor

from deepspeed_ext.deepspeed_types import Config
from deepspeed_ext.planner import probe
from deepspeed_ext.planner.rates import fit
from deepspeed_ext.tools.plan.recorded_training import FlatRates


def measure(config: Config, dtype: torch.dtype) -> FlatRates:
    """Measure the collectives of plain stages with this configuration. Collective; takes some seconds.

    Args:
        config: determines how gradients are reduced.
        dtype: dtype of gradients and parameters.
    """
    zero, group = config.zero_config, groups._get_sequence_data_parallel_group()
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return FlatRates(probe.NO_COST, probe.NO_COST, probe.NO_COST)
    # DeepSpeed reduces each part of a bucket to its owner, or all-reduces the bucket.
    owners = zero.reduce_scatter and not zero.use_multi_rank_bucket_allreduce
    kinds = (_gather, _scatter if zero.reduce_scatter else _all_reduce, _reduce_to_owners if owners else _all_reduce)
    runners = (partial(_runner, kind, ranks, group, dtype) for kind in kinds)
    return FlatRates(*(fit(probe.sample_collective(ranks, dtype, runner)) for runner in runners))


def _runner(kind: Callable[..., Any], ranks: int, group: Any, dtype: torch.dtype, share: int) -> Callable[[], Any]:
    """Return a function that runs a collective with ``share`` elements from each rank."""
    flat = torch.zeros(share * ranks, dtype=dtype, device=get_accelerator().current_device_name())
    return partial(kind, flat, torch.zeros_like(flat[:share]), group)


def _gather(flat: Tensor, shard: Tensor, group: Any) -> None:
    dist.all_gather_into_tensor(flat, shard, group=group)


def _scatter(flat: Tensor, shard: Tensor, group: Any) -> None:
    dist.reduce_scatter_tensor(shard, flat, group=group)


def _all_reduce(flat: Tensor, shard: Tensor, group: Any) -> None:
    dist.all_reduce(flat, group=group)


def _reduce_to_owners(flat: Tensor, shard: Tensor, group: Any) -> None:
    owners = (dist.get_global_rank(group, rank) for rank in range(dist.get_world_size(group)))
    parts = zip(owners, flat.split(shard.numel()), strict=True)
    for handle in [dist.reduce(part, owner, group=group, async_op=True) for owner, part in parts]:
        handle.wait()
