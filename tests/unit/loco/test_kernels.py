# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Kernels match the reference bit for bit and are valid torch operators. Without kernels, the reference processes
messages in pieces of bounded size.
"""

import itertools
import subprocess
import sys
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepspeed_ext.comm import backends
from deepspeed_ext.loco import ops, reference
from deepspeed_ext.loco.reference import Packing
from tests.harness.cuda_on_cpu.emulator import bits_of
from tests.harness.tiers import deep, with_cases

KEPT = (torch.uint8, torch.bfloat16, torch.float32)


def error_like(packing: Packing, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    size = Packing(8, packing.block_size).row_bytes(width) if dtype == torch.uint8 else packing.padded(width)
    return torch.zeros(rows, size, dtype=dtype)


@pytest.mark.parametrize("block", [32, 4096, *deep(64, 128, 256)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
@pytest.mark.parametrize("hadamard", [False, True])
def test_kernels_match_reference_bits(dtype: torch.dtype, bits: int, block: int, hadamard: bool) -> None:
    assert ops.has_kernels("CPU"), "conftest.py has built them"
    torch.manual_seed(0)
    packing = Packing(bits, block)
    for kept in KEPT:
        for width in (1, 31, 129, 4100):
            for unit in (1.0, 1024.0, 3.0):
                both = []
                gradients = [(torch.randn(3, width) * unit).to(dtype) for _ in range(3)]
                gradients[0][1] = 0.0  # nothing is sent of it, nor of what fills its last block
                gradients[1][0, 0] = float("nan")
                for run in (reference.compress, torch.ops.deepspeed_paro.loco_compress):
                    old = None
                    for gradient in gradients:
                        wire = torch.full((3, packing.row_bytes(width)), 7, dtype=torch.uint8)
                        new = error_like(packing, 3, width, kept)
                        run(gradient, wire, old, new, bits, block, 0.8, unit, hadamard)
                        both.append((wire, new))
                        old = new
                half = len(both) // 2
                for (a, b), (c, d) in zip(both[:half], both[half:], strict=True):
                    assert torch.equal(a, c) and torch.equal(b.view(torch.uint8), d.view(torch.uint8))
                outs = [torch.empty(width, dtype=dtype) for _ in range(2)]
                reference.decompress(both[0][0], outs[0], bits, block, 1 / 3, hadamard)
                torch.ops.deepspeed_paro.loco_decompress(both[0][0], outs[1], bits, block, 1 / 3, hadamard)
                assert torch.equal(*outs)


def test_error_can_be_updated_in_place() -> None:
    packing, gradient = Packing(4, 128), torch.randn(2, 1000)
    old = error_like(packing, 2, 1000, torch.uint8)
    wire = packing.empty(2, 1000, gradient)
    ops.compress(gradient, wire, packing, new_error=old, beta=0.8)
    new = old.clone()
    ops.compress(gradient, wire, packing, error=old.clone(), new_error=new, beta=0.8)
    ops.compress(gradient, wire, packing, error=old, new_error=old, beta=0.8)
    assert torch.equal(old, new)


@pytest.mark.parametrize("values", [torch.float16, torch.bfloat16])
def test_kernels_match_reference_on_all_16_bit_values(values: torch.dtype) -> None:
    """Loads and stores convert as torch does."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(values)
    finite = numbers[numbers.isfinite()]
    packing = Packing(8, 32)
    gradient = finite.view(-1, 1).repeat(1, 32)
    wires = [packing.empty(len(finite), 32, gradient) for _ in range(2)]
    ops.compress(gradient, wires[0], packing)
    reference.compress(gradient, wires[1], None, None, 8, 32, 0.0, 1.0, False)
    assert torch.equal(*wires)
    outs = [torch.empty(32, dtype=values) for _ in range(2)]
    for i in range(0, len(finite), 97):
        ops.decompress(wires[0][i : i + 1], outs[0], packing)
        reference.decompress(wires[0][i : i + 1], outs[1], 8, 32, 1.0, False)
        assert torch.equal(*outs), finite[i]


@pytest.mark.parametrize("kept", [None, *KEPT])
def test_opcheck(kept: torch.dtype | None) -> None:
    packing, gradient = Packing(4, 128), torch.randn(2, 300)
    wire = packing.empty(2, 300, gradient)
    errors = [None if kept is None else error_like(packing, 2, 300, kept) for _ in range(2)]
    arguments: tuple[Any, ...] = (gradient, wire.zero_(), *errors, 4, 128, 0.8, 1.0, False)
    torch.library.opcheck(torch.ops.deepspeed_paro.loco_compress.default, arguments)
    out = torch.zeros(300)
    torch.library.opcheck(torch.ops.deepspeed_paro.loco_decompress.default, (wire, out, 4, 128, 0.5, True))
    updated, replica = parameters(2, 300, torch.bfloat16)
    torch.library.opcheck(torch.ops.deepspeed_paro.loco_difference.default, (updated, replica, wire, 4, 128))
    torch.library.opcheck(torch.ops.deepspeed_paro.loco_apply.default, (wire, replica, 4, 128))
    torch.library.opcheck(torch.ops.deepspeed_paro.sum_parts.default, (gradient, out))


@with_cases(
    ("change", "message"),
    ({"bits": 5}, "bits must be 4 or 8, got 5"),
    ({"block": 48}, "block_size must be a power of two from 32 to 4096, got 48"),
    ({"block": 8192}, "block_size must be a power of two from 32 to 4096, got 8192"),
    ({"wire": 1}, r"wire must be contiguous uint8 of \(2, 208\)"),
    ({"error": 1}, "an error in 8 bits must be contiguous uint8"),
)
def test_operators_refuse_unsuitable_tensors(change: dict[str, int], message: str) -> None:
    gradient = torch.randn(2, 300)
    wire = torch.zeros(2, 208 + 16 * change.get("wire", 0), dtype=torch.uint8)
    error = torch.zeros(2, 400 + 16 * change.get("error", 0), dtype=torch.uint8)
    with pytest.raises(RuntimeError, match=message):
        torch.ops.deepspeed_paro.loco_compress(
            gradient, wire, None, error, change.get("bits", 4), change.get("block", 128), 0.8, 1.0, False
        )


def test_cpu_only_kernels_refuse_gpu_tensors() -> None:
    class OnGpu:
        dtype, device = torch.float32, torch.device("cuda", 0)

    for_cpu = mock.patch.object(ops, "has_kernels", lambda device: device == "CPU")
    with for_cpu, pytest.raises(RuntimeError, match="built for the CPU only, got a CUDA tensor"):
        ops.compress(OnGpu(), OnGpu(), Packing(4, 128))  # type: ignore[arg-type]


def parameters(rows: int, width: int, dtype: torch.dtype, step: float = 1e-3) -> tuple[Tensor, Tensor]:
    """Return updated parameters and their replica, both as rows of a longer tensor."""
    replica = (torch.randn(rows, width + 5) * 0.02).to(dtype)
    updated = (replica.float() + step * torch.randn(rows, width + 5)).to(dtype)
    return updated[:, 3 : 3 + width], replica[:, 2 : 2 + width]


@pytest.mark.parametrize("block", [32, 128, 4096])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_differences_match_reference_bits(dtype: torch.dtype, bits: int, block: int) -> None:
    torch.manual_seed(0)
    packing = Packing(bits, block)
    for width in (1, 31, 129, 4100):
        updated, replica = parameters(3, width, dtype)
        updated[1, 0] = float("nan")
        if width > 32:
            updated[2] = replica[2]
        wires = [torch.full((3, packing.row_bytes(width)), 7, dtype=torch.uint8) for _ in range(2)]
        reference.difference(updated, replica, wires[0], bits, block)
        torch.ops.deepspeed_paro.loco_difference(updated, replica, wires[1], bits, block)
        assert torch.equal(*wires)
        both = [parameters(3, width, dtype)[1] for _ in range(2)]
        for target, run in zip(both, (reference.apply, torch.ops.deepspeed_paro.loco_apply), strict=True):
            target.copy_(replica)
            run(wires[0], target, bits, block)
        assert torch.equal(both[0].isnan(), both[1].isnan()) and both[0].isnan().any()
        assert torch.equal(both[0].nan_to_num(), both[1].nan_to_num())
        assert width < 32 or torch.equal(both[1][2], replica[2])


@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_sums_of_parts_match_reference_bits(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    for count, width in itertools.product((1, 2, 3, 8, 64), (1, 15, 16, 1023, 1024, 5000)):
        parts = torch.randn(count, width + 3).to(dtype)[:, 1 : 1 + width]
        parts[-1] = -parts[0].mul_(1e4)  # these cancel, and leave the rounding of the sums between them
        parts[count // 2, 0], parts[:, -1] = float("nan"), -0.0
        expected = torch.empty(width, dtype=dtype)
        backends.sum_reference(parts, expected)
        assert torch.equal(bits_of(backends.sum_parts(parts)), bits_of(expected)), (count, width)
    with pytest.raises(RuntimeError, match="with the width and the dtype of at least one part"):
        torch.ops.deepspeed_paro.sum_parts(parts, expected[1:])


def test_nothing_is_written_after_a_row() -> None:
    packing = Packing(4, 128)
    buffer = torch.randn(4, 1000)
    before, replica = buffer.clone(), buffer[:, 10:310]
    wire = packing.empty(4, 300, replica)
    ops.difference(replica + 0.1, replica, wire, packing)
    ops.apply(wire, replica, packing)
    assert torch.equal(buffer[:, :10], before[:, :10]) and torch.equal(buffer[:, 310:], before[:, 310:])
    assert (replica - before[:, 10:310] - 0.1).abs().max() < 0.01


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("dtype", ops.DTYPES, ids=str)
def test_unsent_differences_are_sent_later(dtype: torch.dtype, bits: int) -> None:
    """Without drift: the replica is within a quantization step of the last difference, and converges in a pause."""
    torch.manual_seed(1)
    packing, width = Packing(bits, 128), 1000
    master = torch.randn(1, width) * 0.02
    replica = master.to(dtype)
    wire = packing.empty(1, width, replica)
    for number in range(200):
        master += 1e-3 * torch.randn(1, width) if number < 190 else 0.0
        updated = master.to(dtype)
        ops.difference(updated, replica, wire, packing)
        ops.apply(wire, replica, packing)
        steps = packing.scales(wire, width).float().repeat_interleave(128, dim=1)[:, :width]
        assert ((replica.float() - updated.float()).abs() <= steps).all()
    assert torch.equal(replica, updated)


def test_differences_refuse_unsuitable_tensors() -> None:
    packing, updated = Packing(4, 128), torch.zeros(2, 300)
    wire = packing.empty(2, 300, updated)
    for unsuitable in (updated.bfloat16(), updated[:, 1:], updated[:1]):
        with pytest.raises(RuntimeError, match="the shape and the dtype of the updated parameters"):
            ops.difference(updated, unsuitable, wire, packing)
    with pytest.raises(RuntimeError, match="wire must be contiguous uint8"):
        ops.apply(wire[:, 1:], updated, packing)


WITHOUT_COMPILER = """
import warnings, torch
from deepspeed_ext.comm.backends import sum_parts
from deepspeed_ext.loco import ops
from deepspeed_ext.loco.reference import Packing
with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    assert not ops.load_kernels() and not ops.load_kernels() and not ops.has_kernels("CPU")
messages = [str(warning.message) for warning in seen if "kernels of LoCo" in str(warning.message)]
assert len(messages) == 1 and "plain PyTorch" in messages[0], messages
packing, gradient = Packing(4, 128), torch.randn(1, 300)
wire, out = packing.empty(1, 300, gradient), torch.empty(300)
ops.compress(gradient, wire, packing)
ops.decompress(wire, out, packing)
assert (out - gradient[0]).norm() < 0.2 * gradient.norm()
assert sum_parts(torch.tensor([[256.0], [1.0], [1.0]]).bfloat16()).item() == 258.0
"""


def test_without_compiler_reference_runs_with_one_warning(tmp_path: Any) -> None:
    environment = {"PATH": str(tmp_path), "TORCH_EXTENSIONS_DIR": str(tmp_path), "CXX": "/nonexistent"}
    environment |= {"HOME": str(tmp_path), "DS_ACCELERATOR": "cpu"}
    done = subprocess.run([sys.executable, "-c", WITHOUT_COMPILER], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_with_gpu_but_no_nvcc_warning_names_missing_package(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.utils.cpp_extension, "CUDA_HOME", None)
    monkeypatch.setattr(ops, "_loaded", False)
    monkeypatch.setattr(ops, "_build_errors", [])
    with pytest.warns(UserWarning, match="CUDA_HOME does not exist.*with a GPU also nvcc"):
        assert not ops.load_kernels()
    assert not list(tmp_path.rglob("lock"))


def test_on_rocm_the_reference_runs_with_one_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    for_cpu = frozenset({"CPU"})  # loaded by another test
    for owner, name, value in (
        (torch.version, "hip", "6.4.43482"),
        (ops, "_loaded", False),
        (ops, "_build_errors", []),
        (ops, "_kernels", lambda loaded: for_cpu),
        (ops, "any_rank", lambda condition, group: condition),
    ):
        monkeypatch.setattr(owner, name, value)
    ops._warn_of_rocm.cache_clear()
    with pytest.warns(UserWarning, match=r"no kernels for ROCm.*plain PyTorch") as warned:
        ops.require_kernels("cuda", None, "zeropp_loco_param")
        assert not ops.load_kernels() and not ops.lacks_kernels("cuda")
    assert len(warned) == 1
    packing, gradient = Packing(4, 128), torch.randn(1, 300)
    wire = packing.empty(1, 300, gradient)
    ops.compress(gradient, wire, packing)
    expected = packing.empty(1, 300, gradient)
    reference.compress(gradient, expected, None, None, 4, 128, 0.0, 1.0, False)
    assert torch.equal(wire, expected)


def test_a_build_ahead_of_time_on_rocm_says_to_omit_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepspeed_ext.op_builder import LocoBuilder

    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    with pytest.raises(RuntimeError, match=r"no kernels for ROCm.*without DS_BUILD_LOCO"):
        LocoBuilder().builder()


def test_kernels_use_deepspeed_flags_except_debug_symbols() -> None:
    from deepspeed_ext.op_builder import LocoBuilder

    builder = LocoBuilder()
    assert set(super(LocoBuilder, builder).cxx_args()) - set(builder.cxx_args()) == {"-g"}


BLOCK = 64


class Largest(TorchDispatchMode):
    """Records the bytes of the largest storage that operations allocate, except for given tensors."""

    def __init__(self, *tensors: Tensor | None) -> None:
        super().__init__()
        self._given = {tensor.untyped_storage().data_ptr() for tensor in tensors if tensor is not None}
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in self._given:
                self.nbytes = max(self.nbytes, tensor.untyped_storage().nbytes())
        return result


def message(bits: int, kept: torch.dtype, rows: int, width: int, hadamard: bool) -> tuple[list[Tensor], int]:
    """Return the outputs of two steps and of a sum of three pieces, and the bytes of the largest temporary."""
    generator = torch.Generator().manual_seed(0)
    packing, written, largest, old = Packing(bits, BLOCK), [], 0, None
    for dtype in (torch.float32, torch.bfloat16):
        gradient = torch.randn(rows, width, generator=generator).to(dtype)
        gradient[0, width // 2] = float("nan")
        wire = torch.full((rows, packing.row_bytes(width)), 7, dtype=torch.uint8)
        new, out = error_like(packing, rows, width, kept).fill_(7), torch.empty(width, dtype=dtype)
        with Largest(gradient, wire, old, new, out) as largest_storage:
            reference.compress(gradient, wire, old, new, bits, BLOCK, 0.8, 3.0, hadamard)
            reference.decompress(wire, out, bits, BLOCK, 1 / 3, hadamard)
        written, largest, old = [*written, wire, new, out], max(largest, largest_storage.nbytes), new
    return written, largest


@pytest.mark.quick
@pytest.mark.parametrize("hadamard", [False, True], ids=["plain", "rotated"])
@pytest.mark.parametrize("kept", [torch.uint8, torch.float32, *deep(torch.bfloat16)], ids=str)
@pytest.mark.parametrize("bits", [4, 8])
def test_reference_pieces_match_one_pass(bits: int, kept: torch.dtype, hadamard: bool) -> None:
    for rows, width in ((3, 1000), (2, 1024), (3, 20)):
        expected, _ = message(bits, kept, rows, width, hadamard)
        for piece in (1, 5 * BLOCK):
            with mock.patch.object(reference, "PIECE", piece):
                cut, _ = message(bits, kept, rows, width, hadamard)
            for a, b in zip(expected, cut, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


@pytest.mark.quick
def test_reference_temporaries_have_piece_size() -> None:
    with mock.patch.object(reference, "PIECE", 2**14):
        for rows, width in ((2, 2**14), (2, 2**18), (16, 2**15)):
            _, largest = message(4, torch.uint8, rows, width, hadamard=True)
            assert 0 < largest <= 4 * 2**14, (rows, width, largest)
