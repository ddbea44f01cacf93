# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Faults in the saves of a training that continues after each of them, among files of other programs.

``KINDS`` is the table of faults. ``run`` continues the training in ``base`` with one of them. It saves into
``<base>/saved`` and ``<base>/memory``, where ``plant`` has put files that are not ours. ``<base>/steps`` has a digest
of the weights and states of each saved step, which a load of it, and the same step after a load, must have again.
"""

import hashlib
import itertools
import os
import pkgutil
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

STRATEGIES = ("NIG", "IIG", "NII", "III")
SYNC, ASYNC, IN_MEMORY = "synchronous", "asynchronous", "in memory"  # kinds of saves
TIMEOUT, SLOW = 10.0, 14.0  # seconds, of collectives and of a write
LIMIT = 90.0  # seconds of a case in one set of ranks
_DAY = 24 * 3600.0
_DAYS_AGO = time.time() - 3 * _DAY

# What a save calls outside of DeepSpeed's collectives: a module, or a class in one, and a name in it.
_DISK = {
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
_WRITER = {
    "complete_copies": ("deepspeed_ext.checkpoint.snapshots:Snapshot", "complete_copies"),
    "torch.save": _DISK["torch.save"],
    "fsync": _DISK["fsync"],
    "digest": ("deepspeed_ext.checkpoint.digests", "_follow"),
    "all_reduce": ("deepspeed_ext.comm.host_channel:HostChannel", "_all_reduce"),
    "HostChannel.exchange": ("deepspeed_ext.comm.host_channel:HostChannel", "exchange"),
}
_COMMIT = {
    "copy_content": ("deepspeed_ext.checkpoint.snapshots:Snapshot", "copy_content"),
    "exchange": ("deepspeed_ext.checkpoint.owned_folder", "_exchange"),
}
CALLS = _DISK | _WRITER | _COMMIT
_OF_ALL = {*_WRITER, "copy_content", "fallocate"}  # the others are of rank 0, which commits
_NOT_OF_ALL_SAVES = {"fallocate": (IN_MEMORY,), "link": (SYNC, ASYNC), "copytree": (SYNC, ASYNC)}
_NOT_OF_ALL_SAVES |= dict.fromkeys(set(_WRITER) - set(_DISK) - {"digest"} | {"copy_content"}, (ASYNC, IN_MEMORY))

FOREIGN = [f"saved/.{name}/notes" for name in ("notes.replaced", "photos.saving", "first.converting", "second.saving")]
FOREIGN += [f"memory/deepspeed_ext-{os.getuid()}-0123456789abcdef/{name}/notes" for name in ("1-0", ".1-0.saving")]
FOREIGN += [".saved.saving/notes", ".saved.replaced/notes", "saved/.latest.saving.txt"]
FOREIGN += ["memory/deepspeed_ext-notes.txt", "saved/.step0.01234567.saving/notes"]  # the latter: of a running save


def plant(base: Path) -> None:
    """Write files of other programs, three days old, under names like those of unfinished saves."""
    (base / "memory").mkdir(parents=True, exist_ok=True)
    (base / "steps").mkdir()
    for path in (base / name for name in FOREIGN):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(path.relative_to(base)))
        for changed in (path, path.parent):
            os.utime(changed, (_DAYS_AGO, _DAYS_AGO))
    (base / FOREIGN[-1]).with_name("owner.json").write_text('{"host": "another"}')


def lost_files(base: Path) -> list[str]:
    """Return the files of other programs that are missing or changed."""
    paths = {name: base / name for name in FOREIGN}
    return [name for name, path in paths.items() if not path.is_file() or path.read_text() != name]


def leftovers(base: Path) -> list[str]:
    """Return leftovers of failed saves: hidden names that ``plant`` did not write."""
    planted = {Path(base, *Path(name).parts[:depth]) for name in FOREIGN for depth in range(1, 4)}
    return sorted(path.name for path in {*base.glob("saved/.*"), *base.glob("memory/*/.*")} - planted)


@dataclass(frozen=True)
class Fault:
    """A fault in the second of three saves, or in its files."""

    kind: str  # of ``KINDS``
    strategy: str
    save: str  # kind of the saves
    same: bool  # whether the second save has the tag of the first one
    rank: int  # the rank of the fault
    call: str = ""  # the call of ``CALLS`` at which it happens; empty: ``seconds`` after the start, or after the save
    number: int = 0  # number of the call, from 0. A rank that makes no such call is killed after the save
    after: bool = False  # whether the call is made first
    everyone: bool = False  # whether all other ranks are killed as well
    seconds: float = 0.0  # of a jump of the clock, or of a kill
    seed: int = 0  # of the damaged file and place

    def __str__(self) -> str:
        when = f"{'after' if self.after else 'before'} {self.call} {self.number}" if self.call else "after it"
        if not self.call and KINDS[self.kind].ends:
            when = f"{self.seconds:.3f} s"
        tag, who = "same" if self.same else "new", "all" if self.everyone else f"rank {self.rank}"
        return f"{self.kind}: {self.strategy} {self.save}, {tag} tag, {who}, {when}"


class Kind(NamedTuple):
    """A kind of fault."""

    act: Callable[[Fault, Sequence[int]], None]  # receives the victims' process ids
    calls: Sequence[str] = ()  # empty: it damages files after the save
    saves: Sequence[str] = (SYNC, ASYNC)
    says: str = ""  # what the error of a save contains if the call is made; empty: there must be no error
    ends: bool = False  # whether processes end


def _raising(error: BaseException) -> Callable[[Fault, Sequence[int]], None]:
    def act(*_: Any) -> None:
        raise error

    return act


def _sending(number: int) -> Callable[[Fault, Sequence[int]], None]:
    def act(fault: Fault, victims: Sequence[int]) -> None:
        for victim in victims:
            os.kill(victim, number)

    return act


def _jump(fault: Fault, _: Sequence[int]) -> None:
    now = time.time
    mock.patch.object(time, "time", lambda: now() + fault.seconds).start()


def _damaging(damage: Callable[[Path, random.Random], Any]) -> Callable[[Fault, Sequence[int]], None]:
    """Damage the file that ``victim`` chooses. The tag is in the working folder's ``saved``."""

    def act(fault: Fault, _: Sequence[int]) -> None:
        damage(victim(fault), random.Random(fault.seed))

    return act


def victim(fault: Fault) -> Path:
    """Return the file that a fault damages; the tag's folder if it is renamed."""
    from deepspeed_ext.checkpoint.digests import content_files
    from deepspeed_ext.checkpoint.folder import RECORD

    tag = Path("saved", Path("saved/latest").read_text())
    files = [*content_files(tag), tag / RECORD]
    return tag if fault.kind == "renamed tag" else random.Random(fault.seed).choice(files)


def flip(path: Path, chance: random.Random | None = None) -> None:
    """Flip a bit of a file, in the middle or at a random place."""
    content = bytearray(path.read_bytes())
    place, bit = (chance.randrange(len(content)), chance.randrange(8)) if chance else (len(content) // 2, 0)
    content[place] ^= 1 << bit
    path.write_bytes(content)


def truncate(path: Path, chance: random.Random) -> None:
    """Remove some bytes at the end of a file."""
    os.truncate(path, chance.randrange(path.stat().st_size))


_ANY, _THREADS = (SYNC, ASYNC, IN_MEMORY), (ASYNC, IN_MEMORY)
KINDS = {
    "ENOSPC": Kind(_raising(OSError(28, "No space left on device")), tuple(_DISK), _ANY, "No space left on device"),
    "EIO": Kind(_raising(OSError(5, "Input/output error")), tuple(_DISK), _ANY, "Input/output error"),
    "no memory": Kind(_raising(MemoryError()), tuple(_DISK), _ANY, "MemoryError"),
    "slow disk": Kind(lambda *_: time.sleep(SLOW), ("torch.save",), _THREADS),
    "killed rank": Kind(_sending(signal.SIGKILL), tuple(CALLS), ends=True),
    "killed writer": Kind(
        _raising(SystemExit("killed")), tuple(_WRITER), _THREADS, "SystemExit|killed|save of the che"
    ),
    "SIGTERM": Kind(_sending(signal.SIGTERM), tuple(CALLS), ends=True),
    "clock jump": Kind(_jump, tuple(_DISK), _ANY),
    "truncated file": Kind(_damaging(truncate)),
    "bit flip": Kind(_damaging(flip)),
    "renamed tag": Kind(_damaging(lambda path, _: path.rename(f"{path}_moved"))),
    "none": Kind(lambda *_: None),
}


class Outcome(NamedTuple):
    """Outcome of a case on one rank."""

    found: int  # step that was loaded at its beginning; 0 if there was none
    fired: bool  # whether the fault happened here
    error: str  # error of the save with the fault
    refused: str  # error of the load after that
    again: str  # error of the third save


def case(base: str, fault: Fault) -> Outcome:
    """Load the newest save, and train on. Save three times, the second time with a fault, and load after the second
    and the third one."""
    import torch
    from deepspeed import comm as dist

    os.chdir(base)
    kind = KINDS[fault.kind]
    if fault.kind == "slow disk":
        _limit_collectives(base)
    pids = [0] * dist.get_world_size()
    torch.distributed.all_gather_object(pids, os.getpid())
    run = Run(fault)
    found, refused = run.load(after_kill=True), ""
    run.step()
    first = f"step{run.engine.global_steps}"
    error = run.save(first)
    assert not error, error
    run.step()
    second = first if fault.same else f"step{run.engine.global_steps}"
    fired: list[bool] = []
    if dist.get_rank() == fault.rank:
        _arm(fault, [pid for pid in pids if fault.everyone and pid != os.getpid()] + [os.getpid()], fired)
    if fault.kind == "SIGTERM" and fault.everyone:
        signal.signal(signal.SIGTERM, _end)  # as a script that ends by itself then
    error = run.save(second, steps=2)
    if kind.ends:
        dist.barrier()
        kind.act(fault, [os.getpid()])
        time.sleep(TIMEOUT)
    if fault.kind != "clock jump":
        mock.patch.stopall()
    if kind.calls or fault.kind == "none":
        run.load()
    else:
        refused = run.load_damaged(fault, first)
        fired.append(True)
    run.step()
    again = run.save(f"step{run.engine.global_steps}")
    run.step()
    run.load()
    mock.patch.stopall()
    run.engine.destroy()
    return Outcome(found, bool(fired), error, refused, again)


class Run:
    """An engine that saves into the working folder's ``saved``."""

    def __init__(self, fault: Fault) -> None:
        from tests.harness import snapshots, training

        keys: dict[str, Any] = {"verify": fault.kind == "bit flip", "async_save": fault.save != SYNC}
        keys |= {"memory_folder": f"{os.getcwd()}/memory"} if fault.save == IN_MEMORY else {}
        job = snapshots.job_of("bf16", checkpoint=keys)
        self.save_kind, self.job = fault.save, job
        self.engine, self.model = training.make_engine(job, training.placed(fault.strategy))
        self._snapshots = snapshots  # imported in ranks alone
        snapshots.mark(self.engine, self.model)

    def step(self) -> str:
        """Train a step; return the error of a save that it raises, after which it is completed."""
        batches = self._snapshots.steps_of(self.job, 1, self.engine.global_steps)
        error = self._snapshots.error_of(self._snapshots.run, self.engine, self.job, batches)
        if error:
            assert error.startswith("SaveFailed"), error
            self.engine.step()
        return str(error)

    def digest(self) -> str:
        """Return a digest of all that a save has."""
        digest = hashlib.sha256()
        for name, value in sorted(self._snapshots.snapshot(self.engine, self.model, self.job).items()):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)} {value.tolist()}".encode())
        return digest.hexdigest()

    def save(self, tag: str, steps: int = 0) -> str:
        """Save, train these steps meanwhile, and wait for the save; return its error."""
        import deepspeed_ext

        number, act = self.engine.global_steps, self.engine.save_checkpoint
        self._compare(is_new=True)
        if self.save_kind == IN_MEMORY:
            act = lambda *words: deepspeed_ext.save_in_memory(self.engine, *words)  # noqa: E731
        error = self._snapshots.error_of(act, "saved", tag)
        for _ in range(0 if error else steps):
            error = error or self.step()
        if self.save_kind != SYNC:
            error = self._snapshots.error_of(self.engine.checkpoint_engine.finish) or error
        if not error:
            self._write(Path("committed"), str(number))
        return str(error)

    def load(self, tag: str | None = None, after_kill: bool = False) -> int:
        """Load the newest save, and compare it with its step; return the step. It must be the last complete one, or a
        later one of a run that may have been killed, which is the last complete one then."""
        path, _ = self.engine.load_checkpoint("saved", tag=tag)
        committed = int(Path("committed").read_text()) if Path("committed").exists() else 0
        number = int(self.engine.global_steps)
        is_right = number >= committed if after_kill else number == committed
        assert is_right, f"step {number} is loaded, but the save of step {committed} is complete"
        assert path or not committed, "nothing is loaded"
        if path:
            self._compare()
            self._write(Path("committed"), str(number))
        return number

    def load_damaged(self, fault: Fault, previous: str) -> str:
        """Damage the newest save, and load it, which must name the damage; then load the previous one, or the renamed
        one under its new name. Return the error of the load."""
        from deepspeed import comm as dist

        from deepspeed_ext.checkpoint.digests import problems

        path, before = victim(fault), self.digest()
        self._snapshots.on_first_rank(KINDS[fault.kind].act, fault, ())
        error = self._snapshots.error_of(self.engine.load_checkpoint, "saved")
        assert "rank " in error and str(path) in error, f"{path}: {error}"
        assert before == self.digest(), f"changed by {error}"
        assert not path.exists() or str(path) in "".join(problems(path.parent))
        if fault.kind == "renamed tag":
            self.load(f"{path.name}_moved")
        dist.barrier()
        self._write(Path("committed"), previous.removeprefix("step"))
        self.load(previous)
        return str(error)

    def _compare(self, is_new: bool = False) -> None:
        """Compare this state with the digest of its step; record it if there is none and the step ``is_new``."""
        path, digest = Path("steps", str(self.engine.global_steps)), self.digest()
        if is_new and not path.exists():
            self._write(path, digest)
        assert path.read_text() == digest, f"step {path.name} is not as it was"

    def _write(self, path: Path, text: str) -> None:
        """Write a file on the first rank, completely or not at all, by calls without faults. Collective."""
        from deepspeed import comm as dist

        dist.barrier()
        if dist.get_rank() == 0:
            with open(f"{path}.new", "w") as file:
                file.write(text)
            os.replace(file.name, path)
        dist.barrier()


def _arm(fault: Fault, victims: Sequence[int], fired: list[bool]) -> None:
    """Let the fault happen in this process."""
    kind, numbers = KINDS[fault.kind], itertools.count()
    if not fault.call:
        if kind.ends and os.fork() == 0:  # a thread would wait for what this process does
            time.sleep(fault.seconds)
            kind.act(fault, victims)
            os._exit(0)
        return
    owner, attribute = CALLS[fault.call]
    location = pkgutil.resolve_name(owner)
    original = getattr(location, attribute)

    def intercepted(*args: Any, **kwargs: Any) -> Any:
        is_own = next(numbers) >= fault.number and not fired
        if fault.kind == "killed writer":
            is_own &= threading.current_thread() is not threading.main_thread()
        fired.extend([True] * is_own)
        if is_own and not fault.after:
            kind.act(fault, victims)
        result = original(*args, **kwargs)
        if is_own and fault.after:
            kind.act(fault, victims)
        return result

    mock.patch.object(location, attribute, intercepted).start()


def _end(*_: Any) -> None:
    """End this process as the interpreter does: a running save is completed."""
    import multiprocessing.util

    multiprocessing.util._exit_function()  # type: ignore[attr-defined]
    os._exit(128 + signal.SIGTERM)


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


# What starts the ranks ############################################################################


def run(pool: Any, base: Path, fault: Fault) -> tuple[list[Outcome], str]:
    """Continue the training in ``base`` with a fault; return the outcomes of ranks after it, and problems."""
    from tests.harness.ranks import RankError

    kind = KINDS[fault.kind]
    (base / "again").unlink(missing_ok=True)
    if not (base / "steps").exists():
        plant(base)
    if kind.ends:
        try:
            pool(4).run(case, str(base), fault, timeout=LIMIT)
            return [], "no rank was killed"
        except RankError as error:
            if fault.kind != "SIGTERM" and "killed by SIGKILL" not in str(error):
                raise
    outcomes: list[Outcome] = pool(4).run(
        case, str(base), replace(fault, kind="none", call="") if kind.ends else fault, timeout=LIMIT
    )
    return outcomes, _problem(fault, outcomes) or ", ".join((*leftovers(base), *lost_files(base)))


def _problem(fault: Fault, outcomes: Sequence[Outcome]) -> str:
    """Return what is wrong with the outcomes of ranks; empty if nothing is."""
    says, errors = KINDS[fault.kind].says, [outcome.error for outcome in outcomes]
    if len({(bool(item.error), bool(item.refused), item.found) for item in outcomes}) > 1:
        return f"ranks differ: {outcomes}"
    if outcomes[0].again:
        return f"the next save: {outcomes[0].again}"
    if errors[0] and not (says and any(item.fired for item in outcomes) and re.search(says, " ".join(errors))):
        return f"error of the save: {errors}"
    return ""


def draw(chance: random.Random, name: str) -> Fault:
    """Draw a fault of a kind, at one of the calls of a save, or at any time."""
    kind, save = KINDS[name], chance.choice(KINDS[name].saves)
    calls = [call for call in kind.calls if save in _NOT_OF_ALL_SAVES.get(call, (save,))]
    strategy, same = chance.choice(STRATEGIES), chance.random() < 0.5 and bool(kind.calls)
    call = chance.choice(calls) if calls and not (kind.ends and chance.random() < 0.3) else ""
    number = 0 if name == "slow disk" else chance.choice((0, 0, 0, 1, 2))
    everyone, after = kind.ends and chance.random() < 0.5, kind.ends and chance.random() < 0.5
    seconds = chance.uniform(0, 0.3) if kind.ends else chance.choice((-1, 1)) * chance.uniform(60, 3 * _DAY)
    writers = 2 if strategy.endswith("I") and not kind.ends else 4  # one group writes states that all groups have
    rank = chance.randrange(writers) if call in _OF_ALL or not call else 0
    return Fault(name, strategy, save, same, rank, call, number, after, everyone, seconds, chance.randrange(2**32))
