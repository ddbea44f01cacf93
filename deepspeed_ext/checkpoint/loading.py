# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``engine.load_checkpoint``: checked on all ranks before anything is changed."""

import functools
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed.runtime.engine
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES, PARTITION_COUNT

from deepspeed_ext.checkpoint import universal
from deepspeed_ext.checkpoint.agreement import raise_together, require_same, smallest, together
from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import LATEST, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.saving import is_first

_LARGEST = 2**62


def load_checkpoint(
    load: Callable[..., Any],
    engine: Any,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Any = None,
) -> Any:
    """DeepSpeed's ``load_checkpoint``, after all that it will read was found to be there, whole, and fitting.

    Two faults of DeepSpeed's are mended with parameters cut: ``load_module_only`` alone loads no weights, and without
    optimizer states the weights are those of ``latest``, whatever the tag.

    Args:
        load: DeepSpeed's.
        engine: one with a strategy of ours.
        load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
        custom_load_fn: DeepSpeed's.

    Raises:
        CheckpointError: on all ranks, if a file is missing, truncated, of another save, of another model, or if the
            optimizer states are cut otherwise. Nothing has been changed.
    """
    from_universal = engine.load_universal_checkpoint()
    tag = together(lambda: _tag(engine, load_dir, tag), f"the latest checkpoint of {load_dir} cannot be told")
    require_same("the tag of a checkpoint", tag)
    rest = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    if not tag:
        return load(engine, load_dir, **rest)  # DeepSpeed's answer where there is none
    if load_module_only and engine.zero_optimization_partition_weights():
        rest["load_optimizer_states"] = False
    folder = CheckpointFolder(load_dir, tag)
    together(lambda: _find(folder, engine), f"{folder.path} could not be put back after a save that was killed")
    files: CheckpointFiles = engine.checkpoint_engine
    try:
        check = _UniversalCheck if from_universal else _Check
        check(engine, load_dir, tag, load_optimizer_states and not load_module_only).run(
            None if custom_load_fn is not None else load_module_strict
        )
        if from_universal:
            paths = universal.model_state_files(folder.path, engine.checkpoint_mp_rank)
            universal.load_untrained(engine, [files.inspect(str(path)) for path in paths])
        with _weights_of(tag, from_universal):
            return load(engine, load_dir, tag, **rest)
    finally:
        files.forget()


def load_into_stock(load: Callable[..., Any], engine: Any, load_dir: str, tag: Any, *args: Any, **kwargs: Any) -> Any:
    """``load_checkpoint`` of an engine without a strategy of ours: also what its ZeRO leaves out.

    DeepSpeed loads neither buffers nor frozen parameters from universal checkpoints. Where a strategy of ours has
    saved it, or the stage was another, that is done here.
    """
    folder = Path(load_dir, _tag(engine, load_dir, tag))
    if folder.is_dir() and universal.beyond_stock(engine.zero_optimization_partition_weights(), folder):
        paths = universal.model_state_files(folder, engine.checkpoint_mp_rank)
        universal.load_untrained(
            engine, [torch.load(path, map_location="cpu", mmap=True, weights_only=False) for path in paths]
        )
    return load(engine, load_dir, tag, *args, **kwargs)


def _tag(engine: Any, load_dir: str, tag: str | None) -> str:
    """The tag, or the one that DeepSpeed's file of the latest names; empty if there is none."""
    if tag is not None:
        return str(tag)
    latest = Path(load_dir) / ("latest_universal" if engine.load_universal_checkpoint() else LATEST)
    return latest.read_text().strip() if latest.is_file() else ""


def _find(folder: CheckpointFolder, engine: Any) -> None:
    """On the first rank: see that the folder is there, even if a save that was killed had set it aside."""
    if not is_first(engine):
        return
    if not folder.path.exists():
        folder.recover()
    if not folder.path.is_dir():
        raise CheckpointError(f"there is no checkpoint {folder.path}.")


def _weights_of(tag: str, from_universal: bool) -> AbstractContextManager[Any]:
    """Meanwhile the engine, where it takes weights from the shards of the optimizer, takes them from this tag's."""
    name = "get_fp32_state_dict_from_zero_checkpoint"
    if from_universal:  # has no shards, and the optimizer loads the weights
        replacement: Callable[..., Any] = dict
    else:
        replacement = functools.partial(getattr(deepspeed.runtime.engine, name), tag=tag)
    return mock.patch.object(deepspeed.runtime.engine, name, replacement)


def _shape(value: Any) -> Any:
    """Of a tensor; a module's extra state has none."""
    return getattr(value, "shape", None)


class _Check:
    """Of one load, before it.

    Args:
        engine: that will load.
        load_dir, tag: what.
        states: whether the optimizer's states are loaded, too.
    """

    def __init__(self, engine: Any, load_dir: str, tag: str, states: bool) -> None:
        self._engine = engine
        self._optimizer = engine.optimizer
        self._files: CheckpointFiles = engine.checkpoint_engine
        self._load_dir, self._tag, self._states = load_dir, tag, states
        self._folder = Path(load_dir) / tag
        self._shard: Mapping[str, Any] = {}  # an optimizer's state dict

    def run(self, strict: bool | None) -> None:
        """Raise on all ranks what one of them finds. Collective.

        Args:
            strict: DeepSpeed's ``load_module_strict``; None where a function of the user's loads the module.
        """
        together(lambda: self._check(strict), f"{self._folder} is not what a checkpoint must be")
        self._check_saves()

    def _check(self, strict: bool | None) -> None:
        module_file = self._module_file()
        module = self._files.read(module_file)
        if strict is not None:
            self._check_names(module_file, module, strict)
        if self._states:
            self._shard = self._files.read(self._shard_file())[OPTIMIZER_STATE_DICT]
            self._check_shapes(module_file, module)
            self._check_states()
            # DeepSpeed refuses another number of ranks. What counts is over how many the states are cut.
            module["dp_world_size"] = self._engine.seq_dp_world_size
        elif self._engine.zero_optimization_partition_weights():
            self._check_all_shards()

    def _module_file(self) -> str:
        """The file of the module's states that this rank loads."""
        names: list[str] = self._engine._get_all_ckpt_names(self._load_dir, self._tag)
        if len(names) == self._engine.mp_world_size:
            return names[self._engine.checkpoint_mp_rank]
        if names:
            raise CheckpointError(
                f"{self._folder} is of {len(names)} model-parallel ranks, but there are {self._engine.mp_world_size}."
            )
        expected = self._engine._get_ckpt_name(self._load_dir, self._tag)
        raise CheckpointError(f"{expected} is missing.{self._saved_as()}")

    def _shard_file(self) -> str:
        """The file of the optimizer's states that this rank loads."""
        name: str = self._engine._get_zero_ckpt_name(self._load_dir, self._tag)
        if Path(name).exists():
            return name
        path, prefix = Path(name), "bf16_"
        other = path.with_name(path.name.removeprefix(prefix) if path.name.startswith(prefix) else prefix + path.name)
        if other.exists():
            raise CheckpointError(
                f"{name} is missing, but {other.name} is there: bf16.enabled must be what it was when it was saved."
            )
        raise CheckpointError(f"{name} is missing.{self._saved_as()}")

    def _check_names(self, module_file: str, module: Mapping[str, Any], strict: bool) -> None:
        """torch says what is missing or has another shape when it has copied the rest."""
        saved, wanted = module["module"] or {}, self._engine.module.state_dict()
        differing = sorted(saved.keys() ^ wanted.keys()) if saved and strict else []
        if not self._engine.zero_optimization_partition_weights():  # where they are cut they show no shape
            common = sorted(saved.keys() & wanted.keys())
            differing += [name for name in common if _shape(saved[name]) != _shape(wanted[name])]
        if differing:
            raise CheckpointError(
                f"{module_file} does not fit the model: of {len(wanted)} names {len(differing)} are missing, "
                f"unexpected or have another shape, the first is {differing[0]!r}."
            )

    def _check_states(self) -> None:
        try:
            self._optimizer.check_states(self._shard)
        except ValueError as error:
            raise CheckpointError(f"{self._shard_file()}: {error}{self._saved_as()}") from error

    def _check_shapes(self, module_file: str, module: Mapping[str, Any]) -> None:
        """DeepSpeed saves what was flattened in this order, and takes it back in the order of now."""
        saved, wanted = (
            [(name, tuple(shape)) for group in groups for name, shape in group.items()]
            for groups in (module.get(PARAM_SHAPES) or (), self._engine._get_zero_param_shapes())
        )
        differing = [(a, b) for a, b in zip(saved, wanted, strict=False) if a[1] != b[1]]
        if saved and (differing or len(saved) != len(wanted)):
            first = f", the first that differs: {differing[0][0]}, expected {differing[0][1]}" if differing else ""
            raise CheckpointError(
                f"{module_file} is of another model, or of parameters in another order (round_robin_gradients): its "
                f"optimizer has {len(saved)} parameters, expected {len(wanted)}{first}."
            )

    def _check_all_shards(self) -> None:
        """Weights without optimizer states come from all shards; each rank checks some."""
        names = sorted(str(name) for name in self._folder.glob("*_optim_states.pt"))
        if not names:
            raise CheckpointError(f"{self._folder} has no files *_optim_states.pt, which hold the weights.")
        self._shard = self._files.inspect(names[0])[OPTIMIZER_STATE_DICT]
        count = self._shard[PARTITION_COUNT]
        count = max(count) if isinstance(count, list) else count
        bf16 = Path(names[0]).name.startswith("bf16_")
        for number in range(dist.get_rank(), count, dist.get_world_size()):
            self._files.inspect(self._engine._get_rank_zero_ckpt_name(self._load_dir, self._tag, 0, number, bf16))

    def _check_saves(self) -> None:
        """Raise on all ranks if the files are not all of one save. Collective."""
        ids = {name: int(self._files.headers.get(name, {}).get("save_id", 0)) for name in self._files.names}
        error: CheckpointError | None = None
        if len(set(ids.values())) > 1:
            error = CheckpointError(f"one of these files is of another save than the others: {', '.join(ids)}.")
        raise_together(error)
        mine = next(iter(ids.values()), _LARGEST)
        if mine not in (smallest(mine), _LARGEST):
            error = CheckpointError(f"{', '.join(ids)} are of another save than the files that other ranks load.")
        raise_together(error)

    def _saved_as(self) -> str:
        """How the checkpoint was saved, as far as it can be told, and what to do."""
        header = next(iter(self._files.headers.values()), None) or self._header_of_any()
        saved = " It"
        if header:
            saved = (
                f" The checkpoint was saved with paro_strategy {header['strategy']} in groups of "
                f"{header['group_size']}, by {header['ranks']} ranks; it"
            )
        ours = self._optimizer
        return (
            f"{saved} is loaded with paro_strategy {ours.strategy.name} in groups of "
            f"{ours.topology.cluster.group_size}, by {ours.topology.cluster.ranks} ranks. If these cut the states "
            f"otherwise, convert it once:\n"
            f"  python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {self._folder} "
            f"--output_folder {self._folder}_universal\n"
            f'and load it with "checkpoint": {{"load_universal": true}} in the configuration.'
        )

    def _header_of_any(self) -> Mapping[str, Any] | None:
        for name in sorted(self._folder.glob("*_states.pt")):
            try:
                self._files.inspect(str(name))
            except CheckpointError:
                continue
            return self._files.headers.pop(str(name), None)
        return None


class _UniversalCheck(_Check):
    """Of a load from a universal checkpoint: each parameter's files, shared among the ranks."""

    def _check(self, strict: bool | None) -> None:
        names = self._engine._get_all_ckpt_names(self._load_dir, self._tag)
        if not names:
            raise CheckpointError(f"{self._folder} has no files *_model_states.pt.")
        # As DeepSpeed chooses it, whatever model parallelism has saved it.
        self._files.read(names[self._engine.checkpoint_mp_rank * len(names) // self._engine.mp_world_size])
        universal.check(self._engine, self._folder, self._files, self._states)

    def _check_saves(self) -> None:
        """A conversion is not a save."""
