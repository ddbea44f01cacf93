# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark of a mixture of experts says of its rows. No measurement."""

import csv
from pathlib import Path

import pytest

from tests.perf import mixture_cluster
from tests.perf.lib import mixture_rows
from tests.perf.lib.mixture_rows import MixtureRow

pytestmark = pytest.mark.quick

NAME = "2x2-100"


def row(method: str, *seconds: float, setting: str = NAME, **more: float) -> MixtureRow:
    setup = f"of {method}"
    return MixtureRow(setting, 100.0, method, setup, list(seconds), [0.0], link_bytes=25e6, compute=0.5, **more)


def test_the_best_of_ours_is_held_to_its_promise() -> None:
    rows = [row("ZeRO-3", 30.0), row("DDP", 1.0), row("IIG", 7.0), row("AutoEP, NIG", 6.5)]
    assert mixture_rows.speeds(rows)["IIG"] == pytest.approx(30 / 7)
    assert mixture_cluster.missed(rows) == ["AutoEP, NIG is 4.6 times as fast as ZeRO-3, not 5"]
    assert mixture_cluster.missed([*rows, row("NIG", 6.0)]) == []
    assert mixture_cluster.missed(rows[1:]) == []  # beside nothing


def test_rows_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    ours = row("AutoEP, NIG", 2.0, 3.0, 5.0, formula_bytes=20e6, formula_experts=16e6)
    dense = row("NIG", 4.0, formula_bytes=25e6, formula_experts=0.0)
    elsewhere = row("AutoEP, NIG", 1.0, setting="another")
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ours.to_csv())
        writer.writeheader()
        for one in (row("AutoEP, NIG", 9.0), ours, row("ZeRO-3", 30.0), dense, elsewhere):
            writer.writerow(one.to_csv())
    kept, peer, *others = mixture_rows.read(path)  # the last one of each
    assert [one.setting for one in others] == [NAME, "another"]
    assert (kept.median, kept.formula_experts, kept.floor) == (3.0, 16e6, ours.floor)
    assert peer.formula_experts is None and peer.setup == "of ZeRO-3"
    assert mixture_rows.table([kept, peer, others[0]])[1] == [
        ["ZeRO-3", "30.00", "30.00 .. 30.00", "2.50", "1.0", "25.0", "", "", "0"],
        ["NIG", "4.00", "4.00 .. 4.00", "2.50", "7.5", "25.0", "1.000", "", "0"],
        ["AutoEP, NIG", "3.00", "2.00 .. 5.00", "2.50", "10.0", "25.0", "1.250", "16.0", "0"],
    ]
