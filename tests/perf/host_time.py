# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Measures the CPU time that a step takes the host of one rank, next to DeepSpeed's stages and FSDP2.

    OMP_NUM_THREADS=1 python -m tests.perf.host_time --csv tests/perf/results/host_time.csv

One of 64 ranks in groups of 8 trains on torch's fake process group, accumulation 4: no data is sent. The model has
the modules and tensors of a 7B Llama with a 64th of its width, so that computing and copying take little of the time.
Engines take turns. FSDP2 wraps layers and the root.
"""

import argparse
import gc
import logging
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tqdm import trange

from tests.perf import growth
from tests.perf.lib import records
from tests.perf.lib.fake_world import FakeWorld

STAGE3 = {"stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9, "stage3_prefetch_bucket_size": 5e7}
RANKS, GROUP, ACCUMULATION, NARROWER, STEPS = 64, 8, 4, 64, 5
SECTIONS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"stage": 1},
    "ZeRO-2": {"stage": 2},
    "ZeRO-2, not contiguous": {"stage": 2, "contiguous_gradients": False},
    "ZeRO-3": {"stage": 3},
    "NIG": {"paro_strategy": "NIG"},
    "NIG, not contiguous": {"paro_strategy": "NIG", "contiguous_gradients": False},
    **{name: {"paro_strategy": name} for name in ("IIG", "III")},
    **{f"{name} without units": {"paro_strategy": name, "stage3_leaf_bytes": 0} for name in ("IIG", "III")},
}
# DeepSpeed's defaults for a model of this width. Vectors are persistent, matrices are not.
SIZES = {key: round(size / NARROWER**2) for key, size in {"reduce_bucket_size": 5e8, **STAGE3}.items()}
SIZES |= {"stage3_param_persistence_threshold": round(1e5 / NARROWER)}
Step = Callable[[], None]


def make_model() -> nn.Sequential:
    """Return the modules of a narrow Llama; each adds the sum of its parameter."""
    growth.NARROWER = NARROWER
    return growth.make_model(layered=True)


def make_deepspeed(section: dict[str, Any]) -> tuple[Step, Step]:
    """Return functions that take a step of an engine, and destroy it."""
    group = {"paro_group_size": GROUP} if "paro_strategy" in section else {}
    zero = {**section, **group, **SIZES}
    engine = growth.make_engine(zero, make_model(), gradient_accumulation_steps=ACCUMULATION)

    def step() -> None:
        for _ in range(ACCUMULATION):
            engine.backward(engine(torch.ones(1, dtype=torch.bfloat16)).sum())
            engine.step()

    return step, engine.destroy


def make_hsdp(keep: bool) -> tuple[Step, Step]:
    """Return the same for HSDP; ``keep``: whether parameters stay gathered until the last micro-batch."""
    model: Any = make_model()
    mesh = init_device_mesh("cpu", (RANKS // GROUP, GROUP), mesh_dim_names=("nodes", "ranks"))
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=not keep, mp_policy=policy)
    optimizer = torch.optim.Adam(model.parameters())

    def step() -> None:
        for number in range(ACCUMULATION):
            last = number == ACCUMULATION - 1
            model.set_is_last_backward(last)
            (model.set_requires_gradient_sync if keep else model.set_requires_all_reduce)(last)
            model.set_reshard_after_backward(last or not keep)
            model(torch.ones(1, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, gc.collect


METHODS: dict[str, Callable[[], tuple[Step, Step]]] = {
    **{name: partial(make_deepspeed, section) for name, section in SECTIONS.items()},
    "HSDP": partial(make_hsdp, False),
    "HSDP, kept": partial(make_hsdp, True),
}


def measure(method: str) -> list[float]:
    """Return the CPU milliseconds of some steps of a new engine."""
    step, destroy = METHODS[method]()
    results = []
    for _ in range(2 + STEPS):
        begin = time.process_time()
        step()
        results.append(1e3 * (time.process_time() - begin))
    destroy()
    gc.collect()
    return results[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--csv", type=Path, metavar="FILE", help="append a row per method")
    arguments = parser.parse_args()
    FakeWorld(RANKS, GROUP)
    deepspeed.init_distributed(dist_backend="gloo")  # finds the fake one
    logging.disable(logging.WARNING)
    turns = [{method: measure(method) for method in arguments.methods} for _ in trange(arguments.rounds)]
    rows = []
    for method in arguments.methods:
        samples = [value for turn in turns for value in turn[method]]
        low, middle, high = statistics.quantiles(samples, n=4)
        values = {"median": middle, "low": low, "high": high, "min": min(samples)}
        rows.append({"method": method, **{f"ms_{name}": round(value, 1) for name, value in values.items()}})
    records.report(rows, arguments.csv, ["method", "ms_median", "ms_low", "ms_high", "ms_min"])


if __name__ == "__main__":
    main()
