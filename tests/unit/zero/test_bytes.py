# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks, counted by the kernel at their sockets, against the formulas of the strategy table."""

from typing import Any

import pytest

from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Volume
from tests.harness.training import PARTITIONED, REPLICATED

SIZES = (256, 511, 512, 300)  # 546,000 parameters: the frames of messages and the norms disappear beside them
BUCKETS = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000}
RELATIVE, ABSOLUTE = 0.01, 1000  # of what is due; bytes where nothing is (barriers, norms, ZeRO-3's compared records)
# The formula gathers each parameter twice in a micro-step. DeepSpeed gathers it less often if it keeps it from one use
# to the next: because it is small, prefetched, or soon used again, as the last layer, with which backward begins. With
# these keys it releases each when the module that owns it has run.
TWICE = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}

Bytes = tuple[float, float]  # within the group, between groups
Row = tuple[str, list[Bytes]]  # strategy, each micro-step of an optimizer step; the last one includes that step


def check(rows: list[Row], cluster: GroupSizes, states: ModelStates, accumulation: int) -> None:
    """Compare each micro-step with the formula, so that what is due once a step comes at the boundary, not before."""
    for name, counted in rows:
        strategy = STRATEGIES[name]
        micro_step, rest = Volume(), Volume()
        for phase in strategy.phases(cluster, states):
            micro_step += phase.volume * phase.each_micro_step
            rest += Volume() if phase.each_micro_step else phase.volume
        due = [micro_step] * (accumulation - 1) + [micro_step + rest]
        for number, (have, want) in enumerate(zip(counted, due, strict=True)):
            assert have == pytest.approx((want.intra, want.inter), rel=RELATIVE, abs=ABSOLUTE), (name, number)
        whole = strategy.volume(cluster, states, accumulation)
        total = tuple(map(sum, zip(*counted, strict=True)))
        assert total == pytest.approx((whole.intra, whole.inter), rel=RELATIVE), name


@pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])
@pytest.mark.parametrize("world, group, accumulation", [(4, 2, 1), (4, 2, 4), (6, 3, 1), (6, 2, 4)])
def test_bytes_within_and_between_groups(
    ranks: Any, world: int, group: int, accumulation: int, names: tuple[str, ...]
) -> None:
    parameters, _, rows = ranks(world).run(bytes_case, names, group, accumulation)[0]
    states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(world, group), states, accumulation)


@pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])
def test_frozen_parameters_are_gathered_but_neither_reduced_nor_updated(ranks: Any, names: tuple[str, ...]) -> None:
    # Not the first layer: without a gradient to compute, backward would not need its parameters.
    parameters, trainable, rows = ranks(4).run(bytes_case, names, 2, 2, frozen=(1,))[0]
    assert trainable < 0.6 * parameters
    states = ModelStates.of(parameters, trainable, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(4, 2), states, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_big_bucket_and_overlap_send_the_same(ranks: Any, overlap: bool) -> None:
    zero = {"reduce_bucket_size": 10**8, "allgather_bucket_size": 10**8, "overlap_comm": overlap}
    parameters, _, rows = ranks(4).run(bytes_case, ("NIG", "NGG", "ING", "IIG", "GGG"), 2, 1, zero)[0]
    states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(4, 2), states, 1)


def bytes_case(
    names: tuple[str, ...],
    group: int,
    accumulation: int,
    zero: dict[str, Any] | None = None,
    frozen: tuple[int, ...] = (),
) -> tuple[int, int, list[Row]]:
    """Parameters, trainable ones, and for each strategy the mean bytes a rank of the micro-steps of a step."""
    from deepspeed import comm as dist

    from deepspeed_ext.comm.traffic import TrafficMeter
    from tests.harness import training

    job = training.Job(sizes=SIZES, empty=False, accumulation=accumulation, frozen=frozen, zero=zero or BUCKETS)
    rows: list[Row] = []
    for name in names:
        engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": group, **TWICE})
        data = training.batches(job)
        meters = [TrafficMeter() for _ in range(accumulation)]
        # A step of one micro-step goes before: it records the order of the modules, which ranks compare once.
        for number, meter in enumerate([TrafficMeter(), *meters]):
            engine.set_gradient_accumulation_boundary(number in (0, accumulation))
            dist.barrier()
            meter.start()
            dist.barrier()
            training.micro_step(engine, job, number, *next(data))
            engine.step()
            if STRATEGIES[name].stage == 3:
                engine.optimizer.parameters.drain()  # or slices are completed during the next forward
            dist.barrier()
            meter.stop()
            dist.barrier()
        splits = [meter.split(group) for meter in meters]
        rows.append((name, [(split.intra_mean, split.inter_mean) for split in splits]))
        numels = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
        engine.destroy()
    return sum(numel for numel, _ in numels), sum(numel for numel, trainable in numels if trainable), rows


@pytest.mark.quick
def test_records_and_traces_tell_the_hops_apart(ranks: Any) -> None:
    for records, labels in ranks(4).run(logger_case):
        # Over 2 ranks, not over all 4. Inside groups the parts of a bucket are unequal, and go by rooted reduces.
        for name in ("inter_reduce_scatter", "intra_all_gather", "inter_all_gather"):
            assert records[name] and all(abs(bus / algorithm - 1 / 2) < 1e-9 for algorithm, bus in records[name])
        assert records["intra_reduce_scatter"]
        assert labels == {f"paro::{name}" for name in records if name.startswith(("intra_", "inter_"))}


def logger_case() -> tuple[dict[str, list[tuple[float, float]]], set[str]]:
    """What a step of NIG with collectives leaves: bandwidths in DeepSpeed's comms logger, and labels in a trace."""
    from unittest import mock

    import torch
    from deepspeed.comm.comm import comms_logger

    from deepspeed_ext.comm import collectives
    from tests.harness import training

    job = training.Job(steps=1, config={"comms_logger": {"enabled": True, "prof_all": True}})
    with mock.patch.object(collectives, "backend_of", lambda group: "nccl"), torch.profiler.profile() as profile:
        training.train(job, {"paro_strategy": "NIG", "paro_group_size": 2})
    labels = {event.name for event in profile.events() if event.name.startswith("paro::")}
    return {
        name: [both for _, _, *found in sizes.values() for both in zip(*found, strict=True)]
        for name, sizes in comms_logger.comms_dict.items()
    }, labels
