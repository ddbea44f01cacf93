# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Families of parameters, each with data-parallel ranks of its own.

Note [Families]
    A *dense* parameter is held by all data-parallel ranks. An expert of expert parallelism is held by the ranks that
    have the same experts, DeepSpeed's expert-data-parallel group: with an expert-parallel size of ep these are every
    ep-th rank. Parameters with one set of such ranks are a family: dense ones, and the experts of one
    expert-parallel size. A family has its own topology, hops and schedules; a strategy means the same for each. Its
    groups are what it has of the dense family's: where a group of 8 ranks has 8 / ep of a family, these are a group,
    and with one of them I means N for this family.

    Means are taken over the dense ranks whatever the family, for each of them has had tokens for each expert.
    A flat buffer, a sub-group and a bucket on the wire are of one family.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from deepspeed.moe.utils import is_moe_param
from deepspeed.utils import groups
from torch import nn

from deepspeed_ext.comm.process_groups import Topology, get_subtopology
from deepspeed_ext.deepspeed_types import Engine

DENSE = "dense"
_Reshard = TypeVar("_Reshard")


def family_of(param: nn.Parameter) -> str:
    """Return the name of a parameter's family: ``dense``, or that of DeepSpeed's group of its experts."""
    return str(getattr(param, "group_name")) if is_moe_param(param) else DENSE  # noqa: B009 # DeepSpeed sets it


def name_in_all(param: nn.Parameter, name: str) -> str:
    """Return a name of a parameter that no other one has on any rank: experts have one name on several ranks."""
    if not is_moe_param(param):
        return name
    return f"{name} (expert-parallel rank {groups._get_expert_parallel_rank(family_of(param))})"


@dataclass(frozen=True)
class Families:
    """The topologies of all families. See Note [Families].

    Attributes:
        dense: of all data-parallel ranks.
        experts: of experts, by the name of DeepSpeed's group, ``ep_size_2`` for one.
    """

    dense: Topology
    experts: Mapping[str, Topology] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """All names, the dense family's first."""
        return [DENSE, *self.experts]

    def reshards(self, make: Callable[[Topology, str], _Reshard]) -> dict[str, _Reshard]:
        """Make one reshard for each family.

        Args:
            make: from a topology, and a prefix of the names of hops.
        """
        return {name: make(self.topology(name), "" if name == DENSE else f"{name}_") for name in self.names}

    def topology(self, name: str) -> Topology:
        """Return the topology of the family of this name."""
        return self.dense if name == DENSE else self.experts[name]


def families_of(engine: Engine, dense: Topology, alone: bool) -> Families:
    """Return the families of an engine's model.

    Collective over all ranks.

    Args:
        dense: the topology of the data-parallel group.
        alone: whether groups of one rank are needed too; see ``get_topology``.

    Raises:
        ValueError: on all ranks, if the ranks with the same experts are spread unevenly over groups.
    """
    used = {family_of(param) for param in engine.module.parameters() if engine.has_moe_layers} - {DENSE}
    ranks = {name: engine.expert_data_parallel_group[name] for name in sorted(used)}
    return Families(dense, {name: get_subtopology(group, dense, alone) for name, group in ranks.items()})
