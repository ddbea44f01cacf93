# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's quantized gradients (qgZ) on a CPU, where its kernels do not run; everything here runs inside ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.comm import coalesced_collectives
from deepspeed.utils import groups as process_groups


class Quantizer:
    """DeepSpeed's CUDA kernels as far as its Python needs them: nothing is rounded, and dtypes are not looked at."""

    Symmetric = 0

    def swizzle_quant(self, tensor: Any, groups: int, *_: int) -> tuple[Any, Any]:
        """The bits, viewed as float16; (nodes, ranks of a node, chunk) to ranks first."""
        *_, nodes, local = _
        values = tensor.view(-1).view(torch.float16).float()
        swizzled = values.view(nodes, local, -1).transpose(0, 1).reshape(-1)
        return swizzled, torch.ones(groups)

    def quantized_reduction(self, pieces: Any, scales: Any, *rest: int) -> tuple[Any, Any]:
        """The sum over the ranks of a node, not divided."""
        local = rest[-1]
        return pieces.view(local, -1).sum(0), scales[: len(scales) // local]

    def dequantize(self, values: Any, *_: Any) -> Any:
        """As they are."""
        return values


@contextmanager
def on_nodes(local: int) -> Iterator[None]:
    """Take ``local`` ranks for those of a node, and the stand-in for the kernels."""
    accelerator = type(get_accelerator())
    with (
        mock.patch.object(accelerator, "device_count", lambda self: local),
        mock.patch.object(coalesced_collectives, "quantizer_module", Quantizer()),
    ):
        try:
            yield
        finally:
            process_groups._ALL_TO_ALL_GROUP.clear()
