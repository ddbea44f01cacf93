# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a model is known by, whatever the strategy and the number of ranks."""

import hashlib

from deepspeed_ext.checkpoint.experts import outside_experts
from deepspeed_ext.comm.agreement import all_gather_texts
from deepspeed_ext.deepspeed_types import Engine


def model_key(engine: Engine) -> str:
    """Return a text that only models have whose parameters have the same names and shapes, but for experts.

    Collective over all ranks, which have different parameters in pipelines and with tensor parallelism.
    """
    shapes = {name: tuple(getattr(one, "ds_shape", one.shape)) for name, one in engine.module.named_parameters()}
    own = [(name, shapes[name]) for name in sorted(outside_experts(engine, shapes))]
    return _digest("".join(sorted(set(all_gather_texts(_digest(repr(own)))))))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
