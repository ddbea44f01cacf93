# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints (arXiv:2406.18820): a folder for each parameter, which any strategy and DeepSpeed's ZeRO load.

Made by DeepSpeed's ``ds_to_universal.py``. What that writes depends on what had saved the checkpoint, and DeepSpeed
0.19.8 reads it back only where parameters were cut (stage 3) before and after, or neither before nor after:

============================  ======================================  ======================================
                              from stage 1 or 2 (p = N)               from stage 3 (p = I or G)
============================  ======================================  ======================================
files of model states         ``mp_rank_*_model_states.pt``           ``zero_pp_rank_*_model_states.pt``
files of a parameter          dicts                                   flat tensors, unless tensor parallel
step count                    ``step.pt`` of each parameter           ``optimizer_state.pt``, of the optimizer
``optimizer_state.pt``        has ``ds_version``                      has not
frozen parameters             whole, in the model states              cut, in the model states of all ranks
============================  ======================================  ======================================

So it is read here, for our optimizers, and for DeepSpeed's where its own code cannot. Also mended here: DeepSpeed's
stage 3 gives all parameter groups the hyperparameters of the first and all sub-groups one step tensor; its stages 1
and 2 fail where a rank holds nothing of a parameter group; and neither loads buffers or frozen parameters.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    BUFFER_NAMES,
    DS_AUTOTP_UC_META,
    DS_VERSION,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM,
    PARAM_GROUPS,
    ZERO_STAGE,
)
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size
from deepspeed.utils.tensor_fragment import map_to_flat_opt_states
from deepspeed.utils.zero_to_fp32 import natural_keys
from torch import Tensor

from deepspeed_ext.checkpoint.files import HEADER, CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError

_WEIGHTS, _STEP = "fp32", "step"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # all that ds_to_universal.py converts
_STATES = "optimizer_state.pt"


def model_state_files(folder: Path, model_parallel_rank: int = 0) -> list[Path]:
    """Files of model states of one model-parallel rank, in the order of data-parallel ranks."""
    names = folder.glob(f"*mp_rank_{model_parallel_rank:02d}_model_states.pt")
    return sorted(names, key=lambda path: natural_keys(path.name))


def other_files(pattern: str, folder: Path) -> list[str]:
    """What to take for model states where DeepSpeed's pattern for its stage finds none: those of the other stages.

    Args:
        pattern: base name of a file, of which ``zero_pp_rank_<n>_`` is missing or too much.
    """
    stages12 = re.sub(r"^zero_pp_rank_\d+_", "", pattern)
    wanted = f"zero_pp_rank_0_{pattern}" if stages12 == pattern else stages12
    return sorted(str(path) for path in folder.glob(wanted))


def global_states(folder: str | Path) -> dict[str, Any]:
    """What is not of one parameter: loss scale, parameter groups, step counts. Tensors stay on disk."""
    path = Path(folder) / "zero" / _STATES
    states: dict[str, Any] = torch.load(path, map_location="cpu", mmap=True, weights_only=False)
    return states


def beyond_stock(stage3: bool, folder: str | Path) -> bool:
    """Whether DeepSpeed's own ZeRO is to load it as ours does: a strategy of ours, or another stage, has saved it."""
    files = model_state_files(Path(folder))
    if not files or not Path(folder, "zero", _STATES).is_file():
        return False
    saved = global_states(folder).get(ZERO_STAGE)
    if saved is not None and (int(saved) == 3) != stage3:
        return True
    return HEADER in torch.load(files[0], map_location="cpu", mmap=True, weights_only=False)


# Checking #########################################################################################


def check(engine: Any, folder: Path, files: CheckpointFiles, states: bool) -> None:
    """Check this rank's share of the files.

    Raises:
        CheckpointError: one is missing or cannot be read, or is of another model.
    """
    found = files.inspect(str(folder / "zero" / _STATES))
    groups = engine.optimizer.optimizer.param_groups
    if states and len(found[PARAM_GROUPS]) != len(groups):
        raise CheckpointError(f"{folder} has {len(found[PARAM_GROUPS])} parameter groups, expected {len(groups)}.")
    parameters = {
        engine.param_names[param]: param for param in engine.module.parameters() if is_optimized_parameter(param)
    }
    for name in sorted(parameters)[dist.get_rank() :: dist.get_world_size()]:
        expected = _numels(parameters[name], engine)
        for path in [folder / "zero" / name / f"{_WEIGHTS}.pt", *_moment_files(folder, name, states)]:
            saved = files.inspect(str(path))
            numel = (saved[PARAM] if isinstance(saved, dict) else saved).numel()
            if expected and numel not in expected:
                raise CheckpointError(f"{path} has {numel} elements, expected {' or '.join(map(str, expected))}.")
    _check_untrained(
        engine, [files.inspect(str(path)) for path in model_state_files(folder, engine.checkpoint_mp_rank)]
    )


def _check_untrained(engine: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Whether ``load_untrained`` can do it."""
    frozen = [(name, p) for name, p in engine.module.named_parameters() if not is_optimized_parameter(p)]
    if not states and (frozen or any(True for _ in engine.module.buffers())):
        raise CheckpointError(
            f"the checkpoint has no model states of model-parallel rank {engine.checkpoint_mp_rank}: buffers and "
            f"frozen parameters are loaded only into as many model-parallel ranks as have saved them."
        )
    for name, param in frozen:
        saved = _frozen(name, states)
        numel = getattr(param, "ds_numel", param.numel())
        if saved is not None and saved.numel() != numel:
            raise CheckpointError(f"the frozen parameter {name} has {saved.numel()} elements, expected {numel}.")


def _numels(param: Any, engine: Any) -> set[int]:
    """Elements that the files of a parameter may have; empty where only DeepSpeed's AutoTP knows."""
    if hasattr(param, DS_AUTOTP_UC_META):
        return set()
    if hasattr(param, "ds_numel"):
        return {param.ds_numel}
    return {param.numel(), param.numel() * engine.mp_world_size}


def _moment_files(folder: Path, name: str, states: bool) -> list[Path]:
    return [folder / "zero" / name / f"{moment}.pt" for moment in (_MOMENTS if states else ())]


# Loading ##########################################################################################


def load(optimizer: Any, folder: str, states: bool, from_fp32: bool) -> None:
    """Load into a ZeRO optimizer, ours or DeepSpeed's.

    Args:
        optimizer: of stage 1, 2 or 3.
        folder: of the checkpoint.
        states: whether to load the optimizer's states, loss scale and hyperparameters; else weights only.
        from_fp32: without states, whether the optimizer's weights are those saved, or the model's, which may have
            16 bits.
    """
    saved = global_states(folder)
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    if states and stage3:
        optimizer._load_global_state_stage3(saved)
    elif states:
        optimizer._load_global_state({DS_VERSION: deepspeed.__version__, **saved})
    (_load_partitioned if stage3 else _load_replicated)(optimizer, Path(folder) / "zero", saved, states)
    if states:
        for group, loaded in zip(optimizer.optimizer.param_groups, saved[PARAM_GROUPS], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
    elif not from_fp32:
        optimizer._restore_from_bit16_weights()


def _load_replicated(optimizer: Any, zero: Path, saved: Mapping[str, Any], states: bool) -> None:
    """Stages 1 and 2: flat buffers, of which this rank holds a chunk with pieces of parameters."""
    for number, group in enumerate(optimizer.optimizer.param_groups):
        params, flat = optimizer.bit16_groups[number], group["params"][0]
        for param in params:
            mapping = param._hp_mapping
            if mapping is not None:
                moments = mapping.optim_fragment
                _load_piece(param, zero / optimizer.param_names[param], optimizer.mpu)
                if not states:
                    mapping.optim_fragment = moments
        if states:
            map_to_flat_opt_states(flat, params, optimizer.optimizer.state, _MOMENTS)
            _set_step(optimizer.optimizer.state[flat], zero / optimizer.param_names[params[0]], saved)
        rank = dist.get_rank(group=optimizer.real_dp_process_group[number])
        optimizer.parallel_partitioned_bit16_groups[number][rank].data.copy_(flat.data)


def _load_piece(param: Any, folder: Path, mpu: Any) -> None:
    """Load what this rank holds of a parameter: the weights into the flat buffer, moments into the mapping."""
    weights = torch.load(folder / f"{_WEIGHTS}.pt", map_location="cpu", mmap=True, weights_only=False)
    if isinstance(weights, dict):
        # How tensor parallelism cuts a parameter is DeepSpeed's to know.
        rank, ranks = bwc_tensor_model_parallel_rank(mpu=mpu), bwc_tensor_model_parallel_world_size(mpu=mpu)
        param.load_hp_checkpoint_state(str(folder), rank, ranks)
        return
    mapping = param._hp_mapping
    start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    piece = slice(start, start + numel)
    mapping.get_hp_fragment().data.copy_(weights.flatten()[piece])
    mapping.optim_fragment = {
        moment: torch.load(folder / f"{moment}.pt", map_location="cpu", mmap=True, weights_only=False).flatten()[piece]
        for moment in _MOMENTS
    }


def _load_partitioned(optimizer: Any, zero: Path, saved: Mapping[str, Any], states: bool) -> None:
    """Stage 3: sub-groups of chunks of parameters."""
    for params, flat, model in zip(
        optimizer.fp16_groups,
        optimizer.fp32_partitioned_groups_flat,
        optimizer.fp16_partitioned_groups_flat,
        strict=True,
    ):
        folders = [(param, zero / optimizer.param_names[param]) for param in params]
        for key in (_WEIGHTS, *_MOMENTS) if states else (_WEIGHTS,):
            pieces = [optimizer.load_hp_checkpoint_state(str(folder), key, param=param) for param, folder in folders]
            loaded = torch.cat(pieces).to(flat)
            if key == _WEIGHTS:
                flat.data.copy_(loaded)
                model.data.copy_(loaded)
            else:
                optimizer.optimizer.state[flat][key] = loaded
        if states:
            _set_step(optimizer.optimizer.state[flat], folders[0][1], saved)


def _set_step(state: dict[str, Any], folder: Path, saved: Mapping[str, Any]) -> None:
    """Set the step count of one of the optimizer's tensors; where it is a tensor, each gets its own."""
    path = folder / f"{_STEP}.pt"
    if path.exists():
        step = torch.load(path, map_location="cpu", weights_only=False)
    else:
        step = next(iter(saved.get(OPTIMIZER_STATE_DICT, {}).get("state", {}).values()), {}).get(_STEP)
    if step is not None:
        state[_STEP] = step.clone() if isinstance(step, Tensor) else step


# What no optimizer holds ##########################################################################


def load_untrained(engine: Any, states: Sequence[Mapping[str, Any]]) -> None:
    """Load buffers and frozen parameters into the model, this rank's chunk of those that are cut.

    Before DeepSpeed's own load, which gathers parameters where they are wanted whole.

    Args:
        engine: ours or DeepSpeed's.
        states: of ``model_state_files``.
    """
    if not states:
        return
    module = states[0]["module"]
    buffers = {name: module[name] for name in states[0][BUFFER_NAMES] if name in module}
    engine.module.load_state_dict(buffers, strict=False)
    for name, param in engine.module.named_parameters():
        whole = None if is_optimized_parameter(param) else _frozen(name, states)
        if whole is None:  # trained, or saved with exclude_frozen_parameters
            continue
        if hasattr(param, "ds_id"):
            chunk = param.ds_tensor.ds_numel
            mine = whole.flatten()[dist.get_rank(group=param.ds_process_group) * chunk :][:chunk]
            param.ds_tensor.data[: mine.numel()].copy_(mine)
        else:
            param.data.copy_(whole.view_as(param))


def _frozen(name: str, states: Sequence[Mapping[str, Any]]) -> Tensor | None:
    """A parameter that was not trained, whole, from the model states of all ranks that hold a part."""
    if name in states[0]["module"] and states[0]["module"][name].numel():
        return states[0]["module"][name]  # stage 3 saves the module with parameters that have no elements
    fragments = [(state.get(FROZEN_PARAM_FRAGMENTS) or {}).get(name) for state in states]
    if any(fragment is None for fragment in fragments):
        return None
    whole = torch.cat([fragment.flatten() for fragment in fragments])
    return whole[: states[0][FROZEN_PARAM_SHAPES][name].numel()]
