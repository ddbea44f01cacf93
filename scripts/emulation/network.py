# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A network on one Linux machine: a network namespace for each node, and links of a limited rate between them.

A veth pair connects each node with a bridge in a namespace of its own, like a cable to a switch. ``tc`` limits the
rate at both ends of the pair, and so in both directions. Messages between ranks of one node go through its own
loopback, without a limit. All traffic stays on the machine.

The namespaces are removed at the end of the context, with every process in them; also on SIGTERM and SIGHUP if the
script turns these into an exception (``launching.exit_on_signals``). If a script was killed, the next one removes its
namespaces.

Needs root, and ``ip`` and ``tc`` of iproute2. Imports neither torch nor DeepSpeed.
"""

import contextlib
import ctypes
import json
import os
import re
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

LINK = "internode"  # each node's end of its link
PORT = 29500  # where ranks meet: a namespace has all ports to itself
MAX_NODES = 250  # addresses end in one byte
_OURS = re.compile(r"emulated-([1-9]\d*)-(switch|node\d+)")  # names carry the pid of the script that made them
_BURST = "128kb"  # bytes that pass at once: more than an offloaded segment of 64 KiB, few compared with a message
_LATENCY = "30ms"  # of the queue, beyond which packets are dropped; in a long queue, acknowledgments wait
# Every kernel has this one. BBR, which may be the host's default, sends at the rate that it remembers of a link, whose
# limit may have changed since.
_CONGESTION_CONTROL, _CONTROL_FILE = "reno", "/proc/sys/net/ipv4/tcp_congestion_control"
_SWITCH, NODE = "EMULATED_SWITCH", "EMULATED_NODE"  # environment of a rank: the switch's namespace, its number
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # from a shell, a supervisor, and a terminal that closes
_KILL_SECONDS = 5  # after which processes that even SIGKILL does not end are left alone


class Traffic(NamedTuple):
    """Bytes that a node has exchanged with others since it exists, as its interface counts them.

    The counters include Ethernet, IP and TCP headers, acknowledgments, retransmissions and ARP; loopback has an
    interface of its own. Segments are as large as the kernel hands them over, up to 64 KiB, with one header each: a
    bulk transfer counts 0.1 to 0.3 % more than its payload, where frames of 1500 bytes would have 4.6 % of headers.
    The limit charges for those frames, though. It does not change the counters, and setting it does not reset them,
    as it would the counters of ``tc``.
    """

    sent: int
    received: int


def missing() -> list[str]:
    """Return the requirements that this machine does not meet."""
    results = [] if os.geteuid() == 0 else ["root: run it as root, or in a container with NET_ADMIN and SYS_ADMIN"]
    return results + [f"{tool}: install iproute2" for tool in ("ip", "tc") if shutil.which(tool) is None]


class Network:
    """The namespaces and links, as a context; one at a time in a process.

    Args:
        nodes: number of them, at most 250.
        mbit: rate of the links in Mbit/s, until a rank sets another one; ``None`` for no limit.
    """

    def __init__(self, nodes: int, mbit: float | None = 1000) -> None:
        if not 1 <= nodes <= MAX_NODES:
            raise ValueError(f"a network has 1 to {MAX_NODES} nodes, not {nodes}")
        self.names = [f"emulated-{os.getpid()}-node{node}" for node in range(nodes)]
        self.switch = f"emulated-{os.getpid()}-switch"
        self._mbit = mbit

    def __enter__(self) -> "Network":
        remove_stale()
        try:
            for name in (self.switch, *self.names):
                _ip("netns", "add", name)
                _ip("-n", name, "link", "set", "lo", "up")
                _ip("netns", "exec", name, "sh", "-c", f"echo {_CONGESTION_CONTROL} > {_CONTROL_FILE}")
            # No snooping and no IPv6 addresses, which announce themselves, so that an idle link counts nothing.
            _ip("-n", self.switch, "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
            _ip("-n", self.switch, "link", "set", "bridge", "addrgenmode", "none")
            _ip("-n", self.switch, "link", "set", "bridge", "up")
            for node, name in enumerate(self.names):
                port = _port(node)
                _ip("link", "add", LINK, "netns", name, "type", "veth", "peer", "name", port, "netns", self.switch)
                _ip("-n", self.switch, "link", "set", port, "master", "bridge", "up", "addrgenmode", "none")
                _ip("-n", name, "address", "add", f"{address(node)}/24", "dev", LINK)
                _ip("-n", name, "link", "set", LINK, "up", "addrgenmode", "none")
                for command in _limits(name, self.switch, node, self._mbit):  # fails here if the kernel cannot
                    _run(command)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with ignore_signals():
            _remove([*self.names, self.switch])

    def environment(self, node: int) -> dict[str, str]:
        """Return the environment variables of a rank of this node: for gloo, and for its ``Link``."""
        return {"GLOO_SOCKET_IFNAME": LINK, _SWITCH: self.switch, NODE: str(node)}

    def enter(self, rank: int, ranks_per_node: int) -> None:
        """Move this thread, and those that it starts, to a rank's node, and set the environment of a rank there."""
        node = rank // ranks_per_node
        os.environ.update(self.environment(node))
        with Path("/run/netns", self.names[node]).open() as file:
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), 0):
                raise OSError(ctypes.get_errno(), "setns")

    def traffic(self) -> list[Traffic]:
        """Return the traffic of each node, of all processes that ever ran in it together."""
        return [_traffic(name) for name in self.names]

    def cut(self, node: int) -> None:
        """Cut a node's link without notice to others, as in a power failure."""
        _ip("-n", self.switch, "link", "set", _port(node), "down")

    def kill(self, nodes: Sequence[int] | None = None) -> None:
        """Kill all processes in these nodes, by default in all, including ranks in sessions of their own."""
        _kill([name for node, name in enumerate(self.names) if nodes is None or node in nodes])


class Link:
    """A rank's view of its node's link. Ranks change the rate themselves, so one launch measures all rates."""

    def __init__(self) -> None:
        self._first = int(os.environ["LOCAL_RANK"]) == 0
        self._node, self._switch = int(os.environ[NODE]), os.environ[_SWITCH]

    def limit(self, mbit: float | None) -> None:
        """Limit both directions, in Mbit/s; ``None`` for no limit. Call a barrier afterwards."""
        if self._first:
            for command in _limits("", self._switch, self._node, mbit):
                _run(command)

    def sent(self) -> int:
        """Return the bytes that this node has sent to others so far, see ``Traffic``; 0 on its other ranks."""
        return _traffic("").sent if self._first else 0

    def received(self) -> int:
        """Return the bytes that others have sent to this node, likewise."""
        return _traffic("").received if self._first else 0


def address(node: int) -> str:
    """Return a node's own address on the link."""
    return f"10.213.0.{node + 1}"


@contextlib.contextmanager
def ignore_signals() -> Iterator[None]:
    """Ignore SIGINT and its like, for cleaning up: a second Ctrl-C must neither end that, nor the commands it runs."""
    if threading.current_thread() is not threading.main_thread():  # which alone may, and gets the exceptions
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) for number in ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def remove_stale() -> None:
    """Remove the namespaces of scripts that were killed, with the processes that still run in them.

    Those of this process, too: it has made none yet, so they are of one that had its pid before.
    """
    stale = []
    for line in _run(["ip", "netns", "list"]).splitlines():
        match = _OURS.fullmatch(line.split()[0])
        if match and (int(match[1]) == os.getpid() or not Path("/proc", match[1]).exists()):
            stale.append(match[0])
    _remove(stale)


def _remove(names: Sequence[str]) -> None:
    """Remove these namespaces, if they exist."""
    _kill(names)
    for name in names:  # the links go with them
        subprocess.run(["ip", "netns", "del", name], stderr=subprocess.DEVNULL, check=False)


def _kill(names: Sequence[str]) -> None:
    """Kill all processes in these namespaces, and those that they start meanwhile."""
    deadline = time.monotonic() + _KILL_SECONDS
    while (pids := _pids(names)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _pids(names: Sequence[str]) -> list[int]:
    results = []
    for name in names:
        listed = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        results += [int(pid) for pid in listed.stdout.split()]
    return results


def _limits(name: str, switch: str, node: int, mbit: float | None) -> list[list[str]]:
    """Return the commands that limit the traffic of a node in both directions; without a name, run inside its
    namespace."""
    tbf = ["tbf", "rate", f"{mbit:g}mbit", "burst", _BURST, "latency", _LATENCY] if mbit is not None else []
    shape = tbf or ["noqueue"]  # what a veth begins with; a tbf of a huge rate would cost time
    return [
        ["tc", *_within(name), "qdisc", "replace", "dev", LINK, "root", *shape],
        ["tc", "-n", switch, "qdisc", "replace", "dev", _port(node), "root", *shape],
    ]


def _traffic(name: str) -> Traffic:
    """Read the counters of a namespace; without a name, of that that this runs in."""
    printed = json.loads(_run(["ip", *_within(name), "-s", "-j", "link", "show", "dev", LINK]))
    counters = printed[0]["stats64"]
    return Traffic(counters["tx"]["bytes"], counters["rx"]["bytes"])


def _within(name: str) -> list[str]:
    return ["-n", name] if name else []


def _port(node: int) -> str:
    return f"port{node}"


def _ip(*arguments: str) -> None:
    _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    """Run a command, and return its output.

    Raises:
        RuntimeError: the command failed; the message has its output.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout
