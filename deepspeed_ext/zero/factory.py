# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Build our optimizer in an engine instead of DeepSpeed's."""

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import deepspeed.runtime.engine
import deepspeed.runtime.superoffload.superoffload_stage3  # subclasses stage 3's class, so import it before the swap
import deepspeed.runtime.zero.stage3
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.collectives import is_pairwise
from deepspeed_ext.comm.hops import GatherHop, ReduceHop
from deepspeed_ext.comm.process_groups import Topology, get_topology
from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.config.keys import SECTION, STRATEGY, configured_value
from deepspeed_ext.config.settings import OuterSettings
from deepspeed_ext.config.unsupported import UNSUPPORTED, UNSUPPORTED_GROUPS, refuse_unsupported
from deepspeed_ext.deepspeed_types import Config, Engine, ZeroConfig
from deepspeed_ext.leaf.setup import choose_by_budget
from deepspeed_ext.overrides import bypassed_methods, replace_attributes
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.announcement import log_strategy, warn_if_too_large
from deepspeed_ext.zero.context import Context
from deepspeed_ext.zero.families import (
    DENSE,
    GROUPED,
    Families,
    Topologies,
    allow_sharded_experts,
    families_of,
    topologies_of,
)
from deepspeed_ext.zero.filling import modules_that_fit
from deepspeed_ext.zero.module_placements import mark_placements
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer
from deepspeed_ext.zero.pace import measure_pace, use_decision
from deepspeed_ext.zero.sample_weights import add_weights, set_micro_batches
from deepspeed_ext.zero.sharded.coordinator import use_coordinator
from deepspeed_ext.zero.sharded.parameters import GatherSettings, ShardedParameters
from deepspeed_ext.zero.stage3 import Stage3Optimizer
from deepspeed_ext.zero.stage12 import Stage12Optimizer
from deepspeed_ext.zero.updates_in_flight import wait_for_replicated_parameters

# Methods of an engine that export weights.
_EXPORT_METHODS = ("save_16bit_model", "_zero3_consolidated_16bit_state_dict")


class Hops(Protocol):
    """Creates hops between groups."""

    def gather(self, group: ProcessGroup | None, name: str) -> GatherHop:
        """Create the hop of parameters over a process group; ``name`` is for records and traces."""

    def reduce(self, group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        """Create the hop of gradients over a process group; ``reduce_scatter`` is DeepSpeed's key of that name."""


class EngineHops(Hops, Protocol):
    """Creates the hops that an engine's configuration selects."""

    def reduce_intra(self, group: ProcessGroup | None, name: str, reduce_scatter: bool = True) -> ReduceHop:
        """Create the hop of gradients within a group; see ``reduce``."""

    def outer(self, bits: int) -> Hops:
        """Return a factory of the outer optimizer's hops, with this number of bits."""


@dataclass
class _Call:
    """Arguments that an engine passed to a class."""

    class_name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def _call_recorder(name: str) -> Callable[..., _Call]:
    """Return a function that replaces a class, and returns its arguments instead of an instance."""

    def record(*args: Any, **kwargs: Any) -> _Call:
        return _Call(name, args, kwargs)

    return record


def build_optimizer(
    configure: Callable[..., Any], engine: Engine, optimizer: object, *, strategy: Strategy, hops: EngineHops
) -> Any:
    """Run ``DeepSpeedEngine._configure_zero_optimizer`` with our classes instead of DeepSpeed's.

    Args:
        configure: DeepSpeed's method.
        engine, optimizer: its arguments.
        strategy: placements of model states.
        hops: creates the hops between groups.

    Raises:
        ValueError: the strategy does not support the model or the optimizer.
        RuntimeError: the engine did not look the class up under the expected name.
    """
    refuse_unsupported(UNSUPPORTED, strategy, engine, optimizer)
    _reject_patched_methods(strategy)
    wait_for_replicated_parameters()  # updates of an earlier engine, before the new one reads its parameters
    outer: OuterSettings | None = engine._config.zero_config.paro_outer_optimizer
    alone = strategy.os == Placement.N or outer is not None
    topology = get_topology(engine.seq_data_parallel_group, engine._config.zero_config.paro_group_size, alone=alone)
    refuse_unsupported(UNSUPPORTED_GROUPS, strategy, engine, topology)
    decision_inputs = use_decision(engine, topology)
    set_micro_batches(engine, topology)
    topologies = topologies_of(engine, topology, alone=alone)
    changed_defaults = use_overlap_defaults(engine._config, strategy)
    if strategy.p != Placement.N:
        patterns = engine._config.zero_config.paro_modules or {}
        if isinstance(patterns, str):  # "fill"
            patterns = modules_that_fit(engine, strategy, topologies)
        mark_placements(engine.module, patterns)
    log_strategy(strategy, topologies, engine, changed_defaults=changed_defaults, outer=outer)
    if strategy.p != Placement.N:
        choose_by_budget(engine._config.zero_config, engine.module)
    warn_if_too_large(strategy, topologies, engine)
    if outer is not None:
        topologies = {DENSE: topology.intra_topology()}
    call = _capture_call(configure, engine, optimizer, strategy)
    builders = {"DeepSpeedZeroOptimizer": _make_stage12, "DeepSpeedZeroOptimizer_Stage3": _make_stage3}
    result = builders.get(call.class_name, _make_inference)(
        call, strategy, topologies, hops, engine._config.zero_config
    )
    _adapt_engine(engine, result, topology, strategy)
    if isinstance(result, ParoOptimizer):
        add_weights(result.sample_weights, engine, topology)
        measure_pace(result, engine, decision_inputs)
    if outer is not None and isinstance(result, ParoOptimizer):
        add_outer_optimizer(result, outer, topology, hops.outer(outer.bits), engine)
    return result


def _capture_call(configure: Callable[..., Any], engine: Engine, optimizer: object, strategy: Strategy) -> _Call:
    """Return the arguments that the engine passes to its optimizer's class: some 35, which differ between releases.

    Raises:
        RuntimeError: the engine called another class.
    """
    engine_module = deepspeed.runtime.engine
    with contextlib.ExitStack() as stack:
        if strategy.p == Placement.N:  # in a pipeline the engine would disable overlap, with a warning
            stack.enter_context(replace_attributes(engine, zero_overlap_comm=lambda: False))
            record = _call_recorder("DeepSpeedZeroOptimizer")
            stack.enter_context(replace_attributes(engine_module, DeepSpeedZeroOptimizer=record))
        else:
            stack.enter_context(allow_sharded_experts(engine))
            stack.enter_context(
                replace_attributes(engine_module, DeepSpeedZeRoOffload=_call_recorder("DeepSpeedZeRoOffload"))
            )
            record = _call_recorder("DeepSpeedZeroOptimizer_Stage3")
            stack.enter_context(
                replace_attributes(deepspeed.runtime.zero.stage3, DeepSpeedZeroOptimizer_Stage3=record)
            )
        call = configure(engine, optimizer)
    if not isinstance(call, _Call):
        raise RuntimeError(
            f"expected the engine to create its optimizer for {strategy} by DeepSpeed's class name, got {type(call)}"
        )
    return call


def _reject_patched_methods(strategy: Strategy) -> None:
    """Reject third-party patches that would have no effect.

    Raises:
        ValueError: a patch has replaced a method of DeepSpeed's optimizer that ours overrides.
    """
    if methods := bypassed_methods(Stage12Optimizer if strategy.p == Placement.N else Stage3Optimizer):
        raise ValueError(
            f"{SECTION}.{STRATEGY} {strategy} overrides {methods[0]}, which other code has patched: its patch "
            f"would have no effect. Turn off that patch (in axolotl: lora_fp32_gradients), or remove "
            f"{SECTION}.{STRATEGY}."
        )


def add_outer_optimizer(
    optimizer: ParoOptimizer, settings: OuterSettings, topology: Topology, hops: Hops, engine: Engine
) -> None:
    """Add an outer optimizer to the optimizer of one group. Collective over all groups.

    Args:
        topology: process groups of all groups.
        hops: creates the outer optimizer's hops between groups.
    """
    # Separate process groups, so that transfers during inner steps do not delay others.
    between = get_topology(topology.world, topology.sizes.group_size, separate=True).inter
    outer = OuterOptimizer(
        optimizer.context,
        settings=settings,
        hops=(hops.reduce(between, "outer"), hops.gather(between, "outer")),
        shards=optimizer,
        report=_monitor_writer(engine) if engine.monitor.enabled else None,
    )
    optimizer.outer = outer
    optimizer.norms.set_skip_group(topology.inter)
    optimizer.gradient_terms.append(outer)
    for name in _EXPORT_METHODS:
        setattr(engine, name, _with_outer_weights(getattr(engine, name), outer))


def _monitor_writer(engine: Engine) -> Callable[[Mapping[str, float]], None]:
    """Return a function that writes an outer step's measures to the engine's monitor, on rank 0."""

    def report(measures: Mapping[str, float]) -> None:
        if engine.global_rank == 0:
            samples = engine.global_samples
            engine.monitor.write_events([(f"Train/Outer/{name}", value, samples) for name, value in measures.items()])

    return report


def _with_outer_weights(save: Callable[..., Any], outer: OuterOptimizer) -> Callable[..., Any]:
    """Wrap a method that saves a group's weights, so that it saves the outer weights."""

    @functools.wraps(save)
    def save_outer_weights(*args: Any, **kwargs: Any) -> Any:
        with outer.use_outer_weights():
            return save(*args, **kwargs)

    return save_outer_weights


def _topologies_of_reductions(strategy: Strategy, topologies: Topologies, config: ZeroConfig) -> Topologies:
    """Return the process groups of gradients. Collective over all ranks.

    If ranks may reduce at different times relative to gathers, gradients need separate process groups, because
    collectives of one group need one order.
    """
    unordered = config.overlap_comm and Placement.N not in (strategy.p, strategy.os) and strategy.g != Placement.G
    during_gathers = strategy.p == Placement.G or strategy.g == Placement.N
    if not (unordered and during_gathers) or is_pairwise(topologies[DENSE].world):
        return topologies
    return {name: get_topology(base.world, base.sizes.group_size, separate=True) for name, base in topologies.items()}


def _context(call: _Call, config: ZeroConfig, strategy: Strategy, families: Families) -> Context:
    """Return the shared constants. Without an optimizer there are no gradients, so their dtypes are not used."""
    accumulation = call.kwargs.get("gradient_accumulation_dtype", torch.float32)
    communication = call.kwargs.get("communication_data_type", torch.float32)
    return Context.from_config(
        config, strategy, families, accumulation_dtype=accumulation, communication_dtype=communication
    )


def _with_grouped(context: Context, config: ZeroConfig) -> Context:
    """Add the parameters that ``paro_modules`` shards inside groups, if any. Collective over all ranks."""
    patterns = config.paro_modules
    if not isinstance(patterns, dict) or Placement.I.name not in patterns.values():  # the same on all ranks
        return context
    dense = context.families[DENSE]
    between = dense.topology
    if not is_pairwise(between.world):  # or each gather G -> N would wait for the updated rows of all these modules
        between = get_topology(between.world, between.sizes.group_size, separate=True)
    gather = ParameterRedistribution(dense.gather.intra, GatherHop(between.inter, "inter"))
    return replace(context, grouped=replace(dense, name=GROUPED, gather=gather))


def _make_stage12(
    call: _Call, strategy: Strategy, topologies: Topologies, hops: EngineHops, config: ZeroConfig
) -> Stage12Optimizer:
    families = families_of(topologies, topologies, hops.gather, hops.reduce, hops.reduce_intra, config.reduce_scatter)
    arguments = call.kwargs | {"overlap_comm": config.overlap_comm}
    return Stage12Optimizer(*call.args, **arguments, context=_context(call, config, strategy, families))


def _make_stage3(
    call: _Call, strategy: Strategy, topologies: Topologies, hops: EngineHops, config: ZeroConfig
) -> Stage3Optimizer:
    reductions = _topologies_of_reductions(strategy, topologies, config)
    families = families_of(topologies, reductions, hops.gather, hops.reduce, hops.reduce_intra, config.reduce_scatter)
    context = _with_grouped(_context(call, config, strategy, families), config)
    return Stage3Optimizer(*call.args, **call.kwargs, context=context, gathering=GatherSettings.from_config(config))


def _make_inference(
    call: _Call, strategy: Strategy, topologies: Topologies, hops: EngineHops, config: ZeroConfig
) -> DeepSpeedZeRoOffload:
    """Shard and gather parameters of an engine without an optimizer."""
    with use_coordinator(topologies[DENSE].shard_group(strategy.p)):
        offload = DeepSpeedZeRoOffload(*call.args, **call.kwargs)
    context = _context(call, config, strategy, families_of(topologies, topologies, hops.gather))
    context = _with_grouped(context, config)
    parameters = ShardedParameters(
        context, module=call.args[0], offload=offload, settings=GatherSettings.from_config(config)
    )
    parameters.whole.gather()
    parameters.whole.wait()
    return offload


def _adapt_engine(engine: Engine, optimizer: object, topology: Topology, strategy: Strategy) -> None:
    """Disable engine code that our optimizer replaces, and select the ranks that write files."""

    def is_first_weights_partition_group() -> bool:
        if isinstance(optimizer, Stage3Optimizer) and optimizer.writers.is_writer is not None:
            return bool(optimizer.writers.is_writer)
        return topology.rank < topology.sizes.group_size  # every group holds all states

    if strategy.p != Placement.N and strategy.os == Placement.I:
        engine.is_first_weights_partition_group = is_first_weights_partition_group
    engine._reduce_autoep_folding_tp_replicated_gradients = _skip_reduction
    if isinstance(optimizer, Stage12Optimizer):
        optimizer.updates.install_hooks(engine.module)
        if optimizer.updates.gathers.overlap_updates:  # HF's Trainer calls it between a step and the next forward
            engine.zero_grad = optimizer.updates.gathers.without_waiting(engine.zero_grad)


def _skip_reduction() -> None:
    """Replace the engine's correction of folded experts' gradients, which our optimizers have already corrected."""


def use_overlap_defaults(config: Config, strategy: Strategy) -> list[str]:
    """Change DeepSpeed's defaults that prevent overlap on devices with streams; keep values set by the user.

    By default DeepSpeed's throughput timer synchronizes host and device, including communication, at the end of each
    step and at the beginning of each forward (``utils/timer.py``), and stages 1 and 2 reduce gradients on the stream
    that computes them.

    Returns:
        Changes, in words.
    """
    changed_defaults: list[str] = []
    if get_accelerator().is_synchronized_device():
        return changed_defaults
    if "synchronized" not in config.timers_config.model_fields_set:
        config.timers_config.synchronized = False
        changed_defaults.append("timers.throughput.synchronized false")
    zero = config.zero_config
    # DeepSpeed rejects overlap_comm at stage 1 if the caller manages accumulation.
    overlap_allowed = strategy.stage > 1 or config.managed_gradient_accumulation
    if not zero.overlap_comm and configured_value(config._param_dict, "overlap_comm") is None and overlap_allowed:
        zero.overlap_comm = True
        changed_defaults.append(f"{SECTION}.overlap_comm true")
    return changed_defaults
