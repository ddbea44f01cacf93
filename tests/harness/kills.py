# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kills of ranks while a checkpoint is saved beside the training; a real SIGKILL.

``killed`` trains, saves, trains on, saves again and dies during that save; ``survived`` loads in new processes.
"""

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

FIRST, SECOND = "first", "second"
# What a save calls, in the order in which it does first. ``owner`` is a module, or a class in one.
CALLS = {
    "Snapshot.take": ("deepspeed_ext.checkpoint.snapshots:Snapshot", "take"),
    "Snapshot.complete": ("deepspeed_ext.checkpoint.snapshots:Snapshot", "complete"),
    "torch.save": ("torch", "save"),
    "fsync": ("os", "fsync"),
    "HostChannel": ("deepspeed_ext.comm.host_channel:HostChannel", "_all_reduce"),
    "copytree": ("shutil", "copytree"),
    "rename": ("pathlib:Path", "rename"),
    "exchange": ("deepspeed_ext.checkpoint.owned", "_exchange"),
    "replace": ("pathlib:Path", "replace"),
    "rmtree": ("shutil", "rmtree"),
}


@dataclass(frozen=True)
class Kill:
    """When and whom.

    Attributes:
        strategy: of the run.
        same: whether the second save has the tag of the first one.
        rank: that is killed.
        all: whether all others are killed with it.
        call: what it does then, of ``CALLS``; empty: whatever it does ``seconds`` after the save has begun.
        number: of the call, from 0.
        after: whether the call is done first.
        aside: whether the saves are asynchronous.
    """

    strategy: str
    same: bool
    rank: int
    all: bool = False
    call: str = ""
    number: int = 0
    after: bool = False
    seconds: float = 0.0
    aside: bool = True

    def __str__(self) -> str:
        when = (
            f"{'after' if self.after else 'before'} {self.call} {self.number}"
            if self.call
            else f"{self.seconds:.3f} s"
        )
        who = "all" if self.all else f"rank {self.rank}"
        return f"{self.strategy} {'same' if self.same else 'new'} tag, {who} {when}"


class Found(NamedTuple):
    """What is loaded after a kill.

    Attributes:
        changed: what differs from the first and from the second save: one of them is empty.
        again: what a load of the next save does not restore.
        left: hidden names beside the checkpoints that are there after that.
        committed: whether the second save had ended before the kill.
    """

    changed: tuple[dict[str, float], dict[str, float]]
    again: dict[str, float]
    left: list[str]
    committed: bool

    @property
    def which(self) -> int:
        """Number of the save that is loaded; -1 if it is none of them, or one that was replaced before."""
        both = [number for number in range(2) if self.changed[number] == {}]
        if len(both) != 1 or (self.committed and both != [1]):
            return -1
        return both[0]


def _job() -> Any:
    from tests.harness import saves, snapshots

    return snapshots.job_of("bf16", {}, **saves.ASIDE)


def calls_case(folder: str, strategy: str, same: bool) -> dict[str, int]:
    """How often a second save calls what on this rank, when nobody is killed."""
    counts: Counter[str] = Counter()

    def count(name: str, act: Callable[[], Any]) -> Any:
        counts[name] += 1
        return act()

    _train_and_save(folder, strategy, same, lambda: _intercept(count))
    return dict(counts)


def killed_case(folder: str, kill: Kill) -> None:
    """Save, train on, save again, and be killed during that save, or later."""
    import torch
    from deepspeed import comm as dist

    pids = [0] * dist.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    others = [pid for pid in pids if pid != os.getpid()] if kill.all else []

    def die() -> None:
        for pid in (*others, os.getpid()):
            os.kill(pid, signal.SIGKILL)

    counts: Counter[str] = Counter()

    def count(name: str, act: Callable[[], Any]) -> Any:
        mine = name == kill.call and counts[name] == kill.number
        counts[name] += 1
        if mine and not kill.after:
            die()
        result = act()
        if mine:
            die()
        return result

    def arm() -> None:
        if dist.get_rank() != kill.rank:
            return
        if kill.call:
            _intercept(count)
        elif os.fork() == 0:  # a thread would wait for what this process does
            time.sleep(kill.seconds)
            for pid in (*others, os.getppid()):
                os.kill(pid, signal.SIGKILL)
            os._exit(0)

    _train_and_save(folder, kill.strategy, kill.same, arm, kill.aside)
    dist.barrier()
    if dist.get_rank() == kill.rank:
        die()
    time.sleep(10)


def _intercept(count: Callable[[str, Callable[[], Any]], Any]) -> None:
    import pkgutil

    for name, (owner, attribute) in CALLS.items():
        place: Any = pkgutil.resolve_name(owner)
        original = getattr(place, attribute)

        def counted(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            return count(name, lambda: original(*args, **kwargs))

        setattr(place, attribute, counted)


def _train_and_save(folder: str, strategy: str, same: bool, arm: Callable[[], None], aside: bool = True) -> None:
    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = _job()
    engine, model = training.make_engine(job, training.placed(strategy))
    snapshots.mark(engine, model)
    if not aside:
        engine.checkpoint_engine.aside = None
    for number, tag in enumerate((FIRST, FIRST if same else SECOND)):
        snapshots.run(engine, job, snapshots.steps_of(job, 1, number))
        seen = snapshots.snapshot(engine, model, job)
        if dist.get_rank() == 0:
            torch.save(seen, f"{folder}/seen{number}.pt")
        dist.barrier()
        if number:
            arm()
        engine.save_checkpoint(f"{folder}/saved", tag)
        if not number:
            engine.checkpoint_engine.finish()
    snapshots.run(engine, job, snapshots.steps_of(job, 3, 2))
    engine.checkpoint_engine.finish()
    Path(folder, "committed").touch()


def survived_case(folder: str, strategy: str) -> Found:
    """Load the latest in a new job, save and load again."""
    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = _job()
    engine, model = training.make_engine(job, training.placed(strategy))
    engine.load_checkpoint(f"{folder}/saved")
    seen = snapshots.snapshot(engine, model, job)
    one, two = (snapshots.difference(torch.load(f"{folder}/seen{number}.pt"), seen) for number in range(2))
    snapshots.run(engine, job, snapshots.steps_of(job, 1, 7))
    seen = snapshots.snapshot(engine, model, job)
    for tag in (FIRST, SECOND):  # what was left of either is cleared
        engine.save_checkpoint(f"{folder}/saved", tag)
    snapshots.run(engine, job, snapshots.steps_of(job, 1, 8))
    engine.load_checkpoint(f"{folder}/saved")
    again = snapshots.difference(seen, snapshots.snapshot(engine, model, job))
    dist.barrier()
    left = hidden_names(f"{folder}/saved")
    committed = Path(folder, "committed").exists()
    engine.destroy()
    return Found((one, two), again, left, committed)


def hidden_names(folder: str) -> list[str]:
    """Return the hidden names in a folder."""
    return sorted(path.name for path in Path(folder).glob(".*"))


def run(pool: Any, folder: str, kill: Kill, hidden: Collection[str] = ()) -> tuple[int, str]:
    """Kill and load; return the number of the save that was loaded, and what is wrong.

    Args:
        pool: of ranks.
        folder: of what it saves; it is made.
        hidden: names beside the checkpoints that were there before.
    """
    from tests.harness.ranks import RankError

    Path(folder).mkdir(exist_ok=True)
    try:
        pool(4).run(killed_case, folder, kill, timeout=60.0)
        return -1, "nobody was killed"
    except RankError as error:
        if "killed by SIGKILL" not in str(error):
            return -1, str(error)
    found: list[Found] = pool(4).run(survived_case, folder, kill.strategy, timeout=60.0)
    left = set(found[0].left) - set(hidden)
    wrong = [one for one in found if one.which < 0 or one.again or left or one.which != found[0].which]
    return found[0].which, str(wrong[0]) if wrong else ""


def draw(chance: random.Random, counts: dict[tuple[str, bool], list[dict[str, int]]]) -> Kill:
    """Draw a kill, at one of the calls that each rank makes, or at any time.

    Args:
        chance: by which.
        counts: of calls, by strategy and whether the tag is the same; of each rank.
    """
    strategy, same = chance.choice(sorted(counts))
    if chance.random() < 0.3:
        return Kill(strategy, same, chance.randrange(4), chance.random() < 0.5, seconds=chance.uniform(0, 0.15))
    rank = chance.choice((0, 0, 1, 2, 3))
    call = chance.choice(sorted(counts[strategy, same][rank]))
    number = chance.randrange(counts[strategy, same][rank][call])
    return Kill(strategy, same, rank, chance.random() < 0.5, call, number, chance.random() < 0.5)
