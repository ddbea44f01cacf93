# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner's timeline predicts for large models on 64 to 16,384 GPUs. Predictions: no GPU takes part.

    python -m tests.perf.predicted_clusters --csv tests/perf/results/predicted_clusters.csv

Data parallelism alone, on the clusters of ``clusters/*.json``, in groups of a node. Each step has 16 M tokens: with
more GPUs a GPU has fewer micro-batches of up to 4,096 tokens, and so less compute between two boundaries. bf16 with
Adam, DeepSpeed's default buckets; communication runs under compute as far as it can, of the plain stages as well. A
collective between k groups takes k - 1 steps of the cluster's latency.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed_ext.planner.choice import plan
from deepspeed_ext.planner.clusters import Cluster, read_cluster
from deepspeed_ext.planner.cost import BUCKET, Experts, Model
from deepspeed_ext.strategy import GroupSizes, ModelStates, full_bucket
from tests.perf.lib.records import RESULTS, append_rows

CLUSTERS = Path(__file__).parent / "clusters"
RANKS = (64, 256, 1024, 4096, 16384)
METHODS = ("ZeRO-1", "ZeRO-3", "NNG", "NIG", "III", "IIG", "IGG")
NAMES = {"III": "III (HSDP)"}
STEP_TOKENS, MICRO_TOKENS = 1 << 24, 4096
FLOPS = 6  # of each parameter for a token
FETCHED = 10**8  # parameters gathered at a time


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


def predict(name: str, cluster: Cluster) -> list[dict[str, Any]]:
    """Return a row for each number of ranks and method."""
    rows = []
    for ranks in RANKS:
        sizes = GroupSizes(ranks, cluster.ranks_per_node)
        model = MODELS[name].model(ranks, cluster)
        found = plan(sizes, model, cluster.rates(sizes), cluster.budget)
        by_name = {one.name: one for one in (*found.predictions, *found.plain)}
        for method in METHODS:
            one = by_name[method]
            rows.append(
                {
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
            )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the speed of each method times plain ZeRO-3's, in Markdown; in brackets where it does not fit."""
    columns = list(dict.fromkeys(row["ranks"] for row in rows))
    lines = [f"| | {' | '.join(f'{ranks:,}' for ranks in columns)} |", "|---" * (len(columns) + 1) + "|"]
    for method in METHODS:
        cells = [row["times_zero3"] if row["fits"] else f"({row['times_zero3']})" for row in _of(rows, method)]
        lines.append(f"| {NAMES.get(method, method)} | {' | '.join(cells)} |")
    spent = [f"{float(row['compute_seconds']) / float(row['seconds']):.0%}" for row in _of(rows, "IIG")]
    return "\n".join([*lines, f"| IIG: of a step compute | {' | '.join(spent)} |"])


def _of(rows: Sequence[dict[str, Any]], method: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["method"] == method]


def draw(found: dict[tuple[str, str], list[dict[str, Any]]], path: Path) -> None:
    """Draw seconds of a step against GPUs, a panel for each cluster and model."""
    from matplotlib import figure  # predictions need none

    names = list(dict.fromkeys(cluster for cluster, _ in found))
    drawing = figure.Figure(figsize=(14, 7), layout="constrained")
    axes = drawing.subplots(len(names), len(MODELS), sharex=True)
    for (cluster, name), rows in found.items():
        panel = axes[names.index(cluster)][list(MODELS).index(name)]
        for method in METHODS:
            some = [row for row in _of(rows, method) if row["fits"]]
            panel.plot([row["ranks"] for row in some], [float(row["seconds"]) for row in some], "o-", label=method)
        panel.set(xscale="log", yscale="log", title=f"{name}\n{cluster}, predicted")
        panel.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    drawing.supxlabel("GPUs")
    drawing.supylabel("seconds per step of 16 M tokens (predicted)")
    drawing.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row per prediction")
    parser.add_argument("--picture", type=Path, metavar="FILE", help=f"such as {RESULTS.name}/predicted_clusters.png")
    args = parser.parse_args()
    found = {}
    for path in sorted(CLUSTERS.glob("*.json")):
        for name in MODELS:
            rows = predict(name, read_cluster(path))
            found[path.stem, name] = rows
            print(f"\n**{name}, {path.stem}**, predicted, times plain ZeRO-3's speed\n\n{table(rows)}")
    if args.csv:
        append_rows(args.csv, [{"cluster": key[0], **row} for key, rows in found.items() for row in rows])
    if args.picture:
        draw(found, args.picture)


if __name__ == "__main__":
    main()
