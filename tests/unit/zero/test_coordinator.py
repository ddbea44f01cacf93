# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The order in which modules are used is compared within the group that gathers together, and only there."""

from typing import Any

import pytest

pytestmark = pytest.mark.quick

RECORDS: dict[str, tuple[list[list[int]], set[int]]] = {  # each rank's record; the ranks that must raise
    "equal": ([[1, 2, 3]] * 4, set()),
    "empty": ([[]] * 4, set()),
    "groups may differ": ([[1, 2, 3], [1, 2, 3], [3, 1], [3, 1]], set()),
    "longer on one rank": ([[1, 2], [1, 2], [1, 2], [1, 2, 3]], {2, 3}),
    "longer on one rank of each group": ([[1], [1, 2], [1, 2, 3], [1, 2]], {0, 1, 2, 3}),
    "another order": ([[1, 2, 3], [1, 3, 2], [1, 2, 3], [1, 2, 3]], {0, 1}),
    "other modules": ([[1, 2, 3], [1, 2, 3], [1, 2, 4], [1, 2, 3]], {2, 3}),
    "nothing on one rank": ([[], [5], [5], [5]], {0, 1}),
}


@pytest.mark.parametrize("what", RECORDS)
def test_a_difference_is_found_by_all_ranks_of_the_group_and_by_no_others(ranks: Any, what: str) -> None:
    records, differing = RECORDS[what]
    for rank, error in enumerate(ranks(4).run(compare_case, records)):
        assert (error is not None) == (rank in differing), (rank, error)
        if error is not None:
            first = rank - rank % 2
            lengths = [len(records[first]), len(records[first + 1])]
            assert f"The ranks {[first, first + 1]}, which gather parameters together" in error
            assert f"rank {rank}: {len(records[rank])} entries in the record" in error
            assert f"between {min(lengths)} and {max(lengths)} in the group" in error


def compare_case(records: list[list[int]]) -> str | None:
    """Compare this rank's record within groups of two; the error if it is refused."""
    from deepspeed import comm as dist
    from deepspeed.runtime.zero.partitioned_param_coordinator import assert_ints_same_as_other_ranks

    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.zero.sharded.coordinator import _comparing_within

    try:
        with _comparing_within(get_topology(None, 2).intra):
            assert_ints_same_as_other_ranks(records[dist.get_rank()])
    except RuntimeError as error:
        return str(error)
    return None


def test_what_persists_stays_gathered_before_the_order_is_known(ranks: Any) -> None:
    assert ranks(4).run(persisting_case) == [{"AVAILABLE"}] * 4


def persisting_case() -> set[str]:
    """Of all parameters, which persist, the state after a first micro-step."""
    from tests.harness import training

    job = training.Job(empty=False, zero={"stage3_param_persistence_threshold": 10**6})
    engine, model = training.make_engine(job, training.placed("IIG"))
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    found = {param.ds_status.name for param in model.parameters()}
    engine.destroy()
    return found


def test_outside_of_a_group_deepspeed_compares_over_all_ranks(ranks: Any) -> None:
    assert ranks(4).run(outside_case) == [(True, "")] * 4


def outside_case() -> tuple[bool, str]:
    """Whether a comparison within a group that has ended is left to DeepSpeed, which finds equal records equal."""
    from deepspeed.runtime.zero.partitioned_param_coordinator import assert_ints_same_as_other_ranks

    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.zero.sharded.coordinator import _comparing_within, assert_same_in_group

    with _comparing_within(get_topology(None, 2).intra):
        within = assert_same_in_group([1, 2])
    left = assert_same_in_group([1, 2])
    assert_ints_same_as_other_ranks([1, 2])
    return within and not left, ""
