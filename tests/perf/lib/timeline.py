# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rows of emulated clusters as cases for the planner, and what communication costs the cores of a host,
which also compute: fitted to some rows, then used for others.

Note [Host costs]
    r ranks share c cores, so what one rank does takes r/c of the time that it would take on a core of its own. With R
    = r/c and f, how slow the host was during the launch, a hop of x bytes in y messages takes

        within a node     f R (x within + y message_within)
        between nodes     x max(link, f R between) + y f R message_between

    where ``link`` is the seconds of a byte of payload on the wire: m ranks share a node's link, and a frame of 1514
    bytes carries 1448. An update touches ``memory`` bytes, LoCo codes what crosses (``coding``), in seconds a byte.

    f is the compute of a step without communication over that of the campaign's first launch, each per rank, element,
    and micro-batch (an update counts as ``UPDATE`` micro-batches), and 1 where compute is emulated. A bucket of
    DeepSpeed's stages is as many messages as there are ranks. What gloo's collectives send beyond the formula is
    counted by the interfaces, and does not depend on the link.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, replace

import numpy
from numpy.typing import NDArray

from deepspeed_ext.leaf.modules import Settings
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import PLAIN, predict, predict_plain_stage
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.models import describe, mark_matrices
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.strategy import STRATEGIES, Direction, GroupSizes, Strategy
from tests.perf.lib import records
from tests.perf.lib.blocks import Pauses, make_blocks
from tests.perf.lib.settings import BLOCKS, FORMS, FP32, MUON, NATIVE, OVERLAP, SIZES, rate_name

LETTERS = {stage: letters for letters, stage in PLAIN.items()}
# Rows of one campaign were measured with one version of the package, within hours.
SUMMED, OVERLAPPING, EMULATED = "small models", "large model", "emulated compute"
NO_UNITS = Settings(None, 0, 0)  # of these campaigns, which fetched modules one by one


@dataclass(frozen=True)
class Case:
    """A measured row, with the inputs of its prediction."""

    row: records.Row  # the measurement
    campaign: str  # see above. In the first campaign nothing overlaps
    # plain, strategy: whether it is a plain stage, and its strategy without groups.
    plain: bool
    strategy: Strategy
    # sent, sizes, model: compression, group sizes, and the model, with the compute measured without communication.
    sent: Compression
    sizes: GroupSizes
    model: Model

    @property
    def extra_bytes(self) -> float:
        """Bytes sent between nodes for each byte of the formula: gloo's collectives send more than necessary."""
        if not self.plain:
            return 1.0
        volume = self.strategy.volume(self.sizes, self.model.states, self.model.accumulation)
        return self.row.bytes_between / (volume.inter * self.sizes.group_size)


def cases() -> tuple[list[Case], Counter[str]]:
    """Return all rows that the planner predicts, and the number of rows of each other method, by name."""
    predicted, unpredicted = [], Counter[str]()
    for row, case in [*_of_clusters(), *_of_overlap()]:
        if case is None:
            unpredicted[row.method] += 1
        else:
            predicted.append(case)
    return predicted, unpredicted


def _of_clusters() -> Iterator[tuple[records.Row, Case | None]]:
    rows = [row for row in records.read("emulated_cluster.csv") if BLOCKS[row.setting].dtype == FP32]
    alone = {(row.setting, row.mbit): row.compute for row in rows}
    for row in rows:
        setting = BLOCKS[row.setting]
        muon = setting.optimizer == MUON
        # Of a step without communication, what Muon takes is what the same model takes less with AdamW.
        less = alone[row.setting.removesuffix(f"-{MUON.lower()}"), row.mbit] if muon else row.compute
        model = replace(
            _cluster_model(setting.size, muon),
            accumulation=setting.accumulation,
            compute=min(less, row.compute) / setting.accumulation,
            orthogonalizing=max(0.0, row.compute - less) * setting.sizes.ranks,
            overlap=None if setting.size == "large" else False,
        )
        yield row, _case(row, OVERLAPPING if setting.size == "large" else SUMMED, setting.sizes, model)


def _of_overlap() -> Iterator[tuple[records.Row, Case | None]]:
    _, width, hidden = SIZES["narrow"]
    shared_settings = {"bucket": 2 * width * hidden, "streams": False, "overlap": True, "overlap_updates": True}
    described = replace(describe(make_blocks(*SIZES["narrow"], Pauses()), units=NO_UNITS), **shared_settings)
    for row in records.read("overlap.csv"):
        setting = OVERLAP[row.setting]
        model = replace(described, accumulation=setting.accumulation, compute=row.compute / setting.accumulation)
        if row.method in LETTERS:  # with a device's overlap and buckets, see ``Workload.overlapping``
            blocks = setting.sizes.ranks // 2 if row.method in ("ZeRO-1", "ZeRO-2") else 1
            model = replace(model, streams=True, bucket=blocks * model.bucket)
        yield row, _case(row, EMULATED, setting.sizes, model)


def _case(row: records.Row, campaign: str, sizes: GroupSizes, model: Model) -> Case | None:
    """Return the planner's case; None for peers and collectives that it does not support."""
    form = next((form for form in sorted(FORMS, key=len, reverse=True) if row.method.endswith(form)), "")
    name = row.method.removesuffix(form)
    if row.method.endswith(NATIVE):
        return None
    if name in STRATEGIES:
        return Case(row, campaign, False, STRATEGIES[name], FORMS[form], sizes, model)
    if row.method in LETTERS and not model.matrices:
        return Case(row, campaign, True, STRATEGIES[LETTERS[row.method]], UNCOMPRESSED, sizes, model)
    return None


@functools.cache
def _cluster_model(size: str, muon: bool) -> Model:
    model = make_blocks(*SIZES[size])
    if muon:
        mark_matrices(model)
    return replace(describe(model, units=NO_UNITS), streams=False)


def kind(case: Case) -> str:
    """Return the link under which a row was measured, and whether compute was emulated."""
    rate = rate_name(case.row.mbit)
    return f"{rate}, {EMULATED}" if case.campaign == EMULATED else rate


# Host costs ########################################################################################

CORES = 2
FRAME = 1514 / 1448  # Ethernet's and TCP's headers
UPDATE = 0.73  # micro-batches: by the computes of 2x2-small-1 and 2x2-small-4
STEPS, LEAST_ERROR = 25, 0.05  # of the fit: an error below this weighs as one of this size
NEARNESS = 0.1  # half of it is as bad as so large an error, for a cost that is e times that of the start

Vector = NDArray[numpy.float64]


@dataclass(frozen=True)
class HostCosts:
    """Seconds on a separate core; see Note [Host costs]."""

    within: float = 1e-9
    between: float = 1e-9
    message_within: float = 1e-4
    message_between: float = 2e-4
    memory: float = 5e-10
    coding: float = 1e-9

    def rates(self, case: Case, slowness: float) -> Rates:
        sizes = case.sizes
        host = sizes.ranks / CORES * slowness
        link = 0.0 if case.row.mbit is None else sizes.group_size * 8 / (case.row.mbit * 1e6) * FRAME
        between = 1 / max(link, host * self.between) / case.extra_bytes
        owners = sizes.ranks if case.plain and PLAIN[case.strategy.name] in ("ZeRO-1", "ZeRO-2") else 1

        def hops(messages: int) -> HopRates:
            within = Rate(host * self.message_within * messages, 1 / (host * self.within))
            return HopRates(within, Rate(host * self.message_between * messages, between))

        return Rates(hops(1), hops(owners), 1 / (host * self.memory))

    def seconds(self, case: Case, slowness: float) -> float:
        rates = self.rates(case, slowness)
        if case.plain:
            return predict_plain_stage(case.strategy.name, case.sizes, case.model, rates).total_seconds
        prediction = predict(case.strategy, case.sizes, case.model, rates, case.sent)
        host = case.sizes.ranks / CORES * slowness
        return prediction.total_seconds + host * self.coding * _coded_bytes(case)


def _coded_bytes(case: Case) -> float:
    """Return the unencoded bytes that a rank has encoded in a step."""
    if case.sent.loco is None:
        return 0.0
    return sum(
        phase.volume.inter * phase.times(case.model.accumulation)
        for phase in case.strategy.phases(case.sizes, case.model.states)
        if phase.kind == Direction.REDUCE or (case.sent.updates is not None and not phase.each_micro_step)
    )


def compute_of_element(case: Case) -> float:
    """Return the seconds of compute of an element in a micro-batch, on a separate core."""
    model = case.model
    share = model.accumulation / (model.accumulation + UPDATE)
    return model.compute * share / model.trainable / case.sizes.ranks * CORES


def fit(cases: Sequence[tuple[Case, float]], start: HostCosts) -> HostCosts:
    """Return the costs whose ratios of predicted to measured steps are nearest to 1. Gauss-Newton, damped, on the
    logarithms of both, by the sum of absolute errors, near the start of the search."""
    begin = numpy.log(numpy.array(astuple(start)))
    identity = numpy.eye(len(begin))

    def errors(values: Vector) -> Vector:
        costs = HostCosts(*map(float, numpy.exp(values)))
        return numpy.array([math.log(costs.seconds(case, slow) / case.row.median) for case, slow in cases])

    def loss(values: Vector, residuals: Vector) -> float:
        return float(numpy.abs(residuals).sum() + NEARNESS / 2 * numpy.square(values - begin).sum())

    values, now, damping = begin, errors(begin), 1e-2
    for _ in range(STEPS):
        slopes = numpy.stack([(errors(values + 1e-3 * direction) - now) / 1e-3 for direction in identity], 1)
        weights = 1 / numpy.maximum(numpy.abs(now), LEAST_ERROR)
        normal = slopes.T @ (weights[:, None] * slopes) + NEARNESS * identity
        gradient = slopes.T @ (weights * now) + NEARNESS * (values - begin)
        move = numpy.linalg.solve(normal + damping * numpy.diag(numpy.diag(normal)), -gradient).clip(-2, 2)
        then = errors(values + move)
        if loss(values + move, then) < loss(values, now):
            values, now, damping = values + move, then, damping / 3
        else:
            damping *= 5
        if numpy.abs(move).max() < 1e-3:
            break
    return HostCosts(*map(float, numpy.exp(values)))
