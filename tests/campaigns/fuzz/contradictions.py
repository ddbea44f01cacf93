# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws configurations that contradict themselves. Every rank must refuse each of them.

A valid configuration is drawn first; a row of ``CONTRADICTIONS`` then adds keys with which it cannot run. The message
must be the same on all ranks and name one of the row's keys. Nothing may have been communicated when it is raised,
except what DeepSpeed sends to make the engine, if only the model shows the contradiction.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hypothesis import strategies as some
from hypothesis.strategies import SearchStrategy

from tests.campaigns.fuzz.cases import Plain
from tests.campaigns.fuzz.drawing import REPLICATED, SHARDED, SLICED, one_of

ALL = (*REPLICATED, *SHARDED)


@dataclass(frozen=True, repr=False)
class Contradiction(Plain):
    """A configuration that cannot run.

    Attributes:
        kind: for counting; ``name``: of the row.
        world: ranks.
        config: the whole of it.
        keys: the message must name one of them.
        model: "plain", "experts" for DeepSpeed's MoE layer, "compiled", or "zero.Init" for one that is built under it.
        late: whether only the model or the optimizer tells.
    """

    kind: str = "contradiction"
    name: str = ""
    world: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    model: str = "plain"
    late: bool = False


class Row(NamedTuple):
    """A kind of contradiction.

    Attributes:
        name: of the kind.
        keys: the message must name one of them.
        zero, config: what is added to zero_optimization, and to the configuration.
        strategies: with which it is one.
        dtypes: likewise.
        model, late: as of ``Contradiction``.
    """

    name: str
    keys: tuple[str, ...]
    zero: SearchStrategy[dict[str, Any]] = some.just({})
    config: SearchStrategy[dict[str, Any]] = some.just({})
    strategies: tuple[str, ...] = ALL
    dtypes: tuple[str, ...] = ("fp32", "bf16", "fp16")
    model: str = "plain"
    late: bool = False


def of(*conditions: Callable[[str], bool]) -> tuple[str, ...]:
    """Strategies for which all conditions hold."""
    return tuple(name for name in ALL if all(condition(name) for condition in conditions))


def each(key: str, *values: Any, **others: Any) -> SearchStrategy[dict[str, Any]]:
    """A key with one of these values, beside others."""
    return one_of(*values).map(lambda value: {key: value, **others})


def inside(key: str, name: str, *values: Any) -> SearchStrategy[dict[str, Any]]:
    """A dictionary under a key, in which a sub-key has one of these values."""
    return one_of(*values).map(lambda value: {key: {name: value}})


def misspelled(*names: str) -> SearchStrategy[dict[str, Any]]:
    """One of these keys with a letter left out, added, or in capitals, but still with our prefix."""

    def spell(drawn: tuple[str, int, str]) -> dict[str, Any]:
        name, place, how = drawn
        at = 5 + place % (len(name) - 5)
        ways = {"out": name[:at] + name[at + 1 :], "in": name[:at] + "x" + name[at:], "up": name.upper()}
        return {ways[how]: 2}

    return some.tuples(one_of(*names), some.integers(0, 30), one_of("out", "in", "up")).map(spell)


NOT_COUNTS = (0, -1, -7, 1.0, 2.5, True, False, None, "2", "auto", [2], {})
NOT_BOOLEANS = (0, 1, None, "true", "auto", [], 1.0)
LOCO, UPDATES, CPU = "zeropp_loco_param", "paro_quantized_updates", {"device": "cpu"}
QUANTIZABLE = of(lambda s: s[0] != "G")
OTHER_OPTIMIZER = {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}}

MISSPELLED = "misspelled key"  # which the message must name

CONTRADICTIONS: tuple[Row, ...] = (
    Row(
        "no strategy",
        ("paro_strategy",),
        each("paro_strategy", "NGI", "GNN", "INN", "IGI", "ZeRO", "auto", "", "nig", 3, None, True, ["NIG"], "NIG "),
    ),
    Row("no group size", ("paro_group_size",), each("paro_group_size", *NOT_COUNTS)),
    Row("group size that does not divide", ("paro_group_size",), each("paro_group_size", 5, 7, 16)),
    Row("no boolean", ("paro_overlap_updates",), each("paro_overlap_updates", *NOT_BOOLEANS)),
    Row(MISSPELLED, (), misspelled("paro_group_size", "paro_memory_gb")),
    Row("key at the top level", ("paro_group_size", "paro_strategy"), config=each("paro_group_size", 2)),
    Row("stage of another strategy", ("stage",), each("stage", 3), strategies=REPLICATED),
    Row("stage below the strategy", ("stage",), each("stage", 1, 2), strategies=SHARDED),
    Row("stage that is none", ("stage",), each("stage", 4, -1, "2", "auto")),
    Row("keys of fastest", ("paro_memory_gb", "paro_decision_file"), each("paro_memory_gb", 4, 0, "8")),
    Row("file of fastest", ("paro_decision_file",), each("paro_decision_file", "f.json", "")),
    Row(
        "memory of fastest",
        ("paro_memory_gb",),
        each("paro_memory_gb", 0, -1, "4", True, None, paro_strategy="fastest"),
    ),
    Row(
        "seconds of fastest",
        ("paro_micro_step_seconds",),
        each("paro_micro_step_seconds", -1, "1", True, None, paro_strategy="fastest"),
    ),
    Row("MiCS beside a strategy", ("mics_shard_size",), each("mics_shard_size", 1, 2)),
    Row("no MiCS size", ("mics_shard_size",), each("mics_shard_size", 0, -2, "2", 1.5, None)),
    Row("MiCS without size", ("mics_hierarchical_params_gather",), each("mics_hierarchical_params_gather", True)),
    Row(
        "leaf bytes with p = N", ("stage3_leaf_bytes",), each("stage3_leaf_bytes", True, 10_000), strategies=REPLICATED
    ),
    Row("no leaf bytes", ("stage3_leaf_bytes",), each("stage3_leaf_bytes", -1, "1e6", None, 1.5), strategies=SHARDED),
    Row(
        "two keys for leaf modules",
        ("stage3_leaf_bytes", "stage3_module_granularity_threshold"),
        each("stage3_leaf_bytes", True, 10_000, stage3_module_granularity_threshold=20),
        strategies=SHARDED,
    ),
    Row("LoCo that is no dictionary", (LOCO,), each(LOCO, True, None, 4, "4", [], "auto")),
    Row("LoCo's bits", ("bits",), inside(LOCO, "bits", 1, 2, 16, "4", True, 4.0, None, "exact")),
    Row("LoCo's beta", ("err_beta",), inside(LOCO, "err_beta", 1, 1.0, -0.1, "0.8", None, True)),
    Row("LoCo's reset", ("reset_T",), inside(LOCO, "reset_T", *NOT_COUNTS)),
    Row("LoCo's blocks", ("block_size",), inside(LOCO, "block_size", 0, 16, 33, 100, 8192, "128", None)),
    Row("LoCo's errors", ("error_bits",), inside(LOCO, "error_bits", 4, 32, "8", True)),
    Row("LoCo's booleans", ("hadamard",), inside(LOCO, "hadamard", *NOT_BOOLEANS)),
    Row("LoCo's keys", (LOCO,), inside(LOCO, "beta", 0.5)),
    Row(
        "LoCo and no quantized gradients",
        (LOCO, "zero_quantized_gradients"),
        some.just({LOCO: {}, "zero_quantized_gradients": False}),
    ),
    Row("LoCo and all-reduce", ("reduce_scatter",), some.just({LOCO: {}, "reduce_scatter": False})),
    Row("updates that are no dictionary", (UPDATES,), each(UPDATES, True, None, 4, "exact"), strategies=QUANTIZABLE),
    Row("bits of updates", ("bits",), inside(UPDATES, "bits", 2, 16, "4", "lossless", None), strategies=QUANTIZABLE),
    Row("blocks of updates", ("block_size",), inside(UPDATES, "block_size", 0, 31, 5000), strategies=QUANTIZABLE),
    Row("resync of updates", ("resync_T",), inside(UPDATES, "resync_T", *NOT_COUNTS), strategies=QUANTIZABLE),
    Row(
        "blocks without bits",
        ("block_size",),
        some.just({UPDATES: {"bits": "exact", "block_size": 64}}),
        strategies=QUANTIZABLE,
    ),
    Row("updates with p = G", (UPDATES,), each(UPDATES, {}, {"bits": 8}), strategies=of(lambda s: s[0] == "G")),
    Row(
        "sums without loss",
        (UPDATES,),
        some.just({UPDATES: {"bits": "exact"}}),
        strategies=of(lambda s: s[2] != "G"),
    ),
    Row(
        "fp32 without loss",
        (UPDATES,),
        some.just({UPDATES: {"bits": "exact"}}),
        strategies=of(lambda s: s[0] != "G", lambda s: s[2] == "G"),
        dtypes=("fp32",),
    ),
    Row(
        "sums by all-reduce",
        ("reduce_scatter",),
        some.just({UPDATES: {}, "reduce_scatter": False}),
        strategies=of(lambda s: s[2] != "G"),
    ),
    Row(
        "updates and autocast",
        ("torch_autocast",),
        some.just({UPDATES: {}}),
        some.just({"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        strategies=of(lambda s: s[0] == "I", lambda s: s[2] == "G"),
        dtypes=("fp32",),
    ),
    Row("ZenFlow", ("zenflow",), some.just({"zenflow": {"topk_ratio": 0.1}})),
    Row(
        "SuperOffload",
        ("super_offload",),
        some.just({"offload_optimizer": {"device": "cpu", "super_offload": True}}),
    ),
    Row(
        "states on NVMe",
        ("offload_optimizer",),
        some.just({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}),
    ),
    Row("parameters on the host, p = N", ("offload_param",), some.just({"offload_param": CPU}), strategies=REPLICATED),
    Row(
        "a cache of parameters on the host, p = os",
        ("paro_parameter_cache_bytes",),
        some.just({"offload_param": CPU, "paro_parameter_cache_bytes": 100}),
        strategies=of(lambda s: s in SHARDED and s not in SLICED),
    ),
    Row(
        "a cache of parameters that are not on the host",
        ("paro_parameter_cache_bytes",),
        some.just({"paro_parameter_cache_bytes": 100, "offload_param": None}),
        strategies=SLICED,
    ),
    Row(
        "parameters on NVMe",
        ("offload_param",),
        some.just({"offload_param": {"device": "nvme", "nvme_path": "/tmp"}}),
        strategies=SHARDED,
    ),
    Row(
        "threshold with p = N",
        ("stage3_module_granularity_threshold",),
        each("stage3_module_granularity_threshold", 20),
        strategies=REPLICATED,
    ),
    Row(
        "all-reduce for gathers",
        ("stage3_use_all_reduce_for_fetch_params",),
        some.just({"stage3_use_all_reduce_for_fetch_params": True}),
        strategies=SHARDED,
    ),
    Row("sanity checks", ("enable_sanity_checks",), some.just({"enable_sanity_checks": True}), strategies=SHARDED),
    Row(
        "loading one by one",
        ("pipeline_loading_checkpoint",),
        some.just({"pipeline_loading_checkpoint": True}),
        strategies=("INI", "III"),
    ),
    Row(
        "local storage",
        ("use_node_local_storage",),
        config=some.just({"checkpoint": {"use_node_local_storage": True}}),
        strategies=("INI", "III"),
    ),
    Row("hpZ", ("zero_hpz_partition_size",), each("zero_hpz_partition_size", 2)),
    Row("quantized weights", ("zero_quantized_weights",), some.just({"zero_quantized_weights": True})),
    Row(
        "quantized frozen weights",
        ("zero_quantized_nontrainable_weights",),
        some.just({"zero_quantized_nontrainable_weights": True}),
    ),
    Row("elastic checkpoints", ("elastic_checkpoint",), some.just({"elastic_checkpoint": True})),
    Row("DeepCompile", ("deepcompile",), config=some.just({"compile": {"deepcompile": True}})),
    Row(
        "momentum in memory",
        ("save_muon_momentum_buffer_in_memory",),
        some.just({"save_muon_momentum_buffer_in_memory": True}),
    ),
    Row("mesh", ("sequence_parallel_size",), config=some.just({"sequence_parallel_size": 2, "data_parallel_size": 1})),
    Row("experts, p is sharded", ("paro_strategy",), strategies=SHARDED, model="experts", late=True),
    Row("sharded model, p = N", ("paro_strategy",), strategies=REPLICATED, model="zero.Init", late=True),
    Row("compiled model, p is sharded", ("paro_strategy",), strategies=SHARDED, model="compiled", late=True),
    Row(
        "experts with Muon",
        ("paro_strategy",),
        config=some.just({"optimizer": OTHER_OPTIMIZER}),
        strategies=REPLICATED,
        model="experts",
        late=True,
    ),
)


@some.composite
def contradictions(draw: Callable[[SearchStrategy[Any]], Any], worlds: tuple[int, ...]) -> Contradiction:
    """A configuration with one contradiction, or with two."""
    row = draw(one_of(*CONTRADICTIONS))
    even = [world for world in worlds if world % 2 == 0] or [2]
    strategy, world = draw(one_of(*row.strategies)), draw(one_of(*even))
    dtype = draw(one_of(*row.dtypes))
    zero: dict[str, Any] = {"paro_strategy": strategy, "paro_group_size": draw(one_of(world, 1))}
    if draw(some.booleans()):
        zero.update(reduce_bucket_size=draw(one_of(300, 1000)), overlap_comm=draw(some.booleans()))
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_allow_untested_optimizer": True,
        "gradient_accumulation_steps": draw(some.integers(1, 3)),
        "gradient_clipping": draw(one_of(0.0, 0.5)),
        "optimizer": {"type": draw(one_of("SGD", "Adam")), "params": {"lr": 0.1}},
    }
    if config["optimizer"]["type"] == "Adam":
        config["optimizer"]["params"]["torch_adam"] = True
    if dtype != "fp32":
        config[dtype] = {"enabled": True}
    keys = row.keys
    rows = [row]
    if not row.late and draw(some.integers(0, 3)) == 3:  # one of both must be named
        rows.insert(0, draw(one_of(*(one for one in CONTRADICTIONS if strategy in one.strategies and not one.late))))
        keys += rows[0].keys
    for one in rows:
        given = draw(one.zero)
        zero.update(given)
        config.update(draw(one.config))
        keys += tuple(given) if one.name == MISSPELLED else ()
    if "sequence_parallel_size" in config:
        config["data_parallel_size"] = world // config["sequence_parallel_size"]
    if row.late:
        zero.pop("offload_param", None)
    return Contradiction(
        name=row.name,
        world=world,
        config={**config, "zero_optimization": zero},
        keys=keys,
        model=row.model,
        late=row.late,
    )
