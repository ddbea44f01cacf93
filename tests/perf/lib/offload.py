# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parameters in host memory, over a link with a limited rate between host and device, which share their memory here.
After a copy over this link, the rank sleeps for the time that its bytes take, in addition to the time of the copy
itself. The rank does nothing else meanwhile, which is a disadvantage for methods that copy more."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch.distributed as dist
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, Placement
from deepspeed_ext.zero.sharded.row_storage import DeviceRows, HostRows
from tests.perf.lib import settings
from tests.perf.lib.blocks import make_adapted_blocks, make_blocks
from tests.perf.lib.measurements import Measurement
from tests.perf.lib.peers import Workload
from tests.perf.lib.records import Row
from tests.perf.lib.settings import SIZES, Setting
from tests.perf.lib.turns import over_ranks


class Pcie:
    """The link of this rank: gigabytes per second, None without a limit, and bytes copied in both directions."""

    def __init__(self) -> None:
        self.gigabytes: float | None = None
        self.nbytes = 0

    def carry(self, nbytes: int) -> None:
        """Count a copy, and sleep for its time."""
        self.nbytes += nbytes
        if self.gigabytes is not None:
            time.sleep(nbytes / (self.gigabytes * 1e9))

    @contextmanager
    def between(self) -> Iterator[None]:
        """Put the link between parameters in host memory and the device. All engines must offload theirs. Strategies
        with p = I and os = G have ``HostRows``, the others ``DeviceRows`` with rows on the host, and stock ZeRO-3
        copies a partition right before it is gathered. An optimizer's step on the device writes the host's copy:
        ``HostRows`` when updates have been received, the others at once."""
        with ExitStack() as stack:
            for owner, name, nbytes in (
                (HostRows, "_copy", lambda rows, source, target: source.nbytes),
                (DeviceRows, "to_device", lambda rows, runs, dtype: sum(run.nbytes for run in runs)),
                (partition_parameters, "_dist_allgather_fn", lambda partition, *_, **__: partition.nbytes),
                (DeepSpeedZeroOptimizer_Stage3, "_reassign_or_swap_out_partitioned_parameters", _written),
            ):
                stack.enter_context(mock.patch.object(owner, name, self._carried(getattr(owner, name), nbytes)))
            yield

    def _carried(self, run: Callable[..., Any], nbytes: Callable[..., int]) -> Callable[..., Any]:
        """Wrap a function so that each call first carries ``nbytes`` of its arguments."""

        def carried(*args: Any, **kwargs: Any) -> Any:
            args = tuple(list(arg) if isinstance(arg, Iterator) else arg for arg in args)
            self.carry(nbytes(*args, **kwargs))
            return run(*args, **kwargs)

        return carried


def _written(optimizer: Any, sub_group: int) -> int:
    # Not with rows of our own: those are counted where they are copied.
    return optimizer.fp16_partitioned_groups_flat[sub_group].nbytes if optimizer.offload_param else 0


class OffloadMeasurement(Measurement):
    """Parameters in host memory: the rank sleeps for each copy between host and device, as over PCIe."""

    file = "host_parameters.csv"
    settings = settings.OFFLOAD
    methods = ("ZeRO-3", "GGG", "GNG", "ING", "IIG")
    rounds = 2
    least: ClassVar = {
        name: dict.fromkeys(("ING", "IIG"), 50.0 if setting.lora else 5.0) for name, setting in settings.items()
    }
    slack = 4000.0  # of norms, for example
    short, most = 5.0, 9
    copied_bound = 0.01

    def measure(self) -> list[Row]:
        self._pcie = Pcie()
        with ExitStack() as self._links:
            return super().measure()

    def make_workload(self) -> Workload:
        setting, size = self.setting, SIZES[self.setting.size]
        model = partial(make_adapted_blocks, *size, 1) if setting.lora else partial(make_blocks, *size)
        return Workload(setting.accumulation, setting.ranks_per_node, model, zero={"offload_param": {"device": "cpu"}})

    def compare(self) -> dict[str, float]:
        self._links.enter_context(self._pcie.between())  # engines want DeepSpeed's own functions as they are made
        self._copied = {}
        for name, method in self.made.items():
            before = self._pcie.nbytes
            self.turns.take(method, 1)
            (self._copied[name],) = over_ranks([self._pcie.nbytes - before], dist.ReduceOp.MAX)
        by_method = super().compare()
        self._pcie.gigabytes = self.args.pcie
        self._meetings = self.turns.a_step(self.compute).sent
        return by_method

    def complete(self, row: Row, rates: Rates | None) -> None:
        super().complete(row, rates)
        row.link_bytes -= self._meetings  # of ranks that begin and end a step together: adapters are as small
        row.more |= {"pcie_gigabytes": self.args.pcie, "copied_bytes": self._copied[row.method]}
        row.more["copied_formula_bytes"] = self.formula_copied(self.setting, row.method)

    @staticmethod
    def formula_copied(setting: Setting, method: str) -> float:
        """Return the bytes that a rank copies in a step: its part in each forward and backward, and updates."""
        p = STRATEGIES[method].p if method in STRATEGIES else Placement.G
        states = setting.states
        return (2 * setting.accumulation * states.parameters + states.updated) / setting.sizes.shards(p)

    @classmethod
    def problems(cls, rows: Sequence[Row]) -> list[str]:
        errors = {row.method: row.more["copied_bytes"] / row.more["copied_formula_bytes"] - 1 for row in rows}
        wrong = ((name, error) for name, error in errors.items() if abs(error) > cls.copied_bound)
        text = "bytes between host and device differ by {:+.1%} from the formula"
        return super().problems(rows) + [f"{name}: {text.format(error)}" for name, error in wrong]
