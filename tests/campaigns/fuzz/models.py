# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The networks of drawn models; inside rank processes only."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
import torch.utils.checkpoint
from deepspeed import comm as dist
from torch import Tensor, nn

from tests.campaigns.fuzz.cases import Block, Case
from tests.harness import mixtures
from tests.harness.networks import Borrower

PACKED = 5  # experts in a block


class Choosing(nn.Module):
    """Three layers. Each call uses one or two of them; if routed, each rank uses different ones."""

    def __init__(self, width: int, routed: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width, bias=i != 1) for i in range(3))
        self.routed, self.calls = routed, 0

    def forward(self, x: Tensor) -> Tensor:
        """Their sum. The training loop sets ``calls``, so a recomputation and a resumed run make the same choice."""
        first = self.calls + (dist.get_rank() if self.routed else 0)
        out: Tensor = sum(self.experts[(first + i) % 3](x) for i in range(1 + self.calls % 2))  # type: ignore[assignment]
        return out


class Packed(nn.Module):
    """A router and packed experts. The call chooses these: the router's choice may depend on rounding."""

    def __init__(self, width: int, routed: bool) -> None:
        super().__init__()
        self.router = nn.Linear(width, PACKED)
        self.experts = mixtures.PackedExperts(width, PACKED)
        self.routed, self.calls = routed, 0

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of two experts for each row; every third call has all rows go to the same two."""
        apart = 0 if self.calls % 3 == 2 else 2
        first = self.calls + (dist.get_rank() if self.routed else 0)
        rows = torch.arange(x.shape[0], device=x.device)[:, None]
        index = (first + apart * rows + torch.arange(2, device=x.device)) % PACKED
        out: Tensor = self.experts(x, index, torch.softmax(self.router(x), -1).gather(1, index))
        return out


class Part(nn.Module):
    """A block with inputs of ``width`` and outputs of ``out`` elements."""

    def __init__(self, block: Block, width: int, routed: bool) -> None:
        super().__init__()
        self.kind, self.out = block.kind, width
        inner = block.width
        if block.kind == "linear":
            self.layer, self.out = nn.Linear(width, inner, bias=block.bias), inner
        elif block.kind == "norm":
            self.layer = nn.LayerNorm(width)
        elif block.kind == "gain":
            self.gain = nn.Parameter(torch.ones(1))
        elif block.kind == "again":
            self.layer = nn.Linear(width, width, bias=block.bias)
        elif block.kind == "tied":
            self.layer, self.between = nn.Linear(width, inner, bias=block.bias), nn.Linear(inner, width)
            self.last = nn.Linear(width, inner, bias=False)
            self.last.weight = self.layer.weight
            self.out = inner
        elif block.kind == "lent":
            self.layer, self.between = nn.Linear(width, inner), nn.Linear(inner, width)
            self.borrower, self.out = Borrower(self.layer, block.bias), inner
        elif block.kind == "experts":
            self.layer = Choosing(width, routed)
        elif block.kind == "packed":
            self.layer = Packed(width, routed)
        else:
            self.mixture = mixtures.MixtureOfExperts(width, 2)
        self.requires_grad_(not block.frozen)

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gain":
            return x * self.gain
        if self.kind == "unit":
            return x + self.mixture(x)
        if self.kind == "packed":
            return x + self.layer(x)
        if self.kind in ("linear", "norm", "experts"):
            return self.layer(x)
        if self.kind == "again":
            return self.layer(torch.tanh(self.layer(x)))
        x = self.between(torch.tanh(self.layer(x)))
        return self.last(x) if self.kind == "tied" else self.borrower(x)


class Drawn(nn.Module):
    """Blocks one after the other, and a head."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.layers, width = nn.ModuleList(), case.inputs
        self.recomputed = [block.recomputed for block in case.blocks]
        for block in case.blocks:
            self.layers.append(Part(block, width, case.routed))
            width = self.layers[-1].out
        self.head = nn.Linear(width, case.outputs)
        if case.unused:
            self.unused = nn.Parameter(torch.ones(case.unused))
        if case.empty:
            self.empty = nn.Parameter(torch.empty(0))
        if case.stage == 3 and any(block.kind == "experts" for block in case.blocks):
            deepspeed.utils.set_z3_leaf_modules(self, [Choosing])

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """Apply the blocks; the input of a skipped one is cut, or repeated, to the size of its output."""
        for number, (layer, recomputed) in enumerate(zip(self.layers, self.recomputed, strict=True)):
            if number in skipped:
                x = x.repeat(1, -(-layer.out // x.shape[1]))[:, : layer.out]
            elif recomputed is not None and (x.requires_grad or not recomputed) and torch.is_grad_enabled():
                x = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=recomputed)
            else:
                x = layer(x)
            x = torch.tanh(x)
        out: Any = self.head(x)
        return out
