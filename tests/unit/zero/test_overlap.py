# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Communication during compute: it runs earlier than without overlap, and results are bitwise equal.

See Note [Early reduction].
"""

import threading
from typing import Any
from unittest import mock

import torch

from deepspeed_ext.zero.boundary import Boundary
from deepspeed_ext.zero.sharded.gradients import ShardedGradients
from tests.harness import calls, networks, training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Job, placed

AT_BOUNDARY = ("INI", "ING", "III", "IIG", "GNG", "GIG")
IN_EACH_MICRO_STEP = ("IGG",)
BY_UNITS = (*AT_BOUNDARY, *IN_EACH_MICRO_STEP)  # these send units of gradients before the boundary
LOCO = {**SMALL, "zeropp_loco_param": {}}
OFFLOAD = {**SMALL, "offload_optimizer": {"device": "cpu"}}
FP32_SUMS = {"data_types": {"grad_accum_dtype": "fp32"}}
_MIXED: dict[str, Any] = {"network": networks.Mixture, "sizes": networks.SQUARE, "groups": 2, "frozen": (2,)}
_ORDERS: dict[str, Any] = {"network": networks.Wandering, "accumulation": 2}
_RESTING: dict[str, Any] = {**_MIXED, "network": None, "skipped": ((3, 1), (5, 0)), "accumulation": 2}
# The job, its strategies in the first tier, and its strategies in the deep tier.
JOBS: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[str, ...]]] = {
    "groups": ({"accumulation": 3, "groups": 2}, (), REPLICATED),
    "fp32 sums": ({"dtype": "bf16", "frozen": (1,), "config": FP32_SUMS}, (), REPLICATED),
    "overflow": ({"dtype": "fp16", "overflow": ((1, 2), (2, 0)), "accumulation": 2}, (), REPLICATED),
    "LoCo": ({"zero": LOCO, "optimizer": "Adam", "groups": 2}, (), REPLICATED),
    "other orders": ({**_ORDERS, "sizes": (29, 29, 29, 29)}, (), REPLICATED[:-1]),
    "first layers last": ({"skipped": ((1, 0), (2, 2), (3, 1)), "accumulation": 2}, ("NIG",), REPLICATED),
    "an unused layer": ({"skipped": ((0, 2), (1, 2), (2, 2))}, (), REPLICATED),
    "boundaries of the user": ({"boundary": "user", "accumulation": 2}, (), REPLICATED),
    "boundaries in step": ({"boundary": "step", "accumulation": 2}, (), REPLICATED[3:]),
    "offload": ({"zero": OFFLOAD, "optimizer": "Adam"}, ("NII",), REPLICATED),
    "sharded": (_MIXED, ("IIG",), PARTITIONED),
    # Ranks that gather together run the same modules.
    "sharded, other orders": ({**_ORDERS, "sizes": networks.SQUARE, "groups": 2}, (), PARTITIONED[:5]),
    "sharded, LoCo": ({**_RESTING, "zero": LOCO}, ("IGG",), PARTITIONED),
    "sharded, overflow": ({**_RESTING, "dtype": "fp16", "overflow": ((3, 1),)}, (), PARTITIONED),
}


@with_cases(
    "job, names",
    *((job, some) for job, (_, some, _) in JOBS.items() if some),
    *deep(*((job, every) for job, (*_, every) in JOBS.items())),
)
def test_results_with_overlap_are_bitwise_equal(ranks: Any, kernels: bool, job: str, names: tuple[str, ...]) -> None:
    for name, (equal, number_sent, ahead) in ranks(4).each(bits_case, names, JOBS[job][0]):
        assert equal == [True, True], name
        early = name in BY_UNITS or (name in REPLICATED[:-1] and job != "boundaries in step")
        assert (number_sent >= 1) == early, (name, number_sent)
        assert ahead == (name in REPLICATED[1:]), name


def bits_case(name: str, details: dict[str, Any]) -> tuple[list[bool], int, bool]:
    """Return whether weights, losses, and norms are the same if all buckets are sent at the boundary, and without
    overlap; how many buckets are sent early; and whether steps end before parameters are received."""
    job = Job(**{"steps": 3, "empty": False, "zero": SMALL, **details})
    sent: list[Any] = []
    ahead = [False]

    def look(engine: Any) -> None:
        updates = getattr(engine.optimizer, "updates", None)
        ahead[0] = updates is not None and bool(updates.gathers._started)

    keys = placed(name, overlap_comm=True)
    with mock.patch.object(Boundary, "mark_ready", lambda boundary, members, **more: []):
        late = training.train(job, keys)
    without = training.train(job, placed(name, overlap_comm=False))
    with calls.after(Boundary, "mark_ready", lambda buckets, *_, **__: sent.extend(buckets)):
        early = training.train(job, {**keys, "paro_overlap_updates": True} if name in REPLICATED else keys, look)
    equal = [
        torch.equal(early.weights, other.weights) and (early.losses, early.norms) == (other.losses, other.norms)
        for other in (late, without)
    ]
    return equal, len(sent), ahead[0]


def test_units_are_reduced_during_the_backward(ranks: Any) -> None:
    for name, rows in ranks(4).each(early_units_case, BY_UNITS):
        # In the first step it is not known which parameters get several gradients.
        assert rows == ([False, False, False, True] if name in AT_BOUNDARY else [True] * 4), (name, rows)


def early_units_case(name: str) -> list[bool]:
    """Return for each micro-batch of two steps of two whether a unit was reduced when the backward reaches the first
    layer; the layer waits for that in the last micro-batch, or in each, if the strategy allows it."""
    job = Job(sizes=networks.SQUARE, empty=False, zero=SMALL, accumulation=2)
    sent, was_sent = threading.Event(), list[bool]()
    last = "_add_full_bucket" if name[1:] == "NG" else "_store_sums" if name in AT_BOUNDARY else "_accumulate"
    awaited = (3,) if name in AT_BOUNDARY else range(4)

    def pause(gradient: Any) -> None:
        was_sent.append(sent.wait(30) if len(was_sent) in awaited else sent.is_set())

    with calls.after(ShardedGradients, last, lambda *_: sent.set()):
        engine, model = training.make_engine(job, placed(name))
        model.layers[0].register_forward_hook(lambda *call: call[2].register_hook(pause) and None)
        for _, (x, y) in zip(range(4), training.batches(job), strict=False):
            loss = ((engine(x) - y) ** 2).mean()
            sent.clear()
            engine.backward(loss)
            engine.step()
    return was_sent


def test_a_full_bucket_is_sent_at_once(ranks: Any) -> None:
    for configured in (29**2, 10**8):
        for name, counts in ranks(2).each(full_bucket_case, ("NIG", "NGG", "III", "GGG"), configured):
            assert counts == [1, 2, 3], (configured, name, counts)


def full_bucket_case(name: str, configured: int) -> list[int]:
    """Return how many weights have been sent when the backward reaches the last layer but one, ..., the first. A
    weight fills a bucket of this number of elements, or of a sixteenth of the model."""
    job = Job(sizes=(29,) * 5, empty=False, zero={**SMALL, "reduce_bucket_size": configured, "overlap_comm": True})
    counts: list[int] = []
    with mock.patch("deepspeed_ext.strategy._LEAST_BUCKET", 1):
        engine, model = training.make_engine(job, placed(name))
        gradients = engine.optimizer.gradients["dense"]
        gradients.reduce = reduce = mock.Mock(wraps=gradients.reduce)

        def look(_: Any) -> None:
            sent = [each for call in reduce.mock_calls for each in call.args[0]]
            counts.append(sum((each if torch.is_tensor(each) else each[1]).numel() for each in sent) // 29**2)

        for layer in model.layers[:-1]:
            layer.register_forward_hook(lambda *call: call[2].register_hook(look) and None)
        training.micro_step(engine, job, 0, *next(training.batches(job)))
    return counts
