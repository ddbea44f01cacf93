# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A link of a limited rate between the host and its device, emulated where both have the same memory.

A copy that crosses it makes its rank sleep for as long as its bytes take, in addition to what the copy itself takes
here. Nothing goes on meanwhile in that rank: that is to the disadvantage of whoever copies more.
"""

import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from torch import Tensor

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
            for owner, name, wrapper in (
                (HostRows, "_copy", self._copy),
                (DeviceRows, "use", self._use),
                (partition_parameters, "_dist_allgather_fn", self._gather),
                (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", self._write),
            ):
                stack.enter_context(mock.patch.object(owner, name, wrapper(getattr(owner, name))))
            yield

    def _copy(self, original: Any) -> Any:
        def copy(rows: HostRows, source: Tensor, target: Tensor) -> None:
            original(rows, source, target)
            self.carry(source.nbytes)

        return copy

    def _use(self, original: Any) -> Any:
        def use(rows: DeviceRows, runs: Iterable[Tensor], dtype: torch.dtype) -> list[Tensor]:
            held = list(runs)
            found: list[Tensor] = original(rows, held, dtype)
            self.carry(sum(run.nbytes for run in held))
            return found

        return use

    def _gather(self, original: Any) -> Any:
        def gather(partition: Tensor, *args: Any, **kwargs: Any) -> Any:
            self.carry(partition.nbytes)
            return original(partition, *args, **kwargs)

        return gather

    def _write(self, original: Any) -> Any:
        def write(optimizer: Any, sub_group: int) -> None:
            original(optimizer, sub_group)
            if optimizer.offload_param:  # not with rows of our own: those are counted where they are copied
                self.carry(optimizer.fp16_partitioned_groups_flat[sub_group].nbytes)

        return write
