# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Schedules transfers: their order, their overlap, and their streams.

Note [Side streams]
    On a device with streams, waiting for a communication orders a stream after it; the host continues. So all hops of
    a transfer can be launched at once: its second hop starts when the first is done, not when the next transfer is
    submitted, and only consumers of its result wait for it. Each transfer therefore runs on a *side stream*: on a
    shared stream, consumers would wait for every hop of every transfer.

    Two side streams alternate: one transfer is in its first hop while the one before it is in its second. A third
    would find both links busy, and take memory. From packing to the result, a transfer allocates on its side stream,
    so the allocator orders reuse; its inputs belong to another stream, which waits until they are read (``submit``).

    Steps of transfers run in the order of submission, and so do deliveries: errors that a hop keeps between
    transfers, and sums, have one order.

    No step may make the host wait: it would wait for the hop before, and could launch nothing meanwhile. For that
    reason, transfers that deliver to pageable host memory use no side streams.

    Without streams, a host thread may replace the side streams (``worker_thread.py``). It runs one transfer at a time,
    from packing to the result. Its messages have their own tags, so ranks may submit such transfers at different
    times, as long as they do so in the same order. Transfers that overlap other communication need this: Note [Leaving
    early] in ``zero/boundary.py``. Or the thread only completes transfers: first hops start at once, and the host
    waits when more are in flight than there would be side streams.
"""

import functools
import inspect
import os
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import comms_logger
from torch import Tensor

from deepspeed_ext.comm.collectives import tagged
from deepspeed_ext.comm.hops import Transfer
from deepspeed_ext.comm.worker_thread import Job, WorkerThread, register_exit_task

Deliver = Callable[[Tensor], object]
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")

_SIDE_STREAMS = 2


def outside_autograd(function: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """Decorate a function, not a generator, to run outside of autograd and inference mode: parameters that an
    evaluation gathers may be trained later. Contexts are entered only if needed; they can take longer than it.
    """
    assert not inspect.isgeneratorfunction(function)

    @functools.wraps(function)
    def call(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        if not (torch.is_grad_enabled() or torch.is_inference_mode_enabled()):
            return function(*args, **kwargs)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args, **kwargs)

    return call


class StreamEvent:
    """An event on the current stream; a no-op on devices without streams."""

    def __init__(self) -> None:
        self._stream: Any = None
        if not get_accelerator().is_synchronized_device():
            self._stream, self._event = get_accelerator().current_stream(), get_accelerator().Event()
            self._event.record()

    def wait(self, *tensors: Tensor) -> None:
        """Make the current stream wait for the event.

        Args:
            tensors: tensors of another stream that the current one will read; their memory is not reused before.
        """
        current: Any = None if self._stream is None else get_accelerator().current_stream()
        if current != self._stream:
            current.wait_event(self._event)
            # Otherwise the allocator could reuse their memory on the other stream before this one has read it.
            for tensor in tensors:
                tensor.record_stream(current)

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait for the event, at most ``limit`` seconds."""
        if self._stream is None:
            return
        if limit is None:
            self._event.synchronize()
            return
        end = time.monotonic() + limit  # device events have no wait with a timeout, so poll
        while not self._event.query() and time.monotonic() < end:
            time.sleep(0.001)


class ActiveTransfer:
    """A transfer whose first hop is in flight.

    ``complete`` runs the rest on the stream where it was started, which owns the memory of its buffers. ``finish``
    returns the result, to several streams if needed.

    Args:
        transfer: the transfer to start.
        deliver: stores the result at its destination; then no reference to it is kept.
    """

    def __init__(self, transfer: Transfer, deliver: Deliver | None = None) -> None:
        self._transfer = transfer
        self._deliver = deliver
        self._handle: Any = None
        self._result: Tensor | None = None
        self._done: StreamEvent | None = None
        # All hops run on this stream: the allocator reuses the transfer's buffers in its order only.
        self._stream_of_transfer = get_accelerator().current_stream()
        self._start()

    @property
    def is_complete(self) -> bool:
        """Whether work launched on the home stream from now on may use the result."""
        return self._done is not None

    def advance(self) -> None:
        """Wait for the hop in flight, and start the next one."""
        with get_accelerator().stream(self._stream_of_transfer):
            if not self.is_complete:
                self._handle.wait()
                self._resume()

    def complete(self) -> None:
        """Run all remaining hops."""
        while not self.is_complete:
            self.advance()

    def finish(self) -> Tensor:
        """Return the transfer's result, complete for work launched on the current stream from now on.

        Waiting for the handle again would not suffice, because results may be computed from received data.
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

    def _start(self) -> None:
        self._resume()

    @outside_autograd
    def _resume(self) -> None:
        try:
            self._handle = next(self._transfer)
        except StopIteration as done:
            self._handle = None
            self._deliver_result(done.value)

    def _deliver_result(self, result: Tensor) -> None:
        if self._deliver is None:
            self._result = result
        else:
            self._deliver(result)
        self._done = StreamEvent()


class _SideStreamTransfer(ActiveTransfer):
    """A transfer that runs to its end on a side stream; see Note [Side streams].

    Args:
        transfer, deliver: see ``ActiveTransfer``.
        stream: the side stream.
        previous: ``steps`` of the transfer before it.

    Attributes:
        steps: events on the side stream after each step: packed and sent, received and sent on, ..., delivered.
    """

    def __init__(
        self, transfer: Transfer, deliver: Deliver | None, stream: Any, previous: Sequence[StreamEvent]
    ) -> None:
        self.steps: list[StreamEvent] = []
        self._previous = previous
        stream.wait_stream(get_accelerator().current_stream())  # which writes the inputs of the transfer
        with get_accelerator().stream(stream):
            super().__init__(transfer, deliver)
            self.complete()
        self._previous = ()

    def _resume(self) -> None:
        # Keep steps in the order of submission: a hop may read errors that the transfer before it has written.
        if len(self.steps) < len(self._previous):
            self._previous[len(self.steps)].wait()
        super()._resume()
        self.steps.append(StreamEvent())

    def _deliver_result(self, result: Tensor) -> None:
        if self._previous:  # deliveries keep the order of submission, too: sums may be added in place
            self._previous[-1].wait()
        super()._deliver_result(result)


class _ThreadTransfer(ActiveTransfer):
    """A transfer that a host thread runs after all earlier ones; see Note [Side streams].

    Args:
        transfer, deliver: see ``ActiveTransfer``.
        worker: the thread.
    """

    _job: Job

    def __init__(self, transfer: Transfer, deliver: Deliver | None, worker: WorkerThread) -> None:
        super().__init__(transfer, deliver)
        self._job = worker.add(super().complete)  # last, because the thread may run it at once

    def complete(self) -> None:
        """Wait until the thread has run it; raises the exception of a step of this transfer or an earlier one."""
        self._job.wait()

    def _start(self) -> None:
        """Do nothing: packing starts on the thread."""

    def advance(self) -> None:
        """Run one step, on the thread."""
        if self._handle is not None:
            self._handle.wait()
        self._resume()


class _ThreadCompletedTransfer(ActiveTransfer):
    """A transfer that a host thread completes; see Note [Side streams]. Takes the arguments of ``_ThreadTransfer``."""

    def __init__(self, transfer: Transfer, deliver: Deliver | None, worker: WorkerThread) -> None:
        tag = worker.next_tag()  # of all hops: the first is started here, the others on the thread
        with tagged(tag):
            super().__init__(transfer, deliver)
        self._job = worker.add(super().complete, tag)

    def complete(self) -> None:
        """Wait until the thread has completed it; raises as ``_ThreadTransfer`` does."""
        self._job.wait()


def _host_waits() -> bool:
    """Return whether the settings of the job make the host wait for each communication."""
    return comms_logger.enabled or os.environ.get("TORCH_NCCL_BLOCKING_WAIT", "0") == "1"


class TransferQueue:
    """Transfers in flight. All ranks start the same communications in the same order.

    Args:
        overlap: whether ``submit`` returns while a transfer is in flight. If the host has to wait for communications,
            each submitted transfer advances all earlier ones by one hop, so at most as many are open as one has hops.
        side_streams: whether side streams run overlapped transfers, on devices with streams; see Note [Side streams].
        on_thread: whether a thread runs them, on devices without streams. The inputs of a transfer must then not
            change until it is complete.
        thread_completes: whether a thread completes them, on devices without streams.
        newest_first: whether later transfers advance before earlier ones, if nothing else advances them: if their
            work between two hops takes long, the hops of earlier ones are in flight meanwhile.
        finish_before_exit: whether other ranks need the transfers even if this rank's script ends; see Note [Endings]
            in ``worker_thread.py``.
    """

    def __init__(
        self,
        overlap: bool,
        side_streams: bool = False,
        on_thread: bool = False,
        thread_completes: bool = False,
        *,
        newest_first: bool = False,
        finish_before_exit: bool = False,
    ) -> None:
        self._overlap = overlap
        self._newest_first = newest_first
        self._open: deque[ActiveTransfer] = deque()
        self._completed: deque[_ThreadCompletedTransfer] = deque()  # a thread may still be completing these
        streams = not get_accelerator().is_synchronized_device()
        self._side_streams = side_streams and overlap and streams
        self._worker = (
            WorkerThread(finish_before_exit) if (on_thread or thread_completes) and overlap and not streams else None
        )
        self._on_thread = on_thread
        self._streams: deque[Any] = deque()
        self._last_steps: Sequence[StreamEvent] = ()  # of the last transfer on a side stream
        if finish_before_exit:
            register_exit_task(self)

    @property
    def unattended(self) -> bool:
        """Whether transfers complete without waits of the host, so that ranks may submit them at different times."""
        return (self._side_streams and not _host_waits()) or (self._on_thread and self._worker is not None)

    def submit(self, transfer: Transfer, deliver: Deliver, reuses: bool = True) -> None:
        """Start a transfer that delivers its result; without overlap, also finish it.

        Args:
            transfer, deliver: see ``ActiveTransfer``.
            reuses: whether the current stream may overwrite or free the inputs of the first step from now on.
        """
        earlier = list(self._open)  # before ``start`` appends the new transfer
        active = self.start(transfer, deliver)
        if isinstance(active, _SideStreamTransfer):
            if reuses:
                active.steps[0].wait()  # the first step has copied its inputs
        elif isinstance(active, _ThreadCompletedTransfer):
            self._completed.append(active)
            if len(self._completed) > _SIDE_STREAMS:
                self._completed.popleft().complete()
        elif self._worker is not None:
            pass  # the thread runs it
        elif self._overlap:
            self._advance(earlier)  # after the start, so that packing has not waited for them
        else:
            self.drain()

    def start(self, transfer: Transfer, deliver: Deliver | None = None) -> ActiveTransfer:
        """Start a transfer whose result ``finish`` returns; takes the arguments of ``ActiveTransfer``."""
        if self._side_streams:
            if not self._streams:
                self._streams.extend(get_accelerator().Stream() for _ in range(_SIDE_STREAMS))
            self._streams.rotate()
            transfer_on_stream = _SideStreamTransfer(transfer, deliver, self._streams[0], self._last_steps)
            self._last_steps = transfer_on_stream.steps
            return transfer_on_stream
        if self._worker is not None:
            thread_class = _ThreadTransfer if self._on_thread else _ThreadCompletedTransfer
            return thread_class(transfer, deliver, self._worker)
        active = ActiveTransfer(transfer, deliver)
        if not active.is_complete:
            self._open.append(active)
        return active

    def finish(self, active: ActiveTransfer) -> Tensor:
        """Return the result of a transfer of this queue, for the current stream.

        Earlier transfers are completed first: ranks may request results in different orders, but must start the
        remaining hops in the same order.
        """
        self._complete_up_to(active)
        return active.finish()

    def wait(self, active: ActiveTransfer) -> None:
        """Make the current stream wait for the delivery of a transfer of this queue; see ``finish``."""
        self._complete_up_to(active)
        active.wait()

    def drain(self) -> None:
        """Complete all transfers: hop by hop over all of them, so that they overlap to the end.

        An exception of the thread is raised here.
        """
        if self._worker is not None:
            self._completed.clear()
            self._worker.wait()
        for step in self._last_steps[-1:]:  # deliveries are in order, so the last one follows all others
            step.wait()
        while self._open:
            self._advance(self._open)

    def synchronize(self, limit: float | None = None) -> None:
        """Make the host wait until all transfers that no thread completes are delivered.

        Args:
            limit: seconds to wait for the device; if set, transfers that only the host can advance are not advanced.
        """
        while self._open and limit is None:
            self._advance(self._open)
        for step in self._last_steps[-1:]:
            step.synchronize(limit)

    def drop(self) -> None:
        """Drop all transfers: their results will not be read."""
        for step in self._last_steps[-1:]:  # their work has been launched, and will write to their destinations
            step.wait()
        self._last_steps = ()
        self._open.clear()
        if self._worker is not None:
            self._completed.clear()
            self._worker.untrack_jobs()

    def _complete_up_to(self, active: ActiveTransfer) -> None:
        while active in self._open:
            self._open.popleft().complete()

    def _advance(self, transfers: Iterable[ActiveTransfer]) -> None:
        """Advance transfers by one hop, in order, and remove complete ones."""
        for active in list(transfers)[:: -1 if self._newest_first else 1]:
            active.advance()
        self._open = deque(active for active in self._open if not active.is_complete)
