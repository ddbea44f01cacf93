# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Estimates of the memory of model states are DeepSpeed's, for the strategies that it has as well."""

import contextlib
import io
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


def table_case() -> list[list[str]]:
    """Return the lines that DeepSpeed prints for a model of a size, and ours."""
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_cold as stock

    from deepspeed_ext.planner.estimate import estimate_paro_model_states_mem_needs_all_cold as ours

    printed = []
    for estimate in (stock, ours):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            estimate(9_004_000, 6_003_000, num_gpus_per_node=8, num_nodes=2)
        printed.append(out.getvalue().splitlines())
    return printed


def test_estimates_are_those_of_deepspeed(ranks: Any) -> None:
    found = ranks(1).run(estimate_case)[0]
    assert len(found) == 2 * len(MODELS) and all(stock == ours for stock, ours in found), found


def test_the_table_looks_like_deepspeeds(ranks: Any) -> None:
    stock, ours = ranks(1).run(table_case)[0]
    assert ours[:2] == stock[:2]
    assert ours[2] == stock[2].replace("layer params.", "layer params, groups of 8.")
    assert ours[3] == stock[3]
    (last,) = (line for line in stock if "offload_optimizer=none, zero_init=1" in line)
    (mine,) = (line for line in ours if "GGG" in line)
    assert mine.rpartition("|")[0] == last.rpartition("|")[0]
    assert len(ours) == 4 + 14
