# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How rows of the emulated cluster are judged, kept and tabulated. No measurement."""

import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_ext.strategy import STRATEGIES
from deepspeed_ext.zero.sharded.rows import HostRows
from tests.perf import tables
from tests.perf.lib import gpt2, records, tabulated
from tests.perf.lib.measurements import BlocksMeasurement, OffloadMeasurement, OuterMeasurement
from tests.perf.lib.overlap_bound import Compute, LinkSeconds, bound, compute_of, of_peer, of_strategy, wire_of
from tests.perf.lib.pcie import Pcie
from tests.perf.lib.records import Row, slower, speed
from tests.perf.lib.saves import Disk, SavesMeasurement
from tests.perf.lib.settings import BOTH, LOCO, NATIVE, OFFLOAD, OVERLAP, SAVES, WIDE

pytestmark = pytest.mark.quick

SETTING = "2x2-large-4"
ONE, FOUR = Compute(1.0, 2.0, 8, 1), Compute(1.0, 2.0, 8, 4)


def row(method: str, *seconds: float, predicted: float = 0.0, memory: float = 1.0, **more: Any) -> Row:
    """Return one of a strategy if a prediction is given, else of a peer; nothing is wrong with it."""
    ours = {"formula_bytes": 100.0, "more": {"seconds_predicted": predicted}} if predicted else {}
    kept = {"link_bytes": 102.0, "headers": 1.02, "held": (memory, 0.0, 0.0), **ours, **more}
    return Row(kept.pop("setting", SETTING), 100, method, "", [[step] for step in seconds], [0.0], **kept)


def test_different_weights_or_bytes_are_problems() -> None:
    good = row("NIG", 1.0, predicted=1.0)
    assert BlocksMeasurement.problems([good, row("DDP", 1.0)]) == []
    for bad, message in (
        (replace(good, difference=2e-4), "NIG: weights differ by 2.0e-04 of the largest"),
        (replace(good, difference=float("nan")), "weights differ by nan"),
        (replace(good, link_bytes=108.0), r"bytes between nodes differ by \+5.9% from the formula"),
    ):
        (found,) = BlocksMeasurement.problems([bad])
        assert re.search(message, found)
    # LoCo changes weights, and gloo's own collectives send more: both are known.
    rough = [replace(good, method="NIG" + form, difference=0.1) for form in (LOCO, BOTH)]
    assert BlocksMeasurement.problems([*rough, replace(good, method="NIG" + NATIVE, link_bytes=150.0)]) == []


def test_losses_that_part_are_problems_of_gpt2() -> None:
    assert gpt2.apart([9.0, 8.1, 7.0], [9.0, 8.0, 7.0]) == pytest.approx(0.05)
    assert gpt2.apart([9.0, 9.0], [9.0, 9.0]) == float("inf")  # nothing was trained
    for method, difference, wrong in (("NIG", 0.03, 1), ("NIG", float("nan"), 1), ("NIG" + BOTH, 0.1, 0)):
        assert len(gpt2.Gpt2Measurement.problems([row(method, 1.0, difference=difference)])) == wrong


def test_outer_weights_and_bytes_are_bounded() -> None:
    good = row(OuterMeasurement.exact, 1.0, formula_bytes=100.0)
    assert OuterMeasurement.problems([good]) == []
    assert OuterMeasurement.problems([replace(good, difference=1e-3)]) == [
        "III outer, 32 bits is 1.0e-03 from FSDP2 outer"
    ]
    assert "1.050 of the formula's bytes" in OuterMeasurement.problems([replace(good, link_bytes=107.1)])[0]


def test_speed_is_that_of_compare_over_common_rounds() -> None:
    found = speed(row("NIG", 1.0, 2.0, 4.0), row("ZeRO-3", 3.0, 6.0))
    assert (found.value, found.low, found.high) == pytest.approx((3.0, 3.0, 3.0)) and found.shows_a_difference
    assert slower([row("IIG", 5.0), row("ZeRO-3", 29.0)], "ZeRO-3", {"IIG": 6.0, "NIG": 9.0}) == [
        "IIG is 5.80 times as fast as ZeRO-3 (5.80 to 5.80), not 6"
    ]
    muon = [row(name, seconds, setting="2x2-large-4-muon") for name, seconds in (("IIG", 5.0), ("ZeRO-3", 29.0))]
    assert len(BlocksMeasurement.missed(muon)) == 1 and BlocksMeasurement.missed(muon[:1]) == []


def test_a_choice_is_judged_by_the_best_that_fits() -> None:
    rows = [row("NNG", 1.0, predicted=1.0, memory=30.0), row("NIG", 1.2, predicted=0.9, memory=20.0)]
    rows.append(row("IIG", 1.1, predicted=2.0, memory=10.0))
    assert tabulated.regret(rows) == pytest.approx(1.2)  # NIG is chosen where NNG fits, too
    rows[0].more["seconds_predicted"] = 0.85
    assert tabulated.regret(rows) == pytest.approx(1.2 / 1.1)  # and where it does not, IIG is better than NIG
    assert tabulated.order(rows) == pytest.approx(0.5)


def test_the_smallest_as_fast_stands_beside_a_peer() -> None:
    wide = row("HSDP (reduces in fp32)", 4.0, memory=80e6)
    rows = [row("DDP", 2.0, memory=100e6), row("NIG", 1.5, predicted=1, memory=60e6), wide]
    rows += [row("IIG", 2.0, predicted=1, memory=40e6), row("NNG", 1.0, predicted=1, memory=10e6)]
    rows += [row("NIG" + WIDE, 3.0, predicted=1, memory=70e6), row("IIG" + BOTH, 9.0, predicted=1, memory=1e6)]
    assert tabulated.equal_speed(rows, SETTING)[1] == [
        ["DDP", "2.00", "100", "IIG, 2.00 s", "40 (0.40)", "none", ""],
        [wide.method, "4.00", "80", f"NIG{WIDE}, 3.00 s", "70 (0.88)", "none", ""],
    ]
    assert tabulated.smallest_as_fast(row("DDP", 1.4), rows, [""]) is None


def test_rows_survive_a_file_that_gets_columns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, first = tmp_path / "rows.csv", row("DDP", 5.0)
    measured = row("NIG", 3.0, 1.0, 2.0, 9.0, 2.5, predicted=0.75, memory=7.0, compute=0.5)
    for one in (first, measured, replace(measured, seconds=[[4.0]])):
        records.append_rows(path, [one.to_csv()])
    monkeypatch.setattr(records, "RESULTS", tmp_path)
    peer, kept = records.read("rows.csv")  # the last one of each
    assert (peer.method, peer.predicted, peer.formula_bytes) == ("DDP", None, None)
    assert (kept.median, kept.predicted, kept.floor) == (4.0, 0.75, pytest.approx(measured.floor, rel=1e-3))
    again = Row.from_csv({name: str(value) for name, value in measured.to_csv().items()})
    assert (again.median, min(again.steps), max(again.steps)) == (2.5, 1.0, 9.0)
    assert again.bytes_between == pytest.approx(measured.bytes_between) and list(again.held) == list(measured.held)


def test_pages_have_the_tables_of_their_rows() -> None:
    found = set()
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        found |= set(re.findall("<!-- table: tables.py (.*) -->", text))
        assert tables.written(text) == text, page.name
    assert found == set(tables.TABLES)


# What is emulated, and formulas by hand ###########################################################


@pytest.mark.parametrize(
    ("compute", "link", "expected"),
    [
        # By hand: seven of eight blocks hide 1.75 s of a reduction, and 0.875 s of a gather.
        (ONE, LinkSeconds(reduced=1.75, updates=0.875), 3.0),
        (ONE, LinkSeconds(reduced=2.0, updates=1.0), 3.0 + 0.25 + 0.125),
        # Reductions of four micro-batches: 9 + 1.75 s hide them.
        (FOUR, LinkSeconds(gradients=2.6875), 12.0),
        (FOUR, LinkSeconds(gradients=3.0, updates=1.0), 12.0 + 1.25 + 0.125),
        (FOUR, LinkSeconds(parameters=2.0, gradients=0.5), 12.0),
        (FOUR, LinkSeconds(parameters=3.0, gradients=0.5), 14.0),
    ],
)
def test_the_bound_of_a_step(compute: Compute, link: LinkSeconds, expected: float) -> None:
    assert bound(compute, link) == pytest.approx(expected)
    assert bound(ONE, LinkSeconds(reduced=2.0), alone=3.5) == pytest.approx(3.75)
    assert bound(FOUR, of_peer("DDP", 2.0, 4)) > bound(FOUR, of_peer("ZeRO-3", 2.0, 4)) == 12.0


def test_w_is_two_hops_of_the_whole_model() -> None:
    for setting, share in ((OVERLAP["2x2-1"], 1 / 2), (OVERLAP["4x2-4"], 3 / 4)):
        hop = share * setting.states.parameters * 8 / 100e6  # what a node receives
        assert wire_of(setting) == pytest.approx(2 * hop)
        compute = compute_of(setting, 0.5)
        assert compute.forward + compute.backward == pytest.approx(4 * hop)
        links = {name: of_strategy(s, setting.sizes, setting.states, 100) for name, s in STRATEGIES.items()}
        assert links["NIG"] == links["IIG"] == LinkSeconds(reduced=pytest.approx(hop), updates=pytest.approx(hop))
        assert links["NGG"] == LinkSeconds(gradients=pytest.approx(hop), updates=pytest.approx(hop))
        assert links["GIG"] == LinkSeconds(parameters=pytest.approx(2 * hop), reduced=pytest.approx(hop))


def test_copied_bytes_are_those_by_hand() -> None:
    model, adapters = 4 * 2 * 512 * 2048 * 4, 4 * 2 * (512 + 2048) * 4  # bytes
    full, lora = OFFLOAD["2x2-full-100"], OFFLOAD["2x2-LoRA-100"]
    copied = OffloadMeasurement.formula_copied
    # A step reads a rank's part in four forwards and backwards, and writes what is trained of it.
    assert copied(full, "ING") == copied(full, "IIG") == 9 * model / 2
    assert copied(full, "GGG") == copied(full, "ZeRO-3") == 9 * model / 4
    assert copied(lora, "ING") == (8 * (model + adapters) + adapters) / 2
    good = row("ING", 1.0, setting=full.name, more={"copied_bytes": 100.0, "copied_formula_bytes": 100.0})
    assert OffloadMeasurement.problems([good]) == []
    good.more["copied_bytes"] = 50.0
    assert OffloadMeasurement.problems([good]) == [
        "ING: bytes between host and device differ by -50.0% from the formula"
    ]


def test_a_copy_and_a_file_take_as_long_as_their_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    link, original = Pcie(), HostRows._copy
    link.carry(10**9)
    link.gigabytes = 2.0
    link.carry(10**9)
    assert slept == [0.5] and link.nbytes == 2 * 10**9
    with link.between():
        assert HostRows._copy is not original
    assert HostRows._copy is original
    disk, save, path = Disk(), torch.save, tmp_path / "file.pt"
    with disk.between():
        disk.megabytes = 0.1
        torch.save(torch.zeros(250_000), path)
    assert torch.save is save and slept[1:] == [pytest.approx(path.stat().st_size / 1e5, abs=1.0)]


def test_saves_that_stop_the_training_are_named() -> None:
    name, numel = "2x2-25M-1000", 12 * 8 * 512 * 512
    # By hand: 12 bytes of each parameter of a shard, one of four; and with p = N what the first rank writes in bf16.
    assert SavesMeasurement.buffers(SAVES[name], "IIG, asynchronous") == 3 * numel
    assert SavesMeasurement.buffers(SAVES[name], "NIG, asynchronous") == 5 * numel
    assert SavesMeasurement.buffers(SAVES[name], "NIG") == 0

    def save(method: str, critical: float, **more: Any) -> Row:
        due = SavesMeasurement.buffers(SAVES[name], method)
        columns = {"disk": "real", "critical_seconds": critical, "buffer_bytes": due, **more}
        return row(method, critical, setting=name, more=columns)

    whole = save("NIG", 1.0)
    good = [whole, save("NIG, asynchronous", 0.1, beside_median=1.01), save("NIG, asynchronous, zero_order", 0.9)]
    assert SavesMeasurement.missed(good) == SavesMeasurement.problems(good) == []
    late = save("NIG, asynchronous", 0.11, beside_median=1.06)
    assert SavesMeasurement.missed([whole, late]) == [
        f"{name}, real disk: NIG, asynchronous stops for 11.0% of a synchronous save, not 10%",
        f"{name}, real disk: NIG, asynchronous: steps beside it take 1.060, not 1.05",
    ]
    assert len(SavesMeasurement.missed([replace(whole, more={**whole.more, "disk": "slow"}), late])) == 1
    late.more["buffer_bytes"] = 2.0 * numel
    assert SavesMeasurement.problems([late]) == [
        "NIG, asynchronous has 50,331,648 bytes of host buffers, not 125,829,120"
    ]


@pytest.mark.deep
def test_gpt2_is_transformers_with_its_head_tied() -> None:
    pytest.importorskip("transformers")
    noted: list[torch.Tensor] = []
    model, again = gpt2.make_gpt2(gpt2.TINY, noted.append), gpt2.make_gpt2(gpt2.TINY)
    tokens = torch.randint(gpt2.TINY["vocab_size"], (1, 32))
    loss = model(tokens, tokens)
    assert noted == [loss] and not noted[0].requires_grad
    logits = model.model(input_ids=tokens).logits
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    for one, other in zip(model.parameters(), again.parameters(), strict=True):  # on every rank, and as bf16 has them
        assert torch.equal(one, other) and torch.equal(one, one.bfloat16().float())
    with torch.device("meta"):
        whole = gpt2.make_gpt2({})
    assert sum(p.numel() for p in whole.parameters()) == 124_439_808 and len(whole.blocks) == 12
