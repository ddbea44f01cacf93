# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Lightning's strategy for DeepSpeed, as far as a CPU allows."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.frameworks.comparison import Row, check, needs, placed, stock
from tests.harness.tiers import deep

pytestmark = needs("transformers", "lightning")


def case(ours: dict[str, Any], stock: dict[str, Any], folder: str) -> Row:
    from tests.harness.frameworks import lightnings, tiny

    expected, start = lightnings.train(stock, f"{folder}/stock")
    run, _ = lightnings.train(ours, f"{folder}/ours")
    resumed, _ = lightnings.train(ours, f"{folder}/ours", resume=True)
    return tiny.compare_runs(start, expected, run, resumed)


@pytest.mark.parametrize("strategy", ["IIG", *deep("ING", "NIG")])
def test_deepspeed_strategy(group: Any, tmp_path: Path, strategy: str) -> None:
    check(group.run(case, placed(strategy), stock(strategy), str(tmp_path)), strategy, resumed=True)
