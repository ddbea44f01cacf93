# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sums the parts of a bucket that a rank has received: in fp32, in rank order, rounded once.

The reference is here. ``loco.ops`` loads kernels (``csrc``), which give the same bits for all numbers; only the bits
of NaNs may differ.
"""

import torch
from torch import Tensor

NAMESPACE = "deepspeed_paro"
DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of kernels


def reference(parts: Tensor, out: Tensor) -> None:
    """See ``sum_parts``; writes the sum to ``out``, 1D."""
    # Not ``parts.sum(0, dtype=torch.float32)``: on the CPU it adds 8 parts or more in another order (torch 2.13).
    total = parts[0].to(torch.float32, copy=True)
    for part in parts[1:]:
        total += part
    out.copy_(total)


_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_library.define("sum_parts(Tensor parts, Tensor(a!) out) -> ()")
_library.impl("sum_parts", reference, "CompositeExplicitAutograd")
# Like all operators of the library, it only writes into its arguments.
torch.library.register_fake(f"{NAMESPACE}::sum_parts", lambda parts, out: None, lib=_library)


def sum_parts(parts: Tensor) -> Tensor:
    """Return the sum of parts, in their dtype; runs a kernel if there is one for the device.

    Args:
        parts: (parts, width), the part of each rank in rank order; at least one part, rows without gaps.

    Returns:
        1D of ``width`` elements.
    """
    out = parts.new_empty(parts.shape[1])
    if out.dtype not in DTYPES:
        reference(parts, out)
    elif out.numel():
        torch.ops.deepspeed_paro.sum_parts(parts, out)
    return out
