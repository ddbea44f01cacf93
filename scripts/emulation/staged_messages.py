# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Messages of gloo ranks that share a GPU: copied through host memory, counted, and delayed as on nodes' links.

gloo's messages between pairs of ranks take host tensors only. Here all tensors of a GPU go through pinned memory, also
those of collectives, so that every method has the same copies.

Without privileges for a network of namespaces (``network.py``), a link is a delay. A node's link carries what its
ranks send to other nodes, one message after the other, and likewise what they receive. A communication takes its place
when its rank starts it, behind the device's work before it, and ends when gloo and the link have carried it. Meanwhile
the rank continues. A reduction or a gather is a ring over the ranks in their order, whatever gloo does.
"""

import fcntl
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_COALESCED = ("allgather_into_tensor_coalesced", "all_gather_single_coalesced")
# The bytes that each rank sends to its successor in a ring of ``size`` ranks, given those of outputs and of inputs.
# Names depend on torch's version.
_RINGS: dict[str, Callable[[int, int, int], float]] = {
    **dict.fromkeys(
        ("allgather", "_allgather_base", "all_gather_single", *_COALESCED),
        lambda size, out, given: (size - 1) * given,
    ),
    **dict.fromkeys(
        ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single"),
        lambda size, out, given: (size - 1) * out,
    ),
    **dict.fromkeys(("allreduce", "allreduce_coalesced"), lambda size, out, given: 2 * (size - 1) / size * out),
    **dict.fromkeys(("broadcast", "reduce"), lambda size, out, given: out),
}
_EXCHANGES = ("alltoall_base", "all_to_all_single")
_PAIRS = ("send", "recv")


class StagedWork(dist.Work):
    """A communication of host memory. The first wait copies what has been received to the device."""

    def __init__(self, inner: Any, arrival: float, copies: Sequence[tuple[Tensor, Tensor]]) -> None:
        super().__init__()
        self._inner, self._arrival, self._copies = inner, arrival, copies
        self._copied: Any = None

    def wait(self, *timeout: Any) -> bool:
        """Wait for the message; order the current stream behind the copy."""
        if self._inner is not None:
            self._inner.wait(*timeout)
            time.sleep(max(0.0, self._arrival - time.monotonic()))
            for tensor, host in self._copies:
                tensor.copy_(host, non_blocking=True)
            self._inner = None
            if any(tensor.is_cuda for tensor, _ in self._copies):
                self._copied = torch.cuda.current_stream().record_event()
        elif self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        return True


class StagedMessages:
    """The messages of a rank, from ``install`` on.

    Args:
        ranks_per_node: a node has consecutive ranks.
        folder: where the ranks share the clocks of links.
        always: whether tensors of the host are copied, too, as a test.
    """

    def __init__(self, ranks_per_node: int, folder: Path, always: bool = False) -> None:
        self._ranks_per_node, self._always = ranks_per_node, always
        self._clock = folder / f"link-{dist.get_rank() // ranks_per_node}"
        self._bytes_per_second: float | None = None
        self._sent, self._lock = 0.0, threading.Lock()

    def limit(self, mbit: float | None) -> None:
        """Limit each direction of this node's link, in Mbit/s; all ranks call it. None: no limit."""
        self._bytes_per_second = None if mbit is None else mbit * 1e6 / 8

    def sent(self) -> float:
        """Return the bytes that this rank has sent to other nodes so far."""
        return self._sent

    def install(self) -> None:
        """Replace the methods by which torch starts communications of a process group."""
        for name in (*_RINGS, *_EXCHANGES, *_PAIRS):
            if hasattr(dist.ProcessGroup, name):
                setattr(dist.ProcessGroup, name, self._staged(name, getattr(dist.ProcessGroup, name)))

    def _staged(self, name: str, start: Callable[..., Any]) -> Callable[..., Any]:
        def staged(group: Any, outputs: Any, *others: Any) -> StagedWork:
            copies = list[tuple[Tensor, Tensor]]()
            two = bool(others) and any(isinstance(leaf, Tensor) for leaf in tree_leaves(others[0]))
            sent, received = self._between_nodes(group, name, outputs, others)
            filled = not two and name != "recv"  # in place
            hosts = [tree_map(lambda leaf: self._on_host(leaf, filled, copies), outputs)]
            if two:
                hosts.append(tree_map(lambda leaf: self._on_host(leaf, True, []), others[0]))
            arrival = self._book(sent, received)
            return StagedWork(start(group, *hosts, *others[two:]), arrival, copies if name != "send" else ())

        return staged

    def _on_host(self, tensor: Any, filled: bool, copies: list[tuple[Tensor, Tensor]]) -> Any:
        """Return a tensor for gloo, with the numbers if it is sent; note the pair."""
        if not isinstance(tensor, Tensor) or not (tensor.is_cuda or self._always):
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        if filled:
            host.copy_(tensor)  # waits for the current stream
        copies.append((tensor, host))
        return host

    def _between_nodes(self, group: Any, name: str, outputs: Any, others: Sequence[Any]) -> tuple[float, float]:
        """Return the bytes that this rank sends to, and receives from, ranks of other nodes."""
        nodes = [rank // self._ranks_per_node for rank in dist.get_process_group_ranks(group)]
        own, size = group.rank(), len(nodes)
        apart = [node != nodes[own] for node in nodes]
        if name in _PAIRS:
            nbytes = _nbytes(outputs) * apart[others[0]]
            return (nbytes, 0) if name == "send" else (0, nbytes)
        if name in _EXCHANGES:
            return _share(others[0], others[2], apart), _share(outputs, others[1], apart)
        nbytes = _RINGS[name](size, _nbytes(outputs), _nbytes(others[0]))
        return nbytes * apart[(own + 1) % size], nbytes * apart[own - 1]

    def _book(self, sent: float, received: float) -> float:
        """Count a message, and return when the link has carried it, behind all that it carries already."""
        with self._lock:
            self._sent += sent
        if self._bytes_per_second is None or not (sent or received):
            return 0.0
        clock = os.open(self._clock, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(clock, fcntl.LOCK_EX)
            ends, now = struct.unpack("dd", os.pread(clock, 16, 0) or bytes(16)), time.monotonic()
            ends = tuple(
                max(end, now) + nbytes / self._bytes_per_second if nbytes else end
                for end, nbytes in zip(ends, (sent, received), strict=True)
            )
            os.pwrite(clock, struct.pack("dd", *ends), 0)
        finally:
            os.close(clock)  # and so unlocked
        return max(end for end, nbytes in zip(ends, (sent, received), strict=True) if nbytes)


def _nbytes(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))


def _share(tensor: Tensor, splits: Sequence[int], apart: Sequence[bool]) -> float:
    """Return the bytes of the parts that are exchanged with ranks of other nodes."""
    lengths = splits or [1] * len(apart)
    total = sum(lengths)
    return tensor.nbytes * sum(n for n, other in zip(lengths, apart, strict=True) if other) / total if total else 0.0
