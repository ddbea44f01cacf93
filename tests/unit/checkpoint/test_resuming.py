# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint restores all that was saved, or parts of it, under the strategy that saved it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from torch import nn

from scripts.emulation.traffic import TrafficMeter
from tests.harness import snapshots, training
from tests.harness.snapshots import error_of, job_of
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, placed

OFFLOAD = {"offload_optimizer": {"device": "cpu"}}
ALL = (*REPLICATED, *PARTITIONED)


@with_cases(
    "optimizer, dtype, names, zero",
    ("Adam", "fp16", ("NIG", "III"), {}),
    ("Muon", "fp32", ("NIG",), {}),
    ("Muon", "fp16", ("GNG",), OFFLOAD),
    *deep(*(("Adam", dtype, ALL, {}) for dtype in ("fp32", "bf16", "fp16"))),
    *deep(("Muon", "fp32", ("NNN", "NII", "III", "IIG", "GNG"), {}), ("Muon", "fp16", ("NII",), OFFLOAD)),
    *deep(("Muon", "bf16", ("NII", "IIG"), {}), ("Muon", "fp16", ("NIG", "III"), {})),
)
def test_a_resumed_run_matches_the_uninterrupted_run(
    ranks: Any, tmp_path: Path, optimizer: str, dtype: str, names: tuple[str, ...], zero: dict[str, Any]
) -> None:
    for name, results in ranks(4).each(resume_case, names, str(tmp_path), optimizer, dtype, zero):
        assert results == [{}, {}, 0.0], (name, results)


def resume_case(
    name: str,
    folder: str,
    optimizer: str,
    dtype: str,
    zero: dict[str, Any] | None = None,
    convert: bool = False,
    lanes: int = 1,
    later: dict[str, Any] | None = None,
    **config: Any,
) -> list[Any]:
    """Return differences after a load and after further steps, the distance of zero_to_fp32's weights from the
    optimizer's, and differences after a load of the universal checkpoint."""
    job = dataclasses.replace(job_of(dtype, zero, optimizer, **config), tensor_parallel=lanes)
    universal = {**config.get("checkpoint", {}), "load_universal": True}
    universal = dataclasses.replace(job, config={**job.config, "checkpoint": universal})
    keys, location = placed(name, 2 // lanes), f"{folder}/{name}"
    saved, *results = snapshots.resume(location, job, keys, 3, 5, later)
    if lanes > 1:
        return results
    dist.barrier()
    if config.get("checkpoint", {}).get("checkpoint_serialization", True):
        results.append(gap_of_exported(location, saved))
    assert dtype != "fp16" or saved["loss scale"] < 256
    if convert:
        snapshots.convert(location)
        engine, model = training.make_engine(universal, keys)
        engine.load_checkpoint(location)
        results.append(snapshots.difference(saved, snapshots.snapshot(engine, model, job)))
    return results


def gap_of_exported(folder: str, saved: dict[str, torch.Tensor]) -> float:
    """Return how far weights of zero_to_fp32 are from those in fp32, or from the model's if they are not trained."""
    exported = get_fp32_state_dict_from_zero_checkpoint(folder)
    kinds = (" buffer", " model", " fp32")
    expected = {key.split(" ")[0]: value for kind in kinds for key, value in saved.items() if key.endswith(kind)}
    return max((exported[key] - value).abs().max().item() for key, value in expected.items())


LOCO: dict[str, Any] = {"zeropp_loco_param": {}}
UPDATES: dict[str, Any] = {"paro_quantized_updates": {}}
OUTER = {"paro_outer_optimizer": {"steps": 4, "bits": 8, "delay": 1}}
OUTER_IN_PARTS = {"paro_outer_optimizer": {"steps": 4, "bits": 4, "fragments": 2}}
MASTERS = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
LAST = 13  # 11 steps are enough for a lost error to change the weights, 7 are not
# Strategies, keys, optimizer, dtype, and after how many steps it is saved.
ROWS = [
    (("III",), OUTER, "Muon", "bf16 masters", (4,)),
    *deep(
        *((("NIG", "IIG", "NNN"), LOCO, "Adam", dtype, range(1, LAST)) for dtype in ("fp32", "bf16 masters", "fp16")),
        *((("NIG", "IIG"), {**LOCO, **UPDATES}, optimizer, "bf16", range(1, LAST)) for optimizer in ("Adam", "Muon")),
        (("NIG", "IIG"), {"paro_quantized_updates": {"resync_T": 4}}, "Adam", "fp32", range(1, LAST)),
        (("NIG", "IIG"), {"paro_quantized_updates": {"bits": "exact"}}, "Adam", "bf16 masters", range(1, LAST)),
        (("NII", "III"), OUTER, "Adam", "fp32", range(1, LAST)),
        (("III",), OUTER, "Muon", "bf16 masters", (2, 4)),
        (("NNI", "INI"), OUTER_IN_PARTS, "Muon", "bf16", range(1, LAST)),
    ),
]


@with_cases("names, zero, optimizer, dtype, starts", *ROWS)
def test_runs_resume_from_any_step(
    ranks: Any, kernels: bool, tmp_path: Path, names: Any, zero: Any, optimizer: str, dtype: str, starts: Any
) -> None:
    results = ranks(4).run(every_step_case, str(tmp_path), names, zero, optimizer, dtype, starts)
    assert results == [[(name, start, {}, {}) for name in names for start in starts]] * 4


def every_step_case(
    folder: str, names: tuple[str, ...], zero: dict[str, Any], optimizer: str, dtype: str, starts: Any
) -> list[tuple[str, int, dict[str, float], dict[str, float]]]:
    """Return differences after a load of an asynchronous save, and at the end; see ``snapshots.resume``."""
    config: dict[str, Any] = {"checkpoint": {"async_save": True}}
    if dtype == "bf16 masters":
        config |= {"bf16": MASTERS, "data_types": {"grad_accum_dtype": "bf16"}}
    job = job_of(dtype.split()[0], zero, optimizer, **config)
    return [
        (name, start, *snapshots.resume(f"{folder}/{name}/{start}", job, placed(name), start, LAST)[1:])
        for name in names
        for start in starts
    ]


VARIANTS: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "offload": (("IIG",), {"zero": OFFLOAD, "zero_force_ds_cpu_optimizer": False}),
    "tensor parallel": (("NIG",), {"lanes": 2}),
    "fp32 accumulation": (("NIG",), {"data_types": {"grad_accum_dtype": "fp32"}}),
    "round robin": (("NIG",), {"zero": {"round_robin_gradients": True}}),
    "not zip": (("IIG",), {"checkpoint": {"checkpoint_serialization": False}}),
    "in few bits": (("NIG",), {"zero": {"paro_quantized_updates": {}, "zeropp_loco_param": {}}}),
    "whole modules": (("IIG",), {"zero": {"paro_modules": {"layers.1": "N"}}}),
    "modules in groups": (("GIG",), {"zero": {"paro_modules": {"layers.1": "I"}}, "later": {"paro_modules": {}}}),
    "modules in groups later": (("GGG",), {"later": {"paro_modules": {"layers.1": "I"}}}),
    "persistent parameters": (("IIG",), {"zero": {"stage3_param_persistence_threshold": 100}}),
}

# The model of the tests is not really cut by tensor parallelism, but converters take it to be. DeepSpeed's
# zero_to_fp32 reads zip archives only.
EXCEPTIONS: dict[str, list[Any]] = {"tensor parallel": [{}, {}], "not zip": [{}, {}, {}]}
LATER = ("fp32 accumulation", "not zip", "round robin", "persistent parameters")  # in the deep tier


@with_cases(
    "variant, names",
    *((one, VARIANTS[one][0]) for one in VARIANTS if one not in LATER),
    *deep(*((one, (*VARIANTS[one][0], "IIG", "III")) for one in VARIANTS)),
)
def test_variants_resume_and_convert(ranks: Any, tmp_path: Path, variant: str, names: tuple[str, ...]) -> None:
    case = {"convert": True, **VARIANTS[variant][1]}
    for name, results in ranks(4).each(resume_case, names, str(tmp_path), "Adam", "bf16", **case):
        assert results == EXCEPTIONS.get(variant, [{}, {}, 0.0, {}]), (name, results)


PARTS = [
    {"load_optimizer_states": False},
    {"load_module_only": True, "load_optimizer_states": False},
    {"load_module_only": True},
    {"load_lr_scheduler_states": False},
]


@pytest.mark.parametrize("stock, name", [("3", "IIG"), *deep(("2", "NIG"), ("2", "NNG"), ("3", "GGG"))])
def test_partial_loads_match_deepspeed(ranks: Any, tmp_path: Path, stock: str, name: str) -> None:
    for part, from_fp32, results in ranks(4).rows(parts_case, str(tmp_path), stock, name):
        assert results == {}, (part, from_fp32, results)


def parts_case(folder: str, stock: str, name: str) -> list[tuple[Any, bool, dict[str, float]]]:
    """Load parts of stock DeepSpeed's checkpoint with DeepSpeed and with a strategy; return the differences."""
    rows = []
    first = job_of("bf16")
    engine, model = training.make_engine(first, placed(stock))
    snapshots.mark(engine, model)
    snapshots.run(engine, first, snapshots.steps_of(first, 3))
    engine.save_checkpoint(folder)
    engine.destroy()
    # With load_module_only alone DeepSpeed's stage 3 loads no weights; what is meant is the second part.
    as_stock = [PARTS[1] if stock == "3" and part == PARTS[2] else part for part in PARTS]
    for from_fp32 in (True, False):
        job = job_of("bf16", zero={"load_from_fp32_weights": from_fp32})
        both = load_parts(folder, job, placed(stock), as_stock), load_parts(folder, job, placed(name), PARTS)
        results = (snapshots.difference(*pair) for pair in zip(*both, strict=True))
        rows += [(part, from_fp32, differing) for part, differing in zip(PARTS, results, strict=True)]
    return rows


def load_parts(folder: str, job: Any, zero: dict[str, Any], parts: list[dict[str, bool]]) -> list[dict[str, Any]]:
    """Return, for each part, a snapshot after a step of another run and the load of the part."""
    engine, model = training.make_engine(job, zero)
    rows = []
    for part in parts:
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=7))
        engine.load_checkpoint(folder, **part)
        observed = snapshots.snapshot(engine, model, job)
        if "load_lr_scheduler_states" not in part:  # moments of the step before: their last bit is of other sums
            observed = {key: value for key, value in observed.items() if " exp_avg" not in key}
        rows.append(observed)
    engine.destroy()
    return rows


class Growing(nn.Linear):
    """With extra state that is longer each time."""

    saves = 0

    def get_extra_state(self) -> Any:
        Growing.saves += 1
        return self.weight.new_zeros(Growing.saves)

    def set_extra_state(self, state: Any) -> None:
        """Nothing."""


def test_options_of_saves_and_loads_match_deepspeed(ranks: Any, tmp_path: Path) -> None:
    for name, row in ranks(2).each(own_way_case, ("NIG", "IIG"), str(tmp_path)):
        assert row == ([], [], True, "KeyError"), (name, row)


def own_way_case(name: str, folder: str) -> tuple[list[str], list[str], bool, str]:
    """Use SGD, no frozen parameters, a custom load function, a module whose state changes its shape, and another tag.
    Return differences after a non-strict load of a checkpoint without frozen parameters, and after a load of weights
    of a tag that is not the latest; names that the custom function did not receive; whether extra state of another
    length is accepted; the error of a reserved key in client_state."""
    job = dataclasses.replace(job_of(), optimizer="SGD", config={})
    engine, model = training.make_engine(job, placed(name))
    snapshots.mark(engine, model)
    snapshots.run(engine, job, snapshots.steps_of(job, 2))
    own = {"epoch": 1}
    engine.save_checkpoint(f"{folder}/{name}", 7, own, exclude_frozen_parameters=True)
    assert own == {"epoch": 1} and Path(folder, name, "7").is_dir()
    saved = snapshots.snapshot(engine, model, job)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.load_checkpoint(f"{folder}/{name}", load_module_strict=False)
    differences = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(f"{folder}/{name}", "later", save_latest=True)
    engine.load_checkpoint(f"{folder}/{name}", "7", load_module_strict=False, load_module_only=True)
    of_tag = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    differences |= {key: gap for key, gap in of_tag.items() if key.endswith(" model")}
    seen: list[str] = []
    engine.load_checkpoint(f"{folder}/{name}", custom_load_fn=lambda src, dst, seen=seen: seen.extend(src))
    unseen = {"layers.0.weight", "seen"} - set(seen)
    model.layers[0].__class__ = Growing
    engine.save_checkpoint(f"{folder}/{name}", "extra", save_latest=False)
    accepted = engine.load_checkpoint(f"{folder}/{name}", "extra")[0] is not None
    raised = error_of(engine.save_checkpoint, f"{folder}/{name}", client_state={"paro": "mine"}).split(":")[0]
    assert Path(folder, name, "latest").read_text() == "later"
    return sorted(differences), sorted(unseen), accepted, raised


@with_cases("names", ("NNN", "NIG", "III"), *deep((ALL,)))
def test_each_state_is_written_once(ranks: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, (files, written, received, due) in ranks(4).each(bytes_case, names, str(tmp_path)):
        cut = {"N": 1, "I": 2, "G": 4}[name[2]]
        assert files == cut, (name, files)
        assert due <= written * cut <= 1.02 * due + 20_000 * cut, (name, written, due)
        # Nobody gathers states: what may move is a slice of the parameters, or, into ZeRO's order, a shard.
        assert received <= (0.4 / 4 if name[0] != "N" else 1 / cut) * due, (name, received, due)


def bytes_case(name: str, folder: str) -> tuple[int, int, int, int]:
    """Files of optimizer states, bytes of the largest, bytes received during the save, bytes of all states."""
    job = training.Job(sizes=(256, 512, 256), optimizer="Adam", empty=False)
    engine, model = training.make_trained(job, name)
    if name[0] != "N":
        engine.optimizer.drain_parameters()  # of the step
    meter = TrafficMeter()
    dist.barrier()
    meter.start()
    dist.barrier()
    engine.save_checkpoint(f"{folder}/{name}")
    meter.stop()
    traffic = meter.split(2)
    sizes = [path.stat().st_size for path in Path(folder, name).glob("*/*_optim_states.pt")]
    due = 12 * sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    return len(sizes), max(sizes), int(traffic.intra_mean + traffic.inter_mean), due
