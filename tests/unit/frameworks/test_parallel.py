# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Sequence parallelism (Ulysses) and tensor parallelism (AutoTP) of DeepSpeed on models of transformers."""

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.harness.frameworks.comparison import Row, check, needs, placed, plain, stock
from tests.harness.tiers import deep, since

pytestmark = needs("transformers", "accelerate")


def ulysses_case(ours: dict[str, Any], stock: dict[str, Any]) -> Row:
    """Two sequences at a time, each cut over two ranks; DeepSpeed is told by an mpu."""
    import torch
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF

    from tests.harness.frameworks import loops, tiny

    engines: list[Any] = []

    def make() -> dict[str, Any]:
        model = tiny.make_model()
        sizes = {"sequence_parallel_size": 2, "micro_batch_size": 2}
        engines.append(UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", **sizes))
        return {"model": model, "mpu": engines[-1]}

    def loss_of(engine: Any, batch: dict[str, Any]) -> Any:
        """Return the mean over the whole sequence; this rank has half of it."""
        tokens, mpu = batch["input_ids"], engines[-1]
        shifted = torch.nn.functional.pad(tokens[:, 1:], (0, 1), value=-100)
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        half = {"input_ids": tokens, "position_ids": positions, "shift_labels": shifted}
        half = {k: v.chunk(2, dim=1)[mpu.get_sequence_parallel_rank()].contiguous() for k, v in half.items()}
        loss, count = engine(**half, labels=half["shift_labels"]).loss, (half["shift_labels"] != -100).sum()
        sums = torch.stack([loss * count, count.float()])
        both = torch.distributed.nn.functional.all_reduce(sums, group=mpu.get_sequence_parallel_group())
        return both[0] / both[1]

    return loops.compare(plain(stock), plain(ours), make, loss_of=loss_of, parts=2)


def make_ulysses(folder: str, zero: dict[str, Any]) -> Any:
    """The Trainer of transformers with sequences that are cut over all ranks. Over fewer, its loss fails on gloo: the
    gradient of torch's all-gather takes rank 0 for a member of every group."""
    from accelerate import ParallelismConfig
    from accelerate.utils import DeepSpeedSequenceParallelConfig
    from transformers import Trainer, TrainingArguments, default_data_collator

    from tests.harness.frameworks import tiny, trainers

    handler = DeepSpeedSequenceParallelConfig(sp_seq_length_is_variable=True, sp_attn_implementation="sdpa")
    parallel = ParallelismConfig(sp_backend="deepspeed", sp_size=4, sp_handler=handler)
    args = trainers.arguments(TrainingArguments, zero, folder, parallelism_config=parallel)
    data = [{**row, "position_ids": list(range(8))} for row in tiny.sequences(64, 8)]
    trainer_arguments = {"model": tiny.make_model(num_key_value_heads=4), "data_collator": default_data_collator}
    return trainers.recording(Trainer)(**trainer_arguments, args=args, train_dataset=data)


def trainer_case(ours: dict[str, Any], stock: dict[str, Any], folder: str) -> Row:
    """Stock DeepSpeed and a strategy under that trainer. Not resumed: the loader of Ulysses cannot skip batches."""
    from tests.harness.frameworks import trainers

    return trainers.compare(functools.partial(make_ulysses, folder), stock, ours)


def tensor_case(ours: dict[str, Any], stock: dict[str, Any]) -> Row:
    """Every linear layer cut over two ranks, and two such pairs."""
    from deepspeed.utils import groups

    from tests.harness.frameworks import loops, tiny

    def look(engine: Any) -> None:
        total = sum(p.numel() for p in tiny.make_model().parameters())
        per_rank = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        if per_rank >= total:
            raise ValueError(f"expected that ranks hold parts of {total} weights, got {per_rank}")

    configs = [plain(zero, tensor_parallel={"autotp_size": 2}) for zero in (stock, ours)]
    return loops.compare(*configs, group=groups._get_data_parallel_group, parts=2, finish=look)


@pytest.mark.deep
@pytest.mark.parametrize("strategy", ["IIG", "NIG"])
def test_ulysses_by_an_mpu(frameworks: Any, strategy: str) -> None:
    check(frameworks(4).run(ulysses_case, placed(strategy), stock(strategy)), strategy)


@since(transformers="5.0", accelerate="1.12")  # the first that have a ParallelismConfig for DeepSpeed's Ulysses
@pytest.mark.parametrize("strategy", ["NIG", *deep("IIG")])
def test_ulysses_by_the_trainer(frameworks: Any, tmp_path: Path, strategy: str) -> None:
    check(frameworks(4).run(trainer_case, placed(strategy), stock(strategy), str(tmp_path)), strategy)


@pytest.mark.parametrize("strategy", ["NIG", *deep("NNG")])
def test_tensor_parallelism(frameworks: Any, strategy: str) -> None:
    check(frameworks(4).run(tensor_case, placed(strategy, paro_group_size=1), stock(strategy)), strategy)
