# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes sent between ranks, read from the kernel's own TCP counters.

With gloo, every byte between two ranks is sent over TCP sockets that the process owns, and Linux keeps a byte counter
for each of them (``TCP_INFO``, tcp(7)). No privilege, no tool and no knowledge of the collective algorithms is needed,
so stock DeepSpeed and this package are measured in the same way. NCCL does not use such sockets for its data: there,
use DeepSpeed's comms logger.
"""

import os
import socket
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch.distributed

# Offset of tcpi_bytes_received (u64) in struct tcp_info of linux/tcp.h, unchanged since Linux 4.1.
_BYTES_RECEIVED_OFFSET = 128
_TCP_INFO_SIZE = 256

Endpoint = tuple[str, int]


class Connection(NamedTuple):
    """One TCP connection, seen from this process."""

    local: Endpoint
    remote: Endpoint


def received_bytes() -> dict[Connection, int]:
    """Payload bytes received so far on each TCP connection that this process holds open."""
    table: dict[Connection, int] = {}
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.type != socket.SOCK_STREAM or sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                connection = Connection(sock.getsockname()[:2], sock.getpeername()[:2])
                info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_SIZE)
        except OSError:  # closed meanwhile, or listening: no peer, no traffic
            continue
        (table[connection],) = struct.unpack_from("Q", info, _BYTES_RECEIVED_OFFSET)
    return table


@dataclass(frozen=True)
class Traffic:
    """Bytes received per rank, split by whether the sender is in the receiver's own group.

    Attributes:
        intra: bytes received from ranks of the same group, one entry a rank.
        inter: bytes received from ranks of other groups, one entry a rank.
    """

    intra: list[int]
    inter: list[int]

    @property
    def intra_mean(self) -> float:
        """Mean bytes a rank received within its group."""
        return sum(self.intra) / len(self.intra)

    @property
    def inter_mean(self) -> float:
        """Mean bytes a rank received from other groups."""
        return sum(self.inter) / len(self.inter)


class TrafficMeter:
    """Measures the bytes that ranks of the default process group receive from one another between two calls.

    ``start`` and ``stop`` are local and send nothing; ``read`` is collective. Put the ranks at rest before
    ``start`` and before ``stop`` (a barrier, or any collective that all of them have finished).
    """

    def __init__(self) -> None:
        self._before: dict[Connection, int] = {}
        self._after: dict[Connection, int] = {}

    def start(self) -> None:
        """Remember the counters."""
        self._before = received_bytes()

    def stop(self) -> None:
        """Remember the counters again."""
        self._after = received_bytes()

    def read(self) -> list[list[int]]:
        """Collective over the default group. Entry ``[dst][src]``: bytes that rank dst received from rank src."""
        # A connection opened in between has no earlier reading: all that it carried counts.
        delta = {c: n - self._before.get(c, 0) for c, n in self._after.items()}
        tables: list[dict[Connection, int]] = [{}] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(tables, delta)
        # By both ends: two processes may have one local port, for connections to different ones.
        owner = {connection: rank for rank, table in enumerate(tables) for connection in table}
        matrix = [[0] * len(tables) for _ in tables]
        for dst, table in enumerate(tables):
            for connection, count in table.items():
                src = owner.get(Connection(connection.remote, connection.local), dst)
                if src != dst:
                    matrix[dst][src] += count
        return matrix

    def split(self, group_size: int) -> Traffic:
        """Collective. Splits ``read()`` into traffic within and between groups of consecutive ranks."""
        matrix = self.read()
        intra, inter = [], []
        for dst, row in enumerate(matrix):
            is_same = sum(count for src, count in enumerate(row) if src // group_size == dst // group_size)
            intra.append(is_same)
            inter.append(sum(row) - is_same)
        return Traffic(intra, inter)
