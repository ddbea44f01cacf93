# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Choice of units: flags, hooks, the report, and refused configurations."""

import contextlib
import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.utils import set_z3_leaf_modules, unset_z3_leaf_modules
from torch import Tensor, nn

from deepspeed_ext.__main__ import main
from deepspeed_ext.config.section import parse_section
from deepspeed_ext.leaf import modules
from deepspeed_ext.leaf.modules import LeafKind, Settings, choose, default_budget, default_settings, set_leaves
from deepspeed_ext.leaf.setup import LiveLimits, choice_table, hooks, predicted_live, settings_and_live
from tests.harness import mixtures, training
from tests.harness.logs import is_ours, logged
from tests.harness.snapshots import error_of
from tests.harness.tiers import since, with_cases

LIVE = 10**9
# Of mixtures.Mixtures, as DeepSpeed counts: parameters / (1 + modules inside that have parameters, lists left out).
GRANULARITY = {"Mixtures": 85, "Stem": 93, "Layer": 84, "Mixer": 60, "MixtureOfExperts": 94, "Expert": 103}
HOOKS = 252  # on all of its modules
INSIDE = {"Stem": 2, "Layer": 27, "Mixer": 3, "MixtureOfExperts": 22, "Expert": 4}  # modules in one of each


def chosen(name: str, budget: int | None, threshold: int = 0, most: int = LIVE, change: str = "") -> dict[str, Any]:
    """Return for each kind the names of modules, the hooks before and after, and the report."""
    model = getattr(mixtures, name)((13, 7))
    if change == "set":
        set_z3_leaf_modules(model, [mixtures.MixtureOfExperts])
    if change == "unset":
        unset_z3_leaf_modules(model, [mixtures.Layer])
    settings = Settings(budget, threshold, most)
    choices = choose(model, settings)
    kinds: dict[str, list[str]] = {}
    for choice in choices:
        kinds.setdefault(choice.kind.value, []).append(choice.name)
    chunks = [[len(chunk) for chunk in choice.chunks] for choice in choices if choice.chunks]
    set_leaves(choices)
    return {
        **kinds,
        "classes": sorted({type(choice.module).__name__ for choice in choices if choice.kind.value == "coarse"}),
        "chunks": chunks,
        "flagged": [key for key, module in model.named_modules() if getattr(module, "_z3_leaf", False)],
        "hooks": hooks(choices, model),
        "granularity": {type(choice.module).__name__: choice.granularity for choice in choices if choice.granularity},
        "text": choice_table(choices, model, settings, LiveLimits(LIVE, 0, 0, 0)),
    }


def test_granularity_matches_deepspeed() -> None:
    assert chosen("Mixtures", None, 1)["granularity"] == GRANULARITY


@with_cases(
    "threshold, classes",
    (1, []),
    (59, []),
    (60, ["Mixer"]),
    (61, ["Mixer"]),
    (83, ["Mixer"]),
    (84, ["Layer"]),
    (92, ["Layer"]),
    (93, ["Layer", "Stem"]),
    (10**12, ["Layer", "Stem"]),  # never the root, although its 85 qualifies as well
)
def test_threshold_chooses_parents_first_but_not_the_root(threshold: int, classes: list[str]) -> None:
    result = chosen("Mixtures", None, threshold)
    counts = {"Stem": 1, "Layer": 2, "Mixer": 2}
    assert result["classes"] == classes
    assert result["hooks"] == (HOOKS, HOOKS - 4 * sum(counts[name] * INSIDE[name] for name in classes))
    assert len(result["flagged"]) == sum(counts[name] for name in classes)


def test_one_fp32_parameter_does_not_double_the_default_budget() -> None:
    assert default_budget(nn.Linear(3, 3), LIVE) == default_budget(nn.Tanh(), LIVE) == 3 * 4 * LIVE
    mixed = nn.Sequential(nn.Linear(100, 100, dtype=torch.bfloat16), nn.Linear(10, 1))
    assert 3 * 2 * LIVE < default_budget(mixed, LIVE) < 1.01 * 3 * 2 * LIVE


def test_units_without_a_key() -> None:
    """They have at most a quarter of stage3_max_live_parameters, and no experts; other leaf modules turn them off."""
    model = mixtures.Mixtures((13, 7))  # a stem has 280 parameters, a mixer 240
    for live, classes in ((LIVE, ["Mixer", "Stem"]), (4 * 280 - 1, ["Mixer"]), (4 * 240 - 1, [])):
        choices = choose(model, default_settings(model, live))
        assert sorted({type(choice.module).__name__ for choice in choices if choice.kind == LeafKind.UNIT}) == classes
        assert not any(choice.chunks or choice.windows for choice in choices)
    assert settings_and_live(parse_section({"paro_strategy": "GGG"}), model)[0].is_default
    for key in ({"leaf_module": {}}, {"stage3_module_granularity_threshold": 5}, {"stage3_leaf_bytes": 0}):
        assert settings_and_live(parse_section({"paro_strategy": "GGG", **key}), model)[0].budget is None, key
    set_z3_leaf_modules(model, [mixtures.Mixer])
    assert settings_and_live(parse_section({"paro_strategy": "GGG"}), model)[0].budget is None


class ExpertLayer(mixtures.Layer):
    """A layer with a class name that a mixture could have."""


def test_a_parent_of_a_mixture_is_none() -> None:
    model = nn.ModuleDict({"body": mixtures.Mixtures((13, 7))})
    model["body"].first = ExpertLayer(mixtures.MixtureOfExperts(13, 2))
    choices = {choice.name: choice for choice in choose(model, Settings(10**12, 0, LIVE))}
    assert choices["body"].why == "it contains a stack of layers" and not choices["body.first"].why


def test_max_live_parameters_caps_units() -> None:
    # A layer has 1936 parameters, its mixture 1696, an expert 413.
    assert chosen("Mixtures", None, 10**12, 1936)["classes"] == ["Layer", "Stem"]
    result = chosen("Mixtures", None, 10**12, 1935)
    assert result["classes"] == ["Mixer", "MixtureOfExperts", "Stem"]
    assert "1,936 parameters are more than stage3_max_live_parameters" in result["text"]
    assert chosen("Mixtures", None, 10**12, 1695)["classes"] == ["Expert", "Mixer", "Stem"]


@with_cases(
    "budget, classes, chunks",
    (10**9, ["Layer", "Stem"], []),  # and not the model, which would fit
    (12 * 1936, ["Layer", "Stem"], []),
    (12 * 1936 - 1, ["Mixer", "MixtureOfExperts", "Stem"], []),
    (12 * 1696, ["Mixer", "MixtureOfExperts", "Stem"], []),
    (12 * 1696 - 1, ["Mixer", "Stem"], [[4]] * 2),  # without the router
    (12 * 413 * 4 - 1, ["Mixer", "Stem"], [[3, 1]] * 2),
    (12 * 413 * 2, ["Mixer", "Stem"], [[2, 2]] * 2),
    (12 * 413, ["Mixer", "Stem"], [[1, 1, 1, 1]] * 2),
    (12 * 413 - 1, ["Mixer", "Stem"], []),  # an expert does not fit: fetched linear by linear
    (12 * 200, [], []),
)
def test_budget_chooses_layers_then_mixtures_then_chunks(budget: int, classes: list[str], chunks: Any) -> None:
    result = chosen("Mixtures", budget)
    assert (result["classes"], result["chunks"]) == (classes, chunks)


def test_modules_entered_from_outside_are_no_units() -> None:
    result = chosen("Tied", 10**9)
    assert result["classes"] == ["Layer"] and "it shares parameters with other modules" in result["text"]
    result = chosen("SharedModule", 10**9)
    assert result["coarse"] == ["stem", "layers.0.mixture", "layers.1.mixture"]
    assert "is in several places of the model" in result["text"]


def test_layers_are_found_in_lists_inside_dictionaries() -> None:
    class Tower(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({"layers": nn.ModuleList(mixtures.Mixer(8) for _ in range(2))})

        def forward(self, x: Tensor) -> Tensor:
            return x

    choices = choose(nn.Sequential(Tower()), Settings(10**9, 0, LIVE))
    units = [choice.name for choice in choices if choice.kind == LeafKind.UNIT]
    assert units == ["0.parts.layers.0", "0.parts.layers.1"]


def test_user_flags_are_respected() -> None:
    result = chosen("Mixtures", 10**9, change="set")
    assert result["coarse"] == ["stem", *(f"layers.{i}.{name}" for i in range(2) for name in ("mixer", "mixture"))]
    assert "has been set as a leaf module" in result["text"]
    result = chosen("Mixtures", 10**9, change="unset")
    assert "Layer" not in result["classes"] and "it has been unset as a leaf module" in result["text"]


def test_nested_lists() -> None:
    # A pair holds lists of different things, not a stack: it is a unit.
    assert chosen("Nested", 10**9)["coarse"] == ["stem", "layers.0", "layers.1"]


def test_choice_table_is_logged(ranks: Any) -> None:
    (by_budget, by_granularity, nothing, split, default), other_ranks = ranks(2).run(report_case)
    (line,) = (line for level, line in default if level == "INFO" and "fetched as one unit each" in line)
    assert "1 Stem (up to 280 parameters each), 2 Mixer (up to 240 parameters each). Set zero" in line
    for lines, where in ((by_budget, "INFO"), (by_granularity, "printed")):
        table = next(line for level, line in lines if level == where and "leaf modules of Mixtures" in line)
        assert re.search(r"Layer +2 +1,936 +84 +23,232  as one", table), table
        assert "Mixtures " in table and "it is the model" in table
        assert "hooks on modules: 252 before, 28 after (88.9% fewer)" in table
    warnings = [line for level, line in nothing if level == "WARNING" and "makes no module a unit" in line]
    assert len(warnings) == 1 and "the smallest granularity is 60 (Mixer layers.0.mixer)" in warnings[0]
    warnings = [line for level, line in split if level == "WARNING" and "mixtures of experts" in line]
    assert len(warnings) == 1 and "MixtureOfExperts layers.0.mixture" in warnings[0]
    assert not any(is_ours(line) for lines in other_ranks for level, line in lines)


def report_case() -> list[list[tuple[str, str]]]:
    """Return the lines with a budget, a threshold, one without effect, one that splits experts, and by default."""
    job = training.Job(network=mixtures.Mixtures, empty=False)
    thresholds = ({"paro_strategy": "GGG", "stage3_module_granularity_threshold": n} for n in (100, 5, 60))
    keys = [{"stage3_leaf_bytes": True}, *thresholds, {"paro_strategy": "GGG"}]
    logs = []
    for zero in keys:
        with logged() as lines, contextlib.redirect_stdout(io.StringIO()) as printed:
            training.make_engine(job, {"stage": 3, **zero})[0].destroy()
        logs.append([*lines, ("printed", printed.getvalue())])
    return logs


BAD: list[tuple[dict[str, Any], str]] = [
    ({"stage": 3, "stage3_leaf_bytes": -1}, "stage3_leaf_bytes must be a number of bytes .*got -1 of type int"),
    ({"stage": 3, "stage3_leaf_bytes": "auto"}, "or true for the budget .*got 'auto' of type str"),
    ({"stage": 2, "stage3_leaf_bytes": 10**9}, "stage3_leaf_bytes needs zero_optimization.stage 3.*got stage 2"),
    ({"paro_strategy": "NIG", "stage3_leaf_bytes": 10**9}, "needs sharded parameters, but paro_strategy is N-I-G"),
    (
        {"stage": 3, "stage3_leaf_bytes": 5, "stage3_module_granularity_threshold": 7},
        r"stage3_leaf_bytes \(5\) and zero_optimization.stage3_module_granularity_threshold \(7\) both choose",
    ),
    ({"stage": 3, "stage3_leaf_byte": 5}, "no key 'stage3_leaf_byte'.* Did you mean 'stage3_leaf_bytes'"),
    (
        {"stage": 3, "stage3_leaf_bytes": 2039},
        "at least the bytes of the largest parameter.*: stem.embedding.weight needs 2,040, got 2,039. Raise it",
    ),
    (
        {"stage": 3, "stage3_leaf_bytes": True, "zero_quantized_weights": True},
        "zero_quantized_weights cannot be combined with zero_optimization.stage3_leaf_bytes",
    ),
]


def test_invalid_keys_are_refused_on_all_ranks(ranks: Any) -> None:
    for errors in ranks(2).run(bad_case):
        for (zero, message), error in zip(BAD, errors, strict=True):
            assert error.startswith("ValueError: ") and re.search(message, error), (zero, error)


def bad_case() -> list[str]:
    return [error_of(make, zero) for zero, _ in BAD]


def make(zero: dict[str, Any]) -> str:
    engine, _ = training.make_engine(training.Job(network=mixtures.Mixtures, empty=False), zero)
    return type(engine.optimizer).__name__


@pytest.mark.parametrize("off", [0, False])
def test_zero_budget_changes_nothing(ranks: Any, off: Any) -> None:
    assert ranks(1).run(make, {"stage": 3, "stage3_leaf_bytes": off}) == ["DeepSpeedZeroOptimizer_Stage3"]
    assert ranks(1).run(make, {"stage": 2, "stage3_leaf_bytes": off}) == ["DeepSpeedZeroOptimizer"]


def test_leaf_command(ranks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (tmp_path / "maker.py").write_text(
        "import torch\nfrom tests.harness import mixtures\n"
        "def model(): return mixtures.Nested((13, 7))\ndef batch(): return (torch.randn(3, 13),)\n"
    )
    command, model = ["deepspeed_ext", "leaf-modules"], ["--model", "maker:model"]
    tight = ["--prefetch-bucket-size", "0", "--max-reuse-distance", "0", "--param-persistence-threshold", "0"]
    (out,) = ranks(1).run(command_case, str(tmp_path), [*command, *model, "--batch", "maker:batch", *tight])
    assert re.search(r"Pair +2 +500 +50 +6,000  as one", out), out
    predicted = int(re.findall(r"at most (\d+) predicted", out)[0])
    hooks, after = re.findall(r"hooks (\d+),", out), re.findall(r"(\d+) after", out)
    assert predicted == 500 and hooks == after, out
    assert "gathered at a time at most 500" in out, out
    refused = (
        ([], "the following arguments are required: --model"),
        ([*model, "--bytes", "7"], "needs 2,040, got 7"),
        ([*model, "--bytes", "7", "--threshold", "9"], "both choose leaf modules"),
        (["--model", "nothing"], "expected PACKAGE.MODULE:FUNCTION, got 'nothing'"),
        (["--model", "maker:none"], "'maker:none' cannot be imported"),
    )
    monkeypatch.syspath_prepend(tmp_path)
    for bad, message in refused:
        monkeypatch.setattr(sys, "argv", [*command, *bad])
        with pytest.raises(SystemExit, match="2"):
            main()
        assert message in capsys.readouterr().err


def command_case(folder: str, command: list[str]) -> str:
    """Return the output of a command in its own process, with the modules of a folder."""
    dist.destroy_process_group()
    alone = {key: value for key, value in os.environ.items() if not key.endswith(("RANK", "SIZE", "ADDR", "PORT"))}
    with (
        mock.patch.dict(os.environ, alone, clear=True),
        mock.patch.object(sys, "path", [folder, *sys.path]),
        mock.patch.object(sys, "argv", command),
        contextlib.redirect_stdout(io.StringIO()) as printed,
    ):
        main()
    return printed.getvalue()


@with_cases(
    "live, expected",
    ((10**9, 0, 0, 0), 20),  # what is used
    ((10**9, 5, 0, 0), 20 + 5 + 20),  # a module that begins within the prefetch
    ((6, 50, 0, 0), 20 + 6 + 20),
    ((10**9, 0, 7, 0), 20 + 7 + 20),
    ((10**9, 0, 0, 4), 20 + 4 * 4),  # biases persist
    ((10**9, 50, 50, 4), 80),  # all there is
)
def test_prediction_of_live_parameters(live: tuple[int, int, int, int], expected: int) -> None:
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
    choices = [modules.ModuleChoice(str(n), module, 20, None, 80, LeafKind.FINE) for n, module in enumerate(model)]
    assert predicted_live(choices, model, LiveLimits(*live)) == expected


# Of configurations with their defaults, which are a published model's: classes that become units, and without a key.
PUBLISHED = {
    "Mixtral": (["MixtralAttention"], ["MixtralAttention"]),
    "Qwen3Moe": (["Qwen3MoeDecoderLayer"], ["Qwen3MoeAttention"]),
    "DeepseekV3": (["DeepseekV3Attention", "DeepseekV3DecoderLayer", "DeepseekV3MLP"], ["DeepseekV3Attention"]),
    "Olmoe": (["OlmoeDecoderLayer"], ["OlmoeAttention"]),
    "GptOss": (["GptOssAttention"], ["GptOssAttention"]),
    # Its experts are one batched product, without windows.
    "Llama4": (["Llama4TextAttention", "Llama4TextMLP"], ["Llama4TextAttention"]),
    "KimiLinear": (
        ["KimiLinearAttention", "KimiLinearDecoderLayer", "KimiLinearDeltaAttention", "KimiLinearMLP"],
        ["KimiLinearAttention", "KimiLinearDecoderLayer", "KimiLinearDeltaAttention"],  # the first layer is dense
    ),
    "Llama": (["LlamaDecoderLayer"], ["LlamaDecoderLayer"]),
}


@since(transformers="5.23")  # classes are those of a release
def test_units_of_published_models(ranks: Any) -> None:
    assert ranks(1).run(published_case) == [PUBLISHED]


def published_case() -> dict[str, tuple[list[str], ...]]:
    """Return the classes that become units of the models in ``PUBLISHED``, with the budget of true and by default."""
    import transformers

    classes = {}
    for name in PUBLISHED:
        config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
        with torch.device("meta"):
            model = transformers.AutoModelForCausalLM.from_config(config(), dtype=torch.bfloat16)
        choices = [
            choose(model, settings)
            for settings in (Settings(default_budget(model, LIVE), 0, LIVE), default_settings(model, LIVE))
        ]
        classes[name] = tuple(
            sorted({type(choice.module).__name__ for choice in chosen if choice.kind.value == "coarse"})
            for chosen in choices
        )
    return classes
