# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Families of parameters, each with data-parallel ranks of its own.

Note [Families]
    A *dense* parameter is held by all data-parallel ranks. An expert of expert parallelism is held by the ranks that
    have the same experts, DeepSpeed's expert-data-parallel group: with an expert-parallel size of ep these are every
    ep-th rank. Parameters with one set of such ranks are a family: dense ones, and the experts of one
    expert-parallel size. A family has its own topology, hops and queues; a strategy means the same for each. Its
    groups are what it has of the dense family's: where a group of 8 ranks has 8 / ep of a family, these are a group,
    and with one of them I means N for this family. All ranks have all families, and start what each needs in one
    order, dense parameters first.

    Means are taken over the dense ranks whatever the family, for each of them has had tokens for each expert.
    A flat buffer, a sub-group and a bucket on the wire are of one family.

Note [Folded experts]
    AutoEP can fold experts into tensor-parallel ranks, which see the same tokens: each of these sends its share of
    them to experts, on any tensor-parallel rank, and all of them put the results together again. The backward of that
    gives experts and routers gradients that are tensor-parallel ranks times too large, the router's from a share of
    the tokens each. DeepSpeed's ``reduce_autoep_folding_gradient`` says what of each parameter is to be done: a mean
    over the tensor-parallel ranks, or, of experts, a division. It is done to each gradient before it is packed or
    kept, which is the one place where strategies differ from DeepSpeed's stages: not at the accumulation boundary,
    where the engine would do it at stage 1, for there gradients may be in slices already.

    With an expert-parallel size that is a multiple of the tensor-parallel one, the ranks with the same experts have
    one tensor-parallel number, so they are data-parallel ranks of each other as everywhere. Other experts of the same
    layer are on other tensor-parallel ranks: a norm adds those of all of them, while of dense parameters the first
    one counts what all have. DeepSpeed's stages 1 and 2 count experts of the first one alone; its stage 3 counts all.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import nn

from deepspeed_ext.comm.backends import MakeGather, MakeReduce, make_reduce
from deepspeed_ext.comm.hops import ErrorState, GatherHop, JointErrorState
from deepspeed_ext.comm.process_groups import Topology, get_subtopology
from deepspeed_ext.comm.redistribution import GradientRedistribution, ParameterRedistribution
from deepspeed_ext.deepspeed_types import Engine

DENSE = "dense"
Topologies = Mapping[str, Topology]  # of all families by name, the dense one's first


@dataclass(frozen=True)
class Family:
    """Parameters with the same data-parallel ranks, and how they travel between these. See Note [Families].

    Attributes:
        name: ``dense``, or that of DeepSpeed's group of experts, ``ep_size_2`` for one.
        topology: the process groups of its ranks.
        gather: of its parameters.
        reduce: of its gradients; perhaps over other process groups of the same ranks.
    """

    name: str
    topology: Topology
    gather: ParameterRedistribution
    reduce: GradientRedistribution


Families = Mapping[str, Family]  # all, by name, the dense one first


def family_of(param: nn.Parameter) -> str:
    """Return the name of a parameter's family: ``dense``, or that of DeepSpeed's group of its experts."""
    return str(getattr(param, "group_name")) if is_moe_param(param) else DENSE  # noqa: B009 # DeepSpeed sets it


def experts_of(families: Iterable[str]) -> list[str]:
    """Return the names of families of experts, of those of all."""
    return [name for name in families if name != DENSE]


def name_in_all(param: nn.Parameter, name: str) -> str:
    """Return a name of a parameter that no other one has on any rank: experts have one name on several ranks."""
    if not is_moe_param(param):
        return name
    return f"{name} (expert-parallel rank {groups._get_expert_parallel_rank(family_of(param))})"


def error_state_of(families: Families, family_of_buffer: Callable[[int], str]) -> ErrorState:
    """Return the errors that reductions between groups keep, of all families.

    Args:
        families: all of an optimizer.
        family_of_buffer: returns the family of a flat buffer, by the number that hops are given.
    """
    several = len(families) > 1

    def place_of(buffer: int) -> tuple[str, ...]:
        return ("families", family_of_buffer(buffer)) if several else ()

    states = {
        (("families", name) if several else ()) + place: state
        for name, family in families.items()
        for place, state in family.reduce.inter.error_states().items()
    }
    return states[()] if states.keys() == {()} else JointErrorState(states, place_of)


def topologies_of(engine: Engine, dense: Topology, alone: bool) -> Topologies:
    """Return the topologies of the families of an engine's model.

    Collective over all ranks.

    Args:
        dense: the topology of the data-parallel group.
        alone: whether groups of one rank are needed too; see ``get_topology``.

    Raises:
        ValueError: on all ranks, if the ranks with the same experts are spread unevenly over groups.
    """
    used = {family_of(param) for param in engine.module.parameters() if engine.has_moe_layers} - {DENSE}
    ranks = {name: engine.expert_data_parallel_group[name] for name in sorted(used)}
    return {DENSE: dense, **{name: get_subtopology(group, dense, alone) for name, group in ranks.items()}}


def families_of(
    topologies: Topologies,
    reductions: Topologies,
    gather: MakeGather = GatherHop,
    reduce: MakeReduce = make_reduce,
    reduce_scatter: bool = True,
) -> dict[str, Family]:
    """Return the families with their hops. Inside a group links are fast, and everything is sent as it is.

    Args:
        topologies: of all families.
        reductions: the same, or other process groups of the same ranks: those over which gradients travel.
        gather: makes the hops of parameters between groups.
        reduce: makes the hops of gradients between groups.
        reduce_scatter: DeepSpeed's key of that name.
    """
    found = {}
    for name, topology in topologies.items():
        over, prefix = reductions[name], "" if name == DENSE else f"{name}_"  # in records and traces
        intra, inter = f"{prefix}intra", f"{prefix}inter"
        found[name] = Family(
            name,
            topology,
            ParameterRedistribution(GatherHop(topology.intra, intra), gather(topology.inter, inter)),
            GradientRedistribution(
                make_reduce(over.intra, intra, reduce_scatter), reduce(over.inter, inter, reduce_scatter)
            ),
        )
    return found
