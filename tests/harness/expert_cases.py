# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings of DeepSpeed's MoE layers and AutoEP's experts, beside its own stages; runs inside rank processes."""

from collections.abc import Sequence
from typing import Any

import torch
from deepspeed import comm as dist

from tests.harness import experts, networks, snapshots, training
from tests.harness.training import SEVERAL_BUCKETS, Difference, Job

SIZES = (13, 10, 10, 7)
PLAIN = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "stage3_param_persistence_threshold": 0}


def routed_case(ep: int, job: dict[str, Any], group: int, **kwargs: Any) -> list[Difference]:
    """Train a mixture with experts on ``ep`` ranks."""
    network = {1: networks.Routed, 2: networks.RoutedOverTwo, 4: networks.RoutedOverFour}[ep]
    made = {"sizes": SIZES, "network": network, **job, "zero": {**SEVERAL_BUCKETS, **job.get("zero", {})}}
    return training.compare(Job(**made), group, **kwargs)


def autoep_case(ep: int, job: dict[str, Any], group: int, **kwargs: Any) -> list[Difference]:
    """Train a model of transformers with experts that DeepSpeed puts on ``ep`` ranks."""
    zero = {**PLAIN, "sub_group_size": 400}  # several of a family, some of them of one parameter
    job = {"sizes": SIZES, "network": experts.SmallMixtral, "zero": zero, "config": experts.autoep(ep), **job}
    return training.compare(Job(**job), group, **kwargs)


def folded_case(ep: int, group: int, accumulation: int, names: tuple[str, ...]) -> list[Difference]:
    """Train a mixture whose attention is cut over two ranks."""
    zero = {"overlap_comm": True} if accumulation > 1 else {}
    job = {
        "network": experts.PairedMixtral,
        "config": experts.folded(ep),
        "clipping": 0.1,
        "zero": {**PLAIN, **zero, "sub_group_size": 400},
    }
    return autoep_case(ep, {"accumulation": accumulation, "steps": 3, **job}, group, strategies=names, stage=3)


def few_bits_case(kind: str, names: tuple[str, ...]) -> list[Difference]:
    """Differences of runs in few bits from those without."""
    config = {} if kind == "MoE" else experts.autoep(2)
    network: Any = networks.RoutedOverTwo if kind == "MoE" else experts.SmallMixtral
    made = Job(sizes=SIZES, network=network, config=config, accumulation=2, steps=3)
    bits = {"zeropp_loco_param": {"bits": 8}, "paro_quantized_updates": {"bits": 8}}
    rows = []
    for name in names:
        plain, coded = (training.train(made, training.placed(name, **more)) for more in ({}, bits))
        rows.append(training.difference(name, coded, plain, ""))
    return rows


def muon_case(ep: int, job: dict[str, Any], group: int, names: tuple[str, ...]) -> list[Difference]:
    """Differences from stage 3, which all-reduces gradients for Muon."""
    zero = {**PLAIN, "sub_group_size": 400, **job.pop("zero", {})}
    made = Job(
        sizes=SIZES, network=experts.SmallMixtral, optimizer="Muon", zero=zero, config=experts.autoep(ep), **job
    )
    variants = [training.placed(name, group) for name in names]
    return training.against(made, variants, {"stage": 3, "reduce_scatter": False})


def resume_case(
    folder: str, ep: int, compressed: bool, kind: str, optimizer: str, names: Sequence[str]
) -> list[tuple[str, bool, bool, bool]]:
    """Whether a load brings back this rank's weights and states, and going on is what it was, to the bit."""
    if kind == "MoE":
        network = {2: networks.RoutedOverTwo, 4: networks.RoutedOverFour}[ep]
        job = Job(sizes=SIZES, network=network, optimizer=optimizer, groups=2, zero=SEVERAL_BUCKETS)
    else:
        network, keys = {
            "AutoEP": (experts.SmallMixtral, experts.autoep),
            "folded": (experts.PairedMixtral, experts.folded),
        }[kind]
        job = Job(sizes=SIZES, network=network, optimizer=optimizer, zero=PLAIN, config=keys(ep))
    few_bits: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}} if compressed else {}
    rows = []
    for name in names:
        zero = training.placed(name, 1 if kind == "folded" else 2, **few_bits)

        def held(engine: Any, model: Any) -> list[Any]:
            optimizer, params = engine.optimizer, [getattr(p, "ds_tensor", p) for p in model.parameters()]
            if optimizer.strategy.stage == 3:
                optimizer.drain_parameters()
            kinds = ("exp_avg", "exp_avg_sq", "momentum_buffer")
            states = [state[key] for state in optimizer.optimizer.state.values() for key in kinds if key in state]
            stage3 = hasattr(optimizer, "fp32_partitioned_groups_flat")
            kept = optimizer.fp32_partitioned_groups_flat if stage3 else optimizer.single_partition_of_fp32_groups
            return [tensor.detach().clone() for tensor in (*params, *kept, *states)]

        engine, model = training.make_engine(job, zero)
        snapshots.run(engine, job, snapshots.steps_of(job, 2), first=0)
        engine.save_checkpoint(f"{folder}/{name}")
        saved = held(engine, model)
        losses = snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        whole = held(engine, model)
        engine.destroy()

        engine, model = training.make_engine(job, zero)
        snapshots.run(engine, job, snapshots.steps_of(job, 1, skip=7))  # something to be overwritten
        engine.load_checkpoint(f"{folder}/{name}")
        restored = all(map(torch.equal, saved, held(engine, model)))
        again = snapshots.run(engine, job, snapshots.steps_of(job, 2, skip=2))
        rows.append((name, restored, again == losses, all(map(torch.equal, whole, held(engine, model)))))
        engine.destroy()
        dist.barrier()
    return rows
