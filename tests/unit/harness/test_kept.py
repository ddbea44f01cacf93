# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Stock DeepSpeed's results are kept over cases, and equal those of a fresh run."""

from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.quick


def test_a_kept_record_is_that_of_a_fresh_run(ranks: Any) -> None:
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


def test_what_differs_is_not_mixed_up(ranks: Any) -> None:
    two, three = ranks(2).run(keys_case), ranks(3).run(keys_case)
    (ours,), (others,) = ({tuple(keys) for keys in found} for found in (two, three))
    assert None not in ours and len(set(ours + others)) == len(ours) + len(others)
    for unnamed in ranks(2).run(unnamed_case):
        assert unnamed == [None, None]


def keys_case() -> list[str | None]:
    """The keys of jobs that differ in one field each, and of other stages."""
    import dataclasses

    from tests.harness import kept, networks
    from tests.harness.training import Job

    changes: dict[str, Any] = {"sizes": (13, 37, 7), "empty": False, "steps": 4, "accumulation": 2, "dtype": "bf16"}
    changes |= {"optimizer": "Adam", "clipping": 0.0, "groups": 2, "frozen": (1,), "skipped": ((0, 1),)}
    changes |= {"overflow": ((0, 1),), "backward": "loss", "boundary": "user", "no_sync": True, "between": True}
    changes |= {"checkpointing": False, "tensor_parallel": 2, "network": networks.Shared, "zero_init": "plain"}
    changes |= {"zero": {"overlap_comm": True}, "config": {"prescale_gradients": True}}
    assert changes.keys() == {one.name for one in dataclasses.fields(Job)}
    jobs = [Job(), *(Job(**{name: value}) for name, value in changes.items())]
    jobs += [Job(network=networks.External), Job(checkpointing=True), Job(zero={"overlap_comm": False})]
    return [*(kept.key(job, {"stage": 2}) for job in jobs), kept.key(Job(), {"stage": 1}), kept.key(Job(), {})]


def unnamed_case() -> list[str | None]:
    """The keys of networks that no name stands for."""
    from tests.harness import kept, networks
    from tests.harness.training import Job

    class Local(networks.Shared):
        pass

    return [kept.key(Job(network=Local), {}), kept.key(Job(network=type("", (networks.Shared,), {})), {})]
