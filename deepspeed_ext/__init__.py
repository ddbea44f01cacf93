# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Group-aware ZeRO for DeepSpeed: PaRO sharding strategies, switched on by ds_config keys.

Installing the package is enough: it activates itself when torch is imported. ``import deepspeed_ext`` does the same.
This module runs inside ``import torch`` of every program in the environment: it stays with the standard library.
"""

from deepspeed_ext.activation import activate
from deepspeed_ext.placement import STRATEGIES, Placement, Strategy

__version__ = "0.1.0"

__all__ = ["STRATEGIES", "Placement", "Strategy", "__version__", "activate"]

activate()
