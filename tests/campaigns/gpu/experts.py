# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks of experiment T13: DeepSpeed's MoE layers and AutoEP's experts on a GPU, compared with DeepSpeed's own
stages. AutoEP's products of several experts are kernels for bf16 on such a GPU, and plain products in fp32."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tests.campaigns.gpu.one_by_one import Case, run_cases
from tests.campaigns.gpu.order import spoiled_memory
from tests.campaigns.gpu.ranks import GROUP, within
from tests.harness.expert_cases import autoep_case, few_bits_case, folded_case, muon_case, resume_case, routed_case
from tests.harness.snapshots import shared_folder
from tests.harness.training import PARTITIONED, REPLICATED, Difference

TWO_STEPS = {"accumulation": 2, "steps": 3}
ADAM = {**TWO_STEPS, "optimizer": "Adam", "groups": 2}
SHARDED = {**ADAM, "zero": {"stage3_param_persistence_threshold": 0, "sub_group_size": 400}}
WITH_MUON = {**TWO_STEPS, "optimizer": "Muon"}
ON_HOST = {**ADAM, "zero": {"offload_optimizer": {"device": "cpu"}}}
IN_BF16 = {**TWO_STEPS, "dtype": "bf16"}
# Tokens of an expert are added up in any order. Without a gradient weights would move by 1e-2, and norms by more.
FP32 = {"weights": 1e-5, "losses": 5e-6, "norms": 2e-5}
BF16 = {"weights": 4e-3, "losses": 1e-2, "norms": 1e-2}
# Muon's iterations are in bf16: what rounding leaves in directions of small gradients grows. A step without them, or
# with another one's matrix, moves weights by 2e-2. Those of MoE layers are relative to a gate's weight of 100.
MUON = {"weights": 1e-4, "losses": 1e-3, "norms": 1e-3}
MUON_OF_AUTOEP = {"weights": 4e-3, "losses": 1e-2, "norms": 1e-2}
EIGHT_BITS = 2e-2
SPLIT = ("IIG", "GNG")  # parameters, in groups and over all


def experts(setup: Any) -> None:
    """T13: train models with experts, compare with DeepSpeed's stages, resume, and send gradients in few bits."""
    replicated, partitioned = (names[-1:] if setup.small else names for names in (REPLICATED, PARTITIONED))
    stage2 = {"strategies": replicated, "stage": 2}
    stage3 = {"strategies": partitioned, "stage": 3}
    beside_stage2 = {**stage3, "stage": 2}  # DeepSpeed's stage 3 refuses MoE layers
    created = [
        _beside("MoE layers", routed_case, (2, TWO_STEPS, GROUP), stage2, FP32),
        _beside("MoE layers, parameters sharded", routed_case, (2, SHARDED, GROUP), beside_stage2, FP32),
        _beside("AutoEP", autoep_case, (2, TWO_STEPS, GROUP), stage2, FP32),
        _beside("AutoEP, parameters sharded", autoep_case, (2, TWO_STEPS, GROUP), stage3, FP32),
    ]
    run_cases(setup, created if setup.small else sorted([*created, *_others()], key=_order))


def _order(case: Case) -> tuple[bool, bool, bool]:
    """Return what AutoEP comes last by, and of it what torch may have no product for, or DeepSpeed does not undo."""
    name = case.name  # DeepSpeed keeps the tensor-parallel ranks of a process for good
    return "AutoEP" in name, "AutoTP" in name, "bf16" not in name


def _others() -> list[Case]:
    few, on_host = {"strategies": SPLIT, "stage": 3}, {"strategies": ("NIG", "NII")}
    families = [("MoE", "NIG", "IIG"), ("AutoEP", "NIG", "III")]
    return [
        _beside("AutoEP in bf16", autoep_case, (2, IN_BF16, GROUP), few, BF16),
        _beside("MoE layers over four ranks", routed_case, (4, IN_BF16, GROUP), {}, BF16),
        _beside("MoE layers, optimizer on the host", routed_case, (2, ON_HOST, GROUP), on_host, FP32),
        _beside("MoE layers, Muon", routed_case, (2, WITH_MUON, GROUP), {"strategies": ("NNN", "NIG")}, MUON),
        _beside("AutoEP, Muon", muon_case, (2, TWO_STEPS, GROUP, ("NIG", "III")), {}, MUON_OF_AUTOEP),
        *(
            Case(f"{kind}, {optimizer}, resumed", partial(_resumed, kind=kind, optimizer=optimizer, names=names))
            for kind, *names in families
            for optimizer in ("Adam", "Muon")
        ),
        *(Case(f"{kind} in eight bits", partial(_few_bits, kind=kind, names=names), 150) for kind, *names in families),
        _beside("AutoEP beside AutoTP", folded_case, (2, 1, 3, ("NIG", "IGG")), {}, FP32),
    ]


def _beside(
    title: str, train: Callable[..., Any], given: tuple[Any, ...], more: dict[str, Any], bounds: dict[str, float]
) -> Case:
    return Case(title, partial(_compared, train=train, given=given, more=more, bounds=bounds))


def _compared(setup: Any, train: Callable[..., list[Difference]], given: Any, more: Any, bounds: Any) -> None:
    rows = train(*given, **more)
    for row in rows:
        setup.report.check(row.strategy, within(row, bounds))
    setup.report.figure("differences", {row.strategy: [row.weights, row.losses, row.norms] for row in rows})


def _resumed(setup: Any, kind: str, optimizer: str, names: Sequence[str]) -> None:
    # Sums over tokens are in any order on a GPU otherwise, so that no two runs would be alike.
    with shared_folder() as folder, spoiled_memory():
        rows = resume_case(folder, 2, False, kind, optimizer, names)
    for name, loaded, resumed in rows:
        setup.report.check(f"{name}: a load restores all", not loaded)
        setup.report.check(f"{name}: resumed is uninterrupted", not resumed)


def _few_bits(setup: Any, kind: str, names: Sequence[str]) -> None:
    for row in few_bits_case(kind, tuple(names)):
        setup.report.figure(row.strategy, [row.weights, row.losses])
        near = row.weights < EIGHT_BITS and 0 < row.losses < EIGHT_BITS
        setup.report.check(row.strategy, row.replicas_equal and near)
