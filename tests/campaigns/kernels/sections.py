# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The sections of cases by name, and those that a build runs."""

from collections.abc import Callable

from tests.campaigns.kernels import blocks, bounds, lossless
from tests.campaigns.kernels.drawing import Drawing
from tests.harness.cuda_on_cpu.comparing import Comparison

Section = Callable[[Comparison, Drawing, float], None]
SECTIONS: dict[str, Section] = {
    "compress": blocks.compress,
    "decompress": blocks.decompress,
    "differences": blocks.differences,
    "sums": blocks.sums,
    "modes": lossless.modes,
    "lossless_rows": lossless.rows,
    "strange": lossless.strange,
    "empty": bounds.empty,
    "rows": bounds.rows,
    "large": bounds.large,
    "devices": bounds.devices,
}
_OF_PLAIN = ("rows", "large")  # memory that the other builds would touch
# What takes nothing but tensors; the others choose blocks, or where tensors seem to be.
ON_DEVICE = ("compress", "decompress", "differences", "sums", "modes", "lossless_rows", "strange")
OF_BUILDS = {
    "plain": tuple(SECTIONS),
    "checked": tuple(name for name in SECTIONS if name not in (*_OF_PLAIN, "empty", "devices")),
    "address": tuple(name for name in SECTIONS if name not in _OF_PLAIN),
}
