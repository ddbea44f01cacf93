# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Table of DeepSpeed options that cannot be combined with a strategy. They are refused, never ignored.

Checks that need the engine, the model or the optimizer are in ``unsupported.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.keys import (
    CACHE_BYTES,
    LOCO,
    MICRO_BATCHES,
    OUTER,
    QUANTIZED_UPDATES,
    REDUCE,
    SECTION,
    STRATEGY,
    THRESHOLD,
    WEIGHTS,
    strategy_key,
)
from deepspeed_ext.config.section import offloads
from deepspeed_ext.config.settings import BACKEND, EXACT, ORDERED, ORDERED_EVERYWHERE
from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy, hyphenated

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def any_strategy(strategy: Strategy) -> bool:
    """With every strategy."""
    return True


def replicates_parameters(strategy: Strategy) -> bool:
    """With p = N."""
    return strategy.p == Placement.N


def shards_parameters(strategy: Strategy) -> bool:
    """With p = I or G."""
    return strategy.p != Placement.N


def _shards_with_states_inside_groups(strategy: Strategy) -> bool:
    return shards_parameters(strategy) and strategy.os == Placement.I


def _keeps_slices(strategy: Strategy) -> bool:
    return shards_parameters(strategy) and strategy.p != strategy.os


def _drops_old_parameters(strategy: Strategy) -> bool:
    return strategy.p == Placement.G


def _updates_may_be_quantized(strategy: Strategy) -> bool:
    return not (_drops_old_parameters(strategy) or _replicates_states(strategy))


def _replicates_states(strategy: Strategy) -> bool:
    return strategy.os != Placement.G


def _communicates_in_micro_batches(strategy: Strategy) -> bool:
    """Whether groups communicate in each micro-batch."""
    return Placement.G in (strategy.p, strategy.g)


@dataclass(frozen=True)
class Refusal:
    """A key that cannot be used with a strategy.

    Attributes:
        key: the full name.
        reason: clause for the message.
        find: returns a true value if the key is set in the parsed configuration.
        applies: whether it is refused with a strategy.
    """

    key: str
    reason: str
    find: Callable[["DeepSpeedConfig"], Any]
    applies: Callable[[Strategy], bool] = any_strategy


def refuse_conflicts(config: "DeepSpeedConfig", strategy: Strategy) -> None:
    """Refuse the options that a strategy's optimizer does not support.

    Raises:
        ValueError: one of the options is set.
    """
    key = strategy_key(config._param_dict[SECTION])
    names = {STRATEGY: f"{STRATEGY} {strategy}", "stage": f"stage {strategy.stage} in a pipeline"}
    requested = names.get(key, key)
    for row in REFUSED:
        if row.applies(strategy) and row.find(config):
            raise ValueError(
                f"{row.key} cannot be combined with {SECTION}.{requested}: {row.reason}. Remove one of the two."
            )


def _refuse_zero_key(
    key: str, reason: str, applies: Callable[[Strategy], bool] = any_strategy, find: Callable[[Any], Any] | None = None
) -> Refusal:
    """Return the refusal of a key of ``zero_optimization`` if it is true, or if ``find(section)`` is."""
    look = find or (lambda zero: getattr(zero, key))
    return Refusal(f"{SECTION}.{key}", reason, lambda config: look(config.zero_config), applies)


def _is_on_nvme(section: Any) -> bool:
    return getattr(section, "device", None) == "nvme"


def _deepcompile_passes(config: "DeepSpeedConfig") -> set[str]:
    """Return the passes of DeepCompile; empty if it is off."""
    return set(config.compile_config.passes or []) if config.compile_config.deepcompile else set()


def _quantizes_updates(zero: Any) -> bool:
    return zero.paro_quantized_updates is not None


def _quantizes_losslessly(zero: Any) -> bool:
    return _quantizes_updates(zero) and zero.paro_quantized_updates.bits == EXACT


def _uses_16_bits(config: "DeepSpeedConfig") -> bool:
    return bool(config.float16_config.enabled or config.bfloat16_config.enabled)


def _refuse_without_master_weights(kind: str, section: str) -> Refusal:
    def find(config: "DeepSpeedConfig") -> bool:
        quantizes = _quantizes_updates(config.zero_config) and not _quantizes_losslessly(config.zero_config)
        return quantizes and bool(getattr(getattr(config, section), f"{kind}_master_weights_and_grads"))

    return Refusal(
        f"{kind}.{kind}_master_weights_and_grads",
        f"quantization errors are corrected from the optimizer's fp32 weights, without which {QUANTIZED_UPDATES} "
        f"would lose them",
        find,
        _updates_may_be_quantized,
    )


def _refuse_with_outer(key: str) -> Refusal:
    return _refuse_zero_key(
        key,
        f"{OUTER} averages groups with equal weights; remove it, or {key}",
        find=lambda zero: getattr(zero, key) and zero.paro_outer_optimizer is not None,
    )


_NEEDS_STAGE_3 = "parameters are not sharded; it needs stage 3"
_STRATEGIES_WITH_SLICES = hyphenated(name for name, row in STRATEGIES.items() if _keeps_slices(row))
_STRATEGIES_OF_OWN_STEPS = hyphenated(
    name for name, row in STRATEGIES.items() if not _communicates_in_micro_batches(row)
)
_STAGE_1_STRATEGIES = hyphenated(name for name, row in STRATEGIES.items() if row.stage == 1)

REFUSED: tuple[Refusal, ...] = (
    _refuse_zero_key("zenflow", "ZenFlow has its own gradient reduction"),
    _refuse_zero_key(
        "offload_optimizer.super_offload",
        "SuperOffload has its own optimizer",
        find=lambda zero: getattr(zero.offload_optimizer, "super_offload", False),
    ),
    _refuse_zero_key(
        "offload_optimizer.device",
        "optimizer states on NVMe are not supported; use device cpu",
        find=lambda zero: _is_on_nvme(zero.offload_optimizer),
    ),
    _refuse_zero_key("offload_param", _NEEDS_STAGE_3, replicates_parameters),
    _refuse_zero_key(THRESHOLD, _NEEDS_STAGE_3, replicates_parameters, lambda zero: zero.module_granularity_threshold),
    _refuse_zero_key(
        "offload_param.device",
        "parameters on NVMe are not supported; use device cpu",
        shards_parameters,
        lambda zero: _is_on_nvme(zero.offload_param),
    ),
    _refuse_zero_key(
        CACHE_BYTES,
        f"it caches slices that are gathered after a step; strategies with such slices: {_STRATEGIES_WITH_SLICES}",
        lambda strategy: not _keeps_slices(strategy),
    ),
    _refuse_zero_key(
        CACHE_BYTES,
        f"it applies to parameters in host memory: also set {SECTION}.offload_param.device to cpu",
        _keeps_slices,
        lambda zero: zero.paro_parameter_cache_bytes and not offloads(zero.offload_param),
    ),
    _refuse_zero_key(
        "stage3_use_all_reduce_for_fetch_params",
        "parameters are gathered by all-gathers within and between groups",
        shards_parameters,
        lambda zero: zero.use_all_reduce_for_fetch_params,
    ),
    _refuse_zero_key(
        "enable_sanity_checks", "it compares buckets over all ranks, but each group reduces its own", shards_parameters
    ),
    _refuse_zero_key(
        "pipeline_loading_checkpoint",
        "it passes a token among the ranks of one group that holds all states",
        _shards_with_states_inside_groups,
    ),
    Refusal(
        "checkpoint.use_node_local_storage",
        "only the ranks of the first group write optimizer states",
        lambda config: config.use_node_local_storage,
        _shards_with_states_inside_groups,
    ),
    _refuse_zero_key(
        "zero_hpz_partition_size",
        "hpZ shards the parameters of stage 3 inside a group; strategies with p = I do that",
        find=lambda zero: zero.zero_hpz_partition_size > 1,
    ),
    _refuse_zero_key(
        "zero_quantized_weights",
        f"parameters are gathered unquantized; {QUANTIZED_UPDATES} quantizes the changes of each step",
        _updates_may_be_quantized,
    ),
    _refuse_zero_key(
        "zero_quantized_weights",
        f"no parameters are sent between groups; {QUANTIZED_UPDATES} quantizes sums of gradients",
        _replicates_states,
    ),
    _refuse_zero_key("zero_quantized_weights", "parameters are gathered unquantized", _drops_old_parameters),
    _refuse_zero_key("zero_quantized_nontrainable_weights", "parameters are gathered exactly"),
    _refuse_zero_key(
        "reduce_scatter",
        "LoCo's reduction between groups is not an all-reduce",
        find=lambda zero: zero.zeropp_loco_param is not None and not zero.reduce_scatter,
    ),
    _refuse_zero_key(
        "reduce_scatter",
        f"an all-reduce sums in the backend's order, and {REDUCE} asks for rank order",
        find=lambda zero: zero.paro_reduce != BACKEND and not zero.reduce_scatter,
    ),
    _refuse_zero_key(
        REDUCE,
        f'{LOCO} has its own reduction between groups, whose sums are in rank order already; "{ORDERED_EVERYWHERE}" '
        f"also orders the sums within groups",
        find=lambda zero: zero.paro_reduce == ORDERED and zero.zeropp_loco_param is not None,
    ),
    _refuse_zero_key(
        QUANTIZED_UPDATES,
        "with p = G, no rank holds the old parameters that a difference needs",
        _drops_old_parameters,
        _quantizes_updates,
    ),
    _refuse_zero_key(
        "reduce_scatter",
        "an all-reduce has no separate gather of sums to quantize",
        _replicates_states,
        lambda zero: _quantizes_updates(zero) and not zero.reduce_scatter,
    ),
    _refuse_zero_key(
        f"{QUANTIZED_UPDATES}.bits",
        f'"{EXACT}" applies to updated parameters, but this strategy sends sums of gradients; set bits to 4 or 8',
        _replicates_states,
        _quantizes_losslessly,
    ),
    Refusal(
        f"{SECTION}.{QUANTIZED_UPDATES}.bits",
        f'"{EXACT}" needs parameters of 16 bits; enable bf16 or fp16, or set bits to 4 or 8',
        lambda config: _quantizes_losslessly(config.zero_config) and not _uses_16_bits(config),
        _updates_may_be_quantized,
    ),
    _refuse_without_master_weights("fp16", "float16_config"),
    _refuse_without_master_weights("bf16", "bfloat16_config"),
    Refusal(
        "torch_autocast.enabled",
        f"the optimizer's weights may be the parameters themselves, which must stay equal on all ranks with "
        f"{QUANTIZED_UPDATES}",
        lambda config: _quantizes_updates(config.zero_config) and config.torch_autocast_enabled,
        lambda strategy: _updates_may_be_quantized(strategy) and shards_parameters(strategy),
    ),
    _refuse_zero_key(
        MICRO_BATCHES,
        f"groups communicate in each micro-batch, which needs equal numbers; strategies whose groups communicate "
        f"once per step: {_STRATEGIES_OF_OWN_STEPS}",
        _communicates_in_micro_batches,
    ),
    *map(_refuse_with_outer, (MICRO_BATCHES, WEIGHTS)),
    Refusal(
        f"{SECTION}.{MICRO_BATCHES}",
        "with managed_gradient_accumulation false, the script chooses the micro-batches of a step; remove one of the "
        "two keys",
        lambda config: config.zero_config.paro_micro_batches and not config.managed_gradient_accumulation,
    ),
    _refuse_zero_key(
        WEIGHTS,
        f"{LOCO} keeps errors of gradients before they are divided by the number of tokens",
        find=lambda zero: zero.paro_weights and zero.zeropp_loco_param is not None,
    ),
    _refuse_zero_key(
        WEIGHTS,
        f"{QUANTIZED_UPDATES} keeps errors of sums before they are divided by the number of tokens",
        _replicates_states,
        lambda zero: zero.paro_weights and _quantizes_updates(zero),
    ),
    _refuse_zero_key("elastic_checkpoint", "use universal checkpoints"),
    Refusal(
        "compile.deepcompile",
        "DeepCompile replaces the reduction of gradients, except with compile.passes of autosp or autotp only",
        lambda c: (
            c.compile_config.deepcompile
            and not (_deepcompile_passes(c) and _deepcompile_passes(c) <= {"autosp", "autotp"})
        ),
    ),
    Refusal(
        "compile.passes autosp",
        f"DeepSpeed skips this pass at stages 2 and 3; strategies of stage 1: {_STAGE_1_STRATEGIES}",
        lambda config: "autosp" in _deepcompile_passes(config),
        lambda strategy: strategy.stage > 1,
    ),
    Refusal(
        "compile.passes autotp",
        "this pass compiles the model as one graph, in which no parameter can be gathered",
        lambda config: "autotp" in _deepcompile_passes(config),
        shards_parameters,
    ),
    _refuse_zero_key(
        "save_muon_momentum_buffer_in_memory",
        "it prevents offloading Muon's momentum to NVMe, which no strategy does; momentum is stored with the other "
        "optimizer states",
    ),
)
