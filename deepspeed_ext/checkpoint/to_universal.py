# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext convert``: DeepSpeed's ``ds_to_universal.py``, extended for Muon and strategies' experts.

Note [Momentum in universal checkpoints]
    DeepSpeed's converter expects the states ``exp_avg`` and ``exp_avg_sq`` by name. For other states, such as the
    ``momentum_buffer`` of Muon's matrices, it fails with a ``KeyError``. Like ``exp_avg``, momentum is a mean of
    gradients. So while fragments are extracted, the converter reads it as ``exp_avg``, with one-byte zeros as
    ``exp_avg_sq``. Afterwards, the dtype of these zeros identifies their files: they are removed, and momentum is
    renamed to ``momentum_buffer.pt``. DeepSpeed's stages 1 and 2 load states by file name, so they find it. For
    AutoEP's experts, stages 1 and 2 convert only fp32, and need a step count: there the mark is a negative number.

    In universal checkpoints, momentum has no loss scale, as in a strategy's optimizer.

Note [States in several files]
    With experts and os = I or N, enough of the first ranks write states to cover all of them
    (``zero/checkpoint_ranks.py``). So dense states, or experts, that are sharded over fewer ranks are repeated in
    several files. DeepSpeed's converter would concatenate all copies. So it is given only those in the first files,
    and at stage 3 the number of ranks that share experts according to the files.

    It reads files in own order (``zero/flat/states.py``) under DeepSpeed's names. It uses their map of parameters, and
    concatenates a parameter's fragments by rank number, which is the order of its elements.

Note [Atomic conversion]
    DeepSpeed's converter writes directly into its output folder, and momentum is renamed after it has ended. If a
    conversion were killed in between, the output would look like a universal checkpoint. So the output is an owned
    folder (``owned_folder.py``). It is renamed at the end, and only then does ``latest_universal`` name it.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.checkpoint import ds_to_universal
from deepspeed.checkpoint.constants import (
    AUTOEP_LAYERS_KEY,
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    FROZEN_PARAM_SHAPES,
    GROUP_PADDINGS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from torch import Tensor

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.conversion import is_universal
from deepspeed_ext.checkpoint.experts import EXPERT_ORDER
from deepspeed_ext.checkpoint.files import HEADER, inspect, tensor_of
from deepspeed_ext.checkpoint.folder import LATEST_UNIVERSAL, CheckpointError
from deepspeed_ext.checkpoint.owned_folder import OwnedFolder, replace_text, resolve_links
from deepspeed_ext.checkpoint.trust import is_trusted, restrict_loads
from deepspeed_ext.console import track_progress
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.strategy import STRATEGIES, Placement, hyphenate
from deepspeed_ext.zero.families import EXPERTS
from deepspeed_ext.zero.flat.states import with_stock_names
from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.saved_states import MOMENTUM_SCALE, unscaled_momentum
from deepspeed_ext.zero.sharded.partitions import PLACEMENT

_FIRST_MOMENT, _SECOND_MOMENT, _STEP = "exp_avg", "exp_avg_sq", "step"
_MARK = torch.uint8  # no moment has this dtype
_EXPERT_MARK = -1.0  # no mean of squares is negative

# Bound before ``convert`` replaces them. Worker processes import replacements from this module by name, and these from
# DeepSpeed's.
_extract_replicated = ds_to_universal.extract_zero_shards
_extract_partitioned = ds_to_universal.extract_zero_shards_stage3
_consolidate = ds_to_universal._consolidate_zero3_autoep_expert_states
_save_other_states = ds_to_universal._save_optimizer_state


def convert(arguments: argparse.Namespace) -> None:
    """Convert a checkpoint; see Note [Atomic conversion].

    Args:
        arguments: as for DeepSpeed's ``main``.

    Raises:
        ValueError: the momentum is from DeepSpeed's stages and ambiguous, experts cannot be converted, the name is
            taken, or a file has a class that may not be loaded; the message says what to do.
    """
    try:
        with restrict_loads(getattr(arguments, "trusted", False)):
            _convert(arguments)
    except CheckpointError as error:
        raise ValueError(str(error)) from error


def _convert(arguments: argparse.Namespace) -> None:
    source, target = Path(arguments.input_folder), Path(arguments.output_folder)
    _refuse_experts(source)
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    owned = OwnedFolder(resolve_links(target))
    owned.create()
    try:
        _convert_into_folder(argparse.Namespace(**{**vars(arguments), "output_folder": str(owned.staging)}))
        digests.record_all(owned.staging)
        owned.publish()
    finally:
        owned.remove()
    replace_text(target.with_name(LATEST_UNIVERSAL), target.name)  # only now: the folder is complete


def _require_replaceable(target: Path) -> None:
    """Refuse to replace anything except a universal checkpoint or an empty folder.

    Raises:
        ValueError: the target is something else.
    """
    if target.exists() and not (target.is_dir() and (is_universal(target) or not any(target.iterdir()))):
        raise ValueError(f"{target} exists, and is not a universal checkpoint. Choose another --output_folder.")


def _convert_into_folder(arguments: argparse.Namespace) -> None:
    """Convert into a hidden folder; see Note [Momentum in universal checkpoints]."""
    with replace_attributes(
        ds_to_universal,
        extract_zero_shards=partial(extract_replicated, trusted=is_trusted()),
        extract_zero_shards_stage3=partial(extract_partitioned, trusted=is_trusted()),
        _consolidate_zero3_autoep_expert_states=consolidate_experts,
        _save_optimizer_state=save_other_states,
        tqdm=SimpleNamespace(tqdm=partial(track_progress, label="converting", unit="part")),  # tqdm also floods logs
    ):
        ds_to_universal.main(arguments)
    moments = sorted(Path(arguments.output_folder, "zero").glob(f"*/{_SECOND_MOMENT}.pt"))
    for path in track_progress(moments, "looking for momentum", "parameter"):
        if _is_mark(tensor_of(inspect(path))):
            path.with_name(f"{_FIRST_MOMENT}.pt").rename(path.with_name(f"{MOMENTUM}.pt"))
            path.unlink()
            path.with_name(f"{_STEP}.pt").unlink(missing_ok=True)


def _is_mark(moment: Tensor) -> bool:
    return moment.dtype == _MARK or bool((moment.flatten()[:1] == _EXPERT_MARK).any())


def _refuse_experts(folder: Path) -> None:
    """Refuse checkpoints that DeepSpeed's converter would fail on or misread, before it starts.

    Raises:
        ValueError: experts are of DeepSpeed's MoE layers, or frozen; or neighboring ranks have the same experts and
            each writes their states.
    """
    way_out = "Load it with the strategy, group size and expert-parallel size that saved it."
    files = (*folder.glob("mp_rank_*_model_states.pt"), *folder.glob("zero_pp_rank_*_model_states.pt"))
    state = inspect(min(files)) if files else {}
    prefixes = tuple(f"{layer['expert_key_prefix']}." for layer in state.get(AUTOEP_LAYERS_KEY) or ())
    if not prefixes and (expert_files := sorted(folder.glob("layer_*_expert_*"))):
        raise ValueError(
            f"{folder} has experts of DeepSpeed's MoE layers ({expert_files[0].name}), which universal checkpoints do "
            f"not support. {way_out}"
        )
    frozen = [name for name in state.get(FROZEN_PARAM_SHAPES) or () if name.startswith(prefixes)]
    if frozen:
        raise ValueError(
            f"{folder} has frozen AutoEP experts, such as {frozen[0]}, which cannot be converted. {way_out}"
        )
    header = state.get(HEADER) or {}
    several = STRATEGIES[header["strategy"]].os != Placement.G if header.get("strategy") else False
    if prefixes and header.get(EXPERT_ORDER) and several:
        raise ValueError(
            f"{folder} was saved with use_data_before_expert_parallelism and {hyphenate(header['strategy'])}, whose "
            f"experts' states are in several files each, and cannot be converted. {way_out}"
        )


def extract_replicated(dir: str, ds_checkpoint: Any, indices_3D: tuple[int, int, int], trusted: bool = False) -> None:
    """Extract a rank's fragments at stages 1 and 2. Arguments are those of DeepSpeed's ``extract_zero_shards``."""
    transform = _transform_loaded_states(lambda state: omit_repeated(present_momentum_as_adam(state), indices_3D[2]))
    with restrict_loads(trusted), transform:  # worker processes may be spawned
        _extract_replicated(dir, ds_checkpoint, indices_3D)


def extract_partitioned(
    optim_files_grid: Any,
    param_shapes_grid: Any,
    dp_degree: int,
    temp_dir: str,
    indices: tuple[int, int],
    exclude_param_names: Any = None,
    trusted: bool = False,
) -> None:
    """Extract a rank's fragments at stage 3. Arguments are those of DeepSpeed's ``extract_zero_shards_stage3``."""
    tensor_parallel, number = indices
    with restrict_loads(trusted):
        state = inspect(optim_files_grid[tensor_parallel][number])[OPTIMIZER_STATE_DICT]
    placed_shapes = zip(state.get(PLACEMENT) or (), param_shapes_grid[tensor_parallel], strict=False)
    repeated = {
        name for placement, shapes in placed_shapes if number >= placement["partition_count"] for name in shapes
    }
    with restrict_loads(trusted), _transform_loaded_states(present_momentum_as_adam):
        _extract_partitioned(
            optim_files_grid,
            param_shapes_grid,
            dp_degree,
            temp_dir,
            indices,
            exclude_param_names={*(exclude_param_names or ()), *repeated},
        )


def consolidate_experts(output_dir: str, model_files: list[str], optim_files: list[str]) -> None:
    """Consolidate experts at stage 3. Arguments are those of DeepSpeed's function."""
    load = torch.load
    placements = inspect(optim_files[0])[OPTIMIZER_STATE_DICT].get(PLACEMENT) or ()
    counts = {placement["partition_count"] for placement in placements if EXPERTS in placement["families"]}

    def load_transformed(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        if AUTOEP_LAYERS_KEY in state and len(counts) == 1:
            (count,) = counts
            layers = [{**layer, "expert_data_parallel_world_size": count} for layer in state[AUTOEP_LAYERS_KEY]]
            state = {**state, AUTOEP_LAYERS_KEY: layers}
        if OPTIMIZER_STATE_DICT in state:
            state = {**state, OPTIMIZER_STATE_DICT: present_momentum_as_adam(state[OPTIMIZER_STATE_DICT])}
        return state

    with replace_attributes(torch, load=load_transformed):
        _consolidate(output_dir, model_files, optim_files)


def save_other_states(args: Any, ds_checkpoint: Any) -> None:
    """Save the states of stages 1 and 2 that belong to no parameter. Arguments are those of DeepSpeed's function."""
    with _transform_loaded_states(with_stock_names):
        _save_other_states(args, ds_checkpoint)


@contextmanager
def _transform_loaded_states(transform: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Apply ``transform`` to a rank's state dict whenever its file is loaded within this context."""
    load = torch.load

    def load_transformed(*args: Any, **kwargs: Any) -> Any:
        state = load(*args, **kwargs)
        return {**state, OPTIMIZER_STATE_DICT: transform(state[OPTIMIZER_STATE_DICT])}

    with replace_attributes(torch, load=load_transformed):
        yield


def omit_repeated(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a rank's state dict of stages 1 and 2 without the parameters in files of earlier ranks."""
    base, counts = state[BASE_OPTIMIZER_STATE], state[PARTITION_COUNT]
    if not isinstance(base, dict):
        return dict(state)
    mappings = list(state[PARAM_SLICE_MAPPINGS])
    for group, row in enumerate(base["param_groups"]):
        ranks = counts[group] if isinstance(counts, list) else counts
        if not row.get("moe", False) and number >= ranks:
            mappings[group] = {}
    return {**state, PARAM_SLICE_MAPPINGS: mappings}


def present_momentum_as_adam(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's state dict under DeepSpeed's names, with momentum as ``exp_avg`` and a mark as ``exp_avg_sq``.

    Args:
        state: the ``state_dict()`` of a ZeRO optimizer, with or without a strategy.

    Raises:
        ValueError: the scale or the layout of momentum is ambiguous.
    """
    state = with_stock_names(state)
    stage3 = BASE_OPTIMIZER_STATE not in state
    key = OPTIMIZER_STATE_DICT if stage3 else BASE_OPTIMIZER_STATE
    flats = state[FP32_FLAT_GROUPS if stage3 else SINGLE_PARTITION_OF_FP32_GROUPS]
    paddings = [0] * len(flats) if stage3 else state[GROUP_PADDINGS]
    base = state[key]
    groups = base["param_groups"] if isinstance(base, dict) else ()
    muon = [(number, group) for group in groups if group.get("use_muon", False) for number in group["params"]]
    if not muon:
        return state
    states: dict[int, dict[str, Any]] = {}
    for number, group in muon:
        moment = _momentum(state, base["state"].get(number, {}), flats[number].numel() + paddings[number])
        if group.get("moe", False) and not stage3:
            mark, extra = torch.full((1,), _EXPERT_MARK), {_STEP: 0}
        else:
            mark, extra = torch.zeros(1, dtype=_MARK), {}
        states[number] = {_FIRST_MOMENT: moment, _SECOND_MOMENT: mark.expand(moment.numel()), **extra}
    return {**state, key: {**base, "state": {**base["state"], **states}}}


def _momentum(state: Mapping[str, Any], saved: Mapping[str, Any], numel: int) -> Tensor:
    """Return the momentum (1D, fp32) of a flat shard, without the loss scale; zeros if there is none."""
    momentum = saved.get(MOMENTUM)
    if momentum is None:  # before the first step, or on a rank without elements of the parameter group
        return torch.zeros(numel)
    scaled = MOMENTUM_SCALE not in state and getattr(state.get(LOSS_SCALER), "cur_scale", 1.0) != 1
    if scaled or momentum.numel() != numel:
        problem = "has a loss scale or not" if scaled else f"is of {momentum.numel()} elements, expected {numel}"
        raise ValueError(
            f"The checkpoint is of DeepSpeed's own Muon, whose momentum {problem}, depending on optimizer offload. "
            f"Load it with a paro_strategy on as many ranks (N-G-G for stages 1 and 2, G-G-G for stage 3), save it, "
            f"and convert that."
        )
    return unscaled_momentum(state, momentum, offloaded=False).float()
