# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The two slots for hops between groups: one for gradients, one for parameters."""

from dataclasses import dataclass

from deepspeed_ext.comm.backends import MakeGather, MakeReduce, make_reduce
from deepspeed_ext.comm.hops import GatherHop
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.comm.reshard import GradientReshard, ParameterReshard


@dataclass(frozen=True)
class Slots:
    """What makes the hops between groups; inside a group links are fast, and what arrives is sent on as it is.

    Attributes:
        reduce: makes the hop of gradients.
        gather: makes the hop of parameters.
    """

    reduce: MakeReduce = make_reduce
    gather: MakeGather = GatherHop

    def gradient_reshard(self, topology: Topology, reduce_scatter: bool = True, prefix: str = "") -> GradientReshard:
        """Make the reductions.

        Args:
            topology: process groups of a family's ranks.
            reduce_scatter: DeepSpeed's key of that name.
            prefix: of the names of hops, in records and traces.
        """
        return GradientReshard(
            make_reduce(topology.intra, f"{prefix}intra", reduce_scatter),
            self.reduce(topology.inter, f"{prefix}inter", reduce_scatter),
        )

    def parameter_reshard(self, topology: Topology, prefix: str = "") -> ParameterReshard:
        """Make the gathers; arguments as above."""
        return ParameterReshard(
            GatherHop(topology.intra, f"{prefix}intra"), self.gather(topology.inter, f"{prefix}inter")
        )
