# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Muon under every strategy: what stock DeepSpeed trains, and what one process with whole matrices does."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest

from tests.harness import training
from tests.harness.tiers import by_strategies, deep, with_some
from tests.harness.training import PARTITIONED, REPLICATED, SMALL, Difference, Job, check, placed

# Iterations make more of what rounding leaves in directions that gradients hardly have.
BOUNDS = {"weights": 1e-4, "losses": 1e-5}
STOCK = {"1": {"stage": 1}, "2": {"stage": 2}, "3": {"stage": 3, "reduce_scatter": False}}
ALL = (*REPLICATED, *PARTITIONED)
SOME = ("NNN", "NII", "NIG", "III", "IIG", "GNG")
OFFLOAD = {"offload_optimizer": {"device": "cpu"}}


def muon(**details: Any) -> Job:
    return Job(**{"optimizer": "Muon", "steps": 3, "empty": False, "zero": SMALL, **details})


def run(
    ranks: Any, job: Job, names: Sequence[str], world: int = 4, group: int = 2, stage: str = "2", **bounds: float
) -> None:
    variants = [placed(name, group) for name in names]
    rows: list[Difference] = ranks(world).run(training.against, job, variants, STOCK[stage])[0]
    for row, name in zip(rows, names, strict=True):
        check([row], **(bounds or BOUNDS), optimizer="Stage12Optimizer" if name in REPLICATED else "Stage3Optimizer")


class Row(NamedTuple):
    """A shape, with what else is configured; ``stage`` is the oracle."""

    world: int
    group: int
    stage: str
    details: dict[str, Any]
    bounds: dict[str, float] = BOUNDS


STANDARD = {"ns_method": "standard", "momentum": 0.8, "weight_decay": 0.1, "torch_adam": True}
ROWS = {
    "groups, frozen, clipped": Row(4, 2, "1", {"groups": 2, "frozen": (1,), "clipping": 0.1}),
    "overlap, layers that rest": Row(
        4,
        2,
        "2",
        {
            "accumulation": 3,
            "clipping": 0.0,
            "skipped": ((1, 0), (1, 1), (2, 2), (4, 1)),
            "zero": {**SMALL, "overlap_comm": True},
        },
    ),
    "groups of three": Row(6, 3, "3", {}),
    # The standard iteration is in bf16, where an ulp of what comes in may be many of what goes out.
    "standard": Row(
        6,
        2,
        "2",
        {
            "accumulation": 3,
            "config": {"optimizer": {"params": STANDARD}},
        },
        {"weights": 2e-2, "losses": 1e-2},
    ),
}


@pytest.mark.parametrize("row, names", with_some(ROWS, SOME, ALL), ids=by_strategies)
def test_parity_at_every_shape_with_what_else_is_configured(ranks: Any, row: str, names: tuple[str, ...]) -> None:
    world, group, stage, details, bounds = ROWS[row]
    run(ranks, muon(**details), names, world, group, stage, **bounds)


@pytest.mark.parametrize("dtype, names", [("bf16", ALL), ("fp16", SOME), *deep(("fp16", ALL))], ids=by_strategies)
def test_parity_in_16_bits_and_with_overflow(ranks: Any, dtype: str, names: tuple[str, ...]) -> None:
    # Parts travel in bf16, and what is orthogonalized from them is as far off as the gradients are.
    job = muon(dtype=dtype, accumulation=2, overflow=((3, 1),) if dtype == "fp16" else ())
    run(ranks, job, names, weights=3e-2, losses=5e-2, norms=3e-2)


def test_parity_with_optimizer_offload(ranks: Any) -> None:
    for dtype, bounds in (("fp32", BOUNDS), ("fp16", {"weights": 3e-2, "losses": 5e-2, "norms": 3e-2})):
        overflow = ((1, 2),) if dtype == "fp16" else ()
        run(ranks, muon(dtype=dtype, overflow=overflow, zero={**SMALL, **OFFLOAD}), SOME, **bounds)


def test_gradients_and_updates_in_few_bits(ranks: Any, kernels: bool) -> None:
    # Muon does not care how large a gradient is, so 4 bits of one turn its small directions; replicas stay equal.
    loco, few = {"zeropp_loco_param": {}}, {"paro_quantized_updates": {}}
    ahead = {"paro_overlap_updates": True}
    variants = [
        *(placed(name, **loco, **few) for name in ("NII", "III", "IIG")),
        *(placed(name, **loco, **few, **ahead) for name in ("NNN", "NIG")),
        placed("NIG", **ahead),
        placed("GNG", **loco),
    ]
    rows = ranks(4).run(training.against, muon(steps=4, accumulation=2), variants, STOCK["2"])[0]
    for row in rows:
        assert row.replicas_equal and row.same_decisions and row.losses < 0.05, row
    assert rows[-2].weights < BOUNDS["weights"]  # only later


def test_under_zero_init_muon_has_its_matrices(ranks: Any) -> None:
    for rows in ranks(4).run(zero_init_case):
        check(rows, **BOUNDS)


def zero_init_case() -> list[Difference]:
    """How far models of deepspeed.zero.Init are from one that is whole."""
    stock = training.train(muon(), STOCK["2"])
    return [
        training.difference(name, training.train(muon(zero_init="config"), placed(name)), stock, "Stage3Optimizer")
        for name in ("III", "IIG", "GGG")
    ]


def test_an_unknown_iteration_is_refused_in_the_same_words(ranks: Any) -> None:
    """Whatever the order in which a rank has DeepSpeed's set."""
    wanted = "ValueError: optimizer.params.ns_method must be one of gram, standard, got 'gramm'."
    assert ranks(1).run(unknown_case) == [[wanted, wanted]]


def unknown_case() -> list[str]:
    """The errors with both orders."""
    from unittest import mock

    from deepspeed.runtime.zero.muon import original_muon

    from tests.harness.snapshots import error_of

    job, messages = muon(config={"optimizer": {"params": {"ns_method": "gramm"}}}), []
    for known in (["gram", "standard"], ["standard", "gram"]):
        with mock.patch.object(original_muon, "NS_METHODS", known):
            messages.append(error_of(training.make_engine, job, placed("NIG", 1)))
    return messages


@pytest.mark.parametrize("names", [SOME, *deep((ALL,))], ids=by_strategies)
def test_one_process_with_whole_matrices_does_the_same(ranks: Any, names: tuple[str, ...]) -> None:
    for rows in ranks(6).run(whole_case, names):
        for name, weights, momentum, equal in rows:
            assert weights < BOUNDS["weights"] and momentum < BOUNDS["weights"] and equal, (name, weights, momentum)


def whole_case(names: tuple[str, ...]) -> list[tuple[str, float, float, bool]]:
    """How far weights and momentum of strategies are from those of one process; whether replicas are equal."""
    import torch
    from deepspeed.utils import safe_get_full_optimizer_state

    from tests.harness import networks

    job = muon(network=networks.Matrices, sizes=networks.SQUARE, clipping=0.0, accumulation=2)
    wanted, momenta = networks.train_whole(job)
    rows = []
    for name in names:
        engine, model = training.make_engine(job, placed(name, 3))
        networks.mark_heads(model)
        data = training.batches(job)
        for number in range(job.steps * job.accumulation):
            training.micro_step(engine, job, number, *next(data))
            engine.step()
        weights = training.whole_weights(model)
        apart = max(
            (safe_get_full_optimizer_state(param, "momentum_buffer") - momenta[key]).abs().max().item()
            for key, param in model.named_parameters()
            if key in momenta
        )
        engine.destroy()
        difference = ((weights - wanted).abs().max() / wanted.abs().max()).item()
        rows.append(
            (
                name,
                difference,
                apart / max(one.abs().max().item() for one in momenta.values()),
                training.replicas_equal(weights),
            )
        )
    assert torch.isfinite(wanted).all()
    return rows


def test_groups_may_differ_in_momentum(ranks: Any) -> None:
    for row, name in zip(ranks(4).run(groups_case)[0], ("NIG", "IIG", "III"), strict=True):
        check([row], **BOUNDS, optimizer="Stage12Optimizer" if name in REPLICATED else "Stage3Optimizer")


def groups_case() -> list[Difference]:
    """Strategies against stage 2, which has what DeepSpeed's stage 3 refuses."""
    from unittest import mock

    groups, job = training.parameter_groups, muon(groups=2)

    def differing(*args: Any) -> list[dict[str, Any]]:
        return [{**group, "momentum": 0.95 - number / 5} for number, group in enumerate(groups(*args))]

    with mock.patch.object(training, "parameter_groups", differing):
        oracle = training.train(job, STOCK["2"])  # as patched, which no run that is kept is
        return [training.beside(oracle, name, job, placed(name)) for name in ("NIG", "IIG", "III")]
