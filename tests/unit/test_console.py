# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bars of progress: on a terminal, by the first rank, and nowhere else."""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from deepspeed_ext import console


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def shown_by(work: Callable[[], object]) -> tuple[str, str]:
    """Return what work writes to stderr: to a log, and to a terminal."""
    log, terminal = io.StringIO(), Terminal()
    for stderr in (log, terminal):
        with contextlib.redirect_stderr(stderr):
            work()
    return log.getvalue(), terminal.getvalue()


def bars() -> None:
    assert sum(console.track_progress([1, 2, 3], "adding", "number")) == 6
    with console.progress_bar(2, "waiting", "turn") as shown:
        shown.update()
        shown.update()


@pytest.mark.quick
@pytest.mark.parametrize("rank", ["", "0", "1"])
def test_the_first_rank_shows_counts_on_a_terminal(monkeypatch: pytest.MonkeyPatch, rank: str) -> None:
    monkeypatch.setenv("RANK", rank) if rank else monkeypatch.delenv("RANK", raising=False)
    log, terminal = shown_by(bars)
    assert log == ""
    for count in ("adding: 100%", "3/3", "waiting: 100%", "2/2"):
        assert (count in terminal) == (rank != "1"), terminal
    assert terminal or rank == "1"


def converter_case() -> tuple[str, str]:
    """DeepSpeed's converter has a bar of its own, which ours takes the place of."""
    import argparse

    from deepspeed.checkpoint import ds_to_universal

    from deepspeed_ext.checkpoint import to_universal

    def main(arguments: argparse.Namespace) -> None:
        assert ds_to_universal._do_parallel_work(str, [1, 2, 3], 1) == ["1", "2", "3"]

    with mock.patch.object(ds_to_universal, "main", main):
        found = shown_by(lambda: to_universal._convert_into_folder(argparse.Namespace(output_folder="none")))
    log, terminal = shown_by(lambda: main(argparse.Namespace()))
    assert "3/3" in log and "3/3" in terminal  # theirs is back
    return found


def test_a_conversion_has_one_bar(ranks: Any) -> None:
    [(log, terminal)] = ranks(1).run(converter_case)
    assert log == "" and terminal.count("converting: 100%") == 1 and terminal.count("3/3") == 1


def kernels_case(folder: str) -> list[list[str]]:
    """Return what the builder of kernels says where they are not built yet, and where they are."""
    from torch.utils import cpp_extension

    from deepspeed_ext.op_builder import LocoBuilder
    from tests.harness.logs import logged

    said = []
    for _ in range(2):
        with (
            mock.patch.object(cpp_extension, "_get_build_directory", lambda *_, **__: folder),
            mock.patch.object(LocoBuilder, "is_built", lambda self: False),
            mock.patch.object(LocoBuilder, "jit_load", lambda self, verbose: Path(folder, "loco.so").touch()),
            logged() as lines,
        ):
            LocoBuilder().load()
        said.append([line for _, line in lines])
    return said


def test_compiling_is_announced_once(ranks: Any, tmp_path: Path) -> None:
    [(first, again)] = ranks(1).run(kernels_case, str(tmp_path))
    assert len(first) == 1 and f"compiling the kernels of LoCo in {tmp_path}, which takes a minute" in first[0]
    assert again == []
