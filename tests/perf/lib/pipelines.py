# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A pipeline with DeepSpeed's ZeRO-1 and with strategies: a byte-level GPT, with embedding and head tied, in two
stages of two nodes each, so four data-parallel ranks in two groups.

Bytes are those that a rank receives, by the kernel's counters. Held are parameters and gradients before the flush.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import deepspeed
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from torch import Tensor

from deepspeed_ext.model_bytes import measure_state_bytes
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, StateBytes
from scripts.emulation.traffic import TrafficMeter
from scripts.examples.gpt import Batches, pipeline, read_corpus
from tests.harness.training import whole_weights
from tests.perf.lib import settings
from tests.perf.lib.measurements import BYTES_BOUND, Measurement
from tests.perf.lib.peers import ADAMW, Method
from tests.perf.lib.records import Row
from tests.perf.lib.settings import FP32
from tests.perf.lib.turns import Turn, Turns, over_ranks

STOCK, STAGES = "ZeRO-1", 2
WIDTH, LAYERS, HEADS, SEQUENCE_LENGTH, CORPUS_BYTES = 256, 4, 4, 32, 500_000
ZERO: dict[str, Any] = {
    "reduce_bucket_size": 500_000,
    "allgather_bucket_size": 500_000,
    # The formula gathers each parameter twice in a micro-batch: nothing may stay from forward to backward.
    "stage3_param_persistence_threshold": 0,
    "stage3_prefetch_bucket_size": 0,
    "stage3_max_reuse_distance": 0,
}


class Pipeline(Method):
    """A pipeline engine with its data."""

    def __init__(self, name: str, group_size: int, micro_batches: int) -> None:
        zero = {"stage": 1} if name == STOCK else {"paro_strategy": name, "paro_group_size": group_size}
        super().__init__(name, ", ".join(f"{key} {value}" for key, value in zero.items()))
        model = pipeline(WIDTH, LAYERS, HEADS, SEQUENCE_LENGTH, STAGES, 0)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": micro_batches,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "eps": ADAMW["eps"], "torch_adam": True}},
            "steps_per_print": 1_000_000,
            "zero_optimization": {**ZERO, **zero},
        }
        self.numel = sum(parameter.numel() for parameter in model.parameters())
        self._engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        self._data = iter(Batches(read_corpus(CORPUS_BYTES), self._engine, SEQUENCE_LENGTH, 0))
        reduce = self._engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def note(engine: Any) -> None:
            self._most = self._states()
            reduce(engine)

        self._engine._INSTRUCTION_MAP = {**self._engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: note}

    def step(self, batches: Sequence[Any], watch: bool = False) -> None:
        self._engine.train_batch(self._data)

    def finish(self) -> None:
        if hasattr(self._engine.optimizer, "parameters"):
            self._engine.optimizer.drain_parameters()  # or slices are completed during the next forward

    def _states(self) -> StateBytes:
        if self.name != STOCK:
            states = measure_state_bytes(self._engine)
            return StateBytes(states.parameters, states.gradients, 0)
        parameters = list(self._engine.module.parameters())
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        return StateBytes(sum(one.nbytes for one in parameters), sum(one.nbytes for one in gradients), 0)

    def weights(self) -> Tensor:
        return whole_weights(self._engine.module)

    def close(self) -> None:
        self._engine.destroy()

    def _micro_step(self, *_: Any) -> None:
        raise NotImplementedError


class PipelineMeasurement(Measurement):
    """Pipelines of ZeRO-1 and of strategies."""

    file = "pipelines.csv"
    settings = settings.PIPELINE
    methods = (STOCK, "NNG", "NIG", "NGG", "IIG", "GGG")
    stock = STOCK
    bounds: ClassVar[Mapping[str, float]] = {FP32: 1e-5}

    def measure(self) -> list[Row]:
        self.turns, self._meter = Turns(self.setting.ranks_per_node, lambda step: []), TrafficMeter()
        self.made = {method.name: method for method in self.make_methods()}
        self._received: dict[str, list[float]] = {}
        states = {name: self.turns.warm_up(method) for name, method in self.made.items()}
        rows = [row for mbit in self.setting.mbit for row in self.at(mbit, {})]
        apart = self.compare()
        for row in rows:
            row.held, row.difference = states[row.method], apart[row.method]
        return rows

    def make_methods(self) -> Iterator[Method]:
        for name in self.names:
            yield Pipeline(name, self.setting.ranks_per_node, self.setting.accumulation)

    def round(self, number: int, rows: Mapping[str, Row]) -> float:
        for name, row in rows.items():
            row.add(*self.turn(self.made[name]))
        return 0.0

    def turn(self, method: Method) -> Turn:
        """Time a step, and count what ranks receive in it, or in each of its tries."""
        before = self.turns.steps_of(method)
        self._meter.start()
        dist.barrier()
        turn = self.turns.a_step(method)
        self._meter.stop()
        received, found = self._meter.read(), {"inter": 0.0, "intra": 0.0, "other_stages": 0.0}
        ranks, group = len(received), self.setting.ranks_per_node
        for rank, by_sender in enumerate(received):
            for sender, count in enumerate(by_sender):
                same_stage = sender * STAGES // ranks == rank * STAGES // ranks
                hop = "intra" if sender // group == rank // group else "inter"
                found[hop if same_stage else "other_stages"] += count / ranks
        steps = self.turns.steps_of(method) - before
        self._received[method.name] = [count / steps for count in found.values()]
        return turn._replace(sent=self._received[method.name][0] * group)

    def complete(self, row: Row, rates: Rates | None) -> None:
        method, group = self.made[row.method], self.setting.ranks_per_node
        row.headers = 1.0  # counted without
        row.more |= dict(zip(("received_intra", "received_other_stages"), self._received[row.method][1:], strict=True))
        if row.method in STRATEGIES and isinstance(method, Pipeline):
            sizes = GroupSizes(self.setting.sizes.ranks // STAGES, group)
            states = ModelStates.of(method.numel, parameter_bytes=4, gradient_bytes=4)
            volume = STRATEGIES[row.method].volume(sizes, states, self.setting.accumulation)
            sums = over_ranks([volume.intra, volume.inter], dist.ReduceOp.SUM)
            intra, inter = (total / dist.get_world_size() for total in sums)  # the mean over stages
            row.formula_bytes, row.more["formula_intra"] = inter * group, intra

    @classmethod
    def other_bytes(cls, row: Row) -> list[str]:
        if row.formula_bytes is None:
            return []
        due = {"inter": row.formula_bytes / 2, "intra": row.more["formula_intra"]}
        received = {"inter": row.bytes_between / 2, "intra": row.more["received_intra"]}
        return [
            f"{row.method}, {row.mbit} Mbit/s: receives {received[hop]:.0f} bytes {hop}, not {due[hop]:.0f}"
            for hop in due
            if abs(received[hop] - due[hop]) > BYTES_BOUND * max(due.values())
        ]
