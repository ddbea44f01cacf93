# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Figures of the planner against real runs: the files of saves, and what an outer optimizer holds and sends."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest

from deepspeed_ext.config.outer import OuterSettings
from deepspeed_ext.loco.settings import LocoSettings
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.cost import Model
from deepspeed_ext.planner.outer import predict_outer
from deepspeed_ext.planner.rates import HopRates, Rate, Rates
from deepspeed_ext.planner.saves import Contents, Family
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from tests.harness.tiers import deep

LINKS = Rates(*[HopRates(Rate(0.0, 1e9), Rate(0.0, 1e8))] * 2)
RELATIVE, ABSOLUTE = 0.01, 2000  # of what is due; bytes where nothing is: barriers, norms, flags


@pytest.mark.parametrize("name", ["NII", "IIG", *deep("NNN", "NNG", "III", "ING")])
def test_files_are_those_of_real_saves(ranks: Any, kernels: bool, tmp_path: Path, name: str) -> None:
    """To 1 %: the rest is headers and padding. On a host, frozen weights are in a file once."""
    trained, every = ranks(4).run(saved, name, str(tmp_path))[0]
    states, sizes = ModelStates.of(every, trained), GroupSizes(4, 2)
    errors = 0.0 if name == "NNN" else Compression(LocoSettings()).saved_bytes(STRATEGIES[name], sizes, trained)
    due = Contents.of(STRATEGIES[name], [Family(sizes, states, errors)])
    if name[0] == "N":
        due = due._replace(weights=(due.weights[0]._replace(each=states.parameters),))
    for kind, one in {"model_states": due.weights[0], "optim_states": due.states, "residuals": due.errors}.items():
        found = [path.stat().st_size for path in (tmp_path / "tag").glob("*.pt") if kind in path.name]
        assert found == ([pytest.approx(one.each, rel=0.01)] * one.ranks if one.each else []), kind


def saved(name: str, folder: str) -> tuple[int, int]:
    """Train a strategy and save it; return the numbers of trained parameters and of all."""
    from tests.harness import training

    job = training.Job(sizes=(512, 1023, 1024, 600), empty=False, optimizer="AdamW", frozen=(1,), dtype="bf16")
    loco = {} if name == "NNN" else {"zeropp_loco_param": {}}
    engine, model = training.make_engine(job, training.placed(name, 2, **loco))
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    engine.step()
    engine.save_checkpoint(folder, "tag")
    numels = [(param.requires_grad, getattr(param, "ds_numel", param.numel())) for param in model.parameters()]
    engine.destroy()
    return sum(numel for trained, numel in numels if trained), sum(numel for _, numel in numels)


class Seen(NamedTuple):
    """What an outer optimizer held and sent on one rank.

    Attributes:
        trained: parameters.
        states: bytes of anchors, outer weights and momenta.
        errors: bytes of errors after the last fragment of an outer step has been used.
        copies: most bytes of results that were on their way.
        twice: most bytes of errors.
        received: mean bytes a rank from other groups in each step, of the two outer steps that were counted.
    """

    trained: int
    states: int
    errors: int
    copies: int
    twice: int
    received: list[float]


@pytest.mark.parametrize("name, bits", [("III", 4), *deep(("NII", 32), ("III", 16), ("NII", 8))])
def test_it_is_what_an_outer_optimizer_holds_and_sends(ranks: Any, kernels: bool, name: str, bits: int) -> None:
    given = {"steps": 4, "fragments": 2, "delay": 1, "bits": bits}
    for seen in ranks(6).run(outer_case, name, given):
        model = Model(ModelStates.of(seen.trained, parameter_bytes=4, gradient_bytes=4), gradient_bytes=4)
        due = predict_outer(STRATEGIES[name], GroupSizes(6, 2), model, LINKS, OuterSettings(**given))
        assert seen.states + seen.errors == pytest.approx(due.held, rel=RELATIVE)
        assert seen.copies + seen.twice - seen.errors == pytest.approx(due.transfer, rel=RELATIVE)
        # In the second step from an outer step on, and in the fourth, half of it.
        expected = [0, due.received / 2] * 4
        assert seen.received == pytest.approx(expected, rel=RELATIVE, abs=ABSOLUTE)
        assert sum(seen.received) / 8 == pytest.approx(due.average.volume.inter, rel=RELATIVE)


def outer_case(name: str, given: dict[str, Any]) -> Seen:
    """Train a strategy for three outer steps, of which the last two are counted."""
    from deepspeed import comm as dist

    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import training

    job = training.Job(sizes=(512, 1023, 1024, 600), empty=False)
    engine, model = training.make_engine(job, training.placed(name, 2, paro_outer_optimizer=given))
    data, outer = training.batches(job), engine.optimizer.outer
    received, copies, twice = [], [], []
    for number in range(3 * given["steps"]):
        meter = TrafficMeter()
        dist.barrier()
        meter.start()
        dist.barrier()
        training.micro_step(engine, job, number, *next(data))
        engine.step()
        twice.append(outer.reduce.errors.nbytes() if outer.reduce.keeps_errors else 0)
        on_the_way = [one.started for one in outer.fragments if one.started is not None]
        copies.append(sum(outer._queue.finish(one).nbytes for one in on_the_way))
        dist.barrier()
        meter.stop()
        dist.barrier()
        received.append(meter.split(2).inter_mean)
    states = sum(t.nbytes for one in outer.fragments for t in (one.anchor, one.weights, one.momentum))
    trained = sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters())
    engine.destroy()
    errors = twice[-2]  # nothing has left since the first fragment was used
    return Seen(trained, states, errors, max(copies), max(twice), received[given["steps"] :])
