# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Over which ranks ZeRO shards and reduces, as far as a configuration and what stands beside it tell.

Each place in DeepSpeed that asks for the data-parallel ranks has an answer of its own: ``DeepSpeedConfig.world_size``
counts batches, and leaves sequence parallelism out; ``utils.groups`` asks the mesh before the mpu in one function and
after it in the next; ZeRO-3 reduces each parameter over the group that ``zero.Init`` has cut it over.
"""

from collections.abc import Sequence
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


def refuse_mesh(keys: Sequence[str], mpu: Any, mesh_device: Any) -> None:
    """Refuse a mesh whose second axis is sequence parallelism, unless an mpu names the group over both axes.

    With such a mesh DeepSpeed 0.19.8 takes the first axis for the ranks of ZeRO (``utils.groups``). Stages 1 and 2
    then reduce gradients over a part of the ranks, and replicas drift apart. Stage 3 reduces over all of them, but
    takes norms and overflows over that part, and its ranks write their shards under the names of one another's.

    Args:
        keys: those of ours that are set.
        mpu, mesh_device: what DeepSpeed was given, or None. It keeps the mesh of an engine for all later ones.

    Raises:
        ValueError: there is such a mesh.
    """
    from deepspeed.utils import groups

    mesh = groups.mesh_device if mesh_device is None else mesh_device
    if mesh is None or hasattr(mpu, "get_sequence_data_parallel_group"):
        return
    data, sequence = mesh.mesh.shape
    if sequence > 1:
        whose = " of an earlier engine of this process" if mesh_device is None else ""
        raise ValueError(
            f"zero_optimization.{keys[0]} cannot be combined with a mesh of data_parallel_size {data} and "
            f"sequence_parallel_size {sequence} (or mesh_param){whose}: DeepSpeed takes {data} of the "
            f"{data * sequence} ranks that hold the same parameters for all of them. Pass "
            f"mpu=deepspeed.runtime.sequence_parallel.parallel_state_sp to deepspeed.initialize, after its "
            f"initialize_sequence_parallel({sequence}), and remove data_parallel_size (or mesh_param); or remove "
            f"{' and '.join(keys)}."
        )
