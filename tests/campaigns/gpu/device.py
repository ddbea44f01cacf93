# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Whether there is a GPU, for programs that need one, and what they say and return without it."""

NO_GPU = 3  # exit status
SAID = "No GPU: nothing was run. torch sees none of NVIDIA's."


def has_gpu() -> bool:
    """Return whether torch sees a GPU of NVIDIA's."""
    import torch

    return bool(torch.version.cuda) and torch.cuda.is_available()
