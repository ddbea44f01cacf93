# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Whole weights: ``export_weights``, which no rank gathers whole, and ``save_16bit_model``."""

import json
import re
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum
from safetensors.torch import load_file

import deepspeed_ext
from deepspeed_ext.checkpoint import digests
from deepspeed_ext.checkpoint.folder import RECORD, CheckpointError, CheckpointFolder
from deepspeed_ext.checkpoint.host_writer import HostWriter
from tests.harness import experts, networks, saves, snapshots, training
from tests.harness.save_faults import flip
from tests.harness.tiers import deep, with_cases
from tests.harness.verification import verified

GATHER = {"stage3_gather_16bit_weights_on_model_save": True}
FROZEN = ("layers.0.weight", "layers.0.bias")
HOST_BYTES = 992  # in two buffers, less than most tensors have


@with_cases(
    "dtype, names",
    ("bf16", ("NIG", "IIG")),
    ("fp32", ("III", "3")),
    *deep(("fp32", training.REPLICATED), ("bf16", training.PARTITIONED)),
)
def test_exported_weights_match_the_model(ranks: Any, tmp_path: Path, dtype: str, names: tuple[str, ...]) -> None:
    for name, (rank, differing, tied, trained, most) in ranks(4).each(parity_case, names, str(tmp_path), dtype):
        assert differing == [] and tied == ["layers.2.weight"] and trained, (name, differing, tied, trained)
        live, largest, retained = most
        assert live <= largest and retained <= HOST_BYTES * (rank < 3), (name, most)
    for name in names:
        results = {path.name: path for path in (tmp_path / name).iterdir()}
        index = json.loads(results.pop("model.safetensors.index.json").read_text())
        assert results.pop("model_ema.safetensors").read_text() == "kept" and results.pop(RECORD) and len(results) > 3
        assert set(index["weight_map"].values()) == results.keys()
        headers = {file: header(path) for file, path in results.items()}
        assert index["weight_map"] == {key: file for file, named in headers.items() for key in named}
        ends = [max(end for _, end in named.values()) for named in headers.values()]
        assert index["metadata"]["total_size"] == sum(ends)
        assert verified(tmp_path / name)[0] == 0
        (file, path), *_ = results.items()
        flip(path)
        status, output = verified(tmp_path / name)
        writer = (int(file.split("-")[1]) - 1) % 3
        assert status == 1 and f"{path} has changed" in output and f" that rank {writer} wrote" in output


def header(path: Path) -> dict[str, tuple[int, int]]:
    """Where each tensor is in a file, by its name."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    results = json.loads(content[8 : 8 + length])
    assert results.pop("__metadata__") == {"format": "pt"} and length % 8 == 0
    where = {name: tuple(item["data_offsets"]) for name, item in results.items()}
    assert max(end for _, end in where.values()) == len(content) - 8 - length
    return where


def parity_case(name: str, folder: str, dtype: str) -> Any:
    """Return this rank; differences from DeepSpeed's full state dict; missing names; whether training continues as
    without an export; elements live at once and those of the largest module; and bytes of host buffers."""
    more = {**GATHER, "paro_overlap_updates": True}
    tied = "layers.1.weight", "layers.2.weight"
    job = training.Job(
        networks.SQUARE, name != "3", dtype=dtype, optimizer="Adam", frozen=(0,), network=networks.Buffered
    )
    zero = {**training.SMALL, **(more if not name.isdigit() else GATHER)}
    undisturbed = training.train(job, training.placed(name, **zero)).weights
    engine, model = training.make_engine(job, training.placed(name, **zero))
    if dist.get_rank() == 0:
        Path(folder, name).mkdir()
        Path(folder, name, "model_ema.safetensors").write_text("kept")
    data = snapshots.steps_of(job, job.steps)
    snapshots.run(engine, job, data[:2], first=0)
    with torch.no_grad():
        engine.eval()
        engine(data[0][0])  # and no backward, for which parameters are prefetched
        engine.train()
    gathers = list(getattr(engine.optimizer, "gathers", {}).values())
    for gather in gathers:
        gather.live.peak = 0
    export = deepspeed_ext.export_weights(
        engine, f"{folder}/{name}", max_shard_bytes=500, writers=3, host_bytes=HOST_BYTES
    )
    largest = max(sum(getattr(p, "ds_numel", p.numel()) for p in m.parameters(recurse=False)) for m in model.modules())
    saved = {k: v for path in Path(folder, name).glob("model-*.safetensors") for k, v in load_file(path).items()}
    full = engine._zero3_consolidated_16bit_state_dict() if name[0] in "IG3" else model.state_dict()
    full = saved | {tied[1]: saved[tied[0]]} if full is None or dist.get_rank() else full  # of the first rank
    differing = [k for k in saved if k not in full or not torch.equal(saved[k], full[k])]
    differing += [k for k in saved if k in full and saved[k].dtype != full[k].dtype]
    deepspeed_ext.export_weights(engine, f"{folder}/some", dtype=torch.float16, exclude_frozen_parameters=True)
    live = max((gather.live.peak for gather in gathers), default=0)
    subset = load_file(f"{folder}/some/model.safetensors")
    expected = {k: v.half() if v.is_floating_point() else v for k, v in saved.items() if k not in FROZEN}
    differing += [k for k in expected | subset if not torch.equal(subset[k], expected[k])]
    snapshots.run(engine, job, data[2:], first=2)
    trained = torch.equal(training.whole_weights(model), undisturbed)
    missing = sorted(full.keys() - saved.keys())
    return dist.get_rank(), differing, missing, trained, (live, largest, export._writer.allocated_bytes)


@with_cases(
    "kind, names",
    ("MoE", ("NIG",)),
    ("AutoEP", ("IIG",)),
    *deep(("AutoEP", ("NIG",)), ("MoE", training.REPLICATED), ("AutoEP", training.PARTITIONED)),
)
def test_experts_are_exported_as_in_a_full_model(ranks: Any, tmp_path: Path, kind: str, names: Sequence[str]) -> None:
    for name, (began_alike, apart) in ranks(4).each(experts_case, names, str(tmp_path), kind):
        assert began_alike and apart < 1e-5, (name, began_alike, apart)


def experts_case(name: str, folder: str, kind: str) -> tuple[bool, float]:
    """Of each: whether an export before the first step is the model that was given; and how far the model that loads
    one after two steps is from it."""
    sizes = (13, 10, 10, 7)
    network: Any = {"MoE": networks.RoutedOverTwo, "AutoEP": experts.SmallMixtral}[kind]
    config = experts.autoep(2) if kind == "AutoEP" else {}
    job = training.Job(sizes, network=network, config=config, optimizer="Adam", frozen=(0,), empty=False)
    engine, _ = training.make_engine(job, training.placed(name, **training.SEVERAL_BUCKETS))
    deepspeed_ext.export_weights(engine, f"{folder}/{kind}{name}")
    torch.manual_seed(7)
    full = (networks.Routed if kind == "MoE" else network)(sizes, None, False)
    provided = full.state_dict()
    saved = load_file(f"{folder}/{kind}{name}/model.safetensors")
    alike = provided.keys() == saved.keys() and all(provided[k].shape == saved[k].shape for k in saved)
    # Experts of ``Routed`` begin otherwise than those of ``RoutedOverTwo``.
    alike &= all(torch.equal(provided[k], saved[k]) for k in saved if kind == "AutoEP" or "experts" not in k)
    snapshots.run(engine, job, snapshots.steps_of(job, 2))
    deepspeed_ext.export_weights(engine, f"{folder}/{kind}{name}", writers=2, max_shard_bytes=3000)
    saved = {k: v for path in Path(folder, f"{kind}{name}").glob("*.safetensors") for k, v in load_file(path).items()}
    full.load_state_dict(saved)
    x, _ = next(training.batches(job))
    engine.eval()
    with torch.no_grad():
        apart = (engine(x) - full.eval()(x)).abs().max().item()
    return alike, apart


@pytest.mark.parametrize("name", ["NIG", "IIG"])
def test_training_continues_while_weights_are_written(ranks: Any, tmp_path: Path, name: str) -> None:
    ranks(2).run(asynchronous_case, tmp_path / "weights", name)
    assert {path.name for path in (tmp_path / "weights").iterdir()} == {"model.safetensors", "notes", RECORD}


def asynchronous_case(folder: Path, name: str) -> None:
    """Export, take a step while nothing is written yet, and let another file appear before the weights."""
    write, go = HostWriter._write, threading.Event()
    job = training.Job(empty=False)
    engine, model = training.make_engine(job, training.placed(name, **training.SMALL))
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        before = {key: param.detach().clone() for key, param in model.named_parameters()}
    with mock.patch.object(HostWriter, "_write", lambda *args: (go.wait(), write(*args))):
        export = deepspeed_ext.export_weights(engine, folder, asynchronous=True)
        snapshots.run(engine, job, snapshots.steps_of(job, 1))
        assert not folder.exists() and not (export.done and dist.get_rank() == 0)
        dist.barrier()
        go.set()
        if dist.get_rank() == 0:
            folder.mkdir()
            (folder / "notes").write_text("of somebody else")
        export.wait()
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(before[key], saved[key]) for key in before), "the weights before the step"
    engine.destroy()


def test_a_failed_export_does_not_change_the_folder(ranks: Any, tmp_path: Path) -> None:
    for at_once, later, names, is_same, again in ranks(2).run(full_disk_case, str(tmp_path)):
        for message in (at_once, later):
            assert message.startswith("CheckpointError: rank 1: ") and "model-00002-of-" in message, message
            assert "could not be written" in message and "No space left on device" in message, message
        assert names == ["weights"] and is_same and again == ""


def full_disk_case(folder: str) -> tuple[str, str, list[str], bool, str]:
    """Return the errors of an export, and of the export after an asynchronous one; the names in the parent folder
    then, whether the folder is unchanged, and the error of an export when there is space."""

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in Path(folder, "weights").iterdir()}

    def export(**more: Any) -> Any:
        return deepspeed_ext.export_weights(engine, f"{folder}/weights", writers=2, max_shard_bytes=2000, **more)

    job = training.Job(empty=False)
    engine, _ = training.make_engine(job, training.placed("IIG"))
    export()
    before = contents()
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with mock.patch.object(HostWriter, "_write", full if dist.get_rank() == 1 else HostWriter._write):
        at_once = snapshots.error_of(export)
    with mock.patch.object(digests, "write_entry", full if dist.get_rank() == 1 else digests.write_entry):
        export(asynchronous=True)._writer.join()
    later = snapshots.error_of(export)
    dist.barrier()
    names, is_same = sorted(path.name for path in Path(folder).iterdir()), contents() == before
    dist.barrier()
    again = snapshots.error_of(export)
    again += "" if contents() != before else "nothing was exported"
    engine.destroy()
    return at_once, later, names, is_same, again


def test_exports_and_asynchronous_saves_wait_for_each_other(ranks: Any, tmp_path: Path) -> None:
    """One goes into the folder of the other: it would be moved while it is written, or set aside."""
    tag, export = ["prepare tag", "publish tag"], ["prepare weights", "publish weights"]
    for rank, (turns, messages, again) in enumerate(ranks(2).run(turns_case, str(tmp_path))):
        assert turns == ([] if rank else [*tag, *export, *export, *tag])
        assert messages.startswith("SaveFailed: ") and "no space" in messages and again == ""
    assert {path.name for path in (tmp_path / "tag" / "weights").iterdir()} == {"model.safetensors", RECORD}
    assert not list(tmp_path.rglob(".*"))


def turns_case(folder: str) -> tuple[list[str], str, str]:
    """Return the order of operations on folders in a save, an export right after it, an asynchronous export, and a
    save right after that; the error that an export raises after a save that failed on one rank; and a later one."""
    turns: list[str] = []

    def noted(what: str) -> Any:
        act = getattr(CheckpointFolder, what)
        return mock.patch.object(
            CheckpointFolder, what, lambda self: (turns.append(f"{what} {self.path.name}"), act(self))
        )

    def export(**more: Any) -> Any:
        return deepspeed_ext.export_weights(engine, f"{folder}/tag/weights", **more)

    engine, _ = training.make_engine(training.Job(empty=False, config=saves.ASIDE), training.placed("NIG", 1))
    files, write, late = engine.checkpoint_engine, HostWriter._write, 0.3
    with noted("prepare"), noted("publish"):
        with saves.late_copies(late):
            engine.save_checkpoint(folder, "tag")
            export()
            files.finish()
        with mock.patch.object(HostWriter, "_write", lambda *args: (time.sleep(late), write(*args))):
            last = export(asynchronous=True)
            engine.save_checkpoint(folder, "tag")
            files.finish()
            last.wait()
    full = {"return_value": CheckpointError("no space")} if dist.get_rank() == 1 else {"side_effect": files.write}
    with mock.patch.object(files, "write", **full):
        engine.save_checkpoint(folder, "tag")
    messages, again = (snapshots.error_of(act) for act in (export, files.finish))
    engine.destroy()
    return turns, messages, again


REFUSED = {
    "writers": r"ValueError: expected 1 to 2 writers.*",
    "dtype": r"ValueError: .*float8_e8m0fnu.*",
    "ranks": r"CheckpointError: rank 1: the arguments of an export.*",
    "file": r"CheckpointError: rank 0: .* must be a folder.*",
    "offloaded": r"RuntimeError: Offloaded parameters.*",
    "pipeline": r"NotImplementedError: Weights of a pipeline.*",
    "tensor parallel": r"NotImplementedError: Weights that are split over 2 tensor-parallel ranks.*",
}


def test_impossible_exports_are_refused(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for messages in ranks(2).run(refused_case, str(tmp_path)):
        for (case, pattern), message in zip(REFUSED.items(), messages, strict=True):
            assert re.fullmatch(pattern, message, re.DOTALL), (case, message)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def refused_case(folder: str) -> list[str]:
    engine, _ = training.make_engine(training.Job(empty=False, optimizer="Adam"), training.placed("IIG", 1))

    def error(name: str = "new", **more: Any) -> str:
        return snapshots.error_of(deepspeed_ext.export_weights, engine, f"{folder}/{name}", **more)

    results = [error(writers=3), error(dtype=torch.float8_e8m0fnu), error(f"rank{dist.get_rank()}"), error("file")]
    offloaded = {OffloadStateTypeEnum.lp_params}
    for owner, name, value in (
        (engine.optimizer, "offloaded_states", offloaded),
        (engine, "pipeline_parallelism", True),
        (engine, "mp_world_size", 2),
    ):
        with mock.patch.object(owner, name, value):
            results.append(error())
    return results


@with_cases("names", ("NIG", "IIG"), *deep((training.REPLICATED,), (training.PARTITIONED,)))
def test_save_16bit_model_writes_all_weights_or_nothing(ranks: Any, tmp_path: Path, names: tuple[str, ...]) -> None:
    for name, row in ranks(4).each(bit16_case, names, str(tmp_path)):
        assert row == (True, [], ["pytorch_model.bin"]), (name, row)


def bit16_case(name: str, folder: str) -> tuple[bool, list[str], list[str]]:
    """Return whether it saved, differences from the model, and the files after a failed save."""

    def fail(state: Any, path: str, **kwargs: Any) -> None:
        Path(path).write_bytes(b"a part")
        raise OSError(28, "No space left on device")

    job = training.Job(dtype="bf16", frozen=(1,), empty=False, network=snapshots.Buffered)
    zero = {"paro_strategy": name, "paro_group_size": 2, **(GATHER if name in training.PARTITIONED else {})}
    engine, model = training.make_engine(job, zero)
    snapshots.mark(engine, model)
    snapshots.run(engine, job, snapshots.steps_of(job, 2))
    answer = engine.save_16bit_model(f"{folder}/{name}")
    dist.barrier()
    saved = torch.load(f"{folder}/{name}/pytorch_model.bin")
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        expected = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        differing = [key for key in expected if key not in saved or not torch.equal(expected[key], saved[key])]
    before = Path(folder, name, "pytorch_model.bin").read_bytes()
    snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=2))  # parameters are sharded again
    with mock.patch.object(torch, "save", fail):
        error = snapshots.error_of(engine.save_16bit_model, f"{folder}/{name}")
    assert error.startswith("OSError") == (dist.get_rank() == 0), error
    dist.barrier()
    differing += ["the file"] * (Path(folder, name, "pytorch_model.bin").read_bytes() != before)
    remaining = sorted(path.name for path in Path(folder, name).iterdir())
    return bool(answer), differing + sorted(saved.keys() - expected.keys()), remaining
