# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``engine.load_checkpoint``: all ranks check the checkpoint before anything is changed."""

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import IO, Any

import deepspeed.runtime.engine
import torch
from deepspeed import comm as dist
from deepspeed.utils import logger

from deepspeed_ext.checkpoint import universal
from deepspeed_ext.checkpoint.checks import Check, UniversalCheck
from deepspeed_ext.checkpoint.converting import converted, is_universal
from deepspeed_ext.checkpoint.files import CheckpointFiles, inspect
from deepspeed_ext.checkpoint.folder import LATEST, LATEST_UNIVERSAL, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.memory_folder import age
from deepspeed_ext.checkpoint.outer_states import OuterStates
from deepspeed_ext.checkpoint.residuals import Residuals
from deepspeed_ext.checkpoint.restoring import bring_back
from deepspeed_ext.comm.agreement import raise_together, require_same, run_on_all_or_raise
from deepspeed_ext.config.unsupported import native_mixtures
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replaced


@torch.inference_mode(False)  # the next step writes to what is loaded
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
    """Check that all files are there, complete, and fit this run; then run DeepSpeed's ``load_checkpoint``.

    If a universal checkpoint is to be loaded, but there is an ordinary one, see Note [Converted checkpoints].

    Two faults of DeepSpeed with sharded parameters are fixed here: ``load_module_only`` alone loads no weights, and
    without optimizer states the weights come from ``latest``, whatever the tag.

    Args:
        load: DeepSpeed's.
        engine: one with a strategy of ours.
        load_dir, tag, load_module_strict, load_optimizer_states, load_lr_scheduler_states, load_module_only,
        custom_load_fn: DeepSpeed's.

    Raises:
        CheckpointError: on all ranks, if a file is missing, truncated, of another save, of another model, or if the
            optimizer states are sharded otherwise. Nothing has been changed.
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
    if not tag:  # there is no checkpoint: let DeepSpeed say so
        # A run that saves in memory does not know whether there is one. For a universal load DeepSpeed would raise.
        with _ordinary(engine) if engine.checkpoint_engine.aside is not None else nullcontext():
            return load(engine, load_dir, **options)
    present = run_on_all_or_raise(
        CheckpointFolder(load_dir, tag).present_tag, f"no checkpoint {tag} in {load_dir}", CheckpointError
    )
    require_same(f"the place of checkpoint {tag}", present, CheckpointError)
    strict = None if custom_load_fn is not None else load_module_strict
    if not engine.load_universal_checkpoint():
        return _load_checked(load, engine, Check(engine, load_dir, present, states), strict, options)
    lease: IO[str] | None = None
    if not is_universal(Path(load_dir, present)):
        with _ordinary(engine):
            check = Check(engine, load_dir, present, states)
            why = _misfit(engine, check, strict)
            if not why:
                return _load_checked(load, engine, check, strict, options)
        present, lease = _convert(engine, load_dir, present, why)
    with lease or nullcontext():  # so that no other job removes the conversion
        return _load_checked(load, engine, UniversalCheck(engine, load_dir, present, states), strict, options)


def _choose_tag(engine: Engine, load_dir: str, tag: str | None) -> str:
    """Return the tag to load, the same on all ranks, once saves have ended; empty if there is none. Collective."""
    files: CheckpointFiles = engine.checkpoint_engine
    files.finish()  # the save that runs may be the one to load, and reads states that this load changes
    if tag is None and files.aside is not None:
        bring_back(engine, load_dir)
    if tag is None and engine.load_universal_checkpoint() and dist.get_rank() == 0:
        _warn_if_older(Path(load_dir, LATEST_UNIVERSAL), Path(load_dir, LATEST))
    tag = run_on_all_or_raise(
        lambda: _tag(engine, load_dir, tag),
        f"the latest checkpoint of {load_dir} cannot be determined",
        CheckpointError,
    )
    require_same("the tag of a checkpoint", tag, CheckpointError)
    return tag


def _convert(engine: Engine, load_dir: str, tag: str, why: str) -> tuple[str, IO[str] | None]:
    """Convert a checkpoint that does not fit; see ``converted``."""
    if layers := native_mixtures(engine.module):
        raise CheckpointError(
            f"{why}\nIt is not converted either, since DeepSpeed's universal checkpoints have no place for "
            f"experts of MoE layers ({', '.join(layers)})."
        )
    return converted(load_dir, tag, why)


def _load_checked(
    load: Callable[..., Any], engine: Engine, check: Check, strict: bool | None, options: Mapping[str, Any]
) -> Any:
    """Check a checkpoint, then run DeepSpeed's load, and load what is in our own files.

    Args:
        load: DeepSpeed's.
        check: of the checkpoint.
        strict: as of ``Check.run``.
        options: of DeepSpeed's load.
    """
    folder, universally = check.folder, isinstance(check, UniversalCheck)
    errors = engine.optimizer.error_state
    try:
        with engine.optimizer.writers.numbered(engine):
            check.run(strict)
        residuals, outer = run_on_all_or_raise(
            lambda: (Residuals(engine, folder) if check.states else None, OuterStates(engine, folder, check.states)),
            f"{folder} cannot be loaded",
            CheckpointError,
        )
        if universally:
            universal.load_untrained(engine, check.untrained)
        with _weights_of(engine, check.tag, universally), engine.optimizer.writers.numbered(engine):
            loaded = _loaded(lambda: load(engine, check.load_dir, check.tag, **options), folder)
        load_errors = errors.forget if residuals is None else residuals.load
        run_on_all_or_raise(load_errors, f"{folder} was loaded only in part", CheckpointError)
        outer.load()
        engine.optimizer.send_whole()  # as the save did; so nothing is left to send of the weights before the load
        return loaded
    finally:
        engine.checkpoint_engine.forget()


def _loaded(load: Callable[[], Any], folder: Path) -> Any:
    """Run DeepSpeed's load, and return what it returns. If it raises on one rank, all others raise instead of waiting.

    Raises:
        CheckpointError: it has raised on another rank.
    """
    failed: Exception | None = None
    try:
        loaded = load()
    except Exception as error:
        failed = error
    try:
        raise_together(failed and CheckpointError(f"{folder} was loaded only in part: {failed}"), CheckpointError)
    except CheckpointError:
        if failed is not None:  # this rank raises DeepSpeed's own error, as scripts expect
            raise failed from None
        raise
    return loaded


@contextmanager
def _ordinary(engine: Engine) -> Iterator[None]:
    """Make the engine load ordinary checkpoints within this context."""
    with replaced(engine._config, load_universal_checkpoint=False):
        yield


def _misfit(engine: Engine, check: Check, strict: bool | None) -> str:
    """Return why a checkpoint cannot be loaded as it is; empty if it can."""
    try:
        with engine.optimizer.writers.numbered(engine):
            check.run(strict)
        return ""
    except CheckpointError as error:
        return str(error)
    finally:
        engine.checkpoint_engine.forget()


def load_into_stock(
    load: Callable[..., Any], engine: Engine, load_dir: str, tag: str | None, *args: Any, **kwargs: Any
) -> Any:
    """Load into an engine without a strategy of ours, including checkpoints that DeepSpeed alone cannot load.

    If DeepSpeed would raise, since the checkpoint is of another stage, buffers and frozen parameters are loaded here,
    too, because DeepSpeed never loads them from universal checkpoints. Everything else is left to DeepSpeed.
    """
    folder = Path(load_dir, _tag(engine, load_dir, tag))
    if universal.beyond_stock(engine.optimizer, engine.zero_optimization_partition_weights(), folder):
        universal.load_untrained(engine, universal.untrained(engine, folder, inspect))
    return load(engine, load_dir, tag, *args, **kwargs)


def _tag(engine: Engine, load_dir: str, tag: str | None) -> str:
    """Return the tag, by default the one that ``latest`` names, or first ``latest_universal`` for a universal load.

    Empty if there is none.
    """
    if tag is not None:
        return str(tag)
    names = [LATEST_UNIVERSAL, LATEST] if engine.load_universal_checkpoint() else [LATEST]
    latest = next((path for name in names if (path := Path(load_dir, name)).is_file()), None)
    return "" if latest is None else latest.read_text().strip()


def _warn_if_older(loaded: Path, other: Path) -> None:
    """Warn if the file that names what is loaded is older than another one. Never raises."""
    with suppress(OSError):
        first, second = loaded.stat().st_mtime, other.stat().st_mtime
        if first < second:
            logger.warning(
                f"deepspeed_ext: {loaded} takes precedence, though it is {age(first)} old and {other} only "
                f"{age(second)}. Remove it to load the newer checkpoint."
            )


def _weights_of(engine: Engine, tag: str, from_universal: bool) -> AbstractContextManager[Any]:
    """Make the engine take weights from this tag's optimizer shards, if it takes them from shards at all.

    A universal checkpoint has no shards; the optimizer loads the weights. A pipeline has weights in the files of its
    layers, and takes them from there if it finds no others.
    """
    name = "get_fp32_state_dict_from_zero_checkpoint"
    original = getattr(deepspeed.runtime.engine, name)
    if not engine.pipeline_parallelism and not from_universal:
        return replaced(deepspeed.runtime.engine, **{name: functools.partial(original, tag=tag)})
    weights: Any = None if engine.pipeline_parallelism else {}
    return replaced(deepspeed.runtime.engine, **{name: lambda *_, **__: weights})
