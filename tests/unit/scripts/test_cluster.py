# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The emulated cluster: what its counters count, that its rate is kept, and that it leaves nothing on the machine.

Ranks here are short scripts without torch and, except in one test, without a launcher, so they start at once.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from scripts.emulation import cluster, network
from scripts.emulation.launching import environment
from tests.harness.tiers import deep

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
    sent, received, begin, missing = link.sent(), link.received(), time.monotonic(), {PAYLOAD}
    connection.sendall(b"1"), connection.recv(1)
    if sends:
        connection.sendall(bytes(missing)), connection.recv(1)
    else:
        while missing:
            missing -= len(connection.recv(missing))
        connection.sendall(b"1")
    seconds = time.monotonic() - begin
    time.sleep(0.1)  # for acknowledgments that are late
    return [seconds, link.sent() - sent, link.received() - received]

found = {{}}
if rank % 2 == 0:
    between = connect(0) if rank else mine.accept()[0]
    found["limited"] = measure(between, rank == 2)
    link.limit(None)
    found["unlimited"] = measure(between, rank == 2)
if rank >= 2:
    within = connect(2) if rank == 3 else mine.accept()[0]
    found["within"] = measure(within, rank == 2)
print(json.dumps(found))
"""

# Each rank starts a process that no signal to its own group reaches, as those of a launcher are, and says so.
LIFE = """
import os, pathlib, signal, subprocess, sys, time
folder, how = sys.argv[1:]
child = subprocess.Popen(["sleep", "300"], start_new_session=True, stdout=subprocess.DEVNULL)
path = pathlib.Path(folder, os.environ["RANK"])
path.with_suffix(".new").write_text(f"{os.getpid()} {child.pid}")
path.with_suffix(".new").rename(path)
if how == "waits" or os.environ["RANK"] == "0" and how != "succeeds":
    time.sleep(300)
if how == "fails":
    sys.exit(3)
if how == "is killed":
    os.kill(os.getpid(), signal.SIGKILL)
"""

SHOW = """
import os
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "GLOO_SOCKET_IFNAME")
known = [os.environ[name] for name in names] + [os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")]
os.write(1, (" ".join(known) + "\\n").encode())  # at once: the ranks of a node share a pipe
"""

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture(scope="module")
def emulation() -> None:
    """Skips where this machine cannot emulate a network, as a container may not."""
    if lacks := network.missing():
        pytest.skip(f"needs {'; '.join(lacks)}")
    try:
        with network.Network(1):
            pass
    except RuntimeError as error:
        pytest.skip(f"namespaces and limits are not permitted here: {error}")


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
    """Those that the process with this id has made."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {name for name in re.findall(r"^\S+", listed, re.MULTILINE) if name.startswith(f"emulated-{pid}-")}


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and that nobody has waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def started(folder: Path, ranks: int, process: "subprocess.Popen[str]") -> list[int]:
    """The ids of all ranks of ``LIFE`` and of their children, once they run."""
    paths = [folder / str(rank) for rank in range(ranks)]
    deadline = time.monotonic() + 60
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, "ranks did not start"
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    return [int(pid) for path in paths for pid in path.read_text().split()]


def test_bytes_between_nodes_are_counted_and_limited(start: Start) -> None:
    process = start(TRANSFERS, "--launcher", "none", "--rate", str(MBIT))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    receiver, sender = (
        next(json.loads(line.removeprefix(prefix)) for line in out.splitlines() if line.startswith(f'{prefix}{{"lim'))
        for prefix in ("", "[node 1] ")
    )
    for case in ("limited", "unlimited"):
        assert PAYLOAD < sender[case][1] < 1.02 * PAYLOAD
        assert receiver[case][2] == pytest.approx(sender[case][1], rel=0.01)
        assert receiver[case][1] < 0.02 * PAYLOAD and sender[case][2] < 0.02 * PAYLOAD  # acknowledgments
    assert sender["limited"][0] > (PAYLOAD - BURST) * 8 / (MBIT * 1e6)
    assert sender["within"][1] < 2000 and sender["within"][2] < 2000
    totals = [[int(count) for count in row] for row in re.findall(r"node \d: (\d+) sent, (\d+) received", out)]
    assert 2 * PAYLOAD < totals[1][0] < 2.04 * PAYLOAD
    assert totals[0][1] == pytest.approx(totals[1][0], rel=0.01)
    assert totals[1][1] == pytest.approx(totals[0][0], rel=0.1) and totals[0][0] < 0.04 * PAYLOAD


@pytest.mark.parametrize(
    ("how", "number", "status"),
    [
        ("succeeds", None, 0),
        ("fails", None, 3),
        ("is killed", None, 128 + signal.SIGKILL),
        ("waits", signal.SIGTERM, 128 + signal.SIGTERM),
        ("waits", signal.SIGINT, 128 + signal.SIGINT),
        ("waits", signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_nothing_is_left(start: Start, tmp_path: Path, how: str, number: int | None, status: int) -> None:
    process = start(LIFE, "--launcher", "none", "--ranks-per-node", "1", arguments=(str(tmp_path), how))
    if number is not None:
        pids = started(tmp_path, 2, process)
        assert all(alive(pid) for pid in pids)
        expected = {f"emulated-{process.pid}-{name}" for name in ("switch", "node0", "node1")}
        assert namespaces(process.pid) == expected
        process.send_signal(number)
    _, err = process.communicate(timeout=280)
    assert process.returncode == status, err
    assert ("node 1 failed" in err) == (status == 3 or how == "is killed")
    pids = [
        int(pid)
        for rank in range(2)
        if (tmp_path / str(rank)).exists()
        for pid in (tmp_path / str(rank)).read_text().split()
    ]
    assert len(pids) >= 2 and not any(alive(pid) for pid in pids)
    assert not namespaces(process.pid)


def test_what_a_killed_script_left_is_removed_by_the_next(start: Start, tmp_path: Path) -> None:
    killed = start(LIFE, "--launcher", "none", arguments=(str(tmp_path), "waits"))
    pids = started(tmp_path, 4, killed)
    killed.kill()
    killed.wait()
    foreign = {f"emulated-{os.getpid()}-node0", f"emulated-{killed.pid}-of-another"}  # of one that lives; not ours
    try:
        for name in foreign:
            subprocess.run(["ip", "netns", "add", name], check=True)
        assert len(namespaces(killed.pid)) == 4 and all(alive(pid) for pid in pids)
        following = start("", "--launcher", "none", "--nodes", "1")
        _, err = following.communicate(timeout=280)
        assert following.returncode == 0, err
        assert not any(alive(pid) for pid in pids)
        assert namespaces(killed.pid) | namespaces(os.getpid()) == foreign
    finally:
        for name in foreign:
            subprocess.run(["ip", "netns", "del", name], check=False)


@pytest.mark.parametrize("launcher", ["deepspeed", *deep("torchrun")])
def test_launchers_start_the_ranks(start: Start, launcher: str) -> None:
    process = start(SHOW, "--launcher", launcher)
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    for rank in range(4):
        prefix = "[node 1] " if rank >= 2 else ""
        assert f"{prefix}{rank} {rank % 2} 4 internode 2" in out.splitlines()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "0"], "--nodes must be 1 to 250, not 0"),
        (["--nodes", "251"], "--nodes must be 1 to 250, not 251"),
        (["--ranks-per-node", "0"], "--ranks-per-node must be at least 1, not 0"),
        (["--rate", "-1"], "must be more than 0 Mbit/s, or 0 or 'unlimited' for no limit, not '-1'"),
        (["--rate", "inf"], "not 'inf'"),
        (["--rate", "fast"], "not 'fast'"),
        (["--launcher", "mpirun"], "invalid choice: 'mpirun'"),
        (["--log", "/nowhere/log"], "there is no folder for --log /nowhere/log"),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cluster.parse_arguments([*arguments, __file__])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


def test_what_follows_the_script_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    args = cluster.parse_arguments(["--rate", "0", __file__, "--nodes", "7", "--rate=1"])
    assert (args.nodes, args.rate, args.arguments) == (2, None, ["--nodes", "7", "--rate=1"])
    with pytest.raises(SystemExit):
        cluster.parse_arguments(["nowhere.py"])
    assert "there is no script nowhere.py" in capsys.readouterr().err


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(sys, "argv", ["cluster.py", __file__])
    monkeypatch.setattr(cluster, "run", lambda args: pytest.fail("went on"))
    with pytest.raises(SystemExit) as ended:
        cluster.main()
    assert ended.value.code == 2
    err = capsys.readouterr().err
    assert "root: run it as root" in err and "ip: install iproute2" in err and "tc: install iproute2" in err


PLANNED = """
import json, sys
from unittest import mock
import deepspeed
import deepspeed.comm as dist
from deepspeed_ext import __main__
from deepspeed_ext.planner import probe

deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # takes a minute to compile
deepspeed.init_distributed("gloo")
measure, mbit = probe.measure, float(sys.argv[1])

def measured(*args, **kwargs):
    for _ in range(3):  # whatever else the machine does may slow a measurement down
        rates = measure(*args, **kwargs)
        if dist.get_rank() == 0:
            print(json.dumps(rates.as_dict()), flush=True)
        if all(abs(16 * kind.inter.bandwidth / 1e6 / mbit - 1) < 0.15 for kind in (rates.gather, rates.reduce)):
            break
    return rates

sys.argv = ["deepspeed_ext", "plan", "--params", "4M", "--dtype", "fp32", "--accumulation", "4"]
with mock.patch.object(probe, "measure", measured):
    __main__.main()
"""


def test_the_planner_measures_the_links_of_a_launch(start: Start) -> None:
    """The rate is that of the payload, and two ranks share a link: TCP's and Ethernet's headers take 5 %."""
    mbit = 200
    process = start(PLANNED, "--launcher", "none", "--rate", str(mbit), arguments=(str(mbit),))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, err
    last = [json.loads(line) for line in out.splitlines() if line.startswith('{"gather"')][-1]
    for kind in ("gather", "reduce"):
        assert 2 * 8 * last[kind]["inter"]["bandwidth"] / 1e6 == pytest.approx(mbit, rel=0.15), kind
        assert last[kind]["intra"]["bandwidth"] > 4 * last[kind]["inter"]["bandwidth"]
    assert "4 ranks in 2 group(s) of 2, 4 micro-step(s) a step" in out
    assert out.count("<-- choice") == 3  # as it is, with LoCo, and with updates in few bits; printed by one rank
    rates = re.findall(r"within groups (\S+) GB/s a rank .* between groups (\S+) GB/s a rank", out)
    assert len(rates) == 2 and all(float(within) > 4 * float(between) > 0 for within, between in rates)
