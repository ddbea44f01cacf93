# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What was measured on emulated clusters, as the planner would be told of it beforehand."""

import functools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.planner.cost import PLAIN, Model
from deepspeed_ext.planner.models import describe, mark_matrices
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, Strategy
from tests.perf.lib import records
from tests.perf.lib.blocks import Pauses, make_blocks
from tests.perf.lib.overlap_bound import BLOCK
from tests.perf.lib.records import Row
from tests.perf.lib.settings import BLOCKS, FORMS, FP32, MUON, NATIVE, OVERLAP, SIZES, rate_name

LETTERS = {stage: letters for letters, stage in PLAIN.items()}
# Rows of one campaign were measured with one version of the package, within hours.
SUMMED, OVERLAPPING, EMULATED = "small models", "large model", "emulated compute"


@dataclass(frozen=True)
class Case:
    """A measured row, and what was known before.

    Attributes:
        row: what was measured.
        campaign: see above. In the first one nothing overlapped yet.
        plain: whether it is a plain stage.
        strategy: of a plain stage the one that it is without groups.
        sent: in what form.
        sizes, model: what was trained, with the compute that was measured without communication.
    """

    row: Row
    campaign: str
    plain: bool
    strategy: Strategy
    sent: Compression
    sizes: GroupSizes
    model: Model

    @property
    def extra_bytes(self) -> float:
        """How many bytes cross between nodes for one of the formula's: gloo's collectives send more than need be."""
        if not self.plain:
            return 1.0
        volume = self.strategy.volume(self.sizes, self.model.states, self.model.accumulation)
        return self.row.bytes_between / (volume.inter * self.sizes.group_size)


def cases() -> tuple[list[Case], Counter[str]]:
    """Return all rows that the planner predicts, and how many there are of each other method, by name."""
    found, others = [], Counter[str]()
    for row, case in [*_of_clusters(), *_of_overlap()]:
        if case is None:
            others[row.method] += 1
        else:
            found.append(case)
    return found, others


def _of_clusters() -> Iterator[tuple[Row, Case | None]]:
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


def _of_overlap() -> Iterator[tuple[Row, Case | None]]:
    for row in records.read("overlap.csv"):
        setting = OVERLAP[row.setting]
        compute = row.compute / setting.accumulation
        model = replace(_overlap_model(), accumulation=setting.accumulation, compute=compute)
        yield row, _case(row, EMULATED, setting.sizes, model)


def _case(row: Row, campaign: str, sizes: GroupSizes, model: Model) -> Case | None:
    """Return what the planner can say; None of peers and collectives that it does not know."""
    form = next((form for form in sorted(FORMS, key=len, reverse=True) if row.method.endswith(form)), "")
    name = row.method.removesuffix(form)
    if row.method.endswith(NATIVE):
        return None
    if name in STRATEGIES:
        return Case(row, campaign, False, STRATEGIES[name], FORMS[form], sizes, model)
    if row.method in LETTERS and not model.matrices:
        return Case(row, campaign, True, STRATEGIES[LETTERS[row.method]], AS_IT_IS, sizes, model)
    return None


@functools.cache
def _cluster_model(size: str, muon: bool) -> Model:
    model = make_blocks(*SIZES[size])
    if muon:
        mark_matrices(model)
    return replace(describe(model), streams=False)


@functools.cache
def _overlap_model() -> Model:
    model = describe(make_blocks(*SIZES["narrow"], Pauses()))
    return replace(model, bucket=BLOCK, streams=False, overlap=True, overlap_updates=True)


def kind(case: Case) -> str:
    """Return under which link a row was measured, and whether compute was emulated."""
    rate = rate_name(case.row.mbit)
    return f"{rate}, {EMULATED}" if case.campaign == EMULATED else rate
