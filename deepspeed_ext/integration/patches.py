# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Every DeepSpeed symbol that we replace or override: what for, and in which form we know it.

With ``replacements`` the only module that knows both DeepSpeed's symbols and all of ours.
"""

import importlib
import inspect
import sys
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

from deepspeed_ext.integration import fork, support
from deepspeed_ext.integration.seams import (
    checkpoints,
    frameworks,
    granularity,
    kernels,
    keys,
    leaf_gradients,
    pipelines,
    planning,
    quantized,
    records,
    strategies,
)
from deepspeed_ext.integration.symbols import Patch

DEEPSPEED_VERSIONS = ">=0.19.8,<0.20"
TESTED_VERSIONS = ("0.19.8",)

_MARK = "__deepspeed_ext__"


_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_PIPELINE = "deepspeed.runtime.pipe.engine:PipelineEngine"
_STAGES = "deepspeed.runtime.pipe.module:PipelineModule"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"


def _relied_on(owner: str, symbols: Iterable[tuple[str, str, str]]) -> Iterator[Patch]:
    """What a class of ours overrides or calls of ``owner``: of each name, why and signature."""
    return (Patch(f"{owner}.{name}", why, signature) for name, why, signature in symbols)


PATCHES: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.config:get_zero_config",
        "accept our keys in zero_optimization",
        "(param_dict)",
        keys.parse_our_keys,
        gate=True,
    ),
    Patch(
        "deepspeed.runtime.config:_reject_removed_config_keys",
        "accept the keys of MiCS and LoCo, which DeepSpeed has removed",
        "(param_dict)",
        keys.leave_removed_keys_to_us,
        gate=True,
    ),
    Patch(
        "deepspeed.runtime.config:DeepSpeedConfig.__init__",
        "refuse what our keys contradict before anything is communicated",
        "(self, config, mpu=None, mesh_device=None)",
        keys.check_our_keys,
        gate=True,
    ),
    Patch(
        f"{_ENGINE}._do_optimizer_sanity_check",
        "keep bf16 with fp32 accumulation at stage 1 in ZeRO's optimizer, where BF16_Optimizer would be made",
        "(self, basic_optimizer)",
        strategies.keep_in_zero,
    ),
    Patch(
        f"{_ENGINE}._configure_distributed_model",
        "decide on a strategy when the model is known and nothing of it depends on the stage yet",
        "(self, model)",
        planning.decide_on_a_strategy,
    ),
    Patch(
        f"{_ENGINE}._configure_zero_optimizer",
        "make our subclass of ZeRO's optimizer, which has the name DeepSpeedZeroOptimizer in the engine meanwhile",
        "(self, optimizer)",
        strategies.make_our_optimizer,
    ),
    Patch(
        "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups",
        "gather updated parameters between groups first, then inside",
        "(groups_flat, partitioned_param_groups, dp_process_group, start_alignment_factor, allgather_bucket_size)",
        strategies.gather_our_parameters,
    ),
    Patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator:assert_ints_same_as_other_ranks",
        "compare the order in which modules are used among the ranks that gather together",
        "(ints)",
        strategies.compare_within_group,
    ),
    Patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator:iter_params",
        "fetch the parameters of a leaf module as one",
        "(module, recurse=False)",
        granularity.fetch_leaves_as_units,
    ),
    Patch(
        "deepspeed.runtime.zero.linear:zero3_linear_wrap",
        "multiply by the small weights of a leaf module without inspecting a signature each time",
        "(input, weight, bias=None)",
        granularity.call_without_detour,
        copies=("deepspeed.runtime.zero.partition_parameters",),
    ),
    Patch(
        "deepspeed.runtime.zero.parameter_offload:DeepSpeedZeRoOffload._set_z3_leaf_modules_by_threshold",
        "bug fix: stage3_module_granularity_threshold never takes the root, nor what is entered from elsewhere; its "
        "table is shown",
        "(self, module, zero_module_granularity_threshold)",
        granularity.choose_leaves,
    ),
    Patch(
        f"{_ZERO3}.create_reduce_and_remove_grad_hooks",
        "bug fix: leaf modules whose inputs need no gradients, or come by keyword",
        "(self)",
        leaf_gradients.watch_our_leaves,
    ),
    Patch(
        f"{_ZERO3}.independent_gradient_partition_epilogue",
        "bug fix: leaf modules whose inputs need no gradients, or come by keyword",
        "(self)",
        leaf_gradients.reduce_what_waits,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters.__init__",
        "take modifier_rank as a data-parallel rank where parameters are cut inside groups",
        "(self, params, modifier_rank=None, fwd_module=None, enabled=True)",
        strategies.modify_in_all_groups,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters._exit",
        "bring what one rank has modified to all groups where parameters are cut inside groups",
        "(self, *exc)",
        strategies.broadcast_to_all_groups,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters._partition_params",
        "have each engine write back its own parameters",
        "(params, has_been_updated)",
        strategies.partition_by_owner,
    ),
    Patch(
        "deepspeed.runtime.zero.stage3:all_to_all_quant_reduce",
        "bug fix: zero_quantized_gradients gives the mean, and takes bfloat16 for what it is",
        "(tensors, groups)",
        quantized.reduce_to_the_mean,
    ),
    Patch(
        "deepspeed.utils.comms_logging:calc_bw_log",
        "record bandwidths over the ranks of a hop, not over all",
        "(comm_op, size, duration)",
        records.count_the_ranks_of_a_hop,
    ),
    Patch(
        "deepspeed.env_report:op_report",
        "show our kernels in ds_report",
        "(verbose=True)",
        kernels.report_our_kernels,
    ),
    Patch(
        "deepspeed.runtime.engine:create_checkpoint_engine",
        "write each file of a checkpoint aside, and read each before anything is changed",
        "(config_params, groups, zero_stage, has_moe_layers, optimize_dp_state)",
        checkpoints.write_files_safely,
    ),
    Patch(
        f"{_ENGINE}.save_checkpoint",
        "replace a checkpoint as a whole",
        "(self, save_dir, tag=None, client_state={}, save_latest=True, exclude_frozen_parameters=False)",
        checkpoints.save_as_a_whole,
    ),
    Patch(
        f"{_ENGINE}.load_checkpoint",
        "check a checkpoint on all ranks before anything is changed",
        "(self, load_dir, tag=None, load_module_strict=True, load_optimizer_states=True, "
        "load_lr_scheduler_states=True, load_module_only=False, custom_load_fn=None)",
        checkpoints.load_what_was_checked,
    ),
    Patch(
        f"{_ENGINE}._get_all_ckpt_names",
        "bug fix: a universal checkpoint of another stage has model states under another name",
        "(self, checkpoints_path, tag)",
        checkpoints.find_files_of_other_stages,
    ),
    *(
        Patch(
            f"{optimizer}._load_universal_checkpoint",
            "load universal checkpoints into ours; bug fix: and into DeepSpeed's where the stage was another",
            "(self, checkpoint_folder, load_optimizer_states, load_from_fp32_weights)",
            checkpoints.load_universal,
        )
        for optimizer in (_ZERO12, _ZERO3)
    ),
    Patch(
        "deepspeed.runtime.engine:get_fp32_state_dict_from_zero_checkpoint",
        "bug fix: take weights from the tag that is loaded",
        "(checkpoint_dir, tag=None, exclude_frozen_parameters=False, lazy_mode=False)",
    ),
    *_relied_on(
        _ENGINE,
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
            ("_get_zero_ckpt_name", "look into a file before it is loaded", "(self, checkpoints_path, tag)"),
            (
                "_get_rank_zero_ckpt_name",
                "look into a file before it is loaded",
                "(self, checkpoints_path, tag, mp_rank, dp_rank, bf16_mode)",
            ),
        ),
    ),
    Patch(
        f"{_PIPELINE}.__init__",
        "run pipelines with strategies, ZeRO-2 and ZeRO-3",
        "(self, has_bool_tensors=False, *super_args, **super_kwargs)",
        pipelines.train_pipelines,
    ),
    Patch(
        f"{_STAGES}._partition_layers",
        "refuse to build a pipeline under zero.Init, where it would hang",
        "(self, method='uniform')",
        pipelines.build_pipelines_whole,
    ),
    *_relied_on(
        _PIPELINE,
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
    *_relied_on(
        _STAGES,
        (
            ("_synchronize_tied_weights", "load layers one by one", "(self)"),
            ("stage_owner", "find the stages of tied weights", "(self, layer_idx)"),
            ("ckpt_layer_path_list", "look into layers before they are loaded", "(self, ckpt_dir, local_layer_idx)"),
        ),
    ),
    *_relied_on(
        _ZERO12,
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
            (
                "_load_legacy_checkpoint",
                "refuse a checkpoint that is cut otherwise",
                "(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False)",
            ),
            ("_load_global_state", "load from universal checkpoints", "(self, sd)"),
            ("_restore_from_bit16_weights", "load weights from universal checkpoints", "(self)"),
            ("step", "tell reductions that remember whether a step was skipped", "(self, closure=None)"),
            ("_get_loss_scale", "know the scale of gradients", "(self)"),
            ("destroy", "drop gradients", "(self)"),
            ("reset_cpu_buffers", "drop the gradients of a skipped step with offload", "(self)"),
            ("reduce_ipg_grads", "flush buckets", "(self, comm_dtype=None)"),
            ("reduce_ready_partitions_and_remove_grads", "put a gradient into a bucket", "(self, param, i)"),
            ("setup_buckets", "open buckets", "(self)"),
            ("get_gradient_for_reduction", "read an accumulated gradient", "(self, param)"),
        ),
    ),
    *_relied_on(
        _ZERO3,
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
            ("_setup_for_real_optimizer", "place gradients", "(self)"),
            ("reduce_ready_partitions_and_remove_grads", "keep a gradient that is not cut", "(self, param)"),
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
            ("_get_norm_groups", "have replicas of the optimizer agree on the norm", "(self)"),
            ("has_overflow", "have replicas of the optimizer agree on overflow", "(self, partition_gradients=True)"),
            (
                "load_state_dict",
                "refuse a checkpoint that is cut otherwise",
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

# Symbols of other packages: replaced where these are imported and as we know them; without them all else works.
BESIDE: tuple[Patch, ...] = (
    Patch(
        "accelerate.utils.deepspeed:HfDeepSpeedConfig.set_stage_and_offload",
        "have Accelerate, HF Trainer and TRL read the stage that a strategy implies, in time for zero.Init",
        "(self)",
        frameworks.read_the_stage_that_is_implied,
    ),
)

_originals: dict[str, tuple[Any, str, Any, Any]] = {}  # path: owner, name, original, replacement


def modules() -> frozenset[str]:
    """Modules that hold a symbol to replace."""
    return frozenset(patch.module for patch in PATCHES + BESIDE if patch.replace)


def foreign() -> str | None:
    """Why this DeepSpeed as a whole is none that we know; None if it may be one."""
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    said = getattr(sys.modules.get("deepspeed"), "__version__", None) or _installed()
    if said is not None and not SpecifierSet(DEEPSPEED_VERSIONS).contains(Version(said).base_version):
        return f"its version is {said}, supported is {DEEPSPEED_VERSIONS}"
    if fork.is_partial():
        return f"it has a part of these features built in ({fork.PACKAGE}), and not all of them"
    return None


def _installed() -> str | None:
    """DeepSpeed's version as pip knows it: while it is imported it does not say it yet."""
    try:
        return metadata.version("deepspeed")
    except metadata.PackageNotFoundError:  # a folder on the search path
        return None


def apply(module: str) -> None:
    """Replace the symbols of a module that is imported already.

    A symbol that is not as we know it stays as it is, and so do all where DeepSpeed is none that we know; but for the
    gates, which refuse our keys then.
    """
    listed = PATCHES + BESIDE
    due = [patch for patch in listed if patch.module == module and patch.replace and patch.path not in _originals]
    unknown = bool(due) and foreign() is not None
    for patch in due:
        if patch.replace is None or ((unknown or patch.problem()) and not patch.gate):
            continue
        try:
            owner, name, original = patch.locate()
        except AttributeError:
            continue
        replacement: Any = patch.replace(getattr(original, "__func__", original))
        setattr(replacement, _MARK, True)
        if isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        for holder in (owner, *_copies(patch)):
            _exchange(holder, name, original, replacement)
        _originals[patch.path] = (owner, name, original, replacement)


def _copies(patch: Patch) -> list[Any]:
    """Return the modules that may hold the symbol as well; what is imported later imports the replacement."""
    return [sys.modules[name] for name in patch.copies if name in sys.modules]


def _exchange(owner: Any, name: str, old: Any, new: Any) -> bool:
    """Put an object in the place of another one, and return whether that was there."""
    found = inspect.getattr_static(owner, name, None) is old
    if found:
        setattr(owner, name, new)
    return found


def undo() -> None:
    """Put the originals back, except where somebody else has patched on top of us."""
    for patch in PATCHES + BESIDE:
        if patch.path not in _originals:
            continue
        owner, name, original, replacement = _originals[patch.path]
        for holder in _copies(patch):
            _exchange(holder, name, replacement, original)
        if _exchange(owner, name, replacement, original):
            del _originals[patch.path]


def import_all() -> None:
    """Import every module that holds a symbol of the list."""
    for module in {patch.module for patch in PATCHES}:
        importlib.import_module(module)


def status() -> list[tuple[Patch, str]]:
    """For each patch: applied, relied on, not imported, not applied, or what is wrong. Imports nothing new."""
    rows = []
    for patch in (*PATCHES, *(patch for patch in BESIDE if patch.module in sys.modules)):
        if patch.path in _originals and not patch.problem():
            state = "applied"
        elif patch.module not in sys.modules:
            state = "not imported"
        else:
            state = patch.problem() or ("not applied" if patch.replace else "as expected")
        rows.append((patch, state))
    return rows


def require() -> None:
    """See ``support.require``.

    Raises:
        RuntimeError: this DeepSpeed is not one that we know, or a symbol has moved or changed.
    """
    problems = [problem for problem in [foreign()] if problem]
    for patch in PATCHES:
        importlib.import_module(patch.module)
        problem = patch.problem()  # of the original: a replacement shows the signature of what it wraps
        if problem or (not problems and patch.replace and patch.path not in _originals):
            problems.append(problem or f"{patch.path} is not patched")
    if problems:
        raise RuntimeError(
            f"deepspeed_ext does not know this DeepSpeed: {'; '.join(problems)}. Tested: DeepSpeed "
            f"{', '.join(TESTED_VERSIONS)}. Install one of those, or remove the keys of deepspeed_ext (paro_*, "
            f"mics_*, zeropp_loco_param) from zero_optimization."
        )


support.checks.append(require)
