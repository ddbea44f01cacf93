# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``engine.load_checkpoint``: all ranks check the checkpoint before changing anything."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import deepspeed.runtime.engine
import torch
from deepspeed import comm as dist
from deepspeed.utils import logger

from deepspeed_ext.checkpoint import digests, universal
from deepspeed_ext.checkpoint.checks import Check, UniversalCheck
from deepspeed_ext.checkpoint.conversion import convert_for_load, is_universal
from deepspeed_ext.checkpoint.files import CheckpointFiles, inspect
from deepspeed_ext.checkpoint.folder import LATEST, LATEST_UNIVERSAL, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import age_text
from deepspeed_ext.checkpoint.memory_restore import restore_from_memory
from deepspeed_ext.checkpoint.outer_states import OuterStates
from deepspeed_ext.checkpoint.residuals import Residuals
from deepspeed_ext.comm.agreement import raise_together, require_same, run_on_all_or_raise
from deepspeed_ext.config.section import save_settings
from deepspeed_ext.config.unsupported import deepspeed_moe_layers
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replace_attributes


@torch.inference_mode(False)  # the next step writes to the loaded tensors
def load_checkpoint(
    load: Callable[..., Any],
    engine: Engine,
    load_dir: str,
    tag: str | None = None,
    load_module_strict: bool = True,
    load_optimizer_states: bool = True,
    load_lr_scheduler_states: bool = True,
    load_module_only: bool = False,
    custom_load_fn: Callable[..., None] | None = None,
) -> Any:
    """Check that all files exist, are complete, and fit this run; then run DeepSpeed's ``load_checkpoint``.

    For a universal load of an ordinary checkpoint, see Note [Converted checkpoints].

    Two DeepSpeed bugs with sharded parameters are fixed here: ``load_module_only`` alone loads no weights, and
    without optimizer states the weights are loaded from ``latest``, regardless of the tag.

    Args:
        load: DeepSpeed's method.
        engine: an engine with a strategy.
        load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
        custom_load_fn: as in DeepSpeed.

    Raises:
        CheckpointError: on all ranks, if a file is missing, truncated, or belongs to another save or model, or if the
            optimizer states are sharded differently. Nothing has been changed.
    """
    options: dict[str, Any] = {
        "load_module_strict": load_module_strict,
        "load_optimizer_states": load_optimizer_states,
        "load_lr_scheduler_states": load_lr_scheduler_states,
        "load_module_only": load_module_only,
        "custom_load_fn": custom_load_fn,
    }
    states = load_optimizer_states and not load_module_only
    if load_module_only and engine.zero_optimization_partition_weights():
        options["load_optimizer_states"] = False
    tag = _choose_tag(engine, load_dir, tag)
    if not tag:  # there is no checkpoint: DeepSpeed warns and returns
        # A run that saves in memory loads before it has saved anything. A universal load would raise in DeepSpeed.
        with _disable_universal(engine) if engine.checkpoint_engine.async_saves is not None else nullcontext():
            return load(engine, load_dir, **options)
    actual_tag = run_on_all_or_raise(
        CheckpointFolder(load_dir, tag).actual_tag, f"{load_dir} has no checkpoint {tag}", CheckpointError
    )
    require_same(f"the path of checkpoint {tag}", actual_tag, CheckpointError)
    _compare_with_record(engine, Path(load_dir, actual_tag))
    strict = None if custom_load_fn is not None else load_module_strict
    if not engine.load_universal_checkpoint():
        return _load_checked(load, engine, Check(engine, load_dir, actual_tag, states), strict, options)
    lease: IO[str] | None = None
    if not is_universal(Path(load_dir, actual_tag)):
        with _disable_universal(engine):
            check = Check(engine, load_dir, actual_tag, states)
            reason = _mismatch(engine, check, strict)
            if not reason:
                return _load_checked(load, engine, check, strict, options)
        actual_tag, lease = _convert(engine, load_dir, actual_tag, reason)
    with lease or nullcontext():  # otherwise another job could remove the converted checkpoint during the load
        return _load_checked(load, engine, UniversalCheck(engine, load_dir, actual_tag, states), strict, options)


def _compare_with_record(engine: Engine, folder: Path) -> None:
    """Compare the files' sizes, and with ``checkpoint.verify`` their digests, with the save's record. Collective."""
    # Ranks share the files of a shared file system; otherwise the folder has only those of this node.
    part = slice(None) if engine.use_node_local_storage() else slice(dist.get_rank(), None, dist.get_world_size())
    verify = save_settings(engine._config).verify
    run_on_all_or_raise(
        lambda: digests.check(folder, part, verify), f"{folder} is not as it was saved", CheckpointError
    )


def _choose_tag(engine: Engine, load_dir: str, tag: str | None) -> str:
    """Wait for saves, and return the tag to load, the same on all ranks; empty if there is none. Collective."""
    files: CheckpointFiles = engine.checkpoint_engine
    files.finish()  # a running save may be the one to load, and it reads states that this load changes
    if tag is None and files.async_saves is not None:
        restore_from_memory(engine, load_dir)
    if tag is None and engine.load_universal_checkpoint() and dist.get_rank() == 0:
        _warn_if_older(Path(load_dir, LATEST_UNIVERSAL), Path(load_dir, LATEST))
    tag = run_on_all_or_raise(
        lambda: _read_tag(engine, load_dir, tag),
        f"the latest checkpoint of {load_dir} cannot be determined",
        CheckpointError,
    )
    require_same("the tag of a checkpoint", tag, CheckpointError)
    return tag


def _convert(engine: Engine, load_dir: str, tag: str, reason: str) -> tuple[str, IO[str] | None]:
    """Convert a checkpoint that does not fit this run; see ``convert_for_load``."""
    if layers := deepspeed_moe_layers(engine.module):
        raise CheckpointError(
            f"{reason}\nIt cannot be converted either: DeepSpeed's universal checkpoints do not support "
            f"experts of MoE layers ({', '.join(layers)})."
        )
    return convert_for_load(load_dir, tag, reason)


def _load_checked(
    load: Callable[..., Any], engine: Engine, check: Check, strict: bool | None, options: Mapping[str, Any]
) -> Any:
    """Check a checkpoint, then run DeepSpeed's load, then load the files that DeepSpeed does not have.

    Args:
        load: DeepSpeed's method.
        strict: as in ``Check.run``.
        options: arguments of DeepSpeed's load.
    """
    folder, from_universal = check.folder, isinstance(check, UniversalCheck)
    errors = engine.optimizer.error_state
    try:
        with engine.optimizer.writers.use_rank_numbers(engine):
            check.run(strict)
        residuals, outer = run_on_all_or_raise(
            lambda: (
                Residuals(engine, folder) if check.load_states else None,
                OuterStates(engine, folder, check.load_states),
            ),
            f"{folder} cannot be loaded",
            CheckpointError,
        )
        if from_universal:
            universal.load_buffers_and_frozen(engine, check.model_states)
        with (
            _read_weights_of_tag(engine, check.tag, from_universal),
            engine.optimizer.writers.use_rank_numbers(engine),
        ):
            loaded = _run_load(lambda: load(engine, check.load_dir, check.tag, **options), folder)
        load_errors = errors.reset if residuals is None else residuals.load
        run_on_all_or_raise(load_errors, f"the load of {folder} failed halfway", CheckpointError)
        outer.load()
        # As the save did. Otherwise later updates would have to correct for weights from before the load.
        engine.optimizer.resync_parameters()
        return loaded
    finally:
        engine.checkpoint_engine.clear_headers()


def _run_load(load: Callable[[], Any], folder: Path) -> Any:
    """Run DeepSpeed's load, and return its result. If it raises on one rank, all others raise instead of waiting.

    Raises:
        CheckpointError: the load raised on another rank.
    """
    failed: Exception | None = None
    try:
        loaded = load()
    except Exception as error:
        failed = error
    try:
        raise_together(failed and CheckpointError(f"the load of {folder} failed halfway: {failed}"), CheckpointError)
    except CheckpointError:
        if failed is not None:  # raise DeepSpeed's own error on this rank, as scripts expect
            raise failed from None
        raise
    return loaded


@contextmanager
def _disable_universal(engine: Engine) -> Iterator[None]:
    """Disable universal loads within this context."""
    with replace_attributes(engine._config, load_universal_checkpoint=False):
        yield


def _mismatch(engine: Engine, check: Check, strict: bool | None) -> str:
    """Return why a checkpoint cannot be loaded without conversion; empty if it can."""
    try:
        with engine.optimizer.writers.use_rank_numbers(engine):
            check.run(strict)
        return ""
    except CheckpointError as error:
        return str(error)
    finally:
        engine.checkpoint_engine.clear_headers()


def load_into_stock(
    load: Callable[..., Any], engine: Engine, load_dir: str, tag: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Load into an engine without a strategy, including checkpoints that DeepSpeed alone cannot load.

    If DeepSpeed would raise because the checkpoint is of another stage, buffers and frozen parameters are loaded here,
    because DeepSpeed never loads them from universal checkpoints. DeepSpeed loads everything else.
    """
    folder = Path(load_dir, _read_tag(engine, load_dir, tag))
    if universal.needs_own_loader(engine.optimizer, engine.zero_optimization_partition_weights(), folder):
        universal.load_buffers_and_frozen(engine, universal.read_model_states(engine, folder, inspect))
    return load(engine, load_dir, tag, *args, **kwargs)


def _read_tag(engine: Engine, load_dir: str, tag: str | None) -> str:
    """Return the tag, by default from ``latest``; for a universal load, from ``latest_universal`` if it exists.

    Empty if there is none.
    """
    if tag is not None:
        return str(tag)
    names = [LATEST_UNIVERSAL, LATEST] if engine.load_universal_checkpoint() else [LATEST]
    latest = next((path for name in names if (path := Path(load_dir, name)).is_file()), None)
    return "" if latest is None else latest.read_text().strip()


def _warn_if_older(loaded: Path, other: Path) -> None:
    """Warn if the file that names the loaded tag is older than the other one. Never raises."""
    with suppress(OSError):
        first, second = loaded.stat().st_mtime, other.stat().st_mtime
        if first < second:
            logger.warning(
                f"deepspeed_ext: {loaded} takes precedence, although it is {age_text(first)} old and {other} is only "
                f"{age_text(second)} old. Remove it to load the newer checkpoint."
            )


def _read_weights_of_tag(engine: Engine, tag: str, from_universal: bool) -> AbstractContextManager[Any]:
    """Return a context in which the engine reads weights from this tag's optimizer shards, if from shards at all.

    A universal checkpoint has no shards; the optimizer loads the weights. A pipeline has weights in its layer files,
    and reads them from there if this function returns no others.
    """
    name = "get_fp32_state_dict_from_zero_checkpoint"
    original = getattr(deepspeed.runtime.engine, name)
    if not engine.pipeline_parallelism and not from_universal:
        return replace_attributes(deepspeed.runtime.engine, **{name: functools.partial(original, tag=tag)})
    weights: Any = None if engine.pipeline_parallelism else {}
    return replace_attributes(deepspeed.runtime.engine, **{name: lambda *_, **__: weights})
