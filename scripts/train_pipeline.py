# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of ``train.py`` as a pipeline, on the same text.

An ordinary DeepSpeed script: stages, micro-batches and loss are DeepSpeed's own, and where a stage keeps its states is
decided by the configuration file alone::

    deepspeed --num_accelerators 4 scripts/train_pipeline.py --deepspeed --deepspeed_config scripts/configs/nig.json

The embedding and the head share their weight, which is on the first and on the last stage.
"""

import argparse
from collections.abc import Iterator
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn
from torch.nn import functional
from tqdm import tqdm
from train import CORPUS_BYTES, VOCABULARY, Batches, Block, ByteGPT, read_corpus


class Embedding(nn.Module):
    """Bytes to vectors, with their positions."""

    def __init__(self, dim: int, sequence_length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, dim), nn.Embedding(sequence_length, dim)
        self.apply(ByteGPT._initialize)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))

    @staticmethod
    def head(embedding: "Embedding", x: Tensor) -> Tensor:
        """Vectors to scores, by the same weight."""
        return functional.linear(x, embedding.token.weight)


class InitializedBlock(Block):
    """A block with small weights."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__(dim, heads)
        self.apply(ByteGPT._initialize)


def layers(dim: int, count: int, heads: int, sequence_length: int) -> list[Any]:
    """Of the pipeline."""
    shared = {"key": "embedding", "typename": Embedding, "dim": dim, "sequence_length": sequence_length}
    shared["tied_weight_attr"] = "token.weight"
    return [
        TiedLayerSpec(**shared),
        *(LayerSpec(InitializedBlock, dim, heads) for _ in range(count)),
        LayerSpec(nn.LayerNorm, dim),
        TiedLayerSpec(**shared, forward_fn=Embedding.head),
    ]


def loss(scores: Tensor, targets: Tensor) -> Tensor:
    """Mean over bytes."""
    return functional.cross_entropy(scores.float().flatten(0, 1), targets.flatten())


def pipeline(dim: int, count: int, heads: int, sequence_length: int, stages: int, seed: int) -> PipelineModule:
    """The model, cut into stages. Each layer's weights follow from the seed and its number."""
    specs = layers(dim, count, heads, sequence_length)
    return PipelineModule(
        specs, num_stages=stages, loss_fn=loss, seed_layers=True, seed_fn=torch.manual_seed, base_seed=seed
    )


def endless(batches: Batches) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batch after micro-batch."""
    number = 0
    while True:
        yield batches.draw(number)
        number += 1


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT as a pipeline with DeepSpeed.")
    parser.add_argument("--stages", type=int, default=2, help="of the pipeline; must divide the number of ranks")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="decides the model and every batch")
    parser.add_argument("--dim", type=int, default=192, help="width of the model")
    parser.add_argument("--layers", type=int, default=4, help="number of blocks")
    parser.add_argument("--heads", type=int, default=4, help="attention heads")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes in a row")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    model = pipeline(args.dim, args.layers, args.heads, args.sequence_length, args.stages, args.seed)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    data = endless(Batches(read_corpus(CORPUS_BYTES), engine, args.sequence_length, args.seed))
    bar = tqdm(range(args.steps), unit="step", disable=dist.get_rank() != 0)
    for _ in bar:
        bar.set_postfix(loss=f"{engine.train_batch(data).item():.4f}")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
