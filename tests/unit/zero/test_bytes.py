# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks, counted by the kernel at their sockets, compared with the formulas of the strategy table."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed import comm as dist
from deepspeed.comm.comm import comms_logger
from deepspeed.moe.utils import is_moe_param

from deepspeed_ext.comm import collectives
from deepspeed_ext.config.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import UNCOMPRESSED, Compression
from deepspeed_ext.planner.costs import predict
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import Rates
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, Strategy, Volume
from deepspeed_ext.zero.module_placements import mark_placements
from scripts.emulation.traffic import TrafficMeter
from tests.harness import experts, networks, training
from tests.harness.tiers import deep, with_cases
from tests.harness.training import NOTHING_KEPT, PARTITIONED, REPLICATED, placed

SIZES = (256, 511, 512, 300)  # 546,000 parameters, so that message headers and norms are negligible
LARGER = (512, 1023, 1024, 600)  # 2.2 million parameters, for 4-bit messages
BUCKETS = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000}
MATRICES, SIDE = 6, 300  # of equal number and size, so that owners have equal work
MUON = {"sizes": (SIDE,) * (MATRICES + 1), "optimizer": "Muon"}
LARGER_BUCKETS = {"reduce_bucket_size": 800_000, "allgather_bucket_size": 800_000}
WIDTH = 4  # bytes of an element
# Relative to the expected bytes; bytes if none are expected (barriers, norms, ZeRO-3's compared records).
RELATIVE, ABSOLUTE = 0.01, 1000
# The formula gathers each parameter twice in a micro-step. DeepSpeed gathers it less often if it keeps it from one use
# to the next: because it is small, prefetched, or soon used again, as the last layer, with which backward begins. With
# these keys it releases each when the module that owns it has run.
HELD = (*REPLICATED, *(name for name in PARTITIONED if name[0] == "I"))  # parameters, between steps

Keys = dict[str, Any]
Bytes = tuple[float, float]  # within the group, between groups
Row = tuple[str, list[Bytes]]  # strategy, each micro-step; the last one of an optimizer step includes that step
Parameter = tuple[int, bool, bool, bool]  # elements, whether trained, of an expert, of Muon


def check(
    rows: list[Row],
    cluster: GroupSizes,
    states: ModelStates,
    accumulation: int,
    sent: Compression = UNCOMPRESSED,
    exchange: Callable[[Strategy], Volume] = lambda strategy: Volume(),
) -> None:
    """Compare each micro-step with the formula: traffic that is due once per step must be sent at the boundary.
    ``exchange`` returns further traffic of a step."""
    for name, counted in rows:
        micro_step, rest = Volume(), exchange(STRATEGIES[name])
        for phase in STRATEGIES[name].phases(cluster, states):
            volume = sent.volume(phase, WIDTH, WIDTH)
            micro_step += volume * phase.each_micro_step
            rest += Volume() if phase.each_micro_step else volume
        expected = [micro_step] * (accumulation - 1) + [micro_step + rest]
        for number, (have, want) in enumerate(zip(counted, expected, strict=True)):
            assert have == pytest.approx((want.intra, want.inter), rel=RELATIVE, abs=ABSOLUTE), (name, number)
        volume = micro_step * accumulation + rest
        total = tuple(map(sum, zip(*counted, strict=True)))
        assert total == pytest.approx((volume.intra, volume.inter), rel=RELATIVE), name


def states_of(params: list[Parameter]) -> ModelStates:
    trained = sum(numel for numel, trained, *_ in params if trained)
    return ModelStates.of(sum(param[0] for param in params), trained, parameter_bytes=WIDTH, gradient_bytes=WIDTH)


ONE_BUCKET = {"reduce_bucket_size": 10**8, "allgather_bucket_size": 10**8}
ON_HOST = {"offload_param": {"device": "cpu"}, "paro_parameter_cache_bytes": 10**5}
BUCKETED = ("NIG", "NGG", "ING", "IIG", "GGG")
SHAPES = ((4, 2, 3), (6, 3, 1), (6, 3, 2), (4, 2, 1), (4, 2, 4), (6, 2, 4))


@with_cases(
    "world, group, accumulation, names, zero, frozen",
    (6, 3, 2, ("NII", "NIG"), {}, ()),
    (6, 3, 2, ("INI", "IGG"), {}, ()),
    (6, 3, 1, ("NIG",), {"paro_reduce": "ordered_everywhere"}, ()),
    # Not the first layer: without a gradient to compute, backward would not need its parameters.
    (4, 2, 2, ("IIG",), ON_HOST, (1,)),
    (4, 2, 1, ("NGG", "GGG"), {**ONE_BUCKET, "overlap_comm": True}, (1,)),
    *deep(*((*shape, names, {}, ()) for shape in SHAPES for names in (REPLICATED, PARTITIONED))),
    *deep(*((4, 2, 2, names, {}, (1,)) for names in (REPLICATED, PARTITIONED))),
    *deep((4, 2, 2, ("ING", "IIG", "IGG"), ON_HOST, (1,)), (4, 2, 1, BUCKETED, ONE_BUCKET, ())),
    *deep((4, 2, 1, BUCKETED, {**ONE_BUCKET, "overlap_comm": True}, ())),
)
def test_bytes_within_and_between_groups(
    ranks: Any, world: int, group: int, accumulation: int, names: tuple[str, ...], zero: Keys, frozen: tuple[int, ...]
) -> None:
    params, rows = ranks(world).run(bytes_case, names, group, accumulation, {**BUCKETS, **zero}, frozen=frozen)[0]
    check(rows, GroupSizes(world, group), states_of(params), accumulation)


def tied(*args: Any) -> training.Network:
    """Return a network of which layers 1 and 3 share a weight, which ZeRO-3 gathers for each of them."""
    network = training.Network(*args)
    network.layers[3].weight = network.layers[1].weight
    return network


@pytest.mark.parametrize("placement, names", [(Placement.N, ("IIG", "GGG")), (Placement.I, ("GNG", "GIG", "GGG"))])
def test_modules_send_as_many_bytes_as_predicted(ranks: Any, placement: Placement, names: tuple[str, ...]) -> None:
    cluster, placed, sizes = GroupSizes(4, 2), {"layers.0": placement.name}, (SIDE,) * 5
    keys, rates = {**BUCKETS, "paro_modules": placed}, Rates.of_links(cluster, 2, 100, 10)
    _, rows = ranks(4).run(bytes_case, names, 2, 2, keys, sizes=sizes, network=tied)[0]
    plain = describe(network := tied(sizes, None, False), WIDTH, WIDTH, accumulation=2)
    mark_placements(network, placed)
    model = describe(network, WIDTH, WIDTH, accumulation=2)
    for name, counted in rows:
        row = STRATEGIES[name]
        sharded, planned = (predict(row, cluster, each, rates).volume for each in (plain, model))
        coarser = replace(row, p=placement).volume(cluster, plain.states, 2)
        total = Volume(*map(sum, zip(*counted, strict=True)))
        assert (total.intra, total.inter) == pytest.approx((planned.intra, planned.inter), rel=0.05), name
        hop = "intra" if placement == Placement.N else "inter"
        assert getattr(coarser, hop) < getattr(total, hop) < getattr(sharded, hop), name


@with_cases(
    "world, accumulation, loco, updates, names",
    (4, 2, {}, {}, ("III",)),
    (6, 1, None, {"bits": 8, "block_size": 64}, ("NNN", "IGG")),
    *deep(*((4, 2, loco, updates, HELD) for loco, updates in ((None, {}), ({}, {}), ({}, None)))),
    *deep((6, 1, None, {"bits": 8, "block_size": 64}, HELD)),
)
def test_bytes_of_quantized_gradients_and_updates(
    ranks: Any, kernels: bool, world: int, accumulation: int, loco: Any, updates: Any, names: tuple[str, ...]
) -> None:
    keys = {"zeropp_loco_param": loco, "paro_quantized_updates": updates}
    zero = LARGER_BUCKETS | {key: value for key, value in keys.items() if value is not None}
    params, rows = ranks(world).run(bytes_case, names, 2, accumulation, zero, sizes=LARGER)[0]
    sent = Compression(
        None if loco is None else LocoSettings(**loco), None if updates is None else UpdateSettings(**updates)
    )
    check(rows, GroupSizes(world, 2), states_of(params), accumulation, sent)


@with_cases(
    "world, group, accumulation, names",
    (4, 2, 2, ("NIG", "ING")),
    *deep(*((*shape, names) for shape in ((4, 2, 2), (6, 3, 1)) for names in (REPLICATED, PARTITIONED))),
)
def test_muon_exchanges_parts_of_matrices_once_a_step(
    ranks: Any, world: int, group: int, accumulation: int, names: tuple[str, ...]
) -> None:
    # All ranks have a part of each stripe, which is one matrix.
    zero = {**BUCKETS, "reduce_bucket_size": SIDE**2}
    params, rows = ranks(world).run(bytes_case, names, group, accumulation, zero, **MUON)[0]
    cluster, matrices = GroupSizes(world, group), MATRICES * SIDE**2 * WIDTH
    between = 2 * (world - group) / world**2 * matrices  # 2 b M / k
    for strategy in map(STRATEGIES.__getitem__, names):
        expected = between if strategy.os == Placement.G else 0
        assert strategy.exchange(cluster, matrices).inter == pytest.approx(expected)
    check(rows, cluster, states_of(params), accumulation, exchange=lambda row: row.exchange(cluster, matrices))


def test_without_stripes_only_divided_matrices_are_exchanged(ranks: Any) -> None:
    # Two of the four partitions end within a matrix, whose other half is on the other rank of the group.
    halves = Volume(2 * 2 * SIDE**2 / 2 * WIDTH / 4, 0)
    zero = {**BUCKETS, "round_robin_gradients": True}
    params, rows = ranks(4).run(bytes_case, ("NII", "NIG"), 2, 1, zero, **MUON)[0]
    exchange = {Placement.G: halves}
    check(rows, GroupSizes(4, 2), states_of(params), 1, exchange=lambda strategy: exchange.get(strategy.os, Volume()))


@with_cases("names", ("NIG", "IIG"), *deep((("NNN", "NGG", "III", "IGG"),)))
def test_a_skipped_step_sends_no_updates(ranks: Any, kernels: bool, names: tuple[str, ...]) -> None:
    """A full update that is due in the skipped step is sent with the next one."""
    zero = {**LARGER_BUCKETS, "paro_quantized_updates": {"resync_T": 3}}
    job = {"steps": 4, "dtype": "fp16", "overflow": ((2, 1),), "sizes": LARGER}
    params, rows = ranks(4).run(bytes_case, names, 2, 1, zero, **job)[0]
    states, width = ModelStates.of(sum(param[0] for param in params)), 2
    coded = Compression(updates=UpdateSettings())
    for name, counted in rows:
        phases = STRATEGIES[name].phases(GroupSizes(4, 2), states)
        *before, update = (coded.volume(phase, width, width).inter for phase in phases)
        # A step precedes the counted steps: the third one would be sent in full, but is skipped.
        for number, expected in enumerate((update, 0, phases[-1].volume.inter, update)):
            assert counted[number][1] == pytest.approx(sum(before) + expected, rel=RELATIVE), (name, number)


def bytes_case(
    names: tuple[str, ...], group: int, accumulation: int, zero: Keys = BUCKETS, steps: int = 1, **details: Any
) -> tuple[list[Parameter], list[Row]]:
    """Return this rank's parameters, and for each strategy the mean bytes per rank of the micro-steps of some steps.
    Muon does not iterate here: the iteration sends nothing and is slow."""
    job = training.Job(
        **{"sizes": SIZES, "empty": False, "accumulation": accumulation, "zero": zero, "steps": steps + 1, **details}
    )
    rows: list[Row] = []
    for name in names:
        engine, model, data = training.begin(job, placed(name, group, **NOTHING_KEPT))
        meters = [TrafficMeter() for _ in range(steps * accumulation)]
        # A step of one micro-step precedes: it records the order of the modules, which ranks compare once.
        for number, meter in enumerate([TrafficMeter(), *meters]):
            engine.set_gradient_accumulation_boundary(number % accumulation == 0)
            dist.barrier()
            meter.start()
            dist.barrier()
            training.micro_step(engine, job, number, *next(data))
            with mock.patch("deepspeed.runtime.zero.muon.original_muon.muon_update", lambda matrix, *_, **__: matrix):
                engine.step()
            if STRATEGIES[name].stage == 3:
                engine.optimizer.drain_parameters()  # or slices are completed during the next forward
            dist.barrier()
            meter.stop()
            dist.barrier()
        splits = [meter.split(group) for meter in meters]
        rows.append((name, [(split.intra_mean, split.inter_mean) for split in splits]))
        params = [
            (getattr(p, "ds_numel", p.numel()), p.requires_grad, is_moe_param(p), getattr(p, "use_muon", False))
            for p in model.parameters()
        ]
        engine.destroy()
    return params, rows


class OnlyExperts(networks.RoutedOverTwo):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        for name, param in self.named_parameters():
            param.requires_grad_(".deepspeed_experts." in name)


@pytest.mark.parametrize("world, group, names", [(4, 2, ("NIG",)), *deep((4, 2, REPLICATED), (8, 4, REPLICATED))])
def test_experts_are_sent_among_the_ranks_that_have_them(ranks: Any, world: int, group: int, names: Any) -> None:
    alone, both = (
        ranks(world).run(bytes_case, names, group, 1, network=network)[0]
        for network in (OnlyExperts, networks.RoutedOverTwo)
    )
    dense, of_experts = (states_of([param for param in both[0] if param[2] == expert]) for expert in (False, True))
    for number, name in enumerate(names):
        of_dense = STRATEGIES[name].volume(GroupSizes(world, group), dense)
        volume = STRATEGIES[name].volume(GroupSizes(world // 2, group // 2), of_experts)
        ((_, (counted,)), (_, (total,))) = alone[1][number], both[1][number]
        assert counted[1] == pytest.approx(volume.inter, rel=RELATIVE), name
        for kind, want in enumerate((of_dense.intra, of_dense.inter)):
            # Tokens, which are sent inside groups, are not counted in the difference.
            assert total[kind] - counted[kind] == pytest.approx(want, rel=RELATIVE), name


class Wide(experts.SmallMixtral):
    """A model so wide that tokens are few bytes in comparison with parameters."""

    width, inner = 160, 320


@with_cases(
    "names, optimizer",
    (("IIG",), "Muon"),
    *deep((("III", "ING", "IIG", "IGG", "GGG"), "SGD"), (("III", "IGG"), "Muon")),
)
def test_sharded_experts_are_gathered_among_their_ranks(ranks: Any, names: tuple[str, ...], optimizer: str) -> None:
    job = {"sizes": (256, 511, 300), "network": Wide, "optimizer": optimizer, "config": experts.autoep(2)}
    params, rows = ranks(4).run(bytes_case, names, 2, 1, BUCKETS, 2, **job)[0]
    families = [[param for param in params if param[2] == expert] for expert in (False, True)]
    clusters = [GroupSizes(4, 2), GroupSizes(2, 1)]
    for name, (*_, (intra, inter)) in rows:  # the record of modules is compared in the second forward
        volumes = [STRATEGIES[name].volume(*each) for each in zip(clusters, map(states_of, families), strict=True)]
        for cluster, family in zip(clusters, families, strict=True):
            matrices = sum(numel for numel, *_, of_muon in family if of_muon)
            volumes.append(STRATEGIES[name].exchange(cluster, matrices * WIDTH))
        assert inter == pytest.approx(sum(volume.inter for volume in volumes), rel=RELATIVE), name
        tokens = 150_000  # to experts and back, in forward and backward
        assert intra == pytest.approx(sum(volume.intra for volume in volumes), rel=RELATIVE, abs=tokens), name


@pytest.mark.quick
def test_records_and_traces_name_each_hop(ranks: Any) -> None:
    for records, labels in ranks(4).run(logger_case):
        hops = {"intra_reduce_scatter", "inter_reduce_scatter", "inter_all_gather", "intra_all_gather"}
        assert hops <= records
        assert labels == {f"paro::{name}" for name in records if name.startswith(("intra_", "inter_"))}


def logger_case() -> tuple[set[str], set[str]]:
    job = training.Job(steps=1, config={"comms_logger": {"enabled": True, "prof_all": True}})
    with mock.patch.object(collectives, "backend_of", lambda group: "nccl"), torch.profiler.profile() as profile:
        training.train(job, {"paro_strategy": "NIG", "paro_group_size": 2})
    labels = {event.name for event in profile.events() if event.name.startswith("paro::")}
    return set(comms_logger.comms_dict), labels
