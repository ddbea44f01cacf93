# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Refusals are one paragraph, on every rank, before anything is communicated."""

import re
from typing import Any

import pytest

from deepspeed_ext.config.keys import KEYS, MICS_KEYS, OF_FASTEST, OURS, REMOVED, our_keys
from deepspeed_ext.config.refused import REFUSED as KEYS_REFUSED
from deepspeed_ext.config.validate import check_section
from deepspeed_ext.strategy import STRATEGIES
from scripts import ROOT
from tests.harness.sections import CPU, GGG, IIG, III, NIG, NVME, config

pytestmark = pytest.mark.quick


def outer(strategy: str = "III", **given: Any) -> dict[str, Any]:
    return {"paro_strategy": strategy, "paro_outer_optimizer": given}


OUTER_SECTIONS: list[tuple[dict[str, Any], str]] = [
    (outer("NIG"), r"os = I\): .*paro_strategy must be one of NNI, NII, INI, III, got 'NIG'. III shards"),
    (outer("fastest"), "must be one of NNI, NII, INI, III, got 'fastest'"),
    ({"paro_outer_optimizer": {}}, r"paro_outer_optimizer is set \({}\) without zero_optimization.paro_strategy"),
    ({"paro_strategy": "III", "paro_outer_optimizer": 30}, "must be a dictionary of steps, lr, .*got 30 of type int"),
    (outer(step=30), "paro_outer_optimizer has no key 'step'.*Did you mean 'steps'"),
    (outer(steps=0), "steps must be an integer of at least 1 .*got 0"),
    (outer(steps=True), "steps must be .*got True of type bool"),
    (outer(lr=0.0), "lr must be a number above 0, got 0.0"),
    (outer(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
    (outer(nesterov="yes"), "nesterov must be true or false, got 'yes'"),
    (outer(warmup_steps=-1), "warmup_steps must be an integer of at least 0"),
    (outer(bits=2), "bits must be 4, 8, 16 or 32, got 2"),
    (outer(offload="nvme"), 'offload must be "none" or "cpu", got \'nvme\''),
    (outer(steps=2, fragments=3), "fragments must be at most .*steps.*got 3 fragments and 2 steps"),
    (outer(steps=10, fragments=3, delay=3), "with 10 steps and 3 fragments less than 3, got 3"),
    (outer(steps=1, delay=1), "less than 1, got 1"),
    (outer() | {"zeropp_loco_param": {}}, "zeropp_loco_param cannot be combined with .*bits says in how many bits"),
    (outer() | {"paro_quantized_updates": {}}, "paro_quantized_updates cannot be combined"),
]
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
    *(
        ({"paro_strategy": "IIG", "paro_parameter_cache_bytes": value}, f"an integer of at least 0 .*got {value!r} of")
        for value in (-1, True, False, 0.0, 9.0, "9", None)
    ),
    ({"paro_strategy": "NIG", "paro_overlap_updates": 1}, "paro_overlap_updates must be true or false, got 1 of type"),
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
    *OUTER_SECTIONS,
    ({"paro_strategy": "fast"}, "GGG .*, or fastest, got 'fast'"),
    ({"paro_memory_gb": 4}, r"paro_memory_gb is set \(4\) without zero_optimization.paro_strategy"),
    ({"paro_strategy": "NIG", "paro_memory_gb": 4}, "paro_memory_gb is for paro_strategy fastest, got .* 'NIG'"),
    ({"paro_strategy": "NIG", "paro_decision_file": "f"}, "paro_decision_file is for paro_strategy fastest"),
    ({"paro_strategy": "fastest", "paro_memory_gb": 0}, "number above 0 .*got 0 of type int"),
    ({"paro_strategy": "fastest", "paro_memory_gb": "4"}, "got '4' of type str"),
    ({"paro_strategy": "fastest", "paro_memory_gb": True}, "got True of type bool"),
    ({"paro_strategy": "fastest", "paro_decision_file": ""}, "path of a file, got ''"),
    ({"paro_strategy": "fastest", "paro_micro_step_seconds": -1}, "number of at least 0 .*got -1 of type int"),
    ({"paro_strategy": "fastest", "stage": 4}, r"must be 1, 2 or 3 \(or absent\) with .* fastest, got 4"),
]


@pytest.mark.parametrize("section, message", BAD_SECTIONS, ids=lambda value: str(value)[:60])
def test_bad_sections_get_one_paragraph(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        check_section(section)
    assert "\n" not in str(error.value)


def test_options_are_frozen() -> None:
    """A key added by accident fails here; one added on purpose is added here and to the table of keys."""
    of_updates = ("paro_overlap_updates", "paro_quantized_updates")
    others = ("paro_outer_optimizer", "paro_parameter_cache_bytes")
    assert ("paro_strategy", "paro_group_size", *of_updates, *others) == KEYS
    assert OF_FASTEST == ("paro_memory_gb", "paro_decision_file", "paro_micro_step_seconds")
    assert (*KEYS, *OF_FASTEST, "stage3_leaf_bytes", "paro_report") == OURS
    assert MICS_KEYS == ("mics_shard_size", "mics_hierarchical_params_gather")
    assert (*MICS_KEYS, "zeropp_loco_param") == REMOVED
    page = (ROOT / "deepspeed_ext" / "config" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{key}`" in page for key in (*OURS, *REMOVED))


@pytest.mark.parametrize("key", [key for key in OURS[1:] if key != "paro_report"])
def test_no_key_stands_without_a_strategy(key: str) -> None:
    with pytest.raises(ValueError, match=f"{key} is set .* without zero_optimization.paro_strategy"):
        check_section({key: 1})


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_passes_with_its_stage_or_without(name: str) -> None:
    stage = STRATEGIES[name].stage
    for section in (
        {"paro_strategy": name},
        {"paro_strategy": name, "stage": stage},
        {"paro_strategy": name, "stage": 0},
        {"paro_strategy": name, "paro_parameter_cache_bytes": 0},
    ):
        assert check_section(section).name == name


def test_memory_may_be_less_than_a_gigabyte() -> None:
    assert check_section({"paro_strategy": "fastest", "paro_memory_gb": 0.5}) is None


@pytest.mark.parametrize("section", [{}, {"stage": 2}, None, True, 3])
def test_sections_without_our_keys_are_not_ours(section: Any) -> None:
    assert our_keys(section) == []


def initialize(zero: dict[str, Any], extra: dict[str, Any] | None = None, how: str = "initialize") -> None:
    """Let DeepSpeed read the configuration, with every collective forbidden."""
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


UPDATES: dict[str, Any] = {"paro_quantized_updates": {}}
WITHOUT_LOSS: dict[str, Any] = {"paro_quantized_updates": {"bits": "exact"}}
BF16: dict[str, Any] = {"bf16": {"enabled": True}}


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
        (in_zero("zero_quantized_nontrainable_weights"), {"zero_quantized_nontrainable_weights": True}, {}),
        (in_zero("reduce_scatter"), {"zeropp_loco_param": {}, "reduce_scatter": False}, {}),
        (in_zero("reduce_scatter"), {"zero_quantized_gradients": True, "reduce_scatter": False}, {}),
        (in_zero("elastic_checkpoint"), {"elastic_checkpoint": True}, {}),
        ("compile.deepcompile", {}, {"compile": {"deepcompile": True}}),
        (in_zero("save_muon_momentum_buffer_in_memory"), {"save_muon_momentum_buffer_in_memory": True}, {}),
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
            IIG | {"paro_parameter_cache_bytes": 9} | offload,
            {},
            cannot(in_zero("paro_parameter_cache_bytes"), "IIG") + ".*offload_param",
        )
        for offload in ({}, {"offload_param": {"device": "none"}})
    ),
    *(
        (
            {"paro_strategy": name, "paro_parameter_cache_bytes": 9} | offload,
            {},
            cannot(in_zero("paro_parameter_cache_bytes"), name) + ".*that have such: ING, IIG, IGG. ",
        )
        for name, offload in (("NIG", {}), ("III", {"offload_param": CPU}), ("GGG", {"offload_param": CPU}))
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
        (strategy | {"zero_quantized_weights": True}, {}, cannot(in_zero("zero_quantized_weights"), name) + why)
        for name, strategy, why in (
            ("NIG", NIG, ".*; paro_quantized_updates sends what a step has changed of them in few"),
            ("IIG", IIG, ".*; paro_quantized_updates sends what a step has changed of them in few"),
            ("III", III, "no parameters cross .*; paro_quantized_updates sends sums of gradients back"),
            ("GGG", GGG, r"parameters are gathered as they are\. Remove one"),
        )
    ),
    (GGG | UPDATES, {}, cannot(in_zero("paro_quantized_updates"), "GGG") + "with p = G no rank holds"),
    (III | UPDATES | {"reduce_scatter": False}, {}, cannot(in_zero("reduce_scatter"), "III") + "an all-reduce has no"),
    *(
        (
            NIG | UPDATES,
            {kind: {"enabled": True, f"{kind}_master_weights_and_grads": True}},
            cannot(f"{kind}.{kind}_master_weights_and_grads", "NIG") + ".*paro_quantized_updates would lose it",
        )
        for kind in ("fp16", "bf16")
    ),
    (NIG | WITHOUT_LOSS, {}, cannot(in_zero("paro_quantized_updates.bits"), "NIG") + '"exact" is for .* of 16 bits'),
    (III | WITHOUT_LOSS, BF16, cannot(in_zero("paro_quantized_updates.bits"), "III") + '"exact" is .* here sums of'),
    (IIG | UPDATES, {"torch_autocast": {"enabled": True}}, cannot("torch_autocast.enabled", "IIG") + ".*have to stay"),
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
            ({"paro_overlap_updates": True, "paro_quantized_updates": {}}, "paro_overlap_updates"),
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
QUANTIZED_UPDATES: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    *(
        (NIG | {"paro_quantized_updates": bad}, {}, rf"paro_quantized_updates{message}")
        for bad, message in (
            (None, " must be a dictionary of bits, block_size, resync_T .each may be left out., got None"),
            (True, " must be a dictionary of .*got True of type bool"),
            ({"blocksize": 128}, " has no key 'blocksize': .* Did you mean 'block_size'"),
            ({"bits": 3}, r'\.bits must be 4, 8 or "exact", got 3 of type int'),
            ({"bits": "4"}, r"""\.bits must be 4, 8 or "exact", got '4' of type str"""),
            ({"bits": "exact", "block_size": 64}, r"\.block_size is for bits 4 and 8.*Remove block_size"),
            ({"block_size": 100}, r"\.block_size must be a power of two from 32 to 4096 \(elements\), got 100"),
            ({"resync_T": 0}, r"\.resync_T must be an integer of at least 1 \(optimizer steps\), got 0"),
        )
    ),
    *(
        (UPDATES | section, {}, f"needs zero_optimization.stage 1 or 2, or a .* with p = N or I, got stage {stage}")
        for section, stage in (({}, None), ({"stage": 3}, 3), ({"stage": 4}, 4))
    ),
    *(  # keys that imply GGG
        (
            UPDATES | {"stage": 3} | key,
            {},
            rf"^{in_zero('paro_quantized_updates')} cannot be combined with .*with p = G",
        )
        for key in ({"zeropp_loco_param": {}}, {"stage3_leaf_bytes": True})
    ),
    (UPDATES | {"stage": 2, "zenflow": {}}, {}, "zenflow cannot be combined with .*paro_quantized_updates: ZenFlow"),
]


def muon(method: Any) -> dict[str, Any]:
    """The configuration of a Muon."""
    return {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "ns_method": method}}}


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
    (NIG, muon("gramm"), "^optimizer.params.ns_method must be one of gram, standard, got 'gramm'.$"),
    ({"paro_strategy": "fastest"}, muon(["gram"]), r"ns_method must be one of gram, standard, got \['gram'\]"),
    *(
        ({"paro_strategy": "NIG"}, {"checkpoint": {key: value}}, f"checkpoint.{key} must be true or false, got {got}")
        for key in ("async_save", "zero_order")
        for value, got in (("yes", "'yes'"), (1, "1 of type int"), (None, "None"))
    ),
    ({"paro_strategy": "fastest"}, {"checkpoint": {"async_save": 0.0}}, "checkpoint.async_save must be true or false"),
    *(
        (
            {"paro_strategy": "NIG"},
            {"checkpoint": {"async_save": True}, **other} | merged,
            f"checkpoint.async_save cannot be combined with {name}",
        )
        for name, other, merged in (
            ("checkpoint.writer", {}, {"checkpoint": {"async_save": True, "writer": {"type": "fast"}}}),
            ("datastates_ckpt", {"datastates_ckpt": {"host_cache_size": 1}}, {}),
        )
    ),
    *((section, {}, message) for section, message in BAD_SECTIONS),
]
WITHOUT_STRATEGY = [
    ({"stage": stage}, {"checkpoint": {key: True}}, f"checkpoint.{key} needs a strategy: set zero_optimization.paro_s")
    for stage, key in ((0, "async_save"), (2, "async_save"), (3, "zero_order"))
]


def test_saves_of_ours_need_a_strategy(ranks: Any) -> None:
    for zero, extra, message in WITHOUT_STRATEGY:
        for error in ranks(2).run_expect_error(make_engine, zero, extra):
            assert error.type == "ValueError" and error.message.startswith(message), error


def make_engine(zero: dict[str, Any], extra: dict[str, Any]) -> None:
    """As a script does."""
    from tests.harness import training

    training.make_engine(training.Job(config=extra), zero)


def test_every_reason_to_refuse_is_tested() -> None:
    messages = [message for *_, message in REFUSED_BESIDE]
    for row in KEYS_REFUSED:
        assert any(message.startswith(f"^{re.escape(row.key)} cannot be combined") for message in messages), row.key


@pytest.mark.parametrize("how", ["initialize", "zero.Init"])
@pytest.mark.parametrize(
    "rows",
    [REFUSED, REFUSED_BESIDE, MICS, LOCO, QUANTIZED_UPDATES],
    ids=["section", "beside", "mics", "loco", "quantized updates"],
)
def test_refused_alike_on_every_rank_before_any_communication(
    ranks: Any, rows: list[tuple[dict[str, Any], dict[str, Any], str]], how: str
) -> None:
    pool = ranks(4)
    for zero, extra, message in rows:
        errors = pool.run_expect_error(initialize, zero, extra, how)
        assert len({error.message for error in errors}) == 1, errors
        assert errors[0].type in ("ValueError", "DeepSpeedConfigError"), errors[0]
        assert re.search(message, errors[0].message) and "\n" not in errors[0].message, errors[0]
