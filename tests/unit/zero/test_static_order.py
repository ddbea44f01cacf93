# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One order in which units leave, whatever is complete first."""

import copy
import itertools
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from deepspeed_ext.zero.boundary_units import BoundaryUnits, units_of
from deepspeed_ext.zero.static_order import StaticOrder
from deepspeed_ext.zero.updates import Updates
from deepspeed_ext.zero.windows import Window

pytestmark = pytest.mark.quick


def test_units_leave_in_one_order_whatever_is_complete_first() -> None:
    units = ["ab", "b", "cd", "", "e"]
    for used in (members for count in range(6) for members in itertools.permutations("abcde", count)):
        order = StaticOrder(units)
        left: list[int] = []
        for number, member in enumerate(used):
            left += order.ready(member)
            complete = [set(unit) <= set(used[: number + 1]) for unit in units]
            assert left == list(range(complete.index(False) if False in complete else len(units)))
            assert order.begun == bool(left)
        assert left + order.rest() == list(range(len(units)))
        assert order.ready("a") == []  # begun anew


def test_a_member_that_is_complete_twice_counts_once() -> None:
    order = StaticOrder(["ab", "c"])
    assert [order.ready("a"), order.ready("a"), order.ready("x")] == [[], [], []]
    assert not order.has_left("a")
    assert order.ready("b") == [0]
    assert order.has_left("a") and not order.has_left("c") and not order.has_left("x")
    assert order.ready("b") == []
    order.clear()
    assert not order.begun and not order.has_left("a")
    assert order.ready("a") == [] and order.rest() == [0, 1]


class Gate(nn.Module):
    """Reads the weight of a part that it never calls, as torch's attention and the gate of DeepSpeed's MoE do."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        self.part = part or nn.Linear(4, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.part.weight)


def watched(model: nn.Module) -> Updates:
    """Updates of a model, a window for each parameter, in their order."""
    places = {id(param): place for place, param in enumerate(model.parameters())}
    windows = [Window(0, place, 1, frozenset([place])) for place in places.values()]
    updates = Updates(windows, lambda window: iter(()), lambda window, cells: None, True, True)
    updates.watch(model, places)
    return updates


def waits(updates: Updates, model: nn.Module) -> list[int]:
    """The windows that modules wait for in a forward, one after the other."""
    with mock.patch.object(Updates, "begun", True), mock.patch.object(updates, "wait_for") as wait_for:
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


def parameters(*numels: int) -> list[Any]:
    """Parameters of this many elements, numbered in turn; even ones in fp32, odd ones in bf16."""
    dtypes = (torch.float32, torch.bfloat16)
    return [SimpleNamespace(ds_id=at, ds_numel=numel, dtype=dtypes[at % 2]) for at, numel in enumerate(numels)]


def numbered(units: list[Any]) -> list[list[int]]:
    """The numbers of their parameters."""
    return [[param.ds_id for param in unit] for unit in units]


def test_units_are_buckets_of_one_dtype_and_the_models_last_ones_are_the_first() -> None:
    params = parameters(5, 3, 9, 4, 2, 4, 0, 20)
    shuffled = [params[at] for at in (1, 0, 6, 3, 5, 4, 2, 7)]
    same = numbered(units_of(shuffled, 10, lambda param: torch.float32))
    assert same == [[7], [6, 3, 5, 4], [2], [1, 0]]
    assert numbered(units_of(shuffled, 10, lambda param: param.dtype)) == [[7], [6, 4], [3, 5], [2], [1], [0]]


def test_what_gets_several_gradients_waits_for_the_boundary_and_what_nobody_uses_holds_up_nobody() -> None:
    params = parameters(4, 4, 4, 4, 4)
    units = BoundaryUnits(units_of(params, 4, lambda param: torch.float32), lambda param: f"layer.{param.ds_id}")
    for at in (3, 2, 1, 1, 0):  # nobody uses 4; another rank does not use 2
        assert units.ready([params[at]]) == []
    assert numbered(units.rest()) == [[4], [3], [2], [1], [0]]
    units.learn(lambda used: used)
    units.clear()
    assert numbered(units.ready(params[2:4])) == [[3], [2]]
    assert units.ready([params[1]]) == units.ready([params[0]]) == []
    with pytest.raises(RuntimeError, match=r"layer\.3 got another gradient .*overlap_comm to false"):
        units.ready([params[3]])
    assert numbered(units.rest()) == [[1], [0], [4]]
