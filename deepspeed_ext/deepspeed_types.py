# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Protocols of the parts of DeepSpeed that we use, since DeepSpeed is untyped. This module does not import it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup


class OffloadConfig(Protocol):
    """A parsed ``offload_optimizer`` or ``offload_param``."""

    device: str
    pin_memory: bool


class LeafModuleConfig(Protocol):
    """A parsed ``leaf_module``."""

    classes: list[str]


class ThroughputTimerConfig(Protocol):
    """A parsed ``timers.throughput``."""

    synchronized: bool
    model_fields_set: set[str]


class ZeroConfig(Protocol):
    """A parsed ``zero_optimization`` with a strategy."""

    model_fields_set: set[str]
    stage: int
    reduce_scatter: bool
    use_multi_rank_bucket_allreduce: bool
    reduce_bucket_size: int
    allgather_bucket_size: int
    allgather_sequential: bool
    overlap_comm: bool
    max_live_parameters: int
    max_reuse_distance: int
    prefetch_bucket_size: int
    param_persistence_threshold: int
    module_granularity_threshold: int
    leaf_module: LeafModuleConfig
    offload_param: OffloadConfig | None
    offload_optimizer: OffloadConfig | None
    # Ours.
    paro_strategy: str
    paro_group_size: int | None
    paro_overlap_updates: bool
    paro_reduce: str
    paro_parameter_cache_bytes: int
    paro_quantized_updates: Any  # settings of config.settings, or None
    paro_outer_optimizer: Any
    paro_micro_batches: list[int] | str | None
    paro_weights: str | None
    paro_memory_gb: float | None
    paro_modules: dict[str, str] | str | None
    paro_decision_file: str
    paro_micro_step_seconds: float | None
    stage3_leaf_bytes: bool | int | None
    zeropp_loco_param: Any


class Config(Protocol):
    """A ``DeepSpeedConfig``."""

    _param_dict: dict[str, Any]
    zero_config: ZeroConfig
    timers_config: ThroughputTimerConfig
    optimizer_params: dict[str, Any] | None
    train_micro_batch_size_per_gpu: int
    gradient_accumulation_steps: int
    train_batch_size: int
    world_size: int  # data-parallel ranks, as batches count them
    seq_parallel_communication_data_type: torch.dtype | None
    managed_gradient_accumulation: bool
    use_data_before_expert_parallel_: bool
    expert_parallel_config: Any


class Timers(Protocol):
    """The engine's timers, by name."""

    def __call__(self, name: str) -> Any: ...
    def log(self, names: Sequence[str]) -> None: ...


class Monitor(Protocol):
    """The engine's monitor: writes (label, value, samples) to the user's dashboards, on rank 0."""

    enabled: bool

    def write_events(self, event_list: Sequence[tuple[str, float, int]]) -> None: ...


class Engine(Protocol):
    """A ``DeepSpeedEngine``."""

    module: nn.Module
    optimizer: Any  # ours, or DeepSpeed's
    client_optimizer: Any
    _config: Config
    mpu: Any
    monitor: Monitor
    timers: Timers
    tput_timer: Any
    set_gradient_accumulation_boundary: Callable[[bool], None]
    set_train_batch_size: Callable[[int], None]
    set_train_micro_batch_size: Callable[[int], None]
    communication_data_type: torch.dtype
    has_moe_layers: bool
    expert_data_parallel_group: dict[str, ProcessGroup]
    pipeline_parallelism: bool
    is_first_weights_partition_group: Callable[[], bool]
    _reduce_autoep_folding_tp_replicated_gradients: Callable[[], None]
    _check_for_duplicates: Callable[[Any], None]
    _backward_prologue: Callable[[], Any]
    _backward_epilogue: Callable[[], Any]
    _INSTRUCTION_MAP: Mapping[type, Callable[..., Any]]  # of a pipeline
    zero_grad: Callable[[], None]
    destroy: Callable[..., None]
    seq_data_parallel_group: ProcessGroup
    seq_dp_world_size: int
    sequence_parallel_size: int
    mp_world_size: int
    global_rank: int
    local_rank: int
    global_steps: int
    micro_steps: int
    global_samples: int
    skipped_steps: int
    backward: Callable[..., Any]
    step: Callable[..., Any]
    train_batch: Callable[..., Any]  # of a pipeline

    def train_batch_size(self) -> int: ...
    def gradient_accumulation_steps(self) -> int: ...
    def zero_optimization_stage(self) -> int: ...
    def get_data_types(self) -> tuple[torch.dtype, torch.dtype]: ...
    def optimizer_name(self) -> str | None: ...
    def steps_per_print(self) -> int | None: ...
    def wall_clock_breakdown(self) -> bool: ...
    def zero_optimization(self) -> bool: ...
    def zero_optimization_partition_gradients(self) -> bool: ...
    def zero_optimization_partition_weights(self) -> bool: ...

    # Checkpoints.
    checkpoint_engine: Any
    engine_timers: Any
    _running_engine_step: bool
    checkpoint_mp_rank: int
    save_zero_checkpoint: bool
    save_non_zero_checkpoint: bool
    param_names: dict[nn.Parameter, str]

    def load_universal_checkpoint(self) -> bool: ...
    def use_node_local_storage(self) -> bool: ...
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: Mapping[str, Any] = ...,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool: ...
    def _stop_timers(self, timer_names: Iterable[str]) -> None: ...
    def _get_all_ckpt_names(self, checkpoints_path: str, tag: str) -> list[str]: ...
    def _get_ckpt_name(
        self, checkpoints_path: str, tag: str, mp_placeholder: str | None = None, pp_placeholder: str | None = None
    ) -> str: ...
    def _get_zero_ckpt_name(self, checkpoints_path: str, tag: str) -> str: ...
    def _get_non_moe_state_dict(self, full_state_dict: dict[str, Any]) -> dict[str, Any]: ...
    def _get_expert_ckpt_name(
        self, checkpoints_path: str, layer_id: int, expert_id: int, tag: str, checkpoint_mp_rank: int
    ) -> str: ...
    def _get_rank_zero_ckpt_name(
        self, checkpoints_path: str, tag: str, mp_rank: int, dp_rank: int, bf16_mode: bool
    ) -> str: ...
    def _get_zero_param_shapes(self) -> list[dict[str, torch.Size]]: ...
    def _get_zero_frozen_param_attributes(self, attr_func: Callable[[nn.Parameter], Any]) -> dict[str, Any]: ...
    def _get_param_shape_func(self, param: nn.Parameter) -> torch.Size: ...
    def _get_param_fragment_func(self, param: nn.Parameter) -> Tensor: ...


class MappedParameter(nn.Parameter):
    """A trained parameter of stages 1 and 2; this rank's shard of the optimizer may have a span of it."""

    _hp_mapping: Any
    _index_in_param_group: int
    load_hp_checkpoint_state: Callable[[str, int, int, int], None]


class ZeroChunk(Tensor):
    """This rank's chunk of a parameter, 1D, padded."""

    ds_numel: int


class ZeroParameter(nn.Parameter):
    """A parameter that ZeRO-3 has partitioned: an ``nn.Parameter`` with these attributes added by ZeRO-3."""

    ds_id: int
    ds_numel: int
    ds_shape: torch.Size
    ds_tensor: ZeroChunk
    ds_status: Any  # a ZeroParamStatus
    ds_persist: bool
    ds_active_sub_modules: set[int]
    ds_process_group: ProcessGroup | None
    ds_zero_partition_rank: int
    ds_zero_partition_world_size: int
    is_external_param: bool
    paro_originals: dict[str, Any]  # ours: DeepSpeed's methods that ours replace
    all_gather: Callable[..., Any]
    all_gather_coalesced: Callable[..., Any]
    partition: Callable[..., None]
    partition_numel: Callable[[], int]
    ds_summary: Callable[..., dict[str, Any]]


def is_partitioned(param: nn.Parameter) -> TypeGuard[ZeroParameter]:
    """Return whether ZeRO-3 has partitioned a parameter."""
    return hasattr(param, "ds_id")


class LeafOptimizer(Protocol):
    """A stage-3 optimizer, as leaf modules see it."""

    module: nn.Module
    fp16_groups: list[list[ZeroParameter]]
    ipg_buckets: dict[torch.dtype, Any]
    leaf_parameters: dict[nn.Module, list[ZeroParameter]]
    parameter_offload: Any
    _leaf_module_hooks: list[Any]
    _backward_hook_state: Any
    _coalesce_grad_reduction: bool
    _max_expected_hooks_seen: int

    def should_refresh_expected_hook_count(self) -> bool: ...
    def reduce_ready_partitions_and_remove_grads(self, param: Any) -> None: ...
    def reenter_backward_if_needed(self) -> None: ...
    def update_hook_state_and_maybe_run_epilogue(self, expected: int) -> None: ...
