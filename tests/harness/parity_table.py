# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The table of parity with stock DeepSpeed: the options, the values that exclude each other, and the rows that run. A
value of an option changes fields of a ``training.Job``; of ``zero`` and ``config`` it changes keys. A row runs with
strategies of its kind, compared with one stock run, on ``world`` ranks in groups of ``group``."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.harness.combinations import Excluded, Option, Row, Table

REPLICATED = ("NNN", "NNI", "NNG", "NII", "NIG", "NGG")
PARTITIONED = ("INI", "ING", "III", "IIG", "IGG", "GNG", "GIG", "GGG")
FILE = Path(__file__).with_name("parity_rows.json")
# With p = I and G, one strategy for each way of a gradient: it depends on g and os, and where both are G on p.
GRADIENT_PATHS = ("INI", "GNG", "III", "IIG", "IGG", "GGG")
# One for each way to hold parameters: p = os = I, p = I with os = G, p = os = G.
PARAMETER_PATHS = ("III", "ING", "GIG")

EXACT = {"weights": 1e-5, "losses": 1e-6, "norms": 1e-5}  # rounding of fp32 stays far below
# What stages of stock differ by, or an ulp or two.
BOUNDS = {"fp32": EXACT, "bf16": {"weights": 4e-3, "losses": 1e-2, "norms": 4e-3}}
BOUNDS["autocast"] = BOUNDS["bf16"]
BOUNDS["fp16"] = {"weights": 1e-3, "losses": 1e-3, "norms": 2e-3}
FEW = {"norms": 2e-2}  # of few elements, rounding does not average out: stages 1 and 2 of stock differ by 1e-2


def key(name: str, default: str, of: str = "zero", **values: dict[str, Any]) -> Option:
    """Return an option with a default that changes nothing, and other values that change keys of zero_optimization, or
    of the configuration."""
    return Option(name, {default: {}, **{value: {of: keys} for value, keys in values.items()}})


def sized(name: str, sizes: dict[str, int], *keys: str) -> Option:
    """Return an option whose values set keys of zero_optimization to a size."""
    return Option(name, {value: {"zero": dict.fromkeys(keys, size)} for value, size in sizes.items()})


# Nothing divides; and fewer elements than ranks.
SIZES = {"square": (13, 29, 29, 29, 7), "tiny": (3, 1, 1, 1, 2), "wide": (41, 17, 17, 17, 1)}
DTYPES = ("fp32", "bf16", "autocast", "fp16")
HOST = {"zero": {"offload_optimizer": {"device": "cpu"}}, "config": {"zero_force_ds_cpu_optimizer": False}}
PREDIVIDED = {"gradient_predivide_factor": 2.0}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
COMMON = (
    # Several groups of several ranks, three, one of all, and one for each rank.
    Option("shape", {f"{n}in{m}": {"world": n, "group": m} for n, m in ((4, 2), (4, 4), (4, 1), (6, 3), (6, 2))}),
    Option("accumulation", {f"x{number}": {"accumulation": number} for number in (1, 2, 3)}),  # micro-steps
    Option("sizes", {name: {"sizes": sizes} for name, sizes in SIZES.items()}),
    # The dtype of parameters, and of what is computed with them.
    Option("dtype", {name: {"dtype": name} if name != "autocast" else {"config": AUTOCAST} for name in DTYPES}),
    # Dtype of sums of gradients.
    Option("sums", {"sums": {}, "fp32sums": {"config": {"data_types": {"grad_accum_dtype": "fp32"}}}}),
    Option("wire", {"wire": {}, "fp32wire": {"config": {"communication_data_type": "fp32"}}}),  # dtype of messages
    Option("optimizer", {"SGD": {}, "Adam": {"optimizer": "Adam"}}),  # with other states
    Option("groups", {"group": {}, "2groups": {"groups": 2}}),  # parameter groups
    Option("clipping", {"clipped": {}, "unclipped": {"clipping": 0.0}}),  # by the norm, or not
    Option("frozen", {"trained": {}, "fewtrained": {"frozen": (0, 1, 2)}, "frozen": {"frozen": (1,)}}),  # layers
    Option("skipped", {"used": {}, "skipped": {"skipped": True}}),  # layers that rest in micro-steps or steps
    Option("overflow", {"finite": {}, "overflow": {"overflow": True}}),  # on one rank
    key("overlap", "waits", overlap={"overlap_comm": True}),  # reduction beside the backward
    key("contiguous", "contiguous", scattered={"contiguous_gradients": False}),  # gradients in one buffer
    # Several buckets, or one.
    sized("buckets", {"buckets": 600, "1bucket": 10**6}, "reduce_bucket_size", "allgather_bucket_size"),
    key("scatter", "reducescatter", allreduce={"reduce_scatter": False}),  # how buckets are reduced
    # When gradients are divided.
    key("scaling", "after", "config", prescale={"prescale_gradients": True}, predivide=PREDIVIDED),
    # Who says that a step is complete.
    Option("boundary", {"engine": {}, "user": {"boundary": "user"}, "step": {"boundary": "step"}}),
    Option("coalesced", {"each": {}, "coalesced": {"boundary": "coalesce"}}),  # reduction once behind all micro-steps
    Option("backward", {"backward": {}, "lossbackward": {"backward": "loss"}}),  # whose
    # Activations.
    Option("recomputed", {"kept": {}, "recomputed": {"checkpointing": False}, "reentrant": {"checkpointing": True}}),
    # States of the optimizer on the host.
    Option("offload", {"device": {}, "host": HOST}),
    # Messages as on nccl, and memory that is NaN until it is written.
    Option("memory", {"gloo": {}, "nan": {"nan": True}}),
)
OF_REPLICATED = (
    Option("operation", {"mean": {}, "sum": {"config": {"gradient_allreduce_op": "sum"}}}),  # of gradients
    # Shared weights, and weights of other modules.
    Option("network", {"plainnet": {}, "tangled": {"network": "Tangled"}}),
    Option("sync", {"sync": {}, "nosync": {"no_sync": True}}),  # of micro-steps before the last
    key("order", "inorder", roundrobin={"round_robin_gradients": True}),  # of parameters in shards
    key("alignment", "packed", aligned={"parameter_alignment": True}),  # of parameters in shards
    key("updates", "gathered", overlapped={"paro_overlap_updates": True}),  # under the next forward
)
MIXTURE = {"network": "Mixture", "empty": False}
PREFETCH = "stage3_prefetch_bucket_size"
OF_PARTITIONED = (
    # Shared weights, and weights of other modules; experts of which each rank uses others.
    Option("network", {"blocks": {"network": "Blocks"}, "tangled": {"network": "Tangled"}, "mixture": MIXTURE}),
    # Parameters that stay gathered.
    sized("persistent", {"none": 0, "some": 100, "all": 10**6}, "stage3_param_persistence_threshold"),
    # Sub-groups of the optimizer.
    sized("subgroups", {"subgroups": 300, "1subgroup": 10**9}, "sub_group_size"),
    # Prefetch of parameters: as configured, none, or short.
    key("prefetch", "prefetch", noprefetch={PREFETCH: 0}, shortprefetch={PREFETCH: 400}),
    key("live", "live", notlive={"stage3_max_live_parameters": 1}),  # parameters at most
    key("reuse", "reuse", noreuse={"stage3_max_reuse_distance": 0}),  # of gathered parameters
    key("gathers", "together", sequential={"stage3_allgather_sequential": True}),  # of modules
    # Units by default; a leaf module of the user's leaves the other blocks without units.
    key("leaf", "units", leaf={"leaf_module": {"names": ["layers.1"]}}),
    key("parameters", "held", hostparameters={"offload_param": {"device": "cpu"}}),  # where they are held
)

EXCLUDED = (
    # Only fp16 has a loss scale, and looks for overflows.
    Excluded({"overflow": ("overflow",), "dtype": ("fp32", "bf16", "autocast")}),
    # DeepSpeed scales before it reduces with all-reduces only
    Excluded({"scaling": ("prescale", "predivide"), "scatter": ("reducescatter",)}),
    # coalesce_grad_reduction has one micro-step an engine's step.
    Excluded({"coalesced": ("coalesced",), "boundary": ("user", "step")}),
    # Reentrant checkpointing needs inputs with gradients.
    Excluded({"recomputed": ("reentrant",), "frozen": ("fewtrained",)}),
    # Stages 1 and 2 refuse two backwards to one weight.
    Excluded({"recomputed": ("reentrant",), "network": ("tangled",)}),
)
WHOLE_GRADIENTS, SHARDED_GRADIENTS = REPLICATED[:3], REPLICATED[3:]
TABLES = {
    "N": Table(
        (*COMMON, *OF_REPLICATED),
        (
            *EXCLUDED,
            Excluded({"sync": ("nosync",)}, SHARDED_GRADIENTS),  # where gradients are sharded, no_sync is refused
            Excluded({"sync": ("nosync",), "boundary": ("user", "step")}),  # no_sync leaves the counting to its caller
            # no_sync and coalesce_grad_reduction are two.
            Excluded({"sync": ("nosync",), "coalesced": ("coalesced",)}),
            Excluded({"sync": ("nosync",), "overlap": ("overlap",)}),  # no_sync is refused beside overlap_comm
            Excluded({"overlap": ("overlap",), "boundary": ("step",)}, WHOLE_GRADIENTS),  # stage 1 refuses it
        ),
    ),
    "I, G": Table(
        (*COMMON, *OF_PARTITIONED),
        (
            *EXCLUDED,
            # Only stage 3 trains experts that some ranks leave out, and leaves old gradients.
            Excluded({"network": ("mixture",), "skipped": ("skipped",)}),
            # Stage 3 does not gather a leaf module whose inputs need no gradients.
            Excluded({"network": ("mixture",), "frozen": ("fewtrained",)}),
            # Stage 3 keeps gradients divided.
            Excluded({"network": ("mixture",), "scaling": ("prescale", "predivide")}),
            # Stage 3 has other gradients of leaf modules.
            Excluded({"network": ("mixture",), "coalesced": ("coalesced",)}),
        ),
    ),
}
STRATEGIES = {"N": REPLICATED, "I, G": PARTITIONED}
# Keys that change no numbers, but that stock does not have, or does wrong: it loses some offloaded gradients.
NOT_OF_STOCK = ("offload", "parameters", "updates", "sync")


def merge_changes(kind: str, row: Row) -> dict[str, Any]:
    """Return all that the values of a row change."""
    results: dict[str, Any] = {"zero": {}, "config": {}}
    for option in TABLES[kind].options:
        for name, change in option.values[row[option.name]].items():
            results[name] = {**results[name], **change} if name in ("zero", "config") else change
    return results


def job_fields(kind: str, row: Row) -> dict[str, Any]:
    """Return the fields of a ``training.Job`` for a row, its network by name."""
    fields = merge_changes(kind, row)
    for name in ("world", "group", "nan"):
        fields.pop(name, None)
    accumulation = fields["accumulation"]
    fields["steps"] = 3 if "overflow" in fields else 2
    if fields.pop("overflow", False):  # in the first micro-step of the second step
        fields["overflow"] = ((accumulation, 1),)
    if fields.pop("skipped", False):
        fields["skipped"] = resting(fields["steps"], accumulation)
    if "optimizer" in fields and row["dtype"] != "fp32":  # there, small gradients have no sign to rely on
        fields["config"]["optimizer"] = {"params": {"lr": 1e-2, "eps": 0.1, "torch_adam": True}}
    return fields


def resting(steps: int, accumulation: int) -> tuple[tuple[int, int], ...]:
    """Return (micro-step, layer): layer 1 is used in the first micro-step of a step only, layer 2 in the last only and
    in the second step not at all; without accumulation, in turns."""
    results = []
    for number in range(steps * accumulation):
        step, at = divmod(number, accumulation)
        if at or (accumulation == 1 and step % 2):
            results.append((number, 1))
        if at < accumulation - 1 or (step == 1 if accumulation > 1 else not step % 2):
            results.append((number, 2))
    return tuple(results)


def stock_row(kind: str, row: Row) -> Row:
    """Return the row that stock runs."""
    return {**row, **{option.name: option.default for option in TABLES[kind].options if option.name in NOT_OF_STOCK}}


def row_name(kind: str, row: Row) -> str:
    options = TABLES[kind].options
    return "-".join(row[option.name] for option in options if row[option.name] != option.default) or "defaults"


def named_row(kind: str, name: str) -> Row:
    options = {value: option.name for option in TABLES[kind].options for value in option.values}
    return TABLES[kind].row({options[value]: value for value in name.split("-") if name != "defaults"})


@functools.cache
def rows_of(kind: str, tier: str = "first") -> tuple[str, ...]:
    """Return the names of the rows that a tier runs. They are kept in a file, since computing them takes seconds."""
    return tuple(json.loads(FILE.read_text(encoding="utf-8"))[tier][kind])


def cases(tier: str) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield kind, row and strategies of the runs of a tier: in the first tier one or two, others in each row, so that
    each pair of values meets some; in the deep tier all."""
    for kind, every in (("N", 3), ("I, G", 8)):  # with p = N two: only half of these take all values
        for number, name in enumerate(rows_of(kind, tier)):
            yield kind, name, STRATEGIES[kind][number % every :: every] if tier == "first" else STRATEGIES[kind]


def write_rows() -> None:
    tiers = {"first": (2, {"N": "1", "I, G": "10"}), "deep": (3, {"N": "", "I, G": ""})}  # salts that give few rows
    results = {
        tier: {
            kind: [row_name(kind, row) for row in table.rows(strength, salts[kind])] for kind, table in TABLES.items()
        }
        for tier, (strength, salts) in tiers.items()
    }
    FILE.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def bounds(row: Row) -> dict[str, float]:
    """Return how far a strategy may be from stock."""
    few = row["sizes"] == "tiny" or row["frozen"] == "fewtrained"
    few = few or (row["sizes"], row["network"]) == ("wide", "blocks")  # the last block, of four elements, dominates
    return {**BOUNDS[row["dtype"]], **(FEW if few and row["dtype"] != "fp32" else {})}


if __name__ == "__main__":
    write_rows()
