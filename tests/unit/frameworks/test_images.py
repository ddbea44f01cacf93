# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Models with a vision tower under the Trainer, when ranks have batches without images."""

from functools import partial
from pathlib import Path
from typing import Any

from tests.harness.frameworks.comparison import Row, check, needs, placed, stock
from tests.harness.tiers import deep, since, with_cases

pytestmark = [needs("transformers", "accelerate", "peft"), since(transformers="5.0")]
TOWERS = {
    "llava": {"*.vision_tower.*": "N", "*.multi_modal_projector.*": "N"},
    "qwen2_vl": {"*.visual.*": "N"},  # the projector is in it
}
LORA = {"lora": r".*language_model.*(q_proj|down_proj)"}  # the tower is frozen
CHECKPOINTS = {"gradient_checkpointing": True}


def make(folder: str, kind: str, more: dict[str, Any], zero: dict[str, Any]) -> Any:
    """A trainer with a model read under zero.Init at stage 3; with stock DeepSpeed, all ranks run the tower."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForImageTextToText, Trainer, TrainingArguments

    from tests.harness.frameworks import towers, trainers

    more = {"eval_strategy": "steps", "eval_steps": 1, "remove_unused_columns": False, "max_steps": 3} | more
    lora = more.pop("lora", None)
    args = trainers.arguments(TrainingArguments, zero, folder, **more)
    model = AutoModelForImageTextToText.from_pretrained(f"{folder}/model", dtype=torch.float32)
    if "paro_strategy" not in zero:
        towers.always_run(model, kind)
    if lora:
        torch.manual_seed(11)
        model = get_peft_model(model, LoraConfig(r=3, target_modules=lora))
    data = {"train_dataset": towers.rows(64), "eval_dataset": towers.rows(16)}
    return trainers.recording(Trainer)(model=model, args=args, data_collator=towers.Collator(kind), **data)


def case(ours: dict[str, Any], stock: dict[str, Any], folder: str, kind: str, more: dict[str, Any]) -> Row:
    import torch.distributed as dist

    from tests.harness.frameworks import towers, trainers

    if dist.get_rank() == 0:
        towers.make_model(kind).save_pretrained(f"{folder}/model")
    dist.barrier()
    return trainers.compare(partial(make, folder, kind, more), stock, ours, f"{folder}/{trainers.CHECKPOINT}")


@with_cases(
    "kind, strategy, more",
    ("llava", "NIG", {}),
    ("llava", "IIG", {}),
    *deep(*(("qwen2_vl", strategy, more) for strategy in ("NIG", "IIG", "ING") for more in ({}, LORA, CHECKPOINTS))),
    *deep(("llava", "ING", {}), ("llava", "ING", LORA), ("llava", "IIG", CHECKPOINTS), ("llava", "NIG", LORA)),
)
def test_ranks_without_images(frameworks: Any, tmp_path: Path, kind: str, strategy: str, more: dict[str, Any]) -> None:
    # Accelerate cannot fill in an "auto" from a configuration of two models.
    sizes = {"stage3_prefetch_bucket_size": 2000}
    modules = {} if strategy.startswith("N") else {"paro_modules": TOWERS[kind]}
    sections = placed(strategy, **sizes, **modules), {**stock(strategy), **sizes}
    check(frameworks(4).run(case, *sections, str(tmp_path), kind, more), strategy, resumed=True)
