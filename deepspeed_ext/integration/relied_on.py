# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of DeepSpeed our classes call and override: what for, and in which form we know it.

An override is marked where it is, and checked against its parent when its class is made (``overrides.py``). What is
called has a row here.
"""

from collections.abc import Iterable, Iterator

from deepspeed_ext.integration.symbols import COORDINATOR, ENGINE, PIPELINE, STAGES, ZERO3, ZERO12, Patch

# Classes of ours with overrides; importing one checks them.
OVERRIDING = (
    "deepspeed_ext.zero.stage12:Stage12Optimizer",
    "deepspeed_ext.zero.stage3:Stage3Optimizer",
    "deepspeed_ext.zero.sharded.coordinator:GroupCoordinator",
    "deepspeed_ext.pipeline.engine:ShardedPipelineEngine",
)


def _of(owner: str, symbols: Iterable[tuple[str, str, str]]) -> Iterator[Patch]:
    """Yield what is called of ``owner``, given each name, why, and signature."""
    dot = "" if owner.endswith(":") else "."  # a module's own functions have none
    return (Patch(f"{owner}{dot}{name}", why, signature) for name, why, signature in symbols)


CALLED: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.engine:get_fp32_state_dict_from_zero_checkpoint",
        "bug fix: take weights from the tag that is loaded",
        "(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False)",
    ),
    *_of(
        "deepspeed.checkpoint.ds_to_universal:",
        (
            (
                "extract_zero_shards",
                "convert momentum, and states in several files",
                "(dir, ds_checkpoint, indices_3D)",
            ),
            (
                "extract_zero_shards_stage3",
                "convert momentum, and states in several files",
                "(optim_files_grid, param_shapes_grid, dp_degree, temp_dir, indices, exclude_param_names=None)",
            ),
            (
                "_consolidate_zero3_autoep_expert_states",
                "convert experts that fewer ranks share",
                "(output_dir, model_files, optim_files)",
            ),
            ("_save_optimizer_state", "convert what is in own order", "(args, ds_checkpoint)"),
        ),
    ),
    *_of(
        ENGINE,
        (
            ("_reduce_autoep_folding_tp_replicated_gradients", "leave to our optimizers what it does", "(self)"),
            ("_copy_recovery_script", "leave out of saves in memory", "(self, save_path)"),
            ("_stop_timers", "leave a step that raises before it has begun", "(self, timer_names)"),
            ("_take_model_step", "record an update", "(self, lr_kwargs)"),
            ("_backward_prologue", "record where a backward begins", "(self)"),
            ("_backward_epilogue", "record where a backward ends", "(self)"),
            ("_get_zero_param_shapes", "compare the model with a checkpoint's", "(self)"),
            ("_get_zero_frozen_param_attributes", "save frozen parameters at stage 1", "(self, attr_func)"),
            ("_get_param_shape_func", "save frozen parameters at stage 1", "(self, param)"),
            ("_get_param_fragment_func", "save frozen parameters at stage 1", "(self, param)"),
            (
                "_get_ckpt_name",
                "name a file that is missing",
                "(self, checkpoints_path, tag, mp_placeholder=None, pp_placeholder=None)",
            ),
            ("_get_non_moe_state_dict", "tell what of a module has files of its own", "(self, full_state_dict)"),
            (
                "_get_expert_ckpt_name",
                "look into a file before it is loaded",
                "(checkpoints_path, layer_id, expert_id, tag, mpu=None, checkpoint_mp_rank=None)",
            ),
            ("_get_zero_ckpt_name", "look into a file before it is loaded", "(self, checkpoints_path, tag)"),
            (
                "_get_rank_zero_ckpt_name",
                "look into a file before it is loaded",
                "(self, checkpoints_path, tag, mp_rank, dp_rank, bf16_mode)",
            ),
        ),
    ),
    *_of(
        COORDINATOR,
        (
            ("is_complete_trace", "release what persists by the record", "(self)"),
            ("is_record_trace", "put windows of experts into the record", "(self)"),
            (
                "_PartitionedParameterCoordinator__params_to_release",
                "let go of a destroyed engine's model, which its cache keeps",
                "(self, submodule_to_release, step_id)",
            ),
        ),
    ),
    *_of(PIPELINE, (("_backward_epilogue", "end a micro-step", "(self)"),)),
    *_of(
        STAGES,
        (
            ("_synchronize_tied_weights", "load layers one by one", "(self)"),
            ("stage_owner", "find the stages of tied weights", "(self, layer_idx)"),
            ("ckpt_layer_path_list", "look into layers before they are loaded", "(self, ckpt_dir, local_layer_idx)"),
        ),
    ),
    *_of(
        ZERO12,
        (
            ("clear_backward_seen_flag", "end a micro-step of a pipeline", "(self)"),
            ("_get_compact_grad_partition_buffer", "keep the optimizer's gradient shard flat", "(self, group_idx)"),
            ("_record_offload_copy", "read gradients on the host when they are there", "(self)"),
            ("_wait_for_offload_copies", "read gradients on the host when they are there", "(self)"),
            ("update_offload_overflow_tracker", "find overflows of offloaded gradients", "(self, grad)"),
            ("_muon_update_lacks_loss_scale", "scale Muon's updates as gradients", "(self, group_index)"),
            ("_load_global_state", "load from universal checkpoints", "(self, sd)"),
            ("_get_loss_scale", "know the scale of gradients", "(self)"),
            ("reduce_ipg_grads", "flush buckets", "(self, comm_dtype=None)"),
            ("reduce_ready_partitions_and_remove_grads", "put a gradient into a bucket", "(self, param, i)"),
            ("setup_buckets", "open buckets", "(self)"),
            ("is_moe_group", "tell the families of flat buffers", "(self, group)"),
            ("get_gradient_for_reduction", "read an accumulated gradient", "(self, param)"),
            ("_clear_previous_reduced_grads", "free the gradients of earlier buckets", "(self)"),
            ("clear_grad_attribute", "free a gradient that is in a bucket", "(self, param)"),
            ("get_param_comm_dtype", "know the dtype on the wire", "(self, param)"),
            ("get_param_id", "look into tables by parameter", "(self, param)"),
            ("is_gradient_accumulation_boundary", "know the accumulation boundary", "(self)"),
            ("set_gradient_accumulation_boundary", "end an unmanaged accumulation", "(self, is_boundary)"),
        ),
    ),
    *_of(
        ZERO3,
        (
            ("clear_backward_seen_flag", "end a micro-step of a pipeline", "(self)"),
            ("_apply_autoep_folding_tp_correction", "correct gradients of folded experts", "(self, param)"),
            ("_finalize_offload_gradient_accumulation", "hand gradients to an offloaded optimizer", "(self)"),
            ("_zero3_partition_group_metadata", "refuse a checkpoint of experts elsewhere", "(self)"),
            ("_muon_update_lacks_loss_scale", "scale Muon's updates as gradients", "(self, sub_group_id)"),
            ("_load_global_state_stage3", "load from universal checkpoints", "(self, sd)"),
            ("_restore_from_bit16_weights", "load weights from universal checkpoints", "(self)"),
            ("load_hp_checkpoint_state", "load from universal checkpoints", "(self, folder, key, param=None)"),
            ("_get_loss_scale", "know the scale of gradients", "(self)"),
            (
                "_get_fp32_opt_state_partition",
                "set weights that ranks do not divide",
                "(self, param, release_swap_buffers, optim_state_key=None)",
            ),
            ("_get_param_partition_rank", "set weights that ranks do not divide", "(self, param)"),
            ("get_param_comm_dtype", "know the dtype on the wire", "(self, param)"),
            ("get_param_id", "look into tables by parameter", "(self, param)"),
            ("is_gradient_accumulation_boundary", "know the accumulation boundary", "(self)"),
            ("set_gradient_accumulation_boundary", "end an unmanaged accumulation", "(self, is_boundary)"),
            (
                "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads",
                "flush buckets",
                "(self, communication_data_type)",
            ),
        ),
    ),
)
