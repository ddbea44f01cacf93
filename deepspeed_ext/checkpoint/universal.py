# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Universal checkpoints (arXiv:2406.18820): a folder per parameter, which any strategy and DeepSpeed's ZeRO can load.

DeepSpeed's ``ds_to_universal.py`` writes them. Its output depends on the stage that saved the checkpoint. DeepSpeed
0.19.8 loads it only if parameters are partitioned (stage 3) in both runs, or in neither:

============================  ======================================  ======================================
                              from stage 1 or 2 (p = N)               from stage 3 (p = I or G)
============================  ======================================  ======================================
files of model states         ``mp_rank_*_model_states.pt``           ``zero_pp_rank_*_model_states.pt``
files of a parameter          dicts                                   flat tensors, unless tensor parallel
step count                    ``step.pt`` of each parameter           ``optimizer_state.pt``, of the optimizer
``optimizer_state.pt``        has ``ds_version``                      has no ``ds_version``
frozen parameters             full, in the model states               partitioned, in those of all ranks
============================  ======================================  ======================================

So this file loads them into optimizers with a strategy, and into DeepSpeed's if its own code would raise. It also
fixes other bugs: DeepSpeed's stage 3 gives all parameter groups the hyperparameters of the first, and all sub-groups
one step tensor; its stages 1 and 2 fail if a rank has no elements of a parameter group; and neither loads buffers or
frozen parameters. If DeepSpeed's optimizers can load a checkpoint, their own code does, bugs included, because a run
without the extension's keys must not change.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import deepspeed
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import (
    AUTOEP_PARAM_LOGICAL_SHAPE,
    BUFFER_NAMES,
    DS_AUTOEP_UC_META,
    DS_AUTOTP_UC_META,
    DS_VERSION,
    FROZEN_PARAM_FRAGMENTS,
    FROZEN_PARAM_SHAPES,
    OPTIMIZER_STATE_DICT,
    PARAM_GROUPS,
    VOCAB_TENSOR,
    ZERO_STAGE,
)
from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.utils import is_optimized_parameter
from deepspeed.utils import groups
from deepspeed.utils.bwc import bwc_tensor_model_parallel_rank, bwc_tensor_model_parallel_world_size
from deepspeed.utils.tensor_fragment import map_to_flat_opt_states
from deepspeed.utils.zero_to_fp32 import natural_keys
from torch import Tensor, nn

from deepspeed_ext.checkpoint.files import inspect, tensor_of
from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.deepspeed_types import Engine, MappedParameter, is_partitioned
from deepspeed_ext.zero.muon import MOMENTUM, uses_muon
from deepspeed_ext.zero.optimizer import ParoOptimizer

_WEIGHTS, _STEP = "fp32", "step"
_ADAM, _MUON = ("exp_avg", "exp_avg_sq"), (MOMENTUM,)  # to_universal.py converts no others
_STATES = "optimizer_state.pt"


Inspect = Callable[[Path], Any]  # returns a file's content; its tensors stay on disk


def read_model_states(engine: Engine, folder: Path, inspect_file: Inspect) -> list[Mapping[str, Any]]:
    """Return the model states for this model-parallel rank, with buffers and frozen parameters.

    They are those of one data-parallel rank, or of all in order if frozen parameters are partitioned.
    """
    ranks = sorted({path.name.split("mp_rank_")[1] for path in folder.glob("*mp_rank_*_model_states.pt")})
    if not ranks:
        raise CheckpointError(f"{folder} has no files *_model_states.pt.")
    own_rank = ranks[engine.checkpoint_mp_rank * len(ranks) // engine.mp_world_size]
    paths = sorted(folder.glob(f"*mp_rank_{own_rank}"), key=lambda path: natural_keys(path.name))
    first = inspect_file(paths[0])
    if len(paths) == 1 or not first.get(FROZEN_PARAM_FRAGMENTS):
        return [first]
    return [first, *(inspect_file(path) for path in paths[1:])]


def needs_own_loader(optimizer: Any, stage3: bool, folder: str | Path) -> bool:
    """Return whether DeepSpeed's own ZeRO cannot load a checkpoint.

    It cannot if parameters are partitioned in only one of the two runs. Nor can it with Muon: stage 3 requires Adam's
    moments of all parameters; stages 1 and 2 without offload, other momentum (Note [Momentum of DeepSpeed's stages]).
    """
    states = Path(folder, "zero", _STATES)
    if not states.is_file():
        return False
    # BF16_Optimizer has no offload, and its own loader.
    muon = uses_muon(getattr(optimizer, "optimizer", None)) and (stage3 or not getattr(optimizer, "cpu_offload", True))
    return muon or (_stage(inspect(states)) == 3) != stage3


def _moments(optimizer: ZeROOptimizer, group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of a parameter group's elementwise states."""
    return _MUON if uses_muon(optimizer.optimizer) and group.get("use_muon", False) else _ADAM


def _moments_by_parameter(optimizer: ZeROOptimizer) -> dict[int, tuple[str, ...]]:
    """Return a dict from parameter id to names of elementwise states."""
    rows = optimizer.optimizer.param_groups
    if hasattr(optimizer, "fp16_groups"):
        numbers = optimizer.sub_group_to_group_id
        listed = [(rows[numbers[number]], params) for number, params in enumerate(optimizer.fp16_groups)]
    else:
        listed = list(zip(rows, optimizer.bit16_groups, strict=True))
    return {id(param): _moments(optimizer, row) for row, params in listed for param in params}


def _stage(states: Mapping[str, Any]) -> int:
    return int(states.get(ZERO_STAGE, 1))  # BF16_Optimizer saves none; 1 is also ds_to_universal.py's default


# Checking #########################################################################################


def check(
    engine: Engine, folder: Path, inspect_file: Inspect, states: bool, model_states: Sequence[Mapping[str, Any]]
) -> None:
    """Check this rank's share of the files.

    Args:
        inspect_file: returns a file's content.
        model_states: from ``read_model_states``.

    Raises:
        CheckpointError: a file is missing, cannot be read, or belongs to another model.
    """
    saved_states = inspect_file(folder / "zero" / _STATES)
    groups = engine.optimizer.optimizer.param_groups
    if states and len(saved_states[PARAM_GROUPS]) != len(groups):
        raise CheckpointError(
            f"{folder} has {len(saved_states[PARAM_GROUPS])} parameter groups, expected {len(groups)}."
        )
    parameters = {
        engine.param_names[param]: param for param in engine.module.parameters() if is_optimized_parameter(param)
    }
    moments = _moments_by_parameter(engine.optimizer) if states else {}
    for name in sorted(parameters)[dist.get_rank() :: dist.get_world_size()]:
        expected = _allowed_numels(parameters[name], engine)
        for key in (_WEIGHTS, *moments.get(id(parameters[name]), ())):
            path = folder / "zero" / name / f"{key}.pt"
            saved = inspect_file(path)
            numel = tensor_of(saved).numel()
            padded = isinstance(saved, dict) and saved.get(VOCAB_TENSOR)  # tensor parallelism pads the vocabulary
            if expected and numel not in expected and not padded:
                raise CheckpointError(
                    f"{path} has {numel} elements, expected {' or '.join(map(str, sorted(expected)))}."
                )
    for name, param in engine.module.named_parameters():
        frozen = None if is_optimized_parameter(param) else _find_frozen(name, model_states)
        numel = getattr(param, "ds_numel", param.numel())
        if frozen is not None and frozen.numel != numel:
            raise CheckpointError(f"the frozen parameter {name} has {frozen.numel} elements, expected {numel}.")


def _allowed_numels(param: nn.Parameter, engine: Engine) -> set[int]:
    """Return the allowed numbers of elements in a parameter's files; empty if only DeepSpeed's AutoTP knows them."""
    if hasattr(param, DS_AUTOTP_UC_META):
        return set()
    if hasattr(param, DS_AUTOEP_UC_META):
        return {math.prod(getattr(param, DS_AUTOEP_UC_META)[AUTOEP_PARAM_LOGICAL_SHAPE])}
    if is_partitioned(param):
        return {param.ds_numel}
    return {param.numel(), param.numel() * engine.mp_world_size}


# Loading ##########################################################################################


def load_into(load: Callable[..., None], optimizer: ZeROOptimizer, folder: str, states: bool, from_fp32: bool) -> None:
    """Load into a ZeRO optimizer, with or without a strategy.

    Args:
        load: DeepSpeed's function; called if it can load the checkpoint itself.
        optimizer: an optimizer of stage 1, 2 or 3.
        folder: the folder of the checkpoint.
        states: whether to load optimizer states, loss scale and hyperparameters; otherwise weights only.
        from_fp32: without states, whether the optimizer keeps the saved fp32 weights. Otherwise it copies the model's,
            which may have 16 bits.
    """
    stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
    swapped = getattr(optimizer, "swap_optimizer", False)  # to NVMe, which only DeepSpeed's loader knows
    ours = isinstance(optimizer, ParoOptimizer)
    if not ours and (swapped or not needs_own_loader(optimizer, stage3, folder)):
        load(optimizer, folder, states, from_fp32)
        return
    if states and not ours:
        _refuse_slices(optimizer, stage3)
    saved = inspect(Path(folder, "zero", _STATES))
    if states and stage3:
        optimizer._load_global_state_stage3(saved)
    elif states:
        optimizer._load_global_state({DS_VERSION: deepspeed.__version__, **saved})
    (_load_partitioned if stage3 else _load_replicated)(optimizer, Path(folder) / "zero", saved, states)
    if states:
        if not ours and uses_muon(optimizer.optimizer):
            _convert_momentum_for_stock(optimizer, stage3, Path(folder) / "zero")
        for group, loaded in zip(optimizer.optimizer.param_groups, saved[PARAM_GROUPS], strict=True):
            group.update({key: value for key, value in loaded.items() if key != "params"})
    elif not from_fp32:
        optimizer._restore_from_bit16_weights()


def _load_replicated(optimizer: ZeROOptimizer, zero: Path, saved: Mapping[str, Any], states: bool) -> None:
    """Load at stages 1 and 2, where this rank owns a chunk of each flat buffer, with spans of parameters.

    Afterwards, the engine gathers the weights on all ranks (``update_lp_params``).
    """
    for number, group in enumerate(optimizer.optimizer.param_groups):
        params, flat = optimizer.bit16_groups[number], group["params"][0]
        moments = _moments(optimizer, group) if states else ()
        for param in params:
            if param._hp_mapping is not None:
                _load_span(param, zero / optimizer.param_names[param], optimizer.mpu, moments)
                param._hp_mapping.update_lp()
        if states:
            map_to_flat_opt_states(flat, params, optimizer.optimizer.state, moments)
        if moments == _ADAM:
            _set_step(optimizer.optimizer.state[flat], zero / optimizer.param_names[params[0]], saved)


def _load_span(param: MappedParameter, folder: Path, mpu: object, moments: tuple[str, ...]) -> None:
    """Load this rank's span of a parameter: its weights into the flat buffer, its moments into the mapping."""
    mapping, weights = param._hp_mapping, inspect(folder / f"{_WEIGHTS}.pt")
    if isinstance(weights, dict):
        # Only DeepSpeed knows how tensor parallelism slices a parameter. It always loads moments, so restore old ones.
        rank, ranks = bwc_tensor_model_parallel_rank(mpu=mpu), bwc_tensor_model_parallel_world_size(mpu=mpu)
        previous = mapping.optim_fragment
        family = getattr(param, "group_name", "") if is_moe_param(param) else ""
        experts = groups._get_expert_parallel_rank(family) if family else 0
        param.load_hp_checkpoint_state(str(folder), rank, ranks, experts)
        if not moments:
            mapping.optim_fragment = previous
        return
    start, numel = mapping.lp_fragment_address.start, mapping.lp_fragment_address.numel
    span = slice(start, start + numel)
    mapping.get_hp_fragment().data.copy_(weights.flatten()[span])
    if moments:
        mapping.optim_fragment = {moment: inspect(folder / f"{moment}.pt").flatten()[span] for moment in moments}


def _load_partitioned(optimizer: ZeROOptimizer, zero: Path, saved: Mapping[str, Any], states: bool) -> None:
    """Load at stage 3, where each sub-group has this rank's chunks of parameters."""
    rows, numbers = optimizer.optimizer.param_groups, optimizer.sub_group_to_group_id
    for number, (params, flat, model) in enumerate(
        zip(
            optimizer.fp16_groups,
            optimizer.fp32_partitioned_groups_flat,
            optimizer.fp16_partitioned_groups_flat,
            strict=True,
        )
    ):
        folders = [(param, zero / optimizer.param_names[param]) for param in params]
        moments = _moments(optimizer, rows[numbers[number]]) if states else ()
        for key in (_WEIGHTS, *moments):
            pieces = [optimizer.load_hp_checkpoint_state(str(folder), key, param=param) for param, folder in folders]
            loaded = torch.cat(pieces).to(flat)
            if key == _WEIGHTS:
                flat.data.copy_(loaded)
                model.data.copy_(loaded)
            else:
                optimizer.optimizer.state[flat][key] = loaded
        if moments == _ADAM:
            _set_step(optimizer.optimizer.state[flat], folders[0][1], saved)


def _convert_momentum_for_stock(optimizer: Any, stage3: bool, zero: Path) -> None:
    """Convert momentum to the form of DeepSpeed's optimizer; see Note [Momentum of DeepSpeed's stages]."""
    scale, states = float(optimizer.loss_scale), optimizer.optimizer.state
    if stage3:
        in_memory = getattr(optimizer, "muon_momentum_buffer_partitioned_groups_flat", {})
        for number, flat in enumerate(optimizer.fp32_partitioned_groups_flat):
            if MOMENTUM in states[flat] and not optimizer.offload_optimizer:
                states[flat][MOMENTUM] *= scale
            if number in in_memory:  # save_muon_momentum_buffer_in_memory
                in_memory[number].copy_(states[flat][MOMENTUM])
        return
    for number, group in enumerate(optimizer.optimizer.param_groups if not optimizer.cpu_offload else ()):
        params, flat = optimizer.params_in_partition[number], group["params"][0]
        if group.get("use_muon", False):
            momenta = [tensor_of(inspect(zero / optimizer.param_names[param] / f"{MOMENTUM}.pt")) for param in params]
            pieces = [momentum.flatten().to(flat) for momentum in momenta] or [flat.new_zeros(0)]
            states[flat][MOMENTUM] = torch.cat(pieces).mul_(scale)


def _refuse_slices(optimizer: Any, stage3: bool) -> None:
    """Refuse momentum of full matrices if tensor or expert parallelism splits them, on all ranks.

    Raises:
        ValueError: the optimizer is DeepSpeed's stage 1 or 2 without offload, with Muon and such parallelism.
    """
    if stage3 or not uses_muon(optimizer.optimizer) or optimizer.cpu_offload:
        return
    experts = any(group.get("moe", False) for group in optimizer.optimizer.param_groups)
    if experts or bwc_tensor_model_parallel_world_size(mpu=optimizer.mpu) > 1:
        raise ValueError(
            "With tensor parallelism or AutoEP's experts, DeepSpeed's stages 1 and 2 load Muon's momentum from a "
            "universal checkpoint only with offload_optimizer. Set offload_optimizer, or a paro_strategy."
        )


def _set_step(state: dict[str, Any], folder: Path, saved: Mapping[str, Any]) -> None:
    """Set the step count in the state of one optimizer tensor."""
    path = folder / f"{_STEP}.pt"
    if path.exists():
        step = inspect(path)
    else:
        states: Mapping[str, Any] = saved.get(OPTIMIZER_STATE_DICT, {}).get("state", {})
        step = next((state[_STEP] for state in states.values() if _STEP in state), None)  # Muon's states have none
    if step is not None:  # cloned, because optimizers increment a tensor in place: a shared one would count too fast
        state[_STEP] = step.clone() if isinstance(step, Tensor) else step


# Buffers and frozen parameters ####################################################################


def load_buffers_and_frozen(engine: Engine, states: Sequence[Mapping[str, Any]]) -> None:
    """Load buffers and frozen parameters into the model; for partitioned ones, this rank's chunk.

    Call it before DeepSpeed's own load, which may gather the parameters.

    Args:
        engine: an engine with or without a strategy.
        states: from ``read_model_states``.
    """
    module = states[0]["module"]
    buffers = {name: module[name] for name in states[0][BUFFER_NAMES] if name in module}
    engine.module.load_state_dict(buffers, strict=False)
    for name, param in engine.module.named_parameters():
        frozen = None if is_optimized_parameter(param) else _find_frozen(name, states)
        if frozen is None:  # it is trained, or was saved with exclude_frozen_parameters
            continue
        values = torch.cat([span.flatten() for span in frozen.pieces])[: frozen.numel]
        if is_partitioned(param):
            chunk = param.ds_tensor.ds_numel
            chunk_values = values[dist.get_rank(group=param.ds_process_group) * chunk :][:chunk]
            param.ds_tensor.data[: chunk_values.numel()].copy_(chunk_values)
        else:
            param.data.copy_(values.view_as(param))


class _FrozenParameter(NamedTuple):
    """A frozen parameter: its spans on disk, the last possibly padded, and its number of elements."""

    pieces: Sequence[Tensor]
    numel: int


def _find_frozen(name: str, states: Sequence[Mapping[str, Any]]) -> _FrozenParameter | None:
    """Return a frozen parameter from the model states of all ranks; None if it is missing."""
    values = states[0]["module"].get(name)
    if values is not None and values.numel():  # stage 3 saves a module's partitioned parameters without elements
        return _FrozenParameter([values], values.numel())
    fragments: list[Tensor] = []
    for state in states:
        fragment = (state.get(FROZEN_PARAM_FRAGMENTS) or {}).get(name)
        if fragment is None:
            return None
        fragments.append(fragment)
    return _FrozenParameter(fragments, math.prod(states[0][FROZEN_PARAM_SHAPES][name]))
