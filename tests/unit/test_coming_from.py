# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The page for users of other frameworks and options: each of its rows trains like what it replaces."""

import json
import re
from typing import Any

import pytest

from scripts import ROOT
from tests.harness.tiers import deep

PAGE = ROOT / "deepspeed_ext" / "coming_from.md"
BOUND = 1e-5  # of the largest weight, as the page says
Section = dict[str, Any]


def rows(tried: str = "") -> list[tuple[str, Section, str]]:
    """What stood before, the section here, and whether it was tried: of all, or of those where that begins so."""
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split(" | ")]
        here = re.match(r"`(\{.*?\})`(;|$)", cells[1]) if len(cells) == 3 else None
        if here and cells[2].startswith(tried):
            found.append((cells[0].strip("`"), json.loads(here[1]), cells[2].strip(" |")))
    return found


def stock_of(before: str, here: Section) -> tuple[Section, str]:
    """A section that the row on the right is held against, and the fully_shard mesh instead of one, if it has one."""
    if before.startswith("{"):
        return json.loads(before), ""
    if "fully_shard" in before or before.startswith("the same, with"):
        return {}, "1D" if "1-D" in before else "2D"
    return {"stage": 3 if here["paro_strategy"][0] != "N" else 2}, ""


@pytest.mark.parametrize("row", [*rows("yes"), *deep(*zip(rows("here only")))], ids=lambda row: row[0][:60])
def test_a_row_trains_to_the_same_weights(ranks: Any, row: tuple[str, Section, str]) -> None:
    assert len(rows()) == 16
    before, here, _ = row
    stock, mesh = stock_of(before, here)
    for difference in ranks(4).run(case, stock, mesh, here):
        assert difference <= BOUND, row


def case(stock: Section, mesh: str, here: Section) -> float:
    """The largest difference of weights, relative to the largest weight."""
    import os
    from unittest import mock

    from tests.harness import training

    job = training.Job(empty=False, clipping=0.0, accumulation=2)
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):  # nodes of two, for keys without a group size
        ours = training.train(job, here).weights
        theirs = fully_sharded(job, mesh) if mesh else training.train(job, stock).weights
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def fully_sharded(job: Any, mesh: str) -> Any:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from tests.harness import training

    torch.manual_seed(7)
    model = training.Network(job.sizes, job.checkpointing, job.empty)
    shape, names = ((4,), ("shard",)) if mesh == "1D" else ((2, 2), ("replicate", "shard"))
    whole = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for layer in model.layers:
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = training.batches(job)
    for number in range(job.steps * job.accumulation):
        inputs, targets = next(data)
        (((model(inputs) - targets) ** 2).float().mean() / job.accumulation).backward()
        if (number + 1) % job.accumulation == 0:
            optimizer.step()
            optimizer.zero_grad()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])
