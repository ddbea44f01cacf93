# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Our keys: accepted in every form, refused with one paragraph on every rank before anything is communicated."""

import base64
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_ext.config.keys import KEYS, MICS_KEYS, OF_FASTEST, our_keys
from deepspeed_ext.config.refused import REFUSED as KEYS_REFUSED
from deepspeed_ext.config.validate import check_section
from deepspeed_ext.strategy import STRATEGIES
from scripts import ROOT
from tests.harness.logs import is_ours

BAD_SECTIONS: list[tuple[dict[str, Any], str]] = [
    ({"paro_strategy": "NGI"}, "one of NNN, .*GGG .*got 'NGI'. NGI is not a strategy.*os = I is coarser than g = G"),
    ({"paro_strategy": "ZeRO"}, "one of NNN, .*got 'ZeRO'"),
    ({"paro_strategy": "auto"}, "one of NNN, .*got 'auto'"),
    ({"paro_strategy": "nig"}, "got 'nig'. Did you mean 'NIG'\\?"),
    ({"paro_strategy": 3}, "got 3"),
    ({"paro_strategy": None}, "got None"),
    ({"paro_group_size": 2}, r"paro_group_size is set \(2\) without zero_optimization.paro_strategy"),
    ({"paro_strategy": "NIG", "paro_group_size": 0}, "integer of at least 1 .*got 0 of type int"),
    ({"paro_strategy": "NIG", "paro_group_size": -2}, "got -2"),
    ({"paro_strategy": "NIG", "paro_group_size": "2"}, "got '2' of type str"),
    ({"paro_strategy": "NIG", "paro_group_size": 2.0}, "got 2.0 of type float"),
    ({"paro_strategy": "NIG", "paro_group_size": True}, "got True of type bool"),
    ({"paro_strategy": "NIG", "paro_group_size": "auto"}, "got 'auto'"),
    (
        {"paro_strategy": "NIG", "stage": 3},
        "NIG places p = N, g = I, which is stage 2, got stage 3. Set .*stage to 2",
    ),
    ({"paro_strategy": "NNG", "stage": 2}, "which is stage 1, got stage 2"),
    ({"paro_strategy": "GGG", "stage": 1}, "which is stage 3, got stage 1"),
    (
        {"paro_strategy": "IIG", "stage": 2},
        "IIG places p = I, g = I, which is stage 3, got stage 2. Set .*stage to 3",
    ),
    ({"paro_strategy": "GNG", "stage": 2}, "GNG places p = G, g = N, which is stage 3, got stage 2"),
    (
        {"paro_stratgy": "NIG"},
        "no key 'paro_stratgy': .*paro_strategy, paro_group_size, .*zeropp_loco_param. Did you mean 'paro_strategy'",
    ),
    ({"paro_strategy": "NIG", "paro_groupsize": 2}, "no key 'paro_groupsize'.*Did you mean 'paro_group_size'"),
    ({"PaRO": "auto"}, "no key 'PaRO'"),
    ({"paro_strategy": "fast"}, "GGG .*, or fastest, got 'fast'"),
    ({"paro_memory_gb": 4}, r"paro_memory_gb is set \(4\) without zero_optimization.paro_strategy"),
    ({"paro_strategy": "NIG", "paro_memory_gb": 4}, "paro_memory_gb is for paro_strategy fastest, got .* 'NIG'"),
    ({"paro_strategy": "NIG", "paro_decision_file": "f"}, "paro_decision_file is for paro_strategy fastest"),
    ({"paro_strategy": "fastest", "paro_memory_gb": 0}, "number above 0 .*got 0 of type int"),
    ({"paro_strategy": "fastest", "paro_memory_gb": "4"}, "got '4' of type str"),
    ({"paro_strategy": "fastest", "paro_memory_gb": True}, "got True of type bool"),
    ({"paro_strategy": "fastest", "paro_decision_file": ""}, "path of a file, got ''"),
    ({"paro_strategy": "fastest", "stage": 4}, r"must be 1, 2 or 3 \(or absent\) with .* fastest, got 4"),
]


@pytest.mark.parametrize("section, message", BAD_SECTIONS, ids=lambda value: str(value)[:60])
def test_bad_sections_get_one_paragraph(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_section(section)
    assert "\n" not in str(error.value)


def test_options_are_frozen() -> None:
    """A key added by accident fails here; one added on purpose is added here and to the README."""
    assert KEYS == ("paro_strategy", "paro_group_size")
    assert OF_FASTEST == ("paro_memory_gb", "paro_decision_file")
    assert MICS_KEYS == ("mics_shard_size", "mics_hierarchical_params_gather")
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in readme for key in (*KEYS, *OF_FASTEST, *MICS_KEYS))


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_passes_with_its_stage_or_without(name: str) -> None:
    stage = STRATEGIES[name].stage
    for section in (
        {"paro_strategy": name},
        {"paro_strategy": name, "stage": stage},
        {"paro_strategy": name, "stage": 0},
    ):
        assert check_section(section).name == name


@pytest.mark.parametrize("section", [{}, {"stage": 2}, None, True, 3])
def test_sections_without_our_keys_are_not_ours(section: Any) -> None:
    assert our_keys(section) == []


def config(**zero: Any) -> dict[str, Any]:
    """A minimal ds_config."""
    return {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}


def parsed_zero_config(form: str, section: dict[str, Any], path: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """Parse in one of the forms that DeepSpeed takes; class name, our fields, and the raw section as it is kept."""
    from deepspeed.runtime.config import DeepSpeedConfig

    text = json.dumps(config(**section))
    given: Any = {"dict": json.loads(text), "file": path, "base64": base64.urlsafe_b64encode(text.encode()).decode()}
    parsed = DeepSpeedConfig(given[form])
    zero = parsed.zero_config
    fields = {key: getattr(zero, key, "absent") for key in ("stage", "overlap_comm", *KEYS)}
    return type(zero).__name__, fields, parsed._param_dict["zero_optimization"]


@pytest.mark.parametrize("form", ["dict", "file", "base64"])
def test_each_form_of_config(ranks: Any, tmp_path: Path, form: str) -> None:
    section = {"paro_strategy": "NIG", "paro_group_size": 2}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(**section)), encoding="utf-8")
    for answer in ranks(4).run(parsed_zero_config, form, section, str(file)):
        assert answer == ("ParoZeroConfig", {"stage": 2, "overlap_comm": False, **section}, {"stage": 2, **section})


def test_the_callers_dict_says_the_stage(ranks: Any) -> None:
    """Frameworks read it there; and the next engine may be given the same dict with another strategy, or with none."""
    stages, others, saved = ranks(1).run(implied_stages_case)[0]
    assert stages == [1, 3, 2, "absent"] and others == [3, 0, "absent"]
    assert b"deepspeed_ext" not in saved  # a checkpoint holds the configuration, and is read without us


def implied_stages_case() -> tuple[list[Any], list[Any], bytes]:
    """The stage in a section that was parsed with one strategy after the other; in others; and one as it is saved."""
    import pickle

    from deepspeed.runtime.config import DeepSpeedConfig

    zero: dict[str, Any] = {}
    stages: list[Any] = []
    for name in ("NNG", "IIG", "NIG"):
        zero["paro_strategy"] = name
        DeepSpeedConfig({**config(), "zero_optimization": zero})
        stages.append(zero["stage"])
    saved = pickle.dumps(zero)
    del zero["paro_strategy"]
    DeepSpeedConfig({**config(), "zero_optimization": zero})
    stages.append(zero.get("stage", "absent"))
    others = []
    for other in ({"mics_shard_size": 1}, {"paro_strategy": "IIG", "stage": 0}, {"paro_strategy": "fastest"}):
        DeepSpeedConfig({**config(), "zero_optimization": other})
        others.append(other.get("stage", "absent"))
    return stages, others, saved


def test_the_strategy_is_parsed_once_and_kept_by_copies(ranks: Any) -> None:
    assert ranks(1).run(copies_case) == [["IIG"] * 4 + ["None"]]


def copies_case() -> list[str]:
    """The strategies of a configuration, of its copies, and at stage 0, with every further parse forbidden."""
    import copy
    import pickle
    from unittest import mock

    from deepspeed.runtime.config import DeepSpeedConfig

    from deepspeed_ext.config import section, validate

    parsed = DeepSpeedConfig(config(paro_strategy="IIG"))
    off = DeepSpeedConfig(config(paro_strategy="IIG", stage=0))
    with mock.patch.object(validate, "parse_strategy", side_effect=AssertionError("parsed again")):
        found = [parsed, copy.copy(parsed), copy.deepcopy(parsed), copy.copy(parsed), off]
        found[3].zero_config = pickle.loads(pickle.dumps(parsed.zero_config))
        return [getattr(section.active_strategy(one), "name", "None") for one in found]


def test_off_means_the_exact_upstream_class(ranks: Any) -> None:
    name, fields, _ = ranks(4).run(parsed_zero_config, "dict", {"stage": 2}, "")[0]
    assert name == "DeepSpeedZeroConfig" and fields["paro_strategy"] == "absent"


def initialize(zero: dict[str, Any], extra: dict[str, Any] | None = None, how: str = "initialize") -> None:
    """Have DeepSpeed read the configuration with every collective forbidden."""
    from unittest import mock

    import deepspeed
    import torch
    from deepspeed import comm as dist

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was communicated")

    collectives = ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_into_tensor", "new_group")
    settings = {**config(**zero), **(extra or {})}
    settings.setdefault("optimizer", {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}})
    with mock.patch.multiple(dist, **dict.fromkeys(collectives, refuse)):
        if how == "zero.Init":
            with deepspeed.zero.Init(config_dict_or_path=settings):
                torch.nn.Linear(3, 3)
        else:
            model = torch.nn.Linear(3, 3)
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)


NIG = {"paro_strategy": "NIG", "paro_group_size": 2}
IIG = {"paro_strategy": "IIG", "paro_group_size": 2}
III = {"paro_strategy": "III", "paro_group_size": 2}
GGG = {"paro_strategy": "GGG", "paro_group_size": 2}
OFFLOADING = ("INI", "III", "GNG", "GIG", "GGG")  # the strategies that offload parameters
CPU, NVME = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/nowhere"}
MUON = {"optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}


def cannot(key: str, strategy: str) -> str:
    """The start of the message that refuses a key beside a strategy, as a pattern."""
    return f"^{re.escape(key)} cannot be combined with zero_optimization.paro_strategy {strategy}: "


def in_zero(key: str) -> str:
    """The name of a key of the section."""
    return f"zero_optimization.{key}"


REFUSED_BESIDE: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (strategy | zero, extra, cannot(key, strategy["paro_strategy"]))
    for strategy in (NIG, IIG, GGG)
    for key, zero, extra in (
        (in_zero("zenflow"), {"zenflow": {}}, {}),
        (in_zero("offload_optimizer.super_offload"), {"offload_optimizer": {**CPU, "super_offload": True}}, {}),
        (in_zero("offload_optimizer.device"), {"offload_optimizer": NVME}, {}),
        (in_zero("zero_hpz_partition_size"), {"zero_hpz_partition_size": 2}, {}),
        (in_zero("zero_quantized_weights"), {"zero_quantized_weights": True}, {}),
        (in_zero("zero_quantized_nontrainable_weights"), {"zero_quantized_nontrainable_weights": True}, {}),
        (in_zero("reduce_scatter"), {"zeropp_loco_param": {}, "reduce_scatter": False}, {}),
        (in_zero("reduce_scatter"), {"zero_quantized_gradients": True, "reduce_scatter": False}, {}),
        (in_zero("elastic_checkpoint"), {"elastic_checkpoint": True}, {}),
        ("compile.deepcompile", {}, {"compile": {"deepcompile": True}}),
        ("optimizer.type", {}, MUON),
        ("expert_parallel", {}, {"expert_parallel": {"enabled": True}}),
    )
] + [
    (NIG | {"offload_param": CPU}, {}, cannot(in_zero("offload_param"), "NIG")),
    *(
        (strategy, {"compile": {"deepcompile": True, "passes": passes}}, cannot(key, strategy["paro_strategy"]))
        for strategy, key, passes in (
            (NIG, "compile.deepcompile", ["autosp", "z1"]),
            (NIG, "compile.passes autosp", ["autosp"]),
            (IIG, "compile.passes autotp", ["autotp"]),
        )
    ),
    (
        NIG | {"stage3_module_granularity_threshold": 9},
        {},
        cannot(in_zero("stage3_module_granularity_threshold"), "NIG"),
    ),
    *(
        (
            {**size, "paro_strategy": name, "offload_param": CPU},
            {},
            cannot(in_zero("offload_param.device"), name) + how,
        )
        for size in ({"paro_group_size": 2}, {})
        for name, how in dict.fromkeys(
            ("ING", "IIG", "IGG"), f".*that offload parameters: {', '.join(OFFLOADING)}. "
        ).items()
    ),
    *(
        (strategy | {"offload_param": NVME}, {}, cannot(in_zero("offload_param.device"), strategy["paro_strategy"]))
        for strategy in (IIG, GGG)
    ),
    *(
        (
            strategy | {"stage3_use_all_reduce_for_fetch_params": True},
            {},
            cannot(in_zero("stage3_use_all_reduce_for_fetch_params"), strategy["paro_strategy"]),
        )
        for strategy in (IIG, GGG)
    ),
    *(
        (strategy | {"enable_sanity_checks": True}, {}, cannot(in_zero("enable_sanity_checks"), name))
        for name, strategy in (("IIG", IIG), ("GGG", GGG))
    ),
    (III | {"pipeline_loading_checkpoint": True}, {}, cannot(in_zero("pipeline_loading_checkpoint"), "III")),
    (
        III,
        {"checkpoint": {"use_node_local_storage": True}},
        cannot("checkpoint.use_node_local_storage", "III"),
    ),
]
# DeepSpeed's words for what it has removed, and ours for MiCS.
MICS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        ({"mics_shard_size": bad}, {}, rf"mics_shard_size must be an integer .* or -1 for off, got {got}\.")
        for bad, got in (
            (0, "0 of type int"),
            (-2, "-2 of type int"),
            ("auto", "'auto' of type str"),
            (True, "True of type bool"),
            (2.0, "2.0 of type float"),
            (None, "None of type NoneType"),
        )
    ),
    ({"mics_shard_size": 3}, {}, r"3 with 4 data-parallel ranks \(4 = 1 x 3 \+ 1\).*\[1, 2, 4\]"),
    ({"mics_shard_size": 8}, {}, "8 with 4 data-parallel"),
    ({"mics_shard_size": 2, "stage": 2}, {}, "mics_shard_size needs zero_optimization.stage 3, got 2"),
    *(
        (
            {"mics_shard_size": 2, **ours},
            {},
            f"mics_shard_size 2 means paro_strategy III .* but {named} is set as well",
        )
        for ours, named in (
            ({"paro_strategy": "III"}, "paro_strategy"),
            ({"paro_strategy": "NIG"}, "paro_strategy"),
            ({"paro_group_size": 2}, "paro_group_size"),
            ({"paro_strategy": "III", "paro_group_size": 2}, "paro_strategy, paro_group_size"),
        )
    ),
    *(
        (
            {"stage": 3, "mics_hierarchical_params_gather": True, **off},
            {},
            "mics_hierarchical_params_gather needs .*mics_shard_size",
        )
        for off in ({}, {"mics_shard_size": -1})
    ),
    ({"mics_shard_size": 2, "zero_hpz_partition_size": 2}, {}, cannot(in_zero("zero_hpz_partition_size"), "III")),
    ({"mics_shard_size": 2, "offload_param": NVME}, {}, cannot(in_zero("offload_param.device"), "III")),
    ({"stage": 3}, {"mics_shard_size": 2}, "'mics_shard_size' is at the top level .*belongs into zero_optimization"),
    ({"mics_shard_size": 2}, {"elasticity": {"enabled": True}}, "Elastic training has been removed"),
    ({"stage": 3}, {"elasticity": {"enabled": True}}, "Elastic training has been removed"),
]
LOCO_KEYS = "err_beta, reset_T, bits, block_size, error_bits, error_feedback, hadamard"
LOCO: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        (
            {"stage": 2, "zeropp_loco_param": {key: bad}},
            {},
            rf"zeropp_loco_param\.{key} must be {wanted}, got {bad!r} of",
        )
        for key, wanted, values in (
            ("bits", "4 or 8", (2, 5, 4.0, True, "4", None)),
            ("block_size", r"a power of two from 32 to 4096 \(elements\)", (16, 48, 0, -128, 8192, "auto")),
            ("err_beta", r"a number in \[0, 1\)", (1, 1.0, -0.1, "0.8", True, None)),
            ("reset_T", r"an integer of at least 1 \(optimizer steps\)", (0, -1, 2.0, False)),
            ("error_bits", "8 or 16", (4, 32)),
            ("error_feedback", "true or false", (1, "yes")),
            ("hadamard", "true or false", (0, None)),
        )
        for bad in values
    ),
    *(
        ({"stage": 2, "zeropp_loco_param": bad}, {}, f"must be a dictionary of {LOCO_KEYS} .each may be left out")
        for bad in (None, True, 4, [], "on")
    ),
    (
        {"stage": 2, "zeropp_loco_param": {"bit": 4}},
        {},
        f"has no key 'bit': its keys are {LOCO_KEYS}. Did you mean 'bits'",
    ),
    ({"paro_strategy": "NIG", "zeropp_loco_param": {"err_beta_": 1}}, {}, "Did you mean 'err_beta'"),
    ({"zeropp_loco_param": {}}, {}, "needs zero_optimization.stage 1, 2 or 3, or .*paro_strategy, got stage None"),
    ({"stage": 4, "zeropp_loco_param": {}}, {}, "needs zero_optimization.stage 1, 2 or 3, .* got stage 4"),
    (
        {"stage": 3, "zeropp_loco_param": {}, "zero_quantized_gradients": False},
        {},
        "zeropp_loco_param implies zero_optimization.zero_quantized_gradients, which is set to false",
    ),
    (
        {"stage": 3, "zeropp_loco_param": {}, "zero_hpz_partition_size": 2},
        {},
        "^zero_optimization.zero_hpz_partition_size cannot be combined with zero_optimization.zeropp_loco_param: ",
    ),
    ({"stage": 1}, {"zeropp_loco_param": {}}, "'zeropp_loco_param' is at the top level .*belongs into zero_optim"),
    ({"stage": 2, "paro_strategy": "IIG", "zeropp_loco_param": {}}, {}, "which is stage 3, got stage 2"),
]
REFUSED: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (
        {"paro_strategy": "NIG", "paro_group_size": 3},
        {},
        r"3 with 4 data-parallel ranks \(4 = 1 x 3 \+ 1\).*\[1, 2, 4\]",
    ),
    ({"paro_strategy": "NIG", "paro_group_size": 8}, {}, r"paro_group_size 8 with 4 data-parallel"),
    ({"paro_strategy": "IIG", "paro_group_size": 8}, {}, r"paro_group_size 8 with 4 data-parallel"),
    ({"paro_strategy": "NIG", "stage": 1}, {}, "stage 2, got stage 1"),
    ({"stage": 2}, {"paro_strategy": "NIG"}, "'paro_strategy' is at the top level .*belongs into zero_optimization"),
    *((section, {}, message) for section, message in BAD_SECTIONS),
]


def test_every_reason_to_refuse_is_tested() -> None:
    messages = [message for *_, message in REFUSED_BESIDE]
    for row in KEYS_REFUSED:
        assert any(message.startswith(f"^{re.escape(row.key)} cannot be combined") for message in messages), row.key


@pytest.mark.parametrize("how", ["initialize", "zero.Init"])
@pytest.mark.parametrize("rows", [REFUSED, REFUSED_BESIDE, MICS, LOCO], ids=["section", "beside", "mics", "loco"])
def test_refused_alike_on_every_rank_before_any_communication(
    ranks: Any, rows: list[tuple[dict[str, Any], dict[str, Any], str]], how: str
) -> None:
    pool = ranks(4)
    for zero, extra, message in rows:
        errors = pool.run_expect_error(initialize, zero, extra, how)
        assert len({error.message for error in errors}) == 1, errors
        assert errors[0].type in ("ValueError", "DeepSpeedConfigError"), errors[0]
        assert re.search(message, errors[0].message) and "\n" not in errors[0].message, errors[0]


def test_stage_0_is_a_no_op(ranks: Any) -> None:
    assert set(ranks(4).run(stage_0_case)) == {"DeepSpeedEngine"}


def stage_0_case() -> str:
    """A reference model as some trainers make it: our key is left in, the stage is set to 0, and no optimizer."""
    import deepspeed
    import torch

    engine, *_ = deepspeed.initialize(model=torch.nn.Linear(3, 3), config=config(paro_strategy="NIG", stage=0))
    assert engine.optimizer is None
    engine.destroy()
    return type(engine).__name__


@pytest.mark.parametrize("name", OFFLOADING)
def test_parameters_may_be_offloaded_where_they_are_updated_in_place(ranks: Any, name: str) -> None:
    section = {"paro_strategy": name, "paro_group_size": 2, "offload_param": CPU}
    for kind, fields, _ in ranks(4).run(parsed_zero_config, "dict", section, ""):
        assert (kind, fields["stage"]) == ("ParoZeroConfig", 3)


@pytest.mark.parametrize("form", ["dict", "file", "base64"])
@pytest.mark.parametrize("stage", [{}, {"stage": 3}], ids=["no stage", "stage 3"])
def test_mics_shard_size_is_iii_in_groups_of_that_size(
    ranks: Any, tmp_path: Path, form: str, stage: dict[str, int]
) -> None:
    section = {"mics_shard_size": 2, **stage}
    file = tmp_path / "ds.json"
    file.write_text(json.dumps(config(**section)), encoding="utf-8")
    for kind, fields, raw in ranks(4).run(parsed_zero_config, form, section, str(file)):
        assert kind == "ParoZeroConfig"
        assert (fields["stage"], fields["paro_strategy"], fields["paro_group_size"]) == (3, "III", 2)
        assert raw == {**section, "stage": 3}  # what the user wrote, and what frameworks read


def test_mics_shard_size_minus_one_is_off(ranks: Any) -> None:
    off = {"mics_shard_size": -1, "mics_hierarchical_params_gather": False, "stage": 3}
    for kind, fields, raw in ranks(4).run(parsed_zero_config, "dict", off, ""):
        assert (kind, fields["stage"], fields["paro_strategy"], raw) == ("DeepSpeedZeroConfig", 3, "absent", off)
    beside = {"mics_shard_size": -1, **IIG}
    for kind, fields, _ in ranks(4).run(parsed_zero_config, "dict", beside, ""):
        assert (kind, fields["paro_strategy"], fields["paro_group_size"]) == ("ParoZeroConfig", "IIG", 2)


@pytest.mark.parametrize(
    ("section", "strategy", "stage"),
    [
        ({"stage": 1, "zeropp_loco_param": {}}, "NNG", 1),
        ({"stage": 2, "zeropp_loco_param": {"bits": 8}, "zero_quantized_gradients": True}, "NGG", 2),
        ({"stage": 3, "zeropp_loco_param": {"err_beta": 0}}, "GGG", 3),
        ({"paro_strategy": "NIG", "zeropp_loco_param": {"reset_T": 512}}, "NIG", 2),
        ({"mics_shard_size": 2, "zeropp_loco_param": {}}, "III", 3),
        ({"paro_strategy": "IIG", "zero_quantized_gradients": True}, "IIG", 3),
        ({"paro_strategy": "IIG", "zero_quantized_gradients": False}, "IIG", 3),
    ],
)
def test_loco_is_a_strategy_of_the_stage_or_stands_beside_one(
    ranks: Any, section: dict[str, Any], strategy: str, stage: int
) -> None:
    for kind, fields, raw in ranks(4).run(parsed_zero_config, "dict", section, ""):
        assert (kind, fields["paro_strategy"], fields["stage"]) == ("ParoZeroConfig", strategy, stage)
        assert raw == {**section, "stage": stage}


def test_stage_3_with_quantized_gradients_alone_is_deepspeeds(ranks: Any) -> None:
    section = {"stage": 3, "zero_quantized_gradients": True}
    assert ranks(4).run(parsed_zero_config, "dict", section, "")[0][0] == "DeepSpeedZeroConfig"


@pytest.mark.parametrize("hierarchical", [False, True])
def test_hierarchical_gathers_of_mics_are_implied(ranks: Any, hierarchical: bool) -> None:
    implied = ": zero_optimization.mics_hierarchical_params_gather is implied"
    for rank, (messages, fields) in enumerate(ranks(4).run(mics_log_case, hierarchical)):
        assert fields == ("III", 2)
        found = [(level, text) for level, text in messages if "mics" in text]
        assert len(found) == (1 if hierarchical and rank == 0 else 0), (rank, found)
        assert all(level == "INFO" and implied in text and is_ours(text) for level, text in found)


def mics_log_case(hierarchical: bool) -> tuple[list[tuple[str, str]], tuple[str, int]]:
    """What parsing MiCS's keys writes to DeepSpeed's log, and our fields."""
    from deepspeed.runtime.config import DeepSpeedConfig

    from tests.harness.logs import logged

    with logged() as lines:
        given = config(mics_shard_size=2, mics_hierarchical_params_gather=hierarchical)
        zero = DeepSpeedConfig(given).zero_config
    return lines, (zero.paro_strategy, zero.paro_group_size)


def test_mics_trains_as_iii_does_and_zero_init_cuts_for_it(ranks: Any, tmp_path: Path) -> None:
    for rows, shards in ranks(4).run(mics_training_case, str(tmp_path / "ds.json")):
        assert rows[:2] == [("Stage3Optimizer", True)] * 2, rows
        assert rows[2] == ("DeepSpeedZeroOptimizer_Stage3", True), rows
        assert shards == {"initialize": [(2, 18)] * 2, "zero.Init": [(2, 18)] * 2}


def mics_training_case(path: str) -> tuple[list[tuple[str, bool]], dict[str, list[tuple[int, int]]]]:
    """Weights of MiCS against III, given as a dict and as a file, and of size -1 against stock, to the bit.

    Also ranks and elements of the shards of two parameters of 36 elements, in an engine of a model as it is and of
    one that was made in zero.Init.
    """
    import deepspeed
    import torch
    from deepspeed import comm as dist

    from deepspeed_ext.zero.stage3 import Stage3Optimizer
    from tests.harness import training

    job = training.Job(accumulation=2, steps=3, empty=False)
    kinds: list[str] = []

    def weights(zero: dict[str, Any]) -> torch.Tensor:
        return training.train(job, zero, look=lambda e: kinds.append(type(e.optimizer).__name__)).weights

    stock = weights({"stage": 3})
    iii = weights({"paro_strategy": "III", "paro_group_size": 2})
    kinds.clear()
    same = [
        torch.equal(weights({"mics_shard_size": 2}), iii),
        torch.equal(weights({"mics_shard_size": 2, "stage": 3, "mics_hierarchical_params_gather": True}), iii),
        torch.equal(weights({"mics_shard_size": -1, "stage": 3}), stock),
    ]
    given = {**config(mics_shard_size=2), "zero_allow_untested_optimizer": True}
    if dist.get_rank() == 0:
        Path(path).write_text(json.dumps(given), encoding="utf-8")
    dist.barrier()
    shards = {}
    for how in ("initialize", "zero.Init"):
        with deepspeed.zero.Init(config_dict_or_path=path, enabled=how == "zero.Init"):
            model = torch.nn.Sequential(torch.nn.Linear(6, 6, bias=False), torch.nn.Linear(6, 6, bias=False))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=given)
        assert isinstance(engine.optimizer, Stage3Optimizer)
        shards[how] = [(dist.get_world_size(p.ds_process_group), p.ds_tensor.numel()) for p in model.parameters()]
        engine.destroy()
    return list(zip(kinds, same, strict=True)), shards
