# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Faults during saves, among files of other programs. Cases run inside rank processes. Every case saves into
``<base>/saved`` and ``<base>/memory``, where ``plant`` has put files that are not ours."""

import itertools
import os
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

STRATEGIES = ("NIG", "IIG", "NII", "III")
ERRORS = (OSError(28, "No space left on device"), OSError(5, "Input/output error"), MemoryError())
CALLS = {  # what a save calls outside of DeepSpeed's collectives
    "torch.save": ("torch", "save"),
    "fsync": ("os", "fsync"),
    "link": ("os", "link"),
    "copytree": ("shutil", "copytree"),
    "rmtree": ("shutil", "rmtree"),
    "rename": ("pathlib:Path", "rename"),
    "replace": ("pathlib:Path", "replace"),
    "write_text": ("pathlib:Path", "write_text"),
    "fallocate": ("os", "posix_fallocate"),
}
TIMEOUT, SLOW = 10.0, 14.0  # seconds, of collectives and of a write
FOREIGN = [f"saved/.{name}/notes" for name in ("notes.replaced", "photos.saving", "first.converting", "second.saving")]
FOREIGN += [f"memory/deepspeed_ext-{os.getuid()}-0123456789abcdef/{name}/notes" for name in ("1-0", ".1-0.saving")]
FOREIGN += [".saved.saving/notes", ".saved.replaced/notes", "saved/.latest.saving.txt"]
FOREIGN.append("memory/deepspeed_ext-notes.txt")
_DAYS_AGO = time.time() - 3 * 24 * 3600


def plant(base: str | Path) -> None:
    """Write files of other programs, three days old, under names like those of unfinished saves."""
    Path(base, "memory").mkdir(parents=True, exist_ok=True)
    for name in FOREIGN:
        path = Path(base, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
        for changed in (path, path.parent):
            os.utime(changed, (_DAYS_AGO, _DAYS_AGO))


def lost_files(base: str | Path) -> list[str]:
    """Return the files of other programs that are missing or changed."""
    paths = {name: Path(base, name) for name in FOREIGN}
    return [name for name, path in paths.items() if not path.is_file() or path.read_text() != name]


def leftovers(base: str | Path) -> list[str]:
    """Return leftovers of failed saves: hidden names that ``plant`` did not write."""
    planted = {Path(base, *Path(name).parts[:depth]) for name in FOREIGN for depth in range(1, 4)}
    results = {*Path(base, "saved").glob(".*"), *Path(base, "memory").glob("*/.*")} - planted
    return sorted(path.name for path in results)


@dataclass(frozen=True)
class Fault:
    """A fault in the second of three saves."""

    strategy: str
    kind: str  # kind of the save: ``"at once"``, ``"aside"`` or ``"in memory"``
    same: bool  # whether the second save has the tag of the first one
    rank: int  # the rank of the fault
    call: str  # the call of ``CALLS`` that raises
    number: int  # number of the call, from 0
    error: int | None  # the error, by its index in ``ERRORS``; None to sleep for longer than a collective may wait

    def __str__(self) -> str:
        case = f"{SLOW:g} s" if self.error is None else repr(ERRORS[self.error])
        tag = "same" if self.same else "new"
        return f"{self.strategy} {self.kind}, {tag} tag, rank {self.rank}: {case} in {self.call} {self.number}"


class Outcome(NamedTuple):
    """Outcome of a fault on one rank."""

    fired: bool  # whether the call was made
    error: str  # error of the save with the fault
    loaded: int  # number of the save that a load restores after it, 0 or 1; -1 if neither
    again: str  # error of the third save, or differences after its load


def fault_case(base: str, fault: Fault) -> Outcome:
    """Save three times, the second time with a fault. Load after the second and the third one."""
    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots

    if fault.error is None:
        _limit_collectives(base)
    run = Run(base, fault.strategy, fault.kind)
    first = run.step()
    error = run.save("first")
    assert not error, error
    fired: list[bool] = []

    def fail(_: str, number: int, act: Callable[[], Any]) -> Any:
        if number == fault.number:
            fired.append(True)
            if fault.error is not None:
                raise ERRORS[fault.error]
            time.sleep(SLOW)
        return act()

    if dist.get_rank() == fault.rank:
        intercept({fault.call: CALLS[fault.call]}, fail)
    second = run.step()
    try:
        error = run.save("first" if fault.same else "second")
    finally:
        mock.patch.stopall()
    torch.distributed.barrier()
    run.load()
    observed = run.snapshot()
    both = [snapshots.difference(expected, observed) == {} for expected in (first, second)]
    third = run.step()
    again = run.save("third")
    run.step()
    run.load()
    again = again or str(snapshots.difference(third, run.snapshot()) or "")
    run.engine.destroy()
    return Outcome(bool(fired), error, both.index(True) if any(both) else -1, again)


class Run:
    """An engine that saves into ``<base>/saved``."""

    def __init__(self, base: str, strategy: str, kind: str) -> None:
        from tests.harness import snapshots, training

        keys = {"async_save": True} if kind != "at once" else {}
        keys |= {"memory_folder": f"{base}/memory"} if kind == "in memory" else {}
        job = snapshots.job_of("bf16", checkpoint=keys)
        self.folder, self.kind, self.job, self._steps = f"{base}/saved", kind, job, 0
        self.engine, self.model = training.make_engine(job, training.placed(strategy))
        self._snapshots = snapshots  # imported in ranks alone
        snapshots.mark(self.engine, self.model)

    def snapshot(self) -> dict[str, Any]:
        return self._snapshots.snapshot(self.engine, self.model, self.job)

    def step(self) -> dict[str, Any]:
        self._snapshots.run(self.engine, self.job, self._snapshots.steps_of(self.job, 1, self._steps))
        self._steps += 1
        return self.snapshot()

    def start(self, tag: str) -> str:
        """Begin to save; return the error."""
        import deepspeed_ext

        if self.kind == "in memory":
            return self._snapshots.error_of(deepspeed_ext.save_in_memory, self.engine, self.folder, tag)
        return self._snapshots.error_of(self.engine.save_checkpoint, self.folder, tag)

    def finish(self) -> str:
        """Wait for the save; return its error."""
        return self._snapshots.error_of(self.engine.checkpoint_engine.finish) if self.kind != "at once" else ""

    def save(self, tag: str) -> str:
        return self.start(tag) or self.finish()

    def load(self) -> None:
        self.engine.load_checkpoint(self.folder)


def intercept(calls: Mapping[str, tuple[str, str]], act: Callable[[str, int, Callable[[], Any]], Any]) -> None:
    """Let ``act`` make each of these calls of this process, until ``mock.patch.stopall``. It receives the name, how
    often it was called before, and the call. By name, ``calls`` has a module, or a class in one, and a name in it."""
    import pkgutil

    for name, (owner, attribute) in calls.items():
        location: Any = pkgutil.resolve_name(owner)
        original, numbers = getattr(location, attribute), itertools.count()

        def intercepted(
            *args: Any, name: str = name, original: Any = original, numbers: Any = numbers, **kwargs: Any
        ) -> Any:
            return act(name, next(numbers), lambda: original(*args, **kwargs))

        mock.patch.object(location, attribute, intercepted).start()


def _limit_collectives(base: str) -> None:
    """Make the process group anew, with a short timeout."""
    from datetime import timedelta

    import deepspeed
    from deepspeed import comm as dist

    rank, world = dist.get_rank(), dist.get_world_size()
    dist.destroy_process_group()
    deepspeed.init_distributed(
        "gloo", timeout=timedelta(seconds=TIMEOUT), init_method=f"file://{base}/again", rank=rank, world_size=world
    )


def draw(chance: random.Random) -> Fault:
    slow = chance.random() < 0.1
    call = "torch.save" if slow else chance.choice(("torch.save", *sorted(CALLS)))
    return Fault(
        strategy=chance.choice(STRATEGIES),
        kind=chance.choice(("aside", "in memory") if slow else ("at once", "aside", "in memory")),
        same=chance.random() < 0.5,
        rank=chance.randrange(4) if call in ("torch.save", "fallocate") else 0,  # the one that commits
        call=call,
        number=0 if slow else chance.choice((0, 0, 0, 1, 2)),
        error=None if slow else chance.randrange(len(ERRORS)),
    )
