# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The kernels on a real device in the place of an emulator, for comparisons of the same cases."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deepspeed_ext.loco import ops
from tests.harness.cuda_on_cpu.emulator import OPERATORS, Counts, Emulator, Use, Variant


class OnDevice(Emulator):
    """Operators that take tensors of the CPU and run on a device, with all that lies around the tensors. Orders of
    blocks and threads are the device's: a case of seven variants runs seven times. Device "cpu" tests this class."""

    def __init__(self, device: str) -> None:
        assert ops.load_kernels() and ops.has_kernels(device.upper()), f"expected kernels for {device}, got none"
        self._device = device

    @functools.cached_property
    def kernels(self) -> dict[str, Callable[..., None]]:
        return {name: functools.partial(self._run, name) for name in OPERATORS}

    def _run(self, name: str, *arguments: Any) -> None:
        storages: dict[int, Tensor] = {}

        def moved(argument: Any) -> Any:
            if not isinstance(argument, Tensor):
                return argument
            full = _whole(argument)
            node = storages.setdefault(full.data_ptr(), full.to(self._device, copy=True))
            return node.view(argument.dtype).as_strided(argument.shape, argument.stride(), argument.storage_offset())

        getattr(torch.ops.deepspeed_paro, name).default(*map(moved, arguments))
        for argument in arguments:
            if isinstance(argument, Tensor):
                full = _whole(argument)
                full.copy_(storages[full.data_ptr()])  # waits for the kernel, and raises what it did wrong

    def set(self, variant: Variant = Variant()) -> None:  # noqa: B008  a tuple
        """Choose nothing: a device does."""

    def allow(self, begin: int, nbytes: int, use: Use) -> None:
        """Allow nothing, because accesses are not recorded."""

    def forget(self) -> None:
        """Keep nothing."""

    def counts(self) -> Counts:
        return Counts(*(0 for _ in Counts._fields))

    def current_device(self) -> int:
        """The device that is current between operators: 0, if they put it back."""
        return torch.cuda.current_device() if self._device == "cuda" else 0

    def explained(self, message: str) -> str:
        return message


def _whole(tensor: Tensor) -> Tensor:
    """All bytes of the memory that a tensor lies in."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
