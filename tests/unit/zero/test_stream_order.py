# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""On devices with streams nothing is used before it is complete. See Note [How order is checked]."""

from typing import Any

import networks
import pytest
from networks import SQUARE
from training import SMALL, Job, placed

WITHOUT_TIMER = {"timers": {"throughput": {"enabled": False}}}  # it synchronizes the device in each micro-step
CUT_ALIKE = [("III", {}), ("GGG", {}), ("GNG", {}), ("GGG", {"stage3_leaf_bytes": True})]  # p = os
# Little is gathered ahead, and nothing kept from forward to backward, but what the backward begins with.
FEW_AT_A_TIME = {"stage3_prefetch_bucket_size": 100, "stage3_max_reuse_distance": 0}


def training_case(name: str, more: dict[str, Any], removed: str = "") -> list[str]:
    """What has no order in four steps of two micro-steps each.

    Between forward and backward, while gathers for the backward are on their way, one parameter is looked at and one
    is changed. Ranks leave experts of a leaf module out.

    Args:
        name: of a strategy, or a stage.
        more: keys of zero_optimization.
        removed: "Class.method" of ours that does nothing instead: something that orders streams.
    """
    import contextlib
    import pkgutil
    from unittest import mock

    import deepspeed
    import training
    from stream_order import device_with_streams

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
        batches = [next(data) for _ in range(8)]
        with order.watch():
            for x, y in batches:
                loss = ((engine(x) - y) ** 2).mean()
                with deepspeed.zero.GatheredParameters([model.unused]):
                    model.unused.sum()
                with deepspeed.zero.GatheredParameters([model.layers[0].weight], modifier_rank=0):
                    model.layers[0].weight.data.mul_(1.5)
                engine.backward(loss)
                engine.step()
    return [str(finding) for finding in order.findings]


@pytest.mark.parametrize("name, more", [*CUT_ALIKE, ("ING", {}), ("IIG", {}), ("IGG", {})])
def test_nothing_is_used_before_it_is_complete(ranks: Any, name: str, more: dict[str, Any]) -> None:
    assert ranks(4).run(training_case, name, more) == [[]] * 4


@pytest.mark.parametrize("name, more", CUT_ALIKE)
def test_gathers_that_do_not_wait_for_the_step_are_found(ranks: Any, name: str, more: dict[str, Any]) -> None:
    removed = "deepspeed_ext.zero.coordinator:GroupCoordinator.follow"
    for found in ranks(4).run(training_case, name, more, removed):
        assert any("runtime/zero/stage3.py" in before(one) and "parameters.py" in one for one in found), found


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
    import training
    from deepspeed.accelerator import get_accelerator
    from stream_order import device_with_streams

    with device_with_streams() as order:
        _, model = training.make_engine(Job(sizes=SQUARE, empty=False, zero=SMALL), placed(name))
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
        return [str(finding) for finding in order.findings], bool(whole > 0)


def before(finding: str) -> str:
    """The access that came first."""
    return finding.rpartition("behind:")[2]
