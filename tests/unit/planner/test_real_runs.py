# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Predicted files of saves against real ones."""

from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.config.settings import LocoSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from deepspeed_ext.tools.plan.saves import Family, SaveFiles
from tests.harness import training
from tests.harness.tiers import deep


@pytest.mark.parametrize("name", ["NII", "IIG", *deep("NNN", "NNG", "III", "ING")])
def test_files_are_those_of_real_saves(ranks: Any, kernels: bool, tmp_path: Path, name: str) -> None:
    """To 1 %: the rest is headers and padding. On a host, frozen weights are in a file once."""
    trained, every = ranks(4).run(saved, name, str(tmp_path))[0]
    states, sizes = ModelStates.of(every, trained), GroupSizes(4, 2)
    errors = 0.0 if name == "NNN" else Compression(LocoSettings()).error_bytes(STRATEGIES[name], sizes, trained)
    expected = SaveFiles.for_strategy(STRATEGIES[name], [Family(sizes, states, errors)])
    if name[0] == "N":
        expected = expected._replace(weights=(expected.weights[0]._replace(each=states.parameters),))
    for kind, file in {
        "model_states": expected.weights[0],
        "optim_states": expected.states,
        "residuals": expected.errors,
    }.items():
        file_sizes = [path.stat().st_size for path in (tmp_path / "tag").glob("*.pt") if kind in path.name]
        assert file_sizes == ([pytest.approx(file.each, rel=0.01)] * file.ranks if file.each else []), kind


def saved(name: str, folder: str) -> tuple[int, int]:
    job = training.Job(sizes=(512, 1023, 1024, 600), empty=False, optimizer="AdamW", frozen=(1,), dtype="bf16")
    loco = {} if name == "NNN" else {"zeropp_loco_param": {}}
    engine, model = training.make_trained(job, training.placed(name, 2, **loco))
    engine.save_checkpoint(folder, "tag")
    numels = [(param.requires_grad, getattr(param, "ds_numel", param.numel())) for param in model.parameters()]
    return sum(numel for trained, numel in numels if trained), sum(numel for _, numel in numels)
