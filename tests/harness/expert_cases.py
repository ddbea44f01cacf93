# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Trainings of DeepSpeed's MoE layers and AutoEP's experts, compared with its stages; runs inside rank processes."""

from collections.abc import Sequence
from typing import Any

from tests.harness import experts, networks, snapshots, training

SIZES = (13, 10, 10, 7)
PLAIN = {"reduce_bucket_size": 3000, "allgather_bucket_size": 3000, "stage3_param_persistence_threshold": 0}
SUB_GROUPS = {**PLAIN, "sub_group_size": 400}  # several of a family, some of them of one parameter


def job_of(kind: str, ep: int, **details: Any) -> training.Job:
    """Return a job with four experts over ``ep`` ranks: of DeepSpeed's layers ("MoE"), of a model of transformers
    ("AutoEP"), or of one whose attention is divided by AutoTP over two ranks, too ("folded")."""
    over = {1: networks.Routed, 2: networks.RoutedOverTwo, 4: networks.RoutedOverFour}
    network, config, zero = {
        "MoE": (over[ep], {}, training.SEVERAL_BUCKETS),
        "AutoEP": (experts.SmallMixtral, experts.autoep(ep), SUB_GROUPS),
        "folded": (experts.PairedMixtral, experts.folded(ep), SUB_GROUPS),
    }[kind]
    zero = {**zero, **details.pop("zero", {})}
    return training.Job(**{"sizes": SIZES, "network": network, "config": config, **details, "zero": zero})


def routed_case(ep: int, job: dict[str, Any], group: int, **kwargs: Any) -> list[training.Difference]:
    return training.compare(job_of("MoE", ep, **job), group, **kwargs)


def autoep_case(ep: int, job: dict[str, Any], group: int, **kwargs: Any) -> list[training.Difference]:
    return training.compare(job_of("AutoEP", ep, **job), group, **kwargs)


def folded_case(ep: int, group: int, accumulation: int, names: tuple[str, ...]) -> list[training.Difference]:
    zero = {"overlap_comm": True} if accumulation > 1 else {}
    job = job_of("folded", ep, accumulation=accumulation, clipping=0.1, zero=zero)
    return training.compare(job, group, names, stage=3)


def few_bits_case(kind: str, names: tuple[str, ...]) -> list[training.Difference]:
    """Differences of runs in few bits from those without."""
    job = job_of(kind, 2, accumulation=2)
    bits = {"zeropp_loco_param": {"bits": 8}, "paro_quantized_updates": {"bits": 8}}
    rows = []
    for name in names:
        plain, coded = (training.train(job, training.placed(name, **more)) for more in ({}, bits))
        rows.append(training.difference(name, coded, plain, ""))
    return rows


def muon_case(ep: int, job: dict[str, Any], group: int, names: tuple[str, ...]) -> list[training.Difference]:
    """Differences from stage 3, which all-reduces gradients for Muon."""
    variants = [training.placed(name, group) for name in names]
    muon = job_of("AutoEP", ep, optimizer="Muon", **job)
    return training.against(muon, variants, {"stage": 3, "reduce_scatter": False})


def resume_case(
    folder: str, ep: int, compressed: bool, kind: str, optimizer: str, names: Sequence[str]
) -> list[tuple[str, dict[str, float], dict[str, float]]]:
    """Return differences after a load, and after further steps; see ``snapshots.resume``."""
    job = job_of(kind, ep, optimizer=optimizer, groups=2 if kind == "MoE" else 1)
    few_bits: dict[str, Any] = {"zeropp_loco_param": {}, "paro_quantized_updates": {}} if compressed else {}
    rows = []
    for name in names:
        keys = training.placed(name, 1 if kind == "folded" else 2, **few_bits)
        results = snapshots.resume(f"{folder}/{name}", job, keys, 1, 2)[1:]
        # Tokens that this rank has sent are not saved.
        rows.append((name, *({k: v for k, v in each.items() if "tokens_per_expert" not in k} for each in results)))
    return rows
