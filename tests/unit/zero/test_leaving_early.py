# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Complete buckets leave under the backward; this changes no bit.

See Note [Leaving early].
"""

import dataclasses
from typing import Any

import pytest

from tests.harness import networks, training
from tests.harness.tiers import by_strategies, with_some
from tests.harness.training import SMALL, Job

AT_BOUNDARY = ("INI", "ING", "III", "IIG", "GNG", "GIG")
IN_EACH_MICRO_STEP = ("IGG",)
_MIXED = Job(
    sizes=networks.SQUARE,
    network=networks.Mixture,  # ranks use different experts of it
    empty=False,
    steps=3,
    groups=2,
    frozen=(2,),
    zero=SMALL,
)
JOBS = {
    "each micro-batch": _MIXED,
    "accumulation, other orders": dataclasses.replace(_MIXED, network=networks.Wandering, frozen=(), accumulation=3),
    "LoCo": dataclasses.replace(
        _MIXED,
        network=None,
        skipped=((3, 1), (5, 0)),
        accumulation=2,
        between=True,
        zero={**SMALL, "zeropp_loco_param": {}},
    ),
    "overflow": dataclasses.replace(
        _MIXED, network=None, dtype="fp16", accumulation=2, between=True, overflow=((3, 1),)
    ),
}


BY_UNITS = (*AT_BOUNDARY, *IN_EACH_MICRO_STEP)
ALL, SOME = (*BY_UNITS, "GGG"), ("INI", "IIG", "IGG", "GNG", "GGG")


@pytest.mark.parametrize("job, names", with_some(JOBS, SOME, ALL), ids=by_strategies)
def test_bits_do_not_depend_on_what_leaves_early(ranks: Any, kernels: bool, job: str, names: tuple[str, ...]) -> None:
    if JOBS[job].network is networks.Wandering:
        names = tuple(name for name in names if name[0] == "I")  # ranks that gather together run the same modules
    by_rank = ranks(4).run(bits_case, names, JOBS[job])
    for name in names:
        for equal_at_boundary, equal_without_overlap, left in (found[name] for found in by_rank):
            assert equal_at_boundary and equal_without_overlap, name
            assert (left >= 1) == (name in BY_UNITS), name


def bits_case(names: list[str], job: Job) -> dict[str, tuple[bool, bool, int]]:
    """For each strategy, whether weights, losses and norms are the same if all leaves at the boundary, and without
    overlap; and how many units have left early."""
    from unittest import mock

    import torch

    from deepspeed_ext.zero.boundary import Boundary

    found, ready = {}, Boundary.ready
    for name in names:
        left: list[Any] = []

        def noting(boundary: Any, members: Any, left: list[Any] = left) -> Any:
            now = ready(boundary, members)
            left += now
            return now

        with mock.patch.object(Boundary, "ready", noting):
            early = training.train(job, training.placed(name))
        with mock.patch.object(Boundary, "ready", lambda boundary, members: []):
            late = training.train(job, training.placed(name))
        without = training.train(job, training.placed(name, overlap_comm=False))
        equal = [
            torch.equal(early.weights, other.weights) and (early.losses, early.norms) == (other.losses, other.norms)
            for other in (late, without)
        ]
        found[name] = (equal[0], equal[1], len(left))
    return found


def test_units_cross_while_a_backward_waits_for_them(ranks: Any) -> None:
    for found in ranks(4).run(crossing_cases):
        # In the first step it is not known which parameters get several gradients.
        at_boundary = {name: [False, False, False, True] for name in AT_BOUNDARY}
        assert found == at_boundary | {name: [True] * 4 for name in IN_EACH_MICRO_STEP}


def crossing_cases() -> dict[str, list[bool]]:
    """For each micro-batch of two steps of two, whether a unit has crossed when the backward comes to the first layer;
    where it may, in the last one or in each, it waits there for that."""
    import threading
    from unittest import mock

    from deepspeed_ext.zero.sharded.gradients import ShardedGradients

    job = Job(sizes=networks.SQUARE, empty=False, zero=SMALL, accumulation=2)
    found: dict[str, list[bool]] = {}
    for name in BY_UNITS:
        crossed, seen = threading.Event(), found.setdefault(name, [])
        last = "_arrive_whole" if name[1:] == "NG" else "_take" if name in AT_BOUNDARY else "_accumulate"
        awaited = (3,) if name in AT_BOUNDARY else range(4)
        original = getattr(ShardedGradients, last)

        def noting(*args: Any, original: Any = original, crossed: Any = crossed) -> None:
            original(*args)
            crossed.set()

        def pause(gradient: Any, seen: Any = seen, crossed: Any = crossed, awaited: Any = awaited) -> None:
            seen.append(crossed.wait(30) if len(seen) in awaited else crossed.is_set())

        with mock.patch.object(ShardedGradients, last, noting):
            engine, model = training.make_engine(job, training.placed(name))
            model.layers[0].register_forward_hook(lambda *call, pause=pause: call[2].register_hook(pause) and None)
            for _, (x, y) in zip(range(4), training.batches(job), strict=False):
                loss = ((engine(x) - y) ** 2).mean()
                crossed.clear()
                engine.backward(loss)
                engine.step()
            engine.destroy()
    return found


@pytest.mark.parametrize("configured", [29 * 29, 10**8], ids=["as configured", "of the model"])
def test_a_full_bucket_leaves_at_once(ranks: Any, configured: int) -> None:
    for found in ranks(2).run(full_bucket_cases, configured):
        assert found == {name: [1, 2, 3] for name in ("NIG", "NGG", "III", "GGG")}


def full_bucket_cases(configured: int) -> dict[str, list[int]]:
    """For each strategy, how many weights have left when the backward comes to the last layer but one, ..., the
    first, where a weight fills a bucket: one of so many elements, or of a sixteenth of the model."""
    from unittest import mock

    import torch

    weight = 29 * 29
    job = Job(sizes=(29,) * 5, empty=False, zero={**SMALL, "reduce_bucket_size": configured})
    found: dict[str, list[int]] = {}
    with mock.patch("deepspeed_ext.strategy._LEAST_BUCKET", 1):
        for name in ("NIG", "NGG", "III", "GGG"):
            engine, model = training.make_engine(job, training.placed(name))
            gradients, seen = engine.optimizer.gradients["dense"], found.setdefault(name, [])
            gradients.reduce = reduce = mock.Mock(wraps=gradients.reduce)

            def look(_: Any, reduce: Any = reduce, seen: Any = seen) -> None:
                sent = [each for call in reduce.mock_calls for each in call.args[0]]
                seen.append(sum((each if torch.is_tensor(each) else each[1]).numel() for each in sent) // weight)

            for layer in model.layers[:-1]:
                layer.register_forward_hook(lambda *call, look=look: call[2].register_hook(look) and None)
            x, y = next(iter(training.batches(job)))
            engine.backward(((engine(x) - y) ** 2).mean())
            engine.destroy()
    return found
