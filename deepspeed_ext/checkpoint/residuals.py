# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Error feedback in checkpoints: a file of residuals for each rank, in addition to DeepSpeed's files.

Residuals differ between ranks even if optimizer states do not, so DeepSpeed's files cannot contain them. A run with
the same sharding loads them bit for bit. Any other run (with other groups, number of ranks or strategy) loads them by
elements of parameters: the sum of unsent gradients over all groups stays the same. It is divided evenly among the
groups of this run, if its reductions keep errors. A warning reports lost residuals.

``ds_to_universal.py`` does not move these files. A load of the converted checkpoint finds them if the original folder
is still its sibling. Files contain that folder's name without a path, so both can be moved, and no file can direct a
load elsewhere.
"""

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from typing_extensions import NotRequired, TypedDict

from deepspeed_ext.checkpoint.files import STRICT, CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError, RankFile
from deepspeed_ext.comm.spans import ShardSpan, Span
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.optimizer import ParoOptimizer

FOLDER = "residuals"  # in the header of saved files: name of the folder with residuals; a path in old checkpoints


class _Content(TypedDict):
    """Fields of a file of residuals."""

    __pydantic_config__ = STRICT  # type: ignore[misc]
    states: dict[str, Any]
    whereabouts: list[tuple[str, int, Sequence[int]]]
    groups: int
    group_size: int
    halves: NotRequired[list[str]]


def save(engine: Engine, files: CheckpointFiles, save_dir: str, tag: str) -> None:
    """Write this rank's residuals, if its reductions keep errors."""
    optimizer: ParoOptimizer = engine.optimizer
    if not optimizer.error_state.keeps_errors:
        return
    error_state = optimizer.error_state
    content = {"states": error_state.states(), "halves": sorted(error_state.halves), **_sharding(optimizer)}
    name = RankFile.RESIDUALS.file_name(optimizer.topology.rank, engine.checkpoint_mp_rank)
    files.save(content, str(Path(save_dir, tag, name)))


def _sharding(optimizer: ParoOptimizer) -> dict[str, Any]:
    """Return the elements of all buckets. If two runs have equal ones, states can be loaded unchanged."""
    sizes = optimizer.topology.sizes
    return {
        "rank": optimizer.topology.rank,
        "groups": sizes.groups,
        "group_size": sizes.group_size,
        "strategy": optimizer.strategy.name,
        "whereabouts": [(name, start, tuple(run)) for name, start, run in optimizer.inter_group_spans()],
    }


class Residuals:
    """The residuals of one checkpoint, read before a load changes anything.

    Args:
        engine: the engine that will load.
        folder: the checkpoint's folder.

    Raises:
        CheckpointError: files are missing, or belong to another save.
    """

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._optimizer: ParoOptimizer = engine.optimizer
        self._error_state = self._optimizer.error_state
        self._folder = folder
        self._own_content: Mapping[str, Any] = {}  # this rank's content, if sharding is the same
        self._rank_contents: list[Mapping[str, Any]] = []  # otherwise the contents of all ranks
        if not self._error_state.keeps_errors:
            return
        self._files: CheckpointFiles = engine.checkpoint_engine
        self._header = self._files.read_header(folder)
        if not self._header.get(FOLDER):
            return
        mp_rank, sharding = engine.checkpoint_mp_rank, _sharding(self._optimizer)
        own_path = folder / RankFile.RESIDUALS.file_name(sharding["rank"], mp_rank)
        if own_path.exists() or engine.use_node_local_storage():
            self._own_content = self._inspect(own_path)
            if all(self._own_content.get(key) == value for key, value in sharding.items()):
                return
        self._own_content = {}
        paths = self._paths(folder, mp_rank) or self._paths_of_source(mp_rank)
        self._rank_contents = [self._inspect(path) for path in paths]
        expected = self._rank_contents[0]["groups"] * self._rank_contents[0]["group_size"] if paths else 0
        if len(paths) != expected:
            raise CheckpointError(
                f"{paths[0].parent} has {len(paths)} files with residuals of reductions, expected {expected}: one "
                f"per data-parallel rank."
            )

    def _inspect(self, path: Path) -> Mapping[str, Any]:
        content: Mapping[str, Any] = self._files.inspect(path, schema=_Content)
        if not self._files.belongs_to_save(path, self._header):
            raise CheckpointError(f"{path} belongs to another save than the other files of {self._folder}.")
        return content

    def _paths_of_source(self, mp_rank: int) -> list[Path]:
        """Return the files of the checkpoint from which this one was converted, if it is still a sibling."""
        name = Path(str(self._header[FOLDER])).name
        paths = self._paths(self._folder.with_name(name), mp_rank) if name not in ("", os.pardir) else []
        if paths:
            self._files.inspect(paths[0])
        return paths if paths and self._files.belongs_to_save(paths[0], self._header) else []

    @staticmethod
    def _paths(folder: Path, mp_rank: int) -> list[Path]:
        return sorted(folder.glob(RankFile.RESIDUALS.pattern(mp_rank)))

    def load(self) -> None:
        """Load the residuals into this rank's error feedback; without residuals, reset it to zero."""
        if not self._error_state.keeps_errors:
            return
        content = self._own_content or (self._rank_contents[0] if self._rank_contents else {})
        if content:
            self._warn_of_lost_errors(set(content.get("halves", ["reductions"])))
        if self._own_content:
            self._error_state.load_states(self._own_content["states"])
        elif self._rank_contents:
            whereabouts = _sharding(self._optimizer)["whereabouts"]
            self._error_state.load_errors(
                self._redistribute(whereabouts), self._rank_contents[0]["states"].get("steps", 0)
            )
        else:
            self._error_state.reset()  # errors from before the load belong to other weights
            warn_on_rank_0(
                f"{self._folder} has no residuals of reductions, so LoCo's errors start at zero. A "
                f"checkpoint saved with LoCo has files residuals_rank_*.pt. If it was converted, copy them from the "
                f"original folder, or move it next to that folder."
            )

    def _warn_of_lost_errors(self, saved: set[str]) -> None:
        """Warn of errors that start at zero, and of saved errors that are not loaded.

        If sharding has changed, reductions may also load the errors of sums.
        """
        configured, same_sharding = self._error_state.halves, bool(self._own_content)
        loaded = saved & configured if same_sharding else ({"reductions"} & configured if saved else set())
        lost = saved - loaded if same_sharding or not loaded else set()
        for kinds, outcome in ((configured - loaded, "start at zero"), (lost, "were saved, but are not loaded")):
            if kinds:
                warn_on_rank_0(
                    f"{self._folder}: errors of {' and '.join(sorted(kinds))} {outcome}: the "
                    f"configuration or the sharding has changed."
                )

    def _redistribute(self, spans: Sequence[tuple[str, int, Sequence[int]]]) -> dict[ShardSpan, Tensor]:
        """Return, for each row of this rank's gradients, its share of the gradients that all groups had not sent."""
        totals: dict[tuple[int, int], Tensor] = {}
        spans_by_name: dict[str, list[tuple[int, ShardSpan]]] = defaultdict(list)
        for name, start, run in spans:
            spans_by_name[name].append((start, ShardSpan(*run)))
        for _, run in (span for spans in spans_by_name.values() for span in spans):
            end = run.elements.stop
            previous = totals.get((run.buffer, run.row), torch.empty(0))
            if previous.numel() < end:
                totals[run.buffer, run.row] = torch.zeros(end)
        for file in self._rank_contents:
            for name, start, values in self._unsent_gradients(file):
                for first, run in spans_by_name[name]:
                    overlap = Span(first, run.numel).common(Span(start, values.numel()))
                    if overlap.numel:
                        total = overlap.shifted(run.start - first).of(totals[run.buffer, run.row])
                        total.add_(overlap.shifted(-start).of(values))
        optimizer = self._optimizer
        groups = {
            buffer: optimizer.families[optimizer.family_of_buffer(buffer)].topology.sizes.groups
            for buffer, _ in totals
        }
        return {
            ShardSpan(buffer, row, 0, total.numel()): total / groups[buffer] for (buffer, row), total in totals.items()
        }

    def _unsent_gradients(self, file: Mapping[str, Any]) -> Iterator[tuple[str, int, Tensor]]:
        """Yield a rank's unsent gradients: name of a parameter, first element, values."""
        spans: dict[tuple[int, int], list[tuple[Span, str, int]]] = defaultdict(list)
        for name, start, (buffer, row, *elements) in file["whereabouts"]:
            spans[buffer, row].append((Span(*elements), name, start))
        for run, values in self._error_state.errors_in(file["states"]):
            for span, name, start in spans[run.buffer, run.row]:
                overlap = span.common(run.elements)
                if overlap.numel:
                    yield name, start + overlap.start - span.start, overlap.shifted(-run.start).of(values)
