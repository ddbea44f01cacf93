# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What our keys contradict: everything that is refused when DeepSpeed has parsed a configuration.

It runs on every rank alike, before any communication of ours.
"""

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_ext.config.implied import as_written, refuse_unread_stage
from deepspeed_ext.config.keys import FASTEST, OF_FASTEST, SECTION, STRATEGY, our_keys
from deepspeed_ext.config.model import STRATEGY_OF_STAGE
from deepspeed_ext.config.refused import refuse_beside
from deepspeed_ext.config.section import ParoZeroConfig, active_strategy, parse_section, save_settings, undecided
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def check_config(config: "DeepSpeedConfig", mpu: Any = None, mesh_device: Any = None) -> None:
    """Validate our keys against the rest of a parsed configuration and the ranks.

    Args:
        mpu, mesh_device: what DeepSpeed was given of other kinds of parallelism.

    Raises:
        ValueError: what is configured contradicts the strategy, or the group size does not fit.
    """
    given = our_keys(config._param_dict.get(SECTION))
    zero = config.zero_config
    if isinstance(zero, ParoZeroConfig):
        _check_strategy(config, zero, given, mpu, mesh_device)
    if given:
        refuse_unread_stage(config)


def _check_strategy(
    config: "DeepSpeedConfig", zero: ParoZeroConfig, given: list[str], mpu: Any, mesh_device: Any
) -> None:
    from deepspeed import comm as dist
    from deepspeed.utils import log_dist

    if zero.paro_group_size is not None and dist.is_initialized():
        GroupSizes(sharding_ranks(config, mpu), zero.paro_group_size)
    strategy = active_strategy(config)
    if strategy is None and not undecided(config):
        return
    refuse_mesh(given, mpu, mesh_device)
    save_settings(config)
    _check_muon(config)
    if strategy is None:
        possible_strategies(config)
        return
    refuse_beside(config, strategy)
    if strategy.p == Placement.N and not zero.use_multi_rank_bucket_allreduce:
        log_dist(
            f"deepspeed_ext: {SECTION}.use_multi_rank_bucket_allreduce has no effect with {STRATEGY}: a bucket is "
            f"reduced to the owners of its parts either way",
            ranks=[0],
        )


def _check_muon(config: "DeepSpeedConfig") -> None:
    """Refuse a Newton-Schulz method that DeepSpeed does not have.

    DeepSpeed does so as well, when it makes the optimizer, with a text that differs between ranks: it prints a set.

    Raises:
        ValueError: there is no such method.
    """
    params = config.optimizer_params or {}
    if config.optimizer_name != "muon" or "ns_method" not in params:
        return
    from deepspeed.runtime.zero.muon.original_muon import NS_METHODS

    known = sorted(NS_METHODS)
    if params["ns_method"] not in known:
        raise ValueError(f"optimizer.params.ns_method must be one of {', '.join(known)}, got {params['ns_method']!r}.")


def use_strategy_of_stage(config: "DeepSpeedConfig", mpu: Any) -> None:
    """Make a parsed configuration of plain ZeRO ask for the strategy that its stage is.

    Args:
        mpu: a pipeline's grid.

    Raises:
        ValueError: what is configured contradicts it.
    """
    section = config._param_dict[SECTION]
    config.zero_config = parse_section({**section, STRATEGY: STRATEGY_OF_STAGE[int(config.zero_config.stage)]})
    check_config(config, mpu)


# The strategies that a configuration leaves to choose from, if it asks for the fastest ##########################


def possible_strategies(config: "DeepSpeedConfig") -> list[Strategy]:
    """Return the strategies from which a parsed configuration leaves to choose.

    Raises:
        ValueError: there is none; with the reason for each.
    """
    found: list[Strategy] = []
    reasons: dict[str, list[str]] = {}
    for name, strategy in STRATEGIES.items():
        try:
            decided(config, strategy)
            found.append(strategy)
        except (ValueError, AssertionError) as error:
            reasons.setdefault(str(error).replace(name, "it"), []).append(name)
    if not found:
        why = "; ".join(f"{', '.join(names)}: {reason}" for reason, names in reasons.items())
        raise ValueError(f"{SECTION}.{STRATEGY} {FASTEST} leaves no strategy to choose from. {why}")
    return found


def decided(config: "DeepSpeedConfig", strategy: Strategy) -> "DeepSpeedConfig":
    """Return a parsed configuration that asks for the fastest, with this strategy instead.

    Raises:
        ValueError: what is configured beside it contradicts it.
        AssertionError: DeepSpeed's own checks find such a thing.
    """
    written = as_written(config._param_dict[SECTION])
    section = {key: value for key, value in written.items() if key not in OF_FASTEST} | {STRATEGY: strategy.name}
    # Not parsed as a whole: batch sizes were settled with the number of ranks that was known then.
    found = copy.copy(config)
    found._param_dict = {**config._param_dict, SECTION: section}
    found.zero_config = parse_section(section)
    found.zero_optimization_stage = found.zero_config.stage
    found.zero_enabled = True
    found.strategy_was_chosen = True
    refuse_beside(found, strategy)
    found._do_error_check()
    return found


# Over which ranks ZeRO shards and reduces ##########################################################
#
# Each place in DeepSpeed that asks for the data-parallel ranks has an answer of its own: DeepSpeedConfig.world_size
# counts batches, and leaves sequence parallelism out; utils.groups asks the mesh before the mpu in one function and
# after it in the next; ZeRO-3 reduces each parameter over the group over which zero.Init has sharded it.


def sharding_ranks(config: "DeepSpeedConfig", mpu: Any) -> int:
    """Return the number of ranks over which ZeRO shards and reduces: data- and sequence-parallel ones together.

    Args:
        config: parsed; the process groups have been initialized.
        mpu: the caller's, or None.
    """
    from deepspeed import comm as dist

    if mpu is None:
        return int(dist.get_world_size() // max(1, config.tensor_parallel_config.autotp_size))
    return int(getattr(mpu, "get_sequence_data_parallel_world_size", lambda: config.world_size)())


def refuse_mesh(keys: Sequence[str], mpu: Any, mesh_device: Any) -> None:
    """Refuse a mesh whose second axis is sequence parallelism, unless an mpu names the group over both axes.

    With such a mesh DeepSpeed 0.19.8 takes the first axis for the ranks of ZeRO (``utils.groups``). Stages 1 and 2
    then reduce gradients over a part of the ranks, and replicas drift apart. Stage 3 reduces over all of them, but
    takes norms and overflows over that part, and its ranks write their shards under the names of one another's.

    Args:
        keys: those of ours that are set.
        mpu, mesh_device: what DeepSpeed was given, or None. It keeps the mesh of an engine for all later ones.

    Raises:
        ValueError: there is such a mesh.
    """
    from deepspeed.utils import groups

    mesh = groups.mesh_device if mesh_device is None else mesh_device
    if mesh is None or hasattr(mpu, "get_sequence_data_parallel_group"):
        return
    data, sequence = mesh.mesh.shape
    if sequence > 1:
        whose = " of an earlier engine of this process" if mesh_device is None else ""
        raise ValueError(
            f"zero_optimization.{keys[0]} cannot be combined with a mesh of data_parallel_size {data} and "
            f"sequence_parallel_size {sequence} (or mesh_param){whose}: DeepSpeed takes {data} of the "
            f"{data * sequence} ranks that hold the same parameters for all of them. Pass "
            f"mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to deepspeed.initialize, after its "
            f"initialize_sequence_parallel({sequence}), and remove data_parallel_size (or mesh_param); or remove "
            f"{' and '.join(keys)}."
        )
