# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rank processes that test cases share, so that a multi-rank case costs little more than its own work.

Note [How a case runs]
    To start a rank, torch and DeepSpeed must be imported, which takes seconds. So a ``RankPool`` forks its ranks from
    a server that has imported them once, and keeps the ranks. Each case sends the ranks one function, by reference; a
    case with fewer ranks runs on the first ones. Modules that take long to import, and that few cases need, have a
    server of their own (``preload``).
    Cases are independent, because before every case a rank restores DeepSpeed's globals and makes a new
    process group: no group, count or unfinished collective of the last case is left. For the same reason one rank may
    run ahead, since groups of different cases never meet.
    After any surprise (an error, a death, a hang), the ranks are killed, and the next case starts new ones.
    An ``assert`` in a rank shows no values, since pytest rewrites only the modules that it collects. So return values
    from the case, and check them in the test.

This module imports neither torch nor DeepSpeed in the process that runs pytest.
"""

import contextlib
import fcntl
import functools
import inspect
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

import pytest

from scripts.emulation.launching import free_port
from tests.harness import recorder
from tests.harness.rank_process import Finished, Raised, RankSlot, run_each, serve

# What every fork server imports, once for all ranks. The first ZeRO optimizer of a process imports Muon, and with it
# a thousand modules of torch's compiler.
_PRELOAD = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "pytest")
_GRACE = 1.0  # seconds that the other ranks get to answer once one rank has failed
_TAIL_LINES = 30
_SKIPPED = pytest.skip.Exception.__name__


class _Died(NamedTuple):
    reason: str

    def __str__(self) -> str:
        return f"died ({self.reason})"


_Answer = Finished | Raised | _Died


class RankError(RuntimeError):
    """A rank raised or died, or did not raise although every rank should have."""


class RankTimeout(RuntimeError):
    """Some ranks did not answer in time; the message says where they were."""


@dataclass(frozen=True)
class _Rank:
    """The parent's view of one rank process."""

    process: BaseProcess
    conn: connection.Connection
    log: Path
    stacks: Path

    def receive(self) -> _Answer:
        """Return the answer that waits on the pipe; a broken pipe means that the process has ended."""
        try:
            answer: _Answer = pickle.loads(self.conn.recv_bytes())
        except (EOFError, ConnectionError):
            return self.death()
        return answer

    def death(self) -> _Died:
        self.process.join(timeout=1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return _Died(f"killed by {signal.Signals(-code).name}")
        return _Died(f"exit code {code}")

    def tail(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def dump_stacks(self) -> None:
        """Make faulthandler write the rank's stacks; its signal handler works even inside a blocked C call."""
        if self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def main_stack(self) -> str:
        """Return where the main thread is, innermost frame first; faulthandler writes that thread last."""
        threads = self.stacks.read_text(errors="replace").strip().split("\n\n")
        return "\n".join(threads[-1].splitlines()[:_TAIL_LINES]) or "(no stack: the rank was still starting)"


class Ranks:
    """The first ranks of a pool, which run functions together over gloo."""

    def __init__(self, pool: "RankPool", world_size: int) -> None:
        self.world_size = world_size
        self._pool = pool

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank and return the results in rank order; ranks import ``fn`` by name.

        Raises:
            RankError: a rank raised or died. Its traceback is in the message, and the pool restarts at its next use.
            RankTimeout: a rank did not answer in ``timeout`` seconds; it was killed with all others.
            pytest.skip.Exception: all ranks called ``pytest.skip``.
        """
        return [answer.value for answer in self._call(_case(fn, args, kwargs), Finished, timeout)]

    def each(self, fn: Callable[..., Any], items: Iterable[Any], *args: Any, **kwargs: Any) -> list[tuple[Any, Any]]:
        """Run ``fn(item, *args, **kwargs)`` for each item, in one case; return items with results, rank by rank."""
        return self.rows(run_each, fn, tuple(items), args, kwargs)

    def rows(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """Run ``fn``, which returns several results; return all of them, rank by rank."""
        return [row for rows in self.run(fn, *args, **kwargs) for row in rows]

    def run_expect_error(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Raised]:
        """Run ``fn``, which must raise on every rank by itself, as for a refused configuration, and return the error
        of each; the ranks stay alive. If a rank does not raise, this fails like ``run``."""
        return self._call(_case(fn, args, kwargs), Raised, 300.0)

    def _call(self, payload: bytes, wanted: type, timeout: float) -> list[Any]:
        try:
            ranks = self._pool.first(self.world_size)
            case = pickle.dumps((self._pool.number_of_case(), self.world_size, payload))
            answers = self._exchange(ranks, case, wanted, timeout)
            self._check(ranks, answers, wanted, timeout)
        except BaseException:  # the guard of a test or Ctrl-C too: nobody knows what the ranks are doing now
            self._pool.close()
            raise
        for tail in _tails(ranks):  # pytest shows it if the case fails afterwards
            print(tail)
        return [answers[rank] for rank in range(self.world_size)]

    def _exchange(self, ranks: list[_Rank], payload: bytes, wanted: type, timeout: float) -> dict[int, _Answer]:
        """Send the case and collect the answers, in order of arrival, until all are in or the time is up."""
        for rank in ranks:
            with contextlib.suppress(ConnectionError):  # it died between two cases: found below
                rank.conn.send_bytes(payload)
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            pending = {rank: ranks[rank] for rank in range(self.world_size) if rank not in answers}
            handles = [handle for rank in pending.values() for handle in (rank.conn, rank.process.sentinel)]
            ready = connection.wait(handles, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for index, rank in pending.items():
                if rank.conn in ready:
                    answers[index] = rank.receive()
                elif rank.process.sentinel in ready:
                    answers[index] = rank.death()
            if not (_all_are(wanted, answers.values()) or _all_skip(answers.values())):
                deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _check(self, ranks: list[_Rank], answers: dict[int, _Answer], wanted: type, timeout: float) -> None:
        if len(answers) == self.world_size and _all_skip(answers.values()):
            pytest.skip(answers[0].message)  # type: ignore[union-attr]
        if not _all_are(wanted, answers.values()):
            raise RankError(self._describe_failure(ranks, answers, wanted))
        if len(answers) < self.world_size:
            raise RankTimeout(self._describe_timeout(ranks, answers, timeout))

    def _describe_failure(self, ranks: list[_Rank], answers: dict[int, _Answer], wanted: type) -> str:
        bad = [rank for rank, answer in answers.items() if not isinstance(answer, wanted)]
        # Peers of a dead rank fail too, a moment later or earlier: the death is the cause.
        first = next((rank for rank in bad if isinstance(answers[rank], _Died)), bad[0])
        expected = "" if wanted is Finished else ", but every rank was expected to raise"
        lines = [f"rank {first} of {self.world_size} {answers[first]}{expected}", self._states(answers, without=first)]
        answer = answers[first]
        if isinstance(answer, Raised):
            lines += [f"--- rank {first}: traceback ---", answer.traceback.rstrip()]
        return "\n".join(lines + _tails(ranks, [first]))

    def _describe_timeout(self, ranks: list[_Rank], answers: dict[int, _Answer], timeout: float) -> str:
        running = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in running:
            ranks[rank].dump_stacks()
        time.sleep(0.5)
        lines = [f"rank(s) {', '.join(map(str, running))} of {self.world_size} still running after {timeout:g} s"]
        lines.append(self._states(answers))
        for rank in running:
            lines += [f"--- rank {rank}: main thread ---", ranks[rank].main_stack()]
        return "\n".join(lines + _tails(ranks, running))

    def _states(self, answers: dict[int, _Answer], without: int | None = None) -> str:
        states = {rank: str(answers.get(rank, "still running")) for rank in range(self.world_size) if rank != without}
        return "\n".join(f"  rank {rank}: {state}" for rank, state in states.items())


class RankPool:
    """Processes that all cases share: as many as the largest case needs, started when they are first needed. Modules
    of ``preload`` are imported in them, in addition to DeepSpeed."""

    def __init__(self, preload: tuple[str, ...] = ()) -> None:
        self._preload = preload
        self._ranks: list[_Rank] = []
        self._cases = 0
        self._workdir: Path | None = None
        self._port = 0

    def __call__(self, world_size: int) -> Ranks:
        """Return that many ranks; further ranks take no part in their cases."""
        return Ranks(self, world_size)

    def first(self, world_size: int) -> list[_Rank]:
        """Return the first ranks, and start those that are missing."""
        if self._workdir is None:
            # For code that reads MASTER_PORT. Ranks meet over a file, so no other process can take the port from them.
            self._workdir, self._port = Path(tempfile.mkdtemp(prefix="ranks-")), free_port()
        while len(self._ranks) < world_size:
            self._ranks.append(self._start(RankSlot(len(self._ranks), self._port, self._workdir)))
        return self._ranks[:world_size]

    def number_of_case(self) -> int:
        """Return a number that no other case has. Ranks meet by it, since some have run fewer cases than others."""
        self._cases += 1
        return self._cases

    def close(self) -> None:
        """Kill the ranks. They hold nothing worth a clean shutdown, and may hang in a collective."""
        for rank in self._ranks:
            rank.process.kill()
        for rank in self._ranks:
            rank.process.join()
            rank.conn.close()
        self._ranks = []
        if self._workdir is not None:
            shutil.rmtree(self._workdir, ignore_errors=True)
            self._workdir = None

    def _start(self, slot: RankSlot) -> _Rank:
        log, stacks = slot.workdir / f"rank{slot.rank}.log", slot.workdir / f"rank{slot.rank}.stacks"
        log.touch()
        stacks.touch()
        context = multiprocessing.get_context("forkserver")
        conn, remote = context.Pipe()
        process = context.Process(target=serve, args=(remote, slot, log, stacks), name=log.stem, daemon=True)
        server = fork_server(self._preload)
        # multiprocessing knows one server only; this is where it asks that one to fork.
        with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
            process.start()
        remote.close()
        return _Rank(process, conn, log, stacks)


def _tails(ranks: list[_Rank], numbers: Iterable[int] | None = None) -> list[str]:
    tails = {rank: ranks[rank].tail() for rank in (range(len(ranks)) if numbers is None else numbers)}
    return [f"--- rank {rank}: last lines of its output ---\n{tail}" for rank, tail in tails.items() if tail]


def _case(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    inspect.signature(fn).bind(*args, **kwargs)  # here: in ranks it would be an error that a test may expect
    return pickle.dumps((os.environ.get(recorder.CONTEXT, ""), fn, args, kwargs))


def _all_are(wanted: type, answers: Iterable[_Answer]) -> bool:
    return all(isinstance(answer, wanted) for answer in answers)


def _all_skip(answers: Iterable[_Answer]) -> bool:
    return all(isinstance(answer, Raised) and answer.type == _SKIPPED for answer in answers)


# ---- once per session, in the process that runs pytest


def prepare_environment() -> None:
    """Set variables that torch and DeepSpeed read at import, and how processes are scheduled; ranks inherit both."""
    if hasattr(os, "SCHED_BATCH"):
        # A message that arrives wakes a thread of gloo. If that thread takes the core from one that is sending, and so
        # holds the lock of the connection, it polls for the rest of its time slice. If ranks share cores, this takes a
        # fifth of all time. Threads of this policy take no core from others when they wake.
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # Muon's dtype would depend on whether a CPU has instructions for 16 bits; here it is the same on all machines.
    os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE")
    # All environments of a user share the default directory, and their builds would undo each other.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


@functools.cache
def fork_server(preload: tuple[str, ...] = ()) -> forkserver.ForkServer:
    """The process that ranks are forked from; in the background it begins to import torch, DeepSpeed and those modules
    of ``preload`` that are installed."""
    server = forkserver.ForkServer()
    recording = ["coverage"] if recorder.FOLDER in os.environ else []
    server.set_forkserver_preload([*_PRELOAD, *preload, *recording, "tests.harness.preload"])
    with recorder.start_unrecorded():
        server.ensure_running()
    return server


def remove_stale_build_locks(directory: Path) -> TextIO:
    """Remove the lock files of killed builds of torch extensions: every later build would wait for them forever.
    Torch's lock does not say who holds it. Sessions therefore share a lock of their own, which dies with its holder,
    and only a session that is alone removes torch's. Keep the returned lock open."""
    directory.mkdir(parents=True, exist_ok=True)
    session_lock = (directory / "sessions").open("w")
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(session_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in directory.glob("*/lock"):
            lock.unlink()
    fcntl.flock(session_lock, fcntl.LOCK_SH)
    return session_lock
