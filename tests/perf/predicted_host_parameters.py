# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the planner predicts for a model of 70B parameters on four nodes of eight GPUs that may not hold it.

    python -m tests.perf.predicted_host_parameters --csv tests/perf/results/predicted_host_parameters.csv

Predictions: no GPU takes part. Each method is predicted with parameters on the devices and in host memory, for LoRA
and for full training with optimizer states in host memory, of GPUs of 24, 40 and 80 GB, of which seven tenths are for
model states, over 10, 25 and 100 Gbit/s to a node. Inside a node a GPU receives 200 Gbit/s, as over PCIe 4.0 x16, and
copies 12 GB/s from host memory, and as much back, half of what its lanes carry, since GPUs share the memory of their
socket. bf16 with Adam, micro-batches of 4,096 tokens at 100 TFLOP/s, four of them a step. Copies under compute and
transfers, and both directions at once. Copies of gradients to an offloaded optimizer, and its time, are not in these
figures, the same for all methods.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_ext.planner.cost import Model, Prediction, predict, predict_plain_stage
from deepspeed_ext.planner.host import HostParameters
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from tests.perf.lib.records import append_rows

SIZES, PER_NODE = GroupSizes(32, 8), 8
INTRA_GBPS, HOST = 200.0, 12e9
LINKS = (10, 25, 100)  # Gbit/s to a node
GPUS, SHARE = (24, 40, 80), 0.7  # GB, and what of it is for model states
PARAMETERS, LORA, LAYER = 70 * 10**9, 2 * 10**8, 10**9
ACCUMULATION, TOKENS, TFLOPS = 4, 4096, 100e12
METHODS = {"LoRA": ("ING", "IGG", "GNG", "GGG"), "full": ("IIG", "IGG", "GIG", "GGG")}


def trained(kind: str, on_host: bool) -> Model:
    """Return what is trained: ``kind`` of ``METHODS``."""
    states = ModelStates.of(PARAMETERS, LORA if kind == "LoRA" else None)
    elements = states.gradients / 2
    held = replace(states, parameters=0.0) if on_host else states
    return Model(
        states,
        accumulation=ACCUMULATION,
        compute=(4 * PARAMETERS + 2 * elements) * TOKENS / TFLOPS,
        fetches=PARAMETERS // LAYER,
        largest_layer=2.0 * LAYER,
        held=held if kind == "LoRA" else replace(held, optimizer=0.0),
        host=HostParameters() if on_host else None,
    )


def predictions(kind: str, gbps: int) -> Iterator[tuple[str, bool, Prediction]]:
    """Yield each method, whether parameters are on the host, and what it costs; plain ZeRO-3 last."""
    rates = Rates.of_links(SIZES, PER_NODE, INTRA_GBPS, gbps, memory=float("inf"), host=HOST)
    for on_host in (False, True):
        model = trained(kind, on_host)
        for name in METHODS[kind]:
            yield name, on_host, predict(STRATEGIES[name], SIZES, model, rates)
        yield "ZeRO-3", on_host, predict_plain_stage("GGG", SIZES, model, rates)


def rows(kind: str) -> list[dict[str, Any]]:
    """Return a row for each method, link and place of the parameters."""
    found = []
    for gbps in LINKS:
        of_link = list(predictions(kind, gbps))
        (zero3,) = (one for name, on_host, one in of_link if name == "ZeRO-3" and on_host)
        found += [
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
            for name, on_host, one in of_link
        ]
    return found


def table(found: Sequence[dict[str, Any]]) -> str:
    """Return seconds of a step over each link in Markdown, a row for each method and place."""
    links = " | ".join(f"{gbps} Gbit/s" for gbps in LINKS)
    lines = [
        f"| | parameters | GB on a device | on the host | fits GPUs of | {links} |",
        "|---" * (5 + len(LINKS)) + "|",
    ]
    keys = dict.fromkeys((row["method"], row["parameters"]) for row in found)
    for key in keys:
        some = [row for row in found if (row["method"], row["parameters"]) == key]
        cells = [f"{row['seconds']} s ({row['times_zero3_offload']})" for row in some]
        held = (some[0][name] for name in ("device_gb", "host_gb", "fits"))
        lines.append(f"| {' | '.join((*key, *held, *cells))} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row per prediction")
    args = parser.parse_args()
    for kind in METHODS:
        found = rows(kind)
        print(f"\n**{kind}**, predicted; in brackets times the speed of ZeRO-3 with offload_param\n\n{table(found)}")
        if args.csv:
            append_rows(args.csv, found)


if __name__ == "__main__":
    main()
