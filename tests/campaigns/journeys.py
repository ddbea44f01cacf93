# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Through which files of the package something travels: four journeys, each traced on one rank.

    python -m tests.campaigns.journeys            the table of deepspeed_ext/README.md
    python -m tests.campaigns.journeys --files    the files, in the order in which they are reached

A *move* is a call from one file of the package into another one, each such pair counted once: what a reader of the
code has to follow.
"""

import argparse
import contextlib
import inspect
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

WORLD = 4
LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
JOURNEYS: dict[str, tuple[str, dict[str, Any]]] = {  # strategy and further keys
    "a key to the first collective": ("IIG", {}),
    "a gradient, a backward and its boundary under NIG": ("NIG", {}),
    "a parameter, a step and the next forward under IIG": ("IIG", {}),
    "a save under NIG + LoCo": ("NIG", LOCO),
}


class Trace:
    """Calls between files of the package, on the thread that is traced.

    Attributes:
        files: in the order in which they are reached, relative to the package.
        moves: pairs of files.
    """

    def __init__(self) -> None:
        import deepspeed_ext

        self._root = os.path.dirname(deepspeed_ext.__file__) + os.sep
        self.files: list[str] = []
        self.moves: set[tuple[str, str]] = set()
        self.stopped = False

    def _file(self, frame: FrameType | None) -> str | None:
        """The file of ours that a frame is in, or the innermost frame of ours that has called it."""
        while frame is not None:
            if frame.f_code.co_filename.startswith(self._root):
                return frame.f_code.co_filename.removeprefix(self._root)
            frame = frame.f_back
        return None

    def _called(self, frame: FrameType, event: str, _: object) -> None:
        function = frame.f_code.co_flags & inspect.CO_OPTIMIZED  # not a class that is made, or a module
        if event != "call" or not function or self.stopped or not frame.f_code.co_filename.startswith(self._root):
            return
        file, caller = self._file(frame), self._file(frame.f_back)
        assert file is not None
        if file not in self.files:
            self.files.append(file)
        if caller is not None and caller != file:
            self.moves.add((caller, file))

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        """Trace in this context."""
        sys.setprofile(self._called)
        try:
            yield
        finally:
            sys.setprofile(None)

    def stop(self) -> None:
        """Trace no further."""
        self.stopped = True


def until_the_first_collective(trace: Trace) -> Callable[[], Any]:
    """Return what undoes that the trace ends where ranks of ours first communicate."""
    from unittest import mock

    from deepspeed import comm as dist

    def ending(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if trace.files:
                trace.stop()
            return function(*args, **kwargs)

        return call

    stack = contextlib.ExitStack()
    for name in ("all_reduce", "all_gather_into_tensor", "broadcast", "all_gather_object", "broadcast_object_list"):
        stack.enter_context(mock.patch.object(dist, name, ending(getattr(dist, name))))
    return stack.close


def travel(journey: str) -> tuple[list[str], int]:
    """Files of a journey, and how many moves it has."""
    from deepspeed_ext.comm.agreement import broadcast_text
    from tests.harness import training

    name, zero = JOURNEYS[journey]
    job, trace = training.Job(sizes=(16, 16), empty=False), Trace()
    engine, _ = training.make_engine(job, training.placed(name, **zero))
    if journey.startswith("a key"):  # and everything is imported
        engine.destroy()
        undo = until_the_first_collective(trace)
        with trace.on():
            engine, _ = training.make_engine(job, training.placed(name, **zero))
        undo()
        engine.destroy()
        return trace.files, len(trace.moves)
    data = training.batches(job)
    for number in range(2):  # the first step has taught what there is to learn
        training.micro_step(engine, job, number, *next(data))
        engine.step()
    with contextlib.ExitStack() as stack:
        if journey.startswith("a gradient"):
            stack.enter_context(trace.on())
            training.micro_step(engine, job, 2, *next(data))
        elif journey.startswith("a parameter"):
            training.micro_step(engine, job, 2, *next(data))
            stack.enter_context(trace.on())
            engine.step()
            engine(next(data)[0])
        else:
            folder = broadcast_text(stack.enter_context(tempfile.TemporaryDirectory()), 0)  # the first rank's
            stack.enter_context(trace.on())
            engine.save_checkpoint(folder)
    engine.destroy()
    return trace.files, len(trace.moves)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", action="store_true", help="print the files of each journey")
    arguments = parser.parse_args()
    from tests.harness import ranks

    ranks.prepare_environment()
    pool = ranks.RankPool()
    from tests.campaigns import journeys  # by the name that ranks know this module by

    found = {}
    try:
        for journey in JOURNEYS:
            with contextlib.redirect_stdout(io.StringIO()):
                found[journey] = pool(WORLD).run(journeys.travel, journey, timeout=600.0)[0]
    finally:
        pool.close()
    print("| journey | files | of them in `zero/` | moves |\n|---|---|---|---|")
    for journey, (files, moves) in found.items():
        print(f"| {journey} | {len(files)} | {sum(file.startswith('zero/') for file in files)} | {moves} |")
        if arguments.files:
            print("\n".join(f"    {file}" for file in files))


if __name__ == "__main__":
    main()
