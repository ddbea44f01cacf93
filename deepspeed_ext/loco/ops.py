# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo's operators in torch's library: schemas, the reference implementation, and kernels if there are any."""

import functools
import warnings

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import any_rank
from deepspeed_ext.comm.backends import DTYPES, NAMESPACE
from deepspeed_ext.loco import lossless, reference
from deepspeed_ext.loco.reference import Packing

BUILD_ADVICE = "Build them where nvcc is found: remove the built ones, or reinstall with DS_BUILD_LOCO=1."
LOSSLESS_DTYPES = (torch.bfloat16, torch.float16)

_PACKED = "int bits, int block_size"
_OPERATORS = {  # by name: arguments, and the reference implementation
    "loco_compress": (
        f"Tensor gradient, Tensor(a!) wire, Tensor? error, Tensor(b!)? new_error, {_PACKED}, float beta, float unit, "
        "bool hadamard",
        reference.compress,
    ),
    "loco_decompress": (f"Tensor wire, Tensor(a!) out, {_PACKED}, float factor, bool hadamard", reference.decompress),
    "loco_difference": (f"Tensor updated, Tensor replica, Tensor(a!) wire, {_PACKED}", reference.difference),
    "loco_apply": (f"Tensor wire, Tensor(a!) replica, {_PACKED}", reference.apply),
    "lossless_measure": ("Tensor updated, Tensor replica, Tensor(a!) tiles", lossless.measure),
    "lossless_pack": ("Tensor updated, Tensor replica, Tensor header, Tensor(a!) wire", lossless.pack),
    "lossless_apply": ("Tensor wire, Tensor(a!) replica", lossless.apply),
}
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
for _name, (_arguments, _reference) in _OPERATORS.items():
    _library.define(f"{_name}({_arguments}) -> ()")
    _library.impl(_name, _reference, "CompositeExplicitAutograd")
    # The operators only write into their arguments.
    torch.library.register_fake(f"{NAMESPACE}::{_name}", lambda *_: None, lib=_library)


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
        error: the kept error, as ``1/unit`` of the gradient's: (rows, row bytes of 8 bits), uint8, or (rows, padded
            width), bf16 or fp32. None: zero.
        new_error: the error to keep, of that dtype and shape; written. May be ``error`` itself. None to keep no error.
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
    """Write ``factor`` times the sum of the pieces to ``out``; the sum is taken in fp32, in their order.

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


def difference(updated: Tensor, replica: Tensor, wire: Tensor, packing: Packing) -> None:
    """Quantize and pack the difference of updated parameters to the receivers' values, in one pass.

    See Note [Differences] in ``reference.py``.

    Args:
        updated: (rows, width), fp32, bf16 or fp16; rows without gaps, of any alignment.
        replica: the receivers' values, likewise.
        wire: (rows, row bytes of ``packing``), uint8; written.
        packing: bits and block size.

    Raises:
        TypeError, RuntimeError: as ``compress``.
    """
    _check(updated, "updated parameters", "paro_quantized_updates")
    if updated.numel():
        torch.ops.deepspeed_paro.loco_difference(updated, replica, wire, packing.bits, packing.block_size)


def apply(wire: Tensor, replica: Tensor, packing: Packing) -> None:
    """Add received differences to the replica, in one pass.

    Args:
        wire: (rows, row bytes of ``packing`` for the width of ``replica``), uint8.
        replica: (rows, width), fp32, bf16 or fp16; rows without gaps; written.

    Raises:
        TypeError, RuntimeError: as ``compress``.
    """
    _check(replica, "parameters", "paro_quantized_updates")
    if replica.numel():
        torch.ops.deepspeed_paro.loco_apply(wire, replica, packing.bits, packing.block_size)


def measure(updated: Tensor, replica: Tensor) -> Tensor:
    """Return the lossless packing mode of each tile of updated parameters, and its size.

    See Note [Lossless updates] in ``lossless.py``.

    Args:
        updated: (1, width), bf16 or fp16; without gaps, of any alignment; at most 2^30 elements.
        replica: the receivers' values, likewise.

    Returns:
        (tiles,), int32: ``mode << 30 | size in steps of 2 bytes``, as bits.

    Raises:
        TypeError: parameters of another dtype.
        RuntimeError: a shape that does not fit, or CUDA tensors with kernels for the CPU only.
    """
    _check_lossless(updated)
    tiles = torch.empty(lossless.tiles_of(updated.shape[-1]), dtype=torch.int32, device=updated.device)
    if updated.numel():
        torch.ops.deepspeed_paro.lossless_measure(updated, replica, tiles)
    return tiles


def pack(updated: Tensor, replica: Tensor, header: Tensor, wire: Tensor) -> None:
    """Pack the difference of updated parameters to the receivers' values, without loss.

    Args:
        updated: as in ``measure``.
        replica: likewise.
        header: from ``lossless.header_of`` for their tiles.
        wire: (1, bytes), uint8, an even number of bytes at an even address; at least the bytes from ``header_of``,
            because tiles that do not fit are omitted. Written up to its end, with zeros after the last tile.

    Raises:
        TypeError, RuntimeError: as ``measure``.
    """
    _check_lossless(updated)
    if updated.numel():
        torch.ops.deepspeed_paro.lossless_pack(updated, replica, header, wire)


def apply_lossless(wire: Tensor, replica: Tensor) -> None:
    """Update the replica to the sent parameters, bit for bit. Tiles that did not fit the wire stay unchanged.

    Args:
        wire: (rows, bytes), uint8, as ``pack`` wrote each row.
        replica: (rows, width), bf16 or fp16, unchanged since the rows were packed; rows without gaps; written.

    Raises:
        TypeError, RuntimeError: as ``measure``.
    """
    _check_lossless(replica)
    if replica.numel():
        torch.ops.deepspeed_paro.lossless_apply(wire, replica)


def _check_lossless(tensor: Tensor) -> None:
    if tensor.dtype not in LOSSLESS_DTYPES:
        raise TypeError(
            f"Lossless updates take parameters in {' or '.join(str(dtype) for dtype in LOSSLESS_DTYPES)}, got "
            f"{tensor.dtype}. Train in bf16 or fp16, or send updates in 4 or 8 bits."
        )
    _check_kernels(tensor)


def _check(tensor: Tensor, name: str, key: str = "") -> None:
    if tensor.dtype not in DTYPES:
        advice = f"Remove {key}." if key else "Set communication_data_type, or remove zeropp_loco_param."
        raise TypeError(
            f"LoCo takes {name} in {', '.join(str(dtype) for dtype in DTYPES)}, got {tensor.dtype}. {advice}"
        )
    _check_kernels(tensor)


def _check_kernels(tensor: Tensor) -> None:
    if lacks_kernels(tensor.device.type):
        raise RuntimeError(f"The kernels of LoCo were built for the CPU only, got a CUDA tensor. {BUILD_ADVICE}")


@functools.cache
def _kernels(loaded: bool) -> frozenset[str]:
    return frozenset(
        key
        for key in ("CPU", "CUDA")
        if torch._C._dispatch_has_kernel_for_dispatch_key(f"{NAMESPACE}::loco_compress", key)
    )


_loaded = False
_build_errors: list[Exception] = []  # so that a failed build is not tried again


def has_kernels(device: str) -> bool:
    """Return whether there are kernels for ``CPU`` or ``CUDA``; if not, the reference runs."""
    return device in _kernels(_loaded)


def lacks_kernels(device: str) -> bool:
    """Return whether kernels were built, but not for this device type: a mistake, because the reference is slow.

    It is not one on ROCm, for which there are none.
    """
    return device == "cuda" and has_kernels("CPU") and not has_kernels("CUDA") and torch.version.hip is None


def load_kernels() -> bool:
    """Load the kernels, or build them; return whether there are any. Warn once if both fail, or on ROCm."""
    global _loaded
    if torch.version.hip is not None:  # DeepSpeed's builder would translate CUDA sources, and fail
        _warn_of_rocm()
        return False
    if not _loaded and not _build_errors:
        try:
            from deepspeed_ext.op_builder import LocoBuilder

            LocoBuilder().load(verbose=False)
        except Exception as error:  # no compiler, no ninja, no headers: in any case, the reference works
            _build_errors.append(error)
            _warn(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
        else:
            _loaded = True
    return _loaded


def require_kernels(device: str, group: ProcessGroup | None, key: str) -> None:
    """Load the kernels. If they cannot run on one rank's device, raise on all ranks before anything is sent.

    Args:
        device: type of the device.
        group: process group of the ranks that check together.
        key: the key of the configuration that needs kernels, for the error.

    Raises:
        RuntimeError: a rank's kernels are for the CPU only.
    """
    load_kernels()
    if device == "cpu":
        return
    lacking = lacks_kernels(device)
    if any_rank(lacking, group):
        raise RuntimeError(
            f"The kernels of LoCo were built for the CPU only{'' if lacking else ' on another rank'}, but the model "
            f"is on {device}. {BUILD_ADVICE} Or remove {key}."
        )


@functools.cache
def _warn_of_rocm() -> None:
    warnings.warn(
        "deepspeed_ext: LoCo has no kernels for ROCm, so its operators run in plain PyTorch, which is slower.",
        stacklevel=3,
    )


def _warn(reason: str) -> None:
    warnings.warn(
        f"deepspeed_ext: the kernels of LoCo could not be built ({reason}), so its operators run in plain PyTorch, "
        f"which is slower. Install a C++ compiler and ninja, with a GPU also nvcc of torch's CUDA version; or build "
        f"ahead of time with DS_BUILD_LOCO=1.",
        stacklevel=3,
    )
