# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""When transfers travel, and who waits: what is in flight, in which order, on which stream.

Note [Side streams]
    On a device with streams to wait for a communication is to order a stream after it; the host goes on. So a transfer
    can be given to the device as a whole: its second hop starts when the first is over, not when the next transfer is
    submitted, and only what needs its result waits for it. For that it runs on a *side stream*: on a shared stream,
    whatever waits for that stream would wait for every hop of every transfer on it.

    There are two side streams, which take turns: one transfer is in its first hop while the one before it is in its
    second. A third would find both links busy, and hold memory. What a transfer allocates is its side stream's memory,
    from packing to the result, so it needs no care; what it reads is another stream's, which waits for the reading
    (``submit``).

    Step by step transfers stay in the order in which they were submitted, and so do their results: what a hop keeps
    from one to the next, and sums, have one order.

    No step may make the host wait: it would wait for the hop before, and nothing else would be given to the device
    meanwhile. What is delivered to pageable memory of the host has no side streams for that reason.

    Without streams a thread of the host may take the place of a side stream (``background.py``): it runs one transfer
    after the other, each from packing to the result. It has its own place in the order of messages, so ranks may
    submit such transfers at different times, as long as they do so in the same order. That is what crosses while other
    things do: Note [Leaving early] in ``zero/boundary.py``. Or the thread only completes what is submitted: first hops
    start at once, and the host waits where more are under way than side streams would take.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from torch import Tensor

from deepspeed_ext.comm.background import Background, Job, owe
from deepspeed_ext.comm.collectives import tagged
from deepspeed_ext.comm.hops import Transfer

Deliver = Callable[[Tensor], object]

_SIDE_STREAMS = 2


class StreamEvent:
    """An event on the current stream; nothing on devices without streams."""

    def __init__(self) -> None:
        self._stream: Any = None
        if not get_accelerator().is_synchronized_device():
            self._stream, self._event = get_accelerator().current_stream(), get_accelerator().Event()
            self._event.record()

    def wait(self, *read: Tensor) -> None:
        """Make the current stream wait for the event.

        Args:
            read: what it will read, of another stream's memory: that is not given out again before.
        """
        current: Any = None if self._stream is None else get_accelerator().current_stream()
        if current != self._stream:
            current.wait_event(self._event)
            for tensor in read:
                tensor.record_stream(current)

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait for the point, for at most so many seconds."""
        if self._stream is None:
            return
        if limit is None:
            self._event.synchronize()
            return
        end = time.monotonic() + limit
        while not self._event.query() and time.monotonic() < end:
            time.sleep(0.001)


class Started:
    """A transfer whose first hop is on the wire.

    ``complete`` runs the rest, on the stream where it was started: the memory of its buffers is that stream's.
    ``finish`` hands out the result, to several streams if need be.

    Args:
        transfer: what to start.
        deliver: puts the result where it belongs; it is not kept then.
    """

    def __init__(self, transfer: Transfer, deliver: Deliver | None = None) -> None:
        self._transfer = transfer
        self._deliver = deliver
        self._handle: Any = None
        self._result: Tensor | None = None
        self._done: StreamEvent | None = None
        self._home = get_accelerator().current_stream()
        self._begin()

    @property
    def is_complete(self) -> bool:
        """Whether the result is there, for what runs on the home stream from now on."""
        return self._done is not None

    def advance(self) -> None:
        """Wait for the hop that is on the wire, and start the next one."""
        with get_accelerator().stream(self._home):
            if not self.is_complete:
                self._handle.wait()
                self._resume()

    def complete(self) -> None:
        """Run the rest."""
        while not self.is_complete:
            self.advance()

    def finish(self) -> Tensor:
        """Return the transfer's result, complete for what the current stream runs from now on.

        To wait for the handle again would not do, for results may be made of what has arrived.
        """
        self.complete()
        assert self._done is not None and self._result is not None
        self._done.wait(self._result)
        return self._result

    def wait(self) -> None:
        """Make the current stream wait for the delivery."""
        self.complete()
        assert self._done is not None
        self._done.wait()

    def _begin(self) -> None:
        self._resume()

    @torch.inference_mode(False)  # what a step makes may outlive the evaluation that runs it
    @torch.no_grad()
    def _resume(self) -> None:
        try:
            self._handle = next(self._transfer)
        except StopIteration as done:
            self._handle = None
            self._arrive(done.value)

    def _arrive(self, result: Tensor) -> None:
        if self._deliver is None:
            self._result = result
        else:
            self._deliver(result)
        self._done = StreamEvent()


class _OnSideStream(Started):
    """A transfer that a side stream takes to its end; see Note [Side streams].

    Args:
        transfer, deliver: see ``Started``.
        stream: the side stream.
        before: ``steps`` of the transfer before it.

    Attributes:
        steps: where the side stream was after each step: packed and sent, received and sent on, ..., delivered.
    """

    def __init__(
        self, transfer: Transfer, deliver: Deliver | None, stream: Any, before: Sequence[StreamEvent]
    ) -> None:
        self.steps: list[StreamEvent] = []
        self._before = before
        stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(stream):
            super().__init__(transfer, deliver)
            self.complete()
        self._before = ()

    def _resume(self) -> None:
        if len(self.steps) < len(self._before):
            self._before[len(self.steps)].wait()
        super()._resume()
        self.steps.append(StreamEvent())

    def _arrive(self, result: Tensor) -> None:
        if self._before:
            self._before[-1].wait()
        super()._arrive(result)


class _InBackground(Started):
    """A transfer that a thread of the host runs when its turn comes; see Note [Side streams].

    Args:
        transfer, deliver: see ``Started``.
        background: the thread.
    """

    _job: Job

    def __init__(self, transfer: Transfer, deliver: Deliver | None, background: Background) -> None:
        super().__init__(transfer, deliver)
        self._job = background.add(super().complete)

    def complete(self) -> None:
        """Wait until the thread has run it; raises what a step, or one of a transfer before it, has raised."""
        self._job.wait()

    def _begin(self) -> None:
        """Begin on the thread: here nothing is packed yet."""

    def advance(self) -> None:
        """Run one step, on the thread."""
        if self._handle is not None:
            self._handle.wait()
        self._resume()


class _Completed(Started):
    """A transfer that a thread of the host completes; see Note [Side streams]. Arguments as of ``_InBackground``."""

    def __init__(self, transfer: Transfer, deliver: Deliver | None, background: Background) -> None:
        tag = background.next_tag()
        with tagged(tag):
            super().__init__(transfer, deliver)
        self._job = background.add(super().complete, tag)

    def complete(self) -> None:
        """Wait until the thread has completed it; raises as ``_InBackground`` does."""
        self._job.wait()


def _host_waits() -> bool:
    """Whether the host waits for each communication, whoever starts it: a setting of the job."""
    return comms_logger.enabled or os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1"


class TransferQueue:
    """Transfers in flight. All ranks start the same communications in the same order.

    Args:
        overlap: whether ``submit`` leaves a transfer on the wire. Where the host has to wait for communications each
            one then moves all earlier ones on by one hop, so that at most as many are open as one has hops.
        side_streams: whether side streams take overlapped transfers, on devices with streams; see Note [Side streams].
        background: whether a thread takes them, on devices without. What a transfer reads must stay as it is then
            until it is complete.
        completed: whether a thread completes them there.
        newest_first: whether, of those on the wire, later ones move on before earlier ones, where nothing else moves
            them: if what they do between two hops takes long, the earlier ones travel meanwhile.
        owed: whether other ranks need the transfers even if this rank's script ends; see Note [Endings] in
            ``background.py``.
    """

    def __init__(
        self,
        overlap: bool,
        side_streams: bool = False,
        background: bool = False,
        completed: bool = False,
        *,
        newest_first: bool = False,
        owed: bool = False,
    ) -> None:
        self._overlap = overlap
        self._newest_first = newest_first
        self._open: deque[Started] = deque()
        self._completed: deque[_Completed] = deque()  # what a thread may still be completing
        streams = not get_accelerator().is_synchronized_device()
        self._side_streams = side_streams and overlap and streams
        self._background = Background(owed) if (background or completed) and overlap and not streams else None
        self._whole = background
        self._streams: deque[Any] = deque()
        self._last: Sequence[StreamEvent] = ()  # of the last transfer that a side stream has taken
        if owed:
            owe(self)

    @property
    def unattended(self) -> bool:
        """Whether transfers come to their end though nobody waits, so that ranks may submit them at any times."""
        return (self._side_streams and not _host_waits()) or (self._whole and self._background is not None)

    def submit(self, transfer: Transfer, deliver: Deliver, reuses: bool = True) -> None:
        """Start a transfer that puts its result where it belongs by itself; without overlap, also finish it.

        Args:
            transfer, deliver: as of ``Started``.
            reuses: whether the current stream may overwrite, or free, from now on what the first step copies.
        """
        earlier = list(self._open)
        started = self.start(transfer, deliver)
        if isinstance(started, _OnSideStream):
            if reuses:
                started.steps[0].wait()
        elif isinstance(started, _Completed):
            self._completed.append(started)
            if len(self._completed) > _SIDE_STREAMS:
                self._completed.popleft().complete()
        elif self._background is not None:
            pass  # its turn comes
        elif self._overlap:
            self._advance(earlier)  # now, so that what was packed has not waited for them
        else:
            self.drain()

    def start(self, transfer: Transfer, deliver: Deliver | None = None) -> Started:
        """Start a transfer whose result ``finish`` hands out; arguments as of ``Started``."""
        if self._side_streams:
            if not self._streams:
                self._streams.extend(get_accelerator().Stream() for _ in range(_SIDE_STREAMS))
            self._streams.rotate()
            beside = _OnSideStream(transfer, deliver, self._streams[0], self._last)
            self._last = beside.steps
            return beside
        if self._background is not None:
            take = _InBackground if self._whole else _Completed
            return take(transfer, deliver, self._background)
        started = Started(transfer, deliver)
        if not started.is_complete:
            self._open.append(started)
        return started

    def finish(self, started: Started) -> Tensor:
        """Return the result of a transfer of this queue, for the current stream.

        Those before it are completed first: ranks may ask for results in different orders, but what is started later
        on the way to them must be in one.
        """
        self._complete_up_to(started)
        return started.finish()

    def wait(self, started: Started) -> None:
        """Make the current stream wait for what a transfer of this queue delivers by itself; see ``finish``."""
        self._complete_up_to(started)
        started.wait()

    def drain(self) -> None:
        """Complete all transfers: hop by hop over all of them, so that they overlap to the end.

        What a thread has raised is raised here.
        """
        if self._background is not None:
            self._completed.clear()
            self._background.wait()
        for step in self._last[-1:]:
            step.wait()
        while self._open:
            self._advance(self._open)

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait until all transfers that no thread completes have arrived.

        Args:
            limit: seconds for what the device completes; then what only the host could move on is left where it is.
        """
        while self._open and limit is None:
            self._advance(self._open)
        for step in self._last[-1:]:
            step.synchronize(limit)

    def drop(self) -> None:
        """Leave all transfers where they are: nobody will read what they bring."""
        for step in self._last[-1:]:  # the device has been given all of them, and will deliver
            step.wait()
        self._last = ()
        self._open.clear()
        if self._background is not None:
            self._completed.clear()
            self._background.forget()

    def _complete_up_to(self, started: Started) -> None:
        while started in self._open:
            self._open.popleft().complete()

    def _advance(self, some: Iterable[Started]) -> None:
        """Move transfers on by one hop, in their order; what is complete is let go."""
        for started in list(some)[:: -1 if self._newest_first else 1]:
            started.advance()
        self._open = deque(started for started in self._open if not started.is_complete)
