# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The Trainer of transformers: its "auto" values, accumulation, bf16, checkpoints, and models made under zero.Init."""

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from tests.harness.frameworks.comparison import Row, check, for_trainer, needs, placed, stock
from tests.harness.tiers import deep, with_cases

pytestmark = needs("transformers", "accelerate")


def make(folder: str, how: str, more: dict[str, Any], zero: dict[str, Any]) -> Any:
    """A trainer with a model made after its arguments: ``how`` is "model", "from_pretrained" or "from_config"."""
    import torch
    from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

    from tests.harness.frameworks import tiny, trainers

    args = trainers.arguments(TrainingArguments, zero, folder, **more)
    if how == "from_pretrained":
        model = AutoModelForCausalLM.from_pretrained(f"{folder}/model", dtype=torch.float32)
    elif how == "from_config":
        torch.manual_seed(11)
        # transformers 4.57 zeroes the embedding of a padding token, which zero.Init has cut away by then.
        model = AutoModelForCausalLM.from_config(tiny.shape(pad_token_id=None))
    else:
        model = tiny.make_model()
    cut = all(hasattr(p, "ds_id") for p in model.parameters())
    if cut != (how != "model"):
        raise ValueError(f"expected zero.Init to cut parameters of a model made by {how}, got {cut}")
    data = {"train_dataset": tiny.sequences(64), "eval_dataset": tiny.sequences(8)}
    return trainers.recording(Trainer)(model=model, args=args, data_collator=default_data_collator, **data)


def case(ours: dict[str, Any], stock: dict[str, Any], folder: str, how: str, more: dict[str, Any]) -> Row:
    import torch.distributed as dist

    from tests.harness.frameworks import tiny, trainers

    if how == "from_pretrained":
        if dist.get_rank() == 0:
            tiny.make_model().save_pretrained(f"{folder}/model")
        dist.barrier()
    return trainers.compare(functools.partial(make, folder, how, more), stock, ours, f"{folder}/{trainers.CHECKPOINT}")


@with_cases(
    "dtype, strategy, how, zero",
    ("bf16", "IIG", "from_pretrained", {"stage": None}),
    *deep(("fp32", "NIG", "model", {}), ("fp32", "IIG", "from_pretrained", {}), ("bf16", "NIG", "model", {})),
    *deep(("fp32", "NIG", "model", {"stage": None}), ("fp32", "IIG", "from_config", {"stage": None})),
)
def test_training_and_resuming(
    group: Any, tmp_path: Path, dtype: str, strategy: str, how: str, zero: dict[str, None]
) -> None:
    """The Trainer reads the stage of the dictionary that it was given: to save, and to make models under zero.Init."""
    more = {"bf16": dtype == "bf16", "eval_strategy": "steps", "eval_steps": 1}
    rows = group.run(case, placed(strategy, **zero), stock(strategy), str(tmp_path), how, more)
    bounds = {"losses": 2e-3, "weights": 8e-3} if more["bf16"] else {}  # an ulp of the largest weight
    check(rows, strategy, **bounds, resumed=True)


@with_cases(
    "averages, batches, message",
    (False, 9, ""),
    (True, 9, "but average_tokens_across_devices is true, so it divides by those of all ranks"),
    (False, 0, "needs a loader of the rank's own samples, but Accelerate has prepared this one"),
    (False, 1, "micro-batches in each step of this rank, but Accelerate ends a step after 1."),
)
def test_loops_weigh_groups_right(frameworks: Any, tmp_path: Path, averages: bool, batches: int, message: str) -> None:
    """Groups run 2 and 3 micro-batches, from this number of own batches, or (0) from Trainer's loader."""
    run = frameworks(4).run_expect_error if message else frameworks(4).run
    for result in run(numbers_case, str(tmp_path), averages, batches):
        assert message in result.message if message else result == 2


def numbers_case(folder: str, averages: bool, batches: int) -> int:
    import torch.distributed as dist
    from accelerate.data_loader import SkipDataLoader  # as resumes with iterable data sets use it

    from tests.harness.frameworks import tiny

    more = {"gradient_accumulation_steps": 2 + dist.get_rank() // 2, "average_tokens_across_devices": averages}
    trainer = make(folder, "model", {**more, "save_strategy": "no"}, placed("NIG", paro_micro_batches=[2, 3]))
    if batches:
        rows = trainer.train_dataset[: 2 * batches]
        own = SkipDataLoader(rows, batch_size=2, collate_fn=trainer.data_collator)
        trainer.get_train_dataloader = lambda: own
    try:
        trainer.train()
        return int(trainer.state.global_step)
    finally:
        tiny.forget()


@pytest.mark.deep
def test_loco(group: Any, kernels: bool, tmp_path: Path) -> None:
    # Near to SGD: what 4 bits lose is not normalized to a whole step.
    more = {"learning_rate": 0.3, "adam_epsilon": 1.0}
    rows = group.run(case, placed("NIG", zeropp_loco_param={}), stock("NIG"), str(tmp_path), "model", more)
    check(rows, "NIG", losses=2e-3, weights=1e-2, resumed=True)
    # Without the other group's gradients, half of each step would be missing.
    assert all(1e-3 * row.moved < row.weights < 0.2 * row.moved for row in rows), rows


@pytest.mark.deep
def test_fastest(group: Any, tmp_path: Path) -> None:
    file = tmp_path / "decision.json"
    section = placed("NGG", paro_strategy="fastest", paro_decision_file=str(file))
    rows = group.run(case, section, stock("NGG"), str(tmp_path), "model", {})
    check(rows, json.loads(file.read_text())["decisions"][0]["strategy"], resumed=True)


def test_an_incomplete_checkpoint_is_not_resumed(frameworks: Any, tmp_path: Path) -> None:
    """The last complete checkpoint stays while the next is written; after a kill there is no file latest."""
    assert frameworks(2).run(incomplete_case, str(tmp_path)) == [([0, 1], True)] * 2


def incomplete_case(folder: str) -> tuple[list[int], bool]:
    """Return at which steps two runs begin, the second without the checkpoint of step 2; whether both end equal."""
    import threading
    from unittest import mock

    import torch
    import torch.distributed as dist
    from transformers import TrainerCallback

    from deepspeed_ext.checkpoint.frameworks import finish_saves
    from deepspeed_ext.checkpoint.snapshots import Snapshot
    from tests.harness import training
    from tests.harness.frameworks import tiny

    complete, returned = Snapshot.complete_copies, threading.Semaphore(0)
    begun: list[int] = []
    finishing: list[bool] = []  # whether the end of the training waits for saves

    class Watch(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:
            begun.append(state.global_step)

        def on_save(self, *_: Any, **__: Any) -> None:
            returned.release()  # what is to be removed has been

    weights, zero = [], placed("NIG")
    more = {"save_total_limit": 1, "deepspeed": {**for_trainer(zero), "checkpoint": {"async_save": True}}}
    with mock.patch.object(Snapshot, "complete_copies", lambda self: returned.acquire() and complete(self)):
        for resumes in (False, True):
            trainer = make(folder, "model", more, zero)
            trainer.add_callback(Watch)
            trainer.train(resume_from_checkpoint=resumes)
            weights.append(training.whole_weights(trainer.model))
            finishing.append(finish_saves() in map(type, trainer.callback_handler.callbacks))
            tiny.final_state(trainer.deepspeed, trainer.micro_losses)
            if dist.get_rank() == 0 and not resumes:
                Path(folder, "checkpoint-2", "latest").unlink()
            dist.barrier()
    return begun, torch.equal(*weights) and all(finishing)


def test_the_example_trains_under_iig(frameworks: Any, tmp_path: Path) -> None:
    (lines, _), *_ = answers = frameworks(4).run(example_case, str(tmp_path))
    for words in ("I-I-G (p=I, g=I, os=G; stage 3)", "over 4 data-parallel ranks in 2 group(s) of 2"):
        assert any(words in line for line in lines), (words, lines)
    assert "'train_loss'" in answers[0][1]  # which ranks print it differs between versions of transformers
    (checkpoint,) = (tmp_path / "build" / "trainer").glob("checkpoint-*")
    assert {path.name for path in checkpoint.iterdir()} >= {"latest", "zero_to_fp32.py"}


def example_case(folder: str) -> tuple[list[str], str]:
    """The log and output of a rank in a folder; the Trainer does not destroy process groups."""
    import os

    from tests.harness import examples
    from tests.harness.frameworks import tiny

    os.chdir(folder)
    try:
        return examples.run("trainer.py", destroys=0)
    finally:
        tiny.forget()


def test_the_callback_exports_while_training_goes_on(group: Any, tmp_path: Path) -> None:
    for alike in group.run(export_case, str(tmp_path)):
        assert alike == [False, True]
    names = {path.name for path in (tmp_path / "exports" / "2").iterdir()}
    assert names == {"config.json", "digests.json", "model.safetensors"}


def export_case(folder: str) -> list[bool]:
    """Whether the exports of steps 1 and 2, read again, are the model after both."""
    import torch
    from transformers import AutoModelForCausalLM

    from scripts.examples.export_weights import ExportWeights
    from tests.harness import training
    from tests.harness.frameworks import tiny

    trainer = make(folder, "model", {"save_strategy": "no"}, placed("IIG"))
    trainer.add_callback(ExportWeights(trainer, f"{folder}/exports", steps=1))
    trainer.train()
    weights = training.whole_weights(trainer.model)
    tiny.final_state(trainer.deepspeed, trainer.micro_losses)
    read = [AutoModelForCausalLM.from_pretrained(f"{folder}/exports/{step}") for step in (1, 2)]
    return [torch.equal(weights, training.whole_weights(model)) for model in read]
