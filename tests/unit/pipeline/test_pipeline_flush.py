# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Traffic and memory of a pipeline, counted at sockets and storages, match the formulas of the strategy table."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from deepspeed import comm as dist
from deepspeed.runtime.pipe import schedule

from deepspeed_ext.comm import collectives
from deepspeed_ext.model_bytes import measure_state_bytes
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from deepspeed_ext.zero.micro_steps import MicroSteps
from scripts.emulation.traffic import TrafficMeter
from tests.harness import calls, pipelines
from tests.harness.tiers import deep
from tests.harness.training import NOTHING_KEPT

CLUSTER = GroupSizes(4, 2)  # of a stage
MICRO_BATCHES = 2
WIDTHS = (1700, 1500, 1600, 1800)
ZERO = {"reduce_bucket_size": 20_000, "allgather_bucket_size": 20_000, **NOTHING_KEPT}
RELATIVE, ABSOLUTE = 0.02, 4000  # of the expected bytes; bytes of norms, losses, and ZeRO-3's compared records


@pytest.mark.parametrize("names", [("NIG", "IIG"), *deep((("NNG", "GGG"),))], ids="".join)
def test_bytes_and_memory_match_the_formula(ranks: Any, names: tuple[str, ...]) -> None:
    results = ranks(8).run(flush_case, names)
    for index, name in enumerate(names):
        strategy, mean = STRATEGIES[name], [0.0, 0.0, 0.0, 0.0]
        for rank, rows in enumerate(results):
            numel, received, gradients, parameters = rows[index]
            states = ModelStates.of(numel, parameter_bytes=4, gradient_bytes=4)
            first = rank // 4 * 4
            node = rank // 2 * 2
            intra = sum(received[node : node + 2])
            inter = sum(received[first : first + 4]) - intra
            volume = strategy.volume(CLUSTER, states, MICRO_BATCHES)
            # A bucket belongs to a few ranks' shards, so single ranks receive more or less than on average.
            both = (intra, inter, volume.intra, volume.inter)
            mean = [a + b / 8 for a, b in zip(mean, both, strict=True)]
            assert intra <= 1.5 * volume.intra + ABSOLUTE and inter <= 1.5 * volume.inter + ABSOLUTE, (name, rank)
            memory = strategy.memory(CLUSTER, states)
            # Gradients that were reduced between groups during the backward are in the optimizer's shard.
            most = memory.gradients + (states.gradients / CLUSTER.shards(strategy.os) if name == "NIG" else 0)
            assert memory.gradients <= gradients <= 1.02 * most + ABSOLUTE, (name, rank)
            assert memory.parameters <= parameters <= 1.02 * memory.parameters + ABSOLUTE, (name, rank)
        assert mean[:2] == pytest.approx(mean[2:], rel=RELATIVE, abs=ABSOLUTE), name


def flush_case(names: tuple[str, ...]) -> list[tuple[int, list[int], int, int]]:
    """Return for each strategy this stage's parameters, bytes received from ranks in a step, and held before it."""
    rows = []
    for name in names:
        pipe = pipelines.Pipe(micro_batches=MICRO_BATCHES, widths=WIDTHS, tied=False, zero=ZERO)
        engine, data = pipelines.start(pipe, {"paro_strategy": name, "paro_group_size": 2})
        states = []

        def note(engine: Any, states: list[Any] = states) -> None:
            states.append(measure_state_bytes(engine))

        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, schedule.ReduceTiedGrads: note}
        meter = TrafficMeter()
        for _ in range(2):
            dist.barrier()
            meter.start()
            dist.barrier()  # no rank may send before other ranks count
            engine.train_batch(data)
            if STRATEGIES[name].stage == 3:
                engine.optimizer.drain_parameters()
            dist.barrier()
            meter.stop()
            dist.barrier()
        numel = sum(getattr(p, "ds_numel", p.numel()) for p in engine.module.parameters())
        rows.append((numel, meter.read()[dist.get_rank()], int(states[-1].gradients), int(states[-1].parameters)))
        engine.destroy()
    return rows


@pytest.mark.parametrize("name", ["IIG", "NNN", *deep("NIG", "III")])
def test_stages_exchange_shards_of_tied_gradients(ranks: Any, name: str) -> None:
    rows = ranks(8).run(tied_case, name)
    shards = CLUSTER.shards(STRATEGIES[name].os)
    numel = rows[0][1]
    assert all(messages == 1 for messages, _, _ in rows)
    # Each of the two stages sends all of the gradient, once for each copy of the optimizer's states.
    assert sum(sent for _, _, sent in rows) == 2 * numel * 4 // shards, rows
    assert max(sent for _, _, sent in rows) <= numel if shards == 1 else 2 * numel / shards + 64, rows


def tied_case(name: str) -> tuple[int, int, int]:
    """Return the messages of tied gradients in a step, elements of the weight, and elements that this rank sends."""
    engine, data = pipelines.start(pipelines.Pipe(), {"paro_strategy": name, "paro_group_size": 2})
    engine.train_batch(data)
    with exchanges() as messages:
        engine.train_batch(data)
    sent = [numel for operation, numel in messages if operation == "tied_gradients_all_to_all"]
    return len(sent), pipelines.VOCABULARY * pipelines.WIDTH, sum(sent)


@contextmanager
def exchanges() -> Iterator[list[tuple[str, int]]]:
    """Record name and elements of this rank's all-to-alls in this context: pairwise ones and collectives."""
    messages: list[tuple[str, int]] = []

    def note(output: Any, message: Any, *_: Any, log_name: str = "", **__: Any) -> None:
        messages.append((log_name, message.numel()))

    def note_pairwise(group: Any, received: Any, sent: Any, log_name: str) -> None:
        messages.append((log_name, sum(part.numel() for part in sent)))

    with (
        calls.before(dist, "all_to_all_single", note),
        calls.before(collectives, "pairwise_all_to_all", note_pairwise),
    ):
        yield messages


@pytest.mark.quick
def test_only_the_backward_before_a_flush_is_the_last() -> None:
    steps = MicroSteps(mock.Mock(), mock.Mock(_backward_active_depth=0))
    with steps.before_flush(True):
        assert steps.is_last
    assert not steps.is_last


def test_groups_reduce_once_per_step_and_buckets_overlap(ranks: Any) -> None:
    for row in ranks(8).run(collectives_case):
        inside, between, early, before_flush, open_transfers = row
        assert inside > 0 and between > 0
        assert 0 < before_flush <= between  # under the last backward, and at the flush
        assert early == 0
        assert open_transfers > 0  # the last bucket of a micro-batch is not waited for at its end


def collectives_case() -> tuple[int, ...]:
    """Train with NIG; return reductions inside the group and between groups in a step, reductions between groups
    before the last micro-batch's backward and before the flush, and open transfers."""
    pipe = pipelines.Pipe(zero={"reduce_bucket_size": 300, "overlap_comm": True})
    engine, data = pipelines.start(pipe, {"paro_strategy": "NIG", "paro_group_size": 2})
    engine.train_batch(data)
    open_transfers, early = [], []
    backward = engine._INSTRUCTION_MAP[schedule.BackwardPass]
    with exchanges() as messages:

        def count() -> int:
            return [operation for operation, _ in messages].count("inter_reduce_scatter")

        def run(engine: Any, buffer_id: int) -> None:
            early.append(count())
            backward(engine, buffer_id)

        def note(engine: Any) -> None:
            gradients = engine.optimizer.gradients["dense"]
            left_open = len(gradients._queue._completed)
            gradients.drain()  # its threads may not have caught up
            gradients._inter_queue.drain()
            open_transfers.append((count(), left_open))

        changed = {schedule.ReduceTiedGrads: note, schedule.BackwardPass: run}
        engine._INSTRUCTION_MAP = {**engine._INSTRUCTION_MAP, **changed}
        engine.train_batch(data)
    names = [operation for operation, _ in messages]
    inside, between = (names.count(f"{hop}_reduce_scatter") for hop in ("intra", "inter"))
    return inside, between, max(early), *open_transfers[-1]
