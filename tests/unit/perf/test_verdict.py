# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What is said of the emulated cluster's rows: what must hold, and how well the planner predicts; and how they are
kept. No measurement."""

import csv
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.strategy import STRATEGIES
from scripts import ROOT
from tests.perf import tables
from tests.perf.lib import cluster_rows, overlap_rows, verdict

PERF = ROOT / "tests" / "perf"

SETTING, MUON = "2x2-large-4", "2x2-large-4-muon"


def row(method: str, seconds: float, predicted: float = 0.0, memory: float = 1.0, mbit: float | None = 100) -> object:
    """Of a strategy if a prediction is given, else of a peer; nothing is wrong with it."""
    ours = {"formula_bytes": 100.0, "parts": {"within": predicted / 2, "update": predicted / 2}} if predicted else {}
    return cluster_rows.MethodRow(
        SETTING, mbit, method, "", [seconds], [0.0], link_bytes=102.0, headers=1.02, held=(memory, 0.0, 0.0), **ours
    )


def test_order_is_that_of_ranks() -> None:
    assert verdict.spearman([1, 2, 3, 4], [10, 20, 30, 1000]) == pytest.approx(1.0)
    assert verdict.spearman([1, 2, 3, 4], [4, 3, 2, 1]) == pytest.approx(-1.0)
    # By hand: ranks 1, 2.5, 2.5, 4 and 1, 2, 3, 4; covariance 4.5, variances 4.5 and 5.
    assert verdict.spearman([1, 2, 2, 3], [5, 6, 7, 8]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))


def test_a_choice_is_judged_by_the_best_that_fits() -> None:
    rows = [row("NNG", 1.0, 1.0, 30.0), row("NIG", 1.2, 0.9, 20.0), row("IIG", 1.1, 2.0, 10.0)]
    assert verdict.regret(rows) == pytest.approx(1.2)  # NIG is chosen where NNG fits, too
    rows[0] = replace(rows[0], parts={"within": 0.85})
    assert verdict.regret(rows) == pytest.approx(1.2 / 1.1)  # and where it does not, IIG is better than NIG
    rows[1] = replace(rows[1], parts={"within": 0.86})  # as fast as NNG, and smaller
    assert verdict.regret(rows) == pytest.approx(1.2)


def test_what_did_not_train_the_same_is_named() -> None:
    good = row("NIG", 1.0, 1.0)
    assert verdict.problems([good, row("DDP", 1.0)]) == []
    for bad, message in (
        (replace(good, difference=2e-4), "NIG: weights differ by 2.0e-04 of the largest"),
        (replace(good, difference=float("nan")), "weights differ by nan"),
        (replace(good, link_bytes=108.0), r"bytes between nodes differ by \+5.9% from the formula"),
    ):
        (found,) = verdict.problems([bad])
        assert re.search(message, found)
    # LoCo changes weights, and gloo's own collectives send more: both are known.
    rough = [replace(good, method="NIG" + form, difference=0.1) for form in (verdict.LOCO, verdict.BOTH)]
    assert verdict.problems([*rough, replace(good, method="NIG" + verdict.NATIVE, link_bytes=150.0)]) == []


def test_what_is_promised_is_looked_at_where_it_is() -> None:
    rows = [row("NIG" + verdict.BOTH, 1.0, 1.0), row("NIG", 3.3, 1.0), row("ZeRO-3", 29.0)]
    assert verdict.promised(rows) == [
        "NIG + LoCo + updates 3.30 times as fast as NIG (at least 3)",
        "MISSED: NIG + LoCo + updates 29.00 times as fast as ZeRO-3 (at least 30)",
    ]
    muon = [replace(one, setting=MUON) for one in (row("IIG", 5.0, 1.0), row("ZeRO-3", 31.0))]
    assert verdict.promised(muon) == ["IIG 6.20 times as fast as ZeRO-3 (at least 6)"]
    assert verdict.promised([replace(one, mbit=500) for one in rows]) == verdict.promised(rows[1:]) == []


def test_each_table_has_the_fastest_first_and_what_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row("NIG", 2.0, 1.0), row("DDP", 1.0), row("NNG", 1.0, 1.0, mbit=None)]
    said: list[list[str]] = []

    def say(some: list[cluster_rows.MethodRow]) -> None:
        said.append([one.method for one in some])

    assert not verdict.print_each(rows, lambda one: one.mbit, say)
    assert said == [["DDP", "NIG"], ["NNG"]]
    assert verdict.print_each([*rows, replace(rows[0], difference=1.0)], lambda one: one.mbit, say)
    assert "FAIL: NIG: weights differ" in capsys.readouterr().out


def test_rows_survive_a_file(tmp_path: Path) -> None:
    measured = row("NIG", 1.0, 0.75, 7.0, None)
    measured.seconds = [3.0, 1.0, 2.0, 9.0, 2.5]
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, measured.to_csv())
        writer.writeheader()
        writer.writerows([row("DDP", 5.0).to_csv(), measured.to_csv() | {"seconds_median": 77}, measured.to_csv()])
    peer, kept = cluster_rows.read(path)  # the last one of each
    assert (kept.median, min(kept.seconds), max(kept.seconds), kept.predicted) == (2.5, 1.0, 9.0, 0.75)
    for name in ("setting", "method", "mbit", "memory", "bytes_between", "formula_bytes", "difference", "floor"):
        assert getattr(kept, name) == getattr(measured, name), name
    assert (peer.predicted, peer.formula_bytes, peer.mbit) == (None, None, 100.0)


def test_tables_of_some_strategies_say_nothing_of_the_order() -> None:
    rows = [row(name, 1.0 + place, 1.0 + place) for place, name in enumerate(STRATEGIES)]
    rows += [row("NIG" + verdict.LOCO, 1.0, 1.0), row("DDP", 9.0)]
    line = tables.all_table(rows).splitlines()[2]
    assert line.endswith("| 1.000 |  | 1.000 |  |"), line


def test_the_pages_have_the_rows_that_are_kept(tmp_path: Path) -> None:
    kept = {path.name: path.read_text(encoding="utf-8") for path in tables.PAGES.glob("*.md")}
    wanted = {name for text in kept.values() for name in re.findall("<!-- table: tables.py (.*) -->", text)}
    assert wanted == {
        tables.ALL,
        *(f"2x2-large-4{end}" for end in ("", "-bf16", "-muon")),
        *tables.OVERLAP,
        *tables.OTHERS,
    }
    for name, text in kept.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    tables.write(tmp_path, cluster_rows.read(), overlap_rows.read())
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == kept
