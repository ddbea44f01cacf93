# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Networks of layers with experts, with difficulties for fetching modules as one unit. All are called like
``training.Network``; the subclasses each have one difficulty."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.utils.checkpoint
from deepspeed import comm as dist
from torch import Tensor, nn

from tests.harness.training import Job

WIDTH = 10
TOKENS = 17
SMALL = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500, "sub_group_size": 700}
AUTO = {"stage3_leaf_bytes": True}
CHUNKS = {"stage3_leaf_bytes": 12_000}  # blocks of experts do not fit: two experts at a time
WINDOWS = {"stage3_leaf_bytes": 2 * 3276}  # an expert of Packed has 273 parameters, which take 3,276 bytes as a unit


def job_of(network: Any, **more: Any) -> Job:
    """A job with Adam: it would show a missing or doubled gradient of any parameter."""
    return Job(**{"network": network, "optimizer": "Adam", "empty": False, "zero": SMALL, **more})


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(width, width + 3), nn.Linear(width, width + 3, bias=False)
        self.down = nn.Linear(width + 3, width)
        self.activation = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.activation(self.gate(x)) * self.up(x))
        return out


class MixtureOfExperts(nn.Module):
    """Experts, all of which are used."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(Expert(width) for _ in range(experts))

    def forward(self, x: Tensor) -> Tensor:
        weights, out = torch.softmax(self.router(x), -1), torch.zeros_like(x)
        left_out = self.left_out(weights)
        for number, expert in enumerate(self.experts):
            if number != left_out:
                out = out + self.apply_expert(expert, x) * weights[:, number : number + 1]
        return out

    def left_out(self, weights: Tensor) -> int:
        """Return the number of an expert that is not used; -1 for none."""
        return -1

    def apply_expert(self, expert: nn.Module, x: Tensor) -> Any:
        return expert(x)


class RoutedMixture(MixtureOfExperts):
    """Leaves out an expert, another one on each rank and input."""

    def left_out(self, weights: Tensor) -> int:
        return (dist.get_rank() + int(weights.sum(0).argmax())) % len(self.experts)


class Recomputed(MixtureOfExperts):
    """Recomputes experts one by one."""

    def apply_expert(self, expert: nn.Module, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(expert, x, use_reentrant=False)


class Reversed(MixtureOfExperts):
    """Enters its experts last to first."""

    def forward(self, x: Tensor) -> Tensor:
        return sum((expert(x) for expert in reversed(list(self.experts))), self.router(x).sum() * 0)


class Mixer(nn.Module):
    """Something that is no expert."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.second(torch.tanh(self.first(self.norm(x))))
        return out


class Layer(nn.Module):
    def __init__(self, mixture: nn.Module, outputs: int = 1) -> None:
        super().__init__()
        self.mixer, self.mixture = Mixer(WIDTH), mixture
        self.outputs = outputs

    def forward(self, x: Tensor) -> Any:
        """One tensor or a dictionary of two."""
        mixed = x + self.mixer(x)
        out = mixed + self.mixture(mixed)
        return out if self.outputs == 1 else {"hidden": out, "side": mixed.tanh()}


class Stem(nn.Module):
    """Token ids to vectors."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding, self.project = nn.Embedding(TOKENS, width), nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.project(self.embedding(tokens))
        return out


class Mixtures(nn.Module):
    """A stem that takes token ids, layers with experts, and a head."""

    layer_count, experts = 2, 4
    keyword = tied = frozen = False
    outputs = loops = 1
    layer: Any = Layer
    mixture: Any = MixtureOfExperts

    def __init__(self, sizes: Sequence[int], checkpointing: bool | None = None, empty: bool = False) -> None:
        super().__init__()
        self.stem = Stem(WIDTH)
        self.layers = nn.ModuleList(
            self.layer(self.mixture(WIDTH, self.experts), self.outputs) for _ in range(self.layer_count)
        )
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.out = nn.Linear(TOKENS, sizes[-1])
        self.checkpointing = checkpointing
        if self.tied:
            nn.init.normal_(self.stem.embedding.weight, std=0.1)
            self.head.weight = self.stem.embedding.weight
        if self.frozen:
            self.stem.requires_grad_(False)

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        x = self.embed(x)
        for _ in range(self.loops):
            for layer in self.layers:
                x = self.apply_layer(layer, x)
        return self.end(x)

    def embed(self, x: Tensor) -> Tensor:
        """Make token ids of the input, and vectors of these."""
        out: Tensor = self.stem((x * 7).long().sum(-1).remainder(TOKENS))
        return out

    def end(self, x: Tensor) -> Tensor:
        out: Tensor = self.out(self.head(x))
        return out

    def apply_layer(self, layer: nn.Module, x: Tensor) -> Tensor:
        if self.checkpointing is not None:
            out = torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=self.checkpointing)
        else:
            out = layer(x=x) if self.keyword else layer(x)
        return out if self.outputs == 1 else out["hidden"] + out["side"]


def variant(name: str, base: type[Mixtures] = Mixtures, **attributes: Any) -> type[Mixtures]:
    """Return a subclass with other attributes; ranks import it by name."""
    return type(name, (base,), {"__module__": __name__, **attributes})


Routed = variant("Routed", mixture=RoutedMixture)  # ranks leave out different experts
ByKeyword = variant("ByKeyword", keyword=True)  # layers get inputs by keyword: module hooks of torch see none
Tied = variant("Tied", tied=True)  # the head is the embedding, which is inside of the stem
FrozenStem = variant("FrozenStem", frozen=True)  # the input of the first layer needs no gradient
TwoOutputs = variant("TwoOutputs", outputs=2)  # layers return dictionaries
Looped = variant("Looped", loops=2)  # layers are applied twice
EachCheckpointed = variant("EachCheckpointed", mixture=Recomputed)
Backwards = variant("Backwards", mixture=Reversed)
Deep = variant("Deep", layer_count=3)


class LateLayer(Layer):
    """With a side output."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.aside = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.aside(torch.ones(1, WIDTH, dtype=x.dtype, device=x.device))


class Late(Mixtures):
    """A second output of each layer is used after all else, and depends on parameters only."""

    layer = LateLayer

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """The first layer's side comes in at the end."""
        x = self.embed(x)
        x, side = self.layers[0](x)
        x, _ = self.layers[1](x)
        return self.end(x) + side.mean()


class Lent(Mixtures):
    """The head borrows a weight from the inside of a layer, without telling DeepSpeed."""

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """Through the layers, then once more through a part of the first."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(nn.functional.linear(x, self.layers[0].mixer.first.weight))  # type: ignore[union-attr]


class PartCalled(Mixtures):
    """A part of a layer is also called from outside of it."""

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """The first layer's mixer once more at the end."""
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.end(x + self.layers[0].mixer(x))  # type: ignore[union-attr,operator]


class Pair(nn.Module):
    """Lists in a list."""

    def __init__(self, *_: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.ModuleList([Mixer(WIDTH), nn.LayerNorm(WIDTH)]), nn.ModuleList([Mixer(WIDTH)])])

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            for module in part:  # type: ignore[union-attr]
                x = x + module(x)
        return x


Nested = variant("Nested", layer=Pair)  # layers of lists of lists


class CollectingLayer(Layer):
    def forward(self, x: Tensor, other: Tensor, seen: list[Tensor]) -> Any:  # type: ignore[override]
        out = super().forward(x + other if dist.get_rank() == 0 else x)
        seen.append(out.square().mean())
        return out


class Collecting(Mixtures):
    """Layers get a list by keyword and put a term of the loss into it; a second input is used on rank 0 alone."""

    layer = CollectingLayer

    def forward(self, x: Tensor, skipped: Sequence[int] = ()) -> Tensor:
        """Return the loss with the layers' auxiliary losses."""
        x = self.embed(x)
        observed: list[Tensor] = []
        for layer in self.layers:
            x = layer(x, torch.tanh(x), seen=observed)
        return self.end(x) + sum(observed)


class SharedModule(Mixtures):
    """The second layer uses the mixer of the first."""

    mixture = staticmethod(lambda width, _: Mixer(width))

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers[1].mixer = self.layers[0].mixer  # type: ignore[assignment,union-attr]


class PackedExperts(nn.Module):
    """Experts in 3-D parameters, with biases, as transformers has them."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.num_experts = experts
        self.up_proj = nn.Parameter(torch.randn(experts, width + 3, width) / 3)
        self.up_proj_bias = nn.Parameter(torch.randn(experts, width + 3) / 3)
        self.down_proj = nn.Parameter(torch.randn(experts, width, width + 3) / 3)
        self.act_fn = nn.SiLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            tokens, k = torch.where(top_k_index == expert)
            inner = self.act_fn(hidden_states[tokens] @ self.up_proj[expert].T + self.up_proj_bias[expert])
            provided = (inner @ self.down_proj[expert].T) * top_k_weights[tokens, k, None]
            out = out.index_add(0, tokens, provided.to(out.dtype))
        return out


class PackedMixture(nn.Module):
    """A router, which sends each token to two experts, and packed experts."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = PackedExperts(width, experts)

    def forward(self, x: Tensor) -> Tensor:
        """The weighted sum of two experts; a rank leaves one out."""
        weights = torch.softmax(self.router(x), -1)
        left_out = torch.arange(weights.shape[-1], device=x.device) == dist.get_rank() % weights.shape[-1]
        shares, index = weights.masked_fill(left_out, 0.0).topk(2, -1)
        out: Tensor = self.experts(x, index, shares)
        return out


Packed = variant("Packed", experts=7, mixture=PackedMixture)
PackedLooped = variant("PackedLooped", Packed, loops=2)


class PackedFrozen(Packed):
    """The experts of the first layer are not trained, nor one parameter of the second."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layers[0].mixture.experts.requires_grad_(False)  # type: ignore[union-attr]
        self.layers[1].mixture.experts.up_proj_bias.requires_grad_(False)  # type: ignore[union-attr]
