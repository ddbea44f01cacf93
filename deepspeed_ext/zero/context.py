# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The constants that all parts of one optimizer share."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from deepspeed.runtime.torch_autocast import get_comm_dtype, is_autocast_initialized
from deepspeed.utils import groups
from torch import nn

from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.config.section import offloads
from deepspeed_ext.deepspeed_types import ZeroConfig
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import DENSE, Families, Family
from deepspeed_ext.zero.streams import ReductionStream


class StateReader(Protocol):
    """Reads optimizer states while training continues, as an asynchronous save does."""

    def before_step(self) -> None:
        """Called on all ranks when a step begins. If it raises, the step has not begun."""

    def before_change(self) -> None:
        """Called before optimizer states are changed or moved outside of a step; returns once they have been read."""


@dataclass(frozen=True)
class Context:
    """Constants that are decided before an optimizer is built."""

    strategy: Strategy  # placements of parameters, gradients, and optimizer states
    families: Families  # parameter families by name, each with its process groups and hops; ``dense`` is the first
    reductions: ReductionStream  # stream of gradient reductions
    accumulation_dtype: torch.dtype  # dtype in which gradients are summed over micro-batches
    communication_dtype: torch.dtype  # dtype in which gradients are sent, without ``torch.autocast``
    reduce_bucket: int  # maximum number of elements in a bucket of gradients, unless one parameter is larger
    gather_bucket: int  # maximum number of elements (of full parameters) in one all-gather
    overlap: bool  # whether transfers may overlap each other and computation (``overlap_comm``)
    offload: bool  # whether optimizer states and gradients of the optimizer's shard are in host memory
    pinned: bool  # whether that host memory is pinned
    sequence_parallel_size: int  # number of ranks that count as one data-parallel rank in the mean
    overlap_updates: bool  # whether a step may end before updated parameters are received (``paro_overlap_updates``)
    grouped: Family | None = None  # dense parameters with p = I next to p = G (``sharded/parameters.py``)
    readers: list[StateReader] = field(default_factory=list)  # notified of changes; the only mutable part

    @classmethod
    def from_config(
        cls,
        config: ZeroConfig,
        strategy: Strategy,
        families: Families,
        *,
        accumulation_dtype: torch.dtype,
        communication_dtype: torch.dtype,
    ) -> "Context":
        """Return the context of an engine's optimizer, or of an engine for inference.

        Args:
            config: section ``zero_optimization`` of the engine.
            strategy: placements of the model states.
            families: all parameter families with the hops of this optimizer.
            accumulation_dtype, communication_dtype: dtypes that the engine has chosen for gradients.
        """
        section: Any = config.offload_optimizer
        offload = offloads(section)
        return cls(
            strategy=strategy,
            families=families,
            reductions=ReductionStream(ordered_by_device=strategy.p == Placement.N),
            accumulation_dtype=accumulation_dtype,
            communication_dtype=communication_dtype,
            reduce_bucket=int(config.reduce_bucket_size),
            gather_bucket=int(config.allgather_bucket_size),
            overlap=bool(config.overlap_comm),
            offload=offload,
            pinned=offload and section.pin_memory,
            sequence_parallel_size=int(groups._get_sequence_parallel_world_size()),
            overlap_updates=config.paro_overlap_updates,
        )

    @property
    def topology(self) -> Topology:
        """Process groups of the data-parallel group."""
        return self.families[DENSE].topology

    @property
    def ranks(self) -> int:
        """Number of data-parallel ranks, over which gradients of every family are averaged."""
        return self.topology.sizes.ranks

    @property
    def side_streams(self) -> bool:
        """Whether gradient transfers may run on side streams: copies to pageable memory block the host."""
        return not self.offload or self.pinned

    def message_dtype(self, param: nn.Parameter) -> torch.dtype:
        """Return the dtype in which the gradient of a parameter is sent."""
        return get_comm_dtype(param) if is_autocast_initialized() else self.communication_dtype

    def mixed_dtype(self, params: Iterable[nn.Parameter]) -> torch.dtype:
        """Return the dtype of messages with gradients of these parameters: theirs, or fp32 if they differ."""
        if not is_autocast_initialized():
            return self.communication_dtype
        dtypes = {get_comm_dtype(param) for param in params}
        return dtypes.pop() if len(dtypes) == 1 else torch.float32

    def before_step(self) -> None:
        """Notify readers of a step. If one raises, the step has not begun."""
        for reader in self.readers:
            reader.before_step()

    def before_change(self) -> None:
        """Wait for readers before states are changed or moved outside of a step."""
        for reader in self.readers:
            reader.before_change()
