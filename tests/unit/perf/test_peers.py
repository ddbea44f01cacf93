# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Methods that benchmarks run one after the other."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.harness.tiers import deep


class Blocks(nn.Module):
    """A model as benchmarks have them: it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.LayerNorm(8)  # no input of a unit may be without a gradient
        self.blocks = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return (self.blocks(self.embedding(inputs)) - targets).square().mean()


def closed_case(name: str) -> bool:
    """Return whether a method's model is gone once the method is closed."""
    import gc
    import weakref

    from tests.perf.lib.peers import Workload
    from tests.perf.lib.turns import methods

    method = next(methods([name], Workload(1, 1, Blocks), {}))
    for _ in range(3):  # ZeRO-3 keeps what it has found once it knows the order of modules
        method.step([(torch.ones(2, 8), torch.zeros(2, 8))])
        method.finish()
    left = weakref.ref(method.module)
    method.close()
    del method
    gc.collect()
    return left() is None


@pytest.mark.parametrize("name", ["ZeRO-3", *deep("NIG", "IIG")])
def test_nothing_is_left_of_a_method_that_is_closed(ranks: Any, name: str) -> None:
    assert ranks(2).run(closed_case, name=name) == [True, True]
