# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What an optimizer of ours tells of its flat shards."""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from deepspeed_ext.strategy import Strategy
from deepspeed_ext.zero.families import Families
from deepspeed_ext.zero.shards import FlatShard


class FlatShards(Protocol):
    """What a step that replaces gradients has to know of an optimizer's flat shards: all that ``Muon`` sees of one.

    Attributes:
        strategy: where model states are.
        families: of parameters, with their process groups.
        optimizer: the one that steps.
        reduce_bucket_size: DeepSpeed's key of that name: elements.
    """

    strategy: Strategy
    families: Families
    optimizer: Any
    reduce_bucket_size: int

    def get_param_comm_dtype(self, param: Any) -> torch.dtype:
        """Return in which dtype the gradient of a parameter travels: DeepSpeed's."""

    def gradient_scale(self) -> float:
        """Return what gradients are multiplied with in this step: by DeepSpeed's loss scale, and by torch's."""

    def flat_shards(self) -> list[FlatShard]:
        """Return which parameters are in the optimizer's flat shards, in one order on all ranks."""

    def shard_weights(self, number: int) -> nn.Parameter:
        """Return the optimizer's weights of a flat shard, 1D: the key of its states."""

    def shard_gradient(self, number: int) -> Tensor:
        """Return the gradient of a flat shard at the accumulation boundary, 1D; may be written."""

    def begin_replacing_gradient(self, number: int) -> float:
        """Called before an update, which no loss scale multiplies, takes the place of a flat shard's gradient.

        Returns:
            By what it has to be multiplied.
        """

    def gradients_replaced(self, shards: Sequence[FlatShard]) -> None:
        """Called after updates have taken the place of the gradients of these flat shards."""
