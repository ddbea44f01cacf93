# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measurements of ``tests.perf.cluster`` with models of blocks, and checks of their rows."""

import argparse
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar
from unittest import mock

import torch
import torch.distributed as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from tqdm import tqdm

from deepspeed_ext.planner import probe
from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.memory import Model
from deepspeed_ext.planner.models import describe, mark_matrices
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, Direction
from tests.perf.lib import network, paper, rings, settings, tabulated
from tests.perf.lib.blocks import Blocks, Pauses, make_adapted_blocks, make_blocks, make_rounded_blocks
from tests.perf.lib.peers import PEERS, WHOLE, Batch, Engine, Method, Ours, OuterFSDP2, Workload
from tests.perf.lib.records import Row, Table, slower
from tests.perf.lib.settings import BF16, BOTH, FP32, LOCO, MUON, NATIVE, ORDERED, RINGS, SHIPPED, SIZES, WIDE, Setting
from tests.perf.lib.turns import WARM_UP_STEPS, Compute, Turn, Turns, differences, methods, over_ranks

ROWS = 8  # of a micro-batch
BYTES_BOUND = 0.05
BACKWARD = 2.0  # seconds of emulated backward for each of forward


class Measurement:
    """Methods that take turns, and their measurement. An instance is one rank's, for one setting.

    Attributes:
        file: file of the rows, in the folder of results.
        settings, usual: settings by name; names of settings that are measured by default (empty: all).
        methods, rounds, steps: all methods; turns and steps by default.
        probes: whether the planner predicts seconds, with the links' rates.
        short, most: turns with steps that together take less than ``short`` seconds have up to ``most`` steps.
        batch_rows: rows of a micro-batch.
        stock, least: required speed of methods relative to ``stock``, by setting and method.
        bytes_bound, slack: share and number of bytes that a node may send in a step beyond the formula.
        compared, bounds, loco_bound: quantities that must not differ from the first method's, and the largest allowed
            differences, relative to the largest weight: bf16 has a precision of 2^-9, and gradients depend on
            the order of sums.
    """

    file: ClassVar[str]
    settings: ClassVar[Mapping[str, Setting]]
    usual: ClassVar[Sequence[str]] = ()
    methods: ClassVar[Sequence[str]]
    rounds: ClassVar[int] = 3
    steps: ClassVar[int] = 1
    probes: ClassVar[bool] = False
    short, most = 0.0, 1
    batch_rows: ClassVar[int] = ROWS
    stock: ClassVar[str] = "ZeRO-3"
    least: ClassVar[Mapping[str, dict[str, float]]] = {}
    bytes_bound: ClassVar[float] = BYTES_BOUND
    slack: ClassVar[float] = 0.0
    compared: ClassVar[str] = "weights"
    bounds: ClassVar[Mapping[str, float]] = {FP32: 1e-4, BF16: 2**-7}
    loco_bound: ClassVar[float] = math.inf
    keys: ClassVar[Mapping[str, Any]] = {}  # of zero_optimization, for strategies
    turns_class: ClassVar[type[Turns]] = Turns
    described: ClassVar[Mapping[str, Any]] = {"streams": False}  # to the planner; ranks compute and copy on the cores

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        self.setting, self.args, self.pauses = setting, args, Pauses()
        self.names = [name for name in self.methods if name in (args.methods or self.methods)]

    # What a rank does

    def measure(self) -> list[Row]:
        self.workload = self.make_workload()
        self.turns = self.turns_class(self.setting.ranks_per_node, self.batches)
        self.compute = Compute(self.workload)
        self.made = {method.name: method for method in self.make_methods()}
        self.turns.warm_up(self.compute, watch=False)
        state_bytes = {name: self.turns.warm_up(method) for name, method in self.made.items()}
        apart = self.compare()
        rows = [row for mbit, more in self.points() for row in self.at(mbit, more)]
        for row in rows:
            row.held, row.difference = state_bytes[row.method], apart.get(row.method, 0.0)
        return rows

    def make_workload(self) -> Workload:
        setting = self.setting
        dtype = torch.bfloat16 if setting.dtype == BF16 else torch.float32
        model = partial(make_rounded_blocks, *SIZES[setting.size], dtype)
        return Workload(setting.accumulation, setting.ranks_per_node, model, optimizer=setting.optimizer, dtype=dtype)

    def make_methods(self) -> Iterator[Method]:
        return methods(self.names, self.workload, self.keys)

    @property
    def width(self) -> int:
        """Numbers in a row of a micro-batch."""
        return SIZES[self.setting.size][1]

    def batches(self, step: int) -> list[Batch]:
        generator = torch.Generator().manual_seed(step * dist.get_world_size() + dist.get_rank())
        rows = torch.randn(self.setting.accumulation, 2, self.batch_rows, self.width, generator=generator)
        return [(inputs, targets) for inputs, targets in rows.to(self.workload.dtype)]

    def compare(self) -> dict[str, float]:
        """Return the difference of weights to the first method's after the warm-up, by method. Collective."""
        return differences(self.made)

    def points(self) -> list[tuple[float | None, dict[str, Any]]]:
        """Return the rates of the measurement, each with additional columns of its rows."""
        return [(mbit, {}) for mbit in self.setting.mbit]

    def at(self, mbit: float | None, more: dict[str, Any]) -> list[Row]:
        self.turns.limit(mbit)
        headers = self.turns.headers()
        rates = probe.measure(self.turns.topology) if self.probes else None
        rows = {name: Row(self.setting.name, mbit, name, m.setup, more=dict(more)) for name, m in self.made.items()}
        compute = []
        for number in tqdm(range(self.args.rounds), f"{self.setting.name} {mbit}", disable=dist.get_rank() != 0):
            compute.append(self.round(number, rows))
        for row in rows.values():
            row.headers, row.compute = headers, statistics.median(compute)
            self.complete(row, rates)
        return list(rows.values())

    def round(self, number: int, rows: Mapping[str, Row]) -> float:
        """Give methods their turns; return the seconds of a step without communication."""
        for name in random.Random(number).sample(list(rows), len(rows)):
            rows[name].add(*self.turn(self.made[name]))
        return statistics.median(self.turn(self.compute).seconds)

    def turn(self, method: Method) -> Turn:
        """Time a step, or several short ones, because the median of only one short step varies."""
        turns = [self.turns.a_step(method)]
        while len(turns) < self.most and sum(turn.seconds[0] for turn in turns) < self.short:
            turns.append(self.turns.a_step(method))
        stolen, seconds, sent = zip(*turns, strict=True)
        return Turn(max(stolen), [statistics.median(steps[0] for steps in seconds)], statistics.mean(sent))

    def complete(self, row: Row, rates: Rates | None) -> None:
        """Add the formula's bytes to the row, and for a strategy predicted seconds if there are rates."""
        method, sizes = self.made[row.method], self.turns.topology.sizes
        if not isinstance(method, Ours):
            row.formula_bytes = self.setting.peer_bytes(row.method)
            return
        (share,) = over_ranks([self.compute.orthogonalizing], dist.ReduceOp.MAX)
        model = replace(
            self.describe(method),
            compute=max(0.0, row.compute - share) / self.setting.accumulation,
            orthogonalizing=share * sizes.ranks,
        )
        any_rates = Rates.of_links(sizes, sizes.group_size, 1.0, 1.0)  # bytes do not depend on them
        prediction = predict(method.strategy, sizes, model, rates or any_rates, method.sent)
        row.formula_bytes = prediction.volume.inter * sizes.group_size
        if "bytes_within" in row.more:
            row.more["formula_bytes_within"] = round(prediction.volume.intra * sizes.group_size)
            row.more["formula_held"] = (
                None if method.sent.label else round(prediction.memory.total)
            )  # errors: transient
        row.more |= {} if rates is None else {"seconds_predicted": prediction.total_seconds}

    def describe(self, method: Method) -> Model:
        model = self.workload.make_model().to(self.workload.dtype)
        if self.workload.optimizer == MUON:
            mark_matrices(model)
        width = 4 if method.name.endswith(WIDE) else None
        description = describe(model, gradient_bytes=width, accumulation=self.workload.accumulation)
        return replace(description, bucket=self.workload.bucket, **self.described)

    # What is said of the rows of a setting

    @classmethod
    def problems(cls, rows: Sequence[Row]) -> list[str]:
        """Return messages about methods that did not train the same, or did not send the bytes of the formula."""
        messages = []
        for row in rows:
            bound = cls.loco_bound if LOCO in row.method else cls.bounds[cls.settings[row.setting].dtype]
            if not row.difference <= bound:  # NaN is not
                messages.append(f"{row.method}: {cls.compared} differ by {row.difference:.1e} from the first's")
            messages += cls.other_bytes(row)
        return messages

    @classmethod
    def other_bytes(cls, row: Row) -> list[str]:
        """Return a message if a method did not send the bytes of the formula."""
        due = 0.0 if NATIVE in row.method else row.formula_bytes or 0.0
        error = row.bytes_between / due - 1 if due else 0.0
        apart = due and abs(error) > cls.bytes_bound + cls.slack / due
        return [f"{row.method}: bytes between nodes differ by {error:+.1%} from the formula"] if apart else []

    @classmethod
    def table(cls, rows: Sequence[Row]) -> Table:
        return tabulated.measured(rows, cls.stock)

    @classmethod
    def missed(cls, rows: Sequence[Row]) -> list[str]:
        """Return the methods that miss their required speed relative to ``stock``."""
        setting = cls.settings[rows[0].setting]
        return slower([row for row in rows if row.mbit == setting.mbit[0]], cls.stock, cls.least.get(setting.name, {}))


class BlocksMeasurement(Measurement):
    """All strategies, with and without LoCo, compared with their peers, without overlap."""

    file = "emulated_cluster.csv"
    settings = settings.BLOCKS
    in_bf16 = ("NNG", "NIG", "IIG")
    methods = (
        *PEERS,
        *(name + suffix for name in STRATEGIES for suffix in ("", LOCO)),
        *(name + BOTH for name in ("NNG", "NIG", "NII", "III", "IIG")),
        *(name + suffix for name in ("NIG", "IIG") for suffix in (NATIVE, ORDERED, ORDERED + NATIVE)),
        *(name + WIDE for name in in_bf16),
    )
    least: ClassVar = {"2x2-large-4": {"NIG" + BOTH: 30.0}, "2x2-large-4-muon": {"IIG": 6.0}}
    probes = True
    short, most = 1.0, 7

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        super().__init__(setting, args)
        usual = self.methods_of(setting)
        self.names = [name for name in self.names if name in usual or (args.methods and NATIVE in name)]

    @classmethod
    def methods_of(cls, setting: Setting) -> list[str]:
        """Return the usual methods of a setting: with Muon and in bf16, fewer strategies and fewer compressed ones."""
        if setting.dtype == BF16:
            rings = (name + suffix for name in ("FSDP2", "ZeRO-1", "ZeRO-2", "ZeRO-3") for suffix in ("", NATIVE))
            ours = (name + suffix for name in cls.in_bf16 for suffix in ("", WIDE, LOCO, BOTH, ORDERED))
            return ["DDP", *settings.HSDP_REDUCTIONS, SHIPPED, *rings, *ours]
        if setting.optimizer != MUON:
            others = {*settings.HSDP_REDUCTIONS}
            others |= {name + NATIVE for name in RINGS if setting.name != "2x2-large-4"}
            return [name for name in cls.methods if name not in others and not name.endswith(WIDE)]
        few_bits = (name + suffix for name in ("NIG", "NII", "III", "IIG") for suffix in (LOCO, BOTH))
        rings = (name + suffix for name in ("ZeRO-1", "ZeRO-2") for suffix in ("", NATIVE))
        return [*rings, "ZeRO-3", "ZeRO-3 defaults", *STRATEGIES, *few_bits]


class PausedMeasurement(Measurement):
    """Compute is emulated: blocks sleep. On a device, the reductions of FSDP2 and of ZeRO's stages overlap with the
    compute that follows in the same backward. On gloo the host waits for them, so blocks sleep less after one."""

    rounds = 2
    reductions: ClassVar = (
        (rings, "ring_reduce_scatter"),
        (DeepSpeedZeroOptimizer, "allreduce_bucket"),
        (_fsdp_param_group, "foreach_reduce"),
    )

    def measure(self) -> list[Row]:
        with ExitStack() as stack:
            for owner, name in self.reductions:
                stack.enter_context(mock.patch.object(owner, name, self._overlap_with_compute(getattr(owner, name))))
            return super().measure()

    def _overlap_with_compute(self, reduction: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            ahead, begin = self.pauses.ahead, time.perf_counter()
            result = reduction(*args, **kwargs)
            # Not +=, which would count a reduction inside this one twice.
            self.pauses.ahead = ahead + time.perf_counter() - begin
            return result

        return timed

    def make_workload(self) -> Workload:
        _, width, hidden = SIZES[self.setting.size]
        steps, ranks = self.setting.accumulation, self.setting.ranks_per_node
        return Workload.overlapping(steps, ranks, self.make_model, 2 * width * hidden)

    def make_model(self) -> Blocks:
        return make_blocks(*SIZES[self.setting.size], self.pauses)

    def pause(self, micro_batch: float, forward: float = 1 / (1 + BACKWARD)) -> None:
        """Make a micro-batch compute for these seconds, of which its forward takes a share."""
        block = micro_batch / SIZES[self.setting.size][0]
        self.pauses.forward, self.pauses.backward = forward * block, (1 - forward) * block

    def turn(self, method: Method) -> Turn:
        return self.turns.steps_in_a_row(method, self.args.steps)

    @staticmethod
    def skipped(setting: Setting, method: str) -> float:
        """Return the formula's bytes of the block that ZeRO-3 keeps, with p = G, from a forward to its backward."""
        phases = STRATEGIES[method].phases(setting.sizes, setting.states)
        gathers = [phase for phase in phases if phase.each_micro_step and phase.kind == Direction.GATHER]
        gathered = setting.accumulation * sum(phase.each_micro_step * phase.volume.inter for phase in gathers)
        return gathered * setting.ranks_per_node / (2 * SIZES[setting.size][0])


class OverlapMeasurement(PausedMeasurement):
    """Overlap of communication between nodes with compute, which is emulated: blocks sleep. W, the seconds in which a
    link carries two hops of the model, is ``ratio`` times the compute of a micro-batch."""

    file = "overlap.csv"
    settings = settings.OVERLAP
    methods = (*(name for name in PEERS if name in (*RINGS, "DDP", "HSDP", "HSDP kept")), *STRATEGIES)
    steps = 2
    keys: ClassVar = {"paro_overlap_updates": True}
    described: ClassVar = {"streams": False, "overlap": True, "overlap_updates": True}
    probes = True

    def points(self) -> list[tuple[float | None, dict[str, Any]]]:
        ratios = self.args.ratios or settings.RATIOS
        return [(mbit, {"wire_of_compute": ratio}) for mbit in self.setting.mbit for ratio in ratios]

    def at(self, mbit: float | None, more: dict[str, Any]) -> list[Row]:
        self.pause(self.wire(self.setting) / more["wire_of_compute"])
        return super().at(mbit, more)

    @staticmethod
    def wire(setting: Setting) -> float:
        """Return W."""
        volume = STRATEGIES["NIG"].volume(setting.sizes, setting.states, setting.accumulation)
        return volume.inter * setting.ranks_per_node * 8 / ((setting.mbit[0] or math.inf) * 1e6)

    def complete(self, row: Row, rates: Rates | None) -> None:
        super().complete(row, rates)
        assert rates is not None
        row.more["payload_mbit"] = rates.gather.inter.bandwidth * self.setting.ranks_per_node * 8 / 1e6
        if row.formula_bytes is not None:
            row.formula_bytes -= self.skipped(self.setting, row.method)


class PaperMeasurement(PausedMeasurement):
    """The paper's comparisons. Compute takes as long, relative to the baseline's communication, as in the paper."""

    file = paper.FILE
    settings = paper.EMULATED
    methods = tuple(dict.fromkeys(method for name in paper.CASES for method in paper.compared(name)))
    slack = 8000.0  # of norms, for example
    bytes_bound, ratio_bound = 0.08, 0.1  # 16 nodes have many small messages

    def __init__(self, setting: Setting, args: argparse.Namespace) -> None:
        super().__init__(setting, args)
        self.case, self.baseline = paper.CASES[setting.name], paper.compared(setting.name)[0]
        self.names = [name for name in self.names if name in paper.compared(setting.name)]

    def make_model(self) -> Blocks:
        if self.setting.lora:
            return make_adapted_blocks(*SIZES[self.setting.size], 1, self.pauses)
        model = super().make_model()
        if self.case.regime == "partial":  # the first layer, 1/16: a backward runs through all blocks
            model.requires_grad_(False)
            next(model.parameters()).requires_grad_()
        return model

    def make_methods(self) -> Iterator[Method]:
        yield from super().make_methods()
        if paper.SHIPPED_2 in self.names:
            zero = {"stage": 2, **WHOLE, "use_multi_rank_bucket_allreduce": True}
            yield Engine(self.workload, paper.SHIPPED_2, zero, native=True)

    def at(self, mbit: float | None, more: dict[str, Any]) -> list[Row]:
        assert mbit is not None
        self.turns.limit(mbit)
        more["link_of_compute"] = self.case.link_of_compute(self.baseline)
        link = self.flat_bytes(self.made[self.baseline]) * self.turns.headers() * 8 / (mbit * 1e6)
        due, forward = link / more["link_of_compute"], 2 / self.case.flops
        self.pause(due / self.setting.accumulation, forward)
        awake = statistics.median(self.turn(self.compute).seconds) - due
        self.pause(max(0.0, due - awake) / self.setting.accumulation, forward)
        return super().at(mbit, more)

    def flat_bytes(self, method: Method) -> float:
        """Return the bytes that a node receives in a step of a stage, whose collectives are over all ranks."""
        sizes = self.setting.sizes
        rates = Rates.of_links(sizes, sizes.group_size, 1.0, 1.0)  # bytes do not depend on them
        nbytes = paper.predicted(method.name, sizes, self.describe(method), rates).volume.inter * sizes.group_size
        nbytes -= self.skipped(self.setting, "GGG") if method.name == "ZeRO-3" else 0.0
        return nbytes * (1 - 1 / sizes.ranks) / (1 - 1 / sizes.groups)

    def complete(self, row: Row, rates: Rates | None) -> None:
        super().complete(row, rates)
        if row.formula_bytes is None:
            row.formula_bytes = self.flat_bytes(self.made[row.method])

    @classmethod
    def problems(cls, rows: Sequence[Row]) -> list[str]:
        base = {row.method: row for row in rows}[paper.compared(rows[0].setting)[0]]
        assert base.mbit is not None
        apart = base.link_bytes * 8 / (base.mbit * 1e6) / base.compute / base.more["link_of_compute"] - 1
        wrong = [f"communication to compute is {apart:+.1%} from the paper's"] if abs(apart) > cls.ratio_bound else []
        return super().problems(rows) + wrong


class NetworkMeasurement(Measurement):
    """Seconds per step over the rate of the link, of a small model whose micro-batches are large enough to compute."""

    file = network.FILE
    settings = settings.NETWORK
    methods = network.METHODS
    stock = network.METHODS[0]
    batch_rows = 128
    short, most = 1.0, 7


class OuterMeasurement(PausedMeasurement):
    """An outer optimizer between two nodes, compared with methods that communicate in every step; compute is emulated.
    Its turn is a period of H steps that is not timed, and a timed one, of which its step is the mean."""

    file = "outer_cluster.csv"
    settings = settings.OUTER
    exact, peer = "III outer, 32 bits", "FSDP2 outer"
    outer: ClassVar[dict[str, dict[str, Any]]] = {  # of III
        "III outer": {"bits": 4},
        "III outer, streaming": {"bits": 4, "fragments": 5, "delay": 2},
        exact: {"bits": 32},
    }
    methods = ("NIG" + BOTH, "DDP", "HSDP", *outer, peer)
    keys: ClassVar = {"paro_overlap_updates": True}
    sgd: ClassVar = {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    aligned = 2  # steps into a period where turns begin: what has left at its end is used before
    element: ClassVar = {4: 0.5 + 2 / 128, 32: 4.0}  # bytes that cross
    bytes_bound, parity = 0.02, 1e-4

    def make_methods(self) -> Iterator[Method]:
        yield from super().make_methods()
        for name, keys in self.outer.items():
            if name in self.names:
                zero = {"paro_strategy": "III", "paro_group_size": self.setting.ranks_per_node}
                section = {"steps": self.args.every, **self.sgd, **keys}
                yield Ours(self.workload, {**zero, "paro_outer_optimizer": section}, name)
        if self.peer in self.names:
            yield OuterFSDP2(self.workload, self.peer, self.args.every, self.sgd)

    def compare(self) -> dict[str, float]:
        """Return the difference of outer weights to the peer's after one period; and align turns with periods."""
        outer = {name: method for name, method in self.made.items() if "outer" in name}
        for method in outer.values():
            self.turns.take(method, self.args.every - WARM_UP_STEPS)
        first = {name: outer[name] for name in (self.peer, *self.outer) if name in outer}
        by_method = differences(first) if self.peer in first else {}
        for method in outer.values():
            self.turns.take(method, self.aligned)
        self.pause(self.args.pause)
        return by_method

    def turn(self, method: Method) -> Turn:
        if "outer" not in method.name:
            return super().turn(method)
        turn = self.turns.steps_in_a_row(method, self.args.every, self.args.every)
        return turn._replace(seconds=[statistics.mean(turn.seconds)])

    def complete(self, row: Row, rates: Rates | None) -> None:
        super().complete(row, rates)
        outer, nodes = "outer" in row.method, self.setting.nodes
        if outer:
            numel, bits = self.setting.states.parameters / 4, self.outer.get(row.method, {"bits": 32})["bits"]
            row.formula_bytes = 2 * (nodes - 1) / nodes * numel * self.element[bits] / self.args.every
        row.more |= {"outer_every": self.args.every, "seconds_pause": self.args.pause}
        row.more["steps_of_a_turn"] = self.args.every if outer else self.args.steps

    @classmethod
    def problems(cls, rows: Sequence[Row]) -> list[str]:
        sent = [(row.method, row.bytes_between / row.formula_bytes) for row in rows if row.formula_bytes]
        messages = [
            f"{m} sends {share:.3f} of the formula's bytes" for m, share in sent if abs(share - 1) > cls.bytes_bound
        ]
        apart = [row for row in rows if row.method == cls.exact and not row.difference < cls.parity]
        return messages + [f"{row.method} is {row.difference:.1e} from {cls.peer}" for row in apart]
