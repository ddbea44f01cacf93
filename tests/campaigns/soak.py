# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trains with everything switched on for a long time, and shows that nothing grows.

    python -m tests.campaigns.soak --steps 2000

Four ranks in groups of two train each of ``RUNS``. Between steps follow operations of users: evaluation, a look at
parameters, a changed learning rate, saving and loading, an early end of the accumulation, an overflow; now and then
the engine is destroyed and made anew (with p = I and G loaded, since DeepSpeed's ZeRO-3 keeps every engine). Behind
the first step after that, each rank counts its tensors' bytes, its resident memory, threads, open files and process
groups. After a fifth of the steps, none may grow.
"""

import argparse
import contextlib
import dataclasses
import gc
import io
import math
import os
import random
import sys
from typing import Any, NamedTuple

from tests.campaigns.fuzz.cases import Block, Case, Event, Step

ANEW = 40  # steps of an engine
_MODEL = (Block(width=29), Block("unit", 13), Block("tied", 13), Block(frozen=True), Block("norm"))
_SMALL = {"reduce_bucket_size": 300, "allgather_bucket_size": 300, "overlap_comm": True}
_SHARDED = {**_SMALL, "stage3_param_persistence_threshold": 20, "sub_group_size": 100, "stage3_leaf_bytes": True}
_FEW_BITS = {"zeropp_loco_param": {"reset_T": 16}, "paro_quantized_updates": {"resync_T": 16}}
_OFFLOAD = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}
_OWN_ADAM = {"zero_force_ds_cpu_optimizer": False}
_COMMON: dict[str, Any] = {"world": 4, "blocks": _MODEL, "unused": 11, "groups": 2}
_COMMON |= {"accumulation": 2, "clipping": 0.5, "boundary": "user"}


def placed(name: str, **keys: Any) -> dict[str, Any]:
    """Keys of a strategy in groups of two."""
    return {"paro_strategy": name, "paro_group_size": 2, **keys}


RUNS = {
    "NIG, all in few bits, ahead": Case(
        zero=placed("NIG", **_SMALL, **_FEW_BITS, paro_overlap_updates=True), dtype="bf16", **_COMMON
    ),
    "IIG, units, all in few bits, host": Case(
        zero=placed("IIG", **_SHARDED, **_FEW_BITS, **_OFFLOAD), optimizer="Adam", config=_OWN_ADAM, **_COMMON
    ),
    "GGG, fp16, units, LoCo": Case(
        zero=placed("GGG", **_SHARDED, zeropp_loco_param={"hadamard": True}),
        dtype="fp16",
        config={"fp16": {"loss_scale_window": 20}},  # one of fifty steps overflows, and the scale recovers
        **_COMMON,
    ),
    "NGG, exact, Muon": Case(
        zero=placed("NGG", **_SMALL, paro_quantized_updates={"bits": "exact", "resync_T": 16}),
        dtype="bf16",
        optimizer="Muon",
        **_COMMON,
    ),
}
# What may come on top of the first half's most. Allocators keep what they have had: a few pages, not a trend.
RESIDENT_MB = 12.0


class Sample(NamedTuple):
    """Resources of a rank: bytes of tensors, resident megabytes, threads, open files, process groups."""

    tensors: float
    resident_mb: float
    threads: float
    files: float
    groups: float


def run_soak(case: Case, steps: int, seed: int) -> tuple[list[Sample], bool]:
    """Train this number of steps; return samples, and whether losses are finite and replicas equal at the end. With p
    = I and G it stays one engine: DeepSpeed's ZeRO-3 keeps each that was ever made, by hooks of gradient accumulators,
    which the garbage collector does not see through."""
    from tests.campaigns.fuzz.events import EVENTS
    from tests.campaigns.fuzz.run import Run
    from tests.harness import training

    chance, samples, finite = random.Random(seed), list[Sample](), True
    run = Run(dataclasses.replace(case, steps=()), case.zero, True)
    for number in range(steps):
        if number and number % ANEW == 0:
            EVENTS["save and load" if case.stage == 3 else "resume"](run, None)
        elif number % 4 == 3:
            event = _event(chance, number)
            EVENTS[event.name](run, event.value)
        overflow = ((0, chance.randrange(case.world)),) if case.dtype == "fp16" and chance.random() < 0.02 else ()
        run.step(Step(micro_steps=1 if chance.random() < 0.1 else case.accumulation, overflow=overflow))
        if number % ANEW == 0:
            finite = finite and all(math.isfinite(loss.item()) for loss in run.losses)
            run.losses.clear()
            run.seen.clear()
            samples.append(_sample())
    alike = training.all_replicas_equal(run.engine, run.model)
    run.destroy()
    return samples, finite and alike


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
    """Return the resources that grow from the first to the second half of the samples, after the first fifth."""
    settled = samples[len(samples) // 5 :]
    early, late = settled[: len(settled) // 2], settled[len(settled) // 2 :]
    results = []
    for name in Sample._fields:
        before = max(getattr(sample, name) for sample in early)
        after = max(getattr(sample, name) for sample in late)
        # A sample depends on the step before it; if memory grows, the minimum of samples grows, too.
        least, since = (min(getattr(sample, name) for sample in half) for half in (early, late))
        if since > least and after > before + (RESIDENT_MB if name == "resident_mb" else 0):
            results.append(f"{name} grows from {before:,.0f} to {after:,.0f}")
    return results


def main() -> None:
    from tests.campaigns import soak  # by the name that ranks know this module by
    from tests.harness import ranks

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=2000, help="of all runs together")
    parser.add_argument("--seed", type=int, default=0, help="of the events")
    arguments = parser.parse_args()
    ranks.prepare_environment()
    pool, wrong = ranks.RankPool(), []
    print(f"{'':<36} engines; from a fifth of them to the last: {', '.join(Sample._fields)}")
    try:
        for name, case in RUNS.items():
            with contextlib.redirect_stdout(io.StringIO()):
                steps = arguments.steps // len(RUNS)
                by_ranks = pool(4).run(soak.run_soak, case, steps, arguments.seed, timeout=3600.0)
            samples = zip(*(of_rank for of_rank, _ in by_ranks), strict=True)
            worst = [Sample(*map(max, zip(*at, strict=True))) for at in samples]
            spans = (f"{a:,.0f}-{b:,.0f}" for a, b in zip(worst[len(worst) // 5], worst[-1], strict=True))
            print(f"{name:<36}{len(worst):>8}", *spans, flush=True)
            results = growth(worst)
            if not all(sound for _, sound in by_ranks):
                results.append("losses are not finite, or replicas differ")
            wrong += [f"{name}: {subject}" for subject in results]
    finally:
        pool.close()
    print("\n".join(wrong) or "nothing grows")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
