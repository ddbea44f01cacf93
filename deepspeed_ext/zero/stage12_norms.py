# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Norms of gradients in a stage-1/2 optimizer of ours: over replicas of the optimizer, and over experts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from torch import Tensor

from deepspeed_ext.zero.stage12_updates import Stage12Updates


class Stage12Norms(Stage12Updates):
    """Such an optimizer, ``Stage12Optimizer``."""

    # Replicas of the optimizer (os = I or N) decide alike, even if a backend rounds differently in each group ####

    def scaled_global_norm(self, norm_type: int = 2) -> Tensor:
        """Return the parent's norm over its group, of what the step applies; see ``_global_norm``."""
        self.muon.apply()
        parents = super().scaled_global_norm
        return self._global_norm(lambda: parents(norm_type))

    def get_grad_norm_direct(self, gradients: Any, params: Any, norm_type: int = 2) -> Tensor:
        """Return the parent's norm of a parameter group; of experts over all ranks, each once."""
        group = next(group for group, held in self.averaged_gradients.items() if held is gradients)
        with self._over_all_experts(group) as once:
            return once(super().get_grad_norm_direct(gradients, params, norm_type))

    def complete_grad_norm_calculation_for_cpu_offload(self, params: Any) -> Tensor:
        """Return the same norm with an offloaded optimizer."""
        group = next(group for group, held in enumerate(self.params_in_partition) if held is params)
        with self._over_all_experts(group) as once:
            return once(super().complete_grad_norm_calculation_for_cpu_offload(params))

    @contextmanager
    def _over_all_experts(self, group: int) -> Iterator[Callable[[Tensor], Tensor]]:
        """Have the parent take a norm of experts over all data-parallel ranks in this context: the ranks that share
        its states need not have all experts. Other ranks hold the same states again.

        Returns:
            What makes of it the norm in which each element counts once; -1 stays, which marks an invalid one.
        """
        topology = self.topology_of(group)
        if topology is self.topology:
            yield lambda norm: norm
            return
        replicas = topology.sizes.ranks // dist.get_world_size(group=self.real_dp_process_group[group])
        with mock.patch.object(self, "dp_process_group", self.topology.world):
            yield lambda norm: torch.where(norm < 0, norm, norm / replicas**0.5)
