# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``plan --from``: predictions of a recorded training on other clusters, as a table and a sentence. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from deepspeed_ext.config.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.choice import TIE, best
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import PLAIN, Prediction
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import GIGA
from deepspeed_ext.strategy import STRATEGIES, hyphenate
from deepspeed_ext.tools.plan.recorded_training import Cluster, RecordedTraining

Bits = tuple[int | str | None, int | str | None]  # of gradients, and of updates, between groups; None for all bits
ALL: Bits = (None, None)
_FORMS = (
    UNCOMPRESSED,
    *(Compression(LocoSettings(bits=bits)) for bits in (8, 4)),
    *(Compression(LocoSettings(bits=bits), UpdateSettings(bits=bits)) for bits in (8, 4)),
)


@dataclass(frozen=True)
class Row:
    """A prediction, and the seconds of a step including unexplained ones."""

    prediction: Prediction
    seconds: float
    bits: Bits = ALL

    @property
    def name(self) -> str:
        """Return the strategy and its compression."""
        kinds = zip(("gradients", "updates"), self.bits, strict=True)
        few = " and ".join(f"{kind} in {bits} bits" for kind, bits in kinds if bits)
        return f"{self.prediction.strategy}, {few}" if few else self.prediction.name

    @property
    def figures(self) -> str:
        """Return a clause with the seconds and the memory."""
        memory = self.prediction.total_memory / GIGA
        return f"{hyphenate(self.name)} would take {self.seconds:.3g} s a step ({memory:.3g} GB on each rank)"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        bits = dict(zip(("gradient_bits", "update_bits"), self.bits, strict=True))
        return {"name": self.name, "seconds": self.seconds, **bits} | self.prediction.as_dict()


@dataclass(frozen=True)
class WhatIf:
    """Predictions of a recorded training.

    Attributes:
        recorded: the training.
        cluster, model: the predicted cluster and model.
        budget: bytes that a rank has for model states; None for no limit.
    """

    recorded: RecordedTraining
    cluster: Cluster
    model: Model
    budget: float | None = None

    @cached_property
    def rows(self) -> list[Row]:
        """Return predictions of all strategies in all forms, and of the plain stages; the fastest first."""
        running = self.recorded.planner_input.sent
        forms = [form for form in _FORMS if _bits(form) != _bits(running)] + [running]
        forms = [form for form in forms if form.allows_sums(self.model.ordered)]
        rows = [self._row(name, form) for form in forms for name, row in STRATEGIES.items() if form.allows(row)]
        rows += [] if self.model.all_matrices else [self._row(stage) for stage in PLAIN.values()]
        return sorted(rows, key=lambda row: row.seconds)

    @cached_property
    def now(self) -> Row:
        """Return the prediction of the running strategy on this cluster."""
        return self._row(self.recorded.planner_input.name, self.recorded.planner_input.sent)

    def _row(self, name: str, sent: Compression = UNCOMPRESSED) -> Row:
        prediction = self.recorded.predict(name, self.cluster, self.model, sent)
        return Row(prediction, prediction.total_seconds + self.recorded.unexplained_seconds, _bits(sent))

    def fits(self, row: Row) -> bool:
        """Return whether a rank has enough memory."""
        return self.budget is None or row.prediction.total_memory <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "ranks": self.cluster.sizes.ranks,
            "group_size": self.cluster.sizes.group_size,
            "accumulation": self.model.accumulation,
            "recorded": {"seconds": self.recorded.step, "predicted": self.recorded.predicted_seconds},
            "unexplained": self.recorded.unexplained_seconds,
            "now": self.now.as_dict(),
            "rows": [row.as_dict() | {"fits": self.fits(row)} for row in self.rows],
            "sentence": self.sentence,
        }

    @property
    def sentence(self) -> str:
        """Return a sentence on the fastest strategies, and the time of the running one."""
        name, planner_input = hyphenate(self.now.name), self.recorded.planner_input
        took = f"{self.recorded.step:.3g} s (predicted: {self.recorded.predicted_seconds:.3g} s)"
        now = f"now {name} takes {took}"
        if (self.cluster, self.model) != (planner_input.cluster, planner_input.model):
            now = f"{name}, as now, would take {self.now.seconds:.3g} s; where it was recorded, it takes {took}"
        fitting = [row for row in self.rows if self.fits(row)]
        if not fitting:
            return f"On this script, no strategy fits; {now}."
        exact = self._best([row for row in fitting if row.bits == ALL])
        best_of_all = self._best(fitting)
        gain = exact.figures
        if exact.seconds >= (1 - TIE) * self.now.seconds:
            gain = f"no strategy that sends all bits would be faster than {name}"
        if best_of_all.seconds < (1 - TIE) * min(exact.seconds, self.now.seconds):
            gain += f", and {best_of_all.figures}"
        return f"On this script, {gain}; {now}."

    def _best(self, rows: Sequence[Row]) -> Row:
        # If no exact strategy fits, the running one takes its place.
        return best(rows or [self.now], lambda row: row.seconds, lambda row: row.prediction.total_memory)

    def table(self) -> str:
        """Return the seconds of a step of each strategy by bits, and the bytes that it holds and receives exactly."""
        sizes, model = self.cluster.sizes, self.model
        columns = sorted({row.bits for row in self.rows}, key=lambda bits: ([bool(kind) for kind in bits], str(bits)))
        by_name: dict[str, dict[Bits, Row]] = {}
        for row in self.rows:
            by_name.setdefault(row.name if row.bits == ALL else row.prediction.strategy, {})[row.bits] = row
        lines = [
            f"{sizes.ranks} ranks in {sizes.groups} group(s) of {sizes.group_size}; as in the report, "
            f"{model.accumulation} micro-batch(es) of {model.compute:.3g} s of compute in a step,",
            f"and {self.recorded.unexplained_seconds:.3g} s of unexplained host time in every row. Seconds by bits of "
            "gradients (g) and updates (u)",
            "between groups; GB that a rank holds and receives from other groups without compression",
            "",
            f"{'':<11}{''.join(f'{_title(bits):>10}' for bits in columns)}{'held':>10}{'received':>10}",
        ]
        return "\n".join([*lines, *(self._line(name, by_name[name], columns) for name in by_name), "", self.sentence])

    def _line(self, name: str, rows: Mapping[Bits, Row], columns: Sequence[Bits]) -> str:
        row = rows.get(ALL, next(iter(rows.values())))
        cells = [f"{rows[bits].seconds:.3g}" if bits in rows else "" for bits in columns]
        cells += [f"{nbytes / GIGA:.3g}" for nbytes in (row.prediction.total_memory, row.prediction.volume.inter)]
        mark = "  <-- now" if name == self.recorded.planner_input.name else ""
        mark += "" if self.fits(row) else "  (too large)"
        return f"{hyphenate(name):<11}{''.join(f'{cell:>10}' for cell in cells)}{mark}"


def _bits(sent: Compression) -> Bits:
    return sent.loco.bits if sent.loco else None, sent.updates.bits if sent.updates else None


def _title(bits: Bits) -> str:
    loco, updates = bits
    return "all" if bits == ALL else f"g {loco or '-'}" + (f", u {updates}" if updates else "")
