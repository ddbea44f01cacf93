# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Ranks that use different parameters in a micro-batch, as a vision tower without images on some ranks."""

import random
from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from deepspeed_ext.zero.filling import choose_modules
from tests.harness import networks, training
from tests.harness.logs import logged
from tests.harness.mixtures import WINDOWS, Packed
from tests.harness.parity_table import PARTITIONED, REPLICATED
from tests.harness.snapshots import error_of
from tests.harness.tiers import deep, with_cases
from tests.harness.training import BF16, SMALL, Job, check, placed

TOWER = {"layers.[12]": "N"}  # the layers that ranks skip
PLACED, LONG = (*REPLICATED, *PARTITIONED), {"plain": 200, "accumulation, overlap": 200, "bf16": 30}
FEW_BITS = {"zeropp_loco_param": {}, "paro_quantized_updates": {}}
JOBS: dict[str, Job] = {
    "plain": Job(),
    "accumulation, overlap": Job(accumulation=3, groups=2, frozen=(0,), zero={"overlap_comm": True}),
    "offload": Job(accumulation=2, zero={"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}),
    "lists": Job(accumulation=2, zero={"contiguous_gradients": False, "overlap_comm": True}),
    "few bits": Job(accumulation=2, zero={**FEW_BITS, "overlap_comm": True}),
    "Muon": Job(accumulation=2, optimizer="Muon", zero={"reduce_scatter": False}),
    "reentrant": Job(checkpointing=True, zero={"overlap_comm": True}),
    "bf16": Job(accumulation=2, dtype="bf16", zero={"overlap_comm": True}),
}


def job_of(kind: str, steps: int, ranks: int = 4) -> Job:
    """Return a job in which each rank skips two layers at random."""
    job, draw = JOBS[kind], random.Random(kind)
    skipped = [
        (at, layer, rank)
        for at in range(steps * job.accumulation)
        for layer in (1, 2)
        for rank in range(ranks)
        if draw.random() < 0.5
    ]
    if not job.frozen:  # a loss needs a trained parameter
        skipped += [(at, 3) for at in range(job.accumulation)]  # no rank uses it in the first step
    zero = {**SMALL, "reduce_bucket_size": 700, **job.zero}
    return replace(job, sizes=networks.SQUARE, steps=steps, skipped=skipped, zero=zero)


def keys_of(name: str) -> dict[str, Any]:
    return placed(name) if name in REPLICATED else placed(name, paro_modules=TOWER)


@with_cases(
    "kind, steps, names",
    ("plain", 4, ("NNG", "NGG", "IGG", "ING")),
    ("accumulation, overlap", 4, ("NIG", "NNI", "IIG", "GGG", "III")),
    *deep(*((*job, PLACED[at : at + 3]) for job in LONG.items() for at in range(0, 14, 3))),
)
def test_parity_with_stock(ranks: Any, kind: str, steps: int, names: tuple[str, ...]) -> None:
    # Stage 0 adds zeros for parameters without gradients; stages 1 and 2 fail.
    bounds = BF16 if kind == "bf16" else {}
    variants = [keys_of(name) for name in names]
    check(ranks(4).run(training.against, job_of(kind, steps), variants, {"stage": 0})[0], **bounds)


@with_cases(
    "kind, names",
    ("offload", ("NIG", "IIG")),
    ("lists", ("NGG",)),
    ("few bits", ("NIG", "NGG", "IIG")),
    ("Muon", ("NIG", "ING")),
    ("reentrant", ("NII", "III")),
    *deep(*((kind, (*REPLICATED, *(p for p in PARTITIONED if kind != "few bits" or p[0] == "I"))) for kind in JOBS)),
)
def test_skipped_parameters_are_zeros(ranks: Any, kind: str, names: tuple[str, ...]) -> None:
    """A run is bit-identical to one in which each rank runs all layers, and adds zero times the output."""
    jobs = job_of(kind, 4), replace(job_of(kind, 4), unused_as_zeros=True)
    for name in names:
        both = (ranks(4).run(training.train, job, keys_of(name)) for job in jobs)
        for skipped, zeros in zip(*both, strict=True):
            assert skipped.weights.equal(zeros.weights), (kind, name)
            assert (skipped.losses, skipped.norms) == (zeros.losses, zeros.norms), (kind, name)
            assert skipped.replicas_equal


def test_ranks_that_gather_different_modules_raise(ranks: Any) -> None:
    skipping = Job(sizes=networks.SQUARE, zero=SMALL, skipped=[(1, 1, 1)], steps=2)
    for error in ranks(2).run_expect_error(training.train, skipping, placed("IIG")):
        assert "gather different modules: layers.1 on ranks [0]; layers.2 on ranks [1]" in error.message
        assert "paro_modules" in error.message and "leaf_module" in error.message


@pytest.mark.parametrize(
    "keys, message",
    [
        (placed("IIG", 1, paro_modules={"tower.*": "N"}), "'tower.*' matches no module with parameters. Modules: s"),
        (placed("NIG", 1, paro_modules=TOWER), "paro_strategy N-I-G shards none"),
        (placed("IIG", 1, paro_modules={"a": "N", "layers.1": "I"}), 'takes only "N" with p = I'),
        (placed("GGG", 1, paro_modules={"layers.1": "G"}), 'with the value "N" or, with p = G, "I"'),
        (placed("GGG", 1, paro_modules={"*.experts": "N"}, **WINDOWS), "PackedExperts, whose experts are fetched"),
        ({"stage": 3, "paro_modules": TOWER}, "without zero_optimization.paro_strategy"),
    ],
)
def test_wrong_patterns_are_refused(ranks: Any, keys: dict[str, Any], message: str) -> None:
    for error in ranks(1).run_expect_error(training.make_engine, Job(network=Packed, zero=SMALL), keys):
        assert message in error.message


@pytest.mark.parametrize(
    "budget, chosen",
    [(20, "wpe"), (80, "T wpe"), (137, "T wpe h.0.0"), (302, "T wpe h.0 h.1"), (999, "T wpe h.0 h.1 ln")],
)
def test_fill_takes_embeddings_then_modules_in_order(budget: int, chosen: str) -> None:
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7), nn.Linear(7, 7)) for _ in range(2))  # 56 each
    model = nn.ModuleDict({"wpe": nn.Embedding(1, 8), "wte": nn.Embedding(10, 7), "h": blocks})
    model["head"], model["ln"] = nn.Linear(7, 10, bias=False), nn.LayerNorm(200)
    model["head"].weight = model["wte"].weight
    names, held = choose_modules(model, budget, lambda params: sum(param.numel() for param in params))
    assert (names, held <= budget) == (chosen.replace("T", "wte head").split(), True)


def test_fill_keeps_whole_what_fits_in_memory(ranks: Any) -> None:
    text = ranks(2).run(fill_case)[0]
    assert '"fill" keeps layers.0, layers.1, layers.2 whole: 8.47e-06 GB. 9.9e-08 of paro_memory_gb 3.1' in text
    assert 'whole on each rank (paro_modules "fill"): 2,117 parameters, 8.47e-06 GB' in text


def fill_case() -> str:
    # 2,331 parameters in fp32, 20 bytes each over 2 ranks; the first three layers, 2,117 of them, also whole.
    keys = placed("GGG", paro_modules="fill", paro_memory_gb=(2331 * 20 / 2 + 2117 * 4 + 99) / 1e9)
    job = Job(sizes=networks.SQUARE, zero=SMALL)
    with logged() as lines:
        filled = training.train(job, keys)
    by_hand = training.train(job, placed("GGG", paro_modules={"layers.[012]": "N"}))
    assert filled.losses == by_hand.losses and filled.weights.equal(by_hand.weights)
    return "".join(text for level, text in lines if level == "WARNING")


@pytest.mark.parametrize("kind", ["few bits", *deep("accumulation, overlap", "offload", "lists")])
def test_zero_grad_drops_an_interrupted_backward(ranks: Any, kind: str) -> None:
    for name, (message, equal) in ranks(4).each(interrupted_case, ("NII", "NIG", "NGG"), kind):
        assert equal and "layers.3.weight got another gradient in a backward" in message, (kind, name, message)


def interrupted_case(name: str, kind: str) -> tuple[str, bool]:
    """Return the error of a backward after an interrupted one, and whether zero_grad drops both."""
    job, weights, message = replace(job_of(kind, 4), skipped=()), [], ""
    for interrupted in (False, True):
        engine, model, data = training.begin(job, placed(name))
        batches = [next(data), next(data)]
        if interrupted:
            hook = model.layers[1].weight.register_hook(lambda gradient: 1 / 0)
            assert error_of(training.micro_step, engine, job, 0, *batches[0]).startswith("ZeroDivisionError")
            hook.remove()
            message = error_of(training.micro_step, engine, job, 0, *batches[1])
            engine.optimizer.zero_grad()
        for number in range(2 * job.accumulation):
            training.step(engine, job, number, data)
        weights.append(training.whole_weights(model))
    return message, weights[0].equal(weights[1])
