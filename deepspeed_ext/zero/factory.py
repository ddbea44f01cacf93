# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Has the engine make our optimizer in the place of DeepSpeed's."""

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.runtime.engine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.utils import log_dist

import deepspeed_ext
from deepspeed_ext.config import GROUP_SIZE, SECTION, STRATEGY
from deepspeed_ext.placement import Placement, Strategy
from deepspeed_ext.topology import Topology, get_topology
from deepspeed_ext.zero.replicated import ReplicatedOptimizer


def configure_with(strategy: Strategy, configure: Callable[..., Any], engine: Any, optimizer: Any) -> Any:
    """``DeepSpeedEngine._configure_zero_optimizer`` with our class under the name of DeepSpeed's.

    The engine passes some 35 arguments to the class it finds by name, and they change from release to release: so
    the name is what we replace, for the duration of the call.

    Raises:
        ValueError: the model or the optimizer is of a kind that the strategy does not support.
        RuntimeError: the engine did not look the class up under that name.
    """
    refuse_unsupported(strategy, engine, optimizer)
    group_size = engine._config.zero_config.paro_group_size
    topology = get_topology(engine.seq_data_parallel_group, group_size, alone=strategy.os == Placement.N)
    announce(strategy, topology)
    make = functools.partial(ReplicatedOptimizer, strategy=strategy, topology=topology)
    with mock.patch.object(deepspeed.runtime.engine, "DeepSpeedZeroOptimizer", make):
        made = configure(engine, optimizer)
    if not isinstance(made, ReplicatedOptimizer):
        raise RuntimeError(f"expected the engine to make a ReplicatedOptimizer for {strategy.name}, got {type(made)}")
    return made


def refuse_unsupported(strategy: Strategy, engine: Any, optimizer: Any) -> None:
    """Refuse what only the model or the optimizer object can tell; the same on all ranks."""
    reasons = (
        (engine.has_moe_layers, "the model has DeepSpeed MoE layers, whose experts are not data-parallel"),
        (isinstance(engine.module, PipelineModule), "the model is a PipelineModule"),
        (
            "muon" in type(optimizer).__name__.lower(),
            f"{type(optimizer).__name__} needs whole gradients where its state is",
        ),
    )
    for unsupported, reason in reasons:
        if unsupported:
            raise ValueError(
                f"{SECTION}.{STRATEGY} {strategy.name} is not supported here: {reason}. Remove {STRATEGY}."
            )


def announce(strategy: Strategy, topology: Topology) -> None:
    """One line on rank 0: versions, strategy, groups; a second one where groups make no difference."""
    n, m, k = topology.cluster.ranks, topology.cluster.group_size, topology.cluster.groups
    log_dist(
        f"deepspeed_ext {deepspeed_ext.__version__} on DeepSpeed {deepspeed.__version__}: {strategy.name} "
        f"(p={strategy.p.name}, g={strategy.g.name}, os={strategy.os.name}; stage {strategy.stage}) "
        f"over {n} data-parallel ranks in {k} group(s) of {m}",
        ranks=[0],
    )
    if m in (1, n):
        same = "the whole of the data-parallel ranks, so I means G" if m == n else "one rank, so I means N"
        log_dist(f"deepspeed_ext: a group is {same}. {SECTION}.{GROUP_SIZE} is {m}.", ranks=[0])
