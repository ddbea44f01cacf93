# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Updates in few bits, and what a script does between steps: copies, checkpoints, states that are moved."""

from typing import Any
from unittest import mock

import pytest

KEY = "paro_quantized_updates"


def test_a_copy_of_the_model_has_nothing_sent_whole(ranks: Any) -> None:
    assert ranks(4).run(copy_case) == [(False, True)] * 4


def copy_case() -> tuple[bool, bool]:
    """Whether an update travels whole after a load into a copy of the model, and into the model."""
    import copy

    from tests.harness import training

    job = training.Job(zero=training.SMALL, empty=False)
    engine, _ = training.make_engine(job, training.placed("NIG", **{KEY: {}}))
    data, whole = training.batches(job), []
    for made in (lambda: copy.deepcopy(engine.module), lambda: engine.module):
        training.micro_step(engine, job, 0, *next(data))
        engine.step()
        model = made()
        model.load_state_dict(model.state_dict())
        training.micro_step(engine, job, 0, *next(data))
        engine.step()
        whole.append(engine.optimizer.resync.now)
    engine.destroy()
    return whole[0], whole[1]


@pytest.mark.parametrize("name", ["NIG", "IIG"])
def test_nothing_is_saved_while_parameters_are_elsewhere(ranks: Any, tmp_path: Any, name: str) -> None:
    for refused, saved in ranks(4).run(offloaded_case, str(tmp_path), name):
        assert refused.startswith("Parameters are offloaded, and with zero_optimization.paro_quantized_updates")
        assert refused.endswith("Call engine.reload_states() before.") and saved


def offloaded_case(folder: str, name: str) -> tuple[str, bool]:
    """The error of a save while parameters are offloaded; whether a save after that succeeds."""
    from pathlib import Path

    from deepspeed import comm as dist
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    from tests.harness import training

    job = training.Job(zero=training.SMALL, empty=False)
    engine, _ = training.make_engine(job, training.placed(name, **{KEY: {}}))
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    engine.step()
    # Here the device is the host, and DeepSpeed looks for what is on the device.
    engine.optimizer.offloaded_states.add(OffloadStateTypeEnum.lp_params)
    error = ""
    try:
        engine.save_checkpoint(folder, "refused")
    except RuntimeError as raised:
        error = str(raised)
    engine.optimizer.offloaded_states.clear()
    dist.barrier()
    engine.save_checkpoint(folder, "saved")
    dist.barrier()
    engine.destroy()
    return error, Path(folder, "saved").is_dir()


def test_errors_that_a_checkpoint_has_not_or_nobody_takes_are_told(ranks: Any, tmp_path: Any) -> None:
    told, *others = ranks(4).run(halves_case, str(tmp_path))
    assert told == [["errors of sums start at zero"], ["errors of sums were saved, and are not taken"], []]
    assert all(lines == [[], [], []] for lines in others)


def halves_case(folder: str) -> list[list[str]]:
    """Warnings of loads: of one half of an all-reduce into both, of both into one, of both into both."""
    from tests.harness import training
    from tests.harness.logs import logged

    job = training.Job(zero={**training.SMALL, "zeropp_loco_param": {}}, empty=False)
    keys: dict[str, dict[str, Any]] = {"one": {}, "both": {KEY: {}}}
    for half, key in keys.items():
        engine, _ = training.make_engine(job, training.placed("NII", **key))
        training.micro_step(engine, job, 0, *next(training.batches(job)))
        engine.step()
        engine.save_checkpoint(folder, half)
        engine.destroy()
    found = []
    for saved, loaded in (("one", "both"), ("both", "one"), ("both", "both")):
        engine, _ = training.make_engine(job, training.placed("NII", **keys[loaded]))
        with logged() as lines:
            engine.load_checkpoint(folder, saved)
        told = [line for level, line in lines if level == "WARNING" and "errors of" in line]
        found.append([line.split(": ")[2] for line in told])
        engine.destroy()
    return found


def test_padding_of_the_optimizers_weights_is_zero_behind_a_load(ranks: Any) -> None:
    assert ranks(4).run(padding_case) == [(True, True)] * 4


def padding_case() -> tuple[bool, bool]:
    """Whether the optimizer's weights have padding here or elsewhere, which is zero when they were taken anew from the
    model, out of memory that was given up."""
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.zero.flat.updates import FlatUpdates
    from tests.harness import training

    job = training.Job(sizes=(13, 37, 29, 7), zero=training.SMALL, empty=False)
    engine, _ = training.make_engine(job, training.placed("NIG", **{KEY: {}}))
    optimizer, hold = engine.optimizer, FlatUpdates._hold

    def hold_what_others_have_left(self: Any) -> None:
        hold(self)
        for _, own in self._owned():
            own.fill_(torch.nan)

    with mock.patch.object(FlatUpdates, "_hold", hold_what_others_have_left):
        optimizer._restore_from_bit16_weights()
    weights = optimizer.single_partition_of_fp32_groups
    padding = [span.of(weights[buffer.number].detach()) for buffer in optimizer.buffers for span in buffer.padding()]
    counted = torch.tensor([float(sum(one.numel() for one in padding))])
    dist.all_reduce(counted)
    engine.destroy()
    return bool(counted.item()), all(not one.any() for one in padding)
