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
from tests.perf.lib.long_runs import CONTROL, EXACT, LOCO, LOSSLESS, RANKS, REFERENCE, STEPS, LongRun

BEGINNING = 20  # steps
# Of a loss: other cores and other versions of torch add up in another order, and GPUs in yet another.
NEAR = 2e-3
FOUR_BITS, IIG = "NIG + LoCo + updates", "IIG + LoCo + updates"
QUICK = pytest.mark.quick


def kept() -> dict[tuple[str, int], LongRun]:
    """The runs in the repository."""
    return {(run.method, run.seed): run for run in long_runs.read()}


@QUICK
def test_files_are_whole_and_each_has_its_reference() -> None:
    runs = kept()
    whole = {(method, seed) for method in long_runs.METHODS for seed in long_runs.SEEDS}
    assert whole - {(CONTROL, 0)} == set(runs)
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

    def beyond(method: str, than: str, kind: str, seed: int) -> float:
        return 100 * (getattr(runs[method, seed], kind) / getattr(runs[than, seed], kind) - 1)

    kinds = ("final_loss", "final_held_out")
    ends, held_out = (
        [[beyond(method, EXACT, kind, seed) for seed in long_runs.SEEDS] for method in (LOCO, FOUR_BITS, IIG)]
        for kind in kinds
    )
    loco, both, sharded = ends
    assert f"LoCo ends {-loco[0]:.2f} % lower with one seed and {loco[1]:.2f} % higher with the other" in text
    assert f"with updates in 4 bits {-both[0]:.2f} % lower and {both[1]:.2f} % higher" in text
    assert "IIG with both {:.2f} and {:.2f} % higher".format(*sharded) in text
    pairs = ", ".join("{:.2f} and {:.2f}".format(*pair) for pair in held_out)
    assert f"held-out losses are {pairs} % higher" in text
    few = [value for pair in ends for value in pair]
    ended, unseen = (-beyond(CONTROL, REFERENCE, kind, 1) for kind in kinds)
    claim = f"{min(few):.2f} to {max(few):+.2f} % from exact NIG; chance moves ZeRO-2 by {ended:.2f} %"
    assert claim in page("tests/perf/README.md").text and f"within {max(few):.2f} %" in page("CHANGELOG.md").text
    assert f"It ends {ended:.2f} % below it, held out {unseen:.2f} %" in text
    below = [
        "{:.2f} and {:.2f} %".format(*(-beyond(EXACT, REFERENCE, kind, seed) for seed in long_runs.SEEDS))
        for kind in kinds
    ]
    assert "ends {} below it, held out {}".format(*below) in text
    for seed, count in ((0, 5), (1, 6)):
        ends_of = {method: run.final_loss for (method, of), run in runs.items() if of == seed and method != LOSSLESS}
        assert max(ends_of, key=lambda method: ends_of[method]) == REFERENCE and len(ends_of) == count
    first = zip(runs[EXACT, 1].losses[:BEGINNING], runs[REFERENCE, 1].losses, strict=False)
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
