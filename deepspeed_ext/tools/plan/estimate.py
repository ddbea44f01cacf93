# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory estimates like DeepSpeed's ``estimate_zero{2,3}_model_states_mem_needs``: same arguments, same table.

There is a row for each strategy. NGG without offload has DeepSpeed's figures for ZeRO-2, and GGG those for ZeRO-3.

DeepSpeed counts, in bytes per parameter, 2 for the 16-bit parameter, 2 for its gradient, 12 for the optimizer (fp32
parameter and two moments), and for the fp32 gradient that it updates from 4 at stage 2 and 2 at stage 3.
"""

from typing import Any

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, Strategy

_UPDATED_FROM = {False: 4, True: 2}  # bytes of the fp32 gradient, by whether parameters are sharded


def estimate_paro_model_states_mem_needs(
    strategy: Strategy,
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    group_size: int | None = None,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Return the memory of a strategy without offload.

    Args:
        strategy: one of the table.
        total_params: parameters of the model.
        largest_layer_params: parameters of the module that holds the most itself.
        num_gpus_per_node, num_nodes: size of the cluster.
        group_size: ranks in a group; by default the GPUs of a node.
        additional_buffer_factor: DeepSpeed's factor for host memory.

    Returns:
        Bytes of a node's host memory, bytes of a GPU's memory, and how many of the latter are for the largest gathered
        layer (0 with p = N).

    Raises:
        ValueError: the group size does not divide the number of GPUs.
    """
    sizes = GroupSizes(num_gpus_per_node * num_nodes, group_size or num_gpus_per_node)
    sharded = strategy.p != Placement.N
    states = ModelStates.of(total_params, optimizer_bytes=12 + _UPDATED_FROM[sharded])
    largest = 4 * largest_layer_params if sharded else 0
    # Host memory while the model is made; with sharded parameters, as under zero.Init.
    host = (largest_layer_params if sharded else total_params) * 4 * num_gpus_per_node * additional_buffer_factor
    memory = strategy.memory(sizes, states)
    # Rounded as DeepSpeed does: whole states exactly, and the sharded rest rounded down.
    whole = memory.parameters if strategy.p == Placement.N else 0.0
    return int(host), int(largest + whole) + int(memory.total - whole), int(largest)


def estimate_paro_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    group_size: int | None = None,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print a table of all strategies for a model of that size; see ``estimate_paro_model_states_mem_needs``."""
    hardware: dict[str, Any] = {
        "num_gpus_per_node": num_gpus_per_node,
        "num_nodes": num_nodes,
        "group_size": group_size,
        "additional_buffer_factor": additional_buffer_factor,
    }
    rows = [
        (name, *estimate_paro_model_states_mem_needs(row, total_params, largest_layer_params, **hardware))
        for name, row in STRATEGIES.items()
    ]
    nodes, gpus = "nodes" if num_nodes > 1 else "node", "GPUs" if num_gpus_per_node > 1 else "GPU"
    print(
        f"Estimated memory needed for params, optim states and gradients for a:\n"
        f"HW: Setup with {num_nodes} {nodes}, {num_gpus_per_node} {gpus} per node.\n"
        f"SW: Model with {int(total_params / 1e6)}M total params, {int(largest_layer_params / 1e6)}M largest layer "
        f"params, groups of {group_size or num_gpus_per_node}."
    )
    print("  per CPU  |  per GPU |   Options")
    for name, host, gpu, _ in rows:
        print(f" {host / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | paro_strategy={name}, offload_optimizer=none")
