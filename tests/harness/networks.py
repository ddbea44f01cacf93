# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Networks with difficulties for gathering parameters: shared weights, borrowed weights, paths that ranks choose. All
are called like ``training.Network``; layers 1 to the last but one must be equally wide."""

from collections.abc import Sequence
from typing import Any

import deepspeed
import torch
from deepspeed import comm as dist
from torch import Tensor, nn

from tests.harness.training import Network

SQUARE = (13, 29, 29, 29, 7)  # sizes for all networks here


class Block(nn.Module):
    """Two linear layers: a unit with p = I and G."""

    def __init__(self, first: nn.Linear) -> None:
        super().__init__()
        self.out_features = first.out_features
        self.first, self.second = first, nn.Linear(first.out_features, first.out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x + torch.tanh(self.second(x))


class Blocks(Network):
    """Layers that are blocks."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers = nn.ModuleList(Block(layer) for layer in self.layers)  # type: ignore[arg-type]


class Shared(Network):
    """Layers 1 and 2 share a weight, and layer 1 is applied twice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers[2].weight = self.layers[1].weight

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for layer in (self.layers[i] for i in (0, 1, 2, 1, 3)):
            x = torch.tanh(layer(x))
        return x


class Buffered(Shared):
    """The same with buffers: of several dtypes, of other values on each rank, and one that is not saved."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("count", torch.tensor(dist.get_rank()))
        self.register_buffer("mask", torch.arange(5) % 2 == 0)
        self.register_buffer("cache", torch.ones(2), persistent=False)
        self.layers[-1].register_buffer("scale", torch.full((3,), 1.5 + dist.get_rank()))


class Borrower(nn.Module):
    """Applies the weight of another module."""

    def __init__(self, lender: nn.Linear, register: bool) -> None:
        super().__init__()
        self.lenders = [lender]  # in a list: not a child
        if register:
            deepspeed.zero.register_external_parameter(self, lender.weight)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.lenders[0].weight)


class Experts(nn.Module):
    """Three experts. Each rank uses one or two of them, and different ones in each call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        """Route; backwards recompute nothing, so calls count micro-steps."""
        self.calls += 1
        first = (dist.get_rank() + self.calls) % 3
        chosen = [self.experts[(first + i) % 3] for i in range(1 + self.calls % 2)]
        out: Tensor = sum(expert(x) for expert in chosen) / len(chosen)  # type: ignore[assignment]
        return out


class Mixture(Network):
    """Experts after layer 1, in a leaf module."""

    def __init__(self, sizes: Sequence[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(sizes, *args, **kwargs)
        self.mixture = Experts(sizes[2])
        deepspeed.utils.set_z3_leaf_modules(self, [Experts])

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for i in range(len(self.layers)):
            x = self.apply_layer(i, x, skipped)
            if i == 1:
                x = torch.tanh(self.mixture(x))
        return x


class Tangled(Network):
    """Layers 1 and 2 share a weight, layer 1 is applied twice, and two modules borrow this weight. Each rank makes
    sequences of its own length, 1 to 4, of its input, another one in each call."""

    calls = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers[2].weight = self.layers[1].weight
        self.borrowers = nn.ModuleList([Borrower(self.layers[1], False), Borrower(self.layers[2], True)])

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        self.calls += 1
        length = 1 + (dist.get_rank() + self.calls) % 4
        x = x.unsqueeze(1) / torch.arange(1, 1 + length, dtype=x.dtype, device=x.device).view(1, -1, 1)
        for i in (0, 1, 2):
            x = self.apply_layer(i, x, skipped)
        for borrower in self.borrowers:
            x = torch.tanh(borrower(x))
        return self.apply_layer(3, self.apply_layer(1, x, skipped), skipped).mean(1)


class Wandering(Blocks):
    """Ranks of the first half of the data-parallel ranks use layers in another order now and then, or leave one out.
    The others always use all layers in one order."""

    calls = 0
    paths: tuple[tuple[int, ...], ...] = ((1, 2), (2, 1), (2,), (1, 2, 1))

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for i in (0, *self.order(), len(self.layers) - 1):
            x = torch.tanh(self.layers[i](x))
        return x

    def order(self) -> tuple[int, ...]:
        """Of the layers in the middle, in the next call."""
        self.calls += 1
        return self.paths[self.calls % len(self.paths)] if dist.get_rank() < dist.get_world_size() // 2 else (1, 2)


class Returning(Wandering):
    """Such ranks recompute each layer, and come back to one now and then: it gets a gradient before the others, and
    another one after them."""

    paths = ((2, 1, 2), (1, 2), (2,), (1, 2))

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        for i in (0, *self.order(), len(self.layers) - 1):
            x = torch.tanh(torch.utils.checkpoint.checkpoint(self.layers[i], x, use_reentrant=bool(i)))
        return x


class ReorderingMixtures(Wandering):
    """All ranks use all layers once, and three leaf modules of experts, which the first half uses in turns last to
    first; a layer is used in every third call only."""

    paths = ((1, 2), (2, 1))

    def __init__(self, sizes: Sequence[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(sizes, *args, **kwargs)
        self.mixtures = nn.ModuleList(Experts(sizes[2]) for _ in range(3))
        self.seldom = nn.Linear(sizes[-1], sizes[-1])
        deepspeed.utils.set_z3_leaf_modules(self, [Experts])

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        turned = dist.get_rank() < dist.get_world_size() // 2 and self.calls % 2
        mixtures = list(self.mixtures)
        for mixture in reversed(mixtures) if turned else mixtures:
            x = x + torch.tanh(mixture(x))
        for i in self.order():
            if self.checkpointing is None:
                x = torch.tanh(self.layers[i](x))
            else:
                x = torch.tanh(torch.utils.checkpoint.checkpoint(self.layers[i], x, use_reentrant=self.checkpointing))
        x = self.layers[-1](x)
        return self.seldom(x) if self.calls % 3 == 0 else x


class Routed(Network):
    """DeepSpeed's layer of four experts after layer 0. Each rank has some experts; nothing is sent to the last one.
    Subclasses say how many ranks hold four experts together."""

    ep_size = 1
    more = 1  # how much wider experts are inside

    def __init__(self, sizes: Sequence[int], *args: Any, **kwargs: Any) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__(sizes, *args, **kwargs)
        width, inner = sizes[1], sizes[1] + self.more
        expert = nn.Sequential(nn.Linear(width, inner), nn.Tanh(), nn.Linear(inner, width, bias=False))
        choice = {"min_capacity": 0, "drop_tokens": False, "use_rts": False}
        self.mixture = MoE(width, expert, num_experts=4, ep_size=self.ep_size, **choice)
        with torch.no_grad():
            self.mixture.deepspeed_moe.gate.wg.weight[3] = -100.0
            for number, other in enumerate(self.mixture.deepspeed_moe.experts.deepspeed_experts):
                for param in other.parameters():  # they begin alike
                    param.mul_(1 + number / 3 + (dist.get_rank() % self.ep_size) / 7)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        x = torch.tanh(self.layers[0](x)).abs() + 0.1
        if 1 not in skipped:
            x = x + self.mixture(x)[0]
        for layer in list(self.layers)[1:]:
            x = torch.tanh(layer(x))
        return x


class RoutedOverTwo(Routed):
    """Each of two ranks has two of the experts."""

    ep_size = 2


class RoutedOverFour(Routed):
    """Each of four ranks has one of the experts."""

    ep_size = 4


class Matrices(Network):
    """Layers, packed experts, a projection of heads, and a kernel, which Muon does not treat as one matrix."""

    kernel_shape: tuple[int, ...] = (4, 3, 2, 2)

    def __init__(self, sizes: Sequence[int], *args: Any, **kwargs: Any) -> None:
        super().__init__(sizes, *args, **kwargs)
        width = sizes[1]
        self.experts = nn.Parameter(torch.randn(5, width, 7) / 8)
        self.heads = nn.Linear(width, 12, bias=False)
        self.heads.weight.muon_num_heads = 3  # type: ignore[assignment]  # as ``per_head_muon`` marks it
        self.kernel = nn.Parameter(torch.randn(self.kernel_shape) / 4)
        self.back = nn.Linear(7 + 12 + 4, width)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        x = torch.tanh(self.layers[0](x))
        convolved = nn.functional.conv2d(x[:, :12].reshape(-1, 3, 2, 2), self.kernel.view(4, 3, 2, 2)).flatten(1)
        mixed = torch.einsum("bi,eij->bj", x, self.experts)
        x = torch.tanh(self.back(torch.cat([mixed, self.heads(x), convolved], 1)))
        for layer in list(self.layers)[1:]:
            x = torch.tanh(layer(x))
        return x


class FlatKernel(Matrices):
    """The same with the kernel as one matrix: with Muon, DeepSpeed's stages fail with another one."""

    kernel_shape = (4, 12)


class Normed(Network):
    """Layer 1 has torch's old weight norm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        torch.nn.utils.weight_norm(self.layers[1])


def make_partly_frozen(zero: dict[str, Any], config: dict[str, Any], zero_init: bool = False) -> Any:
    """Return an engine of a layer of 6000 parameters, and one of 4000 that is frozen."""
    optimizer = {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}}
    settings = {"zero_optimization": zero, "optimizer": optimizer, "zero_force_ds_cpu_optimizer": False}
    settings |= {"train_micro_batch_size_per_gpu": 1, **config}
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=zero_init):
        model = nn.Sequential(nn.Linear(100, 60, bias=False), nn.Linear(80, 50, bias=False))
    model[1].requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
    return engine
