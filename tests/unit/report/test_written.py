# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A report is written as a whole, or the last one stays, and names the device that trained."""

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import logger

from deepspeed_ext import clocks
from deepspeed_ext.report.made import _made, write
from tests.harness import reports

pytestmark = pytest.mark.quick


def test_a_report_that_cannot_be_written_leaves_the_last_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(reports.report(), tmp_path)
    before = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    assert before.keys() == {"report.html", "report.json", "trace.json"}
    put = Path.write_text

    def full(path: Path, text: str, **more: Any) -> int:
        if "trace" in path.name:
            put(path, text[:10], **more)
            raise OSError(28, "No space left on device")
        return put(path, text, **more)

    with mock.patch.object(Path, "write_text", full), mock.patch.object(logger, "propagate", True):
        write(reports.report("IIG"), tmp_path)
    assert {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()} == before
    assert "No space left on device" in caplog.text


def test_ranks_on_the_processors_of_a_machine_with_gpus_are_said_to_be_there() -> None:
    of_kind, gpu = torch.get_device_module, mock.Mock(get_device_name=lambda: "a GPU")
    with (
        mock.patch.object(torch, "get_device_module", lambda kind=None: of_kind(kind) if kind else gpu),
        mock.patch.object(clocks, "get_accelerator", lambda: mock.Mock(current_device_name=lambda: "cpu")),
    ):
        assert _made([])["device"] == "cpu"
