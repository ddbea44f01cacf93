# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``MoE`` layers with p = I and G.

Note [MoE layers with sharded parameters]
    DeepSpeed's stage 3 shards AutoEP's experts, each over the ranks that have it, and refuses those of its own ``MoE``
    layers (``DeepSpeedEngine._validate_zero3_moe_compatibility``). What it has to know of a parameter is the same for
    both: that it is an expert's, and of which group of ranks. It reads that from attributes, which AutoEP sets.

    Nothing in a layer keeps its experts from being sharded. In each forward it calls all experts of the rank, in one
    order and with as many rows each, whether there are tokens for them or not, so that ranks gather the same
    parameters in the same order. Its gate reads the weight of a module that it does not call, which is announced
    (``register_external_parameter``): otherwise DeepSpeed learns of it in the first forward, when it has noted
    already which parameters the gate uses, and takes the next one for a change of the model.

    A checkpoint has weights of experts where it has those of AutoEP: in the shards. DeepSpeed also writes its file for
    each expert, from parameters that nobody has gathered: there is nothing in it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.partition_parameters import register_external_parameter

from deepspeed_ext.config.unsupported import native_mixtures
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replaced

EXPERTS = "autoep_expert"  # DeepSpeed's name of the placement of experts


@contextmanager
def sharded(engine: Engine) -> Iterator[None]:
    """Let the engine take experts of ``MoE`` layers for sharded ones while it makes its optimizer of stage 3."""
    layers = native_mixtures(engine.module)
    if not layers:
        yield
        return
    for layer in layers.values():
        gate = layer.deepspeed_moe.gate
        register_external_parameter(gate, gate.wg.weight)
    for param in engine.module.parameters():
        if is_moe_param(param):
            expert: Any = param
            expert.ds_zero_placement_family = EXPERTS
            expert.ds_zero_partition_group_name = expert.group_name
    with replaced(engine, _validate_zero3_moe_compatibility=lambda: None):
        yield
