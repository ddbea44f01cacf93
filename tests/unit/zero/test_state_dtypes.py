# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Optimizer states are loaded in the dtypes in which the optimizer computes them."""

from contextlib import nullcontext

import pytest
import torch

from deepspeed_ext.zero.muon import MOMENTUM
from deepspeed_ext.zero.state_dtypes import keep_state_dtypes


def _optimizer(**states: torch.Tensor) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    """Return an optimizer of bf16 weights with these states, of which Muon takes a second tensor of weights."""
    weights = [torch.zeros(3, dtype=torch.bfloat16, requires_grad=True) for _ in range(2)]
    groups = [{"params": [weights[0]]}, {"params": [weights[1]], "use_muon": True}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    optimizer.state[weights[0]].update(states)
    return optimizer, weights[1]


@pytest.mark.parametrize("kept", [False, True])
def test_states_in_fp32_of_weights_in_bf16_are_not_rounded(kept: bool) -> None:
    third = torch.full((3,), 1 / 3)  # bf16 cannot represent it
    saving, matrix = _optimizer(exact=third.clone(), rounded=third.bfloat16(), count=3, step=torch.tensor(7.0))
    saving.state[matrix][MOMENTUM] = third.clone()
    zeros = torch.zeros(3)
    loading, fresh = _optimizer(exact=zeros.clone(), rounded=zeros.bfloat16(), count=0, step=torch.tensor(0.0))
    with keep_state_dtypes(loading) if kept else nullcontext():
        loading.load_state_dict(saving.state_dict())
    states = loading.state[loading.param_groups[0]["params"][0]]
    assert torch.equal(states["exact"].float(), third) == kept
    assert torch.equal(loading.state[fresh][MOMENTUM].float(), third) == kept
    assert states["rounded"].dtype == torch.bfloat16 and (states["count"], states["step"].item()) == (3, 7.0)
    loading.load_state_dict(saving.state_dict())  # as torch does again
    assert loading.state[fresh][MOMENTUM].dtype == torch.bfloat16
