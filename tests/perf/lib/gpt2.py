# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""transformers' GPT-2 with random weights, for benchmarks: it returns its own loss, and its blocks are units."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

# Methods draw other random numbers, so with dropout their losses could not be compared.
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)


def forget(loss: Tensor) -> None:
    """Do nothing with a loss."""


class Gpt2(nn.Module):
    """A ``GPT2LMHeadModel`` with its embedding tied to its head.

    Args:
        shape: what its configuration has otherwise than GPT-2 with 124 M parameters.
        note: is given the loss of each forward, detached.
    """

    def __init__(self, shape: Mapping[str, Any], note: Callable[[Tensor], None] = forget) -> None:
        from transformers import GPT2Config, GPT2LMHeadModel

        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(**NO_DROPOUT, **shape))
        self._note = note

    @property
    def blocks(self) -> nn.ModuleList:
        """What is gathered as one; the embeddings, which are the head as well, are the root's."""
        return cast(nn.ModuleList, self.model.transformer.h)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each token's prediction from those before it.

        Args:
            tokens: ids, (rows, tokens), int64.
            targets: the same ids; the model shifts them.
        """
        loss: Tensor = self.model(input_ids=tokens, labels=targets, use_cache=False).loss
        self._note(loss.detach())
        return loss


def make_gpt2(shape: Mapping[str, Any], note: Callable[[Tensor], None] = forget) -> Gpt2:
    """Return the same fp32 model on every call and every rank, with weights that bf16 represents exactly.

    DeepSpeed makes its fp32 masters from weights that it has rounded, PyTorch from those that it is given.
    """
    torch.manual_seed(0)
    model: Gpt2 = Gpt2(shape, note).to(torch.bfloat16).float()
    return model


def parameters_of(model: nn.Module) -> int:
    """Return how many there are, tied ones once."""
    return sum(p.numel() for p in model.parameters())
