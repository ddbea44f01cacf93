# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Run a script on a cluster that this machine emulates: nodes with links of a limited rate between them.

    scripts/cluster --nodes 2 --ranks-per-node 2 --rate 100 script.py arguments...
    scripts/cluster --nodes 2 --ranks-per-node 2 --rate 100 --module deepspeed_ext doctor

Each node is a network namespace (see ``network.py``). In it, the launcher is started as on a node of a real cluster:
``torchrun``, or the program that the ``deepspeed`` runner starts on each of its hosts. Ranks of one node communicate
through its loopback, without a limit. At the end it prints the bytes between nodes, from the counters of their
interfaces; these include the messages by which ranks meet.

A script can change the rate and read the counters through ``network.Link``.

There is no name server in a node. If torch warns that it cannot retrieve a hostname, it continues with the address.

Exit status: that of the first node that failed; 128 plus the signal's number if a signal ended it or this script;
2 if it could not run.

The benchmarks on emulated networks use ``collect``. Imports neither torch nor DeepSpeed.
"""

import argparse
import base64
import contextlib
import json
import math
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from deepspeed_ext.tools.arguments import counts
from scripts.emulation.launching import environment, exit_on_signals, split_output
from scripts.emulation.network import ENDING, MAX_NODES, PORT, Network, Traffic, address, ignore_signals, missing

LAUNCHERS = ("torchrun", "deepspeed", "none")
_GRACE_SECONDS = 3  # that processes have to end by themselves when another one has failed
_POLL_SECONDS = 0.05


class NodeJob(NamedTuple):
    """A process to start in a node."""

    node: int
    command: list[str]
    variables: dict[str, str]  # of its environment, in addition to ours


class Failure(NamedTuple):
    """The first process that failed: its node, and its status."""

    node: int
    status: int


def rank_jobs(nodes: Sequence[int], script: Sequence[str]) -> list[NodeJob]:
    """Return the ranks themselves, each with the variables that a launcher sets.

    Args:
        nodes: number of ranks in each node.
        script: what they run, with its arguments.
    """
    master = {"WORLD_SIZE": str(sum(nodes)), "MASTER_ADDR": address(0), "MASTER_PORT": str(PORT)}
    places = [(node, local) for node, ranks in enumerate(nodes) for local in range(ranks)]
    return [
        NodeJob(
            node,
            [sys.executable, *script],
            {"RANK": str(rank), "LOCAL_RANK": str(local), "LOCAL_WORLD_SIZE": str(nodes[node]), **master},
        )
        for rank, (node, local) in enumerate(places)
    ]


def launcher_jobs(launcher: str, nodes: Sequence[int], script: Sequence[str]) -> list[NodeJob]:
    """Return a launcher for each node; with ``none``, its ranks themselves, which start seconds earlier."""
    if launcher == "none":
        return rank_jobs(nodes, script)
    if launcher == "torchrun":
        options = ["torch.distributed.run", f"--nnodes={len(nodes)}"]
        options += [f"--master-addr={address(0)}", f"--master-port={PORT}"]
        rank_option = "--node-rank"
    else:
        hosts = {f"node{node}": list(range(ranks)) for node, ranks in enumerate(nodes)}
        world = base64.urlsafe_b64encode(json.dumps(hosts).encode()).decode()
        options = ["deepspeed.launcher.launch", f"--world_info={world}"]
        options += [f"--master_addr={address(0)}", f"--master_port={PORT}"]
        rank_option = "--node_rank"
    command = [sys.executable, "-m", *options]
    ranks_option = [f"--nproc-per-node={ranks}" for ranks in nodes] if launcher == "torchrun" else []
    return [
        NodeJob(node, [*command, *ranks_option[node : node + 1], f"{rank_option}={node}", *script], {})
        for node in range(len(nodes))
    ]


class Processes:
    """Processes in the nodes of a network, as a context. At its end, none is left, nor any that they have started."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._started: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> "Processes":
        return self

    def __exit__(self, *_: object) -> None:
        with ignore_signals():
            for _, process in self._started:
                process.terminate()  # does nothing if it has ended
            deadline = time.monotonic() + _GRACE_SECONDS
            for _, process in self._started:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0, deadline - time.monotonic()))
            self._network.kill()
            for _, process in self._started:
                process.kill()  # one that had not entered its namespace yet
                process.wait()
            for reader in self._readers:
                reader.join(_GRACE_SECONDS)  # every process that could write has ended

    def start(self, job: NodeJob, output: IO[bytes] | None, read: Callable[[IO[bytes]], None] | None = None) -> None:
        """Start a process with this output, by default ours; or let another thread read its output."""
        process = subprocess.Popen(
            ["ip", "netns", "exec", self._network.names[job.node], *job.command],
            env=environment() | self._network.environment(job.node) | job.variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if read else output,
            stderr=subprocess.STDOUT if read or output else None,
            start_new_session=True,  # Ctrl-C is for this script, which then ends the processes
        )
        self._started.append((job.node, process))
        if read:
            self._readers.append(threading.Thread(target=read, args=(process.stdout,), daemon=True))
            self._readers[-1].start()

    def forget(self, node: int) -> None:
        """Do not count the end of a node's processes as a failure, since they were to be killed."""
        self._started = [(of, process) for of, process in self._started if of != node]

    def wait(self, timeout: float = math.inf) -> Failure | None:
        """Wait until all have ended, or one has failed.

        Raises:
            TimeoutError: neither happened within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        running = True
        while running:
            running = any([process.poll() is None for _, process in self._started])  # a list: polls all of them
            for node, process in self._started:
                if process.returncode:
                    return Failure(node, process.returncode)
            if running and time.monotonic() > deadline:
                raise TimeoutError(f"not finished after {timeout:.0f} s")
            time.sleep(_POLL_SECONDS if running else 0)
        return None


# For scripts with ranks that take part in the emulation ############################################


def require_emulation() -> None:
    """Exit with status 2 if this machine cannot emulate a network, and print what is missing."""
    if lacks := missing():
        print("this emulates a network, which needs:\n  " + "\n  ".join(lacks), file=sys.stderr)
        sys.exit(2)


def collect(nodes: int, ranks_per_node: int, module: str, log: Path, timeout: float, more: Sequence[str] = ()) -> Any:
    """Run the ranks of this program in a network, with its own arguments and further ones.

    Returns the JSON value that the first rank has written.

    ``--worker`` tells a rank where to write. Exits with status 2 if a rank fails, or this machine cannot emulate.
    """
    require_emulation()
    exit_on_signals()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            jobs = rank_jobs([ranks_per_node] * nodes, ["-m", module, "--worker", str(report), *sys.argv[1:], *more])
            with Network(nodes) as network:
                _run_logged(network, jobs, log, timeout)
        except RuntimeError as failure:
            print(failure, file=sys.stderr)
            sys.exit(2)
        return json.loads(report.read_text())


def _run_logged(network: Network, jobs: list[NodeJob], log: Path, timeout: float) -> None:
    """Run the jobs until all have ended. The first one's progress bar goes to the terminal, all else to the log.

    Raises:
        RuntimeError: one failed, or they did not end in time. None of them is left running.
    """
    with log.open("wb", buffering=0) as file:
        try:
            with Processes(network) as processes:
                for job in jobs:
                    processes.start(job, file, None if job != jobs[0] else lambda stream: split_output(stream, file))
                if processes.wait(timeout) is not None:
                    raise RuntimeError(f"a rank failed; see {log}")
        except TimeoutError as late:
            raise RuntimeError(f"{late}; see {log}") from None


# The command ######################################################################################


def run(args: argparse.Namespace) -> int:
    """Start the launchers, wait for them, and print the bytes sent; return the exit status."""
    kind = [] if not args.module else ["--module" if args.launcher == "deepspeed" else "-m"]
    jobs = launcher_jobs(args.launcher, args.nodes, [*kind, args.script, *args.arguments])
    with _output_of_others(args.log) as output, Network(len(args.nodes), args.rate) as network:
        with Processes(network) as processes:
            for job in jobs:
                processes.start(job, None, _reader(job.node, output) if job.node else None)
            failure = processes.wait()
        print(traffic_table(network.traffic()), flush=True)
    if failure is None:
        return 0
    status = failure.status if failure.status > 0 else 128 - failure.status
    print(f"node {failure.node} failed with status {status}; the others were ended", file=sys.stderr)
    return status


def traffic_table(traffic: list[Traffic]) -> str:
    """Return a line for each node."""
    lines = [f"  node {node}: {sent} sent, {received} received" for node, (sent, received) in enumerate(traffic)]
    return "\n".join(["bytes between nodes, headers included:", *lines])


@contextlib.contextmanager
def _output_of_others(log: Path | None) -> Iterator[IO[bytes]]:
    """Open the file that nodes other than the first print to."""
    if log is None:
        yield sys.stdout.buffer
    else:
        with log.open("wb") as file:
            yield file


def _reader(node: int, output: IO[bytes]) -> Callable[[IO[bytes]], None]:
    """Return a function that passes on a node's output line by line, since nodes must not cut one another's lines."""

    def read(stream: IO[bytes]) -> None:
        for line in stream:
            output.write(f"[node {node}] ".encode() + line.rstrip(b"\r\n") + b"\n")
            output.flush()

    return read


def parse_arguments(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/cluster", description="Run a script on an emulated cluster.", allow_abbrev=False
    )
    parser.add_argument("--nodes", type=int, help=f"at most {MAX_NODES}; 2 by default")
    parser.add_argument("--ranks-per-node", type=counts, default=[2], help="one number, or one for each node: 4,2")
    parser.add_argument("--rate", type=_rate, metavar="MBIT", help="of the links, in Mbit/s; unlimited by default")
    parser.add_argument(
        "--launcher",
        choices=LAUNCHERS,
        default=LAUNCHERS[0],
        help="that runs in each node; none: the ranks are started without one, with the same environment",
    )
    parser.add_argument("--log", type=Path, help="file for what nodes other than the first print")
    parser.add_argument("--module", action="store_true", help="the script is a module, as of python -m")
    parser.add_argument("script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")
    args = parser.parse_args(arguments)
    ranks, nodes = args.ranks_per_node, args.nodes
    args.nodes = ranks * (2 if nodes is None else nodes) if len(ranks) == 1 else ranks
    if not 1 <= len(args.nodes) <= MAX_NODES:
        parser.error(f"--nodes must be 1 to {MAX_NODES}, not {len(args.nodes)}")
    if nodes not in (None, len(args.nodes)):
        parser.error(f"--ranks-per-node must be one number, or one for each of {nodes} nodes, not {ranks}")
    if not args.module and not Path(args.script).is_file():
        parser.error(f"there is no script {args.script}")
    if args.log is not None and not args.log.absolute().parent.is_dir():
        parser.error(f"there is no folder for --log {args.log}")
    return args


def _rate(text: str) -> float | None:
    """Return Mbit/s; ``None`` for no limit."""
    try:
        mbit = 0.0 if text == "unlimited" else float(text)
    except ValueError:
        mbit = math.nan
    if not 0 <= mbit < math.inf:
        raise argparse.ArgumentTypeError(f"must be more than 0 Mbit/s, or 0 or 'unlimited' for no limit, not {text!r}")
    return mbit or None


def main() -> int:
    args = parse_arguments()
    require_emulation()
    # SIGINT, too: a shell that starts this in the background would make it ignored.
    exit_on_signals(ENDING)
    try:
        return run(args)
    except RuntimeError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
