# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Estimates of the memory of model states are DeepSpeed's, for the strategies that it has as well."""

from typing import Any

from deepspeed_ext.strategy import STRATEGIES

MODELS = [(7 * 10**9, 10**8, 8, 4), (123_457, 991, 3, 5), (10**6, 1, 1, 1)]  # total, largest layer, GPUs a node, nodes


def estimate_case() -> list[tuple[Any, Any]]:
    """Return DeepSpeed's estimates and ours of the same strategies, as (host, GPU)."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs as zero3
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs as zero2

    from deepspeed_ext.planner.estimate import estimate_paro_model_states_mem_needs as ours

    found = []
    for total, largest, gpus, nodes in MODELS:
        on = {"num_gpus_per_node": gpus, "num_nodes": nodes}
        two = zero2(total, **on, cpu_offload=False)
        three = zero3(total, largest, **on, cpu_offload=False, cpu_offload_params=False)[:2]
        found += [
            (stock, ours(STRATEGIES[name], total, largest, **on)[:2]) for name, stock in (("NGG", two), ("GGG", three))
        ]
    return found


def test_estimates_are_those_of_deepspeed(ranks: Any) -> None:
    found = ranks(1).run(estimate_case)[0]
    assert len(found) == 2 * len(MODELS) and all(stock == ours for stock, ours in found), found
