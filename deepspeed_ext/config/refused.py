# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What our optimizers do not do, and a user may configure beside a strategy. Refused, never skipped; a row for each.

What only the model or the optimizer object can tell is in ``unsupported.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.keys import CACHE_BYTES, QUANTIZED_UPDATES, SECTION, STRATEGY, asked_by
from deepspeed_ext.config.section import offloads
from deepspeed_ext.loco.settings import EXACT, UpdateSettings
from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def always(strategy: Strategy) -> bool:
    """With every strategy."""
    return True


def replicated(strategy: Strategy) -> bool:
    """With p = N."""
    return strategy.p == Placement.N


def sharded(strategy: Strategy) -> bool:
    """With p = I or G."""
    return strategy.p != Placement.N


def _sharded_with_states_inside_groups(strategy: Strategy) -> bool:
    return sharded(strategy) and strategy.os == Placement.I


def _sliced(strategy: Strategy) -> bool:
    return sharded(strategy) and strategy.p != strategy.os


def _shards_gradients(strategy: Strategy) -> bool:
    return strategy.stage > 1


def _releases_parameters(strategy: Strategy) -> bool:
    return strategy.p == Placement.G


def _updates_may_be_quantized(strategy: Strategy) -> bool:
    return not (_releases_parameters(strategy) or _replicates_states(strategy))


def _replicates_states(strategy: Strategy) -> bool:
    return strategy.os != Placement.G


@dataclass(frozen=True)
class Refusal:
    """A key that cannot be used with a strategy.

    Attributes:
        key: its full name.
        find: looks for it in the parsed configuration, and returns something true if it is there.
        why: the reason.
        applies: with which strategies.
    """

    key: str
    find: Callable[["DeepSpeedConfig"], Any]
    why: str
    applies: Callable[[Strategy], bool] = always


def refuse_beside(config: "DeepSpeedConfig", strategy: Strategy) -> None:
    """Refuse what is configured and a strategy's optimizer does not do.

    Raises:
        ValueError: something of that is configured.
    """
    asked = asked_by(config._param_dict[SECTION])
    names = {STRATEGY: f"{STRATEGY} {strategy.name}", "stage": f"stage {strategy.stage} in a pipeline"}
    given = names.get(asked, asked)
    for row in REFUSED:
        if row.applies(strategy) and row.find(config):
            raise ValueError(f"{row.key} cannot be combined with {SECTION}.{given}: {row.why}. Remove one of the two.")


def _passes(config: "DeepSpeedConfig") -> set[str]:
    """The passes of DeepCompile, where it is on."""
    return set(config.compile_config.passes or []) if config.compile_config.deepcompile else set()


def _quantizes_updates(config: "DeepSpeedConfig") -> bool:
    return config.zero_config.paro_quantized_updates is not None


def _without_loss(config: "DeepSpeedConfig") -> bool:
    return _quantizes_updates(config) and UpdateSettings.parse(config.zero_config.paro_quantized_updates).bits == EXACT


def _in_16_bits(config: "DeepSpeedConfig") -> bool:
    return bool(config.float16_config.enabled or config.bfloat16_config.enabled)


_GATHERED_AFTER_STEPS = ", ".join(name for name, row in STRATEGIES.items() if _sliced(row))

REFUSED: tuple[Refusal, ...] = (
    Refusal(f"{SECTION}.zenflow", lambda c: c.zero_config.zenflow, "ZenFlow reduces gradients its own way"),
    Refusal(
        f"{SECTION}.offload_optimizer.super_offload",
        lambda c: getattr(c.zero_config.offload_optimizer, "super_offload", False),
        "SuperOffload is an optimizer of its own",
    ),
    Refusal(
        f"{SECTION}.offload_optimizer.device",
        lambda c: getattr(c.zero_config.offload_optimizer, "device", None) == "nvme",
        "optimizer states on NVMe are not supported; use device cpu",
    ),
    Refusal(
        f"{SECTION}.offload_param",
        lambda c: c.zero_config.offload_param,
        "parameters are not sharded; it needs stage 3",
        replicated,
    ),
    Refusal(
        f"{SECTION}.stage3_module_granularity_threshold",
        lambda c: c.zero_config.module_granularity_threshold,
        "parameters are not sharded; it needs stage 3",
        replicated,
    ),
    Refusal(
        f"{SECTION}.offload_param.device",
        lambda c: getattr(c.zero_config.offload_param, "device", None) == "nvme",
        "parameters on NVMe are not supported; use device cpu",
        sharded,
    ),
    Refusal(
        f"{SECTION}.{CACHE_BYTES}",
        lambda c: c.zero_config.paro_parameter_cache_bytes,
        f"it keeps slices that are gathered after steps; strategies that have such: {_GATHERED_AFTER_STEPS}",
        lambda strategy: not _sliced(strategy),
    ),
    Refusal(
        f"{SECTION}.{CACHE_BYTES}",
        lambda c: c.zero_config.paro_parameter_cache_bytes and not offloads(c.zero_config.offload_param),
        f"it is for parameters in host memory: set {SECTION}.offload_param.device to cpu as well",
        _sliced,
    ),
    Refusal(
        f"{SECTION}.stage3_use_all_reduce_for_fetch_params",
        lambda c: c.zero_config.use_all_reduce_for_fetch_params,
        "parameters are gathered by all-gathers within and between groups",
        sharded,
    ),
    Refusal(
        f"{SECTION}.enable_sanity_checks",
        lambda c: c.zero_config.enable_sanity_checks,
        "it compares buckets over all ranks, but groups reduce their own",
        sharded,
    ),
    Refusal(
        f"{SECTION}.pipeline_loading_checkpoint",
        lambda c: c.zero_config.pipeline_loading_checkpoint,
        "it passes a token from rank to rank of one group that holds all states",
        _sharded_with_states_inside_groups,
    ),
    Refusal(
        "checkpoint.use_node_local_storage",
        lambda c: c.use_node_local_storage,
        "only the ranks of the first group write optimizer states",
        _sharded_with_states_inside_groups,
    ),
    Refusal(
        f"{SECTION}.zero_hpz_partition_size",
        lambda c: c.zero_config.zero_hpz_partition_size > 1,
        "hpZ shards the parameters of stage 3 inside a group; strategies with p = I do that",
    ),
    Refusal(
        f"{SECTION}.zero_quantized_weights",
        lambda c: c.zero_config.zero_quantized_weights,
        f"parameters are gathered as they are; {QUANTIZED_UPDATES} sends what a step has changed of them in few bits",
        _updates_may_be_quantized,
    ),
    Refusal(
        f"{SECTION}.zero_quantized_weights",
        lambda c: c.zero_config.zero_quantized_weights,
        f"no parameters cross between groups; {QUANTIZED_UPDATES} sends sums of gradients back in few bits",
        _replicates_states,
    ),
    Refusal(
        f"{SECTION}.zero_quantized_weights",
        lambda c: c.zero_config.zero_quantized_weights,
        "parameters are gathered as they are",
        _releases_parameters,
    ),
    Refusal(
        f"{SECTION}.zero_quantized_nontrainable_weights",
        lambda c: c.zero_config.zero_quantized_nontrainable_weights,
        "parameters are gathered exactly",
    ),
    Refusal(
        f"{SECTION}.reduce_scatter",
        lambda c: c.zero_config.zeropp_loco_param is not None and not c.zero_config.reduce_scatter,
        "LoCo's reduction between groups is not an all-reduce",
    ),
    Refusal(
        f"{SECTION}.{QUANTIZED_UPDATES}",
        _quantizes_updates,
        "with p = G no rank holds the parameters to which updates could be sent as differences",
        _releases_parameters,
    ),
    Refusal(
        f"{SECTION}.reduce_scatter",
        lambda c: _quantizes_updates(c) and not c.zero_config.reduce_scatter,
        "an all-reduce has no sums that could come back in few bits",
        _replicates_states,
    ),
    Refusal(
        f"{SECTION}.{QUANTIZED_UPDATES}.bits",
        _without_loss,
        f'"{EXACT}" is for updated parameters, and here sums of gradients come back; set bits to 4 or 8',
        _replicates_states,
    ),
    Refusal(
        f"{SECTION}.{QUANTIZED_UPDATES}.bits",
        lambda c: _without_loss(c) and not _in_16_bits(c),
        f'"{EXACT}" is for parameters of 16 bits; enable bf16 or fp16, or set bits to 4 or 8',
        _updates_may_be_quantized,
    ),
    Refusal(
        "fp16.fp16_master_weights_and_grads",
        lambda c: _quantizes_updates(c) and not _without_loss(c) and c.float16_config.fp16_master_weights_and_grads,
        f"what a difference lacks is in the optimizer's fp32 weights, without which {QUANTIZED_UPDATES} would lose it",
        _updates_may_be_quantized,
    ),
    Refusal(
        "bf16.bf16_master_weights_and_grads",
        lambda c: _quantizes_updates(c) and not _without_loss(c) and c.bfloat16_config.bf16_master_weights_and_grads,
        f"what a difference lacks is in the optimizer's fp32 weights, without which {QUANTIZED_UPDATES} would lose it",
        _updates_may_be_quantized,
    ),
    Refusal(
        "torch_autocast.enabled",
        lambda c: _quantizes_updates(c) and c.torch_autocast_enabled,
        f"the optimizer's weights may be the parameters themselves, which with {QUANTIZED_UPDATES} have to stay what "
        f"other ranks hold",
        lambda strategy: _updates_may_be_quantized(strategy) and sharded(strategy),
    ),
    Refusal(
        f"{SECTION}.elastic_checkpoint",
        lambda c: c.zero_config.elastic_checkpoint,
        "use universal checkpoints",
    ),
    Refusal(
        "compile.deepcompile",
        lambda c: c.compile_config.deepcompile and not (_passes(c) and _passes(c) <= {"autosp", "autotp"}),
        "DeepCompile replaces the reduction of gradients, except with compile.passes of autosp or autotp only",
    ),
    Refusal(
        "compile.passes autosp",
        lambda c: "autosp" in _passes(c),
        "DeepSpeed leaves this pass out at stages 2 and 3; strategies of stage 1: "
        f"{', '.join(name for name, row in STRATEGIES.items() if row.stage == 1)}",
        _shards_gradients,
    ),
    Refusal(
        "compile.passes autotp",
        lambda c: "autotp" in _passes(c),
        "this pass compiles the model as one graph, in which no parameter can be gathered",
        sharded,
    ),
    Refusal(
        f"{SECTION}.save_muon_momentum_buffer_in_memory",
        lambda c: c.zero_config.save_muon_momentum_buffer_in_memory,
        "it keeps Muon's momentum from being offloaded to NVMe, which no strategy supports; the momentum is where the "
        "other optimizer states are",
    ),
)
