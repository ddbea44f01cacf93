# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Votes, texts, and messages between all ranks over gloo on the host, separate from the process groups that train.

Note [Channels of threads]
    *Connections.* Ranks form a tree: blocks of 32 consecutive ranks are process groups, the first ranks of 32 blocks
    form the next larger group, and so on. A value is reduced toward the root, and the result is broadcast back. So a
    rank has at most 31 connections per level; 16,384 ranks have three levels. A mesh would have a connection for each
    pair of ranks. Messages use a process group of all ranks that connects two of them at their first message.

    *Disks.* A disk may be slower than any timeout of a collective. So a second thread runs slow functions, and until
    it is done on all ranks, they vote at short intervals whether it is. The timeout applies to each vote, not to the
    disk, and the next vote detects a dead rank.

    *Failures.* A rank that cannot vote closes its connections, so the others fail as well, at once. A channel is not
    used after that: its owner creates another one.
"""

import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch import Tensor, distributed
from torch.distributed import ProcessGroupGloo, ReduceOp, distributed_c10d

from deepspeed_ext.comm.agreement import printable, wait_for_all_ranks
from deepspeed_ext.comm.disjoint_groups import timeout_of

_Result = TypeVar("_Result")
_PREFIX = "deepspeed_ext"  # of keys in the store
_CLOSED = "closed"  # key in the store of a channel: a rank has closed its connections
_POLL = 0.02  # seconds between two looks at the store
_FAN_OUT = 32
_TEXT_BYTES = 4096  # bytes of a text that is broadcast
_SLOW_DISK_SECONDS = 300.0  # seconds until a warning that a disk is slow; each further warning after twice as many


class ChannelError(RuntimeError):
    """A communication of a ``HostChannel`` that failed. Other ranks may not have failed yet."""


def tree(rank: int, world: int) -> list[list[int]]:
    """Return the groups of a rank from the leaves to the root, as ascending ranks. The first rank of each leads it."""
    groups, step = [], 1
    while step < world and rank % step == 0:
        first = rank - rank % (step * _FAN_OUT)
        groups.append(list(range(first, min(first + step * _FAN_OUT, world), step)))
        step *= _FAN_OUT
    return groups


@dataclass
class _Group:
    """A process group. Its connections are closed when nothing else, such as an exception, references ``gloo``."""

    gloo: Any


def _store(name: str, ranks: Sequence[int]) -> Any:
    keys = f"{_PREFIX}/{name}/{ranks[0]}-{ranks[-1]}"
    return distributed_c10d.PrefixStore(keys, distributed_c10d._get_default_store())


class HostChannel:
    """A ``Channel`` of one thread of each rank. See Note [Channels of threads].

    All ranks must call its methods in the same order. Its groups do not use ``deepspeed.comm``: so they also work in a
    thread that outlives ``destroy_process_group``, and the comms logger does not time communication that overlaps
    training.

    The constructor is collective over all ranks.

    Args:
        number: the same on all ranks, and different for each channel.
    """

    def __init__(self, number: int) -> None:
        self.rank, self.world = int(dist.get_rank()), int(dist.get_world_size())
        self._timeout = timeout_of(None) or distributed_c10d.default_pg_timeout
        self._closed = False
        self._worker: _Worker | None = None
        self._groups: list[_Group] = []  # all of them
        levels = enumerate(tree(self.rank, self.world))
        self._tree = [self._create_group(f"{number}/{level}", ranks) for level, ranks in levels if len(ranks) > 1]
        self._mesh = self._create_mesh(f"{number}/mesh")
        self._peers = _store(f"{number}/peers", range(self.world))
        self._connected_peers: set[int] = set()  # ranks with which a message has been exchanged

    def _create_group(self, name: str, ranks: Sequence[int]) -> "_Group":
        store, rank = _store(name, ranks), ranks.index(self.rank)
        return self._track_group(distributed_c10d.ProcessGroupGloo(store, rank, len(ranks), self._timeout))

    def _create_mesh(self, name: str) -> "_Group":
        """Create a group of all ranks that connects two ranks at their first message."""
        gloo: Any = ProcessGroupGloo
        options = gloo._Options()
        options._timeout = self._timeout
        # Same devices as torch creates for its eagerly connected groups.
        interfaces = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
        devices = [gloo.create_device(interface=name, lazy_init=True) for name in interfaces]
        options._devices = devices or [gloo.create_default_device(lazy_init=True)]
        return self._track_group(gloo(_store(name, range(self.world)), self.rank, self.world, options))

    def _track_group(self, gloo: Any) -> "_Group":
        self._groups.append(_Group(gloo))
        return self._groups[-1]

    def close(self) -> None:
        """End the process groups, with their threads and connections. Not collective.

        Called by the thread that uses the channel, or when no thread does. Data that this rank has sent is still
        received: another rank may be in the last call.
        """
        self._closed = True
        with suppress(RuntimeError):  # the process that serves the store may have ended
            self._peers.set(_CLOSED, "")
        for group in self._groups:
            group.gloo = None

    # Votes ############################################################################################

    def all_reduce_min(self, value: int) -> int:
        """Return the smallest of all ranks' values."""
        return int(self._all_reduce(torch.tensor([value]), ReduceOp.MIN).item())

    def all_reduce_sum(self, value: int) -> int:
        """Return the sum of all ranks' values."""
        return int(self._all_reduce(torch.tensor([value]), ReduceOp.SUM).item())

    def broadcast_text(self, text: str, source: int) -> str:
        """Broadcast the text of rank ``source``, truncated to ``_TEXT_BYTES`` bytes."""
        content = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if self.rank == source:
            encoded = bytearray(printable(text).encode()[:_TEXT_BYTES])
            content[: len(encoded)] = torch.frombuffer(encoded or bytearray(1), dtype=torch.uint8)[: len(encoded)]
        reduced = self._all_reduce(content, ReduceOp.MAX)  # other ranks have zeros
        return bytes(reduced.numpy()).rstrip(b"\0").decode(errors="replace")

    def wait_for(self, function: Callable[[], _Result]) -> _Result:
        """Run a function of any duration, and return its result when all ranks have run theirs. Collective.

        It runs on another thread. If a vote fails meanwhile, this still waits for the thread, because the caller's
        cleanup must not run while the thread still writes.
        """
        done, start = self._submit(function), time.monotonic()
        next_warning = start + _SLOW_DISK_SECONDS

        def has_ended_within(seconds: float) -> bool:
            nonlocal next_warning
            now = time.monotonic()
            if self.rank == 0 and now > next_warning:
                logger.warning(f"deepspeed_ext: a rank has been writing to its disk for {now - start:.0f} s.")
                next_warning = 2 * now - start
            return bool(futures.wait([done], seconds).done)

        try:
            wait_for_all_ranks(has_ended_within, self)
        finally:
            futures.wait([done])
        return done.result()

    def end_worker(self) -> None:
        """End the second thread. Called when this channel's thread is idle."""
        if self._worker is not None:
            self._worker.end()
            self._worker = None

    def _submit(self, function: Callable[[], _Result]) -> "futures.Future[_Result]":
        done: futures.Future[_Result] = futures.Future()

        @torch.no_grad()  # grad mode is per thread
        def run() -> None:
            try:
                done.set_result(function())
            except BaseException as error:
                done.set_exception(error)

        try:
            self._worker = self._worker or _Worker()
        except RuntimeError:  # the system has no more threads, or the interpreter ends
            run()
        else:
            self._worker.put(run)
        return done

    def _all_reduce(self, values: Tensor, operation: Any) -> Tensor:
        options = distributed.AllreduceOptions()
        options.reduceOp = operation
        with self._channel_errors():
            # Only the first rank of a group is also in a group of the next level.
            for group in self._tree:
                group.gloo.allreduce([values], options).wait()
            for group in reversed(self._tree):
                group.gloo.broadcast([values], distributed.BroadcastOptions()).wait()
        return values

    # Messages #########################################################################################

    def exchange(self, sent: Sequence[Tensor], target: int, received: Sequence[Tensor], source: int) -> None:
        """Send tensors to ``target`` and receive tensors from ``source``, each in order; either list may be empty."""
        handles: list[Any] = []
        with self._channel_errors():
            self._rendezvous({peer for peer, tensors in ((target, sent), (source, received)) if tensors})
            try:
                # Receives first, as in Note [Pairwise messages] in ``collectives.py``.
                handles += [self._mesh.gloo.recv([tensor], source, 0) for tensor in received]
                handles += [self._mesh.gloo.send([tensor], target, 0) for tensor in sent]
                for handle in handles:
                    handle.wait()
            finally:
                # An exception references this list, and its handles reference connections that must be closed.
                handles.clear()

    def _rendezvous(self, peers: set[int]) -> None:
        """Before the first message between two ranks, wait until both are about to send it.

        Gloo connects them at that message. Without this, it would retry for five times the timeout if the other rank
        has closed its connections.

        Raises:
            RuntimeError: a rank has closed its connections, or is not ready within the timeout.
        """
        new_peers = peers - self._connected_peers - {self.rank}
        # Announce all before the first wait, because ranks may wait for one another in a cycle.
        for peer in new_peers:
            self._peers.set(f"{self.rank}-{peer}", "")
        end = time.monotonic() + self._timeout.total_seconds()
        for peer in sorted(new_peers):
            while not self._peers.check([f"{peer}-{self.rank}"]):
                if self._peers.check([_CLOSED]):
                    raise RuntimeError("a rank has closed its connections")
                if time.monotonic() > end:
                    raise RuntimeError(f"rank {peer} has not connected within {self._timeout}")
                time.sleep(_POLL)
        self._connected_peers |= new_peers

    def exchange_text(self, text: str, target: int, source: int) -> str:
        """Send a text to ``target``, and return the text received from ``source``."""
        content = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        length = torch.zeros(1, dtype=torch.int64)
        self.exchange([torch.tensor([content.numel()])], target, [length], source)
        received = torch.empty(int(length), dtype=torch.uint8)
        self.exchange([content], target, [received], source)
        return bytes(received.numpy()).decode()

    @contextmanager
    def _channel_errors(self) -> Iterator[None]:
        if self._closed:
            raise ChannelError("the connections of this rank are closed")
        try:
            yield
        except RuntimeError as error:
            raise ChannelError(f"a connection between ranks has failed: {error}") from error


class _Worker:
    """A thread that runs functions one at a time until it is ended."""

    def __init__(self) -> None:
        self._functions: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="deepspeed_ext files", daemon=True)
        self._thread.start()

    def put(self, function: Callable[[], None]) -> None:
        """Queue a function that does not raise."""
        self._functions.put(function)

    def end(self) -> None:
        """Wait until all functions are done and the thread has ended."""
        self._functions.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (function := self._functions.get()) is not None:
            function()
