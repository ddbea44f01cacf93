# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of saves says of its rows, and the disk that it emulates. No measurement."""

import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.perf.lib import save_rows
from tests.perf.lib.disk import Disk
from tests.perf.lib.save_rows import SETTINGS, SaveRow

pytestmark = pytest.mark.quick

NAME = "2x2-25M-1000"
MODEL = 12 * 8 * 512 * 512


def row(method: str, seconds: float) -> SaveRow:
    """Nothing is wrong with it."""
    due = SETTINGS[NAME].buffers(method)
    made = SaveRow(NAME, 1000.0, method, "", [seconds], [0.0], buffers=due, load=[2.0], first=[2 * seconds])
    if "asynchronous" not in method:
        return replace(made, waits=[0.0])
    return replace(made, waits=[0.02], behind=[3.0], steps=[1.0], beside=[1.01], lost=[0.0], cpu=[0.5])


def test_buffers_are_those_of_the_formula() -> None:
    setting = SETTINGS[NAME]
    # By hand: 12 bytes of each parameter of a shard, one of four; and with p = N what the first rank writes in bf16.
    assert setting.parameters == MODEL
    assert setting.buffers("IIG, asynchronous") == 3 * MODEL
    assert setting.buffers("NIG, asynchronous") == setting.buffers("NIG, asynchronous, zero_order") == 5 * MODEL
    assert setting.buffers("NIG") == setting.buffers("ZeRO-3") == 0
    good = row("IIG, asynchronous", 0.1)
    assert save_rows.problems([good, row("IIG", 1.0)]) == []
    (found,) = save_rows.problems([replace(good, buffers=2.0 * MODEL)])
    assert found == "IIG, asynchronous has 50,331,648 bytes of host buffers, not 75,497,472"


def test_what_stops_for_too_long_is_named() -> None:
    rows = [row("NIG", 1.0), row("NIG, asynchronous", 0.08), row("NIG, asynchronous, zero_order", 0.9)]
    assert save_rows.missed(rows) == []
    late = [rows[0], replace(rows[1], seconds=[0.09], beside=[1.0, 1.06, 1.07])]
    assert save_rows.missed(late) == [
        f"{NAME}, real disk: NIG, asynchronous stops for 11.0% of a synchronous save, not 10%",
        f"{NAME}, real disk: NIG, asynchronous: steps beside it take 1.060, not 1.05",
    ]
    assert save_rows.missed([row("NIG", 0.5), rows[1], replace(rows[0], disk="slow")]) != []  # of the same disk
    assert save_rows.missed(rows[1:]) == []  # beside nothing


def test_rows_survive_a_file(tmp_path: Path) -> None:
    measured, path = row("NIG, asynchronous", 0.2), tmp_path / "rows.csv"
    measured.seconds, measured.waits, measured.beside = [0.3, 0.1, 0.2], [0.0, 0.05, 0.01], [1.0, 1.1]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, measured.to_csv())
        writer.writeheader()
        for one in (row("NIG, asynchronous", 9.0), measured, row("NIG", 2.0)):
            writer.writerow(one.to_csv())
    kept, whole = save_rows.read(path)  # the last one of each
    for name in ("setting", "method", "disk", "mbit", "median", "spread", "critical", "buffers"):
        assert getattr(kept, name) == pytest.approx(getattr(measured, name)), name
    assert whole.beside == [] and whole.behind == []
    synchronous, aside = save_rows.table([kept, whole])[1]  # in the order of methods
    place = "25M, 1000, real"
    assert synchronous == [place, "NIG", "2.00", "2.00 .. 2.00", "4.00", "2.00", *[""] * 6, "0.0"]
    assert aside[:5] == [place, "NIG, asynchronous", "0.20", "0.10 .. 0.30", "0.40"]
    assert aside[5:] == ["0.21", "10.5%", "3.00", "0.50", "1.00", "1.050", "126", "0.0"]


def test_a_file_takes_as_long_as_its_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    disk, original, path = Disk(), torch.save, tmp_path / "file.pt"
    with disk.between():
        torch.save(torch.zeros(250_000), path)
        assert slept == []
        disk.megabytes = 0.1
        torch.save(torch.zeros(250_000), path)
    assert torch.save is original
    assert slept == [pytest.approx(path.stat().st_size / 1e5, abs=1.0)] and torch.load(path).numel() == 250_000
