# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon's momentum in steps that are not applied, and that a step of Muon compiles nothing."""

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests.harness.training import PARTITIONED, REPLICATED, SMALL, placed

BOTH = pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])


def job_of(**details: Any) -> Any:
    """Muon of more matrices than there are ranks, so that there are rounds."""
    from tests.harness import training

    sizes = (13, 37, 29, 31, 23, 27, 7)
    return training.Job(**{"sizes": sizes, "optimizer": "Muon", "empty": False, "zero": SMALL, **details})


def momenta_of(engine: Any) -> list[Any]:
    """Return copies of this rank's momentum."""
    states = engine.optimizer.optimizer.state.values()
    return [state["momentum_buffer"].clone() for state in states if "momentum_buffer" in state]


@contextmanager
def fails_in_a_later_round() -> Iterator[None]:
    """Make the second round raise during orthogonalization, on all ranks, with or without a matrix."""
    from unittest import mock

    from deepspeed_ext.zero import muon

    rounds = itertools.count()

    def raising(original: Any) -> Any:
        def orthogonalize(*args: Any) -> None:
            if next(rounds):
                raise ZeroDivisionError
            original(*args)

        return orthogonalize

    with ExitStack() as stack:
        for name in ("_orthogonalize", "_orthogonalize_own"):
            original = getattr(muon.Muon, name)
            stack.enter_context(mock.patch.object(muon.Muon, name, raising(original)))
        yield


@BOTH
def test_a_step_that_is_not_applied_leaves_the_momentum(ranks: Any, names: tuple[str, ...]) -> None:
    for rows in ranks(4).run(lost_case, names):
        for name, kept, raised, weights in rows:
            assert kept and raised, (name, kept, raised)
            assert weights == 0.0, (name, weights)  # to the bit what it is without these two steps


def lost_case(names: tuple[str, ...]) -> list[tuple[str, bool, bool, float]]:
    """Whether a step that overflows, and one that raises in its update, leave the momentum; how later steps differ."""
    import torch

    from tests.harness import training

    rows = []
    # No loss scale that changes: what follows must be what it is without the lost steps.
    job = job_of(dtype="fp16", overflow=((1, 1),), config={"fp16": {"enabled": True, "loss_scale": 256}})
    for name in names:
        weights, kept = [], []
        for lost in (False, True):
            engine, model = training.make_engine(job, placed(name))
            data = training.batches(job)
            batches = [next(data) for _ in range(2)]
            training.micro_step(engine, job, 0, *batches[0])
            engine.step()
            if lost:
                before = momenta_of(engine)
                training.micro_step(engine, job, 1, *batches[1])
                engine.step()
                after = momenta_of(engine)
                kept.append(len(before) > 0 and all(map(torch.equal, before, after)) and not engine.was_step_applied())
                training.micro_step(engine, job, 2, *batches[1])
                with fails_in_a_later_round(), pytest.raises(ZeroDivisionError):
                    engine.step()
                engine.optimizer.zero_grad()
                if name in REPLICATED:  # as a step that is skipped does
                    engine.optimizer.averaged_gradients.update(dict.fromkeys(engine.optimizer.averaged_gradients))
                kept.append(all(map(torch.equal, before, momenta_of(engine))))
            training.micro_step(engine, job, 3, *batches[1])
            engine.step()
            assert engine.was_step_applied()
            weights.append(training.whole_weights(model))
            engine.destroy()
        rows.append((name, *kept, (weights[0] - weights[1]).abs().max().item()))
    return rows


def test_a_step_compiles_nothing(ranks: Any) -> None:
    assert ranks(1).run(compiling_case) == [(0, True)]


def compiling_case() -> tuple[int, bool]:
    """Return how many functions a step of Muon compiles, and whether it has changed the weights."""
    import torch
    from torch._dynamo.utils import counters

    from tests.harness import training

    job = job_of(sizes=(5, 3, 4))
    engine, model = training.make_engine(job, placed("NII", 1))
    before = training.whole_weights(model)
    torch._dynamo.config.disable = False  # ``make_engine`` disables the compiler
    counters.clear()
    training.micro_step(engine, job, 0, *next(training.batches(job)))
    engine.step()
    changed = not torch.equal(before, training.whole_weights(model))
    engine.destroy()
    return counters["frames"]["total"], changed
