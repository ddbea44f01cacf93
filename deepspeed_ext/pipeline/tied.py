# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Gradients of weights that several pipeline stages share, such as the weights of embedding and head.

Each stage reduces its own gradient of such a weight like any other. Once gradients are sharded as the optimizer's
states are, ranks of these stages exchange their shards. So no rank ever has the full gradient, and even a compressed
gradient is the same on all stages. With p = N, a weight has a different offset in each stage's flat buffer, so its
shards have different elements: a rank sends each other rank the elements that both have. If a rank has d elements of
the weight's gradient, and there are t stages, it sends and receives (t-1)*d elements per step. DeepSpeed's all-reduce
of full gradients takes 2*(t-1)/t times the full weight.
"""

import functools
from collections.abc import Iterable, Sequence

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.module import PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import all_gather_ints
from deepspeed_ext.comm.disjoint_groups import make_groups
from deepspeed_ext.comm.process_groups import data_parallel_ranks, destroy_groups
from deepspeed_ext.comm.spans import Span, split_as
from deepspeed_ext.strategy import Placement
from deepspeed_ext.zero.optimizer import ParoOptimizer


class TiedGradients:
    """The tied weights of this rank's stage that have a gradient. The constructor is collective over all ranks."""

    def __init__(self, module: PipelineModule, optimizer: ParoOptimizer) -> None:
        self._optimizer = optimizer
        self._exchanges = [
            _Exchange(optimizer, weights, group, [_stage(module, rank) for rank in ranks])
            for ranks, group, weights in _make_groups(module, optimizer)
        ]

    def complete_gradients(self) -> None:
        """Sum the gradients of all stages in the order of the stages, so that all get the same bits. Collective."""
        for exchange in self._exchanges:
            exchange.run()

    def destroy(self) -> None:
        """Destroy the process groups; no gradients can be summed afterwards."""
        destroy_groups(exchange.group for exchange in self._exchanges)
        self._exchanges.clear()


class _Exchange:
    """The exchange of gradients of weights that are on the same stages.

    Args:
        optimizer: this rank's optimizer.
        weights: parameters of this rank's stage.
        group: ranks of all these stages that together have each stage's shards once.
        stages: stage of each rank in the group.
    """

    def __init__(
        self, optimizer: ParoOptimizer, weights: Sequence[nn.Parameter], group: ProcessGroup, stages: Sequence[int]
    ) -> None:
        self._optimizer, self._weights, self.group, self._stages = optimizer, weights, group, stages
        self._rank = dist.get_rank(group=group)
        gathered = all_gather_ints([number for weight in weights for number in optimizer.owned_span(weight)], group)
        self._spans = [[Span(*span) for span in zip(row[::2], row[1::2], strict=True)] for row in gathered]

    def run(self) -> None:
        device = get_accelerator().current_device_name()
        owned = [self._optimizer.owned_gradient(weight) for weight in self._weights]  # on the host if offloaded
        local_shards = [part.to(device) for part in owned]
        sent = [self._common_elements(local_shards, rank) for rank in range(len(self._stages))]
        splits = [part.numel() for part in sent]  # and of received parts: both ranks list their common elements
        received = torch.empty_like(bucket := torch.cat(sent))
        dist.all_to_all_single(
            received, bucket, splits, splits, group=self.group, log_name="tied_gradients_all_to_all"
        )
        # Sums are in fp32, so that 16-bit gradients are rounded only once.
        totals = {
            stage: [torch.zeros_like(part, dtype=torch.float32) for part in local_shards] for stage in self._stages
        }
        for stage_part, part in zip(totals[self._stages[self._rank]], local_shards, strict=True):
            stage_part.copy_(part)
        for rank, content in enumerate(received.split(splits)):
            self._write_received(totals[self._stages[rank]], rank, content)
        # In the order of stages, so that all of them get the same bits.
        for number, part in enumerate(owned):
            part.copy_(functools.reduce(torch.add, (totals[stage][number] for stage in sorted(totals))))

    def _common_spans(self, rank: int) -> Iterable[tuple[int, Span]]:
        """Yield (number of the weight, elements of this rank's shard of it) that another stage's rank has, too."""
        if self._stages[rank] == self._stages[self._rank]:
            return
        for number, (local_span, other) in enumerate(zip(self._spans[self._rank], self._spans[rank], strict=True)):
            common = local_span.common(other)
            if common.numel:
                yield number, common.shifted(-local_span.start)

    def _common_elements(self, shards: Sequence[Tensor], rank: int) -> Tensor:
        """Return the elements that this rank sends to another one, 1D."""
        return torch.cat([shards[0][:0], *(span.of(shards[number]) for number, span in self._common_spans(rank))])

    def _write_received(self, parts: Sequence[Tensor], rank: int, content: Tensor) -> None:
        """Copy elements received from another rank to their positions."""
        pairs = list(self._common_spans(rank))
        for (number, span), part in zip(pairs, split_as(content, [span for _, span in pairs]), strict=True):
            span.of(parts[number]).copy_(part)


def _make_groups(
    module: PipelineModule, optimizer: ParoOptimizer
) -> list[tuple[list[int], ProcessGroup, list[nn.Parameter]]]:
    """Return (ranks, process group, weights) of this rank's tied weights. Collective over all ranks."""
    grid, exchanges = module._grid, []
    for stages, keys in tied_stages(module).items():
        weights = [
            weight
            for key in keys
            if key in module.tied_comms
            for weight in (
                PipelineModule._recursive_getattr(module.tied_modules[key], name)
                for name in module.tied_comms[key]["weight_attr"]
            )
            if weight.requires_grad
        ]
        for model in range(grid.get_slice_parallel_world_size()):
            coordinates = {"model": model} if "model" in grid._topo.get_axis_names() else {}
            lists = [
                sorted(grid.stage_to_global(stage_id=s, data=d, **coordinates) for s in stages for d in replica)
                for replica in _replicas(optimizer)
            ]
            # Collective: ranks without these weights must create the groups, too.
            group = make_groups(lists, None)
            if group is not None and weights:
                exchanges.append((data_parallel_ranks(group), group, weights))
    return exchanges


def tied_stages(module: PipelineModule) -> dict[tuple[int, ...], list[str]]:
    """Return the keys of tied layers by their stages, without layers on only one stage, which exchange nothing."""
    stages: dict[str, set[int]] = {}
    for index, spec in enumerate(module._layer_specs):
        if isinstance(spec, TiedLayerSpec):
            stages.setdefault(spec.key, set()).add(module.stage_owner(index))
    keys: dict[tuple[int, ...], list[str]] = {}
    for key in sorted(stages):  # sorted: all ranks must create the process groups in the same order
        if len(stages[key]) > 1:
            keys.setdefault(tuple(sorted(stages[key])), []).append(key)
    return keys


def _replicas(optimizer: ParoOptimizer) -> list[range]:
    """Return the sets of data-parallel ranks that each have all of a stage's optimizer states."""
    sizes = optimizer.topology.sizes
    size = {Placement.N: 1, Placement.I: sizes.group_size, Placement.G: sizes.ranks}[optimizer.strategy.os]
    return [range(first, first + size) for first in range(0, sizes.ranks, size)]


def _stage(module: PipelineModule, rank: int) -> int:
    return int(module.topology().get_coord(rank).pipe)
