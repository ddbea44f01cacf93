# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tables of the how-to pages, predicted by the planner. Predictions, not measurements: no GPU takes part. Nodes have
eight GPUs. A GPU receives 2,400 Gbit/s inside its node, reaches 156 TFLOPS (half of an A100's), and has 64 GB for
model states. Training is in bf16 with Adam; a micro-batch has 4,096 tokens on each GPU, and a step has four
micro-batches unless a table says otherwise. Recomputation and attention are not counted."""

from collections.abc import Sequence
from dataclasses import replace

from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.compression import COMPRESSIONS
from deepspeed_ext.planner.costs import Prediction
from deepspeed_ext.planner.memory import BUCKET, Model
from deepspeed_ext.planner.rates import GIGA, NETWORK_STEP
from deepspeed_ext.strategy import GroupSizes, ModelStates, full_bucket, hyphenate
from deepspeed_ext.tools.plan.saves import Saves, predict_saves
from tests.perf.lib.predictions import FETCHED, FLOPS, MICRO_TOKENS, PER_NODE, Cluster, Trained
from tests.perf.lib.records import Table

BUDGET = 64 * GIGA
GBPS = (1, 10, 25, 100)  # to a node
SIZE, LORA = 8 * 10**9, 42 * 10**6  # adapters of rank 16 beside each linear layer of a Llama with 8B parameters
LARGE, LARGE_LORA = 70 * 10**9, 2 * 10**8
FOUR_BITS = 0.5  # bytes of a packed parameter
BATCH = 1152  # sequences of 1,024 tokens, four in a micro-batch
SEQUENCE_PARALLEL = 8
MIXTURE = Trained(1_500_000_000, 29_000_000_000, 1 / 16)  # 30B parameters, 3.3B active
DISK, COPIES, FAILURES = 2 * GIGA, 12 * GIGA, 24 * 3600.0  # of a node; of a GPU to its host; seconds


def cluster(gbps: float) -> Cluster:
    return Cluster(2400, gbps, NETWORK_STEP, 1500 * GIGA, 156)


def dense(
    parameters: int, trained: int | None = None, *, accumulation: int = 4, tokens: int = MICRO_TOKENS, width: float = 2
) -> Model:
    """Return a model without experts, of which ``trained`` parameters are trained, by default all; a frozen one has
    ``width`` bytes. A micro-batch has ``tokens`` on each GPU."""
    elements = parameters if trained is None else trained
    states = ModelStates.of(parameters, trained)
    if trained is not None:
        states = replace(states, parameters=width * parameters)
    return Model(
        states,
        accumulation=accumulation,
        compute=(FLOPS - 2 + 2 * elements / parameters) * parameters * tokens / (cluster(1).tflops * 1e12),
        fetches=parameters // FETCHED,
        bucket=full_bucket(BUCKET, elements),
    )


def planned(nodes: int, model: Model, gbps: float) -> tuple[Plan, dict[str, Prediction]]:
    """Return the plan for some nodes, and its predictions by name, those of plain stages included."""
    sizes = GroupSizes(nodes * PER_NODE, PER_NODE)
    outcome = plan(sizes, model, cluster(gbps).rates(sizes), BUDGET, COMPRESSIONS)
    return outcome, {row.name: row for row in (*outcome.predictions, *outcome.plain)}


def memory(outcome: Plan, row: Prediction) -> str:
    """Return the GB that a GPU holds, in brackets if they do not fit."""
    text = f"{row.total_memory / GIGA:.3g}"
    return text if outcome.fits(row) else f"({text})"


def seconds(row: Prediction) -> str:
    return f"{row.total_seconds:.3g}"


def relative_to_one_node(model: Model, names: Sequence[str]) -> Table:
    """Return seconds of a step on two nodes, and tokens per second relative to ZeRO-3 on one node."""
    alone, stages = planned(1, model, 1)
    one_node = stages["ZeRO-3"]
    lines = {name: [hyphenate(name)] for name in names}
    for gbps in GBPS:
        outcome, rows = planned(2, model, gbps)
        for name, line in lines.items():
            row = rows[name]
            cell = f"{seconds(row)} s ({2 * one_node.total_seconds / row.total_seconds:.2f})"
            line[1:] = [memory(outcome, row), *line[2:], cell]
    first = ["ZeRO-3 on one node", memory(alone, one_node), *[f"{seconds(one_node)} s (1.00)"] * len(GBPS)]
    return ["", "GB per GPU", *(f"{gbps} Gbit/s" for gbps in GBPS)], [first, *lines.values()]


def slow_network(kind: str) -> Table:
    """Return ``relative_to_one_node`` of full training, of LoRA, or of QLoRA."""
    if kind == "full":
        names = ("ZeRO-3", "ZeRO-2", "ZeRO-1", "NIG", "IIG", "IIG" + COMPRESSIONS[-1].label)
        return relative_to_one_node(dense(SIZE), names)
    width = FOUR_BITS if kind == "QLoRA" else 2
    return relative_to_one_node(dense(SIZE, LORA, width=width), ("ZeRO-3", "ZeRO-2", "ING", "NIG"))


def accumulation() -> Table:
    """Return times ZeRO-3's speed on two nodes, by micro-batches per step."""
    counts = (1, 4, 16)
    lines = {name: [hyphenate(name)] for name in ("ZeRO-2", "NIG", "IIG")}
    for count in counts:
        _, rows = planned(2, dense(SIZE, accumulation=count), 25)
        for name, line in lines.items():
            line.append(f"{rows['ZeRO-3'].total_seconds / rows[name].total_seconds:.2f}")
    return ["accumulation", *map(str, counts)], list(lines.values())


def number_of_gpus() -> Table:
    """Return GB per GPU and seconds of a step of one batch on one to four nodes."""
    names, lines = ("ZeRO-3", "IIG", "NIG"), []
    for nodes in (4, 3, 2, 1):
        steps, remainder = divmod(BATCH, 4 * PER_NODE * nodes)
        assert not remainder
        outcome, rows = planned(nodes, dense(SIZE, accumulation=steps), 25)
        cells = [f"{memory(outcome, rows[name])} GB, {seconds(rows[name])} s" for name in names]
        lines.append([f"{nodes} ({nodes * PER_NODE})", str(steps), *cells])
    return ["nodes (GPUs)", "micro-batches per step", *map(hyphenate, names)], lines


def lora() -> Table:
    """Return memory, bytes from other nodes, and seconds of LoRA on a large model, on two nodes."""
    lines = []
    by_rate = {gbps: planned(2, dense(LARGE, LARGE_LORA), gbps) for gbps in (10, 100)}
    for name in ("ZeRO-3", "GNG", "ING", "NIG"):
        outcome, rows = by_rate[10]
        row = rows[name]
        times = [seconds(by_name[name]) for _, by_name in by_rate.values()]
        lines.append([hyphenate(name), memory(outcome, row), f"{row.volume.inter / GIGA:.3g}", *times])
    columns = [f"s at {gbps} Gbit/s" for gbps in by_rate]
    return ["", "GB per GPU", "GB from other nodes, per GPU and step", *columns], lines


def ulysses() -> Table:
    """Return seconds of a step on four nodes, by the length of sequences that the GPUs of a node share."""
    lengths = (32_768, 131_072, 524_288)
    lines = []
    for count in (1, 4):
        for name in ("ZeRO-3", "IIG"):
            models = [dense(SIZE, accumulation=count, tokens=length // SEQUENCE_PARALLEL) for length in lengths]
            lines.append([hyphenate(name), str(count), *[seconds(planned(4, model, 25)[1][name]) for model in models]])
    return ["", "accumulation", *(f"{length:,} tokens" for length in lengths)], lines


def mixture() -> Table:
    """Return memory and seconds of a mixture on four nodes, with its experts as dense parameters and with AutoEP."""
    sizes = GroupSizes(4 * PER_NODE, PER_NODE)
    rates = (25, 100)
    with_experts = replace(MIXTURE.model(sizes.ranks, cluster(1)), accumulation=4, overlap_updates=False)
    as_dense = replace(dense(MIXTURE.dense + MIXTURE.experts), compute=with_experts.compute)
    lines = []
    for model, label, names in (
        (as_dense, "", ("ZeRO-3", "IIG")),
        (with_experts, "AutoEP, ", ("ZeRO-2", "NIG", "IIG")),
    ):
        outcomes = [planned(4, model, gbps) for gbps in rates]
        for name in names:
            row = outcomes[0][1][name]
            times = [seconds(rows[name]) for _, rows in outcomes]
            lines.append([label + hyphenate(name), memory(outcomes[0][0], row), *times])
    return ["", "GB per GPU", *(f"s at {gbps} Gbit/s" for gbps in rates)], lines


def saving() -> Table:
    """Return seconds for which a save stops the training on four nodes at 100 Gbit/s."""
    lines = []
    saves = Saves(FAILURES, PER_NODE, DISK)
    for size, names in ((SIZE, ("NIG", "IIG")), (LARGE, ("IIG",))):
        model = dense(size)
        outcome, rows = planned(4, model, 100)
        for name in names:
            cost = predict_saves(saves, rows[name], outcome.sizes, model, replace(outcome.rates, host=COPIES)).saves
            cells = [f"{cost.total / GIGA:.0f}", f"{cost.of_first_rank / GIGA:.3g}"]
            cells += [f"{cost.synchronous.held:.3g}", f"{cost.asynchronous.held:.2g}"]
            lines.append([f"{size // 10**9}B, {hyphenate(name)}", *cells])
    return ["", "GB of files", "GB of the first rank", "stops for, s", "asynchronous, s"], lines


def going_back() -> Table:
    """Return memory and seconds under strategies and under the stages that load their checkpoints, on two nodes."""
    lines = []
    by_rate = {gbps: planned(2, dense(SIZE), gbps) for gbps in (25, 100)}
    for names in (("NNG", "ZeRO-1"), ("NIG", "ZeRO-2"), ("IIG", "ZeRO-3")):
        held = [memory(by_rate[25][0], by_rate[25][1][name]) for name in names]
        cells = [[seconds(rows[name]) for name in names] for _, rows in by_rate.values()]
        lines.append([*map(hyphenate, names), *(f"{before} -> {after}" for before, after in (held, *cells))])
    return ["strategy", "stage", "GB per GPU", *(f"s at {gbps} Gbit/s" for gbps in by_rate)], lines
