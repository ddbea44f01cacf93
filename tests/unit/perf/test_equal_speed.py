# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which of NIG and IIG is beside a peer of equal speed. No measurement."""

import pytest

from tests.perf.lib import equal_speed
from tests.perf.lib.cluster_rows import BOTH, LOCO, SETTINGS, WIDE, MethodRow

pytestmark = pytest.mark.quick

SETTING = "2x2-large-4-bf16"


def row(method: str, seconds: float, megabytes: float, ours: bool = True, mbit: float = 100) -> MethodRow:
    formula = 1.0 if ours else None
    return MethodRow(SETTING, mbit, method, "", [seconds], formula_bytes=formula, held=(megabytes * 1e6, 0.0, 0.0))


def test_the_smallest_that_is_as_fast() -> None:
    peer = row("DDP", 2.0, 90, ours=False)
    rows = [peer, row("NIG", 1.5, 60), row("IIG", 2.0, 40), row("NNG", 1.0, 10), row("NIG" + LOCO, 0.5, 30)]
    found = equal_speed.smallest(peer, rows, [""])
    assert found is not None and found.method == "IIG"  # as fast to the digit is as fast
    rows[2] = row("IIG", 2.1, 40)
    found = equal_speed.smallest(peer, rows, [""])
    assert found is not None and found.method == "NIG"
    assert equal_speed.smallest(row("DDP", 1.4, 90, ours=False), rows, [""]) is None


def test_a_line_for_each_peer_in_its_precision() -> None:
    rows = [
        row("HSDP (reduces in fp32)", 4.0, 80, ours=False),
        row("DDP", 2.0, 100, ours=False),
        row("ZeRO-1", 0.4, 50, ours=False),
        row("NIG", 1.0, 60),
        row("NIG" + WIDE, 3.0, 70),
        row("IIG" + BOTH, 0.5, 55),
        row("DDP", 9.0, 1, ours=False, mbit=500),
    ]
    header, lines = equal_speed.table(rows, SETTING, 100)
    assert lines == [
        ["ZeRO-1", "0.40", "50", "none", "", "none", ""],
        ["DDP", "2.00", "100", "NIG, 1.00 s", "60 (0.60)", "IIG + LoCo + updates, 0.50 s", "55 (0.55)"],
        [rows[0].method, "4.00", "80", f"NIG{WIDE}, 3.00 s", "70 (0.88)", "IIG + LoCo + updates, 0.50 s", "55 (0.69)"],
    ]
    assert all(len(line) == len(header) for line in lines)


def test_the_setting_in_bf16_has_both_reductions() -> None:
    from tests.perf.emulated_cluster import all_methods, methods_of

    in_bf16, in_fp32 = methods_of(SETTINGS[SETTING]), methods_of(SETTINGS["2x2-large-4"])
    assert {"HSDP (reduces in fp32)", "HSDP (reduces in bf16)", "NIG" + WIDE, "NIG", "ZeRO-1"} <= set(in_bf16)
    assert set(in_bf16) <= set(all_methods())
    assert not any("reduces in" in name for name in in_fp32) and "HSDP" in in_fp32
