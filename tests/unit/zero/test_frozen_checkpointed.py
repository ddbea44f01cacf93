# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""LoRA under activation checkpointing: the number of frozen parameters gathered at once, and parity with stock."""

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepspeed_ext.integration import fork
from tests.harness import training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import NOTHING_KEPT, PARTITIONED, Job, placed

WIDTH, BLOCKS = 64, 3
LINEAR = WIDTH * (WIDTH + 1)
BLOCK = 2 * LINEAR + 2 * WIDTH  # frozen elements
ADAPTERS = 2 * 2 * WIDTH
HOST = "ING with parameters on the host"


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Block(nn.Module):
    """Frozen layers with adapters; may checkpoint its inside, where no module is the first in a backward."""

    def __init__(self, use_reentrant: bool | None = None) -> None:
        super().__init__()
        self._use_reentrant = use_reentrant
        self.norm = nn.LayerNorm(WIDTH).requires_grad_(False)
        self.first, self.second = Adapted(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        if self._use_reentrant is None:
            return x + self._inside(x)
        return x + checkpoint(self._inside, x, use_reentrant=self._use_reentrant)

    def _inside(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.relu(self.first(self.norm(x)))))


class Checkpointed(nn.Module):
    """Blocks, each under a checkpoint; the first one's input requires gradients, as users of adapters set it."""

    inside = False

    def __init__(self, sizes: Sequence[int], use_reentrant: bool | None, empty: bool) -> None:
        super().__init__()
        self._use_reentrant = use_reentrant
        self.first = nn.Linear(sizes[0], WIDTH).requires_grad_(False)
        self.blocks = nn.ModuleList(Block(use_reentrant if self.inside else None) for _ in range(BLOCKS))
        self.last = nn.Linear(WIDTH, sizes[-1]).requires_grad_(False)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        x = self.first(x).requires_grad_()
        for block in self.blocks:
            x = block(x) if self.inside else checkpoint(block, x, use_reentrant=self._use_reentrant)
        return self.last(x)


class CheckpointedInside(Checkpointed):
    """The same model with checkpoints inside the blocks."""

    inside = True


def checkpointed_case(
    use_reentrant: bool, network: type[Checkpointed], zero_init: str | None, names: Sequence[str]
) -> list[tuple[int, int, float, bool]]:
    """Train stock and strategies; return for each the most elements that were gathered at once in a micro-step, and
    between them; the largest difference of weights from stock's; and whether all ranks have the same weights."""
    details = {"network": network, "checkpointing": use_reentrant, "zero_init": zero_init}
    job = Job(zero=NOTHING_KEPT, empty=False, steps=2, accumulation=2, **details)
    rows = []
    weights: list[Tensor] = []
    on_host = placed("ING", offload_param={"device": "cpu"})
    for zero in ({"stage": 3}, *(on_host if name == HOST else placed(name) for name in names)):
        engine, model = training.make_engine(job, zero)
        most = between = 0

        def gathered(model: Any = model) -> int:
            return sum(p.ds_numel for p in model.parameters() if p.ds_status != ZeroParamStatus.NOT_AVAILABLE)

        def look(*_: Any, gathered: Any = gathered) -> None:
            nonlocal most
            most = max(most, gathered())

        for module in model.modules():
            module.register_forward_pre_hook(look)
            module.register_forward_hook(look)
            module.register_full_backward_pre_hook(look)
        data = training.batches(job)
        for number in range(job.steps * job.accumulation):
            training.micro_step(engine, job, number, *next(data))
            between = max(between, gathered())
            engine.step()
            between = max(between, gathered())
        weights.append(training.whole_weights(model))
        apart = ((weights[-1] - weights[0]).abs().max() / weights[0].abs().max()).item()
        rows.append((most, between, apart, training.replicas_equal(weights[-1])))
        engine.destroy()
    return rows


@with_cases(
    "use_reentrant, network, zero_init, names",
    (False, CheckpointedInside, None, ("IIG",)),
    *deep(*product((True, False), (Checkpointed, CheckpointedInside), (None, "config"), [(*PARTITIONED, HOST)])),
)
def test_frozen_blocks_are_gathered_one_at_a_time(
    ranks: Any, use_reentrant: bool, network: type[Checkpointed], zero_init: str | None, names: Sequence[str]
) -> None:
    """With reentrant checkpoints stock gathers all blocks by the end of the backward; a fork has fixed that."""
    stock, *ours = ranks(4).run(checkpointed_case, use_reentrant, network, zero_init, names)[0]
    if use_reentrant and network is Checkpointed:  # once DeepSpeed has fixed it, the override can be removed
        assert (stock[0] >= BLOCKS * BLOCK) != (fork.version() is not None), stock
    for name, (most, between, apart, equal) in zip(names, ours, strict=True):
        assert apart < 2e-6 and equal, (name, apart)
        assert network is not Checkpointed or (most <= BLOCK + ADAPTERS and between == 0), (name, most, between)
