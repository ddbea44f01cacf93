# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods that take turns on an emulated cluster, in the same processes, as a rank sees it.

All train the same model on the same data from the same seed, in rounds whose order alternates: so whatever else this
machine does falls on all of them.
"""

import itertools
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.muon.original_muon import muon_update
from torch import Tensor, nn

from deepspeed_ext.comm import collectives
from deepspeed_ext.planner.choice import plan
from deepspeed_ext.planner.compression import AS_IT_IS
from deepspeed_ext.planner.cost import Model
from deepspeed_ext.planner.models import describe, mark_matrices
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib.cluster_rows import FORMS, FP32, MUON, NATIVE, WIDE, MethodRow
from tests.perf.lib.peers import MUON_RATE, PEERS, Batch, Method, Ours, Workload
from tests.perf.lib.turns import Turn, Turns, give_back_memory, over_ranks

ROWS = 8  # of a micro-batch
WARM_UP_STEPS = 2
COMPUTE = "compute"


class Compute(Method):
    """What no method can do without: forward and backward on whole parameters, and an update of 1/n of them.

    Muon's update is that of whole matrices, of every n-th one here.

    Attributes:
        orthogonalizing: seconds of Muon's last update.
    """

    orthogonalizing = 0.0

    def __init__(self, workload: Workload) -> None:
        super().__init__(COMPUTE, "no communication")
        self._model, self._accumulation = workload.make_model().to(workload.dtype), workload.accumulation
        trainable = [p for p in self._model.parameters() if p.requires_grad]
        mine = trainable[dist.get_rank() :: dist.get_world_size()]
        self._momenta = [(p, torch.zeros_like(p)) for p in mine] if workload.optimizer == MUON else []
        flat = torch.cat([p.detach().flatten() for p in trainable]).float()
        self._share = nn.Parameter(flat[: -(-flat.numel() // dist.get_world_size())].clone())
        self._share.grad = torch.zeros_like(self._share)
        self._optimizer = torch.optim.AdamW([self._share], **workload.adamw)

    def _micro_step(self, inputs: Tensor, targets: Tensor, last: bool, look: Callable[[], None]) -> None:
        (self._model(inputs, targets) / self._accumulation).backward()
        if last:
            self._orthogonalize() if self._momenta else self._optimizer.step()
            self._model.zero_grad()

    @torch.no_grad()
    def _orthogonalize(self) -> None:
        begin = time.perf_counter()
        for matrix, momentum in self._momenta:
            matrix.sub_(muon_update(matrix.grad, momentum), alpha=MUON_RATE)
        self.orthogonalizing = time.perf_counter() - begin

    def _states(self) -> Any:
        raise NotImplementedError

    def weights(self) -> Tensor:
        raise NotImplementedError

    def close(self) -> None:
        self._model = self._optimizer = None  # type: ignore[assignment]


def methods(names: Sequence[str], workload: Workload, keys: Mapping[str, Any]) -> Iterator[Method]:
    """Yield what is asked for, in a fixed order; strategies with these keys, too."""
    for name, make in PEERS.items():
        if name in names:
            yield make(workload)
    for name in STRATEGIES:
        zero: dict[str, Any] = {"paro_strategy": name, "paro_group_size": workload.group_size, **keys}
        for suffix, sent in FORMS.items():
            if name + suffix in names:
                used = {"zeropp_loco_param": sent.loco, "paro_quantized_updates": sent.updates}
                few_bits = {key: {} for key, settings in used.items() if settings is not None}
                yield Ours(workload, {**zero, **few_bits}, name + suffix)
        if name + WIDE in names:
            wide = {**workload.config, "communication_data_type": FP32}
            yield Ours(replace(workload, config=wide), zero, name + WIDE)
        if name + NATIVE in names:
            # As on other backends: hops take the backend's own reduce-scatter and all-gather.
            with mock.patch.object(collectives, "backend_of", lambda group: "native"):
                yield Ours(workload, zero, name + NATIVE)


class SideBySide(Turns):
    """A rank's methods, and its link.

    Args:
        names: of the methods.
        workload: what they train: a model that takes rows of ``width``.
        width: of the model.
        keys: of the section ``zero_optimization``, for strategies.
        described: what the planner is told of the model besides.
    """

    def __init__(
        self,
        names: Sequence[str],
        workload: Workload,
        width: int,
        keys: Mapping[str, Any],
        described: Mapping[str, Any],
    ) -> None:
        super().__init__(workload.group_size)
        self._workload, self._width = workload, width
        model = workload.make_model().to(workload.dtype)
        if workload.optimizer == MUON:
            mark_matrices(model)
        self._described, self._described_wide = (
            replace(
                describe(model, gradient_bytes=width, accumulation=workload.accumulation),
                bucket=workload.bucket,
                **described,
            )
            for width in (None, 4)
        )
        self.compute = Compute(workload)
        self.methods = {method.name: method for method in methods(names, workload, keys)}
        self._steps: Counter[str] = Counter()

    def warm_up(self) -> dict[str, tuple[float, float, float]]:
        """Open connections, record modules, make moments; return what is held."""
        held = {}
        for method in [self.compute, *self.methods.values()]:
            for number in range(WARM_UP_STEPS):
                method.step(self._batches(method), watch=number > 0 and method is not self.compute)
                method.finish()
            give_back_memory()
            if method is not self.compute:
                states = asdict(method.held())
                held[method.name] = tuple(over_ranks(list(states.values()), dist.ReduceOp.MAX))
        return held

    def one_round(self, number: int, rows: dict[str, MethodRow], take: Callable[[Method], Turn]) -> float:
        """Give each method of these rows its turn, and ``Compute``; return the median of the latter's seconds."""
        order = list(rows)
        random.Random(number).shuffle(order)
        for name in order:
            take(self.methods[name]).count_in(rows[name])
        return statistics.median(take(self.compute).seconds)

    def take(self, method: Method, count: int) -> None:
        """Take so many steps that are not timed."""
        for _ in range(count):
            method.step(self._batches(method))
        method.finish()

    def steps_in_a_row(self, method: Method, count: int, before: int = 1) -> Turn:
        """Time so many steps after others, since each step waits for what the previous one has left under way.

        A step lasts from the end of the one before to its own, each on the rank that gets there last: ranks of one
        machine have one clock.
        """

        def run() -> list[float]:
            ends = []
            for batches in [self._batches(method) for _ in range(count + before)]:
                method.step(batches)
                ends.append(time.perf_counter())
            method.finish()
            ends = over_ranks(ends[before - 1 :], dist.ReduceOp.MAX)
            return [end - begin for begin, end in itertools.pairwise(ends)]

        return self._undisturbed(run, count + before)

    def predict(self, rows: Mapping[str, MethodRow], compute: float, rates: Any) -> None:
        """Put down what the planner says; ``compute`` is the seconds of a step without communication."""
        (share,) = over_ranks([self.compute.orthogonalizing], dist.ReduceOp.MAX)
        alone, whole = (compute - share) / self._workload.accumulation, share * dist.get_world_size()
        sizes = self.topology.sizes
        forms = [(self._described, suffix, sent) for suffix, sent in FORMS.items()]
        for described, suffix, sent in [*forms, (self._described_wide, WIDE, AS_IT_IS)]:
            model: Model = replace(described, compute=alone, orthogonalizing=whole)
            for one in plan(sizes, model, rates, None, [sent]).predictions:
                row = rows.get(one.strategy + suffix)
                if row is not None:
                    row.parts = one.seconds
                    row.formula_bytes = one.volume.inter * sizes.group_size
        for name in STRATEGIES:
            if name in rows and name + NATIVE in rows:
                rows[name + NATIVE].formula_bytes = rows[name].formula_bytes

    def _batches(self, method: Method) -> list[Batch]:
        """Make the batches of a method's next step: those that every other method has in that step."""
        step = self._steps[method.name]
        self._steps[method.name] += 1
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        rows = torch.randn(self._workload.accumulation, 2, ROWS, self._width, generator=generator)
        return [(inputs, targets) for inputs, targets in rows.to(self._workload.dtype)]

    def compare(self) -> dict[str, float]:
        """Return the difference of each method's weights to the first one's, relative to the largest. Collective."""
        first = next(iter(self.methods.values())).weights()
        found = {}
        for name, method in self.methods.items():
            apart = ((method.weights() - first).abs().max() / first.abs().max()).nan_to_num(float("inf"))
            (found[name],) = over_ranks([apart.item()], dist.ReduceOp.MAX)
        return found
