# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A pipeline with DeepSpeed's ZeRO-1 and with strategies: a byte-level GPT, with tied embedding and head, in two
stages of two nodes each, so four data-parallel ranks in two groups; and the same model without a pipeline on all eight
ranks, with the same samples in a step.

Bytes are those that a rank receives, by the kernel's counters. Memory of a pipeline is that of states before the
flush, when it holds most, on the rank with the most. Activations are tensors that the forwards of all micro-batches in
flight keep for their backwards.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from deepspeed.runtime.pipe import schedule
from deepspeed.utils import groups
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from deepspeed_ext.leaf.modules import numel_of
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, StateBytes
from scripts.emulation.traffic import TrafficMeter
from scripts.examples.gpt import Batches, ByteGPT, pipeline, read_corpus
from tests.perf.lib import settings
from tests.perf.lib.measurements import BYTES_BOUND, Measurement
from tests.perf.lib.peers import PEERS, Batch, Engine, Method, Ours, Workload, gathered
from tests.perf.lib.records import Row
from tests.perf.lib.settings import FP32, MOVES, SHIPPED
from tests.perf.lib.turns import Turn, methods, over_ranks

STOCK, STAGES = "ZeRO-1", 2
ALONE = "no pipeline, "
WIDTH, LAYERS, HEADS, SEQUENCE_LENGTH, CORPUS_BYTES, BUCKET = 256, 4, 4, 32, 500_000, 500_000
# The formula gathers each parameter twice in a micro-batch: nothing may stay from forward to backward.
LEAN = {f"stage3_{key}": 0 for key in ("param_persistence_threshold", "prefetch_bucket_size", "max_reuse_distance")}
make_stages = partial(pipeline, WIDTH, LAYERS, HEADS, SEQUENCE_LENGTH, STAGES, 0)
_only_stage = cache(partial(pipeline, WIDTH, LAYERS, HEADS, SEQUENCE_LENGTH, 1, 0))
SAME_AS = {STOCK: "NNG", SHIPPED: "NNG", "ZeRO-3": "GGG", "ZeRO-3 defaults": "GGG"}  # in what ranks hold


@torch.no_grad()
def make_whole() -> ByteGPT:
    model = ByteGPT(WIDTH, LAYERS, HEADS, SEQUENCE_LENGTH)
    model.lm_head.weight = model.token_embedding.weight
    for mine, staged in zip(model.parameters(), _only_stage().parameters(), strict=True):
        mine.copy_(staged)
    return model


def weights_of_stage(model: Any, layers: range) -> Tensor:
    """Return full parameters of the whole model: the tied embedding, and those of a stage's layers. Collective."""
    parts = enumerate([gathered(model.token_embedding), *map(gathered, model.blocks), gathered(model.norm)])
    return torch.cat([p.flatten() for number, part in parts if not number or number in layers for p in part])


def weights_in_stage(stage: nn.Module) -> Tensor:
    """Return the same of a stage. Position embeddings are left out: those of the last stage are not used."""
    embedding, _, *others = gathered(stage)
    return torch.cat([p.flatten() for p in (embedding, *others)])


def kept_bytes(model: nn.Module, *inputs: Tensor) -> int:
    """Return the bytes that a forward keeps for its backward, besides parameters."""
    parameters, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, dict[int, int]()

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        out = model(*inputs)  # held, so that no storage is reused
    return sum(nbytes for at, nbytes in kept.items() if at not in parameters) if out.requires_grad else 0


class Pipeline(Ours):
    """A pipeline engine with its data: of DeepSpeed's ZeRO-1, or of a strategy."""

    def __init__(self, workload: Workload, name: str) -> None:
        if name in STRATEGIES:
            zero = self.keys(workload, {"paro_strategy": name, "paro_group_size": workload.group_size})
        else:
            zero = cast(Any, PEERS[name]).keywords["zero"]
        Engine.__init__(self, workload, name, zero, native=name != STOCK)
        groups.mpu = None  # the pipeline's, which engines without a pipeline would use
        self._data = iter(Batches(read_corpus(CORPUS_BYTES), self._engine, SEQUENCE_LENGTH, 0))
        reduce = self._engine._INSTRUCTION_MAP[schedule.ReduceTiedGrads]

        def note(engine: Any) -> None:
            self._most = self._states()
            reduce(engine)

        self._engine._INSTRUCTION_MAP = {**self._engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: note}

    def step(self, batches: Sequence[Any], watch: bool = False) -> None:
        with self._reductions():
            self._engine.train_batch(self._data)

    def _states(self) -> StateBytes:
        return super()._states() if self.name in STRATEGIES else Engine._states(self)


class PipelineMeasurement(Measurement):
    """Pipelines of ZeRO-1 and of strategies, and methods without a pipeline."""

    file = "pipelines.csv"
    settings = settings.PIPELINE
    methods = (
        *(ALONE + name for name in (STOCK, "ZeRO-3", "ZeRO-3 defaults", "NIG", "IIG")),
        *(STOCK, SHIPPED, "NNG", "NIG", "NGG", "IIG", "GGG"),
    )
    stock = STOCK
    bounds: ClassVar[Mapping[str, float]] = {FP32: 1e-5}

    def make_workload(self) -> Workload:
        self._meter, self._received, self._layers = TrafficMeter(), dict[str, list[float]](), range(LAYERS + 2)
        rank = SimpleNamespace(train_micro_batch_size_per_gpu=lambda: 1, data_parallel_group=None, device="cpu")
        self._data = Batches(read_corpus(CORPUS_BYTES), cast(Any, rank), SEQUENCE_LENGTH, 0)
        return Workload(
            self.setting.accumulation // STAGES,
            self.setting.ranks_per_node,
            make_whole,
            bucket=BUCKET,
            whole=lambda model: weights_of_stage(model, self._layers),
        )

    def batches(self, step: int) -> list[Batch]:
        count = self.workload.accumulation
        return [self._data.draw((step - 1) * count + number) for number in range(count)]

    def make_methods(self) -> Iterator[Method]:
        inputs, stage = self._data.draw(0), make_stages()
        hidden = torch.zeros(*inputs[0].shape, WIDTH, requires_grad=True)
        in_flight = STAGES - stage.stage_id  # of DeepSpeed's schedule, 1F1B
        kept = kept_bytes(stage, hidden if stage.stage_id else inputs[0]) * in_flight
        self._activations = over_ranks([kept, kept_bytes(make_whole(), *inputs)], dist.ReduceOp.MAX)
        self._layers = range(stage._local_start, stage._local_stop)
        # Stages have other numbers of modules, which ZeRO-3 counts in each process, and compares between ranks.
        for method in methods([n.removeprefix(ALONE) for n in self.names if n.startswith(ALONE)], self.workload, {}):
            method.name = ALONE + method.name
            yield method
        staged: dict[str, Any] = {"accumulation": self.setting.accumulation, "make_model": make_stages, "zero": LEAN}
        workload = replace(self.workload, **staged, whole=weights_in_stage)
        for name in (name for name in self.names if not name.startswith(ALONE)):
            yield Pipeline(workload, name)

    def turn(self, method: Method) -> Turn:
        """Time a step, and count what ranks receive in it, or in each of its tries."""
        before = self.turns.steps_of(method)
        self._meter.start()
        dist.barrier()
        turn = self.turns.a_step(method)
        self._meter.stop()
        received, bytes_by_kind = self._meter.read(), {"inter": 0.0, "intra": 0.0, "other_stages": 0.0}
        ranks, group = len(received), self.setting.ranks_per_node
        stages = STAGES if isinstance(method, Pipeline) else 1
        for rank, by_sender in enumerate(received):
            for sender, count in enumerate(by_sender):
                same_stage = sender * stages // ranks == rank * stages // ranks
                hop = "intra" if sender // group == rank // group else "inter"
                bytes_by_kind[hop if same_stage else "other_stages"] += count / ranks
        steps = self.turns.steps_of(method) - before
        self._received[method.name] = [count / steps for count in bytes_by_kind.values()]
        return turn._replace(sent=self._received[method.name][0] * group)

    def complete(self, row: Row, rates: Rates | None) -> None:
        """Add activations, and bytes of the formulas: the mean over stages that cross, and the maximum held."""
        method, name = cast(Engine, self.made[row.method]), row.method.removeprefix(ALONE)
        piped, group = isinstance(method, Pipeline), self.setting.ranks_per_node
        stages, accumulation = (STAGES, self.setting.accumulation) if piped else (1, self.workload.accumulation)
        sizes = GroupSizes(self.setting.sizes.ranks // stages, group)
        numel = [float(sum(map(numel_of, method.engine.module.parameters())))]
        (most,), (total,) = (over_ranks(numel, op) for op in (dist.ReduceOp.MAX, dist.ReduceOp.SUM))
        counts = (most, total / dist.get_world_size())
        largest, mean = (ModelStates.of(round(n), parameter_bytes=4, gradient_bytes=4) for n in counts)
        row.headers = 1.0  # counted without
        row.more |= dict(zip(("received_intra", "received_other_stages"), self._received[row.method][1:], strict=True))
        row.more["activation_bytes"] = self._activations[0 if piped else 1]
        row.more["formula_held"] = STRATEGIES[SAME_AS.get(name, name)].memory(sizes, largest).total
        if moves := MOVES.get(name):
            row.formula_bytes = (accumulation * moves[0] + moves[1]) * (1 - 1 / sizes.ranks) * mean.parameters
        else:
            volume = STRATEGIES[name].volume(sizes, mean, accumulation)
            row.formula_bytes, row.more["formula_intra"] = volume.inter * group, volume.intra

    @classmethod
    def other_bytes(cls, row: Row) -> list[str]:
        messages, due = super().other_bytes(row), row.more.get("formula_intra")
        if due is not None and abs(row.more["received_intra"] - due) > BYTES_BOUND * max(due, row.bytes_between / 2):
            messages.append(f"{row.method}: receives {row.more['received_intra']:.0f} bytes in nodes, not {due:.0f}")
        return messages
