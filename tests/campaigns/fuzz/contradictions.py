# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Draws configurations that contradict themselves. Every rank must refuse each of them.

A valid configuration is drawn first; a row of ``CONTRADICTIONS`` then adds keys with which it cannot run. The message
must be the same on all ranks and name one of the row's keys. Nothing may have been communicated when it is raised,
except what DeepSpeed sends to make the engine, if only the model shows the contradiction.
"""

from collections.abc import Callable, Sequence
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
        kind: for counting.
        world: ranks.
        config: the whole of it.
        keys: the message must name one of them.
        model: "plain", "experts" for DeepSpeed's MoE layer, "compiled", or "zero.Init" for one that is built under it.
        late: whether only the model or the optimizer tells.
    """

    kind: str = "contradiction"
    world: int = 2
    config: dict[str, Any] = field(default_factory=dict)
    keys: tuple[str, ...] = ()
    model: str = "plain"
    late: bool = False


class Row(NamedTuple):
    """A contradiction: keys that the message may name, and sections of zero_optimization of which one is added."""

    keys: Sequence[str]  # none: those of the section that is added
    sections: Sequence[dict[str, Any]]
    strategies: Sequence[str] = ALL
    config: dict[str, Any] = {}  # noqa: RUF012  never changed; added to the configuration
    dtypes: Sequence[str] = ("fp32", "bf16", "fp16")
    model: str = "plain"
    late: bool = False


def each(key: str, *values: Any, **others: Any) -> list[dict[str, Any]]:
    """Return a section for each value of a key, with further keys."""
    return [{key: value, **others} for value in values]


def bad(key: str, *values: Any, strategies: Sequence[str] = ALL, **others: Any) -> Row:
    """Return a row of bad values of a key."""
    return Row([key], each(key, *values, **others), strategies)


def inside(key: str, name: str, *values: Any, strategies: Sequence[str] = ALL) -> Row:
    """Return a row of bad values of a key of a dictionary."""
    return Row([name], each(key, *({name: value} for value in values)), strategies)


def misspelled(*names: str) -> list[dict[str, Any]]:
    """Return keys that lack a letter, have one more, or are in capitals, but begin as ours."""
    spelled = [
        way
        for name in names
        for at in range(5, len(name))
        for way in (name[:at] + name[at + 1 :], name[:at] + "x" + name[at:])
    ]
    return [{name: 2} for name in (*spelled, *map(str.upper, names))]


NOT_COUNTS = (0, -1, -7, 1.0, 2.5, True, False, None, "2", "auto", [2], {})
NOT_BOOLEANS = (0, 1, None, "true", "auto", [], 1.0)
LOCO, UPDATES, CPU, NVME = "zeropp_loco_param", "paro_quantized_updates", {"device": "cpu"}, {"device": "nvme"}
LEAF, GRANULARITY, CACHE = "stage3_leaf_bytes", "stage3_module_granularity_threshold", "paro_parameter_cache_bytes"
QUANTIZABLE = [name for name in ALL if name[0] != "G"]
SUMS = [name for name in ALL if name[2] != "G"]
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
NAMES = ("NGI", "GNN", "INN", "IGI", "ZeRO", "auto", "", "nig", 3, None, True, ["NIG"], "NIG ")

CONTRADICTIONS: tuple[Row, ...] = (
    bad("paro_strategy", *NAMES),
    bad("paro_group_size", *NOT_COUNTS, 5, 7, 16),
    bad("paro_overlap_updates", *NOT_BOOLEANS),
    Row((), misspelled("paro_group_size", "paro_memory_gb")),
    Row(("paro_group_size", "paro_strategy"), [{}], config={"paro_group_size": 2}),
    bad("stage", 3, strategies=REPLICATED),
    bad("stage", 1, 2, strategies=SHARDED),
    bad("stage", 4, -1, "2", "auto"),
    bad("paro_memory_gb", 4, 0, "8"),
    bad("paro_decision_file", "f.json", ""),
    bad("paro_memory_gb", 0, -1, "4", True, None, paro_strategy="fastest"),
    bad("paro_micro_step_seconds", -1, "1", True, None, paro_strategy="fastest"),
    bad("mics_shard_size", 1, 2, 0, -2, "2", 1.5, None),
    bad("mics_hierarchical_params_gather", True),
    bad(LEAF, True, 10_000, strategies=REPLICATED),
    bad(LEAF, -1, "1e6", None, 1.5, strategies=SHARDED),
    Row((LEAF, GRANULARITY), each(LEAF, True, 10_000, **{GRANULARITY: 20}), SHARDED),
    bad(LOCO, True, None, 4, "4", [], "auto", {"beta": 0.5}),
    inside(LOCO, "bits", 1, 2, 16, "4", True, 4.0, None, "exact"),
    inside(LOCO, "err_beta", 1, 1.0, -0.1, "0.8", None, True),
    inside(LOCO, "reset_T", *NOT_COUNTS),
    inside(LOCO, "block_size", 0, 16, 33, 100, 8192, "128", None),
    inside(LOCO, "error_bits", 4, 32, "8", True),
    inside(LOCO, "hadamard", *NOT_BOOLEANS),
    Row((LOCO, "zero_quantized_gradients"), [{LOCO: {}, "zero_quantized_gradients": False}]),
    Row(("reduce_scatter",), [{LOCO: {}, "reduce_scatter": False}]),
    bad(UPDATES, True, None, 4, "exact", strategies=QUANTIZABLE),
    inside(UPDATES, "bits", 2, 16, "4", "lossless", None, strategies=QUANTIZABLE),
    inside(UPDATES, "block_size", 0, 31, 5000, strategies=QUANTIZABLE),
    inside(UPDATES, "resync_T", *NOT_COUNTS, strategies=QUANTIZABLE),
    Row(("block_size",), [{UPDATES: {"bits": "exact", "block_size": 64}}], QUANTIZABLE),
    bad(UPDATES, {}, {"bits": 8}, strategies=[name for name in ALL if name[0] == "G"]),
    bad(UPDATES, {"bits": "exact"}, strategies=SUMS),
    Row((UPDATES,), [{UPDATES: {"bits": "exact"}}], [s for s in QUANTIZABLE if s[2] == "G"], dtypes=["fp32"]),
    Row(("reduce_scatter",), [{UPDATES: {}, "reduce_scatter": False}], SUMS),
    Row(("torch_autocast",), [{UPDATES: {}}], ("IIG", "IGG", "ING"), AUTOCAST, ["fp32"]),
    bad("zenflow", {"topk_ratio": 0.1}),
    Row(("super_offload",), [{"offload_optimizer": {**CPU, "super_offload": True}}]),
    bad("offload_optimizer", {**NVME, "nvme_path": "/tmp"}),
    bad("offload_param", CPU, strategies=REPLICATED),
    bad("offload_param", {**NVME, "nvme_path": "/tmp"}, strategies=SHARDED),
    bad(CACHE, 100, offload_param=CPU, strategies=[name for name in SHARDED if name not in SLICED]),
    bad(CACHE, 100, offload_param=None, strategies=SLICED),
    bad(GRANULARITY, 20, strategies=REPLICATED),
    bad("stage3_use_all_reduce_for_fetch_params", True, strategies=SHARDED),
    bad("enable_sanity_checks", True, strategies=SHARDED),
    bad("pipeline_loading_checkpoint", True, strategies=("INI", "III")),
    Row(("use_node_local_storage",), [{}], ("INI", "III"), {"checkpoint": {"use_node_local_storage": True}}),
    bad("zero_hpz_partition_size", 2),
    bad("zero_quantized_weights", True),
    bad("zero_quantized_nontrainable_weights", True),
    bad("elastic_checkpoint", True),
    Row(("deepcompile",), [{}], config={"compile": {"deepcompile": True}}),
    bad("save_muon_momentum_buffer_in_memory", True),
    Row(("sequence_parallel_size",), [{}], config={"sequence_parallel_size": 2}),
    *(Row(("paro_strategy",), [{}], SHARDED, model=model, late=True) for model in ("experts", "compiled")),
    Row(("paro_strategy",), [{}], REPLICATED, model="zero.Init", late=True),
    Row(
        ("paro_strategy",),
        [{}],
        REPLICATED,
        {"optimizer": {"type": "Muon", "params": {"lr": 0.1, "torch_adam": True}}},
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
    rows = [row]
    if not row.late and draw(some.integers(0, 3)) == 3:  # one of both must be named
        rows.insert(0, draw(one_of(*(one for one in CONTRADICTIONS if strategy in one.strategies and not one.late))))
    keys: list[str] = []
    for one in rows:
        given = draw(one_of(*one.sections))
        zero.update(given)
        config.update(one.config)
        keys += one.keys or given
    if "sequence_parallel_size" in config:
        config["data_parallel_size"] = world // config["sequence_parallel_size"]
    if row.late:
        zero.pop("offload_param", None)
    return Contradiction(
        world=world, config={**config, "zero_optimization": zero}, keys=tuple(keys), model=row.model, late=row.late
    )
