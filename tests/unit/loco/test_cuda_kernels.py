# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels give the bits of the reference, which here runs on the CPU: on a GPU, and emulated without one."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from deepspeed_ext.loco import ops, reference
from deepspeed_ext.loco.packing import Packing
from deepspeed_ext.op_builder import source_folder
from tests.harness.cuda_on_cpu import building
from tests.harness.cuda_on_cpu.emulator import Emulator

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def on_a_gpu(test: Callable[..., None]) -> Callable[..., None]:
    """Of tests that the campaign of emulated kernels has cases for, or that are of streams and graphs."""
    for mark in needs_gpu:
        test = mark(test)
    return test


KEPT = (torch.uint8, torch.bfloat16, torch.float32)
WIDTHS = (1, 7, 127, 128, 129, 4095, 16385, 40961)
ROWS = 2
GIB = 2**30
CASES = list(itertools.product(ops.DTYPES, (4, 8), (32, 128, 512, 4096), (False, True), (1.0, 1024.0)))
FIRST = CASES[::13]  # of the emulated ones: all values of each option


class Kernels(NamedTuple):
    """The CUDA kernels where they run: on a GPU, or emulated in the memory of the CPU."""

    device: str
    compress: Callable[..., None]  # with the arguments of those in ``ops``
    decompress: Callable[..., None]

    def moved(self, tensor: Tensor, offset: int = 0) -> Tensor:
        """A copy that begins ``offset`` elements (of packed bytes, pairs) after an aligned address."""
        offset *= 2 if tensor.dtype == torch.uint8 else 1
        buffer = torch.empty(tensor.numel() + offset, dtype=tensor.dtype, device=self.device)
        return buffer[offset:].view(tensor.shape).copy_(tensor)


ON_GPU = pytest.param("gpu", marks=needs_gpu)
EMULATED = pytest.param(
    "emulated", marks=pytest.mark.skipif(bool(building.missing()), reason=f"needs {building.missing()}")
)


@pytest.fixture(scope="module")
def emulator() -> Emulator:
    return Emulator(building.built(source_folder(), building.LIBRARIES, "plain"))


@pytest.fixture
def run(place: str, request: pytest.FixtureRequest) -> Kernels:
    if place == "gpu":
        assert ops.has_kernels("CUDA"), "conftest.py has built them"
        return Kernels("cuda", ops.compress, ops.decompress)
    operators = request.getfixturevalue("emulator").kernels

    def compress(
        gradient: Tensor, wire: Tensor, packing: Packing, *, error: Tensor | None = None,
        new_error: Tensor | None = None, beta: float = 0.0, unit: float = 1.0, hadamard: bool = False,
    ) -> None:  # fmt: skip
        settings = (packing.bits, packing.block_size, beta, unit, hadamard)
        operators["loco_compress"](gradient, wire, error, new_error, *settings)

    def decompress(wire: Tensor, out: Tensor, packing: Packing, factor: float = 1.0, hadamard: bool = False) -> None:
        operators["loco_decompress"](wire, out, packing.bits, packing.block_size, factor, hadamard)

    return Kernels("cpu", compress, decompress)


def bits_of(tensor: Tensor) -> Tensor:
    """As integers; of NaNs, which hardware and torch write in several ways, the largest one."""
    tensor = tensor.cpu()
    if not tensor.is_floating_point():
        return tensor
    size = tensor.element_size()
    integers = tensor.view(torch.int16 if size == 2 else torch.int32)
    return torch.where(tensor.isnan(), 2 ** (8 * size - 1) - 1, integers)


def assert_same_bits(actual: Tensor, expected: Tensor) -> None:
    different = (bits_of(actual) != bits_of(expected)).nonzero()
    assert not len(different), f"{len(different)} differ, the first at {different[0].tolist()}"


def error_like(packing: Packing, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    size = Packing(8, packing.block_size).row_bytes(width) if dtype == torch.uint8 else packing.padded(width)
    return torch.zeros(rows, size, dtype=dtype)


def gradients_of(width: int, dtype: torch.dtype) -> Tensor:
    """Of all magnitudes from subnormal ones on, some not finite."""
    gradients = torch.randn(ROWS, width) * torch.exp2(torch.randint(-30, 10, (ROWS, 1)))
    gradients[0, :32] *= 1e-38
    gradients[-1, -1] = torch.tensor([torch.nan, -torch.inf, -0.0, 1.0])[width % 4]
    return gradients.to(dtype)


def placed(place: Any, cases: list[Any], more: list[Any] | None = None) -> list[Any]:
    """Cases at a place; more of them in the deep tier."""
    deeper = [pytest.param(*place.values, *case, marks=[*place.marks, pytest.mark.deep]) for case in more or []]
    return [*(pytest.param(*place.values, *case, marks=place.marks) for case in cases), *deeper]


@pytest.mark.parametrize(
    "place, dtype, bits, block, hadamard, unit",
    [*placed(ON_GPU, CASES), *placed(EMULATED, FIRST, [case for case in CASES if case not in FIRST])],
    ids=str,
)
def test_bits_of_the_reference(
    run: Kernels, dtype: torch.dtype, bits: int, block: int, hadamard: bool, unit: float
) -> None:
    torch.manual_seed(0)
    packing = Packing(bits, block)
    for kept, width, offset in itertools.product(KEPT, WIDTHS, (0, 1)):
        wire, error = packing.empty(ROWS, width, torch.empty(0)), error_like(packing, ROWS, width, kept)
        cuda_wire, cuda_error = run.moved(wire, offset), run.moved(error, offset)
        for _ in range(2):
            gradient = gradients_of(width, dtype)
            reference.compress(gradient, wire, error, error, bits, block, 0.8, unit, hadamard)
            cuda_wire.fill_(7)
            run.compress(
                run.moved(gradient, offset), cuda_wire, packing,
                error=cuda_error, new_error=cuda_error, beta=0.8, unit=unit, hadamard=hadamard,
            )  # fmt: skip
            assert_same_bits(cuda_wire, wire)
            assert_same_bits(cuda_error, error)
        out = torch.empty(width, dtype=dtype)
        cuda_out = run.moved(out, offset)
        reference.decompress(wire, out, bits, block, 1 / 3, hadamard)
        run.decompress(cuda_wire, cuda_out, packing, 1 / 3, hadamard)
        assert_same_bits(cuda_out, out)


@pytest.mark.parametrize("place", [ON_GPU, EMULATED])
@pytest.mark.parametrize("kept", [None, *KEPT])
def test_errors_may_be_missing(run: Kernels, kept: torch.dtype | None) -> None:
    packing, gradient = Packing(4, 128), torch.randn(3, 1000)
    gradient[1, 5] = torch.inf
    wire = packing.empty(3, 1000, gradient)
    cuda_gradient, cuda_wire = run.moved(gradient), run.moved(wire)
    error = None if kept is None else error_like(packing, 3, 1000, kept).fill_(3)
    cuda_error = None if error is None else run.moved(error)
    reference.compress(gradient, wire, None, error, 4, 128, 0.8, 1.0, False)
    run.compress(cuda_gradient, cuda_wire, packing, new_error=cuda_error, beta=0.8)
    assert_same_bits(cuda_wire, wire)
    if error is not None and cuda_error is not None:
        assert_same_bits(cuda_error, error)
        reference.compress(gradient, wire, error, None, 4, 128, 0.8, 1.0, False)
        run.compress(cuda_gradient, cuda_wire, packing, error=cuda_error, beta=0.8)
        assert_same_bits(cuda_wire, wire)


@pytest.mark.parametrize("place", [ON_GPU, EMULATED])
@pytest.mark.parametrize("pieces", [1, 4, 5, 9])
def test_pieces_are_added_in_their_order(run: Kernels, pieces: int) -> None:
    for packing, dtype in itertools.product((Packing(4, 128), Packing(8, 32)), ops.DTYPES):
        wire = packing.empty(pieces, 5000, torch.empty(0))
        ops.compress(torch.randn(pieces, 5000), wire, packing)
        out = torch.empty(5000, dtype=dtype)
        cuda_out = run.moved(out)
        reference.decompress(wire, out, packing.bits, packing.block_size, 1.0, False)
        run.decompress(run.moved(wire), cuda_out, packing)
        assert_same_bits(cuda_out, out)


@on_a_gpu
def test_more_rows_than_a_dimension_of_a_grid_has() -> None:
    packing, gradient = Packing(4, 32), torch.randn(65535 + 2, 3)
    wire, cuda_wire = (packing.empty(*gradient.shape, like) for like in (gradient, gradient.cuda()))
    reference.compress(gradient, wire, None, None, 4, 32, 0.0, 1.0, False)
    ops.compress(gradient.cuda(), cuda_wire, packing)
    assert_same_bits(cuda_wire, wire)


@on_a_gpu
def test_each_stream_has_its_own_order() -> None:
    """On both, compressing waits for a gradient that is written late, and for nothing else."""
    packing, width = Packing(4, 128), 2**20
    values = [torch.randn(1, width) for _ in range(2)]
    sources = [value.cuda() for value in values]
    gradients = [torch.zeros(1, width, device="cuda") for _ in range(2)]
    wires = [packing.empty(1, width, gradient) for gradient in gradients]
    outs = [torch.empty(width, device="cuda") for _ in range(2)]
    torch.cuda.synchronize()
    for i in range(2):
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(50_000_000)
            gradients[i].copy_(sources[i])
            ops.compress(gradients[i], wires[i], packing)
            ops.decompress(wires[i], outs[i], packing)
    torch.cuda.synchronize()
    for value, wire, out in zip(values, wires, outs, strict=True):
        expected, arrived = packing.empty(1, width, value), torch.empty(width)
        reference.compress(value, expected, None, None, 4, 128, 0.0, 1.0, False)
        reference.decompress(expected, arrived, 4, 128, 1.0, False)
        assert_same_bits(wire, expected)
        assert_same_bits(out, arrived)


@on_a_gpu
def test_a_graph_captures_them() -> None:
    """So they allocate nothing, and wait for nothing."""
    packing, gradient = Packing(4, 128), torch.randn(2, 5000, device="cuda")
    wire, out = packing.empty(2, 5000, gradient), torch.empty(5000, device="cuda")
    ops.compress(gradient, wire, packing)
    ops.decompress(wire, out, packing)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.compress(gradient, wire, packing)
        ops.decompress(wire, out, packing)
    wire.zero_()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected)


@on_a_gpu
def test_more_elements_than_32_bits_count() -> None:
    if torch.cuda.mem_get_info()[0] < 24 * GIB:
        pytest.skip("needs 24 GiB of the GPU's memory")
    packing, kept, width, edge = Packing(4, 128), Packing(8, 128), 2**31 + 8, 2**14
    gradient = torch.empty(1, width, dtype=torch.bfloat16, device="cuda").normal_()
    wire, error = packing.empty(1, width, gradient), kept.empty(1, width, gradient)
    out = torch.empty(width, dtype=torch.bfloat16, device="cuda")
    ops.compress(gradient, wire, packing, new_error=error, hadamard=True)
    ops.decompress(wire, out, packing, hadamard=True)
    for first, end in ((0, edge), (2**31 - edge, width)):
        part = gradient[:, first:end].cpu()
        size = part.shape[1]
        sent, left, arrived = packing.empty(1, size, part), kept.empty(1, size, part), part[0].clone()
        reference.compress(part, sent, None, left, 4, 128, 0.0, 1.0, True)
        reference.decompress(sent, arrived, 4, 128, 1.0, True)
        assert_same_bits(out[first:end], arrived)
        for form, whole, expected in ((packing, wire, sent), (kept, error, left)):
            payload, scales = form.payload(expected, size), form.scales(expected, size)
            begin, block = first * form.bits // 8, first // form.block_size
            assert_same_bits(form.payload(whole, width)[:, begin : begin + payload.shape[1]], payload)
            assert_same_bits(form.scales(whole, width)[:, block : block + scales.shape[1]], scales)
    assert not wire[0, packing.payload_bytes(width) + 2 * packing.blocks(width) :].any()


@on_a_gpu
def test_other_devices_are_refused() -> None:
    packing, gradient = Packing(4, 128), torch.randn(1, 300, device="cuda")
    wire = packing.empty(1, 300, gradient)
    with pytest.raises(RuntimeError, match="wire must be on the device"):
        ops.compress(gradient, wire.cpu(), packing)
    with pytest.raises(RuntimeError, match="wire must be on the device"):
        ops.decompress(wire.cpu(), torch.empty(300, device="cuda"), packing)
