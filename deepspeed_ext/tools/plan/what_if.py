# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``plan --from``: what strategies would take of a recorded training, as a table and a sentence."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_ext.config.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.choice import TIE, best
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.planner.costs import PLAIN, Prediction
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import GIGA, MICRO
from deepspeed_ext.strategy import STRATEGIES, GroupSizes
from deepspeed_ext.tools.plan.recorded import Cluster, Recorded

Bits = tuple[int | str | None, int | str | None]  # of gradients, and of updates, that cross between groups
ALL: Bits = (None, None)
FORMS = (
    AS_IT_IS,
    *(Compression(LocoSettings(bits=bits)) for bits in (8, 4)),
    *(Compression(LocoSettings(bits=bits), UpdateSettings(bits=bits)) for bits in (8, 4)),
)


@dataclass(frozen=True)
class Row:
    """A prediction, and seconds of a step with those that nothing explains; ``bits``: of gradients and updates."""

    prediction: Prediction
    seconds: float
    bits: Bits = ALL

    @property
    def name(self) -> str:
        """Return the strategy, and what it sends in few bits."""
        loco, updates = self.bits
        few = [f"{kind} in {bits} bits" for kind, bits in (("gradients", loco), ("updates", updates)) if bits]
        name = self.prediction.strategy if few else self.prediction.name
        return ", ".join(filter(None, [name, " and ".join(few)]))

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        loco, updates = self.bits
        bits = {"gradient_bits": loco, "update_bits": updates}
        return {"name": self.name, "seconds": self.seconds, **bits} | self.prediction.as_dict()


@dataclass(frozen=True)
class WhatIf:
    """What each strategy would take.

    Attributes:
        recorded: the training.
        cluster, model: where, and what is trained there.
        budget: bytes that a rank has for model states; None for no limit.
        rows: all, the fastest first.
        now: what runs, on that cluster.
        checked: what runs, where it was recorded.
    """

    recorded: Recorded
    cluster: Cluster
    model: Model
    budget: float | None
    rows: Sequence[Row]
    now: Row
    checked: Row

    @classmethod
    def of(cls, recorded: Recorded, cluster: Cluster, model: Model, budget: float | None = None) -> "WhatIf":
        """Predict all strategies in all forms, and the plain stages; arguments as the attributes."""

        def row(name: str, sent: Compression, where: Cluster, what: Model) -> Row:
            found = recorded.predict(name, where, what, sent)
            return Row(found, found.total_seconds + recorded.unexplained, _bits(sent))

        one = recorded.described
        kinds = [sent for sent in FORMS if _bits(sent) != _bits(one.sent)] + [one.sent]
        found = [
            row(name, sent, cluster, model) for sent in kinds for name in STRATEGIES if sent.allows(STRATEGIES[name])
        ]
        plain = [] if model.all_matrices else [row(name, AS_IT_IS, cluster, model) for name in PLAIN.values()]
        now = row(recorded.name, one.sent, cluster, model)
        rows = sorted([*found, *plain], key=lambda one: one.seconds)
        return cls(recorded, cluster, model, budget, rows, now, row(recorded.name, one.sent, one.cluster, one.model))

    @classmethod
    def of_arguments(cls, arguments: argparse.Namespace) -> "WhatIf":
        """Return predictions of the report that ``plan`` was given, with the cluster and memory of its arguments.

        Raises:
            ValueError: the report cannot be used, or a rate that is needed was neither recorded nor given.
        """
        recorded = Recorded.read(vars(arguments)["from"])
        was, model = recorded.described.cluster, recorded.described.model
        per_node = arguments.ranks_per_node or was.ranks_per_node
        moved = arguments.nodes or arguments.ranks_per_node
        ranks = (arguments.nodes or was.nodes) * per_node if moved else was.sizes.ranks
        kept = was.sizes.group_size if per_node == was.ranks_per_node else per_node
        cluster = Cluster(
            GroupSizes(ranks, arguments.group_size or kept),
            per_node,
            arguments.intra_gbps,
            arguments.inter_gbps,
            None if arguments.latency_us is None else arguments.latency_us * MICRO,
        )
        accumulation = arguments.accumulation or model.accumulation
        overlap = arguments.overlap_updates or model.overlap_updates
        model = replace(model, accumulation=accumulation, overlap_updates=overlap)
        budget = None if arguments.memory_gb is None else arguments.memory_gb * GIGA
        return cls.of(recorded, cluster, model, budget)

    def fits(self, row: Row) -> bool:
        """Return whether a rank has the memory."""
        return self.budget is None or row.prediction.total_memory <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "ranks": self.cluster.sizes.ranks,
            "group_size": self.cluster.sizes.group_size,
            "accumulation": self.model.accumulation,
            "recorded": {"seconds": self.recorded.step, "predicted": self.checked.seconds},
            "unexplained": self.recorded.unexplained,
            "now": self.now.as_dict(),
            "rows": [row.as_dict() | {"fits": self.fits(row)} for row in self.rows],
            "sentence": self.sentence,
        }

    @property
    def sentence(self) -> str:
        """Return what would be fastest, and what runs now takes."""
        name, took = self.now.name, f"{self.recorded.step:.3g} s (predicted: {self.checked.seconds:.3g} s)"
        same = (self.cluster, self.model) == (self.recorded.described.cluster, self.recorded.described.model)
        now = f"now {name} takes {took}"
        if not same:
            now = f"{name}, as now, would take {self.now.seconds:.3g} s; where it was recorded, it takes {took}"
        fitting = [row for row in self.rows if self.fits(row)]
        if not fitting:
            return f"On this script, no strategy fits; {now}."
        exact = self._best([row for row in fitting if row.bits == ALL])
        few = self._best(fitting)
        said = f"On this script, {_figures(exact)}"
        if exact.seconds >= (1 - TIE) * self.now.seconds:
            said = f"On this script, no strategy that sends all bits would be faster than {self.now.name}"
        if few.seconds < (1 - TIE) * min(exact.seconds, self.now.seconds):
            said += f", and {_figures(few)}"
        return f"{said}; {now}."

    def _best(self, some: Sequence[Row]) -> Row:
        return best(some or [self.now], lambda row: row.seconds, lambda row: row.prediction.total_memory)

    def table(self) -> str:
        """Return the seconds of a step of each strategy by bits, and what an exact one holds and receives."""
        sizes, model = self.cluster.sizes, self.model
        columns = sorted({row.bits for row in self.rows}, key=_order)
        by_name: dict[str, dict[Bits, Row]] = {}
        for row in self.rows:
            by_name.setdefault(row.prediction.strategy if row.bits != ALL else row.name, {})[row.bits] = row
        lines = [
            f"{sizes.ranks} ranks in {sizes.groups} group(s) of {sizes.group_size}; as in the report, "
            f"{model.accumulation} micro-batch(es) of {model.compute:.3g} s of compute in a step,",
            f"and {self.recorded.unexplained:.3g} s of the host, in every row, that nothing explains. Seconds by bits "
            "of gradients (g) and updates (u)",
            "between groups; GB that a rank holds and receives from other groups without these",
            "",
            f"{'':<11}{''.join(f'{_title(bits):>10}' for bits in columns)}{'held':>10}{'received':>10}",
        ]
        return "\n".join([*lines, *(self._line(name, by_name[name], columns) for name in by_name), "", self.sentence])

    def _line(self, name: str, found: dict[Bits, Row], columns: Sequence[Bits]) -> str:
        row = found.get(ALL, next(iter(found.values())))
        cells = [f"{found[bits].seconds:.3g}" if bits in found else "" for bits in columns]
        cells += [f"{part / GIGA:.3g}" for part in (row.prediction.total_memory, row.prediction.volume.inter)]
        now = "  <-- now" if name == self.recorded.name else ""
        return f"{name:<11}{''.join(f'{cell:>10}' for cell in cells)}{now}{'' if self.fits(row) else '  (too large)'}"


def _figures(row: Row) -> str:
    return (
        f"{row.name} would take {row.seconds:.3g} s a step ({row.prediction.total_memory / GIGA:.3g} GB on each rank)"
    )


def _bits(sent: Compression) -> Bits:
    loco, updates = (None if one is None else one.bits for one in (sent.loco, sent.updates))
    return loco, updates


def _order(bits: Bits) -> tuple[bool, bool, str]:
    return bits[0] is not None, bits[1] is not None, str(bits)


def _title(bits: Bits) -> str:
    loco, updates = bits
    return "all" if bits == ALL else f"g {loco or '-'}" + (f", u {updates}" if updates else "")
