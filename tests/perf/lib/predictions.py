# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predictions of the planner for large models on many GPUs. These are not measurements: no GPU is used.

*at_scale*: 7B and 65B on nodes of 8 GPUs, with NVLink of 300 GB/s and 200 Gbit/s of network per node, half of an
A100's 312 TFLOPS, bf16 with Adam; in parentheses GB per rank.

*expected*: 7B on 4 nodes of 8 GPUs, at several rates of the network, at accumulation 1 and 4; otherwise as *at_scale*.

*predicted_clusters*: up to 16,384 GPUs of ``CLUSTERS``, in groups of a node. Each step has 16 M tokens: with more GPUs
a GPU has fewer micro-batches of up to 4,096 tokens, and so less compute between two boundaries.

*predicted_host_parameters*: 70B on four nodes of eight GPUs, with parameters on the devices and in host memory, for
LoRA and for full training with optimizer states in host memory. Inside a node a GPU receives 200 Gbit/s, as over PCIe
4.0 x16, and copies 12 GB/s from and to host memory, half of the rate of its lanes, because GPUs share the memory of
their socket. Gradients and time of an offloaded optimizer are the same for all methods, and are left out.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.costs import Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.memory import BUCKET, HostParameters, Model, Part
from deepspeed_ext.planner.rates import GIGA, MICRO, Latencies, Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, full_bucket, hyphenate
from tests.perf.lib.records import Table

FLOPS = 6  # of each parameter for a token, forward and backward; recomputation is not counted
FETCHED = 10**8  # parameters gathered at a time
PER_NODE = 8

SCALE_MODELS = {"7B": 7 * 10**9, "65B": 65 * 10**9}
TRAINABLE = {"full": 1.0, "partial": 1 / 16, "PEFT": 3 / 1000}  # the three regimes of the paper
SCALE_RANKS = (32, 64, 128, 1024)
SCALE_METHODS = ("ZeRO-1", "ZeRO-2", "NNG", "NIG", "NGG", "ING", "III", "IIG", "IGG", "GGG")

EXPECTED_SIZES, EXPECTED_PARAMETERS = GroupSizes(32, PER_NODE), SCALE_MODELS["7B"]
EXPECTED_GBPS = (10, 25, 100, 200, 400)  # of a node
EXPECTED_ACCUMULATION = (1, 4)
PEERS = ("ZeRO-3", "III")  # III is HSDP


def speeds(plans: Plan, names: Iterable[str]) -> dict[str, tuple[float, Prediction]]:
    by_name = {prediction.name: prediction for prediction in (*plans.predictions, *plans.plain)}
    return {name: (by_name["ZeRO-3"].total_seconds / by_name[name].total_seconds, by_name[name]) for name in names}


def scale_model(parameters: int, share: float, flops: float, accumulation: int) -> Model:
    """Return a model of which a share is trained, with ``flops`` of each parameter in a micro-batch."""
    states = ModelStates.of(parameters, int(parameters * share))
    return Model(states, accumulation=accumulation, compute=flops * parameters / 156e12, fetches=parameters // FETCHED)


def scale_rates(sizes: GroupSizes, gbps: float) -> Rates:
    """Return the rates of A100s with ``gbps`` of network per node."""
    return Rates.of_links(sizes, PER_NODE, 2400, gbps, Latencies.for_groups(sizes, PER_NODE), 1500e9)


def at_scale(parameters: int, share: float) -> Table:
    """Return the speed of each method relative to plain ZeRO-3, for a model of which a share is trained."""
    model = scale_model(parameters, share, (4 + 2 * share) * 4096, 4)
    cells: dict[str, list[str]] = {name: [] for name in (*SCALE_METHODS, "chosen")}
    for ranks in SCALE_RANKS:
        sizes = GroupSizes(ranks, PER_NODE)
        plans = plan(sizes, model, scale_rates(sizes, 200), 64e9)
        for name, (speed, prediction) in speeds(plans, SCALE_METHODS).items():
            mark = "" if plans.fits(prediction) else ", too large"
            cells[name].append(f"{speed:.2f} ({prediction.total_memory / 1e9:.0f} GB{mark})")
        cells["chosen"].append(plans.choice.strategy if plans.choice else "none")
    return ["", *(f"{ranks} GPUs" for ranks in SCALE_RANKS)], [[name, *row] for name, row in cells.items()]


def expected() -> Table:
    """Return the speeds of N-I-G and I-I-G, a line for each rate of the network; a cell has a speed for each peer."""
    sizes, header = EXPECTED_SIZES, ["Gbit/s per node"]
    lines = [[str(gbps)] for gbps in EXPECTED_GBPS]
    for accumulation in EXPECTED_ACCUMULATION:
        header += [f"{name}, accumulation {accumulation}" for name in ("N-I-G", "I-I-G")]
        model = scale_model(EXPECTED_PARAMETERS, 1.0, FLOPS * 4096, accumulation)
        for line, gbps in zip(lines, EXPECTED_GBPS, strict=True):
            prediction = plan(sizes, model, scale_rates(sizes, gbps), 64e9)
            seconds = {row.name: row.total_seconds for row in (*prediction.predictions, *prediction.plain)}
            for name in ("NIG", "IIG"):
                line.append(", ".join(f"{seconds[peer] / seconds[name]:.2f}" for peer in PEERS))
    return header, lines


def few_bits() -> Table:
    """Return how much faster LoCo makes a step; after the comma, LoCo and updates: a line for each number of GPUs."""
    methods = [(name, accumulation) for accumulation in EXPECTED_ACCUMULATION for name in ("NIG", "IIG")]
    few, lines = [Compression.parse(*keys) for keys in ((None, None), ({}, None), ({}, {}))], []
    for sizes in (GroupSizes(ranks, PER_NODE) for ranks in (32, 64, 128)):
        lines.append([str(sizes.ranks)])
        for name, accumulation in methods:
            model = scale_model(EXPECTED_PARAMETERS, 1.0, FLOPS * 4096, accumulation)
            where = sizes, model, CLUSTERS["100-gbit-per-node"].rates(sizes)
            exact, *others = (predict(STRATEGIES[name], *where, sent).total_seconds for sent in few)
            lines[-1].append(", ".join(f"{100 * (exact / seconds - 1):+.0f} %" for seconds in others))
    return ["GPUs", *(f"{hyphenate(name)}, accumulation {accumulation}" for name, accumulation in methods)], lines


# Clusters #########################################################################################


@dataclass(frozen=True)
class Cluster:
    """Nodes of eight GPUs; a GPU has 64 GB for model states."""

    intra_gbps: float
    inter_gbps: float  # of a node
    step: float  # seconds of a message over the network
    memory: float  # bytes/s of a GPU
    tflops: float  # reached

    def rates(self, sizes: GroupSizes) -> Rates:
        latencies = Latencies.for_groups(sizes, PER_NODE, self.step)
        return Rates.of_links(sizes, PER_NODE, self.intra_gbps, self.inter_gbps, latencies, self.memory)


CLUSTERS = {
    "100-gbit-per-node": Cluster(2400, 100, 20 * MICRO, 1500 * GIGA, 156),
    "400-gbit-per-gpu": Cluster(3600, 3200, 5 * MICRO, 3000 * GIGA, 400),
}
RANKS = (64, 256, 1024, 4096, 16384)
METHODS = ("ZeRO-1", "ZeRO-3", "NNG", "NIG", "III", "IIG", "IGG")
STEP_TOKENS, MICRO_TOKENS = 1 << 24, 4096


@dataclass(frozen=True)
class Trained:
    """A model: parameters that all tokens use, those of experts, and the share of these that a token uses."""

    dense: int
    experts: int = 0
    used: float = 0.0
    expert_parallel: int = 8

    def model(self, ranks: int, cluster: Cluster) -> Model:
        tokens = min(MICRO_TOKENS, STEP_TOKENS // ranks)
        active = self.dense + self.used * self.experts
        held = self.experts // self.expert_parallel  # of experts
        experts = Part(self.expert_parallel, ModelStates.of(held), fetches=max(1, held // FETCHED))
        return Model(
            ModelStates.of(self.dense),
            accumulation=STEP_TOKENS // (ranks * tokens),
            compute=FLOPS * active * tokens / (cluster.tflops * 1e12),
            fetches=max(1, self.dense // FETCHED),
            bucket=full_bucket(BUCKET, self.dense + held),
            overlap_updates=True,
            experts=(experts,) if self.experts else (),
        )


MODELS = {
    "7B": Trained(7 * 10**9),
    "70B": Trained(70 * 10**9),
    "405B": Trained(405 * 10**9),
    "mixture": Trained(8 * 10**9, 227 * 10**9, 14 / 227),  # 235B, 22B active
}


def on_cluster(name: str, model: str) -> Table:
    """Return the speed of each method relative to plain ZeRO-3; in parentheses if it does not fit."""
    cluster = CLUSTERS[name]
    lines = [["III (HSDP)" if method == "III" else method] for method in METHODS] + [["IIG: of a step compute"]]
    for ranks in RANKS:
        sizes = GroupSizes(ranks, PER_NODE)
        plans = plan(sizes, MODELS[model].model(ranks, cluster), cluster.rates(sizes), 64 * GIGA)
        by_name = speeds(plans, METHODS)
        for line, (speed, prediction) in zip(lines, by_name.values(), strict=False):
            line.append(f"{speed:.2f}" if plans.fits(prediction) else f"({speed:.2f})")
        _, iig = by_name["IIG"]
        lines[-1].append(f"{iig.seconds['compute'] / iig.total_seconds:.0%}")
    return ["", *(f"{ranks:,}" for ranks in RANKS)], lines


# Parameters in host memory ########################################################################

HOST_SIZES = GroupSizes(32, PER_NODE)
LINKS = (10, 25, 100)  # Gbit/s to a node
GPUS, SHARE = (24, 40, 80), 0.7  # GB, and what of it is for model states
PARAMETERS, LORA, LAYER = 70 * 10**9, 2 * 10**8, 10**9
HOST_METHODS = {"LoRA": ("ING", "IGG", "GNG", "GGG"), "full": ("IIG", "IGG", "GIG", "GGG")}


def _host_model(kind: str, on_host: bool) -> Model:
    states = ModelStates.of(PARAMETERS, LORA if kind == "LoRA" else None)
    device_states = replace(states, parameters=0.0) if on_host else states
    return Model(
        states,
        accumulation=4,
        compute=(4 * PARAMETERS + 2 * states.gradients / 2) * 4096 / 100e12,
        fetches=PARAMETERS // LAYER,
        largest_layer=2.0 * LAYER,
        held=device_states if kind == "LoRA" else replace(device_states, optimizer=0.0),
        host=HostParameters() if on_host else None,
    )


def host_parameters(kind: str) -> Table:
    """Return seconds of a step over each link, a line for each method and place; ZeRO-3 is last in each place."""
    lines_by_method: dict[tuple[str, bool], list[str]] = {}
    for gbps in LINKS:
        rates = Rates.of_links(HOST_SIZES, PER_NODE, 200, gbps, Latencies.for_groups(HOST_SIZES, PER_NODE), host=12e9)
        stock = predict_plain_stage("GGG", HOST_SIZES, _host_model(kind, True), rates).total_seconds
        for on_host in (False, True):
            model = _host_model(kind, on_host)
            for name in (*HOST_METHODS[kind], "ZeRO-3"):
                row, where = STRATEGIES.get(name), (HOST_SIZES, model, rates)
                prediction = predict(row, *where) if row else predict_plain_stage("GGG", *where)
                fits = " ".join(str(gpu) for gpu in GPUS if prediction.total_memory <= SHARE * gpu * 1e9) or "none"
                gigabytes = [f"{n / 1e9:.1f}" for n in (prediction.total_memory, prediction.host)]
                line = [name, "host" if on_host else "device", *gigabytes, fits]
                seconds = f"{prediction.total_seconds:.4g} s ({stock / prediction.total_seconds:.1f})"
                lines_by_method.setdefault((name, on_host), line).append(seconds)
    header = ["", "parameters", "GB on a device", "on the host", "fits GPUs of", *(f"{gbps} Gbit/s" for gbps in LINKS)]
    return header, list(lines_by_method.values())
