# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's ``MoE`` layers with p = I and G.

Note [MoE layers with sharded parameters]
    DeepSpeed's stage 3 shards AutoEP's experts, each over the ranks that have it, and rejects experts of its own
    ``MoE`` layers (``DeepSpeedEngine._validate_zero3_moe_compatibility``). It needs the same data for both: whether a
    parameter belongs to an expert, and to which group of ranks. It reads them from attributes, which AutoEP sets.

    Experts of these layers can be sharded. In each forward a layer calls all experts of the rank, in one order and
    with equally many rows, with or without tokens, so ranks gather the same parameters in the same order. Its gate
    reads the weight of a module that it does not call, so the weight is registered (``register_external_parameter``).
    Otherwise DeepSpeed detects it in the first forward, after recording which parameters the gate uses, and considers
    the next forward a changed model.

    A checkpoint has weights of experts in the shards, as AutoEP's. DeepSpeed also writes its file for each expert, but
    from parameters that are not gathered, so the file is empty.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.utils import is_moe_param
from deepspeed.runtime.zero.partition_parameters import register_external_parameter

from deepspeed_ext.config.unsupported import deepspeed_moe_layers
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.overrides import replace_attributes

EXPERTS = "autoep_expert"  # DeepSpeed's name of the placement of experts


@contextmanager
def allow_sharding(engine: Engine) -> Iterator[None]:
    """Mark experts of ``MoE`` layers as shardable while the engine creates its optimizer of stage 3."""
    layers = deepspeed_moe_layers(engine.module)
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
    with replace_attributes(engine, _validate_zero3_moe_compatibility=lambda: None):
        yield
