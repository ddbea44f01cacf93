# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What it takes to have a contradicting configuration refused, and to see what is communicated; inside ranks only."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import deepspeed
import torch
from torch import nn

from tests.campaigns.fuzz.contradictions import Contradiction
from tests.harness.stream_order import _COLLECTIVES as COLLECTIVES


def model_of(given: Contradiction) -> nn.Module:
    """A small model of the kind that a contradiction needs."""
    torch.manual_seed(7)
    if given.model == "experts":
        from tests.harness.networks import SQUARE, Routed

        return Routed(SQUARE, None, False)
    with deepspeed.zero.Init(enabled=given.model == "zero.Init"):
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    if given.model == "compiled":
        model[0] = torch.compile(model[0], backend="eager")
    return model


@contextlib.contextmanager
def noting(groups: type, called: list[str]) -> Iterator[None]:
    """Note each collective of process groups in this context."""

    def noted(name: str) -> Callable[..., Any]:
        method = getattr(groups, name)

        def collective(*args: Any, **kwargs: Any) -> Any:
            called.append(name)
            return method(*args, **kwargs)

        return collective

    with contextlib.ExitStack() as patches:
        for name in (*COLLECTIVES, "barrier"):
            if hasattr(groups, name):
                patches.enter_context(mock.patch.object(groups, name, noted(name)))
        yield


def noted_groups(called: list[str]) -> Callable[..., Any]:
    """Make process groups, and note that."""
    new_group = torch.distributed.new_group

    def noted(*args: Any, **kwargs: Any) -> Any:
        called.append("new_group")
        return new_group(*args, **kwargs)

    return noted
