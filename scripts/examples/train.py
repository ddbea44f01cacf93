# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small byte-level GPT with DeepSpeed.

An ordinary DeepSpeed script: the ``zero_optimization`` section of the configuration file alone decides which strategy
runs, and where model states are kept::

    deepspeed --num_accelerators 4 scripts/examples/train.py --deepspeed_config scripts/examples/configs/nig.json
"""

import argparse

import deepspeed
import torch
import torch.distributed as dist
from gpt import Batches, ByteGPT, read_corpus
from tqdm import tqdm


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT with DeepSpeed.")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="decides the model and every batch")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes in a row")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_arguments()
    torch.manual_seed(args.seed)
    model = ByteGPT(dim=192, layers=4, heads=4, sequence_length=args.sequence_length)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    batches = iter(Batches(read_corpus(), engine, args.sequence_length, args.seed))
    bar = tqdm(range(args.steps), unit="step", disable=dist.get_rank() != 0)
    for _ in bar:
        for _ in range(engine.gradient_accumulation_steps()):
            tokens, targets = next(batches)
            loss = engine(tokens, targets)
            engine.backward(loss)
            engine.step()
        bar.set_postfix(loss=f"{loss.item():.4f}")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
