# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints saved on the host, and on a device that is not the host, load on both."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.device_on_host import cases

LOCO = {"zeropp_loco_param": {}}


@pytest.mark.parametrize(
    "optimizer, zero, names, from_device",
    [
        ("Adam", {}, ("NIG", "IIG"), False),
        ("Adam", {**LOCO, **cases.PINNED}, ("NII", "IIG"), True),
        ("Adam", {**LOCO, "paro_quantized_updates": {}}, ("NIG", "ING"), True),
        ("Adam", cases.HOST, ("ING", "IIG"), True),
        ("Muon", {}, ("NIG", "III"), False),
        ("Muon", cases.PAGEABLE, ("NIG", "GNG"), True),
    ],
    ids=str,
)
def test_a_resumed_run_is_the_uninterrupted_one_on_both(
    run_on_device: Any,
    tmp_path: Path,
    optimizer: str,
    zero: dict[str, Any],
    names: tuple[str, ...],
    from_device: bool,
) -> None:
    for rows in run_on_device(cases.resume, str(tmp_path), names, optimizer, zero, from_device):
        assert rows == [(name, {}, {}, {}) for name in names]


def test_an_export_from_the_device_is_the_model(run_on_device: Any, tmp_path: Path) -> None:
    for rows in run_on_device(cases.export, str(tmp_path), ("NIG", "IIG")):
        assert rows == [("NIG", []), ("IIG", [])]
