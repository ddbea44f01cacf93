# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Damages files of checkpoints, and verifies them by the command."""

import contextlib
import functools
import io
import os
import random
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.folder import RECORD, CheckpointError
from deepspeed_ext.tools.main import main
from tests.harness.save_faults import flip, truncate


class Payload:
    """Creates a folder when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (f"{self.path}.ran",)


def check_each_of(folder: Path, files: int) -> None:
    """Record small files of ranks; with a flipped bit in each, ``verify`` names all, and with fewer bytes any load."""
    chance = random.Random(0)
    paths = [folder / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(files)]
    for rank, path in enumerate(paths):
        with digests.recording(str(path), rank):
            path.write_bytes(chance.randbytes(chance.randint(1, 5000)))
    digests.collect(folder)
    assert verified(folder) == (0, f"{folder}: {files} files, 0 problems\n")
    for path in paths:
        flip(path, chance)
    status, output = verified(folder)
    assert status == 1 and f"{files} files, {files} problems" in output
    digests.check(folder, slice(None), with_digests=False)  # which sizes do not show
    read_once = functools.cache(digests.read_record)
    with mock.patch.object(digests, "read_record", read_once):
        for number, path in enumerate(sorted(paths)):
            rank, size = paths.index(path), path.stat().st_size
            assert f"{path} has changed: its digest differs from that of the {size} bytes that rank {rank} " in output
            truncate(path, chance)
            with pytest.raises(CheckpointError, match=f"{path} has .* bytes, expected {size}, which rank {rank} "):
                digests.check(folder, slice(number, number + 1), with_digests=False)


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
    record = (folder / RECORD).read_text()
    (folder / RECORD).write_text(record.replace('"version": 1', '"version": 9'))  # one bit
    assert verified(folder)[0] == 1
    (folder / RECORD).unlink()
    status, output = verified(folder)
    assert status == 0 and f"has no {RECORD}" in output
    flip(path)
    assert verified(folder)[0] == 1 and f"{path} has changed: the checksum" in verified(folder)[1]
