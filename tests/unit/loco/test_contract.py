# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoCo's numerical contract for single operators; parts that need several ranks are tested in test_hop.py. S: the
scale on the wire; r = h - d: the quantization error of a compensated gradient."""

import itertools
import math
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from deepspeed_ext.comm.spans import ShardSpan
from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.loco import ops, reference, sampling
from deepspeed_ext.loco.feedback import ErrorFeedback
from deepspeed_ext.loco.reference import Packing
from tests.harness.tiers import with_cases

pytestmark = pytest.mark.quick

BITS = (4, 8)
DTYPES = ops.DTYPES
ULP = 2.0**-23


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def student_t3(numel: int) -> Tensor:
    """Return heavy-tailed numbers, like gradients of embeddings."""
    squares = normal(3, numel, seed=5).square().sum(0) / 3
    return normal(numel, seed=6) / squares.sqrt()


class Sender:
    """A rank's side of one bucket: its message, and its error."""

    def __init__(self, bits: int = 4, block: int = 128, dtype: torch.dtype = torch.uint8, **options: Any) -> None:
        self.packing, self.dtype, self.options = Packing(bits, block), dtype, options
        self.error: Tensor | None = None

    def send(self, gradient: Tensor) -> Tensor:
        """Compress (rows, width), and return the received values, fp32."""
        rows, width = gradient.shape
        self.wire = self.packing.empty(rows, width, gradient)
        error_packing = Packing(8, self.packing.block_size)
        size = error_packing.row_bytes(width) if self.dtype == torch.uint8 else error_packing.padded(width)
        new = torch.empty(rows, size, dtype=self.dtype)
        ops.compress(gradient, self.wire, self.packing, error=self.error, new_error=new, **self.options)
        self.error = new
        return self.arrived(width)

    def arrived(self, width: int) -> Tensor:
        arrived = torch.empty(self.wire.shape[0], width)
        for row, out in zip(self.wire, arrived, strict=True):
            ops.decompress(row.view(1, -1), out, self.packing, hadamard=self.options.get("hadamard", False))
        return arrived

    def kept(self, width: int) -> Tensor:
        if self.error is None:
            return torch.zeros(1, width)
        return reference.decode_error(self.error, width, self.packing.block_size, self.options.get("hadamard", False))

    def steps(self, width: int) -> Tensor:
        scales = self.packing.scales(self.wire, width).float()
        return scales.repeat_interleave(self.packing.block_size, dim=1)[:, :width]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("beta", [0.0, 0.8])
def test_01_unsent_part_is_the_error(bits: int, beta: float) -> None:
    width = 1000
    sender = Sender(bits, dtype=torch.float32, beta=beta)
    for step in range(3):
        gradient, before = normal(2, width, seed=step), sender.kept(width)
        arrived = sender.send(gradient)
        expected = beta * before + (1 - beta) * (gradient + before - arrived)
        assert (sender.kept(width) - expected).abs().max() <= 4 * ULP * gradient.abs().max(), step


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-3), (torch.uint8, 3e-3)])
def test_02_errors_telescope(dtype: torch.dtype, bound: float) -> None:
    width, beta, mean = 4096, 0.8, normal(1, 4096, seed=99)
    sender = Sender(dtype=dtype, beta=beta)
    sent, total = torch.zeros(1, width, dtype=torch.float64), torch.zeros(1, width, dtype=torch.float64)
    for step in range(300):
        gradient = mean + normal(1, width, seed=step)
        total += gradient
        sent += sender.send(gradient)
    unsent = sender.kept(width).double() / (1 - beta)
    assert ((total - sent - unsent).norm() / total.norm()) <= bound
    assert ((total - sent).norm() / total.norm()) < 0.02  # without feedback 0.058


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", [32, 128, 4096])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_03_quantization_error_is_at_most_half_a_step(bits: int, block: int, dtype: torch.dtype) -> None:
    width = 8 * block + 5
    gradient = torch.stack([normal(width, seed=3), student_t3(width), normal(width).abs() + 1]).to(dtype)
    sender = Sender(bits, block)
    lost = (gradient.float() - sender.send(gradient)).abs()
    steps = sender.steps(width)
    assert (lost <= steps / 2 * (1 + 1e-3)).all()
    # Scales are rounded up: no element, the largest included, is beyond the largest integer.
    assert (gradient.float().abs() <= steps * (2 ** (bits - 1) - 1)).all()


@with_cases(
    ("bits", "block", "heavy", "hadamard", "ceiling"),
    (4, 128, False, False, 0.0145),
    (4, 32, False, False, 0.01),
    (8, 128, False, False, 5e-5),
    (4, 128, True, True, 0.015),
)
def test_04_quantization_noise(bits: int, block: int, heavy: bool, hadamard: bool, ceiling: float) -> None:
    numel = 2**20
    gradient = (student_t3(numel) if heavy else normal(numel)).view(1, -1)
    noise = (gradient - Sender(bits, block, hadamard=hadamard).send(gradient)).norm() / gradient.norm()
    assert ceiling * 0.5 < noise.item() ** 2 <= ceiling


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("block", [32, 128, 1024])
@pytest.mark.parametrize("width", [1, 127, 128, 129, 100_000])
def test_05_bytes(bits: int, block: int, width: int) -> None:
    sender = Sender(bits, block)
    sender.send(normal(3, width))
    blocks = math.ceil(width / block)
    assert sender.wire.nbytes == 3 * 16 * math.ceil((blocks * block * bits // 8 + 2 * blocks) / 16)
    if (bits, block, width) == (4, 128, 100_000):
        assert sender.wire.nbytes * 8 <= 3 * (4.125 * (width + 127) + 128)
    assert sender.error is not None and sender.error.nbytes <= 3 * (blocks * block + 2 * blocks + 15)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kept", [torch.uint8, torch.bfloat16])
def test_08_nonfinite_values_show_in_their_block(bad: float, bits: int, dtype: torch.dtype, kept: torch.dtype) -> None:
    width = 5 * 128
    sender = Sender(bits, dtype=kept, beta=0.8)
    sender.send(normal(1, width).to(dtype))
    before = sender.kept(width)
    gradient = normal(1, width, seed=1).to(dtype)
    gradient[0, 300] = bad  # a single one, which DeepSpeed's kernels sent as zero if it was a NaN
    arrived = sender.send(gradient)
    touched = slice(256, 384)
    assert not arrived[0, touched].isfinite().any()
    assert arrived[0, :256].isfinite().all() and arrived[0, 384:].isfinite().all()
    assert torch.equal(sender.kept(width)[0, touched], before[0, touched])
    assert sender.kept(width).isfinite().all()
    assert sender.send(normal(1, width, seed=2).to(dtype)).isfinite().all()


def test_08_sums_are_taken_in_fp32() -> None:
    packing, gradient = Packing(4, 128), torch.full((8, 128), 40000.0).half()
    wire = packing.empty(8, 128, gradient)
    ops.compress(gradient, wire, packing)
    mean = torch.empty(128, dtype=torch.float16)
    ops.decompress(wire, mean, packing, factor=1 / 8)
    assert (mean - 40000).abs().max() <= 40000 * 2**-7


@pytest.mark.parametrize("change", [2.0, 0.5, 4096.0])
@pytest.mark.parametrize("kept", [torch.uint8, torch.bfloat16])
def test_09_error_does_not_depend_on_loss_scale(change: float, kept: torch.dtype) -> None:
    width = 640
    first, second = Sender(dtype=kept, beta=0.8), Sender(dtype=kept, beta=0.8)
    for sender in (first, second):
        sender.options["unit"] = 8.0
        sender.send(8 * normal(1, width))
    second.options["unit"] = 8.0 * change  # a power of two scales all bits alike
    gradient = normal(1, width, seed=1)
    assert torch.equal(first.send(8 * gradient) * change, second.send(8 * change * gradient))
    assert torch.equal(first.kept(width), second.kept(width))


@pytest.mark.parametrize("bits", BITS)
def test_10_zero_and_tiny_blocks(bits: int) -> None:
    sender = Sender(bits, beta=0.0, dtype=torch.float32)
    assert torch.equal(sender.send(torch.zeros(1, 128)), torch.zeros(1, 128))
    assert torch.equal(sender.kept(128), torch.zeros(1, 128))
    for dtype, sizes in ((torch.float32, (1e-30, 2e-38, 1e-39)), (torch.bfloat16, (1e-30,)), (torch.float16, (6e-8,))):
        for size in sizes:
            sender = Sender(bits, beta=0.0, dtype=torch.float32)
            gradient = (normal(1, 128) * size).to(dtype)
            lost = gradient.float() - sender.send(gradient)
            steps = sender.steps(128)
            assert steps.isfinite().all(), (dtype, size)
            flushed = bool((steps == 0).all())
            assert flushed or (lost.abs() <= steps / 2 * (1 + 1e-3)).all(), (dtype, size)
            if size < 1e-38:
                assert flushed
            torch.testing.assert_close(sender.kept(128), lost, rtol=1e-6, atol=1e-45)


@pytest.mark.parametrize("numel", [1, 7, 127, 128, 129, 4095, 16385, 40961, 300_000])
@pytest.mark.parametrize("hadamard", [False, True])
def test_11_any_size_and_alignment(numel: int, hadamard: bool) -> None:
    base = normal(numel + 3).to(torch.bfloat16)
    for offset in (0, 1, 3):
        gradient = base[offset : offset + numel].view(1, -1)
        arrived = Sender(beta=0.8, hadamard=hadamard).send(gradient)
        assert torch.equal(Sender(beta=0.8, hadamard=hadamard).send(gradient.clone()), arrived)
        # Behind the end are zeros: they do not change the scale of what is before it.
        last = (numel - 1) // 128 * 128
        padded = torch.zeros(1, 128, dtype=gradient.dtype)
        padded[:, : numel - last] = gradient[:, last:]
        assert torch.equal(Sender(beta=0.8, hadamard=hadamard).send(padded)[:, : numel - last], arrived[:, last:])


def test_11_strided_rows_and_outputs() -> None:
    packing, gradient = Packing(4, 128), normal(4, 1000)[:, 3:700]
    wires = [packing.empty(4, 697, gradient) for _ in range(2)]
    ops.compress(gradient, wires[0], packing)
    ops.compress(gradient.contiguous(), wires[1], packing)
    assert torch.equal(*wires)
    out = torch.full((700,), 7.0)
    ops.decompress(wires[0], out[1:698], packing)
    assert out[0] == 7 and (out[698:] == 7).all() and not (out[1:698] == 7).any()


def test_12_dtypes() -> None:
    exact = normal(1, 5000).to(torch.bfloat16)
    for hadamard in (False, True):
        arrived = Sender(hadamard=hadamard).send(exact)
        assert torch.equal(arrived, Sender(hadamard=hadamard).send(exact.float()))
        projection = ((arrived * exact).sum() / exact.float().square().sum()).item()
        assert 0.97 < projection < 1.03  # bits of another type would be far off
    for dtype in (torch.float64, torch.complex64, torch.int32):
        with pytest.raises(TypeError, match=rf"float32, .*bfloat16, .*float16, got {dtype}"):
            Sender().send(torch.zeros(1, 128, dtype=dtype))
        with pytest.raises(TypeError, match="results"):
            ops.decompress(torch.zeros(1, 80, dtype=torch.uint8), torch.zeros(128, dtype=dtype), Packing(4, 128))


def test_13_bits_do_not_depend_on_threads() -> None:
    gradient, threads = normal(2, 100_000), torch.get_num_threads()
    results = []
    try:
        for count, _ in itertools.product((1, 2, 3), range(2)):
            torch.set_num_threads(count)
            sender = Sender(beta=0.8, hadamard=True)
            sender.send(gradient)
            sender.send(gradient)
            out = torch.empty(100_000)
            ops.decompress(sender.wire, out, sender.packing)
            results.append((sender.wire.clone(), sender.error.clone(), out))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def test_13_pieces_are_summed_in_order() -> None:
    packing, values = Packing(8, 32), (1e8, 1.0, -1e8, 1.0)
    wire = packing.empty(4, 32, torch.empty(0))
    ops.compress(torch.tensor(values).view(4, 1).repeat(1, 32), wire, packing)
    decoded = torch.empty(4, 32)
    for row, out in zip(wire, decoded, strict=True):
        ops.decompress(row.view(1, -1), out, packing)
    total = torch.empty(32)
    ops.decompress(wire, total, packing)
    assert torch.equal(total, ((decoded[0] + decoded[1]) + decoded[2]) + decoded[3])
    assert not torch.equal(total, (decoded[0] + decoded[2]) + (decoded[1] + decoded[3]))


@pytest.mark.parametrize("error_bits", [8, 16])
def test_15_errors_are_kept_if_padding_changes(error_bits: int) -> None:
    contents = ((ShardSpan(0, 0, 0, 1000),), (ShardSpan(0, 1, 0, 1000),))
    settings = LocoSettings(error_bits=error_bits)
    memory = ErrorFeedback(settings)
    unsent = {run: normal(1000, seed=run.row) for (run,) in contents}
    memory.load_errors(unsent, 1)
    errors = [(1 - settings.err_beta) * values for values in unsent.values()]  # Note [Bucket errors]
    for splits in ([1000, 1000], [1040, 1040], [1008, 1008]):
        stored, _ = memory.buffers(contents, splits, "cpu")
        rows = memory._decode(stored, splits).view(2, -1)
        assert rows.shape[1] == splits[0] and not rows[:, 1000:].any()
        for row, expected in zip(rows, errors, strict=True):
            assert (row[:1000] - expected).norm() < 0.02 * expected.norm()
        memory.finish_step(False)


def test_sample_measures_relative_error_of_a_message() -> None:
    width, sender, sample = 2**14, Sender(beta=0.8), sampling.Sampling()
    for step in range(2):
        gradient, before, error = normal(1, width, seed=step), sender.kept(width), sender.error
        with mock.patch.object(sampling, "SAMPLE_NUMEL", 2**12):
            sample.restart(samples_next=True)
            blocks, *later_blocks = [sample.blocks(width, sender.packing) for _ in range(3)]
            assert blocks is not None and later_blocks == [None, None]
            quantizer_input = sampling.compensate(gradient, error, blocks, unit=1.0, block_size=128)
            assert quantizer_input.numel() <= 2**12
            arrived = sender.send(gradient)
            sample.record_error(quantizer_input, sender.wire, width, sender.packing)
        compensated = gradient + before
        expected = ((compensated - arrived).norm() / compensated.norm()).item()
        assert sample.relative_error == pytest.approx(expected, rel=0.1)
