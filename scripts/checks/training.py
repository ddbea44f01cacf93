# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training from a fixed seed whose states can be compared: what the checks of checkpoints train."""

from collections.abc import Iterable
from typing import Any

import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from scripts.checks.steps import train_step
from scripts.examples.gpt import Batches, ByteGPT

SEED = 0
MOMENTS = ("exp_avg", "exp_avg_sq")
# The formula gathers each parameter twice in a micro-step: nothing may stay from forward to backward.
ZERO = {
    "reduce_bucket_size": 200_000,
    "allgather_bucket_size": 200_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
    "leaf_module": {"classes": ["Block"]},
}

Snapshot = dict[str, Tensor]


def configuration(accumulation: int, zero: dict[str, Any]) -> dict[str, Any]:
    """Return the ds_config. A large eps: Adam would blow rounding of near-zero gradients up to the size of a step."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": 1e-4, "torch_adam": True}},
        "steps_per_print": 1_000_000,
        "zero_optimization": {**ZERO, **zero},
    }


class Watched(ByteGPT):
    """The examples' model with a position embedding that is not trained, and a buffer that each forward changes."""

    def __init__(self, **sizes: int) -> None:
        super().__init__(**sizes)
        self.position.requires_grad_(False)
        self.register_buffer("seen", torch.zeros(3))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Count and apply."""
        self.seen.add_(1.0)
        return super().forward(tokens, targets)


class Training:
    """An engine from a fixed seed, with two parameter groups, and its data.

    Args:
        sizes: of the model.
        zero: keys of ``zero_optimization``.
        universal: whether it loads universal checkpoints.
        index: of the data.
    """

    def __init__(
        self, sizes: dict[str, int], zero: dict[str, Any], dtype: str = "fp32", universal: bool = False, index: int = 0
    ) -> None:
        torch.manual_seed(SEED)
        self.model = Watched(**sizes)
        config = configuration(1, {"stage3_gather_16bit_weights_on_model_save": True, **zero})
        config["scheduler"] = {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-3, "warmup_num_steps": 10}}
        config["checkpoint"] = {"load_universal": universal}
        if dtype == "bf16":
            config["bf16"] = {"enabled": True}
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.trained = sum(parameter.numel() for parameter in trained)
        groups = [
            {"params": [p for p in trained if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in trained if p.dim() <= 1], "weight_decay": 0.0},
        ]
        self.engine, *_ = deepspeed.initialize(model=self.model, model_parameters=groups, config=config)
        # Any bytes will do, and those of the examples take seconds to find.
        corpus = torch.randint(256, (100_000,), generator=torch.Generator().manual_seed(SEED), dtype=torch.uint8)
        self._batches = Batches(corpus, self.engine, sizes["sequence_length"], SEED + index)

    def run(self, numbers: Iterable[int]) -> list[float]:
        """Train on the batches of these numbers, a step each; return this rank's losses."""
        return [train_step(self.engine, [self._batches.draw(number)]).item() for number in numbers]

    def states(self) -> Snapshot:
        """Return weights in fp32 and moments, whole. Collective."""
        optimizer = self.engine.optimizer
        if hasattr(optimizer, "_hp_optimizer_states_linked"):
            # Stages 1 and 2 link the states of all parameter groups when only the first has stepped.
            optimizer._hp_optimizer_states_linked = False
            optimizer._lazy_init_hp_params_optimizer_state()
        seen: Snapshot = {}
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                seen[f"{name} fp32"] = safe_get_full_fp32_param(parameter).clone()
                for moment in MOMENTS:
                    seen[f"{name} {moment}"] = safe_get_full_optimizer_state(parameter, moment).clone()
        return seen
