# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rank processes that test cases share, so that a multi-rank case costs little more than its own work.

Note [How a case runs]
    Starting a rank means importing torch and DeepSpeed, seconds each time. A ``RankPool`` therefore forks its ranks
    from a server that has imported them once, and keeps them: each case sends the ranks one function, by reference.
    Cases stay independent, because before every case a rank puts back what DeepSpeed keeps in globals and makes a new
    process group: no group, count or half-done collective of the last case is left. That is also why one rank may
    run ahead: groups of different cases never meet.
    After any surprise (an error, a death, a hang) the ranks are killed and the next case starts new ones.
    An ``assert`` in a rank shows no values, for pytest rewrites only the modules that it collects: return what is to
    be checked, and check it in the test.

This module imports neither torch nor DeepSpeed in the process that runs pytest.
"""

import contextlib
import copy
import faulthandler
import fcntl
import functools
import gc
import itertools
import multiprocessing
import os
import pickle
import pkgutil
import random
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection, forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple, TextIO

# What the fork server imports, once for all ranks. The first ZeRO optimizer of a process imports Muon, which alone
# imports a thousand modules of torch's compiler.
_PRELOAD = ["deepspeed", "deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.ops.op_builder.all_ops", "pytest"]
_GROUP_TIMEOUT = timedelta(seconds=90)  # a wrong collective on the world group ends by itself, with a traceback
_GRACE = 1.0  # seconds that the other ranks get to answer once one rank has failed
_TAIL_LINES = 30

# Globals of DeepSpeed 0.19 that one case would hand on to the next: the owner, then its names.
# ``deepspeed.utils.groups`` is missing since ``destroy_process_group`` clears it.
_CHECKPOINTING = "deepspeed.runtime.activation_checkpointing.checkpointing"
_GLOBALS: dict[str, tuple[str, ...]] = {
    "deepspeed.runtime.torch_autocast": (
        "TORCH_AUTOCAST_INITIALIZED",
        "TORCH_AUTOCAST_DTYPE",
        "_WARNED_NESTED_AUTOCAST",
    ),
    # ZeRO-3 counts persistent elements over all engines of the process against one limit.
    "deepspeed.runtime.zero.partition_parameters:Init": (
        "param_id",
        "param_persistence_threshold",
        "model_persistence_threshold",
        "num_persisted_parameters",
        "num_persisted_elements",
        "apply_param_persistence",
        "override_module_apply",
    ),
    "deepspeed.runtime.zero.partition_parameters": ("zero_init_context", "top_level_context"),
    "deepspeed.runtime.zero.parameter_offload": ("FWD_MODULE_STACK",),
    "deepspeed.runtime.pipe.p2p": ("_groups", "_grid", "_async"),
    "deepspeed.runtime.tensor_parallel.init_utils": ("_TP_MODEL_INIT_ARGS",),
    _CHECKPOINTING: (
        "deepspeed_checkpointing_enabled",
        "mpu",
        "num_layers",
        "PARTITION_ACTIVATIONS",
        "CPU_CHECKPOINT",
        "CONTIGUOUS_CHECKPOINTING",
        "SYNCHRONIZE",
        "PROFILE_TIME",
    ),
    # zero.Init replaces it for good (mem_efficient_linear).
    "torch.nn.functional": ("linear",),
}
# The same, for objects of which every attribute is put back.
_OBJECTS = (
    "deepspeed.comm.comm:comms_logger",
    "deepspeed.comm.comm:timers",
    # Tests override what the device supports (fp16 on a CPU) by assigning to it.
    "deepspeed.accelerator.real_accelerator:ds_accelerator",
)


class Raised(NamedTuple):
    """An exception that a rank raised; the object itself may not survive pickling."""

    type: str
    message: str
    traceback: str

    def __str__(self) -> str:
        return f"raised {self.type}: {self.message}"


class _Finished(NamedTuple):
    value: Any

    def __str__(self) -> str:
        return "finished"


class _Died(NamedTuple):
    reason: str

    def __str__(self) -> str:
        return f"died ({self.reason})"


_Answer = _Finished | Raised | _Died


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
    """``world_size`` rank processes, started at first use, that run functions together over gloo."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._ranks: list[_Rank] = []
        self._workdir: Path | None = None

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
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
        return [answer.value for answer in self._call(pickle.dumps((fn, args, kwargs)), _Finished, timeout)]

    def run_expect_error(
        self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any
    ) -> list[Raised]:
        """Run ``fn`` where every rank must raise, and return what each raised; the ranks live on.

        This is for errors that all ranks find alone, such as a refused configuration. If a rank does not raise, this
        fails like ``run``.
        """
        return self._call(pickle.dumps((fn, args, kwargs)), Raised, timeout)

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
        start_fork_server()
        self._workdir = Path(tempfile.mkdtemp(prefix="ranks-"))
        port = _free_port()
        context = multiprocessing.get_context("forkserver")
        for rank in range(self.world_size):
            log, stacks = self._workdir / f"rank{rank}.log", self._workdir / f"rank{rank}.stacks"
            log.touch()
            stacks.touch()
            conn, remote = context.Pipe()
            place = _Place(rank, self.world_size, port, self._workdir)
            args = (remote, place, log, stacks)
            process = context.Process(target=_serve, args=args, name=f"rank{rank}", daemon=True)
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
        expected = "" if wanted is _Finished else ", but every rank was expected to raise"
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

    def __init__(self, limit: int = 2) -> None:
        self._limit = limit
        self._pools: OrderedDict[int, RankPool] = OrderedDict()

    def __call__(self, world_size: int) -> RankPool:
        """The pool of this world size; the pool that was not used for longest makes room."""
        pool = self._pools.pop(world_size, None) or RankPool(world_size)
        self._pools[world_size] = pool
        while len(self._pools) > self._limit:
            self._pools.popitem(last=False)[1].close()
        return pool

    def close(self) -> None:
        """Kill the ranks of all pools."""
        while self._pools:
            self._pools.popitem()[1].close()


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


def start_fork_server() -> None:
    """Begin to import torch and DeepSpeed in the background, in the process that ranks are forked from."""
    forkserver.set_forkserver_preload(_PRELOAD)
    forkserver.ensure_running()


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


# ---- in a rank


class _Place(NamedTuple):
    """Where a rank stands: all that it needs to meet the others."""

    rank: int
    world_size: int
    port: int
    workdir: Path


class _ProcessState:
    """What a case may change in its process, as it was before the first case."""

    def __init__(self) -> None:
        self._cwd = os.getcwd()
        self._environ = dict(os.environ)
        self._globals = [(pkgutil.resolve_name(path), name) for path, names in _GLOBALS.items() for name in names]
        self._values = [_copied(getattr(owner, name)) for owner, name in self._globals]
        self._objects = [vars(pkgutil.resolve_name(path)) for path in _OBJECTS]
        self._attributes = [{name: _copied(value) for name, value in entry.items()} for entry in self._objects]
        self._caches = _function_caches()
        gc.freeze()  # a collection need not visit all that was imported before

    def restore(self) -> None:
        """Put all of it back, and let go of what the last case left to the garbage collector."""
        import deepspeed
        import torch

        _destroy_engines()
        if torch.distributed.is_initialized():
            deepspeed.comm.destroy_process_group()
        os.chdir(self._cwd)
        os.environ.clear()
        os.environ.update(self._environ)
        for (owner, name), value in zip(self._globals, self._values, strict=True):
            setattr(owner, name, _copied(value))
        for live, saved in zip(self._objects, self._attributes, strict=True):
            live.clear()
            live.update({name: _copied(value) for name, value in saved.items()})
        for cache in self._caches + _function_caches():
            cache.cache_clear()
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        gc.collect()


def _destroy_engines() -> None:
    """Destroy the engines that cases left behind.

    Otherwise they live forever, with the threads and sockets of their groups: the hooks on gradient accumulators
    refer back to the engine from C++, where the garbage collector does not see them.
    """
    import deepspeed

    for entry in gc.get_objects():
        if issubclass(type(entry), deepspeed.DeepSpeedEngine):
            entry.destroy()


def _function_caches() -> list[Any]:
    """The ``functools`` caches of DeepSpeed and its add-ons, among the objects that are not frozen.

    One of them, on a method of ZeRO-3, keeps every model alive that was ever trained, and with it its groups.
    """
    cache_type = type(functools.cache(_copied))
    entries = [entry for entry in gc.get_objects() if type(entry) is cache_type]
    return [entry for entry in entries if str(entry.__module__).startswith("deepspeed")]


def _copied(value: Any) -> Any:
    return copy.copy(value) if isinstance(value, (dict, list, set)) else value


def _serve(conn: connection.Connection, place: _Place, log: Path, stacks: Path) -> None:
    """The life of a rank: answer one case after the other until the parent is gone."""
    _enter(place, log, stacks)
    state = _ProcessState()
    for case in itertools.count():
        try:
            payload = conn.recv_bytes()
        except EOFError:
            return
        sys.stdout.flush()
        os.ftruncate(sys.stdout.fileno(), 0)  # the log tells of one case only
        conn.send_bytes(_answer(payload, lambda case=case: _begin_case(place, state, case)))


def _enter(place: _Place, log: Path, stacks: Path) -> None:
    """Make the forked process a rank: its output, its signals, its environment."""
    with log.open("a") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    sys.stdout.reconfigure(line_buffering=True)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, file=stacks.open("w"), all_threads=True)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of the terminal; the parent decides
    threading.Thread(target=_die_with_parent, name="die_with_parent", daemon=True).start()
    warnings.simplefilter("ignore", FutureWarning)  # torch's deprecations of what DeepSpeed calls
    size = str(place.world_size)
    os.environ.update(
        RANK=str(place.rank),
        LOCAL_RANK=str(place.rank),
        WORLD_SIZE=size,
        LOCAL_WORLD_SIZE=size,
        LOCAL_SIZE=size,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(place.port),
    )
    _configure_libraries()


def _configure_libraries() -> None:
    import deepspeed
    import torch

    torch.set_num_threads(1)
    # A shared-memory all-reduce for inference: minutes to compile on a busy machine, and every rank that loads it
    # leaves 66 MB in /dev/shm that nothing removes. Without it DeepSpeed uses gloo.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _begin_case(place: _Place, state: _ProcessState, case: int) -> None:
    """Forget the last case, and meet the other ranks in a process group of this case's own."""
    import deepspeed
    import torch

    state.restore()
    random.seed(0)
    torch.manual_seed(0)
    deepspeed.init_distributed(
        dist_backend="gloo",
        timeout=_GROUP_TIMEOUT,
        init_method=f"file://{place.workdir}/case{case}",
        rank=place.rank,
        world_size=place.world_size,
    )


def _answer(payload: bytes, begin: Callable[[], None]) -> bytes:
    """Run one case. Nothing that it raises, ``SystemExit`` included, ends the rank."""
    try:
        begin()
        fn, args, kwargs = pickle.loads(payload)
        return pickle.dumps(_Finished(fn(*args, **kwargs)))
    except BaseException as error:
        return pickle.dumps(Raised(type(error).__name__, str(error), "".join(traceback.format_exception(error))))
