# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The two operators of LoCo in torch's library: schemas, the reference, and the kernels where there are any."""

import functools
import warnings

import torch
from torch import Tensor

from deepspeed_ext.loco import reference
from deepspeed_ext.loco.packing import Packing

NAMESPACE = "deepspeed_paro"
BUILD_THEM = "Build them where nvcc is found: remove the built ones, or reinstall with DS_BUILD_LOCO=1."
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define(
    "loco_compress(Tensor gradient, Tensor(a!) wire, Tensor? error, Tensor(b!)? new_error, int bits, int block_size, "
    "float beta, float unit, bool hadamard) -> ()"
)
_library.define(
    "loco_decompress(Tensor wire, Tensor(a!) out, int bits, int block_size, float factor, bool hadamard) -> ()"
)
_library.impl("loco_compress", reference.compress, "CompositeExplicitAutograd")
_library.impl("loco_decompress", reference.decompress, "CompositeExplicitAutograd")


@torch.library.register_fake(f"{NAMESPACE}::loco_compress", lib=_library)
def _(*_: object) -> None:
    """Return nothing: it writes into its arguments only."""


@torch.library.register_fake(f"{NAMESPACE}::loco_decompress", lib=_library)
def _(*_: object) -> None:
    """Return nothing: it writes into its arguments only."""


def compress(
    gradient: Tensor,
    wire: Tensor,
    packing: Packing,
    *,
    error: Tensor | None = None,
    new_error: Tensor | None = None,
    beta: float = 0.0,
    unit: float = 1.0,
    hadamard: bool = False,
) -> None:
    """Compensate, quantize and pack gradients, and update the error, in one pass.

    See Note [Arithmetic of a block] in ``reference.py``.

    Args:
        gradient: (rows, width), fp32, bf16 or fp16; rows without gaps, of any alignment.
        wire: (rows, row bytes of ``packing``), uint8; written.
        packing: bits and block size on the wire.
        error: what was kept, in units of ``1/unit`` of the gradient: (rows, row bytes of 8 bits), uint8, or (rows,
            padded width), bf16 or fp32. None: zero.
        new_error: what is to be kept, of that dtype and shape; written. May be ``error`` itself. None: nothing.
        beta: weight of the old error.
        unit: the loss scale.
        hadamard: whether to rotate each 32 elements.

    Raises:
        TypeError: gradients of another dtype.
        RuntimeError: a shape that does not fit, or CUDA tensors with kernels for the CPU only.
    """
    _check(gradient, "gradients")
    if not gradient.numel():
        return
    torch.ops.deepspeed_paro.loco_compress(
        gradient, wire, error, new_error, packing.bits, packing.block_size, beta, unit, hadamard
    )


def decompress(wire: Tensor, out: Tensor, packing: Packing, factor: float = 1.0, hadamard: bool = False) -> None:
    """Write ``factor`` times the sum of the pieces, taken in fp32 and in their order.

    Args:
        wire: (pieces, row bytes of ``packing`` for the width of ``out``), uint8.
        out: 1D, fp32, bf16 or fp16; written.

    Raises:
        TypeError: ``out`` of another dtype.
        RuntimeError: as ``compress``.
    """
    _check(out, "results")
    if not out.numel():
        return
    torch.ops.deepspeed_paro.loco_decompress(wire, out, packing.bits, packing.block_size, factor, hadamard)


def _check(tensor: Tensor, what: str) -> None:
    if tensor.dtype not in DTYPES:
        raise TypeError(
            f"LoCo takes {what} in {', '.join(str(dtype) for dtype in DTYPES)}, got {tensor.dtype}. Set "
            f"communication_data_type, or remove zero_optimization.zeropp_loco_param."
        )
    if lacks_kernels(tensor.device.type):
        raise RuntimeError(f"The kernels of LoCo were built for the CPU only, got a CUDA tensor. {BUILD_THEM}")


@functools.cache
def _kernels(loaded: bool) -> frozenset[str]:
    return frozenset(
        key
        for key in ("CPU", "CUDA")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::loco_compress", key)
    )


_loaded = False
_failed: list[Exception] = []  # to build is tried once


def has_kernels(device: str) -> bool:
    """Whether there are kernels for ``CPU`` or ``CUDA``; without, the reference runs."""
    return device in _kernels(_loaded)


def lacks_kernels(device: str) -> bool:
    """Whether kernels were built, but none for this type of device: an oversight, for the reference is slow."""
    return device == "cuda" and has_kernels("CPU") and not has_kernels("CUDA")


def load_kernels() -> bool:
    """Load the kernels, or build them, and return whether there are any; warn once where that fails."""
    global _loaded
    if not _loaded and not _failed:
        try:
            from deepspeed_ext.op_builder import LocoBuilder

            LocoBuilder().load(verbose=False)
        except Exception as error:  # no compiler, no ninja, no headers: whatever it is, the reference works
            _failed.append(error)
            _warn(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        else:
            _loaded = True
    return _loaded


def _warn(reason: str) -> None:
    warnings.warn(
        f"deepspeed_ext: the kernels of LoCo could not be built ({reason}), so its operators run in plain PyTorch, "
        f"which is slower. Install a C++ compiler and ninja, with a GPU also nvcc of torch's CUDA version; or build "
        f"ahead of time with DS_BUILD_LOCO=1.",
        stacklevel=3,
    )
