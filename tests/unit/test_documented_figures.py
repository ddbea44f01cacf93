# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Figures of pages about keys, strategies and predictions, against the code."""

import inspect
import json
import re
from typing import Any

import pytest

from deepspeed_ext import op_builder
from deepspeed_ext.config import keys
from deepspeed_ext.config.model import ParoConfig
from deepspeed_ext.config.refused import REFUSED
from deepspeed_ext.config.settings import LocoSettings, UpdateSettings
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates
from scripts import ROOT
from tests.harness.documents import page, pages
from tests.perf.lib import predictions

pytestmark = pytest.mark.quick

KEYS_PAGE, STRATEGIES_PAGE = "deepspeed_ext/config/README.md", "deepspeed_ext/zero/README.md"
SHAPED_AS_KEYS = re.compile(r"`((?:paro|stage3|zeropp?|mics)_\w+)`")
NO_KEYS = {"zero_to_fp32", "zero_optimization"}


def defaults_case() -> dict[str, Any]:
    from deepspeed_ext.config.section import ParoZeroConfig
    from deepspeed_ext.planner.fastest import STATES_SHARE

    found = {field.alias or name: field.default for name, field in ParoZeroConfig.model_fields.items()}
    return {name: value for name, value in found.items() if isinstance(value, bool | int | float | str | None)} | {
        "share": STATES_SHARE
    }


@pytest.fixture(scope="module")
def defaults(ranks: Any) -> dict[str, Any]:
    (found,) = ranks(1).run(defaults_case)
    return dict(found)


def test_the_table_of_keys_is_the_code(defaults: dict[str, Any]) -> None:
    def table(name: str, first: str = "key") -> dict[str, str]:
        return {row[0].strip("`"): row[1].strip('`"') for row in page(name).rows(first)}

    theirs, ours = table(KEYS_PAGE, "DeepSpeed's key"), table(KEYS_PAGE)
    assert ours[keys.MEMORY] == f"{defaults['share']:.0%} of the device's free memory".replace("%", " %")
    for key in (keys.QUANTIZED, keys.THRESHOLD):
        assert json.loads(theirs[key]) == defaults[key], key
    for name in ("deepspeed_ext/leaf/README.md", "deepspeed_ext/planner/README.md"):
        assert table(name).items() <= (theirs | ours).items()


def test_keys_that_pages_name_exist(defaults: dict[str, Any]) -> None:
    known = {*defaults, *ParoConfig.model_fields, *NO_KEYS}
    for one in pages():
        if not one.name.startswith("patches/"):
            assert set(SHAPED_AS_KEYS.findall(one.text)) <= known, one.name


def test_the_tables_of_loco_are_the_code() -> None:
    for heading, settings in (("## Keys", LocoSettings()), ("## Updates between groups in 4 bits", UpdateSettings())):
        rows = page("deepspeed_ext/loco/README.md").section(heading).rows("sub-key")
        assert {row[0].strip("`"): json.loads(row[1]) for row in rows} == settings.as_dict()


def test_what_is_refused_is_named_under_limits() -> None:
    limits = page(STRATEGIES_PAGE).section("## Limits").text
    named = {"zenflow": "ZenFlow", "super_offload": "SuperOffload", "device": "NVMe offload"}
    named |= {
        "expert_parallel": "expert parallelism",
        "compile": "compile.deepcompile",
        "reduce_scatter": "`reduce_scatter: false` with LoCo",
    }
    for row in REFUSED:
        last = row.key.split()[-1].split(".")[-1]
        assert named.get(last, last) in limits, row.key


def value_of(formula: str, **names: float) -> float:
    """The value of a formula as pages write it: ``(s+1) a M``, ``2Ψ + 2Ψ/m + 12Ψ/n``."""
    product = re.sub(r"(?<=[\w)]) (?=[a-zA-Z(])", " * ", formula)
    product = re.sub(r"(\d)(?=[sΨ])", r"\1*", product)
    return float(eval(product.replace("Ψ", "P"), {}, names))


def test_the_tables_of_strategies_are_the_code() -> None:
    one = page(STRATEGIES_PAGE)
    known = {name: row for row in one.rows("strategy") for name in row[0].replace("-", "").split(", ")}
    assert set(known) == set(STRATEGIES)
    for name, (_, known_as, stage) in known.items():
        strategy = STRATEGIES[name]
        ours = strategy.known_as.replace("Megatron ", "Megatron's ").replace("FSDP ", "FSDP's ")
        assert known_as.replace("`", "") == ours, name
        assert int(stage) == strategy.stage
    n, m, s, psi = 12, 4, 5, 1000
    sizes, states = GroupSizes(n, m), ModelStates.of(psi)
    names = {"n": n, "m": m, "s": s, "P": psi, "M": 2 * psi, "a": (m - 1) / m, "b": (n // m - 1) / n}
    rows = one.section("## Memory and bytes").rows("strategy")
    formulas = {row[0].split(",")[0].replace("-", ""): row[1:] for row in rows}
    assert set(formulas) == set(STRATEGIES)
    for name, (memory, intra, inter) in formulas.items():
        strategy = STRATEGIES[name]
        volume = strategy.volume(sizes, states, s)
        assert value_of(memory, **names) == pytest.approx(strategy.memory(sizes, states).total), name
        assert value_of(intra, **names) == pytest.approx(volume.intra), name
        assert value_of(inter, **names) == pytest.approx(volume.inter), name


def test_the_memory_of_the_readme_is_that_of_its_predictions() -> None:
    states = ModelStates.of(predictions.EXPECTED_PARAMETERS)
    rows = {"N-I-G": "NIG", "I-I-G": "IIG", "HSDP": "III", "ZeRO-3": "GGG"}
    text = page("README.md").text
    for shown, name in rows.items():
        memory = STRATEGIES[name].memory(predictions.EXPECTED_SIZES, states).total / 1e9
        assert f"{shown} {memory:.1f} GB" in text, shown


def test_messages_that_pages_quote() -> None:
    guides = ("deepspeed_ext/troubleshooting.md", "deepspeed_ext/debugging.md", "deepspeed_ext/how_to/")
    text = " ".join(" ".join(one.text for one in pages() if one.name.startswith(guides)).split())
    assert f"warns after {op_builder._UNKNOWN_SECONDS:.0f} seconds" in text
    assert "s old, the lock file of a process that builds" in inspect.getsource(op_builder)
    assert f"after {op_builder._UNKNOWN_SECONDS:.0f} seconds" in page("csrc/README.md").text
    quoted = {
        "has no key": "deepspeed_ext/config/settings.py",
        "contradicts": "deepspeed_ext/config/model.py",
        "is at the top level of the configuration; move it into": "deepspeed_ext/config/keys.py",
        "paro_group_size must divide the data-parallel size": "deepspeed_ext/strategy.py",
        "paro_strategy needs the number of ranks on each node": "deepspeed_ext/comm/process_groups.py",
        "cannot be combined with": "deepspeed_ext/config/refused.py",
        "groups of one rank": "deepspeed_ext/zero/announcement.py",
        "one group": "deepspeed_ext/zero/announcement.py",
        "which gather parameters together": "deepspeed_ext/zero/sharded/coordinator.py",
        "does not run its experts in their order": "deepspeed_ext/leaf/chunks.py",
        "cannot be loaded without conversion. Converting it to": "deepspeed_ext/checkpoint/conversion.py",
        "look like mixtures of experts are not fetched as a unit": "deepspeed_ext/leaf/setup.py",
        "so I is N for them": "deepspeed_ext/zero/announcement.py",
        "has no effect: the engine's optimizer is DeepSpeed's own": "deepspeed_ext/config/section.py",
    }
    for words, file in quoted.items():
        assert words in text and words in (ROOT / file).read_text(encoding="utf-8"), words
