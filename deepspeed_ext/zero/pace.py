# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Pace of groups, and the numbers of micro-batches that balance it (``paro_micro_batches`` "measured").

Note [Pace]
    With p and g = N or I groups communicate only at the end of a step. So each group runs at its own *pace* from there
    to the end of its last-but-one backward: seconds per micro-batch, on the slowest rank of the group. The last
    backward may already wait for other groups.

    The first step warms up, and the next ones are timed, all with the mean number of micro-batches. Then all ranks
    compute the same numbers from the same paces. The numbers change at the end of a step. DeepSpeed counts micro-steps
    from the start of the training and divides by the rank's number, so the counter starts anew there.
"""

import heapq
import itertools
import json
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_ext.comm.agreement import all_gather_texts, all_reduce_max, broadcast_from_first
from deepspeed_ext.comm.process_groups import Topology
from deepspeed_ext.config.decisions import Decisions
from deepspeed_ext.config.keys import MEASURED, MICRO_BATCHES, SECTION
from deepspeed_ext.console import warn_on_rank_0
from deepspeed_ext.deepspeed_types import Engine
from deepspeed_ext.zero.optimizer import ParoOptimizer
from deepspeed_ext.zero.sample_weights import add_weights
from deepspeed_ext.zero.updates_in_flight import wait_for_updates

WARM_UP, TIMED = 1, 3  # steps


def balance(paces: Sequence[float], total: int) -> list[int]:
    """Return the numbers of micro-batches of groups, each at least 1, with this total and the shortest step."""
    numbers = [1] * len(paces)
    ends = [(2 * pace, group) for group, pace in enumerate(paces)]  # of each group with another micro-batch
    heapq.heapify(ends)
    for _ in range(total - len(numbers)):
        _, group = ends[0]
        numbers[group] += 1
        heapq.heapreplace(ends, ((numbers[group] + 1) * paces[group], group))
    return numbers


def use_decision(engine: Engine, topology: Topology) -> dict[str, Any]:
    """Replace "measured" in an engine's configuration by the numbers of an earlier run, if any. Collective.

    Returns:
        the inputs of the decision for ``measure_pace``; empty without "measured".
    """
    zero = engine._config.zero_config
    if zero.paro_micro_batches != MEASURED:
        return {}
    engine.set_gradient_accumulation_boundary = _refuse_own_boundaries
    inputs, file = _inputs(engine, topology), Decisions(Path(zero.paro_decision_file))
    text = broadcast_from_first(lambda: find_numbers(file, inputs), f"{file.path} cannot be read", ValueError)
    zero.paro_micro_batches = json.loads(text) if text else MEASURED
    return inputs


def _inputs(engine: Engine, topology: Topology) -> dict[str, Any]:
    """Return the inputs of a decision. If any value changes, the pace is measured again. Collective."""
    config = engine._config
    hosts = [(name, len(list(ranks))) for name, ranks in itertools.groupby(all_gather_texts(socket.gethostname()))]
    return {
        "ranks": topology.sizes.ranks,
        "group_size": topology.sizes.group_size,
        "accumulation": config.gradient_accumulation_steps,
        "micro_batch_size": config.train_micro_batch_size_per_gpu,
        "hosts": hosts,
        "strategies": [config.zero_config.paro_strategy],
    }


def find_numbers(file: Decisions, inputs: dict[str, Any]) -> str:
    """Return the decided numbers as JSON; empty without a decision, or if they cannot be used."""
    entry = file.find(inputs)
    if entry is None:
        return ""
    numbers: Any = entry["plan"].get(MICRO_BATCHES) if isinstance(entry["plan"], dict) else None
    groups = inputs["ranks"] // inputs["group_size"]
    total = inputs["accumulation"] * groups
    are_integers = isinstance(numbers, list) and all(type(number) is int and number > 0 for number in numbers)
    if not are_integers or (len(numbers), sum(numbers)) != (groups, total):
        expected = f"{groups} integers of at least 1 with the sum {total}, got {numbers!r}"
        warn_on_rank_0(f"{file.path}: plan.{MICRO_BATCHES} must be {expected}: measuring again")
        return ""
    warn_on_rank_0(f"{SECTION}.{MICRO_BATCHES} stays {numbers}, as decided on {entry['date']} ({file.path})")
    return json.dumps(numbers)


def _refuse_own_boundaries(is_boundary: bool) -> None:
    raise RuntimeError(
        f'{SECTION}.{MICRO_BATCHES} "{MEASURED}" changes the number of micro-batches, so the engine must set the '
        f"boundaries of accumulations, but the script (or Accelerate) has called set_gradient_accumulation_boundary. "
        f"Remove that call, or set {MICRO_BATCHES} to a list of numbers."
    )


def measure_pace(optimizer: ParoOptimizer, engine: Engine, inputs: dict[str, Any]) -> None:
    """Measure the pace of groups in the first steps, and then use numbers that balance it, if that is configured.

    Args:
        inputs: of the decision; see ``use_decision``.
    """
    if engine._config.zero_config.paro_micro_batches == MEASURED:
        _Measurement(optimizer, engine, inputs)


class _Measurement:
    """The first steps of a training. See Note [Pace]."""

    def __init__(self, optimizer: ParoOptimizer, engine: Engine, inputs: dict[str, Any]) -> None:
        self._optimizer, self._engine, self._inputs = optimizer, engine, inputs
        self._steps, self._begin, self._end = 0, 0.0, 0.0
        self._paces: list[float] = []
        optimizer.on_step, optimizer.micro_steps.on_end = self._end_step, self._end_micro_step

    def _end_micro_step(self) -> None:
        if self._steps >= WARM_UP:
            get_accelerator().synchronize()
            self._end = time.perf_counter()

    def _end_step(self) -> None:
        number = self._engine.gradient_accumulation_steps()
        if self._steps >= WARM_UP and self._end > self._begin:
            self._paces.append((self._end - self._begin) / (number - 1))
        self._steps += 1
        wait_for_updates()  # which groups send to each other
        get_accelerator().synchronize()
        if self._steps == WARM_UP + TIMED:
            self._optimizer.on_step = self._optimizer.micro_steps.on_end = None
            self._decide()
        self._begin = time.perf_counter()

    def _decide(self) -> None:
        """Use the numbers that balance the paces. Collective."""
        topology, config = self._optimizer.topology, self._engine._config
        groups, group = topology.sizes.groups, topology.rank // topology.sizes.group_size
        total = config.gradient_accumulation_steps * groups
        by_group = torch.zeros(groups, dtype=torch.float64)
        by_group[group] = median(self._paces) if self._paces else float("inf")
        reduced = all_reduce_max(by_group)  # over all ranks, also those of other parts of the model
        if torch.isinf(reduced).any():
            warn_on_rank_0(f"{SECTION}.{MICRO_BATCHES} stays {total // groups}: a rank has run no complete backward")
            return
        paces: list[float] = reduced.tolist()
        numbers = balance(paces, total)
        if dist.get_rank() == 0:
            seconds = ", ".join(f"{pace:.3g}" for pace in paces)
            warn_on_rank_0(f"{SECTION}.{MICRO_BATCHES} is now {numbers}: groups take {seconds} s per micro-batch")
            plan = {MICRO_BATCHES: numbers, "paces": paces}
            Decisions(Path(config.zero_config.paro_decision_file)).keep(
                self._inputs["strategies"][0], self._inputs, plan
            )
        config.zero_config.paro_micro_batches, config.gradient_accumulation_steps = numbers, numbers[group]
        add_weights(self._optimizer.sample_weights, self._engine, topology)
        self._engine.micro_steps = -1  # ``engine.step``, which is running, adds 1
