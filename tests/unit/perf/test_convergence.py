# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Final losses: how they are judged, and that current code reproduces the first steps of the long study."""

import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.harness.ranks import RankPool
from tests.perf.lib.studies import STUDIES, Run, judged, judged_norms, read_runs

OUTER, LONG = STUDIES["outer"], STUDIES["long"]
BEGINNING = 20  # steps
# Of a loss: other cores and other versions of torch add up in another order, and GPUs in yet another.
NEAR = 2e-3
FEW = "H=30, 4 bits"


def end(method: str, loss: float, seed: int = 0) -> Run:
    """Return a run that ended with this loss, of training and held out."""
    return Run(method, seed, "", OUTER.steps, losses=[loss] * OUTER.steps, held_out={str(OUTER.steps): loss})


@pytest.mark.quick
def test_methods_are_judged_with_the_same_seeds() -> None:
    ends = [end("NIG", 2.0), end("H=30", 2.0), end("H=30", 3.0, 1)]
    ends += [end(FEW, 2.0), end(FEW, 3.003, 1), end(FEW, 9.0, 2)]
    ((passed, line),) = judged(OUTER, ends)
    assert passed and "AdamW, 2 groups, H=30, 4 bits: the final loss is +0.05% (+0.00% to +0.10%) from H=30" in line
    ((passed, line),) = judged(OUTER, [*ends[:4], end(FEW, 3.015, 1)])
    assert not passed and "each +0.00%, +0.50%" in line
    assert list(judged(OUTER, ends[:3])) == []
    direct = "NIG + direct 4 bits"
    coarse = [end("NIG", 2.0), end("NIG", 2.0, 1), end(direct, 2.1), end(direct, 2.005, 1)]
    ((passed, _),) = judged(STUDIES["updates"], coarse)
    assert not passed  # with one seed it is not shown that it is too coarse
    loco = [end("none", 2.0), end("none", 2.0, 1), end("LoCo", 2.0), end("LoCo", 2.011, 1)]
    ((passed, _),) = judged(STUDIES["loco"], loco)
    assert not passed  # the bound holds with every seed
    runs = [Run(name, 0, "", 2, norms=norms) for name, norms in (("none", [1.0, 2.0]), ("LoCo", [1.0, 2.1]))]
    ((passed, _),) = judged_norms(STUDIES["loco"], runs)
    assert not passed


@pytest.mark.quick
def test_a_run_with_another_text_is_not_taken(tmp_path: Path) -> None:
    run = Run("NIG", 0, "text", 10, losses=[2.0] * 9 + [1.0], held_out={"10": 1.5})
    run.write(tmp_path)
    result = run.found(tmp_path)
    assert result == run and result.final_loss == 1.0 and replace(run, seed=1).found(tmp_path) is None
    for changed in (replace(run, text="other"), replace(run, steps=20)):
        with pytest.raises(ValueError, match=r"NIG-0.json: expected a run of .*: move it away"):
            changed.found(tmp_path)


@pytest.mark.quick
def test_updates_without_loss_change_no_loss() -> None:
    runs = kept()
    for seed in range(LONG.seeds):
        lossless, loco = runs["NIG + LoCo + exact", seed], runs["NIG + LoCo", seed]
        assert (lossless.losses, lossless.held_out) == (loco.losses, loco.held_out)


def held_out_case() -> tuple[int, int]:
    """Return the bytes that are trained and held out; none is both."""
    from tests.perf import convergence

    tokens = torch.arange(2 * convergence.PERIOD)
    with mock.patch.object(convergence, "read_corpus", lambda budget: tokens):
        trained, held_out = convergence.read_text(OUTER)
    rows = [convergence.held_out_rows(held_out, 64, rank, 4) for rank in range(4)]
    assert set(torch.cat(rows).flatten().tolist()).isdisjoint(trained.tolist())
    return len(trained), len(held_out)


def test_no_run_trains_on_held_out_text(ranks: Any) -> None:
    assert ranks(1).run(held_out_case) == [(400_000, 40_000)]


def batches_case() -> list[float]:
    """Return what tells first batches of four seeds apart."""
    from scripts.examples.gpt import Batches

    engine: Any = SimpleNamespace(data_parallel_group=None, device="cpu", train_micro_batch_size_per_gpu=lambda: 4)
    return [float(Batches(torch.arange(1000), engine, 8, seed).draw(0)[0].sum()) for seed in (0, 1, 2, 0)]


def test_batches_depend_on_the_seed(ranks: Any) -> None:
    ((first, *others, again),) = ranks(1).run(batches_case)
    assert first == again and first not in others and len(set(others)) == 2


def stored_errors_case(method: str) -> tuple[str, int]:
    """Return the dtype of stored errors, and how many values a block of them has."""
    from deepspeed_ext.comm.spans import ShardSpan
    from deepspeed_ext.config.settings import LocoSettings
    from tests.perf import convergence

    with convergence.put_in(method):
        errors = convergence.hop.ErrorFeedback(LocoSettings(error_bits=16))
    bucket = ((ShardSpan(0, 0, 0, 128),),), [128], "cpu"
    errors.store(bucket[0], errors.buffers(*bucket)[1].copy_(torch.arange(128)))
    stored = errors.buffers(*bucket)[1]
    return str(stored.dtype), len(stored.unique())


def test_errors_are_stored_in_fp32_and_in_4_bits(ranks: Any) -> None:
    for method, values in (("errors in fp32", 128), ("errors in 4 bits", 8)):  # of positive numbers
        assert ranks(1).run(stored_errors_case, method) == [("torch.float32", values)]


def kept() -> dict[tuple[str, int], Run]:
    """Return the runs of the long study in the repository."""
    return {(run.method, run.seed): run for run in read_runs(LONG)}


@pytest.mark.deep
@pytest.mark.parametrize(("method", "seed"), sorted(kept()))
def test_the_first_steps_are_those_of_the_file(method: str, seed: int, ranks: RankPool) -> None:
    expected = kept()[method, seed]
    result, *_ = ranks(4).run(_beginning, method, seed)
    if result.text != expected.text:
        pytest.skip(f"the DeepSpeed that is installed has other sources: {result.text}")
    for step, (loss, expected_loss) in enumerate(zip(result.losses, expected.losses, strict=False)):
        assert loss == pytest.approx(expected_loss, rel=NEAR), step
    assert len(result.losses) == BEGINNING
    for other, run in kept().items():
        if other[1] == seed and crossing(other[0]) != crossing(method):
            assert apart(result.losses, expected) < apart(result.losses, run), other


def apart(losses: list[float], run: Run) -> float:
    """Return how far first losses are from a file's: a mean. Rounding moves losses by 2e-5, 4-bit updates by 1e-4."""
    return statistics.mean(abs(loss / other - 1) for loss, other in zip(losses, run.losses, strict=False))


def crossing(method: str) -> tuple[bool, bool]:
    zero = LONG.methods[method].zero
    return "zeropp_loco_param" in zero, zero.get("paro_quantized_updates") == {"bits": 4}


def _beginning(method: str, seed: int) -> Run:
    from tests.perf import convergence

    with mock.patch.object(convergence, "BATCHES", 1):
        return convergence.Trainer(LONG).train(Run(method, seed, "", LONG.steps), BEGINNING)
