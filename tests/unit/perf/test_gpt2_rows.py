# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the benchmark with GPT-2 trains, and what it says of its rows. No measurement."""

import csv
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.perf.lib import gpt2_rows
from tests.perf.lib.cluster_rows import BOTH
from tests.perf.lib.gpt2_rows import SETTINGS, TINY, Gpt2Row

pytestmark = pytest.mark.quick

NAME = "2x2-gpt2"


def row(method: str, *seconds: float, mbit: float | None = 100, setting: str = NAME, **more: object) -> Gpt2Row:
    kept: dict[str, object] = {"link_bytes": 250e6, "compute": 4.0, "losses": [9.0, 8.0, 7.0], **more}
    return Gpt2Row(setting, mbit, method, f"of {method}", list(seconds), [0.0], **kept)


def test_the_model_is_transformers_with_its_head_tied() -> None:
    pytest.importorskip("transformers")
    from tests.perf.lib.gpt2 import make_gpt2

    noted: list[torch.Tensor] = []
    model, again = make_gpt2(TINY, noted.append), make_gpt2(TINY)
    tokens = torch.randint(SETTINGS["2x2-tiny"].vocabulary, (1, 32))
    loss = model(tokens, tokens)
    assert noted == [loss] and not noted[0].requires_grad
    logits = model.model(input_ids=tokens).logits
    assert torch.allclose(loss, torch.nn.functional.cross_entropy(logits[0, :-1], tokens[0, 1:]))
    assert len(model.blocks) == TINY["n_layer"]
    assert model.model.lm_head.weight is model.model.transformer.wte.weight
    for one, other in zip(model.parameters(), again.parameters(), strict=True):  # on every rank, and as bf16 has them
        assert torch.equal(one, other) and torch.equal(one, one.bfloat16().float())
    assert torch.equal(model(tokens, tokens), loss)  # no dropout


def test_it_is_gpt2_in_its_full_size() -> None:
    pytest.importorskip("transformers")
    from tests.perf.lib.gpt2 import make_gpt2, parameters_of

    with torch.device("meta"):
        model = make_gpt2(SETTINGS[NAME].shape)
    assert parameters_of(model) == 124_439_808 and len(model.blocks) == 12
    assert model.model.config.vocab_size == SETTINGS[NAME].vocabulary


def test_losses_are_apart_by_their_largest_difference_of_the_fall() -> None:
    assert gpt2_rows.apart([9.0, 8.1, 7.0], [9.0, 8.0, 7.0]) == pytest.approx(0.05)
    assert gpt2_rows.apart([9.0, 8.0, 6.5], [9.0, 8.0, 7.0]) == pytest.approx(0.25)
    assert gpt2_rows.apart([9.0, 9.0], [9.0, 9.0]) == float("inf")  # nothing was trained


def test_what_did_not_train_the_same_is_named() -> None:
    good = row("NIG", 20.0, formula_bytes=249e6)
    assert gpt2_rows.problems([good, row("DDP", 30.0)]) == []
    for bad, message in (
        (replace(good, difference=0.03), "NIG: losses differ by 3.0e-02 of their fall"),
        (replace(good, difference=float("nan")), "losses differ by nan"),
        (replace(good, method="NIG" + BOTH, difference=float("nan")), "losses differ by nan"),
        (replace(good, method="NIG" + BOTH, difference=0.3), "losses differ by 3.0e-01"),
        (replace(good, link_bytes=270e6), r"NIG: bytes between nodes differ by \+8.4% from the formula"),
    ):
        (found,) = gpt2_rows.problems([bad])
        assert re.search(message, found)
    assert gpt2_rows.problems([replace(good, method="NIG" + BOTH, difference=0.1)]) == []  # LoCo changes losses


def test_rows_survive_a_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    assert gpt2_rows.read(path) == []  # nothing has been measured yet
    ours = row("NIG", 20.0, 24.0, formula_bytes=248e6, difference=1e-3, held=(250e6, 125e6, 375e6))
    fast = row("NIG", 6.0, mbit=1000, formula_bytes=248e6)
    stock, stock_fast = (
        row(gpt2_rows.STOCK, 240.0, link_bytes=3e9),
        row(gpt2_rows.STOCK, 30.0, mbit=1000, link_bytes=3e9),
    )
    tiny = row("NIG", 1.0, setting="2x2-tiny", mbit=None)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ours.to_csv())
        writer.writeheader()
        for one in (row("NIG", 9.0), ours, fast, stock, stock_fast, tiny):
            writer.writerow(one.to_csv())
    rows = gpt2_rows.read(path)  # the last one of each
    kept = rows[0]
    assert (kept.median, kept.difference, kept.losses, kept.floor) == (22.0, 1e-3, [9.0, 7.0], ours.floor)
    assert rows[-1].mbit is None and rows[2].setup == "of ZeRO-1" and rows[2].formula_bytes is None
    assert gpt2_rows.measured(path) == rows[:-1]
    header, lines = gpt2_rows.table(rows[:-1])
    assert [len(header)] * 2 == [len(line) for line in lines]
    assert [name for name in header if "seconds" in name] == ["seconds at 100 Mbit/s", "seconds at 1000 Mbit/s"]
    assert [" ".join(line) for line in lines] == [
        "ZeRO-1 240.0 240.0 .. 240.0 244.0 1.0 30.0 30.0 .. 30.0 28.0 1.0 3000  0",
        "NIG 22.0 20.0 .. 24.0 24.0 10.9 6.00 6.00 .. 6.00 6.00 5.0 250 1.008 750",
    ]
