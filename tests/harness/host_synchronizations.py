# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""How often the host waits for the device while it trains, and where; everything here runs inside rank processes."""

import contextlib
import gc
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

from torch import Tensor

from tests.harness import networks, training
from tests.harness.stream_cases import micro_step
from tests.harness.stream_order import Order, Synchronization, device_with_streams
from tests.harness.training import SMALL, Job, placed

FIRST, LAST = 5, 10  # micro-steps in which they are counted, from 1
JOB = Job(sizes=networks.SQUARE, accumulation=2, empty=False, zero=SMALL)
_ASKED = ("tolist", "numpy")  # of a tensor: the host waits for its values


class HostWaits(NamedTuple):
    """What the host waits for, and where: outside of ``engine.step()``, and in it."""

    outside: Counter[Synchronization]
    in_step: Counter[Synchronization]

    @property
    def all(self) -> Counter[Synchronization]:
        """Both together."""
        return self.outside + self.in_step


def host_synchronizations(name: str, more: dict[str, Any], **changed: Any) -> HostWaits:
    """Train ten micro-steps, two to a step, and return what the host waits for in the last six.

    Args:
        name: of a strategy, or a stage.
        more: further keys of zero_optimization.
        changed: attributes of the job.
    """
    job = replace(JOB, **changed)
    waits = HostWaits(Counter(), Counter())
    with device_with_streams() as order:
        engine, model = training.make_engine(job, placed(name, **more))
        data = training.batches(job)
        batches = [next(data) for _ in range(LAST)]
        gc.collect()  # an earlier engine; if it ended now, the host would wait
        with order.watch(), asking(order):
            for number, batch in enumerate(batches):
                before = order.synchronizations.copy()
                micro_step(engine, model, job, number, batch, gathering=False)
                between = order.synchronizations.copy()
                engine.step()
                if number + 1 >= FIRST:
                    waits.outside.update(between - before)
                    waits.in_step.update(order.synchronizations - between)
        engine.destroy()
    return waits


@contextlib.contextmanager
def asking(order: Order) -> Any:
    """Count, in this context, what the device with streams does not see, for on a CPU it is no operation."""

    def counting(method: str, plain: Any) -> Any:
        def asked(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            order.synchronize(method, order.current.clock)
            return plain(tensor, *args, **kwargs)

        return asked

    with contextlib.ExitStack() as patches:
        for name in _ASKED:
            patches.enter_context(mock.patch.object(Tensor, name, counting(name, getattr(Tensor, name))))
        yield
