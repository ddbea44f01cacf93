# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Saves that survive a node without any disk: into memory of the nodes, with copies in that of other groups.

Note [Saves in memory]
    A save in memory is an asynchronous save with another end: the thread of each rank writes its files into shared
    memory of its node, which outlives the processes that train (``memory_folder.py``). Of states that all groups have,
    each group writes the files that the first one writes to disk, under the same names: nothing crosses for these. A
    file that the next group does not have is sent to the rank there that has the same number, by messages of the
    thread's own process group, chunk by chunk, from memory to memory. So each file is in as many groups as are asked
    for, and the save before this one stays until all ranks have all of theirs.

    After a restart, ``engine.load_checkpoint`` writes a save that is newer than the one on disk into ``save_dir``, as
    an ordinary checkpoint, and loads that (``restoring.py``).

    What is in ``save_dir`` may be removed or replaced after a save in memory. So a folder of memory belongs to a run
    in ``save_dir``, which ends when somebody empties that, and a save records what ``latest`` named.
"""

import functools
import hashlib
import itertools
import json
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch import Tensor

from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.experts import model_key
from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import LATEST, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import RUN, Identity, MemoryFolder, Part, run_of
from deepspeed_ext.checkpoint.owned import replace_text
from deepspeed_ext.checkpoint.snapshots import nbytes_of
from deepspeed_ext.comm.agreement import (
    Channel,
    all_gather_rows,
    bounds,
    broadcast_text,
    raise_together,
    run_on_all_or_raise,
    unique_number,
)
from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.config.section import save_settings
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replaced
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer

_CHUNK = 16 * 2**20  # bytes of a message
_BESIDE = 2**16  # bytes of a file beside its tensors, at most
_DOING = "the save in memory failed"


def save_in_memory(
    engine: Engine, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None
) -> bool:
    """Save into memory of the nodes what ``engine.save_checkpoint`` saves to disk. See Note [Saves in memory].

    It returns when states are copied, as an asynchronous save does, and fails as one does. All ranks must call it.

    Args:
        engine: one with a strategy, and ``"checkpoint": {"async_save": true}``.
        save_dir: where the run saves to disk, and what it calls ``load_checkpoint`` with.
        tag: under which a load writes it to ``save_dir``; by default ``global_step<steps>``.
        client_state: of the script, as for ``save_checkpoint``.

    Raises:
        ValueError: the engine or its configuration cannot do it.
        CheckpointError: on all ranks, if there is no room, or if an asynchronous save before this one has failed.
    """
    files = _require_able(engine)
    optimizer: ParoOptimizer = engine.optimizer
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    memory = MemorySave(engine, save_dir)
    commit = MemoryCommit(CheckpointFolder(save_dir, tag), dist.get_rank() == 0, True, False, memory=memory)
    with (
        optimizer.writers.in_each_group(engine, optimizer.topology.inter),
        replaced(files, elsewhere=commit),
        replaced(engine, _copy_recovery_script=lambda save_path: None),  # to disk
    ):
        return engine.save_checkpoint(save_dir, tag, dict(client_state or {}), save_latest=False)


def _require_able(engine: Engine) -> CheckpointFiles:
    files = engine.checkpoint_engine
    if not isinstance(engine.optimizer, ParoOptimizer) or not isinstance(files, CheckpointFiles):
        raise ValueError("save_in_memory needs an engine with zero_optimization.paro_strategy, and our own writer.")
    if files.aside is None:
        raise ValueError('save_in_memory needs "checkpoint": {"async_save": true} in the configuration.')
    if engine.use_node_local_storage():
        raise ValueError(
            "save_in_memory cannot be combined with checkpoint.use_node_local_storage: what the memory of several "
            "nodes holds is loaded from a folder that all of them share."
        )
    if isinstance(engine.optimizer.outer, OuterOptimizer):
        raise ValueError(
            "save_in_memory cannot be combined with zero_optimization.paro_outer_optimizer, where each group has "
            "states of its own: use engine.save_checkpoint."
        )
    return files


def files_to_send(files: Collection[int], groups: Sequence[Collection[int]]) -> list[list[int]]:
    """Return which files of a rank are copied to each of the next groups, in order: what these do not have.

    A group gets copies from the group before it, then from the one before that, and so on.

    Args:
        files: of the rank.
        groups: files that each of the next groups has written.
    """
    left, sent = set(files), []
    for group in groups:
        left -= set(group)
        sent.append(sorted(left))
    return sent


@dataclass(frozen=True)
class MemoryCommit(Commit):
    """The end of a save in memory.

    Attributes:
        memory: this rank's part of it.
    """

    memory: "MemorySave" = field(kw_only=True)

    def prepare(self, over: Channel) -> None:
        self.folder.staging = self.memory.prepare(over)

    def expect(self, waiting: Sequence[tuple[object, str, str]]) -> None:
        self.memory.expect({path: nbytes_of(content) for content, _, path in waiting}, self.folder)

    def run(self, written: int, error: Exception | None, over: Channel) -> None:
        assert isinstance(over, HostChannel)
        try:
            raise_together(error, CheckpointError, over)
            self.memory.copy(over)
            run_on_all_or_raise(lambda: self.memory.publish(self.folder.tag), _DOING, CheckpointError, over)
        except CheckpointError as failure:
            self.revert(failure, over)
            raise
        self.memory.clear()

    def revert(self, failure: Exception, over: Channel) -> None:
        self.memory.revert()

    def abandon(self) -> None:
        if not self.memory.published:  # else other ranks may have removed earlier saves, since all have published
            self.memory.revert()


class MemorySave:
    """A rank's part of a save in memory.

    Making one communicates nothing.

    Args:
        engine: of the run.
        save_dir: where it saves to disk.
    """

    def __init__(self, engine: Engine, save_dir: str) -> None:
        self._engine, self._save_dir = engine, Path(save_dir)
        self._rank = dist.get_rank()
        self._step = engine.global_steps
        self._number, self._time = 0, time.time()
        self._model = self._latest = ""
        self._folder: MemoryFolder
        self._staging: Path
        self._place, self._on_disk = 0, False
        self._ring = _Ring(engine)
        self._names: dict[int, str] = {}  # of this rank's files, by what they are known by
        self._sent: list[list[str]] = []  # for each target, names
        self._files: dict[str, int] = {}  # of this rank's folder, the rank that wrote each
        self._count = 0  # of files of all ranks
        self.published = False

    def prepare(self, over: Channel) -> Path:
        """Return a folder for this rank's files. Collective."""
        # After this, no thread of any rank still writes or removes anything of an earlier save.
        self._number = unique_number()
        self._model = model_key(self._engine)
        run, self._latest = self._run_and_latest()
        self._folder = MemoryFolder(self._engine._config, self._save_dir, run)
        run_on_all_or_raise(self._begin, _DOING, CheckpointError, over)
        return self._staging

    def _begin(self) -> None:
        folder = self._folder
        self._staging = folder.begin(self._number, self._rank)
        self._place, self._on_disk = _known_by(folder.place), not folder.is_in_memory

    def _run_and_latest(self) -> tuple[str, str]:
        """Return the run in ``save_dir``, which begins one if it has none, and what ``latest`` names. Collective."""
        path = self._save_dir / RUN

        def look() -> str:
            if self._rank != 0:
                return ""
            if not run_of(self._save_dir):
                self._save_dir.mkdir(parents=True, exist_ok=True)
                replace_text(path, secrets.token_hex(16))
            latest = self._save_dir / LATEST
            return json.dumps([run_of(self._save_dir), latest.read_text().strip() if latest.is_file() else ""])

        found = run_on_all_or_raise(look, f"{path} cannot be made", CheckpointError)
        run, latest = json.loads(broadcast_text(found, 0))
        return run, latest

    def expect(self, sizes: Mapping[str, int], folder: CheckpointFolder) -> None:
        """Decide what is copied where, and whether there is room. Collective.

        Args:
            sizes: bytes of this rank's files, by their paths.
            folder: of the checkpoint.

        Raises:
            CheckpointError: on all ranks; there is none.
        """
        own = {str(Path(path).relative_to(folder.path)): size + _BESIDE for path, size in sizes.items()}
        self._names = {_known_by(name): name for name in own}
        self._files = dict.fromkeys(own, self._rank)
        ((_, most),) = bounds([len(own)])
        described = [part for key, name in self._names.items() for part in (key, own[name])]
        rows = all_gather_rows([int(self._time * 1e6), self._place, *described, *[0] * 2 * (most - len(own))])
        self._time = int(rows[0, 0]) / 1e6
        self._count = int((rows[:, 2::2].unique() != 0).sum())
        received = 0

        def files_of(ranks: Sequence[int]) -> dict[int, int]:
            flat = rows[list(ranks), 2:].reshape(-1, 2).tolist()
            return {key: size for key, size in flat if key}

        sent = files_to_send(self._names, [files_of(group) for group in self._ring.next_groups()])
        self._sent = [[self._names[key] for key in keys] for keys in sent]
        for source, groups in self._ring.sources():
            files = files_of([source])
            received += sum(files[key] for key in files_to_send(files, [files_of(group) for group in groups])[-1])
        beside = any(int(rows[target, 1]) == self._place for target in self._ring.targets)
        self._require_room(sum(own.values()) + received, beside)

    def _require_room(self, needed: int, beside: bool) -> None:
        """Raise on all ranks if a node has no room for what all its ranks need. Collective.

        Args:
            needed: bytes, by this rank.
            beside: whether this rank's copies are in the same memory as its files.
        """
        free = run_on_all_or_raise(lambda: self._folder.free, _DOING, CheckpointError)
        rows = all_gather_rows([self._place, needed, free, beside, self._on_disk])
        if self._rank == 0:
            self._warn(int(rows[:, 3].sum()), bool(rows[:, 4].any()))
        there = rows[:, 0] == self._place
        total, free = int(rows[there, 1].sum()), int(rows[there, 2].min())

        def compare() -> None:
            if total > free:
                raise CheckpointError(
                    f"a save in memory needs {total / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free beside the one "
                    f"before it, in {self._folder.path} on the node of ranks {there.nonzero().flatten().tolist()}. "
                    f"Make that larger (mount -o remount,size=..., docker --shm-size), set checkpoint.memory_folder "
                    f"to another one, or checkpoint.memory_copies to 0.{self._others()}"
                )

        run_on_all_or_raise(compare, _DOING, CheckpointError)

    def _warn(self, beside: int, on_disk: bool) -> None:
        """Log what limits saves of all ranks."""
        if on_disk:
            _warn_once(f"{self._folder.parent} is not in memory (tmpfs): saves in memory are written to a disk.")
        if beside:
            _warn_once(
                f"copies of files in memory are on the node of those that they are made of, on {beside} rank(s): they "
                f"do not survive it. Set zero_optimization.paro_group_size to the ranks of a node."
            )
        if self._ring.short:
            _warn_once(
                f"{self._ring.groups} group(s) of ranks have no place for {self._ring.wanted} copies of a save in "
                f"memory in others, so there are {self._ring.groups - 1}."
            )

    def _others(self) -> str:
        """Return a sentence on saves in memory of other runs on this node; empty if there are none."""
        others = "; ".join(self._folder.others())
        return f" Saves of other runs take room there, too: {others}. Remove those that have ended." if others else ""

    # In the thread ####################################################################################

    def copy(self, over: HostChannel) -> None:
        """Send files to other groups, and receive theirs. Collective.

        Raises:
            CheckpointError: on all ranks; one could not.
        """
        for names, target, (source, _) in zip(self._sent, self._ring.targets, self._ring.sources(), strict=True):
            tensors = run_on_all_or_raise(
                lambda names=names: [_mapped(self._staging / name) for name in names],  # type: ignore[misc]
                _DOING,
                CheckpointError,
                over,
            )
            told = json.dumps(list(zip(names, (one.numel() for one in tensors), strict=True)))
            taken = json.loads(over.exchange_text(told, target, source))
            room = run_on_all_or_raise(
                lambda taken=taken: [_made(self._staging / name, size) for name, size in taken],  # type: ignore[misc]
                _DOING,
                CheckpointError,
                over,
            )
            for sent, received in itertools.zip_longest(_chunks(tensors), _chunks(room), fillvalue=()):
                over.exchange(sent, target, received, source)
            self._files |= {name: source for name, _ in taken}

    def publish(self, tag: str) -> None:
        """Make this rank's files count."""
        save = Identity(self._number, tag, self._step, self._time, self._latest, self._model, self._count)
        self._folder.publish(self._staging, Part(save, f"{self._number}-{self._rank}", self._files))
        self.published = True

    def clear(self) -> None:
        """Remove earlier saves, when all ranks have published this one."""
        self._folder.keep_only(self._number)

    def revert(self) -> None:
        """Remove what this rank has of the save."""
        self._folder.drop(self._number, self._rank)


class _Ring:
    """The ranks of one number in all groups. Each sends copies of its files to the next ones.

    Attributes:
        groups: how many there are.
        wanted: copies of each file.
        targets: global ranks that get this rank's files.
    """

    def __init__(self, engine: Engine) -> None:
        topology = engine.optimizer.topology
        self._ranks, self._size = data_parallel_ranks(topology.world), topology.sizes.group_size
        self._rank, self.groups = topology.rank, topology.sizes.groups
        self.wanted = save_settings(engine._config).memory_copies
        copies = min(self.wanted, self.groups - 1)  # what is left of a job that has lost a node goes on
        self._steps = range(1, copies + 1)
        self.targets = [self._neighbor(step) for step in self._steps]

    @property
    def short(self) -> bool:
        """Whether there are too few groups for all copies."""
        return self.wanted >= self.groups

    def _neighbor(self, step: int) -> int:
        return self._ranks[(self._rank + step * self._size) % len(self._ranks)]

    def _group(self, step: int) -> list[int]:
        first = (self._rank // self._size + step) % self.groups * self._size
        return self._ranks[first : first + self._size]

    def next_groups(self) -> list[list[int]]:
        """Return the ranks of each group that gets copies of this rank's files."""
        return [self._group(step) for step in self._steps]

    def sources(self) -> list[tuple[int, list[list[int]]]]:
        """Return each rank whose files this one gets, and of this rank's group and those between them the ranks."""
        return [
            (self._neighbor(-step), [self._group(between) for between in range(1 - step, 1)]) for step in self._steps
        ]


def _known_by(text: str) -> int:
    """Return a number, not 0, that only this text has."""
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest(), "big")


def _mapped(path: Path) -> Tensor:
    """Return the bytes of a file, which stay where they are."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def _made(path: Path, size: int) -> Tensor:
    """Make a file of so many bytes, and return it as a tensor to write into.

    Raises:
        OSError: there is no room. (Writing to a mapped file that has none would end the process.)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return _mapped(path)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor]]:
    yield from ((chunk,) for one in tensors for chunk in one.split(_CHUNK))


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(f"deepspeed_ext: {text}")
