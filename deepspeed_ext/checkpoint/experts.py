# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experts of expert parallelism in checkpoints: DeepSpeed writes a file for each, beside that of the module."""

from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

from deepspeed_ext.deepspeed_types import Engine


def outside_experts(engine: Engine, names: Iterable[str]) -> list[str]:
    """Return those of a module's names that are in its own file."""
    found: dict[str, Any] = dict.fromkeys(names)
    return list(engine._get_non_moe_state_dict(found)) if engine.has_moe_layers else list(found)


def expert_files(engine: Engine, load_dir: str, tag: str) -> Iterator[str]:
    """Yield the files of this rank's experts; with parameters sharded there are none, and these are in the shards."""
    if not engine.has_moe_layers or engine.zero_optimization_partition_weights():
        return
    number = 0
    for module in engine.module.modules():
        family = _family(module)
        if family:
            first = groups._get_expert_parallel_rank(family) * module.num_local_experts
            for expert in range(first, first + module.num_local_experts):
                yield engine._get_expert_ckpt_name(
                    load_dir, number, expert, tag, checkpoint_mp_rank=engine.checkpoint_mp_rank
                )
            number += 1


def _family(module: Any) -> str:
    """Return the name of DeepSpeed's group of a layer's experts; empty for any other module."""
    if isinstance(module, MoE):
        return str(module.expert_group_name)
    return str(module.ep_group_name) if type(module).__name__ == "AutoEPMoELayer" else ""
