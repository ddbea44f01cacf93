# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What is said and refused when the engine makes an optimizer of ours."""

from typing import Any

import pytest
from logs import is_ours, logged

from deepspeed_ext.placement import STRATEGIES

CPU = {"device": "cpu"}


def make_engine(zero: dict[str, Any], config: dict[str, Any], zero_init: bool = False) -> Any:
    """An engine of a layer of 6000 parameters, and one of 4000 that is frozen."""
    import deepspeed
    import torch

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": zero,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        **config,
    }
    with deepspeed.zero.Init(config_dict_or_path=settings, enabled=zero_init):
        model = torch.nn.Sequential(torch.nn.Linear(100, 60, bias=False), torch.nn.Linear(80, 50, bias=False))
    model[1].requires_grad_(False)
    parameters = [p for p in model.parameters() if p.requires_grad]
    engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, config=settings)
    return engine


def initialization_case(zero: dict[str, Any], config: dict[str, Any], memory: int, zero_init: bool) -> list[Any]:
    """Our lines of the log of an initialization where the machine has so many bytes."""
    from deepspeed.accelerator import get_accelerator

    get_accelerator().total_memory = lambda device_index=None: memory
    with logged() as lines:
        make_engine(zero, config, zero_init).destroy()
    return [(level, text) for level, text in lines if is_ours(text)]


def kilobytes(name: str, parameters: float, gradients: float, optimizer: float) -> float:
    """Model states of a rank in kB, on 4 ranks in groups of 2; the three are those of the whole model."""
    shards = {"N": 1, "I": 2, "G": 4}
    p, g, os = (shards[letter] for letter in name)
    return parameters / p + gradients / g + optimizer / os


# Keys, what the whole model of make_engine has on the device in kB (p, g, os; with Adam), and the dtype's sections.
MODELS: dict[str, tuple[dict[str, Any], tuple[float, float, float], dict[str, Any]]] = {
    "fp32": ({}, (40, 24, 72), {}),
    "bf16": ({}, (20, 12, 72), {"bf16": {"enabled": True}}),
    "bf16, fp32 sums": (
        {},
        (20, 24, 72),
        {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    "optimizer offloaded": ({"offload_optimizer": CPU}, (40, 24, 0), {}),
    "offloaded to nothing": ({"offload_optimizer": {"device": "none"}}, (40, 24, 72), {}),
    "parameters offloaded": ({"offload_param": CPU, "offload_optimizer": CPU}, (0, 24, 0), {}),
}


@pytest.mark.parametrize(
    "name, what, zero_init",
    [
        ("NIG", "fp32", False),
        ("NIG", "bf16", False),
        ("NIG", "optimizer offloaded", False),
        ("III", "bf16, fp32 sums", False),
        ("III", "parameters offloaded", False),
        ("IIG", "fp32", False),
        ("IIG", "fp32", True),
        ("IIG", "bf16", True),
        ("IIG", "optimizer offloaded", True),
        ("IIG", "offloaded to nothing", False),
        ("GGG", "bf16", False),
        ("GGG", "parameters offloaded", True),
    ],
)
def test_a_model_that_does_not_fit_gets_one_warning(ranks: Any, name: str, what: str, zero_init: bool) -> None:
    zero, (p, g, os), config = MODELS[what]
    needed = kilobytes(name, p, g, os)
    zero = {**zero, "paro_strategy": name, "paro_group_size": 2}

    fits = ranks(4).run(initialization_case, zero, config, int(4000 * needed), zero_init)
    assert not any("WARNING" in level for lines in fits for level, _ in lines), fits

    available = needed - 0.25  # of each of the four ranks, which share the machine
    answers = ranks(4).run(initialization_case, zero, config, int(4000 * available), zero_init)
    warnings = [[text for level, text in lines if level == "WARNING"] for lines in answers]
    assert [len(lines) for lines in warnings] == [1, 0, 0, 0], warnings
    others = [row for row in STRATEGIES if kilobytes(row, p, g, os) <= available]
    assert warnings[0][0].removeprefix("[Rank 0] ") == (
        f"deepspeed_ext: zero_optimization.paro_strategy {name} needs {needed / 1e6:.3g} GB of model states on each "
        f"rank, which has {available / 1e6:.3g} GB (the model's parameters {p / 1e6:.3g} GB, gradients "
        f"{g / 1e6:.3g} GB and optimizer states {os / 1e6:.3g} GB, over 4 ranks in groups of 2). Strategies that "
        f"fit: {', '.join(others) or 'none'}."
    )


@pytest.mark.parametrize("name", ["INI", "IIG", "GNG", "GGG"])
@pytest.mark.parametrize("group, words", [(2, None), (4, "so I means G"), (1, "so I means N")])
def test_one_line_says_what_runs(ranks: Any, name: str, group: int, words: str | None) -> None:
    p, g, os = name
    zero = {"paro_strategy": name, "paro_group_size": group}
    for rank, lines in enumerate(ranks(4).run(initialization_case, zero, {}, 10**9, False)):
        assert len(lines) == (0 if rank else 1 if words is None else 2), lines
        if rank == 0:
            assert all(level == "INFO" for level, _ in lines), lines
            first = f"{name} (p={p}, g={g}, os={os}; stage 3) over 4 data-parallel ranks in {4 // group} group(s) of"
            assert f"{first} {group}" in lines[0][1]
            assert words is None or words in lines[1][1]


UNSUPPORTED = {
    "moe": "the model has DeepSpeed MoE layers, whose experts are not data-parallel",
    "muon": "MuonWithAuxAdam needs whole gradients where its state is",
}


@pytest.mark.parametrize("name", ["NIG", "IIG", "GGG"])
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_models_and_optimizers_that_no_strategy_supports(ranks: Any, what: str, name: str) -> None:
    for error in ranks(4).run_expect_error(unsupported_case, what, name):
        assert error.type == "ValueError", error
        assert error.message == (
            f"zero_optimization.paro_strategy {name} is not supported here: {UNSUPPORTED[what]}. Remove paro_strategy."
        )


def unsupported_case(what: str, name: str) -> None:
    """Initialize with a model or an optimizer that the configuration says nothing of."""
    import deepspeed
    import torch
    from deepspeed.moe.layer import MoE
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    class Expert(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.moe = MoE(4, torch.nn.Linear(4, 4), num_experts=4, ep_size=2)

    model: torch.nn.Module = torch.nn.Linear(4, 4)
    if what == "moe":
        model = Expert()
    parameters: Any = list(model.parameters())
    optimizer: Any = torch.optim.Adam(parameters)
    if what == "muon":
        optimizer = MuonWithAuxAdam([{"params": parameters[:1], "use_muon": True}])
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"paro_strategy": name, "paro_group_size": 2},
        "zero_allow_untested_optimizer": True,
    }
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)
