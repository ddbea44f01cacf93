# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``export_weights``: the weights of a whole model as safetensors, of which no rank holds more than a module.

1. All ranks divide the model into files, and files among the ranks that write (``weights.py``).
2. They gather one module after the other, for each file in turn. Whoever writes the file copies what
   it is made of to buffers on the host, which a thread writes under the next gathers (``host_writer.py``).
3. ``Export.wait`` waits for the threads of all ranks. Then the folder appears, as a checkpoint does (``folder.py``).

Where all ranks have all weights (p = N, and no experts elsewhere), a rank writes its files without any gather.
"""

import os
import weakref
from collections.abc import Sequence
from pathlib import Path

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

from deepspeed_ext.checkpoint.files import CheckpointFiles
from deepspeed_ext.checkpoint.folder import CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.host_writer import HostWriter
from deepspeed_ext.checkpoint.owned import new_token, sync
from deepspeed_ext.checkpoint.weights import (
    INDEX,
    NAMES,
    TensorFile,
    divide,
    gathered,
    index_of,
    interleaved,
    weights_of,
)
from deepspeed_ext.comm.agreement import (
    broadcast_text,
    raise_together,
    require_same,
    run_on_all_or_raise,
    wait_on_all,
)
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.outer import outer_weights

_LARGEST_FILE = 5 * 10**9  # bytes, as transformers has it
_HOST_BYTES = 256 * 2**20
_DOING = "the weights could not be exported"
_under_way: "weakref.WeakKeyDictionary[Engine, Export]" = weakref.WeakKeyDictionary()


class Export:
    """An export whose weights are gathered, and which may still be written.

    Args:
        folder: that appears.
        files: all of the export; not kept, since they lead to the engine by whose entry an export is held.
        writer: of this rank.
    """

    def __init__(self, folder: CheckpointFolder, files: Sequence[TensorFile], writer: HostWriter) -> None:
        self._folder, self._writer = folder, writer
        self._names, self._index = [file.name for file in files], index_of(files)
        self._waited = False

    @property
    def done(self) -> bool:
        """Whether this rank has written its files. The folder appears in ``wait``."""
        return self._writer.done

    def wait(self) -> None:
        """Wait until all ranks have written, and let the folder appear. Collective over all ranks, once.

        Raises:
            CheckpointError: on all ranks, if one of them could not write. What was in the folder is untouched.
        """
        if self._waited:
            return
        wait_on_all(self._writer.join)
        self._waited = True
        first = dist.get_rank() == 0
        try:
            raise_together(self._writer.error, CheckpointError)
            run_on_all_or_raise(lambda: self._publish() if first else None, _DOING, CheckpointError)
        except CheckpointError:
            run_on_all_or_raise(lambda: self._folder.revert() if first else None, _DOING, CheckpointError)
            raise
        except BaseException:  # ranks can no longer communicate
            if first:
                self._folder.abandon()
            raise
        if first:
            self._folder.clear()

    def _publish(self) -> None:
        missing = [name for name in self._names if not (self._folder.staging / name).exists()]
        if missing:
            raise CheckpointError(
                f"rank 0 does not see {missing[0]} in {self._folder.staging}, which another rank has written: the "
                f"folder must be on a file system that all ranks share, or writers must be 1."
            )
        if len(self._names) > 1:
            index = self._folder.staging / INDEX
            index.write_text(self._index)
            sync(index)
        self._folder.publish()


def export_weights(
    engine: Engine,
    folder: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    exclude_frozen_parameters: bool = False,
    max_shard_bytes: int = _LARGEST_FILE,
    writers: int | None = None,
    host_bytes: int | None = None,
    asynchronous: bool = False,
) -> Export:
    """Write the weights of a whole model as safetensors: ``model.safetensors``, or several files and their index.

    They are those that the next forward would use. A tied weight is in the file once, under its first name. With an
    outer optimizer they are what all groups have agreed on last. No step may run meanwhile, for all weights are of one
    step: when this returns, all have been gathered, and training may go on.

    The folder appears, or its weights are replaced, when all is written; all other files in it stay. Collective over
    all ranks, with the same arguments.

    Args:
        engine: DeepSpeed's, with a strategy of ours or not; between two steps.
        folder: in which ``transformers`` finds the weights, on a file system that the ranks which write share.
        dtype: in which floating-point weights and buffers are written; None: in that of each.
        exclude_frozen_parameters: leave out parameters without gradients.
        max_shard_bytes: of a file, unless a single weight has more.
        writers: how many ranks write; None: those of the first node.
        host_bytes: of host memory that a rank which writes takes; where it is full, gathers wait. None: 256 MiB, and
            if ``asynchronous`` as much more as the rank writes, so that nothing waits.
        asynchronous: return when all weights are gathered, though they may not be written yet. The folder appears in
            ``Export.wait``, which the next export or save of this engine calls first.

    Returns:
        The export, which has ended unless it is ``asynchronous``.

    Raises:
        CheckpointError: on all ranks, if one of them could not write, in this export, or in the last export or save
            that nobody has waited for. What was in the folder is untouched.
        NotImplementedError: nobody can put the model together; see ``weights_of``.
        RuntimeError: parameters are offloaded.
        ValueError: an argument has no meaning.
    """
    finish_last(engine)
    if isinstance(engine.checkpoint_engine, CheckpointFiles):
        engine.checkpoint_engine.finish()  # the save that runs may have set aside what ``prepare`` would put back
    place = Path(os.path.abspath(folder))
    asked = f"{place}, dtype={dtype}, exclude_frozen_parameters={exclude_frozen_parameters}"
    asked = f"{asked}, max_shard_bytes={max_shard_bytes}, writers={writers}, asynchronous={asynchronous}"
    require_same("what an export is asked for", asked, CheckpointError)
    count = _number_of_writers(writers, max_shard_bytes)
    _require_parameters(engine)
    files = divide(weights_of(engine, dtype, exclude_frozen_parameters), max_shard_bytes, count)
    target = CheckpointFolder(place.parent, place.name, NAMES)
    target.use_token(broadcast_text(new_token(), 0))
    first = dist.get_rank() == 0
    run_on_all_or_raise(lambda: target.prepare() if first else None, _DOING, CheckpointError)
    if host_bytes is None:
        mine = sum(weight.nbytes for file in files if file.writer == dist.get_rank() for weight in file.weights)
        host_bytes = _HOST_BYTES + (mine if asynchronous else 0)
    export = Export(target, files, _write(engine, target, files, count, host_bytes))
    if asynchronous:
        _under_way[engine] = export
    else:
        export.wait()
    return export


def _number_of_writers(asked: int | None, max_shard_bytes: int) -> int:
    """Return how many ranks write: by default those of the first node. Collective."""
    ranks = dist.get_world_size()
    writers = int(broadcast_text(os.environ.get("LOCAL_WORLD_SIZE", "1"), 0)) if asked is None else asked
    if not 1 <= writers <= ranks or max_shard_bytes < 1:
        raise ValueError(
            f"expected 1 to {ranks} writers (there are as many ranks) and a positive max_shard_bytes, got {writers} "
            f"and {max_shard_bytes}."
        )
    return writers


def finish_last(engine: Engine) -> None:
    """Wait for the last export of an engine. A save calls it first: no two may write to a folder and its neighbors.

    Collective over all ranks.

    Raises:
        CheckpointError: on all ranks, if one of them could not write.
    """
    last = _under_way.pop(engine, None)
    if last is not None:
        last.wait()


def _write(
    engine: Engine, folder: CheckpointFolder, files: Sequence[TensorFile], writers: int, host_bytes: int
) -> HostWriter:
    """Gather all weights, and hand this rank's to a thread that writes them; return that."""
    rank = dist.get_rank()
    writer = run_on_all_or_raise(lambda: HostWriter(host_bytes), "no thread could be started", CheckpointError)
    try:
        offsets = {}
        for file in files:
            if file.writer == rank:
                begin, offsets[file.name] = file.layout()
                writer.put(folder.staging / file.name, 0, torch.frombuffer(bytearray(begin), dtype=torch.uint8))
        with torch.no_grad(), outer_weights(engine):
            if hasattr(engine.optimizer, "checkpoint_event_prologue"):
                engine.optimizer.checkpoint_event_prologue()  # nothing is under way, nor gathered, after it
            for file, unit in interleaved(files, writers):
                if file.writer != rank and not any(weight.collective for weight in unit):
                    continue
                with gathered(unit):
                    for weight in unit:
                        offset = offsets[file.name][weight.name] if file.writer == rank else 0
                        for part in weight.parts():
                            if file.writer == rank:
                                offset = writer.put(folder.staging / file.name, offset, part, weight.dtype)
    finally:
        writer.finish()
    return writer


def _require_parameters(engine: Engine) -> None:
    if OffloadStateTypeEnum.lp_params in getattr(engine.optimizer, "offloaded_states", ()):
        raise RuntimeError("Parameters are offloaded, and cannot be exported. Call engine.reload_states() before.")
