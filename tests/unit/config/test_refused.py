# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Refusals are one paragraph, on every rank, before anything is communicated."""

import re
from typing import Any
from unittest import mock

import deepspeed
import pytest
import torch
from deepspeed import comm as dist

from deepspeed_ext.config.keys import our_keys
from deepspeed_ext.config.model import ParoConfig
from deepspeed_ext.config.refused import REFUSED as KEYS_REFUSED
from deepspeed_ext.strategy import STRATEGIES, hyphenate
from tests.harness import training
from tests.harness.config_sections import CPU, GGG, IIG, III, NIG, NVME, config
from tests.harness.tiers import deep, with_cases

pytestmark = pytest.mark.quick

# Keys of zero_optimization, other keys of the configuration, and a pattern of the message.
Row = tuple[dict[str, Any], dict[str, Any], str]
UPDATES: dict[str, Any] = {"paro_quantized_updates": {}}
WITHOUT_LOSS: dict[str, Any] = {"paro_quantized_updates": {"bits": "exact"}}
ORDERED: dict[str, Any] = {"paro_reduce": "ordered"}
FASTEST: dict[str, Any] = {"paro_strategy": "fastest"}
OWN_STEPS: dict[str, Any] = {"paro_micro_batches": [2, 1]}


def outer(strategy: str = "III", **given: Any) -> dict[str, Any]:
    return {"paro_strategy": strategy, "paro_outer_optimizer": given}


def muon(method: Any) -> dict[str, Any]:
    return {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "ns_method": method}}}


def cannot(key: str, strategy: str) -> str:
    """Return a pattern for the start of the message that refuses a key with a strategy."""
    return f"^{re.escape(key)} cannot be combined with zero_optimization.paro_strategy {hyphenate(strategy)}: "


def alone(*rows: tuple[dict[str, Any], str]) -> list[Row]:
    """Return rows of sections that are refused whatever else is configured."""
    return [(section, {}, message) for section, message in rows]


def beside(strategy: dict[str, Any], key: str, zero: dict[str, Any], why: str = "", **extra: Any) -> Row:
    """Return a row of a key that cannot be combined with a strategy."""
    return strategy | zero, extra, cannot(key, strategy["paro_strategy"]) + why


def in_zero(strategy: dict[str, Any], key: str, zero: dict[str, Any], why: str = "", **extra: Any) -> Row:
    return beside(strategy, f"zero_optimization.{key}", zero, why, **extra)


# Keys that need a strategy.
KEYS = {"group_size": 1, "overlap_updates": True, "outer_optimizer": {}, "parameter_cache_bytes": 1}
KEYS |= {"reduce": "ordered", "memory_gb": 1, "decision_file": "file", "micro_step_seconds": 1}
STRATEGY = alone(
    ({"paro_strategy": "NGI"}, "N-N-N, .*G-G-G .*got 'NGI'. N-G-I is not a strategy.*os = I is coarser than g = G"),
    ({"paro_strategy": "fast"}, "one of N-N-N, .*G-G-G .*, or fastest, got 'fast'"),
    ({"paro_strategy": "N-IG"}, "one of N-N-N, .*, or fastest, got 'N-IG'.$"),
    ({"paro_strategy": "nig"}, "got 'nig'. Did you mean 'N-I-G'\\?"),
    *(
        ({f"paro_{key}": value}, f"paro_{key} is set .* without zero_optimization.paro_strategy")
        for key, value in KEYS.items()
    ),
    ({"stage3_leaf_bytes": 1}, "stage3_leaf_bytes needs .*stage 3, or a paro_strategy with p = I or G, got"),
    ({"paro_strategy": "NIG", "paro_group_size": 0}, "integer of at least 1 .*got 0 of type int"),
    ({"paro_strategy": "NIG", "paro_group_size": True}, "got True of type bool"),
    ({"paro_strategy": "NIG", "paro_group_size": 3}, r"3 with 4 data-parallel ranks \(4 = 1 x 3 \+ 1\).*\[1, 2, 4\]"),
    *(
        ({"paro_strategy": "IIG", "paro_parameter_cache_bytes": value}, f"an integer of at least 0 .*got {value!r} of")
        for value in (-1, False, 9.0, None)
    ),
    ({"paro_strategy": "NIG", "paro_overlap_updates": 1}, "paro_overlap_updates must be true or false, got 1 of type"),
    ({"paro_strategy": "NIG", "paro_reduce": True}, 'be "backend", "ordered" or "ordered_everywhere", got True of'),
    ({"paro_strategy": "NIG", "stage": 3}, "N-I-G places p = N, g = I, which is stage 2, got stage 3. Set .*to 2"),
    ({"paro_strategy": "IIG", "stage": 2}, "I-I-G places p = I, g = I, which is stage 3, got stage 2. Set .*to 3"),
    (
        {"paro_stratgy": "NIG"},
        "no key 'paro_stratgy': .*paro_strategy, paro_group_size, .*zeropp_loco_param. Did you mean 'paro_strategy'",
    ),
    ({"paro_strategy": "NIG", "paro_memory_gb": 4}, 'is for paro_strategy fastest and paro_modules "fill", .*N-I-G'),
    ({"paro_strategy": "IIG", "paro_modules": "fill"}, "needs to know .*: add zero_optimization.paro_memory_gb"),
    ({"paro_strategy": "IIG", "paro_modules": "all"}, 'as {"visual.*": "N"}, or "fill", got \'all\''),
    (FASTEST | {"paro_modules": {"visual.*": "N"}}, "paro_modules cannot be combined with paro_strategy fastest"),
    (FASTEST | OWN_STEPS, "paro_micro_batches cannot be combined with .*with p and g = N or I, or remove"),
    ({"paro_strategy": "NIG", "paro_micro_batches": [2, 0]}, r"a list of integers of at least 1 .*got \[2, 0\] of"),
    ({"paro_strategy": "NIG", "paro_decision_file": "f"}, "paro_decision_file is for paro_strategy fastest"),
    (FASTEST | {"paro_memory_gb": 0}, "number above 0 .*got 0 of type int"),
    (FASTEST | {"paro_memory_gb": True}, "got True of type bool"),
    (FASTEST | {"paro_decision_file": ""}, "path of a file, got ''"),
    (FASTEST | {"paro_micro_step_seconds": -1}, "number of at least 0 .*got -1 of type int"),
    (FASTEST | {"stage": 4}, r"must be 1, 2 or 3 \(or absent\) with .* fastest, got 4"),
)
REPORT = alone(
    ({"stage": 2, "paro_report": True}, "paro_report must be a dictionary of folder, after, steps, probe"),
    *(
        ({"paro_strategy": "NIG", "paro_report": given}, "zero_optimization.paro_report" + said)
        for given, said in (
            ({"step": 3}, r" has no key 'step': its keys are folder, after, steps, probe. Did you mean 'steps'\?"),
            ({"steps": 0}, r".steps must be an integer of at least 1 \(optimizer steps\)"),
            ({"after": 1}, ".after must be an integer of at least 2"),
            ({"probe": 1}, ".probe must be true or false, got 1"),
            ({"folder": ""}, ".folder must be the path of a folder"),
        )
    ),
)
OUTER = alone(
    (outer("NIG"), r"os = I\): .*paro_strategy must be one of N-N-I, N-I-I, I-N-I, I-I-I, got N-I-G. I-I-I shards"),
    ({"paro_strategy": "III", "paro_outer_optimizer": 30}, "must be a dictionary of steps, lr, .*got 30 of type int"),
    (outer(step=30), "paro_outer_optimizer has no key 'step'.*Did you mean 'steps'"),
    (outer(steps=0), "steps must be an integer of at least 1 .*got 0"),
    (outer(lr=0.0), "lr must be a number above 0, got 0.0"),
    (outer(momentum=1.0), r"momentum must be a number in \[0, 1\), got 1.0"),
    (outer(nesterov="yes"), "nesterov must be true or false, got 'yes'"),
    (outer(warmup_steps=-1), "warmup_steps must be an integer of at least 0"),
    (outer(bits=2), "bits must be 4, 8, 16 or 32, got 2"),
    (outer(offload="nvme"), 'offload must be "none" or "cpu", got \'nvme\''),
    (outer(steps=2, fragments=3), "fragments must be at most .*steps.*got 3 fragments and 2 steps"),
    (outer(steps=10, fragments=3, delay=3), "with 10 steps and 3 fragments less than 3, got 3"),
    (outer() | {"zeropp_loco_param": {}}, "zeropp_loco_param cannot be combined with .*bits sets the bits"),
    (outer() | UPDATES, "paro_quantized_updates cannot be combined"),
    (outer() | OWN_STEPS, "paro_micro_batches cannot be combined with .*averages groups with equal weights"),
    (outer() | ORDERED, "paro_reduce cannot be combined with .*: inner steps send nothing between groups"),
)
OTHER_PACKAGES: list[Row] = [
    in_zero(NIG, "zenflow", {"zenflow": {}}),
    in_zero(IIG, "offload_optimizer.super_offload", {"offload_optimizer": {"device": "cpu", "super_offload": True}}),
    in_zero(GGG, "offload_optimizer.device", {"offload_optimizer": NVME}),
    in_zero(IIG, "zero_hpz_partition_size", {"zero_hpz_partition_size": 2}),
    in_zero(NIG, "zero_quantized_nontrainable_weights", {"zero_quantized_nontrainable_weights": True}),
    in_zero(GGG, "reduce_scatter", {"zeropp_loco_param": {}, "reduce_scatter": False}),
    in_zero(GGG, "reduce_scatter", {**ORDERED, "reduce_scatter": False}, ".*paro_reduce asks for rank order"),
    in_zero(NIG, "paro_reduce", {**ORDERED, "zeropp_loco_param": {}}, '.*"ordered_everywhere" also orders'),
    in_zero(NIG, "reduce_scatter", {"zero_quantized_gradients": True, "reduce_scatter": False}),
    in_zero(GGG, "paro_micro_batches", OWN_STEPS, ".*once per step: N-N-N, N-N-I, N-N-G, N-I-I, N-I-G, I-N-I, I-N-G"),
    (NIG | {"paro_micro_batches": "measured"}, {}, '"measured" needs gradient_accumulation_steps of at least 2'),
    in_zero(NIG, "paro_micro_batches", OWN_STEPS, ".*the script chooses", managed_gradient_accumulation=False),
    in_zero(NIG, "paro_weights", {"paro_weights": "tokens", "zeropp_loco_param": {}}, ".*_param keeps errors"),
    in_zero(III, "paro_weights", {"paro_weights": "tokens"} | UPDATES, ".*updates keeps errors of sums"),
    in_zero(IIG, "elastic_checkpoint", {"elastic_checkpoint": True}),
    in_zero(NIG, "save_muon_momentum_buffer_in_memory", {"save_muon_momentum_buffer_in_memory": True}),
    beside(GGG, "compile.deepcompile", {}, compile={"deepcompile": True}),
    beside(NIG, "compile.deepcompile", {}, compile={"deepcompile": True, "passes": ["autosp", "z1"]}),
    beside(NIG, "compile.passes autosp", {}, compile={"deepcompile": True, "passes": ["autosp"]}),
    beside(IIG, "compile.passes autotp", {}, compile={"deepcompile": True, "passes": ["autotp"]}),
    in_zero(NIG, "offload_param", {"offload_param": CPU}),
    in_zero(NIG, "stage3_module_granularity_threshold", {"stage3_module_granularity_threshold": 9}),
    *(
        in_zero(IIG, "paro_parameter_cache_bytes", {"paro_parameter_cache_bytes": 9} | offload, ".*offload_p")
        for offload in ({}, {"offload_param": {"device": "none"}})
    ),
    *(
        in_zero(
            strategy,
            "paro_parameter_cache_bytes",
            {"paro_parameter_cache_bytes": 9} | offload,
            ".*with such slices: I-N-G, I-I-G, I-G-G. ",
        )
        for strategy, offload in ((NIG, {}), (III, {"offload_param": CPU}), (GGG, {"offload_param": CPU}))
    ),
    *(
        in_zero(strategy, key, {name: value})
        for strategy in (IIG, GGG)
        for key, name, value in (
            ("offload_param.device", "offload_param", NVME),
            ("stage3_use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params", True),
            ("enable_sanity_checks", "enable_sanity_checks", True),
        )
    ),
    *(
        in_zero(strategy, "zero_quantized_weights", {"zero_quantized_weights": True}, why)
        for strategy, why in (
            (NIG, ".*; paro_quantized_updates quantizes the changes of each step"),
            (III, "no parameters are sent .*; paro_quantized_updates quantizes sums of gradients"),
            (GGG, r"parameters are gathered unquantized\. Remove one"),
        )
    ),
    in_zero(GGG, "paro_quantized_updates", UPDATES, "with p = G, no rank holds"),
    in_zero(III, "reduce_scatter", UPDATES | {"reduce_scatter": False}, "an all-reduce has no"),
    *(
        beside(
            NIG,
            f"{kind}.{kind}_master_weights_and_grads",
            UPDATES,
            ".*paro_quantized_updates would lose them",
            **{kind: {"enabled": True, f"{kind}_master_weights_and_grads": True}},
        )
        for kind in ("fp16", "bf16")
    ),
    in_zero(NIG, "paro_quantized_updates.bits", WITHOUT_LOSS, '"exact" needs .* of 16 bits'),
    in_zero(III, "paro_quantized_updates.bits", WITHOUT_LOSS, '"exact" applies .* sends sums', bf16={"enabled": True}),
    beside(IIG, "torch_autocast.enabled", UPDATES, ".*must stay equal", torch_autocast={"enabled": True}),
    in_zero(III, "pipeline_loading_checkpoint", {"pipeline_loading_checkpoint": True}),
    beside(III, "checkpoint.use_node_local_storage", {}, checkpoint={"use_node_local_storage": True}),
]
# DeepSpeed's words for what it has removed, and ours for MiCS.
MICS: list[Row] = [
    *alone(
        ({"mics_shard_size": 0}, r"mics_shard_size must be an integer .* or -1 for off, got 0 of type int\."),
        ({"mics_shard_size": True}, "or -1 for off, got True of type bool"),
        ({"mics_shard_size": 3}, r"3 with 4 data-parallel ranks \(4 = 1 x 3 \+ 1\).*\[1, 2, 4\]"),
        ({"mics_shard_size": 2, "stage": 2}, "mics_shard_size needs zero_optimization.stage 3, got 2"),
    ),
    *(
        (
            {"mics_shard_size": 2, **ours},
            {},
            f"mics_shard_size 2 means paro_strategy I-I-I .* but {', '.join(ours)} is set as well",
        )
        for ours in ({"paro_strategy": "NIG"}, {"paro_group_size": 2}, {"paro_strategy": "III", "paro_group_size": 2})
    ),
    *(
        (
            {"stage": 3, "mics_hierarchical_params_gather": True, **off},
            {},
            "mics_hierarchical_params_gather needs .*mics_shard_size",
        )
        for off in ({}, {"mics_shard_size": -1})
    ),
    ({"mics_shard_size": 2, "zero_hpz_partition_size": 2}, {}, "zero_hpz_partition_size cannot be .* I-I-I: "),
    ({"stage": 3}, {"mics_shard_size": 2}, "'mics_shard_size' is at the top level .*move it into zero_optimization"),
    ({"mics_shard_size": 2}, {"elasticity": {"enabled": True}}, "Elastic training has been removed"),
]
LOCO_KEYS = "err_beta, reset_T, bits, block_size, error_bits, error_feedback, hadamard"
LOCO: list[Row] = [
    *(
        ({"stage": 2, "zeropp_loco_param": {key: bad}}, {}, rf"loco_param\.{key} must be {wanted}, got {bad!r} of")
        for key, wanted, values in (
            ("bits", "4 or 8", (5, True)),
            ("block_size", r"a power of two from 32 to 4096 \(elements\)", (16, 48, 8192, "auto")),
            ("err_beta", r"a number in \[0, 1\)", (1, -0.1, "0.8")),
            ("reset_T", r"an integer of at least 1 \(optimizer steps\)", (0, 2.0)),
            ("error_bits", "8 or 16", (4,)),
            ("error_feedback", "true or false", (1,)),
            ("hadamard", "true or false", (0,)),
        )
        for bad in values
    ),
    *alone(
        ({"stage": 2, "zeropp_loco_param": None}, f"must be a dictionary of {LOCO_KEYS} .each may be left out"),
        ({"stage": 2, "zeropp_loco_param": {"bit": 4}}, f"has no key 'bit': its keys are {LOCO_KEYS}.* mean 'bits'"),
        ({"zeropp_loco_param": {}}, "needs zero_optimization.stage 1, 2 or 3, or .*paro_strategy, got stage None"),
        (
            {"stage": 3, "zeropp_loco_param": {}, "zero_quantized_gradients": False},
            "zeropp_loco_param implies zero_optimization.zero_quantized_gradients, which is set to false",
        ),
        (
            {"stage": 3, "zeropp_loco_param": {}, "zero_hpz_partition_size": 2},
            "^zero_optimization.zero_hpz_partition_size cannot be combined with zero_optimization.zeropp_loco_param: ",
        ),
    ),
    ({"stage": 1}, {"zeropp_loco_param": {}}, "'zeropp_loco_param' is at the top level .*move it into zero_optim"),
]
QUANTIZED_UPDATES: list[Row] = [
    *(
        (NIG | {"paro_quantized_updates": bad}, {}, rf"paro_quantized_updates{message}")
        for bad, message in (
            (None, " must be a dictionary of bits, block_size, resync_T .each may be left out., got None"),
            ({"blocksize": 128}, " has no key 'blocksize': .* Did you mean 'block_size'"),
            ({"bits": "4"}, r"""\.bits must be 4, 8 or "exact", got '4' of type str"""),
            ({"bits": "exact", "block_size": 64}, r"\.block_size is for bits 4 and 8.*Remove block_size"),
            ({"block_size": 100}, r"\.block_size must be a power of two from 32 to 4096 \(elements\), got 100"),
            ({"resync_T": 0}, r"\.resync_T must be an integer of at least 1 \(optimizer steps\), got 0"),
        )
    ),
    *(
        (UPDATES | section, {}, f"needs zero_optimization.stage 1 or 2, or a .* with p = N or I, got stage {stage}")
        for section, stage in (({}, None), ({"stage": 3}, 3))
    ),
    *(  # keys that imply GGG
        (UPDATES | {"stage": 3} | key, {}, r"^zero_.*quantized_updates cannot be combined with .*with p = G")
        for key in ({"zeropp_loco_param": {}}, {"stage3_leaf_bytes": True})
    ),
    (UPDATES | {"stage": 2, "zenflow": {}}, {}, "zenflow cannot be combined with .*paro_quantized_updates: ZenFlow"),
]
ELSEWHERE: list[Row] = [
    ({"stage": 2}, {"paro_strategy": "NIG"}, "'paro_strategy' is at the top level .*move it into zero_optimization"),
    (NIG, muon("gramm"), "^optimizer.params.ns_method must be one of gram, standard, got 'gramm'.$"),
    (FASTEST, muon(["gram"]), r"ns_method must be one of gram, standard, got \['gram'\]"),
    *(
        (strategy, {"checkpoint": {key: value}}, f"checkpoint.{key} must be true or false, got {value!r}")
        for strategy, key, value in ((NIG, "async_save", "yes"), (FASTEST, "async_save", 0.0))
    ),
    (NIG, {"checkpoint": {"zero_order": True}}, "checkpoint.zero_order has been removed"),
    (
        NIG,
        {"checkpoint": {"async_save": True, "writer": {"type": "fast"}}},
        "checkpoint.async_save cannot be combined with checkpoint.writer",
    ),
    (
        NIG,
        {"checkpoint": {"async_save": True}, "datastates_ckpt": {"host_cache_size": 1}},
        "checkpoint.async_save cannot be combined with datastates_ckpt",
    ),
]
REFUSED = {
    "strategy": STRATEGY,
    "report": REPORT,
    "outer optimizer": OUTER,
    "beside a strategy": OTHER_PACKAGES,
    "MiCS": MICS,
    "LoCo": LOCO,
    "quantized updates": QUANTIZED_UPDATES,
    "elsewhere": ELSEWHERE,
}


def error_case(row: Row, how: str) -> str:
    """Return the error with which DeepSpeed refuses a configuration, with every collective forbidden."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was communicated")

    collectives = ("all_reduce", "broadcast", "all_gather", "barrier", "all_gather_into_tensor", "new_group")
    zero, extra, _ = row
    settings = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    settings |= {**config(**zero), **extra}
    with mock.patch.multiple(dist, **dict.fromkeys(collectives, refuse)):
        try:
            with deepspeed.zero.Init(config_dict_or_path=settings, enabled=how == "zero.Init"):
                model = torch.nn.Linear(3, 3)
            deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
        except Exception as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


@with_cases(
    "how, kind",
    *(("initialize", kind) for kind in REFUSED),
    ("zero.Init", "strategy"),
    *deep(*(("zero.Init", kind) for kind in REFUSED if kind != "strategy")),
)
def test_refused_alike_before_any_communication(ranks: Any, how: str, kind: str) -> None:
    answers = ranks(4).each(error_case, REFUSED[kind], how)
    assert answers == answers[: len(REFUSED[kind])] * 4
    prefix = "(?:ValueError|DeepSpeedConfigError): "
    refused = [(row, error, re.fullmatch(f"{prefix}(.+)", error)) for row, error in answers]
    wrong = [(row, error) for row, error, found in refused if not (found and re.search(row[2], found[1]))]
    assert not wrong, wrong


def test_every_reason_to_refuse_is_tested() -> None:
    messages = [message for *_, message in OTHER_PACKAGES]
    for row in KEYS_REFUSED:
        assert any(message.startswith(f"^{re.escape(row.key)} cannot be combined") for message in messages), row.key


WITHOUT_STRATEGY: list[Row] = [
    ({"stage": stage}, {"checkpoint": {key: True}}, f"checkpoint.{key} needs a strategy: set zero_optimization.paro_s")
    for stage, key in ((0, "async_save"), (2, "async_save"), (3, "memory_copies"))
]


def test_saves_of_ours_need_a_strategy(ranks: Any) -> None:
    for zero, extra, message in WITHOUT_STRATEGY:
        for error in ranks(2).run_expect_error(make_engine, zero, extra):
            assert error.type == "ValueError" and error.message.startswith(message), error


def make_engine(zero: dict[str, Any], extra: dict[str, Any]) -> None:
    training.make_engine(training.Job(config=extra), zero)


def test_options_are_frozen() -> None:
    """A key added by accident fails here; a key added on purpose is added here."""
    ours = "strategy group_size overlap_updates reduce modules quantized_updates outer_optimizer micro_batches weights"
    more = ("parameter_cache_bytes", "memory_gb", "decision_file", "micro_step_seconds", "report")
    keys = [f"paro_{key}" for key in (*ours.split(), *more)]
    mics = ("mics_shard_size", "mics_hierarchical_params_gather")
    assert list(ParoConfig.model_fields) == [*keys, "stage3_leaf_bytes", *mics, "zeropp_loco_param"]


def test_every_strategy_passes_with_its_stage_or_without() -> None:
    for name, row in STRATEGIES.items():
        for more in ({}, {"stage": row.stage}, {"stage": 0}, {"paro_parameter_cache_bytes": 0}):
            assert ParoConfig.from_section({"paro_strategy": name, **more}).named_strategy == row
    assert ParoConfig.from_section({"paro_strategy": "fastest", "paro_memory_gb": 0.5}).named_strategy is None


@pytest.mark.parametrize("section", [{}, {"stage": 2}, None, True, 3])
def test_sections_without_our_keys_are_not_ours(section: Any) -> None:
    assert our_keys(section) == []
