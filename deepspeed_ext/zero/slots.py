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

    def gradient_reshard(self, topology: Topology, reduce_scatter: bool = True) -> GradientReshard:
        """Make the reductions; ``reduce_scatter`` is DeepSpeed's key of that name."""
        return GradientReshard(
            make_reduce(topology.intra, "intra", reduce_scatter), self.reduce(topology.inter, "inter", reduce_scatter)
        )

    def parameter_reshard(self, topology: Topology) -> ParameterReshard:
        """Make the gathers."""
        return ParameterReshard(GatherHop(topology.intra, "intra"), self.gather(topology.inter, "inter"))
