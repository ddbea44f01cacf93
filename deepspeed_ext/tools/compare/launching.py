# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Launches a script's ranks by a stock launcher, and makes sure that they end.

Note [Variables on other nodes]
    torchrun and srun pass on the environment. DeepSpeed's runner starts ranks on other nodes by ssh, and exports
    variables with some prefixes, and the lines of the file ``.deepspeed_env`` in the home or the current folder, or of
    the file name in DS_ENV_FILE. So each launch has its own file with the user's lines and ours, at an absolute path.
    The lines may be secrets: only the user can read the file, and it is removed after the launch.

Note [Ranks of a launch]
    A launcher may start ranks in their own sessions, as torchrun does, and end before they do. So processes of a
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

from deepspeed_ext.tools.compare.run_spec import VARIABLE, RunSpec

PLACEHOLDER = "{config}"
LAUNCHERS = ("deepspeed", "torchrun")
MODULE = "-m"  # before the script, as for python
_ENV_FILE = "DS_ENV_FILE"  # DeepSpeed's variable, a file name that its runner looks for in two folders
_DEFAULT_ENV_FILE = ".deepspeed_env"
_LAUNCH = "DEEPSPEED_EXT_LAUNCH"  # identifies the processes of a launch: see Note [Ranks of a launch]
_GRACE = 45.0  # seconds that a terminated launcher has to end its ranks; torchrun gives them 30 of these
_POLL = 0.2
_TAIL_LINES = 40


class RunFailed(Exception):
    """A launch ended with an error, did not end in time, or did not complete its turn."""


@dataclass(frozen=True)
class Launcher:
    """A launcher and its options.

    Attributes:
        name: one of ``LAUNCHERS``.
        ranks: number of ranks on each node; None for one rank per device.
        hostfile: hostfile of DeepSpeed's runner; None for this machine alone.
        prefix: command to put before the script instead of the other options; None for none.
    """

    name: str = LAUNCHERS[0]
    ranks: int | None = None
    hostfile: str | None = None
    prefix: str | None = None

    def command(self, script: Sequence[str], config: Path) -> list[str]:
        """Return the command that runs a script's ranks.

        Args:
            script: the script's path, or -m and a module, and its arguments, in which {config} is replaced.
            config: file of the configuration.
        """
        words = [word.replace(PLACEHOLDER, str(config)) for word in script]
        if self.prefix is not None:
            return [*shlex.split(self.prefix), *words]
        module = words[:1] == [MODULE]
        return [*self._stock_command(), *(["--module"] if module else []), *words[int(module) :]]

    def _stock_command(self) -> list[str]:
        if self.name == "torchrun":
            per_node = "auto" if self.ranks is None else str(self.ranks)
            return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", per_node]
        command = [sys.executable, "-m", "deepspeed.launcher.runner"]
        command += [] if self.ranks is None else ["--num_accelerators", str(self.ranks)]
        if self.hostfile is not None:
            return [*command, "--hostfile", self.hostfile]
        return [*command, "--master_port", str(free_port())]


@contextlib.contextmanager
def environment(spec: RunSpec) -> Iterator[dict[str, str]]:
    """Yield the environment of a launch; see Note [Variables on other nodes].

    Args:
        spec: the turn of its ranks.
    """
    name = os.environ.get(_ENV_FILE, _DEFAULT_ENV_FILE)
    env_files = [Path(folder, name) for folder in (Path.home(), Path())]
    lines = [line for path in env_files if path.is_file() for line in path.read_text().splitlines() if line.strip()]
    with tempfile.NamedTemporaryFile("w", prefix="deepspeed_env-") as file:  # mode 0600
        file.write("\n".join([*lines, f"{VARIABLE}={spec.encode()}", ""]))
        file.flush()
        yield {**os.environ, VARIABLE: spec.encode(), _ENV_FILE: file.name}


def run(command: Sequence[str], env: Mapping[str, str], log: Path, seconds: float) -> None:
    """Run a launcher to its end. None of its ranks outlives a time-out, an interrupt, or a failure of the launcher.

    Args:
        command: command of the launcher.
        env: environment of the launcher.
        log: file for the output of the launcher and its ranks.
        seconds: time limit.

    Raises:
        RunFailed: it was not found, failed, or did not end in time; with the end of the log.
    """
    mark = secrets.token_hex(8)
    env = {**env, _LAUNCH: mark}
    with log.open("wb") as file:
        try:
            # In its own session: ``stop`` kills the launcher's process group, which must not contain this process.
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
        reason = f"exit status {process.returncode}" if ended else f"not finished after {seconds:g} s"
        raise RunFailed(f"{tail(log)}\n\n{reason}\ncommand: {shlex.join(command)}\nwhole log: {log}")


def stop(process: "subprocess.Popen[bytes]", mark: str) -> None:
    """Terminate a launcher, which ends its ranks on all nodes, and kill remaining ranks on this machine.

    Args:
        process: the launcher, which may have ended.
        mark: value of ``_LAUNCH`` in its processes.
    """
    deadline = time.monotonic() + _GRACE
    if process.poll() is None:
        process.terminate()
    try:
        while (process.poll() is None or _remaining_pids(mark)) and time.monotonic() < deadline:
            time.sleep(_POLL)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        while pids := _remaining_pids(mark):  # repeat, since a process may have started another before it was killed
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_POLL)
        process.wait()


def _remaining_pids(mark: str) -> list[int]:
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
    """Turn signals that would end Python immediately, with its ranks still running, into an exception.

    A SIGHUP that ``nohup`` ignores stays ignored.
    """
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def free_port() -> int:
    """Return a port that was free just now, so that two concurrent runs do not use the same port."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port
