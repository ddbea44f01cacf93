# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A fault in a save or a load loses nothing that was there, and every rank reports it."""

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist
from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES, PARAM_SLICE_MAPPINGS
from deepspeed.runtime.checkpoint_engine.fast_checkpoint_engine import FastCheckpointEngine
from deepspeed.runtime.checkpoint_engine.torch_checkpoint_engine import TorchCheckpointEngine
from deepspeed.runtime.zero.utils import ZeRORuntimeException

from deepspeed_ext.checkpoint import commit, experts
from deepspeed_ext.checkpoint import folder as folders
from deepspeed_ext.checkpoint.files import CheckpointFiles, wrap
from deepspeed_ext.strategy import hyphenate
from deepspeed_ext.zero import checkpoint_ranks
from tests.harness import calls, snapshots, training
from tests.harness.logs import logged
from tests.harness.save_faults import ASYNC, SYNC, Fault, flip
from tests.harness.save_faults import run as run_fault
from tests.harness.snapshots import SHARD, error_of
from tests.harness.tiers import deep
from tests.harness.verification import Payload, check_each_of, check_verification

# Of the folder of a tag, in groups of 2: a file that one rank reads; ``SHARD`` is another.
MODULE = {"NIG": "mp_rank_00_model_states.pt", "III": "zero_pp_rank_1_mp_rank_00_model_states.pt"}
MODULE["IIG"] = MODULE["III"]
FAULTS = (
    *("missing", "truncated", "empty", "of another save"),
    *("of no checkpoint", "of something else", "flipped", "with a payload"),
)
REASONS = {"missing": "is missing", "of another save": "to another save", FAULTS[-1]: "posix.mkdir, which is not"}
# Found by the size alone, and by the digest. The other faults are those of a save without a record.
RECORDED = {"truncated": " bytes, expected ", "flipped": "has changed: its digest differs"}


def spoil(path: Path, fault: str) -> None:
    if fault not in RECORDED:
        path.with_name(folders.RECORD).unlink(missing_ok=True)
    if fault == "missing":
        path.unlink()
    elif fault == "flipped":
        flip(path)
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "of another save":
        path.write_bytes((path.parents[1] / "before" / path.name).read_bytes())
    elif fault == "of something else":
        torch.save({"a": 1}, path)
    elif fault == "with a payload":
        content = torch.load(path, weights_only=False)
        torch.save({**(content if isinstance(content, dict) else {}), "payload": Payload(path)}, path)
    else:
        path.write_text("nothing that torch has written")


def files_of(name: str, universal: bool) -> Iterator[tuple[str, str, dict[str, bool]]]:
    """Yield a file, its fault, and the arguments of the load."""
    if universal:
        states = ("fp32.pt", "exp_avg.pt", "exp_avg_sq.pt")
        for file in (*(f"layers.2.weight/{state}" for state in states), "optimizer_state.pt"):
            yield from (
                (f"zero/{file}", fault, {}) for fault in ("missing", "truncated", "of no checkpoint", FAULTS[-1])
            )
    else:
        yield from ((file, fault, {}) for file in (MODULE[name], SHARD) for fault in FAULTS)
        if name in training.PARTITIONED:  # weights without optimizer states come from all shards
            yield from ((SHARD, fault, {"load_module_only": True}) for fault in FAULTS)


@pytest.mark.parametrize(
    "name, universal",
    [("IIG", False), ("NIG", True), *deep(*((name, one) for name in ("NIG", "IIG", "III") for one in (False, True)))],
)
def test_a_damaged_file_is_named_before_any_change(ranks: Any, tmp_path: Path, name: str, universal: bool) -> None:
    answers = ranks(4).run(damaged_case, str(tmp_path), name, universal)
    for messages, changed, again in answers:
        assert messages == answers[0][0] and (changed, again) == ({}, {})
        for (file, fault, _), message in zip(files_of(name, universal), messages, strict=True):
            assert message.startswith("CheckpointError: rank ") and file in message, (fault, message)
            reasons = REASONS if universal else {**REASONS, **RECORDED}
            assert reasons.get(fault, "cannot be read") in message, (fault, message)
    assert not [*tmp_path.rglob("*.ran")]  # no payload has run
    if not universal:
        check_verification(tmp_path / "good")


def damaged_case(folder: str, name: str, universal: bool) -> tuple[list[str], dict[str, float], dict[str, float]]:
    """Return the error of each load, the changes that loads made, and differences after a load of intact files."""
    config = {"checkpoint": {"load_universal": universal, "verify": True}}
    job = training.Job(optimizer="Adam", empty=False, frozen=(1,), network=snapshots.Buffered, config=config)
    engine, model = training.make_trained(job, name)
    engine.save_checkpoint(folder, tag="before")
    snapshots.mark(engine, model)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(folder, tag="good")
    saved = snapshots.snapshot(engine, model, job)
    if universal:
        snapshots.convert(folder)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    tag, messages = "good_universal" if universal else "good", []
    for file, fault, parts in files_of(name, universal):
        path = Path(folder, tag, file)
        good = {path: path.read_bytes() for path in (path, path.with_name(folders.RECORD)) if path.exists()}
        snapshots.on_first_rank(spoil, path, fault)
        messages.append(error_of(engine.load_checkpoint, folder, tag=tag, **parts))
        for path, content in good.items():
            snapshots.on_first_rank(path.write_bytes, content)
    changed = snapshots.difference(now, snapshots.snapshot(engine, model, job))
    engine.load_checkpoint(folder, tag=tag)
    return messages, changed, snapshots.difference(saved, snapshots.snapshot(engine, model, job))


@pytest.mark.deep
def test_each_of_a_thousand_damaged_files_is_named(tmp_path: Path) -> None:
    check_each_of(tmp_path, 1000)


# (saved by; loaded by, keys then; what the error says)
MISFITS: list[tuple[str, str, dict[str, Any], str]] = [
    ("GGG", "III", {}, "stage 3, sharded over 4 ranks, but this run expects stage 3, sharded over 2"),
    ("NIG", "NNN", {}, "of stage 2, sharded over [4] ranks"),
    ("NIG", "IIG", {}, "zero_pp_rank_0_mp_rank_00_model_states.pt is missing"),
    ("IIG", "NIG", {}, "mp_rank_00_model_states.pt is missing"),
    ("NIG", "NIG", {"round_robin_gradients": True}, "order"),
]


def test_differently_sharded_states_are_refused(ranks: Any, tmp_path: Path) -> None:
    for (saved, loaded, _, reason), (message, changed) in ranks(4).each(misfits_case, MISFITS, str(tmp_path)):
        assert message.startswith("CheckpointError: rank 0: ") and reason in message, message
        if saved != loaded:
            assert f"saved with paro_strategy {hyphenate(saved)} in groups of 2, by 4 ranks" in message, message
            assert f"loaded with paro_strategy {hyphenate(loaded)} in groups of 2, by 4 ranks" in message, message
            assert "python -m deepspeed_ext convert" in message
        assert not changed


def misfits_case(misfit: tuple[Any, ...], folder: str) -> tuple[str, bool]:
    """Return the error of a load, of the class that scripts catch with stock, and whether a weight changed."""
    job, (saved, loaded, keys, _) = training.Job(empty=False), misfit
    if not Path(folder, saved).exists():
        engine, _ = training.make_trained(job, saved)
        engine.save_checkpoint(f"{folder}/{saved}")
        engine.destroy()
    engine, model = training.make_engine(job, training.placed(loaded, **keys))
    before, message = training.whole_weights(model), ""
    try:
        engine.load_checkpoint(f"{folder}/{saved}")
    except ZeRORuntimeException as error:
        message = f"{type(error).__name__}: {error}"
    return message, bool((training.whole_weights(model) - before).any())


def test_another_model_is_refused(ranks: Any, tmp_path: Path) -> None:
    for rows in ranks(2).run(another_model_case, str(tmp_path)):
        assert len(rows) == 8
        for name, sizes, message, changed in rows:
            assert message.startswith("CheckpointError: rank 0: ") and not changed, (name, message)
            names = {(13, 37, 31, 7): (6, 3), (13, 38, 7): (4, 3)}[sizes]
            assert f"does not fit the model: of {names[0]} names, {names[1]} are missing" in message, (name, message)
            assert "the first is 'layers.2.bias'" in message or "the first is 'layers.0.bias'" in message


def another_model_case(folder: str) -> list[tuple[str, tuple[int, ...], str, bool]]:
    """The error where a model has another layer, or a layer of another width, and whether a weight changed."""
    rows = []
    for name in ("NIG", "IIG"):
        for sizes in ((13, 37, 7), (13, 38, 7), (13, 37, 31, 7)):
            engine, model = training.make_trained(training.Job(sizes=sizes, empty=False), name)
            if sizes == (13, 37, 7):
                engine.save_checkpoint(f"{folder}/{name}")
            for only in (True, False) if sizes != (13, 37, 7) else ():
                before = training.whole_weights(model)
                message = error_of(engine.load_checkpoint, f"{folder}/{name}", load_module_only=only)
                rows.append((name, sizes, message, bool((training.whole_weights(model) - before).any())))
            if name == "NIG":  # a function of the user's may know what to do
                engine.load_checkpoint(f"{folder}/{name}", load_module_only=True, custom_load_fn=lambda src, dst: None)
            engine.destroy()
    return rows


@pytest.mark.parametrize(
    ("saved", "loaded"), [("NIG", "NIG"), ("3", "GGG"), *deep(("IIG", "IIG"), ("III", "III"), ("GGG", "GGG"))]
)
def test_parameters_of_one_shape_are_matched_by_name(ranks: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    for rows in ranks(2).run(order_case, str(tmp_path), saved, loaded):
        for case in ("reversed", "reversed, other frozen"):
            message, _ = rows.pop(case)
            assert message.startswith("CheckpointError: rank 0: ") and "have another order" in message, (case, message)
            assert "'layers.0.weight' (8, 8)" in message and "'layers.2.weight' (8, 8)" in message, message
        assert rows == dict.fromkeys(("reversed, universal", "renamed", "no names"), ("", 0.0))


def order_case(folder: str, saved: str, loaded: str) -> dict[str, tuple[str, float]]:
    """Return, for several models and checkpoints, the error of a load and the largest difference of weights."""

    class Reversed(training.Network):
        """The same names, with the parameters in reverse order of layers, and so of the same shapes."""

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.layers._modules = dict(reversed(self.layers._modules.items()))

    class Renamed(training.Network):
        """Other names, in the same order."""

        layers = property(lambda self: self.blocks)  # type: ignore[assignment]

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.blocks = self._modules.pop("layers")

    def make(name: str, network: Any = None, frozen: Any = (), universal: bool = False) -> Any:
        config = {"checkpoint": {"load_universal": universal}}
        job = training.Job((8, 8, 8, 8), False, optimizer="Adam", frozen=frozen, network=network, config=config)
        return job, *training.make_engine(job, training.placed(name, group_size=1))

    def weights_of(model: Any) -> list[torch.Tensor]:
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            return [model.layers[number].weight.detach().clone() for number in range(3)]

    def forget_names(path: Path) -> None:
        content = torch.load(path, weights_only=False)
        content.pop(PARAM_SHAPES, None)
        content.get(OPTIMIZER_STATE_DICT, {}).pop(PARAM_SLICE_MAPPINGS, None)
        torch.save(content, path)
        path.with_name(folders.RECORD).unlink(missing_ok=True)

    def load_renamed(src: dict[str, Any], dst: Any) -> None:
        for name, param in dst.named_parameters():
            if param.numel():
                param.data.copy_(src[name.replace("blocks", "layers")])

    trained = []
    for frozen in ((), (0,)):
        job, engine, model = make(saved, frozen=frozen)
        snapshots.run(engine, job, snapshots.steps_of(job, 2))
        engine.save_checkpoint(f"{folder}/{len(frozen)}", tag="good")
        trained.append(weights_of(model))
        engine.destroy()
    snapshots.convert(f"{folder}/0", ours=True)
    rows = {}
    for case, network, frozen in (
        ("reversed", Reversed, ()),
        ("reversed, other frozen", Reversed, (2,)),
        ("reversed, universal", Reversed, ()),
        ("renamed", Renamed, ()),
        ("no names", None, ()),
    ):
        if case == "no names" and dist.get_rank() == 0:
            for path in Path(folder, "0", "good").glob("*.pt"):
                forget_names(path)
        dist.barrier()
        universal = "universal" in case
        _, engine, model = make(loaded, network, frozen, universal)
        load = partial(engine.load_checkpoint, f"{folder}/{len(frozen)}", "good_universal" if universal else "good")
        if network is Renamed:
            load = partial(load, custom_load_fn=load_renamed)
        message = error_of(load)
        pairs = zip(trained[len(frozen)], weights_of(model), strict=True)
        rows[case] = message, max((item - other).abs().max().item() for item, other in pairs)
        engine.destroy()
    return rows


@pytest.mark.parametrize("tag", ["same", *deep("new")])
def test_a_save_that_one_rank_cannot_write_changes_nothing(ranks: Any, tmp_path: Path, tag: str) -> None:
    for message, results in ranks(4).run(full_disk_case, str(tmp_path), tag):
        assert message.startswith("CheckpointError: rank 2: ") and "could not be written" in message, message
        assert "No space left on device" in message and SHARD.replace("_1_", "_2_") in message
        assert results == {}


def full_disk_case(folder: str, tag: str) -> tuple[str, dict[str, float]]:
    """Return the error, and differences after a load of the previous checkpoint."""
    job = training.Job(optimizer="Adam", empty=False)
    engine, model = training.make_trained(job, "IIG")
    engine.save_checkpoint(folder, tag="same")
    saved, write = snapshots.snapshot(engine, model, job), torch.save

    def fail(state: Any, path: str, **kwargs: Any) -> None:
        write({"a": "part"}, path, **kwargs)
        if dist.get_rank() == 2 and "optim" in path:
            raise OSError(28, "No space left on device")

    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    latest = Path(folder, "latest").read_text()
    with mock.patch.object(torch, "save", fail):
        message = error_of(engine.save_checkpoint, folder, tag=tag)
    assert Path(folder, "latest").read_text() == latest
    engine.load_checkpoint(folder)
    return message, snapshots.difference(saved, snapshots.snapshot(engine, model, job))


def test_tags_that_differ_or_cannot_be_used_are_refused(ranks: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for nothing, differing, missing, in_the_way in ranks(2).run(tags_case, str(tmp_path)):
        assert nothing == (None, None), "DeepSpeed's answer where there is no file latest"
        for message in differing:
            assert message.startswith("CheckpointError: rank 1: the tag of a checkpoint must be the same"), message
        assert missing == f"CheckpointError: rank 0: there is no checkpoint {tmp_path}/some_tag."
        assert in_the_way.startswith(f"CheckpointError: rank 0: {tmp_path}/file must be a folder, or must not exist; ")


def tags_case(folder: str) -> tuple[Any, list[str], str, str]:
    """Return the result of a load without a file latest; errors of a save and of a load with another tag on each rank,
    of a load of a tag that does not exist, and of a save to the name of a file."""
    engine, _ = training.make_trained(training.Job(empty=False), "NIG")
    nothing, own = engine.load_checkpoint(folder), f"of rank {dist.get_rank()}"
    differing = [error_of(act, folder, tag=own) for act in (engine.save_checkpoint, engine.load_checkpoint)]
    missing = error_of(engine.load_checkpoint, folder, tag="some_tag")
    return nothing, differing, missing, error_of(engine.save_checkpoint, folder, tag="file")


# Kills in a save over the same tag, synchronous or not, and which save is loaded: until the new folder has its name,
# the first one, then the second, whatever the file latest is.
_kill = partial(Fault, "killed rank", same=True)
KILLS = [
    (_kill("IIG", SYNC, rank=2, call="torch.save"), 1),
    *deep(
        (_kill("NII", ASYNC, rank=0, everyone=True, call="replace", after=True), 2),
        (_kill("IIG", SYNC, rank=0, call="replace"), 2),
        (_kill("NIG", ASYNC, rank=2, call="complete_copies"), 1),
        (_kill("NIG", ASYNC, rank=1, call="HostChannel.exchange", number=1), 1),
        (_kill("IIG", SYNC, rank=0, call="torch.save", number=1), 1),
        (_kill("IIG", SYNC, rank=0, call="exchange"), 1),
        (_kill("IIG", ASYNC, rank=0, call="exchange"), 1),
    ),
]


@pytest.mark.parametrize("kill, step", KILLS, ids=str)
def test_a_rank_killed_in_a_save_leaves_a_complete_save(ranks: Any, tmp_path: Path, kill: Fault, step: int) -> None:
    outcomes, problem = run_fault(ranks, tmp_path, kill)
    assert problem == "" and {outcome.found for outcome in outcomes} == {step}


LOCAL = {"checkpoint": {"use_node_local_storage": True}}


def make_on_nodes(job: Any, name: str = "NGG") -> tuple[Any, Any]:
    """An engine after a step, on one of two nodes with two ranks each."""
    engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": 2})
    engine.local_rank = dist.get_rank() % 2
    engine._configure_checkpointing()
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    return engine, model


def node_dir(folder: str) -> str:
    return f"{folder}/node{dist.get_rank() // 2}"


@pytest.mark.parametrize("name, tag", [("NGG", "same"), ("IIG", "new"), *deep(("NGG", "new"), ("IIG", "same"))])
def test_a_save_that_fails_on_one_node_changes_no_disk(ranks: Any, tmp_path: Path, name: str, tag: str) -> None:
    for message, before, remaining in ranks(4).run(node_local_case, str(tmp_path), name, tag):
        assert message.startswith("CheckpointError: rank 2: the checkpoint could not be saved"), message
        assert "no space for names" in message and before == {}, (message, before)
        assert remaining == sorted({"same", tag, "latest"}), remaining


def node_local_case(folder: str, name: str, tag: str) -> tuple[str, Any, list[str]]:
    """Make ``latest`` fail on the second node only, and disks slow while the save is undone. Return the error,
    differences after a load of the previous save, and the names on the disk after another save."""
    job = training.Job(optimizer="Adam", empty=False, config=LOCAL)
    engine, model = make_on_nodes(job, name)
    disk = node_dir(folder)
    engine.save_checkpoint(disk, "same")
    saved = snapshots.snapshot(engine, model, job)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    fail = mock.Mock(side_effect=OSError("no space for names"))
    with (
        mock.patch.object(folders, "replace_text", fail if dist.get_rank() == 2 else folders.replace_text),
        calls.before(folders.CheckpointFolder, "revert", lambda _: time.sleep(0.5)),
    ):
        message = error_of(engine.save_checkpoint, disk, tag)
    engine.load_checkpoint(disk)
    before = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    engine.save_checkpoint(disk, tag)
    engine.destroy()
    dist.barrier()
    return message, before, sorted(path.name for path in Path(disk).iterdir() if path.suffix != ".py")


def test_unshared_disks_raise_an_error(ranks: Any, tmp_path: Path) -> None:
    for message, remaining in ranks(4).run(not_shared_case, str(tmp_path)):
        assert message.startswith("CheckpointError: rank 0: rank 0 sees 3 files in ") and "expected 5" in message
        assert "set checkpoint.use_node_local_storage to true" in message and "global_step1" not in remaining


def not_shared_case(folder: str) -> tuple[str, list[str]]:
    """Return the error if each node has its own disk without the key for it, and the names on the first disk."""
    engine, _ = make_on_nodes(training.Job(empty=False))
    disk = node_dir(folder)
    (Path(disk) / ".global_step1.saving").mkdir(parents=True, exist_ok=True)
    dist.barrier()
    with mock.patch.object(commit, "_POLLS", 1):
        message = error_of(engine.save_checkpoint, disk)
    return message, sorted(path.name for path in Path(folder, "node0").iterdir())


@pytest.mark.quick
def test_each_rank_expects_its_experts_and_its_writers_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks with two experts each, and the ranks that have the same states as the first two."""
    monkeypatch.setattr(experts, "_expert_group_name", lambda module: "pairs")
    monkeypatch.setattr(experts.groups, "_get_expert_parallel_rank", lambda family: 1)
    layer, engine = SimpleNamespace(num_local_experts=2, experts=torch.nn.Linear(3, 5)), mock.Mock()
    engine.zero_optimization_partition_weights.return_value = False
    engine.module.named_modules.return_value = [("mixture", layer)]
    engine._get_expert_ckpt_name = lambda folder, number, expert, *_, **__: str(expert)
    files = dict(experts.expert_files(engine, "", "tag"))
    assert files["3"]["mixture.experts.weight.3"] == (3,) and list(files) == ["2", "3"]
    writers: Any = object.__new__(checkpoint_ranks.CheckpointWriters)
    writers._world, writers._group = "all", "two"
    monkeypatch.setattr(checkpoint_ranks, "data_parallel_ranks", lambda group: [1, 3, 5, 7])
    monkeypatch.setattr(dist, "get_world_size", lambda group: 2)
    assert writers.ranks_of_writer([5, 7, 1]) == [1, 3, 1]


def test_other_checkpoint_writers_are_not_replaced(ranks: Any) -> None:
    assert ranks(1).run(writer_case) == [(True, False, True)]


def writer_case() -> tuple[bool, bool, bool]:
    """Whether torch's is ours then, whether another is, and whether a warning names the key."""
    fast = object.__new__(FastCheckpointEngine)
    with logged() as lines:
        kinds = [isinstance(wrap(inner), CheckpointFiles) for inner in (TorchCheckpointEngine(), fast)]
    warned = any(level == "WARNING" and "checkpoint.writer" in line for level, line in lines)
    return kinds[0], kinds[1], warned


@pytest.mark.parametrize("stage", [2, 3])
def test_stock_loads_files_that_are_no_zip_archives(ranks: Any, tmp_path: Path, stage: int) -> None:
    assert ranks(2).run(stock_case, str(tmp_path), stage) == [0.0] * 2


def stock_case(folder: str, stage: int) -> float:
    """Return the largest difference after stock DeepSpeed loads its universal checkpoint beside this package."""
    job = training.Job(optimizer="Adam", empty=False, config={"checkpoint": {"checkpoint_serialization": False}})
    weights = []
    for universal in (False, True):
        job.config["checkpoint"]["load_universal"] = universal
        engine, model = training.make_trained(job, {"stage": stage}, skip=int(universal))
        if universal:
            engine.load_checkpoint(folder)
        else:
            engine.save_checkpoint(folder)
            snapshots.convert(folder)
        weights.append(training.whole_weights(model))
        engine.destroy()
    return (weights[0] - weights[1]).abs().max().item()
