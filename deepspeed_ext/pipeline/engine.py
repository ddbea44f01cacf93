# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipeline engine with gradients, and parameters, that are sharded.

Note [What runs when, in a pipeline]
    The accumulation boundary is the flush of the pipeline. In each backward of a micro-batch gradients move N -> g as
    the strategy says, inside the group where g = I; the hop between groups runs once, at the flush, and the step after
    it. Reductions are started in the order of the schedule, the same on all ranks of a stage, and with
    ``overlap_comm`` they go on under the instructions that follow. With stages 2 and 3 the hop between groups begins
    under the backward of the last micro-batch; what is left goes at the flush. Nothing else of the schedule changes.

    DeepSpeed runs no reduction between micro-batches here: it ends a backward of a stage before the last one without
    the steps that ZeRO takes at the end of a backward. They are what is added.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar
from unittest import mock

import deepspeed
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext.comm.process_groups import Topology, data_parallel_ranks
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.overrides import checked, override
from deepspeed_ext.pipeline.agreement import require_same_groups
from deepspeed_ext.pipeline.tied import TiedGradients, tied_stages
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.optimizer import ParoOptimizer

NOTHING_TO_TRAIN = "nothing_to_train"  # a parameter of stages that have no other


class _Outputs:
    """The outputs of a stage: one backward through all of them, so that a parameter's gradient is ready once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def backward(self, gradient: Tensor | Sequence[Tensor]) -> None:
        gradients = [gradient] if isinstance(gradient, Tensor) else gradient
        floating = [tensor for tensor in self._tensors if tensor.is_floating_point()]
        pairs = [pair for pair in zip(floating, gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


@checked
class ShardedPipelineEngine(PipelineEngine):
    """A pipeline engine with a strategy. See Note [What runs when, in a pipeline].

    It is made of a ``PipelineEngine`` by ``setup.initialize``.
    """

    _backwards = 0  # of this accumulation

    def layout_hint(self, strategy: Strategy, topology: Topology) -> str:
        """Explain why I means N here: nobody has chosen a group size, and a node has one rank of each stage.

        Returns:
            A clause that follows what the strategy comes down to; empty elsewhere.
        """
        sizes, axes = topology.sizes, self.module.topology()
        chosen = self._config.zero_config.paro_group_size is not None
        if (
            chosen
            or sizes.group_size > 1
            or sizes.ranks == 1
            or Placement.I not in (strategy.p, strategy.g, strategy.os)
        ):
            return ""
        lengths = ", ".join(f"{axis} {axes.get_dim(axis)}" for axis in axes.get_axis_names())
        return (
            f": each node has one data-parallel rank of a stage (those of the first are the ranks "
            f"{data_parallel_ranks(topology.world)}; axes, outermost first: {lengths}). For groups inside of nodes "
            f"make pipe the outermost axis, as PipeDataParallelTopology and PipeModelDataParallelTopology do, and cut "
            f"tensors over fewer ranks than a node has; stages then send their activations between nodes"
        )

    def connect(self) -> None:
        """Take the pipeline's part in our optimizer, once the parent is initialized. Collective over all ranks."""
        self.enable_backward_allreduce = True  # at the end of each backward, as without a pipeline
        self._trains = any(
            param.requires_grad
            for name, param in self.module.named_parameters()
            if not name.startswith(NOTHING_TO_TRAIN)
        )
        strategy = active_strategy(self._config)
        self._shards_parameters = strategy is not None and strategy.p != Placement.N
        self._use_checkpointing_that_stops_early()
        if isinstance(self.optimizer, ParoOptimizer):  # there is none where nothing is trained
            require_same_groups(self.module, self.optimizer, bool(tied_stages(self.module)))
            self.optimizer.complete_gradients = TiedGradients(self.module, self.optimizer).sum
            self.optimizer.overlaps_micro_steps = True

    def _use_checkpointing_that_stops_early(self) -> None:
        """Where parameters are sharded, have torch recompute where DeepSpeed's non-reentrant checkpointing would.

        DeepSpeed's runs all of a segment again, to the end of its last module, which releases the parameters whose
        backward has just begun: it fails in ZeRO-3, without a pipeline as well. torch's stops before that.
        """
        module = self.module
        if not self._shards_parameters:
            return
        if module.activation_checkpoint_func is not checkpointing.non_reentrant_checkpoint:
            return
        options = self._config.activation_checkpointing_config
        if options.partition_activations or options.cpu_checkpointing:
            raise ValueError(
                "pipeline.use_reentrant false with sharded parameters cannot be combined with "
                "activation_checkpointing.partition_activations and cpu_checkpointing. Remove one of the two."
            )
        module.activation_checkpoint_func = functools.partial(torch_checkpoint, use_reentrant=False)

    @override
    def train_batch(self, data_iter: Any = None) -> Any:
        """Train on a batch, as DeepSpeed does."""
        self._backwards = 0  # the one before may have ended by an exception
        return super().train_batch(data_iter)

    # Instructions of the schedule #####################################################################

    @override
    def _exec_backward_pass(self, buffer_id: int) -> None:
        self._backwards += 1
        self.optimizer.flush_follows = self._backwards == self.micro_batches
        try:
            self._run_backward_pass(buffer_id)
        finally:
            self.optimizer.flush_follows = False

    def _run_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            super()._exec_backward_pass(buffer_id)
        elif self._has_gradient(buffer_id):
            # The parent starts timers that the hooks of its outputs start as well, which ends in an assertion.
            with mock.patch.object(self, "wall_clock_breakdown", lambda: False):
                super()._exec_backward_pass(buffer_id)
            self._backward_epilogue()
        # One backward is one micro-step of the optimizer, whatever forwards stand between them.
        self.optimizer.clear_backward_seen_flag()

    def _has_gradient(self, buffer_id: int) -> bool:
        """Whether a micro-batch has something to do in backward here: not in a first stage that is frozen."""
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.is_pipe_partitioned:
            return True
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if not self._trains and not any(tensor.requires_grad for tensor in tensors):
            self.pipe_buffers["outputs"][buffer_id] = None
            return False
        self.pipe_buffers["outputs"][buffer_id] = _Outputs(tensors)
        return True

    @override
    def _exec_reduce_tied_grads(self) -> None:
        """Do nothing yet: tied gradients are summed when they are where the optimizer's states are."""

    @override
    def _exec_reduce_grads(self) -> None:
        """Flush: g -> os, and the sum over stages for tied weights."""
        self._force_grad_boundary = True
        try:
            if self.zero_optimization_partition_gradients():
                self.optimizer.finalize_gradient_accumulation_boundary()
            else:
                self.allreduce_gradients()
        finally:
            self._force_grad_boundary = False

    _INSTRUCTION_MAP: ClassVar[dict[type, Any]] = {
        **PipelineEngine._INSTRUCTION_MAP,
        schedule.BackwardPass: _exec_backward_pass,
        schedule.ReduceTiedGrads: _exec_reduce_tied_grads,
        schedule.ReduceGrads: _exec_reduce_grads,
    }

    # Checkpoints: a file for each layer ###############################################################

    @override
    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> None:
        """Save with the parameters of one layer gathered at a time. Collective where they are sharded."""
        for _ in self._layers(modify=False):
            super().module_state_dict(exclude_frozen_parameters)

    @override
    def load_module_state_dict(self, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load in the same way, after which all stages have the tied weights of the first."""
        for _ in self._layers(modify=True):
            super().load_module_state_dict(checkpoint, *args, **kwargs)
        tied = list(self.module.tied_modules.parameters())
        if tied and self._shards_parameters:
            with deepspeed.zero.GatheredParameters(tied, modifier_rank=0):
                self.module._synchronize_tied_weights()

    def _layers(self, modify: bool) -> Iterator[None]:
        """Have DeepSpeed see one layer after the other where parameters are sharded; otherwise all of them, once.

        All ranks of a stage visit all layers, in one order, whoever writes them.
        """
        if not self._shards_parameters:
            yield
            return
        module, first = self.module, self.module._local_start
        for index, layer in enumerate(list(module.forward_funcs)):
            parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
            with contextlib.ExitStack() as stack:
                stack.enter_context(mock.patch.object(module, "forward_funcs", [layer]))
                stack.enter_context(mock.patch.object(module, "_local_start", first + index))
                # For all layers at once, at the end: stages have different numbers of them.
                stack.enter_context(mock.patch.object(module, "_synchronize_tied_weights", lambda: None))
                if parameters:
                    whole = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if modify else None)
                    stack.enter_context(whole)
                yield
