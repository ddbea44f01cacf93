# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum in checkpoints of DeepSpeed's stages and of strategies: each continues where the other stopped."""

from pathlib import Path
from typing import Any

import pytest

from tests.harness.tiers import deep
from tests.harness.training import placed

UNIVERSAL = "universal"
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
# A sub-group for each parameter group: DeepSpeed's stage 3 divides none anew.
SUB_GROUPS = {"reduce_bucket_size": 300, "sub_group_size": 10**6, "allgather_bucket_size": 10**6}
# (saved by, loaded by, keys of both, keys of the first)
PAIRS: dict[str, list[tuple[str, str, dict[str, Any], dict[str, Any]]]] = {
    "p=N": [
        ("2", "NIG", {}, {}),
        ("1", "NNG", {"round_robin_gradients": True}, {}),
        ("2", "NGG", {"parameter_alignment": True}, {}),
        ("1", "NIG", {}, OFFLOAD),
        ("NIG", "2", OFFLOAD, {}),
    ],
    "p=I,G": [("3", "IIG", {}, {}), ("GNG", "3", {}, {}), ("3", "GIG", OFFLOAD, {})],
    # DeepSpeed's own, from universal checkpoints
    UNIVERSAL: [("IIG", "2", {}, {}), ("IIG", "3", {}, {}), ("NIG", "1", OFFLOAD, {})],
}


@pytest.mark.parametrize(
    "pairs, dtype",
    [
        *(("p=N", "fp32"), ("p=I,G", "fp16"), (UNIVERSAL, "fp32")),
        *deep(("p=N", "fp16"), ("p=I,G", "fp32"), (UNIVERSAL, "fp16")),
    ],
)
def test_stock_and_strategies_go_on_from_each_other(ranks: Any, tmp_path: Path, pairs: str, dtype: str) -> None:
    # As in parity tests. Momentum with a loss scale too many would be 256 times what it should be.
    bound = 1e-4 if dtype == "fp32" else 5e-2
    for rows in ranks(4).run(interchange_case, str(tmp_path), PAIRS[pairs], dtype, pairs == UNIVERSAL):
        for pair, weights, momentum in rows:
            assert weights < bound and momentum < bound, (pair, weights, momentum)


def interchange_case(
    folder: str, pairs: list[tuple[Any, ...]], dtype: str, universal: bool
) -> list[tuple[Any, float, float]]:
    """Relative differences of weights and momentum between a run and one that another has begun."""
    import torch

    from tests.harness import snapshots, training

    job = training.Job(
        sizes=(13, 37, 29, 29, 7),
        optimizer="Muon",
        dtype=dtype,
        groups=2,
        empty=False,
        config={"checkpoint": {"load_universal": universal}},
    )
    first, then = snapshots.steps_of(job, 3), snapshots.steps_of(job, 2, skip=3)

    def keys(name: str, zero: dict[str, Any]) -> dict[str, Any]:
        return placed(name, 2, **SUB_GROUPS, **({"reduce_scatter": False} if name == "3" else {}), **zero)

    rows = []
    for number, (saved, loaded, both, more) in enumerate(pairs):
        engine, _ = training.make_engine(job, keys(saved, {**both, **more}))
        snapshots.run(engine, job, first)
        engine.save_checkpoint(f"{folder}/{number}")
        engine.destroy()
        if universal:
            snapshots.convert(f"{folder}/{number}", ours=True)
        found = []
        for resumed in (False, True):
            engine, model = training.make_engine(job, keys(loaded, both))
            if resumed:
                engine.load_checkpoint(f"{folder}/{number}")
            else:
                snapshots.run(engine, job, first)
            snapshots.run(engine, job, then)
            seen = snapshots.snapshot(engine, model, job)
            kinds = ("model", "momentum_buffer")
            found.append([[one for key, one in seen.items() if key.endswith(kind)] for kind in kinds])
            engine.destroy()
        apart = [
            max(
                (((one - two).abs().max() / two.abs().max()).item() for one, two in zip(*pair, strict=True)),
                default=0.0,
            )
            for pair in zip(*found, strict=True)
        ]
        assert all(torch.isfinite(one).all() for kind in found[1] for one in kind)
        rows.append(((saved, loaded, both, more), *apart))
    return rows
