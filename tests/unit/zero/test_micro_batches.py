# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks with different numbers of micro-batches. The oracle is a stage with equal numbers, in which losses are
multiplied by constants, or by zero."""

import functools
import itertools
import json
import re
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist

import deepspeed_ext
from deepspeed_ext.tools.plan.recorded_training import RecordedTraining
from deepspeed_ext.tools.report.contents import group_rows
from deepspeed_ext.zero import pace
from deepspeed_ext.zero.pace import balance
from tests.harness import networks, sampled, training
from tests.harness.logs import is_ours, logged
from tests.harness.recorded_trainings import links_given
from tests.harness.snapshots import error_of
from tests.harness.tiers import deep, with_cases
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Job, Record, placed

# Each rank's number of micro-batches in each step: by groups, in another division, and as ranks run out of batches.
BY_GROUPS, OF_SIX, ANEW = [(2, 2, 1, 1)] * 3, [(2, 2, 2, 2, 1, 1)] * 2, [(2, 2, 1, 1), (1, 1, 2, 2)]
BY_ONE, BY_TWO = [*[(1,) * 4] * 3, (1, 1, 0, 0), (1, 0, 0, 0)], [(2,) * 4, (2, 2, 1, 1), (2, 1, 0, 0)]
JOBS = {  # and bounds
    "plain": (Job(), 1e-5),
    "tokens": (Job(), 1e-5),
    "Muon": (Job(optimizer="Muon", zero={"reduce_scatter": False}), 1e-4),
    "fp16": (Job(dtype="fp16", overflow=[(0, 3)]), 2e-3),
    "offload": (Job(zero={"offload_optimizer": {"device": "cpu"}}), 1e-5),
    "LoCo": (Job(zero={"zeropp_loco_param": {}}), 1e-2),
    "updates": (Job(zero={"paro_quantized_updates": {}}), 1e-2),
    "bf16": (Job(dtype="bf16"), 4e-3),
    "exact": (Job(dtype="bf16", zero={"paro_quantized_updates": {"bits": "exact"}}), 0.0),
}


def train(kind: str, zero: dict[str, Any], steps: Any, how: str, folder: str = "") -> Record:
    """Train. The first step is saved to a folder, or loaded if it is there. ``how``: "oracle"; "last", in a context of
    last batches; "own", numbers of groups; or "measured", by a clock on which the second half of the ranks is slow."""
    number = {"gradient_accumulation_steps": {"own": None, "measured": 2}[how]} if how in ("own", "measured") else {}
    job = replace(JOBS[kind][0], sizes=networks.SQUARE, accumulation=max(map(max, steps)), config=number)
    engine, model = training.make_engine(job, {**SMALL, "overlap_comm": True, **job.zero, **zero})
    is_saved = bool(folder) and Path(folder, "latest").exists()
    if is_saved:
        engine.load_checkpoint(folder)
    rank, data, record = dist.get_rank(), training.batches(job), Record([0.0], torch.empty(0), [], [], [])
    context: Any = deepspeed_ext.last_batches(engine) if how == "last" else nullcontext()
    if how == "measured":
        seconds = [0.0]
        assert "Accelerate" in error_of(engine.set_gradient_accumulation_boundary, True)
        model.register_forward_pre_hook(lambda *_: seconds.append(0.05 + 0.1 * (rank >= dist.get_world_size() // 2)))
        context = mock.patch.object(pace, "time", SimpleNamespace(perf_counter=lambda: sum(seconds)))
    with context:
        for step, numbers in enumerate(steps):
            counts = [[1 + (r + at) % 3 * (kind == "tokens") for at in range(n)] for r, n in enumerate(numbers)]
            own = list(zip(islice(data, numbers[rank]), counts[rank], strict=False))
            own += [(next(training.batches(job)), 0)] * (job.accumulation - len(own)) if how == "oracle" else []
            for (x, y), count in own if step or not is_saved else ():
                deepspeed_ext.set_tokens(engine, count)
                weight = count * job.accumulation * len(numbers) / sum(map(sum, counts)) if how == "oracle" else 1
                weight *= torch.inf if (step, rank) in job.overflow else 1
                engine.backward(((engine(x) - y) ** 2).float().mean() * weight)
                engine.step()
            record.norms.append(float(engine.get_global_grad_norm() or 0.0))
            record.applied.append(engine.was_step_applied())
            if folder and not (step or is_saved):
                engine.save_checkpoint(folder)
    assert how in ("oracle", "last") or engine.train_batch_size() == 2 * sum(steps[-1])
    weights, alike = training.whole_weights(model), training.all_replicas_equal(engine, model)
    engine.destroy()
    return record._replace(weights=weights, replicas_equal=alike)


def compare(kind: str, names: tuple[str, ...], steps: Any, how: str) -> list[training.Difference]:
    keys = {"paro_weights": "tokens"} if kind == "tokens" else {}
    keys |= {"paro_micro_batches": list(steps[0][::2])} if how == "own" else {}

    @functools.cache
    def oracle(name: str) -> Record:
        if kind == "exact":  # the same without this key
            return train("bf16", placed(name, **keys), steps, how)
        return train(kind, placed(name), steps, "oracle")

    of = {name: name if kind in ("LoCo", "updates", "exact") else "1" for name in names}
    runs = {name: train(kind, placed(name, **keys), steps, how) for name in names}
    return [training.difference(name, run, oracle(of[name]), "ours") for name, run in runs.items()]


def everywhere(kind: str) -> list[Any]:
    """Return cases with all strategies that support a kind of job."""
    refused = {"updates": "G..", "exact": "G..|..[NI]"}.get(kind, "")
    names = tuple(name for name in (*REPLICATED, *PARTITIONED) if not re.fullmatch(refused, name))
    own = tuple(name for name in names if "G" not in name[:2])
    return [(kind, own, OF_SIX, "own"), (kind, names, BY_TWO, "last")]


@with_cases(
    "kind, names, steps, how",
    ("plain", ("NIG", "NII", "IIG", "III"), BY_GROUPS, "own"),
    ("tokens", ("NIG",), BY_GROUPS, "own"),
    ("fp16", ("NNI", "IIG"), OF_SIX, "own"),
    ("plain", ("NIG", "III", "GGG"), BY_ONE, "last"),
    ("plain", ("NGG", "IIG"), BY_TWO, "last"),
    ("tokens", ("NIG", "ING"), BY_TWO, "last"),
    ("updates", ("NIG", "III"), BY_GROUPS, "own"),
    *deep(*itertools.chain(*map(everywhere, JOBS))),
)
def test_steps_use_the_mean_of_all_ranks(ranks: Any, kind: str, names: tuple[str, ...], steps: Any, how: str) -> None:
    training.check(ranks(len(steps[0])).run(compare, kind, names, steps, how)[0], JOBS[kind][1], optimizer="ours")


@with_cases("name", "NIG", "IIG")
def test_a_resumed_run_is_the_same_and_may_divide_anew(ranks: Any, tmp_path: Path, name: str) -> None:
    run, folder, keys = ranks(4).run, str(tmp_path), placed(name, paro_micro_batches=[2, 1])
    whole, resumed = (run(train, "plain", keys, BY_GROUPS, "own", folder)[0] for _ in range(2))
    assert whole.weights.equal(resumed.weights) and whole.norms[1:] == resumed.norms[1:]
    divided = run(train, "plain", placed(name, paro_micro_batches=[1, 2]), ANEW, "own", folder)[0]
    assert divided.weights.allclose(run(train, "plain", {"stage": 1}, ANEW, "oracle")[0].weights, 1e-5, 1e-6)


@pytest.mark.quick
def test_numbers_balance_the_paces_of_groups() -> None:
    for paces in ([1.0, 1.0], [1.0, 1.1], [0.1, 1.0], [1.0, 2.0, 0.3], [3.0, 1.0, 1.0, 2.0]):
        total = 3 * len(paces)
        given = [row for row in itertools.product(range(1, total), repeat=len(paces)) if sum(row) == total]
        best = min(max(map(float.__mul__, paces, row)) for row in given)
        assert tuple(balance(paces, total)) in given and max(map(float.__mul__, paces, balance(paces, total))) == best


def logged_train(*case: Any) -> tuple[Record, list[str]]:
    with logged() as lines:
        record = train(*case)
    return record, [text for _, text in lines if is_ours(text) and "paro_micro_batches" in text]


@with_cases("name", "NIG", "IIG")
def test_measured_numbers_are_used_and_kept(ranks: Any, tmp_path: Path, name: str) -> None:
    run, folder, file = ranks(4).run, str(tmp_path / "saved"), tmp_path / "decision.json"
    keys, equal, balanced = {"paro_micro_batches": "measured", "paro_decision_file": str(file)}, (2,) * 4, (3, 3, 1, 1)
    for steps, said in (([equal] * 4 + [balanced] * 2, "is now [3, 1]"), ([equal] + [balanced] * 2, "stays [3, 1]")):
        record, (line,) = run(logged_train, "plain", placed(name, **keys), steps, "measured", folder)[0]
        assert said in line and all(record.applied[1:])
        expected = run(train, "plain", {"stage": 1}, steps, "oracle")[0]
        assert record.weights.allclose(expected.weights, 1e-5, 1e-6)
    (entry,) = json.loads(file.read_text())["decisions"]
    assert entry["plan"] == {"paro_micro_batches": [3, 1], "paces": pytest.approx([0.05, 0.15])}


def test_a_report_has_the_numbers_and_waits_of_groups(ranks: Any, tmp_path: Path) -> None:
    zero = placed("NIG", paro_micro_batches=[3, 2], paro_report={"folder": str(tmp_path), "after": 2, "steps": 1})
    ranks(4).run(reported_train, "plain", zero, [(3, 3, 2, 2)] * 9, "own")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["groups"] == group_rows([3, 2], [row["pace"] for row in report["groups"]])
    with pytest.raises(ValueError, match="groups with different numbers of micro-batches"):
        RecordedTraining.from_report(report)


def reported_train(*case: Any) -> None:
    with links_given():
        train(*case)


@with_cases(
    "zero, number, steps",
    (placed("NIG", paro_micro_batches=[2, 1]), None, 4),
    (placed("IIG", paro_micro_batches=[1, 3]), None, 2),
    (placed("NNG"), 2, 2),
    ({"stage": 1}, 1, 6),
)
def test_a_sampler_divides_each_step_by_groups(ranks: Any, zero: dict[str, Any], number: Any, steps: int) -> None:
    for apart, taken in ranks(4).run(sampled_case, zero, number):
        assert apart < 1e-6 and taken == steps


def sampled_case(zero: dict[str, Any], number: int | None) -> tuple[float, int]:
    job = replace(sampled.JOB, config={"gradient_accumulation_steps": number})
    engine, model = training.make_engine(job, {**SMALL, **zero})

    def micro_step(x: torch.Tensor, y: torch.Tensor) -> None:
        engine.backward(((engine(x) - y) ** 2).mean())
        engine.step()

    return sampled.train(engine, model, micro_step)


@with_cases(
    "name, keys, batches, message",
    ("NIG", {"paro_micro_batches": [2, 1, 1]}, 1, "each group: 4 data-parallel ranks in groups of 2 are 2 groups"),
    ("NIG", {"paro_micro_batches": [1, 2]}, 1, "gives gradient_accumulation_steps 2 to ranks of group 1, got 1"),
    ("NIG", {"paro_micro_batches": [1, 1]}, 1, "cannot be combined with zero_optimization.paro_micro_batches"),
    ("IIG", {}, 0, "a rank without any batch gathers parameters with ranks that have one"),
    ("III", {}, 1, "evaluate after the context"),
    ("NIG", {}, 1, "expected one engine.backward per engine.step"),
)
def test_other_numbers_raise(ranks: Any, name: str, keys: dict[str, Any], batches: int, message: str) -> None:
    for error in ranks(4).run_expect_error(refused_case, placed(name, **keys), batches):
        assert message in error.message


def refused_case(zero: dict[str, Any], batches: int) -> None:
    """Train with more batches on higher ranks, evaluate, and run two backwards."""
    engine, _ = training.make_engine(Job(), zero)
    with deepspeed_ext.last_batches(engine):
        for x, _ in islice(training.batches(Job()), dist.get_rank() + batches):
            engine.backward(engine(x).sum())
            engine.step()
            engine.eval()
            engine(x)
            engine.train()
            for _ in range(2):
                engine.backward(engine(x).sum())
