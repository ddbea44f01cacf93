# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""In-memory saves: files in node memory, with copies in other groups, survive the loss of a node without a disk.

Note [Saves in memory]
    A save in memory is an asynchronous save with a different commit. Each rank's thread writes files into its node's
    shared memory, which outlives the training processes (``memory_folder.py``). For states that all groups have, each
    group writes the files that the first group writes to disk, under the same names, so these are not sent. A file
    that the next group lacks is sent to the rank with the same number in that group, in chunks, from memory to memory,
    over the thread's own process group. So each file is kept in the configured number of groups. The previous save
    stays until all ranks have all of their files.

    After a restart, ``engine.load_checkpoint`` checks whether the newest save is newer than the checkpoint on disk. If
    so, it writes the save into ``save_dir`` as an ordinary checkpoint, and loads that (``memory_restore.py``).

    The content of ``save_dir`` may be removed or replaced after a save in memory. So a memory folder belongs to a run
    in ``save_dir``, which ends when that is emptied, and a save records the tag in ``latest``.
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
from deepspeed_ext.checkpoint.experts import model_hash
from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import LATEST, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import RUN, Identity, MemoryFolder, Part, read_run
from deepspeed_ext.checkpoint.owned_folder import replace_text
from deepspeed_ext.checkpoint.snapshots import nbytes_of
from deepspeed_ext.comm.agreement import (
    Channel,
    all_gather_rows,
    bounds,
    broadcast_from_first,
    raise_together,
    run_on_all_or_raise,
    unique_number,
)
from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.process_groups import data_parallel_ranks
from deepspeed_ext.config.section import save_settings
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer

_CHUNK_BYTES = 16 * 2**20  # bytes of a message
_OVERHEAD_BYTES = 2**16  # upper bound for a file's bytes in addition to its tensors
_ACTION = "the save in memory failed"


def save_in_memory(
    engine: Engine, save_dir: str, tag: str | None = None, client_state: Mapping[str, Any] | None = None
) -> bool:
    """Save the content of ``engine.save_checkpoint`` into memory of the nodes. See Note [Saves in memory].

    Returns once states are copied, and reports errors like an asynchronous save. All ranks must call it.

    Args:
        engine: an engine with a strategy, and ``"checkpoint": {"async_save": true}``.
        save_dir: the folder that the run passes to ``save_checkpoint`` and ``load_checkpoint``.
        tag: the tag under which a load writes it to ``save_dir``; by default ``global_step<steps>``.
        client_state: as for ``save_checkpoint``.

    Raises:
        ValueError: the engine or its configuration does not support it.
        CheckpointError: on all ranks, if there is no room, or if an earlier asynchronous save has failed.
    """
    files = _require_supported(engine)
    optimizer: ParoOptimizer = engine.optimizer
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    memory = MemorySave(engine, save_dir)
    commit = MemoryCommit(CheckpointFolder(save_dir, tag), dist.get_rank() == 0, True, False, memory=memory)
    with (
        optimizer.writers.write_in_each_group(engine, optimizer.topology.inter),
        replace_attributes(files, memory_commit=commit),
        replace_attributes(engine, _copy_recovery_script=lambda save_path: None),  # to disk
    ):
        return engine.save_checkpoint(save_dir, tag, dict(client_state or {}), save_latest=False)


def _require_supported(engine: Engine) -> CheckpointFiles:
    files = engine.checkpoint_engine
    if not isinstance(engine.optimizer, ParoOptimizer) or not isinstance(files, CheckpointFiles):
        raise ValueError(
            "save_in_memory needs an engine with zero_optimization.paro_strategy and the default checkpoint writer."
        )
    if files.async_saves is None:
        raise ValueError('save_in_memory needs "checkpoint": {"async_save": true} in the configuration.')
    if engine.use_node_local_storage():
        raise ValueError(
            "save_in_memory cannot be combined with checkpoint.use_node_local_storage: a load collects the files of "
            "all nodes in a folder that they share."
        )
    if isinstance(engine.optimizer.outer, OuterOptimizer):
        raise ValueError(
            "save_in_memory cannot be combined with zero_optimization.paro_outer_optimizer, because each group has "
            "its own states. Use engine.save_checkpoint."
        )
    return files


def files_to_send(files: Collection[int], groups: Sequence[Collection[int]]) -> list[list[int]]:
    """Return the files of a rank that are sent to each of the next groups, in order: those that a group lacks.

    A group receives copies from the group before it, then from the one before that, and so on.

    Args:
        files: the rank's files.
        groups: files that each of the next groups has written.
    """
    missing, sent = set(files), []
    for group in groups:
        missing -= set(group)
        sent.append(sorted(missing))
    return sent


@dataclass(frozen=True)
class MemoryCommit(Commit):
    """The commit of a save in memory.

    Attributes:
        memory: this rank's part of the save.
    """

    memory: "MemorySave" = field(kw_only=True)

    def prepare(self, channel: Channel) -> None:
        self.folder.staging = self.memory.prepare(channel)

    def plan_files(self, pending: Sequence[tuple[object, str, str]]) -> None:
        self.memory.plan_files({path: nbytes_of(content) for content, _, path in pending}, self.folder)

    def run(self, written: int, error: Exception | None, channel: Channel) -> None:
        assert isinstance(channel, HostChannel)
        try:
            raise_together(error, CheckpointError, channel)
            self.memory.send_copies(channel)
            run_on_all_or_raise(lambda: self.memory.publish(self.folder.tag), _ACTION, CheckpointError, channel)
        except CheckpointError as failure:
            self.revert(failure, channel)
            raise
        self.memory.clear()  # after the vote above: until all ranks have published, the previous save is needed

    def revert(self, failure: Exception, channel: Channel) -> None:
        self.memory.revert()

    def abandon(self) -> None:
        # Once this rank has published, all ranks may have, and may have removed the previous save: keep this one.
        if not self.memory.published:
            self.memory.revert()


class MemorySave:
    """A rank's part of a save in memory.

    The constructor does not communicate.

    Args:
        engine: the run's engine.
        save_dir: the folder of its checkpoints on disk.
    """

    def __init__(self, engine: Engine, save_dir: str) -> None:
        self._engine, self._save_dir = engine, Path(save_dir)
        self._rank = dist.get_rank()
        self._step = engine.global_steps
        self._number, self._time = 0, time.time()
        self._model = self._latest = ""
        self._folder: MemoryFolder
        self._staging: Path
        self._location, self._on_disk = 0, False
        self._ring = _Ring(engine)
        self._names: dict[int, str] = {}  # hash of a name: name, for this rank's files
        self._to_send: list[list[str]] = []  # for each target, names of files to send
        self._files: dict[str, int] = {}  # name: rank that wrote it, for all files in this rank's folder
        self._count = 0  # number of files of all ranks
        self.published = False

    def prepare(self, channel: Channel) -> Path:
        """Return a folder for this rank's files. Collective."""
        # Also a barrier: after it, no thread of any rank still writes or removes files of an earlier save.
        self._number = unique_number()
        self._model = model_hash(self._engine)
        run, self._latest = self._run_and_latest()
        self._folder = MemoryFolder(self._engine._config, self._save_dir, run)
        run_on_all_or_raise(self._create_staging, _ACTION, CheckpointError, channel)
        return self._staging

    def _create_staging(self) -> None:
        folder = self._folder
        self._staging = folder.create_staging(self._number, self._rank)
        self._location, self._on_disk = _hash(folder.location), not folder.is_in_memory

    def _run_and_latest(self) -> tuple[str, str]:
        """Return the run in ``save_dir``, after creating it if there is none, and the latest tag. Collective."""
        path = self._save_dir / RUN

        def read() -> str:
            if not read_run(self._save_dir):
                self._save_dir.mkdir(parents=True, exist_ok=True)
                replace_text(path, secrets.token_hex(16))
            latest = self._save_dir / LATEST
            return json.dumps([read_run(self._save_dir), latest.read_text().strip() if latest.is_file() else ""])

        run, latest = json.loads(broadcast_from_first(read, f"{path} cannot be created", CheckpointError))
        return run, latest

    def plan_files(self, sizes: Mapping[str, int], folder: CheckpointFolder) -> None:
        """Choose which files are sent to which ranks, and check that there is room. Collective.

        Args:
            sizes: path: bytes, for this rank's files.
            folder: the checkpoint's folder.

        Raises:
            CheckpointError: on all ranks; there is no room.
        """
        own_sizes = {str(Path(path).relative_to(folder.path)): size + _OVERHEAD_BYTES for path, size in sizes.items()}
        self._names = {_hash(name): name for name in own_sizes}
        self._files = dict.fromkeys(own_sizes, self._rank)
        ((_, most),) = bounds([len(own_sizes)])
        described = [value for key, name in self._names.items() for value in (key, own_sizes[name])]
        rows = all_gather_rows([int(self._time * 1e6), self._location, *described, *[0] * 2 * (most - len(own_sizes))])
        self._time = int(rows[0, 0]) / 1e6  # rank 0's, because all parts of a save must have equal identities
        self._count = int((rows[:, 2::2].unique() != 0).sum())
        received = 0

        def files_of(ranks: Sequence[int]) -> dict[int, int]:
            flat = rows[list(ranks), 2:].reshape(-1, 2).tolist()
            return {key: size for key, size in flat if key}

        sent = files_to_send(self._names, [files_of(group) for group in self._ring.next_groups()])
        self._to_send = [[self._names[key] for key in keys] for keys in sent]
        for source, groups in self._ring.sources():
            files = files_of([source])
            received += sum(files[key] for key in files_to_send(files, [files_of(group) for group in groups])[-1])
        same_memory = any(int(rows[target, 1]) == self._location for target in self._ring.targets)
        self._require_room(sum(own_sizes.values()) + received, same_memory)

    def _require_room(self, needed: int, same_memory: bool) -> None:
        """Raise on all ranks if a node has no room for the files of all its ranks. Collective.

        Args:
            needed: bytes that this rank needs.
            same_memory: whether this rank's copies are in the same memory as its files.
        """
        free = run_on_all_or_raise(lambda: self._folder.free_bytes, _ACTION, CheckpointError)
        rows = all_gather_rows([self._location, needed, free, same_memory, self._on_disk])
        if self._rank == 0:
            self._warn(int(rows[:, 3].sum()), bool(rows[:, 4].any()))
        sharers = rows[:, 0] == self._location
        total, free = int(rows[sharers, 1].sum()), int(rows[sharers, 2].min())

        def compare() -> None:
            if total > free:
                raise CheckpointError(
                    f"a save in memory needs {total / 1e9:.3f} GB in addition to the previous save, and "
                    f"{free / 1e9:.3f} GB are free in {self._folder.path} on the node of ranks "
                    f"{sharers.nonzero().flatten().tolist()}. Enlarge it (mount -o remount,size=..., docker "
                    f"--shm-size), set checkpoint.memory_folder to another folder, or set checkpoint.memory_copies to "
                    f"0.{self._other_runs()}"
                )

        run_on_all_or_raise(compare, _ACTION, CheckpointError)

    def _warn(self, same_node: int, on_disk: bool) -> None:
        """Log limitations of saves on all ranks."""
        if on_disk:
            _warn_once(f"{self._folder.parent} is not in memory (tmpfs): saves in memory go to a disk.")
        if same_node:
            _warn_once(
                f"the in-memory copies of {same_node} rank(s) are on the same node as the originals, and would be "
                f"lost with it. Set zero_optimization.paro_group_size to the ranks of a node."
            )
        if self._ring.lacks_groups:
            _warn_once(
                f"checkpoint.memory_copies is {self._ring.configured_copies}, but there are {self._ring.groups} "
                f"group(s) of ranks, so each file has {self._ring.groups - 1} copies."
            )

    def _other_runs(self) -> str:
        """Return a sentence about other runs' saves in memory on this node; empty if there are none."""
        others = "; ".join(self._folder.describe_others())
        return f" Saves of other runs also use it: {others}. Remove those of runs that have ended." if others else ""

    # Writer thread ####################################################################################

    def send_copies(self, channel: HostChannel) -> None:
        """Send files to other groups, and receive theirs. Collective.

        Raises:
            CheckpointError: on all ranks, if one of them failed.
        """
        for names, target, (source, _) in zip(self._to_send, self._ring.targets, self._ring.sources(), strict=True):
            # A rank that failed alone here would leave its neighbors waiting in the exchange.
            tensors = run_on_all_or_raise(
                lambda names=names: [_map_file(self._staging / name) for name in names],  # type: ignore[misc]
                _ACTION,
                CheckpointError,
                channel,
            )
            sizes = json.dumps(list(zip(names, (tensor.numel() for tensor in tensors), strict=True)))
            received_files = json.loads(channel.exchange_text(sizes, target, source))
            # All ranks must have room before any of them sends.
            buffers = run_on_all_or_raise(
                lambda received_files=received_files: [
                    _create_mapped_file(self._staging / name, size) for name, size in received_files
                ],  # type: ignore[misc]
                _ACTION,
                CheckpointError,
                channel,
            )
            for sent, received in itertools.zip_longest(_chunks(tensors), _chunks(buffers), fillvalue=()):
                channel.exchange(sent, target, received, source)
            self._files |= {name: source for name, _ in received_files}

    def publish(self, tag: str) -> None:
        """Publish this rank's files by a rename."""
        save = Identity(
            number=self._number,
            tag=tag,
            step=self._step,
            time=self._time,
            latest=self._latest,
            model=self._model,
            files=self._count,
        )
        self._folder.publish(self._staging, Part(save, f"{self._number}-{self._rank}", self._files))
        self.published = True

    def clear(self) -> None:
        """Remove earlier saves. Called once all ranks have published this one."""
        self._folder.remove_others(self._number)

    def revert(self) -> None:
        """Remove this rank's files of the save."""
        self._folder.remove_files_of(self._number, self._rank)


class _Ring:
    """The ranks with the same number in all groups. Each sends copies of its files to the next ones.

    Attributes:
        groups: number of groups.
        configured_copies: configured copies of each file.
        targets: global ranks that receive this rank's files.
    """

    def __init__(self, engine: Engine) -> None:
        topology = engine.optimizer.topology
        self._ranks, self._size = data_parallel_ranks(topology.world), topology.sizes.group_size
        self._rank, self.groups = topology.rank, topology.sizes.groups
        self.configured_copies = save_settings(engine._config).memory_copies
        copies = min(self.configured_copies, self.groups - 1)  # fewer than configured if the job has lost a node
        self._steps = range(1, copies + 1)
        self.targets = [self._neighbor(step) for step in self._steps]

    @property
    def lacks_groups(self) -> bool:
        """Whether there are too few groups for all copies."""
        return self.configured_copies >= self.groups

    def _neighbor(self, step: int) -> int:
        return self._ranks[(self._rank + step * self._size) % len(self._ranks)]

    def _group(self, step: int) -> list[int]:
        first = (self._rank // self._size + step) % self.groups * self._size
        return self._ranks[first : first + self._size]

    def next_groups(self) -> list[list[int]]:
        """Return the ranks of each group that receives copies of this rank's files."""
        return [self._group(step) for step in self._steps]

    def sources(self) -> list[tuple[int, list[list[int]]]]:
        """Return each rank whose files this one receives, and the ranks of the groups after it, up to this group."""
        return [
            (self._neighbor(-step), [self._group(between) for between in range(1 - step, 1)]) for step in self._steps
        ]


def _hash(text: str) -> int:
    """Return a nonzero hash of a text, as an integer that a row of a collective can contain."""
    return 1 + int.from_bytes(hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=7).digest(), "big")


def _map_file(path: Path) -> Tensor:
    """Return the bytes of a file, mapped into memory."""
    return torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)


def _create_mapped_file(path: Path, size: int) -> Tensor:
    """Create a file of ``size`` bytes, and return it as a tensor to write into.

    Raises:
        OSError: there is no room. (Writing to a mapped file without room would kill the process.)
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, size)
    return _map_file(path)


def _chunks(tensors: Sequence[Tensor]) -> Iterator[tuple[Tensor]]:
    yield from ((chunk,) for tensor in tensors for chunk in tensor.split(_CHUNK_BYTES))


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(f"deepspeed_ext: {text}")
