# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Records a rank's phases, waits and communications in moments of a clock, which are converted to seconds afterwards.

Note [Why not torch.profiler]
    Its ranges lack waits of the host, the groups and bytes of DeepSpeed's own communications, and devices other than
    CUDA's. It also records each operator, which slows the measured step.
"""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from deepspeed import comm as dist
from torch import Tensor
from torch.distributed import ProcessGroup, irecv

from deepspeed_ext.comm import observers
from deepspeed_ext.tools.clocks import Clock
from deepspeed_ext.tools.report.measures import HANDLING, Communication, Moment, Phase, Step, Wait

_Timed = TypeVar("_Timed", Communication, Phase, Wait)


class WatchedHandle:
    """Wraps a communication's handle. The first completed wait is recorded as the communication's end."""

    def __init__(self, recorder: "Recorder", communication: Communication, handle: Any) -> None:
        self._recorder, self._communication, self._handle = recorder, communication, handle

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for the communication."""
        begin = self._recorder.clock.mark()
        result = self._handle.wait(*args, **kwargs)
        self._recorder.waited(begin, self._communication)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Recorder:
    """Records a rank's phases, waits and communications; an ``Observer`` of our communications.

    Args:
        clock: clock that was created on the training lane.
        hop_of: returns the hop of a process group.

    Attributes:
        clock: the same clock.
    """

    def __init__(self, clock: Clock, hop_of: Callable[[ProcessGroup | None], str]) -> None:
        self.clock, self._hop_of = clock, hop_of
        self._module = ""  # module whose parameters are being fetched
        self._communications: list[Communication] = []
        self._waits: list[Wait] = []
        self._phases: list[Phase] = []
        self._open: dict[str, Moment] = {}
        self._ends: list[tuple[int, Moment]] = []

    def on_start(
        self, name: str, group: ProcessGroup | None, nbytes: float, handle: Any, begin: Moment = None
    ) -> WatchedHandle:
        """Record a communication that started at ``begin`` or now; see ``Observer.on_start``."""
        moment = self.clock.mark() if begin is None else begin
        self._communications.append(Communication(name, self._hop_of(group), nbytes, moment, None))
        return WatchedHandle(self, self._communications[-1], handle)

    def completed(self, name: str, group: ProcessGroup | None, nbytes: float, begin: Moment) -> None:
        """Record a communication for which this thread or stream has waited since ``begin``."""
        self._communications.append(Communication(name, self._hop_of(group), nbytes, begin, None))
        self.waited(begin, self._communications[-1])

    def waited(self, begin: Moment, communication: Communication | None) -> None:
        """Record a wait from ``begin`` until now."""
        end = self.clock.mark()
        # Only the first wait ends a communication: later waits for the same handle return at once.
        if communication is not None and communication.end is None:
            communication.end = end
        self._waits.append(Wait(begin, end, self.clock.on_training_lane(), communication, self._module))

    @contextmanager
    def on_wait(self) -> Iterator[None]:
        """See ``Observer.on_wait``."""
        begin = self.clock.mark()
        try:
            yield
        finally:
            self.waited(begin, None)

    @contextmanager
    def phase(self, kind: str, module: str = "") -> Iterator[None]:
        """Record a phase of the training lane; a nested phase of the same kind is part of the outer phase."""
        opened = self.open(kind)
        try:
            yield
        finally:
            if opened:
                self.close(kind, module)

    def open(self, kind: str) -> bool:
        """Begin a phase; return False if it is open already, or outside the training lane."""
        if kind in self._open or not self.clock.on_training_lane():
            return False
        self._open[kind] = self.clock.mark()
        return True

    def close(self, kind: str, module: str = "") -> None:
        """End a phase if it is open."""
        if kind in self._open:
            self._phases.append(Phase(kind, self._open.pop(kind), self.clock.mark(), module))

    @contextmanager
    def fetching(self, module: str) -> Iterator[None]:
        """Record that a module's parameters are being fetched; on a host, also as handling."""
        # The fetch of a module may run inside the fetch of another, such as its parent's.
        before, self._module = self._module, module
        try:
            with self.handling(module):
                yield
        finally:
            self._module = before

    @contextmanager
    def handling(self, module: str = "") -> Iterator[None]:
        """Record that the host handles communication. Does nothing on a device, which computes concurrently."""
        if not self.clock.on_host:
            yield
            return
        with self.phase(HANDLING, module):
            yield

    def end_step(self, number: int) -> None:
        """Record that step ``number`` ends now and the next step begins."""
        self._ends.append((number, self.clock.mark()))

    def steps(self) -> list[Step]:
        """Return the steps between the recorded ends, in seconds. Ends the recording."""
        self.clock.settle()
        seconds, last = self.clock.seconds, self._ends[-1][1]
        items: list[Communication | Wait | Phase] = [*self._communications, *self._waits, *self._phases]
        for item in items:
            # A communication that nothing waited for ends with the recording.
            item.begin, item.end = seconds(item.begin), seconds(last if item.end is None else item.end)
        ends = [(number, seconds(end)) for number, end in self._ends]
        return [
            Step(
                number=number,
                begin=begin,
                end=end,
                phases=_started_within(begin, end, self._phases),
                waits=_started_within(begin, end, self._waits),
                communications=_started_within(begin, end, self._communications),
            )
            for (_, begin), (number, end) in itertools.pairwise(ends)
        ]


def _started_within(begin: float, end: float, timed: Sequence[_Timed]) -> list[_Timed]:
    return [item for item in timed if begin <= item.begin < end]


# DeepSpeed's communications #######################################################################

Arguments = Mapping[str, Any]


class Operation(NamedTuple):
    """An operation of DeepSpeed's backend.

    Attributes:
        arguments: names of the arguments, in order: DeepSpeed's decorators hide the signature.
        received: returns the bytes that a rank receives, from the arguments and the number of ranks in the group.
        asynchronous: whether it always returns a handle.
    """

    arguments: tuple[str, ...]
    received: Callable[[Arguments, int], float]
    asynchronous: bool = False

    def bind(self, args: Iterable[Any], kwargs: Arguments) -> dict[str, Any]:
        """Return the arguments by name."""
        return {**dict(zip(self.arguments, args, strict=False)), **kwargs}


def _nbytes(value: Any) -> float:
    return float(value.nbytes if isinstance(value, Tensor) else sum(tensor.nbytes for tensor in value))


def _collective_operation(arguments: str, of: str, times: float = 1.0) -> Operation:
    """Return a collective that receives the other ranks' parts of argument ``of``, ``times`` times."""
    return Operation(
        (*arguments.split(), "group", "async_op"),
        lambda values, ranks: times * _nbytes(values[of]) * (ranks - 1) / ranks,
    )


def _message_operation(other: str, asynchronous: bool) -> Operation:
    """Return a message to or from a rank."""
    return Operation(
        ("tensor", other, "group", "tag"),
        lambda values, ranks: _nbytes(values["tensor"]) if other == "src" and ranks > 1 else 0.0,
        asynchronous,
    )


# A reduce to one rank counts as a ring through all ranks: each rank receives about the other ranks' parts.
OPERATIONS: Mapping[str, Operation] = {
    "all_reduce": _collective_operation("tensor op", "tensor", 2),
    "inference_all_reduce": _collective_operation("tensor op", "tensor", 2)._replace(
        arguments=("tensor", "op", "group")
    ),
    "all_reduce_coalesced": _collective_operation("tensors op", "tensors", 2),
    "reduce": _collective_operation("tensor dst op", "tensor"),
    "reduce_scatter": _collective_operation("output input_list op", "input_list"),
    "reduce_scatter_tensor": _collective_operation("output_tensor input_tensor op", "input_tensor"),
    "broadcast": _collective_operation("tensor src", "tensor"),
    "all_gather": _collective_operation("tensor_list tensor", "tensor_list"),
    "all_gather_into_tensor": _collective_operation("output_tensor input_tensor", "output_tensor"),
    "all_gather_coalesced": _collective_operation("output_tensors input_tensors", "output_tensors"),
    "all_to_all_single": _collective_operation("output input output_split_sizes input_split_sizes", "output"),
    "all_to_all": _collective_operation("output_tensor_list input_tensor_list", "output_tensor_list"),
    "gather": _collective_operation("tensor gather_list dst", "tensor", 0),
    "scatter": _collective_operation("tensor scatter_list src", "tensor"),
    "send": _message_operation("dst", False),
    "recv": _message_operation("src", False),
    "isend": _message_operation("dst", True),
    "irecv": _message_operation("src", True),
    "batch_isend_irecv": Operation(
        ("p2p_op_list",),
        lambda values, _: sum(_nbytes(message.tensor) for message in values["p2p_op_list"] if message.op is irecv),
        asynchronous=True,
    ),
    "barrier": Operation(("group", "async_op", "device_ids"), lambda values, ranks: 0.0),
}


def record_operation(
    recorder: Recorder, name: str, operation: Operation, run: Callable[..., Any]
) -> Callable[..., Any]:
    """Wrap an operation of DeepSpeed's backend so that it is recorded, unless it is one of our communications."""

    @functools.wraps(run)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if observers.is_package_communication():
            return run(*args, **kwargs)
        arguments = operation.bind(args, kwargs)
        group = arguments["p2p_op_list"][0].group if "p2p_op_list" in arguments else arguments.get("group")
        nbytes = operation.received(arguments, dist.get_world_size(group=group))
        begin = recorder.clock.mark()
        with observers.package_communication():  # operations that it calls internally would be recorded twice
            result = run(*args, **kwargs)
        if not (operation.asynchronous or arguments.get("async_op")):
            recorder.completed(name, group, nbytes, begin)
            return result
        if isinstance(result, list):  # a batch of messages: record all bytes with the first message
            return [
                recorder.on_start(name, group, nbytes if not number else 0.0, handle, begin)
                for number, handle in enumerate(result)
            ]
        return result if result is None else recorder.on_start(name, group, nbytes, result, begin)

    return wrapper
