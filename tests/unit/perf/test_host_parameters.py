# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of parameters in host memory says of its rows, and the link that it emulates. No measurement."""

import csv
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_ext.zero.sharded.rows import HostRows
from tests.perf.lib import host_parameter_rows
from tests.perf.lib.host_parameter_rows import SETTINGS, HostRow
from tests.perf.lib.pcie import Pcie

pytestmark = pytest.mark.quick

FULL, LORA = "2x2-full-100", "2x2-LoRA-100"
MODEL = 4 * 2 * 512 * 2048 * 4  # bytes of four blocks
ADAPTERS = 4 * 2 * (512 + 2048) * 4


def row(method: str, seconds: float, setting: str = FULL) -> HostRow:
    """Nothing is wrong with it."""
    due = SETTINGS[setting].bytes_between(method)
    return HostRow(
        setting,
        100.0,
        method,
        "",
        [seconds],
        [0.0],
        link_bytes=due or 1e6,
        formula_bytes=due,
        compute=0.5,
        gigabytes=25.0,
        copied=SETTINGS[setting].copied(method),
    )


def test_bytes_are_those_of_the_formulas() -> None:
    full, lora = SETTINGS[FULL], SETTINGS[LORA]
    # By hand: a step reads a rank's part in four forwards and backwards, and writes what is trained of it.
    assert full.copied("ING") == full.copied("IIG") == 9 * MODEL / 2
    assert full.copied("GGG") == full.copied("GNG") == full.copied("ZeRO-3") == 9 * MODEL / 4
    assert lora.copied("ING") == (8 * (MODEL + ADAPTERS) + ADAPTERS) / 2
    # A node receives half of the gradients and half of the updates, and of frozen parameters nothing.
    assert full.bytes_between("ING") == full.bytes_between("IIG") == MODEL
    assert lora.bytes_between("ING") == lora.bytes_between("IIG") == ADAPTERS
    assert lora.bytes_between("GNG") == 8 * (MODEL + ADAPTERS) / 2 + ADAPTERS / 2
    assert lora.bytes_between("ZeRO-3") is None


def test_what_is_too_slow_is_named() -> None:
    rows = [row("ZeRO-3", 20.0), row("GGG", 15.0), row("ING", 3.9), row("IIG", 4.1)]
    assert host_parameter_rows.problems(rows) == []
    assert host_parameter_rows.missed(rows) == ["IIG is 4.9 times as fast as ZeRO-3, not 5"]
    lora = [replace(one, setting=LORA, seconds=[20.0 if one.method == "ZeRO-3" else 0.4]) for one in rows]
    assert host_parameter_rows.missed(lora) == []
    assert host_parameter_rows.missed(rows[1:]) == []  # beside nothing


def test_other_bytes_are_named() -> None:
    good = row("ING", 1.0)
    (found,) = host_parameter_rows.problems([replace(good, copied=good.copied * 0.5)])
    assert found == "ING: bytes between host and device differ by -50.0% from the formula"
    few = row("ING", 1.0, LORA)
    assert host_parameter_rows.problems([replace(few, link_bytes=few.link_bytes + 4000)]) == []
    assert host_parameter_rows.problems([replace(few, link_bytes=few.link_bytes + 9000)])


def test_rows_survive_a_file(tmp_path: Path) -> None:
    measured, path = row("IIG", 2.0), tmp_path / "rows.csv"
    measured.seconds = [3.0, 1.0, 2.0]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, measured.to_csv())
        writer.writeheader()
        writer.writerows([row("IIG", 9.0).to_csv(), measured.to_csv()])
    (kept,) = host_parameter_rows.read(path)  # the last one
    for name in ("setting", "method", "mbit", "median", "spread", "copied", "gigabytes", "bytes_between"):
        assert getattr(kept, name) == getattr(measured, name), name
    assert host_parameter_rows.table([kept])[1][0][:2] == ["full, 100", "IIG"]


def test_a_copy_takes_as_long_as_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
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
