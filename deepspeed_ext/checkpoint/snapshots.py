# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies checkpoint states to host memory while training continues.

Note [Snapshot copies]
    A file of a checkpoint contains states that change at different times:

    - *Optimizer states*, including fp32 weights, change only in the optimizer's step. They are most of the bytes, and
      their copies overlap with training. A side stream copies from a device; the writer thread copies from the host.
      The optimizer calls ``Snapshot.wait_for_copies`` before a step and before any other operation of its own that
      changes or moves its states.
    - *Everything else* may change as soon as the save returns: 16-bit weights, which a script may replace by averaged
      ones; buffers in the next forward; error feedback in the next backward; objects from the script. It is copied
      before the save returns. On a device the side stream copies it, and the compute stream waits, not the host.

    With an outer optimizer, no copy overlaps with training: during a save, anchors replace the group's weights.

    Optimizer states of stripes (p = N) are copied in this rank's order. The writer thread sends them to the ranks that
    own the elements in ZeRO's order, so files are the same as in other saves; see ``exchange_later`` and ``exchange``.

    Storages are copied, as ``torch.save`` writes them: tensors that share a storage also share one in the snapshot. So
    the file is identical, to the byte, to that of a synchronous save. (The file of a device tensor records the host as
    its device.)
"""

import copy
import pickle
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.relayout import Relayout
from deepspeed_ext.comm.worker_thread import WorkerThread

_SMALL_BYTES = 256  # bytes
_LINK_SHARE = 1 / 20  # of time in which an exchange uses the links, which steps also need
_MAX_PAUSE, _POLL_SECONDS = 30.0, 0.1  # seconds
_NO_PAUSE = 2**62  # replaces the microseconds of a round on a rank that must not pause
_Storage = torch.UntypedStorage | torch.TypedStorage


class HostBuffers:
    """Host memory of snapshots, pinned if there is a device. Allocated on the first save and reused."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._in_use: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(
            buffer.nbytes for buffer in (*self._in_use, *(free for buffers in self._free.values() for free in buffers))
        )

    def allocate(self, nbytes: int) -> Tensor:
        """Return a uint8 buffer of ``nbytes`` bytes with arbitrary content."""
        fitting = self._free[nbytes]
        buffer = fitting.pop() if fitting else get_accelerator().pin_memory(torch.empty(nbytes, dtype=torch.uint8))
        self._in_use.append(buffer)
        return buffer

    def reclaim(self) -> None:
        """Reclaim all lent buffers, and free those that were not used since the last call, as sizes have changed."""
        self._free = defaultdict(list)
        for buffer in reversed(self._in_use):
            self._free[buffer.nbytes].append(buffer)
        self._in_use = []


class _TensorFinder(pickle.Pickler):
    """Finds the tensors that ``torch.save`` would find, in the same order, by the same pickling."""

    def __init__(self) -> None:
        super().__init__(self, protocol=2)
        self.tensors: list[Tensor] = []
        self.other_bytes = 0  # bytes of everything that is not a tensor

    def write(self, written: bytes) -> None:
        """Count bytes; write nothing."""
        self.other_bytes += len(written)

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, Tensor):
            self.tensors.append(obj)
        return "" if isinstance(obj, Tensor | _Storage) else None


def nbytes_of(content: object) -> int:
    """Return the bytes of a file with this content, without the metadata of each tensor."""
    finder = _TensorFinder()
    finder.dump(content)
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in finder.tensors}
    return finder.other_bytes + sum(storages.values())


class Pace:
    """Pauses between the rounds of an exchange, to limit its share of the links until training waits for the save."""

    def __init__(self, thread: WorkerThread) -> None:
        self._thread, self._lifted = thread, threading.Event()

    def lift(self) -> None:
        """Stop pausing, because training waits."""
        self._lifted.set()

    @property
    def lifted(self) -> bool:
        """Whether training, or the end of the process, waits."""
        return self._lifted.is_set() or self._thread.joined

    def pause(self, spent: float) -> None:
        """Pause after a round that took ``spent`` seconds."""
        end = time.monotonic() + min(_MAX_PAUSE, spent * (1 / _LINK_SHARE - 1))
        while not self.lifted and (left := end - time.monotonic()) > 0:
            self._lifted.wait(min(left, _POLL_SECONDS))


class _Exchange(NamedTuple):
    """A pending exchange of a flat buffer's chunks: this rank's two, 1D, which share their memory."""

    relayout: Relayout
    source: Tensor
    target: Tensor


class Snapshot:
    """Host copies of the states of one save. See Note [Snapshot copies].

    Args:
        buffers: host memory for the copies.
        changed_by_steps: tensors that only the optimizer changes, after it has called ``wait_for_copies``.
    """

    def __init__(self, buffers: HostBuffers, changed_by_steps: Iterable[Tensor]) -> None:
        self._buffers = buffers
        self._overlapped = {tensor.untyped_storage().data_ptr() for tensor in changed_by_steps}
        self._copies: dict[int, Tensor] = {}  # storage address: copy, uint8, of the file that is being copied
        self._on_device: list[tuple[Tensor, Tensor]] = []  # sources and copies, uint8, of overlapped copies
        self._on_host: list[tuple[Tensor, Tensor]] = []  # the same, copied by the writer thread
        self._exchanges: list[_Exchange] = []
        self._own_storages: set[int] = set()  # addresses of storages that are copies already
        self._receive_buffer: Tensor | None = None  # receive buffer for one chunk, uint8
        # Keeps sources alive until the side stream has read them; freed memory would be reused by the compute stream.
        self._sources: list[Tensor] = []
        self._stream: Any = None  # side stream, once something on a device is copied
        self._stream_device = 0  # of the side stream
        self._read_event: Any = None  # event after which all device tensors have been read
        self._host_copies_done = threading.Event()  # all host tensors have been read

    def copy_content(self, content: object) -> object:
        """Return a file's content with all tensors replaced by copies, which are valid after ``complete_copies``."""
        finder = _TensorFinder()
        finder.dump(content)
        copies: dict[int, Any] = {
            id(tensor): self._copy_tensor(tensor) for tensor in finder.tensors if _is_strided_view(tensor)
        }
        copied = copy.deepcopy(content, copies)
        self._copies.clear()  # a tensor of the next file may reuse the address of a tensor that has been freed
        if self._stream is not None:  # without this wait, training could overwrite tensors before they are copied
            get_accelerator().current_stream().wait_stream(self._stream)
        return copied

    def exchange_later(self, chunk: Tensor, relayout: Relayout) -> Tensor:
        """Copy a chunk of a flat buffer, and return this rank's chunk of another layout; see ``DeferredExchange``.

        The returned content is arbitrary until ``exchange``.
        """
        source_bytes, target_bytes = chunk.nbytes, relayout.numel * chunk.element_size()
        memory = self._buffers.allocate(max(source_bytes, target_bytes))
        source = memory[:source_bytes]
        self._copy(chunk.detach().view(torch.uint8), source)
        # Through numpy, it has its own storage. A slice would share the buffer's, and files contain full storages.
        target = torch.from_numpy(memory.numpy()[:target_bytes]).view(chunk.dtype)
        self._own_storages.add(target.untyped_storage().data_ptr())
        self._exchanges.append(_Exchange(relayout, source.view(chunk.dtype), target))
        return target

    def _copy_tensor(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._own_storages:
            return tensor
        memory = self._copies.get(storage.data_ptr()) if storage.nbytes() else torch.empty(0, dtype=torch.uint8)
        if memory is None:
            memory = self._copies[storage.data_ptr()] = self._buffers.allocate(storage.nbytes())
            self._copy(tensor.detach().as_strided(_storage_shape(tensor), (1,), 0).view(torch.uint8), memory)
        copied = memory.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, nn.Parameter):
            copied = nn.Parameter(copied, tensor.requires_grad)
        copied.requires_grad_(tensor.requires_grad)
        vars(copied).update(copy.deepcopy(vars(tensor)))  # files contain these attributes, too
        return copied

    def _copy(self, source: Tensor, target: Tensor) -> None:
        # Small host tensors, such as Adam's step count, are copied now, or the next step would wait for the thread.
        small = source.device.type == "cpu" and source.nbytes <= _SMALL_BYTES
        if source.data_ptr() in self._overlapped and not small:
            (self._on_host if source.device.type == "cpu" else self._on_device).append((source, target))
        elif source.device.type == "cpu":
            target.copy_(source)
        else:
            self._copy_on_stream([(source, target)])

    def _copy_on_stream(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        if self._stream is None:
            self._stream, self._stream_device = get_accelerator().Stream(), get_accelerator().current_device()
        self._stream.wait_stream(get_accelerator().current_stream())  # sources may still be being computed
        with get_accelerator().stream(self._stream):
            for source, target in pairs:
                target.copy_(source, non_blocking=True)
                self._sources.append(source)

    def start_device_copies(self) -> None:
        """Start the overlapped copies from the device, after all others."""
        if self._on_device:
            self._copy_on_stream(self._on_device)
        if self._stream is not None:
            self._read_event = get_accelerator().Event()
            self._read_event.record(self._stream)

    def complete_copies(self) -> None:
        """Complete all copies. Called by the writer thread."""
        for source, target in self._on_host:
            target.copy_(source)
        if self._read_event is not None:
            # A new thread has device 0, and would create a context there.
            get_accelerator().set_device(self._stream_device)
            self._read_event.synchronize()
        self._unblock_steps()
        # Allocated here, because an error here is raised on all ranks. During the exchange, others would wait.
        self._receive_buffer = torch.empty(
            max((exchange.target.nbytes for exchange in self._exchanges), default=0), dtype=torch.uint8
        )

    def exchange(self, channel: HostChannel, pace: Pace) -> None:
        """Exchange the chunks of ``exchange_later`` after ``complete_copies``. Collective over the channels
        of all ranks.

        Raises:
            ChannelError: a rank died, or did not send its part within the timeout.
        """
        rounds, ended, slowest = self._rounds(channel), object(), 1
        while slowest:
            begin = time.monotonic()
            more = next(rounds, ended) is not ended
            spent = _NO_PAUSE if pace.lifted else 1 + int((time.monotonic() - begin) * 1e6)
            slowest = -channel.all_reduce_min(-spent if more else 0)  # microseconds; 0 if all ranks have finished
            if slowest < _NO_PAUSE:
                # The same pause on all ranks. Otherwise a rank's wait for another's pause would lengthen its own.
                pace.pause(slowest / 1e6)

    def _rounds(self, channel: HostChannel) -> Iterator[None]:
        for relayout, source, target in self._exchanges:
            assert self._receive_buffer is not None
            received = self._receive_buffer[: target.nbytes].view(target.dtype)
            yield from relayout.exchange_on_host(source, received, channel)
            # Only after all rounds, because `target` and `source` share memory that is still being sent.
            target.copy_(received)

    def discard(self) -> None:
        """Discard the copies after those in progress have ended."""
        if self._stream is not None:
            self._stream.synchronize()  # the device may still write into buffers that would be reused
        self.release()

    def release(self) -> None:
        """Release sources and waiters: all files have been written, or the copies are no longer needed."""
        self._exchanges, self._receive_buffer = [], None
        self._unblock_steps()

    def _unblock_steps(self) -> None:
        self._sources, self._on_device, self._on_host = [], [], []
        self._host_copies_done.set()

    def wait_for_copies(self) -> None:
        """Order all later work of the current stream and the host after all copies."""
        if self._on_host:
            self._host_copies_done.wait()  # the writer thread sets it even after an error
        if self._read_event is not None:
            get_accelerator().current_stream().wait_event(self._read_event)


def _storage_shape(tensor: Tensor) -> tuple[int]:
    """Return the shape of a 1D view of a tensor's full storage."""
    return (tensor.untyped_storage().nbytes() // tensor.element_size(),)


def _is_strided_view(tensor: Tensor) -> bool:
    """Whether a tensor is a plain strided view of its storage; others are copied immediately by ``deepcopy``."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
    )
