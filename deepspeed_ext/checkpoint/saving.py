# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``engine.save_checkpoint``: a save that replaces the checkpoint completely or leaves it as it was."""

import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any

from deepspeed.checkpoint.constants import FROZEN_PARAM_FRAGMENTS, FROZEN_PARAM_SHAPES

from deepspeed_ext.checkpoint import outer, residuals
from deepspeed_ext.checkpoint.experts import EXPERT_ORDER, data_before_experts
from deepspeed_ext.checkpoint.files import HEADER, CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from deepspeed_ext.comm.agreement import (
    all_reduce_min,
    all_reduce_sum,
    raise_together,
    require_same,
    run_on_all_or_raise,
)
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.version import __version__
from deepspeed_ext.zero.optimizer import ParoOptimizer

_SAVE_ID_BITS = 62
_LOOKS = 5


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
        save: DeepSpeed's.
        engine: one with a strategy of ours.
        save_dir, tag, client_state, save_latest, exclude_frozen_parameters: DeepSpeed's.

    Raises:
        KeyError: ``client_state`` has a key of ours.
        CheckpointError: on all ranks, if one of them could not write. The previous checkpoint is untouched.
        RuntimeError: parameters are offloaded; see ``ParoOptimizer.send_whole``.
    """
    if HEADER in (client_state or {}):
        raise KeyError(f"client_state has the key {HEADER!r}, which deepspeed_ext uses to record what saved it.")
    tag = f"global_step{engine.global_steps}" if tag is None else str(tag)
    require_same("the tag of a checkpoint", tag, CheckpointError)
    files: CheckpointFiles = engine.checkpoint_engine
    folder = CheckpointFolder(save_dir, tag)
    first, doing = _is_first(engine), "the checkpoint could not be saved"
    run_on_all_or_raise(lambda: folder.prepare() if first else None, doing, CheckpointError)
    more = {} if exclude_frozen_parameters else _frozen(engine)
    engine.optimizer.send_whole()  # so that a run that loads this checkpoint continues as this one does
    of_outer = outer.contents(engine)
    try:
        header, writers = _header(engine, folder.path.name), engine.optimizer.writers
        with (
            engine.optimizer.outer.in_place(),
            files.saving(folder, header, writers.left_to_others),
            writers.numbered(engine),
        ):
            saved: bool = save(
                engine, save_dir, tag, {**more, **(client_state or {})}, False, exclude_frozen_parameters
            )
            residuals.save(engine, files, save_dir, tag)
            outer.save(engine, files, of_outer, save_dir, tag)
        raise_together(files.error, CheckpointError)
        written = all_reduce_sum(len(files.written))
        if not engine.use_node_local_storage():
            run_on_all_or_raise(lambda: _require_all(folder, written) if first else None, doing, CheckpointError)
        run_on_all_or_raise(lambda: folder.publish() if first else None, doing, CheckpointError)
        if save_latest:
            run_on_all_or_raise(lambda: folder.point() if first else None, doing, CheckpointError)
    except CheckpointError as error:  # on all ranks: none may go on and read ``latest`` before it is restored
        run_on_all_or_raise(
            lambda: folder.revert() if first else None,
            f"{error}; what was there could not be put back",
            CheckpointError,
        )
        raise
    if first:
        folder.clear()
    return saved


def _frozen(engine: Engine) -> dict[str, Any]:
    """Return frozen parameters as stages 2 and 3 save them, since ``zero_to_fp32.py`` expects them at stage 1, too."""
    if engine.zero_optimization_partition_gradients():
        return {}
    return {
        FROZEN_PARAM_SHAPES: engine._get_zero_frozen_param_attributes(engine._get_param_shape_func),
        FROZEN_PARAM_FRAGMENTS: engine._get_zero_frozen_param_attributes(engine._get_param_fragment_func),
    }


def _require_all(folder: CheckpointFolder, expected: int) -> None:
    """Wait until this rank sees all files that ranks have written; a network file system may show them late."""
    for _ in range(_LOOKS):
        found = folder.files()
        if found >= expected:
            return
        time.sleep(1.0)
    raise CheckpointError(
        f"of {expected} files that all ranks have written rank 0 sees {found} in {folder.staging}: {folder.save_dir} "
        f"must be on a file system that all nodes share, or checkpoint.use_node_local_storage must be true."
    )


def _is_first(engine: Engine) -> bool:
    """Return whether this rank does the work that is done once per file system."""
    rank = engine.local_rank if engine.use_node_local_storage() else engine.global_rank
    return rank == 0


def _header(engine: Engine, name: str) -> dict[str, Any]:
    """Return the header that identifies the files of one save: plain values, for tools without torch."""
    optimizer: ParoOptimizer = engine.optimizer
    return {
        "version": __version__,
        "save_id": all_reduce_min(secrets.randbits(_SAVE_ID_BITS)),
        "strategy": optimizer.strategy.name,
        "group_size": optimizer.topology.sizes.group_size,
        "ranks": optimizer.topology.sizes.ranks,
        EXPERT_ORDER: data_before_experts(engine),
        residuals.FOLDER: name if optimizer.error_state.keeps_errors else "",
    }
