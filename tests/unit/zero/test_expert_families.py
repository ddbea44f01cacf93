# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's MoE layers under strategies with p = N train what its stages 1 and 2 train; see ``zero/families.py``."""

from functools import partial
from typing import Any

import pytest

from tests.harness import training
from tests.harness.training import BF16, REPLICATED, Difference, Job

SIZES = (13, 10, 10, 7)
SMALL_BUCKETS = {"reduce_bucket_size": 300, "allgather_bucket_size": 300}
check = partial(training.check, optimizer="Stage12Optimizer")


def run(ranks: Any, ep: int, job: dict[str, Any], world: int = 4, group: int = 2, **kwargs: Any) -> list[Difference]:
    """Rows of rank 0; all ranks must agree on what concerns replicas."""
    rows = ranks(world).run(routed_case, ep, job, group, **kwargs)
    assert all(row.replicas_equal for of in rows for row in of)
    return [max(of, key=lambda row: row.weights) for of in zip(*rows, strict=True)]


def routed_case(ep: int, job: dict[str, Any], group: int, **kwargs: Any) -> list[Difference]:
    """Train a mixture whose experts are spread over ``ep`` ranks."""
    from tests.harness import networks

    network = {1: networks.Routed, 2: networks.RoutedOverTwo, 4: networks.RoutedOverFour}[ep]
    zero = {**SMALL_BUCKETS, **job.pop("zero", {})}
    return training.compare(Job(sizes=SIZES, network=network, zero=zero, **job), group, **kwargs)


@pytest.mark.parametrize("world, ep, group", [(4, 1, 2), (4, 2, 2), (4, 4, 2), (4, 2, 4), (4, 2, 1), (6, 2, 2)])
def test_parity_at_every_shape(ranks: Any, world: int, ep: int, group: int) -> None:
    check(run(ranks, ep, {"accumulation": 2, "steps": 3}, world, group))


@pytest.mark.parametrize("ep, group", [(4, 2), (2, 4)])
def test_parity_of_eight_ranks(ranks: Any, ep: int, group: int) -> None:
    check(run(ranks, ep, {"accumulation": 3, "steps": 3}, 8, group))


@pytest.mark.parametrize(
    "job",
    [
        {"groups": 2, "frozen": (1,), "optimizer": "Adam", "accumulation": 2},
        {"zero": {"overlap_comm": True}, "accumulation": 3, "skipped": [(n, 1) for n in range(9) if n % 3]},
        {"zero": {"round_robin_gradients": True}, "clipping": 0.0},
        {"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": "Adam"},
        {"boundary": "step", "backward": "loss", "accumulation": 2},
    ],
    ids=["groups, frozen", "overlap, skipped", "round robin, no clipping", "offload", "own boundary"],
)
def test_parity_with_keys_of_deepspeed(ranks: Any, job: dict[str, Any]) -> None:
    check(run(ranks, 2, {"steps": 3, **job}))


@pytest.mark.parametrize("ep, group", [(2, 2), (4, 2)])
def test_experts_of_autoep(ranks: Any, ep: int, group: int) -> None:
    check(ranks(4).run(autoep_case, ep, {"accumulation": 2, "steps": 3}, group)[0])


def autoep_case(ep: int, job: dict[str, Any], group: int, **kwargs: Any) -> list[Difference]:
    """Train a model of transformers whose experts DeepSpeed spreads over ``ep`` ranks."""
    from tests.harness import experts

    zero = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000}
    job = {"sizes": SIZES, "network": experts.SmallMixtral, "zero": zero, "config": experts.autoep(ep), **job}
    return training.compare(Job(**job), group, **kwargs)


def test_sixteen_bits(ranks: Any) -> None:
    check(run(ranks, 2, {"dtype": "bf16", "accumulation": 2, "steps": 3}), **BF16)
    job = {"dtype": "fp16", "accumulation": 2, "steps": 4, "overflow": [(3, 1)]}
    check(run(ranks, 2, job, strategies=REPLICATED), weights=2e-3, losses=1e-2, norms=4e-3)
