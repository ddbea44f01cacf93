# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""TRL's trainers: supervised fine-tuning, and DPO, which has a second engine for the reference model."""

import functools
from pathlib import Path
from typing import Any

from tests.harness.frameworks.comparison import Row, check, needs, placed, stock
from tests.harness.tiers import deep, with_cases

pytestmark = needs("transformers", "accelerate", "trl", "datasets", "tokenizers")


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from tests.harness.frameworks import tiny

    words = {"<bos>": 0, "<eos>": 1, **{f"w{i}": i for i in range(2, tiny.VOCABULARY)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<eos>")


def sentences(rows: int) -> list[str]:
    from tests.harness.frameworks import tiny

    return [" ".join(f"w{token}" for token in row["input_ids"]) for row in tiny.sequences(rows)]


def make_sft(folder: str, zero: dict[str, Any]) -> Any:
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tests.harness.frameworks import tiny, trainers

    args = trainers.arguments(SFTConfig, zero, folder, max_length=16, bf16=False, gradient_checkpointing=True)
    data = Dataset.from_dict({"text": sentences(32)})
    trainer = trainers.recording(SFTTrainer)
    return trainer(model=tiny.make_model(), args=args, train_dataset=data, processing_class=make_tokenizer())


def make_dpo(folder: str, zero: dict[str, Any]) -> Any:
    """TRL's trainer for direct preference optimization; its reference model is an engine without an optimizer."""
    import deepspeed
    from datasets import Dataset
    from trl import DPOConfig, DPOTrainer

    from tests.harness.frameworks import tiny, trainers

    args = trainers.arguments(DPOConfig, zero, folder, max_length=32, bf16=False, gradient_checkpointing=False)
    texts = sentences(96)
    data = Dataset.from_dict({"prompt": texts[:32], "chosen": texts[32:64], "rejected": texts[64:]})
    models = {"model": tiny.make_model(), "ref_model": tiny.make_model()}
    trainer = trainers.recording(DPOTrainer)
    trl_trainer = trainer(**models, args=args, train_dataset=data, processing_class=make_tokenizer())
    result = type(trl_trainer.ref_model), all(hasattr(p, "ds_id") for p in trl_trainer.ref_model.parameters())
    if result != (deepspeed.DeepSpeedEngine, zero["stage"] == 3):
        raise TypeError(f"expected a reference engine, with parameters cut at stage 3, got {result}")
    return trl_trainer


def case(make: Any, ours: dict[str, Any], stock: dict[str, Any], folder: str) -> Row:
    from tests.harness.frameworks import trainers

    return trainers.compare(functools.partial(make, folder), stock, ours, f"{folder}/{trainers.CHECKPOINT}")


@with_cases("make, strategy", (make_dpo, "IIG"), *deep((make_dpo, "NIG"), (make_sft, "GNG"), (make_sft, "NIG")))
def test_fine_tuning(group: Any, tmp_path: Path, make: Any, strategy: str) -> None:
    check(group.run(case, make, placed(strategy), stock(strategy), str(tmp_path)), strategy, resumed=True)
