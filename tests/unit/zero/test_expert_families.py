# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Parity of DeepSpeed's MoE layers and AutoEP under strategies with DeepSpeed's stages; see ``families.py``."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.moe.utils import is_moe_param

from tests.harness import expert_cases, experts, networks, snapshots, training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import BF16, PARTITIONED, REPLICATED, Difference, Job, check

FP16 = {"weights": 2e-3, "losses": 1e-2, "norms": 4e-3}
OVERFLOW = {"dtype": "fp16", "accumulation": 2, "steps": 3, "overflow": [(3, 1)]}
ON_HOST = {"zero": {"offload_optimizer": {"device": "cpu"}}}


def run(ranks: Any, ep: int, job: dict[str, Any], world: int = 4, group: int = 2, **kwargs: Any) -> list[Difference]:
    """Return the rows of rank 0; all ranks must have the same results for replicas."""
    rows = ranks(world).run(expert_cases.routed_case, ep, job, group, **kwargs)
    assert all(row.replicas_equal for of in rows for row in of)
    return [max(of, key=lambda row: row.weights) for of in zip(*rows, strict=True)]


X2, X3 = {"accumulation": 2}, {"accumulation": 3}
RESTING = {"zero": {"overlap_comm": True}, "accumulation": 3, "skipped": [(n, 1) for n in range(6) if n % 3]}


@with_cases(
    "world, ep, group, names, job, bounds",
    (6, 2, 2, ("NNI",), X2, {}),
    *deep((4, 1, 2, ("NNN",), X2, {}), (8, 4, 2, ("NIG",), X2, {})),
    (4, 2, 2, ("NNG",), {"groups": 2, "frozen": (1,), "optimizer": "Adam", "accumulation": 2}, {}),
    (4, 2, 2, ("NII", "NGG"), RESTING, {}),
    (4, 2, 2, ("NIG",), {"zero": {"round_robin_gradients": True}, "clipping": 0.0}, {}),
    (4, 2, 2, ("NIG",), {**ON_HOST, "optimizer": "Adam"}, {}),
    (4, 2, 2, ("NGG",), {"boundary": "step", "backward": "loss", "accumulation": 2}, {}),
    (4, 2, 2, ("NIG",), OVERFLOW, FP16),
    *deep((4, 2, 2, REPLICATED, {**X2, "dtype": "bf16"}, BF16), (4, 2, 2, REPLICATED, OVERFLOW, FP16)),
    *deep((6, 2, 2, REPLICATED, X2, {}), (4, 2, 2, REPLICATED, RESTING, {})),
    *deep(*((8, ep, group, REPLICATED, X3, {}) for ep, group in ((2, 4), (4, 2), (2, 1)))),
)
def test_parity_of_moe_layers(
    ranks: Any, world: int, ep: int, group: int, names: tuple[str, ...], job: dict[str, Any], bounds: dict[str, float]
) -> None:
    check(run(ranks, ep, job, world, group, strategies=names), **bounds)


@with_cases(
    "ep, group, job, names",
    (2, 2, {"accumulation": 2, "optimizer": "Adam", "groups": 2}, ("III",)),
    *deep((2, 2, {"accumulation": 2, "optimizer": "Adam", "groups": 2}, PARTITIONED)),
    *deep((4, 2, {"accumulation": 3}, PARTITIONED), (2, 2, {"optimizer": "Muon", "accumulation": 2}, PARTITIONED)),
)
def test_parity_of_moe_layers_with_sharded_parameters(
    ranks: Any, ep: int, group: int, job: dict[str, Any], names: tuple[str, ...]
) -> None:
    """DeepSpeed's stage 3 rejects MoE layers, so the oracle is its stage 2."""
    zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 400}
    check(run(ranks, ep, {**job, "zero": zero}, 4, group, strategies=names, stage=2))


@with_cases(
    "ep, group, names, job, bounds",
    (2, 2, ("NIG",), X2, {}),
    (2, 2, ("IIG",), X2, {}),
    *deep((2, 2, ("GGG",), {**X2, "dtype": "bf16"}, BF16)),
    *deep(*((ep, 2, names, X2, {}) for ep in (2, 4) for names in (REPLICATED, PARTITIONED))),
    *deep((2, 4, PARTITIONED, X2, {}), (2, 2, ("III", "IIG"), {"dtype": "bf16"}, BF16)),
    *deep((2, 2, ("III", "IIG", "GGG"), {**OVERFLOW, "clipping": 0.0}, FP16)),
)
def test_parity_of_experts_of_autoep(
    ranks: Any, ep: int, group: int, names: tuple[str, ...], job: dict[str, Any], bounds: dict[str, float]
) -> None:
    stage = 2 if names[0][0] == "N" else 3
    for rows in ranks(4).run(expert_cases.autoep_case, ep, job, group, strategies=names, stage=stage):
        check(rows, **bounds)


@with_cases(
    "ep, world, group, accumulation, names",
    (2, 4, 1, 2, ("NIG", "IGG")),
    *deep(*((ep, 8, 2, 3, (*REPLICATED, *PARTITIONED)) for ep in (2, 4))),
)
def test_parity_of_experts_folded_into_tensor_parallelism(
    ranks: Any, ep: int, world: int, group: int, accumulation: int, names: tuple[str, ...]
) -> None:
    # Clipped as stock stage 3 does; the norms of its stages 1 and 2 lack experts of all tensor-parallel ranks but one.
    for rows in ranks(world).run(expert_cases.folded_case, ep, group, accumulation, names):
        check(rows)


@with_cases("kind, names", ("MoE", ("NIG",)), *deep(("MoE", ("NNN", "NII")), ("AutoEP", ("NIG", "III", "IGG"))))
def test_loco_errors_of_families_are_separate(ranks: Any, kernels: bool, kind: str, names: tuple[str, ...]) -> None:
    """Eight bits are close to exact, and each family has its own four bits."""
    for row in ranks(4).rows(expert_cases.few_bits_case, kind, names):
        assert row.replicas_equal and row.weights < 2e-2 and 0 < row.losses < 2e-2, row


@pytest.mark.parametrize("frozen", ["experts", *deep("others")])
def test_a_family_without_trained_parameters(ranks: Any, frozen: str) -> None:
    for rows in ranks(4).run(frozen_case, frozen):
        check(rows)


def test_frozen_experts_are_loaded_by_the_ranks_that_have_them(ranks: Any, tmp_path: Path) -> None:
    for lost, refused in ranks(4).run(frozen_load_case, str(tmp_path)):
        assert not lost, lost
        assert not refused or "has frozen AutoEP experts, such as model.layers.0.mlp.experts.w1" in refused, refused


def frozen_load_case(folder: str) -> tuple[list[str], str]:
    """Return names of parameters that a load does not restore, and why the checkpoint cannot be converted; experts are
    frozen, in one layer only in part."""

    class Network(experts.SmallMixtral):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name, param in self.named_parameters():
                param.requires_grad_(".experts." not in name or name.endswith("1.mlp.experts.down_proj"))

    job = Job(sizes=expert_cases.SIZES, network=Network, config=experts.autoep(2))
    engine, model = training.make_engine(job, training.placed("NIG"))
    engine.save_checkpoint(folder)
    saved = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    engine.load_checkpoint(folder)
    lost = [name for name, param in model.named_parameters() if not torch.equal(param, saved[name])]
    return lost, snapshots.error_of(snapshots.convert, folder, ours=True)


def frozen_case(frozen: str) -> list[Difference]:
    """Return differences from stock if only one family is trained; stock's stage 2 does not support frozen experts."""

    class Network(experts.SmallMixtral):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name, param in self.named_parameters():
                expert = ".experts." in name or is_moe_param(param)
                param.requires_grad_(expert == (frozen == "others"))

    job = Job(sizes=expert_cases.SIZES, network=Network, zero=expert_cases.PLAIN, config=experts.autoep(2))
    return training.compare(job, 2, ("ING", "IGG", "NIG"), stage=3)


# Iterations amplify rounding errors in directions of small gradients.
MUON = {"weights": 1e-4, "losses": 1e-5}


@with_cases(
    "world, ep, group, names, job",
    (6, 2, 2, ("NIG",), {"accumulation": 2, "clipping": 0.1, "groups": 2}),
    *deep((8, 2, 4, REPLICATED, {"accumulation": 3}), (4, 2, 2, REPLICATED, ON_HOST)),
)
def test_muon_of_moe_layers_matches_stock(
    ranks: Any, world: int, ep: int, group: int, names: tuple[str, ...], job: dict[str, Any]
) -> None:
    """Each matrix of an expert is orthogonalized by a rank that has it, as in DeepSpeed's stages 1 and 2."""
    rows = run(ranks, ep, {"optimizer": "Muon", **job}, world, group, strategies=names)
    check(rows, weights=1e-6, losses=1e-5, norms=1e-4)  # the gate has a weight of 100


@with_cases(
    "world, ep, group, names, job",
    (4, 2, 2, ("IIG",), {"clipping": 0.1, "groups": 2}),
    *deep((4, 2, 4, ("NIG", "III", "GNG"), {"accumulation": 3})),
    *deep((8, 2, 4, PARTITIONED + REPLICATED, {}), (4, 2, 2, PARTITIONED + REPLICATED, ON_HOST)),
)
def test_muon_of_autoep_matches_stock(
    ranks: Any, world: int, ep: int, group: int, names: tuple[str, ...], job: dict[str, Any]
) -> None:
    """Packed experts are compared with DeepSpeed's stage 3."""
    for rows in ranks(world).run(expert_cases.muon_case, ep, job, group, names):
        check(rows, **MUON)


def test_stock_and_strategies_load_each_others_checkpoints(ranks: Any, tmp_path: Path) -> None:
    """This holds for os = G; other checkpoints are rejected before anything is changed."""
    for rows, refused in ranks(4).run(exchange_case, str(tmp_path)):
        assert len(rows) == 10 and all(rows.values()), rows
        assert "universal checkpoints do not support experts of MoE layers (" in refused[0]
        assert "shard the states otherwise" in refused[1], refused
        assert "does not fit the model's experts: of 3 names, 3 are missing, unexpected, or have another" in refused[2]
        assert "shard the states otherwise" in refused[3] and "It cannot be converted either: Deep" in refused[3]
        assert "mp_rank_00_model_states.pt is missing. The checkpoint was saved with paro_strategy I-I-G" in refused[4]
        assert "layer_0_expert_" in refused[5] and "is missing" in refused[5], refused


def exchange_case(folder: str) -> tuple[dict[str, bool], list[str]]:
    """Return whether training continues equally from its own and the other's checkpoint; errors of bad loads."""
    equal = {}
    routed = Job(sizes=expert_cases.SIZES, network=networks.RoutedOverTwo, optimizer="Adam")
    mixtral = Job(sizes=expert_cases.SIZES, network=experts.SmallMixtral, optimizer="Adam", config=experts.autoep(2))
    for job, *names in (
        (replace(routed, optimizer="Muon", groups=2), "2", "NIG"),  # momentum of whole matrices
        (routed, "2", "NIG", "2"),
        (routed, "IIG", "ING"),
        (mixtral, "3", "IIG", "3"),
    ):
        losses: list[list[float]] = []
        for before, name in zip(["", *names], names, strict=False):
            engine, _ = training.make_engine(job, training.placed(name))
            if before:
                engine.load_checkpoint(f"{folder}/{before}")
            else:
                snapshots.run(engine, job, snapshots.steps_of(job, 1), first=0)
            engine.save_checkpoint(f"{folder}/{name}")
            losses.append(snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=1)))
            equal[f"{job.optimizer}, {before} to {name}"] = losses[-1] == pytest.approx(losses[0], rel=0, abs=1e-6)
            engine.destroy()
            dist.barrier()

    def refusal(job: Job, name: str, saver: str = "NIG", tag: str | None = None) -> str:
        engine, _ = training.make_engine(job, training.placed(name))
        error = snapshots.error_of(engine.load_checkpoint, f"{folder}/{saver}", tag=tag)
        engine.destroy()
        return error

    universal = replace(routed, config={"checkpoint": {"load_universal": True}})
    Path(folder, "NIG", "universal", "zero").mkdir(parents=True, exist_ok=True)
    wider = Job(sizes=expert_cases.SIZES, network=type("", (networks.RoutedOverTwo,), {"more": 3}), optimizer="Adam")
    refused = [refusal(universal, "NIG", tag="universal"), refusal(routed, "NII"), refusal(wider, "NIG")]
    refused += [refusal(universal, "NII"), refusal(routed, "NIG", "IIG")]
    for path in sorted(Path(folder, "NIG", "global_step1").glob("layer_0_expert_*")):
        snapshots.on_first_rank(path.unlink)
    return equal, [*refused, refusal(routed, "NIG")]


@with_cases(
    "kind, ep, compressed, optimizer, names",
    ("AutoEP", 4, True, "Adam", ("IGG",)),
    *deep(("folded", 2, False, "Adam", ("IIG",)), ("folded", 4, True, "Adam", ("NIG", "INI", "IIG"))),
    *deep(*((kind, 4, True, "Adam", ("NNN", "III", "ING", "IGG")) for kind in ("MoE", "AutoEP"))),
    *deep(*((kind, 2, False, "Muon", ("NII", "NIG", "INI", "IIG", "GGG")) for kind in ("MoE", "AutoEP"))),
)
def test_a_resumed_run_matches_an_uninterrupted_run(
    ranks: Any, tmp_path: Path, kind: str, ep: int, compressed: bool, optimizer: str, names: tuple[str, ...]
) -> None:
    for rows in ranks(4).run(expert_cases.resume_case, str(tmp_path), ep, compressed, kind, optimizer, names):
        assert rows == [(name, {}, {}) for name in names]
