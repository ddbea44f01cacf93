# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Group-aware ZeRO for DeepSpeed: PaRO sharding strategies, enabled by ds_config keys.

Installing the package is enough: it activates itself when torch is imported. ``import deepspeed_ext`` does the same.
This module runs inside ``import torch`` of every program in the environment, so it imports only the standard library.
"""

import importlib
from typing import TYPE_CHECKING, Any

from deepspeed_ext.integration.activation import activate
from deepspeed_ext.version import __version__

if TYPE_CHECKING:
    from deepspeed_ext.checkpoint.export import export_weights
    from deepspeed_ext.checkpoint.in_memory import save_in_memory
    from deepspeed_ext.strategy import STRATEGIES, Placement, Strategy
    from deepspeed_ext.zero.last_batches import last_batches
    from deepspeed_ext.zero.outer import outer_weights
    from deepspeed_ext.zero.sample_weights import set_tokens
    from deepspeed_ext.zero.sampler import GroupSampler
    from deepspeed_ext.zero.updates_in_flight import wait_for_updates

__all__ = [
    "STRATEGIES",
    "GroupSampler",
    "Placement",
    "Strategy",
    "__version__",
    "activate",
    "export_weights",
    "last_batches",
    "outer_weights",
    "save_in_memory",
    "set_tokens",
    "wait_for_updates",
]
_MODULES = {
    "GroupSampler": "zero.sampler",
    "export_weights": "checkpoint.export",
    "last_batches": "zero.last_batches",
    "outer_weights": "zero.outer",
    "save_in_memory": "checkpoint.in_memory",
    "set_tokens": "zero.sample_weights",
    "wait_for_updates": "zero.updates_in_flight",
}


def __getattr__(name: str) -> Any:
    """Import public names only when they are used."""
    if name in __all__:
        return getattr(importlib.import_module(f"deepspeed_ext.{_MODULES.get(name, 'strategy')}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


activate()
