# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules wait for the updated parameters that they may read."""

import copy
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed_ext.comm.spans import Span
from deepspeed_ext.zero.flat.arrivals import Arrivals
from deepspeed_ext.zero.shards import Window

pytestmark = pytest.mark.quick


class Gate(nn.Module):
    """Reads the weight of a part that it never calls, as torch's attention and the gate of DeepSpeed's MoE do."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part or nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.part.weight)


def watched(model: nn.Module) -> Arrivals:
    """Arrivals of a model, a window for each parameter, in their order."""
    places = {id(param): place for place, param in enumerate(model.parameters())}
    windows = [Window(0, Span(place, 1), (place,)) for place in places.values()]
    updates = Arrivals(windows, lambda window: iter(()), lambda window, cells: None, True, True)
    updates.watch(model, places)
    return updates


def waits(updates: Arrivals, model: nn.Module) -> list[int]:
    """The windows that modules wait for in a forward, one after the other."""
    with mock.patch.object(Arrivals, "begun", True), mock.patch.object(updates, "wait_for") as wait_for:
        model(torch.ones(1, 4))
    return [call.args[0] for call in wait_for.call_args_list]


def test_a_module_waits_for_what_it_may_read_of_its_parts() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Gate(), nn.Sequential(nn.Linear(4, 4)))
    updates = watched(model)
    copy.deepcopy(model)  # reads parameters, and calls nothing
    assert waits(updates, model) == [4, 1, 2, 4, 4]
    assert waits(updates, model) == [1, 2, 4]
    updates.drop()
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_all_modules_that_share_a_part_wait_for_it() -> None:
    part = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(Gate(part), Gate(part))
    updates = watched(model)
    assert [waits(updates, model), waits(updates, model)] == [[0, 0, 0], [0, 0]]


class Projection(nn.Module):
    """Calls its part in training, unless it is told to read the weight, as it does in evaluation."""

    def __init__(self, scaled: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4)) if scaled else 1.0
        self.part = nn.Linear(4, 4, bias=False)
        self.reads = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and not self.reads:
            return self.part(x * self.scale)
        return nn.functional.linear(x * self.scale, self.part.weight)


def test_evaluation_waits_for_what_only_training_has_called() -> None:
    model = Projection(scaled=False)
    updates = watched(model)
    assert [waits(updates, model), waits(updates, model)] == [[0, 0], [0]]
    model.eval()
    assert [waits(updates, model), waits(updates, model)] == [[0], [0]]
    model.train()
    assert waits(updates, model) == [0]


def test_a_module_with_parameters_waits_for_a_part_that_it_calls_now_and_then() -> None:
    model = Projection(scaled=True)
    updates = watched(model)
    assert [waits(updates, model), waits(updates, model)] == [[1, 1], [1, 1]]
    model.reads = True
    assert waits(updates, model) == [1]


def test_a_module_waits_for_a_part_that_another_one_calls() -> None:
    part = nn.Linear(4, 4, bias=False)
    model = nn.Sequential(Gate(part), nn.Sequential(part))
    updates = watched(model)
    assert [waits(updates, model), waits(updates, model)] == [[0, 0, 0, 0], [0, 0, 0]]
