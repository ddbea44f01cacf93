# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's pipeline engine with sharded gradients and parameters.

Note [Order of operations in a pipeline]
    The accumulation boundary is the flush of the pipeline. In the backward of each micro-batch, gradients are reduced
    N -> g as the strategy says; with g = I, this is inside the group. The hop between groups runs once, at the flush,
    and the optimizer's step runs after it. Reductions are started in the order of the pipeline's schedule, which is
    the same on all ranks of a stage. With ``overlap_comm``, they overlap the instructions that follow. With stages 2
    and 3, the hop between groups starts during the backward of the last micro-batch, and the rest is sent at the
    flush. The schedule is otherwise unchanged.

    DeepSpeed itself runs no reduction between micro-batches: except on the last stage, its pipeline omits the steps of
    ZeRO at the end of a backward. These steps are added here.
"""

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import deepspeed
import torch
from deepspeed.runtime.activation_checkpointing import checkpointing
from deepspeed.runtime.pipe import schedule
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from deepspeed_ext.comm.process_groups import Topology, data_parallel_ranks, destroy_topologies
from deepspeed_ext.config.section import active_strategy
from deepspeed_ext.overrides import check_overrides, override, replace_attributes
from deepspeed_ext.pipeline.agreement import require_same_groups
from deepspeed_ext.pipeline.tied import TiedGradients, tied_stages
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.optimizer import ParoOptimizer

NOTHING_TO_TRAIN = "nothing_to_train"  # name of the parameter that a stage with nothing to train gets


class _Outputs:
    """The outputs of a stage. One backward goes through all of them, so that each gradient is ready only once."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = tensors

    def backward(self, gradient: Tensor | Sequence[Tensor]) -> None:
        gradients = [gradient] if isinstance(gradient, Tensor) else gradient
        # The next stage sends gradients of all floating-point outputs, even of outputs that need none.
        floating = [tensor for tensor in self._tensors if tensor.is_floating_point()]
        pairs = [pair for pair in zip(floating, gradients, strict=True) if pair[0].requires_grad]
        torch.autograd.backward([tensor for tensor, _ in pairs], [gradient for _, gradient in pairs])


@check_overrides
class ShardedPipelineEngine(PipelineEngine):
    """A pipeline engine with a strategy. See Note [Order of operations in a pipeline].

    ``setup.initialize`` turns a ``PipelineEngine`` into one.
    """

    _backwards = 0  # number of backwards in this accumulation
    _tied: TiedGradients | None = None

    def layout_hint(self, strategy: Strategy, topology: Topology) -> str:
        """Explain why I equals N if a node has only one rank of each stage and no group size is set.

        Returns:
            A clause to append to the log line that names the strategy's effect; empty in all other cases.
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
            f": each node has one data-parallel rank of a stage (the first stage has the ranks "
            f"{data_parallel_ranks(topology.world)}; axes, outermost first: {lengths}). To form groups inside nodes, "
            f"make pipe the outermost axis, as PipeDataParallelTopology and PipeModelDataParallelTopology do, and use "
            f"fewer tensor-parallel ranks than a node has; stages then send their activations between nodes"
        )

    def attach_optimizer(self) -> None:
        """Connect the pipeline to our optimizer. Called once the parent is initialized. Collective over all ranks."""
        self.enable_backward_allreduce = True  # reduce at the end of each backward, as without a pipeline
        self._trains = any(
            param.requires_grad
            for name, param in self.module.named_parameters()
            if not name.startswith(NOTHING_TO_TRAIN)
        )
        strategy = active_strategy(self._config)
        self._shards_parameters = strategy is not None and strategy.p != Placement.N
        self._use_torch_checkpointing()
        if isinstance(self.optimizer, ParoOptimizer):  # a stage with nothing to train has none
            require_same_groups(self.module, self.optimizer, bool(tied_stages(self.module)))
            self._tied = TiedGradients(self.module, self.optimizer)
            self.optimizer.gradient_terms.append(self._tied)
            # Gradients are read only at the flush, so the last buckets of a backward may overlap the next backward.
            self.optimizer.micro_steps.overlap = True

    def _use_torch_checkpointing(self) -> None:
        """With sharded parameters, use torch's non-reentrant checkpointing instead of DeepSpeed's.

        DeepSpeed's recomputes a segment up to the end of its last module. The end of that forward releases parameters
        that the backward is about to use, so it fails with ZeRO-3, even without a pipeline. torch's stops earlier.
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
                "activation_checkpointing.partition_activations or cpu_checkpointing. Remove one of these keys."
            )
        module.activation_checkpoint_func = functools.partial(torch_checkpoint, use_reentrant=False)

    @override
    def destroy(self) -> None:
        """Destroy the engine as DeepSpeed does, and the process groups that were created for it."""
        super().destroy()
        if self._tied is not None and torch.distributed.is_initialized():
            self._tied.destroy()
            self._tied = None
            # Each pipeline has data-parallel groups of its own, unless it has one stage.
            if (group := self.grid.get_data_parallel_group()) is not torch.distributed.group.WORLD:
                destroy_topologies(group)

    @override
    def train_batch(self, data_iter: Any = None) -> Any:
        """Train on a batch, as DeepSpeed does."""
        self._backwards = 0  # an exception may have ended the previous batch early
        return super().train_batch(data_iter)

    # Instructions of the schedule #####################################################################

    @override
    def _exec_backward_pass(self, buffer_id: int) -> None:
        self._backwards += 1
        if not isinstance(self.optimizer, ParoOptimizer):
            self._run_backward_pass(buffer_id)
            return
        with self.optimizer.micro_steps.before_flush(self._backwards == self.micro_batches):
            self._run_backward_pass(buffer_id)

    def _run_backward_pass(self, buffer_id: int) -> None:
        if self.is_last_stage():
            super()._exec_backward_pass(buffer_id)
        elif self._has_gradient(buffer_id):
            # Both the parent and hooks on its outputs start timers; starting one twice is an assertion error.
            with replace_attributes(self, wall_clock_breakdown=lambda: False):
                super()._exec_backward_pass(buffer_id)
            self._backward_epilogue()
        # One backward is one micro-step of the optimizer, however many forwards run in between.
        self.optimizer.clear_backward_seen_flag()

    def _has_gradient(self, buffer_id: int) -> bool:
        """Whether a micro-batch has a backward on this stage; a frozen first stage has none."""
        outputs = self.pipe_buffers["outputs"][buffer_id]
        if self.is_pipe_partitioned:
            return True
        tensors = outputs if isinstance(outputs, tuple) else (outputs,)
        if not self._trains and not any(tensor.requires_grad for tensor in tensors):
            self.pipe_buffers["outputs"][buffer_id] = None  # no backward will free these outputs
            return False
        self.pipe_buffers["outputs"][buffer_id] = _Outputs(tensors)
        return True

    @override
    def _exec_reduce_tied_grads(self) -> None:
        """Do nothing yet: tied gradients are summed later, when they are sharded as the optimizer's states are."""

    @override
    def _exec_reduce_grads(self) -> None:
        """Flush the pipeline: reduce gradients g -> os, and sum gradients of tied weights over stages."""
        self._force_grad_boundary = True  # a pipeline of DeepSpeed's has no other accumulation boundary
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
        """Save the layers, gathering one layer's parameters at a time. Collective if parameters are sharded."""
        for _ in self._expose_layers(modify=False):
            super().module_state_dict(exclude_frozen_parameters)

    @override
    def load_module_state_dict(self, checkpoint: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        """Load the layers in the same way; then copy the tied weights of the first stage to all others."""
        for _ in self._expose_layers(modify=True):
            super().load_module_state_dict(checkpoint, *args, **kwargs)
        tied = list(self.module.tied_modules.parameters())
        if tied and self._shards_parameters:
            with deepspeed.zero.GatheredParameters(tied, modifier_rank=0):
                self.module._synchronize_tied_weights()

    def _expose_layers(self, modify: bool) -> Iterator[None]:
        """Show DeepSpeed one layer at a time if parameters are sharded; otherwise all of them at once.

        All ranks of a stage visit all layers, in the same order, regardless of which rank writes them.
        """
        if not self._shards_parameters:
            yield
            return
        module, first = self.module, self.module._local_start
        for index, layer in enumerate(list(module.forward_funcs)):
            parameters = list(layer.parameters()) if isinstance(layer, nn.Module) else []
            with contextlib.ExitStack() as stack:
                stack.enter_context(replace_attributes(module, forward_funcs=[layer], _local_start=first + index))
                # Tied weights are synchronized once, at the end: stages have different numbers of layers, so their
                # collectives would not match.
                stack.enter_context(replace_attributes(module, _synchronize_tied_weights=lambda: None))
                if parameters:
                    gathered = deepspeed.zero.GatheredParameters(parameters, modifier_rank=0 if modify else None)
                    stack.enter_context(gathered)
                yield
