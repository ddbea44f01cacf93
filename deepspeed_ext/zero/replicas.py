# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Replicas of an optimizer's shard (os = I or N) take the same decisions.

They see the same gradients, unless a backend rounds differently in two groups. One of them skipping a step, or
clipping by another norm, would let them drift apart for good.
"""

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor


def largest_of_replicas(value: Tensor, replicas: Any) -> Tensor:
    """The largest value among the replicas, a process group, or None where there are none."""
    if replicas is None:
        return value
    largest = value.to(get_accelerator().current_device_name())
    dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=replicas)
    return largest.to(value.device)


def any_of_replicas(found: bool, replicas: Any) -> bool:
    """Whether one of the replicas has found it."""
    return bool(largest_of_replicas(torch.tensor([float(found)]), replicas).item())


def largest_norm(norm: Tensor, replicas: Any) -> Tensor:
    """The largest norm of all replicas; -1, as DeepSpeed marks an invalid one, if it is invalid for one of them."""
    norm = largest_of_replicas(torch.where(norm < 0, torch.inf, norm), replicas)
    return torch.where(norm.isinf(), -1.0, norm)
