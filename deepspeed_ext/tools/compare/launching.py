# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Launches a script's ranks by a stock launcher, and makes sure that they end.

Note [Variables on other nodes]
    torchrun and srun run where the variables are. DeepSpeed's runner starts ranks on other nodes by ssh, and exports
    variables of some prefixes, and the lines of the file ``.deepspeed_env`` in the home or the current folder, or of
    the name in DS_ENV_FILE. So a launch gets a file that has the user's lines and ours, by its absolute path. They
    may be secrets: only the user can read the file, and it is removed when the launch has ended.

Note [Ranks of a launch]
    A launcher may start ranks in sessions of their own, as torchrun does, and end before they do. So processes of a
    launch on this machine are found by a variable that they inherit. On other nodes, the launcher ends its ranks.
"""

import contextlib
import os
import secrets
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_ext.tools.compare.turn import VARIABLE, Turn

PLACEHOLDER = "{config}"
LAUNCHERS = ("deepspeed", "torchrun")
MODULE = "-m"  # before the script, as for python
_ENV_FILE = "DS_ENV_FILE"  # of DeepSpeed's runner, which looks for that name in two folders
_DEFAULT_ENV_FILE = ".deepspeed_env"
_LAUNCH = "DEEPSPEED_EXT_LAUNCH"  # one value for the processes of each launch: see Note [Ranks of a launch]
_GRACE = 45.0  # seconds in which a launcher that is told to end may end its ranks; torchrun gives them 30 of these
_POLL = 0.2
_TAIL_LINES = 40


class RunFailed(Exception):
    """A launch ended with an error, did not end in time, or did not do what it was launched for."""


@dataclass(frozen=True)
class Launcher:
    """How to launch.

    Attributes:
        name: one of ``LAUNCHERS``.
        ranks: on each node; None for as many as the launcher finds devices.
        hostfile: of DeepSpeed's runner; None for this machine alone.
        prefix: what to put before the script instead of all that; None for nothing.
    """

    name: str = LAUNCHERS[0]
    ranks: int | None = None
    hostfile: str | None = None
    prefix: str | None = None

    def command(self, script: Sequence[str], config: Path) -> list[str]:
        """Return the command that runs a script's ranks.

        Args:
            script: its path, or -m and a module, and its arguments, in which {config} is replaced.
            config: file of the configuration.
        """
        words = [word.replace(PLACEHOLDER, str(config)) for word in script]
        if self.prefix is not None:
            return [*shlex.split(self.prefix), *words]
        module = words[:1] == [MODULE]
        return [*self._stock(), *(["--module"] if module else []), *words[int(module) :]]

    def _stock(self) -> list[str]:
        if self.name == "torchrun":
            each = "auto" if self.ranks is None else str(self.ranks)
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", each]
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command += [] if self.ranks is None else ["--num_accelerators", str(self.ranks)]
        if self.hostfile is not None:
            return [*command, "--hostfile", self.hostfile]
        return [*command, "--master_port", str(free_port())]


@contextlib.contextmanager
def environment(turn: Turn) -> Iterator[dict[str, str]]:
    """Yield the environment of a launch; see Note [Variables on other nodes].

    Args:
        turn: what its ranks measure.
    """
    name = os.environ.get(_ENV_FILE, _DEFAULT_ENV_FILE)
    theirs = [Path(folder, name) for folder in (Path.home(), Path())]
    lines = [line for path in theirs if path.is_file() for line in path.read_text().splitlines() if line.strip()]
    with tempfile.NamedTemporaryFile("w", prefix="deepspeed_env-") as file:  # mode 0600
        file.write("\n".join([*lines, f"{VARIABLE}={turn.encode()}", ""]))
        file.flush()
        yield {**os.environ, VARIABLE: turn.encode(), _ENV_FILE: file.name}


def run(command: Sequence[str], env: Mapping[str, str], log: Path, seconds: float) -> None:
    """Run a launcher to its end. None of its ranks outlives a time-out, an interrupt, or a failure of the launcher.

    Args:
        command: the launcher's.
        env: its environment.
        log: file for what it and its ranks print.
        seconds: that it may take.

    Raises:
        RunFailed: it was not found, failed, or did not end in time; with the end of the log.
    """
    mark = secrets.token_hex(8)
    env = {**env, _LAUNCH: mark}
    with log.open("wb") as file:
        try:
            process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
        except OSError as error:
            raise RunFailed(f"{command[0]} cannot be run: {error}") from error
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
        finally:
            ended = process.poll() is not None
            if process.returncode != 0:
                stop(process, mark)
    if process.returncode or not ended:
        why = f"exit status {process.returncode}" if ended else f"not finished after {seconds:g} s"
        raise RunFailed(f"{tail(log)}\n\n{why}\ncommand: {shlex.join(command)}\nwhole log: {log}")


def stop(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Tell a launcher to end its ranks, on other nodes as well, and kill what is left of them on this machine.

    Args:
        process: the launcher's; it may have ended.
        mark: what its processes have in ``_LAUNCH``.
    """
    until = time.monotonic() + _GRACE
    if process.poll() is None:
        process.terminate()
    try:
        while (process.poll() is None or _left(mark)) and time.monotonic() < until:
            time.sleep(_POLL)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        while left := _left(mark):  # again, since one may have started another
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        process.wait()


def _left(mark: str) -> list[int]:
    """Return the processes of a launch that still run on this machine; see Note [Ranks of a launch]."""
    import psutil  # type: ignore[import-untyped]

    pids = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_LAUNCH) == mark:
                pids.append(process.pid)
    return pids


def tail(log: Path) -> str:
    """Return the last lines of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])


def exit_on_signals(numbers: Sequence[int] = (signal.SIGTERM, signal.SIGHUP)) -> None:
    """Turn signals that would end Python at once, and leave the ranks running, into an exception.

    Signals that ``nohup`` has made ignored stay ignored.
    """
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    """Return a port that was free a moment ago, so that two runs at the same time do not meet."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
