# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Exported weights: save_16bit_model, and safetensors of a model of transformers, by its own and by ours."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.training import PARTITIONED, REPLICATED

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}


@pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])
def test_the_model_is_saved_in_its_own_precision(ranks: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    for rows in ranks(4).run(bit16_case, str(tmp_path), names):
        assert rows == [(name, True, []) for name in names]


def bit16_case(folder: str, names: tuple[str, ...]) -> list[tuple[str, bool, list[str]]]:
    """Whether it says that it has saved, and what differs from the model's weights after a step that follows one."""
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(dtype="bf16", frozen=(1,), empty=False, network=snapshots.Buffered)
    rows = []
    for name in names:
        zero = {"paro_strategy": name, "paro_group_size": 2, **(GATHER if name in PARTITIONED else {})}
        engine, model = training.make_engine(job, zero)
        snapshots.mark(engine, model)
        snapshots.run(engine, job, snapshots.steps_of(job, 2))
        said = engine.save_16bit_model(f"{folder}/{name}")
        dist.barrier()
        saved = torch.load(f"{folder}/{name}/pytorch_model.bin")
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            wanted = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            differing = [key for key in wanted if key not in saved or not torch.equal(wanted[key], saved[key])]
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=2))  # parameters are sharded again
        engine.destroy()
        rows.append((name, bool(said), differing + sorted(saved.keys() - wanted.keys())))
    return rows


def test_a_model_of_transformers_is_exported(ranks: Any, tmp_path: Path) -> None:
    for rows in ranks(4).run(safetensors_case, str(tmp_path)):
        assert rows == [(name, ["model.safetensors"], []) for name in ("NIG", "IIG", "III")]


def safetensors_case(folder: str) -> list[tuple[str, list[str], list[str]]]:
    """As the Trainer of transformers does it, and without a whole state dict: files of weights, and what differs when
    the model is read again."""
    import deepspeed
    import torch
    from deepspeed import comm as dist
    from transformers import LlamaConfig, LlamaForCausalLM

    import deepspeed_ext

    rows = []
    for name in ("NIG", "IIG", "III"):
        torch.manual_seed(1)
        small = {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
        model = LlamaForCausalLM(LlamaConfig(vocab_size=50, tie_word_embeddings=True, **small)).bfloat16()
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "zero_optimization": {"paro_strategy": name, "paro_group_size": 2, **(GATHER if name[0] != "N" else {})},
        }
        engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        tokens = torch.arange(8).view(2, 4) + dist.get_rank()
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        whole = engine._zero3_consolidated_16bit_state_dict() if name[0] != "N" else model.state_dict()
        if dist.get_rank() == 0:
            model.save_pretrained(f"{folder}/{name}", state_dict=whole)
            model.config.save_pretrained(f"{folder}/{name}/exported")
        deepspeed_ext.export_weights(engine, f"{folder}/{name}/exported", max_shard_bytes=9000)
        files = sorted(path.name for path in Path(folder, name).glob("*.safetensors"))
        differing = []
        for place in (f"{folder}/{name}", f"{folder}/{name}/exported"):
            again = LlamaForCausalLM.from_pretrained(place, dtype=torch.bfloat16).state_dict()
            with deepspeed.zero.GatheredParameters(list(model.parameters())):
                differing += [key for key, value in model.state_dict().items() if not torch.equal(value, again[key])]
        engine.destroy()
        rows.append((name, files, differing))
    return rows
