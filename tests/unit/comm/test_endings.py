# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Exits of scripts while updated parameters are in flight: processes exit as with stock ZeRO, and no data is lost.
Most cases are two real processes that end by Python's own finalization; one rank takes its last step later."""

import time
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from torch.distributed.distributed_c10d import _get_default_store

import deepspeed_ext
from deepspeed_ext.comm import worker_thread
from deepspeed_ext.comm.hops import GatherHop
from deepspeed_ext.comm.transfer_queue import TransferQueue
from tests.campaigns.endings import Case, Ended, served
from tests.harness import calls, snapshots, training
from tests.harness.tiers import deep

LATE = 0.5  # seconds; the other rank has ended by then
CASES = {
    "read, IIG": Case("read", "IIG", LATE),
    "read, ahead": Case("read", "NIG, updates ahead", LATE),
    "error on one, all": Case("error on one", "NIG, all", first=True),
    "killed late and destroyed, ahead": Case("killed late, destroyed", "NIG, updates ahead", LATE, 1),
    "interrupted, ahead": Case("interrupted", "NIG, updates ahead", moment=0.2),
    "saving, error on all": Case("error on all", "NIG", save="well"),
    "failing, exit": Case("exit", "IIG", save="fails"),
}
DEEP = {"destroy, all": Case("destroy", "NIG, all", LATE), "exit, IIG": Case("exit", "IIG", LATE)}
DEEP |= {"saving, end": Case("end", "NIG", save="well"), "failing, destroy": Case("destroy", "IIG", save="fails")}


@pytest.fixture(scope="module")
def ends(request: pytest.FixtureRequest) -> dict[str, Ended]:
    cases = CASES | (DEEP if any(item.get_closest_marker("deep") for item in request.session.items) else {})
    return dict(zip(cases, served(list(cases.values())), strict=True))


def test_first_rank_to_exit_completes_updates_for_late_rank(ends: dict[str, Ended]) -> None:
    """The first rank destroys its groups and exits. Both strategies give the same weights."""
    of_slices, of_windows = ends["read, IIG"], ends["read, ahead"]
    assert (of_slices.statuses, of_windows.statuses) == ((0, 0), (0, 0)), of_slices.written + of_windows.written
    assert of_slices.weights is not None and of_slices.weights == of_windows.weights


@pytest.mark.parametrize("name", ["read, IIG", "read, ahead", *deep("destroy, all", "exit, IIG")])
def test_no_thread_is_alive_at_interpreter_shutdown(ends: dict[str, Ended], name: str) -> None:
    ended = ends[name]
    assert ended.statuses == ((3, 3) if "exit" in name else (0, 0)), ended.written
    assert not ended.alive and "Traceback" not in ended.written


def test_missing_updates_set_the_exit_status(ends: dict[str, Ended]) -> None:
    """The other rank is killed before its last step, while the script of the first rank has ended normally."""
    ended = ends["killed late and destroyed, ahead"]
    assert ended.statuses == (1, -9), ended.written
    assert "Updated parameters of the last step were not received" in ended.written
    assert "Traceback" in ended.written and not ended.alive


@pytest.mark.parametrize("kind", ["error on all", *deep("end")])
def test_running_save_is_completed_at_exit(ends: dict[str, Ended], kind: str) -> None:
    ended = ends[f"saving, {kind}"]
    assert ended.saved and ended.statuses == ((1, 1) if "error" in kind else (0, 0)) and not ended.alive, ended.written


@pytest.mark.parametrize("kind", ["exit", *deep("destroy")])
def test_save_failure_at_exit_sets_the_exit_status(ends: dict[str, Ended], kind: str) -> None:
    """This holds for any exit status of the script, and the error is printed."""
    ended = ends[f"failing, {kind}"]
    assert ended.statuses == (1, 1) and not ended.saved and not ended.alive, ended.written
    assert ended.written.count("failed; existing files are unchanged: rank 1: ") >= 3, ended.written
    assert "No space left on device" in ended.written


def test_failing_rank_does_not_block_others(ends: dict[str, Ended]) -> None:
    ended = ends["error on one, all"]
    assert ended.statuses == (1, 1) and "the script's own" in ended.written, ended.written
    assert ended.seconds < 10


def test_signal_ends_all_ranks(ends: dict[str, Ended]) -> None:
    ended = ends["interrupted, ahead"]
    assert set(ended.statuses) <= {-2, 1} and -2 in ended.statuses and not ended.alive, ended.written


def given_up_case() -> tuple[float, str, int]:
    """Exit after an error while the other rank joins no reduction; return seconds, its error, and running threads."""
    group = dist.new_group([0, 1])
    queue, failure = TransferQueue(overlap=True, on_thread=True), "none"
    if dist.get_rank() == 0:
        started = queue.start(GatherHop(group).all_gather(torch.ones(3)))
        time.sleep(0.1)
        begin = time.monotonic()
        assert worker_thread.complete_before_exit(after_an_error=True) is None  # gradients are owed to nobody
        seconds = time.monotonic() - begin
        failure = snapshots.error_of(started.wait)
    else:
        seconds = 0.0
    running = len(worker_thread.running_workers())
    dist.barrier()
    return seconds, failure, running


def test_reductions_are_dropped_after_an_error(ranks: Any) -> None:
    (seconds, failure, running), _ = ranks(2).run(given_up_case)
    assert seconds < 3 and running == 0
    # Of the connections that the thread waited on.
    assert failure.startswith("RuntimeError: ") and "closure" in failure


def finalizer_case() -> tuple[bool, bool]:
    """Return whether transfers are complete after the finalizer of a multiprocessing process, and before it."""
    done: list[bool] = []

    def transfer() -> Any:
        time.sleep(0.2)
        done.append(True)
        return torch.ones(1)
        yield

    TransferQueue(overlap=True, on_thread=True, finish_before_exit=True).start(transfer())
    before = bool(done)
    (finalizer,) = worker_thread._finalizers
    finalizer()
    worker_thread._finalizers.clear()  # the next case has one of its own
    return bool(done), before


def test_multiprocessing_child_completes_updates_at_exit(ranks: Any) -> None:
    assert ranks(1).run(finalizer_case) == [(True, False)]


def wait_case() -> tuple[int, int]:
    """Return the unfinished transfers of IIG before and after ``wait_for_updates``; the other group steps late."""
    job = training.Job(empty=False)
    engine, _ = training.make_engine(job, training.placed("IIG", **training.SMALL))
    x, y = next(training.batches(job))
    training.micro_step(engine, job, 0, x, y)

    def wait(*_: Any, **__: Any) -> None:
        if dist.get_rank() > 1:  # in the other group
            _get_default_store().wait(["the first group has seen what runs"])

    with calls.before(engine.optimizer.optimizer, "step", wait):
        engine.step()
    before = len([worker for worker in worker_thread.running_workers() if worker.finish_before_exit])
    if dist.get_rank() == 0:
        _get_default_store().set("the first group has seen what runs", "")
    deepspeed_ext.wait_for_updates()
    return before, len(engine.optimizer.slices["dense"]._update_of)


def test_wait_for_updates_covers_slices(ranks: Any) -> None:
    (before, after), *_ = ranks(4).run(wait_case)
    assert before == 1 and after == 0
