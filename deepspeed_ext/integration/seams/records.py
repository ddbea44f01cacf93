# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the comms logger records."""

import functools
from collections.abc import Callable
from typing import Any


def count_the_ranks_of_a_hop(calculate: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(calculate)
    def calc_bw_log(comm_op: str, size: int, duration: float) -> Any:
        from deepspeed_ext.comm.bandwidth import bandwidths

        return bandwidths(calculate, comm_op, size, duration)

    return calc_bw_log
