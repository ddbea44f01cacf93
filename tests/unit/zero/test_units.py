# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Modules fetched as one train what unmodified ZeRO-3 trains.

To the bit on two ranks, where a sum over ranks has one order. But leaf modules, DeepSpeed's own as well, leave fewer
nodes in autograd's graph: where a tensor has three consumers or more, its gradients may be summed in another order.
Such networks are compared to the bit with stock ZeRO-3 that has the same leaf modules, set by hand.
"""

from typing import Any

import mixtures
import pytest
import training
from training import Job, check

SMALL = {"stage3_param_persistence_threshold": 0, "reduce_bucket_size": 500, "sub_group_size": 700}
AUTO = {"stage3_leaf_bytes": True}
BLOCKS = {"stage3_leaf_bytes": 22_000}  # blocks of experts fit, and layers do not


def job_of(network: Any, **more: Any) -> Job:
    """A job with Adam: it would show a missing or doubled gradient of any parameter."""
    return Job(**{"network": network, "optimizer": "Adam", "empty": False, "zero": SMALL, "steps": 4, **more})


def against(job: Job, variants: list[dict[str, Any]], oracle: dict[str, Any]) -> list[Any]:
    """Differences of variants of zero_optimization from the oracle's."""
    stock = training.train(job, oracle)
    rows = []
    for zero in variants:
        kind: list[str] = []
        ours = training.train(job, zero, look=lambda engine, kind=kind: kind.append(type(engine.optimizer).__name__))
        rows.append(training.difference(str(zero), ours, stock, kind[0]))
    return rows


def exact(rows: list[Any]) -> None:
    """Not a bit is different."""
    for row in rows:
        assert (row.weights, row.losses, row.norms) == (0.0, 0.0, 0.0), row
        assert row.replicas_equal and row.same_decisions, row


NETWORKS = ["Mixtures", "ByKeyword", "Tied", "FrozenStem", "TwoOutputs", "Looped", "Nested"]
BY_HAND = {"stage": 3, "leaf_module": {"classes": ["Layer"]}}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_every_network_on_two_ranks(ranks: Any, name: str, accumulation: int) -> None:
    job = job_of(getattr(mixtures, name), accumulation=accumulation)
    variants = [{"stage": 3, **keys} for keys in (AUTO, BLOCKS)]
    rows = ranks(2).run(against, job, variants, {"stage": 3})[0]
    exact(rows) if name == "Nested" else check(rows)


@pytest.mark.parametrize("name", ["Mixtures", "Tied", "Routed"])
def test_the_same_units_by_hand(ranks: Any, name: str) -> None:
    job = job_of(getattr(mixtures, name), accumulation=2)
    exact(ranks(2).run(against, job, [{"stage": 3, **AUTO}], BY_HAND)[0])


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_on_four_ranks_in_two_groups(ranks: Any, name: str) -> None:
    job = job_of(getattr(mixtures, name), accumulation=2)
    variants = [training.placed(strategy, **AUTO) for strategy in training.PARTITIONED]
    check(ranks(4).run(against, job, variants, {"stage": 3})[0])
