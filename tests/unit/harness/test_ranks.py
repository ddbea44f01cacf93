# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Rank processes: results, errors, hangs and deaths are reported, and cases are independent. See ranks.py."""

import os
import random
import signal
import time
from typing import Any

import pytest

from tests.harness.ranks import RankError, RankPool, RankTimeout


def _identity(offset: int, scale: int = 1) -> tuple[int, int, str]:
    import torch.distributed

    rank = torch.distributed.get_rank()
    return offset + scale * rank, torch.distributed.get_world_size(), os.environ["RANK"]


def test_results_come_in_rank_order(ranks: RankPool) -> None:
    assert ranks(4).run(_identity, 10, scale=2) == [(10, 4, "0"), (12, 4, "1"), (14, 4, "2"), (16, 4, "3")]


def test_later_and_smaller_cases_run_in_the_same_processes(ranks: RankPool) -> None:
    four = ranks(4).run(os.getpid)
    assert len(set(four)) == 4 and ranks(2).run(os.getpid) == four[:2]
    assert ranks(3).run(_identity, 0) == [(rank, 3, str(rank)) for rank in range(3)]


def _threads_of_fork_server() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


def test_fork_server_has_one_thread(ranks: RankPool) -> None:
    """Forking a process with threads can leave locks taken forever."""
    assert ranks(1).run(_threads_of_fork_server) == [1]


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
    "returns": (RankTimeout, r"rank\(s\) 0 of 2 still running after 2 s", "in _fail_on_one_rank"),
}


@pytest.mark.parametrize("how", FAILURES)
def test_a_failing_rank_is_reported_and_the_next_case_runs(ranks: RankPool, how: str) -> None:
    error, message, more = FAILURES[how]
    pool = ranks(2)
    pool.run(os.getpid)
    start = time.monotonic()
    with pytest.raises(error, match=message) as caught:
        pool.run(_fail_on_one_rank, how, timeout=2.0)
    assert more in str(caught.value) and time.monotonic() - start < 30.0
    assert [rank for rank, *_ in pool.run(_identity, 0)] == [0, 1]


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


def _global_state() -> dict[str, Any]:
    """State that a case sees from earlier cases."""
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


def _pollute() -> None:
    """Change all that ``_global_state`` looks at, with engines that are not destroyed."""
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups

    logger, autocast = {"enabled": True, "prof_all": True}, {"enabled": True, "dtype": "bfloat16"}
    for stage, more in ((3, {"comms_logger": logger}), (2, {"torch_autocast": autocast})):
        config = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, **more}
        config["optimizer"] = {"type": "Adam", "params": {"lr": 1e-2, "torch_adam": True}}
        engine, *_ = deepspeed.initialize(model=torch.nn.Linear(8, 16), config=config)
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    torch.distributed.new_group([0])
    groups.mpu = object()
    get_accelerator().is_fp16_supported = lambda: "leak"
    os.environ["LEAK"] = "1"
    os.chdir("/")
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)


def test_cases_share_no_state(ranks: RankPool) -> None:
    pool = ranks(2)
    before = pool.run(_global_state)
    pool.run(_pollute)
    assert pool.run(_global_state) == before
