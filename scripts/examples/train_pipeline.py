# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train the byte-level GPT of ``train.py`` as a pipeline, on the same text.

An ordinary DeepSpeed script: stages, micro-batches and loss are DeepSpeed's own, and the configuration file alone
decides where a stage keeps its states::

    deepspeed --num_accelerators 4 scripts/examples/train_pipeline.py \
        --deepspeed_config scripts/examples/configs/nig.json
"""

import argparse

import deepspeed
import torch.distributed as dist
from gpt import Batches, pipeline, read_corpus
from tqdm import tqdm


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT as a pipeline with DeepSpeed.")
    parser.add_argument("--stages", type=int, default=2, help="of the pipeline; must divide the number of ranks")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0, help="decides the model and every batch")
    parser.add_argument("--sequence-length", type=int, default=128, help="bytes in a row")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    return deepspeed.add_config_arguments(parser).parse_args()


def main() -> None:
    args = parse_arguments()
    deepspeed.init_distributed()
    model = pipeline(192, 4, 4, args.sequence_length, args.stages, args.seed)
    engine, *_ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters())
    batches = iter(Batches(read_corpus(), engine, args.sequence_length, args.seed))
    bar = tqdm(range(args.steps), unit="step", disable=dist.get_rank() != 0)
    for _ in bar:
        bar.set_postfix(loss=f"{engine.train_batch(batches).item():.4f}")
    engine.destroy()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
