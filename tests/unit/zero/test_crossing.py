# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What crosses between groups is the same in all of them, whatever the order in which it arrives in each."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some

from deepspeed_ext.zero.sharded.crossing import Crossing

pytestmark = pytest.mark.quick

ROWS = 2
DTYPES = (torch.float32, torch.bfloat16)
Crossed = list[tuple[list[int], list[list[float]], torch.dtype]]


def backward(crossing: Crossing, used: list[Any], cuts: set[int]) -> Crossed:
    """Messages of a backward: parameters arrive in this order, in buckets that end at ``cuts``.

    Row r of parameter p has the numbers 10 p + r.
    """
    crossed: Crossed = []

    def take(last: bool = False) -> None:
        for bucket in crossing.buckets(last):
            params, message = bucket.params, bucket.pack()
            ids = [param.ds_id for param in params]
            expected = [
                [10.0 * param.ds_id + row for param in params for _ in range(param.ds_tensor.ds_numel)]
                for row in range(ROWS)
            ]
            assert message.is_contiguous() and message.tolist() == expected
            crossed.append((ids, message.tolist(), message.dtype))

    bucket: list[Any] = []
    for number, param in enumerate(used):
        if bucket and (number in cuts or bucket[0].dtype != param.dtype):
            arrive(crossing, bucket)
            take()
            bucket = []
        bucket.append(param)
    if bucket:
        arrive(crossing, bucket)
    take(last=True)
    return crossed


def arrive(crossing: Crossing, bucket: list[Any]) -> None:
    """A bucket arrives, as it is sorted by DeepSpeed."""
    bucket.sort(key=lambda param: param.ds_id)
    parts = [
        torch.tensor([[10.0 * p.ds_id + row] * p.ds_tensor.ds_numel for row in range(ROWS)], dtype=p.dtype)
        for p in bucket
    ]
    crossing.add(bucket, torch.cat(parts, dim=1))


@settings(max_examples=200, deadline=None)
@given(data=some.data(), count=some.integers(1, 8), limit=some.integers(1, 60))
def test_messages_do_not_depend_on_the_order_of_arrival(data: Any, count: int, limit: int) -> None:
    params = [
        SimpleNamespace(
            ds_id=number,
            ds_numel=ROWS * width,
            ds_tensor=SimpleNamespace(ds_numel=width),
            dtype=data.draw(some.sampled_from(DTYPES)),
        )
        for number, width in enumerate(data.draw(some.lists(some.integers(1, 12), min_size=count, max_size=count)))
    ]
    groups = [Crossing(params, ROWS, limit) for _ in range(2)]
    for _ in range(3):
        used = data.draw(some.lists(some.sampled_from(params), max_size=12))  # some twice, some not at all
        crossed = [
            backward(crossing, data.draw(some.permutations(used)), data.draw(some.sets(some.integers(1, 11))))
            for crossing in groups
        ]
        assert crossed[0] == crossed[1]
        numbers = [number for ids, *_ in crossed[0] for number in ids]
        assert sorted(numbers) == sorted(param.ds_id for param in used)
        for ids, *_ in crossed[0]:
            assert len(set(ids)) == len(ids)
            assert len(ids) == 1 or sum(params[number].ds_numel for number in ids) <= limit


def test_what_arrives_in_the_order_of_the_model_crosses_at_once() -> None:
    params = [
        SimpleNamespace(ds_id=n, ds_numel=ROWS * 3, ds_tensor=SimpleNamespace(ds_numel=3), dtype=torch.float32)
        for n in range(8)
    ]
    crossing = Crossing(params, ROWS, 2 * ROWS * 3)
    for end in (8, 6, 4, 2):
        arrive(crossing, params[end - 2 : end])
        crossed = [[param.ds_id for param in bucket.params] for bucket in crossing.buckets(last=end == 2)]
        assert crossed == [[end - 2, end - 1]]
