# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the scripts that start their own ranks have in common; imports neither torch nor DeepSpeed by itself."""

import argparse
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from deepspeed_ext.strategy import GroupSizes


def add_options(parser: argparse.ArgumentParser, log: str, timeout: float) -> None:
    """Add the options of a script that starts ranks, and those of a rank."""
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


def exit_on_signals(numbers: Sequence[int] = (signal.SIGTERM, signal.SIGHUP)) -> None:
    """These end Python on the spot, and the ranks would live on; an exception lets a launch clean up.

    But what ``nohup`` has had ignored stays ignored.
    """
    for number in numbers:
        if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, lambda number, _: sys.exit(128 + number))


def environment() -> dict[str, str]:
    """The caller's environment, made fit for several CPU ranks on one machine."""
    env = dict(os.environ)
    env["OMP_NUM_THREADS"] = "1"  # more threads than cores make every rank wait for the others
    env["DS_ACCELERATOR"] = "cpu"
    # DeepSpeed's default folder for compiled operators is shared by all environments of a user, which then rebuild
    # one another's files, and wait forever for a lock that a killed build left behind.
    env.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions"))
    # The launcher and ninja lie beside this Python, also where the environment was not activated.
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")])
    return env


def free_port() -> int:
    """A port that was free a moment ago, so that two runs side by side do not meet."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def launch(script: str, ranks: int, worker: Path, log: Path, timeout: float, more: Sequence[str] = ()) -> None:
    """Run a script's ranks under the stock launcher.

    Raises:
        compare.RunFailed: it failed, or did not end in time.
    """
    import compare  # for the parent alone: it draws pictures, and drawing takes seconds to import

    launcher = shutil.which("deepspeed", path=environment()["PATH"]) or "deepspeed"
    command = [launcher, "--num_accelerators", str(ranks), "--master_port", str(free_port())]
    compare.launch([*command, script, "--worker", str(worker), *more], log.resolve(), timeout)


def start_rank() -> bool:
    """Join the other ranks; whether this is the first one."""
    import deepspeed

    # A shared-memory all-reduce for inference, which would be compiled now, and leave 66 MB a rank in /dev/shm.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    return deepspeed.comm.get_rank() == 0
