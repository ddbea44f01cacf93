# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicts the cost of a strategy with an outer optimizer between groups. Pure.

Note [Cost of outer steps]
    Groups train separately (Note [Outer steps] in ``zero/outer.py``; DiLoCo, arXiv:2311.08105), so an inner step is
    the strategy's in a world of one group: nothing is sent between groups. Every H inner steps there is an outer step.
    With os = I and Ψ trained parameters, a rank and those of its number in other groups have the same Ψ/m elements.

    *Bytes.* Changes are reduced from I to G, and outer weights are gathered from G to I. So with w bytes per element a
    rank receives 2 b wΨ bytes in an outer step, with b = (k-1)/n: 2 b 4Ψ in 32 bits. In 8 and 4 bits an element also
    has its share of a 16-bit scale.

    *Memory.* A rank holds the anchor of its elements in fp32, 4Ψ/m bytes, and outer weights and momentum of one row
    of k, 8Ψ/n. In 8 and 4 bits the reduction keeps its errors in 8 bits and scales, Ψ/m bytes. A fragment in flight
    takes a copy in fp32, and its errors exist twice until it is used. With a delay, the copy is of the entire
    fragment, 1/F of the elements. Without a delay, the fragment is sent in pieces of at most ``MAX_TRANSFER_NUMEL``
    elements, one after the other, and the copy is of one piece.

    *Seconds.* Both hops of a fragment take t seconds. They overlap with the inner steps of the delay d, so F fragments
    add F max(0, t - d inner) seconds to H inner steps (Streaming DiLoCo, arXiv:2501.18512).

    Left out: steps of the warm-up, which cost the same as the strategy alone; the arithmetic of an outer step; copies
    to the host and back with ``offload``; the flag by which groups share that fp16 gradients have overflowed.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_ext.config.model import OUTER_STRATEGIES
from deepspeed_ext.config.settings import MAX_TRANSFER_NUMEL, OuterSettings, outer_step_settings
from deepspeed_ext.planner.closed_form import BETWEEN
from deepspeed_ext.planner.costs import Prediction, predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import BITS, Rates
from deepspeed_ext.strategy import (
    STRATEGIES,
    GroupSizes,
    Placement,
    Strategy,
    Volume,
    hyphenated,
    redistribution_volume,
)

_FP32 = 4  # bytes


@dataclass(frozen=True)
class OuterPrediction:
    """The predicted cost of a strategy with an outer optimizer; see Note [Cost of outer steps].

    Attributes:
        average: cost of a step, the mean over H inner steps and the outer step. ``transient`` includes ``held`` and
            ``transfer``, and ``host`` the offloaded outer states.
        held: bytes on the device for anchor, outer weights, momentum and errors.
        transfer: peak bytes of fragments in flight.
        received: bytes from other groups in an outer step, for all fragments.
        exposed: seconds that an outer step adds to H inner steps.
        busy: seconds for which it uses the link between groups.
    """

    average: Prediction
    held: float
    transfer: float
    received: float
    exposed: float
    busy: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values of ``average`` and of an outer step."""
        names = ("held", "transfer", "received", "exposed", "busy")
        return self.average.as_dict() | {"outer_step": {name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class OuterPlan:
    """All strategies with an outer optimizer for one model and cluster. None is chosen: it changes the training.

    Attributes:
        settings: settings of the outer optimizer.
        budget: bytes per rank for model states and transient memory of a step; None for no limit.
        predictions: predictions of the strategies, the fastest first.
    """

    settings: OuterSettings
    budget: float | None
    predictions: tuple[OuterPrediction, ...]

    def fits(self, row: OuterPrediction) -> bool:
        return self.budget is None or row.average.total_memory <= self.budget

    def as_dict(self) -> dict[str, Any]:
        """Return plain values."""
        rows = [row.as_dict() | {"fits": self.fits(row)} for row in self.predictions]
        return {"settings": self.settings.as_dict(), "budget": self.budget, "predictions": rows}


@dataclass(frozen=True)
class _Bits:
    """Bits per element: of a change and of an outer weight on the wire, and of a change's error feedback."""

    change: float
    weight: float
    error_feedback: float = 0.0

    @classmethod
    def for_settings(cls, settings: OuterSettings, groups: int) -> "_Bits":
        if settings.bits >= 16:
            return cls(settings.bits, settings.bits)
        changes, weights = outer_step_settings(settings.bits)
        return cls(changes.wire_bits, weights.wire_bits, changes.error_feedback_bits if groups > 1 else 0.0)


def predict_outer(
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, settings: OuterSettings
) -> OuterPrediction:
    """Predict the cost of a strategy with an outer optimizer.

    Args:
        strategy: one of ``OUTER_STRATEGIES``.
        sizes: ranks and groups.
        model: the model to train, without experts.
        rates: rates of the hops.
        settings: settings of the outer optimizer.

    Raises:
        ValueError: the strategy's optimizer states are not sharded inside a group, or the model has experts.
    """
    if strategy.name not in OUTER_STRATEGIES:
        raise ValueError(f"an outer optimizer needs one of {hyphenated(OUTER_STRATEGIES)}, got {strategy}.")
    if model.experts:
        raise ValueError(
            "an outer optimizer does not support expert parallelism, since all ranks with the same experts may be in "
            "one group."
        )
    # Inner steps send nothing between groups, so each group is a world of its own.
    one_group = GroupSizes(sizes.group_size, sizes.group_size)
    inner = predict(strategy, one_group, model, rates)
    elements, bits = model.states.gradients / model.gradient_bytes, _Bits.for_settings(settings, sizes.groups)
    outer_bytes, host, transfer = _memory(elements, bits, sizes, settings)
    change_bytes, weight_bytes = (
        redistribution_volume(sizes, Placement.I, Placement.G, elements * wire / BITS).inter
        for wire in (bits.change, bits.weight)
    )
    parts = settings.fragments
    messages = max(1, math.ceil(elements / sizes.shards(Placement.I) / parts / MAX_TRANSFER_NUMEL))
    reduce, gather = rates.reduce.inter, rates.gather.inter
    seconds = reduce.seconds(change_bytes / parts, messages) + gather.seconds(weight_bytes / parts, messages)
    exposed = parts * max(0.0, seconds - settings.delay * inner.total_seconds)
    average = replace(
        inner,
        transient=inner.transient + outer_bytes + transfer,
        host=inner.host + host,
        volume=inner.volume + Volume(inter=(change_bytes + weight_bytes) / settings.steps),
        seconds=inner.seconds | {BETWEEN: exposed / settings.steps},
        busy=inner.busy | {BETWEEN: parts * seconds / settings.steps},
    )
    return OuterPrediction(
        average=average,
        held=outer_bytes,
        transfer=transfer,
        received=change_bytes + weight_bytes,
        exposed=exposed,
        busy=parts * seconds,
    )


def _memory(elements: float, bits: _Bits, sizes: GroupSizes, settings: OuterSettings) -> tuple[float, float, float]:
    """Return the outer optimizer's bytes on the device and on the host, and the bytes of a transfer."""
    shard, row = elements / sizes.shards(Placement.I), elements / sizes.shards(Placement.G)
    states, errors = _FP32 * (shard + 2 * row), bits.error_feedback / BITS * shard
    fragment = shard / settings.fragments
    copied = fragment if settings.delay else min(fragment, MAX_TRANSFER_NUMEL)
    transfer = _FP32 * copied + errors / settings.fragments
    if settings.offload == "cpu":
        return errors, states, transfer
    return states + errors, 0.0, transfer


def plan_outer(
    sizes: GroupSizes, model: Model, rates: Rates, settings: OuterSettings, budget: float | None = None
) -> OuterPlan:
    """Predict all strategies that support an outer optimizer.

    Args:
        sizes, model, rates, settings: see ``predict_outer``, also for its errors.
        budget: bytes on each rank; None for no limit.
    """
    rows = [predict_outer(STRATEGIES[name], sizes, model, rates, settings) for name in OUTER_STRATEGIES]
    rows.sort(key=lambda row: (row.average.total_seconds, row.average.total_memory))
    return OuterPlan(settings, budget, tuple(rows))
