# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a strategy costs with an outer optimizer between groups. Pure.

Note [Cost of outer steps]
    Groups train apart (Note [Outer steps] in ``zero/outer.py``; DiLoCo, arXiv:2311.08105), so an inner step is the
    strategy's in a world of one group: nothing crosses between groups. Every H inner steps there is an outer step.
    With os = I and Ψ trained parameters, a rank and those of its number in other groups have the same Ψ/m elements.

    *Bytes.* Changes are reduced from I to G, and outer weights are gathered from G to I. So with w bytes an element a
    rank receives 2 b wΨ bytes in an outer step, where b = (k-1)/n: 2 b 4Ψ in 32 bits. In 8 and 4 bits an element also
    has its share of a scale of 16 bits.

    *Memory.* A rank holds the anchor of its elements in fp32, 4Ψ/m bytes, and outer weights and momentum of one row
    of k, 8Ψ/n. In 8 and 4 bits the reduction keeps its errors in 8 bits and scales, Ψ/m bytes. A fragment on its way
    takes a copy in fp32, and its errors are there twice until it is used. With a delay the copy is of all of the
    fragment, 1/F of the elements. Without one the fragment crosses in pieces of at most ``MOST_AT_ONCE`` elements, one
    after the other, and the copy is of one of these.

    *Seconds.* Both hops of a fragment take t seconds. It hides under the inner steps of its delay d, so F fragments
    add F max(0, t - d inner) seconds to H inner steps (Streaming DiLoCo, arXiv:2501.18512).

    Left out: steps of the warm-up, which cost what the strategy alone does; the arithmetic of an outer step; copies
    to the host and back with ``offload``; the flag by which groups agree that fp16 gradients have overflowed.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

from deepspeed_ext.config.model import WITH_OUTER
from deepspeed_ext.config.settings import MOST_AT_ONCE, OuterSettings, of_outer_steps
from deepspeed_ext.planner.closed_form import BETWEEN
from deepspeed_ext.planner.costs import Prediction, predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import BITS, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Placement, Strategy, Volume, redistribution_volume

_FP32 = 4  # bytes


@dataclass(frozen=True)
class OuterPrediction:
    """A strategy with an outer optimizer, and what it costs each rank; see Note [Cost of outer steps].

    Attributes:
        average: of a step, the mean over H inner steps and the outer step. ``transient`` has ``held`` and
            ``transfer`` in it, ``host`` what the outer optimizer offloads.
        held: bytes of the device for anchor, outer weights, momentum and errors.
        transfer: most bytes that what is on its way takes.
        received: bytes from other groups in an outer step, all of its fragments.
        exposed: seconds that an outer step adds to H inner steps.
        busy: seconds for which it takes the link between groups.
    """

    average: Prediction
    held: float
    transfer: float
    received: float
    exposed: float
    busy: float

    def as_dict(self) -> dict[str, Any]:
        """Return plain values: those of ``average``, and of an outer step."""
        names = ("held", "transfer", "received", "exposed", "busy")
        return self.average.as_dict() | {"outer_step": {name: getattr(self, name) for name in names}}


@dataclass(frozen=True)
class OuterPlan:
    """All strategies with an outer optimizer for one model and cluster. None is chosen: it changes the training.

    Attributes:
        settings: how groups are brought together.
        budget: bytes that a rank has for model states and for what else a step holds; None for no limit.
        predictions: of the strategies, the fastest first.
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
    """Bits of an element: of a change and of an outer weight on the wire, and of what is kept of a change."""

    change: float
    weight: float
    kept: float = 0.0

    @classmethod
    def of(cls, settings: OuterSettings, groups: int) -> "_Bits":
        if settings.bits >= 16:
            return cls(settings.bits, settings.bits)
        changes, weights = of_outer_steps(settings.bits)
        return cls(changes.wire_bits, weights.wire_bits, changes.kept_bits if groups > 1 else 0.0)


def predict_outer(
    strategy: Strategy, sizes: GroupSizes, model: Model, rates: Rates, settings: OuterSettings
) -> OuterPrediction:
    """Predict what a strategy costs with an outer optimizer.

    Args:
        strategy: one of ``WITH_OUTER``.
        sizes: ranks and groups.
        model: what is trained; without experts.
        rates: of the hops.
        settings: of the outer optimizer.

    Raises:
        ValueError: the strategy's optimizer states are not sharded inside a group, or the model has experts.
    """
    if strategy.name not in WITH_OUTER:
        raise ValueError(f"an outer optimizer needs one of {', '.join(WITH_OUTER)}, got {strategy.name}.")
    if model.experts:
        raise ValueError(
            "an outer optimizer takes no experts of expert parallelism, since ranks with the same ones may be in one "
            "group alone."
        )
    alone = GroupSizes(sizes.group_size, sizes.group_size)
    inner = predict(strategy, alone, model, rates)
    elements, bits = model.states.gradients / model.gradient_bytes, _Bits.of(settings, sizes.groups)
    held, host, transfer = _memory(elements, bits, sizes, settings)
    there, back = (
        redistribution_volume(sizes, Placement.I, Placement.G, elements * wire / BITS).inter
        for wire in (bits.change, bits.weight)
    )
    parts = settings.fragments
    messages = max(1, math.ceil(elements / sizes.shards(Placement.I) / parts / MOST_AT_ONCE))
    reduce, gather = rates.reduce.inter, rates.gather.inter
    seconds = reduce.seconds(there / parts, messages) + gather.seconds(back / parts, messages)
    exposed = parts * max(0.0, seconds - settings.delay * inner.total_seconds)
    average = replace(
        inner,
        transient=inner.transient + held + transfer,
        host=inner.host + host,
        volume=inner.volume + Volume(inter=(there + back) / settings.steps),
        seconds=inner.seconds | {BETWEEN: exposed / settings.steps},
        busy=inner.busy | {BETWEEN: parts * seconds / settings.steps},
    )
    return OuterPrediction(average, held, transfer, there + back, exposed, parts * seconds)


def _memory(elements: float, bits: _Bits, sizes: GroupSizes, settings: OuterSettings) -> tuple[float, float, float]:
    """Return the bytes that the outer optimizer holds on the device and on the host, and those of a transfer."""
    mine, row = elements / sizes.shards(Placement.I), elements / sizes.shards(Placement.G)
    states, errors = _FP32 * (mine + 2 * row), bits.kept / BITS * mine
    fragment = mine / settings.fragments
    copied = fragment if settings.delay else min(fragment, MOST_AT_ONCE)
    transfer = _FP32 * copied + errors / settings.fragments
    if settings.offload == "cpu":
        return errors, states, transfer
    return states + errors, 0.0, transfer


def plan_outer(
    sizes: GroupSizes, model: Model, rates: Rates, settings: OuterSettings, budget: float | None = None
) -> OuterPlan:
    """Predict all strategies that an outer optimizer may be used with.

    Args:
        sizes, model, rates, settings: see ``predict_outer``, and for what it raises.
        budget: bytes on each rank; None for no limit.
    """
    rows = [predict_outer(STRATEGIES[name], sizes, model, rates, settings) for name in WITH_OUTER]
    rows.sort(key=lambda row: (row.average.total_seconds, row.average.total_memory))
    return OuterPlan(settings, budget, tuple(rows))
