# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""GatheredParameters with a modifier rank, where every group holds all of the parameters (os = I).

DeepSpeed broadcasts what one rank has modified over the process group that a parameter is cut over. With groups that
is one of several: ``modifier_rank=0`` would be the first rank of each group, and groups would drift apart.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

REPLICAS = "paro_replicas"  # attribute of such a parameter: the data-parallel group


def replicated(params: Any) -> tuple[Any, list[Any]]:
    """What GatheredParameters is given, iterable again, and those of it that every group holds, in order."""
    if isinstance(params, Iterable) and not isinstance(params, torch.Tensor):
        params = list(params)
    some = params if isinstance(params, list) else [params]
    unique = {param.ds_id: param for param in some if hasattr(param, REPLICAS)}
    return params, [unique[ds_id] for ds_id in sorted(unique)]


def broadcast_to_replicas(modifier_rank: int, params: Sequence[Any]) -> None:
    """Broadcast gathered parameters over all data-parallel ranks.

    Args:
        modifier_rank: data-parallel rank that has changed them.
        params: from ``replicated``, gathered.
    """
    device = torch.device(get_accelerator().current_device_name())
    for param in params:
        world = getattr(param, REPLICAS)
        if param.data.device == device:  # else DeepSpeed refuses, next
            dist.broadcast(param.data.view(torch.uint8), dist.get_global_rank(world, modifier_rank), group=world)
