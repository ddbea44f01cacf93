# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What a rank holds after each engine of a long run, and what of it grows. Imports no torch outside of ranks."""

import dataclasses
import gc
import math
import os
import random
from typing import NamedTuple

from tests.campaigns.fuzz.cases import Case, Event, Step

# What may come on top of the first half's most. Allocators keep what they have had: a few pages, not a trend.
RESIDENT_MB = 12.0


class Sample(NamedTuple):
    """What a rank holds: bytes of tensors, resident megabytes, threads, open files, process groups."""

    tensors: float
    resident_mb: float
    threads: float
    files: float
    groups: float


class Soaked(NamedTuple):
    """A run: samples; whether losses are finite, and replicas the same bits at the end."""

    samples: list[Sample]
    finite: bool
    replicas_equal: bool


def soaked(case: Case, steps: int, anew: int, seed: int) -> Soaked:
    """Train so many steps, each engine ``anew`` of them, with events between them; in ranks.

    With p = I and G it stays one engine: DeepSpeed's ZeRO-3 keeps each that was ever made, by hooks of gradient
    accumulators, which the garbage collector does not see through.
    """
    from tests.campaigns.fuzz.events import act
    from tests.campaigns.fuzz.run import Run
    from tests.harness import training

    chance, samples, finite = random.Random(seed), list[Sample](), True
    run = Run(dataclasses.replace(case, steps=()), case.zero, True)
    for number in range(steps):
        if number and number % anew == 0:
            act(run, "save and load" if case.stage == 3 else "resume", None)
        elif number % 4 == 3:
            act(run, *_event(chance, number))
        overflow = ((0, chance.randrange(case.world)),) if case.dtype == "fp16" and chance.random() < 0.02 else ()
        early = chance.random() < 0.1
        run.step(Step(micro_steps=1 if early else case.accumulation, overflow=overflow))
        if number % anew == 0:
            finite = finite and all(math.isfinite(loss.item()) for loss in run.losses)
            run.losses.clear()
            run.seen.clear()
            samples.append(_sample())
    alike = training.all_replicas_equal(run.engine, run.model)
    run.destroy()
    return Soaked(samples, finite, alike)


def _event(chance: random.Random, number: int) -> Event:
    events = [
        *(Event(name, chance.randrange(8)) for name in ("evaluate", "look", "states", "save and load", "export")),
        Event("frozen", chance.choice((0.5, 2.0))),
        Event("rate", 0.5 if number % 8 == 3 else 2.0),
    ]
    return chance.choice(events)


def _sample() -> Sample:
    import torch
    from torch.distributed import distributed_c10d

    from tests.campaigns.fuzz.run import live_bytes

    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    torch.distributed.barrier()
    return Sample(live_bytes(), resident, threads, files, len(distributed_c10d._world.pg_map))


def growth(samples: list[Sample]) -> list[str]:
    """What the second half of the samples, after a fifth, has more of than the first."""
    settled = samples[len(samples) // 5 :]
    early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    found = []
    for name in Sample._fields:
        before = max(getattr(sample, name) for sample in early)
        after = max(getattr(sample, name) for sample in late)
        # A sample depends on the step before it; if memory grows, the minimum of samples grows, too.
        least, since = (min(getattr(sample, name) for sample in half) for half in (early, late))
        if since > least and after > before + (RESIDENT_MB if name == "resident_mb" else 0):
            found.append(f"{name} grows from {before:,.0f} to {after:,.0f}")
    return found
