# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The model and the data of the examples: a byte-level GPT, whole or as a pipeline, and source text of Python.

The model and every batch depend on the seed only, so two configurations that differ only in where states are kept
must show the same losses.
"""

import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.runtime.engine import DeepSpeedEngine
from torch import Tensor, nn
from torch.nn import functional

VOCABULARY = 256  # a token is a byte
CORPUS_BYTES = 8_000_000


class Block(nn.Module):
    """One pre-norm transformer block: causal attention, then a feed-forward layer."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.projection = nn.Linear(dim, dim, bias=False)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim, bias=False), nn.GELU(), nn.Linear(4 * dim, dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, length, 3, self.heads, dim // self.heads)
        query, key, value = qkv.permute(2, 0, 3, 1, 4)  # (batch, heads, length, dim / heads) each
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, dim))
        return x + self.mlp(self.mlp_norm(x))


def initialize(module: nn.Module) -> None:
    """Give a layer small weights, so that the loss starts near ln 256, that of random guessing."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)


class ByteGPT(nn.Module):
    """A GPT over bytes that returns its own loss, as DeepSpeed's examples do.

    With Muon, DeepSpeed trains parameters named ``embed`` or ``lm_head`` by Adam, and all other matrices by Muon.
    """

    def __init__(self, dim: int, layers: int, heads: int, sequence_length: int) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(VOCABULARY, dim)
        self.position_embedding = nn.Embedding(sequence_length, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCABULARY, bias=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            x = block(x)
        return byte_loss(self.lm_head(self.norm(x)), targets)


def byte_loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy over bytes."""
    return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


# As a pipeline ####################################################################################


class PipelineEmbedding(nn.Module):
    """Bytes to vectors, with their positions."""

    def __init__(self, dim: int, sequence_length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(sequence_length, dim)
        self.apply(initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))

    @staticmethod
    def head(embedding: "PipelineEmbedding", x: Tensor) -> Tensor:
        """Turn vectors into scores, with the same weight."""
        return functional.linear(x, embedding.token.weight)


class PipelineBlock(Block):
    """A block with small weights."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.apply(initialize)


def pipeline(dim: int, count: int, heads: int, sequence_length: int, stages: int, seed: int) -> PipelineModule:
    """Return the model split into stages. Each layer's weights depend on the seed and its number only.

    The embedding and the head share their weight, which is on the first and on the last stage.
    """
    shared = {"key": "embedding", "typename": PipelineEmbedding, "dim": dim, "sequence_length": sequence_length}
    shared["tied_weight_attr"] = "token.weight"
    layers = [
        TiedLayerSpec(**shared),
        *(LayerSpec(PipelineBlock, dim, heads) for _ in range(count)),
        LayerSpec(nn.LayerNorm, dim),
        TiedLayerSpec(**shared, forward_fn=PipelineEmbedding.head),
    ]
    return PipelineModule(
        layers, num_stages=stages, loss_fn=byte_loss, seed_layers=True, seed_fn=torch.manual_seed, base_seed=seed
    )


# Data #############################################################################################


def read_corpus(budget: int = CORPUS_BYTES) -> Tensor:
    """Return the first ``budget`` bytes of the standard library's sources, in the same order on all machines."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    text = bytearray()
    for name in files:
        # Installed packages are not the standard library, and differ between machines.
        if name.startswith(("site-packages/", "dist-packages/")):
            continue
        text += (root / name).read_bytes()
        if len(text) >= budget:
            break
    return torch.frombuffer(text, dtype=torch.uint8)[:budget]


class Batches:
    """Batches that depend on the seed, the micro-step and the data-parallel rank, and on nothing else."""

    def __init__(self, corpus: Tensor, engine: DeepSpeedEngine, sequence_length: int, seed: int) -> None:
        self._corpus = corpus
        self._rows = engine.train_micro_batch_size_per_gpu()
        self._length = sequence_length
        self._seed = seed
        self._rank = dist.get_rank(engine.data_parallel_group)
        self._world_size = dist.get_world_size(engine.data_parallel_group)
        self._device = engine.device

    def draw(self, micro_step: int) -> tuple[Tensor, Tensor]:
        """Return tokens and the tokens that follow them, each of shape (micro-batch, sequence length)."""
        generator = torch.Generator()
        # The generator uses only the low 32 bits, so each seed has 2**20 batches of its own.
        generator.manual_seed((self._seed << 20) + micro_step * self._world_size + self._rank)
        starts = torch.randint(len(self._corpus) - self._length, (self._rows, 1), generator=generator)
        rows = self._corpus[starts + torch.arange(self._length + 1)].long().to(self._device)
        return rows[:, :-1], rows[:, 1:]

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield micro-batches without end."""
        micro_step = 0
        while True:
            yield self.draw(micro_step)
            micro_step += 1
