# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts a recorded training under other links, nodes, strategies and bits. Pure.

Note [Prediction from a record]
    A report contains the planner's inputs: the model, the probed links, and, for a step of T seconds, C seconds of
    compute, U of the update, and O that are neither of these nor exposed (its part "other"). A step is predicted as

        P + H,  P = closed form (compute C/s of each of s micro-batches; update U, scaled by the states of a rank)

    H is unexplained time of the host, the same for all strategies: O, but at most T - P for the recorded cluster. On a
    host, the cores that compute also run hops inside groups. These are part of P, and of O, too. Any other difference
    between P and T is printed, and nothing is scaled by it.

    *Links.* A probed rate B of the hop between groups is a node's link of B times its flows (Note [Rates]), which
    gives rates on other clusters. Latencies scale as those of the backend (Note [Latency of a hop]).

    *Plain stages.* Their collectives are over all n ranks. In a flat ring X (n-1)/n bytes enter each node. A backend
    may send more: gloo's reduce-scatter sends twice that. So these collectives are probed, too. If a rank receives F
    bytes/s in one, a ring enters a node u = (the link's rate)/F times, and takes u X (n-1)/n / link on other links.

    Left out: copies of strategies other than the recorded one, and LoCo's kernels. If a flat collective is limited by
    the host rather than by the link, u is too large for slower links.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import TypeAdapter

from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import PLAIN, UPDATE_TRAFFIC, Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import BITS, GIGA, HopRates, Latencies, Rate, Rates, hop_latency
from deepspeed_ext.strategy import STRATEGIES, GroupSizes

KEY = "planner"  # key of a report


@dataclass(frozen=True)
class FlatRates:
    """Rates of the collectives of plain stages, over all ranks, in bytes that a rank receives.

    Attributes:
        gather: all-gather.
        scatter: reduction of ZeRO-3.
        reduce: reduction of ZeRO-1 and ZeRO-2.
    """

    gather: Rate
    scatter: Rate
    reduce: Rate


@dataclass(frozen=True)
class Cluster:
    """The cluster of a prediction.

    Attributes:
        sizes: ranks and groups.
        ranks_per_node: number of ranks on each node.
        intra_gbps, inter_gbps: Gbit/s, as in ``Rates.of_links``; None for the recorded value.
        latency: seconds of a message between groups; None for the recorded value.
    """

    sizes: GroupSizes
    ranks_per_node: int
    intra_gbps: float | None = None
    inter_gbps: float | None = None
    latency: float | None = None

    @property
    def nodes(self) -> int:
        """Return the number of nodes."""
        return -(-self.sizes.ranks // self.ranks_per_node)

    @property
    def flows(self) -> int:
        """Return the number of hops between groups that share a node's link."""
        return min(self.sizes.group_size, self.ranks_per_node)


@dataclass(frozen=True)
class PlannerInput:
    """The part of a report that only the planner reads.

    Attributes:
        strategy: the three letters of the running strategy; for a plain stage, its key in ``PLAIN``.
        plain: whether it is a plain stage.
        sent: the compression.
        cluster: the recorded cluster.
        backend: "nccl" or "gloo".
        model: the model, with the recorded compute of a micro-batch.
        rates: probed rates of the hops.
        flat: probed rates of collectives over all ranks.
    """

    strategy: str
    plain: bool
    sent: Compression
    cluster: Cluster
    backend: str
    model: Model
    rates: Rates
    flat: FlatRates

    @property
    def name(self) -> str:
        """Return the running strategy or plain stage."""
        return PLAIN[self.strategy] if self.plain else self.strategy

    def as_dict(self) -> dict[str, Any]:
        """Return plain values, with "inf" for infinity, which JSON lacks."""
        values: dict[str, Any] = _infinity_as_text(TypeAdapter(PlannerInput).dump_python(self))
        return values


def _infinity_as_text(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _infinity_as_text(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_infinity_as_text(item) for item in value]
    return "inf" if value == inf else value


@dataclass(frozen=True)
class RecordedTraining:
    """A recorded training; see Note [Prediction from a record].

    Attributes:
        planner_input: the report's part for the planner.
        step: seconds of a step.
        update: seconds of the optimizer's step.
        other: seconds of a step that are neither compute, update, nor exposed.
    """

    planner_input: PlannerInput
    step: float
    update: float
    other: float

    @classmethod
    def from_file(cls, path: Path) -> "RecordedTraining":
        """Return the training of a ``report.json``.

        Raises:
            ValueError: it cannot be read, is no report, or lacks the planner's inputs.
        """
        try:
            return cls.from_report(json.loads(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ValueError(f"--from {path} cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise ValueError(f"--from {path}: {error}") from error

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> "RecordedTraining":
        """Return the training of a report.

        Raises:
            ValueError: it is no report, or lacks the planner's inputs.
        """
        try:
            seconds = {row["part"]: row["seconds"] for row in report["parts"]}
            step, update, other = median(report["steps"]["seconds"]), seconds["update"], seconds["other"]
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError("expected the report.json of paro_report, got something else.") from error
        if report.get(KEY) is None:
            raise ValueError(
                "the report has no inputs for the planner: it is from an earlier version, or was made with probe "
                "false, with an outer optimizer, of groups with different numbers of micro-batches, or of a pipeline. "
                "Record again, without these."
            )
        try:
            sent = Compression.parse(*(report[KEY]["sent"][name] for name in ("loco", "updates")))
            planner_input = TypeAdapter(PlannerInput).validate_python({**report[KEY], "sent": sent})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{KEY!r} in the report is from another version ({error}). Record again.") from error
        return cls(planner_input, step, update, other)

    @cached_property
    def predicted_seconds(self) -> float:
        """Return the predicted seconds of the recorded step, P + H."""
        return self._formula_seconds + self.unexplained_seconds

    @property
    def unexplained_seconds(self) -> float:
        """Return H."""
        return max(0.0, min(self.other, self.step - self._formula_seconds))

    @cached_property
    def _formula_seconds(self) -> float:
        planner_input = self.planner_input
        return self.predict(
            planner_input.name, planner_input.cluster, planner_input.model, planner_input.sent
        ).total_seconds

    def predict(self, name: str, cluster: Cluster, model: Model, sent: Compression = UNCOMPRESSED) -> Prediction:
        """Predict a strategy, or a plain stage; see Note [Prediction from a record].

        Args:
            name: three letters, or a plain stage.
            cluster: the cluster.
            model: the model to train.
            sent: the compression.

        Raises:
            ValueError: a necessary rate was neither recorded nor given.
        """
        rates = replace(self._rates(cluster), memory=self._memory)
        if name in STRATEGIES:
            return predict(STRATEGIES[name], cluster.sizes, model, rates, sent)
        letters = next(letters for letters, stage in PLAIN.items() if stage == name)
        flat, probed = self.planner_input.flat, self.planner_input.rates
        reduction = flat.reduce if letters in ("NNG", "NGG") else flat.scatter
        gather = self._flat_hops(flat.gather, probed.gather, rates.gather, cluster)
        reduce = self._flat_hops(reduction, probed.reduce, rates.reduce, cluster)
        return predict_plain_stage(letters, cluster.sizes, model, replace(rates, gather=gather, reduce=reduce))

    @property
    def _memory(self) -> float:
        """Return the memory bytes per second of the recorded update; infinite if it takes no time."""
        model, placement = self.planner_input.model, STRATEGIES[self.planner_input.strategy].os
        families = model.families(self.planner_input.cluster.sizes)
        nbytes = sum((part.held or part.states).optimizer / sizes.shards(placement) for sizes, part in families)
        return UPDATE_TRAFFIC * nbytes / self.update if nbytes and self.update > 0 else inf

    def _rates(self, cluster: Cluster) -> Rates:
        """Return the rates of hops within and between groups on a cluster."""
        rates = self.planner_input.rates
        if cluster == self.planner_input.cluster:
            return rates
        return replace(rates, gather=self._hops(rates.gather, cluster), reduce=self._hops(rates.reduce, cluster))

    def _hops(self, probed: HopRates, cluster: Cluster) -> HopRates:
        old, backend = self.planner_input.cluster, self.planner_input.backend
        if old.sizes.group_size > old.ranks_per_node and None in (cluster.intra_gbps, cluster.inter_gbps):
            raise ValueError("groups span nodes in the report: give both --intra-gbps and --inter-gbps.")
        intra = cluster.intra_gbps or probed.intra.bandwidth * BITS / GIGA
        # A probed rate is one rank's share of the node's link, which all flows of the node use at once.
        inter = cluster.inter_gbps or probed.inter.bandwidth * old.flows * BITS / GIGA
        members = {"--intra-gbps": (intra, cluster.sizes.group_size), "--inter-gbps": (inter, cluster.sizes.groups)}
        for flag, (rate, ranks) in members.items():
            if rate == inf and ranks > 1:
                raise ValueError(f"the report has no such link, because it has too few ranks: give {flag}.")
        before, after = (Latencies.for_groups(c.sizes, c.ranks_per_node, backend=backend) for c in (old, cluster))
        within = _scale_latency(probed.intra.latency, before.intra, after.intra)
        between = _scale_latency(probed.inter.latency, before.inter, after.inter)
        latencies = Latencies(within, between if cluster.latency is None else cluster.latency)
        return Rates.of_links(cluster.sizes, cluster.ranks_per_node, intra, inter, latencies).gather

    def _flat_hops(self, flat: Rate, probed: HopRates, hops: HopRates, cluster: Cluster) -> HopRates:
        """Return the rates of a collective over all ranks as two hops that run at once.

        Args:
            flat: probed rate of the collective.
            probed: probed rates of the hops.
            hops: rates of the hops on ``cluster``.
            cluster: the cluster.
        """
        old, n, k = self.planner_input.cluster, cluster.sizes.ranks, cluster.sizes.groups
        before, after = (
            hop_latency(c.sizes.ranks, c.nodes, backend=self.planner_input.backend) for c in (old, cluster)
        )
        latency = _scale_latency(flat.latency, before, after) if cluster.latency is None else cluster.latency
        # With one group, the collective has a single hop.
        if k == 1:
            share = 1.0
            if old.sizes.groups == 1 and probed.intra.bandwidth != inf:
                share = flat.bandwidth / probed.intra.bandwidth
            return HopRates(Rate(latency, hops.intra.bandwidth * share), hops.inter)
        times = probed.inter.bandwidth * old.flows / flat.bandwidth if old.sizes.groups > 1 else 1.0
        link = hops.inter.bandwidth * cluster.flows / times
        return HopRates(replace(hops.intra, latency=0.0), Rate(latency, link * (k - 1) / (n - 1)))


def _scale_latency(latency: float, before: float, after: float) -> float:
    """Scale a probed latency to another cluster by the ratio of the formula's latencies."""
    return latency * after / before if before else latency or after
