# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Stock DeepSpeed's results are kept over cases, and equal those of a fresh run."""

from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.quick


def test_kept_results_equal_those_of_a_fresh_run(ranks: Any) -> None:
    pool = ranks(2)
    # In the second case nothing trains; a rank that has lost its records makes all train again.
    assert pool.run(stock_case, False) == [[True, 1]] * 2
    assert pool.run(stock_case, False) == [[True, 0]] * 2
    assert pool.run(stock_case, True) == [[True, 1]] * 2


def stock_case(lost: bool) -> list[Any]:
    """Whether stock's record is that of a fresh run to the bit, and how often stock trained for it."""
    import torch
    from deepspeed import comm as dist

    from tests.harness import kept, training

    job, zero = training.Job(steps=2, accumulation=2, dtype="bf16", zero=training.SMALL), {"stage": 2}
    if lost and dist.get_rank() == 1:
        kept._KEPT.clear()
    with mock.patch.object(training, "train", side_effect=training.train) as train:
        records = [training.stock(job, zero) for _ in range(2)]
    fresh = training.train(job, zero)
    same = [
        record._replace(weights=0) == fresh._replace(weights=0) and torch.equal(record.weights, fresh.weights)
        for record in records
    ]
    return [all(same), train.call_count]


def test_keys_of_different_jobs_differ(ranks: Any) -> None:
    keys, without = ranks(1).run(keys_case)[0]
    assert None not in keys and len(set(keys)) == len(keys) and without is None


def keys_case() -> tuple[list[str | None], str | None]:
    """The keys of jobs that differ in one field each, and of other stages; and that of a network without a name."""
    import dataclasses

    from tests.harness import kept, networks
    from tests.harness.training import Job

    changes: dict[str, Any] = {"sizes": (13, 37, 7), "empty": False, "steps": 4, "accumulation": 2, "dtype": "bf16"}
    changes |= {"optimizer": "Adam", "clipping": 0.0, "groups": 2, "frozen": (1,), "skipped": ((0, 1),)}
    changes |= {"overflow": ((0, 1),), "backward": "loss", "boundary": "user", "no_sync": True, "between": True}
    changes |= {"checkpointing": False, "tensor_parallel": 2, "network": networks.Shared, "zero_init": "plain"}
    changes |= {"zero": {"overlap_comm": True}, "config": {"prescale_gradients": True}}
    assert changes.keys() == {one.name for one in dataclasses.fields(Job)}
    jobs = [Job(), *(Job(**{name: value}) for name, value in changes.items()), Job(network=networks.External)]
    keys = [*(kept.key(job, {"stage": 2}) for job in jobs), kept.key(Job(), {"stage": 1}), kept.key(Job(), {})]
    return keys, kept.key(Job(network=type("", (networks.Shared,), {})), {})
