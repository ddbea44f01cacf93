# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""``python -m deepspeed_ext plan`` shows what each strategy would cost, and which to use.

Under a launcher (torchrun, deepspeed), the plan is for the launched ranks. Rates that are not given are measured.
"""

import argparse
import json
import os
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

from deepspeed_ext.comm.process_groups import LOCAL_SIZE_VARIABLES, ranks_per_node
from deepspeed_ext.config.outer import OuterSettings
from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.model_bytes import ADAM_BYTES, MUON_BYTES
from deepspeed_ext.planner.choice import Plan, plan
from deepspeed_ext.planner.clusters import Cluster, read_cluster
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.planner.costs import BUCKET, Experts, Model
from deepspeed_ext.planner.host import HostParameters
from deepspeed_ext.planner.rates import Rates, bytes_per_second
from deepspeed_ext.strategy import GroupSizes, ModelStates, Placement, full_bucket
from deepspeed_ext.tools.arguments import count, import_callable, new_file, number, sub_key
from deepspeed_ext.tools.plan import report
from deepspeed_ext.tools.plan.outer import OuterPlan, plan_outer
from deepspeed_ext.tools.plan.saves import Saves

BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
FLOPS, FROZEN_FLOPS = 6, 4  # for each parameter and token, forward and backward
TERMINAL = Path("-")  # as a file
FETCHED = 50_000_000  # elements in a gather, assumed if only the size of the model is known


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``plan``."""
    some, ranks, amount, rest = number(count), number(int), number(float), number(float, zero=True)
    what = parser.add_argument_group("the model")
    either = what.add_mutually_exclusive_group(required=True)
    either.add_argument("--model", metavar="PKG:FN", help="makes the model; on the meta device it is free")
    either.add_argument("--params", type=some, metavar="N", help="its number of parameters instead, such as 7e9 or 7B")
    what.add_argument("--trainable", type=number(count, zero=True), metavar="N", help="of these (default: all)")
    layer = "parameters of the largest module, with --params"
    what.add_argument("--largest-layer", type=number(count, zero=True), metavar="N", help=layer)
    apart = "of these in experts, with --params and --expert-parallel"
    what.add_argument("--expert-params", type=some, metavar="N", help=apart)
    together = "expert-parallel size: ranks that have all experts together"
    what.add_argument("--expert-parallel", type=ranks, metavar="E", help=together)
    what.add_argument("--dtype", choices=BYTES, default="bf16", help="of parameters and gradients (default: bf16)")
    what.add_argument("--accumulation", type=ranks, default=1, metavar="S", help="micro-steps of a step (default: 1)")
    hides = "seconds of forward and backward of a micro-step without communication (default: 0)"
    what.add_argument("--micro-step-seconds", type=rest, default=0.0, metavar="S", help=hides)
    batch = "of a micro-batch on a rank; with the cluster's tflops they give S"
    what.add_argument("--tokens", type=count, metavar="N", help=batch)
    overlap = "paro_overlap_updates: with p = N, updated parameters come under the next forward"
    what.add_argument("--overlap-updates", action="store_true", help=overlap)
    muon = (
        "Muon trains the matrices that DeepSpeed chooses for it (with --params: all trained parameters); S: seconds "
        "that one rank would take to orthogonalize them all (default: 0)"
    )
    what.add_argument("--muon", type=rest, nargs="?", const=0.0, metavar="S", help=muon)
    outer = (
        "with paro_outer_optimizer, for strategies with os = I: its steps, and other sub-keys, such as 30 bits=4 "
        "fragments=5 delay=2"
    )
    steps, shape = partial(sub_key, alone="steps"), ("H", "KEY=VALUE")
    what.add_argument("--outer", type=steps, nargs="+", metavar=shape, help=outer)
    offload = "offload_param: parameters in pinned host memory (p = I and G)"
    what.add_argument("--offload-param", action="store_true", help=offload)
    cache = "paro_parameter_cache_bytes, in 10^9 bytes: of them on each device as well"
    what.add_argument("--parameter-cache-gb", type=rest, default=0.0, metavar="G", help=cache)
    what.add_argument("--offload-optimizer", action="store_true", help="optimizer states in host memory")
    where = parser.add_argument_group("the cluster; under a launcher it is that of the launch")
    file = "JSON that describes its nodes and links, instead of the options below; needs --nodes if it has none"
    where.add_argument("--cluster", type=Path, metavar="FILE", help=file)
    where.add_argument("--nodes", type=ranks)
    where.add_argument("--ranks-per-node", type=ranks)
    where.add_argument("--group-size", type=ranks, help="paro_group_size (default: ranks per node)")
    where.add_argument("--intra-gbps", type=amount, metavar="G", help="Gbit/s that a rank receives inside its node")
    where.add_argument("--inter-gbps", type=amount, metavar="G", help="Gbit/s that a node receives from others")
    copies = "10^9 bytes/s that a rank copies from host memory to its device, and back, while all of its node do"
    where.add_argument("--host-gbps", type=amount, metavar="G", help=copies)
    where.add_argument("--latency-us", type=rest, default=0.0, metavar="U", help="of a message between groups")
    where.add_argument("--memory-gb", type=amount, metavar="G", help="10^9 bytes of a rank for model states")
    saves = parser.add_argument_group("how often to save, if --mtbf-hours is given")
    failures = (
        "mean hours between failures of the whole job: those of one node, divided by the number of nodes; needs "
        "--disk-gbps, and --micro-step-seconds or --tokens"
    )
    saves.add_argument("--mtbf-hours", type=amount, metavar="H", help=failures)
    saves.add_argument("--disk-gbps", type=amount, metavar="G", help="10^9 bytes/s that a node writes to storage")
    shared = "10^9 bytes/s that the storage takes from all nodes together (default: no limit)"
    saves.add_argument("--shared-disk-gbps", type=amount, metavar="G", help=shared)
    restart = "seconds from a failure until training goes on, with the load (default: 0)"
    saves.add_argument("--restart-seconds", type=rest, metavar="S", help=restart)
    later = "checkpoint.async_save: training goes on while files are written"
    saves.add_argument("--async-save", action="store_true", help=later)
    output = parser.add_argument_group("output")
    terminal = "write the plans; - for the terminal, instead of the table"
    output.add_argument("--json", type=new_file, metavar="FILE", help=terminal)
    output.add_argument("--picture", type=new_file, metavar="FILE", help="draw memory against time (needs matplotlib)")
    output.add_argument("--estimate", action="store_true", help="print memory as DeepSpeed's own estimators do")


def run(arguments: argparse.Namespace) -> None:
    """Print the plan; under a launcher, on the first rank only.

    Raises:
        ValueError: an argument is missing, out of bounds, or contradicts another.
    """
    cluster = _take_cluster(arguments)
    _check(arguments)
    settings = _outer(arguments)
    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    nodes, per_node = _nodes(arguments, launched)
    sizes = GroupSizes(nodes * per_node, arguments.group_size or per_node)
    model = replace(_offloaded(_model(arguments), arguments), saves=_saves(arguments, per_node))
    if cluster is not None and cluster.tflops is not None and arguments.tokens is not None:
        parameters, trained = (one / BYTES[arguments.dtype] for one in (model.states.parameters, model.states.updated))
        flops = FROZEN_FLOPS * parameters + (FLOPS - FROZEN_FLOPS) * trained
        model = replace(model, compute=flops * arguments.tokens / (cluster.tflops * 1e12))
    if arguments.estimate and model.states.updated != model.states.parameters:
        raise ValueError(
            f"--estimate assumes, as DeepSpeed's estimators do, that all parameters are trained; of {arguments.model} "
            f"{model.states.updated / model.states.parameters:.1%} are. Leave out --estimate."
        )
    rates = cluster.rates(sizes) if cluster else _rates(arguments, sizes, per_node, launched)
    if launched and int(os.environ.get("RANK", "0")):
        return
    if arguments.inter_gbps is None:
        from deepspeed.accelerator import get_accelerator

        model = replace(model, streams=not get_accelerator().is_synchronized_device())
    budget = None if arguments.memory_gb is None else arguments.memory_gb * 1e9
    forms = (AS_IT_IS, Compression(LocoSettings()), Compression(LocoSettings(), UpdateSettings()))
    allowed = lambda row: model.host is None or row.p != Placement.N  # noqa: E731
    plans = [plan(sizes, model, rates, budget, [sent], allowed) for sent in forms]
    outer = None if settings is None else plan_outer(sizes, replace(model, saves=None), rates, settings, budget)
    _write(arguments, plans, outer, nodes, per_node)


def _write(
    arguments: argparse.Namespace, plans: list[Plan], outer: OuterPlan | None, nodes: int, per_node: int
) -> None:
    document = {name: found.as_dict() for name, found in zip(("exact", "loco", "both"), plans, strict=True)}
    if outer is not None:
        document["outer"] = outer.as_dict()
    if arguments.json == TERMINAL:
        json.dump(document, sys.stdout, indent=2, allow_nan=False)
        print()
    else:
        print(report.table(plans))
        if outer is not None:
            print(f"\n{report.outer_table(outer)}")
        if arguments.json:
            arguments.json.write_text(json.dumps(document, indent=2, allow_nan=False) + "\n")
    if arguments.estimate:
        from deepspeed_ext.tools.plan.estimate import estimate_paro_model_states_mem_needs_all_cold as estimate

        width = BYTES[arguments.dtype]
        model = plans[0].model
        largest = int(model.largest_layer / width)
        print()
        estimate(int(model.states.parameters / width), largest, per_node, nodes, plans[0].sizes.group_size)
    if arguments.picture:
        report.picture(plans, arguments.picture)


def _take_cluster(arguments: argparse.Namespace) -> Cluster | None:
    """Return the cluster of --cluster, and set the options that it replaces to its figures."""
    if arguments.cluster is None:
        if arguments.tokens is not None:
            raise ValueError("--tokens goes with --cluster, whose file tells tflops.")
        return None
    replaced = ("ranks_per_node", "intra_gbps", "inter_gbps", "memory_gb", "host_gbps")
    given = [name for name in replaced if getattr(arguments, name) is not None]
    given += ["latency_us"] if arguments.latency_us else []
    if given:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
        raise ValueError(f"--cluster {arguments.cluster} describes the cluster; leave out {names}.")
    cluster = read_cluster(arguments.cluster)
    if cluster.nodes is not None and arguments.nodes is not None:
        raise ValueError(f"{arguments.cluster} has {cluster.nodes} nodes; leave out --nodes {arguments.nodes}.")
    if arguments.tokens is not None and (cluster.tflops is None or arguments.micro_step_seconds):
        raise ValueError(
            "--tokens needs tflops in the file of --cluster, and takes the place of --micro-step-seconds."
        )
    if arguments.tokens is not None and arguments.expert_params is not None:
        raise ValueError("--tokens does not support experts, since a token uses only some: give --micro-step-seconds.")
    for name in replaced:
        setattr(arguments, name, getattr(cluster, name))
    arguments.nodes = cluster.nodes or arguments.nodes
    return cluster


def _check(a: argparse.Namespace) -> None:
    """Refuse arguments that contradict one another."""
    of_params = a.params is not None
    experts, trainable, largest = (one is not None for one in (a.expert_params, a.trainable, a.largest_layer))
    known = "--estimate prints what DeepSpeed's estimators know"
    for wrong, message in (
        (
            trainable and not of_params,
            "--trainable goes with --params; of a --model those count that require a gradient.",
        ),
        (experts != (a.expert_parallel is not None), "--expert-params and --expert-parallel go together."),
        (
            experts and not of_params,
            "--expert-params goes with --params; of a --model those count that DeepSpeed has marked.",
        ),
        (
            experts and trainable,
            "--expert-params: all parameters are trained, so it does not go with --trainable.",
        ),
        (
            experts and of_params and a.expert_params >= a.params,
            f"--expert-params {a.expert_params} leaves nothing of --params {a.params}.",
        ),
        (
            trainable and of_params and a.trainable > a.params,
            f"--trainable {a.trainable} is more than --params {a.params}.",
        ),
        (a.parameter_cache_gb and not a.offload_param, "--parameter-cache-gb goes with --offload-param."),
        (
            a.host_gbps is not None and a.inter_gbps is None,
            "--host-gbps goes with --intra-gbps and --inter-gbps; without them all rates are measured.",
        ),
        ((a.offload_param or a.offload_optimizer) and a.estimate, f"{known}, nothing in host memory here."),
        (
            (a.offload_param or a.offload_optimizer) and a.outer,
            "--outer takes nothing in host memory but its own states.",
        ),
        (largest and not of_params, "--largest-layer goes with --params; of a --model it is counted."),
        (a.estimate and experts, f"{known}, no experts. Leave out one of the two."),
        (
            a.estimate and (trainable or a.dtype == "fp32"),
            f"{known}: 16 bits, all parameters trained. Leave out --trainable and --dtype fp32, or --estimate.",
        ),
        (
            a.estimate and of_params and not largest,
            "--estimate needs --largest-layer beside --params, as DeepSpeed's estimators do.",
        ),
        (
            a.estimate and a.json == TERMINAL,
            "--json - writes nothing else to the terminal. Leave out --estimate, or name a file.",
        ),
        ((a.intra_gbps is None) != (a.inter_gbps is None), "--intra-gbps and --inter-gbps go together."),
        ((a.mtbf_hours is None) != (a.disk_gbps is None), "--mtbf-hours and --disk-gbps go together."),
        (
            a.mtbf_hours is None and (a.async_save or a.shared_disk_gbps is not None or a.restart_seconds is not None),
            "--shared-disk-gbps, --restart-seconds and --async-save go with --mtbf-hours and --disk-gbps.",
        ),
        (
            a.mtbf_hours is not None and not a.micro_step_seconds and a.tokens is None,
            "--mtbf-hours needs the time of a step: give --micro-step-seconds above 0, or --tokens with --cluster.",
        ),
    ):
        if wrong:
            raise ValueError(message)


def _outer(arguments: argparse.Namespace) -> OuterSettings | None:
    """Return the settings of --outer; None without."""
    if arguments.outer is None:
        return None
    names = [name for name, _ in arguments.outer]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"--outer gives {', '.join(twice)} twice.")
    return OuterSettings.parse(dict(arguments.outer), "--outer", "{where} {key}")


def _saves(arguments: argparse.Namespace, per_node: int) -> Saves | None:
    """Return where a run saves and how often it fails; None without --mtbf-hours."""
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


def _nodes(arguments: argparse.Namespace, launched: bool) -> tuple[int, int]:
    """Return the number of nodes, and of ranks on each node."""
    given = arguments.nodes, arguments.ranks_per_node
    if not launched:
        if None in given:
            raise ValueError("expected --nodes and --ranks-per-node (or a launcher, which says how many there are).")
        return given
    ranks, per_node = int(os.environ["WORLD_SIZE"]), ranks_per_node() or arguments.ranks_per_node
    if per_node is None:
        raise ValueError(
            f"the launcher started {ranks} ranks, and none of {', '.join(LOCAL_SIZE_VARIABLES)} says how many of them "
            f"are on this node. Set --ranks-per-node."
        )
    if ranks % per_node:
        raise ValueError(f"{ranks} ranks, of which {per_node} are on this node, are no nodes of the same size.")
    found = ranks // per_node, per_node
    if any(value not in (None, have) for value, have in zip(given, found, strict=True)):
        raise ValueError(
            f"the launcher started {found[0]} node(s) of {found[1]} rank(s), got --nodes {given[0]} --ranks-per-node "
            f"{given[1]}: leave them out."
        )
    return found


def _model(arguments: argparse.Namespace) -> Model:
    width = BYTES[arguments.dtype]
    extra = {"accumulation": arguments.accumulation, "compute": arguments.micro_step_seconds}
    updates = arguments.overlap_updates
    muon = arguments.muon is not None
    extra_of_muon = {"overlap_updates": updates, "orthogonalizing": arguments.muon or 0.0}
    if arguments.model is not None:
        made = import_callable(arguments.model)()
        from deepspeed_ext.planner.models import describe, mark_matrices

        if muon:
            mark_matrices(made)
        return replace(describe(made, parameter_bytes=width, **extra), **extra_of_muon)
    each = MUON_BYTES if muon else ADAM_BYTES
    apart = arguments.expert_params or 0
    states = ModelStates.of(
        arguments.params - apart,
        arguments.trainable,
        parameter_bytes=width,
        gradient_bytes=width,
        optimizer_bytes=each,
    )
    layer = float((arguments.largest_layer or 0) * width)
    fetches = max(1, (arguments.params - apart) // FETCHED)
    experts = _experts(apart, arguments.expert_parallel, width, muon) if apart else ()
    bucket = full_bucket(BUCKET, round((states.gradients + sum(e.states.gradients for e in experts)) / width))
    matrices = states.gradients if muon else 0.0
    return Model(
        states,
        width,
        **extra,
        fetches=fetches,
        largest_layer=layer,
        bucket=bucket,
        matrices=matrices,
        experts=experts,
        **extra_of_muon,
    )


def _offloaded(model: Model, arguments: argparse.Namespace) -> Model:
    """Return the model with what is in host memory, of experts as well."""
    offloaded = {"parameters": arguments.offload_param, "optimizer": arguments.offload_optimizer}
    none = {name: 0.0 for name, wanted in offloaded.items() if wanted}
    if not none:
        return model
    return replace(
        model,
        held=replace(model.states, **none),
        experts=tuple(replace(one, held=replace(one.states, **none)) for one in model.experts),
        host=HostParameters(cache=arguments.parameter_cache_gb * 1e9) if arguments.offload_param else None,
    )


def _experts(params: int, ranks: int, width: int, muon: bool) -> tuple[Experts, ...]:
    """Return the share of the experts that each of ``ranks`` ranks has."""
    each = MUON_BYTES if muon else ADAM_BYTES
    states = ModelStates.of(params // ranks, parameter_bytes=width, gradient_bytes=width, optimizer_bytes=each)
    fetches, matrices = max(1, params // ranks // FETCHED), states.gradients if muon else 0.0
    return (Experts(ranks, states, fetches=fetches, matrices=matrices),)


def _rates(arguments: argparse.Namespace, sizes: GroupSizes, per_node: int, launched: bool) -> Rates:
    if arguments.inter_gbps is not None:
        latency = arguments.latency_us / 1e6
        host = bytes_per_second(arguments.host_gbps)
        return Rates.of_links(sizes, per_node, arguments.intra_gbps, arguments.inter_gbps, latency, host=host)
    if not launched:
        raise ValueError("expected --intra-gbps and --inter-gbps (or a launcher, whose ranks measure them).")
    import deepspeed
    import torch

    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.planner import probe

    copies = arguments.offload_param or arguments.mtbf_hours is not None
    # Otherwise all ranks of a node would measure on its first device.
    deepspeed.get_accelerator().set_device(int(os.environ.get("LOCAL_RANK", "0")))
    deepspeed.init_distributed()
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[arguments.dtype]
    return probe.measure(get_topology(None, sizes.group_size), dtype, pinned=copies or None)
