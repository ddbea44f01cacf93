# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kills of ranks during a save; a real SIGKILL. ``killed_case`` trains, saves, trains on, saves again and dies during
that save; ``survived_case`` loads in new processes."""

import os
import random
import signal
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests.harness.save_faults import Run, intercept

FIRST, SECOND = "first", "second"
# What a save calls, in the order in which it does first: a module, or a class in one, and a name in it.
CALLS = {
    "Snapshot.copy_content": ("deepspeed_ext.checkpoint.snapshots:Snapshot", "copy_content"),
    "Snapshot.complete_copies": ("deepspeed_ext.checkpoint.snapshots:Snapshot", "complete_copies"),
    "torch.save": ("torch", "save"),
    "fsync": ("os", "fsync"),
    "HostChannel": ("deepspeed_ext.comm.host_channel:HostChannel", "_all_reduce"),
    "HostChannel.exchange": ("deepspeed_ext.comm.host_channel:HostChannel", "exchange"),
    "copytree": ("shutil", "copytree"),
    "rename": ("pathlib:Path", "rename"),
    "exchange": ("deepspeed_ext.checkpoint.owned_folder", "_exchange"),
    "replace": ("pathlib:Path", "replace"),
    "rmtree": ("shutil", "rmtree"),
}
# The others are of rank 0, which commits.
OF_ALL = ("Snapshot.copy_content", "Snapshot.complete_copies", "torch.save", "HostChannel", "HostChannel.exchange")


@dataclass(frozen=True)
class Kill:
    """Time and victim of a kill."""

    strategy: str
    same: bool  # whether the second save has the tag of the first one
    rank: int  # the killed rank
    all: bool = False  # whether all other ranks are killed as well
    call: str = ""  # the call of ``CALLS`` at which it is killed; empty: ``seconds`` after the start of the save
    number: int = 0  # of the call, from 0. A rank that makes no such call is killed after the save
    after: bool = False  # whether the call is done first
    seconds: float = 0.0
    aside: bool = True  # whether the saves are asynchronous

    def __str__(self) -> str:
        when = f"{'after' if self.after else 'before'} {self.call} {self.number}"
        who = "all" if self.all else f"rank {self.rank}"
        tag = "same" if self.same else "new"
        return f"{self.strategy} {tag} tag, {who} {when if self.call else f'{self.seconds:.3f} s'}"


class Found(NamedTuple):
    """The result of a load after a kill."""

    which: int  # number of the save that is loaded; -1 if it is none of them, or one that was replaced before
    again: dict[str, float]  # differences after a load of the next save
    left: list[str]  # hidden names next to the checkpoints after that


def killed_case(folder: str, kill: Kill) -> None:
    """Save, train on, save again, and be killed during that save, or later."""
    import torch
    from deepspeed import comm as dist

    pids = [0] * dist.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    victims = [pid for pid in pids if kill.all and pid != os.getpid()] + [os.getpid()]

    def die() -> None:
        for pid in victims:
            os.kill(pid, signal.SIGKILL)

    def at(name: str, number: int, act: Callable[[], Any]) -> Any:
        own = name == kill.call and number == kill.number
        if own and not kill.after:
            die()
        result = act()
        if own:
            die()
        return result

    run = Run(folder, kill.strategy, "aside" if kill.aside else "at once")
    for number, tag in enumerate((FIRST, FIRST if kill.same else SECOND)):
        observed = run.step()
        if dist.get_rank() == 0:
            torch.save(observed, f"{folder}/seen{number}.pt")
        dist.barrier()
        if number and dist.get_rank() == kill.rank:
            if kill.call:
                intercept(CALLS, at)
            elif os.fork() == 0:  # a thread would wait for what this process does
                time.sleep(kill.seconds)
                die()
                os._exit(0)
        error = run.start(tag) or ("" if number else run.finish())
        assert not error, error
    for _ in range(3):
        run.step()
    error = run.finish()
    assert not error, error
    Path(folder, "committed").touch()
    dist.barrier()
    if dist.get_rank() == kill.rank:
        die()
    time.sleep(10)


def survived_case(folder: str, strategy: str) -> Found:
    """Load the latest in a new job, save and load again."""
    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots

    run = Run(folder, strategy, "aside")
    run.load()
    observed = run.snapshot()
    both = [which for which in range(2) if not snapshots.difference(torch.load(f"{folder}/seen{which}.pt"), observed)]
    replaced = Path(folder, "committed").exists() and both != [1]
    observed = run.step()
    for tag in (FIRST, SECOND):  # what was left of either is cleared
        error = run.start(tag)
        assert not error, error
    run.step()
    run.load()
    again = snapshots.difference(observed, run.snapshot())
    dist.barrier()
    run.engine.destroy()
    return Found(both[0] if len(both) == 1 and not replaced else -1, again, hidden_names(f"{folder}/saved"))


def hidden_names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).glob(".*"))


def run(pool: Any, folder: str, kill: Kill, hidden: Collection[str] = ()) -> tuple[int, str]:
    """Kill and load; return the number of the loaded save, and problems. ``hidden`` names were there before."""
    from tests.harness.ranks import RankError

    Path(folder).mkdir(exist_ok=True)
    try:
        pool(4).run(killed_case, folder, kill, timeout=60.0)
        return -1, "no rank was killed"
    except RankError as error:
        if "killed by SIGKILL" not in str(error):
            return -1, str(error)
    results: list[Found] = pool(4).run(survived_case, folder, kill.strategy, timeout=60.0)
    wrong = [result for result in results if result.which < 0 or result.again or set(result.left) - set(hidden)]
    wrong += [result for result in results if result.which != results[0].which]
    return results[0].which, str(wrong[0]) if wrong else ""


def draw(chance: random.Random) -> Kill:
    """Draw a kill, at one of the calls of a save, or at any time."""
    strategy, is_same, everyone = chance.choice(("NIG", "IIG", "NII")), chance.random() < 0.5, chance.random() < 0.5
    if chance.random() < 0.3:
        return Kill(strategy, is_same, chance.randrange(4), everyone, seconds=chance.uniform(0, 0.15))
    call = chance.choice(sorted(CALLS))
    rank = chance.randrange(4) if call in OF_ALL else 0
    return Kill(strategy, is_same, rank, everyone, call, chance.choice((0, 0, 0, 1, 2)), chance.random() < 0.5)
