# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The model of the benchmarks on emulated clusters; its compute may be emulated, too."""

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Pauses:
    """Seconds that each block sleeps in its forward and backward; can be changed between steps. ``ahead``: seconds
    that the host has waited for reductions of this backward. A device would compute meanwhile, so the blocks that
    follow sleep less."""

    forward: float = 0.0
    backward: float = 0.0
    ahead: float = 0.0


class Sleep(torch.autograd.Function):
    """Sleeps in forward and backward: emulated compute that leaves the cores to transports, as a GPU does."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, pauses: Pauses) -> Tensor:
        ctx.pauses, pauses.ahead = pauses, 0.0
        time.sleep(pauses.forward)
        return inputs.clone()  # FSDP2's hooks want no view

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        hidden = min(ctx.pauses.ahead, ctx.pauses.backward)
        ctx.pauses.ahead -= hidden
        time.sleep(ctx.pauses.backward - hidden)
        return gradient, None


class ShortcutBlock(nn.Module):
    """Two layers with a shortcut. It sleeps after its layers: its parameters are needed before the sleep, and its
    gradients are ready after the sleep in backward."""

    def __init__(self, width: int, hidden: int, pauses: Pauses | None) -> None:
        super().__init__()
        self.rise = nn.Linear(width, hidden, bias=False)
        self.fall = nn.Linear(hidden, width, bias=False)
        self._pauses = pauses

    def forward(self, inputs: Tensor) -> Tensor:
        return self._after(inputs + self.fall(nn.functional.gelu(self.rise(inputs))))

    def _after(self, outputs: Tensor) -> Tensor:
        return outputs if self._pauses is None else Sleep.apply(outputs, self._pauses)


class SleepInstead(torch.autograd.Function):
    """Sleeps instead of running two layers, and returns constant gradients of their weights."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, rise: Tensor, fall: Tensor, pauses: Pauses) -> Tensor:
        ctx.pauses, ctx.shapes = pauses, (rise.shape, fall.shape)
        time.sleep(pauses.forward)
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        time.sleep(ctx.pauses.backward)
        rise, fall = (torch.full(shape, 1e-3, dtype=gradient.dtype) for shape in ctx.shapes)
        return gradient, rise, fall, None


class SleepingBlock(nn.Module):
    """The weights of a ``ShortcutBlock`` without its compute; everything else in its step is real."""

    def __init__(self, width: int, hidden: int, pauses: Pauses, dtype: torch.dtype) -> None:
        super().__init__()
        self.rise = nn.Parameter(torch.randn(hidden, width, dtype=dtype) / width**0.5)
        self.fall = nn.Parameter(torch.randn(width, hidden, dtype=dtype) / hidden**0.5)
        self._pauses = pauses

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = SleepInstead.apply(inputs, self.rise, self.fall, self._pauses)
        return outputs


class AdaptedBlock(ShortcutBlock):
    """Two frozen layers with a shortcut, each with a parallel LoRA adapter."""

    def __init__(self, width: int, hidden: int, rank: int, pauses: Pauses | None) -> None:
        super().__init__(width, hidden, pauses)
        self.requires_grad_(False)
        self.rise_adapter, self.fall_adapter = make_adapter(width, rank, hidden), make_adapter(hidden, rank, width)

    def forward(self, inputs: Tensor) -> Tensor:
        risen = nn.functional.gelu(self.rise(inputs) + self.rise_adapter(inputs))
        return self._after(inputs + self.fall(risen) + self.fall_adapter(risen))


def make_adapter(inputs: int, rank: int, outputs: int) -> nn.Sequential:
    adapter = nn.Sequential(nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False))
    nn.init.zeros_(adapter[1].weight)  # as LoRA begins
    return adapter


class Blocks(nn.Module):
    """Blocks that return their own loss."""

    def __init__(self, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        inputs.requires_grad_()  # or DeepSpeed's own leaf modules crash: the first block has nothing to hook
        for block in self.blocks:
            inputs = block(inputs)
        return (inputs - targets).square().mean()


# Each of these returns the same model on every call and every rank.


def make_blocks(count: int, width: int, hidden: int, pauses: Pauses | None = None) -> Blocks:
    torch.manual_seed(0)
    return Blocks(ShortcutBlock(width, hidden, pauses) for _ in range(count))


def make_rounded_blocks(count: int, width: int, hidden: int, dtype: torch.dtype) -> Blocks:
    """Make fp32 blocks with weights that this dtype represents exactly: masters are made from rounded ones."""
    blocks: Blocks = make_blocks(count, width, hidden).to(dtype).float()
    return blocks


def make_sleeping_blocks(count: int, width: int, hidden: int, pauses: Pauses, dtype: torch.dtype) -> Blocks:
    torch.manual_seed(0)
    return Blocks(SleepingBlock(width, hidden, pauses, dtype) for _ in range(count))


def make_adapted_blocks(count: int, width: int, hidden: int, rank: int, pauses: Pauses | None = None) -> Blocks:
    torch.manual_seed(0)
    return Blocks(AdaptedBlock(width, hidden, rank, pauses) for _ in range(count))
