# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Every DeepSpeed symbol that we replace or override: what for, and in which form we know it.

The only module that knows both DeepSpeed's symbols and all of ours. Replacements take the original and return what
stands in its place; they look for our keys and call the original where there are none.
"""

import functools
import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

DEEPSPEED_VERSIONS = ">=0.19.8,<0.20"
TESTED_VERSIONS = ("0.19.8",)

_MARK = "__deepspeed_ext__"


@dataclass(frozen=True)
class Patch:
    """A symbol of DeepSpeed that we depend on.

    Attributes:
        target: module and qualified name, separated by a colon.
        why: what for.
        signature: of the symbol as we know it, without annotations; another one is refused.
        replace: makes the replacement from the original; None where a subclass of ours overrides or calls it.
        gate: replaced even if its signature has changed, since it is where our keys arrive and errors come from.
    """

    target: str
    why: str
    signature: str
    replace: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None
    gate: bool = False

    @property
    def module(self) -> str:
        """Dotted name of the module."""
        return self.target.partition(":")[0]

    @property
    def path(self) -> str:
        """Dotted path of the symbol."""
        return self.target.replace(":", ".")

    def locate(self) -> tuple[Any, str, Callable[..., Any]]:
        """Owner, attribute name and present value of the symbol.

        Raises:
            AttributeError: it is not there.
        """
        owner: Any = importlib.import_module(self.module)
        *parents, name = self.target.partition(":")[2].split(".")
        for parent in parents:
            owner = getattr(owner, parent)
        return owner, name, inspect.getattr_static(owner, name)

    def problem(self) -> str | None:
        """Why the symbol is not as we know it; None if it is."""
        try:
            *_, value = self.locate()
        except (AttributeError, ImportError):
            return f"{self.path} is gone (used for: {self.why})"
        signature = _signature(getattr(value, "__func__", value))
        if signature != self.signature:
            return f"{self.path} has signature {signature}, expected {self.signature} (used for: {self.why})"
        return None


def _signature(function: Callable[..., Any]) -> str:
    """Names, kinds and defaults. Annotations print differently from one Python to the next."""
    function = inspect.unwrap(function)
    while getattr(function, "__module__", None) == "deepspeed.utils.nvtx":  # a decorator that hides what it wraps
        function = inspect.getclosurevars(function).nonlocals["func"]
    signature = inspect.signature(function)
    plain = [parameter.replace(annotation=parameter.empty) for parameter in signature.parameters.values()]
    return str(signature.replace(parameters=plain, return_annotation=signature.empty))


# Replacements #####################################################################################


def _parse_our_keys(get_zero_config: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_zero_config)
    def parse(param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext import config

        config.check_top_level(param_dict)
        section = param_dict.get(config.SECTION)
        if not config.our_keys(section):
            return get_zero_config(param_dict, *args, **kwargs)
        require()
        return config.parse_section(section)

    return parse


def _leave_mics_to_us(reject: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reject)
    def _reject_removed_config_keys(param_dict: dict[str, Any]) -> Any:
        from deepspeed_ext.config import without_mics

        return reject(without_mics(param_dict))

    return _reject_removed_config_keys


def _check_our_keys(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, config: Any, mpu: Any = None, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.config import SECTION, check_config, our_keys

        try:
            init(self, config, mpu, *args, **kwargs)
        except Exception:
            # The reason may be that this DeepSpeed is not the one that we patch: then say that instead.
            if our_keys(getattr(self, "_param_dict", {}).get(SECTION)):
                require()
            raise
        # ZeRO cuts over data- and sequence-parallel ranks together, where the mpu knows such a group.
        size = getattr(mpu, "get_sequence_data_parallel_world_size", lambda: self.world_size)()
        check_config(self, int(size))

    return __init__


def _keep_in_zero(sanity_check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sanity_check)
    def _do_optimizer_sanity_check(self: Any, basic_optimizer: Any) -> Any:
        wrapper = sanity_check(self, basic_optimizer)
        from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION

        from deepspeed_ext.config import active_strategy

        return ZERO_OPTIMIZATION if wrapper == BFLOAT16 and active_strategy(self._config) else wrapper

    return _do_optimizer_sanity_check


def _make_our_optimizer(configure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(configure)
    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        from deepspeed_ext.config import active_strategy

        strategy = active_strategy(self._config)
        if strategy is None:
            if self.zero_optimization_partition_weights() and "deepspeed_ext.zero.parameters" in sys.modules:
                from deepspeed_ext.zero.parameters import recut_for_stock

                recut_for_stock(self.module, self.seq_data_parallel_group)
            return configure(self, optimizer)
        from deepspeed_ext.zero.factory import configure_with

        return configure_with(strategy, configure, self, optimizer)

    return _configure_zero_optimizer


def _gather_our_parameters(all_gather_dp_groups: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(all_gather_dp_groups)
    def gather(groups_flat: Any, *args: Any, **kwargs: Any) -> None:
        own = getattr(groups_flat, "all_gather", None)
        if own is None or not own():
            all_gather_dp_groups(groups_flat, *args, **kwargs)

    return gather


def _compare_within_group(assert_ints_same: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(assert_ints_same)
    def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
        from deepspeed_ext.zero.coordinator import assert_same_in_group

        if not assert_same_in_group(ints):
            assert_ints_same(ints)

    return assert_ints_same_as_other_ranks


def _modify_in_all_groups(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.zero import modified

        params = modified.listed(params)
        with modified.cut_over_all(modified.replicated(params)):
            init(self, params, *args, **kwargs)

    return __init__


def _broadcast_to_all_groups(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def _exit(self: Any, *exc: Any) -> Any:
        from deepspeed_ext.zero import modified

        if self.src_rank is not None:
            modified.broadcast_to_replicas(modified.replicated(self.params), self.src_rank_by_group)
        return leave(self, *exc)

    return _exit


def _partition_by_owner(partition: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(partition)
    def _partition_params(params: Any, has_been_updated: bool) -> None:
        from deepspeed_ext.zero import modified

        modified.partition_by_owner(partition, params, has_been_updated)

    return _partition_params


# The list #########################################################################################

_ENGINE = "deepspeed.runtime.engine:DeepSpeedEngine"
_ZERO3 = "deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
_ZERO12 = "deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer"

PATCHES: tuple[Patch, ...] = (
    Patch(
        "deepspeed.runtime.config:get_zero_config",
        "accept our keys in zero_optimization",
        "(param_dict)",
        _parse_our_keys,
        gate=True,
    ),
    Patch(
        "deepspeed.runtime.config:_reject_removed_config_keys",
        "accept the keys of MiCS, which DeepSpeed has removed",
        "(param_dict)",
        _leave_mics_to_us,
        gate=True,
    ),
    Patch(
        "deepspeed.runtime.config:DeepSpeedConfig.__init__",
        "refuse what our keys contradict before anything is communicated",
        "(self, config, mpu=None, mesh_device=None)",
        _check_our_keys,
        gate=True,
    ),
    Patch(
        f"{_ENGINE}._do_optimizer_sanity_check",
        "keep bf16 with fp32 accumulation at stage 1 in ZeRO's optimizer, where BF16_Optimizer would be made",
        "(self, basic_optimizer)",
        _keep_in_zero,
    ),
    Patch(
        f"{_ENGINE}._configure_zero_optimizer",
        "make our subclass of ZeRO's optimizer, which has the name DeepSpeedZeroOptimizer in the engine meanwhile",
        "(self, optimizer)",
        _make_our_optimizer,
    ),
    Patch(
        "deepspeed.runtime.zero.stage_1_and_2:all_gather_dp_groups",
        "gather updated parameters between groups first, then inside",
        "(groups_flat, partitioned_param_groups, dp_process_group, start_alignment_factor, allgather_bucket_size)",
        _gather_our_parameters,
    ),
    Patch(
        "deepspeed.runtime.zero.partitioned_param_coordinator:assert_ints_same_as_other_ranks",
        "compare the order in which modules are used among the ranks that gather together",
        "(ints)",
        _compare_within_group,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters.__init__",
        "take modifier_rank as a data-parallel rank where parameters are cut inside groups",
        "(self, params, modifier_rank=None, fwd_module=None, enabled=True)",
        _modify_in_all_groups,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters._exit",
        "bring what one rank has modified to all groups where parameters are cut inside groups",
        "(self, *exc)",
        _broadcast_to_all_groups,
    ),
    Patch(
        "deepspeed.runtime.zero.partition_parameters:GatheredParameters._partition_params",
        "have each engine write back its own parameters",
        "(params, has_been_updated)",
        _partition_by_owner,
    ),
    *(
        Patch(f"{_ZERO12}.{name}", why, signature)
        for name, why, signature in (
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
            ("copy_grads_in_partition", "copy gradients to an offloaded optimizer", "(self, param, group_idx=None)"),
            ("independent_gradient_partition_epilogue", "end a micro-step", "(self)"),
            ("finalize_gradient_accumulation_boundary", "end an unmanaged accumulation", "(self)"),
            ("scaled_global_norm", "have replicas of the optimizer agree on the norm", "(self, norm_type=2)"),
            ("has_overflow", "have replicas of the optimizer agree on overflow", "(self, partition_gradients=True)"),
            (
                "_load_legacy_checkpoint",
                "refuse a checkpoint that is cut otherwise",
                "(self, state_dict_list, load_optimizer_states=True, load_from_fp32_weights=False)",
            ),
            ("destroy", "drop gradients", "(self)"),
            ("reset_cpu_buffers", "drop the gradients of a skipped step with offload", "(self)"),
            ("reduce_ipg_grads", "flush buckets", "(self, comm_dtype=None)"),
            ("reduce_ready_partitions_and_remove_grads", "put a gradient into a bucket", "(self, param, i)"),
            ("setup_buckets", "open buckets", "(self)"),
            ("get_gradient_for_reduction", "read an accumulated gradient", "(self, param)"),
        )
    ),
    *(
        Patch(f"{_ZERO3}.{name}", why, signature)
        for name, why, signature in (
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
            ("independent_gradient_partition_epilogue", "end a micro-step", "(self)"),
            ("finalize_gradient_accumulation_boundary", "end an unmanaged accumulation", "(self)"),
            ("_finalize_offload_gradient_accumulation", "hand gradients to an offloaded optimizer", "(self)"),
            ("zero_grad", "forget accumulated gradients", "(self, set_to_none=True)"),
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
            ("destroy", "give parameters back", "(self)"),
        )
    ),
)

_originals: dict[str, tuple[Any, str, Any, Any]] = {}  # path: owner, name, original, replacement


def modules() -> frozenset[str]:
    """Modules that hold a symbol to replace."""
    return frozenset(patch.module for patch in PATCHES if patch.replace)


def apply(module: str) -> None:
    """Replace the symbols of a module that is imported already. A symbol that is not as we know it stays as it is."""
    for patch in PATCHES:
        if patch.module != module or patch.replace is None or patch.path in _originals:
            continue
        if patch.problem() and not patch.gate:
            continue
        try:
            owner, name, original = patch.locate()
        except AttributeError:
            continue
        replacement: Any = patch.replace(getattr(original, "__func__", original))
        setattr(replacement, _MARK, True)
        if isinstance(original, staticmethod):
            replacement = staticmethod(replacement)
        setattr(owner, name, replacement)
        _originals[patch.path] = (owner, name, original, replacement)


def undo() -> None:
    """Put the originals back, except where somebody else has patched on top of us."""
    for path, (owner, name, original, replacement) in list(_originals.items()):
        if inspect.getattr_static(owner, name) is replacement:
            setattr(owner, name, original)
            del _originals[path]


def status() -> list[tuple[Patch, str]]:
    """For each patch: applied, relied on, not imported, not applied, or what is wrong. Imports nothing new."""
    rows = []
    for patch in PATCHES:
        if patch.path in _originals and not patch.problem():
            state = "applied"
        elif patch.module not in sys.modules:
            state = "not imported"
        else:
            state = patch.problem() or ("not applied" if patch.replace else "as expected")
        rows.append((patch, state))
    return rows


def require() -> None:
    """Called when one of our keys is used.

    Raises:
        RuntimeError: this DeepSpeed is not one that we know, or a symbol has moved or changed.
    """
    import deepspeed
    from packaging.specifiers import SpecifierSet
    from packaging.version import Version

    problems = []
    if not SpecifierSet(DEEPSPEED_VERSIONS).contains(Version(deepspeed.__version__).base_version):
        problems.append(f"its version is {deepspeed.__version__}, supported is {DEEPSPEED_VERSIONS}")
    for patch in PATCHES:
        importlib.import_module(patch.module)
        problem = patch.problem()  # of the original: a replacement shows the signature of what it wraps
        if problem or (patch.replace and patch.path not in _originals):
            problems.append(problem or f"{patch.path} is not patched")
    if problems:
        raise RuntimeError(
            f"deepspeed_ext does not know this DeepSpeed: {'; '.join(problems)}. Tested: DeepSpeed "
            f"{', '.join(TESTED_VERSIONS)}. Install one of those, or remove the keys that start with 'paro_' from "
            f"zero_optimization."
        )
