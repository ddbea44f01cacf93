# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's accelerator for the simulated device."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from tests.harness.device_on_host.backend import NAME, groups_of_device, register
from tests.harness.stream_order import Order, StreamAccelerator, device_with_streams

_COPIES = ("copy_", "_to_copy")


class DeviceOrder(Order):
    """The order of a device and a host: each runs the operations on its own tensors, and copies are on the current
    stream. The host waits for copies, unless they are told not to block and its memory is pinned. Pinned memory that
    is freed is not reused before its copies have ended, as in torch. If a source has gaps, or another dtype than its
    target, the host reads it as soon as the copy is called, even while a stream still writes it."""

    knows_host = True

    def operate(
        self, name: str, reads: list[Tensor], writes: list[Tensor], made: list[Tensor], non_blocking: bool
    ) -> None:
        hosts = [tensor for tensor in (*reads, *writes, *made) if tensor.device.type == "cpu"]
        if len(hosts) == len(reads) + len(writes) + len(made):
            self.run(self.of_host, name, reads, writes, made)
            return
        if name not in _COPIES:  # numbers of the host are arguments of the kernel
            self.run(self.of_host, name, hosts)
            reads = [tensor for tensor in reads if tensor.device.type != "cpu"]
        else:
            self.run(self.of_host, name, [tensor for tensor in reads if _made_ready(tensor, (*writes, *made))])
        super().operate(name, reads, writes, made, non_blocking)
        if name in _COPIES and hosts:
            if non_blocking and all(tensor.is_pinned() for tensor in hosts):
                for tensor in hosts:
                    self.record(tensor, self.current)
            else:
                self.synchronize("copy", self.current.clock)


def _made_ready(source: Tensor, targets: tuple[Tensor, ...]) -> bool:
    """Return whether the host reads the source of a copy to a device at once, to pack it or to convert its dtype."""
    alike = all(target.dtype == source.dtype for target in targets)
    return source.device.type == "cpu" and not (source.is_contiguous() and alike)


def _tensors(dtype: torch.dtype) -> Any:
    return property(lambda _: functools.partial(torch.tensor, dtype=dtype, device=NAME))


class DeviceAccelerator(StreamAccelerator):
    """Tells where things are as DeepSpeed's accelerator for CUDA does."""

    _torch_pins_host_memory = True

    def device_name(self, device_index: int | None = None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index: int | None = None) -> torch.device:
        return torch.device(NAME, self.current_device() if device_index is None else device_index)

    def set_device(self, device_index: int) -> None:
        torch.accelerator.set_device_index(device_index)

    def current_device(self) -> int:
        return torch.accelerator.current_device_index()

    def current_device_name(self) -> str:
        return f"{NAME}:{self.current_device()}"

    def pin_memory(self, tensor: Tensor, make_copy: bool = True, match_shape: bool = True) -> Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: Tensor, shape: Any) -> Tensor:
        return tensor.new_empty(shape, pin_memory=True)

    BFloat16Tensor = _tensors(torch.bfloat16)
    ByteTensor = _tensors(torch.uint8)
    DoubleTensor = _tensors(torch.float64)
    FloatTensor = _tensors(torch.float32)
    HalfTensor = _tensors(torch.float16)
    IntTensor = _tensors(torch.int32)
    LongTensor = _tensors(torch.int64)

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == NAME


@contextlib.contextmanager
def device_on_host(library: str) -> Iterator[Order]:
    """Within this context, DeepSpeed's device is simulated: tensors know where they are, streams have an order.
    Afterwards, the process cannot run other cases, since torch cannot forget the device."""
    register(library)
    with groups_of_device(), device_with_streams(DeviceOrder(), DeviceAccelerator) as order:
        yield order
