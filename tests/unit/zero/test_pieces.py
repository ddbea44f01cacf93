# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What crosses between groups in each micro-step is the same in all of them, whatever each has used, in which order.

See Note [Pieces].
"""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from torch import Tensor

from deepspeed_ext.zero.boundary import Boundary
from deepspeed_ext.zero.sharded.gradients import boundary_buckets
from deepspeed_ext.zero.sharded.pieces import Pieces

pytestmark = pytest.mark.quick

ROWS = 2
DTYPES = (torch.float32, torch.bfloat16)


class Group:
    """Crosses what arrives in it, which are ones."""

    def __init__(self, params: list[Any], limit: int) -> None:
        self.pieces = Pieces(ROWS)
        self.boundary: Boundary[list[Any]] = Boundary(
            boundary_buckets(params, limit, lambda param: param.dtype),
            lambda bucket: [param.ds_id for param in bucket],
            early=True,
            once=False,
            again="always",
        )
        self.crossed: list[list[int]] = []
        self.sums = {param.ds_id: 0 for param in params}

    def backward(self, used: list[Any], cuts: set[int]) -> None:
        """Parameters arrive in this order, in buckets that end at ``cuts``."""
        bucket: list[Any] = []
        for number, param in enumerate(used):
            if bucket and (number in cuts or bucket[0].dtype != param.dtype or param in bucket):
                self.arrive(bucket)
                bucket = []
            bucket.append(param)
        if bucket:
            self.arrive(bucket)

    def arrive(self, bucket: list[Any]) -> None:
        """A bucket arrives, sorted as by DeepSpeed, and with padding."""
        bucket.sort(key=lambda param: param.ds_id)
        width = sum(param.ds_tensor.ds_numel for param in bucket)
        arrived = torch.ones(ROWS, width + 1, dtype=bucket[0].dtype)
        self.pieces.add(bucket, arrived.view(-1))
        self.cross(self.boundary.ready(param.ds_id for param in bucket))

    def cross(self, buckets: list[list[Any]]) -> None:
        """Take what leaves."""
        for bucket in buckets:
            self.crossed.append([param.ds_id for param in bucket])
            message = torch.cat(self.pieces.take(bucket), dim=1)
            columns = message.split([param.ds_tensor.ds_numel for param in bucket], dim=1)
            for param, part in zip(bucket, columns, strict=True):
                assert part.min() == part.max()
                self.sums[param.ds_id] += int(part[0, 0])


def parameters(widths: list[int], dtype: Callable[[], torch.dtype]) -> list[Any]:
    """Parameters with so many columns."""
    return [
        SimpleNamespace(ds_id=n, ds_numel=ROWS * width, ds_tensor=SimpleNamespace(ds_numel=width), dtype=dtype())
        for n, width in enumerate(widths)
    ]


def together(groups: list[Group], act: Callable[[Group, Callable[[Tensor], Tensor]], None]) -> None:
    """Have groups do what asks for the largest of their values once."""
    everybody, all_asked = [], threading.Barrier(len(groups), timeout=60)

    def largest(mine: Tensor) -> Tensor:
        everybody.append(mine)
        all_asked.wait()
        return torch.stack(everybody).amax(0)

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: act(group, largest), groups))


@settings(max_examples=200, deadline=None)
@given(data=some.data(), widths=some.lists(some.integers(1, 12), min_size=1, max_size=8), limit=some.integers(1, 60))
def test_groups_may_use_different_parameters(data: Any, widths: list[int], limit: int) -> None:
    """In any order, some several times: the same buckets cross in the same order, and everything once."""
    params = parameters(widths, lambda: data.draw(some.sampled_from(DTYPES)))
    groups = [Group(params, limit) for _ in range(2)]
    for step in range(3):
        for group in groups:
            group.crossed, group.sums = [], dict.fromkeys(group.sums, 0)
        uses = [data.draw(some.lists(some.sampled_from(params), max_size=12)) for _ in groups]
        for group, used in zip(groups, uses, strict=True):
            group.backward(used, data.draw(some.sets(some.integers(1, 11))))
        for group in groups:
            group.cross(group.boundary.rest())
        together(groups, lambda group, largest: group.cross(group.boundary.again(largest)))
        assert groups[0].crossed == groups[1].crossed
        for group, used in zip(groups, uses, strict=True):
            assert group.sums == {param.ds_id: used.count(param) for param in params}
            assert not group.pieces._held
        if step == 1:
            together(groups, lambda group, largest: group.boundary.learn(largest))


def test_what_arrives_in_the_order_of_the_model_crosses_at_once() -> None:
    params = parameters([3] * 8, lambda: torch.float32)
    group = Group(params, 2 * ROWS * 3)
    for end in (8, 6, 4, 2):
        group.arrive(params[end - 2 : end])
        assert group.crossed.pop() == [end - 2, end - 1] and not group.crossed and not group.pieces._held


def test_neighbors_cross_without_a_copy() -> None:
    params = parameters([3, 2, 4], lambda: torch.float32)
    pieces, arrived = Pieces(ROWS), torch.rand(ROWS, 9)
    pieces.add(params, arrived)
    (piece,) = pieces.take(params)
    assert piece.data_ptr() == arrived.data_ptr() and torch.equal(piece, arrived)
