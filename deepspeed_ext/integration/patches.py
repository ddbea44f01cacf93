# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Table of the DeepSpeed symbols that we replace or override: purpose, replacement, and expected signature.

Each is checked when one of our keys is used. Symbols that we only call are compared by ``scripts/patches drift``.
"""

from deepspeed_ext.integration import seams
from deepspeed_ext.integration.seams import lazily
from deepspeed_ext.integration.symbols import ENGINE, PIPELINE, STAGES, ZERO3, ZERO12, Patch

DEEPSPEED_VERSIONS = ">=0.19.8,<0.20"  # also read by setup.py, as a requirement for pip
TESTED_VERSIONS = ("0.19.8",)


REPLACED: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.config:get_zero_config",
        "accept our keys in zero_optimization",
        "(param_dict)",
        seams.parse_our_keys,
        gate=True,
        takes_require=True,
    ),
    Patch(
        "deepspeed.runtime.config:_reject_removed_config_keys",
        "accept the keys of MiCS and LoCo, which DeepSpeed has removed",
        "(param_dict)",
        seams.leave_removed_keys_to_us,
        gate=True,
    ),
    Patch(
        "deepspeed.runtime.config:DeepSpeedConfig.__init__",
        "check our keys against the rest of the configuration before any communication",
        "(self, config, mpu=None, mesh_device=None)",
        seams.check_our_keys,
        gate=True,
        takes_require=True,
    ),
    Patch(
        f"{ENGINE}._do_optimizer_sanity_check",
        "use ZeRO's optimizer for bf16 with fp32 accumulation at stage 1, instead of BF16_Optimizer",
        "(self, basic_optimizer)",
        seams.keep_in_zero,
    ),
    Patch(
        f"{ENGINE}._configure_distributed_model",
        "choose the fastest strategy once the model is built, before anything depends on the stage",
        "(self, model)",
        seams.decide_on_a_strategy,
    ),
    Patch(
        f"{ENGINE}._configure_zero_optimizer",
        "build our subclass of ZeRO's optimizer under the name DeepSpeedZeroOptimizer",
        "(self, optimizer)",
        seams.make_our_optimizer,
    ),
    Patch(
        "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups",
        "gather updated parameters between groups first, then inside",
        "(groups_flat, partitioned_param_groups, dp_process_group, start_alignment_factor, allgather_bucket_size)",
        seams.gather_our_parameters,
    ),
    Patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator:assert_ints_same_as_other_ranks",
        "compare the order of modules only among ranks that gather together",
        "(ints)",
        seams.compare_within_group,
    ),
    Patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator:iter_params",
        "fetch the parameters of a leaf module as one",
        "(module, recurse=False)",
        lazily("deepspeed_ext.leaf.units:entries"),
    ),
    Patch(
        "deepspeed.runtime.zero.linear:zero3_linear_wrap",
        "multiply by the small weights of a leaf module without inspecting a signature each time",
        "(input, weight, bias=None)",
        seams.call_without_detour,
    ),
    Patch(
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._set_z3_leaf_modules_by_threshold",
        "with a strategy, make stage3_module_granularity_threshold skip the root and modules that are called from "
        "outside, and log its table",
        "(self, module, zero_module_granularity_threshold)",
        seams.choose_leaves,
    ),
    Patch(
        f"{ZERO3}.create_reduce_and_remove_grad_hooks",
        "reduce the gradients of a leaf module together once all are computed",
        "(self)",
        seams.watch_our_leaves,
    ),
    Patch(
        f"{ZERO3}.independent_gradient_partition_epilogue",
        "reduce the remaining gradients of leaf modules at the end of the backward",
        "(self)",
        seams.reduce_what_waits,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters.__init__",
        "interpret modifier_rank as a data-parallel rank if parameters are sharded inside groups",
        "(self, params, modifier_rank=None, fwd_module=None, enabled=True)",
        seams.modify_in_all_groups,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters._exit",
        "broadcast modified parameters to all groups if parameters are sharded inside groups",
        "(self, *exc)",
        seams.broadcast_to_all_groups,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters._partition_params",
        "make each engine write back its own parameters",
        "(params, has_been_updated)",
        lazily("deepspeed_ext.zero.sharded.parameter_chunks:partition_by_owner"),
    ),
    Patch(
        "deepspeed.runtime.engine:create_checkpoint_engine",
        "write checkpoint files to a temporary folder, and read them before a load changes anything",
        "(config_params, groups, zero_stage, has_moe_layers, optimize_dp_state)",
        seams.write_files_safely,
    ),
    Patch(
        f"{ENGINE}.save_checkpoint",
        "replace a checkpoint atomically",
        "(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False)",
        seams.save_as_a_whole,
    ),
    Patch(
        f"{ENGINE}.load_checkpoint",
        "check a checkpoint on all ranks before a load changes anything",
        "(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, "
        "load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None)",
        seams.load_what_was_checked,
    ),
    Patch(
        f"{ENGINE}._get_all_ckpt_names",
        "bug fix: a universal checkpoint of another stage has model states under another name",
        "(self, checkpoints_path, tag)",
        seams.find_files_of_other_stages,
    ),
    *(
        Patch(
            f"{optimizer}._load_universal_checkpoint",
            "load universal checkpoints into our optimizers; bug fix: into DeepSpeed's if stages differ",
            "(self, checkpoint_folder, load_optimizer_states, load_from_fp32_weights)",
            lazily("deepspeed_ext.checkpoint.universal:load_into"),
        )
        for optimizer in (ZERO12, ZERO3)
    ),
    Patch(
        f"{PIPELINE}.__init__",
        "run pipelines with strategies, ZeRO-2 and ZeRO-3",
        "(self, has_bool_tensors=False, *super_args, **super_kwargs)",
        lazily("deepspeed_ext.pipeline.setup:initialize"),
        takes_require=True,
    ),
    Patch(
        f"{STAGES}._partition_layers",
        "refuse to build a pipeline under zero.Init, where it would hang",
        "(self, method='uniform')",
        lazily("deepspeed_ext.pipeline.setup:partition_layers"),
    ),
)

# Functions that our code replaces temporarily, during one of its calls.
_CONVERTER = "deepspeed.checkpoint.ds_to_universal"
REPLACED_DURING_CALLS: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.engine:get_fp32_state_dict_from_zero_checkpoint",
        "bug fix: read weights from the requested tag",
        "(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False)",
    ),
    Patch(
        "torch.serialization:load",
        "load only listed classes from checkpoints",
        "(f, map_location=None, pickle_module=None, *, weights_only=None, mmap=None, **pickle_load_args)",
    ),
    Patch(
        f"{_CONVERTER}:extract_zero_shards",
        "convert momentum, and states in several files",
        "(dir, ds_checkpoint, indices_3D)",
    ),
    Patch(
        f"{_CONVERTER}:extract_zero_shards_stage3",
        "convert momentum, and states in several files",
        "(optim_files_grid, param_shapes_grid, dp_degree, temp_dir, indices, exclude_param_names=None)",
    ),
    Patch(
        f"{_CONVERTER}:_consolidate_zero3_autoep_expert_states",
        "convert experts that fewer ranks share",
        "(output_dir, model_files, optim_files)",
    ),
    Patch(
        f"{_CONVERTER}:_save_optimizer_state", "convert states that are not in ZeRO's order", "(args, ds_checkpoint)"
    ),
    Patch(
        f"{ENGINE}._reduce_autoep_folding_tp_replicated_gradients", "leave this reduction to our optimizers", "(self)"
    ),
    Patch(f"{ENGINE}._check_for_duplicates", "do not compare all pairs of parameters", "(self, optimizer)"),
    Patch(f"{ENGINE}._copy_recovery_script", "do not copy the script into saves in memory", "(self, save_path)"),
    Patch(f"{STAGES}._synchronize_tied_weights", "load layers one by one", "(self)"),
)

PATCHES = REPLACED + REPLACED_DURING_CALLS

# Our classes with overrides, which are checked on import.
OVERRIDING_CLASSES = (
    "deepspeed_ext.zero.stage12:Stage12Optimizer",
    "deepspeed_ext.zero.stage3:Stage3Optimizer",
    "deepspeed_ext.zero.sharded.coordinator:GroupCoordinator",
    "deepspeed_ext.pipeline.engine:ShardedPipelineEngine",
)

# Symbols of other packages, replaced if imported and with the expected signature. Nothing else depends on them.
OTHER_PACKAGES: tuple[Patch, ...] = (
    Patch(
        "accelerate.utils.deepspeed:HfDeepSpeedConfig.set_stage_and_offload",
        "make Accelerate, HF Trainer and TRL read the stage that a strategy implies, in time for zero.Init",
        "(self)",
        lazily("deepspeed_ext.config.implied:read_with_stage"),
    ),
    Patch(
        "accelerate.accelerator:Accelerator.save_state",
        "complete a save that runs before older checkpoints are deleted",
        "(self, output_dir=None, safe_serialization=True, **save_model_func_kwargs)",
        lazily("deepspeed_ext.checkpoint.frameworks:save_state"),
    ),
    Patch(
        "accelerate.accelerator:Accelerator.load_state",
        "resume from the newest checkpoint that is complete",
        "(self, input_dir=None, load_kwargs=None, **load_model_func_kwargs)",
        lazily("deepspeed_ext.checkpoint.frameworks:load_state"),
    ),
    Patch(
        "transformers.trainer_utils:get_last_checkpoint",
        "resume from the newest checkpoint that is complete",
        "(folder)",
        lazily("deepspeed_ext.checkpoint.frameworks:last_checkpoint"),
    ),
    Patch(
        "transformers.trainer_utils:rotate_checkpoints",
        "keep the last complete checkpoint while the next one is being written",
        "(output_dir, save_total_limit=None, best_model_checkpoint=None, use_mtime=False, "
        "checkpoint_prefix='checkpoint')",
        lazily("deepspeed_ext.checkpoint.frameworks:rotate_checkpoints"),
    ),
    Patch(
        "transformers.trainer:Trainer._rotate_checkpoints",
        "the same, in transformers 4",
        "(self, use_mtime=False, output_dir=None)",
        lazily("deepspeed_ext.checkpoint.frameworks:rotate_checkpoints_of"),
    ),
    Patch(
        "transformers.trainer:Trainer._save_checkpoint",
        "complete the last save of a training before the training ends",
        "(self, model, trial)",
        lazily("deepspeed_ext.checkpoint.frameworks:save_checkpoint"),
    ),
    Patch(
        "accelerate.accelerator:Accelerator.backward",
        "refuse loaders and steps with which groups would not run their own numbers of micro-batches",
        "(self, loss, **kwargs)",
        lazily("deepspeed_ext.zero.framework_loops:backward"),
    ),
    Patch(
        "transformers.trainer:Trainer.training_step",
        "refuse losses that are divided by the tokens of all ranks if groups run their own numbers of micro-batches",
        "(self, model, inputs, num_items_in_batch=None)",
        lazily("deepspeed_ext.zero.framework_loops:training_step"),
    ),
    Patch(
        "torch.distributed.distributed_c10d:destroy_process_group",
        "complete updates in flight before the connections between ranks are closed",
        "(group=None)",
        seams.complete_transfers_first,
    ),
)
