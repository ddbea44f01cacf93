# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""One order in which buckets leave, whatever is complete first."""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.zero.boundary import Boundary
from deepspeed_ext.zero.sharded.gradients import boundary_buckets

pytestmark = pytest.mark.quick


def test_buckets_leave_in_one_order_whatever_is_complete_first() -> None:
    buckets = ["ab", "b", "cd", "", "e"]
    for used in (members for count in range(6) for members in itertools.permutations("abcde", count)):
        boundary = Boundary(buckets, str, early=True)
        left: list[str] = []
        for number, member in enumerate(used):
            left += boundary.ready([member])
            complete = [set(bucket) <= set(used[: number + 1]) for bucket in buckets]
            assert left == buckets[: complete.index(False) if False in complete else len(buckets)]
            assert boundary.begun == bool(left)
        assert left + boundary.rest() == buckets
        assert boundary.ready("a") == []  # begun anew


def test_a_member_that_is_complete_twice_counts_once() -> None:
    boundary = Boundary(["ab", "c"], str, early=True)
    assert [boundary.ready("a"), boundary.ready("a"), boundary.ready("x")] == [[], [], []]
    assert boundary.ready("b") == ["ab"]
    assert boundary.ready("b") == []
    boundary.clear()
    assert not boundary.begun
    assert boundary.ready("a") == [] and boundary.rest() == ["ab", "c"]


def test_nothing_leaves_early_where_it_may_not() -> None:
    boundary = Boundary(["ab", "c"], str, early=False)
    assert boundary.ready("abc") == [] and not boundary.begun
    boundary.learn(lambda used: pytest.fail("nothing is learned"))
    assert boundary.rest() == ["ab", "c"]


def parameters(*numels: int) -> list[Any]:
    """Parameters of this many elements, numbered in turn; even ones in fp32, odd ones in bf16."""
    dtypes = (torch.float32, torch.bfloat16)
    return [SimpleNamespace(ds_id=at, ds_numel=numel, dtype=dtypes[at % 2]) for at, numel in enumerate(numels)]


def numbered(buckets: list[Any]) -> list[list[int]]:
    """The numbers of their parameters."""
    return [[param.ds_id for param in bucket] for bucket in buckets]


def test_buckets_are_of_one_dtype_and_the_models_last_ones_are_the_first() -> None:
    params = parameters(5, 3, 9, 4, 2, 4, 0, 20)
    shuffled = [params[at] for at in (1, 0, 6, 3, 5, 4, 2, 7)]
    same = numbered(boundary_buckets(shuffled, 10, lambda param: torch.float32))
    assert same == [[7], [6, 3, 5, 4], [2], [1, 0]]
    assert numbered(boundary_buckets(shuffled, 10, lambda param: param.dtype)) == [[7], [6, 4], [3, 5], [2], [1], [0]]


def test_what_gets_several_gradients_waits_for_the_boundary_and_what_nobody_uses_holds_up_nobody() -> None:
    buckets = [[4], [3], [2], [1], [0]]
    boundary = Boundary(buckets, list, early=True, once=False, name=lambda member: f"layer.{member}")
    for member in (3, 2, 1, 1, 0):  # nobody uses 4
        assert boundary.ready([member]) == []
    assert boundary.rest() == buckets
    boundary.learn(lambda used: used)
    assert boundary.ready([2, 3]) == [[3], [2]]
    assert boundary.ready([1]) == boundary.ready([0]) == []
    with pytest.raises(RuntimeError, match=r"layer\.3 got another gradient .*overlap_comm to false"):
        boundary.ready([3])
    assert boundary.rest() == [[1], [0], [4]]
    boundary.learn(lambda used: pytest.fail("it is learned once"))


@pytest.mark.parametrize("again", ["in the first step", "always"])
def test_a_bucket_leaves_again_with_what_comes_after_it(again: Any) -> None:
    boundary = Boundary(["ab", "c", "d"], str, early=True, once=False, again=again)
    assert [boundary.ready(member) for member in "abca"] == [[], ["ab"], ["c"], []]
    assert boundary.rest() == ["d"] and boundary.again(lambda late: late) == ["ab"]
    # It has had several gradients, so that its bucket waits; another rank's bucket leaves again.
    assert [boundary.ready(member) for member in "abcad"] == [[]] * 5
    assert boundary.rest() == ["ab", "c", "d"] and boundary.again(lambda late: late + torch.eye(3)[1]) == ["c"]
    boundary.learn(lambda used: used)
    assert [boundary.ready(member) for member in "abc"] == [[]] * 3
    assert boundary.rest() == ["ab", "c", "d"] and boundary.again(torch.zeros_like) == []


def test_after_the_first_step_ranks_agree_only_where_buckets_may_always_leave_again() -> None:
    first = Boundary(["a", "b"], str, early=True, once=False, again="in the first step")
    always = Boundary(["a", "b"], str, early=True, once=False, again="always")
    for boundary in (first, always):
        assert boundary.ready("ab") == ["a", "b"]
        assert boundary.rest() == boundary.again(lambda late: late) == []
        boundary.learn(lambda used: used)
        assert boundary.ready("ab") == ["a", "b"]
    assert always.ready("a") == always.rest() == [] and always.again(lambda late: late) == ["a"]
    with pytest.raises(RuntimeError, match=r"a got another gradient"):
        first.ready("a")
    assert first.rest() == first.again(lambda late: pytest.fail("nothing leaves again")) == []
