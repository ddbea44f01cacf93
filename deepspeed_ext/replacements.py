# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What stands in the place of DeepSpeed's symbols; the list is in ``patches.py``.

Each function takes the original and returns its replacement, which looks for our keys and calls the original where
there are none. Nothing of ours is imported before it is needed: most of it imports DeepSpeed, which may be just being
imported.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any


def parse_our_keys(get_zero_config: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(get_zero_config)
    def parse(param_dict: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext import config
        from deepspeed_ext.patches import require

        config.check_top_level(param_dict)
        section = param_dict.get(config.SECTION)
        if not config.our_keys(section):
            return get_zero_config(param_dict, *args, **kwargs)
        require()
        return config.parse_section(section)

    return parse


def leave_removed_keys_to_us(reject: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reject)
    def _reject_removed_config_keys(param_dict: dict[str, Any]) -> Any:
        from deepspeed_ext.config import without_removed

        return reject(without_removed(param_dict))

    return _reject_removed_config_keys


def check_our_keys(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, config: Any, mpu: Any = None, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.config import SECTION, check_config, our_keys
        from deepspeed_ext.patches import require

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


def keep_in_zero(sanity_check: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sanity_check)
    def _do_optimizer_sanity_check(self: Any, basic_optimizer: Any) -> Any:
        wrapper = sanity_check(self, basic_optimizer)
        from deepspeed.runtime.engine import BFLOAT16, ZERO_OPTIMIZATION

        from deepspeed_ext.config import active_strategy

        return ZERO_OPTIMIZATION if wrapper == BFLOAT16 and active_strategy(self._config) else wrapper

    return _do_optimizer_sanity_check


def decide_on_a_strategy(configure: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(configure)
    def _configure_distributed_model(self: Any, model: Any) -> None:
        from deepspeed_ext.config import undecided

        if undecided(self._config):
            from deepspeed_ext.planner.fastest import decide_for

            decide_for(self, model)
        configure(self, model)

    return _configure_distributed_model


def make_our_optimizer(configure: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(configure)
    def _configure_zero_optimizer(self: Any, optimizer: Any) -> Any:
        from deepspeed_ext.config import active_strategy

        strategy = active_strategy(self._config)
        if "deepspeed_ext.zero.leaf_modules" in sys.modules:
            from deepspeed_ext.zero.leaf_modules import unset_leaves

            unset_leaves(self.module)  # of an engine before this one
        if strategy is None:
            if self.zero_optimization_partition_weights() and "deepspeed_ext.zero.parameters" in sys.modules:
                from deepspeed_ext.zero.parameters import recut_for_stock

                recut_for_stock(self.module, self.seq_data_parallel_group)
            if not self.zero_module_granularity_threshold():
                return configure(self, optimizer)
            from deepspeed_ext.zero.coordinator import coordinator_of

            with coordinator_of(None):
                return configure(self, optimizer)
        from deepspeed_ext.loco.assembly import inter_hop
        from deepspeed_ext.zero.factory import configure_with

        return configure_with(strategy, inter_hop(self), configure, self, optimizer)

    return _configure_zero_optimizer


def reduce_to_the_mean(reduce: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(reduce)
    def all_to_all_quant_reduce(tensors: Any, groups: Any) -> Any:
        from deepspeed_ext.loco import qgz

        return qgz.all_to_all_quant_reduce(tensors, groups)

    return all_to_all_quant_reduce


def report_our_kernels(report: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(report)
    def op_report(*args: Any, **kwargs: Any) -> None:
        from unittest import mock

        from deepspeed import env_report

        from deepspeed_ext.op_builder import LocoBuilder

        builder = LocoBuilder()
        with (
            mock.patch.dict(env_report.ALL_OPS, {builder.NAME: builder}),
            mock.patch.dict(env_report.installed_ops, {builder.NAME: builder.is_built()}),
        ):
            report(*args, **kwargs)

    return op_report


def gather_our_parameters(all_gather_dp_groups: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(all_gather_dp_groups)
    def gather(groups_flat: Any, *args: Any, **kwargs: Any) -> None:
        own = getattr(groups_flat, "all_gather", None)
        if own is None or not own():
            all_gather_dp_groups(groups_flat, *args, **kwargs)

    return gather


def compare_within_group(assert_ints_same: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(assert_ints_same)
    def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
        from deepspeed_ext.zero.coordinator import assert_same_in_group

        if not assert_same_in_group(ints):
            assert_ints_same(ints)

    return assert_ints_same_as_other_ranks


def fetch_leaves_as_units(iter_params: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(iter_params)
    def entries(module: Any, recurse: bool = False) -> Any:
        from deepspeed_ext.zero import units

        return units.entries(iter_params, module, recurse)

    return entries


def call_without_detour(wrapped: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(wrapped)
    def zero3_linear_wrap(input: Any, weight: Any, bias: Any = None) -> Any:
        from deepspeed_ext.zero.linear import linear

        return linear(wrapped, input, weight, bias)

    return zero3_linear_wrap


def choose_leaves(choose: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(choose)
    def _set_z3_leaf_modules_by_threshold(self: Any, module: Any, zero_module_granularity_threshold: int) -> None:
        from deepspeed_ext.zero.leaf_setup import by_granularity

        by_granularity(self, module, zero_module_granularity_threshold)

    return _set_z3_leaf_modules_by_threshold


def watch_our_leaves(create: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(create)
    def create_reduce_and_remove_grad_hooks(self: Any) -> None:
        create(self)
        if hasattr(self, "reduce_leaf") or self.parameter_offload.fast_sharding_for_leaf_module:
            from deepspeed_ext.zero.leaf_gradients import watch_leaves

            watch_leaves(self)

    return create_reduce_and_remove_grad_hooks


def reduce_what_waits(epilogue: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(epilogue)
    def independent_gradient_partition_epilogue(self: Any) -> None:
        from deepspeed_ext.zero.leaf_gradients import end_of_backward

        end_of_backward(self)
        epilogue(self)

    return independent_gradient_partition_epilogue


def modify_in_all_groups(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, params: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.zero import modified

        params = modified.listed(params)
        with modified.cut_over_all(modified.replicated(params)):
            init(self, params, *args, **kwargs)

    return __init__


def broadcast_to_all_groups(leave: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(leave)
    def _exit(self: Any, *exc: Any) -> Any:
        from deepspeed_ext.zero import modified

        if self.src_rank is not None:
            modified.broadcast_to_replicas(modified.replicated(self.params), self.src_rank_by_group)
        return leave(self, *exc)

    return _exit


def partition_by_owner(partition: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(partition)
    def _partition_params(params: Any, has_been_updated: bool) -> None:
        from deepspeed_ext.zero import modified

        modified.partition_by_owner(partition, params, has_been_updated)

    return _partition_params


def train_pipelines(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.pipeline import setup

        setup.initialize(init, self, *args, **kwargs)

    return __init__


def build_pipelines_whole(partition: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(partition)
    def _partition_layers(self: Any, *args: Any, **kwargs: Any) -> None:
        from deepspeed_ext.pipeline import setup

        setup.refuse_zero_init()
        partition(self, *args, **kwargs)

    return _partition_layers


def write_files_safely(create: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(create)
    def create_checkpoint_engine(config_params: Any, *args: Any, **kwargs: Any) -> Any:
        from deepspeed_ext.config import active_strategy

        made = create(config_params, *args, **kwargs)
        if active_strategy(config_params) is None:
            return made
        from deepspeed_ext.checkpoint.files import wrap

        return wrap(made)

    return create_checkpoint_engine


def save_as_a_whole(save: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(save)
    def save_checkpoint(self: Any, save_dir: Any, *args: Any, **kwargs: Any) -> Any:
        if not save_dir or not _has_our_files(self):
            return save(self, save_dir, *args, **kwargs)
        from deepspeed_ext.checkpoint import saving

        return saving.save_checkpoint(save, self, save_dir, *args, **kwargs)

    return save_checkpoint


def load_what_was_checked(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_checkpoint(self: Any, load_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
        ours = _has_our_files(self)
        if not ours and not (self.load_universal_checkpoint() and self.zero_optimization()):
            return load(self, load_dir, tag, *args, **kwargs)
        from deepspeed_ext.checkpoint import loading

        by_us = loading.load_checkpoint if ours else loading.load_into_stock
        return by_us(load, self, load_dir, tag, *args, **kwargs)

    return load_checkpoint


def _has_our_files(engine: Any) -> bool:
    """Whether the engine has an optimizer of ours, and writes its files through us."""
    if not hasattr(engine.optimizer, "check_states"):
        return False
    from deepspeed_ext.checkpoint.files import CheckpointFiles

    return isinstance(engine.checkpoint_engine, CheckpointFiles)


def find_files_of_other_stages(names: Callable[..., list[str]]) -> Callable[..., list[str]]:
    @functools.wraps(names)
    def _get_all_ckpt_names(self: Any, checkpoints_path: Any, tag: Any) -> list[str]:
        found = names(self, checkpoints_path, tag)
        if found or not self.load_universal_checkpoint():
            return found
        from pathlib import Path

        from deepspeed_ext.checkpoint.universal import other_files

        pattern = Path(self._get_ckpt_name(checkpoints_path, tag, mp_placeholder="*", pp_placeholder="0"))
        return other_files(pattern.name, pattern.parent)

    return _get_all_ckpt_names


def load_universal(load: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(load)
    def _load_universal_checkpoint(self: Any, folder: Any, states: bool, from_fp32: bool) -> None:
        from deepspeed_ext.checkpoint import universal

        ours, stage3 = hasattr(self, "check_states"), hasattr(self, "fp32_partitioned_groups_flat")
        swapped = getattr(self, "swap_optimizer", False)  # to NVMe, which only DeepSpeed's loader knows
        if ours or (not swapped and universal.beyond_stock(stage3, folder)):
            universal.load(self, folder, states, from_fp32)
        else:
            load(self, folder, states, from_fp32)

    return _load_universal_checkpoint
