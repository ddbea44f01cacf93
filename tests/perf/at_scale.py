# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner predicts for large models on many GPUs. Predictions, not measurements: no GPU takes part.

A table in Markdown for each model: speed relative to plain ZeRO-3, and in brackets GB of model states and what a step
holds besides on each rank. Nodes of 8 GPUs; by default NVLink of 300 GB/s and 200 Gbit/s of network a node, half of an
A100's 312 TFLOPS, bf16 with Adam. Communication runs under compute as far as it can.
"""

import argparse

from deepspeed_ext.planner.choice import plan
from deepspeed_ext.planner.cost import Model
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import GroupSizes, ModelStates

MODELS = {"7B": 7 * 10**9, "65B": 65 * 10**9}
TRAINABLE = {"full": 1.0, "partial (1/16)": 1 / 16, "PEFT (3/1000)": 3 / 1000}  # the three regimes of the paper
RANKS = (32, 64, 128, 1024)
METHODS = ("ZeRO-1", "ZeRO-2", "NNG", "NIG", "NGG", "ING", "III", "IIG", "IGG", "GGG")
FLOPS_PER_TOKEN = 6  # for each parameter, forward and backward; recomputation is not counted


def table(parameters: int, share: float, args: argparse.Namespace) -> list[str]:
    """Return the lines of a table: a row a plain stage or strategy, a column a number of ranks."""
    count = int(parameters * share)
    compute = (4 + 2 * share) / 6 * FLOPS_PER_TOKEN * parameters * args.tokens / (args.tflops * 1e12)
    cells: dict[str, list[str]] = {name: [] for name in METHODS}
    choices = []
    for ranks in RANKS:
        sizes = GroupSizes(ranks, args.ranks_per_node)
        rates = Rates.of_links(
            sizes,
            args.ranks_per_node,
            args.intra_gbps,
            args.inter_gbps,
            args.latency_us / 1e6,
            args.memory_gbps * 1e9,
        )
        model = Model(
            ModelStates.of(parameters, count),
            accumulation=args.accumulation,
            compute=compute,
            fetches=parameters // 10**8,
            overlap_updates=args.overlap_updates,
        )
        found = plan(sizes, model, rates, args.memory_gb * 1e9)
        by_name = {one.name: one for one in (*found.predictions, *found.plain)}
        for name in METHODS:
            one = by_name[name]
            speed = by_name["ZeRO-3"].total_seconds / one.total_seconds
            mark = "" if found.fits(one) else ", too large"
            cells[name].append(f"{speed:.2f} ({one.total_memory / 1e9:.0f} GB{mark})")
        choices.append(found.choice.strategy if found.choice else "none")
    lines = ["| | " + " | ".join(f"{ranks} GPUs" for ranks in RANKS) + " |", "|---" * (1 + len(RANKS)) + "|"]
    lines += [f"| {name} | " + " | ".join(row) + " |" for name, row in cells.items()]
    lines.append("| chosen | " + " | ".join(choices) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Predict the strategies for large models on many GPUs.")
    parser.add_argument("--ranks-per-node", type=int, default=8)
    parser.add_argument("--intra-gbps", type=float, default=2400, help="that a GPU receives inside its node")
    parser.add_argument("--inter-gbps", type=float, default=200, help="that a node receives")
    parser.add_argument("--latency-us", type=float, default=20, help="of a message between groups")
    parser.add_argument("--memory-gbps", type=float, default=1500, help="GB/s of a GPU's memory")
    parser.add_argument("--memory-gb", type=float, default=64, help="of a GPU, for model states")
    parser.add_argument("--accumulation", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096, help="of a micro-batch on a GPU")
    parser.add_argument("--tflops", type=float, default=156, help="that a GPU reaches")
    parser.add_argument("--overlap-updates", action="store_true", help="paro_overlap_updates")
    args = parser.parse_args()
    for model, parameters in MODELS.items():
        for regime, share in TRAINABLE.items():
            print(f"\n**{model}, {regime}**, predicted, times plain ZeRO-3's speed\n")
            print("\n".join(table(parameters, share, args)))


if __name__ == "__main__":
    main()
