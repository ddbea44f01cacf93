# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On devices with streams nothing is used before it is complete. See Note [How order is checked]."""

from typing import Any

import pytest

from tests.harness import networks
from tests.harness.networks import SQUARE
from tests.harness.training import SMALL, Job, placed

WITHOUT_TIMER = {"timers": {"throughput": {"enabled": False}}}  # it synchronizes the device in each micro-step
CUT_ALIKE = [("III", {}), ("GGG", {}), ("GNG", {}), ("GGG", {"stage3_leaf_bytes": True})]  # p = os
# Little is gathered ahead, and nothing kept from forward to backward, but what the backward begins with.
FEW_AT_A_TIME = {"stage3_prefetch_bucket_size": 100, "stage3_max_reuse_distance": 0}


def training_case(
    name: str, more: dict[str, Any], steps: int = 3, gathering: bool = True, removed: str = ""
) -> list[str]:
    """What has no order in some steps of two micro-steps each. Ranks leave experts of a leaf module out.

    Args:
        name: of a strategy, or a stage.
        more: keys of zero_optimization.
        steps: how many.
        gathering: whether one parameter is looked at, and one changed, between forward and backward, while gathers for
            the backward are on their way.
        removed: "Class.method" of ours that does nothing instead: something that orders streams.
    """
    import contextlib
    import pkgutil
    from unittest import mock

    import deepspeed

    from tests.harness import training
    from tests.harness.stream_order import device_with_streams

    job = Job(
        sizes=SQUARE,
        network=networks.Mixture,
        accumulation=2,
        empty=False,
        zero={**SMALL, **FEW_AT_A_TIME, **more},
        config=WITHOUT_TIMER,
    )
    with contextlib.ExitStack() as context:
        order = context.enter_context(device_with_streams())
        if removed:
            owner, _, method = removed.rpartition(".")
            context.enter_context(mock.patch.object(pkgutil.resolve_name(owner), method, lambda *_: None))
        engine, model = training.make_engine(job, placed(name))
        data = training.batches(job)
        batches = [next(data) for _ in range(2 * steps)]
        with order.watch():
            for x, y in batches:
                loss = ((engine(x) - y) ** 2).mean()
                if gathering:
                    with deepspeed.zero.GatheredParameters([model.unused]):
                        model.unused.sum()
                    with deepspeed.zero.GatheredParameters([model.layers[0].weight], modifier_rank=0):
                        model.layers[0].weight.data.mul_(1.5)
                engine.backward(loss)
                engine.step()
        engine.destroy()  # while the device has streams: what is in flight is completed
    return [str(finding) for finding in order.findings]


@pytest.mark.parametrize("name, more", [*CUT_ALIKE, ("ING", {}), ("IGG", {})])
def test_nothing_is_used_before_it_is_complete(ranks: Any, name: str, more: dict[str, Any]) -> None:
    assert ranks(4).run(training_case, name, more) == [[]] * 4


@pytest.mark.parametrize("name, more", CUT_ALIKE)
def test_gathers_that_do_not_wait_for_the_step_are_found(ranks: Any, name: str, more: dict[str, Any]) -> None:
    removed = "deepspeed_ext.zero.coordinator:GroupCoordinator.follow"
    for found in ranks(4).run(training_case, name, more, 2, False, removed):
        assert any("copy_ wrote on compute at runtime/zero/stage3.py" in before(one) for one in found), found


def test_stage_3_of_deepspeed_has_an_order_where_parameters_persist(ranks: Any) -> None:
    # It gathers them after a step, and then has the host wait for the device.
    persist = {"stage3_param_persistence_threshold": 50}
    assert ranks(4).run(training_case, "3", persist, 2, False) == [[]] * 4


def test_compute_waits_for_no_update_that_is_gathered_ahead(ranks: Any) -> None:
    for waits, pulled, calls in ranks(4).run(updates_case):
        assert calls > 10 and not waits and not pulled


def updates_case() -> tuple[int, int, int]:
    """Where a block of slices is waited for under IIG: how often that puts the stream that computes behind a wire, how
    often it puts the stream of gathers behind what computes, and how often it is waited for."""
    from unittest import mock

    from deepspeed_ext.zero.slices import Slices
    from tests.harness import training
    from tests.harness.stream_order import device_with_streams

    job = Job(sizes=SQUARE, empty=False, zero={**SMALL, **FEW_AT_A_TIME}, config=WITHOUT_TIMER)
    waits, pulled = [], []
    plain = Slices._wait_for_updates
    with device_with_streams() as order:

        def seen_of_wires() -> dict[int, int]:
            return {one.number: order.default.clock.get(one.number, 0) for one in order.streams if "wire" in one.name}

        def watched(self: Slices, params: Any) -> None:
            wires, computed = seen_of_wires(), order.current.clock.get(order.default.number, 0)
            plain(self, params)
            waits.append(seen_of_wires() != wires and order.current is not order.default)
            pulled.append(order.current.clock.get(order.default.number, 0) > computed)

        engine, _ = training.make_engine(job, placed("IIG"))
        data = training.batches(job)
        with mock.patch.object(Slices, "_wait_for_updates", watched), order.watch():
            for number in range(3):
                training.micro_step(engine, job, number, *next(data))
                engine.step()
        engine.destroy()
    return sum(waits), sum(pulled), len(waits)


@pytest.mark.parametrize("name", ["III", "GGG"])
def test_a_gather_that_another_stream_has_finished_is_waited_for(ranks: Any, name: str) -> None:
    assert ranks(4).run(gathers_case, name) == [([], True)] * 4


def gathers_case(name: str) -> tuple[list[str], bool]:
    """What has no order where parameters are gathered ahead on a stream, and others meanwhile on the current one.

    Gathers are finished in the order in which they have begun, so the second finishes the first. Also, whether the
    gathered parameters may be freed afterwards without one.
    """
    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from tests.harness import training
    from tests.harness.stream_order import device_with_streams

    with device_with_streams() as order:
        engine, model = training.make_engine(Job(sizes=SQUARE, empty=False, zero=SMALL), placed(name))
        ahead, used = get_accelerator().Stream(), get_accelerator().current_stream()
        params = list(model.layers[0].parameters())
        with order.watch():
            ahead.wait_stream(used)
            with get_accelerator().stream(ahead):
                handle = params[0].all_gather_coalesced(params)
            with deepspeed.zero.GatheredParameters([model.unused]):
                model.unused.sum()  # without a look at the sum, which would synchronize
            with get_accelerator().stream(ahead):
                handle.wait()
                torch.zeros(10)
            used.wait_stream(ahead)
            whole = sum(param.abs().sum() for param in params)
            params[0].partition(param_list=params)
            torch.zeros(10)
        engine.destroy()
        return [str(finding) for finding in order.findings], bool(whole > 0)


def before(finding: str) -> str:
    """The access that came first."""
    return finding.rpartition("behind:")[2]


def test_what_has_no_order_is_found(ranks: Any) -> None:
    for found in ranks(4).run(checker_case):
        assert found == {name: name.startswith("!") for name in found} and len(found) == 16


def checker_case() -> dict[str, bool]:
    """Whether anything is found in small programs; those that lack an order have names that begin with "!"."""
    import torch
    from deepspeed import comm as dist
    from deepspeed.accelerator import get_accelerator

    from tests.harness.stream_order import device_with_streams

    def written(side: Any) -> torch.Tensor:
        tensor = torch.zeros(8)
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            tensor[:4].fill_(1)
        return tensor

    def ordered(side: Any, how: Any) -> None:
        tensor = written(side)
        how()
        tensor.sum()

    def by_event(side: Any) -> None:
        tensor, event = written(side), get_accelerator().Event()
        event.record(side)
        side.wait_stream(get_accelerator().current_stream())
        get_accelerator().current_stream().wait_event(event)
        tensor.sum()

    def by_answer(side: Any) -> None:
        tensor = written(side)
        with get_accelerator().stream(side):
            tensor[0].item()
        tensor.sum()

    def overwritten(side: Any) -> None:
        tensor = torch.zeros(8)
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            tensor.view(2, 4).sum()
        tensor.t().fill_(1)

    def reduced(side: Any, waits: int, reads: bool = True) -> None:
        tensor = torch.zeros(8)
        handle = dist.all_reduce(tensor, async_op=True)
        if waits == 2:
            with get_accelerator().stream(side):
                handle.wait()
        if waits == 1:
            handle.wait()
        tensor.sum() if reads else tensor[0].fill_(1)
        handle.wait()

    def freed(side: Any, then: Any = lambda tensor: None, afterwards: Any = lambda: None) -> None:
        tensor = torch.zeros(8)
        side.wait_stream(get_accelerator().current_stream())
        with get_accelerator().stream(side):
            tensor.sum()
        then(tensor)
        del tensor
        afterwards()
        torch.zeros(8)

    def here() -> Any:
        return get_accelerator().current_stream()

    programs: dict[str, Any] = {
        "!read": lambda side: ordered(side, lambda: None),
        "read behind a stream": lambda side: ordered(side, lambda: here().wait_stream(side)),
        "read behind the device": lambda side: ordered(side, get_accelerator().synchronize),
        "read behind the host": lambda side: ordered(side, side.synchronize),
        "read behind an event": by_event,
        "read behind an answer": by_answer,
        "read beside": lambda side: written(side)[4:].sum(),
        "!read across": lambda side: written(side)[3:].sum(),
        "!overwritten": overwritten,
        "!reduced": lambda side: reduced(side, 0),
        "!reduced, and overwritten": lambda side: reduced(side, 0, False),
        "!reduced for another stream": lambda side: reduced(side, 2),
        "reduced for this stream": lambda side: reduced(side, 1),
        "!freed": freed,
        "freed and recorded": lambda side: freed(side, lambda tensor: tensor.record_stream(side)),
        "freed, and late": lambda side: freed(side, afterwards=lambda: here().wait_stream(side)),
    }
    found = {}
    with device_with_streams() as order:
        for name, program in programs.items():
            order.findings.clear()
            with order.watch():
                program(get_accelerator().Stream())
            found[name] = bool(order.findings)
    return found
