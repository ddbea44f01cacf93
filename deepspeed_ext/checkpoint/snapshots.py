# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Copies in host memory of what a save writes, made while the training goes on.

Note [What a snapshot copies when]
    A file of a checkpoint holds states that change at different times:

    - *Optimizer states*, the weights in fp32 among them, change in the optimizer's step alone. They are most of the
      bytes, and are copied *behind* the training: by a stream beside it from a device, by the thread that will write
      from the host. ``Snapshot.settle`` is what waits for that: the optimizer calls it before a step, and before
      anything else of its own that changes or moves its states.
    - *Everything else* may change as soon as the save has returned: weights in 16 bits, which a script may exchange
      for averaged ones, buffers in the next forward, errors of reductions in the next backward, what the script has
      given. It is copied before the save returns: from a device by the same stream, for which the one that computes
      waits, and not the host.

    With an outer optimizer nothing is copied behind: a save shows anchors in the place of the group's weights, and
    takes them back when it returns.

    Optimizer states of stripes (p = N) are copied in the order in which this rank has them. The thread that writes
    sends them to the ranks that have their elements in ZeRO's order, and files are the same as those of other saves;
    see ``send_later`` and ``exchange``.

    What is copied are storages, as ``torch.save`` writes them: tensors that share one in what was given share one in
    the snapshot. So its file is the same, to the byte, as that of a save that writes at once. (That of a tensor on a
    device says that it was on the host.)
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

from deepspeed_ext.comm.background import Background
from deepspeed_ext.comm.host_channel import HostChannel
from deepspeed_ext.comm.relayout import Relayout

_SMALL = 256  # bytes
_SHARE = 1 / 20  # of the time in which an exchange uses the links, which steps need as well
_LONGEST_PAUSE, _LOOKS = 30.0, 0.1  # seconds
_HURRIED = 2**62  # in the place of the microseconds of a round
_Storage = torch.UntypedStorage | torch.TypedStorage


class HostBuffers:
    """Host memory of snapshots, pinned where there is a device: made once, and used again by the next save."""

    def __init__(self) -> None:
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._lent: list[Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all of them."""
        return sum(one.nbytes for one in (*self._lent, *(free for many in self._free.values() for free in many)))

    def lend(self, nbytes: int) -> Tensor:
        """Return memory of so many bytes, uint8, with any content."""
        fitting = self._free[nbytes]
        one = fitting.pop() if fitting else get_accelerator().pin_memory(torch.empty(nbytes, dtype=torch.uint8))
        self._lent.append(one)
        return one

    def take_back(self) -> None:
        """Take back all that was lent, and free what was not asked for since the last time: sizes have changed."""
        self._free = defaultdict(list)
        for one in reversed(self._lent):
            self._free[one.nbytes].append(one)
        self._lent = []


class _Finder(pickle.Pickler):
    """Finds tensors in the same places where ``torch.save`` does, in order, by going the same way."""

    def __init__(self) -> None:
        super().__init__(self, protocol=2)
        self.found: list[Tensor] = []
        self.others = 0  # bytes of what is no tensor

    def write(self, written: bytes) -> None:
        """Write nothing."""
        self.others += len(written)

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, Tensor):
            self.found.append(obj)
        return "" if isinstance(obj, Tensor | _Storage) else None


def nbytes_of(content: object) -> int:
    """Return how many bytes a file that holds this has, but for what goes with each tensor."""
    finder = _Finder()
    finder.dump(content)
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in finder.found}
    return finder.others + sum(storages.values())


class Pace:
    """Pauses between the rounds of an exchange: it takes a share of the links until somebody waits for the save.

    Args:
        thread: that exchanges.
    """

    def __init__(self, thread: Background) -> None:
        self._thread, self._lifted = thread, threading.Event()

    def lift(self) -> None:
        """Pause no more, since the training waits."""
        self._lifted.set()

    @property
    def lifted(self) -> bool:
        """Whether the training, or the end of the process, waits."""
        return self._lifted.is_set() or self._thread.joined

    def pause(self, spent: float) -> None:
        """Pause after a round that has taken so many seconds."""
        end = time.monotonic() + min(_LONGEST_PAUSE, spent * (1 / _SHARE - 1))
        while not self.lifted and (left := end - time.monotonic()) > 0:
            self._lifted.wait(min(left, _LOOKS))


class _Exchange(NamedTuple):
    """A flat buffer whose chunks are to be exchanged: this rank's two, which share their memory, 1D."""

    relayout: Relayout
    source: Tensor
    target: Tensor


class Snapshot:
    """The states of one save. See Note [What a snapshot copies when].

    Args:
        buffers: to copy into.
        changed_by_steps: tensors that only the optimizer changes, and before that calls ``settle``.
    """

    def __init__(self, buffers: HostBuffers, changed_by_steps: Iterable[Tensor]) -> None:
        self._buffers = buffers
        self._behind = {tensor.untyped_storage().data_ptr() for tensor in changed_by_steps}
        self._copies: dict[int, Tensor] = {}  # of storages of the file that is taken, uint8, by their addresses
        self._on_device: list[tuple[Tensor, Tensor]] = []  # source and copy, uint8, of what is copied behind
        self._on_host: list[tuple[Tensor, Tensor]] = []
        self._exchanges: list[_Exchange] = []
        self._own: set[int] = set()  # addresses of storages that are copies already
        self._moved: Tensor | None = None  # room for one chunk on its way to its place, uint8
        self._sources: list[Tensor] = []  # held until they have been read
        self._stream: Any = None  # beside the one that computes, once something on a device is copied
        self._device = 0  # whose stream it is
        self._read: Any = None  # an event: all on the device has been
        self._done = threading.Event()

    def take(self, content: object) -> object:
        """Return what a file is to hold, with copies of all tensors, which are complete after ``complete``."""
        finder = _Finder()
        finder.dump(content)
        copies: dict[int, Any] = {id(one): self._copied(one) for one in finder.found if _is_plain(one)}
        taken = copy.deepcopy(content, copies)
        self._copies.clear()  # what the next file has may be where something was that is gone by now
        if self._stream is not None:
            get_accelerator().current_stream().wait_stream(self._stream)
        return taken

    def send_later(self, chunk: Tensor, relayout: Relayout) -> Tensor:
        """Copy a chunk of a flat buffer, and return this rank's one of another layout; see ``SendsLater``.

        Its content is arbitrary until ``exchange``.
        """
        source_bytes, target_bytes = chunk.nbytes, relayout.numel * chunk.element_size()
        memory = self._buffers.lend(max(source_bytes, target_bytes))
        source = memory[:source_bytes]
        self._copy(chunk.detach().view(torch.uint8), source)
        # By way of numpy it is a storage by itself: a file has all of a tensor's storage.
        target = torch.from_numpy(memory.numpy()[:target_bytes]).view(chunk.dtype)
        self._own.add(target.untyped_storage().data_ptr())
        self._exchanges.append(_Exchange(relayout, source.view(chunk.dtype), target))
        return target

    def _copied(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() in self._own:
            return tensor
        held = self._copies.get(storage.data_ptr()) if storage.nbytes() else torch.empty(0, dtype=torch.uint8)
        if held is None:
            held = self._copies[storage.data_ptr()] = self._buffers.lend(storage.nbytes())
            self._copy(tensor.detach().as_strided(_whole(tensor), (1,), 0).view(torch.uint8), held)
        made = held.view(tensor.dtype).as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())
        if isinstance(tensor, nn.Parameter):
            made = nn.Parameter(made, tensor.requires_grad)
        made.requires_grad_(tensor.requires_grad)
        vars(made).update(copy.deepcopy(vars(tensor)))  # as files have it, too
        return made

    def _copy(self, source: Tensor, to: Tensor) -> None:
        # A small one on the host, such as Adam's count of steps, would have the next step wait for the thread.
        small = source.device.type == "cpu" and source.nbytes <= _SMALL
        if source.data_ptr() in self._behind and not small:
            (self._on_host if source.device.type == "cpu" else self._on_device).append((source, to))
        elif source.device.type == "cpu":
            to.copy_(source)
        else:
            self._copy_on_stream([(source, to)])

    def _copy_on_stream(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        if self._stream is None:
            self._stream, self._device = get_accelerator().Stream(), get_accelerator().current_device()
        self._stream.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(self._stream):
            for source, to in pairs:
                to.copy_(source, non_blocking=True)
                self._sources.append(source)

    def seal(self) -> None:
        """Begin to copy from the device what is copied behind, after everything else."""
        if self._on_device:
            self._copy_on_stream(self._on_device)
        if self._stream is not None:
            self._read = get_accelerator().Event()
            self._read.record(self._stream)

    def complete(self) -> None:
        """Complete all copies; called by the thread that writes them."""
        for source, to in self._on_host:
            to.copy_(source)
        if self._read is not None:
            get_accelerator().set_device(self._device)  # a new thread has the first, and would make a context there
            self._read.synchronize()
        self._let_steps_go()
        # Here, where a lack of memory is an error on all ranks, and not of one whose part others wait for.
        self._moved = torch.empty(max((one.target.nbytes for one in self._exchanges), default=0), dtype=torch.uint8)

    def exchange(self, channel: HostChannel, pace: Pace) -> None:
        """Exchange the chunks of ``send_later`` after ``complete``. Collective over the channels of all ranks.

        Raises:
            ChannelError: a rank has died, or has not sent its part within the timeout.
        """
        rounds, ended, slowest = self._rounds(channel), object(), 1
        while slowest:
            begin = time.monotonic()
            more = next(rounds, ended) is not ended
            spent = _HURRIED if pace.lifted else 1 + int((time.monotonic() - begin) * 1e6)
            slowest = -channel.all_reduce_min(-spent if more else 0)  # microseconds; 0 where all have ended
            if slowest < _HURRIED:
                # On all ranks alike: time in which a rank waits for another's pause would lengthen its own.
                pace.pause(slowest / 1e6)

    def _rounds(self, channel: HostChannel) -> Iterator[None]:
        for relayout, source, target in self._exchanges:
            assert self._moved is not None
            moved = self._moved[: target.nbytes].view(target.dtype)
            yield from relayout.send(source, moved, channel)
            target.copy_(moved)  # not before: others may still receive what is there

    def give_up(self) -> None:
        """Wait for what is being copied, which nobody will use."""
        if self._stream is not None:
            self._stream.synchronize()
        self.let_go()

    def let_go(self) -> None:
        """Wait for nothing any more: nobody will use the copies, or all files have been written."""
        self._exchanges, self._moved = [], None
        self._let_steps_go()

    def _let_steps_go(self) -> None:
        self._sources, self._on_device, self._on_host = [], [], []
        self._done.set()

    def settle(self) -> None:
        """Make what the current stream, and the host, do from now on come after all copies."""
        if self._on_host:
            self._done.wait()
        if self._read is not None:
            get_accelerator().current_stream().wait_event(self._read)


def _whole(tensor: Tensor) -> tuple[int]:
    """Return how many elements of its dtype a tensor's storage has."""
    return (tensor.untyped_storage().nbytes() // tensor.element_size(),)


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is no more than a view of its storage; others are copied by ``deepcopy``, at once."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout == torch.strided
        and tensor.untyped_storage().nbytes() % tensor.element_size() == 0
        and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg() or tensor.is_meta)
    )
