# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Order and overlap of transfers, and the threads and streams that wait for them."""

import os
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from deepspeed_ext.comm import worker_thread
from deepspeed_ext.comm.transfer_queue import ActiveTransfer, TransferQueue
from deepspeed_ext.comm.worker_thread import WorkerThread
from tests.harness.stream_order import Order, Stream, device_with_streams
from tests.harness.tiers import with_cases
from tests.harness.transfers import Handle

pytestmark = pytest.mark.quick


def transfer(log: list[str], name: str, handle: type[Handle] = Handle) -> Any:
    for hop in (1, 2):
        log.append(f"start {name}{hop}")
        yield handle(log, f"{name}{hop}")
    log.append(f"done {name}")
    return torch.ones(1)


def held_up(log: list[str], may: threading.Event) -> Any:
    """A transfer that starts when it may."""
    may.wait(10)
    assert not torch.is_grad_enabled()
    return (yield from transfer(log, "a"))


def ignore(result: torch.Tensor) -> None:
    """Deliver to no destination."""


class Late(threading.Thread):
    """A thread that starts late, after a signal."""

    def start(self) -> None:
        with mock.patch.object(self._started, "wait", side_effect=KeyboardInterrupt):  # type: ignore[attr-defined]
            super().start()

    def _bootstrap(self) -> None:
        time.sleep(0.1)
        super()._bootstrap()  # type: ignore[misc]


class Listed(threading.Thread):
    """A thread that is listed but never starts, because of a signal."""

    def start(self) -> None:
        mock.patch.object(threading, "enumerate", lambda: [self]).start()
        raise KeyboardInterrupt


class Refused(threading.Thread):
    def start(self) -> None:
        raise RuntimeError("can't start new thread")


def test_join_waits_for_thread_with_interrupted_start() -> None:
    jobs, done = WorkerThread(), threading.Event()
    with mock.patch.object(threading, "Thread", Late), pytest.raises(KeyboardInterrupt):
        jobs.add(done.set)
    assert jobs.join() and done.is_set()
    jobs.add(done.clear).wait()
    assert not done.is_set()


def test_waits_end_if_a_signal_interrupts_job_start() -> None:
    jobs, done = WorkerThread(), threading.Event()
    with mock.patch.object(jobs, "_start_thread", side_effect=KeyboardInterrupt), pytest.raises(KeyboardInterrupt):
        jobs.add(done.set)
    jobs.wait()
    jobs.add(done.set).wait()
    assert done.is_set() and jobs.join()


@pytest.mark.parametrize("kind", [Listed, Refused])
def test_waits_return_if_thread_never_starts(kind: type[threading.Thread]) -> None:
    jobs, done = WorkerThread(), threading.Event()
    with (
        mock.patch.object(worker_thread, "_START_TIMEOUT", 0.05),
        mock.patch.object(threading, "Thread", kind),
        pytest.raises((KeyboardInterrupt, RuntimeError)),
    ):
        jobs.add(done.set)
    mock.patch.stopall()
    jobs.wait()
    assert jobs.join() and not done.is_set()
    jobs.add(done.set).wait()
    assert done.is_set()


def test_idle_thread_waits_for_next_job_until_joined() -> None:
    jobs, done, begun = WorkerThread(), list[int](), mock.Mock(side_effect=threading.Thread)
    with mock.patch.object(worker_thread, "_IDLE_TIMEOUT", 30.0), mock.patch.object(threading, "Thread", begun):
        for number in range(3):
            jobs.add(partial(done.append, number)).wait()
        begin = time.monotonic()
        while jobs.busy and time.monotonic() < begin + 10:  # it has said that a job is done, and looks for the next
            time.sleep(0.001)
        assert worker_thread.running_workers() == [] and jobs.join()
        assert begun.call_count == 1 and not jobs.busy and time.monotonic() - begin < 10
        jobs.add(partial(done.append, 3)).wait()
        assert begun.call_count == 2 and jobs.join()
        jobs.add(lambda: time.sleep(0.1))
        assert jobs.busy and jobs.join(5)  # joined before it is done
    assert done == [0, 1, 2, 3]


def test_join_waits_for_threads_after_their_last_job() -> None:
    jobs, threads = WorkerThread(), list[threading.Thread]()
    take = WorkerThread._next_job

    def take_slowly(self: WorkerThread) -> worker_thread.Job | None:
        job = take(self)
        if job is None and not threads:
            threads.append(threading.current_thread())
            time.sleep(0.5)  # another thread takes what is added now
        return job

    ends_soon = mock.patch.object(worker_thread, "_IDLE_TIMEOUT", 0.01)
    with ends_soon, mock.patch.object(WorkerThread, "_next_job", take_slowly):
        jobs.add(lambda: None).wait()
        ends = time.monotonic() + 10
        while not threads and time.monotonic() < ends:
            time.sleep(0.001)
        jobs.add(lambda: None).wait()
        assert threads[0].is_alive() and jobs.join() and not threads[0].is_alive()


def test_forked_process_starts_its_own_thread() -> None:
    jobs = WorkerThread()
    with mock.patch.object(worker_thread, "_IDLE_TIMEOUT", 30.0):
        jobs.add(lambda: None).wait()
        with jobs._lock:  # as it may be held where another thread forks
            pid = os.fork()
            if pid == 0:
                done = threading.Event()
                jobs.add(done.set)
                os._exit(0 if done.wait(10) else 1)
        assert os.waitpid(pid, 0)[1] == 0 and jobs.join()


def test_idle_thread_ends_and_frees_its_jobs() -> None:
    class Large:
        """An object that a job references."""

    large = Large()
    alive, jobs = weakref.ref(large), WorkerThread()
    with mock.patch.object(worker_thread, "_IDLE_TIMEOUT", 2.0):
        jobs.add(lambda large=large: None).wait()  # type: ignore[misc]
        del large
        assert jobs._accepts_jobs and alive() is None
        ends = time.monotonic() + 10
        while jobs._accepts_jobs and time.monotonic() < ends:
            time.sleep(0.01)
    assert not jobs._accepts_jobs and jobs.join()


@with_cases(
    "names, overlap, newest_first, expected",
    ("ab", False, False, "start a1|wait a1|start a2|wait a2|done a|start b1|wait b1|start b2|wait b2|done b"),
    # The first hop of b is on the wire together with the second of a.
    ("ab", True, False, "start a1|start b1|wait a1|start a2|wait a2|done a|wait b1|start b2|wait b2|done b"),
    # What b does between its hops has the second hop of a, and the first of c, on the wire.
    (
        *("abc", True, True),
        "start a1|start b1|wait a1|start a2|start c1|wait b1|start b2|wait a2|done a|wait c1|start c2|wait b2|done b|"
        "wait c2|done c",
    ),
)
def test_hops_of_transfers_overlap(names: str, overlap: bool, newest_first: bool, expected: str) -> None:
    log: list[str] = []
    queue = TransferQueue(overlap=overlap, newest_first=newest_first)
    for name in names:
        queue.submit(transfer(log, name), ignore)
    if overlap:
        queue.drain()
    assert "|".join(log) == expected


def test_transfer_advances_only_when_finished() -> None:
    log: list[str] = []
    started = ActiveTransfer(transfer(log, "a"))
    assert log == ["start a1"]
    result = started.finish()
    assert log == ["start a1", "wait a1", "start a2", "wait a2", "done a"]
    assert started.finish() is result and log[-1] == "done a"


def test_all_hops_are_launched_if_waits_do_not_block() -> None:
    log: list[str] = []
    with mock.patch("deepspeed_ext.comm.transfer_queue.get_accelerator") as accelerator:
        accelerator().is_synchronized_device.return_value = False
        queue = TransferQueue(overlap=True, side_streams=True)
        queue.submit(transfer(log, "a"), lambda _: log.append("delivered a"))
        assert log == ["start a1", "wait a1", "start a2", "wait a2", "done a", "delivered a"]


class Behind:
    """A communication on its own stream; a stream that waits is ordered after it."""

    def __init__(self, order: Order, wire: Stream) -> None:
        self.order = order
        wire.wait_stream(order.current)
        wire.begin()
        self.clock = dict(wire.clock)

    def wait(self) -> None:
        self.order.current.see(self.clock)


@contextmanager
def wired() -> Iterator[tuple[Order, list[Stream]]]:
    """A device with streams, and a stream for each of two links."""
    with device_with_streams() as order:
        yield order, [Stream(order, "intra"), Stream(order, "inter")]


def over(order: Order, wires: list[Stream]) -> Any:
    """A transfer with a hop over each of these links."""
    for wire in wires:
        yield Behind(order, wire)
    return torch.empty(0)


def seen(stream: Stream, wires: list[Stream]) -> list[int]:
    """Return the number of communications of each link that this stream is ordered after."""
    return [stream.clock.get(wire.number, 0) for wire in wires]


def test_streams_wait_only_for_results_that_they_need() -> None:
    with wired() as (order, wires):
        gathers = TransferQueue(overlap=True, side_streams=True)
        first, second, _ = (gathers.start(over(order, wires)) for _ in range(3))
        assert seen(order.default, wires) == [0, 0]
        gathers.finish(first)
        assert seen(order.default, wires) == [1, 1]
        gathers.finish(second)
        assert seen(order.default, wires) == [2, 2]


@pytest.mark.parametrize("owed", [True, False])
def test_exit_waits_only_for_transfers_that_others_need(owed: bool) -> None:
    with wired() as (order, wires):
        updates = TransferQueue(overlap=True, side_streams=True, finish_before_exit=owed)
        for _ in range(3):
            updates.start(over(order, wires))
        assert worker_thread.complete_before_exit(after_an_error=False) is None
        assert [order.host.get(wire.number, 0) for wire in wires] == [3 * owed] * 2


def test_packing_waits_only_for_the_bucket_before_last() -> None:
    delivered: list[list[int]] = []
    with wired() as (order, wires):
        reductions = TransferQueue(overlap=True, side_streams=True)
        for number in range(4):
            reductions.submit(over(order, wires), lambda _: delivered.append(seen(order.current, wires)))
            # Two are in flight: the third one's packing waits for the first one's side stream.
            assert seen(order.default, wires) == [max(0, number - 1)] * 2
            assert [wire.clock[wire.number] for wire in wires] == [number + 1] * 2  # given to the device at once
        reductions.drain()
        assert seen(order.default, wires) == [4, 4]
    assert delivered == [[number, number] for number in (1, 2, 3, 4)]  # in their order, each after its own hops


def test_bucket_with_one_hop_is_delivered_in_order() -> None:
    behind: list[bool] = []
    with wired() as (order, wires):
        reductions = TransferQueue(overlap=True, side_streams=True)
        reductions.submit(over(order, wires), ignore)
        reductions.submit(over(order, wires[:1]), lambda _: behind.append(seen(order.current, wires) == [2, 1]))
    assert behind == [True]


def test_hop_state_is_ordered_between_transfers() -> None:
    """Error feedback needs this: the next bucket between groups may have the same error."""
    writes: list[tuple[Stream, int]] = []
    behind: list[bool] = []

    def keeping(order: Order, wires: list[Stream]) -> Any:
        yield Behind(order, wires[0])
        behind.extend(order.current.clock.get(stream.number, 0) >= number for stream, number in writes)
        writes.append((order.current, order.current.begin()))
        yield Behind(order, wires[1])
        return torch.empty(0)

    with wired() as (order, wires):
        reductions = TransferQueue(overlap=True, side_streams=True)
        for _ in range(3):
            reductions.submit(keeping(order, wires), ignore)
    assert behind == [True] * 3


def test_current_stream_waits_for_dropped_transfers() -> None:
    with device_with_streams() as order:
        wires = [Stream(order, "intra")]
        reductions = TransferQueue(overlap=True, side_streams=True)
        reductions.submit(over(order, wires), ignore)
        reductions.drop()
        assert seen(order.default, wires) == [1]


def test_thread_completes_one_transfer_after_another() -> None:
    log: list[str] = []
    may = threading.Event()
    queue = TransferQueue(overlap=True, side_streams=True, on_thread=True)
    assert queue.unattended and not TransferQueue(overlap=True, side_streams=True).unattended
    first = queue.start(held_up(log, may))
    queue.submit(transfer(log, "b"), lambda _: log.append("delivered b"))
    assert not log  # nobody has waited here
    may.set()
    assert queue.finish(first).item() == 1
    queue.drain()
    hops = [[f"start {name}1", f"wait {name}1", f"start {name}2", f"wait {name}2", f"done {name}"] for name in "ab"]
    assert log == [*hops[0], *hops[1], "delivered b"]
    assert not TransferQueue(overlap=False, on_thread=True).unattended


def test_host_waits_for_third_transfer_in_flight() -> None:
    log: list[str] = []
    may = threading.Event()

    class HeldUp(Handle):
        def wait(self) -> None:
            may.wait(10)
            super().wait()

    queue = TransferQueue(overlap=True, thread_completes=True)
    assert not queue.unattended
    for name in "ab":
        queue.submit(transfer(log, name, HeldUp), lambda _, name=name: log.append(f"delivered {name}"))
    assert log == ["start a1", "start b1"]
    threading.Timer(0.2, may.set).start()
    queue.submit(transfer(log, "c", HeldUp), ignore)
    assert "delivered a" in log
    queue.drain()
    assert [entry for entry in log if "c1" not in entry] == [
        *("start a1", "start b1", "wait a1", "start a2", "wait a2", "done a", "delivered a"),
        *("wait b1", "start b2", "wait b2", "done b", "delivered b", "start c2", "wait c2", "done c"),
    ]


def test_thread_errors_are_raised_by_waits() -> None:
    log: list[str] = []

    def failing() -> Any:
        yield Handle(log, "a1")
        raise ConnectionError("a rank is gone")

    queue = TransferQueue(overlap=True, on_thread=True)
    queue.submit(failing(), ignore)
    queue.submit(transfer(log, "b"), ignore)
    for _ in range(2):
        with pytest.raises(ConnectionError, match="a rank is gone"):
            queue.drain()
    assert log == ["wait a1"]  # nothing starts after it, since that would meet other ranks' messages
    queue.drop()
    queue.drain()


def test_dropped_transfers_still_run_on_thread() -> None:
    log: list[str] = []
    may = threading.Event()
    queue = TransferQueue(overlap=True, on_thread=True)
    queue.submit(held_up(log, may), ignore)
    queue.drop()
    queue.drain()  # of nothing
    queue.submit(transfer(log, "b"), ignore)
    may.set()
    queue.drain()
    assert [entry for entry in log if entry.startswith("done")] == ["done a", "done b"]
