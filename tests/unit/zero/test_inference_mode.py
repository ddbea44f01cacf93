# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Training goes on after evaluation under ``torch.inference_mode()``: autograd refuses tensors that are made there."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.harness import networks, training
from tests.harness.tiers import deep
from tests.harness.training import PARTITIONED, REPLICATED, SEVERAL_BUCKETS, SMALL, Job, placed

# Of persistent parameters, the others being gathered for each use.
PERSISTENT = {**SEVERAL_BUCKETS, "stage3_param_persistence_threshold": 20}
ON_HOST = {"offload_param": {"device": "cpu", "pin_memory": False}, "paro_parameter_cache_bytes": 3000}
LOSSY = {"zeropp_loco_param": {"err_beta": 0.8}, "paro_quantized_updates": {"bits": 8}}
SLICED = ("ING", "IIG", "IGG")

# Each with its keys and how far losses may be from stock's, and strategies.
OPTIONS: dict[str, tuple[dict[str, Any], float, tuple[str, ...]]] = {
    "each use": (SMALL, 1e-6, (*REPLICATED, *PARTITIONED)),
    "persistent": (PERSISTENT, 1e-6, PARTITIONED),
    "overlap": ({**SMALL, "overlap_comm": True}, 1e-6, PARTITIONED),
    "updates ahead": ({**SMALL, "paro_overlap_updates": True, "overlap_comm": True}, 1e-6, REPLICATED),
    "units": ({**SMALL, "stage3_leaf_bytes": 10**5}, 1e-6, PARTITIONED),
    "persistent units": ({**PERSISTENT, "stage3_leaf_bytes": 10**5}, 1e-6, PARTITIONED),
    "parameters on the host": ({**SMALL, **ON_HOST}, 1e-6, SLICED),
    "lossy": ({**SMALL, **LOSSY, "overlap_comm": True}, 0.5, ("ING", "IIG", "NIG")),
    "lossy on the host": ({**SMALL, **ON_HOST, **LOSSY}, 0.5, SLICED[:2]),
}


@pytest.mark.parametrize(
    "option, strategies", [("persistent", ("IIG",)), *deep(*((name, row[2]) for name, row in OPTIONS.items()))]
)
def test_training_goes_on_after_inference_mode(
    ranks: Any, tmp_path: Path, option: str, strategies: tuple[str, ...]
) -> None:
    zero, most, _ = OPTIONS[option]
    for rows in ranks(4).run(evaluation_case, zero, strategies, tmp_path):
        for name, apart, changed in rows:
            assert apart <= most and changed == 0.0, (name, apart, changed)


def evaluation_case(zero: dict[str, Any], strategies: tuple[str, ...], folder: Path) -> list[tuple[str, float, float]]:
    """Of each strategy: largest difference of losses from stock's, and from those with ``no_grad`` instead."""
    import torch

    stock = _losses({key: zero[key] for key in PERSISTENT} | {"stage": 3}, torch.no_grad)  # its own may fail, too
    rows = []
    for name in strategies:
        keys = zero | placed(name)
        found, other = (_losses(keys, mode, folder / name) for mode in (torch.inference_mode, torch.no_grad))
        apart = [abs(a - b) for both in zip(found, stock, strict=True) for a, b in zip(*both, strict=True)]
        rows.append((name, max(apart), max(abs(a - b) for a, b in zip(found[0], other[0], strict=True))))
    return rows


def _losses(
    zero: dict[str, Any], mode: Callable[[], Any], folder: Path | None = None
) -> tuple[list[float], list[float]]:
    """Losses of training, and outputs of evaluation in this mode, before the first micro-step and after most.

    Args:
        folder: where to save in this mode, and to load, after two steps.
    """
    import torch

    sizes, config = networks.SQUARE, {"checkpoint": {"async_save": True}} if folder else {}
    job = Job(sizes, False, 4, 2, optimizer="Adam", network=networks.Shared, zero=zero, config=config)
    engine, model = training.make_engine(job, {})
    data, probe = training.batches(job), torch.ones(3, sizes[0])
    found: tuple[list[float], list[float]] = [], []

    def evaluate(after: int) -> None:
        with mode():
            if after != 4:
                found[1].extend(module(probe * i).mean().item() for i in range(2) for module in (engine, model))
                found[1].append(training.whole_weights(model).norm().item())
            if folder and after == 3:
                engine.save_checkpoint(folder)
                engine.load_checkpoint(folder)

    evaluate(-1)
    for number in range(job.steps * job.accumulation):
        found[0].append(training.micro_step(engine, job, number, *next(data)))
        engine.step()
        evaluate(number)
    engine.destroy()
    return found
