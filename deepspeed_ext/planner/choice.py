# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Chooses a strategy, and gives the reason. Pure."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from deepspeed_ext.planner.closed_form import HOST
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import Prediction, predict, predict_plain
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy, hyphenate, hyphenated

# Relative difference up to which predictions count as equally fast; the one with less memory is then better.
TIE = 0.03
T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """All strategies for one model and cluster, fastest first.

    Attributes:
        sizes, model, rates: the inputs.
        budget: bytes per rank for model states and transient memory of a step; None for no limit.
        predictions: all strategies, the fastest first.
        choice: the strategy to use; None if none fits.
        plain: DDP and the plain stages, for comparison.
        overlapped: the best strategy with p = N and ``paro_overlap_updates``; None if the key is true or none fits.
    """

    sizes: GroupSizes
    model: Model
    rates: Rates
    budget: float | None
    predictions: tuple[Prediction, ...]
    choice: Prediction | None
    plain: tuple[Prediction, ...] = ()
    overlapped: Prediction | None = None

    def fits(self, prediction: Prediction) -> bool:
        return self.budget is None or prediction.total_memory <= self.budget

    @property
    def reason(self) -> str:
        """Return a one-line reason for the choice, or the reason why nothing fits."""
        least = min(self.predictions, key=lambda row: row.total_memory)
        limit = "" if self.budget is None else f" of {self.budget / 1e9:.3g}"
        if self.choice is None:
            return (
                f"no strategy fits: {hyphenate(least.name)} needs the least memory, {least.total_memory / 1e9:.3g} GB"
                f"{limit} GB on each rank. Use more ranks, or offload."
            )
        chosen = self.choice
        compute, within, between = (chosen.seconds[part] for part in ("compute", "within", "between"))
        text = (
            f"{hyphenate(chosen.name)}: predicted {chosen.total_seconds:.3g} s per step: {compute:.3g} s compute, and "
            f"exposed {within:.3g} s within groups and {between:.3g} s between{self._copies_clause(chosen)}; "
            f"{chosen.total_memory / 1e9:.3g}{limit} GB on each rank"
        )
        close = [row for row in self.predictions if self.fits(row) and self._is_tied(row) and self._is_larger(row)]
        if close:
            text += f"; as fast within {TIE:.0%}, with more memory: {hyphenated(row.name for row in close)}"
        faster = [row for row in self.predictions if not self.fits(row) and self._is_faster(row)]
        if faster:
            text += f"; faster, but too large: {_figures(faster[0])}"
        if self.overlapped is not None and self._is_faster(self.overlapped):
            text += f"; faster with paro_overlap_updates true: {_figures(self.overlapped)}"
        if self.model.experts:
            text += (
                f"; of {chosen.volume.inter / 1e9:.3g} GB that a rank receives from other groups in a step "
                f"{chosen.of_experts.inter / 1e9:.3g} are of experts"
            )
        if self.model.all_matrices:
            text += "; not compared with plain stages: with Muon they also send full gradients and momentum"
        return text + self._plain_rival_clause()

    def _copies_clause(self, row: Prediction) -> str:
        copies = row.seconds[HOST]
        return "" if self.model.host is None else f", and {copies:.3g} s of copies from and to the host"

    def _plain_rival_clause(self) -> str:
        """Return a clause about the smallest plain stage at least as fast as the choice; empty if there is none."""
        assert self.choice is not None
        comparable = [row for row in self.plain if self.fits(row) and not self._lacks_units(row)]
        rivals = [row for row in comparable if self._is_tied(row) or self._is_faster(row)]
        if not rivals:
            return ""
        row = min(rivals, key=lambda row: (row.total_memory, row.total_seconds))
        speed = "as fast" if self._is_tied(row) else "faster"
        price = ", with more memory" if self._is_larger(row) else ": no strategy is needed"
        return f"; {speed}: plain {_figures(row)}{price}"

    def _lacks_units(self, row: Prediction) -> bool:
        """Return whether a plain stage fetches more modules, whose host time is not predicted."""
        plain = self.model.without_units
        return row.strategy == "GGG" and plain is not None and plain[0] > self.model.fetches

    def _is_faster(self, row: Prediction) -> bool:
        assert self.choice is not None
        return row.total_seconds < self.choice.total_seconds and not self._is_tied(row)

    def _is_tied(self, row: Prediction) -> bool:
        assert self.choice is not None
        return abs(row.total_seconds - self.choice.total_seconds) <= TIE * self.choice.total_seconds

    def _is_larger(self, row: Prediction) -> bool:
        assert self.choice is not None
        return row.total_memory > self.choice.total_memory

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {
            "ranks": self.sizes.ranks,
            "group_size": self.sizes.group_size,
            "accumulation": self.model.accumulation,
            "micro_step_seconds": self.model.compute,
            "budget": self.budget,
            "rates": self.rates.as_dict(),
            "choice": None if self.choice is None else self.choice.as_dict(),
            "reason": self.reason,
            "predictions": [row.as_dict() | {"fits": self.fits(row)} for row in self.predictions],
            "plain": [row.as_dict() | {"fits": self.fits(row)} for row in self.plain],
        }


def _figures(row: Prediction) -> str:
    return f"{hyphenate(row.name)} ({row.total_seconds:.3g} s, {row.total_memory / 1e9:.3g} GB)"


def plan(
    sizes: GroupSizes,
    model: Model,
    rates: Rates,
    budget: float | None = None,
    compressions: Iterable[Compression] = (UNCOMPRESSED,),
    allowed: Callable[[Strategy], bool] = lambda _: True,
) -> Plan:
    """Predict all strategies, and choose the fastest that fits; among equally fast strategies, the smallest.

    Args:
        sizes: ranks and groups.
        model: the model to train.
        rates: rates of the hops.
        budget: bytes on each rank; None for no limit.
        compressions: compressions to predict for each strategy that allows them, unless the model's ordered sums
            exclude them. The choice is among all of them.
        allowed: returns whether to consider a strategy.

    Raises:
        ValueError: no strategy is allowed.
    """
    compressions = [compression for compression in compressions if compression.allows_sums(model.ordered)]
    rows = [row for row in STRATEGIES.values() if allowed(row)]
    predictions = [
        predict(row, sizes, model, rates, compression)
        for compression in compressions
        for row in rows
        if compression.allows(row)
    ]
    if not predictions:
        raise ValueError("no strategy is allowed.")
    predictions.sort(key=lambda row: (row.total_seconds, row.total_memory))
    # A plain stage is compared only if the equal strategy is allowed: with zero.Init only ZeRO-3, for example.
    plain = tuple(row for row in predict_plain(sizes, model, rates) if allowed(STRATEGIES[row.strategy]))
    unsharded = [row for row in rows if row.p == Placement.N and not model.overlap_updates]
    overlapping = replace(model, overlap_updates=True)
    overlapped = [
        predict(row, sizes, overlapping, rates, compression)
        for compression in compressions
        for row in unsharded
        if compression.allows(row)
    ]
    choices = [_best_within(budget, rows_by_overlap) for rows_by_overlap in (predictions, overlapped)]
    return Plan(
        sizes=sizes,
        model=model,
        rates=rates,
        budget=budget,
        predictions=tuple(predictions),
        choice=choices[0],
        plain=plain,
        overlapped=choices[1],
    )


def _best_within(budget: float | None, rows: Sequence[Prediction]) -> Prediction | None:
    fitting = [row for row in rows if budget is None or row.total_memory <= budget]
    if not fitting:
        return None
    return best(fitting, lambda row: row.total_seconds, lambda row: (row.total_memory, row.host))


def best(rows: Sequence[T], seconds: Callable[[T], float], memory: Callable[[T], Any]) -> T:
    """Return the smallest row within ``TIE`` of the fastest; among equally small rows, the fastest."""
    quickest = min(map(seconds, rows))
    # Within TIE, the error of the model exceeds the difference, so memory decides.
    close = [row for row in rows if seconds(row) <= (1 + TIE) * quickest]
    return min(close, key=lambda row: (memory(row), seconds(row)))
