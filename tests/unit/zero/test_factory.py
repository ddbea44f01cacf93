# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Log lines, warnings, and errors when the engine creates one of our optimizers."""

from types import SimpleNamespace
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

from deepspeed_ext.config.unsupported import UNSUPPORTED, refuse_unsupported
from deepspeed_ext.overrides import _function, list_overrides
from deepspeed_ext.strategy import STRATEGIES, hyphenate
from deepspeed_ext.zero.stage3 import Stage3Optimizer
from deepspeed_ext.zero.stage12 import Stage12Optimizer
from tests.harness.logs import is_ours, logged
from tests.harness.networks import make_partly_frozen
from tests.harness.tiers import with_cases

CPU = {"device": "cpu"}


def initialization_case(zero: dict[str, Any], config: dict[str, Any], memory: int, zero_init: bool) -> list[Any]:
    get_accelerator().total_memory = lambda device_index=None: memory
    with logged() as lines:
        make_partly_frozen(zero, config, zero_init).destroy()
    return [(level, text) for level, text in lines if is_ours(text)]


def kilobytes(name: str, parameters: float, gradients: float, optimizer: float, placed: str = "G") -> float:
    """Return a rank's model states in kB, on 4 ranks in groups of 2, for these states of the full model."""
    shards = {"N": 1, "I": 2, "G": 4}
    p, g, os = (shards[letter] for letter in name)
    more = 1 / shards[placed] - (1 / p if placed == "I" else 0) if shards[placed] < p else 0  # whole ones have shards
    return parameters * (1 / p + more) + gradients / g + optimizer / os


# Keys, bytes on the device in kB of make_partly_frozen's full model (p, g, os; with Adam), and the dtype's sections.
MODELS: dict[str, tuple[dict[str, Any], tuple[float, float, float], dict[str, Any]]] = {
    "fp32": ({}, (40, 24, 72), {}),
    "bf16": ({}, (20, 12, 72), {"bf16": {"enabled": True}}),
    "bf16, fp32 sums": ({}, (20, 24, 72), {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}),
    "optimizer offloaded": ({"offload_optimizer": CPU}, (40, 24, 0), {}),
    "offloaded to nothing": ({"offload_optimizer": {"device": "none"}}, (40, 24, 72), {}),
    "N": ({"paro_modules": {"*": "N"}}, (40, 24, 72), {}),
    "I": ({"paro_modules": {"*": "I"}}, (40, 24, 72), {}),
    "parameters offloaded": ({"offload_param": CPU, "offload_optimizer": CPU}, (0, 24, 0), {}),
}


@with_cases(
    "name, what, zero_init",
    ("NIG", "bf16", False),
    ("NIG", "optimizer offloaded", False),
    ("III", "bf16, fp32 sums", False),
    ("IIG", "fp32", True),
    ("IIG", "offloaded to nothing", False),
    ("IIG", "N", False),
    ("GIG", "I", True),
    ("GGG", "parameters offloaded", True),
)
def test_a_model_that_does_not_fit_gets_one_warning(ranks: Any, name: str, what: str, zero_init: bool) -> None:
    zero, (p, g, os), config = MODELS[what]
    of_modules = what if what in "NI" else "G"
    needed = kilobytes(name, p, g, os, of_modules)
    zero = {**zero, "paro_strategy": name, "paro_group_size": 2}

    fits = ranks(4).run(initialization_case, zero, config, int(4000 * needed), zero_init)
    assert not any(" GB of model states" in text for lines in fits for _, text in lines), fits

    available = needed - 0.25  # of each of the four ranks, which share the machine
    answers = ranks(4).run(initialization_case, zero, config, int(4000 * available), zero_init)
    too_large = " GB of model states"
    warnings = [[text for level, text in lines if level == "WARNING" and too_large in text] for lines in answers]
    assert [len(lines) for lines in warnings] == [1, 0, 0, 0], warnings
    fitting = [hyphenate(row) for row in STRATEGIES if kilobytes(row, p, g, os, of_modules) <= available]
    assert warnings[0][0].removeprefix("[Rank 0] ") == (
        f"deepspeed_ext: zero_optimization.paro_strategy {hyphenate(name)} needs {needed / 1e6:.3g} GB of model "
        f"states on each rank, which has {available / 1e6:.3g} GB (the model's parameters {p / 1e6:.3g} GB, gradients "
        f"{g / 1e6:.3g} GB, and optimizer states {os / 1e6:.3g} GB, over 4 ranks in groups of 2). Strategies that "
        f"fit: {', '.join(fitting) or 'none'}."
    )


@with_cases(
    "name, group, meaning",
    ("NIG", 2, None),
    ("NIG", 4, "one group, so N-I-G is ZeRO-2 here"),
    ("IIG", 1, "groups of one rank, so I-I-G is ZeRO-1 here"),
    ("INI", 4, "one group, so I-N-I is G-N-G here"),
    ("GNG", 1, "groups of one rank"),
)
def test_one_warning_names_the_strategy_and_groups(ranks: Any, name: str, group: int, meaning: str | None) -> None:
    p, g, os = name
    zero = {"stage": STRATEGIES[name].stage, "paro_strategy": name, "paro_group_size": group}
    answers = ranks(4).run(initialization_case, zero, {}, 10**9, False)
    assert [len(lines) for lines in answers] == [1, 0, 0, 0], answers
    (level, line), *_ = answers[0]
    assert level == "WARNING"  # levels that DeepSpeed shows
    summary = f"{hyphenate(name)} (p={p}, g={g}, os={os}; stage {STRATEGIES[name].stage}) over 4 data-parallel ranks"
    assert f"{summary} in {4 // group} group(s) of {group}" in line
    assert line.endswith(f": {meaning} (zero_optimization.paro_group_size is {group})" if meaning else f"of {group}")


@pytest.mark.parametrize("group", [2, 4])
def test_the_log_says_if_loco_compresses_nothing(ranks: Any, kernels: bool, group: int) -> None:
    zero = {"stage": 2, "zeropp_loco_param": {}, "paro_strategy": "NIG", "paro_group_size": group}
    lines, *other_ranks = ranks(4).run(initialization_case, zero, {}, 10**9, False)
    warnings = [line for level, line in lines if level == "WARNING"]
    assert len(warnings) == 1 and not any(other_ranks)
    assert ("there are no messages between groups to compress" in warnings[0]) == (group == 4)


NIG, IIG = ({"paro_strategy": name, "paro_group_size": 2} for name in ("NIG", "IIG"))

# Ranks, the model or optimizer, keys, the message, and alternatives that work.
REFUSED: list[tuple[int, str, dict[str, Any], str, list[tuple[str, dict[str, Any]]]]] = [
    (
        4,
        "frozen moe",
        {**IIG, "stage3_leaf_bytes": 99},
        "the model has DeepSpeed MoE layers, and frozen experts, such as "
        "moe.deepspeed_moe.experts.deepspeed_experts.0.weight, are in no rank's shard. Remove paro_strategy and "
        "paro_group_size and stage3_leaf_bytes, and set zero_optimization.stage to 1 or 2; strategies with p = N do "
        "not shard experts.",
        [("frozen moe", {"stage": 1}), ("moe", IIG)],
    ),
    (
        2,
        "NorMuon",
        NIG,
        "NorMuon needs whole matrices, but a rank has shards of them. Use DeepSpeed's: set optimizer.type to Muon, "
        "or pass MuonWithAuxAdam of deepspeed.runtime.zero.muon.muon_optimizer to deepspeed.initialize.",
        [("DeepSpeed's", IIG)],
    ),
    (
        2,
        "a bias",
        IIG,
        "Muon orthogonalizes matrices, and a parameter group with use_muon true has the parameter bias of shape "
        "(4,). Move it to a parameter group with use_muon false.",
        [],
    ),
    (
        2,
        "zero.Init",
        NIG,
        "it replicates parameters, but the model was built under deepspeed.zero.Init, which has sharded weight. "
        "Build the model without zero.Init, or set paro_strategy to one with p = I or G.",
        [("zero.Init", IIG)],
    ),
    (
        2,
        "mixed dtypes",
        IIG,
        "ZeRO-3 keeps all trained parameters in one buffer of one dtype, but the optimizer has 0.weight in "
        "torch.bfloat16 and 1.weight in torch.float32. Convert the model to one dtype, or set paro_strategy to one "
        "with p = N.",
        [("mixed, frozen", IIG), ("mixed dtypes", NIG)],
    ),
]


@pytest.mark.parametrize("n, what, zero, why, allowed", REFUSED, ids=[what for _, what, *_ in REFUSED])
def test_models_and_optimizers_are_refused_with_advice(
    ranks: Any, n: int, what: str, zero: dict[str, Any], why: str, allowed: list[tuple[str, dict[str, Any]]]
) -> None:
    for error in ranks(n).run_expect_error(unsupported_case, what, zero):
        assert error.type == "ValueError", error
        prefix = f"zero_optimization.paro_strategy {hyphenate(zero['paro_strategy'])} is not supported here: "
        assert error.message == prefix + why
    for other in allowed:
        ranks(n).run(unsupported_case, *other)


def test_experts_that_groups_divide_unevenly_are_refused(ranks: Any) -> None:
    for error in ranks(6).run_expect_error(unsupported_case, "moe", {"paro_strategy": "NIG", "paro_group_size": 3}):
        assert error.type == "ValueError", error
        assert "ranks with the same experts are spread unevenly: groups have [" in error.message, error
        assert "to a multiple or a divisor of the expert-parallel size, 2, if" in error.message, error


@pytest.mark.parametrize("folded", [{"_autoep_folding_spec": SimpleNamespace(tp_size=2, ep_size=4)}, {}])
def test_experts_folded_across_groups_are_refused(folded: dict[str, Any]) -> None:
    refuse_unsupported(UNSUPPORTED[:1], STRATEGIES["NIG"], SimpleNamespace(**folded), None)
    engine = SimpleNamespace(_autoep_folding_spec=SimpleNamespace(tp_size=4, ep_size=2))
    advice = r"into 4 tensor-parallel ranks with autoep_size 2, .* to a multiple of tensor_parallel.autotp_size\."
    with pytest.raises(ValueError, match=advice):
        refuse_unsupported(UNSUPPORTED[:1], STRATEGIES["NIG"], engine, None)


def test_a_compiled_model_is_refused_if_it_is_sharded(ranks: Any) -> None:
    for compiled in ("all of it", "a part"):
        for error in ranks(2).run_expect_error(compiled_case, "IIG", compiled):
            assert error.type == "ValueError", error
            assert "I-I-G is not supported here: the model was compiled with torch.compile" in error.message
            assert error.message.endswith("and call engine.compile() after it.")
    for name, how in (("NIG", "a part"), ("IIG", "afterwards")):
        assert ranks(2).run(compiled_case, name, how) == [True] * 2


def compiled_case(name: str, compiled: str) -> bool:
    """Whether a model that is compiled before or after initialization completes a step."""
    model: Any = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    if compiled == "all of it":
        model = torch.compile(model, backend="eager")
    elif compiled == "a part":
        model[1] = torch.compile(model[1], backend="eager")
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"paro_strategy": name, "paro_group_size": 2},
        "zero_allow_untested_optimizer": True,
    }
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    if compiled == "afterwards":
        engine.compile(backend="eager")
    engine.backward(engine(torch.ones(1, 3)).sum())
    engine.step()
    return bool(engine.was_step_applied())


def unsupported_case(feature: str, zero: dict[str, Any]) -> None:
    """Initialize with a model or an optimizer that the configuration does not show."""

    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(4, torch.nn.Linear(4, 4), num_experts=4, ep_size=2)

    with deepspeed.zero.Init(enabled=feature == "zero.Init", dtype=torch.float32):
        model: torch.nn.Module = torch.nn.Linear(4, 4)
    if feature.startswith("mixed"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.bfloat16), model)
        model[0].requires_grad_(feature == "mixed dtypes")
    if feature in ("moe", "frozen moe"):
        model = Expert()
        for param in model.moe.deepspeed_moe.experts.deepspeed_experts[0].parameters():  # type: ignore[union-attr]
            param.requires_grad_(feature == "moe")
    parameters: Any = [param for param in model.parameters() if param.requires_grad]
    groups = split_params_into_different_moe_groups_for_optimizer({"params": parameters, "name": "all"})
    matrices = parameters if feature == "a bias" else parameters[:1]
    optimizer: Any = {
        "moe": lambda: torch.optim.Adam(groups),
        "frozen moe": lambda: torch.optim.Adam(groups),
        "mixed dtypes": lambda: torch.optim.SGD(parameters),
        "NorMuon": lambda: type(feature, (torch.optim.SGD,), {})(parameters, lr=0.1),
    }.get(feature, lambda: MuonWithAuxAdam([{"params": matrices, "use_muon": True}]))()
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "zero_allow_untested_optimizer": True}
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)


@pytest.mark.quick
@pytest.mark.parametrize("name", ["NIG", "IIG"])
def test_patched_methods_of_the_optimizer_are_refused(ranks: Any, name: str) -> None:
    for error in ranks(1).run_expect_error(replaced_case, name):
        assert error.type == "ValueError" and f"{hyphenate(name)} overrides " in error.message, error.message
        assert "which other.code has replaced" in error.message and "lora_fp32_gradients" in error.message


def replaced_case(name: str) -> None:
    cls = Stage12Optimizer if name == "NIG" else Stage3Optimizer
    parent, method = next(
        (parent, method)
        for parent, method, member in list_overrides(cls)
        if callable(member) and "__class__" not in _function(member).__code__.co_freevars
    )

    def replacement(*args: Any, **kwargs: Any) -> None:
        """Replacement of the method."""

    replacement.__module__ = "other.code"
    with mock.patch.object(parent, method, replacement):
        make_partly_frozen({"paro_strategy": name, "paro_group_size": 1}, {}, False)
