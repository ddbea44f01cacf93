# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels compile, and on a GPU they support streams, graphs, and 64-bit sizes. ``tests.campaigns.kernels``
compares their bits with the reference, emulated and on a GPU."""

from pathlib import Path

import pytest
import torch

from deepspeed_ext.loco import lossless, ops, reference
from scripts import ROOT
from tests.campaigns.kernels import resources
from tests.harness import nvcc
from tests.harness.tiers import deep

needs_nvcc = pytest.mark.skipif(nvcc.NVCC is None, reason="needs nvcc, of the CUDA toolkit")
GIB = 2**30


@pytest.fixture
def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    assert ops.has_kernels("CUDA"), "conftest.py has built them"


@needs_nvcc
@pytest.mark.parametrize("capability", ["8.0", *deep("9.0", "10.0", "12.0")])
@pytest.mark.parametrize("source", [nvcc.SOURCES[0], *deep(*nvcc.SOURCES[1:])])
def test_cuda_kernels_use_no_local_memory(tmp_path: Path, source: str, capability: str) -> None:
    if not nvcc.knows(capability):
        pytest.skip(f"nvcc {nvcc.version()} does not know the architecture {capability}")
    arguments = nvcc.arguments([capability])
    assert any(argument.endswith(f"code=sm_{capability.replace('.', '')}") for argument in arguments), arguments
    assert "-fmad=false" in arguments and "--use_fast_math" not in arguments
    built = tmp_path / "cuda.o"
    kernels, output = nvcc.compile_source(source, [capability], built, "-fatbin" if capability == "8.0" else "-c")
    assert "warning" not in output, output
    assert built.stat().st_size
    instances = {"loco_cuda.cu": 24, "difference_cuda.cu": 12, "lossless_cuda.cu": 3, "sum_cuda.cu": 3}
    assert len(kernels) == instances[source]
    assert not resources.in_local_memory(kernels)
    # What __launch_bounds__(kThreads, kResident) promises: thread blocks load while others compute.
    assert all(resources.occupancy(kernel)[0] >= 32 for kernel in kernels), resources.table(kernels)


@needs_nvcc
@pytest.mark.deep
def test_page_lists_kernel_resources() -> None:
    page = (ROOT / "csrc" / "README.md").read_text(encoding="utf-8")
    if f"nvcc {nvcc.version()}" not in page:
        pytest.skip(f"the page has the figures of another nvcc than {nvcc.version()}")
    assert resources.table(resources.all_taken(resources.CAPABILITIES)) in page


@pytest.mark.gpu
def test_kernels_use_the_current_stream(gpu: None) -> None:
    """On both streams, compression waits for a gradient that is written late, and for nothing else."""
    packing, width = reference.Packing(4, 128), 2**20
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
        assert torch.equal(wire.cpu(), expected)
        assert torch.equal(out.cpu(), arrived)


@pytest.mark.gpu
def test_cuda_graph_captures_kernels(gpu: None) -> None:
    """Kernels neither allocate nor synchronize."""
    packing, gradient = reference.Packing(4, 128), torch.randn(2, 5000, device="cuda")
    wire, out = packing.empty(2, 5000, gradient), torch.empty(5000, device="cuda")
    updated = torch.randn(1, 5000, device="cuda").bfloat16()
    replica = torch.zeros_like(updated)
    header, size = lossless.header_of(ops.measure(updated, replica))
    packed = torch.zeros(1, int(size), dtype=torch.uint8, device="cuda")
    ops.compress(gradient, wire, packing)
    ops.decompress(wire, out, packing)
    expected = out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.compress(gradient, wire, packing)
        ops.decompress(wire, out, packing)
        ops.pack(updated, replica, header, packed)
        ops.apply_lossless(packed, replica)
    wire.zero_()
    out.zero_()
    graph.replay()
    assert torch.equal(out, expected) and torch.equal(replica, updated)


@pytest.mark.gpu
def test_kernels_support_more_than_2_31_elements(gpu: None) -> None:
    if torch.cuda.mem_get_info()[0] < 24 * GIB:
        pytest.skip("needs 24 GiB of the GPU's memory")
    packing, error_packing, width, edge = reference.Packing(4, 128), reference.Packing(8, 128), 2**31 + 8, 2**14
    gradient = torch.empty(1, width, dtype=torch.bfloat16, device="cuda").normal_()
    wire, error = packing.empty(1, width, gradient), error_packing.empty(1, width, gradient)
    out = torch.empty(width, dtype=torch.bfloat16, device="cuda")
    ops.compress(gradient, wire, packing, new_error=error, hadamard=True)
    ops.decompress(wire, out, packing, hadamard=True)
    for first, end in ((0, edge), (2**31 - edge, width)):
        part = gradient[:, first:end].cpu()
        size = part.shape[1]
        sent, new_error, arrived = packing.empty(1, size, part), error_packing.empty(1, size, part), part[0].clone()
        reference.compress(part, sent, None, new_error, 4, 128, 0.0, 1.0, True)
        reference.decompress(sent, arrived, 4, 128, 1.0, True)
        assert torch.equal(out[first:end].cpu(), arrived)
        for form, packed, expected in ((packing, wire, sent), (error_packing, error, new_error)):
            payload, scales = form.payload(expected, size), form.scales(expected, size)
            begin, block = first * form.bits // 8, first // form.block_size
            assert torch.equal(form.payload(packed, width)[:, begin : begin + payload.shape[1]].cpu(), payload)
            assert torch.equal(form.scales(packed, width)[:, block : block + scales.shape[1]].cpu(), scales)
    assert not wire[0, packing.payload_bytes(width) + 2 * packing.blocks(width) :].any()


@pytest.mark.gpu
def test_tensors_on_different_devices_are_refused(gpu: None) -> None:
    packing, gradient = reference.Packing(4, 128), torch.randn(1, 300, device="cuda")
    wire = packing.empty(1, 300, gradient)
    with pytest.raises(RuntimeError, match="wire must be on the device"):
        ops.compress(gradient, wire.cpu(), packing)
    with pytest.raises(RuntimeError, match="wire must be on the device"):
        ops.decompress(wire.cpu(), torch.empty(300, device="cuda"), packing)
