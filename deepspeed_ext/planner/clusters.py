# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A cluster that a file describes. Pure."""

import json
from pathlib import Path
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from deepspeed_ext.planner.rates import GIGA, Rates, bytes_per_second
from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.values import EXACTLY, made

_MICRO = 1e-6
_COUNT = Field(gt=0, description="a whole number above 0")
_AMOUNT = Field(gt=0, allow_inf_nan=False, description="a finite number above 0")
_LATENCY = Field(ge=0, allow_inf_nan=False, description="a finite number of at least 0")


@dataclass(frozen=True, config=EXACTLY)
class Cluster:
    """Nodes of the same kind, and the links between them.

    Attributes:
        ranks_per_node: GPUs of a node.
        intra_gbps: Gbit/s that a rank receives from others of its node.
        inter_gbps: Gbit/s that a node receives from others; its ranks share it.
        nodes: number of nodes; None if the file does not say.
        latency_us: microseconds of one step of a ring between nodes; a collective over k nodes takes k - 1 steps.
        memory_gb: 10^9 bytes of a rank for model states; None for no limit.
        memory_gbps: 10^9 bytes/s of a rank's memory, which bounds an optimizer step; None: the step takes no time.
        host_gbps: 10^9 bytes/s that a rank copies from host memory to its device, and back, while all of its node do;
            None: these copies take no time.
        tflops: 10^12 floating-point operations/s that a rank reaches in training; None if unknown.
    """

    ranks_per_node: Annotated[int, _COUNT]
    intra_gbps: Annotated[float, _AMOUNT]
    inter_gbps: Annotated[float, _AMOUNT]
    nodes: Annotated[int | None, _COUNT] = None
    latency_us: Annotated[float, _LATENCY] = 0.0
    memory_gb: Annotated[float | None, _AMOUNT] = None
    memory_gbps: Annotated[float | None, _AMOUNT] = None
    host_gbps: Annotated[float | None, _AMOUNT] = None
    tflops: Annotated[float | None, _AMOUNT] = None

    def rates(self, sizes: GroupSizes) -> Rates:
        """Return the rates of the hops of groups of consecutive ranks."""
        steps = max(1, sizes.groups - 1)
        memory, host = map(bytes_per_second, (self.memory_gbps, self.host_gbps))
        latency = self.latency_us * _MICRO * steps
        return Rates.of_links(sizes, self.ranks_per_node, self.intra_gbps, self.inter_gbps, latency, memory, host)

    @property
    def budget(self) -> float | None:
        """Return the bytes of a rank for model states."""
        return None if self.memory_gb is None else self.memory_gb * GIGA


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a JSON file describes.

    Raises:
        ValueError: it cannot be read; see ``made``.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from error
    return made(Cluster, given, str(path), "{where}: {key}")
