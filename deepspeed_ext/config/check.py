# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks our keys against the rest of a configuration that DeepSpeed has parsed.

The checks run identically on every rank, before any communication of ours.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.implied import refuse_unread_stage, without_implied_stage
from deepspeed_ext.config.keys import FASTEST, FASTEST_KEYS, MEASURED, MICRO_BATCHES, SECTION, STRATEGY, our_keys
from deepspeed_ext.config.model import STRATEGY_OF_STAGE
from deepspeed_ext.config.refused import refuse_conflicts
from deepspeed_ext.config.section import ParoZeroConfig, active_strategy, parse_section, save_settings, wants_fastest
from deepspeed_ext.console import log_on_rank_0
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def check_config(config: "DeepSpeedConfig", mpu: Any = None, mesh_device: Any = None) -> None:
    """Validate our keys against the rest of a parsed configuration and the ranks.

    Args:
        mpu, mesh_device: DeepSpeed's arguments for other kinds of parallelism.

    Raises:
        ValueError: the configuration contradicts the strategy, or the group size does not fit.
    """
    keys = our_keys(config._param_dict.get(SECTION))
    zero = config.zero_config
    if isinstance(zero, ParoZeroConfig):
        _check_strategy(config, zero, keys, mpu, mesh_device)
    if keys:
        refuse_unread_stage(config)


def _check_strategy(
    config: "DeepSpeedConfig", zero: ParoZeroConfig, keys: list[str], mpu: Any, mesh_device: Any
) -> None:
    from deepspeed import comm as dist

    # Without process groups the number of ranks is unknown; the engine checks the size later.
    if zero.paro_group_size is not None and dist.is_initialized():
        GroupSizes(sharding_ranks(config, mpu), zero.paro_group_size)
    strategy = active_strategy(config)
    if strategy is None and not wants_fastest(config):
        return
    refuse_mesh(keys, mpu, mesh_device)
    save_settings(config)
    _check_muon(config)
    if strategy is None:
        possible_strategies(config)
        return
    refuse_conflicts(config, strategy)
    _check_measured(config)
    if strategy.p == Placement.N and not zero.use_multi_rank_bucket_allreduce:
        log_on_rank_0(
            f"{SECTION}.use_multi_rank_bucket_allreduce has no effect with {STRATEGY}: "
            f"gradients are always reduced to the ranks that own them"
        )


def _check_muon(config: "DeepSpeedConfig") -> None:
    """Refuse a Newton-Schulz method that DeepSpeed does not have.

    DeepSpeed does so when it builds the optimizer. Its message differs between ranks, because it prints a set.

    Raises:
        ValueError: there is no such method.
    """
    params = config.optimizer_params or {}
    if config.optimizer_name != "muon" or "ns_method" not in params:
        return
    from deepspeed.runtime.zero.muon.original_muon import NS_METHODS

    methods = sorted(NS_METHODS)
    if params["ns_method"] not in methods:
        raise ValueError(
            f"optimizer.params.ns_method must be one of {', '.join(methods)}, got {params['ns_method']!r}."
        )


def _check_measured(config: "DeepSpeedConfig") -> None:
    """Refuse to measure the pace of groups in steps of one micro-batch, at whose end groups wait for each other.

    Raises:
        ValueError: the mean number of micro-batches is 1.
    """
    number = config.gradient_accumulation_steps
    if config.zero_config.paro_micro_batches == MEASURED and number < 2:
        raise ValueError(
            f'{SECTION}.{MICRO_BATCHES} "{MEASURED}" needs gradient_accumulation_steps of at least 2, the mean number '
            f'of micro-batches of a group, got {number} (frameworks may replace "auto" by 1).'
        )


def use_strategy_of_stage(config: "DeepSpeedConfig", mpu: Any) -> None:
    """Set the strategy that equals the stage in a parsed configuration of plain ZeRO.

    Args:
        mpu: a pipeline's grid.

    Raises:
        ValueError: the configuration contradicts the strategy.
    """
    section = config._param_dict[SECTION]
    config.zero_config = parse_section({**section, STRATEGY: STRATEGY_OF_STAGE[int(config.zero_config.stage)]})
    check_config(config, mpu)


# Strategies to choose from, if a configuration asks for the fastest #################################


def possible_strategies(config: "DeepSpeedConfig") -> list[Strategy]:
    """Return the strategies that a parsed configuration allows.

    Raises:
        ValueError: it allows none; the message has the reason for each.
    """
    possible: list[Strategy] = []
    reasons: dict[str, list[str]] = {}
    for strategy in STRATEGIES.values():
        try:
            with_strategy(config, strategy)
            possible.append(strategy)
        except (ValueError, AssertionError) as error:
            # Without the strategy's name, equal reasons of several strategies merge into one.
            reasons.setdefault(str(error).replace(str(strategy), "it"), []).append(str(strategy))
    if not possible:
        details = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise ValueError(f"{SECTION}.{STRATEGY} {FASTEST} has no strategy to choose from. {details}")
    return possible


def with_strategy(config: "DeepSpeedConfig", strategy: Strategy) -> "DeepSpeedConfig":
    """Return a copy of a parsed configuration with this strategy in place of the fastest.

    Raises:
        ValueError: the rest of the configuration contradicts the strategy.
        AssertionError: DeepSpeed's own checks fail.
    """
    written = without_implied_stage(config._param_dict[SECTION])
    section = {key: value for key, value in written.items() if key not in FASTEST_KEYS} | {STRATEGY: strategy.name}
    # Only parse the section: parsing everything again would recompute batch sizes from the number of ranks.
    new_config = copy.copy(config)
    new_config._param_dict = {**config._param_dict, SECTION: section}
    new_config.zero_config = parse_section(section)
    new_config.zero_optimization_stage = new_config.zero_config.stage
    new_config.zero_enabled = True
    new_config.strategy_was_chosen = True
    refuse_conflicts(new_config, strategy)
    new_config._do_error_check()
    return new_config


# Ranks over which ZeRO shards and reduces ##########################################################
#
# DeepSpeed determines the data-parallel ranks differently in each place. DeepSpeedConfig.world_size counts batches,
# and ignores sequence parallelism. utils.groups prefers the mesh to the mpu in one function, and the mpu in the next.
# ZeRO-3 reduces each parameter over the group over which zero.Init has sharded it.


def sharding_ranks(config: "DeepSpeedConfig", mpu: Any) -> int:
    """Return the number of ranks over which ZeRO shards and reduces: data- and sequence-parallel ranks together.

    Args:
        config: parsed configuration; the process groups must be initialized.
        mpu: the caller's mpu, or None.
    """
    from deepspeed import comm as dist

    if mpu is None:
        return int(dist.get_world_size() // max(1, config.tensor_parallel_config.autotp_size))
    return int(getattr(mpu, "get_sequence_data_parallel_world_size", lambda: config.world_size)())


def refuse_mesh(keys: Sequence[str], mpu: Any, mesh_device: Any) -> None:
    """Refuse a mesh whose second axis is sequence parallelism, unless an mpu names the group over both axes.

    With such a mesh DeepSpeed 0.19.8 uses the first axis as the ranks of ZeRO (``utils.groups``). Stages 1 and 2
    then reduce gradients over only a part of the ranks, and replicas drift apart. Stage 3 reduces over all ranks, but
    computes norms and overflows over that part, and its ranks write their shards under the names of each other's.

    Args:
        keys: our keys that are set.
        mpu, mesh_device: DeepSpeed's arguments, or None. DeepSpeed keeps an engine's mesh for all later engines.

    Raises:
        ValueError: there is such a mesh.
    """
    from deepspeed.utils import groups

    mesh = groups.mesh_device if mesh_device is None else mesh_device
    if mesh is None or hasattr(mpu, "get_sequence_data_parallel_group"):
        return
    data, sequence = mesh.mesh.shape
    if sequence > 1:
        source = " of an earlier engine of this process" if mesh_device is None else ""
        raise ValueError(
            f"zero_optimization.{keys[0]} cannot be combined with a mesh of data_parallel_size {data} and "
            f"sequence_parallel_size {sequence} (or mesh_param){source}: DeepSpeed would use {data} of the "
            f"{data * sequence} ranks that hold the same parameters as if they were all. Pass "
            f"mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to deepspeed.initialize, after its "
            f"initialize_sequence_parallel({sequence}), and remove data_parallel_size (or mesh_param); or remove "
            f"{' and '.join(keys)}."
        )
