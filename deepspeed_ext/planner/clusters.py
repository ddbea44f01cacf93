# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A cluster, as a file describes it. Pure."""

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import GroupSizes

_MICRO, _GIGA = 1e-6, 1e9
_MAY_BE_ZERO = ("latency_us",)
_COUNTS = ("nodes", "ranks_per_node")


@dataclass(frozen=True)
class Cluster:
    """Nodes of the same kind, and what joins them.

    Attributes:
        ranks_per_node: GPUs of a node.
        intra_gbps: Gbit/s that a rank receives from others of its node.
        inter_gbps: Gbit/s that a node receives from others; its ranks share it.
        nodes: None where the file says nothing of it.
        latency_us: microseconds of one step of a ring between nodes; a collective over k nodes takes k - 1 of them.
        memory_gb: 10^9 bytes of a rank for model states; None for no limit.
        memory_gbps: 10^9 bytes/s of a rank's memory, which an optimizer step is bound by; None to count none for it.
        tflops: 10^12 floating-point operations/s that a rank reaches in training; None if unknown.
    """

    ranks_per_node: int
    intra_gbps: float
    inter_gbps: float
    nodes: int | None = None
    latency_us: float = 0.0
    memory_gb: float | None = None
    memory_gbps: float | None = None
    tflops: float | None = None

    def rates(self, sizes: GroupSizes) -> Rates:
        """Return the rates of the hops of groups of consecutive ranks."""
        steps = max(1, sizes.groups - 1)
        memory = float("inf") if self.memory_gbps is None else self.memory_gbps * _GIGA
        latency = self.latency_us * _MICRO * steps
        return Rates.of_links(sizes, self.ranks_per_node, self.intra_gbps, self.inter_gbps, latency, memory)

    @property
    def budget(self) -> float | None:
        """Bytes of a rank for model states."""
        return None if self.memory_gb is None else self.memory_gb * _GIGA


def read_cluster(path: Path) -> Cluster:
    """Return the cluster that a JSON file describes.

    Raises:
        ValueError: it cannot be read, lacks a key, has another one, or a value that is no positive number.
    """
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from error
    known = {one.name: one for one in fields(Cluster)}
    required = ("ranks_per_node", "intra_gbps", "inter_gbps")
    if not isinstance(given, dict):
        raise ValueError(f"{path} must have one object with the keys {', '.join(known)}, got {given!r}.")
    if unknown := sorted(set(given) - set(known)):
        raise ValueError(f"{path} has the unknown key(s) {', '.join(unknown)}; the keys are {', '.join(known)}.")
    if missing := [name for name in required if name not in given]:
        raise ValueError(f"{path} lacks the key(s) {', '.join(missing)}.")
    for name, value in given.items():
        _check(path, name, value)
    return Cluster(**given)


def _check(path: Path, name: str, value: Any) -> None:
    kind = int if name in _COUNTS else (int, float)
    what = "a whole number" if name in _COUNTS else "a number"
    if isinstance(value, bool) or not isinstance(value, kind):
        raise ValueError(f"{path}: {name} must be {what}, got {value!r}.")
    if not (value > 0 or (name in _MAY_BE_ZERO and value == 0)) or value == float("inf"):
        raise ValueError(f"{path}: {name} must be above 0, got {value!r}.")
