# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The emulated cluster: its counters, its rate, its launchers, and that nothing is left on the machine. Ranks are
short scripts without torch and, except in one test, without a launcher, so they start at once."""

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.emulation.launching import environment
from tests.harness.tiers import deep, with_cases

PAYLOAD = 2_000_000
MBIT = 80
BURST = 128 * 1024  # that a link passes at once

TRANSFERS = f"""
import json, os, socket, sys, time
from scripts.emulation.network import Link, address

rank, link = int(os.environ["RANK"]), Link()
mine = socket.create_server((address(rank // 2), 1000 + rank))

def connect(other):
    while True:
        try:
            return socket.create_connection((address(other // 2), 1000 + other))
        except ConnectionRefusedError:
            time.sleep(0.02)

def measure(connection, sends):
    # A byte each way, so that both are there; then the payload, and a byte when it has arrived.
    connection.sendall(b"1"), connection.recv(1)
    sent, begin, missing = link.sent(), time.monotonic(), {PAYLOAD}
    if sends:
        connection.sendall(bytes(missing)), connection.recv(1)
    else:
        while missing:
            missing -= len(connection.recv(missing))
        connection.sendall(b"1")
    seconds = time.monotonic() - begin
    time.sleep(0.1)  # for acknowledgments that are late
    return [seconds, link.sent() - sent]

found = {{}}
if rank % 2 == 0:
    found["between"] = measure(connect(0) if rank else mine.accept()[0], rank == 2)
if rank >= 2:
    found["within"] = measure(connect(2) if rank == 3 else mine.accept()[0], rank == 2)
print(json.dumps(found))
"""

# Each rank starts a process that no signal to its own group reaches, as those of a launcher are, and writes both ids.
LIFE = """
import os, pathlib, subprocess, sys, time
child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
path = pathlib.Path(sys.argv[1], os.environ["RANK"])
path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".new").rename(path)
if sys.argv[2] == "fails" and os.environ["RANK"] == "1":
    while not path.with_name("0").exists():  # a failure ends the other rank, wherever it is
        time.sleep(0.01)
    sys.exit(3)
time.sleep(0 if sys.argv[2] == "succeeds" else 300)
"""

SHOW = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
known = [os.environ[name] for name in names] + [os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")]
os.write(1, (" ".join(known) + "\\n").encode())  # at once: the ranks of a node share a pipe
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def start(emulation: None, tmp_path: Path) -> Iterator[Start]:
    """Starts the command on a script of this code; ended with the test."""
    processes: list[subprocess.Popen[str]] = []

    def run(code: str, *options: str, arguments: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
        script = tmp_path / "script.py"
        script.write_text(code)
        command = [sys.executable, "-m", "scripts.emulation.cluster", *options, str(script), *arguments]
        heard = lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL)  # noqa: E731 - also where tests run under nohup
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        processes.append(subprocess.Popen(command, **pipes, env=environment(), text=True, preexec_fn=heard))
        return processes[-1]

    yield run
    for process in processes:
        process.terminate()
        process.wait(30)  # not for its pipes to close, which ranks may hold that a failed test has left


def namespaces(pid: int) -> set[str]:
    """The namespaces that the process with this id has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {name for name in re.findall(r"^\S+", listed, re.MULTILINE) if name.startswith(f"emulated-{pid}-")}


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started(folder: Path) -> list[int]:
    """The ids of both ranks of ``LIFE`` and of their children, once they run."""
    paths, deadline = [folder / "0", folder / "1"], time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "ranks did not start"
        time.sleep(0.05)
    return [int(pid) for path in paths for pid in path.read_text().split()]


def test_bytes_between_nodes_are_counted_and_limited(start: Start) -> None:
    process = start(TRANSFERS, "--launcher", "none", "--rate", str(MBIT))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    (sender,) = [json.loads(results) for results in re.findall(r'({"between".*"within".*})', out)]
    assert PAYLOAD < sender["between"][1] < 1.02 * PAYLOAD and sender["within"][1] < 2000
    assert sender["between"][0] > (PAYLOAD - BURST) * 8 / (MBIT * 1e6)
    (from_0, to_0), (from_1, to_1) = (map(int, row) for row in re.findall(r"node \d: (\d+) sent, (\d+) received", out))
    assert PAYLOAD < from_1 < 1.03 * PAYLOAD and from_0 < 0.04 * PAYLOAD
    assert to_0 == pytest.approx(from_1, rel=0.01) and to_1 == pytest.approx(from_0, rel=0.1)


@with_cases(
    ("how", "number", "status"),
    ("fails", None, 3),
    ("waits", signal.SIGTERM, 128 + signal.SIGTERM),
    *deep(
        ("succeeds", None, 0),
        ("waits", signal.SIGINT, 128 + signal.SIGINT),
        ("waits", signal.SIGHUP, 128 + signal.SIGHUP),
    ),
)
def test_the_cluster_leaves_no_process_or_namespace(
    start: Start, tmp_path: Path, how: str, number: int | None, status: int
) -> None:
    process = start(LIFE, "--launcher", "none", "--ranks-per-node", "1", arguments=(str(tmp_path), how))
    pids = started(tmp_path)
    if number is not None:
        assert all(alive(pid) for pid in pids)
        assert namespaces(process.pid) == {f"emulated-{process.pid}-{name}" for name in ("switch", "node0", "node1")}
        process.send_signal(number)
    _, err = process.communicate(timeout=280)
    assert ("node 1 failed" in err) == (how == "fails"), err
    assert process.returncode == status
    assert not any(alive(pid) for pid in pids) and not namespaces(process.pid)


@pytest.mark.deep
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_launchers_start_the_ranks(start: Start, launcher: str) -> None:
    process = start(SHOW, "--launcher", launcher, "--ranks-per-node", "4,2")
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    for rank in range(6):
        prefix, size = ("[node 1] ", 2) if rank >= 4 else ("", 4)
        assert f"{prefix}{rank} {rank % 4} 6 internode {size}" in out.splitlines()
