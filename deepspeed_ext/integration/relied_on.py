# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Every DeepSpeed symbol that our classes override or call: what for, and in which form we know it."""

from collections.abc import Iterable, Iterator

from deepspeed_ext.integration.symbols import ENGINE, PIPELINE, STAGES, ZERO3, ZERO12, Patch


def _of(owner: str, symbols: Iterable[tuple[str, str, str]]) -> Iterator[Patch]:
    """Yield what a class of ours overrides or calls of ``owner``, given each name, why, and signature."""
    return (Patch(f"{owner}.{name}", why, signature) for name, why, signature in symbols)


RELIED_ON: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.engine:get_fp32_state_dict_from_zero_checkpoint",
        "bug fix: take weights from the tag that is loaded",
        "(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False)",
    ),
    *_of(
        ENGINE,
        (
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
        PIPELINE,
        (
            ("_exec_backward_pass", "end a micro-step", "(self, buffer_id)"),
            ("_exec_reduce_tied_grads", "sum the gradients of tied weights later", "(self)"),
            ("_exec_reduce_grads", "end an accumulation", "(self)"),
            ("module_state_dict", "gather the parameters of a layer", "(self, exclude_frozen_parameters=False)"),
            (
                "load_module_state_dict",
                "gather the parameters of a layer",
                "(self, checkpoint, strict=True, custom_load_fn=None, fetch_z3_params=False, "
                "z3_params_to_fetch=None, allowed_missing_keys=None)",
            ),
            ("_backward_epilogue", "end a micro-step", "(self)"),
        ),
    ),
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
            ("_model_parallel_all_reduce", "take one norm over all stages", "(self, tensor, op)"),
            ("clear_backward_seen_flag", "end a micro-step of a pipeline", "(self)"),
            (
                "average_tensor",
                "reduce a full bucket",
                "(self, tensor, communication_data_type)",
            ),
            (
                "_buffered_reduce_fallback_preserving_fp32",
                "reduce a bucket without contiguous_gradients",
                "(self, grads, grad_params, communication_data_type, elements_per_buffer)",
            ),
            ("_use_compact_grad_partition_buffer", "keep the optimizer's gradient shard flat", "(self, group_idx)"),
            ("_get_compact_grad_partition_buffer", "keep the optimizer's gradient shard flat", "(self, group_idx)"),
            ("_build_compact_grad_partition_buffer", "add offloaded gradients on the host", "(self, group_idx)"),
            ("copy_grads_in_partition", "copy gradients to an offloaded optimizer", "(self, param, group_idx=None)"),
            ("_record_offload_copy", "read gradients on the host when they are there", "(self)"),
            ("_wait_for_offload_copies", "read gradients on the host when they are there", "(self)"),
            ("update_offload_overflow_tracker", "find overflows of offloaded gradients", "(self, grad)"),
            ("independent_gradient_partition_epilogue", "end a micro-step", "(self)"),
            ("finalize_gradient_accumulation_boundary", "end an unmanaged accumulation", "(self)"),
            ("scaled_global_norm", "have replicas of the optimizer agree on the norm", "(self, norm_type=2)"),
            ("has_overflow", "have replicas of the optimizer agree on overflow", "(self, partition_gradients=True)"),
            ("_apply_muon_updates_cpu_offload", "orthogonalize what owners have", "(self)"),
            ("_commit_muon_momentum", "orthogonalize what owners have", "(self)"),
            ("_muon_update_lacks_loss_scale", "scale Muon's updates as gradients", "(self, group_index)"),
            (
                "_load_legacy_checkpoint",
                "refuse a checkpoint that is sharded otherwise",
                "(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False)",
            ),
            (
                "flatten_dense_tensors_aligned",
                "lay out flat buffers in stripes",
                "(self, tensor_list, alignment, use_cpu_data=False, param_padding=None)",
            ),
            ("get_data_parallel_partitions", "take partitions of stripes", "(self, tensor, group_id)"),
            (
                "get_partition_info",
                "tell what partitions of stripes have",
                "(self, tensor_list, partition_size, partition_id, param_padding=None)",
            ),
            (
                "initialize_gradient_partition",
                "tell what partitions of stripes have",
                "(self, i, param_group, partition_id)",
            ),
            ("get_first_param_index", "look at this rank's partition", "(self, group_id, param_group, partition_id)"),
            (
                "get_grad_position",
                "tell what partitions of stripes have",
                "(self, group_id, tensor_list, first_offset, partition_size)",
            ),
            ("_link_all_hp_params", "tell what partitions of stripes have", "(self)"),
            ("_lazy_init_hp_params_optimizer_state", "link states of each parameter group", "(self)"),
            ("state_dict", "save in the order of ZeRO's partitions", "(self)"),
            ("_load_global_state", "load from universal checkpoints", "(self, sd)"),
            ("_restore_from_bit16_weights", "load weights from universal checkpoints", "(self)"),
            ("update_lp_params", "have all ranks hold the optimizer's weights", "(self)"),
            ("reload_states", "make partitions anew", "(self, non_blocking=False)"),
            ("step", "tell reductions that remember whether a step was skipped", "(self, closure=None)"),
            ("_get_loss_scale", "know the scale of gradients", "(self)"),
            ("destroy", "drop gradients", "(self)"),
            ("reset_cpu_buffers", "drop the gradients of a skipped step with offload", "(self)"),
            ("reduce_ipg_grads", "flush buckets", "(self, comm_dtype=None)"),
            ("reduce_ready_partitions_and_remove_grads", "put a gradient into a bucket", "(self, param, i)"),
            ("reduce_independent_p_g_buckets_and_remove_grads", "move a full bucket on", "(self, param, i)"),
            ("setup_buckets", "open buckets", "(self)"),
            ("is_moe_group", "tell the families of flat buffers", "(self, group)"),
            ("get_grad_norm_direct", "count each expert once", "(self, gradients, params, norm_type=2)"),
            ("complete_grad_norm_calculation_for_cpu_offload", "count each expert once", "(self, params)"),
            ("get_gradient_for_reduction", "read an accumulated gradient", "(self, param)"),
        ),
    ),
    *_of(
        ZERO3,
        (
            ("_model_parallel_all_reduce", "take one norm over all stages", "(self, tensor, op)"),
            ("clear_backward_seen_flag", "end a micro-step of a pipeline", "(self)"),
            ("get_grad_norm_direct", "count tied weights once", "(self, gradients, params, norm_type=2)"),
            ("complete_grad_norm_calculation_for_cpu_offload", "count tied weights once", "(self, params)"),
            ("_create_fp16_sub_groups", "limit sub-groups to a bucket of the gather", "(self, params_group)"),
            ("_get_parameter_partitions", "hold slices in the flat parameter buffer", "(self)"),
            ("_set_fp16_partitioned_groups_flat", "hold slices in the flat parameter buffer", "(self)"),
            ("_pre_step", "wait for gathers of parameters", "(self)"),
            ("_post_step", "gather updated parameters", "(self, timer_names)"),
            ("_reassign_or_swap_out_partitioned_parameters", "send what a step has changed", "(self, sub_group_id)"),
            (
                "set_full_hp_param",
                "send weights that somebody has set as they are",
                "(self, value, param, optim_state_key=None)",
            ),
            (
                "set_local_hp_param",
                "send weights that somebody has set as they are",
                "(self, value, param, optim_state_key=None)",
            ),
            ("_setup_for_real_optimizer", "place gradients", "(self)"),
            ("reduce_ready_partitions_and_remove_grads", "keep a gradient that is not sharded", "(self, param)"),
            (
                "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_grads",
                "reduce a full bucket",
                "(self, params_to_reduce, communication_data_type)",
            ),
            (
                "_DeepSpeedZeroOptimizer_Stage3__avg_scatter_contiguous_grads",
                "reduce a full bucket without reduce-scatter",
                "(self, buffer_to_reduce, communication_data_type)",
            ),
            ("partition_grads", "release the gradients of a bucket", "(self, params_to_release, grad_partitions)"),
            ("finalize_gradient_accumulation_boundary", "end an unmanaged accumulation", "(self)"),
            ("_finalize_offload_gradient_accumulation", "hand gradients to an offloaded optimizer", "(self)"),
            ("zero_grad", "forget gradients, and tell reductions that remember", "(self, set_to_none=True)"),
            (
                "_get_fp32_grad_state_partition",
                "refuse gradients that are not complete",
                "(self, param, release_swap_buffers)",
            ),
            (
                "update_fp32_grad_for_param_vectorized",
                "refuse gradients that are not complete",
                "(self, update_func, param_list)",
            ),
            ("checkpoint_event_prologue", "wait for gathers of parameters", "(self)"),
            ("checkpoint_event_epilogue", "complete parameters that were loaded", "(self)"),
            (
                "offload_states",
                "move parameters and gradients as we hold them",
                "(self, include=None, device=<OffloadDeviceEnum.cpu: 'cpu'>, pin_memory=True, non_blocking=False)",
            ),
            ("reload_states", "move parameters and gradients as we hold them", "(self, non_blocking=False)"),
            ("_zero3_partition_group_metadata", "refuse a checkpoint of experts elsewhere", "(self)"),
            ("_get_sub_group_partition_ranks", "read the file of another group with experts", "(self, sub_group_id)"),
            ("_get_norm_groups", "have replicas of the optimizer agree on the norm", "(self)"),
            ("has_overflow", "have replicas of the optimizer agree on overflow", "(self, partition_gradients=True)"),
            ("_apply_muon_to_accumulated_grads", "orthogonalize what owners have", "(self)"),
            ("_muon_update_lacks_loss_scale", "scale Muon's updates as gradients", "(self, sub_group_id)"),
            ("_loss_scale_update_and_overflow_cleanup", "keep momentum, or drop it", "(self)"),
            (
                "load_state_dict",
                "refuse a checkpoint that is sharded otherwise",
                "(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False, "
                "checkpoint_folder=None, load_serial=None, param_shapes=None)",
            ),
            ("_load_global_state_stage3", "load from universal checkpoints", "(self, sd)"),
            ("_restore_from_bit16_weights", "load weights from universal checkpoints", "(self)"),
            ("load_hp_checkpoint_state", "load from universal checkpoints", "(self, folder, key, param=None)"),
            ("step", "tell reductions that remember whether a step was skipped", "(self, closure=None)"),
            ("_get_loss_scale", "know the scale of gradients", "(self)"),
            ("destroy", "give parameters back", "(self)"),
        ),
    ),
)
