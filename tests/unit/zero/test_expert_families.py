# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""DeepSpeed's MoE layers and AutoEP's train under strategies what they train in its stages; see ``families.py``."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.harness import training
from tests.harness.expert_cases import (
    PLAIN,
    SIZES,
    autoep_case,
    few_bits_case,
    folded_case,
    muon_case,
    resume_case,
    routed_case,
)
from tests.harness.tiers import by_strategies, deep
from tests.harness.training import BF16, PARTITIONED, REPLICATED, Difference, Job

check = partial(training.check, optimizer="Stage12Optimizer")


def run(ranks: Any, ep: int, job: dict[str, Any], world: int = 4, group: int = 2, **kwargs: Any) -> list[Difference]:
    """Rows of rank 0; all ranks must agree on what concerns replicas."""
    rows = ranks(world).run(routed_case, ep, job, group, **kwargs)
    assert all(row.replicas_equal for of in rows for row in of)
    return [max(of, key=lambda row: row.weights) for of in zip(*rows, strict=True)]


@pytest.mark.parametrize("world, ep, group", [(4, 1, 2), (6, 2, 2), *deep((4, 2, 2), (4, 4, 2), (4, 2, 4), (4, 2, 1))])
def test_parity_at_every_shape(ranks: Any, world: int, ep: int, group: int) -> None:
    check(run(ranks, ep, {"accumulation": 2, "steps": 3}, world, group))


@pytest.mark.parametrize("ep, group, names", [(4, 2, ("NII", "NIG")), *deep((2, 4, REPLICATED), (4, 2, REPLICATED))])
def test_parity_of_eight_ranks(ranks: Any, ep: int, group: int, names: tuple[str, ...]) -> None:
    check(run(ranks, ep, {"accumulation": 3, "steps": 3}, 8, group, strategies=names))


@pytest.mark.parametrize(
    "job",
    [
        {"groups": 2, "frozen": (1,), "optimizer": "Adam", "accumulation": 2},
        {"zero": {"overlap_comm": True}, "accumulation": 3, "skipped": [(n, 1) for n in range(9) if n % 3]},
        {"zero": {"round_robin_gradients": True}, "clipping": 0.0},
        {"zero": {"offload_optimizer": {"device": "cpu"}}, "optimizer": "Adam"},
        {"boundary": "step", "backward": "loss", "accumulation": 2},
    ],
    ids=["groups, frozen", "overlap, skipped", "round robin, no clipping", "offload", "own boundary"],
)
def test_parity_with_keys_of_deepspeed(ranks: Any, job: dict[str, Any]) -> None:
    check(run(ranks, 2, {"steps": 3, **job}))


@pytest.mark.parametrize("ep, group", [(2, 2), *deep((4, 2))])
def test_experts_of_autoep(ranks: Any, ep: int, group: int) -> None:
    check(ranks(4).run(autoep_case, ep, {"accumulation": 2, "steps": 3}, group)[0])


@pytest.mark.parametrize(
    "ep, group, job, names",
    [
        (2, 2, {"accumulation": 2, "optimizer": "Adam", "groups": 2}, ("ING", "III", "IIG", "GIG")),
        *deep((4, 2, {"accumulation": 3}, PARTITIONED), (1, 2, {"accumulation": 2}, PARTITIONED)),
        *deep((2, 1, {"accumulation": 1, "clipping": 0.1}, PARTITIONED), (2, 4, {"accumulation": 2}, PARTITIONED)),
        *deep((2, 2, {"optimizer": "Muon", "accumulation": 2}, PARTITIONED)),
    ],
    ids=by_strategies,
)
def test_moe_layers_with_parameters_sharded(
    ranks: Any, ep: int, group: int, job: dict[str, Any], names: tuple[str, ...]
) -> None:
    """DeepSpeed's stage 3 refuses them, so the oracle is its stage 2."""
    zero = {"stage3_param_persistence_threshold": 0, "sub_group_size": 400}
    rows = run(ranks, ep, {"steps": 3, **job, "zero": zero}, 4, group, strategies=names, stage=2)
    check(rows, optimizer="Stage3Optimizer")


SOME_PARTITIONED = ("III", "IIG", "GGG")


@pytest.mark.parametrize(
    "ep, group, names",
    [
        (2, 2, ("INI", "IIG", "GNG")),
        *deep(*((*shape, PARTITIONED) for shape in ((2, 2), (1, 2), (4, 2), (2, 4)))),
    ],
)
def test_experts_of_autoep_with_parameters_sharded(ranks: Any, ep: int, group: int, names: tuple[str, ...]) -> None:
    job = {"accumulation": 2, "steps": 3}
    for rows in ranks(4).run(autoep_case, ep, job, group, strategies=names, stage=3):
        check(rows, optimizer="Stage3Optimizer")


@pytest.mark.parametrize(
    "ep, world, group, accumulation, names",
    [
        (2, 4, 1, 3, ("NNI", "NIG", "ING", "IGG")),
        *deep((2, 4, 2, 1, (*REPLICATED, *PARTITIONED)), (4, 4, 1, 3, (*REPLICATED, *PARTITIONED))),
        *deep(*((ep, 8, 2, 3, ("NNG", "NII", "NIG", "INI", "IIG", "GNG")) for ep in (2, 4))),
    ],
    ids=by_strategies,
)
def test_experts_folded_into_tensor_parallel_ranks(
    ranks: Any, ep: int, world: int, group: int, accumulation: int, names: tuple[str, ...]
) -> None:
    # Clipped as stock stage 3 does; the norms of its stages 1 and 2 lack experts of all tensor-parallel ranks but one.
    for rows in ranks(world).run(folded_case, ep, group, accumulation, names):
        for row in rows:
            check([row], optimizer="Stage12Optimizer" if row.strategy[0] == "N" else "Stage3Optimizer")


@pytest.mark.parametrize(
    "kind, names",
    [("MoE", ("NNN", "NIG")), ("AutoEP", ("NIG", "III", "IGG")), *deep(("MoE", ("NNN", "NII", "NIG")))],
    ids=by_strategies,
)
def test_few_bits(ranks: Any, kernels: bool, kind: str, names: tuple[str, ...]) -> None:
    """Eight bits are close to what is exact, and four bits of each family are its own."""
    for rows in ranks(4).run(few_bits_case, kind, names):
        for row in rows:
            assert row.replicas_equal and row.weights < 2e-2 and 0 < row.losses < 2e-2, row


@pytest.mark.parametrize("frozen", ["experts", *deep("others")])
def test_a_family_without_anything_trained(ranks: Any, frozen: str) -> None:
    for sharded, whole in ranks(4).run(frozen_case, frozen):
        check(sharded, optimizer="Stage3Optimizer")
        check(whole)


def test_frozen_experts_are_loaded_by_the_ranks_that_have_them(ranks: Any, tmp_path: Path) -> None:
    for lost, refused in ranks(4).run(frozen_load_case, str(tmp_path)):
        assert not lost, lost
        assert not refused or "has frozen experts of AutoEP, such as model.layers.0.mlp.experts.w1" in refused, refused


def frozen_load_case(folder: str) -> tuple[list[str], str]:
    """Names of parameters that a load does not bring back, and why the checkpoint is not converted; experts are
    frozen, of one layer in part."""
    import torch

    from tests.harness import experts, snapshots

    class Network(experts.SmallMixtral):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name, param in self.named_parameters():
                param.requires_grad_(".experts." not in name or name.endswith("1.mlp.experts.down_proj"))

    job = Job(sizes=SIZES, network=Network, config=experts.autoep(2))
    engine, model = training.make_engine(job, training.placed("NIG"))
    engine.save_checkpoint(folder)
    saved = {name: param.detach().clone() for name, param in model.named_parameters()}
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    engine.load_checkpoint(folder)
    lost = [name for name, param in model.named_parameters() if not torch.equal(param, saved[name])]
    engine.destroy()
    return lost, snapshots.error_of(snapshots.convert, folder, ours=True)


def frozen_case(frozen: str) -> tuple[list[Difference], list[Difference]]:
    """Differences from stock where only one family is trained; stock's stage 2 does not take frozen experts."""
    from deepspeed.moe.utils import is_moe_param

    from tests.harness import experts

    class Network(experts.SmallMixtral):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            for name, param in self.named_parameters():
                expert = ".experts." in name or is_moe_param(param)
                param.requires_grad_(expert == (frozen == "others"))

    job = Job(sizes=SIZES, network=Network, zero=PLAIN, config=experts.autoep(2), steps=3)
    strategies = ("INI", "ING", "IGG", "GIG"), ("NIG", "NNI")
    return training.compare(job, 2, strategies[0], stage=3), training.compare(job, 2, strategies[1], stage=3)


MUON = {
    "weights": 1e-4,
    "losses": 1e-5,
}  # iterations make more of what rounding leaves in directions of small gradients
ON_HOST = {"zero": {"offload_optimizer": {"device": "cpu"}}}


@pytest.mark.parametrize(
    "world, ep, group, names, job",
    [
        (6, 2, 2, ("NNN", "NIG"), {"accumulation": 3, "clipping": 0.1, "groups": 2}),
        *deep(*((*shape, REPLICATED, {"accumulation": 3}) for shape in ((4, 1, 2), (4, 2, 2), (4, 4, 2), (8, 2, 4)))),
        *deep((4, 2, 2, REPLICATED, ON_HOST)),
    ],
)
def test_muon(ranks: Any, world: int, ep: int, group: int, names: tuple[str, ...], job: dict[str, Any]) -> None:
    """Each matrix of an expert is orthogonalized by a rank that has it, as in DeepSpeed's stages 1 and 2."""
    rows = run(ranks, ep, {"steps": 3, "optimizer": "Muon", **job}, world, group, strategies=names)
    check(rows, weights=1e-6, losses=1e-5, norms=1e-4)  # the gate has a weight of 100


@pytest.mark.parametrize(
    "world, ep, group, names, job",
    [
        (4, 2, 4, ("NIG", "III", "GNG"), {"accumulation": 3}),
        (4, 2, 2, ("IIG",), {"clipping": 0.1, "groups": 2}),
        *deep(*((*shape, PARTITIONED + REPLICATED, {}) for shape in ((4, 2, 2), (4, 1, 2), (4, 4, 2), (8, 2, 4)))),
        *deep((4, 2, 2, PARTITIONED + REPLICATED, ON_HOST)),
    ],
)
def test_muon_of_autoep(
    ranks: Any, world: int, ep: int, group: int, names: tuple[str, ...], job: dict[str, Any]
) -> None:
    """Packed experts, beside DeepSpeed's stage 3."""
    for rows in ranks(world).run(muon_case, ep, {"steps": 3, **job}, group, names):
        for row, name in zip(rows, names, strict=True):
            check([row], **MUON, optimizer="Stage3Optimizer" if name in PARTITIONED else "Stage12Optimizer")


FP16 = {"weights": 2e-3, "losses": 1e-2, "norms": 4e-3}


@pytest.mark.parametrize(
    "job, bounds",
    [
        ({"dtype": "fp16", "accumulation": 2, "steps": 4, "overflow": [(3, 1)]}, FP16),
        *deep(({"dtype": "bf16", "accumulation": 2, "steps": 3}, BF16)),
    ],
    ids=["fp16", "bf16"],
)
def test_sixteen_bits(ranks: Any, job: dict[str, Any], bounds: dict[str, float]) -> None:
    check(run(ranks, 2, job), **bounds)


@pytest.mark.parametrize(
    "job, bounds",
    [
        ({"dtype": "bf16", "accumulation": 2, "steps": 3}, BF16),
        *deep(({"dtype": "fp16", "accumulation": 2, "steps": 4, "overflow": [(3, 1)], "clipping": 0.0}, FP16)),
    ],
    ids=["bf16", "fp16"],
)
def test_sixteen_bits_of_autoep(ranks: Any, job: dict[str, Any], bounds: dict[str, float]) -> None:
    for rows in ranks(4).run(autoep_case, 2, job, 2, strategies=SOME_PARTITIONED, stage=3):
        check(rows, **bounds, optimizer="Stage3Optimizer")


def test_stock_and_strategies_load_each_others_checkpoints(ranks: Any, tmp_path: Path) -> None:
    """Those with os = G; what does not fit is refused before anything is changed."""
    for rows, refused in ranks(4).run(exchange_case, str(tmp_path)):
        assert len(rows) == 6 and all(rows.values()), rows
        assert "mp_rank_00_model_states.pt is missing. The checkpoint was saved with paro_strategy IIG" in refused[5]
        assert "is a universal checkpoint, in which DeepSpeed has no place for experts of MoE layers (" in refused[0]
        assert "shard the states otherwise" in refused[1], refused
        assert "does not fit the model's experts: of 3 names 3 are missing, unexpected or have another" in refused[2]
        assert "layer_0_expert_" in refused[3] and "is missing" in refused[3], refused
        assert "shard the states otherwise" in refused[4] and "It is not converted either, since Deep" in refused[4]


def exchange_case(folder: str) -> tuple[dict[str, bool], list[str]]:
    """Whether going on is the same from a checkpoint of one's own and from another's; errors of bad loads."""
    from dataclasses import replace
    from pathlib import Path

    from deepspeed import comm as dist

    from tests.harness import experts, networks, snapshots

    found = {}
    routed = Job(sizes=SIZES, network=networks.RoutedOverTwo, optimizer="Adam")
    mixtral = Job(sizes=SIZES, network=experts.SmallMixtral, optimizer="Adam", config=experts.autoep(2))
    for job, saver, loader in (
        (routed, "2", "NIG"),
        (routed, "NIG", "2"),
        (routed, "IIG", "ING"),
        (mixtral, "3", "IIG"),
        (mixtral, "IIG", "3"),
        (replace(routed, optimizer="Muon", groups=2), "2", "NIG"),  # momentum of whole matrices
    ):
        engine, _ = training.make_engine(job, training.placed(saver))
        snapshots.run(engine, job, snapshots.steps_of(job, 2), first=0)
        engine.save_checkpoint(f"{folder}/{saver}")
        losses = snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        engine.destroy()
        engine, _ = training.make_engine(job, training.placed(loader))
        engine.load_checkpoint(f"{folder}/{saver}")
        again = snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        same = all(abs(a - b) < 1e-6 for a, b in zip(losses, again, strict=True))
        found[f"{job.optimizer}, {saver} to {loader}"] = same
        engine.destroy()
        dist.barrier()
    refused = []
    universal = Job(sizes=SIZES, network=networks.RoutedOverTwo, config={"checkpoint": {"load_universal": True}})
    Path(folder, "NIG", "universal", "zero").mkdir(parents=True, exist_ok=True)
    engine, _ = training.make_engine(universal, training.placed("NIG"))
    refused.append(snapshots.error_of(engine.load_checkpoint, f"{folder}/NIG", tag="universal"))
    engine.destroy()
    wider = Job(sizes=SIZES, network=type("", (networks.RoutedOverTwo,), {"more": 3}), optimizer="Adam")
    engine, _ = training.make_engine(routed, training.placed("NII"))
    refused.append(snapshots.error_of(engine.load_checkpoint, f"{folder}/NIG"))
    engine.destroy()
    engine, _ = training.make_engine(wider, training.placed("NIG"))
    refused.append(snapshots.error_of(engine.load_checkpoint, f"{folder}/NIG"))
    engine.destroy()
    engine, _ = training.make_engine(universal, training.placed("NII"))
    unconverted = snapshots.error_of(engine.load_checkpoint, f"{folder}/NIG")
    engine.destroy()
    engine, _ = training.make_engine(routed, training.placed("NIG"))
    sharded = snapshots.error_of(engine.load_checkpoint, f"{folder}/IIG")
    engine.destroy()
    if dist.get_rank() == 0:
        for path in Path(folder, "NIG", "global_step2").glob("layer_0_expert_*"):
            path.unlink()
    dist.barrier()
    engine, _ = training.make_engine(routed, training.placed("NIG"))
    refused.append(snapshots.error_of(engine.load_checkpoint, f"{folder}/NIG"))
    engine.destroy()
    return found, [*refused, unconverted, sharded]


@pytest.mark.parametrize(
    "kind, ep, compressed, optimizer",
    [
        ("MoE", 4, True, "Adam"),
        ("AutoEP", 4, True, "Adam"),
        ("folded", 2, False, "Adam"),
        ("MoE", 2, False, "Muon"),
        *deep(("AutoEP", 2, False, "Muon"), ("folded", 4, True, "Adam")),
        *deep(("MoE", 2, False, "Adam"), ("MoE", 4, False, "Adam")),
        *deep(("MoE", 2, True, "Adam"), ("AutoEP", 2, False, "Adam"), ("AutoEP", 2, True, "Adam")),
        *deep(("AutoEP", 4, False, "Adam")),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(
    ranks: Any, tmp_path: Path, kind: str, ep: int, compressed: bool, optimizer: str
) -> None:
    for rows in ranks(4).run(resume_case, str(tmp_path), ep, compressed, kind, optimizer):
        for name, restored, same_losses, same_weights in rows:
            assert restored and same_losses and same_weights, (name, restored, same_losses, same_weights)
