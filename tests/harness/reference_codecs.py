# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The operators of LoCo in plain PyTorch: the reference of kernels, and the fallback without them."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

import torch

from deepspeed_ext.comm import backends
from deepspeed_ext.loco import lossless, ops, reference

REFERENCE: dict[str, Callable[..., None]] = {
    "loco_compress": reference.compress,
    "loco_decompress": reference.decompress,
    "loco_difference": reference.difference,
    "loco_apply": reference.apply,
    "lossless_measure": lossless.measure,
    "lossless_pack": lossless.pack,
    "lossless_apply": lossless.apply,
    "sum_parts": backends.sum_reference,
}


@contextmanager
def reference_codecs() -> Iterator[None]:
    """Within this context the reference runs in place of all kernels."""
    operators = getattr(torch.ops, ops.NAMESPACE)
    with ExitStack() as stack:
        for name, function in REFERENCE.items():
            stack.enter_context(mock.patch.object(operators, name, function))
        yield
