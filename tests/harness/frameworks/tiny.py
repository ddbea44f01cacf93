# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tiny models and data and the state of a run that tests compare; all of it runs inside rank processes."""

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import deepspeed
import torch
import tqdm
from accelerate.state import AcceleratorState, GradientState
from deepspeed.runtime.sequence_parallel import parallel_state_sp
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.deepspeed import unset_hf_deepspeed_config
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from tests.harness import training
from tests.harness.frameworks.comparison import Row

VOCABULARY = 53
_ATTENTION = (ALL_ATTENTION_FUNCTIONS._global_mapping, ALL_ATTENTION_FUNCTIONS._local_mapping)
_SAVED = tuple(dict(mapping) for mapping in _ATTENTION)
tqdm.tqdm.set_lock(threading.RLock())  # its own is a semaphore, which a killed rank never releases


def shape(**more: Any) -> LlamaConfig:
    """Sizes of the model; all weights count, for embeddings are not tied."""
    sizes = {"hidden_size": 24, "intermediate_size": 37, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
    return LlamaConfig(**{**sizes, **heads, **tokens, "use_cache": False, "tie_word_embeddings": False, **more})


def make_model(**more: Any) -> LlamaForCausalLM:
    """A Llama with the same random weights each time; no file is read and nothing is downloaded."""
    torch.manual_seed(11)
    return LlamaForCausalLM(shape(**more))


def make_network() -> nn.Module:
    torch.manual_seed(11)
    return nn.Sequential(nn.Embedding(VOCABULARY, 24), nn.Linear(24, 37), nn.Tanh(), nn.Linear(37, VOCABULARY))


def network_loss(network: Any, tokens: Tensor) -> Tensor:
    """Of predicting each next token."""
    return nn.functional.cross_entropy(network(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sequences(rows: int, length: int = 9) -> list[dict[str, list[int]]]:
    """Token sequences, the same on every rank, with the tokens to predict."""
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(2, VOCABULARY, (rows, length), generator=generator).tolist()
    return [{"input_ids": row, "labels": row} for row in tokens]


def forget() -> None:
    """Put back the globals of the frameworks, those of Ulysses included, and the generators of random numbers."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    unset_hf_deepspeed_config()
    parallel_state_sp._release_sequence_parallel_groups()
    for live, saved in zip(_ATTENTION, _SAVED, strict=True):
        live.clear()
        live.update(saved)
    torch.manual_seed(0)


class Run(NamedTuple):
    """The final state of a run on a rank."""

    losses: list[float]  # of each micro-step
    weights: Tensor  # 1D, all parameters in fp32
    strategy: str | None  # of the engine's optimizer; None if it is DeepSpeed's own
    stage: int


def final_state(engine: Any, losses: Sequence[float]) -> Run:
    """Return the final state of a run, destroy its engine, and reset globals; TypeError if the framework has trained
    without DeepSpeed, as Accelerate does where it finds no accelerator."""
    if not isinstance(engine, deepspeed.DeepSpeedEngine):
        raise TypeError(f"expected that a DeepSpeedEngine trains, got {type(engine).__name__}")
    strategy = getattr(engine.optimizer, "strategy", None)
    name = strategy.name if strategy else None
    run = Run(list(losses), training.whole_weights(engine.module), name, engine.zero_optimization_stage())
    engine.destroy()
    forget()
    return run


def compare_runs(start: Tensor, stock: Run, ours: Run, resumed: Run | None = None, group: Any = None) -> Row:
    """Compare a run and the end of a resumed run to stock's; ``group`` has one state, by default all ranks."""
    if stock.strategy or stock.stage != ours.stage:
        raise ValueError(f"expected stock DeepSpeed at stage {ours.stage}, got {stock.strategy or stock.stage}")
    largest = stock.weights.abs().max()
    return Row(
        str(ours.strategy),
        max(abs(a - b) for a, b in zip(ours.losses, stock.losses, strict=True)) / max(stock.losses),
        ((ours.weights - stock.weights).abs().max() / largest).item(),
        ((start - stock.weights).abs().max() / largest).item(),
        training.replicas_equal(ours.weights, group),
        None if resumed is None else torch.equal(resumed.weights, ours.weights) and resumed.strategy == ours.strategy,
    )
