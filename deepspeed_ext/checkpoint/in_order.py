# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in own order for readers that know ZeRO's alone; see Note [Own order] in ``zero/flat/saved.py``.

``python -m deepspeed_ext zero-order --folder D/TAG`` puts the files of optimizer states into ZeRO's order, without a
model and without ranks: they are then what a save with ``"zero_order": true`` would have written. They are read where
they are on disk. What is written is prepared in files, too, one chunk of one state at a time: memory is needed for
no more than that.
"""

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARAM_ALIGNMENT_PADDINGS,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
    ZERO_STAGE,
)
from deepspeed.utils.zero_to_fp32 import natural_keys
from torch import Tensor

from deepspeed_ext.checkpoint.files import HEADER, checked
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.owned import sync
from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.comm.spans import Span
from deepspeed_ext.progress import followed
from deepspeed_ext.zero.flat.saved import OWN_ORDER, OWN_PARTITIONS, Place, State, under_deepspeeds_names

_OPTIMIZER = re.compile(r"(?P<before>(?:bf16_)?zero_pp_rank_)\d+_(?P<model>mp_rank_.+)_optim_states\.pt")

NewTensor = Callable[[Tensor, int], Tensor]
"""Makes a 1D tensor of zeros like another one, of a number of elements."""


def way_out(folder: str | os.PathLike[str]) -> str:
    """Return what to do with a checkpoint in own order where only ZeRO's is read."""
    return (
        f"{folder} has optimizer states in the order in which the ranks of a strategy held them "
        f"(checkpoint.zero_order false). Put them into ZeRO's order once:\n"
        f"  python -m deepspeed_ext zero-order --folder {folder}\n"
    )


class Shards:
    """The optimizer states of all ranks of a checkpoint, some of their flat buffers in own order.

    Args:
        states: of ranks, by their files, of which none is missing.

    Raises:
        CheckpointError: chunks of a flat buffer are missing.
    """

    def __init__(self, states: Mapping[Path, State]) -> None:
        self._states = states
        self._chunks: dict[tuple[str, int, int], dict[int, Path]] = defaultdict(dict)
        for path, state in states.items():
            for number, place in _placed(state):
                # Ranks that hold the same chunk have the same in it.
                self._chunks[_model_of(path), number, place["experts"]].setdefault(place["cell"], path)
        for (_, number, _), files in self._chunks.items():
            path = min(files.values())
            layout = FlatLayout(**_place(states[path], number)["layout"])
            if set(files) != set(range(layout.rows * layout.cols)):
                raise CheckpointError(
                    f"{path.parent} has {len(files)} of {layout.rows * layout.cols} chunks of parameter group "
                    f"{number}, one in {path.name}: files are missing, or of another save."
                )

    def in_zeros_order(self, path: Path, new: NewTensor) -> dict[str, Any]:
        """Return the states of a file in ZeRO's order: what this would be with ``"zero_order": true``.

        Args:
            path: of the file.
            new: makes tensors to fill.
        """
        state = self._states[path]
        base = state[BASE_OPTIMIZER_STATE]
        weights, paddings = list(state[OWN_PARTITIONS]), list(state[GROUP_PADDINGS])
        mappings, states = list(state[PARAM_SLICE_MAPPINGS]), dict(base["state"])
        for number, place in _placed(state):
            source = FlatLayout(**place["layout"])
            target = FlatLayout(place["zeros"], source.rows, source.cols)
            paddings[number], mappings[number] = place["zeros_padding"], place["zeros_mapping"]
            chunks = self._of_all_ranks(path, number, source, _weights)
            weights[number] = new(weights[number], target.chunk - paddings[number])
            _fill(weights[number], source, target, place["cell"], chunks)
            parameter = _parameter(state, number)
            for key in _sharded(states.get(parameter, {}), source):
                chunks = self._of_all_ranks(path, number, source, _state(key))
                moved = new(states[parameter][key], target.chunk)
                _fill(moved, source, target, place["cell"], chunks)
                states[parameter] = {**states[parameter], key: moved}
        return {
            **under_deepspeeds_names(state),
            SINGLE_PARTITION_OF_FP32_GROUPS: weights,
            GROUP_PADDINGS: paddings,
            PARAM_SLICE_MAPPINGS: mappings,
            BASE_OPTIMIZER_STATE: {**base, "state": states},
        }

    def weights_in_order(self, number: int) -> list[Tensor]:
        """Return the optimizer's weights of a parameter group, of one model-parallel rank, in pieces (1D) whose order
        is that of the elements in ZeRO's files, padding excluded.

        Raises:
            CheckpointError: they are experts', of which ranks have different ones.
        """
        keys = [key for key in self._chunks if key[1] == number]
        if not keys:
            return [state[OWN_PARTITIONS][number] for state in self._states.values()]
        if len(keys) > 1:
            path = min(self._chunks[keys[0]].values())
            raise CheckpointError(
                f"{path.parent} has experts of several ranks in parameter group {number}, which zero_to_fp32 puts "
                f"together in no order. Make a universal checkpoint (python -m deepspeed_ext convert)."
            )
        path = min(self._chunks[keys[0]].values())
        source = FlatLayout(**_place(self._states[path], number)["layout"])
        chunks = self._of_all_ranks(path, number, source, _weights)
        return [
            piece.columns.of(chunks[piece.row * source.cols + piece.col])
            for piece in source.pieces(Span(0, source.numel))
        ]

    def _of_all_ranks(
        self, path: Path, number: int, layout: FlatLayout, take: Callable[[State, int], Tensor | None]
    ) -> list[Tensor]:
        """Return the same of all chunks of a flat buffer, in order.

        Raises:
            CheckpointError: a file has it not, or in another size.
        """
        files = self._chunks[_model_of(path), number, _place(self._states[path], number)["experts"]]
        found = []
        for _, file in sorted(files.items()):
            chunk = take(self._states[file], number)
            if (
                chunk is None
                or chunk.shape != (layout.chunk,)
                or _place(self._states[file], number)["layout"] != (_place(self._states[path], number)["layout"])
            ):
                raise CheckpointError(f"{file} does not fit {path.name}: it has another parameter group {number}.")
            found.append(chunk.detach())
        return found


def _fill(into: Tensor, source: FlatLayout, target: FlatLayout, cell: int, chunks: Sequence[Tensor]) -> None:
    """Copy into a chunk of one layout, 1D, what it has of the chunks of another one."""
    for piece in target.cells_of(*divmod(cell, target.cols)):
        for part in source.pieces(piece.span.common(Span(0, source.numel))):
            place = part.span.shifted(piece.column - piece.span.start)
            place.of(into).copy_(part.columns.of(chunks[part.row * source.cols + part.col]))


def _placed(state: State) -> Iterator[tuple[int, Place]]:
    return ((number, place) for number, place in enumerate(state.get(OWN_ORDER) or ()) if place is not None)


def _place(state: State, number: int) -> Place:
    return dict(_placed(state))[number]


def _parameter(state: State, number: int) -> int:
    found: int = state[BASE_OPTIMIZER_STATE]["param_groups"][number]["params"][0]
    return found


def _weights(state: State, number: int) -> Tensor:
    weights: Tensor = state[OWN_PARTITIONS][number]
    return weights


def _state(key: str) -> Callable[[State, int], Tensor | None]:
    def take(state: State, number: int) -> Tensor | None:
        found: Tensor | None = state[BASE_OPTIMIZER_STATE]["state"].get(_parameter(state, number), {}).get(key)
        return found

    return take


def _sharded(states: Mapping[str, Any], layout: FlatLayout) -> list[str]:
    return [key for key, value in states.items() if isinstance(value, Tensor) and value.shape == (layout.chunk,)]


# Files ################################################################################################


def _model_of(path: Path) -> str:
    """Return which model-parallel rank's a file of optimizer states is."""
    found = _OPTIMIZER.fullmatch(path.name)
    return "" if found is None else found["model"]


def _contents(folder: Path) -> dict[Path, dict[str, Any]]:
    """Return what the files of optimizer states hold, all of one save, by their paths; their tensors stay on disk.

    Raises:
        CheckpointError: there are none, one is missing, cannot be read, or is of another save.
    """
    paths = sorted((path for path in folder.iterdir() if _OPTIMIZER.fullmatch(path.name)), key=_natural)
    if not paths:
        raise CheckpointError(f"{folder} has no files zero_pp_rank_*_optim_states.pt, of ZeRO's optimizer states.")
    contents = {path: checked(path, OPTIMIZER_STATE_DICT) for path in paths}
    counts = contents[paths[0]][OPTIMIZER_STATE_DICT][PARTITION_COUNT]
    for model in sorted({_model_of(path) for path in paths}):
        for number in range(max(counts) if isinstance(counts, list) else counts):
            path = paths[0].with_name(_OPTIMIZER.sub(rf"\g<before>{number}_{model}_optim_states.pt", paths[0].name))
            if path not in contents:
                raise CheckpointError(f"{path} is missing.")
    first, *others = contents.items()
    for path, content in others:
        if content.get(HEADER) != first[1].get(HEADER):
            raise CheckpointError(f"{path} is of another save than {first[0].name}.")
    return contents


def _natural(path: Path) -> Any:
    return natural_keys(path.name)


def put_in_zeros_order(folder: str | os.PathLike[str]) -> str:
    """Put the optimizer states of a checkpoint into ZeRO's order, as a whole or not at all; return what was done.

    All other files are kept. No run may save to the folder meanwhile.

    Args:
        folder: of the checkpoint, D/TAG; may be a link, which it stays.

    Raises:
        CheckpointError: it is no complete checkpoint, or could not be written. Nothing has been changed.
    """
    path = Path(os.path.abspath(folder))
    checkpoint = CheckpointFolder(path.parent, path.name)
    contents = _contents(path.parent / checkpoint.present_tag())
    own = [OWN_ORDER in content[OPTIMIZER_STATE_DICT] for content in contents.values()]
    if not any(own):
        return f"{path} is in ZeRO's order already: nothing has been changed."
    if not all(own):
        raise CheckpointError(f"{path} has files in own order and others, so they are not of one save.")
    shards = Shards({file: content[OPTIMIZER_STATE_DICT] for file, content in contents.items()})
    try:
        checkpoint.prepare()
        for file, content in followed(contents.items(), "putting in order", "file"):
            _write(checkpoint.staging, file, content, shards)
        checkpoint.publish(keeps_all=True)
    except BaseException as error:
        checkpoint.revert()
        if isinstance(error, CheckpointError) or not isinstance(error, Exception):
            raise
        raise CheckpointError(f"{path} could not be written, and is as it was: {error}") from error
    checkpoint.clear()
    return f"{path} is in ZeRO's order now: {len(contents)} files of optimizer states."


def _write(staging: Path, file: Path, content: Mapping[str, Any], shards: Shards) -> None:
    """Write a file in ZeRO's order into another folder."""
    with tempfile.TemporaryDirectory(dir=staging) as scratch:
        made: list[Path] = []

        def new(like: Tensor, numel: int) -> Tensor:
            made.append(Path(scratch, str(len(made))))
            return _on_disk(made[-1], like.dtype, numel)

        state = shards.in_zeros_order(file, new)
        torch.save({**content, OPTIMIZER_STATE_DICT: state}, staging / file.name)
        del state
    sync(staging / file.name)


def _on_disk(path: Path, dtype: torch.dtype, numel: int) -> Tensor:
    """Return zeros, 1D, that are in a file: where memory is short, the system writes them there."""
    if not numel:
        return torch.zeros(0, dtype=dtype)
    with path.open("wb") as file:  # so that a full disk is an error here, and not a signal when it is filled
        os.posix_fallocate(file.fileno(), 0, numel * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=numel, dtype=dtype)


# DeepSpeed's zero_to_fp32 #############################################################################


def parse_optim_states(
    parse: Callable[[Sequence[str], str], Any], files: Sequence[str], ds_checkpoint_dir: str
) -> tuple[int, int, list[list[Tensor]], Any]:
    """Return what DeepSpeed's ``parse_optim_states`` does, also of a checkpoint in own order.

    Its callers put the weights of ranks together one after the other, for each parameter group. So of own order they
    get pieces of them in the order of elements, in the place of ranks.

    Args:
        parse: DeepSpeed's, which looks for weights in ZeRO's order.
        files, ds_checkpoint_dir: DeepSpeed's.

    Raises:
        CheckpointError: it is in own order, and incomplete or with experts of several ranks.
    """
    try:
        found: tuple[int, int, list[list[Tensor]], Any] = parse(files, ds_checkpoint_dir)
        return found
    except KeyError as error:
        if error.args != (SINGLE_PARTITION_OF_FP32_GROUPS,):
            raise
        states = {Path(file): checked(file, OPTIMIZER_STATE_DICT)[OPTIMIZER_STATE_DICT] for file in files}
        if not all(OWN_ORDER in state for state in states.values()):
            raise
    first, shards = states[Path(files[0])], Shards(states)
    groups = [shards.weights_in_order(number) for number in range(len(first[OWN_PARTITIONS]))]
    pieces = [
        [group[place] if place < len(group) else group[0].new_empty(0) for group in groups]
        for place in range(max(len(files), *map(len, groups)))
    ]
    return first[ZERO_STAGE], len(files), pieces, first.get(PARAM_ALIGNMENT_PADDINGS)


# Stages of DeepSpeed's ################################################################################


def explain(error: KeyError, folder: Path) -> None:
    """Say what is wrong where one of DeepSpeed's stages has failed to load a checkpoint in own order.

    Raises:
        CheckpointError: it is one.
    """
    if error.args == (SINGLE_PARTITION_OF_FP32_GROUPS,) and any(
        OWN_ORDER in checked(path, OPTIMIZER_STATE_DICT)[OPTIMIZER_STATE_DICT]
        for path in sorted(folder.glob("*zero_pp_rank_0_*_optim_states.pt"))[:1]
    ):
        raise CheckpointError(f"{way_out(folder)}and load it again: it was loaded only in part.") from error
