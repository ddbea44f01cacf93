# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A killed build does not block later builds; if its death cannot be detected, waiting processes name what they wait
for.
"""

import fcntl
import multiprocessing
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.utils import cpp_extension

from deepspeed_ext import op_builder

TINY = """
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "tiny"};
PyMODINIT_FUNC PyInit_tiny(void) { return PyModule_Create(&module); }
"""
FORKED = multiprocessing.get_context("fork")


def in_child(act: Callable[[], None]) -> int:
    """Run a function in a fork of the process, and return the exit code."""
    child = FORKED.Process(target=act)
    child.start()
    child.join(60)
    assert child.exitcode is not None
    return child.exitcode


def killed_while_it_builds(folder: Path) -> None:
    with op_builder.build_once(folder, "it"):
        (folder / "lock").touch()  # as torch does
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record warnings, which appear early."""
    messages: list[str] = []
    monkeypatch.setattr(op_builder.logger, "warning", messages.append)
    monkeypatch.setattr(op_builder, "_UNKNOWN_SECONDS", 0.0)
    monkeypatch.setattr(op_builder, "_ALIVE_SECONDS", 0.5)
    return messages


@pytest.fixture
def blocking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the existence of torch's lock file block, as before torch 2.15."""
    monkeypatch.setattr(cpp_extension, "FileBaton", object(), raising=False)


def test_ranks_build_after_a_killed_build(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny.cpp").write_text(TINY)
    assert in_child(lambda: killed_while_it_builds(tmp_path / "tiny")) == -signal.SIGKILL
    answers = ranks(2).run(real_build_case, str(tmp_path), timeout=60)
    blocks = hasattr(cpp_extension, "FileBaton")  # from torch 2.15 on the file means nothing, and stays
    assert sorted(removed for removed, _ in answers) == [False, blocks]
    assert all(file == f"{tmp_path}/tiny/tiny.so" for _, file in answers)
    assert (tmp_path / "tiny" / "lock").exists() is not blocks


def real_build_case(root: str) -> tuple[bool, str]:
    """Return whether this rank has removed the dead process's lock, and the library that torch has loaded."""

    class Tiny(op_builder.LocoBuilder):
        NAME = "tiny"  # of one name torch knows one extension in a process

        def sources(self) -> list[str]:
            return [f"{root}/tiny.cpp"]

    os.environ["TORCH_EXTENSIONS_DIR"] = root
    messages: list[str] = []
    op_builder.logger.warning = messages.append
    try:
        file = Tiny().load(verbose=False).__file__
    finally:
        del op_builder.logger.warning
    return any(f"removed {root}/tiny/lock" in message for message in messages), file


def waits(folder: Path, told: list[str], done: Callable[[], None]) -> str:
    """Return the messages of two processes that wait for the folder until this is done, and then use it together."""
    together = threading.Barrier(2, timeout=20)

    def build() -> None:
        with op_builder.build_once(folder, "it"):
            together.wait()

    waiters = [threading.Thread(target=build, daemon=True) for _ in range(2)]
    for waiter in waiters:
        waiter.start()
    deadline = time.monotonic() + 20
    while len(told) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(3 * op_builder._POLL_SECONDS)
    done()
    for waiter in waiters:
        waiter.join(20)
    assert not together.broken and not any(waiter.is_alive() for waiter in waiters)
    first, second = told  # each says it once
    assert first == second
    return first


@pytest.mark.usefixtures("blocking")
@pytest.mark.parametrize("last", ["unknown", "of another machine", "here, and of another machine before", "no flock"])
def test_lock_of_a_possibly_live_holder_is_waited_for(
    tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    lock = tmp_path / "lock"
    if "another machine" in last:
        (tmp_path / "holders").write_text("another boot")
    if "here" in last or last == "no flock":
        in_child(lambda: killed_while_it_builds(tmp_path))
    if last == "no flock":
        monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(95, "Operation not supported")))
    lock.touch()
    os.utime(lock, (time.time() - 300, time.time() - 300))
    message = waits(tmp_path, told, lock.unlink)
    assert re.match(rf"deepspeed_ext: waiting for {lock}, 3\d\d s old, the lock file of a process", message), message
    assert message.endswith("If no process on any machine builds there, remove the file."), message


@pytest.mark.usefixtures("blocking")
def test_lock_of_a_building_process_is_waited_for(tmp_path: Path, told: list[str]) -> None:
    builder = op_builder.build_once(tmp_path, "it")
    builder.__enter__()
    (tmp_path / "lock").touch()

    def finish() -> None:
        (tmp_path / "lock").unlink()
        builder.__exit__(None, None, None)

    message = waits(tmp_path, told, finish)
    assert message.startswith("deepspeed_ext: waiting for another process, which builds it"), message


def test_file_locked_by_torch_does_not_block(tmp_path: Path, told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(cpp_extension, "FileBaton", raising=False)  # as in torch 2.15
    lock = tmp_path / "lock"
    lock.touch()  # left there after a build
    with monkeypatch.context() as patch:
        patch.setattr(op_builder, "_boot_id", lambda: "another")
        assert in_child(lambda: built(tmp_path)) == 0
    assert in_child(lambda: built(tmp_path)) == 0
    with op_builder.build_once(tmp_path, "it"):
        assert lock.exists()
    assert not told


def built(folder: Path) -> None:
    """Build, and end; a waiting build does not end."""
    threading.Timer(10, lambda: os._exit(1)).start()
    with op_builder.build_once(folder, "it"):
        os._exit(0)
