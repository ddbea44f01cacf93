# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Chooses the modules that stay whole on every rank, if ``paro_modules`` is "fill".

Embeddings come first: one that is tied to the head is gathered four times per micro-batch. Then come modules in the
order of the model, until one does not fit. A module that is too large is replaced by its children. The choice depends
only on the model and the configuration, so it is the same on all ranks.
"""

from collections import Counter
from collections.abc import Callable, Iterator

from deepspeed.moe.utils import is_moe_param
from torch import nn

from deepspeed_ext.config.keys import FILL, MEMORY, MODULES, SECTION
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.model_bytes import whole_bytes
from deepspeed_ext.strategy import Placement, Strategy
from deepspeed_ext.zero.families import Topologies, states_of_families
from deepspeed_ext.zero.module_placements import shorten


def modules_that_fit(engine: Engine, strategy: Strategy, topologies: Topologies) -> dict[str, str]:
    """Return the modules to keep whole, as ``paro_modules``, and log them on rank 0."""
    memory_gb = engine._config.zero_config.paro_memory_gb
    assert memory_gb is not None
    parts = states_of_families(topologies, engine)
    left = memory_gb * 1e9 - sum(strategy.memory(sizes, states).total for sizes, states in parts)
    names, held = choose_modules(engine.module, left, lambda params: whole_bytes(engine, params))
    warn_on_rank_0(
        f'{SECTION}.{MODULES} "{FILL}" keeps {shorten(names) or "no module"} whole: {held / 1e9:.3g} GB. '
        f"{(left - held) / 1e9:.3g} of {MEMORY} {memory_gb:g} is left."
    )
    return dict.fromkeys(names, Placement.N.name)


def choose_modules(
    model: nn.Module, budget: float, bytes_of: Callable[[list[nn.Parameter]], float]
) -> tuple[list[str], float]:
    """Return the names of the modules to keep whole, and the bytes of their parameters.

    Args:
        model: the model.
        budget: bytes for whole parameters.
        bytes_of: returns the bytes of parameters.
    """
    chosen: dict[str, None] = {}
    held, seen = 0.0, set[int]()

    def take(name: str, module: nn.Module) -> bool:
        nonlocal held
        params = [param for param in module.parameters() if id(param) not in seen]
        nbytes = bytes_of(params)
        if held + nbytes > budget or any(map(is_moe_param, module.parameters())):
            return False
        chosen[name] = None
        held += nbytes
        seen.update(map(id, params))
        return True

    def take_children(module: nn.Module, prefix: str) -> bool:
        for name, child in module.named_children():
            path = f"{prefix}{name}"
            if not any(True for _ in child.parameters()) or path in embeddings:
                continue
            if isinstance(child, nn.ModuleList) or not take(path, child):
                experts_only = all(map(is_moe_param, child.parameters()))
                if not experts_only and not (any(True for _ in child.children()) and take_children(child, f"{path}.")):
                    return False
        return True

    embeddings = dict(_embeddings(model))
    for name, module in embeddings.items():
        take(name, module)
    take_children(model, "")
    return list(chosen), held


def _embeddings(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield embeddings and modules that share their parameters, those that are used most often first."""
    named = [(name, module) for name, module in model.named_modules() if name]
    users = Counter(id(param) for _, module in named for param in module._parameters.values() if param is not None)
    tables = [module for _, module in named if isinstance(module, nn.Embedding)]
    shared = {id(param) for table in tables for param in table.parameters()}
    found = [(name, module) for name, module in named if not shared.isdisjoint(map(id, module._parameters.values()))]
    found.sort(key=lambda item: -max(users[id(param)] for param in item[1].parameters(recurse=False)))
    return iter(found)
