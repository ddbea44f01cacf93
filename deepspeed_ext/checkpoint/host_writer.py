# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A thread that writes tensors to files, through host buffers of bounded size."""

import hashlib
import queue
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.folder import CheckpointError
from deepspeed_ext.checkpoint.owned_folder import sync

_MAX_BUFFER_BYTES = 32 * 2**20  # bytes of a buffer: more than disks and copies need at once
_ALIGNMENT = 16  # bytes: no element of any dtype is split


@dataclass
class _Buffer:
    """A host buffer and its segments: the path of a file, the offset in the file, and the end in the buffer."""

    bytes: Tensor
    filled: int = 0
    segments: list[tuple[Path, int, int]] = field(default_factory=list)
    copy_event: Any = None  # device event after which it may be read


@dataclass
class _Digest:
    """The digest of the first ``size`` bytes of a file; the file is longer if some were not written in order."""

    hash: Any = field(default_factory=hashlib.sha256)
    size: int = 0


class HostWriter:
    """Writes tensors to files in a thread, and then each file's entry (``digests.py``) next to it.

    The first failure is kept in ``error``, and all later writes are skipped. Nothing is raised, because other ranks
    still wait for this one.

    Args:
        max_bytes: bytes of host memory, but at least two buffers.
        rank: this rank, for the entries.

    Attributes:
        error: the failure; None if there is none.
        allocated_bytes: bytes of host memory in use.
    """

    def __init__(self, max_bytes: int, rank: int) -> None:
        self.error: CheckpointError | None = None
        self.allocated_bytes = 0
        size = max(1, min(_MAX_BUFFER_BYTES, max_bytes // 2) // _ALIGNMENT) * _ALIGNMENT
        self._size, self._max_buffers = size, max(2, max_bytes // size)
        self._free: queue.SimpleQueue[_Buffer] = queue.SimpleQueue()
        self._full: queue.SimpleQueue[_Buffer | None] = queue.SimpleQueue()
        self._current: _Buffer | None = None
        self._open_file: tuple[Path, BinaryIO] | None = None
        self._rank, self._digests = rank, defaultdict[Path, _Digest](_Digest)
        self._device = None if get_accelerator().is_synchronized_device() else get_accelerator().current_device()
        self._thread = threading.Thread(target=self._write_buffers, name="deepspeed_ext export", daemon=True)
        self._thread.start()

    # The caller's thread ##############################################################################

    def put(self, path: Path, offset: int, values: Tensor, dtype: torch.dtype | None = None) -> int:
        """Write a contiguous tensor in a dtype to a file, starting at ``offset``; return its end offset.

        After this returns, only the current stream reads ``values``. It waits for the thread if buffers are full.
        """
        flat, dtype = values.reshape(-1), dtype or values.dtype
        try:
            while flat.numel() and self.error is None:
                buffer = self._buffer_with_space(dtype.itemsize)
                count = min(flat.numel(), (self._size - buffer.filled) // dtype.itemsize)
                end = buffer.filled + count * dtype.itemsize
                source = flat[:count].to(dtype).view(torch.uint8)
                buffer.bytes[buffer.filled : end].copy_(source, non_blocking=True)
                buffer.segments.append((path, offset, end))
                flat, offset, buffer.filled = flat[count:], offset + end - buffer.filled, end
        except Exception as error:
            self._record_error(path, error)
        return offset

    def finish(self) -> None:
        """End the thread after it has written everything."""
        try:
            self._submit()
        finally:
            self._full.put(None)  # also after an error, or the thread would never end

    def join(self, seconds: float | None = None) -> bool:
        """Wait for the thread to end, after ``finish``, up to ``seconds``; return whether it has ended."""
        self._thread.join(seconds)
        return self.done

    @property
    def done(self) -> bool:
        """Whether the thread has ended."""
        return not self._thread.is_alive()

    def _buffer_with_space(self, nbytes: int) -> _Buffer:
        if self._current is not None and self._size - self._current.filled < nbytes:
            self._submit()
        if self._current is None:
            self._current = self._next_buffer()
        return self._current

    def _next_buffer(self) -> _Buffer:
        """Return a buffer: a written one, else a new one, else the next one that the thread has written."""
        if self._free.empty() and self.allocated_bytes // self._size < self._max_buffers:
            memory = torch.empty(self._size, dtype=torch.uint8)
            self.allocated_bytes += self._size
            return _Buffer(
                memory if get_accelerator().is_synchronized_device() else get_accelerator().pin_memory(memory)
            )
        buffer = self._free.get()
        return _Buffer(buffer.bytes)

    def _submit(self) -> None:
        if self._current is None:
            return
        if not get_accelerator().is_synchronized_device():
            # Without this event, the thread could write the buffer before the device has filled it.
            self._current.copy_event = get_accelerator().Event()
            self._current.copy_event.record(get_accelerator().current_stream())
        self._full.put(self._current)
        self._current = None

    # Writer thread ####################################################################################

    def _write_buffers(self) -> None:
        if self._device is not None:
            get_accelerator().set_device(self._device)  # a new thread has device 0, and would create a context there
        while (buffer := self._full.get()) is not None:
            try:
                if self.error is None:
                    self._write(buffer)
            except Exception as error:
                self._record_error(buffer.segments[0][0], error)
            self._free.put(buffer)  # also after an error, or `put` would wait for a buffer forever
        path = self._open_file[0] if self._open_file is not None else Path()
        try:
            self._close()
            for path, digest in self._digests.items() if self.error is None else ():
                size = path.stat().st_size
                content = digest.hash.hexdigest() if digest.size == size else digests.digest_of(path)
                digests.write_entry(path, digests.Entry(size, content, self._rank))
        except Exception as error:
            self._record_error(path, error)
        while not self._free.empty():  # free host memory now, because a caller may keep an export for long
            self._free.get()

    def _write(self, buffer: _Buffer) -> None:
        if buffer.copy_event is not None:
            buffer.copy_event.synchronize()  # copies from the device into the buffer are non-blocking
        content, start = memoryview(cast(Any, buffer.bytes.numpy())), 0
        for path, offset, end in buffer.segments:
            if self._open_file is None or self._open_file[0] != path:
                self._close()
                self._open_file = path, path.open("r+b" if path.exists() else "wb")
            self._open_file[1].seek(offset)
            self._open_file[1].write(content[start:end])
            digest = self._digests[path]
            if offset == digest.size:
                digest.hash.update(content[start:end])
                digest.size += end - start
            start = end

    def _close(self) -> None:
        """Close the open file, and flush it to disk."""
        if self._open_file is not None:
            path, file = self._open_file
            self._open_file = None
            file.close()
            sync(path)

    def _record_error(self, path: Path, error: Exception) -> None:
        self.error = self.error or CheckpointError(f"{path} could not be written: {type(error).__name__}: {error}")
