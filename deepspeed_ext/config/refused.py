# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a user may have configured beside a strategy and that our optimizers do not do. Refused, never skipped."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig

SECTION = "zero_optimization"

_Finder = Callable[["DeepSpeedConfig"], Any]


def _always(strategy: Strategy) -> bool:
    return True


def _replicated(strategy: Strategy) -> bool:
    return strategy.p == Placement.N


def _cut(strategy: Strategy) -> bool:
    return strategy.p != Placement.N


def _cut_inside_groups(strategy: Strategy) -> bool:
    return _cut(strategy) and strategy.os == Placement.I


def _updated_between_groups(strategy: Strategy) -> bool:
    return _cut(strategy) and strategy.p != strategy.os


def _partitions_gradients(strategy: Strategy) -> bool:
    return strategy.stage > 1


def _passes(config: "DeepSpeedConfig") -> set[str]:
    """The passes of DeepCompile, where it is on."""
    return set(config.compile_config.passes or []) if config.compile_config.deepcompile else set()


_OFFLOAD_PARAM = ", ".join(name for name, row in STRATEGIES.items() if row.p == row.os != Placement.N)

REFUSED: tuple[tuple[str, _Finder, str, Callable[[Strategy], bool]], ...] = (
    (f"{SECTION}.zenflow", lambda c: c.zero_config.zenflow, "ZenFlow reduces gradients its own way", _always),
    (
        f"{SECTION}.offload_optimizer.super_offload",
        lambda c: getattr(c.zero_config.offload_optimizer, "super_offload", False),
        "SuperOffload is an optimizer of its own",
        _always,
    ),
    (
        f"{SECTION}.offload_optimizer.device",
        lambda c: getattr(c.zero_config.offload_optimizer, "device", None) == "nvme",
        "optimizer states on NVMe are not supported; use device cpu",
        _always,
    ),
    (
        f"{SECTION}.offload_param",
        lambda c: c.zero_config.offload_param,
        "parameters are not cut; it needs stage 3",
        _replicated,
    ),
    (
        f"{SECTION}.stage3_module_granularity_threshold",
        lambda c: c.zero_config.module_granularity_threshold,
        "parameters are not cut; it needs stage 3",
        _replicated,
    ),
    (
        f"{SECTION}.offload_param.device",
        lambda c: getattr(c.zero_config.offload_param, "device", None) == "nvme",
        "parameters on NVMe are not supported; use device cpu",
        _cut,
    ),
    (
        f"{SECTION}.offload_param.device",
        lambda c: getattr(c.zero_config.offload_param, "device", "none") != "none",
        f"updated parameters are gathered between groups on the device; strategies that offload parameters: "
        f"{_OFFLOAD_PARAM}",
        _updated_between_groups,
    ),
    (
        f"{SECTION}.stage3_use_all_reduce_for_fetch_params",
        lambda c: c.zero_config.use_all_reduce_for_fetch_params,
        "parameters are gathered by all-gathers within and between groups",
        _cut,
    ),
    (
        f"{SECTION}.enable_sanity_checks",
        lambda c: c.zero_config.enable_sanity_checks,
        "it compares buckets over all ranks, but groups reduce their own",
        _cut,
    ),
    (
        f"{SECTION}.pipeline_loading_checkpoint",
        lambda c: c.zero_config.pipeline_loading_checkpoint,
        "it passes a token from rank to rank of one group that holds all states",
        _cut_inside_groups,
    ),
    (
        "checkpoint.use_node_local_storage",
        lambda c: c.use_node_local_storage,
        "only the ranks of the first group write optimizer states",
        _cut_inside_groups,
    ),
    (
        f"{SECTION}.zero_hpz_partition_size",
        lambda c: c.zero_config.zero_hpz_partition_size > 1,
        "hpZ cuts the parameters of stage 3 inside a group; strategies with p = I do that",
        _always,
    ),
    (
        f"{SECTION}.zero_quantized_weights",
        lambda c: c.zero_config.zero_quantized_weights,
        "parameters are gathered exactly",
        _always,
    ),
    (
        f"{SECTION}.zero_quantized_nontrainable_weights",
        lambda c: c.zero_config.zero_quantized_nontrainable_weights,
        "parameters are gathered exactly",
        _always,
    ),
    (
        f"{SECTION}.reduce_scatter",
        lambda c: c.zero_config.zeropp_loco_param is not None and not c.zero_config.reduce_scatter,
        "LoCo's reduction between groups is not an all-reduce",
        _always,
    ),
    (
        f"{SECTION}.elastic_checkpoint",
        lambda c: c.zero_config.elastic_checkpoint,
        "use universal checkpoints",
        _always,
    ),
    (
        "compile.deepcompile",
        lambda c: c.compile_config.deepcompile and not (_passes(c) and _passes(c) <= {"autosp", "autotp"}),
        "DeepCompile replaces the reduction of gradients, except with compile.passes of autosp or autotp only",
        _always,
    ),
    (
        "compile.passes autosp",
        lambda c: "autosp" in _passes(c),
        "DeepSpeed leaves this pass out at stages 2 and 3; strategies of stage 1: "
        f"{', '.join(name for name, row in STRATEGIES.items() if row.stage == 1)}",
        _partitions_gradients,
    ),
    (
        "compile.passes autotp",
        lambda c: "autotp" in _passes(c),
        "this pass compiles the model as one graph, in which no parameter can be gathered",
        _cut,
    ),
    (
        "optimizer.type",
        lambda c: c.optimizer_name == "muon",
        "Muon needs whole gradients where its state is",
        _always,
    ),
    (
        "expert_parallel",
        lambda c: getattr(getattr(c, "expert_parallel_config", None), "enabled", False),
        "expert groups are not data-parallel groups",
        _always,
    ),
)
"""Key, how to find it in the parsed configuration, why, and with which strategies."""
