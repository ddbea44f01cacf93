# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A link of a limited rate between the host and its device, emulated where both have the same memory.

A copy that crosses it makes its rank sleep for as long as its bytes take, in addition to what the copy itself takes
here. Nothing goes on meanwhile in that rank: that is to the disadvantage of whoever copies more.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deepspeed_ext.zero.sharded.rows import DeviceRows, HostRows


class Pcie:
    """The link of this rank.

    Attributes:
        gigabytes: per second that it carries; None without a limit.
        nbytes: that have crossed it, in both directions together.
    """

    def __init__(self) -> None:
        self.gigabytes: float | None = None
        self.nbytes = 0

    def carry(self, nbytes: int) -> None:
        """Count a copy, and sleep for as long as it takes."""
        self.nbytes += nbytes
        if self.gigabytes is not None:
            time.sleep(nbytes / (self.gigabytes * 1e9))

    @contextmanager
    def between(self) -> Iterator[None]:
        """Put the link between parameters in host memory and the device. All engines must offload theirs.

        Strategies with p = I and os = G have ``HostRows``, the others ``DeviceRows`` whose rows are on the host, and
        stock ZeRO-3 copies a partition right before it is gathered. An optimizer's step, which is made on the device,
        writes the host's copy: ``HostRows`` when updates have arrived, the others at once.
        """
        with ExitStack() as stack:
            for owner, name, nbytes in (
                (HostRows, "_copy", lambda rows, source, target: source.nbytes),
                (DeviceRows, "use", lambda rows, runs, dtype: sum(run.nbytes for run in runs)),
                (partition_parameters, "_dist_allgather_fn", lambda partition, *_, **__: partition.nbytes),
                (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", _written),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._carried(getattr(owner, name), nbytes)))
            yield

    def _carried(self, run: Callable[..., Any], nbytes: Callable[..., int]) -> Callable[..., Any]:
        """Return a function before which bytes are carried, as many as ``nbytes`` says of its arguments."""

        def carried(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            self.carry(nbytes(*args, **kwargs))
            return run(*args, **kwargs)

        return carried


def _written(optimizer: Any, sub_group: int) -> int:
    # Not with rows of our own: those are counted where they are copied.
    return optimizer.fp16_partitioned_groups_flat[sub_group].nbytes if optimizer.offload_param else 0
