# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The library of emulated kernels, loaded: its operators, settings, and counters."""

import ctypes
import enum
import functools
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deepspeed_ext.loco import ops
from tests.harness.cuda_on_cpu.building import line_of
from tests.harness.cuda_on_cpu.rewriting import NAMESPACE

OPERATORS = ("loco_compress", "loco_decompress", "loco_difference", "loco_apply")
OPERATORS += ("lossless_measure", "lossless_pack", "lossless_apply", "sum_parts")
_CODE = re.compile(r"code ([0-9a-f]+)")
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element


class Order(enum.IntEnum):
    """In which blocks, or the threads of a block, run."""

    IN_ORDER = 0
    REVERSED = 1
    SHUFFLED = 2
    WARP_BY_WARP = 3  # of threads: the one that was released last continues


class Variant(NamedTuple):
    """Choices that CUDA leaves open: orders, and the last bits of ``rcp.approx``."""

    blocks: Order = Order.IN_ORDER
    threads: Order = Order.IN_ORDER
    rcp: int = 0  # units in the last place that it is off by


class Counts(NamedTuple):
    """Counters of a library since it was loaded."""

    launches: int
    blocks: int
    warp_calls: int
    barriers: int
    unchecked_launches: int  # after which nothing asked for an error
    accesses: int  # of the checked build
    memsets: int
    read: int  # bytes of global memory, where traffic is counted; what lanes of a warp read together counts once
    written: int
    read_sectors: int  # of 32 bytes, that the accesses of warps touch
    written_sectors: int
    fetched_sectors: int  # of those read, once for each thread block


class Use(enum.IntFlag):
    """Accesses to memory that kernels may make."""

    READ = 1
    WRITE = 2
    KNOWN = 4  # it has been written to


class Emulator:
    """Loads a library of ``building.built``; one in a process, since its operators have fixed names."""

    def __init__(self, library: Path) -> None:
        assert ops.DTYPES, "which defines the operators of the package, whose schemas these have"
        self._path = library
        self._operators = torch.library.Library(NAMESPACE, "DEF")
        for name in OPERATORS:
            self._operators.define(str(getattr(torch.ops.deepspeed_paro, name).default._schema).partition("::")[2])
        torch.ops.load_library(str(library))
        self._library = ctypes.CDLL(str(library))
        self._library.cuda_on_cpu_allow.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
        self._library.cuda_on_cpu_place.argtypes = [ctypes.c_size_t, ctypes.c_int]
        self._library.cuda_on_cpu_error.restype = ctypes.c_char_p
        self._seed = 0

    @functools.cached_property
    def kernels(self) -> dict[str, Callable[..., None]]:
        return {name: getattr(getattr(torch.ops, NAMESPACE), name).default for name in OPERATORS}

    def set(self, variant: Variant = Variant()) -> None:  # noqa: B008  a tuple
        """Choose orders and reciprocals for the launches to come; each time other random numbers."""
        self._seed += 1
        self._library.cuda_on_cpu_set(*variant[:2], self._seed, variant.rcp, True)

    @contextmanager
    def only(self, blocks: Sequence[int]) -> Iterator[None]:
        self._library.cuda_on_cpu_only((ctypes.c_int64 * len(blocks))(*blocks), len(blocks))
        try:
            yield
        finally:
            self._library.cuda_on_cpu_only((ctypes.c_int64 * 0)(), 0)

    @contextmanager
    def placed(self, tensor: Tensor, device: int) -> Iterator[None]:
        """Let a tensor be on a device, the CPU if below 0; all others are on device 1, and 0 is the current one."""
        self._library.cuda_on_cpu_place(tensor.data_ptr(), device)
        try:
            yield
        finally:
            self._library.cuda_on_cpu_place(tensor.data_ptr(), 1)

    def allow(self, begin: int, nbytes: int, use: Use) -> None:
        """Let kernels use memory, until ``forget``: the checked build refuses all other."""
        self._library.cuda_on_cpu_allow(begin, nbytes, int(use))

    def forget(self) -> None:
        self._library.cuda_on_cpu_forget()

    @contextmanager
    def counted_traffic(self) -> Iterator[None]:
        """Count the bytes and sectors that kernels of the checked build move; they are in ``counts`` afterwards."""
        self._library.cuda_on_cpu_count_traffic(1)
        try:
            yield
        finally:
            self._library.cuda_on_cpu_count_traffic(0)

    def counts(self) -> Counts:
        results = (ctypes.c_int64 * len(Counts._fields))()
        self._library.cuda_on_cpu_counts(results)
        return Counts(*results)

    def current_device(self) -> int:
        """The device that is current between operators: 0, if they put it back."""
        return int(self._library.cuda_on_cpu_current_device())

    def explained(self, message: str) -> str:
        """A message of the library with lines of the sources in place of addresses."""
        return _CODE.sub(lambda found: line_of(self._path, int(found[1], 16)), message)


def integers_of(tensor: Tensor) -> Tensor:
    return tensor.view(INTEGERS[tensor.element_size()])


def bits_of(tensor: Tensor) -> Tensor:
    """As integers; NaNs, which hardware and torch write in several ways, as the largest one."""
    integers = integers_of(tensor)
    if not tensor.is_floating_point():
        return integers
    return torch.where(tensor.isnan(), 2 ** (8 * tensor.element_size() - 1) - 1, integers)
