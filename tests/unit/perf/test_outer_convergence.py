# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The benchmark of outer optimizers: which runs are missing, what is said of those that are there, and one of them."""

import argparse
import csv
from dataclasses import replace
from pathlib import Path
from typing import Any

from deepspeed_ext.config.outer import OuterSettings
from tests.perf import tables
from tests.perf.lib import outer_rows
from tests.perf.lib.outer_rows import EXACT, METHODS, SEEDS, STEPS, OuterRow, Run

FEW = "H=30, 4 bits"


def row(method: str, loss: float, seed: int = 0, steps: int = STEPS, **given: float) -> OuterRow:
    """Of two groups and AdamW, with all that the program has by default."""
    run = Run("AdamW", 2, seed, method)
    dtype, ranks, steps, strategy, outer = outer_rows.settings_of(
        run, "bf16", 1, steps, outer_rows.outer_keys(method, "AdamW", **given)
    )
    found = {"tokens": 1, "own_loss": loss, "training_loss": loss, "inter_bytes": 2000.0, "seconds": 3.0}
    curve = ((STEPS // 2, 2.5), (STEPS, loss))
    return OuterRow(
        dtype, ranks, 2, steps, "AdamW", method, strategy, outer, seed, final_loss=loss, curve=curve, **found
    )


def test_methods_are_configurations_that_are_accepted() -> None:
    for name, method in METHODS.items():
        outer = outer_rows.outer_keys(name, "Muon")
        assert (outer is None) == (method.outer is None)
        if outer is not None:
            settings = OuterSettings.parse(outer)
            assert (settings.lr, settings.momentum) == tuple(outer_rows.OUTER_SGD["Muon"].values())
            assert STEPS % settings.steps == STEPS // 10 % settings.steps == 0  # curves end with outer steps
        if method.plain is not None:
            beside = METHODS[method.plain].outer
            assert method.outer == {**(beside or {}), "bits": 4}
    assert outer_rows.outer_keys("H=30", "AdamW", lr=0.4, momentum=None) == {"steps": 30, "lr": 0.4, "momentum": 0.9}


def test_what_says_most_trains_first() -> None:
    runs = outer_rows.planned(outer_rows.OUTER_SGD, outer_rows.GROUPS, SEEDS, METHODS)
    assert len(set(runs)) == len(runs) == 2 * 2 * 3 * len(METHODS)
    assert [run.method for run in runs[:3]] == [EXACT, "H=30", FEW] and set(runs[: len(METHODS)]) == {
        Run("AdamW", 2, 0, method) for method in METHODS
    }
    assert [run.groups for run in runs[: 4 * len(METHODS)]] == sorted([2, 4] * (2 * len(METHODS)))
    assert {run.seed for run in runs[: 4 * len(METHODS)]} == {0}
    assert runs[-1].optimizer == "Muon"


def test_rows_survive_a_file_and_only_those_of_other_settings_are_trained_again(tmp_path: Path) -> None:
    rows = [
        row(EXACT, 2.0),
        row("H=30", 2.1),
        row("H=30", 2.2, seed=1),
        row(FEW, 2.3, steps=30),
        row(FEW, 2.4, lr=0.4),
    ]
    path = tmp_path / "rows.csv"
    assert outer_rows.read(path) == []
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].to_csv())
        writer.writeheader()
        writer.writerows(one.to_csv() for one in rows)
    kept = outer_rows.read(path)
    assert kept == rows
    runs = outer_rows.planned(["AdamW"], [2], [0, 1], [EXACT, "H=30", FEW])
    wanted = {run: row(run.method, 0.0, run.seed).settings for run in runs}
    missing = [run for run in runs if run not in outer_rows.by_run(kept, wanted)]
    assert [(run.method, run.seed) for run in missing] == [(FEW, 0), (EXACT, 1), (FEW, 1)]
    again = replace(rows[0], final_loss=1.9)
    assert outer_rows.of_defaults([*kept, again]) == [again, *rows[1:3]]


def test_few_bits_are_held_against_the_same_seeds_in_32() -> None:
    rows = [
        row(EXACT, 2.0),
        row("H=30", 2.0),
        row("H=30", 3.0, 1),
        row(FEW, 2.0),
        row(FEW, 3.003, 1),
        row(FEW, 9.0, 2),
    ]
    ((kept, said),) = outer_rows.verdict(rows)
    assert kept and "AdamW, 2 groups, H=30, 4 bits: the final loss is +0.05%" in said and "of 2 seeds" in said
    ((kept, said),) = outer_rows.verdict([*rows[:4], replace(rows[4], final_loss=3.015)])
    assert not kept and "each +0.00%, +0.50%" in said
    assert list(outer_rows.verdict(rows[:3])) == []


def test_the_table_says_which_seeds_there_are() -> None:
    rows = [row(EXACT, 2.0), row("H=30", 2.02), row("H=30", 2.04, 1), row(FEW, 2.04)]
    lines = tables.markdown(*outer_rows.table(rows)).splitlines()[2:]
    assert lines == [
        "| AdamW | 2 | NIG | 0 | 2.0000 |  | +0.00 | +0.00 |  | 2.0000 | 2.0000 | 2.0 |",
        "| AdamW | 2 | H=30 | 0 1 | 2.0300 | 0.0141 | +1.00 | +1.00 |  | 2.0300 | 2.0300 | 2.0 |",
        "| AdamW | 2 | H=30, 4 bits | 0 | 2.0400 |  | +2.00 | +2.00 | +0.99 | 2.0400 | 2.0400 | 2.0 |",
    ]


def trained_case(steps: int, methods: list[str]) -> list[OuterRow]:
    """What the program's ranks find, with little held-out text."""
    from unittest import mock

    from tests.perf import outer_convergence

    with mock.patch.object(outer_convergence, "EVALUATED", 64):
        trainer = outer_convergence.Trainer(argparse.Namespace(group_size=2, steps=steps, lr=None, momentum=None))
    return [trainer.train(Run("AdamW", 2, 0, method)) for method in methods]


def test_outer_weights_stand_between_outer_steps(ranks: Any) -> None:
    steps = 11  # an outer step with H=10
    found = ranks(4).run(trained_case, steps, [EXACT, "H=10"])
    exact, apart = found[0]
    assert exact.tokens == steps * 4 * 8 * 64 and [step for step, _ in exact.curve] == [*range(1, steps), steps]
    losses, outer = ([loss for _, loss in one.curve] for one in (exact, apart))
    assert losses == sorted(losses, reverse=True) and losses[-1] == exact.final_loss < exact.own_loss
    assert len(set(outer[:9])) == 1 and outer[8] > outer[9] == outer[10] == apart.final_loss, outer
    assert 0 < apart.inter_bytes < exact.inter_bytes
    for rows in found:
        assert [(one.run, one.final_loss) for one in rows] == [(one.run, one.final_loss) for one in found[0]]


def held_out_case() -> tuple[int, int, set[int]]:
    """Bytes that are trained and held out, and lengths of a rank's rows; none is trained."""
    import torch

    from tests.perf import outer_convergence

    corpus = torch.arange(2 * outer_convergence.PERIOD)
    trained, held = outer_convergence.split(corpus)
    rows = [outer_convergence.held_out_rows(held, rank, 4) for rank in range(4)]
    assert set(torch.cat(rows).flatten().tolist()).isdisjoint(trained.tolist())
    assert len({int(row[0]) for part in rows for row in part}) == outer_convergence.EVALUATED
    return len(trained), len(held), {part.shape[0] for part in rows}


def test_no_run_trains_on_what_is_held_out(ranks: Any) -> None:
    assert ranks(1).run(held_out_case) == [(400_000, 40_000, {256})]
