# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What of updated parameters hides under the next forward, for a small model with default sizes under IIG.

    python -m tests.perf.first_module --csv tests/perf/results/first_module.csv

The model has 16 blocks of 6.3 M parameters in bf16: one sub-group. This process is one rank of 4 in groups of 2, on a
fake process group, whose collectives end at once; gathers of updates take as long as their bytes on an emulated link,
one after the other. Nothing is fetched ahead. Blocks sleep in their forward, all together ``--ratio`` times as long as
the link needs for the updates. *In one piece* is how such a model crossed before: the sub-group at once.

*Waited* are the seconds in which the first forward after a step waits for the link. Both methods take turns.
"""

import argparse
import contextlib
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import torch

from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.zero.sharded import slices
from tests.perf.lib import records
from tests.perf.lib.blocks import Pauses, make_blocks
from tests.perf.lib.fake_world import FakeWorld

BLOCKS, WIDTH, HIDDEN = 16, 1024, 3072
RANKS, GROUP_SIZE = 4, 2
METHODS = {"in one piece": lambda most, total: most, "in windows": slices.full_bucket}


class Link:
    """What updates travel over: one after the other.

    Args:
        rate: bytes a second.
    """

    def __init__(self, rate: float) -> None:
        self.rate, self.free, self.busy, self.waited = rate, 0.0, 0.0, 0.0

    @contextlib.contextmanager
    def connected(self) -> Iterator[None]:
        """In this context gathers of updates take their time."""
        complete_rows = ParameterRedistribution.complete_rows

        def paced(redistribution: ParameterRedistribution, rows: torch.Tensor) -> Any:
            transfer = complete_rows(redistribution, rows)
            handle = next(transfer)
            begun = max(time.perf_counter(), self.free)
            seconds = rows[0].nbytes * (redistribution.rows - 1) / self.rate
            due = self.free = begun + seconds
            self.busy += seconds
            yield _Due(due, self)
            handle.wait()
            with contextlib.suppress(StopIteration):
                next(transfer)
            return rows

        with mock.patch.object(ParameterRedistribution, "complete_rows", paced):
            yield


class _Due:
    def __init__(self, at: float, link: Link) -> None:
        self._at, self._link = at, link

    def wait(self) -> None:
        begun = time.perf_counter()
        time.sleep(max(0.0, self._at - begun))
        self._link.waited += max(0.0, self._at - begun)


def make_engine(pauses: Pauses) -> Any:
    """Return an engine with default sizes, but for what is fetched ahead: on this process group the host would wait
    for it, where elsewhere a thread or a stream does."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"paro_strategy": "IIG", "paro_group_size": GROUP_SIZE, "stage3_prefetch_bucket_size": 0},
    }
    model = make_blocks(BLOCKS, WIDTH, HIDDEN, pauses)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    return engine


def waited(engine: Any, link: Link, pauses: Pauses, forward: float) -> float:
    """Take a step; return the seconds that the next forward waits for the link."""
    batch = torch.randn(1, WIDTH, dtype=torch.bfloat16)
    pauses.forward = 0.0
    engine.backward(engine(batch, torch.zeros_like(batch)))
    link.free = link.busy = link.waited = 0.0
    pauses.forward = forward
    with link.connected():
        engine.step()
        engine.eval()
        with torch.no_grad():
            engine(batch, torch.zeros_like(batch))
        engine.train()
    return link.waited


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link of this rank")
    parser.add_argument("--ratio", type=float, default=1.0, help="of forward to the link's seconds")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--csv", type=Path, help="append rows to this file")
    args = parser.parse_args()
    FakeWorld(RANKS, GROUP_SIZE)
    link, pauses = Link(args.mbit * 1e6 / 8), Pauses()
    numel = BLOCKS * 2 * WIDTH * HIDDEN
    forward = args.ratio * (2 * numel / RANKS) * (RANKS // GROUP_SIZE - 1) / link.rate / BLOCKS
    engines, found = {}, {name: list[float]() for name in METHODS}
    for name, rule in METHODS.items():
        with mock.patch.object(slices, "full_bucket", rule):
            engines[name] = make_engine(pauses)
            waited(engines[name], link, pauses, forward)  # and windows are made
    for _ in range(args.rounds):
        for name, engine in engines.items():
            found[name].append(waited(engine, link, pauses, forward))
    given = {"parameters": numel, "mbit": args.mbit, "ratio": args.ratio, "rounds": args.rounds, "link": link.busy}
    shown = {"waited": statistics.median, "least waited": min, "most waited": max}
    rows = [{"method": name, **given, **{key: of(some) for key, of in shown.items()}} for name, some in found.items()]
    records.report(rows, args.csv)


if __name__ == "__main__":
    main()
