# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The ratios that the PaRO paper published, and the same ratios predicted and emulated. Pure. Nodes have eight A100s.
A micro-batch of a GPU has 4 sequences of 512 tokens, and 65B recomputes activations, which adds a forward. The rate
between nodes is fitted: of ``GBPS``, it is the one with the smallest median miss."""

import functools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from deepspeed_ext.planner.closed_form import BETWEEN, COMPUTE
from deepspeed_ext.planner.costs import Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, hyphenate
from tests.perf.lib import predictions
from tests.perf.lib.records import Row, Table, read
from tests.perf.lib.settings import SHIPPED, Setting
from tests.perf.lib.tabulated import rank_correlation

FILE = "paper.csv"
SHIPPED_2 = "ZeRO-2 as shipped"
GBPS = (80, 100, 150, 200, 300)  # of a node; the paper says 100, and 80 in its guideline
NEAR = 0.15


class Case(NamedTuple):
    """What the paper trained."""

    model: str
    regime: str
    gpus: int = 32
    accumulation: int = 10

    @property
    def flops(self) -> float:
        """FLOPs of a parameter for a token; a forward has 2."""
        return 4 + 2 * predictions.TRAINABLE[self.regime] + (2 if self.model == "65B" else 0)

    def predict(self, method: str, gbps: float) -> Prediction:
        sizes = GroupSizes(self.gpus, predictions.PER_NODE)
        size, share = predictions.SCALE_MODELS[self.model], predictions.TRAINABLE[self.regime]
        model = predictions.scale_model(size, share, self.flops * 4 * 512, self.accumulation)
        return predicted(method, sizes, model, predictions.scale_rates(sizes, gbps))

    def link_of_compute(self, method: str) -> float:
        """Return how long a method occupies the links between nodes, relative to its compute, at the fitted rate."""
        busy = self.predict(method, fitted()).busy
        return busy[BETWEEN] / busy[COMPUTE]


CASES = {
    **{name: Case(*name.split("-")) for name in ("7B-full", "65B-full", "65B-partial", "65B-PEFT", "7B-partial")},
    **{f"7B-{gpus}": Case("7B", "full", gpus) for gpus in (16, 128)},
    "7B-540": Case("7B", "full", accumulation=135),  # 540 sequences of a GPU in a step
}
Where = tuple[str, str]  # a case and a method
# Speeds of the first relative to the second. Two values if the text allows both.
CLAIMS: dict[tuple[Where, Where], tuple[float, ...]] = {
    (("7B-full", "IIG"), ("7B-full", "ZeRO-3")): (2.28,),
    (("7B-full", "NII"), ("7B-full", SHIPPED_2)): (1.67,),
    (("65B-full", "IIG"), ("65B-full", "ZeRO-3")): (1.86,),
    (("65B-partial", "III"), ("65B-partial", "ZeRO-3")): (2.64, 3.64),
    (("65B-partial", "IIG"), ("65B-partial", "ZeRO-3")): (2.66, 3.66),
    (("65B-PEFT", "ING"), ("65B-PEFT", "ZeRO-3")): (1.44,),
    (("7B-partial", "NIG"), ("7B-partial", SHIPPED_2)): (1.15,),
    (("7B-partial", "NII"), ("7B-partial", SHIPPED_2)): (1.21,),
    (("7B-128", "ZeRO-3"), ("7B-16", "ZeRO-3")): (0.63,),
    (("7B-128", SHIPPED_2), ("7B-16", SHIPPED_2)): (0.63,),
    (("7B-128", "NIG"), ("7B-16", "NIG")): (0.84,),
    (("7B-128", "IIG"), ("7B-16", "IIG")): (0.92,),
    (("7B-540", "NNI"), ("7B-540", SHIPPED)): (1.487,),
}
Ratios = Sequence[float | None]  # for each claim


def predicted(method: str, sizes: GroupSizes, model: Model, rates: Rates) -> Prediction:
    """Predict a strategy or a stage. As shipped, a stage all-reduces, as if gradients had twice their bytes."""
    if method in STRATEGIES:
        return predict(STRATEGIES[method], sizes, model, rates)
    if "shipped" in method:
        states = replace(model.states, gradients=2 * model.states.gradients)
        model = replace(model, states=states, gradient_bytes=2 * model.gradient_bytes)
    return predict_plain_stage({"1": "NNG", "2": "NGG", "3": "GGG"}[method[len("ZeRO-")]], sizes, model, rates)


def ratios(seconds: Callable[[Where], float | None]) -> Ratios:
    """Return the ratio of each claim; None if one of its seconds is."""
    pairs = ((seconds(of), seconds(to)) for of, to in CLAIMS)
    return [to / of if of and to else None for of, to in pairs]


def predicted_ratios(gbps: float) -> Ratios:
    return ratios(lambda where: CASES[where[0]].predict(where[1], gbps).total_seconds)


def emulated_ratios(rows: Iterable[Row]) -> Ratios:
    return ratios({(row.setting, row.method): row.median for row in rows}.get)


def comparable(found: Ratios) -> list[tuple[float, float]]:
    return [(ratio, nearest(ratio, values)) for ratio, values in zip(found, CLAIMS.values(), strict=True) if ratio]


def nearest(ratio: float, values: Sequence[float]) -> float:
    """Return the published ratio; if the text allows two, the nearer one."""
    return min(values, key=lambda value: abs(ratio / value - 1))


def misses(found: Ratios) -> list[float]:
    return [abs(ratio / value - 1) for ratio, value in comparable(found)]


@functools.cache
def fitted() -> float:
    """Return the rate between nodes, in Gbit/s of a node, with the smallest median miss."""
    return min(GBPS, key=lambda gbps: statistics.median(misses(predicted_ratios(gbps))))


# Emulated #########################################################################################

EMULATED = {  # with one rank per node, as many nodes as in the paper
    name: Setting(
        name,
        *((2, 2) if case.gpus == 32 else (case.gpus // 8, 1)),
        accumulation=10,
        mbit=(50 if case.accumulation == 10 else 500,),
        size="paper",
        lora=case.regime == "PEFT",
    )
    for name, case in CASES.items()
}


def compared(case: str) -> list[str]:
    """Return the methods of a case, the baseline first; on 32 GPUs also ZeRO-2 with the fewest bytes."""
    where = [pair for claim in CLAIMS for pair in reversed(claim) if pair[0] == case]
    names = sorted(dict.fromkeys(method for _, method in where), key=lambda method: method in STRATEGIES)
    return names + ["ZeRO-2"] * (SHIPPED_2 in names and CASES[case].gpus == 32)


# Tables ###########################################################################################


def table() -> Table:
    """Return each published ratio, and how far the predicted and the emulated ratio are from it."""
    lines = []
    for ((case, of), (base, to)), values in CLAIMS.items():
        text = f"{case}: {hyphenate(of)} / {to}" if case == base else f"{hyphenate(of)}: {case} / {base}"
        lines.append([text, " or ".join(f"{value:g}" for value in values)])
    for found in (predicted_ratios(fitted()), emulated_ratios(read(FILE))):
        for line, ratio, values in zip(lines, found, CLAIMS.values(), strict=True):
            line.append(f"{ratio:.2f} ({ratio / nearest(ratio, values) - 1:+.0%})" if ratio else "")
    return ["", "paper", f"predicted at {fitted():g} Gbit/s", "emulated"], lines


def rates() -> Table:
    columns, lines = {f"{gbps} Gbit/s": predicted_ratios(gbps) for gbps in GBPS}, []
    for name, found in {**columns, "emulated": emulated_ratios(read(FILE))}.items():
        apart, (ours, theirs) = misses(found), zip(*comparable(found), strict=True)
        line = [f"{statistics.median(apart):.0%}", f"{max(apart):.0%}"]
        line.append(f"{sum(miss <= NEAR for miss in apart)} of {len(apart)}")
        lines.append([name, *line, f"{rank_correlation(ours, theirs):.2f}"])
    return ["", "median miss", "largest", f"within {NEAR:.0%}", "rank correlation"], lines
