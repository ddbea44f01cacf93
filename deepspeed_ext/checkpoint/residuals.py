# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Error feedback in checkpoints: a file of residuals for each rank, beside DeepSpeed's files.

Residuals differ from rank to rank even if optimizer states do not, so they cannot be in DeepSpeed's files. A run that
is sharded in the same way loads them bit for bit. Any other run (with other groups, another number of ranks or another
strategy) loads them by elements of parameters: the sum over all groups of what has not been sent stays the same, and
is divided evenly among the groups of this run, if its reductions keep errors. If something is lost, a warning says so.

``ds_to_universal.py`` leaves these files where they are. A load of the converted checkpoint finds them if the original
folder is still beside it. Files name that folder without a path, so that both may be moved, and so that no file can
direct a load elsewhere.
"""

import logging
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils import log_dist
from torch import Tensor

from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError, RankFile
from deepspeed_ext.comm.spans import ShardSpan, Span
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.optimizer import ParoOptimizer

FOLDER = "residuals"  # in the header of saved files: name of the folder with residuals; a path in old checkpoints


def save(engine: Engine, files: CheckpointFiles, save_dir: str, tag: str) -> None:
    """Write this rank's residuals, if its reductions keep errors."""
    optimizer: ParoOptimizer = engine.optimizer
    if not optimizer.error_state.keeps_errors:
        return
    kept = optimizer.error_state
    content = {"states": kept.states(), "halves": sorted(kept.halves), **_described(optimizer)}
    name = RankFile.RESIDUALS.of(optimizer.topology.rank, engine.checkpoint_mp_rank)
    files.save(content, str(Path(save_dir, tag, name)))


def _described(optimizer: ParoOptimizer) -> dict[str, Any]:
    """Return which elements the buckets have. If it is equal, states can be loaded as they are."""
    sizes = optimizer.topology.sizes
    return {
        "rank": optimizer.topology.rank,
        "groups": sizes.groups,
        "group_size": sizes.group_size,
        "strategy": optimizer.strategy.name,
        "whereabouts": [(name, start, tuple(run)) for name, start, run in optimizer.crossing_spans()],
    }


class Residuals:
    """The residuals of one checkpoint, read before a load changes anything.

    Args:
        engine: the engine that will load.
        folder: the folder of the checkpoint.

    Raises:
        CheckpointError: some files are missing, or of another save.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._optimizer: ParoOptimizer = engine.optimizer
        self._errors = self._optimizer.error_state
        self._folder = folder
        self._same: Mapping[str, Any] = {}  # this rank's, if sharded in the same way; or
        self._ranks: list[Mapping[str, Any]] = []  # those of all ranks, if sharded otherwise
        if not self._errors.keeps_errors:
            return
        self._files: CheckpointFiles = engine.checkpoint_engine
        self._saved = self._files.header_of(folder)
        if not self._saved.get(FOLDER):
            return
        mp_rank, described = engine.checkpoint_mp_rank, _described(self._optimizer)
        own = folder / RankFile.RESIDUALS.of(described["rank"], mp_rank)
        if own.exists() or engine.use_node_local_storage():
            self._same = self._look(own)
            if all(self._same.get(key) == value for key, value in described.items()):
                return
        self._same = {}
        paths = self._paths(folder, mp_rank) or self._paths_elsewhere(mp_rank)
        self._ranks = [self._look(path) for path in paths]
        expected = self._ranks[0]["groups"] * self._ranks[0]["group_size"] if paths else 0
        if len(paths) != expected:
            raise CheckpointError(
                f"{paths[0].parent} has {len(paths)} files with residuals of reductions, expected {expected}: one of "
                f"each data-parallel rank."
            )

    def _look(self, path: Path) -> Mapping[str, Any]:
        content: Mapping[str, Any] = self._files.inspect(path, "states", "whereabouts")
        if not self._files.is_of_save(path, self._saved):
            raise CheckpointError(f"{path} is of another save than the other files of {self._folder}.")
        return content

    def _paths_elsewhere(self, mp_rank: int) -> list[Path]:
        """Return the files of the checkpoint from which this one was converted, if it is still beside this one."""
        name = Path(str(self._saved[FOLDER])).name
        paths = self._paths(self._folder.with_name(name), mp_rank) if name not in ("", os.pardir) else []
        if paths:
            self._files.inspect(paths[0])
        return paths if paths and self._files.is_of_save(paths[0], self._saved) else []

    @staticmethod
    def _paths(folder: Path, mp_rank: int) -> list[Path]:
        return sorted(folder.glob(RankFile.RESIDUALS.of_all(mp_rank)))

    def load(self) -> None:
        """Load the residuals into this rank's error feedback; without residuals, reset it to zero."""
        if not self._errors.keeps_errors:
            return
        found = self._same or (self._ranks[0] if self._ranks else {})
        if found:
            self._tell_what_is_not_taken(set(found.get("halves", ["reductions"])))
        if self._same:
            self._errors.load_states(self._same["states"])
        elif self._ranks:
            wanted = _described(self._optimizer)["whereabouts"]
            self._errors.load_errors(self._collected(wanted), self._ranks[0]["states"].get("steps", 0))
        else:
            self._errors.forget()
            log_dist(
                f"deepspeed_ext: {self._folder} has no residuals of reductions: the errors of LoCo start at zero. A "
                f"checkpoint that was saved with LoCo has files residuals_rank_*.pt; if it was converted, copy them "
                f"from the folder that was converted, or put it beside that.",
                ranks=[0],
                level=logging.WARNING,
            )

    def _tell_what_is_not_taken(self, saved: set[str]) -> None:
        """Warn of errors that start at zero, and of saved errors that are not loaded.

        If sharding has changed, reductions may take the errors of sums, too.
        """
        wanted, alike = self._errors.halves, bool(self._same)
        taken = saved & wanted if alike else ({"reductions"} & wanted if saved else set())
        lost = saved - taken if alike or not taken else set()
        for what, how in ((wanted - taken, "start at zero"), (lost, "were saved, and are not taken")):
            if what:
                log_dist(
                    f"deepspeed_ext: {self._folder}: errors of {' and '.join(sorted(what))} {how}: the configuration, "
                    f"or how states are sharded, was another.",
                    ranks=[0],
                    level=logging.WARNING,
                )

    def _collected(self, wanted: Sequence[tuple[str, int, Sequence[int]]]) -> dict[ShardSpan, Tensor]:
        """Return, for each row of this rank's gradients, its share of what all groups had not sent."""
        totals: dict[tuple[int, int], Tensor] = {}
        places: dict[str, list[tuple[int, ShardSpan]]] = defaultdict(list)
        for name, start, run in wanted:
            places[name].append((start, ShardSpan(*run)))
        for _, run in (place for of in places.values() for place in of):
            end = run.elements.stop
            before = totals.get((run.buffer, run.row), torch.empty(0))
            if before.numel() < end:
                totals[run.buffer, run.row] = torch.zeros(end)
        for file in self._ranks:
            for name, start, values in self._by_parameter(file):
                for first, run in places[name]:
                    both = Span(first, run.numel).common(Span(start, values.numel()))
                    if both.numel:
                        total = both.shifted(run.start - first).of(totals[run.buffer, run.row])
                        total.add_(both.shifted(-start).of(values))
        optimizer = self._optimizer
        groups = {
            buffer: optimizer.families[optimizer.family_of_buffer(buffer)].topology.sizes.groups
            for buffer, _ in totals
        }
        return {
            ShardSpan(buffer, row, 0, total.numel()): total / groups[buffer] for (buffer, row), total in totals.items()
        }

    def _by_parameter(self, file: Mapping[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield what a rank had not sent: name of a parameter, first element, values."""
        places: dict[tuple[int, int], list[tuple[Span, str, int]]] = defaultdict(list)
        for name, start, (buffer, row, *elements) in file["whereabouts"]:
            places[buffer, row].append((Span(*elements), name, start))
        for run, values in self._errors.errors_in(file["states"]):
            for span, name, start in places[run.buffer, run.row]:
                both = span.common(run.elements)
                if both.numel:
                    yield name, start + both.start - span.start, both.shifted(-run.start).of(values)
