# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between groups with an outer optimizer, counted by the kernel at sockets: none but those of outer steps."""

import time
from statistics import mean
from typing import Any

import pytest

from tests.harness.tiers import by_strategies, deep

ALL = ("NNI", "NII", "INI", "III")
SIZES = (512, 1023, 1024, 600)  # 2.2 million parameters
RELATIVE = 0.01  # of what is due
SCALE = 2 / 128  # bytes of an element's share of a scale
BYTES = {32: 4.0, 16: 2.0, 8: 1 + SCALE, 4: 0.5 + SCALE}  # of an element that crosses
REST = 0.02  # seconds in which barriers end on all ranks
BARRIERS = 4  # that are counted alone
NOTHING, A_FLAG = 60, 250  # bytes a step beside barriers, at most, of which some are counted before or after
PLAIN, STREAMING = {"steps": 3}, {"steps": 6, "fragments": 3, "delay": 1}


@pytest.mark.parametrize(
    "world, group, bits, outer, dtype, names",
    [
        (4, 2, 32, PLAIN, "fp32", ALL),
        (4, 2, 16, STREAMING, "bf16", ("NNI", "III")),
        (4, 2, 8, PLAIN, "fp16", ("NII", "INI")),
        (6, 2, 4, STREAMING, "fp32", ("NII", "INI")),
        *deep((4, 2, 16, STREAMING, "bf16", ALL), (4, 2, 8, PLAIN, "fp16", ALL), (6, 2, 4, STREAMING, "fp32", ALL)),
        *deep((4, 2, 4, PLAIN, "bf16", ALL), (6, 2, 32, STREAMING, "fp16", ALL), (4, 1, 8, STREAMING, "bf16", ALL)),
        *deep((6, 3, 16, PLAIN, "fp32", ALL), (8, 2, 4, STREAMING, "fp16", ALL)),
    ],
    ids=by_strategies,
)
def test_only_what_leaves_crosses_between_groups(
    ranks: Any,
    kernels: bool,
    world: int,
    group: int,
    bits: int,
    outer: dict[str, int],
    dtype: str,
    names: tuple[str, ...],
) -> None:
    groups, fragments, steps = world // group, outer.get("fragments", 1), outer["steps"]
    leaving = {(part + 1) * steps // fragments % steps for part in range(fragments)}
    parameters, rows = ranks(world).run(case, names, group, {**outer, "bits": bits}, dtype)[0]
    part = parameters / group / fragments  # of a rank's slice
    due = 2 * (groups - 1) / groups * part * BYTES[bits]
    for name, at_rest, counted in rows:
        # DeepSpeed's stages 1 and 2 look for overflows in bf16, too.
        agree = dtype == "fp16" or (dtype == "bf16" and name[0] == "N")
        assert len(counted) == 2 * steps - 1
        outer_steps = [have for step, have in enumerate(counted, 2) if step % steps in leaving]
        inner_steps = [have - at_rest for step, have in enumerate(counted, 2) if step % steps not in leaving]
        assert outer_steps == pytest.approx([due] * 2 * fragments, rel=RELATIVE), name
        assert max(inner_steps) < A_FLAG and (agree or mean(inner_steps) < NOTHING), name


def case(
    names: tuple[str, ...], group: int, outer: dict[str, int], dtype: str
) -> tuple[int, list[tuple[str, float, list[float]]]]:
    """Parameters; of each strategy the mean bytes that a rank receives from other groups, by barriers alone, and in
    each step from the second to the end of the second outer period, with all that leaves in it."""
    from deepspeed import comm as dist

    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import training
    from tests.harness.outer_oracle import KEY

    job = training.Job(sizes=SIZES, empty=False, dtype=dtype)
    rows, parameters = [], 0
    for name in names:
        engine, model = training.make_engine(job, training.placed(name, group, **{KEY: outer}))
        data, counts = training.batches(job), []
        parameters = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
        # In the first step modules are recorded, which ranks compare. Before it, barriers are counted alone.
        for step in range(1 - BARRIERS, 2 * outer["steps"] + 1):
            meter = TrafficMeter()
            dist.barrier()
            time.sleep(REST)
            meter.start()
            dist.barrier()
            if step > 0:
                training.micro_step(engine, job, step, *next(data))
                engine.step()
                engine.optimizer.outer.settle()
            dist.barrier()
            time.sleep(REST)
            meter.stop()
            dist.barrier()
            counts.append(meter.split(group).inter_mean)
        rows.append((name, mean(counts[:BARRIERS]), counts[BARRIERS + 1 :]))
        engine.destroy()
    return parameters, rows
