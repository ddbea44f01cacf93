# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Start CPU ranks on this machine under the stock launcher, and make sure that all of them end.

A program that starts its own ranks is started again for each of them, with ``--worker``. Imports neither torch nor
DeepSpeed by itself.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools.compare.launching import RunFailed, free_port, tail
from deepspeed_ext.tools.compare.launching import exit_on_signals as exit_on_signals
from scripts import ROOT

_BAR = re.compile(rb"\w+: +\d+%\|.*\]")  # what tqdm draws


def add_options(parser: argparse.ArgumentParser, log: str, timeout: float) -> None:
    """Add the options of a program that starts ranks, and those of a rank."""
    parser.add_argument("--ranks", type=int, default=4, help="processes to train with")
    parser.add_argument("--group-size", type=int, default=2, help="ranks in a group")
    parser.add_argument("--log", type=Path, default=Path(log), help="what the ranks of the last launch print")
    parser.add_argument("--timeout", type=float, default=timeout, help="seconds that a launch may take")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)  # a rank; where it finds its work, and reports
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # set by the launcher


def parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, and refuse groups that do not fit the ranks."""
    args = parser.parse_args()
    try:
        GroupSizes(args.ranks, args.group_size)
    except ValueError as error:
        parser.error(str(error))
    return args


def environment() -> dict[str, str]:
    """Return the caller's environment, adapted to several CPU ranks on one machine."""
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = "1"  # more threads than cores make every rank wait for the others
    env["DS_ACCELERATOR"] = "cpu"
    # All environments of a user share DeepSpeed's default folder for compiled operators. They would rebuild
    # one another's files, and wait forever for the lock of a killed build.
    env.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    # The launcher and ninja are beside this Python, even if the environment was not activated.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    # Ranks are started in any folder, and import modules of scripts and tests by their names.
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    return env


def launch(module: str, arguments: Sequence[str], ranks: int, log: Path, timeout: float) -> None:
    """Run a module's ranks under the stock launcher.

    Raises:
        RunFailed: it failed, or was still running after ``timeout`` seconds.
    """
    launcher = shutil.which("deepspeed", path=environment()["PATH"])
    if launcher is None:
        raise RunFailed("the deepspeed launcher was not found: is DeepSpeed installed in this environment?")
    port = free_port()
    command = [launcher, "--num_accelerators", str(ranks), "--master_port", str(port), "--module", module]
    try:
        _run([*command, *arguments], log.resolve(), timeout)
    finally:
        _remove_shared_memory(port)


def launch_workers(module: str, worker: Path, args: argparse.Namespace, ranks: int, more: Sequence[str] = ()) -> None:
    """Run this many ranks of a program with ``add_options``; exit with status 2 if that fails."""
    try:
        launch(module, ["--worker", str(worker), *more], ranks, args.log, args.timeout)
    except RunFailed as failure:
        print(failure, file=sys.stderr)
        sys.exit(2)


def collect(module: str, args: argparse.Namespace) -> Any:
    """Run the ranks of this program with its own arguments; return the JSON value that the first one has written.

    Exits with status 2 if that fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        launch_workers(module, report, args, args.ranks, sys.argv[1:])
        return json.loads(report.read_text())


def start_rank() -> bool:
    """Join the other ranks; return whether this is the first one."""
    import deepspeed

    # A shared-memory all-reduce for inference would be compiled now, and leave 66 MB per rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed.comm.get_rank() == 0


def split_output(stream: IO[bytes], log: IO[bytes]) -> None:
    """Show progress bars on the terminal and keep all other output for the log, until the stream ends."""
    pending = b""
    while chunk := os.read(stream.fileno(), 65536):
        *pieces, pending = re.split(rb"[\r\n]", pending + chunk)
        if _BAR.match(pending):  # a bar that stands has no end of line yet
            pieces.append(pending)
            pending = b""
        for piece in pieces:
            if bar := _BAR.match(piece):
                sys.stderr.write(f"\r{bar.group().decode(errors='replace')}  ")
                sys.stderr.flush()
            elif piece.strip():
                log.write(piece + b"\n")
    log.write(pending)
    sys.stderr.write("\n")


def _run(command: list[str], log_path: Path, timeout: float) -> None:
    """Run the command in a process group of its own, so that no rank outlives a time-out or an interrupt."""
    env = environment()
    expired = threading.Event()
    with log_path.open("wb", buffering=0) as log:  # so that each line is in the log at once
        process = subprocess.Popen(
            command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )

        def expire() -> None:
            expired.set()
            os.killpg(process.pid, signal.SIGKILL)

        timer = threading.Timer(timeout, expire)
        timer.start()
        try:
            assert process.stdout is not None
            split_output(process.stdout, log)
            process.wait()
        finally:
            timer.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode == 0:
        return
    why = f"exit status {process.returncode}"
    if expired.is_set():
        locks = [str(path) for path in Path(env["TORCH_EXTENSIONS_DIR"]).rglob("lock")]
        why = f"not finished after {timeout:.0f} s"
        why += f"; a build that was cut off may have left {', '.join(locks)}: delete it" if locks else ""
    raise RunFailed(f"{tail(log_path)}\n\nrun failed: {why}\ncommand: {' '.join(command)}\nwhole log: {log_path}")


def _remove_shared_memory(port: int) -> None:
    """Free the memory that DeepSpeed's shared-memory operator leaves: 66 MiB per rank, which nothing else unlinks."""
    for buffer in Path("/dev/shm").glob(f"deepspeed_allreduce_buffer_*_{port}_*"):
        buffer.unlink(missing_ok=True)
