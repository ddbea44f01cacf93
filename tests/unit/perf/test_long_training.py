# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The files of long trainings: what they have, what is said of them, and that today's code begins as they do."""

import math
import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from tests.harness.documents import page
from tests.harness.ranks import RankPool
from tests.harness.tiers import deep
from tests.perf.lib import long_runs
from tests.perf.lib.long_runs import EXACT, LOCO, LOSSLESS, RANKS, REFERENCE, STEPS, LongRun

BEGINNING = 20  # steps
# Of a loss: other cores and other versions of torch add up in another order, and GPUs in yet another.
NEAR = 2e-3
FOUR_BITS = "NIG + LoCo + updates"
QUICK = pytest.mark.quick


def kept() -> dict[tuple[str, int], LongRun]:
    """The runs in the repository."""
    return {(run.method, run.seed): run for run in long_runs.read()}


@QUICK
def test_files_are_whole_and_each_has_its_reference() -> None:
    runs = kept()
    for run in runs.values():
        assert run.done and len(run.losses) == STEPS == int(max(run.held_out, key=int)), run.name
        assert all(map(math.isfinite, run.losses)) and run.losses[0] > 5 > 2 > run.final_loss, run.name
        assert (run.text, run.device) == (runs[REFERENCE, run.seed].text, runs[REFERENCE, run.seed].device)


@QUICK
def test_lossless_updates_change_no_loss() -> None:
    runs = kept()
    for method, seed in runs:
        if method == LOSSLESS:
            assert runs[LOSSLESS, seed].losses == runs[LOCO, seed].losses
            assert runs[LOSSLESS, seed].held_out == runs[LOCO, seed].held_out


@QUICK
def test_figures_of_the_page_have_their_files() -> None:
    runs, text = kept(), " ".join(page("tests/perf/results/long_training.md").text.split())
    exact, reference, kinds = runs[EXACT, 1], runs[REFERENCE, 1], ("final_loss", "final_held_out")

    def higher(kind: str, than: LongRun = exact) -> list[str]:
        methods = (LOCO, FOUR_BITS, "IIG + LoCo + updates")
        return [f"{100 * (getattr(runs[method, 1], kind) / getattr(than, kind) - 1):.2f}" for method in methods]

    loco, both, sharded = higher("final_loss")
    assert f"LoCo ends {loco} % higher, with updates in 4 bits {both} %, and IIG with both {sharded} %" in text
    assert "held-out losses are {}, {} and {} % higher".format(*higher("final_held_out")) in text
    for seed, said in ((1, "ends {} % below ZeRO-2**, held out {} %"), (0, "it ends {} % below, held out {} %")):
        mine, beside = runs[EXACT, seed], runs[REFERENCE, seed]
        below = [f"{100 * (1 - getattr(mine, kind) / getattr(beside, kind)):.2f}" for kind in kinds]
        assert said.format(*below) in text
    first = zip(exact.losses[:BEGINNING], reference.losses, strict=False)
    assert max(abs(loss / other - 1) for loss, other in first) < 5e-5 and "within 5e-5 of each other" in text


@QUICK
def test_a_run_survives_its_file_and_a_table_has_its_losses(tmp_path: Path) -> None:
    def made(method: str, loss: float) -> LongRun:
        return LongRun(method, 0, "text", 20, "cpu", 2.0, [9.0] * 18 + [loss - 0.1, loss + 0.1], {"20": 2 * loss})

    some = [made("NIG", 1.01), made(REFERENCE, 1.0)]
    for run in some:
        run.write(tmp_path)
    found = long_runs.read(tmp_path)
    assert [run.method for run in found] == [REFERENCE, "NIG"]
    assert asdict(found[1]) == asdict(some[0]) and found[0].done
    header, lines = long_runs.table(found)
    assert lines[1] == ["NIG", "1.0100", "+1.00%", "2.0200", "+1.00%"] and len(header) == 5
    found[0].losses.pop()
    assert not found[0].done and long_runs.table(found)[1] == []


@QUICK
def test_a_seed_that_a_method_has_not_is_a_dash() -> None:
    def made(method: str, seed: int) -> LongRun:
        return LongRun(method, seed, "text", 10, "cpu", losses=[1.0] * 10, held_out={"10": 2.0})

    _, lines = long_runs.table([made(REFERENCE, 0), made(REFERENCE, 1), made("NIG", 1), made("NIG", 2)])
    assert lines[1] == ["NIG", "-, 1.0000", "-, +0.00%", "-, 2.0000", "-, +0.00%"]


@QUICK
def test_another_run_is_not_continued() -> None:
    run = LongRun("NIG", 0, "text", 20, "cpu")
    run.check_same(replace(run, losses=[1.0], seconds=2.0), "folder")
    for changed in ({"steps": 10}, {"text": "other"}, {"device": "a GPU"}, {"seed": 1}, {"method": REFERENCE}):
        with pytest.raises(ValueError, match=r"folder: expected a run of .*: move it away"):
            run.check_same(replace(run, **changed), "folder")  # type: ignore[arg-type]


@QUICK
def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    from tests.perf.long_training import Trainer

    trainer = Trainer.__new__(Trainer)  # without an engine
    trainer.run = LongRun("NIG", 0, "text", 20, "cpu", 2.0, [9.0], {"1": 9.0}, [{"from": 0}])
    trainer._resume(tmp_path)
    assert trainer.run == LongRun("NIG", 0, "text", 20, "cpu")


RUNS = sorted(kept(), key=lambda run: (run[0] != FOUR_BITS, run))  # one of few bits is in the first tier


@pytest.mark.parametrize(("method", "seed"), [*RUNS[:1], *deep(*RUNS[1:])])
def test_the_first_steps_are_those_of_the_file(method: str, seed: int, ranks: RankPool, tmp_path: Path) -> None:
    """Half of them before a checkpoint, and half after it, by an engine that has loaded it."""
    expected = kept()[method, seed]
    found, *_ = ranks(RANKS).run(_beginning, method, seed, str(tmp_path / "checkpoints"))
    if found["text"] != expected.text:
        pytest.skip(f"the DeepSpeed that is installed has other sources: {found['text']}")
    for step, (loss, wanted) in enumerate(zip(found["losses"], expected.losses, strict=False)):
        assert loss == pytest.approx(wanted, rel=NEAR), step
    assert len(found["losses"]) == BEGINNING
    for other, run in kept().items():
        if other[1] == seed and crossing(other[0]) != crossing(method):
            assert apart(found["losses"], expected) < apart(found["losses"], run), other


def apart(losses: list[float], run: LongRun) -> float:
    """How far first losses are from a file's: a mean. Rounding moves losses by 2e-5, updates in four bits by 1e-4."""
    return statistics.mean(abs(loss / other - 1) for loss, other in zip(losses, run.losses, strict=False))


def crossing(method: str) -> tuple[bool, bool]:
    """Whether a method's gradients cross in few bits, and whether its updates do."""
    zero = long_runs.METHODS[method]
    return "zeropp_loco_param" in zero, zero.get("paro_quantized_updates") == {"bits": 4}


def _beginning(method: str, seed: int, folder: str) -> dict[str, Any]:
    from tests.perf.lib.long_task import fingerprint, read_text
    from tests.perf.long_training import Trainer

    text, checkpoints = read_text(), Path(folder)
    run = LongRun(method, seed, fingerprint(text), STEPS, "cpu")
    for until in (BEGINNING // 2, BEGINNING):
        trainer = Trainer(run, text, checkpoints)
        trainer.train(until)
        trainer.save()
        trainer.engine.destroy()
        run = trainer.run
    if trainer.engine.global_rank == 0:
        shutil.rmtree(checkpoints)
    return {"text": run.text, "losses": run.losses}
