# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext plan`` prints the predicted cost of each strategy and a choice, or writes a calculator.

Under a launcher (torchrun, deepspeed), the plan is for the launched ranks. Rates that are not given are measured.
"""

import argparse
import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed_ext.comm.process_groups import LOCAL_SIZE_VARIABLES, ranks_per_node
from deepspeed_ext.config.settings import BACKEND, ORDERED_LEVELS, OuterSettings
from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.compression import COMPRESSIONS
from deepspeed_ext.planner.memory import HostParameters, Model
from deepspeed_ext.planner.rates import GIGA, MICRO, Latencies, Rates, bytes_per_second
from deepspeed_ext.strategy import GroupSizes, ModelStates, Placement
from deepspeed_ext.tools.arguments import count, counts, import_callable, new_file, number, sub_key
from deepspeed_ext.tools.plan import page, report
from deepspeed_ext.tools.plan.outer import plan_outer
from deepspeed_ext.tools.plan.recorded_training import Cluster, RecordedTraining
from deepspeed_ext.tools.plan.saves import Saves, plan_saves
from deepspeed_ext.tools.plan.what_if import WhatIf

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOPS, FROZEN_FLOPS = 6, 4  # per parameter and token, forward and backward
TERMINAL = Path("-")  # value of --json
# Option, the option that it needs, and the reason.
REQUIRED = (
    ("trainable", "params", "of a --model, parameters that require a gradient are counted"),
    ("largest_layer", "params", "of a --model, the largest module is found"),
    ("modules", "model", "names of modules are not known otherwise"),
    ("expert_params", "params", "of a --model, parameters that DeepSpeed has marked are counted"),
    ("expert_params", "expert_parallel", ""),
    ("expert_parallel", "expert_params", ""),
    ("parameter_cache_gb", "offload_param", ""),
    ("tokens", "tflops", ""),
    ("tflops", "tokens", ""),
    ("intra_gbps", "inter_gbps", ""),
    ("inter_gbps", "intra_gbps", ""),
    ("host_gbps", "inter_gbps", "without it all rates are measured"),
    ("mtbf_hours", "disk_gbps", ""),
    ("disk_gbps", "mtbf_hours", ""),
    ("shared_disk_gbps", "mtbf_hours", ""),
    ("restart_seconds", "mtbf_hours", ""),
    ("async_save", "mtbf_hours", ""),
)
# Options that exclude each other, and the reason.
EXCLUSIVE = (
    ("expert_params", "trainable", "all parameters are trained"),
    ("tokens", "micro_step_seconds", "either of them gives the seconds of a micro-step"),
    ("tokens", "expert_params", "a token uses only some experts: give --micro-step-seconds"),
    ("outer", "reduce", "inner steps send nothing between groups"),
    ("outer", "offload_param", "only the outer optimizer's own states can be in host memory"),
    ("outer", "offload_optimizer", "only the outer optimizer's own states can be in host memory"),
)

# Options that go with --from; those of ``_CLUSTER_OPTIONS`` replace recorded values of the cluster.
_CLUSTER_OPTIONS = ("nodes", "ranks_per_node", "group_size", "intra_gbps", "inter_gbps", "latency_us")
OPTIONS_WITH_FROM = (*_CLUSTER_OPTIONS, "memory_gb", "accumulation", "overlap_updates", "json")


_COUNT, _WHOLE, _POSITIVE, _NON_NEGATIVE = number(count), number(int), number(float), number(float, zero=True)
_SWITCH: Mapping[str, Any] = {"action": "store_true"}
_Adder = Callable[..., argparse.Action]


def _adder(group: argparse._ActionsContainer) -> _Adder:
    """Return a function that adds an option from its flag, metavar, help, type if it has a value, and the rest."""

    def add(
        flag: str, metavar: Any, text: str | None, kind: Callable[[str], Any] | None = None, **rest: Any
    ) -> argparse.Action:
        keywords = _SWITCH if kind is None else {"type": kind, "metavar": metavar}
        return group.add_argument(flag, help=text, **{**keywords, **rest})

    return add


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    model = parser.add_argument_group("the model")
    either = _adder(model.add_mutually_exclusive_group(required=True))
    either("--model", "PKG:FN", "function that builds the model; on the meta device it takes no memory", str)
    either("--params", "N", "number of parameters instead, such as 7e9 or 7B", _COUNT)
    either("--page", "FILE", "write a calculator as one HTML file, which needs no installation or options", new_file)
    either("--from", "FILE", "report.json of your own training: predict it with other links, nodes, strategies", Path)
    _add_model(_adder(model))
    _add_cluster(_adder(parser.add_argument_group("the cluster; under a launcher, the launched ranks")))
    add = _adder(parser.add_argument_group("how often to save, if --mtbf-hours is given"))
    failures = "mean hours between failures of the whole job: those of one node, divided by the number of nodes"
    add("--mtbf-hours", "H", f"{failures}; needs --disk-gbps, and --micro-step-seconds or --tokens", _POSITIVE)
    add("--disk-gbps", "G", "10^9 bytes/s that a node writes to storage", _POSITIVE)
    add("--shared-disk-gbps", "G", "10^9 bytes/s that all nodes write together (default: no limit)", _POSITIVE)
    add(
        "--restart-seconds",
        "S",
        "from a failure until training continues, including the load (default: 0)",
        _NON_NEGATIVE,
    )
    add("--async-save", None, "checkpoint.async_save: training continues while files are written")
    add = _adder(parser.add_argument_group("output"))
    add("--json", "FILE", "write the plans; - for the terminal, instead of the table", new_file)


def _placed_pattern(text: str) -> tuple[str, str]:
    """Return a pattern of names of modules, and their placement."""
    pattern, _, placement = text.partition("=")
    if placement not in ("", Placement.N.name, Placement.I.name):
        raise argparse.ArgumentTypeError(f"expected PATTERN, PATTERN=N or PATTERN=I, got {text!r}")
    return pattern, placement or Placement.N.name


def _add_model(add: _Adder) -> None:
    non_negative = number(count, zero=True)
    add("--trainable", "N", "trained parameters, with --params (default: all)", non_negative)
    add("--largest-layer", "N", "parameters of the largest module, with --params", non_negative)
    add("--expert-params", "N", "parameters in experts, with --params and --expert-parallel", _COUNT)
    add("--expert-parallel", "E", "expert-parallel size: ranks that have all experts together", _WHOLE)
    add("--dtype", None, "dtype of parameters and gradients (default: bf16)", str, choices=BYTES)
    sent = "communication_data_type: dtype in which gradients are sent (default: that of --dtype)"
    add("--gradient-dtype", None, sent, str, choices=BYTES)
    placed = "paro_modules, with --model: modules that stay whole with p = I and G; =I: sharded in groups with p = G"
    add("--modules", "PATTERN[=I]", placed, _placed_pattern, nargs="+")
    ordered = [name for name, levels in ORDERED_LEVELS.items() if levels]
    add("--reduce", None, "paro_reduce: sum gradients in rank order, with its memory", str, choices=ordered)
    add("--accumulation", "S", "micro-steps of a step (default: 1)", _WHOLE)
    add(
        "--micro-step-seconds",
        "S",
        "seconds of forward and backward, without communication (default: 0)",
        _NON_NEGATIVE,
    )
    flops = "6 FLOPs for each token and parameter, 4 for a frozen one"
    add("--tokens", "N", f"tokens of a micro-batch on a rank, for --micro-step-seconds: {flops}", _COUNT)
    add("--tflops", "T", "10^12 FLOPs/s that a rank reaches, with --tokens", _POSITIVE)
    add("--overlap-updates", None, "paro_overlap_updates: with p = N, gather updates during the next forward")
    muon = "Muon trains the matrices that DeepSpeed chooses for it (with --params: all trained parameters)"
    seconds = "seconds that one rank would take to orthogonalize them all (default: 0)"
    add("--muon", "S", f"{muon}; S: {seconds}", _NON_NEGATIVE, nargs="?", const=0.0)
    outer = "with paro_outer_optimizer, for strategies with os = I: its steps, and other sub-keys"
    example, steps = "such as 30 bits=4 fragments=5 delay=2", partial(sub_key, alone="steps")
    add("--outer", ("H", "KEY=VALUE"), f"{outer}, {example}", steps, nargs="+")
    add("--offload-param", None, "offload_param: parameters in pinned host memory (p = I and G)")
    add(
        "--parameter-cache-gb", "G", "paro_parameter_cache_bytes, in 10^9 bytes: on each device as well", _NON_NEGATIVE
    )
    add("--offload-optimizer", None, "optimizer states in host memory")


def _add_cluster(add: _Adder) -> None:
    add("--nodes", None, None, _WHOLE)
    add("--ranks-per-node", "N", "one number, or one for each node, such as 8,4", counts)
    add("--group-size", None, "paro_group_size (default: ranks per node, or their greatest common divisor)", _WHOLE)
    add("--intra-gbps", "G", "Gbit/s that a rank receives inside its node", _POSITIVE)
    add("--inter-gbps", "G", "Gbit/s that a node receives from others", _POSITIVE)
    add("--host-gbps", "G", "10^9 bytes/s that each rank of a node copies from its host at once, and back", _POSITIVE)
    add(
        "--latency-us",
        "U",
        "latency of a message between groups; 0 within (default: NCCL's rings and PAT)",
        _NON_NEGATIVE,
    )
    add("--memory-gb", "G", "10^9 bytes of a rank for model states", _POSITIVE)


def run(arguments: argparse.Namespace) -> None:
    """Print the plan; under a launcher, on the first rank only.

    Raises:
        ValueError: an argument is missing, out of bounds, or contradicts another.
    """
    _check(arguments)
    first_rank = not int(os.environ.get("RANK", "0"))
    if arguments.page:
        if first_rank:
            arguments.page.write_text(page.render(), encoding="utf-8")
        return
    if vars(arguments)["from"] is not None:
        what_if = _what_if(arguments)
        _write(arguments.json, what_if.as_dict(), what_if.table)
        return
    settings = _outer_settings(arguments)
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    nodes = _ranks_of_nodes(arguments, launched)
    per_node = max(nodes)  # the links of the largest node are shared by the most ranks
    sizes = GroupSizes(sum(nodes), arguments.group_size or math.gcd(*nodes))
    model, saves = _model(arguments), _save_settings(arguments, per_node)
    rates = _rates(arguments, sizes, per_node, launched)
    if not first_rank and launched:  # not earlier: all ranks must take part in measuring rates
        return
    if arguments.inter_gbps is None:
        from deepspeed.accelerator import get_accelerator

        model = replace(model, streams=not get_accelerator().is_synchronized_device())
    budget = None if arguments.memory_gb is None else arguments.memory_gb * GIGA
    # ``offload_param`` needs sharded parameters.
    allowed = lambda row: model.host is None or row.p != Placement.N  # noqa: E731
    forms = dict(zip(("exact", "loco", "both"), COMPRESSIONS, strict=True))
    forms = {name: form for name, form in forms.items() if form.allows_sums(model.ordered)}
    plans = [plan(sizes, model, rates, budget, compressions=[form], allowed=allowed) for form in forms.values()]
    if saves is not None:
        plans = [plan_saves(exact, saves, form) for exact, form in zip(plans, forms.values(), strict=True)]
    document = {name: _document(planned, saves) for name, planned in zip(forms, plans, strict=True)}
    table: Callable[[], str] = partial(report.table, plans, saves)
    if settings is not None:
        outer = plan_outer(sizes, model, rates, settings, budget)
        document["outer"] = outer.as_dict()
        _add_saves_key(document["outer"]["predictions"])
        table = lambda: f"{report.table(plans, saves)}\n\n{report.outer_table(outer)}"  # noqa: E731
    _write(arguments.json, document, table)


def _write(file: Path | None, document: Mapping[str, Any], table: Callable[[], str]) -> None:
    """Print the table and write the document, or print the document instead."""
    text = json.dumps(document, indent=2, allow_nan=False)
    print(text if file == TERMINAL else table())
    if file not in (None, TERMINAL):
        file.write_text(text + "\n")


def _what_if(arguments: argparse.Namespace) -> WhatIf:
    """Return predictions of a recorded training for the arguments' cluster and memory.

    Raises:
        ValueError: the report cannot be used.
    """
    recorded = RecordedTraining.from_file(vars(arguments)["from"])
    old, model = recorded.planner_input.cluster, recorded.planner_input.model
    per_node, *others = arguments.ranks_per_node or [old.ranks_per_node]
    if others:
        raise ValueError("--ranks-per-node expects one number with --from.")
    ranks = old.sizes.ranks
    if arguments.nodes or arguments.ranks_per_node:
        ranks = (arguments.nodes or old.nodes) * per_node
    group_size = old.sizes.group_size if per_node == old.ranks_per_node else per_node
    latency = None if arguments.latency_us is None else arguments.latency_us * MICRO
    sizes = GroupSizes(ranks, arguments.group_size or group_size)
    model = replace(
        model,
        accumulation=arguments.accumulation or model.accumulation,
        overlap_updates=arguments.overlap_updates or model.overlap_updates,
    )
    cluster = Cluster(sizes, per_node, arguments.intra_gbps, arguments.inter_gbps, latency)
    return WhatIf(recorded, cluster, model, None if arguments.memory_gb is None else arguments.memory_gb * GIGA)


def _document(planned: Plan, saves: Saves | None) -> dict[str, Any]:
    """Return a plan as plain values; ``saves`` is None if saves are not predicted."""
    document = planned.as_dict() | {"reason": report.reason(planned)}
    document["saves"] = None if saves is None else saves.as_dict()
    _add_saves_key([*document["predictions"], *document["plain"], *filter(None, [document["choice"]])])
    return document


def _add_saves_key(rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        row.setdefault("saves", None)


def _check(arguments: argparse.Namespace) -> None:
    """Refuse arguments that contradict each other."""
    options = {name for name, value in vars(arguments).items() if value is not None and value is not False}
    options -= {"command", "local_rank"}
    other_options = sorted(options - {"page"})
    if arguments.page and other_options:
        raise ValueError(
            f"{_flag('page')} takes no other options, since the page has its own inputs: remove "
            f"{_flag(other_options[0])}."
        )
    if "from" in options:
        for option in sorted(options - {"from", *OPTIONS_WITH_FROM}):
            raise ValueError(
                f"{_flag(option)} cannot be combined with --from: only {', '.join(map(_flag, OPTIONS_WITH_FROM))} can."
            )
        return
    for option, needed, reason in REQUIRED:
        if option in options and needed not in options:
            raise ValueError(f"{_flag(option)} needs {_flag(needed)}{reason and ': '}{reason}.")
    for option, other, reason in EXCLUSIVE:
        if {option, other} <= options:
            raise ValueError(f"{_flag(option)} cannot be combined with {_flag(other)}: {reason}.")
    params, experts, trained = arguments.params, arguments.expert_params, arguments.trainable
    if experts is not None and experts >= params:
        raise ValueError(f"--expert-params {experts} must be less than --params {params}.")
    if trained is not None and trained > params:
        raise ValueError(f"--trainable {trained} must be at most --params {params}.")
    if "mtbf_hours" in options and not arguments.micro_step_seconds and "tokens" not in options:
        raise ValueError("--mtbf-hours needs the time of a step: give --micro-step-seconds above 0, or --tokens.")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _outer_settings(arguments: argparse.Namespace) -> OuterSettings | None:
    """Return the settings of --outer; None without it."""
    if arguments.outer is None:
        return None
    names = [name for name, _ in arguments.outer]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--outer gives {', '.join(twice)} twice.")
    return OuterSettings.parse(dict(arguments.outer), "--outer", "{where} {key}")


def _save_settings(arguments: argparse.Namespace, per_node: int) -> Saves | None:
    """Return the storage and failure rate of a run; None without --mtbf-hours."""
    if arguments.mtbf_hours is None:
        return None
    return Saves(
        mtbf=3600 * arguments.mtbf_hours,
        ranks_per_node=per_node,
        disk=bytes_per_second(arguments.disk_gbps),
        shared=bytes_per_second(arguments.shared_disk_gbps),
        restart=arguments.restart_seconds or 0.0,
        asynchronous=arguments.async_save,
    )


def _ranks_of_nodes(arguments: argparse.Namespace, launched: bool) -> list[int]:
    """Return the number of ranks on each node."""
    nodes, given = arguments.nodes, arguments.ranks_per_node or []
    if not launched:
        if not given or (nodes is None and len(given) == 1):
            raise ValueError("expected --nodes and --ranks-per-node (or a launcher, which sets them).")
        counts = given * nodes if len(given) == 1 else given
        if nodes not in (None, len(counts)):
            raise ValueError(
                f"--ranks-per-node expects one number, or one for each node, got {given} with {nodes} nodes."
            )
        return counts
    ranks, own = int(os.environ["WORLD_SIZE"]), ranks_per_node()
    per_node = own or (given[0] if given else None)
    if per_node is None:
        raise ValueError(
            f"the launcher started {ranks} ranks, and none of {', '.join(LOCAL_SIZE_VARIABLES)} gives the number "
            f"on this node. Set --ranks-per-node."
        )
    counts = given if len(given) > 1 else [per_node] * (ranks // per_node)
    if sum(counts) != ranks:
        raise ValueError(
            f"{ranks} ranks, of which {per_node} are on this node: nodes have different sizes. Set --ranks-per-node, "
            f"such as 8,4."
        )
    if nodes not in (None, len(counts)) or (given and own not in (None, *given)):
        raise ValueError(
            f"the launcher started {len(counts)} node(s), this one with {per_node} rank(s), got --nodes {nodes} "
            f"--ranks-per-node {','.join(map(str, given))}: remove these options."
        )
    return counts


def _model(arguments: argparse.Namespace) -> Model:
    """Return the model to train, by counting a built model or from its size."""
    width, muon = BYTES[arguments.dtype or "bf16"], arguments.muon is not None
    gradient_width = BYTES[arguments.gradient_dtype or arguments.dtype or "bf16"]
    if arguments.model is not None:
        module = import_callable(arguments.model)()
        from deepspeed_ext.planner.models import describe, mark_matrices
        from deepspeed_ext.zero.module_placements import mark_placements

        if muon:
            mark_matrices(module)
        mark_placements(module, dict(arguments.modules or ()))
        model = describe(module, parameter_bytes=width, gradient_bytes=gradient_width)
    else:
        model = Model.of_size(
            arguments.params,
            arguments.trainable,
            width=width,
            gradient_width=gradient_width,
            experts=arguments.expert_params or 0,
            expert_parallel=arguments.expert_parallel or 1,
            muon=muon,
            largest_layer=arguments.largest_layer or 0,
        )
    compute = arguments.micro_step_seconds or 0.0
    if arguments.tokens is not None:
        frozen = (model.states.parameters - model.states.updated) / width
        flops = FROZEN_FLOPS * frozen + FLOPS * model.states.updated / width
        compute = flops * arguments.tokens / (arguments.tflops * 1e12)
    model = replace(
        model,
        accumulation=arguments.accumulation or 1,
        compute=compute,
        overlap_updates=arguments.overlap_updates,
        orthogonalizing=arguments.muon or 0.0,
        ordered=ORDERED_LEVELS[arguments.reduce or BACKEND],
    )
    return _with_states_on_device(model, arguments)


def _with_states_on_device(model: Model, arguments: argparse.Namespace) -> Model:
    """Return the model with the states on the device: without offloaded ones, with gradients in their own dtype."""
    offloaded = {"parameters": arguments.offload_param, "optimizer": arguments.offload_optimizer}
    no_bytes = {name: 0.0 for name, enabled in offloaded.items() if enabled}
    if not no_bytes and arguments.gradient_dtype is None:
        return model
    cache = (arguments.parameter_cache_gb or 0.0) * GIGA
    wider = model.gradient_bytes / BYTES[arguments.dtype or "bf16"]  # on the wire, than on the device

    def on_device(states: ModelStates) -> ModelStates:
        return replace(states, gradients=states.gradients / wider, **no_bytes)

    return replace(
        model,
        held=on_device(model.states),
        experts=tuple(replace(family, held=on_device(family.states)) for family in model.experts),
        placed={p: replace(part, held=on_device(part.states)) for p, part in model.placed.items()},
        host=HostParameters(cache=cache) if arguments.offload_param else None,
    )


def _rates(arguments: argparse.Namespace, sizes: GroupSizes, per_node: int, launched: bool) -> Rates:
    """Return the rates of the hops, from specifications or measured."""
    if arguments.inter_gbps is not None:
        latencies = Latencies.for_groups(sizes, per_node)
        if arguments.latency_us is not None:
            # The option sets the latency between groups; messages within groups then cost no latency.
            latencies = Latencies(inter=arguments.latency_us * MICRO)
        host = bytes_per_second(arguments.host_gbps)
        return Rates.of_links(sizes, per_node, arguments.intra_gbps, arguments.inter_gbps, latencies, host=host)
    if not launched:
        raise ValueError("expected --intra-gbps and --inter-gbps (or a launcher, whose ranks measure them).")
    import deepspeed
    import torch

    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.planner import probe

    copies = arguments.offload_param or arguments.mtbf_hours is not None
    # Without this, all ranks of a node would measure on its first device.
    deepspeed.get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[
        arguments.gradient_dtype or arguments.dtype or "bf16"
    ]
    topology, ordered = get_topology(None, sizes.group_size), ORDERED_LEVELS[arguments.reduce or BACKEND]
    return probe.measure(topology, dtype, pinned=copies or None, ordered=ordered)
