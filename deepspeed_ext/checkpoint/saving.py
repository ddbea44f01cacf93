# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``engine.save_checkpoint``: a save that replaces the checkpoint completely or not at all."""

import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES
from torch import Tensor

from deepspeed_ext.checkpoint import export, outer_states, residuals
from deepspeed_ext.checkpoint.asynchronous import AsyncSaves, SaveFailed
from deepspeed_ext.checkpoint.commit import Commit
from deepspeed_ext.checkpoint.experts import EXPERT_ORDER, data_before_experts
from deepspeed_ext.checkpoint.files import HEADER, CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.snapshots import Snapshot
from deepspeed_ext.comm.agreement import WORLD, raise_together, require_same, unique_number
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replace_attributes
from deepspeed_ext.version import __version__
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.outer import OuterOptimizer


@torch.inference_mode(False)  # writer threads use these tensors outside of the caller's inference mode
def save_checkpoint(
    save: Callable[..., Any],
    engine: Engine,
    save_dir: str,
    tag: str | None = None,
    client_state: Mapping[str, Any] | None = None,
    save_latest: bool = True,
    exclude_frozen_parameters: bool = False,
) -> bool:
    """Run DeepSpeed's ``save_checkpoint`` so that the checkpoint appears only when it is complete. See ``folder.py``.

    Args:
        save: DeepSpeed's method.
        engine: an engine with a strategy.
        save_dir, tag, client_state, save_latest, exclude_frozen_parameters: as in DeepSpeed.

    Raises:
        KeyError: ``client_state`` has the key that the extension uses.
        CheckpointError: on all ranks, if one of them could not write, or if an earlier asynchronous save or export
            failed and has not raised yet. The previous checkpoint is untouched.
        RuntimeError: parameters are offloaded; see ``ParoOptimizer.resync_parameters``.
    """
    if HEADER in (client_state or {}):
        raise KeyError(f"client_state has the key {HEADER!r}, which is reserved for the header of deepspeed_ext.")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    require_same("the tag of a checkpoint", tag, CheckpointError)
    files: CheckpointFiles = engine.checkpoint_engine
    files.finish()  # at most one save runs at a time; raises if the last one failed
    if files.memory_commit is None:  # an in-memory save does not touch the folder of an export
        export.finish_last_export(engine)
    commit = files.memory_commit or Commit(
        CheckpointFolder(save_dir, tag),
        _is_first(engine),
        not engine.use_node_local_storage(),
        save_latest,
        engine._config if save_latest else None,
    )
    snapshot = None
    try:
        if files.async_saves is not None:
            files.async_saves.connect()
        commit.prepare(WORLD)
        frozen = {} if exclude_frozen_parameters else _frozen_parameters(engine)
        snapshot = None if files.async_saves is None else _snapshot(engine, files.async_saves)
        engine.optimizer.resync_parameters()  # or a run that loads this checkpoint would differ
        outer_content = outer_states.file_content(engine)
        header, writers = _header(engine, commit.folder.path.name), engine.optimizer.writers
        with (
            engine.optimizer.outer.use_outer_weights(),
            files.redirect_to_staging(commit.folder, header, writers, snapshot),
            writers.use_rank_numbers(engine),
            engine.optimizer.saving(snapshot),
            # `require_same` above has compared the tags already.
            replace_attributes(engine, checkpoint_tag_validation_enabled=lambda: False),
        ):
            saved: bool = save(
                engine, save_dir, tag, {**frozen, **(client_state or {})}, False, exclude_frozen_parameters
            )
            residuals.save(engine, files, save_dir, tag)
            outer_states.save(engine, files, outer_content, save_dir, tag)
        if files.async_saves is None or snapshot is None:
            commit.run(len(files.written_paths), files.error, WORLD)
        else:
            _start_async_save(files, files.async_saves, snapshot, commit)
    except BaseException:
        # A writer thread that already has the snapshot commits or abandons the folder itself.
        if files.async_saves is None or snapshot is None or files.async_saves.discard(snapshot):
            commit.abandon()
        raise
    return saved


class _Reader:
    """Blocks the optimizer until an engine's asynchronous saves have read its states."""

    def __init__(self, engine: Engine, async_saves: AsyncSaves) -> None:
        self._engine: Engine = weakref.proxy(engine)  # the engine's optimizer refers to this object
        self._async_saves = async_saves

    def before_step(self) -> None:
        """Wait until states may change, and raise if a save has failed.

        Raises:
            SaveFailed: on all ranks. The engine's step may be called again.
        """
        try:
            self._async_saves.before_step(raises=not self._engine.pipeline_parallelism)
        except SaveFailed:
            if self._engine._running_engine_step:  # reset what DeepSpeed's step has set, so it can be called again
                self._engine._running_engine_step = False
                self._engine._stop_timers(self._engine.engine_timers.step_timers)
            raise

    def before_change(self) -> None:
        """Wait until a running save has copied the states."""
        self._async_saves.wait_for_copies()


def _snapshot(engine: Engine, async_saves: AsyncSaves) -> Snapshot:
    """Return an empty snapshot. The optimizer waits for it before changing its states."""
    readers = engine.optimizer.context.readers
    readers[:] = [*(reader for reader in readers if not isinstance(reader, _Reader)), _Reader(engine, async_saves)]
    return async_saves.snapshot(_changed_by_steps(engine))


def _changed_by_steps(engine: Engine) -> Iterator[Tensor]:
    """Yield the optimizer's weights and states, if they change only by steps and after ``before_change``."""
    optimizer: ParoOptimizer = engine.optimizer
    if isinstance(optimizer.outer, OuterOptimizer):
        return
    parameters = {
        tensor.untyped_storage().data_ptr()
        for param in engine.module.parameters()
        for tensor in (param, getattr(param, "ds_tensor", param))
    }
    for shard in optimizer.flat_shards():
        weights = optimizer.shard_weights(shard.number)
        # In fp32, weights may be the model's parameters, which a script may change at any time.
        if weights.untyped_storage().data_ptr() not in parameters:
            yield weights
        yield from (
            value for value in optimizer.optimizer.state.get(weights, {}).values() if isinstance(value, Tensor)
        )


def _start_async_save(files: CheckpointFiles, async_saves: AsyncSaves, snapshot: Snapshot, commit: Commit) -> None:
    """Start writing a snapshot in the background, or raise on all ranks if one failed to copy states. Collective.

    Raises:
        CheckpointError: on all ranks.
    """
    raise_together(files.error, CheckpointError)
    pending = files.pop_pending()
    commit.plan_files(pending)
    snapshot.start_device_copies()
    async_saves.start(snapshot, pending, files.write, commit)


def _frozen_parameters(engine: Engine) -> dict[str, Any]:
    """Return frozen parameters as stages 2 and 3 save them: ``zero_to_fp32.py`` also expects them at stage 1."""
    if engine.zero_optimization_partition_gradients():
        return {}
    return {
        FROZEN_PARAM_SHAPES: engine._get_zero_frozen_param_attributes(engine._get_param_shape_func),
        FROZEN_PARAM_FRAGMENTS: engine._get_zero_frozen_param_attributes(engine._get_param_fragment_func),
    }


def _is_first(engine: Engine) -> bool:
    """Return whether this rank does the work that is needed once per file system."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return rank == 0


def _header(engine: Engine, name: str) -> dict[str, Any]:
    """Return the header that identifies the files of one save. It has plain values, for tools without torch."""
    optimizer: ParoOptimizer = engine.optimizer
    sizes = optimizer.topology.all_groups.sizes
    return {
        "version": __version__,
        "save_id": unique_number(),
        "strategy": optimizer.strategy.name,
        "group_size": sizes.group_size,
        "ranks": sizes.ranks,
        EXPERT_ORDER: data_before_experts(engine),
        residuals.FOLDER: name if optimizer.error_state.keeps_errors else "",
    }
