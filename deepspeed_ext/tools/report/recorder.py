# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Takes down what a rank does while steps are recorded: moments of a clock, which are resolved afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.distributed import ProcessGroup

from deepspeed_ext.clocks import Clock
from deepspeed_ext.tools.report.recording import HANDLING, Communication, Phase, Step, Wait


@dataclass
class _Started:
    """A communication, in moments; ``end`` is None until something has waited for it."""

    name: str
    hop: str
    nbytes: float
    begin: Any
    end: Any = None


class WatchedHandle:
    """The handle of a communication, of which the first wait that ends tells when it has ended."""

    def __init__(self, recorder: "Recorder", started: _Started, handle: Any) -> None:
        self._recorder, self._started, self._handle = recorder, started, handle

    def wait(self, *args: Any, **kwargs: Any) -> Any:
        """Wait for it."""
        begin = self._recorder.clock.mark()
        result = self._handle.wait(*args, **kwargs)
        self._recorder.waited(begin, self._started)
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self._handle, name)


class Recorder:
    """What a rank does, as moments of a clock; a ``Watcher`` of our communications.

    Args:
        clock: made on the training lane.
        hop_of: returns which hop a process group is.

    Attributes:
        clock: the same.
        module: the module whose parameters are being fetched; empty if none is.
    """

    def __init__(self, clock: Clock, hop_of: Callable[[ProcessGroup | None], str]) -> None:
        self.clock, self.module = clock, ""
        self._hop_of = hop_of
        self._started: list[_Started] = []
        self._waits: list[tuple[Any, Any, bool, _Started | None, str]] = []
        self._phases: list[tuple[str, Any, Any, str]] = []
        self._open: dict[str, Any] = {}
        self._ends: list[tuple[int, Any]] = []

    # Communications ###################################################################################

    def started(self, name: str, group: ProcessGroup | None, nbytes: float, handle: Any, begin: Any = None) -> Any:
        """Take down one that has been started, at ``begin`` or now; see ``Watcher.started``."""
        taken = _Started(name, self._hop_of(group), nbytes, self.clock.mark() if begin is None else begin)
        self._started.append(taken)
        return WatchedHandle(self, taken, handle)

    def completed(self, name: str, group: ProcessGroup | None, nbytes: float, begin: Any) -> None:
        """Take down one that began at that moment, and for which this thread or stream has waited until now."""
        taken = _Started(name, self._hop_of(group), nbytes, begin)
        self._started.append(taken)
        self.waited(begin, taken)

    def waited(self, begin: Any, started: _Started | None) -> None:
        """Take down a wait from that moment until now."""
        end = self.clock.mark()
        if started is not None and started.end is None:
            started.end = end
        self._waits.append((begin, end, self.clock.trains(), started, self.module))

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """See ``Watcher.waiting``."""
        begin = self.clock.mark()
        try:
            yield
        finally:
            self.waited(begin, None)

    # Phases ###########################################################################################

    @contextmanager
    def phase(self, kind: str, module: str = "") -> Iterator[None]:
        """Take down a phase of the training lane; one inside another of its kind is a part of it."""
        opened = self.open(kind)
        try:
            yield
        finally:
            if opened:
                self.close(kind, module)

    def open(self, kind: str) -> bool:
        """Begin a phase; return whether it had not begun already."""
        if kind in self._open or not self.clock.trains():
            return False
        self._open[kind] = self.clock.mark()
        return True

    def close(self, kind: str, module: str = "") -> None:
        """End a phase, if it has begun."""
        begin = self._open.pop(kind, None)
        if begin is not None:
            self._phases.append((kind, begin, self.clock.mark(), module))

    @contextmanager
    def fetching(self, module: str) -> Iterator[None]:
        """Take down that the parameters of a module are being fetched, and on a host that this is handled."""
        before, self.module = self.module, module
        try:
            with self.handling(module):
                yield
        finally:
            self.module = before

    @contextmanager
    def handling(self, module: str = "") -> Iterator[None]:
        """Take down that the host handles what communicates. A device does so beside what the host does."""
        if not self.clock.on_host:
            yield
            return
        with self.phase(HANDLING, module):
            yield

    def step_ends(self, number: int) -> None:
        """Take down that step ``number`` ends here, and the next one begins."""
        self._ends.append((number, self.clock.mark()))

    # What was recorded ################################################################################

    def steps(self) -> list[Step]:
        """Return the steps between the ends that were taken down."""
        self.clock.settle()
        at = self.clock.seconds
        last = at(self._ends[-1][1])
        made = {
            id(one): Communication(
                one.name, one.hop, one.nbytes, at(one.begin), last if one.end is None else at(one.end)
            )
            for one in self._started
        }
        waits = [
            Wait(at(begin), at(end), trains, None if one is None else made[id(one)], module)
            for begin, end, trains, one, module in self._waits
        ]
        phases = [Phase(kind, at(begin), at(end), module) for kind, begin, end, module in self._phases]
        found = []
        for (_, begin), (number, end) in zip(self._ends, self._ends[1:], strict=False):
            since, until = at(begin), at(end)

            def inside(one: Communication | Wait | Phase, since: float = since, until: float = until) -> bool:
                return since <= one.begin < until

            found.append(
                Step(
                    number,
                    since,
                    until,
                    tuple(filter(inside, phases)),
                    tuple(filter(inside, waits)),
                    tuple(filter(inside, made.values())),
                )
            )
        return found
