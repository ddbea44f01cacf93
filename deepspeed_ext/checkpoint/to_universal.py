# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext convert``: DeepSpeed's ``ds_to_universal.py``, also for Muon and strategies' experts.

Note [Momentum in universal checkpoints]
    DeepSpeed's converter knows the states ``exp_avg`` and ``exp_avg_sq`` by name, and fails with a ``KeyError`` where
    a parameter has others; Muon's matrices have ``momentum_buffer``. Like ``exp_avg``, that is a mean of gradients. So
    it is shown to the converter as ``exp_avg`` while fragments are extracted, beside zeros of a byte each as
    ``exp_avg_sq``. By the dtype of these zeros the files are found afterwards: they are removed, and momentum gets its
    own name, ``momentum_buffer.pt``. DeepSpeed's stages 1 and 2 load states by the names of files, so they find it.
    Of AutoEP's experts, stages 1 and 2 convert nothing but fp32, with a step count: their mark is a negative number.

    The momentum of a universal checkpoint is of gradients without the loss scale, as a strategy has it.

Note [States in several files]
    With experts and os = I or N, as many of the first ranks write states as have all of them together
    (``zero/writers.py``). So dense states that fewer ranks share, or experts that fewer share, are in several files.
    DeepSpeed's converter would put all of them together. It is shown only those of the first files, and that experts
    at stage 3 are shared by as many ranks as the files say.

    Files in own order (``zero/flat/states.py``) are shown under the names that it knows: it goes by their map of
    parameters, and puts the fragments of one together by the numbers of ranks, which is the order of its elements.

Note [Whole or absent]
    DeepSpeed's converter writes into the folder that it is to make, and momentum gets its name after it has ended. A
    conversion that is killed in between would leave what looks like a universal checkpoint. So the folder is made in
    an owned one (``owned.py``). It gets its name at the end, and only then ``latest_universal`` names it.
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

from deepspeed_ext.checkpoint.converting import is_universal
from deepspeed_ext.checkpoint.experts import EXPERT_ORDER
from deepspeed_ext.checkpoint.files import HEADER, inspect, tensor_of
from deepspeed_ext.checkpoint.folder import LATEST_UNIVERSAL
from deepspeed_ext.checkpoint.owned import OwnedFolder, behind_links, replace_text
from deepspeed_ext.overrides import replaced
from deepspeed_ext.progress import followed
from deepspeed_ext.strategy import STRATEGIES, Placement
from deepspeed_ext.zero.flat.states import under_deepspeeds_names
from deepspeed_ext.zero.momentum import MOMENTUM_SCALE, unscaled
from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.native_experts import EXPERTS
from deepspeed_ext.zero.sharded.partitions import PLACEMENT

_SHOWN_AS, _BESIDE, _STEP = "exp_avg", "exp_avg_sq", "step"
_MARK = torch.uint8  # no moment has this dtype
_MARK_OF_EXPERTS = -1.0  # no mean of squares is negative

# Bound before ``convert`` replaces them. Worker processes find ours by name in this module, and these in DeepSpeed's.
_extract_replicated = ds_to_universal.extract_zero_shards
_extract_partitioned = ds_to_universal.extract_zero_shards_stage3
_consolidate = ds_to_universal._consolidate_zero3_autoep_expert_states
_save_rest = ds_to_universal._save_optimizer_state


def convert(arguments: argparse.Namespace) -> None:
    """Convert a checkpoint; see Note [Whole or absent].

    Args:
        arguments: DeepSpeed's, of its own ``main``.

    Raises:
        ValueError: the momentum is that of DeepSpeed's stages and cannot be told apart, experts cannot be converted,
            or the name is taken by something else; says what to do.
    """
    source, target = Path(arguments.input_folder), Path(arguments.output_folder)
    _refuse_experts(source)
    _require_replaceable(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    owned = OwnedFolder(behind_links(target))
    owned.create()
    try:
        _make(argparse.Namespace(**{**vars(arguments), "output_folder": str(owned.made)}))
        owned.put_in_place()
    finally:
        owned.remove()
    replace_text(target.with_name(LATEST_UNIVERSAL), target.name)


def _require_replaceable(target: Path) -> None:
    """Refuse to replace anything but another universal checkpoint.

    Raises:
        ValueError: there is something else.
    """
    if target.exists() and not (target.is_dir() and (is_universal(target) or not any(target.iterdir()))):
        raise ValueError(f"{target} is there, and is no universal checkpoint. Name another --output_folder.")


def _make(arguments: argparse.Namespace) -> None:
    """Convert into a folder that nobody sees; see Note [Momentum in universal checkpoints]."""
    with replaced(
        ds_to_universal,
        extract_zero_shards=extract_replicated,
        extract_zero_shards_stage3=extract_partitioned,
        _consolidate_zero3_autoep_expert_states=consolidate_experts,
        _save_optimizer_state=save_rest,
        tqdm=SimpleNamespace(tqdm=partial(followed, what="converting", unit="part")),  # theirs fills logs, too
    ):
        ds_to_universal.main(arguments)
    moments = sorted(Path(arguments.output_folder, "zero").glob(f"*/{_BESIDE}.pt"))
    for path in followed(moments, "looking for momentum", "parameter"):
        if _is_mark(tensor_of(inspect(path))):
            path.with_name(f"{_SHOWN_AS}.pt").rename(path.with_name(f"{MOMENTUM}.pt"))
            path.unlink()
            path.with_name(f"{_STEP}.pt").unlink(missing_ok=True)


def _is_mark(moment: Tensor) -> bool:
    return moment.dtype == _MARK or bool((moment.flatten()[:1] == _MARK_OF_EXPERTS).any())


def _refuse_experts(folder: Path) -> None:
    """Refuse what DeepSpeed's converter fails with, or takes for something else, before it begins.

    Raises:
        ValueError: experts are frozen; or neighboring ranks have the same ones, of which each writes states.
    """
    way_out = "Load it with the strategy, group size and expert-parallel size that saved it."
    files = (*folder.glob("mp_rank_*_model_states.pt"), *folder.glob("zero_pp_rank_*_model_states.pt"))
    state = inspect(min(files)) if files else {}
    prefixes = tuple(f"{layer['expert_key_prefix']}." for layer in state.get(AUTOEP_LAYERS_KEY) or ())
    if not prefixes and (of_layers := sorted(folder.glob("layer_*_expert_*"))):
        raise ValueError(
            f"{folder} has experts of DeepSpeed's MoE layers ({of_layers[0].name}), for which universal checkpoints "
            f"have no place. {way_out}"
        )
    frozen = [name for name in state.get(FROZEN_PARAM_SHAPES) or () if name.startswith(prefixes)]
    if frozen:
        raise ValueError(f"{folder} has frozen experts of AutoEP, such as {frozen[0]}, not to be converted. {way_out}")
    header = state.get(HEADER) or {}
    several = STRATEGIES[header["strategy"]].os != Placement.G if header.get("strategy") else False
    if prefixes and header.get(EXPERT_ORDER) and several:
        raise ValueError(
            f"{folder} was saved with use_data_before_expert_parallelism and {header['strategy']}, whose experts' "
            f"states are in several files each, and cannot be converted. {way_out}"
        )


def extract_replicated(dir: str, ds_checkpoint: Any, indices_3D: tuple[int, int, int]) -> None:
    """Extract a rank's fragments at stages 1 and 2. Arguments are those of DeepSpeed's ``extract_zero_shards``."""
    with _shown_when_loaded(lambda state: without_repeated(shown(state), indices_3D[2])):
        _extract_replicated(dir, ds_checkpoint, indices_3D)


def extract_partitioned(
    optim_files_grid: Any,
    param_shapes_grid: Any,
    dp_degree: int,
    temp_dir: str,
    indices: tuple[int, int],
    exclude_param_names: Any = None,
) -> None:
    """Extract a rank's fragments at stage 3. Arguments are those of DeepSpeed's ``extract_zero_shards_stage3``."""
    tensor_parallel, number = indices
    state = inspect(optim_files_grid[tensor_parallel][number])[OPTIMIZER_STATE_DICT]
    placed = zip(state.get(PLACEMENT) or (), param_shapes_grid[tensor_parallel], strict=False)
    repeated = {name for placement, shapes in placed if number >= placement["partition_count"] for name in shapes}
    with _shown_when_loaded(shown):
        _extract_partitioned(
            optim_files_grid,
            param_shapes_grid,
            dp_degree,
            temp_dir,
            indices,
            exclude_param_names={*(exclude_param_names or ()), *repeated},
        )


def consolidate_experts(output_dir: str, model_files: list[str], optim_files: list[str]) -> None:
    """Put experts together at stage 3. Arguments are those of DeepSpeed's function."""
    load = torch.load
    placements = inspect(optim_files[0])[OPTIMIZER_STATE_DICT].get(PLACEMENT) or ()
    shares = {placement["partition_count"] for placement in placements if EXPERTS in placement["families"]}

    def load_shown(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        if AUTOEP_LAYERS_KEY in found and len(shares) == 1:
            (count,) = shares
            layers = [{**layer, "expert_data_parallel_world_size": count} for layer in found[AUTOEP_LAYERS_KEY]]
            found = {**found, AUTOEP_LAYERS_KEY: layers}
        if OPTIMIZER_STATE_DICT in found:
            found = {**found, OPTIMIZER_STATE_DICT: shown(found[OPTIMIZER_STATE_DICT])}
        return found

    with replaced(torch, load=load_shown):
        _consolidate(output_dir, model_files, optim_files)


def save_rest(args: Any, ds_checkpoint: Any) -> None:
    """Save what states of stages 1 and 2 have beside parameters. Arguments are those of DeepSpeed's function."""
    with _shown_when_loaded(under_deepspeeds_names):
        _save_rest(args, ds_checkpoint)


@contextmanager
def _shown_when_loaded(show: Callable[[Mapping[str, Any]], dict[str, Any]]) -> Iterator[None]:
    """Show a rank's state dict otherwise where its file is loaded within this context."""
    load = torch.load

    def load_shown(*args: Any, **kwargs: Any) -> Any:
        found = load(*args, **kwargs)
        return {**found, OPTIMIZER_STATE_DICT: show(found[OPTIMIZER_STATE_DICT])}

    with replaced(torch, load=load_shown):
        yield


def without_repeated(state: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a rank's state dict of stages 1 and 2 without the parameters that are in the files of earlier ranks.

    Args:
        number: of the rank.
    """
    base, counts = state[BASE_OPTIMIZER_STATE], state[PARTITION_COUNT]
    if not isinstance(base, dict):
        return dict(state)
    shown_of = list(state[PARAM_SLICE_MAPPINGS])
    for group, row in enumerate(base["param_groups"]):
        ranks = counts[group] if isinstance(counts, list) else counts
        if not row.get("moe", False) and number >= ranks:
            shown_of[group] = {}
    return {**state, PARAM_SLICE_MAPPINGS: shown_of}


def shown(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a rank's state dict under DeepSpeed's names, with momentum as ``exp_avg``, beside marked zeros as
    ``exp_avg_sq``.

    Args:
        state: as ``state_dict()`` of a ZeRO optimizer, ours or DeepSpeed's, gives it.

    Raises:
        ValueError: it cannot be told what the momentum is of.
    """
    state = under_deepspeeds_names(state)
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
            mark, more = torch.full((1,), _MARK_OF_EXPERTS), {_STEP: 0}
        else:
            mark, more = torch.zeros(1, dtype=_MARK), {}
        states[number] = {_SHOWN_AS: moment, _BESIDE: mark.expand(moment.numel()), **more}
    return {**state, key: {**base, "state": {**base["state"], **states}}}


def _momentum(state: Mapping[str, Any], saved: Mapping[str, Any], numel: int) -> Tensor:
    """Return the momentum (1D, fp32) of a flat shard, of gradients without the loss scale; zeros if there is none."""
    momentum = saved.get(MOMENTUM)
    if momentum is None:  # before the first step, or where a rank has nothing of the parameter group
        return torch.zeros(numel)
    scaled = MOMENTUM_SCALE not in state and getattr(state.get(LOSS_SCALER), "cur_scale", 1.0) != 1
    if scaled or momentum.numel() != numel:
        what = "has a loss scale or not" if scaled else f"is of {momentum.numel()} elements, expected {numel}"
        raise ValueError(
            f"The checkpoint is of DeepSpeed's own Muon, whose momentum {what}, depending on optimizer offload. Load "
            f"it with a paro_strategy on as many ranks (NGG for stages 1 and 2, GGG for stage 3), save it, and "
            f"convert that."
        )
    return unscaled(state, momentum, offloaded=False).float()
