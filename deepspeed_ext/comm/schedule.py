# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""When transfers travel, and who waits: what is in flight, in which order, on which stream."""

from collections import deque
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.comm.hops import Transfer


class Started:
    """A transfer whose first hop is on the wire.

    ``complete`` runs the rest, on the stream where it was started: the memory of its buffers is that stream's.
    ``finish`` hands out the result, to several streams if need be.

    Args:
        transfer: what to start.
        hops: of how many communications it is made at most. Where waiting for one orders streams and does not block
            the host, all are started at once.
    """

    def __init__(self, transfer: Transfer, hops: int = 1) -> None:
        self._transfer = transfer
        self._handle: Any = None
        self._result: Tensor | None = None
        self._streams = not get_accelerator().is_synchronized_device()
        self._home = get_accelerator().current_stream()
        self._done: Any = None  # event: the result is complete
        self._resume()
        if self._streams:
            for _ in range(hops - 1):
                self._advance()

    @property
    def is_complete(self) -> bool:
        """Whether the result is there, for what runs on the home stream from now on."""
        return self._result is not None

    def advance(self) -> None:
        """Wait for the hop that is on the wire, and start the next one."""
        with get_accelerator().stream(self._home):
            self._advance()

    def complete(self) -> None:
        """Run the rest."""
        with get_accelerator().stream(self._home):
            while not self.is_complete:
                self._advance()

    def finish(self) -> Tensor:
        """Return the transfer's result, complete for what the current stream runs from now on.

        To wait for the handle again would not do, for results may be made of what has arrived.
        """
        self.complete()
        assert self._result is not None
        if self._streams and get_accelerator().current_stream() != self._home:
            get_accelerator().current_stream().wait_event(self._done)
            self._result.record_stream(get_accelerator().current_stream())
        return self._result

    def _advance(self) -> None:
        if not self.is_complete:
            self._handle.wait()
            self._resume()

    def _resume(self) -> None:
        try:
            self._handle = next(self._transfer)
        except StopIteration as done:
            self._result, self._handle = done.value, None
            if self._streams:
                self._done = get_accelerator().Event()
                self._done.record()


class Schedule:
    """Transfers in flight. All ranks start the same communications in the same order.

    Args:
        overlap: whether ``submit`` leaves a transfer on the wire. Then each moves all earlier ones on by one hop
            first, so that at most as many are open as one has hops.
        own_stream: whether transfers run on a stream of their own, behind what starts them: then whoever finishes one
            on a stream waits for the transfer, and not for what else the stream that started it has been given.
    """

    def __init__(self, overlap: bool, own_stream: bool = False) -> None:
        self._overlap = overlap
        self._open: deque[Started] = deque()
        streams = own_stream and not get_accelerator().is_synchronized_device()
        self._stream = get_accelerator().Stream() if streams else None

    def submit(self, transfer: Transfer) -> None:
        """Start a transfer that puts its result where it belongs by itself; without overlap, also finish it."""
        self._advance()
        self.start(transfer)
        if not self._overlap:
            self.drain()

    def start(self, transfer: Transfer, hops: int = 1) -> Started:
        """Start a transfer whose result ``finish`` hands out; arguments as of ``Started``."""
        if self._stream is not None:
            self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            started = Started(transfer, hops)
        if not started.is_complete:
            self._open.append(started)
        return started

    def finish(self, started: Started) -> Tensor:
        """Return the result of a transfer of this schedule, for the current stream.

        Those before it are completed first: ranks may ask for results in different orders, but what is started later
        on the way to them must be in one.
        """
        while started in self._open:
            self._open.popleft().complete()
        return started.finish()

    def drain(self) -> None:
        """Complete all transfers: hop by hop over all of them, so that they overlap to the end."""
        while self._open:
            self._advance()

    def drop(self) -> None:
        """Leave all transfers where they are: nobody will read what they bring."""
        self._open.clear()

    def _advance(self) -> None:
        """Move all transfers on by one hop; what is complete is let go."""
        for _ in range(len(self._open)):
            started = self._open.popleft()
            started.advance()
            if not started.is_complete:
                self._open.append(started)
