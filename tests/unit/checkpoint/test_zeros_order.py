# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Asynchronous saves with p = N are in ZeRO's order for DeepSpeed and its tools; files in the old order still load."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import BASE_OPTIMIZER_STATE, GROUP_PADDINGS, SINGLE_PARTITION_OF_FP32_GROUPS

from deepspeed_ext.comm.layout import FlatLayout
from deepspeed_ext.zero.flat.states import OWN_ORDER, OWN_PARTITIONS, FlatStates, _in_memory_order
from tests.harness import saves, snapshots, training
from tests.harness.tiers import deep

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


class EqualShapes(training.Network):
    """Trains matrices of one shape, so sizes do not reveal an exchange of two of them."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() == 2)


@pytest.mark.quick
def test_states_of_elastic_saves_are_found_by_their_group() -> None:
    layout = FlatLayout(4, 1, 2)
    buffer: Any = SimpleNamespace(number=1, striped=True, layout=layout, stock_layout=layout)
    state = {BASE_OPTIMIZER_STATE: [{}, {"exp_avg": torch.ones(2)}], GROUP_PADDINGS: [0, 0]}
    state[SINGLE_PARTITION_OF_FP32_GROUPS] = [torch.zeros(2)] * 2
    assert _in_memory_order([buffer], state)[BASE_OPTIMIZER_STATE] == state[BASE_OPTIMIZER_STATE]


def job_of(**config: Any) -> training.Job:
    return training.Job(
        sizes=(24,) * 9, optimizer="Adam", empty=False, zero=training.SMALL, network=EqualShapes, config=config
    )


def save(folder: str, job: training.Job, name: str) -> dict[str, torch.Tensor]:
    """Train and save; return the saved states. Collective."""
    engine, model = training.make_trained(job, name, 2)
    assert any(buffer.striped for buffer in engine.optimizer.buffers)
    engine.save_checkpoint(folder, "tag")
    saved = snapshots.snapshot(engine, model, job)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.destroy()
    dist.barrier()
    return saved


def load(folder: str, name: str, group: int, zero: Mapping[str, Any], **how: Any) -> tuple[str, dict[str, Any], Any]:
    """Load into a strategy or stage; return the error, the changes of the load, and the states after it."""
    job = job_of(**({"checkpoint": {"load_universal": True}} if "universal" in folder else {}))
    engine, model = training.make_trained(job, training.placed(name, group, **zero), skip=5)
    before = snapshots.snapshot(engine, model, job)
    tag = "tag_universal" if "universal" in folder else "tag"
    error = snapshots.error_of(engine.load_checkpoint, folder.removesuffix("universal"), tag, **how)
    after = snapshots.snapshot(engine, model, job)
    engine.destroy()
    return error, snapshots.difference(before, after), after


@pytest.mark.parametrize("name", ["NIG", *deep("NGG", "NII")])
def test_deepspeed_reads_asynchronous_saves(ranks: Any, tmp_path: Path, name: str) -> None:
    for results in ranks(4 if name[2] == "G" else 2).run(readers_case, str(tmp_path), name):
        assert results == {"zero_to_fp32.py": {}, "stage 2": {}, "universal": {}}, results


def readers_case(folder: str, name: str) -> dict[str, dict[str, float]]:
    """Return, for each reader, differences from the saved states: the copied script, stock, and a universal load."""
    saved = save(folder, job_of(**saves.ASIDE), name)
    results = {}
    if dist.get_rank() == 0:
        alone = {**os.environ, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
        script = [sys.executable, "zero_to_fp32.py", ".", "weights"]
        subprocess.run(script, cwd=folder, env=alone, check=True, stdout=subprocess.DEVNULL, timeout=120)
    snapshots.convert(folder, ours=True)
    weights = torch.load(f"{folder}/weights/pytorch_model.bin")
    expected = {key.removesuffix(" fp32"): value for key, value in saved.items() if key.endswith(" fp32")}
    trained = {key: value for key, value in weights.items() if key in expected}
    results["zero_to_fp32.py"] = snapshots.difference(expected, trained)
    results["stage 2"] = snapshots.difference(saved, load(folder, "2", 2, {})[2])
    results["universal"] = snapshots.difference(saved, load(f"{folder}universal", "GGG", 2, {})[2])
    return results


def in_own_order(self: FlatStates, state: Mapping[str, Any]) -> dict[str, Any]:
    """As asynchronous saves were before 2026-11-29."""
    places = [{"layout": asdict(buffer.layout)} if buffer.striped else None for buffer in self._optimizer.buffers]
    names = {SINGLE_PARTITION_OF_FP32_GROUPS: OWN_PARTITIONS}
    return {**{names.get(key, key): value for key, value in state.items()}, OWN_ORDER: places}


# (strategy or stage, group size, keys of zero_optimization, arguments of the load)
LOADS: list[tuple[str, int, dict[str, Any], dict[str, Any]]] = [
    ("NGG", 4, {"reduce_bucket_size": 1000}, {}),
    ("NIG", 2, {}, {"load_optimizer_states": False}),
    ("NNG", 2, {"round_robin_gradients": True}, {}),
]
MORE_LOADS = [("NNG", 1, {"reduce_bucket_size": 10**8}, {}), ("NGG", 2, OFFLOAD, {}), ("NII", 4, {}, {})]
MORE_LOADS += [("NIG", 2, {}, {"load_module_only": True}), ("NII", 2, {}, {}), ("IIG", 2, {}, {})]


@pytest.mark.parametrize("loads", [LOADS, *deep(MORE_LOADS)], ids=["some", "more"])
def test_files_in_the_old_order_can_be_loaded(ranks: Any, tmp_path: Path, loads: list[Any]) -> None:
    for rows in ranks(4).run(old_case, str(tmp_path), loads):
        assert rows.pop() == ("universal", "", []), rows
        for (name, group, zero, how), error, changed, different in rows:
            if (name, group) in (("NII", 2), ("IIG", 2)) or "round_robin_gradients" in zero:
                assert error.startswith("CheckpointError") and not changed, (name, error, changed)
            elif how:
                assert not error and different and all("model" not in item for item in different), (name, different)
            else:
                assert not error and different == [], (name, zero, error, different)


def old_case(folder: str, loads: list[Any]) -> list[Any]:
    """Return, for each load, its error, its changes, and differences from the saved states; last, a converted one."""
    with mock.patch.object(FlatStates, "in_stock_order", in_own_order):
        saved = save(folder, job_of(), "NIG")
    rows: list[Any] = []
    for name, group, zero, how in loads:
        error, changed, after = load(folder, name, group, zero, **how)
        rows.append(((name, group, zero, how), error, list(changed), list(snapshots.difference(saved, after))))
    snapshots.convert(folder, ours=True)
    error, _, after = load(f"{folder}universal", "GGG", 2, {})
    return [*rows, ("universal", error, list(snapshots.difference(saved, after)))]
