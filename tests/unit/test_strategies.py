# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The verdicts of scripts/strategies.py; what it measures with is tested in test_memory.py and test_traffic.py."""

import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "scripts"))


def test_a_row_names_what_is_out_of_bounds(ranks: Any) -> None:
    (verdicts,) = ranks(1).run(verdicts_case)
    assert verdicts.pop("nothing") == []
    assert verdicts == {name: [name] for name in ("weights", "intra", "inter", "parameters", "gradients", "optimizer")}


def verdicts_case() -> dict[str, list[str]]:
    """Verdicts on rows in which one thing is wrong, or nothing is."""
    import strategies

    due = dict.fromkeys(strategies.COLUMNS, 100.0)
    verdicts = {
        "nothing": strategies.Row("NIG", 1e-6, due, due).out_of_bounds,
        "weights": strategies.Row("NIG", float("nan"), due, due).out_of_bounds,
    }
    for column in strategies.COLUMNS:
        verdicts[column] = strategies.Row("NIG", 0.0, {**due, column: 94.0}, due).out_of_bounds
    return verdicts
