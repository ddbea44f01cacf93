# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Functions that replace DeepSpeed's, by a patch or by a hook of a fork.

Each receives the original, followed by the original's arguments. It looks for our keys and calls the original if there
are none. Other modules of the package are only imported inside these functions: most of them import DeepSpeed, whose
own import may still be running when this module is imported.

``require`` raises if this DeepSpeed is not supported.
"""

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from torch import Tensor, nn

    from deepspeed_ext.deepspeed_types import Engine, LeafOptimizer

Replace = Callable[..., Callable[..., Any]]  # (original, optional ``require``) -> replacement


def lazily(target: str) -> Replace:
    """Turn a function of another module into a replacement.

    Args:
        target: ``module:function``, imported at the first call.
    """
    module, _, name = target.partition(":")
    return _make_replace(module, name, lambda: getattr(importlib.import_module(module), name))


def _seam(behavior: Callable[..., Any]) -> Replace:
    """Decorator that turns a function of this module into a replacement."""
    return _make_replace(behavior.__module__, behavior.__name__, lambda: behavior)


def _make_replace(module: str, name: str, resolve: Callable[[], Callable[..., Any]]) -> Replace:
    def replace(original: Callable[..., Any], require: Callable[[], None] | None = None) -> Callable[..., Any]:
        extra = {} if require is None else {"require": require}
        behavior: Callable[..., Any] | None = None

        @functools.wraps(original)
        def replacement(*args: Any, **kwargs: Any) -> Any:
            nonlocal behavior
            if behavior is None:  # resolve only once: ZeRO-3's prefetching calls such a function per parameter
                behavior = resolve()
            return behavior(original, *args, **kwargs, **extra)

        return replacement

    replace.__module__, replace.__name__ = module, name  # ``Patch.label`` is built from these
    return replace


# Configurations ###################################################################################


@_seam
def parse_our_keys(
    parse: Callable[..., Any],
    param_dict: dict[str, Any],
    *args: Any,
    require: Callable[[], None] = lambda: None,
    **kwargs: Any,
) -> Any:
    from deepspeed_ext.config.implied import forget_stage
    from deepspeed_ext.config.keys import SECTION, check_top_level, our_keys

    check_top_level(param_dict)
    section: Any = param_dict.get(SECTION)
    forget_stage(section)
    if not our_keys(section):  # nothing so far depends on DeepSpeed's version
        return parse(param_dict, *args, **kwargs)
    require()
    from deepspeed_ext.config.section import parse_and_imply

    return parse_and_imply(section)


@_seam
def leave_removed_keys_to_us(reject: Callable[..., Any], param_dict: dict[str, Any]) -> Any:
    from deepspeed_ext.config.keys import drop_removed_keys

    return reject(drop_removed_keys(param_dict))


@_seam
def check_our_keys(
    init: Callable[..., None],
    self: Any,
    config: Any,
    mpu: Any = None,
    mesh_device: Any = None,
    require: Callable[[], None] = lambda: None,
) -> None:
    from deepspeed_ext.config.keys import REPORT, SECTION, our_keys
    from deepspeed_ext.config.settings import REPORT_VARIABLE
    from deepspeed_ext.integration import plugins

    if isinstance(config, dict):
        # Before DeepSpeed parses the configuration, because plugins may change it.
        plugins.configure(config)
    try:
        init(self, config, mpu, mesh_device)
    except Exception:
        # An unsupported DeepSpeed may be the cause. If so, raise that error instead.
        if our_keys(getattr(self, "_param_dict", {}).get(SECTION)):
            require()
        raise
    if our_keys(self._param_dict.get(SECTION)):
        from deepspeed_ext.config.check import check_config

        check_config(self, mpu, mesh_device)
        if getattr(self.zero_config, REPORT, None) is not None:
            plugins.require("report", f"{SECTION}.{REPORT}")
    if REPORT_VARIABLE in os.environ:
        plugins.require("report", REPORT_VARIABLE)


# Engines ##########################################################################################


@_seam
def decide_on_a_strategy(configure: Callable[..., None], self: "Engine", model: "nn.Module") -> None:
    from deepspeed_ext.config.section import active_strategy, wants_fastest
    from deepspeed_ext.integration import plugins

    if wants_fastest(self._config):
        from deepspeed_ext.planner.fastest import choose_strategy

        choose_strategy(self, model)
    configure(self, model)
    if active_strategy(self._config):
        self._check_for_duplicates = functools.partial(_check_if_duplicated, self._check_for_duplicates)
    plugins.engine_ready(self)


def _check_if_duplicated(check: Callable[[Any], None], optimizer: Any) -> None:
    """Call DeepSpeed's check only if it may fail: it compares each parameter with every other one."""
    params = [id(param) for group in optimizer.param_groups for param in group["params"]]
    if len(set(params)) < len(params):
        check(optimizer)


@_seam
def keep_in_zero(sanity_check: Callable[..., Any], self: "Engine", basic_optimizer: object) -> Any:
    wrapper = sanity_check(self, basic_optimizer)
    from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION

    from deepspeed_ext.config.section import active_strategy

    return ZERO_OPTIMIZATION if wrapper == BFLOAT16 and active_strategy(self._config) else wrapper


@_seam
def make_our_optimizer(configure: Callable[..., Any], self: "Engine", optimizer: object) -> Any:
    from deepspeed_ext.config.section import active_strategy, record_optimizer

    strategy = active_strategy(self._config)
    if "deepspeed_ext.leaf.modules" in sys.modules:
        from deepspeed_ext.leaf.modules import unset_leaves

        unset_leaves(self.module)  # an earlier engine may have marked leaf modules of the same model
    if strategy is None:
        chunks = "deepspeed_ext.zero.sharded.parameter_chunks"
        if self.zero_optimization_partition_weights() and chunks in sys.modules:
            from deepspeed_ext.zero.sharded.parameter_chunks import repartition_for_stock

            repartition_for_stock(self.module)
        return configure(self, optimizer)
    from deepspeed_ext.config.implied import warn_without_zero_init
    from deepspeed_ext.loco.setup import ConfiguredHops
    from deepspeed_ext.zero.factory import build_optimizer

    warn_without_zero_init(self._config, strategy, self.module)
    result = build_optimizer(configure, self, optimizer, strategy=strategy, hops=ConfiguredHops(self, strategy))
    record_optimizer(self._config)
    return result


# ZeRO #############################################################################################


@_seam
def gather_our_parameters(
    all_gather_dp_groups: Callable[..., None], groups_flat: object, *args: Any, **kwargs: Any
) -> None:
    gather = getattr(groups_flat, "all_gather", None)
    if gather is None or not gather():
        all_gather_dp_groups(groups_flat, *args, **kwargs)


@_seam
def compare_within_group(assert_ints_same: Callable[..., None], ints: list[int]) -> None:
    from deepspeed_ext.zero.sharded.coordinator import assert_same_in_group

    if not assert_same_in_group(ints):
        assert_ints_same(ints)


@_seam
def modify_in_all_groups(
    init: Callable[..., None],
    self: Any,
    params: Any,
    modifier_rank: int | None = None,
    fwd_module: Any = None,
    enabled: bool = True,
) -> None:
    from deepspeed_ext.zero.resync import request_all
    from deepspeed_ext.zero.sharded.parameter_chunks import as_list, replicated_params, use_global_modifier_ranks
    from deepspeed_ext.zero.updates_in_flight import wait_for_replicated_parameters

    wait_for_replicated_parameters()  # an update in flight would overwrite the modification
    if modifier_rank is not None:
        request_all()  # quantized differences would need several steps to send a large modification
    if not enabled:  # DeepSpeed ignores the parameters, which may be a generator: ``as_list`` would consume it
        init(self, params, modifier_rank, fwd_module, enabled)
        return
    params = as_list(params)
    with use_global_modifier_ranks(replicated_params(params)):
        init(self, params, modifier_rank, fwd_module, enabled)


@_seam
def broadcast_to_all_groups(leave: Callable[..., Any], self: Any, *exc: object) -> Any:
    from deepspeed_ext.zero.sharded.parameter_chunks import broadcast_to_replicas, replicated_params

    if self.src_rank is not None:
        broadcast_to_replicas(replicated_params(self.params), self.src_rank_by_group)
    return leave(self, *exc)


@_seam
def choose_leaves(
    choose: Callable[..., None],
    self: "DeepSpeedZeRoOffload",
    module: "nn.Module",
    zero_module_granularity_threshold: int,
) -> None:
    from deepspeed_ext.zero.sharded.coordinator import is_coordinating

    if not is_coordinating():
        choose(self, module, zero_module_granularity_threshold)
        return
    from deepspeed_ext.leaf.setup import choose_by_granularity

    choose_by_granularity(self, module, zero_module_granularity_threshold)


def call_without_detour(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrapped)  # neither lazily nor a seam: torch.compile only traces through import statements
    def zero3_linear_wrap(input: "Tensor", weight: "Tensor", bias: "Tensor | None" = None) -> Any:
        from deepspeed_ext.leaf.units import linear

        return linear(wrapped, input, weight, bias)

    return zero3_linear_wrap


@_seam
def watch_our_leaves(create: Callable[..., None], self: "LeafOptimizer") -> None:
    from deepspeed_ext.leaf.gradients import DelayedGradients

    create(self)
    DelayedGradients(self)  # only for plain stage 3: a strategy's optimizer replaces these hooks


@_seam
def reduce_what_waits(epilogue: Callable[..., None], self: "LeafOptimizer") -> None:
    from deepspeed_ext.leaf.gradients import reduce_delayed_gradients

    reduce_delayed_gradients(self)
    epilogue(self)


@_seam
def complete_transfers_first(destroy: Callable[..., None], group: Any = None) -> None:
    from torch.distributed import GroupMember

    if group not in (None, GroupMember.WORLD) or "deepspeed_ext.comm.worker_thread" not in sys.modules:
        destroy(group)
        return
    from deepspeed_ext.comm import worker_thread

    # Transfers in flight need the groups, and other ranks wait for their data: complete them before destroying.
    failure = worker_thread.complete_before_exit(after_an_error=sys.exc_info()[0] is not None)
    destroy(group)
    if failure is not None:
        raise RuntimeError(worker_thread.failure_message(failure)) from failure


# Checkpoints ######################################################################################


@_seam
def write_files_safely(create: Callable[..., Any], config_params: Any, *args: Any, **kwargs: Any) -> Any:
    from deepspeed_ext.config.section import (
        active_strategy,
        refuse_saves_without_strategy,
        require_optimizer,
        save_settings,
    )

    if active_strategy(config_params) is None:
        refuse_saves_without_strategy(config_params)
        return create(config_params, *args, **kwargs)
    # The engine has built its optimizer by now, and this is the first later function that all engines call.
    require_optimizer(config_params)
    from deepspeed_ext.checkpoint.asynchronous import AsyncSaves
    from deepspeed_ext.checkpoint.files import wrap

    return wrap(
        create(config_params, *args, **kwargs), AsyncSaves if save_settings(config_params).async_save else None
    )


@_seam
def save_as_a_whole(save: Callable[..., Any], self: "Engine", save_dir: str | None, *args: Any, **kwargs: Any) -> Any:
    if not save_dir or not _has_our_files(self):
        return save(self, save_dir, *args, **kwargs)
    from deepspeed_ext.checkpoint import saving

    return saving.save_checkpoint(save, self, save_dir, *args, **kwargs)


@_seam
def load_what_was_checked(
    load: Callable[..., Any], self: "Engine", load_dir: str, tag: str | None = None, *args: Any, **kwargs: Any
) -> Any:
    has_our_files = _has_our_files(self)
    if not has_our_files and not (self.load_universal_checkpoint() and self.zero_optimization()):
        return load(self, load_dir, tag, *args, **kwargs)
    from deepspeed_ext.checkpoint import loading
    from deepspeed_ext.checkpoint.trust import restrict_loads
    from deepspeed_ext.config.section import save_settings

    load_ours = loading.load_checkpoint if has_our_files else loading.load_into_stock
    # Without a strategy, the key is refused, and DeepSpeed's own load of the same files has no restriction either.
    with restrict_loads(not has_our_files or save_settings(self._config).trusted):
        return load_ours(load, self, load_dir, tag, *args, **kwargs)


def _has_our_files(engine: "Engine") -> bool:
    """Whether the engine has an optimizer of ours and our checkpoint engine."""
    module = sys.modules.get("deepspeed_ext.zero.optimizer")  # imported if there is such an optimizer
    if module is None or not isinstance(engine.optimizer, module.ParoOptimizer):
        return False
    from deepspeed_ext.checkpoint.files import CheckpointFiles

    return isinstance(engine.checkpoint_engine, CheckpointFiles)


@_seam
def find_files_of_other_stages(
    names: Callable[..., list[str]], self: "Engine", checkpoints_path: str, tag: str
) -> list[str]:
    """Find the model states in a universal checkpoint of another stage, whose files have other names (DeepSpeed bug).

    A fork has this fix in DeepSpeed's own files, so this function changes nothing there.
    """
    paths = names(self, checkpoints_path, tag)
    if paths or not self.load_universal_checkpoint():
        return paths
    pattern = Path(self._get_ckpt_name(checkpoints_path, tag, mp_placeholder="*", pp_placeholder="0"))
    stages12 = re.sub(r"^zero_pp_rank_\d+_", "", pattern.name)
    other_name = f"zero_pp_rank_0_{pattern.name}" if stages12 == pattern.name else stages12
    return sorted(str(path) for path in pattern.parent.glob(other_name))
