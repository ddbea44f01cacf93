# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Over which ranks ZeRO shards and reduces, as far as a configuration and what stands beside it tell.

Each place in DeepSpeed that asks for the data-parallel ranks has an answer of its own: ``DeepSpeedConfig.world_size``
counts batches, and leaves sequence parallelism out; ``utils.groups`` asks the mesh before the mpu in one function and
after it in the next; ZeRO-3 reduces each parameter over the group that ``zero.Init`` has cut it over.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepspeed.runtime.config import DeepSpeedConfig


def sharding_ranks(config: "DeepSpeedConfig", mpu: Any) -> int:
    """Return the number of ranks over which ZeRO shards and reduces: data- and sequence-parallel ones together.

    Args:
        config: parsed; the process groups have been initialized.
        mpu: the caller's, or None.
    """
    from deepspeed import comm as dist

    if mpu is None:
        return int(dist.get_world_size()) // max(1, config.tensor_parallel_config.autotp_size)
    return int(getattr(mpu, "get_sequence_data_parallel_world_size", lambda: config.world_size)())


def refuse_mesh(key: str, mpu: Any, mesh_device: Any) -> None:
    """Refuse a mesh whose second axis is sequence parallelism, unless an mpu names the group over both axes.

    With such a mesh DeepSpeed 0.19.8 takes the first axis for the ranks of ZeRO (``utils.groups``). Stages 1 and 2
    then reduce gradients over a part of the ranks, and replicas drift apart. Stage 3 reduces over all of them, but
    takes norms and overflows over that part, and its ranks write their shards under the names of one another's.

    Args:
        key: the key of ours that is active.
        mpu, mesh_device: what DeepSpeed was given, or None.

    Raises:
        ValueError: there is such a mesh.
    """
    if mesh_device is None or hasattr(mpu, "get_sequence_data_parallel_group"):
        return
    data, sequence = mesh_device.mesh.shape
    if sequence > 1:
        raise ValueError(
            f"{key} cannot be combined with a mesh of data_parallel_size {data} and sequence_parallel_size {sequence} "
            f"(or mesh_param): DeepSpeed takes {data} of the {data * sequence} ranks that hold the same parameters "
            f"for all of them. Pass mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to "
            f"deepspeed.initialize, after its initialize_sequence_parallel({sequence}), and remove "
            f"data_parallel_size (or mesh_param); or remove {key}."
        )
