# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rank processes that test cases share, so that a multi-rank case costs little more than its own work.

Note [How a case runs]
    Starting a rank means importing torch and DeepSpeed, seconds each time. A ``RankPool`` therefore forks its ranks
    from a server that has imported them once, and keeps them: each case sends the ranks one function, by reference.
    What takes long to import and few cases need has a server of its own (``preload``).
    Cases stay independent, because before every case a rank puts back what DeepSpeed keeps in globals and makes a new
    process group: no group, count or half-done collective of the last case is left. That is also why one rank may
    run ahead: groups of different cases never meet.
    After any surprise (an error, a death, a hang) the ranks are killed and the next case starts new ones.
    An ``assert`` in a rank shows no values, for pytest rewrites only the modules that it collects: return what is to
    be checked, and check it in the test.

This module imports neither torch nor DeepSpeed in the process that runs pytest.
"""

import contextlib
import fcntl
import functools
import multiprocessing
import os
import pickle
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TextIO
from unittest import mock

from tests.harness import recorder
from tests.harness.rank_process import Finished, Place, Raised, serve

# What every fork server imports, once for all ranks. The first ZeRO optimizer of a process imports Muon, which alone
# imports a thousand modules of torch's compiler.
_PRELOAD = ("deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "pytest")
_GRACE = 1.0  # seconds that the other ranks get to answer once one rank has failed
_TAIL_LINES = 30


class _Died(NamedTuple):
    reason: str

    def __str__(self) -> str:
        return f"died ({self.reason})"


_Answer = Finished | Raised | _Died


class RankError(RuntimeError):
    """A rank raised or died, or did not raise where every rank should have."""


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
        """The answer that is waiting on the pipe; a broken pipe means that the process is gone."""
        try:
            answer: _Answer = pickle.loads(self.conn.recv_bytes())
        except (EOFError, ConnectionError):
            return self.death()
        return answer

    def death(self) -> _Died:
        """How the process ended."""
        self.process.join(timeout=1.0)
        code = self.process.exitcode
        if code is not None and code < 0:
            return _Died(f"killed by {signal.Signals(-code).name}")
        return _Died(f"exit code {code}")

    def tail(self) -> str:
        """The last lines that the rank wrote in this case."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])

    def dump_stacks(self) -> None:
        """Have faulthandler write where the rank is; its signal handler works inside a blocked C call too."""
        if self.process.pid is not None:
            os.kill(self.process.pid, signal.SIGUSR1)

    def main_stack(self) -> str:
        """Where the main thread is, innermost frame first; faulthandler writes that thread last."""
        threads = self.stacks.read_text(errors="replace").strip().split("\n\n")
        return "\n".join(threads[-1].splitlines()[:_TAIL_LINES]) or "(no stack: the rank was still starting)"


class RankPool:
    """``world_size`` rank processes, started at first use, that run functions together over gloo.

    Args:
        world_size: number of ranks.
        preload: modules that ranks find imported, beside DeepSpeed.
    """

    def __init__(self, world_size: int, preload: tuple[str, ...] = ()) -> None:
        self.world_size = world_size
        self._preload = preload
        self._ranks: list[_Rank] = []
        self._workdir: Path | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any) -> list[Any]:
        """Run ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        Args:
            fn: a function at the top level of a module; ranks import it by name.
            args: positional arguments of ``fn``, the same for every rank.
            timeout: seconds until all ranks must have answered.
            kwargs: keyword arguments of ``fn``.

        Raises:
            RankError: a rank raised or died. Its traceback is in the message, and the pool restarts at its next use.
            RankTimeout: a rank did not answer; it was killed with all others.
        """
        return [answer.value for answer in self._call(_case(fn, args, kwargs), Finished, timeout)]

    def run_expect_error(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 300.0, **kwargs: Any
    ) -> list[Raised]:
        """Run ``fn`` where every rank must raise, and return what each raised; the ranks live on.

        This is for errors that all ranks find alone, such as a refused configuration. If a rank does not raise, this
        fails like ``run``.
        """
        return self._call(_case(fn, args, kwargs), Raised, timeout)

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

    def _call(self, payload: bytes, wanted: type, timeout: float) -> list[Any]:
        try:
            if not self._ranks:
                self._start()
            answers = self._exchange(payload, wanted, timeout)
            self._check(answers, wanted, timeout)
        except BaseException:  # the guard of a test or Ctrl-C too: nobody knows what the ranks are doing now
            self.close()
            raise
        self._echo_logs()
        return [answers[rank] for rank in range(self.world_size)]

    def _start(self) -> None:
        server = fork_server(self._preload)
        self._workdir = Path(tempfile.mkdtemp(prefix="ranks-"))
        port = _free_port()
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world_size):
            log, stacks = self._workdir / f"rank{rank}.log", self._workdir / f"rank{rank}.stacks"
            log.touch()
            stacks.touch()
            conn, remote = context.Pipe()
            place = Place(rank, self.world_size, port, self._workdir)
            args = (remote, place, log, stacks)
            process = context.Process(target=serve, args=args, name=f"rank{rank}", daemon=True)
            # multiprocessing knows one server only; this is where it asks that one to fork.
            with mock.patch.object(forkserver, "connect_to_new_process", server.connect_to_new_process):
                process.start()
            remote.close()
            self._ranks.append(_Rank(process, conn, log, stacks))

    def _exchange(self, payload: bytes, wanted: type, timeout: float) -> dict[int, _Answer]:
        """Send the case and collect the answers, in order of arrival, until all are in or the time is up."""
        for rank in self._ranks:
            with contextlib.suppress(ConnectionError):  # it died between two cases: found below
                rank.conn.send_bytes(payload)
        answers: dict[int, _Answer] = {}
        deadline = time.monotonic() + timeout
        while len(answers) < self.world_size:
            pending = {rank: self._ranks[rank] for rank in range(self.world_size) if rank not in answers}
            handles = [handle for rank in pending.values() for handle in (rank.conn, rank.process.sentinel)]
            ready = connection.wait(handles, max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for index, rank in pending.items():
                if rank.conn in ready:
                    answers[index] = rank.receive()
                elif rank.process.sentinel in ready:
                    answers[index] = rank.death()
            if not _all_are(wanted, answers.values()):
                deadline = min(deadline, time.monotonic() + _GRACE)
        return answers

    def _check(self, answers: dict[int, _Answer], wanted: type, timeout: float) -> None:
        if not _all_are(wanted, answers.values()):
            raise RankError(self._describe_failure(answers, wanted))
        if len(answers) < self.world_size:
            raise RankTimeout(self._describe_timeout(answers, timeout))

    def _describe_failure(self, answers: dict[int, _Answer], wanted: type) -> str:
        bad = [rank for rank, answer in answers.items() if not isinstance(answer, wanted)]
        # Peers of a dead rank fail too, a moment later or earlier: the death is the cause.
        first = next((rank for rank in bad if isinstance(answers[rank], _Died)), bad[0])
        expected = "" if wanted is Finished else ", but every rank was expected to raise"
        lines = [f"rank {first} of {self.world_size} {answers[first]}{expected}", self._states(answers, without=first)]
        answer = answers[first]
        if isinstance(answer, Raised):
            lines += [f"--- rank {first}: traceback ---", answer.traceback.rstrip()]
        return "\n".join(lines + self._tails([first]))

    def _describe_timeout(self, answers: dict[int, _Answer], timeout: float) -> str:
        running = [rank for rank in range(self.world_size) if rank not in answers]
        for rank in running:
            self._ranks[rank].dump_stacks()
        time.sleep(0.5)
        lines = [f"rank(s) {', '.join(map(str, running))} of {self.world_size} still running after {timeout:g} s"]
        lines.append(self._states(answers))
        for rank in running:
            lines += [f"--- rank {rank}: main thread ---", self._ranks[rank].main_stack()]
        return "\n".join(lines + self._tails(running))

    def _states(self, answers: dict[int, _Answer], without: int | None = None) -> str:
        states = {rank: str(answers.get(rank, "still running")) for rank in range(self.world_size) if rank != without}
        return "\n".join(f"  rank {rank}: {state}" for rank, state in states.items())

    def _tails(self, ranks: Iterable[int]) -> list[str]:
        tails = {rank: self._ranks[rank].tail() for rank in ranks}
        return [f"--- rank {rank}: last lines of its output ---\n{tail}" for rank, tail in tails.items() if tail]

    def _echo_logs(self) -> None:
        """Hand the ranks' output to pytest, which shows it if the case fails afterwards."""
        for tail in self._tails(range(self.world_size)):
            print(tail)


class RankPools:
    """One pool per world size, and few of them: each rank holds memory, and threads and sockets of its groups."""

    def __init__(self, limit: int = 2, preload: tuple[str, ...] = ()) -> None:
        self._limit = limit
        self._preload = preload
        self._pools: OrderedDict[int, RankPool] = OrderedDict()

    def __call__(self, world_size: int) -> RankPool:
        """The pool of this world size; the pool that was not used for longest makes room."""
        pool = self._pools.pop(world_size, None) or RankPool(world_size, self._preload)
        self._pools[world_size] = pool
        while len(self._pools) > self._limit:
            self._pools.popitem(last=False)[1].close()
        return pool

    def close(self) -> None:
        """Kill the ranks of all pools."""
        while self._pools:
            self._pools.popitem()[1].close()


def _case(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    return pickle.dumps((os.environ.get(recorder.CONTEXT, ""), fn, args, kwargs))


def _all_are(wanted: type, answers: Iterable[_Answer]) -> bool:
    return all(isinstance(answer, wanted) for answer in answers)


def _free_port() -> int:
    """A port for code that reads MASTER_PORT. The ranks meet over a file, so nobody else can take it from them."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


# ---- once per session, in the process that runs pytest


def prepare_environment() -> None:
    """Set what torch and DeepSpeed read while they are imported; ranks inherit it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # The default directory is shared by all environments of a user, whose builds then undo each other.
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))


@functools.cache
def fork_server(preload: tuple[str, ...] = ()) -> forkserver.ForkServer:
    """The process that ranks are forked from; it begins to import torch, DeepSpeed and ``preload`` in the background.

    A module that is not installed is left out.
    """
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_PRELOAD, *preload, *(["coverage"] if recorder.is_on() else [])])
    with recorder.unrecorded():
        server.ensure_running()
    return server


def remove_stale_build_locks(directory: Path) -> TextIO:
    """Remove the lock files of killed builds of torch extensions: every later build would wait for them forever.

    Torch's lock does not say who holds it. Sessions therefore share a lock of their own, which dies with its holder,
    and only a session that is alone removes torch's.

    Returns:
        The session's lock, to be kept open.
    """
    directory.mkdir(parents=True, exist_ok=True)
    session_lock = (directory / "sessions").open("w")
    with contextlib.suppress(BlockingIOError):
        fcntl.flock(session_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        for lock in directory.glob("*/lock"):
            lock.unlink()
    fcntl.flock(session_lock, fcntl.LOCK_SH)
    return session_lock
