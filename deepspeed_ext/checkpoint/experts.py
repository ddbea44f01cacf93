# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Experts of expert parallelism in checkpoints: DeepSpeed writes a file for each expert, apart from the module's."""

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups

from deepspeed_ext.comm.agreement import all_gather_texts
from deepspeed_ext.deepspeed_types import Engine

EXPERT_ORDER = "data_before_experts"  # in the header of saved files: the result of the function with that name


def data_before_experts(engine: Engine) -> bool:
    """Return whether neighboring ranks have the same experts."""
    return bool(engine.has_moe_layers and engine._config.use_data_before_expert_parallel_)


def names_outside_experts(engine: Engine, names: Iterable[str]) -> list[str]:
    """Return the names of a module's entries that are in its own file, not in expert files."""
    entries: dict[str, Any] = dict.fromkeys(names)
    return list(engine._get_non_moe_state_dict(entries)) if engine.has_moe_layers else list(entries)


def model_hash(engine: Engine) -> str:
    """Return a hash of the names and shapes of a model's parameters, without experts.

    Collective over all ranks, which have different parameters in pipelines and with tensor parallelism.
    """
    shapes = {name: tuple(getattr(param, "ds_shape", param.shape)) for name, param in engine.module.named_parameters()}
    entries = [(name, shapes[name]) for name in sorted(names_outside_experts(engine, shapes))]
    return _digest("".join(sorted(set(all_gather_texts(_digest(repr(entries)))))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def expert_files(engine: Engine, load_dir: str, tag: str) -> Iterator[tuple[str, dict[str, tuple[int, ...]]]]:
    """Yield the files of this rank's experts, each with its expected names and shapes.

    If parameters are sharded, there are no such files: experts are in the shards.
    """
    if not engine.has_moe_layers or engine.zero_optimization_partition_weights():
        return
    number = 0
    for name, module in engine.module.named_modules():
        family = _expert_group_name(module)
        if not family:
            continue
        first = groups._get_expert_parallel_rank(family) * module.num_local_experts
        for local in range(module.num_local_experts):
            path = engine._get_expert_ckpt_name(
                load_dir, number, first + local, tag, checkpoint_mp_rank=engine.checkpoint_mp_rank
            )
            yield path, dict(_expert_shapes(module, f"{name}." if name else "", local, first + local))
        number += 1


def _expert_shapes(module: Any, prefix: str, local: int, expert: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes in an expert's file; names contain its number among all experts."""
    if isinstance(module, MoE):
        local_expert = module.deepspeed_moe.experts.deepspeed_experts[local]
        start = f"{prefix}deepspeed_moe.experts.deepspeed_experts.{expert}."
        yield from ((start + name, tuple(value.shape)) for name, value in local_expert.state_dict().items())
        return
    for name, value in module.experts.named_parameters():
        yield f"{prefix}experts.{name}.{expert}", tuple(value.shape[1:])


def _expert_group_name(module: Any) -> str:
    """Return the name of DeepSpeed's process group for a layer's experts; empty for any other module."""
    if isinstance(module, MoE):
        return str(module.expert_group_name)
    return str(module.ep_group_name) if is_autoep(module) else ""


def is_autoep(module: Any) -> bool:
    """Return whether a module is a layer with which AutoEP replaced a mixture."""
    return type(module).__name__ == "AutoEPMoELayer"
