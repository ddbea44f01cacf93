# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner predicts for large models on many GPUs. Predictions, not measurements: no GPU takes part.

    python -m tests.perf.predictions at_scale
    python -m tests.perf.predictions predicted_clusters --csv tests/perf/results/predicted_clusters.csv
    python -m tests.perf.predictions predicted_host_parameters --csv tests/perf/results/predicted_host_parameters.csv

*at_scale*: 7B and 65B on nodes of 8 GPUs, with NVLink of 300 GB/s and 200 Gbit/s of network a node, half of an A100's
312 TFLOPS, bf16 with Adam; in brackets GB of model states and what a step holds besides on each rank.

*predicted_clusters*: up to 16,384 GPUs of the clusters of ``clusters/*.json``, in groups of a node. Each step has 16 M
tokens: with more GPUs a GPU has fewer micro-batches of up to 4,096 tokens, and so less compute between two boundaries.
A collective between k groups takes k - 1 steps of the cluster's latency.

*predicted_host_parameters*: 70B on four nodes of eight GPUs that may not hold it, with parameters on the devices and
in host memory, for LoRA and for full training with optimizer states in host memory. Of a GPU's memory seven tenths are
for model states. Inside a node a GPU receives 200 Gbit/s, as over PCIe 4.0 x16, and copies 12 GB/s from host memory,
and as much back, half of what its lanes carry, since GPUs share the memory of their socket. Copies of gradients to an
offloaded optimizer, and its time, are the same for all methods, and not in these figures.

Communication, and copies, run under compute as far as they can, of the plain stages as well.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deepspeed_ext.planner.choice import plan
from deepspeed_ext.planner.clusters import Cluster, read_cluster
from deepspeed_ext.planner.cost import BUCKET, Experts, Model, Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.host import HostParameters
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, full_bucket
from tests.perf.lib.records import append_rows

FLOPS = 6  # of each parameter for a token, forward and backward; recomputation is not counted
FETCHED = 10**8  # parameters gathered at a time
Row = dict[str, Any]


def lines_of(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table in Markdown."""
    first, *others = [f"| {' | '.join(line)} |".replace("|  |", "| |", 1) for line in (header, *lines)]
    return "\n".join([first, "|---" * len(header) + "|", *others])


# At scale #########################################################################################

SCALE_MODELS = {"7B": 7 * 10**9, "65B": 65 * 10**9}
TRAINABLE = {"full": 1.0, "partial (1/16)": 1 / 16, "PEFT (3/1000)": 3 / 1000}  # the three regimes of the paper
SCALE_RANKS = (32, 64, 128, 1024)
SCALE_METHODS = ("ZeRO-1", "ZeRO-2", "NNG", "NIG", "NGG", "ING", "III", "IIG", "IGG", "GGG")
PER_NODE = 8


def at_scale() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield a title and a table for each model and regime."""
    for name, parameters in SCALE_MODELS.items():
        for regime, share in TRAINABLE.items():
            yield f"**{name}, {regime}**, predicted, times plain ZeRO-3's speed", _scale_table(parameters, share), []


def _scale_table(parameters: int, share: float) -> str:
    count = int(parameters * share)
    compute = (4 + 2 * share) / 6 * FLOPS * parameters * 4096 / 156e12
    cells: dict[str, list[str]] = {name: [] for name in (*SCALE_METHODS, "chosen")}
    for ranks in SCALE_RANKS:
        sizes = GroupSizes(ranks, PER_NODE)
        rates = Rates.of_links(sizes, PER_NODE, 2400, 200, 20e-6, 1500e9)
        states = ModelStates.of(parameters, count)
        model = Model(states, accumulation=4, compute=compute, fetches=parameters // FETCHED)
        found = plan(sizes, model, rates, 64e9)
        by_name = {one.name: one for one in (*found.predictions, *found.plain)}
        for name in SCALE_METHODS:
            one = by_name[name]
            speed = by_name["ZeRO-3"].total_seconds / one.total_seconds
            mark = "" if found.fits(one) else ", too large"
            cells[name].append(f"{speed:.2f} ({one.total_memory / 1e9:.0f} GB{mark})")
        cells["chosen"].append(found.choice.strategy if found.choice else "none")
    return lines_of(["", *(f"{ranks} GPUs" for ranks in SCALE_RANKS)], [[name, *row] for name, row in cells.items()])


# Clusters #########################################################################################

CLUSTERS = Path(__file__).parent / "clusters"
RANKS = (64, 256, 1024, 4096, 16384)
METHODS = ("ZeRO-1", "ZeRO-3", "NNG", "NIG", "III", "IIG", "IGG")
STEP_TOKENS, MICRO_TOKENS = 1 << 24, 4096


@dataclass(frozen=True)
class Trained:
    """A model: parameters that all tokens use, those of experts, and of these the share that a token uses."""

    dense: int
    experts: int = 0
    used: float = 0.0
    expert_parallel: int = 8

    def model(self, ranks: int, cluster: Cluster) -> Model:
        """Return what a rank trains in a step."""
        assert cluster.tflops is not None
        tokens = min(MICRO_TOKENS, STEP_TOKENS // ranks)
        active = self.dense + self.used * self.experts
        states, held = ModelStates.of(self.dense), ModelStates.of(self.experts // self.expert_parallel)
        experts = Experts(self.expert_parallel, held, fetches=max(1, self.experts // self.expert_parallel // FETCHED))
        elements = self.dense + self.experts // self.expert_parallel
        return Model(
            states,
            accumulation=STEP_TOKENS // (ranks * tokens),
            compute=FLOPS * active * tokens / (cluster.tflops * 1e12),
            fetches=max(1, self.dense // FETCHED),
            bucket=full_bucket(BUCKET, elements),
            overlap_updates=True,
            experts=(experts,) if self.experts else (),
        )


MODELS = {
    "7B": Trained(7 * 10**9),
    "70B": Trained(70 * 10**9),
    "405B": Trained(405 * 10**9),
    "235B mixture (22B active)": Trained(8 * 10**9, 227 * 10**9, 14 / 227),
}


def predicted_clusters() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield a title, a table and rows for each cluster and model."""
    for path in sorted(CLUSTERS.glob("*.json")):
        for name in MODELS:
            rows = [{"cluster": path.stem, **row} for row in _on_cluster(name, read_cluster(path))]
            title = f"**{name}, {path.stem}**, predicted, times plain ZeRO-3's speed"
            yield title, _cluster_table(rows), rows


def _on_cluster(name: str, cluster: Cluster) -> Iterator[Row]:
    for ranks in RANKS:
        sizes = GroupSizes(ranks, cluster.ranks_per_node)
        found = plan(sizes, MODELS[name].model(ranks, cluster), cluster.rates(sizes), cluster.budget)
        by_name = {one.name: one for one in (*found.predictions, *found.plain)}
        for method in METHODS:
            one = by_name[method]
            yield {
                "kind": "predicted",
                "model": name,
                "ranks": ranks,
                "method": method,
                "seconds": f"{one.total_seconds:.4g}",
                "compute_seconds": f"{one.seconds['compute']:.4g}",
                "times_zero3": f"{by_name['ZeRO-3'].total_seconds / one.total_seconds:.2f}",
                "memory_gb": f"{one.total_memory / 1e9:.1f}",
                "fits": found.fits(one),
                "chosen": found.choice is not None and found.choice.strategy == method,
            }


def _cluster_table(rows: Sequence[Row]) -> str:
    """Return the speed of each method times plain ZeRO-3's; in brackets where it does not fit."""
    lines = []
    for method in METHODS:
        some = [row for row in rows if row["method"] == method]
        cells = [row["times_zero3"] if row["fits"] else f"({row['times_zero3']})" for row in some]
        lines.append(["III (HSDP)" if method == "III" else method, *cells])
    ours = [row for row in rows if row["method"] == "IIG"]
    lines.append(
        ["IIG: of a step compute", *(f"{float(r['compute_seconds']) / float(r['seconds']):.0%}" for r in ours)]
    )
    return lines_of(["", *(f"{ranks:,}" for ranks in RANKS)], lines)


# Parameters in host memory ########################################################################

HOST_SIZES = GroupSizes(32, PER_NODE)
LINKS = (10, 25, 100)  # Gbit/s to a node
GPUS, SHARE = (24, 40, 80), 0.7  # GB, and what of it is for model states
PARAMETERS, LORA, LAYER = 70 * 10**9, 2 * 10**8, 10**9
HOST_METHODS = {"LoRA": ("ING", "IGG", "GNG", "GGG"), "full": ("IIG", "IGG", "GIG", "GGG")}


def predicted_host_parameters() -> Iterator[tuple[str, str, list[Row]]]:
    """Yield a title, a table and rows for each kind of training."""
    for kind in HOST_METHODS:
        rows = [row for gbps in LINKS for row in _over_link(kind, gbps)]
        title = f"**{kind}**, predicted; in brackets times the speed of ZeRO-3 with offload_param"
        yield title, _host_table(rows), rows


def _host_model(kind: str, on_host: bool) -> Model:
    states = ModelStates.of(PARAMETERS, LORA if kind == "LoRA" else None)
    held = replace(states, parameters=0.0) if on_host else states
    return Model(
        states,
        accumulation=4,
        compute=(4 * PARAMETERS + 2 * states.gradients / 2) * 4096 / 100e12,
        fetches=PARAMETERS // LAYER,
        largest_layer=2.0 * LAYER,
        held=held if kind == "LoRA" else replace(held, optimizer=0.0),
        host=HostParameters() if on_host else None,
    )


def _over_link(kind: str, gbps: int) -> list[Row]:
    rates = Rates.of_links(HOST_SIZES, PER_NODE, 200.0, gbps, memory=float("inf"), host=12e9)
    found: list[tuple[str, bool, Prediction]] = []
    for on_host in (False, True):
        model = _host_model(kind, on_host)
        found += [(name, on_host, predict(STRATEGIES[name], HOST_SIZES, model, rates)) for name in HOST_METHODS[kind]]
        found.append(("ZeRO-3", on_host, predict_plain_stage("GGG", HOST_SIZES, model, rates)))
    *_, (_, _, zero3) = found
    return [
        {
            "kind": "predicted",
            "trained": kind,
            "gbps": gbps,
            "method": name,
            "parameters": "host" if on_host else "device",
            "seconds": f"{one.total_seconds:.4g}",
            "between_seconds": f"{one.seconds['between']:.4g}",
            "copies_seconds": f"{one.seconds['host']:.4g}",
            "times_zero3_offload": f"{zero3.total_seconds / one.total_seconds:.1f}",
            "device_gb": f"{one.total_memory / 1e9:.1f}",
            "host_gb": f"{one.host / 1e9:.1f}",
            "fits": " ".join(str(gpu) for gpu in GPUS if one.total_memory <= SHARE * gpu * 1e9) or "none",
        }
        for name, on_host, one in found
    ]


def _host_table(rows: Sequence[Row]) -> str:
    """Return seconds of a step over each link, a line for each method and place."""
    lines = []
    for key in dict.fromkeys((row["method"], row["parameters"]) for row in rows):
        some = [row for row in rows if (row["method"], row["parameters"]) == key]
        cells = [f"{row['seconds']} s ({row['times_zero3_offload']})" for row in some]
        lines.append([*key, *(some[0][name] for name in ("device_gb", "host_gb", "fits")), *cells])
    header = ["", "parameters", "GB on a device", "on the host", "fits GPUs of", *(f"{gbps} Gbit/s" for gbps in LINKS)]
    return lines_of(header, lines)


PREDICTIONS = {one.__name__: one for one in (at_scale, predicted_clusters, predicted_host_parameters)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=PREDICTIONS)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row per prediction")
    args = parser.parse_args()
    kept = []
    for title, table, rows in PREDICTIONS[args.what]():
        print(f"\n{title}\n\n{table}")
        kept += rows
    if args.csv and kept:
        append_rows(args.csv, kept)


if __name__ == "__main__":
    main()
