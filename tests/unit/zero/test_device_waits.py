# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Devices with streams: waits of the host, defaults of overlap, and the order in which updates are sent."""

import gc
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deepspeed_ext.comm.redistribution import ParameterRedistribution
from deepspeed_ext.strategy import STRATEGIES
from deepspeed_ext.zero.factory import use_overlap_defaults
from deepspeed_ext.zero.stage3 import Stage3Optimizer
from tests.harness import calls, training
from tests.harness.logs import logged
from tests.harness.networks import SQUARE
from tests.harness.stream_cases import micro_step
from tests.harness.stream_order import asking, device_with_streams
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Job, placed

BY_PARAMETER = {"sub_group_size": 100}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}


def host_waits_case(names: Sequence[str], dtype: str, config: dict[str, Any], zero: dict[str, Any]) -> dict[str, Any]:
    """Return how often the host waits in micro-steps 5 to 8, which are two steps, for each strategy or stage.

    Kinds are "device", "stream", "event", and "answer" (a value), in ``engine.step()`` or outside of it. The events
    are DeepSpeed's limits on how far the host may be ahead of gathers and reductions.
    """
    job = Job(sizes=SQUARE, accumulation=2, empty=False, zero=SMALL, dtype=dtype, config=config)
    waits: dict[str, Counter[str]] = {name: Counter() for name in names}

    def count(name: str, waited: Counter[Any], where: str) -> None:
        for wait, number in waited.items():
            kind = wait.what if wait.what in ("device", "stream", "event") else "answer"
            waits[name][f"{kind} {where}"] += number

    for name in names:
        with device_with_streams() as order:
            engine, model, data = training.begin(job, placed(name, **zero))
            batches = [next(data) for _ in range(8)]
            gc.collect()  # an earlier engine; if it ended now, the host would wait
            with order.watch(), asking(order):
                for number, batch in enumerate(batches, 1):
                    before = order.synchronizations.copy()
                    micro_step(engine, model, job, number - 1, batch, gathering=False)
                    between = order.synchronizations.copy()
                    engine.step()
                    if number >= 5:
                        count(name, between - before, "outside")
                        count(name, order.synchronizations - between, "in step")
            engine.destroy()
    return waits


@with_cases(
    "dtype, config, zero, names",
    ("fp16", {}, {}, ("NIG", "IIG")),
    # The scale of torch's scaler is on the device; each message in four bits needs it.
    *deep(("fp32", {"torch_autocast": {"enabled": True, "dtype": "float16"}}, {"zeropp_loco_param": {}}, ("IIG",))),
    *deep(("fp16", {}, {}, (*REPLICATED, *PARTITIONED))),
)
def test_the_host_waits_only_to_decide_a_step(
    ranks: Any, kernels: bool, dtype: str, config: dict[str, Any], zero: dict[str, Any], names: tuple[str, ...]
) -> None:
    ours = ranks(4).run(host_waits_case, names, dtype, config, zero | BY_PARAMETER)[0]
    # DeepSpeed waits once for each sub-group: with one parameter each, their number is the same with strategies.
    stages = sorted({"2" if name.startswith("N") else "3" for name in names})
    stocks = ranks(4).run(host_waits_case, stages, dtype, config, BY_PARAMETER)[0]
    assert all(waits["device outside"] >= 4 <= waits["device in step"] for waits in stocks.values())
    for name, waits in ours.items():
        stock = stocks["2" if name.startswith("N") else "3"]
        assert set(waits) <= {"event outside", "answer in step"}, (name, waits)
        scales = 2 if zero else 0  # once in a step
        assert waits["answer in step"] <= stock["answer in step"] + scales, (name, waits, stock)


def test_four_bit_messages_use_the_scale_of_their_step(ranks: Any, kernels: bool) -> None:
    for scales in ranks(4).run(scales_case):
        assert len({scale for scale, _ in scales}) > 1
        assert all(used_scale == scale for scale, used_scale in scales)


def scales_case() -> list[tuple[float, float]]:
    """Return the scale of torch's scaler after each step, in which it grows, and the scale that 4-bit messages use."""
    autocast = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
    job = Job(sizes=SQUARE, empty=False, steps=3, zero={**SMALL, "zeropp_loco_param": {}}, config=autocast)
    engine, _ = training.make_engine(job, placed("NIG"))
    engine.optimizer.torch_autocast_gradscaler.set_growth_interval(1)
    data = training.batches(job)
    scales = []
    for number in range(job.steps):
        training.step(engine, job, number, data)
        optimizer = engine.optimizer
        scales.append((optimizer.torch_autocast_gradscaler.get_scale(), optimizer.gradient_scale.value()))
    return scales


def settings(synchronized: bool | None, overlap: bool | None, managed: bool = True) -> Any:
    """Return the part of a parsed configuration that ``use_overlap_defaults`` reads."""
    section = {} if overlap is None else {"overlap_comm": overlap}
    return SimpleNamespace(
        _param_dict={"zero_optimization": section},
        managed_gradient_accumulation=managed,
        timers_config=SimpleNamespace(
            synchronized=synchronized is not False,
            model_fields_set=set() if synchronized is None else {"synchronized"},
        ),
        zero_config=SimpleNamespace(overlap_comm=bool(overlap)),
    )


@pytest.mark.quick
def test_overlap_is_the_default_only_with_streams() -> None:
    def used(name: str, config: Any) -> tuple[bool, bool, int]:
        changed = use_overlap_defaults(config, STRATEGIES[name])
        return config.timers_config.synchronized, config.zero_config.overlap_comm, len(changed)

    assert used("NIG", settings(None, None)) == (True, False, 0)  # the CPU
    with device_with_streams():
        assert used("NIG", settings(None, None)) == (False, True, 2)
        assert used("NNG", settings(None, None)) == (False, True, 2)
        assert used("NIG", settings(True, None)) == (True, True, 1)
        assert used("NIG", settings(None, False)) == (False, False, 1)
        assert used("NIG", settings(False, True)) == (False, True, 0)
        # DeepSpeed rejects overlap at stage 1 if the caller manages accumulation.
        assert used("NNG", settings(None, None, managed=False)) == (False, False, 1)
        assert used("NIG", settings(None, None, managed=False)) == (False, True, 2)


def test_changed_defaults_are_used_and_logged(ranks: Any) -> None:
    for lines, overlaps in ranks(2).run(defaults_case):
        assert overlaps == [True, False]
        assert not lines or [line.partition("(defaults changed: ")[2] for line in lines] == [
            "timers.throughput.synchronized false, zero_optimization.overlap_comm true)",
            "timers.throughput.synchronized false)",
        ]


def defaults_case() -> tuple[list[str], list[bool]]:
    """Return log lines about two engines, and whether their optimizers overlap: by default, and with overlap off."""
    overlaps = []
    with device_with_streams(), logged() as lines:
        for zero in ({}, {"overlap_comm": False}):
            engine, _ = training.make_engine(Job(zero=SMALL), placed("NIG", group_size=1, **zero))
            overlaps.append(engine.optimizer.overlap_comm)
            engine.destroy()
    return [line for _, line in lines if "data-parallel ranks" in line], overlaps


def test_updates_are_sent_in_the_order_of_the_model(ranks: Any) -> None:
    """The order is not that of parameter groups, of which the second one has every other layer."""
    for sent in ranks(4).run(updates_case):
        assert len(sent) > 2 and sent == sorted(sent)


def updates_case() -> list[int]:
    job = Job(sizes=(16,) * 7, empty=False, groups=2, zero={**SMALL, "stage3_prefetch_bucket_size": 600})
    sent: list[int] = []
    with device_with_streams():
        engine, _ = training.make_engine(job, placed("IIG", sub_group_size=300))
        slices = engine.optimizer.slices["dense"]
        training.micro_step(engine, job, 0, *next(training.batches(job)))

        def note(*_: Any) -> None:
            sent.append(slices._windows[len(sent)].members[0])

        with calls.before(ParameterRedistribution, "gather_g_to_i_in_place", note):
            engine.step()
        engine.destroy()
    return sent


def test_bucket_buffers_are_reusable_after_a_micro_step(ranks: Any) -> None:
    assert ranks(2).run(buffers_case) == [(True, False)] * 2


def buffers_case() -> tuple[bool, bool]:
    """Return whether any tensor was recorded on another stream than its own, and whether a bucket's buffer was: its
    memory would be reusable only when that stream gets there, and the host is some micro-steps ahead."""
    recorded: set[int] = set()
    buffers: set[int] = set()
    with device_with_streams() as order:
        engine, _ = training.make_engine(Job(zero={"reduce_bucket_size": 600}), placed("NGG", group_size=1))
        plain = order.record

        def record(tensor: torch.Tensor, stream: Any) -> None:
            recorded.add(tensor.untyped_storage().data_ptr())
            buffers.update(buffer.untyped_storage().data_ptr() for buffer, _ in engine.optimizer.buckets._free)
            plain(tensor, stream)

        order.record = record  # type: ignore[method-assign]
        with order.watch():
            training.micro_step(engine, Job(), 0, *next(training.batches(Job())))
        engine.destroy()
    return bool(recorded), bool(recorded & buffers)


def test_offloaded_optimizers_send_updates_during_the_step(ranks: Any) -> None:
    for log in ranks(4).run(early_case):
        assert log.count("step") > 2
        assert [kind for kind, _ in groupby(log)] == ["step", "send"] * log.count("step")


def early_case() -> list[str]:
    log: list[str] = []
    job = Job(sizes=SQUARE, empty=False, zero={**SMALL, **OFFLOADED})
    engine, _ = training.make_engine(job, placed("IIG", sub_group_size=600))
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    with (
        calls.before(Stage3Optimizer, "_optimizer_step", lambda *_: log.append("step")),
        calls.before(ParameterRedistribution, "gather_g_to_i_in_place", lambda *_: log.append("send")),
    ):
        engine.step()
    return log


def test_a_step_does_not_wait_for_pageable_copies(ranks: Any) -> None:
    for pinned, complete in ranks(4).each(windows_case, (True, False)):
        assert set(complete) == {pinned}, (pinned, complete)


def windows_case(pinned: bool) -> list[bool]:
    """Return whether the device has received all of each window of host parameters when a step ends, in memory that is
    pinned, or pageable, for whose copies the host would wait."""
    with device_with_streams():
        on_host = {"offload_param": {"device": "cpu", "pin_memory": pinned}}
        engine, _ = training.make_trained(Job(sizes=SQUARE, empty=False, zero=SMALL), placed("IIG", **on_host))
        complete = [update.is_complete for update in engine.optimizer.slices["dense"]._update_of.values()]
        engine.destroy()
    return complete


@pytest.mark.parametrize("name", ["GNG", "ING"])
def test_gradients_of_an_offloaded_optimizer_stay_in_place(ranks: Any, name: str) -> None:
    for places in ranks(4).run(addresses_case, name):
        assert len(set(places)) == 1


def addresses_case(name: str) -> list[int]:
    """Return the addresses of the gradients of the optimizer's shard: when created, and at three boundaries."""
    job = Job(sizes=SQUARE, empty=False, accumulation=2, zero={**SMALL, **OFFLOADED})
    engine, _, data = training.begin(job, placed(name))
    places = [engine.optimizer.gradients["dense"].shard.data_ptr()]
    for number in range(6):
        training.micro_step(engine, job, number, *next(data))
        if number % 2:
            places.append(engine.optimizer.gradients["dense"].shard.data_ptr())
        engine.step()
    return places
