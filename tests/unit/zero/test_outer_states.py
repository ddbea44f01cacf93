# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of an outer optimizer: what is not this run goes on from the anchors."""

from collections.abc import Sequence
from typing import Any

import pytest

ALL = ("NNI", "NII", "INI", "III")


def elsewhere_case(folder: str, names: Sequence[str]) -> list[Any]:
    """Where a checkpoint's weights differ from the anchors: on disk, in a file of 16 bits, and in other runs; and
    headers that tell of other ranks."""
    import os
    from pathlib import Path

    import torch
    from deepspeed import comm as dist
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    from deepspeed_ext.checkpoint.files import HEADER
    from tests.harness import snapshots, training
    from tests.harness.outer_oracle import KEY

    job = snapshots.job_of("fp32")
    found = []
    for name in names:
        where = f"{folder}/{name}"
        engine, model = training.make_engine(job, training.placed(name, 2, **{KEY: {"steps": 2}}))
        snapshots.run(engine, job, snapshots.steps_of(job, 3))
        theirs = snapshots.snapshot(engine, model, job)
        with engine.optimizer.outer.in_place():
            anchors = {key: value for key, value in _weights(engine, model).items()}
        back = snapshots.difference(theirs, snapshots.snapshot(engine, model, job))
        apart = [key for key in anchors if not torch.equal(anchors[key], _weights(engine, model)[key])]
        engine.save_checkpoint(where)
        engine.save_16bit_model(where, "weights.bin")
        engine.destroy()
        dist.barrier()
        on_disk = get_fp32_state_dict_from_zero_checkpoint(where)
        differ = [key for key, value in anchors.items() if not torch.equal(on_disk[key], value)]
        files = Path(where, "global_step3").glob("*_model_states.pt")
        headers = [torch.load(file, weights_only=False)[HEADER] for file in files]
        differ += [str(one) for one in headers if (one["ranks"], one["group_size"]) != (4, 2)]
        if dist.get_rank() == 0 and os.path.exists(f"{where}/weights.bin"):
            saved = torch.load(f"{where}/weights.bin")
            differ += [f"{key} of 16 bits" for key in anchors if not torch.equal(saved[key].float(), anchors[key])]
        for other in _others(name):
            engine, model = training.make_engine(job, other)
            engine.load_checkpoint(where)
            weights = _weights(engine, model)
            differ += [f"{key} {other}" for key in anchors if not torch.equal(weights[key], anchors[key])]
            snapshots.run(engine, job, snapshots.steps_of(job, 3, skip=3))
            differ += [f"finite {other}" for value in _weights(engine, model).values() if not value.isfinite().all()]
            engine.destroy()
        found.append((name, bool(apart), back, differ))
    return found


def _others(name: str) -> list[dict[str, Any]]:
    """What loads a checkpoint of a strategy: other settings, no outer optimizer."""
    from tests.harness import training
    from tests.harness.outer_oracle import KEY

    other = {"NNI": "NII", "NII": "NNI", "INI": "III", "III": "INI"}[name]
    return [
        training.placed(name, 2),
        training.placed(name, 2, **{KEY: {"steps": 3}}),
        training.placed(other, 2, **{KEY: {"steps": 2}}),
    ]


def _weights(engine: Any, model: Any) -> dict[str, Any]:
    """The parameters that are trained, whole."""
    import deepspeed

    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    with deepspeed.zero.GatheredParameters(list(trained.values())):
        return {name: param.detach().clone() for name, param in trained.items()}


def test_everything_else_goes_on_from_the_anchors(ranks: Any, tmp_path: Any) -> None:
    for rows in ranks(4).run(elsewhere_case, str(tmp_path), ALL):
        assert rows == [(name, True, {}, []) for name in ALL]


def converted_case(folder: str, name: str) -> list[str]:
    """Where a universal checkpoint's weights differ from the anchors, in runs of other strategies and sizes."""
    from dataclasses import replace

    import torch

    from tests.harness import snapshots, training
    from tests.harness.outer_oracle import KEY

    job = snapshots.job_of("fp32")
    engine, model = training.make_engine(job, training.placed(name, 2, **{KEY: {"steps": 2}}))
    snapshots.run(engine, job, snapshots.steps_of(job, 3))
    with engine.optimizer.outer.in_place():
        anchors = _weights(engine, model)
    engine.save_checkpoint(folder)
    engine.destroy()
    snapshots.convert(folder)
    loading = replace(job, config={**job.config, "checkpoint": {"load_universal": True}})
    partitioned = name[0] != "N"
    groups = [training.placed(name, m, **{KEY: {"steps": 2}}) for m in (1, 4)]
    others = [*groups, training.placed("NIG"), training.placed("IIG"), {"stage": 3 if partitioned else 2}]
    differ = []
    for other in others:
        engine, model = training.make_engine(loading, other)
        engine.load_checkpoint(folder)
        weights = _weights(engine, model)
        differ += [f"{key} {other}" for key in anchors if not torch.equal(weights[key], anchors[key])]
        snapshots.run(engine, job, snapshots.steps_of(job, 3, skip=3))
        engine.destroy()
    return differ


@pytest.mark.parametrize("name", ["NII", "III"])
def test_other_strategies_and_numbers_of_groups_go_on_from_the_anchors(ranks: Any, tmp_path: Any, name: str) -> None:
    assert ranks(4).run(converted_case, str(tmp_path), name) == [[]] * 4


def replaced_case(folder: str) -> tuple[list[str], list[str], list[str]]:
    """Which files of an outer optimizer a save without one leaves, and where weights differ from that save's after a
    load: of it, and of it beside such files of the save before it."""
    import shutil
    from pathlib import Path

    import torch
    from deepspeed import comm as dist

    from tests.harness import snapshots, training
    from tests.harness.outer_oracle import KEY

    job = snapshots.job_of("fp32")
    outer, plain = training.placed("NII", 1, **{KEY: {"steps": 2}}), training.placed("NII", 1)
    engine, model = training.make_engine(job, outer)
    snapshots.run(engine, job, snapshots.steps_of(job, 3))
    engine.save_checkpoint(folder, "tag")
    engine.destroy()
    old = sorted(Path(folder, "tag").glob("outer_rank_*.pt"))
    own = old[dist.get_rank()]
    shutil.copy(own, f"{folder}/{own.name}")
    engine, model = training.make_engine(job, plain)
    snapshots.run(engine, job, snapshots.steps_of(job, 1))
    engine.save_checkpoint(folder, "tag")
    saved = _weights(engine, model)
    engine.destroy()
    left, differ = [path.name for path in old if path.exists()], []
    for beside in (False, True):
        if beside:  # as older versions left it
            shutil.copy(f"{folder}/{own.name}", own)
        engine, model = training.make_engine(job, outer)
        engine.load_checkpoint(folder, "tag")
        weights = _weights(engine, model)
        differ.append([key for key in saved if not torch.equal(weights[key], saved[key])])
        engine.destroy()
        dist.barrier()
    return left, differ[0], differ[1]


def test_a_save_without_it_leaves_nothing_of_the_one_that_it_replaces(ranks: Any, tmp_path: Any) -> None:
    assert ranks(2).run(replaced_case, str(tmp_path)) == [([], [], [])] * 2
