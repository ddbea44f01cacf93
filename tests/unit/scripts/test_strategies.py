# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The verdicts of the scripts that print tables; what they measure with is tested elsewhere."""

from typing import Any


def test_a_row_names_what_is_out_of_bounds(ranks: Any) -> None:
    (verdicts,) = ranks(1).run(verdicts_case)
    assert verdicts.pop("nothing") == []
    assert verdicts == {name: [name] for name in ("weights", "intra", "inter", "parameters", "gradients", "optimizer")}


def verdicts_case() -> dict[str, list[str]]:
    """Verdicts on rows in which one thing is wrong, or nothing is."""
    from scripts.checks import strategies

    due = dict.fromkeys(strategies.COLUMNS, 100.0)
    verdicts = {
        "nothing": strategies.StrategyRow("NIG", 1e-6, due, due).out_of_bounds,
        "weights": strategies.StrategyRow("NIG", float("nan"), due, due).out_of_bounds,
    }
    for column in strategies.COLUMNS:
        verdicts[column] = strategies.StrategyRow("NIG", 0.0, {**due, column: 94.0}, due).out_of_bounds
    return verdicts


def test_a_checkpoint_that_is_not_exact_or_too_large_is_named(ranks: Any) -> None:
    (verdicts,) = ranks(1).run(checkpoint_verdicts_case)
    assert verdicts.pop("nothing") == []
    assert verdicts == {name: [name] for name in verdicts} and len(verdicts) == 6


def checkpoint_verdicts_case() -> dict[str, list[str]]:
    """Verdicts on rows in which one thing is wrong, or nothing is."""
    from scripts.checks import checkpoints

    good = {"resumed": 0.0, "zero_to_fp32": 0.0, "save_16bit": 0.0, "files": 4, "shards": 4}
    good |= {"written": 25.5, "peak": 1.0, "states": 100.0}
    nan = float("nan")
    bad = {"resumed": nan, "zero_to_fp32": 1e-9, "save_16bit": 1e-9, "files": 2, "written": 30.0, "peak": 51.0}
    verdicts = {
        name: checkpoints.CheckpointRow("NIG", **{**good, name: value}).out_of_bounds for name, value in bad.items()
    }
    return {"nothing": checkpoints.CheckpointRow("NIG", **{**good, "peak": None}).out_of_bounds, **verdicts}


def test_a_run_that_does_not_go_on_from_where_it_must_fails(ranks: Any) -> None:
    assert ranks(1).run(kill_verdicts_case) == [[True, True, False, False, False]]


def kill_verdicts_case() -> list[bool]:
    """Of runs that were killed before and after their save was published, and of three that went wrong."""
    from scripts.checks import crashes

    ends = [(False, 2, True), (True, 4, True), (True, 2, True), (False, 4, True), (False, 2, False)]
    return [crashes.Kill(1, "NIG", "new", 0, 0.5, 2, 4, *end).passed for end in ends]
