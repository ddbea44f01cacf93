# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The process groups that training would form."""

import logging
import time
from datetime import timedelta
from typing import Any

from torch.distributed import Store

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level
from deepspeed_ext.tools.doctor.place import Place

TITLE = "process groups"
_LATER = 60.0  # seconds after which NCCL's watchdog would end the process, later than the check gives up


def check_of(store: Store) -> Check:
    """Return the check that forms them over this store; those after it use them."""
    return Check(TITLE, lambda place: examine(place, store), judge, together=True)


def examine(place: Place, store: Store) -> dict[str, Any]:
    """Form the process group of all ranks, unless there is one, and the groups; return how long that took."""
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.utils import logger
    from torch import distributed

    from deepspeed_ext.comm.agreement import all_reduce_sum
    from deepspeed_ext.comm.process_groups import get_topology

    logger.setLevel(logging.WARNING)
    begin = time.perf_counter()
    if not distributed.is_initialized():
        _form(place, store)
    # One that DeepSpeed compiles at its start on a host, for a minute; training has to, the doctor has not.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    try:
        get_topology(None, place.options.group_size)
        refused = ""
    except ValueError as error:  # on all ranks alike
        refused = str(error)
    everybody = all_reduce_sum(1)
    return {
        "backend": distributed.get_backend(),
        "seconds": time.perf_counter() - begin,
        "ranks": everybody,
        "refused": refused,
        "initialized": dist.is_initialized(),
    }


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return that they are formed, or why not."""
    one = answers[min(answers)]
    if one["refused"]:
        return [Finding("groups", Level.WRONG, one["refused"], "See groups above.")]
    if one["ranks"] != place.world:
        said = f"an all-reduce counts {one['ranks']} of {place.world} ranks"
        return [Finding(one["backend"], Level.WRONG, said, "The backend computes wrong sums: suspect its version.")]
    slowest = max(answer["seconds"] for answer in answers.values())
    return [Finding(one["backend"], Level.OK, f"formed in {slowest:.1f} s")]


def _form(place: Place, store: Store) -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from torch import distributed

    device = get_accelerator()
    on_host = device.is_synchronized_device()
    # Bound to its device as DeepSpeed binds it, which decides how groups are made.
    bound = torch.device(device.current_device_name()) if device.device_name() == "cuda" and place.world > 1 else None
    distributed.init_process_group(
        device.communication_backend_name(),
        store=distributed.PrefixStore("groups", store),
        rank=place.rank,
        world_size=place.world,
        timeout=timedelta(seconds=place.options.timeout + (0 if on_host else _LATER)),
        device_id=bound,
    )
