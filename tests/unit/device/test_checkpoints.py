# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints saved on the host, and on a device that is not the host, load on both."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.device_on_host import cases
from tests.harness.tiers import deep

LOCO = {"zeropp_loco_param": {}}

RESUMED: list[tuple[str, dict[str, Any], tuple[str, ...], bool]] = [
    ("Adam", {}, ("NIG", "IIG"), False),
    ("Adam", {**LOCO, **cases.PINNED}, ("IIG", "NII"), True),
    ("Adam", {**LOCO, "paro_quantized_updates": {}}, ("NIG", "ING"), True),
    ("Adam", cases.HOST, ("ING", "IIG"), True),
    ("Muon", {}, ("III", "NIG"), False),
    ("Muon", cases.PAGEABLE, ("GNG", "NIG"), True),
]


@pytest.mark.parametrize(
    "optimizer, zero, names, from_device",
    [*((*options, names[:1], from_device) for *options, names, from_device in RESUMED[1::2]), *deep(*RESUMED)],
    ids=str,
)
def test_resumed_run_matches_uninterrupted_run_on_both(
    run_on_device: Any, tmp_path: Path, optimizer: str, zero: dict[str, Any], names: tuple[str, ...], from_device: bool
) -> None:
    for rows in run_on_device(cases.resume, str(tmp_path), names, optimizer, zero, from_device):
        assert rows == [(name, {}, {}, {}) for name in names]


def test_export_from_device_equals_model(run_on_device: Any, tmp_path: Path) -> None:
    for rows in run_on_device(cases.export, str(tmp_path), ("NIG", "IIG")):
        assert rows == [("NIG", []), ("NIG", []), ("IIG", []), ("IIG", [])]


FEW_BITS: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
ROWS: list[tuple[str, str, dict[str, Any], str]] = [("NIG", "bf16", {}, "Adam")]
MORE: list[tuple[str, str, dict[str, Any], str]] = [
    ("IIG", "bf16", FEW_BITS, "Adam"),
    ("NII", "fp16", cases.PAGEABLE, "Adam"),
    ("NIG", "bf16", cases.PINNED, "Muon"),
    ("III", "bf16", cases.OUTER, "Adam"),
]


@pytest.mark.parametrize("rows", [ROWS, *deep(MORE)], ids=len)
def test_asynchronous_saves_equal_synchronous_saves(
    run_on_device: Any, tmp_path: Path, rows: list[tuple[str, str, dict[str, Any], str]]
) -> None:
    for twins in run_on_device(cases.twins, str(tmp_path), rows):
        assert len(twins) == len(rows)
        for twin in twins:
            assert twin.different == [] and twin.files >= 28 and twin.same, tuple(twin)
