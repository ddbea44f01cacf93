# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Damages files of checkpoints, and verifies them by the command."""

import contextlib
import io
import os
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from deepspeed_ext.checkpoint.folder import RECORD
from deepspeed_ext.tools.main import main


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (f"{self.path}.ran",)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def verified(*words: str | Path) -> tuple[int, str]:
    """Return the exit status and the output of ``python -m deepspeed_ext verify``."""
    output, status = io.StringIO(), 0
    with mock.patch.object(sys, "argv", ["", "verify", *map(str, words)]), contextlib.redirect_stdout(output):
        try:
            main()
        except SystemExit as end:
            status = int(str(end.code))
    return status, output.getvalue()


def check_verification(folder: Path) -> None:
    """Verify a checkpoint with each file damaged or missing, then without a record."""
    assert verified(folder)[0] == verified(folder.parent, "--tag", folder.name)[0] == 0
    assert verified(folder / "none")[0] == verified(folder.parent, "--tag", "none")[0] == 2
    (folder / "mp_rank_09_model_states.pt").write_text("")
    assert "mp_rank_09_model_states.pt is unexpected" in verified(folder)[1]
    (folder / "mp_rank_09_model_states.pt").unlink()
    for path in sorted(folder.iterdir()):
        content = path.read_bytes()
        flip(path)
        status, output = verified(folder)
        assert status == 1 and str(path) in output and (" that rank " in output or path.name == RECORD)
        path.unlink()
        status, output = verified(folder)
        assert path.name == RECORD or (status == 1 and f"{path} is missing, which rank " in output), output
        path.write_bytes(content)
    (folder / RECORD).unlink()
    status, output = verified(folder)
    assert status == 0 and f"has no {RECORD}" in output
    flip(path)
    assert verified(folder)[0] == 1 and f"{path} has changed: the checksum" in verified(folder)[1]
