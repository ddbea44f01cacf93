# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks, counted by the kernel at their sockets, against the formulas of the strategy table."""

from typing import Any

import pytest
from training import REPLICATED

from deepspeed_ext.placement import STRATEGIES, Cluster, ModelStates

SIZES = (256, 511, 512, 300)  # 542,000 parameters: the frames of messages and the norms disappear beside them
BUCKETS = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}


@pytest.mark.parametrize("world, group", [(4, 2), (6, 2), (6, 3)])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_bytes_within_and_between_groups(ranks: Any, world: int, group: int, accumulation: int) -> None:
    cluster = Cluster(world, group)
    parameters, rows = ranks(world).run(bytes_case, REPLICATED, group, accumulation)[0]
    states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
    for name, micro_step, (intra, inter) in rows:
        expected = STRATEGIES[name].volume(cluster, states, accumulation)
        assert inter == pytest.approx(expected.inter, rel=0.02), name
        assert intra == pytest.approx(expected.intra, rel=0.10), name
        if accumulation > 1:  # what runs at the boundary only must not run before it
            every = STRATEGIES[name].reduce_gradients(cluster, states)
            slack = 0.02 * expected.inter / accumulation
            assert micro_step[0] == pytest.approx(every.intra, rel=0.10, abs=slack), name
            assert micro_step[1] == pytest.approx(every.inter, rel=0.02, abs=slack), name


@pytest.mark.parametrize("overlap", [False, True])
def test_one_big_bucket_and_overlap_send_the_same(ranks: Any, overlap: bool) -> None:
    zero = {"reduce_bucket_size": 10**8, "allgather_bucket_size": 10**8, "overlap_comm": overlap}
    parameters, rows = ranks(4).run(bytes_case, ("NIG", "NGG"), 2, 1, zero)[0]
    states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
    for name, _, (intra, inter) in rows:
        expected = STRATEGIES[name].volume(Cluster(4, 2), states, 1)
        assert inter == pytest.approx(expected.inter, rel=0.02), name
        assert intra == pytest.approx(expected.intra, rel=0.10), name


Row = tuple[str, tuple[float, float], tuple[float, float]]


def bytes_case(
    names: tuple[str, ...], group: int, accumulation: int, zero: dict[str, Any] | None = None
) -> tuple[int, list[Row]]:
    """Parameters, and for each strategy (intra, inter) mean bytes a rank of a first micro-step and of a step."""
    import training
    from deepspeed import comm as dist

    from deepspeed_ext.traffic import TrafficMeter

    job = training.Job(sizes=SIZES, accumulation=accumulation, zero=zero or BUCKETS)
    rows: list[Row] = []
    for name in names:
        engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": group})
        data = training.batches(job)
        readings = []
        for _ in range(2):  # the first step opens connections
            micro, step = TrafficMeter(), TrafficMeter()
            dist.barrier()
            micro.start()
            step.start()
            for number in range(accumulation):
                training.micro_step(engine, job, number, *next(data))
                if number == 0:
                    dist.barrier()
                    micro.stop()
                engine.step()
            dist.barrier()
            step.stop()
            readings = [micro.split(group), step.split(group)]
        first, whole = ((reading.intra_mean, reading.inter_mean) for reading in readings)
        rows.append((name, first, whole))
        count = sum(p.numel() for p in model.parameters())
        engine.destroy()
    return count, rows


def test_comms_logger_tells_the_hops_apart(ranks: Any) -> None:
    for record in ranks(4).run(logger_case):
        assert {"intra_reduce_scatter", "inter_reduce_scatter", "intra_all_gather", "inter_all_gather"} <= set(record)


def logger_case() -> list[str]:
    """Names that DeepSpeed's comms logger has recorded after a step of NIG."""
    import training
    from deepspeed.comm.comm import comms_logger

    job = training.Job(steps=1, config={"comms_logger": {"enabled": True, "prof_all": True}})
    training.train(job, {"paro_strategy": "NIG", "paro_group_size": 2})
    return list(comms_logger.comms_dict)
