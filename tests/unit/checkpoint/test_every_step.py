# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A run that is resumed from any step is the uninterrupted run, with each option that rounds or compresses values."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiers import by_strategies, deep

DTYPES = ("fp32", "bf16", "bf16 masters")
LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
UPDATES: dict[str, Any] = {"paro_quantized_updates": {}}
RESYNC = {"paro_quantized_updates": {"resync_T": 4}}
LOSSLESS = {"paro_quantized_updates": {"bits": "exact"}}


def outer(bits: int, delay: int, fragments: int) -> dict[str, Any]:
    """Return the key of an outer optimizer."""
    return {"paro_outer_optimizer": {"steps": 4, "bits": bits, "delay": delay, "fragments": fragments}}


def table() -> Iterator[tuple[str, tuple[str, ...], dict[str, Any], str, int, str]]:
    """Yield what is trained, strategies, keys, optimizer, steps between saves, dtype."""
    alone, both = ("NII", "III"), ("NIG", "IIG")
    for dtype in (*DTYPES, "fp16"):
        yield "LoCo", both, LOCO, "Adam", 1, dtype
        yield "LoCo", ("NGG", "NNN"), LOCO, "Adam", 1, dtype
        yield "Muon", ("NIG", "III"), {}, "Muon", 1, dtype
        yield "Muon, LoCo", both, LOCO, "Muon", 1, dtype
    # A save sends updates whole, so there are steps without one.
    for dtype in ("fp32", "bf16"):
        yield "updates", both, UPDATES, "Adam", 3, dtype
        yield "updates, resync", both, RESYNC, "Adam", 3, dtype
        yield "LoCo, updates", both, {**LOCO, **UPDATES}, "Adam", 3, dtype
        yield "Muon, LoCo, updates", both, {**LOCO, **UPDATES}, "Muon", 3, dtype
    for dtype in ("bf16", "bf16 masters"):
        yield "lossless updates", both, LOSSLESS, "Adam", 3, dtype
    for dtype in DTYPES:
        for how in itertools.product((16, 8, 4), (0, 1), (1, 2)):
            yield f"outer, bits, delay, fragments {how}", alone, outer(*how), "Adam", 1, dtype
        yield "outer, Muon", alone, outer(4, 1, 2), "Muon", 1, dtype
        yield "outer", ("NNI", "INI"), outer(8, 1, 1), "Adam", 1, dtype


QUICK = ("outer, masters", ("III",), outer(8, 1, 1), "Muon", 1, "bf16 masters")


@pytest.mark.parametrize(
    ("kind", "names", "zero", "optimizer", "every", "dtype"), [QUICK, *deep(*table())], ids=by_strategies
)
def test_a_run_that_is_resumed_from_any_step_is_the_uninterrupted_one(
    ranks: Any,
    kernels: bool,
    tmp_path: Path,
    kind: str,
    names: tuple[str, ...],
    zero: dict[str, Any],
    optimizer: str,
    every: int,
    dtype: str,
) -> None:
    found = ranks(4).run(every_step_case, str(tmp_path), names, zero, optimizer, every, dtype)
    assert found == [(12 * len(names), [])] * 4


def every_step_case(
    folder: str, names: tuple[str, ...], zero: dict[str, Any], optimizer: str, every: int, dtype: str
) -> tuple[int, list[Any]]:
    """Return how many runs were resumed, and which of them differ."""
    from tests.harness import resumes

    return resumes.differences(folder, resumes.Row(names, zero, optimizer, every), dtype)
