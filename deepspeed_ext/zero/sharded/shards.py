# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Where gradients are held that the optimizer reads: one tensor, of all families.

With g = N gradients stay whole until the accumulation boundary; meanwhile a placeholder stands for the shard, one
element that is repeated, so that DeepSpeed finds tensors of the sizes it expects.
"""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from deepspeed_ext.zero.families import DENSE
from deepspeed_ext.zero.sharded.gradients import ShardedGradients


class GradientShards:
    """The tensor, and its parts.

    Args:
        gradients: of each family, which hold a part each.
        dtype: in which gradients are accumulated.
        chunks: DeepSpeed's map from ds_id to the gradient of the optimizer's shard, 1D; written.
        show: given what DeepSpeed reads as a whole: the optimizer's row; of several families all rows, in whose sum an
            overflow shows where it shows in one of theirs.

    Attributes:
        held: the tensor, 1D.
    """

    held: Tensor

    def __init__(
        self,
        gradients: Mapping[str, ShardedGradients],
        dtype: torch.dtype,
        chunks: dict[int, Tensor],
        show: Callable[[Tensor], None],
    ) -> None:
        self._gradients = gradients
        self._dtype = dtype
        self.chunks = chunks
        self._show = show

    @property
    def _numels(self) -> list[int]:
        """Elements that are held of each family's gradients."""
        return [gradients.rows * gradients.numel for gradients in self._gradients.values()]

    @property
    def one_row(self) -> bool:
        """Whether the optimizer's shard is all that is held."""
        return all(gradients.rows == 1 for gradients in self._gradients.values())

    def place(self, held: Tensor) -> None:
        """Hold gradients in this tensor, 1D: all rows of one family after the other."""
        self.held = held
        for gradients, part in zip(self._gradients.values(), held.split(self._numels), strict=True):
            self.chunks.update(gradients.place(part))
        self._show(held if len(self._gradients) > 1 else self._gradients[DENSE].shard)

    def make(self, device: str | torch.device) -> None:
        """Hold gradients in zeros."""
        self.place(torch.zeros(sum(self._numels), dtype=self._dtype, device=device))

    def drop(self, device: str | torch.device) -> None:
        """Hold a placeholder: with g = N there is no shard beside whole gradients."""
        self.place(torch.zeros(1, dtype=self._dtype, device=device).expand(sum(self._numels)))

    @property
    def is_placeholder(self) -> bool:
        """Whether there is no shard beside whole gradients."""
        return any(gradients.is_placeholder for gradients in self._gradients.values())

    @property
    def begun(self) -> bool:
        """Whether something of this accumulation is held."""
        return any(gradients.begun for gradients in self._gradients.values())
