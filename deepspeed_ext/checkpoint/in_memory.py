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
import itertools
import json
import os
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from deepspeed import comm as dist
from deepspeed.utils import logger
from torch import Tensor

from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import LATEST, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import RUN, Identity, MemoryFolder, Part, run_of
from deepspeed_ext.checkpoint.model_key import model_key
from deepspeed_ext.checkpoint.owned import replace_text
from deepspeed_ext.checkpoint.snapshots import nbytes_of
from deepspeed_ext.comm.agreement import (
    Channel,
    all_gather_texts,
    all_reduce_min,
    broadcast_text,
    raise_together,
    run_on_all_or_raise,
)
from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.config.saves import ASYNC_SAVE, CHECKPOINT, memory_copies
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer

_NUMBER_BITS = 62
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
        mock.patch.object(files, "elsewhere", commit),
        mock.patch.object(engine, "_copy_recovery_script", lambda save_path: None),  # to disk
    ):
        return engine.save_checkpoint(save_dir, tag, dict(client_state or {}), save_latest=False)


def _require_able(engine: Engine) -> CheckpointFiles:
    files = engine.checkpoint_engine
    if not isinstance(engine.optimizer, ParoOptimizer) or not isinstance(files, CheckpointFiles):
        raise ValueError("save_in_memory needs an engine with zero_optimization.paro_strategy, and our own writer.")
    if files.aside is None:
        raise ValueError(f'save_in_memory needs "{CHECKPOINT}": {{"{ASYNC_SAVE}": true}} in the configuration.')
    if engine.use_node_local_storage():
        raise ValueError(
            f"save_in_memory cannot be combined with {CHECKPOINT}.use_node_local_storage: what the memory of several "
            f"nodes holds is loaded from a folder that all of them share."
        )
    if isinstance(engine.optimizer.outer, OuterOptimizer):
        raise ValueError(
            "save_in_memory cannot be combined with zero_optimization.paro_outer_optimizer, where each group has "
            "states of its own: use engine.save_checkpoint."
        )
    return files


@dataclass(frozen=True)
class Transfer:
    """Files that one rank sends to another."""

    source: int
    target: int
    names: list[str]


def transfers_of(
    files: Sequence[Mapping[str, int]], groups: Sequence[Any], targets: Sequence[Sequence[int]]
) -> list[list[Transfer]]:
    """Return what is copied to other groups: what these do not have. In rounds, with one target for each source.

    Args:
        files: of each rank, by their names; of one group, no two ranks have the same.
        groups: of each rank, what its group is known by.
        targets: of each rank, where its files are to be as well.
    """
    held = {group: set[str]() for group in groups}
    for group, names in zip(groups, files, strict=True):
        held[group].update(names)
    rounds = []
    for number in range(max(map(len, targets), default=0)):
        sent = [
            Transfer(source, of[number], sorted(files[source].keys() - held[groups[of[number]]]))
            for source, of in enumerate(targets)
            if number < len(of)
        ]
        for one in sent:
            held[groups[one.target]].update(one.names)
        rounds.append([one for one in sent if one.names])
    return rounds


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
        try:
            self.memory.expect({path: nbytes_of(content) for content, _, path in waiting}, self.folder)
        except CheckpointError:
            self.memory.revert()
            raise

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
        self._place = ""
        self._rounds: list[list[Transfer]] = []
        self._names: list[str] = []  # of all ranks
        self._files: dict[str, int] = {}  # of this rank's folder, the rank that wrote each

    def prepare(self, over: Channel) -> Path:
        """Return a folder for this rank's files. Collective."""
        # After this, no thread of any rank still writes or removes anything of an earlier save.
        self._number = all_reduce_min(secrets.randbits(_NUMBER_BITS))
        self._model = model_key(self._engine)
        run, self._latest = self._run_and_latest()
        self._folder = MemoryFolder(self._engine._config, self._save_dir, run)
        run_on_all_or_raise(self._begin, _DOING, CheckpointError, over)
        return self._staging

    def _begin(self) -> None:
        self._staging = self._folder.begin(self._number, self._rank)
        self._place = self._folder.place
        if not self._folder.is_in_memory:
            _warn_once(f"{self._folder.parent} is not in memory (tmpfs): saves in memory are written to a disk.")

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
        mine = {
            "files": own,
            "group": data_parallel_ranks(self._engine.optimizer.topology.intra)[0],
            "targets": self._targets(),
            "place": self._place,
            "free": run_on_all_or_raise(lambda: self._folder.free, _DOING, CheckpointError),
            "time": self._time,
        }
        ranks = [json.loads(text) for text in all_gather_texts(json.dumps(mine))]
        files = [one["files"] for one in ranks]
        self._time = ranks[0]["time"]
        self._names = sorted(set(itertools.chain(*files)))
        self._rounds = transfers_of(files, [one["group"] for one in ranks], [one["targets"] for one in ranks])
        self._files = dict.fromkeys(own, self._rank)
        for one in itertools.chain(*self._rounds):
            files[one.target] = {**files[one.target], **{name: files[one.source][name] for name in one.names}}
            if ranks[one.target]["place"] == ranks[one.source]["place"]:
                _warn_once(
                    f"copies of files in memory are on the node of those that they are made of (rank {one.target} has "
                    f"copies of rank {one.source}'s): they do not survive it. Set zero_optimization.paro_group_size "
                    f"to the ranks of a node."
                )
        self._require_room(ranks, files)

    def _targets(self) -> list[int]:
        """Return the global ranks that are to have this rank's files, too."""
        topology = self._engine.optimizer.topology
        everybody, sizes = data_parallel_ranks(topology.world), topology.sizes
        copies = memory_copies(self._engine._config)
        if copies >= sizes.groups:  # what is left of a job that has lost a node must not be stopped by this
            _warn_once(
                f"{sizes.groups} group(s) of ranks have no place for {copies} copies of a save in memory in others, "
                f"so there are {sizes.groups - 1}."
            )
        steps = range(1, min(copies, sizes.groups - 1) + 1)
        return [everybody[(topology.rank + step * sizes.group_size) % sizes.ranks] for step in steps]

    def _require_room(self, ranks: Sequence[Mapping[str, Any]], files: Sequence[Mapping[str, int]]) -> None:
        for place in dict.fromkeys(one["place"] for one in ranks):
            there = [rank for rank, one in enumerate(ranks) if one["place"] == place]
            needed = sum(sum(files[rank].values()) for rank in there)
            free = min(ranks[rank]["free"] for rank in there)
            if needed > free:
                raise CheckpointError(
                    f"a save in memory needs {needed / 1e9:.3f} GB, and {free / 1e9:.3f} GB are free beside the one "
                    f"before it, in {place.split(':', 3)[3]} on the node of ranks {there}. Make that larger (mount -o "
                    f"remount,size=..., docker --shm-size), set checkpoint.memory_folder to another one, or "
                    f"checkpoint.memory_copies to 0.{self._others(there[0])}"
                )

    def _others(self, rank: int) -> str:
        """Return a sentence on other saves in memory on the node of a rank; empty if there are none. Collective."""

        def look() -> str:
            return "; ".join(self._folder.others()) if self._rank == rank else ""

        others = broadcast_text(run_on_all_or_raise(look, _DOING, CheckpointError), rank)
        return f" Saves of other runs take room there, too: {others}. Remove those that have ended." if others else ""

    # In the thread ####################################################################################

    def copy(self, over: HostChannel) -> None:
        """Send files to other groups, and receive theirs. Collective.

        Raises:
            CheckpointError: on all ranks; one could not.
        """
        for some in self._rounds:
            if not some:
                continue
            sent = next((one for one in some if one.source == self._rank), Transfer(self._rank, self._rank, []))
            taken = next((one for one in some if one.target == self._rank), Transfer(self._rank, self._rank, []))
            tensors = run_on_all_or_raise(
                lambda sent=sent: [_mapped(self._staging / name) for name in sent.names],  # type: ignore[misc]
                _DOING,
                CheckpointError,
                over,
            )
            told = torch.tensor([one.numel() for one in tensors], dtype=torch.int64)
            sizes = torch.zeros(len(taken.names), dtype=torch.int64)
            over.exchange(told if sent.names else None, sent.target, sizes if taken.names else None, taken.source)
            room = run_on_all_or_raise(
                lambda taken=taken, sizes=sizes: [  # type: ignore[misc]
                    _made(self._staging / name, size) for name, size in zip(taken.names, sizes.tolist(), strict=True)
                ],
                _DOING,
                CheckpointError,
                over,
            )
            for one, other in itertools.zip_longest(_chunks(tensors), _chunks(room)):
                over.exchange(one, sent.target, other, taken.source)
            self._files |= dict.fromkeys(taken.names, taken.source)

    def publish(self, tag: str) -> None:
        """Make this rank's files count."""
        save = Identity(self._number, tag, self._step, self._time, self._latest, self._model, len(self._names))
        self._folder.publish(self._staging, Part(save, f"{self._number}-{self._rank}", self._files), self._names)

    def clear(self) -> None:
        """Remove earlier saves, when all ranks have published this one."""
        self._folder.keep_only(self._number)

    def revert(self) -> None:
        """Remove what this rank has of the save."""
        self._folder.drop(self._number, self._rank)


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


def _chunks(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    for one in tensors:
        yield from one.split(_CHUNK)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(f"deepspeed_ext: {text}")
