# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Many steps with events between them, and what a rank holds meanwhile; inside rank processes only."""

import dataclasses
import gc
import math
import os
import random

import torch
from torch.distributed import distributed_c10d

from tests.campaigns.fuzz.cases import Case, Event, Step
from tests.campaigns.fuzz.events import act
from tests.campaigns.fuzz.run import Run, live_bytes
from tests.campaigns.soak.growth import Sample, Soaked
from tests.harness import training


def soak(case: Case, steps: int, anew: int, seed: int) -> Soaked:
    """Train so many steps, each engine ``anew`` of them.

    With p = I and G it stays one engine: DeepSpeed's ZeRO-3 keeps each that was ever made, by hooks of gradient
    accumulators, which the garbage collector does not see through.
    """
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
            samples.append(sample())
    alike = training.all_replicas_equal(run.engine, run.model)
    run.destroy()
    return Soaked(samples, finite, alike)


def _event(chance: random.Random, number: int) -> Event:
    events = [
        Event("evaluate"),
        Event("look", chance.randrange(8)),
        Event("states", chance.randrange(8)),
        Event("frozen", chance.choice((0.5, 2.0))),
        Event("rate", 0.5 if number % 8 == 3 else 2.0),
        Event("save and load"),
        Event("export"),
    ]
    return chance.choice(events)


def sample() -> Sample:
    """What this process holds now."""
    gc.collect()
    with open("/proc/self/statm") as file:
        resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    threads, files = len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
    torch.distributed.barrier()
    return Sample(live_bytes(), resident, threads, files, len(distributed_c10d._world.pg_map))
