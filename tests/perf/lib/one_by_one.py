# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods of which memory holds one at a time, on an emulated cluster, as a rank sees it.

A method is made for its turn, takes its first steps over links without a limit, is timed at each rate, and is let go
of. All train the same model on the same data from the same seed, in rounds whose order alternates.
"""

import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tests.perf.lib.peers import Batch, Method
from tests.perf.lib.turns import Turn, Turns, give_back_memory, over_ranks

WARM_UP_STEPS = 2  # in the first one Adam has no moments, and ZeRO-3 records modules; the second one is watched


class OneByOne(Turns):
    """A rank's turns.

    Args:
        group_size: ranks in a node.
        batches: makes this rank's micro-batches, which every step has.
    """

    def __init__(self, group_size: int, batches: Callable[[], list[Batch]]) -> None:
        super().__init__(group_size)
        self._make = batches
        self._losses: list[Tensor] = []

    def note(self, loss: Tensor) -> None:
        """Keep the loss of a micro-batch: models of methods call this."""
        self._losses.append(loss)

    def take(
        self, make: Callable[[], Method], rates: Sequence[float | None], steps: int, watch: bool = True
    ) -> "Taken":
        """Give a method its turn.

        Args:
            make: makes it.
            rates: of the links between nodes, in Mbit/s.
            steps: at each of them.
            watch: whether it is looked at what the method holds.
        """
        self._losses.clear()
        method = make()
        for number in range(WARM_UP_STEPS):
            method.step(self._batches(method), watch and number > 0)
            method.finish()
        taken = Taken(method.setup)
        if watch:
            taken.held = tuple(over_ranks([float(n) for n in asdict(method.held()).values()], dist.ReduceOp.MAX))
        for rate in rates:
            self.set_rate(rate)
            taken.turns.append([self.a_step(method) for _ in range(steps)])
        self.set_rate(None)
        taken.losses = self._means()[: WARM_UP_STEPS + steps * len(rates)]  # a step may have been repeated
        method.close()
        del method
        gc.collect()  # engines are in cycles
        give_back_memory()
        return taken

    def set_rate(self, mbit: float | None) -> None:
        """Limit the links. Collective."""
        dist.barrier()  # nobody sends at the rate of before
        self.link.limit(mbit)
        dist.barrier()

    def _means(self) -> list[float]:
        """Return the loss of each step, in the mean over micro-batches and ranks. Collective."""
        count = len(self._make())
        sums = [float(sum(self._losses[i : i + count])) for i in range(0, len(self._losses), count)]
        return [total / count / dist.get_world_size() for total in over_ranks(sums, dist.ReduceOp.SUM)]

    def _batches(self, method: Method) -> list[Batch]:
        return self._make()


class Taken:
    """What a turn has shown.

    Attributes:
        setup: the method's.
        held: bytes of parameters, gradients and optimizer states on the rank that holds most.
        turns: steps at each rate.
        losses: of all steps, with those that were not timed.
    """

    def __init__(self, setup: str) -> None:
        self.setup = setup
        self.held: Any = (0.0, 0.0, 0.0)
        self.turns: list[list[Turn]] = []
        self.losses: list[float] = []
