# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The harness of multi-rank tests keeps what it promises: see ranks.py."""

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.harness.ranks import RankError, RankPool, RankTimeout, remove_stale_build_locks

# ---- what the ranks run


def _identity(offset: int, scale: int = 1) -> tuple[int, int, str]:
    import torch.distributed

    rank = torch.distributed.get_rank()
    return offset + scale * rank, torch.distributed.get_world_size(), os.environ["RANK"]


def _sum_of_ranks() -> float:
    import torch.distributed

    value = torch.tensor(float(torch.distributed.get_rank()))
    torch.distributed.all_reduce(value)
    return value.item()


def _sizes() -> str:
    return os.environ["WORLD_SIZE"]


def _pid() -> int:
    return os.getpid()


def _raise_on(rank: int) -> None:
    import torch.distributed

    if torch.distributed.get_rank() == rank:
        print("about to fail")
        raise ValueError("boom")
    torch.distributed.barrier()


def _refuse() -> None:
    raise TypeError(f"no good on rank {os.environ['RANK']}")


def _skip_before(rank: int, version: str) -> None:
    import torch.distributed

    from tests.harness.installed import skip_before

    if torch.distributed.get_rank() >= rank:
        skip_before(torch=version)
    raise ValueError("not skipped")


def _miss_the_barrier() -> None:
    import torch.distributed

    if torch.distributed.get_rank() == 1:
        torch.distributed.barrier()


def _sleep(seconds: float) -> None:
    time.sleep(seconds)


def _die_on(rank: int) -> None:
    import torch.distributed

    if torch.distributed.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.barrier()


def _global_state() -> dict[str, Any]:
    """What a case can see of the cases before it."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.comm.comm import comms_logger
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.zero.parameter_offload import FWD_MODULE_STACK
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    return {
        "accelerator": get_accelerator().is_fp16_supported(),
        "autocast": torch_autocast.is_autocast_initialized(),
        "comms_logger": (comms_logger.enabled, dict(comms_logger.comms_dict)),
        "cwd": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "environment": os.environ.get("LEAK"),
        "grad": torch.is_grad_enabled(),
        "groups": (groups.mpu, groups.mesh_device, groups._WORLD_GROUP),
        "linear": torch.nn.functional.linear.__name__,
        "modules": len(FWD_MODULE_STACK),
        "persistent": (Init.num_persisted_elements, Init.apply_param_persistence),
        "process_groups": len(torch.distributed.distributed_c10d._world.pg_map),
        "random": (random.random(), torch.rand(()).item()),
        "threads": len(os.listdir("/proc/self/task")),
    }


def _train(stage: int, steps: int = 2, destroy: bool = True, **config: Any) -> list[float]:
    """Losses of a small model under stock DeepSpeed."""
    import deepspeed
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    adam = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
    zero = {"stage": stage}
    batch = {"train_micro_batch_size_per_gpu": 4}
    engine, *_ = deepspeed.initialize(
        model=model, config={"optimizer": adam, "zero_optimization": zero, **batch, **config}
    )
    losses = []
    for _ in range(steps):
        loss = engine(torch.randn(4, 8)).square().mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    if destroy:
        engine.destroy()
    return losses


def _pollute() -> None:
    """Change all that ``_global_state`` looks at, with engines that nobody destroys."""
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    _train(3, destroy=False, comms_logger={"enabled": True, "prof_all": True})
    _train(2, destroy=False, torch_autocast={"enabled": True, "dtype": "bfloat16"})
    torch.distributed.new_group([0])
    groups.mpu = object()
    get_accelerator().is_fp16_supported = lambda: "leak"
    os.environ["LEAK"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def _threads_of_fork_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


# ---- the tests


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    assert ranks(4).run(_identity, 10, scale=2) == [(10, 4, "0"), (12, 4, "1"), (14, 4, "2"), (16, 4, "3")]


def test_later_cases_run_in_the_same_processes(ranks: RankPool) -> None:
    """Which makes them cheap: nothing is started or imported again."""
    pool = ranks(4)
    first = pool.run(os.getpid)
    assert pool.run(_sum_of_ranks) == [6.0] * 4
    assert pool.run(os.getpid) == first and len(set(first)) == 4


def test_fork_server_has_one_thread(ranks: RankPool) -> None:
    """Forking a process with threads can leave locks taken forever."""
    assert ranks(4).run(_threads_of_fork_server) == [1] * 4


def test_stock_zero2_trains_twice_alike(ranks: RankPool) -> None:
    first = ranks(4).run(_train, 2)
    assert first == ranks(4).run(_train, 2)
    assert all(losses[1] < losses[0] for losses in first)


def test_error_is_reported_and_the_next_case_runs(ranks: RankPool) -> None:
    pool = ranks(2)
    with pytest.raises(RankError, match=r"rank 1 of 2 raised ValueError: boom\n  rank 0: still running") as caught:
        pool.run(_raise_on, 1)
    assert 'raise ValueError("boom")' in str(caught.value), "the remote traceback"
    assert "about to fail" in str(caught.value), "the remote output"
    assert pool.run(_sum_of_ranks) == [1.0] * 2


@pytest.mark.parametrize(
    ("fn", "args", "place"), [(_miss_the_barrier, (), "in _miss_the_barrier"), (_sleep, (60.0,), "in _sleep")]
)
def test_hang_is_cut_and_located(ranks: RankPool, fn: Any, args: tuple[Any, ...], place: str) -> None:
    pool = ranks(2)
    pool.run(_pid)
    start = time.monotonic()
    with pytest.raises(RankTimeout, match="1 of 2 still running after 1 s") as caught:
        pool.run(fn, *args, timeout=1.0)
    assert time.monotonic() - start < 30.0
    assert place in str(caught.value)
    assert pool.run(_sum_of_ranks) == [1.0] * 2


def test_death_is_noticed_at_once(ranks: RankPool) -> None:
    pool = ranks(2)
    start = time.monotonic()
    with pytest.raises(RankError, match=r"rank 0 of 2 died \(killed by SIGKILL\)"):
        pool.run(_die_on, 0)
    assert time.monotonic() - start < 30.0
    assert pool.run(_sum_of_ranks) == [1.0] * 2


def test_expected_errors_keep_the_ranks(ranks: RankPool) -> None:
    pool = ranks(2)
    pids = pool.run(_pid)
    errors = pool.run_expect_error(_refuse)
    assert [(error.type, error.message) for error in errors] == [
        ("TypeError", "no good on rank 0"),
        ("TypeError", "no good on rank 1"),
    ]
    assert pool.run(_pid) == pids


def test_missing_error_is_an_error(ranks: RankPool) -> None:
    with pytest.raises(RankError, match=r"rank \d of 2 finished, but every rank was expected to raise"):
        ranks(2).run_expect_error(_pid)


def test_arguments_that_a_case_does_not_take_are_no_expected_error(ranks: RankPool) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'match'"):
        ranks(2).run_expect_error(_refuse, match="no good")


def test_cases_share_no_state(ranks: RankPool) -> None:
    pool = ranks(2)
    before = pool.run(_global_state)
    pool.run(_pollute)
    assert pool.run(_global_state) == before


def test_ranks_skip_a_test_where_all_of_them_do(ranks: RankPool) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"^needs torch 99\.0$"):
        ranks(2).run(_skip_before, 0, "99.0")
    for first, version in ((1, "99.0"), (0, "2.10")):  # one rank skips, none does
        with pytest.raises((RankError, pytest.skip.Exception), match="not skipped") as found:
            ranks(2).run(_skip_before, first, version)
        assert found.type is RankError  # a skip that is raised would skip this test


def test_function_without_a_name_is_refused(ranks: RankPool) -> None:
    pool = ranks(2)
    pids = pool.run(_pid)
    with pytest.raises(Exception, match="local object"):
        pool.run(lambda: None)
    assert pool.run(_pid) == pids


def test_a_case_of_fewer_ranks_runs_on_the_first_ones(ranks: RankPool) -> None:
    """Also where others have been started later, or have seen fewer cases."""
    two = ranks(2).run(_pid)
    four = ranks(4).run(_pid)
    assert four[:2] == two == ranks(2).run(_pid)
    assert ranks(3).run(_identity, 0) == [(rank, 3, str(rank)) for rank in range(3)]
    assert ranks(3).run(_sizes) == ["3"] * 3 and ranks(4).run(_sizes) == ["4"] * 4


def test_build_locks_of_the_dead_are_removed(tmp_path: Path) -> None:
    lock = tmp_path / "some_op" / "lock"
    lock.parent.mkdir()
    lock.touch()
    with remove_stale_build_locks(tmp_path):
        assert not lock.exists()
        lock.touch()
        with remove_stale_build_locks(tmp_path):
            assert lock.exists(), "another session is alive and may be building"
