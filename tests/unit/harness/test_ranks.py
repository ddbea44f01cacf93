# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rank processes report errors, hangs, and deaths, and run the next case. See ranks.py."""

import os
import signal
import time

import pytest

from tests.harness.ranks import RankError, RankPool, RankTimeout


def _fail_on_one_rank(how: str) -> None:
    import torch.distributed

    if torch.distributed.get_rank() == 1:
        print("about to fail")
        if how == "raises":
            raise ValueError("boom")
        if how == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "returns":
            return
    torch.distributed.barrier()


FAILURES = {
    "raises": (RankError, r"rank 1 of 2 raised ValueError: boom\n  rank 0: still running", 'raise ValueError("boom")'),
    "dies": (RankError, r"rank 1 of 2 died \(killed by SIGKILL\)", "about to fail"),
    "returns": (RankTimeout, r"rank\(s\) 0 of 2 still running after 10 s", "in _fail_on_one_rank"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_rank_is_reported_and_the_next_case_runs(ranks: RankPool, how: str) -> None:
    error, message, more = FAILURES[how]
    pool = ranks(2)
    pool.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        pool.run(_fail_on_one_rank, how, timeout=10.0 if how == "returns" else 60.0)
    assert more in str(caught.value) and time.monotonic() - start < 60.0
    assert len(set(pool.run(os.getpid))) == 2


def _refuse() -> None:
    raise TypeError(f"no good on rank {os.environ['RANK']}")


def test_expected_errors_keep_the_ranks(ranks: RankPool) -> None:
    pool = ranks(2)
    pids = pool.run(os.getpid)
    errors = pool.run_expect_error(_refuse)
    assert [str(error) for error in errors] == [f"raised TypeError: no good on rank {rank}" for rank in range(2)]
    with pytest.raises(TypeError, match="unexpected keyword argument 'match'"):
        pool.run_expect_error(_refuse, match="no good")
    assert pool.run(os.getpid) == pids
    with pytest.raises(RankError, match=r"rank \d of 2 finished, but every rank was expected to raise"):
        pool.run_expect_error(os.getpid)
