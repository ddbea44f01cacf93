# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""A fault in a save or a load loses nothing that was there, and every rank reports what it was."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness.snapshots import SHARD, after_a_step, error_of
from tests.harness.tiers import deep
from tests.harness.training import placed

# Of the folder of a tag, in groups of 2: a file that one rank reads; ``SHARD`` is another.
MODULE = {"NIG": "mp_rank_00_model_states.pt", "III": "zero_pp_rank_1_mp_rank_00_model_states.pt"}
MODULE["IIG"] = MODULE["III"]
FAULTS = ("missing", "truncated", "empty", "of another save", "of no checkpoint", "of something else")


def spoil(path: Path, fault: str) -> None:
    """Do this to a file."""
    if fault == "missing":
        path.unlink()
    elif fault == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    elif fault == "empty":
        path.write_bytes(b"")
    elif fault == "of another save":
        path.write_bytes((path.parents[1] / "before" / path.name).read_bytes())
    elif fault == "of something else":
        import torch

        torch.save({"a": 1}, path)
    else:
        path.write_text("nothing that torch has written")


@pytest.mark.parametrize("name", ["NIG", "III", "IIG"])
def test_a_spoilt_file_is_named_before_anything_changes(ranks: Any, tmp_path: Path, name: str) -> None:
    answers = ranks(4).run(spoilt_case, str(tmp_path), name)
    for rows in answers:
        assert len(rows) == 2 * len(FAULTS) and rows == answers[0]
        for file, fault, message, changed, again in rows:
            assert message.startswith("CheckpointError: rank ") and file in message, (fault, message)
            reason = {"missing": "is missing", "of another save": "of another save"}.get(fault, "cannot be read")
            assert reason in message, (fault, message)
            assert not changed and again == {}, (fault, changed, again)


def spoilt_case(folder: str, name: str) -> list[tuple[str, str, str, bool, dict[str, float]]]:
    """File, what was done to it, the error, whether a weight or state changed, and what the repaired one loads."""
    import shutil

    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False, frozen=(1,), network=snapshots.Buffered)
    engine, model = after_a_step(job, name)
    engine.save_checkpoint(folder, tag="before")
    snapshots.mark(engine, model)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(folder, tag="good")
    saved = snapshots.snapshot(engine, model, job)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    rows = []
    for file in (MODULE[name], SHARD):
        for fault in FAULTS:
            if dist.get_rank() == 0:
                shutil.copytree(f"{folder}/good", f"{folder}/bad")
                spoil(Path(folder, "bad", file), fault)
            dist.barrier()
            message = error_of(engine.load_checkpoint, folder, tag="bad")
            changed = bool(snapshots.difference(now, snapshots.snapshot(engine, model, job)))
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.rmtree(f"{folder}/bad")
            rows.append((file, fault, message, changed))
    engine.load_checkpoint(folder, tag="good")
    again = snapshots.difference(saved, snapshots.snapshot(engine, model, job))
    engine.destroy()
    return [(*row, again) for row in rows]


@pytest.mark.parametrize("fault", FAULTS)
def test_weights_alone_are_not_taken_from_a_spoilt_shard(ranks: Any, tmp_path: Path, fault: str) -> None:
    for message, changed in ranks(4).run(spoilt_weights_case, str(tmp_path), fault):
        assert message.startswith("CheckpointError: rank ") and SHARD in message and not changed, message


def spoilt_weights_case(folder: str, fault: str) -> tuple[str, bool]:
    """With parameters cut, weights without optimizer states come from all shards."""
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False)
    engine, model = after_a_step(job, "IIG")
    engine.save_checkpoint(folder, tag="before")
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(folder, tag="bad")
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    if dist.get_rank() == 0:
        spoil(Path(folder, "bad", SHARD), fault)
    dist.barrier()
    now = snapshots.snapshot(engine, model, job)
    message = error_of(engine.load_checkpoint, folder, load_module_only=True)
    changed = bool(snapshots.difference(now, snapshots.snapshot(engine, model, job)))
    engine.destroy()
    return message, changed


@pytest.mark.parametrize("name", ["NIG", "IIG"])
@pytest.mark.parametrize("file", ["fp32.pt", "exp_avg.pt", "exp_avg_sq.pt", "optimizer_state.pt"])
def test_a_spoilt_file_of_a_universal_checkpoint_is_named(ranks: Any, tmp_path: Path, name: str, file: str) -> None:
    for rows in ranks(4).run(spoilt_universal_case, str(tmp_path), name, file):
        for fault, message, changed in rows:
            assert message.startswith("CheckpointError: rank ") and file in message and not changed, (fault, message)


def spoilt_universal_case(folder: str, name: str, file: str) -> list[tuple[str, str, bool]]:
    """What is done to a file, the error, whether a weight or state changed."""
    from deepspeed import comm as dist

    from tests.harness import snapshots, training

    job = training.Job(optimizer="Adam", empty=False, config={"checkpoint": {"load_universal": True}})
    engine, model = after_a_step(job, name)
    engine.save_checkpoint(folder)
    snapshots.convert(folder)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    now = snapshots.snapshot(engine, model, job)
    zero = Path(folder, "global_step1_universal", "zero")
    path = zero / ("" if file == "optimizer_state.pt" else "layers.2.weight") / file
    good, rows = path.read_bytes(), []
    dist.barrier()
    for fault in ("missing", "truncated", "of no checkpoint"):
        if dist.get_rank() == 0:
            path.write_bytes(good)
            spoil(path, fault)
        dist.barrier()
        message = error_of(engine.load_checkpoint, folder)
        rows.append((fault, message, bool(snapshots.difference(now, snapshots.snapshot(engine, model, job)))))
        dist.barrier()
    engine.destroy()
    return rows


# (saved by, keys then; loaded by, keys now; what the error says)
MISFITS = [
    (
        "GGG",
        {},
        "III",
        {},
        "of stage 3 and sharded over 4 ranks, but those of this run are of stage 3 and sharded over 2",
    ),
    ("NIG", {}, "NNN", {}, "of stage 2 and sharded over [4] ranks"),
    ("NIG", {}, "IIG", {}, "zero_pp_rank_0_mp_rank_00_model_states.pt is missing"),
    ("IIG", {}, "NIG", {}, "mp_rank_00_model_states.pt is missing"),
    ("NIG", {}, "NIG", {"round_robin_gradients": True}, "order"),
]


@pytest.mark.parametrize("saved, then, loaded, now, reason", MISFITS)
def test_states_that_are_cut_otherwise_are_refused(
    ranks: Any, tmp_path: Path, saved: str, then: Any, loaded: str, now: Any, reason: str
) -> None:
    for message, changed in ranks(4).run(
        misfit_case, str(tmp_path), {**placed(saved), **then}, {**placed(loaded), **now}
    ):
        assert message.startswith("CheckpointError: rank 0: ") and reason in message, message
        if saved != loaded:
            assert f"saved with paro_strategy {saved} in groups of 2, by 4 ranks" in message, message
            assert f"loaded with paro_strategy {loaded} in groups of 2, by 4 ranks" in message, message
            assert "python -m deepspeed_ext convert" in message
        assert not changed


def misfit_case(folder: str, saved: dict[str, Any], loaded: dict[str, Any]) -> tuple[str, bool]:
    """The error of a load, of the class that scripts catch with stock, and whether a weight changed."""
    from deepspeed.runtime.zero.utils import ZeRORuntimeException

    from tests.harness import training

    job = training.Job(empty=False)
    engine, _ = training.make_engine(job, saved)
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    engine, model = training.make_engine(job, loaded)
    before = training.whole_weights(model)
    message = ""
    try:
        engine.load_checkpoint(folder)
    except ZeRORuntimeException as error:
        message = f"{type(error).__name__}: {error}"
    changed = bool((training.whole_weights(model) - before).any())
    engine.destroy()
    return message, changed


def test_another_model_is_refused(ranks: Any, tmp_path: Path) -> None:
    for rows in ranks(4).run(another_model_case, str(tmp_path)):
        assert len(rows) == 8
        for name, sizes, message, changed in rows:
            assert message.startswith("CheckpointError: rank 0: ") and not changed, (name, message)
            names = {(13, 37, 31, 7): (6, 3), (13, 38, 7): (4, 3)}[sizes]
            assert f"does not fit the model: of {names[0]} names {names[1]} are missing" in message, (name, message)
            assert "the first is 'layers.2.bias'" in message or "the first is 'layers.0.bias'" in message


def another_model_case(folder: str) -> list[tuple[str, tuple[int, ...], str, bool]]:
    """The error where a model has another layer, or a layer of another width, and whether a weight changed."""
    from tests.harness import training

    rows = []
    for name in ("NIG", "IIG"):
        for sizes in ((13, 37, 7), (13, 38, 7), (13, 37, 31, 7)):
            engine, model = after_a_step(training.Job(sizes=sizes, empty=False), name)
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
    ("saved", "loaded"), [("NIG", "NIG"), ("IIG", "IIG"), ("3", "GGG"), *deep(("III", "III"), ("GGG", "GGG"))]
)
def test_parameters_of_one_shape_are_told_apart_by_name(ranks: Any, tmp_path: Path, saved: str, loaded: str) -> None:
    for rows in ranks(2).run(order_case, str(tmp_path), saved, loaded):
        for what in ("reversed", "reversed, other frozen"):
            message, _ = rows.pop(what)
            assert message.startswith("CheckpointError: rank 0: ") and "in another order" in message, (what, message)
            assert "'layers.0.weight' (8, 8)" in message and "'layers.2.weight' (8, 8)" in message, message
        assert rows == dict.fromkeys(("reversed, universal", "renamed", "no names"), ("", 0.0))


def order_case(folder: str, saved: str, loaded: str) -> dict[str, tuple[str, float]]:
    """For several models and checkpoints, what a load raises and how far the weights are from the saved ones."""
    import deepspeed
    import torch
    from deepspeed import comm as dist
    from deepspeed.checkpoint.constants import OPTIMIZER_STATE_DICT, PARAM_SHAPES, PARAM_SLICE_MAPPINGS

    from tests.harness import snapshots, training

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
    for what, network, frozen in (
        ("reversed", Reversed, ()),
        ("reversed, other frozen", Reversed, (2,)),
        ("reversed, universal", Reversed, ()),
        ("renamed", Renamed, ()),
        ("no names", None, ()),
    ):
        if what == "no names" and dist.get_rank() == 0:
            for path in Path(folder, "0", "good").glob("*.pt"):
                forget_names(path)
        dist.barrier()
        universal = "universal" in what
        _, engine, model = make(loaded, network, frozen, universal)
        load = partial(engine.load_checkpoint, f"{folder}/{len(frozen)}", "good_universal" if universal else "good")
        if network is Renamed:
            load = partial(load, custom_load_fn=load_renamed)
        message = error_of(load)
        pairs = zip(trained[len(frozen)], weights_of(model), strict=True)
        rows[what] = message, max((one - other).abs().max().item() for one, other in pairs)
        engine.destroy()
    return rows
