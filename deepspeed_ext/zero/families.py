# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Families of parameters, each with its own data-parallel ranks.

Note [Families]
    A *dense* parameter is on all data-parallel ranks. An expert of expert parallelism is on the ranks that have the
    same experts, DeepSpeed's expert-data-parallel group: with an expert-parallel size of ep these are every ep-th
    rank. Parameters with one set of such ranks are a family: dense ones, and the experts of one expert-parallel size.
    A family has its own topology, hops, and queues; a strategy means the same for each. Its groups are subsets of the
    dense family's: if 8 / ep ranks of a group of 8 have the same experts, these ranks are a group, and if this is one
    rank, I means N for this family. All ranks have all families, and start their operations in one order, dense
    parameters first.

    Gradients of every family are averaged over the dense ranks, because each of them has had tokens for each expert.
    A flat buffer, a sub-group, and a bucket in a message belong to one family.

Note [Folded experts]
    AutoEP can fold experts into tensor-parallel ranks, which see the same tokens. Each of these ranks sends its share
    of the tokens to experts, on any tensor-parallel rank, and all of them combine the results. In the backward,
    gradients of experts and routers are too large by the number of tensor-parallel ranks, and a router's is from the
    rank's share of the tokens. DeepSpeed's ``reduce_autoep_folding_gradient`` corrects a parameter: by a mean over the
    tensor-parallel ranks, or, for experts, by a division. Each gradient is corrected before it is packed or stored.
    This is the one place in which strategies differ from DeepSpeed's stages: at the accumulation boundary, where the
    engine corrects gradients at stage 1, gradients may already be in slices.

    If the expert-parallel size is a multiple of the tensor-parallel size, the ranks with the same experts have one
    tensor-parallel number, so they are data-parallel ranks of each other as usual. Other experts of the same layer are
    on other tensor-parallel ranks: a norm includes the experts of all of them, but dense parameters only of the first
    one. DeepSpeed's stages 1 and 2 count only the first one's experts; its stage 3 counts all.

Note [MoE layers with sharded parameters]
    DeepSpeed's stage 3 shards AutoEP's experts, each over the ranks that have it, and rejects experts of its own
    ``MoE`` layers (``DeepSpeedEngine._validate_zero3_moe_compatibility``). It needs the same data for both: whether a
    parameter belongs to an expert, and to which group of ranks. It reads them from attributes, which AutoEP sets.

    Experts of these layers can be sharded. In each forward a layer calls all experts of the rank, in one order and
    with equally many rows, with or without tokens, so ranks gather the same parameters in the same order. Its gate
    reads the weight of a module that it does not call, so the weight is registered (``register_external_parameter``).
    Otherwise DeepSpeed detects it in the first forward, after recording which parameters the gate uses, and considers
    the next forward a changed model.

    A checkpoint has weights of experts in the shards, as AutoEP's. DeepSpeed also writes its file for each expert, but
    from parameters that are not gathered, so the file is empty.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.partition_parameters import register_external_parameter
from deepspeed.utils import groups
from torch import nn

from deepspeed_ext.comm.backends import MakeGather, MakeReduce, make_reduce
from deepspeed_ext.comm.hops import CombinedErrorState, ErrorState, GatherHop
from deepspeed_ext.comm.process_groups import Topology, get_subtopology
from deepspeed_ext.comm.redistribution import GradientRedistribution, ParameterRedistribution
from deepspeed_ext.config.unsupported import deepspeed_moe_layers
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.model_bytes import states_on_device
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.strategy import GroupSizes, ModelStates

DENSE = "dense"
GROUPED = "grouped"  # the dense parameters with p = I next to p = G
EXPERTS = "autoep_expert"  # DeepSpeed's name of the placement of experts
Topologies = Mapping[str, Topology]  # topologies of all families by name, the dense one first


@dataclass(frozen=True)
class Family:
    """Parameters with the same data-parallel ranks, and their communication. See Note [Families].

    Attributes:
        name: ``dense``, ``grouped``, or the name of DeepSpeed's group of experts, such as ``ep_size_2``.
        topology: the process groups of its ranks.
        gather: redistribution of its parameters.
        reduce: redistribution of its gradients, possibly over other process groups of the same ranks.
    """

    name: str
    topology: Topology
    gather: ParameterRedistribution
    reduce: GradientRedistribution


Families = Mapping[str, Family]  # all families by name, the dense one first


def family_of(param: nn.Parameter) -> str:
    """Return the name of a parameter's family: ``dense``, or the name of DeepSpeed's group of its experts."""
    return str(getattr(param, "group_name")) if is_moe_param(param) else DENSE  # noqa: B009 # DeepSpeed sets it


def experts_of(families: Iterable[str]) -> list[str]:
    """Return the names that belong to families of experts."""
    return [name for name in families if name != DENSE]


def name_in_all(param: nn.Parameter, name: str) -> str:
    """Return a parameter's name, unique over all ranks: different experts have one name on several ranks."""
    if not is_moe_param(param):
        return name
    return f"{name} (expert-parallel rank {groups._get_expert_parallel_rank(family_of(param))})"


def error_state_of(families: Families, family_of_buffer: Callable[[int], str]) -> ErrorState:
    """Return the error feedback of reductions between groups, of all families.

    Args:
        families: all families of an optimizer.
        family_of_buffer: returns the family of a flat buffer, by the number that hops use.
    """
    has_experts = len(families) > 1

    def key_path_of(buffer: int) -> tuple[str, ...]:
        return ("families", family_of_buffer(buffer)) if has_experts else ()

    states = {
        (("families", name) if has_experts else ()) + key_path: state
        for name, family in families.items()
        for key_path, state in family.reduce.inter.error_states().items()
    }
    return states[()] if states.keys() == {()} else CombinedErrorState(states, key_path_of)


def topologies_of(engine: Engine, dense: Topology, alone: bool) -> Topologies:
    """Return the topologies of the families of an engine's model.

    Collective over all ranks.

    Args:
        dense: the topology of the data-parallel group.
        alone: whether groups of one rank are also needed; see ``get_topology``.

    Raises:
        ValueError: on all ranks, if the ranks with the same experts are spread unevenly over groups.
    """
    used = {family_of(param) for param in engine.module.parameters() if engine.has_moe_layers} - {DENSE}
    # Sorted: topologies must be created in the same order on all ranks.
    ranks = {name: engine.expert_data_parallel_group[name] for name in sorted(used)}
    return {DENSE: dense, **{name: get_subtopology(group, dense, alone) for name, group in ranks.items()}}


def states_of_families(topologies: Topologies, engine: Engine) -> list[tuple[GroupSizes, ModelStates]]:
    """Return the group sizes of each family, and the states that an engine's device would have without sharding."""
    params_of: dict[str, list[nn.Parameter]] = {name: [] for name in topologies}
    for param in engine.module.parameters():
        params_of[family_of(param)].append(param)
    return [(topologies[name].sizes, states_on_device(engine, params)) for name, params in params_of.items()]


def families_of(
    topologies: Topologies,
    reductions: Topologies,
    gather: MakeGather = GatherHop,
    reduce: MakeReduce = make_reduce,
    reduce_intra: MakeReduce = make_reduce,
    reduce_scatter: bool = True,
) -> dict[str, Family]:
    """Return the families with their hops. Inside a group links are fast, so nothing is compressed.

    Args:
        topologies: topologies of all families.
        reductions: topologies of gradients: the same, or other process groups of the same ranks.
        gather: creates the hops of parameters between groups.
        reduce: creates the hops of gradients between groups.
        reduce_intra: creates the hops of gradients within groups.
        reduce_scatter: DeepSpeed's key of that name.
    """
    families = {}
    for name, topology in topologies.items():
        reduction_topology, prefix = reductions[name], "" if name == DENSE else f"{name}_"  # in records and traces
        intra, inter = f"{prefix}intra", f"{prefix}inter"
        families[name] = Family(
            name,
            topology,
            ParameterRedistribution(GatherHop(topology.intra, intra), gather(topology.inter, inter)),
            GradientRedistribution(
                reduce_intra(reduction_topology.intra, intra, reduce_scatter),
                reduce(reduction_topology.inter, inter, reduce_scatter),
            ),
        )
    return families


@contextmanager
def allow_sharded_experts(engine: Engine) -> Iterator[None]:
    """Mark experts of ``MoE`` layers as shardable while the engine creates its optimizer of stage 3."""
    layers = deepspeed_moe_layers(engine.module)
    if not layers:
        yield
        return
    for layer in layers.values():
        gate = layer.deepspeed_moe.gate
        register_external_parameter(gate, gate.wg.weight)
    for param in engine.module.parameters():
        if is_moe_param(param):
            expert: Any = param
            expert.ds_zero_placement_family = EXPERTS
            expert.ds_zero_partition_group_name = expert.group_name
    with replace_attributes(engine, _validate_zero3_moe_compatibility=lambda: None):
        yield
