# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Judging, storing, and tabulating rows of the emulated cluster, without measurements; and its rings."""

import argparse
import re
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.perf import tables
from tests.perf.lib import gpt2, paper, records, tabulated
from tests.perf.lib.blocks import Sleep
from tests.perf.lib.measurements import BlocksMeasurement, OuterMeasurement, OverlapMeasurement, PaperMeasurement
from tests.perf.lib.offload import OffloadMeasurement
from tests.perf.lib.saves import SavesMeasurement
from tests.perf.lib.settings import BLOCKS, BOTH, LOCO, NATIVE, OFFLOAD, OVERLAP, SAVES

pytestmark = pytest.mark.quick

SETTING = "2x2-large-4"
LENGTHS = (5, 0, 1, 3)  # of parts of a ring's sum


def row(method: str, *seconds: float, predicted: float = 0.0, memory: float = 1.0, **more: Any) -> records.Row:
    """Return one of a strategy if a prediction is given, else of a peer; nothing is wrong with it."""
    ours = {"formula_bytes": 100.0, "more": {"seconds_predicted": predicted}} if predicted else {}
    kept = {"link_bytes": 102.0, "headers": 1.02, "held": (memory, 0.0, 0.0), **ours, **more}
    return records.Row(kept.pop("setting", SETTING), 100, method, "", [[step] for step in seconds], [0.0], **kept)


GOOD = row("NIG", 1.0, predicted=1.0)
OUTER = row(OuterMeasurement.exact, 1.0, formula_bytes=100.0)
COPIED = row("ING", 1.0, setting="2x2-full-100", more={"copied_bytes": 50.0, "copied_formula_bytes": 100.0})


@pytest.mark.parametrize(
    ("measurement", "bad", "message"),
    [
        (BlocksMeasurement, replace(GOOD, difference=2e-4), "NIG: weights differ by 2.0e-04 from the first"),
        (BlocksMeasurement, replace(GOOD, difference=float("nan")), "weights differ by nan"),
        (BlocksMeasurement, replace(GOOD, link_bytes=108.0), r"bytes between nodes differ by \+5.9% from the formula"),
        (gpt2.Gpt2Measurement, replace(GOOD, setting="2x2-gpt2", difference=0.03), "losses differ"),
        (OuterMeasurement, replace(OUTER, difference=1e-3), "III outer, 32 bits is 1.0e-03 from FSDP2 outer"),
        (OuterMeasurement, replace(OUTER, link_bytes=107.1), "1.050 of the formula's bytes"),
        (OffloadMeasurement, COPIED, "ING: bytes between host and device differ by -50.0% from the formula"),
    ],
)
def test_different_weights_or_bytes_are_problems(measurement: Any, bad: records.Row, message: str) -> None:
    (result,) = measurement.problems([bad])
    assert re.search(message, result)


def test_known_differences_are_no_problems() -> None:
    rough = [replace(GOOD, method="NIG" + form, difference=0.1) for form in (LOCO, BOTH)]
    native = replace(GOOD, method="NIG" + NATIVE, link_bytes=150.0)
    assert BlocksMeasurement.problems([GOOD, *rough, native, row("DDP", 1.0)]) == []
    assert OuterMeasurement.problems([OUTER]) == []
    assert gpt2.Gpt2Measurement.problems([replace(one, setting="2x2-gpt2") for one in rough]) == []
    assert gpt2.apart([9.0, 8.1, 7.0], [9.0, 8.0, 7.0]) == pytest.approx(0.05)


def test_speeds_and_choices_are_judged_by_common_rounds() -> None:
    result = records.speed(row("NIG", 1.0, 2.0, 4.0), row("ZeRO-3", 3.0, 6.0))
    assert (result.value, result.low, result.high) == pytest.approx((3.0, 3.0, 3.0)) and result.is_significant
    (line,) = records.slower([row("IIG", 5.0), row("ZeRO-3", 29.0)], "ZeRO-3", {"IIG": 6.0, "NIG": 9.0})
    assert line == "IIG is 5.80 times as fast as ZeRO-3 (5.80 to 5.80), not 6"
    rows = [row("NNG", 1.0, predicted=1.0, memory=30.0), row("NIG", 1.2, predicted=0.9, memory=20.0)]
    rows.append(row("IIG", 1.1, predicted=2.0, memory=10.0))
    assert tabulated.regret(rows) == pytest.approx(1.2)  # NIG is chosen where NNG fits, too
    rows[0].more["seconds_predicted"] = 0.85
    assert tabulated.regret(rows) == pytest.approx(1.2 / 1.1)  # and where it does not, IIG is better than NIG
    assert tabulated.order(rows) == pytest.approx(0.5)


def test_rows_survive_a_file_that_gets_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first = tmp_path / "rows.csv", row("DDP", 5.0)
    measured = row("NIG", 3.0, 1.0, 2.0, 9.0, 2.5, predicted=0.75, memory=7.0, compute=0.5)
    for one in (first, replace(measured, seconds=[[4.0]]), measured):
        records.append_rows(path, [one.to_csv()])
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    peer, kept = records.read("rows.csv")  # the last one of each
    assert (peer.method, peer.predicted, peer.formula_bytes) == ("DDP", None, None)
    assert (kept.median, min(kept.steps), max(kept.steps), kept.predicted) == (2.5, 1.0, 9.0, 0.75)
    assert kept.floor == pytest.approx(measured.floor, rel=1e-3) and list(kept.held) == list(measured.held)


def test_pages_have_the_tables_of_their_rows() -> None:
    result = set()
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        result |= set(re.findall("<!-- table: tables.py (.*) -->", text))
        assert tables.written(text) == text, page.name
    for plotted in tables.PLOTTED:
        assert records.markdown(plotted.table()) in plotted.PLOT.read_text(encoding="utf-8")
    assert result == set(tables.TABLES)


def test_formulas_are_those_by_hand() -> None:
    for setting, share in ((OVERLAP["2x2-1"], 1 / 2), (OVERLAP["4x2-4"], 3 / 4)):
        hop = share * setting.states.parameters  # bytes that a node receives
        assert OverlapMeasurement.wire(setting) == pytest.approx(2 * hop * 8 / 100e6)
        assert OverlapMeasurement.skipped(setting, "NIG") == 0
        assert OverlapMeasurement.skipped(setting, "GIG") == pytest.approx(setting.accumulation * 2 * hop / 16)
    large, shares = BLOCKS[SETTING], {"ZeRO-1": 1.5, "ZeRO-2": 3.75, "ZeRO-3": 9, "FSDP2": 9.1875, "HSDP": 1, "hpZ": 0}
    assert all((large.peer_bytes(name) or 0) == share * large.states.parameters for name, share in shares.items())
    assert BLOCKS["2x2-large-4-bf16"].peer_bytes("HSDP (reduces in fp32)") == large.peer_bytes("HSDP")
    model, adapters = 4 * 2 * 512 * 2048 * 4, 4 * 2 * (512 + 2048) * 4  # bytes
    full, lora = OFFLOAD["2x2-full-100"], OFFLOAD["2x2-LoRA-100"]
    # A step reads a rank's part in four forwards and backwards, and writes what is trained of it.
    for setting, method, expected in (
        (full, "ING", 9 * model / 2),
        (full, "ZeRO-3", 9 * model / 4),
        (lora, "ING", (8 * (model + adapters) + adapters) / 2),
    ):
        assert OffloadMeasurement.formula_copied(setting, method) == expected
    # 12 bytes of each parameter of a shard, one of four; and with p = N what the first rank writes in bf16.
    name, numel = "2x2-25M-1000", 12 * 8 * 512 * 512
    for method, expected in (("IIG, asynchronous", 3 * numel), ("NIG, asynchronous", 5 * numel), ("NIG", 0)):
        assert SavesMeasurement.buffers(SAVES[name], method) == expected


def test_ratios_of_the_paper_are_predicted_in_its_setting() -> None:
    case, hop = paper.CASES["7B-full"], (4 - 1) / 32 * 14e9
    for method, hops in (("ZeRO-3", 3 * 10), (paper.SHIPPED_2, 2 * 10 + 1), ("ZeRO-2", 10 + 1), ("NII", 2)):
        assert case.predict(method, 200).volume.inter == pytest.approx(hops * hop)
    assert case.link_of_compute("ZeRO-3") == pytest.approx(
        30 * hop * 8 / 25e9 / (10 * 6 * 7e9 * 2048 / 156e12), rel=0.01
    )
    seconds = {("7B-full", "IIG"): 2.0, ("7B-full", "ZeRO-3"): 5.0, ("7B-16", "NIG"): 4.0, ("7B-128", "NIG"): 8.0}
    found = paper.emulated_ratios(row(method, taken, setting=name) for (name, method), taken in seconds.items())
    assert list(filter(None, found)) == [2.5, 0.5] and paper.misses(found)[1] == pytest.approx(1 - 0.5 / 0.84)


def test_blocks_sleep_less_after_a_reduction() -> None:
    measurement = OverlapMeasurement(OVERLAP["2x2-1"], argparse.Namespace(methods=None))
    reduction = measurement._overlap_with_compute(measurement._overlap_with_compute(lambda: None))
    slept, pauses = list[float](), measurement.pauses
    with mock.patch("time.sleep", slept.append):
        loss = Sleep.apply(Sleep.apply(torch.ones(2, requires_grad=True), pauses), pauses).sum()
        with mock.patch("time.perf_counter", side_effect=[0.0, 1.0, 4.0, 5.0]):
            reduction()
        pauses.backward = 3.0
        loss.backward()
    assert slept == [0.0, 0.0, 0.0, 1.0]  # 5 of 6 seconds have passed: one in another counts once


def test_emulated_communication_takes_the_share_of_the_paper() -> None:
    measured = records.read(paper.FILE)
    for name in {one.setting for one in measured}:
        rows = [one for one in measured if one.setting == name]
        due = paper.CASES[name].link_of_compute(paper.compared(name)[0])
        assert PaperMeasurement.problems([replace(one, more={"link_of_compute": due}) for one in rows]) == []
        slow = [replace(one, compute=1.3 * one.compute) for one in rows]
        assert "communication to compute" in PaperMeasurement.problems(slow)[-1]
    both = zip(paper.predicted_ratios(paper.fitted()), paper.emulated_ratios(measured), strict=True)
    assert max(abs((ours or 0.0) / (due or 1.0) - 1) for due, ours in both) < 0.13  # on the page


def test_rings_sum_and_train_as_gloo_does(ranks: Any) -> None:
    for length, (part, differences) in zip(LENGTHS, ranks(4).run(sum_and_train), strict=True):
        assert part == [sum(range(1, 5)) * (length + 1)] * length
        assert max(differences) < 1e-6


def sum_and_train() -> tuple[list[float], list[float]]:
    """Return this rank's part of a sum, and how far weights are from those with gloo's own collectives, by stage."""
    from unittest import mock

    import torch
    import torch.distributed as dist

    from tests.harness import training
    from tests.perf.lib import rings

    parts = [torch.full((length,), float((length + 1) * (dist.get_rank() + 1))) for length in LENGTHS]
    differences, job = [], training.Job(empty=False, accumulation=2, clipping=0.0)
    for stage in (1, 2, 3):
        zero = {"stage": stage, "use_multi_rank_bucket_allreduce": False, **training.SMALL}
        with mock.patch.object(rings, "ring_reduce_scatter", wraps=rings.ring_reduce_scatter) as ring:
            with rings.ring_reductions():
                ours, calls = training.train(job, zero).weights, ring.call_count
            stock = training.train(job, zero).weights
        assert ring.call_count == calls > 0
        differences.append(((ours - stock).abs().max() / stock.abs().max()).item())
    return rings.ring_reduce_scatter(parts, dist.group.WORLD).tolist(), differences


def test_two_hops_and_rings_return_what_gloo_does(ranks: Any) -> None:
    assert ranks(4).run(differences_from_gloo) == [[[0.0] * 4] * 2] * 4


def differences_from_gloo() -> list[list[float]]:
    from deepspeed_ext.comm.process_groups import get_topology
    from tests.perf.lib.collectives import OPERATIONS, moves

    return [[apart for _, apart in moves(get_topology(None, 2), one, 256, 1e-4).values()] for one in OPERATIONS]
