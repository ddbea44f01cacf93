# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A device with streams, simulated on the CPU, that finds accesses without an order.

Note [How order is checked]
    On a GPU, operations of one stream run one after the other, and those of two streams at any time, unless an event,
    a collective's ``wait`` or the host orders them. A missing order gives wrong numbers now and then. Here, everything
    runs on the CPU, at once and with right numbers, while an ``Order`` keeps vector clocks: for each other stream, a
    stream knows up to which operation it is ordered after it. If one of two accesses to the same bytes is a write, the
    clocks must order them:

    - Operations of torch are seen by a dispatch mode. They read and write on the current stream.
    - Collectives are seen at the process group. Each group has a stream of its own, which waits for the current one;
      only ``wait`` orders others after it. Their tensors stay alive until then, as with NCCL.
    - If tensors of the host can be told from the device's (``device_on_host/``), the host is a stream as well. It runs
      operations on tensors of the host only, and waits for copies, except non-blocking ones of pinned memory.
    - Memory belongs to the stream that was current when it was allocated. If it is freed while another stream may
      still use it, without ``record_stream``, it must not be allocated again before its own stream is ordered after
      that use.

    Bytes, not tensors, are compared, since views that overlap share memory. Memory is identified by its storage and
    not by its address, which the CPU's allocator reuses at once.

This runs inside rank processes.
"""

import contextlib
import functools
import itertools
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple
from unittest import mock

import torch
from deepspeed.accelerator import real_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from deepspeed_ext.comm.worker_thread import THREAD_NAME
from tests.harness import calls
from tests.harness.streams import Access, Clock, Event, Memory, Stream, Work, byte_spans, merge, place_of_call

# Operators with outputs that nobody has filled, and those that use only the shape of their input.
_UNWRITTEN = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
_UNREAD = (*_UNWRITTEN, "zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "new_zeros", "new_full")
ASKS_DEVICE = ("_local_scalar_dense", "equal", "nonzero", "is_nonzero")  # the host waits for their answer
# Of the methods of a process group: numbers of the arguments that are written, and that are read.
_COLLECTIVES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "reduce", "broadcast"), ((0,), (0,))),
    **dict.fromkeys(("allgather", "_allgather_base", "allgather_into_tensor_coalesced", "gather"), ((0,), (1,))),
    **dict.fromkeys(("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_tensor_coalesced"), ((0,), (1,))),
    **dict.fromkeys(("all_gather_single", "reduce_scatter_single", "all_to_all_single"), ((0,), (1,))),
    **dict.fromkeys(("alltoall", "alltoall_base", "scatter"), ((0,), (1,))),
    "send": ((), (0,)),
    **dict.fromkeys(("recv", "recv_anysource"), ((0,), ())),
}
Tensors = Iterable[Tensor]


class Finding(NamedTuple):
    """Two accesses without an order; or one, and the end of the memory."""

    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.after}\n    without an order behind: {self.before}"


class Synchronization(NamedTuple):
    """The host waits."""

    what: str  # it waits for: "device", "stream", "event", or an operation's answer
    where: str

    def __str__(self) -> str:
        return f"{self.what} at {self.where}"


class Order:
    """The streams of a simulated device, and what happens on them. See Note [How order is checked].

    Attributes:
        streams: all of them; ``default`` and ``current`` are two.
        host: clock of the operations that the host has waited for.
        left_out: whether the current ordering call is omitted.
        on_their_way: collectives in flight.
        findings: accesses without an order, and how often they occurred.
        knows_host: whether operations on tensors of the host are told from those of the device.
        accesses: number of accesses to tensors that were checked.
        pairs: number of pairs of accesses that were compared: to the same bytes on two streams, at least one a write.
        synchronizations: how often the host has waited for the device while it was watched.
    """

    knows_host = False

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.host: Clock = {}
        self.default = self.current = Stream(self, "compute")
        self.left_out: Callable[[], bool] = lambda: False
        self.on_their_way: set[Work] = set()
        self.of_host = Stream(self, "the host")
        self.findings: Counter[Finding] = Counter()
        self.accesses = self.pairs = 0
        self.synchronizations: Counter[Synchronization] = Counter()
        self._memories: dict[int, Memory] = {}
        self._freed: list[Memory] = []  # early, and not given out again
        self._wires: weakref.WeakKeyDictionary[Any, Stream] = weakref.WeakKeyDictionary()
        self._watching = False
        self._lock = threading.RLock()  # autograd may run in threads of its own

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Check the operations in this context; earlier operations have ended."""
        self.synchronize()
        self._memories.clear()
        self._freed.clear()
        self._watching = True
        try:
            with _Operations(self):
                yield
        finally:
            self._watching = False

    @contextlib.contextmanager
    def on(self, stream: Stream | None) -> Iterator[None]:
        before, self.current = self.current, stream or self.current
        try:
            yield
        finally:
            self.current = before

    @contextlib.contextmanager
    def by_host(self) -> Iterator[None]:
        """Within this context, operations run on the host, at once and in order with everything that it starts."""
        with self.on(self.of_host):
            yield

    def synchronize(self, what: str = "device", *clocks: Clock) -> None:
        """Make the host wait for all streams, or up to these clocks; ``what``: the target of the wait. If one of our
        threads waits, the computing thread does not."""
        if self.left_out() or threading.current_thread().name == THREAD_NAME:
            return
        for clock in clocks or [stream.clock for stream in self.streams]:
            merge(self.host, clock)
        if self._watching:
            self.synchronizations[Synchronization(what, place_of_call())] += 1

    def run(
        self, stream: Stream, operation: str, reads: Tensors = (), writes: Tensors = (), made: Tensors = ()
    ) -> None:
        """Run an operation on a stream: tensors in ``reads`` and ``writes`` are written; memory of ``made`` is new."""
        with self._lock:
            number, where = stream.begin(), place_of_call()
            if stream is self.of_host:
                self.host[stream.number] = number
            if made:
                self._give_out(stream, operation, where)
            for tensor in made:
                self._memory(tensor, stream)
            for tensor, writing in [(tensor, True) for tensor in writes] + [(tensor, False) for tensor in reads]:
                spans = byte_spans(tensor)
                if not spans:
                    continue
                access = Access(stream, number, writing, spans, operation, where)
                conflicting, unordered = self._memory(tensor, self.default).add(access)
                self.accesses += 1
                self.pairs += conflicting
                for other in unordered:
                    self.findings[Finding(str(other), str(access))] += 1

    def operate(
        self, name: str, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], non_blocking: bool
    ) -> None:
        self.run(self.current, name, reads, writes, made)
        if name in ASKS_DEVICE:
            self.synchronize(name, self.current.clock)

    def record(self, tensor: Tensor, stream: Stream) -> None:
        if not self.left_out():
            self._memory(tensor, self.default).recorded.add(stream)

    def communicate(self, group: Any, name: str, start: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        """Start a collective of a process group with these arguments, and return its handle."""
        written, read = ([*_tensors([args[i] for i in index])] for index in _COLLECTIVES[name])
        with _disable_current_modes():
            work = start()
        if not self._watching or work is None:
            return work
        wire = self._wires.get(group)
        if wire is None:
            wire = self._wires[group] = Stream(self, f"wire {group.group_name}")
        self.current.see(self.host)
        wire.wait_stream(self.current)
        self.run(wire, name, read, written)
        return Work(self, work, dict(wire.clock), written + read)

    def _memory(self, tensor: Tensor, home: Stream) -> Memory:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._memories:
            self._memories[key] = Memory(home)
            weakref.finalize(storage, self._free, key, self._memories[key]).atexit = False
        return self._memories[key]

    def _free(self, key: int, memory: Memory) -> None:
        with self._lock:
            if self._watching and self._memories.get(key) is memory:  # else of an earlier context
                del self._memories[key]
                memory.freed = place_of_call()
                for stream in memory.recorded:
                    merge(memory.known, stream.clock)
                self._freed.append(memory)

    def _give_out(self, stream: Stream, operation: str, where: str) -> None:
        """Memory is allocated on a stream: it may be any that was freed there."""
        retained = []
        for memory in self._freed:
            used = memory.in_use()
            if used and memory.home is not stream:
                retained.append(memory)
            for access in used if memory.home is stream else ():
                provided = f"{operation} gets memory of {stream.name}, freed at {memory.freed}, at {where}"
                self.findings[Finding(str(access), provided)] += 1
        self._freed = retained


class _Operations(TorchDispatchMode):
    """Tells an order of each operation of torch."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            return outputs
        name, uses = _arguments(func)
        provided = {**dict(zip(uses, args, strict=False)), **(kwargs or {})}
        tensors: dict[str, list[Tensor]] = {"read": [], "written": [], "seen": []}
        for argument, value in provided.items():
            tensors[uses[argument]] += _tensors(value)
        registered = {tensor.untyped_storage()._cdata for subset in tensors.values() for tensor in subset}
        if name == "lift_fresh":  # torch.tensor, on the stream that is current, of numbers of the host
            registered.clear()
        created = [tensor for tensor in _tensors(outputs) if tensor.untyped_storage()._cdata not in registered]
        if created or tensors["written"] or name in ASKS_DEVICE:  # else it is a view
            filled, read = [] if name in _UNWRITTEN else created, [] if name in _UNREAD else tensors["read"]
            self._order.operate(name, read, tensors["written"] + filled, created, bool(provided.get("non_blocking")))
        return outputs


@functools.cache
def _arguments(operator: Any) -> tuple[str, dict[str, str]]:
    """Return the name of an operator, and by argument, whether it is read, written, or only seen, as by a view."""
    uses = {
        argument.name: "read" if argument.alias_info is None else "written" if argument.alias_info.is_write else "seen"
        for argument in operator._schema.arguments
    }
    return operator._schema.name.partition("::")[2], uses


class StreamAccelerator(CPU_Accelerator):  # type: ignore[misc]
    """DeepSpeed's accelerator for the CPU, with streams."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self.order = order
        self._numbers = itertools.count(1)

    def is_synchronized_device(self) -> bool:
        return False

    def use_host_timers(self) -> bool:
        return True

    def synchronize(self, device_index: Any = None) -> None:
        self.order.synchronize()

    @property
    def Stream(self) -> Callable[..., Stream]:
        return lambda *_, **__: Stream(self.order, f"side {next(self._numbers)}")

    @property
    def Event(self) -> Callable[..., Event]:
        return lambda *_, **__: Event(self.order)

    def stream(self, stream: Any) -> Any:
        return self.order.on(stream)

    def current_stream(self, device_index: Any = None) -> Any:
        return self.order.current

    def default_stream(self, device_index: Any = None) -> Any:
        return self.order.default


@contextlib.contextmanager
def device_with_streams(
    order: Order | None = None, accelerator: Callable[[Order], StreamAccelerator] = StreamAccelerator
) -> Iterator[Order]:
    """Within this context, DeepSpeed's device has streams, and hops are as on NCCL; groups are gloo's. The default
    order is one for a device with tensors that torch takes for the host's."""
    order = order or Order()

    def watched(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
            return order.communicate(group, name, lambda: method(group, *args, **kwargs), args)

        return collective

    def to_host(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
        copy = tensor.clone()
        order.synchronize("cpu", order.current.clock)
        return copy

    with contextlib.ExitStack() as patches:
        for name in _COLLECTIVES:
            if hasattr(ProcessGroup, name):
                method = watched(name, getattr(ProcessGroup, name))
                patches.enter_context(mock.patch.object(ProcessGroup, name, method))
        patches.enter_context(mock.patch.object(torch.Tensor, "record_stream", lambda t, s: order.record(t, s)))
        if not order.knows_host:
            patches.enter_context(mock.patch.object(torch.Tensor, "cpu", to_host))  # which would copy nothing here
        patches.enter_context(mock.patch("deepspeed_ext.comm.collectives.backend_of", lambda group: "nccl"))
        patches.enter_context(mock.patch.object(real_accelerator, "ds_accelerator", accelerator(order)))
        yield order


@contextlib.contextmanager
def asking(order: Order) -> Iterator[None]:
    """In this context, count waits that ``watch`` does not see: asking for values is no operation on a CPU."""

    def counted(name: str) -> Any:
        return calls.before(Tensor, name, lambda *_, **__: order.synchronize(name, order.current.clock))

    with counted("tolist"), counted("numpy"):
        yield


def _tensors(nested: Any) -> list[Tensor]:
    """Return the tensors in an argument: itself, or those in lists of lists."""
    if isinstance(nested, (list, tuple)):
        return [tensor for item in nested for tensor in _tensors(item)]
    return [nested] if isinstance(nested, Tensor) else []
