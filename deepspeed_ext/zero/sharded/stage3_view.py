# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""View of a stage-3 optimizer for its parts: attributes of DeepSpeed's class that this package reads or writes."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from deepspeed_ext.deepspeed_types import ZeroParameter


class Stage3View:
    """Attributes that ``Stage3Optimizer`` inherits, and methods that its parts call.

    A *sub-group* is the unit of DeepSpeed's step: neighboring trained parameters of one parameter group.
    """

    # The model and its sub-groups.
    module: nn.Module  # the model
    fp16_groups: list[list[ZeroParameter]]  # trained parameters of each sub-group, whatever their dtype
    sub_group_to_group_id: dict[int, int]  # number of the parameter group of each sub-group
    sub_group_size: int  # maximum number of elements of a sub-group
    sub_group_process_groups: list[Any]  # ranks that share the optimizer states of each sub-group
    param_names: dict[Any, str]  # names of all parameters
    # Weights and states.
    optimizer: Any  # the torch optimizer, of which each sub-group is one parameter
    lp_param_buffer: Tensor  # this rank's shards of all trained parameters in the model's dtype, 1D
    fp16_partitioned_groups_flat: list[Tensor]  # part of ``lp_param_buffer`` that a step updates, of each sub-group
    fp32_partitioned_groups_flat: list[Any]  # the optimizer's weights of each sub-group, 1D; keys of its states
    persistent_parameters: list[ZeroParameter]  # small parameters that stay gathered between uses
    # Gradients.
    ipg_buckets: dict[torch.dtype, Any]  # bucket of gradients that is being filled, of each dtype on the wire
    _DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition: dict[int, Tensor]  # gradient of each chunk, by ds_id
    grad_partitions_flat_buffer: Any  # the tensor of which these gradients are views; None while it is replaced
    averaged_gradients: dict[int, list[Tensor]]  # gradients that the step reads, of each sub-group
    inf_or_nan_tracker: Tensor  # bool of one element: whether a gradient has overflowed
    norm_for_param_grads: dict[int, Tensor]  # norms of an offloaded optimizer's gradients, by parameter
    loss_scale: float  # factor of the loss in the next backward
    sub_groups_lacking_loss_scale: set[int]  # numbers of sub-groups whose update by Muon has no loss scale yet
    _coalesce_grad_reduction: bool  # whether several backwards are combined before gradients are reduced
    _offload_boundary_param_ids: set[int]  # ds_ids of parameters whose gradients an offloaded optimizer has to read
    # Settings.
    dp_process_group: Any  # ranks that share the optimizer states of dense parameters
    partition_count: Any  # number of these ranks
    model_parallel_group: Any  # ranks with the other parts of the model; None without an ``mpu``
    model_parallel_rank: int  # number of this part of the model; in norms part 0 counts parameters that all parts have
    autoep_folding_spec: Any  # folding of experts into tensor parallelism; None without folding
    reduce_and_partition_stream: Any  # stream of reductions; None on devices without streams
    reduce_scatter: bool  # DeepSpeed's key of that name
    sequence_parallel_size: int  # ranks that share one sequence
    offload_optimizer: bool  # whether optimizer states are in host memory
    offload_param: bool  # whether DeepSpeed keeps parameters in host memory

    # DeepSpeed's methods that parts call.
    get_param_id: Callable[[Any], int]  # key of ``norm_for_param_grads``
    reduce_ready_partitions_and_remove_grads: Callable[[Any], None]  # receives a complete gradient
    _DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads: Callable[[torch.dtype], None]  # flushes a bucket
    _apply_autoep_folding_tp_correction: Callable[[Any], None]  # corrects the gradient of a folded expert
    _finalize_offload_gradient_accumulation: Callable[[], None]  # passes gradients to an offloaded optimizer
    _get_fp32_opt_state_partition: Callable[..., tuple[Any, Any]]  # this rank's weights, or a state, of a parameter
    _get_param_partition_rank: Callable[[Any], int]  # number of this rank's chunk of a parameter
    _set_fp16_partitioned_groups_flat: Callable[[], None]  # creates the flat tensors of all sub-groups
    _zero3_partition_group_metadata: Callable[[], Any]  # with AutoEP: the ranks that share each sub-group
