# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A check that all ranks have the kernels that they need."""

from torch.distributed import ProcessGroup

from deepspeed_ext.comm.agreement import any_rank
from deepspeed_ext.loco import ops


def require_kernels(device: str, group: ProcessGroup | None, key: str) -> None:
    """Load the kernels. If they cannot run on one rank's device, raise on all ranks before anything is sent.

    Args:
        device: type of the device.
        group: process group of the ranks that check together.
        key: the key of the configuration that needs kernels, for the error.

    Raises:
        RuntimeError: a rank's kernels are for the CPU only.
    """
    ops.load_kernels()
    if device == "cpu":
        return
    lacking = ops.lacks_kernels(device)
    if any_rank(lacking, group):
        raise RuntimeError(
            f"The kernels of LoCo were built for the CPU only{'' if lacking else ' on another rank'}, but the model "
            f"is on {device}. {ops.BUILD_THEM} Or remove {key}."
        )
