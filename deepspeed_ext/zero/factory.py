# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Make an engine build our optimizer in the place of DeepSpeed's."""

import contextlib
import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest import mock

import deepspeed
import deepspeed.runtime.engine
import deepspeed.runtime.superoffload.superoffload_stage3  # subclasses stage 3's class: before we take its name
import deepspeed.runtime.zero.stage3
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from deepspeed.utils import log_dist
from torch import Tensor, nn

from deepspeed_ext.comm.backends import MakeGather, MakeReduce
from deepspeed_ext.comm.collectives import is_pairwise
from deepspeed_ext.comm.process_groups import Topology, get_topology, ranks_per_node
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.config.keys import GROUP_SIZE, OVERLAP_UPDATES, SECTION, STRATEGY, as_given
from deepspeed_ext.config.settings import OuterSettings
from deepspeed_ext.config.unsupported import UNSUPPORTED, refuse_unsupported
from deepspeed_ext.deepspeed_types import Config, Engine, ZeroConfig
from deepspeed_ext.leaf.setup import by_budget
from deepspeed_ext.model_bytes import on_device
from deepspeed_ext.overrides import bypassed
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy
from deepspeed_ext.version import __version__
from deepspeed_ext.zero import native_experts
from deepspeed_ext.zero.arrivals import wait_for_whole_parameters
from deepspeed_ext.zero.families import (
    DENSE,
    Families,
    Topologies,
    experts_of,
    families_of,
    family_of,
    topologies_of,
)
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer
from deepspeed_ext.zero.sharded.coordinator import coordinator_of
from deepspeed_ext.zero.sharded.gathers import GatherSettings, partition
from deepspeed_ext.zero.stage3 import Stage3Optimizer
from deepspeed_ext.zero.stage12 import Stage12Optimizer

OuterHops = Callable[[int], tuple[MakeReduce, MakeGather]]
_TO_FILES = ("save_16bit_model", "_zero3_consolidated_16bit_state_dict")  # of an engine: what leaves the process


def configure_with(
    strategy: Strategy,
    gather: MakeGather,
    reduce: MakeReduce,
    outer_hops: OuterHops,
    configure: Callable[..., Any],
    engine: Engine,
    optimizer: object,
) -> Any:
    """Run ``DeepSpeedEngine._configure_zero_optimizer`` with our classes under the names of DeepSpeed's.

    The engine passes some 35 arguments to the class it finds by name, and they change from release to release: so
    the name is what we replace, for the duration of the call.

    Args:
        strategy: how model states are placed.
        gather, reduce: make the hops between groups.
        outer_hops: gives what makes those of an outer optimizer.
        configure: DeepSpeed's method.
        engine, optimizer: its arguments.

    Raises:
        ValueError: the model or the optimizer is of a kind that the strategy does not support.
        RuntimeError: the engine did not look the class up under that name.
    """
    refuse_unsupported(UNSUPPORTED, strategy, engine, optimizer)
    _refuse_replaced_methods(strategy)
    wait_for_whole_parameters()  # of an engine before this one
    group_size = engine._config.zero_config.paro_group_size
    outer = outer_settings(engine)
    alone = strategy.os == Placement.N or outer is not None
    topology = get_topology(engine.seq_data_parallel_group, group_size, alone=alone)
    topologies = topologies_of(engine, topology, alone=alone)
    announce(strategy, topologies, engine, use_streams(engine._config, strategy))
    by_budget(engine._config.zero_config, engine.module)
    warn_if_too_large(strategy, topologies, engine)
    if outer is not None:
        topologies = {DENSE: topology.apart()}
    if strategy.p != Placement.N and strategy.os == Placement.I:
        # Every group holds all states: the first one writes them to checkpoints.
        engine.is_first_weights_partition_group = lambda: topology.rank < topology.sizes.group_size
    made: list[Any] = []
    with contextlib.ExitStack() as stack:
        if strategy.p == Placement.N:  # in a pipeline the engine would switch it off, with a warning
            stack.enter_context(mock.patch.object(engine, "zero_overlap_comm", lambda: False))
        else:
            stack.enter_context(native_experts.sharded(engine))
        reductions = _topologies_of_reductions(strategy, topologies, engine._config.zero_config)
        for module, name, make in _replacements(
            strategy, topologies, reductions, gather, reduce, engine._config.zero_config
        ):

            def remember(*args: Any, make: Callable[..., Any] = make, **kwargs: Any) -> Any:
                stack.close()  # found: nothing below needs to see our names
                made.append(make(*args, **kwargs))
                return made[-1]

            stack.enter_context(mock.patch.object(module, name, remember))
        configured = configure(engine, optimizer)
    if not any(configured is one for one in made):
        raise RuntimeError(
            f"expected the engine to make an optimizer for {strategy.name} under a name of DeepSpeed's, got "
            f"{type(configured)}"
        )
    engine._reduce_autoep_folding_tp_replicated_gradients = lambda: None  # ours does, as gradients come
    if isinstance(configured, Stage3Optimizer) and configured.writers.writes is not None:
        engine.is_first_weights_partition_group = lambda: bool(configured.writers.writes)
    if outer is not None and isinstance(configured, ParoOptimizer):
        add_outer_optimizer(configured, outer, topology, outer_hops(outer.bits), engine)
    if isinstance(configured, Stage12Optimizer):
        configured.updates.watch(engine.module)
        if configured.updates.arrivals.ahead:  # HF's Trainer calls it between a step and the next forward
            engine.zero_grad = configured.updates.arrivals.unread(engine.zero_grad)
    return configured


def _refuse_replaced_methods(strategy: Strategy) -> None:
    """Refuse code of others that would have no effect.

    Raises:
        ValueError: it has replaced a method of DeepSpeed's optimizer that ours overrides.
    """
    if found := bypassed(Stage12Optimizer if strategy.p == Placement.N else Stage3Optimizer):
        raise ValueError(
            f"{SECTION}.{STRATEGY} {strategy.name} overrides {found[0]}: that code would have no effect. Turn off "
            f"what replaces the method (in axolotl: lora_fp32_gradients), or remove {SECTION}.{STRATEGY}."
        )


def outer_settings(engine: Engine) -> OuterSettings | None:
    """Return how groups are brought together by an outer optimizer; None where there is none."""
    section = engine._config.zero_config.paro_outer_optimizer
    return None if section is None else OuterSettings.parse(section)


def add_outer_optimizer(
    optimizer: ParoOptimizer,
    settings: OuterSettings,
    topology: Topology,
    make: tuple[MakeReduce, MakeGather],
    engine: Engine,
) -> None:
    """Bring the groups together, in each of which an optimizer has been made as if there were no other. Collective.

    Args:
        topology: of all groups.
        make: its hops between groups.
    """
    # Their own process groups: what travels beside inner steps keeps nothing else waiting.
    between = get_topology(topology.world, topology.sizes.group_size, second=True).inter
    numels = [optimizer.shard_weights(shard.number).numel() for shard in optimizer.flat_shards()]
    outer = OuterOptimizer(
        settings,
        topology,
        make[0](between, "outer", True),
        make[1](between, "outer"),
        numels,
        lambda number: optimizer.shard_weights(number).data,
        optimizer.send_parameters,
        _reporter(engine) if engine.monitor.enabled else None,
    )
    optimizer.outer = outer
    optimizer.norms.overflowing = topology.inter
    if settings.warmup_steps:
        numbers = range(len(numels))
        optimizer.complete_gradients = lambda: outer.average_gradients(
            (number, optimizer.shard_gradient(number)) for number in numbers
        )
    if isinstance(optimizer, Stage12Optimizer):
        _take_what_is_set(optimizer, outer)
    for name in _TO_FILES:
        setattr(engine, name, _with_outer_weights(getattr(engine, name), outer))


def _take_what_is_set(optimizer: Stage12Optimizer, outer: OuterOptimizer) -> None:
    """Let an outer optimizer take over weights that somebody sets by DeepSpeed's ``safe_set_full_fp32_param``."""
    found = weakref.ref(outer)  # parameters may outlive the engine
    for shard in optimizer.flat_shards():
        for member in shard.members:
            owner: Any = member.param
            owner.set_full_hp_param = _taking(owner.set_full_hp_param, found, shard.number, member.in_shard)


def _taking(
    change: Callable[..., None], found: "weakref.ref[OuterOptimizer]", number: int, span: Span
) -> Callable[..., None]:
    @functools.wraps(change)
    def changed(value: Tensor, optim_state_key: str | None = None, *args: Any, **kwargs: Any) -> None:
        change(value, optim_state_key, *args, **kwargs)
        outer = found()
        if outer is not None and optim_state_key is None:
            outer.take(number, span)

    return changed


def _reporter(engine: Engine) -> Callable[[Mapping[str, float]], None]:
    """Return what tells the engine's monitor, whose writers are on rank 0, of an outer step."""

    def report(found: Mapping[str, float]) -> None:
        if engine.global_rank == 0:
            samples = engine.global_samples
            engine.monitor.write_events([(f"Train/Outer/{name}", value, samples) for name, value in found.items()])

    return report


def _with_outer_weights(save: Callable[..., Any], outer: OuterOptimizer) -> Callable[..., Any]:
    """Return what saves the outer weights, where it would save those of a group."""

    @functools.wraps(save)
    def saved(*args: Any, **kwargs: Any) -> Any:
        with outer.in_place():
            return save(*args, **kwargs)

    return saved


def _topologies_of_reductions(strategy: Strategy, topologies: Topologies, config: ZeroConfig) -> Topologies:
    """Return the process groups over which gradients travel: where ranks may reduce at other times than they gather,
    their own, for collectives of one group have one order. Collective over all ranks."""
    at_any_time = config.overlap_comm and Placement.N not in (strategy.p, strategy.os) and strategy.g != Placement.G
    beside_gathers = strategy.p == Placement.G or strategy.g == Placement.N
    if not (at_any_time and beside_gathers) or is_pairwise(topologies[DENSE].world):
        return topologies
    return {name: get_topology(one.world, one.sizes.group_size, second=True) for name, one in topologies.items()}


def _replacements(
    strategy: Strategy,
    topologies: Topologies,
    reductions: Topologies,
    gather: MakeGather,
    reduce: MakeReduce,
    config: ZeroConfig,
) -> list[tuple[Any, str, Callable[..., Any]]]:
    """Return what the engine may make: module and name where it looks the class up, and what to make instead."""

    def families() -> Families:
        return families_of(topologies, reductions, gather, reduce, config.reduce_scatter)

    def make_stage12(*args: Any, **kwargs: Any) -> Stage12Optimizer:
        kwargs["overlap_comm"] = config.overlap_comm
        ahead = config.paro_overlap_updates
        return Stage12Optimizer(*args, **kwargs, strategy=strategy, families=families(), overlap_updates=ahead)

    if strategy.p == Placement.N:
        return [(deepspeed.runtime.engine, "DeepSpeedZeroOptimizer", make_stage12)]
    gathering = GatherSettings.of(config)

    def make_stage3(*args: Any, **kwargs: Any) -> Stage3Optimizer:
        return Stage3Optimizer(*args, **kwargs, strategy=strategy, families=families(), gathering=gathering)

    def make_inference(module: nn.Module, **kwargs: Any) -> DeepSpeedZeRoOffload:
        return _inference(module, strategy, families_of(topologies, topologies, gather), gathering, kwargs)

    return [
        (deepspeed.runtime.zero.stage3, "DeepSpeedZeroOptimizer_Stage3", make_stage3),
        (deepspeed.runtime.engine, "DeepSpeedZeRoOffload", make_inference),
    ]


def _inference(
    module: nn.Module,
    strategy: Strategy,
    families: Families,
    gathering: GatherSettings,
    arguments: dict[str, Any],
) -> DeepSpeedZeRoOffload:
    """Make what the engine has without an optimizer: parameters are sharded and gathered, that is all."""
    with coordinator_of(families[DENSE].topology.shard_group(strategy.p)):
        offload = DeepSpeedZeRoOffload(module, **arguments)
    partition(module, offload, strategy, families, gathering)
    return offload


def use_streams(config: Config, strategy: Strategy) -> list[str]:
    """Overlap on devices with streams, where DeepSpeed's defaults would not: what the user has set stays.

    By default DeepSpeed's throughput timer has the host wait for the device, communication included, at the end of
    each step and at the beginning of each forward (``utils/timer.py``), and stages 1 and 2 reduce gradients on the
    stream that computes them.

    Returns:
        What was changed, in words.
    """
    changed: list[str] = []
    if get_accelerator().is_synchronized_device():
        return changed
    if "synchronized" not in config.timers_config.model_fields_set:
        config.timers_config.synchronized = False
        changed.append("timers.throughput.synchronized false")
    zero = config.zero_config
    # DeepSpeed refuses it at stage 1 where the caller manages accumulation.
    possible = strategy.stage > 1 or config.managed_gradient_accumulation
    if not zero.overlap_comm and as_given(config._param_dict, "overlap_comm") is None and possible:
        zero.overlap_comm = True
        changed.append(f"{SECTION}.overlap_comm true")
    return changed


def announce(strategy: Strategy, topologies: Topologies, engine: Engine, changed: Sequence[str]) -> None:
    """Log one line on rank 0: versions, strategy, groups, and what they come down to here.

    At level WARNING: DeepSpeed hides INFO, and on one node most strategies are a plain stage, which many a first try
    will be. Where the planner has chosen, its own warning says what and why, and this line is INFO.

    Args:
        changed: what else was, of DeepSpeed's defaults.
    """
    topology = topologies[DENSE]
    chosen = getattr(engine._config, "strategy_was_chosen", False)
    n, m, k = topology.sizes.ranks, topology.sizes.group_size, topology.sizes.groups
    compressed = engine._config.zero_config.zeropp_loco_param is not None
    defaults = f" (by default here: {', '.join(changed)})" if changed else ""
    if engine._config.zero_config.paro_overlap_updates and strategy.p == strategy.os:
        defaults += f"; {SECTION}.{OVERLAP_UPDATES} changes nothing: with p = os no parameters come back after a step"
    hint = getattr(engine, "layout_hint", lambda *placed: "")(strategy, topology)  # of a pipeline
    log_dist(
        f"deepspeed_ext {__version__} on DeepSpeed {deepspeed.__version__}: {strategy.name} "
        f"(p={strategy.p.name}, g={strategy.g.name}, os={strategy.os.name}; stage {strategy.stage}) "
        f"over {n} data-parallel ranks in {k} group(s) of {m}{_meaning(strategy, topology.sizes, compressed)}"
        f"{''.join(_of_experts(name, topologies[name].sizes) for name in experts_of(topologies))}{hint}"
        f"{_of_outer(outer_settings(engine))}"
        f"{defaults}",
        ranks=[0],
        level=logging.INFO if chosen else logging.WARNING,
    )


def _meaning(strategy: Strategy, sizes: GroupSizes, compressed: bool) -> str:
    """Return what a strategy comes down to where there is one group, or groups are one rank; else nothing."""
    n, m = sizes.ranks, sizes.group_size
    if 1 < m < n:
        return ""
    groups = "one group" if m == n else "groups of one rank"
    size = f"({SECTION}.{GROUP_SIZE} is {m})"
    name = strategy.name.replace(Placement.I.name, (Placement.G if m == n else Placement.N).name)
    plain = {"NNN": "DDP", "NNG": "ZeRO-1", "NGG": "ZeRO-2", "GGG": "ZeRO-3"}.get(name, name)
    nothing = ", and nothing crosses between groups that could be compressed" if compressed and m == n else ""
    comes_down_to = f", so {strategy.name} is {plain} here" if plain != strategy.name else ""
    return f": {groups}{comes_down_to}{nothing} {size}"


def _of_experts(name: str, sizes: GroupSizes) -> str:
    """Return what to say of the groups of a family of experts."""
    small = ", so I is N for them" if sizes.group_size == 1 else ""
    return f"; experts of {name} over {sizes.ranks} in {sizes.groups} group(s) of {sizes.group_size}{small}"


def _of_outer(settings: OuterSettings | None) -> str:
    """Return what to say of an outer optimizer."""
    if settings is None:
        return ""
    given = ", ".join(f"{name} {value}" for name, value in settings.as_dict().items() if name != "steps")
    return f"; groups train apart, with an outer step every {settings.steps} steps ({given})"


def warn_if_too_large(strategy: Strategy, topologies: Topologies, engine: Engine) -> None:
    """Warn on rank 0 if the model states of a rank exceed its device's memory by the formula."""
    available = get_accelerator().total_memory()
    if get_accelerator().device_name() == "cpu":
        available /= ranks_per_node() or 1
    topology = topologies[DENSE]
    of_families = {
        name: [param for param in engine.module.parameters() if family_of(param) == name] for name in topologies
    }
    parts = [(topologies[name].sizes, on_device(engine, some)) for name, some in of_families.items()]

    def total(row: Strategy) -> float:
        return sum(row.memory(sizes, held).total for sizes, held in parts)

    needed = total(strategy)
    if needed <= available:
        return
    fits = [row.name for row in STRATEGIES.values() if total(row) <= available]
    p, g, os = (
        sum(getattr(held, part) for _, held in parts) / 1e9 for part in ("parameters", "gradients", "optimizer")
    )
    log_dist(
        f"deepspeed_ext: {SECTION}.{STRATEGY} {strategy.name} needs {needed / 1e9:.3g} GB of model states on each "
        f"rank, which has {available / 1e9:.3g} GB (the model's parameters {p:.3g} GB, gradients {g:.3g} GB and "
        f"optimizer states {os:.3g} GB, over {topology.sizes.ranks} ranks in groups of "
        f"{topology.sizes.group_size}). Strategies that fit: {', '.join(fits) or 'none'}.",
        ranks=[0],
        level=logging.WARNING,
    )
