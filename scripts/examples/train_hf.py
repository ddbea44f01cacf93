# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Train a small GPT-2 over bytes with the Trainer of transformers.

An ordinary script: the Trainer passes the configuration file to DeepSpeed, and its ``zero_optimization`` section alone
decides where model states are kept. Its values "auto" are set from the Trainer's arguments::

    deepspeed --num_accelerators 4 scripts/examples/train_hf.py --config scripts/examples/configs/nig_hf.json
"""

import argparse

import torch
from gpt import VOCABULARY, read_corpus
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

SEQUENCE_LENGTH = 128


class ByteRows(Dataset[dict[str, Tensor]]):
    """The corpus, in rows of as many bytes as the model takes; the model itself shifts the labels."""

    def __init__(self, corpus: Tensor) -> None:
        self._rows = corpus[: len(corpus) // SEQUENCE_LENGTH * SEQUENCE_LENGTH].view(-1, SEQUENCE_LENGTH)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self._rows[index].long()
        return {"input_ids": row, "labels": row}


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small byte-level GPT-2 with the Trainer of transformers.")
    parser.add_argument("--config", required=True, help="DeepSpeed's configuration file")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps")
    parser.add_argument("--output", default="build/train_hf", help="folder of the Trainer's files")
    parser.add_argument("--local_rank", type=int, default=-1, help="set by the launcher")
    args = parser.parse_args()
    arguments = TrainingArguments(
        output_dir=args.output,
        deepspeed=args.config,
        max_steps=args.steps,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=not torch.cuda.is_available(),
    )
    sizes = {"n_embd": 192, "n_layer": 4, "n_head": 4, "n_positions": SEQUENCE_LENGTH}
    config = GPT2Config(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=0, **sizes)
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=ByteRows(read_corpus())).train()


if __name__ == "__main__":
    main()
