# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Attributes of DeepSpeed's stage-1/2 optimizer that this package reads or writes."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn


class Stage12View:
    """Attributes that ``Stage12Optimizer`` inherits, and methods that its parts call.

    A *number* is the number of a parameter group, which has one flat buffer. A *partition* is a rank's part of the
    buffer. An *id* is DeepSpeed's number of a parameter.
    """

    # Parameters and flat buffers.
    bit16_groups: list[list[nn.Parameter]]  # parameters by number, in the order of the model
    bit16_groups_flat: Any  # flat buffers by number, 1D
    has_moe_layers: bool  # whether the model has experts
    parallel_partitioned_bit16_groups: list[list[Tensor]]  # partitions of flat buffers, by number and rank
    param_names: dict[nn.Parameter, str]  # names of trained parameters, in the order of the model
    partition_size: list[int]  # elements of a partition, of the buffers built so far
    round_robin_bit16_meta: list[list[Tensor]]  # parameters in the order of the flat buffer, without storage
    round_robin_bit16_offsets: list[list[int]]  # their offsets in the flat buffer, by number
    round_robin_bit16_padding: list[list[int]]  # padding after each of them, by number
    round_robin_gradients: bool  # whether the order of the flat buffer is not that of the model
    # Contents of partitions.
    grad_partition_insertion_offset: dict[int, dict[int, dict[int, int]]]  # offset in a partition, by number, rank, id
    grad_position: dict[int, list[int]]  # with offload, by id: number, first element, offset, elements
    grad_start_offset: dict[int, dict[int, dict[int, int]]]  # first element of the parameter, by number, rank, id
    is_grad_computed: dict[int, dict[int, dict[int, bool]]]  # whether its gradient is computed, by number, rank, id
    param_to_partition_ids: dict[int, dict[int, list[int]]]  # ranks of the partitions with a parameter, by number, id
    params_in_partition: list[list[nn.Parameter]]  # parameters in this rank's partition, by number
    total_grads_in_partition: dict[int, dict[int, int]]  # number of parameters in a partition, by number and rank
    _param_slice_mappings: list[Any]  # parts of parameters in this rank's partitions, for universal checkpoints
    # Weights and states.
    groups_padding: list[int]  # elements of padding at the end of this rank's partition, by number
    optimizer: Any  # the torch optimizer, of which each partition is one parameter
    single_partition_of_fp32_groups: list[Any]  # the optimizer's weights by number, 1D; keys of its states
    _backward_active_depth: int  # nested backwards that run now
    _hp_optimizer_states_linked: bool  # whether all states are linked to parameters, for ``safe_get_full_...``
    # Gradients.
    accumulated_grads_in_cpu: dict[int, Tensor]  # with offload: accumulated gradients by id, views of a partition
    averaged_gradients: dict[int, Any]  # complete gradients of this rank's partition, which a step reads, by number
    groups_lacking_loss_scale: set[int]  # numbers whose gradient was replaced by an update without the loss scale
    norm_for_param_grads: dict[int, Tensor]  # with offload: norms of gradients by id
    offload_gradient_dict: dict[int, Any]  # with offload: gradients of this rank's partition by number
    temp_grad_buffer_for_gpu_offload: Tensor  # with offload: memory for DeepSpeed's own accumulation
    # Settings.
    autoep_folding_spec: Any  # folding of experts into tensor parallelism
    autoep_folding_tp_group: Any  # ranks over which experts are folded; None without folding
    contiguous_gradients: bool  # whether gradients are copied to the parent's buckets as they are computed
    cpu_offload: bool  # whether optimizer states are in host memory
    dp_process_group: Any  # ranks that share the optimizer states of dense parameters
    gradient_average: bool  # whether sums of gradients are divided by the number of ranks
    gradient_predivide_factor: float  # part of that division that is done before the sum
    model_parallel_rank: int  # number of this part of the model; in norms part 0 counts parameters that all parts have
    overlap_comm: bool  # whether buckets are reduced on a separate stream
    partition_count: Any  # number of ranks that share states, by number
    postscale_gradients: bool  # whether the rest of the division is done after the sum
    real_dp_process_group: list[Any]  # ranks that share the optimizer states, by number
    reduce_scatter: bool  # DeepSpeed's key of that name
    reduction_stream: Any  # stream of reductions; None on devices without streams

    # DeepSpeed's methods that parts call.
    clear_grad_attribute: Callable[[nn.Parameter], None]  # drops a gradient, or its sum over micro-batches
    get_gradient_for_reduction: Callable[[nn.Parameter], Any]  # a gradient, or its sum over micro-batches; or None
    get_param_id: Callable[[nn.Parameter], int]  # id of a parameter
    is_moe_group: Callable[[Mapping[str, Any]], bool]  # whether a parameter group has experts
    update_offload_overflow_tracker: Callable[[Tensor], None]  # checks a gradient for an overflow on the device
    _gradient_reduction_buffer_dtype: Callable[[], torch.dtype]  # dtype of gradients in buckets
    _maybe_reduce_autoep_folding_tp_gradient: Callable[[nn.Parameter, Tensor], None]  # corrects experts' gradients
    _get_compact_grad_partition_buffer: Callable[[int], Any]  # gradient of this rank's partition, created if missing
    _record_offload_copy: Callable[[], None]  # records a copy to the host, for ``_wait_for_offload_copies``
