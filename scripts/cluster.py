# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A cluster on one Linux machine: a network namespace for each node, and links of a limited rate between them.

A veth pair connects each node with a bridge, in a namespace of its own, as a cable would with a switch; ``tc`` limits
the rate at both ends of it, so in both directions. What ranks of one node send one another goes through its own
loopback, without a limit. No traffic leaves the machine. The namespaces are removed at the end of the context, also
on SIGTERM where the script turns that into an exception (``launching.exit_on_sigterm``).

Needs root, and ``ip`` and ``tc`` of iproute2. Imports neither torch nor DeepSpeed.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

LINK = "internode"  # each node's end of its link
_PORT = 29500  # a namespace has all ports to itself
_BURST = "128kb"  # what passes at once: more than the 64 KiB of an offloaded segment, little against a message
_LATENCY = "100ms"  # of the queue, beyond which packets are dropped: long enough that few are
_SWITCH, _NODE = "EMULATED_SWITCH", "EMULATED_NODE"  # environment of a rank: the switch's namespace, its number


def missing() -> list[str]:
    """What this needs and this machine does not give."""
    found = [] if os.geteuid() == 0 else ["root: run it as root, or in a container with NET_ADMIN and SYS_ADMIN"]
    return found + [f"{tool}: install iproute2" for tool in ("ip", "tc") if shutil.which(tool) is None]


class Network:
    """The namespaces and links, as a context.

    Args:
        nodes: number of them, at most 250.
    """

    def __init__(self, nodes: int) -> None:
        self.names = [f"node{os.getpid()}-{node}" for node in range(nodes)]
        self.switch = f"switch{os.getpid()}"

    def __enter__(self) -> "Network":
        try:
            for name in (self.switch, *self.names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for node, name in enumerate(self.names):
                port = _port(node)
                _ip("link", "add", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
                _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up")
                _ip("-n", name, "address", "add", f"{_address(node)}/24", "dev", LINK)
                _ip("-n", name, "link", "set", LINK, "up")
                for command in _limits(name, self.switch, node, 1000):  # fails here if the kernel cannot
                    _run(command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in (*self.names, self.switch):  # the links go with them
            subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)

    def run(self, script: Sequence[str], ranks_per_node: int, log: Path, timeout: float) -> None:
        """Run a script once for each rank, until all have ended; the first one's bar is for the terminal.

        Raises:
            RuntimeError: one failed, or they did not end in time. None is left.
        """
        from compare import split_output  # for the parent alone: it draws pictures, which takes seconds to import

        ranks: list[subprocess.Popen[bytes]] = []
        deadline = time.monotonic() + timeout
        with log.open("wb", buffering=0) as file:
            try:
                for rank in range(len(self.names) * ranks_per_node):
                    ranks.append(
                        subprocess.Popen(
                            ["ip", "netns", "exec", self.names[rank // ranks_per_node], sys.executable, *script],
                            env=self._environment(rank, ranks_per_node),
                            stdout=file if rank else subprocess.PIPE,
                            stderr=subprocess.STDOUT,
                            start_new_session=True,
                        )
                    )
                threading.Thread(target=split_output, args=(ranks[0].stdout, file), daemon=True).start()
                while any(process.poll() is None for process in ranks):
                    if any(process.returncode for process in ranks):
                        raise RuntimeError(f"a rank failed; see {log}")
                    if time.monotonic() > deadline:
                        raise RuntimeError(f"not finished after {timeout:.0f} s; see {log}")
                    time.sleep(0.5)
                if any(process.returncode for process in ranks):
                    raise RuntimeError(f"a rank failed; see {log}")
            finally:
                for process in ranks:
                    if process.poll() is None:
                        os.killpg(process.pid, signal.SIGKILL)
                        process.wait()

    def _environment(self, rank: int, ranks_per_node: int) -> dict[str, str]:
        """What a launcher sets, and the interface that gloo shall use."""
        from compare import environment

        node, local = divmod(rank, ranks_per_node)
        return environment() | {
            "RANK": str(rank),
            "LOCAL_RANK": str(local),
            "WORLD_SIZE": str(len(self.names) * ranks_per_node),
            "LOCAL_WORLD_SIZE": str(ranks_per_node),
            "MASTER_ADDR": _address(0),
            "MASTER_PORT": str(_PORT),
            "GLOO_SOCKET_IFNAME": LINK,
            _SWITCH: self.switch,
            _NODE: str(node),
        }


def collect(nodes: int, ranks_per_node: int, script: str, log: Path, timeout: float) -> Any:
    """Run the ranks of this script in a network, with its own arguments; what the first one has written, from JSON.

    A rank is told where to write by ``--worker``. Exits with status 2 if a rank fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        try:
            with Network(nodes) as network:
                network.run([script, "--worker", str(report), *sys.argv[1:]], ranks_per_node, log, timeout)
        except RuntimeError as failure:
            print(failure, file=sys.stderr)
            sys.exit(2)
        return json.loads(report.read_text())


class Link:
    """A rank's view of its node's link. The ranks change the rate themselves: so one launch measures all rates."""

    def __init__(self) -> None:
        self._first = int(os.environ["LOCAL_RANK"]) == 0
        self._node, self._switch = int(os.environ[_NODE]), os.environ[_SWITCH]

    def limit(self, mbit: float) -> None:
        """Limit both directions. To be followed by a barrier."""
        if self._first:
            for command in _limits("", self._switch, self._node, mbit):
                _run(command)

    def sent(self) -> int:
        """Bytes that this node has sent so far, headers included; 0 on its other ranks."""
        if not self._first:
            return 0
        return int(json.loads(_run(["tc", "-s", "-j", "qdisc", "show", "dev", LINK]))[0]["bytes"])


def _limits(name: str, switch: str, node: int, mbit: float) -> list[list[str]]:
    """The commands that limit what a node sends and what it is sent; without a name, run inside its namespace."""
    shape = ["root", "tbf", "rate", f"{mbit:g}mbit", "burst", _BURST, "latency", _LATENCY]
    within = ["-n", name] if name else []
    return [
        ["tc", *within, "qdisc", "replace", "dev", LINK, *shape],
        ["tc", "-n", switch, "qdisc", "replace", "dev", _port(node), *shape],
    ]


def _port(node: int) -> str:
    return f"port{node}"


def _address(node: int) -> str:
    return f"10.213.0.{node + 1}"


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    """What a command prints.

    Raises:
        RuntimeError: with what it said.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
