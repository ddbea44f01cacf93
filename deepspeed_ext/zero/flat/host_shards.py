# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""With optimizer offload: the gradients of the optimizer's shards, in memory of the host."""

from collections.abc import Callable, Iterable

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.stage_1_and_2 import get_norm_dtype
from torch import Tensor, nn

Place = tuple[int, int, int]  # DeepSpeed's number of a parameter; start and length of its gradient in the shard


class HostShard(list[Tensor]):
    """An entry of ``averaged_gradients`` that is on the host already, and is not moved when states are offloaded."""

    def __init__(self, flat_partition: Tensor) -> None:
        super().__init__()
        self.flat_partition = flat_partition


class HostShards:
    """They are the gradients that the optimizer reads, or other tensors where those have less precision.

    Args:
        weights: gives the optimizer's weights of a parameter group, 1D.
        places: gives what a parameter group's shard has.
        dtype: in which gradients are accumulated.
        bucket: elements that are looked at on the device at a time.
    """

    def __init__(
        self,
        weights: Callable[[int], nn.Parameter],
        places: Callable[[int], Iterable[Place]],
        dtype: torch.dtype,
        bucket: int,
    ) -> None:
        self._weights, self._places, self._dtype, self._bucket = weights, places, dtype, bucket

    def _read(self, group: int) -> Tensor:
        """Return the gradient that the optimizer reads, 1D."""
        gradient = self._weights(group).grad
        assert gradient is not None
        return gradient.view(-1)

    def make(self, group: int) -> Tensor:
        """Return a shard of zeros, 1D."""
        shard = self._read(group)
        if shard.dtype not in (torch.float32, self._dtype):
            shard = torch.empty_like(shard, dtype=self._dtype)
        return shard.zero_()

    def views(self, group: int, shard: Tensor) -> dict[int, Tensor]:
        """Return the gradient of each parameter in a shard, 1D, a view."""
        return {number: shard.narrow(0, start, numel) for number, start, numel in self._places(group)}

    def norms(
        self, group: int, shard: Tensor, used: Iterable[int], look: Callable[[Tensor], None]
    ) -> dict[int, Tensor]:
        """Return the norms of gradients that were used, and hand all of them to the optimizer.

        Args:
            group: of the shard.
            shard: complete.
            used: numbers of the parameters that were used; others have no norm (DeepSpeed's ignore_unused_parameters).
            look: given each piece on the device, where DeepSpeed looks for overflows.
        """
        found, device, used = {}, get_accelerator().current_device_name(), set(used)
        for number, start, numel in self._places(group):
            norms = []
            for part in shard.narrow(0, start, numel).split(self._bucket):
                on_device = part.to(device)
                look(on_device)
                norms.append(on_device.to(get_norm_dtype()).norm(2))
            if number in used:
                found[number] = torch.stack(norms).norm(2)
        gradient = self._read(group)
        if gradient.data_ptr() != shard.data_ptr():
            gradient.copy_(shard)
        return found
