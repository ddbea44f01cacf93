# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sections of configurations."""

from typing import Any

NIG = {"paro_strategy": "NIG", "paro_group_size": 2}
IIG = {"paro_strategy": "IIG", "paro_group_size": 2}
III = {"paro_strategy": "III", "paro_group_size": 2}
GGG = {"paro_strategy": "GGG", "paro_group_size": 2}
OFFLOADING = ("INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG")  # the strategies that offload parameters
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nowhere"}


def config(**zero: Any) -> dict[str, Any]:
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
