# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The order in which buckets of gradients are sent between groups: the same on all ranks, in any order of completion.

See Note [Pending gradients].
"""

import itertools
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
from deepspeed_ext.zero.sharded.gradients import PendingGradients, boundary_buckets

pytestmark = pytest.mark.quick

ROWS = 2
DTYPES = (torch.float32, torch.bfloat16)


def test_buckets_are_sent_in_one_order() -> None:
    buckets = ["ab", "b", "cd", "", "e"]
    for used in (members for count in range(6) for members in itertools.permutations("abcde", count)):
        boundary = Boundary(buckets, str, early=True)
        sent: list[str] = []
        for number, member in enumerate(used):
            sent += boundary.mark_ready([member])
            complete = [set(bucket) <= set(used[: number + 1]) for bucket in buckets]
            assert sent == buckets[: complete.index(False) if False in complete else len(buckets)]
            assert boundary.has_sent == bool(sent)
        assert sent + boundary.pop_remaining() == buckets
        assert boundary.mark_ready("a") == []  # a new step


def test_a_member_that_is_complete_twice_counts_once() -> None:
    boundary = Boundary(["ab", "c"], str, early=True, advice=" twice")
    assert [boundary.mark_ready("a"), boundary.mark_ready("a"), boundary.mark_ready("x")] == [[], [], []]
    assert boundary.mark_ready("b") == ["ab"]
    with pytest.raises(RuntimeError, match=r"b got another gradient .* reduced twice"):
        boundary.mark_ready("b")
    boundary.clear()
    assert not boundary.has_sent
    assert boundary.mark_ready("a") == [] and boundary.pop_remaining() == ["ab", "c"]


def test_buckets_wait_for_the_boundary_if_early_is_false() -> None:
    boundary = Boundary(["ab", "c"], str, early=False)
    assert boundary.mark_ready("abc") == [] and not boundary.has_sent
    boundary.learn_order(lambda used: pytest.fail("ranks need not agree"))
    assert boundary.pop_remaining() == ["ab", "c"]


def parameters(numels: list[int], dtypes: list[torch.dtype]) -> list[Any]:
    """Return parameters with these numbers of elements in each row."""
    return [
        SimpleNamespace(ds_id=n, ds_numel=ROWS * numel, ds_tensor=SimpleNamespace(ds_numel=numel), dtype=dtype)
        for n, (numel, dtype) in enumerate(zip(numels, dtypes, strict=True))
    ]


def ds_ids_of(buckets: list[Any]) -> list[list[int]]:
    return [[param.ds_id for param in bucket] for bucket in buckets]


def test_buckets_have_one_dtype_and_begin_with_the_last_layer() -> None:
    params = parameters([5, 3, 9, 4, 2, 4, 0, 20], [*DTYPES] * 4)
    shuffled = [params[at] for at in (1, 0, 6, 3, 5, 4, 2, 7)]
    of_one_dtype = ds_ids_of(boundary_buckets(shuffled, 20, lambda param: torch.float32))
    assert of_one_dtype == [[7], [6, 3, 5, 4], [2], [1, 0]]
    assert ds_ids_of(boundary_buckets(shuffled, 20, lambda param: param.dtype)) == [[7], [6, 4], [3, 5], [2], [1], [0]]


def test_only_parameters_with_one_gradient_are_sent_early() -> None:
    buckets = [[4], [3], [2], [1], [0]]
    boundary = Boundary(buckets, list, early=True, single_gradient=False, name=lambda member: f"layer.{member}")
    for member in (3, 2, 1, 1, 0):  # 4 is not used, and must not block the others
        assert boundary.mark_ready([member]) == []
    assert boundary.pop_remaining() == buckets
    boundary.learn_order(lambda used: used)
    assert boundary.mark_ready([2, 3]) == [[3], [2]]
    assert boundary.mark_ready([1]) == boundary.mark_ready([0]) == []
    with pytest.raises(RuntimeError, match=r"layer\.3 got another gradient"):
        boundary.mark_ready([3])
    assert boundary.pop_remaining() == [[1], [0], [4]]
    boundary.learn_order(lambda used: pytest.fail("ranks agree once"))


def test_buckets_are_sorted_by_their_last_members() -> None:
    boundaries = [Boundary(["ab", "c", "", "d", "e"], str, early=True) for _ in range(2)]
    for _ in range(2):  # in both micro-batches of the first step
        for boundary, used in zip(boundaries, ("dbca", "dce"), strict=True):
            for member in used:
                boundary.mark_ready(member)
            boundary.pop_remaining()
    own: list[Tensor] = []
    boundaries[0].learn_order(lambda times: own.append(times) or times)
    boundaries[1].learn_order(lambda times: torch.maximum(times, own[0]))
    assert boundaries[1].buckets == ["", "d", "c", "e", "ab"]
    assert boundaries[0].buckets == ["", "d", "c", "ab", "e"]  # as if no rank had used e


def test_late_gradients_raise_or_resend_their_bucket() -> None:
    first = Boundary(["a", "b"], str, early=True, single_gradient=False, resend="in the first step")
    always = Boundary(["a", "b"], str, early=True, single_gradient=False, resend="always")
    for boundary in (first, always):
        assert boundary.mark_ready("ab") == ["a", "b"]
        assert boundary.pop_remaining() == boundary.buckets_to_resend(lambda late: late) == []
        boundary.learn_order(lambda used: used)
        assert boundary.mark_ready("ab") == ["a", "b"]
    assert always.mark_ready("a") == always.pop_remaining() == []
    assert always.buckets_to_resend(lambda late: late) == ["a"]
    with pytest.raises(RuntimeError, match=r"a got another gradient"):
        first.mark_ready("a")
    assert first.pop_remaining() == first.buckets_to_resend(lambda late: pytest.fail("nothing is sent again")) == []


class Group:
    """A group of ranks that sends its gradients, which are ones, to other groups."""

    def __init__(self, params: list[Any], limit: int) -> None:
        self.pieces = PendingGradients(ROWS)
        buckets = boundary_buckets(params, limit, lambda param: param.dtype)
        self.boundary: Boundary[list[Any]] = Boundary(
            buckets, lambda bucket: ds_ids_of([bucket])[0], early=True, single_gradient=False, resend="always"
        )
        self.crossed: list[list[int]] = []
        self.sums = {param.ds_id: 0 for param in params}

    def backward(self, used: list[Any], cuts: set[int]) -> None:
        """Give parameters gradients in this order, in buckets that end at ``cuts``."""
        bucket: list[Any] = []
        for number, param in enumerate(used):
            if bucket and (number in cuts or bucket[0].dtype != param.dtype or param in bucket):
                self.arrive(bucket)
                bucket = []
            bucket.append(param)
        if bucket:
            self.arrive(bucket)

    def arrive(self, bucket: list[Any]) -> None:
        """Add a reduced bucket, sorted as DeepSpeed sorts it, and with padding."""
        bucket.sort(key=lambda param: param.ds_id)
        width = sum(param.ds_tensor.ds_numel for param in bucket)
        self.pieces.add(bucket, torch.ones(ROWS, width + 1, dtype=bucket[0].dtype).view(-1))
        self.cross(self.boundary.mark_ready(param.ds_id for param in bucket))

    def cross(self, buckets: list[list[Any]]) -> None:
        """Pop the pieces of buckets that are sent."""
        for bucket in buckets:
            self.crossed += ds_ids_of([bucket])
            message = torch.cat(self.pieces.pop(bucket), dim=1)
            columns = message.split([param.ds_tensor.ds_numel for param in bucket], dim=1)
            for param, part in zip(bucket, columns, strict=True):
                assert part.min() == part.max()
                self.sums[param.ds_id] += int(part[0, 0])


def run_with_all_reduce(groups: list[Group], act: Callable[[Group, Callable[[Tensor], Tensor]], None]) -> None:
    """Run an action of all groups, each of which calls an elementwise maximum over all groups once."""
    everybody, all_asked = [], threading.Barrier(len(groups), timeout=60)

    def largest(values: Tensor) -> Tensor:
        everybody.append(values)
        all_asked.wait()
        return torch.stack(everybody).amax(0)

    with ThreadPoolExecutor(len(groups)) as pool:
        list(pool.map(lambda group: act(group, largest), groups))


@settings(max_examples=80, deadline=None)
@given(data=some.data(), widths=some.lists(some.integers(1, 12), min_size=1, max_size=8), limit=some.integers(1, 60))
def test_groups_may_use_different_parameters(data: Any, widths: list[int], limit: int) -> None:
    """Gradients come in any order, some repeatedly: groups send equal buckets in one order, each gradient once."""
    params = parameters(widths, [data.draw(some.sampled_from(DTYPES)) for _ in widths])
    groups = [Group(params, limit) for _ in range(2)]
    for step in range(3):
        for group in groups:
            group.crossed, group.sums = [], dict.fromkeys(group.sums, 0)
        uses = [data.draw(some.lists(some.sampled_from(params), max_size=12)) for _ in groups]
        for group, used in zip(groups, uses, strict=True):
            group.backward(used, data.draw(some.sets(some.integers(1, 11))))
        for group in groups:
            group.cross(group.boundary.pop_remaining())
        run_with_all_reduce(groups, lambda group, largest: group.cross(group.boundary.buckets_to_resend(largest)))
        assert groups[0].crossed == groups[1].crossed
        for group, used in zip(groups, uses, strict=True):
            assert group.sums == {param.ds_id: used.count(param) for param in params}
            assert not group.pieces._pending
        if step == 1:
            run_with_all_reduce(groups, lambda group, largest: group.boundary.learn_order(largest))


def test_neighboring_pieces_are_sent_without_a_copy() -> None:
    params = parameters([3, 2, 4], [torch.float32] * 3)
    pieces, arrived = PendingGradients(ROWS), torch.rand(ROWS, 9)
    pieces.add(params, arrived)
    (piece,) = pieces.pop(params)
    assert piece.data_ptr() == arrived.data_ptr() and torch.equal(piece, arrived)
