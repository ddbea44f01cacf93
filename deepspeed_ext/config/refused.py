# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Table of DeepSpeed options that cannot be combined with a strategy. They are refused, never ignored.

Checks that need the engine, the model or the optimizer are in ``unsupported.py``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.keys import CACHE_BYTES, QUANTIZED_UPDATES, SECTION, STRATEGY, THRESHOLD, asked_by
from deepspeed_ext.config.section import offloads
from deepspeed_ext.config.settings import EXACT
from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy, hyphenated

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
        key: the full name.
        why: the reason.
        find: returns a true value if the key is set in the parsed configuration.
        applies: whether it is refused with a strategy.
    """

    key: str
    why: str
    find: Callable[["DeepSpeedConfig"], Any]
    applies: Callable[[Strategy], bool] = always


def refuse_beside(config: "DeepSpeedConfig", strategy: Strategy) -> None:
    """Refuse the options that a strategy's optimizer does not support.

    Raises:
        ValueError: one of the options is set.
    """
    key = asked_by(config._param_dict[SECTION])
    names = {STRATEGY: f"{STRATEGY} {strategy}", "stage": f"stage {strategy.stage} in a pipeline"}
    requested = names.get(key, key)
    for row in REFUSED:
        if row.applies(strategy) and row.find(config):
            raise ValueError(
                f"{row.key} cannot be combined with {SECTION}.{requested}: {row.why}. Remove one of the two."
            )


def _in_zero(
    key: str,
    why: str,
    applies: Callable[[Strategy], bool] = always,
    find: Callable[[Any], Any] | None = None,
) -> Refusal:
    """Return the refusal of a key of ``zero_optimization`` if it is true, or if ``find(section)`` is."""
    look = find or (lambda zero: getattr(zero, key))
    return Refusal(f"{SECTION}.{key}", why, lambda config: look(config.zero_config), applies)


def _on_nvme(section: Any) -> bool:
    return getattr(section, "device", None) == "nvme"


def _passes(config: "DeepSpeedConfig") -> set[str]:
    """Return the passes of DeepCompile; empty if it is off."""
    return set(config.compile_config.passes or []) if config.compile_config.deepcompile else set()


def _quantizes_updates(zero: Any) -> bool:
    return zero.paro_quantized_updates is not None


def _without_loss(zero: Any) -> bool:
    return _quantizes_updates(zero) and zero.paro_quantized_updates.bits == EXACT


def _in_16_bits(config: "DeepSpeedConfig") -> bool:
    return bool(config.float16_config.enabled or config.bfloat16_config.enabled)


def _without_master_weights(kind: str, section: str) -> Refusal:
    def find(config: "DeepSpeedConfig") -> bool:
        quantizes = _quantizes_updates(config.zero_config) and not _without_loss(config.zero_config)
        return quantizes and bool(getattr(getattr(config, section), f"{kind}_master_weights_and_grads"))

    return Refusal(
        f"{kind}.{kind}_master_weights_and_grads",
        f"quantization errors are corrected from the optimizer's fp32 weights, without which {QUANTIZED_UPDATES} "
        f"would lose them",
        find,
        _updates_may_be_quantized,
    )


_UNSHARDED = "parameters are not sharded; it needs stage 3"
_GATHERED_AFTER_STEPS = hyphenated(name for name, row in STRATEGIES.items() if _sliced(row))
_STAGE_1 = hyphenated(name for name, row in STRATEGIES.items() if row.stage == 1)

REFUSED: tuple[Refusal, ...] = (
    _in_zero("zenflow", "ZenFlow reduces gradients its own way"),
    _in_zero(
        "offload_optimizer.super_offload",
        "SuperOffload is an optimizer of its own",
        find=lambda zero: getattr(zero.offload_optimizer, "super_offload", False),
    ),
    _in_zero(
        "offload_optimizer.device",
        "optimizer states on NVMe are not supported; use device cpu",
        find=lambda zero: _on_nvme(zero.offload_optimizer),
    ),
    _in_zero("offload_param", _UNSHARDED, replicated),
    _in_zero(THRESHOLD, _UNSHARDED, replicated, lambda zero: zero.module_granularity_threshold),
    _in_zero(
        "offload_param.device",
        "parameters on NVMe are not supported; use device cpu",
        sharded,
        lambda zero: _on_nvme(zero.offload_param),
    ),
    _in_zero(
        CACHE_BYTES,
        f"it keeps slices that are gathered after steps; strategies that have such: {_GATHERED_AFTER_STEPS}",
        lambda strategy: not _sliced(strategy),
    ),
    _in_zero(
        CACHE_BYTES,
        f"it is for parameters in host memory: set {SECTION}.offload_param.device to cpu as well",
        _sliced,
        lambda zero: zero.paro_parameter_cache_bytes and not offloads(zero.offload_param),
    ),
    _in_zero(
        "stage3_use_all_reduce_for_fetch_params",
        "parameters are gathered by all-gathers within and between groups",
        sharded,
        lambda zero: zero.use_all_reduce_for_fetch_params,
    ),
    _in_zero("enable_sanity_checks", "it compares buckets over all ranks, but groups reduce their own", sharded),
    _in_zero(
        "pipeline_loading_checkpoint",
        "it passes a token from rank to rank of one group that holds all states",
        _sharded_with_states_inside_groups,
    ),
    Refusal(
        "checkpoint.use_node_local_storage",
        "only the ranks of the first group write optimizer states",
        lambda config: config.use_node_local_storage,
        _sharded_with_states_inside_groups,
    ),
    _in_zero(
        "zero_hpz_partition_size",
        "hpZ shards the parameters of stage 3 inside a group; strategies with p = I do that",
        find=lambda zero: zero.zero_hpz_partition_size > 1,
    ),
    _in_zero(
        "zero_quantized_weights",
        f"parameters are gathered as they are; {QUANTIZED_UPDATES} sends what a step has changed of them in few bits",
        _updates_may_be_quantized,
    ),
    _in_zero(
        "zero_quantized_weights",
        f"no parameters are sent between groups; {QUANTIZED_UPDATES} sends sums of gradients back in few bits",
        _replicates_states,
    ),
    _in_zero("zero_quantized_weights", "parameters are gathered as they are", _releases_parameters),
    _in_zero("zero_quantized_nontrainable_weights", "parameters are gathered exactly"),
    _in_zero(
        "reduce_scatter",
        "LoCo's reduction between groups is not an all-reduce",
        find=lambda zero: zero.zeropp_loco_param is not None and not zero.reduce_scatter,
    ),
    _in_zero(
        QUANTIZED_UPDATES,
        "with p = G no rank holds the parameters to which updates could be sent as differences",
        _releases_parameters,
        _quantizes_updates,
    ),
    _in_zero(
        "reduce_scatter",
        "an all-reduce has no sums that could be sent back in few bits",
        _replicates_states,
        lambda zero: _quantizes_updates(zero) and not zero.reduce_scatter,
    ),
    _in_zero(
        f"{QUANTIZED_UPDATES}.bits",
        f'"{EXACT}" is for updated parameters, and here sums of gradients are sent back; set bits to 4 or 8',
        _replicates_states,
        _without_loss,
    ),
    Refusal(
        f"{SECTION}.{QUANTIZED_UPDATES}.bits",
        f'"{EXACT}" is for parameters of 16 bits; enable bf16 or fp16, or set bits to 4 or 8',
        lambda config: _without_loss(config.zero_config) and not _in_16_bits(config),
        _updates_may_be_quantized,
    ),
    _without_master_weights("fp16", "float16_config"),
    _without_master_weights("bf16", "bfloat16_config"),
    Refusal(
        "torch_autocast.enabled",
        f"the optimizer's weights may be the parameters themselves, which with {QUANTIZED_UPDATES} have to stay equal "
        f"on all ranks",
        lambda config: _quantizes_updates(config.zero_config) and config.torch_autocast_enabled,
        lambda strategy: _updates_may_be_quantized(strategy) and sharded(strategy),
    ),
    _in_zero("elastic_checkpoint", "use universal checkpoints"),
    Refusal(
        "compile.deepcompile",
        "DeepCompile replaces the reduction of gradients, except with compile.passes of autosp or autotp only",
        lambda c: c.compile_config.deepcompile and not (_passes(c) and _passes(c) <= {"autosp", "autotp"}),
    ),
    Refusal(
        "compile.passes autosp",
        f"DeepSpeed leaves this pass out at stages 2 and 3; strategies of stage 1: {_STAGE_1}",
        lambda config: "autosp" in _passes(config),
        lambda strategy: strategy.stage > 1,
    ),
    Refusal(
        "compile.passes autotp",
        "this pass compiles the model as one graph, in which no parameter can be gathered",
        lambda config: "autotp" in _passes(config),
        sharded,
    ),
    _in_zero(
        "save_muon_momentum_buffer_in_memory",
        "it keeps Muon's momentum from being offloaded to NVMe, which no strategy supports; the momentum is where the "
        "other optimizer states are",
    ),
)
