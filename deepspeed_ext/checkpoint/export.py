# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``export_weights``: a full model as safetensors; no rank gathers more than one module at a time.

1. All ranks divide the model into files, and files among the writer ranks (``weights.py``).
2. They gather one module after the other, for each file in turn. The file's writer copies the weights to host
   buffers, which a thread writes during the next gathers (``host_writer.py``).
3. ``Export.wait`` waits for the threads of all ranks. Then it publishes the folder, like a checkpoint (``folder.py``).

If all ranks have all weights (p = N, and no experts on other ranks), a rank writes its files without any gather.
"""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import RECORD, SIDECAR, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.host_writer import HostWriter
from deepspeed_ext.checkpoint.owned_folder import new_token, sync
from deepspeed_ext.checkpoint.weights import (
    INDEX,
    NAMES,
    TensorFile,
    divide_into_files,
    exported_weights,
    gather_weights,
    index_text,
    interleave_units,
)
from deepspeed_ext.comm.agreement import (
    broadcast_text,
    raise_together,
    require_same,
    run_on_all_or_raise,
    run_on_first_or_raise,
    wait_for_all_ranks,
)
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.outer import outer_weights

_MAX_FILE_BYTES = 5 * 10**9  # bytes, as transformers has it
_HOST_BYTES = 256 * 2**20
_ACTION = "the weights could not be exported"
_pending_exports: "weakref.WeakKeyDictionary[Engine, Export]" = weakref.WeakKeyDictionary()


class Export:
    """An export whose weights are gathered, but possibly not yet written.

    Args:
        folder: the folder to publish.
        files: all files; not kept, because they refer to the engine, whose entry in ``_pending_exports`` keeps this
            export.
        writer: this rank's writer.
    """

    def __init__(self, folder: CheckpointFolder, files: Sequence[TensorFile], writer: HostWriter) -> None:
        self._folder, self._writer = folder, writer
        self._names, self._index = [file.name for file in files], index_text(files)
        self._finished = False

    @property
    def done(self) -> bool:
        """Whether this rank has written its files. ``wait`` publishes the folder."""
        return self._writer.done

    def wait(self) -> None:
        """Wait until all ranks have written, and publish the folder. Collective over all ranks, once.

        Raises:
            CheckpointError: on all ranks, if one of them could not write. The folder's previous content is untouched.
        """
        if self._finished:
            return
        wait_for_all_ranks(self._writer.join)
        self._finished = True
        first = dist.get_rank() == 0
        try:
            raise_together(self._writer.error, CheckpointError)
            run_on_first_or_raise(self._publish, _ACTION, CheckpointError)
        except CheckpointError:
            run_on_first_or_raise(self._folder.revert, _ACTION, CheckpointError)
            raise
        except BaseException:  # ranks can no longer communicate
            if first:
                self._folder.abandon()
            raise
        if first:
            self._folder.clear()

    def _publish(self) -> None:
        files = [f"{name}{suffix}" for name in self._names for suffix in ("", SIDECAR)]
        missing = [name for name in files if not (self._folder.staging / name).exists()]
        if missing:
            raise CheckpointError(
                f"rank 0 does not see {missing[0]} in {self._folder.staging}, which another rank has written. Export "
                f"to a file system that all ranks share, or set writers to 1."
            )
        if len(self._names) > 1:
            index = self._folder.staging / INDEX
            with digests.recording(str(index), 0):
                index.write_text(self._index)
                sync(index)
        digests.collect(self._folder.staging, self._folder)
        self._folder.publish()


def export_weights(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    exclude_frozen_parameters: bool = False,
    max_shard_bytes: int = _MAX_FILE_BYTES,
    writers: int | None = None,
    host_bytes: int | None = None,
    asynchronous: bool = False,
) -> Export:
    """Write the weights of a full model as safetensors: ``model.safetensors``, or several files and their index.

    The weights are those of the next forward. A tied weight is written once, under its first name. With an outer
    optimizer, the outer weights are written. No step may run during this call, so all weights are of one step. When it
    returns, all weights have been gathered, and training may continue.

    The folder appears, or its weights are replaced, after all files are written; other files in it stay. Collective
    over all ranks, with the same arguments.

    Args:
        engine: a DeepSpeed engine, with or without a strategy; between two steps.
        folder: folder for ``transformers``, on a file system that the writer ranks share.
        dtype: dtype of floating-point weights and buffers in the files; None keeps each dtype.
        exclude_frozen_parameters: omit parameters without gradients.
        max_shard_bytes: maximum bytes of a file, unless a single weight has more.
        writers: number of writer ranks; None: the ranks of the first node.
        host_bytes: bytes of host memory of a writer rank; if they are full, gathers wait. None: 256 MiB, plus all
            bytes that the rank writes if ``asynchronous``, so that nothing waits.
        asynchronous: return when all weights are gathered, possibly before they are written. ``Export.wait`` publishes
            the folder; the next export or save of this engine calls it first.

    Returns:
        The export, which is complete unless it is ``asynchronous``.

    Raises:
        CheckpointError: on all ranks, if one of them could not write, in this export, or in the last export or save,
            if it was never waited for. The folder's previous content is untouched.
        NotImplementedError: the full model cannot be assembled; see ``exported_weights``.
        RuntimeError: parameters are offloaded.
        ValueError: an argument is out of range.
    """
    finish_last_export(engine)
    if isinstance(engine.checkpoint_engine, CheckpointFiles):
        engine.checkpoint_engine.finish()  # a running save may have renamed a folder that ``prepare`` would restore
    path = Path(os.path.abspath(folder))
    arguments = f"{path}, dtype={dtype}, exclude_frozen_parameters={exclude_frozen_parameters}"
    arguments = f"{arguments}, max_shard_bytes={max_shard_bytes}, writers={writers}, asynchronous={asynchronous}"
    require_same("the arguments of an export", arguments, CheckpointError)
    count = _number_of_writers(writers, max_shard_bytes)
    _require_loaded_parameters(engine)
    files = divide_into_files(exported_weights(engine, dtype, exclude_frozen_parameters), max_shard_bytes, count)
    target = CheckpointFolder(path.parent, path.name, (*NAMES, RECORD))
    target.set_token(broadcast_text(new_token(), 0))  # all writers must use the same staging folder
    run_on_first_or_raise(target.prepare, _ACTION, CheckpointError)
    if host_bytes is None:
        own_bytes = sum(weight.nbytes for file in files if file.writer == dist.get_rank() for weight in file.weights)
        host_bytes = _HOST_BYTES + (own_bytes if asynchronous else 0)
    export = Export(target, files, _gather_and_write(engine, target, files, count, host_bytes))
    if asynchronous:
        _pending_exports[engine] = export
    else:
        export.wait()
    return export


def _number_of_writers(requested: int | None, max_shard_bytes: int) -> int:
    """Return the number of writer ranks: by default those of the first node. Collective."""
    ranks = dist.get_world_size()
    writers = int(broadcast_text(os.environ.get("LOCAL_WORLD_SIZE", "1"), 0)) if requested is None else requested
    if not 1 <= writers <= ranks or max_shard_bytes < 1:
        raise ValueError(
            f"expected 1 to {ranks} writers (the number of ranks) and a positive max_shard_bytes, got {writers} "
            f"and {max_shard_bytes}."
        )
    return writers


def finish_last_export(engine: Engine) -> None:
    """Wait for an engine's last export. A save calls it first, as only one may write to a folder and its neighbors.

    Collective over all ranks.

    Raises:
        CheckpointError: on all ranks, if one of them could not write.
    """
    last = _pending_exports.pop(engine, None)
    if last is not None:
        last.wait()


def _gather_and_write(
    engine: Engine, folder: CheckpointFolder, files: Sequence[TensorFile], writers: int, host_bytes: int
) -> HostWriter:
    """Gather all weights, and pass this rank's to a writer thread; return the writer."""
    rank = dist.get_rank()
    writer = run_on_all_or_raise(
        lambda: HostWriter(host_bytes, rank), "no writer thread could be started", CheckpointError
    )
    try:
        offsets = {}
        for file in files:
            if file.writer == rank:
                begin, offsets[file.name] = file.layout()
                writer.put(folder.staging / file.name, 0, torch.frombuffer(bytearray(begin), dtype=torch.uint8))
        with torch.no_grad(), outer_weights(engine):
            if hasattr(engine.optimizer, "checkpoint_event_prologue"):
                engine.optimizer.checkpoint_event_prologue()  # completes transfers, and partitions parameters
            for file, unit in interleave_units(files, writers):
                if file.writer != rank and not any(weight.is_collective for weight in unit):
                    continue
                with gather_weights(unit):
                    for weight in unit:
                        offset = offsets[file.name][weight.name] if file.writer == rank else 0
                        for part in weight.parts():
                            if file.writer == rank:
                                offset = writer.put(folder.staging / file.name, offset, part, weight.dtype)
    finally:
        writer.finish()  # also after an error, or the thread would never end
    return writer


def _require_loaded_parameters(engine: Engine) -> None:
    if OffloadStateTypeEnum.lp_params in getattr(engine.optimizer, "offloaded_states", ()):
        raise RuntimeError("Offloaded parameters cannot be exported. Call engine.reload_states() first.")
