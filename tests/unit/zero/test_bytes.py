# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Bytes between ranks, counted by the kernel at their sockets, against the formulas of the strategy table."""

from collections.abc import Callable
from typing import Any

import pytest

from deepspeed_ext.loco.settings import LocoSettings, UpdateSettings
from deepspeed_ext.planner.compression import AS_IT_IS, Compression
from deepspeed_ext.strategy import STRATEGIES, GroupSizes, ModelStates, Placement, Strategy, Volume
from tests.harness.tiers import by_strategies, deep
from tests.harness.training import PARTITIONED, REPLICATED

SIZES = (256, 511, 512, 300)  # 546,000 parameters: the frames of messages and the norms disappear beside them
LARGER = (512, 1023, 1024, 600)  # 2.2 million, for what is in 4 bits
BUCKETS = {"reduce_bucket_size": 200_000, "allgather_bucket_size": 200_000}
MATRICES, SIDE = 6, 300  # as many and as large, so that owners have as much to do
SQUARES = (SIDE,) * (MATRICES + 1)
LARGER_BUCKETS = {"reduce_bucket_size": 800_000, "allgather_bucket_size": 800_000}
WIDTH = 4  # bytes of an element
RELATIVE, ABSOLUTE = 0.01, 1000  # of what is due; bytes where nothing is (barriers, norms, ZeRO-3's compared records)
# The formula gathers each parameter twice in a micro-step. DeepSpeed gathers it less often if it keeps it from one use
# to the next: because it is small, prefetched, or soon used again, as the last layer, with which backward begins. With
# these keys it releases each when the module that owns it has run.
TWICE = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 0}
HELD = (*REPLICATED, *(name for name in PARTITIONED if name[0] == "I"))  # parameters, between steps

Bytes = tuple[float, float]  # within the group, between groups
Row = tuple[str, list[Bytes]]  # strategy, each micro-step; the last one of an optimizer step includes that step


def check(
    rows: list[Row],
    cluster: GroupSizes,
    states: ModelStates,
    accumulation: int,
    sent: Compression = AS_IT_IS,
    exchange: Callable[[Strategy], Volume] = lambda strategy: Volume(),
) -> None:
    """Compare each micro-step with the formula, so that what is due once a step comes at the boundary, not before.

    Args:
        rows: what was counted.
        cluster, states, accumulation, sent: what the formula is of.
        exchange: what a step moves besides.
    """
    for name, counted in rows:
        micro_step, rest = Volume(), exchange(STRATEGIES[name])
        for phase in STRATEGIES[name].phases(cluster, states):
            volume = sent.volume(phase, WIDTH, WIDTH)
            micro_step += volume * phase.each_micro_step
            rest += Volume() if phase.each_micro_step else volume
        due = [micro_step] * (accumulation - 1) + [micro_step + rest]
        for number, (have, want) in enumerate(zip(counted, due, strict=True)):
            assert have == pytest.approx((want.intra, want.inter), rel=RELATIVE, abs=ABSOLUTE), (name, number)
        whole = micro_step * accumulation + rest
        total = tuple(map(sum, zip(*counted, strict=True)))
        assert total == pytest.approx((whole.intra, whole.inter), rel=RELATIVE), name


@pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])
@pytest.mark.parametrize(
    "world, group, accumulation",
    [(6, 3, 2), *deep((4, 2, 3), (6, 3, 1), (4, 2, 1), (4, 2, 4), (6, 2, 4))],
)
def test_bytes_within_and_between_groups(
    ranks: Any, world: int, group: int, accumulation: int, names: tuple[str, ...]
) -> None:
    parameters, _, rows = ranks(world).run(bytes_case, names, group, accumulation)[0]
    states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(world, group), states, accumulation)


@pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])
def test_frozen_parameters_are_gathered_but_neither_reduced_nor_updated(ranks: Any, names: tuple[str, ...]) -> None:
    # Not the first layer: without a gradient to compute, backward would not need its parameters.
    parameters, trainable, rows = ranks(4).run(bytes_case, names, 2, 2, frozen=(1,))[0]
    assert trainable < 0.6 * parameters
    states = ModelStates.of(parameters, trainable, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(4, 2), states, 2)


def test_parameters_on_the_host_send_the_same(ranks: Any) -> None:
    zero = {"offload_param": {"device": "cpu"}, "paro_parameter_cache_bytes": 10**5}
    parameters, trainable, rows = ranks(4).run(bytes_case, ("ING", "IIG", "IGG"), 2, 2, zero, frozen=(1,))[0]
    states = ModelStates.of(parameters, trainable, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(4, 2), states, 2)


@pytest.mark.parametrize("overlap", [False, True])
def test_one_big_bucket_and_overlap_send_the_same(ranks: Any, overlap: bool) -> None:
    zero = {"reduce_bucket_size": 10**8, "allgather_bucket_size": 10**8, "overlap_comm": overlap}
    parameters, _, rows = ranks(4).run(bytes_case, ("NIG", "NGG", "ING", "IIG", "GGG"), 2, 1, zero)[0]
    states = ModelStates.of(parameters, parameter_bytes=4, gradient_bytes=4)
    check(rows, GroupSizes(4, 2), states, 1)


@pytest.mark.parametrize(
    "world, accumulation, loco, updates, names",
    [
        (4, 2, None, {}, HELD),
        (4, 1, {}, {}, HELD),
        (6, 1, None, {"bits": 8, "block_size": 64}, ("NNN", "NIG", "III", "IGG")),
        (4, 1, {}, None, ("NIG", "NII", "IIG")),
    ],
)
def test_gradients_and_updates_in_few_bits(
    ranks: Any,
    kernels: bool,
    world: int,
    accumulation: int,
    loco: dict[str, Any] | None,
    updates: dict[str, Any] | None,
    names: tuple[str, ...],
) -> None:
    keys = {"zeropp_loco_param": loco, "paro_quantized_updates": updates}
    zero = LARGER_BUCKETS | {key: value for key, value in keys.items() if value is not None}
    parameters, _, rows = ranks(world).run(bytes_case, names, 2, accumulation, zero, sizes=LARGER)[0]
    sent = Compression(
        None if loco is None else LocoSettings(**loco), None if updates is None else UpdateSettings(**updates)
    )
    states = ModelStates.of(parameters, parameter_bytes=WIDTH, gradient_bytes=WIDTH)
    check(rows, GroupSizes(world, 2), states, accumulation, sent)


@pytest.mark.parametrize("names", [REPLICATED, PARTITIONED], ids=["p=N", "p=I,G"])
@pytest.mark.parametrize("world, group, accumulation", [(4, 2, 2), *deep((6, 3, 1))])
def test_muon_exchanges_parts_of_matrices_once_a_step(
    ranks: Any, world: int, group: int, accumulation: int, names: tuple[str, ...]
) -> None:
    # Of stripes of one matrix each, all ranks have a part.
    zero = {**BUCKETS, "reduce_bucket_size": SIDE**2}
    parameters, _, rows = ranks(world).run(muon_case, names, group, accumulation, zero)[0]
    cluster, matrices = GroupSizes(world, group), MATRICES * SIDE**2 * WIDTH
    between = 2 * (world - group) / world**2 * matrices  # 2 b M / k
    for strategy in map(STRATEGIES.__getitem__, names):
        assert strategy.exchange(cluster, matrices).inter == pytest.approx(
            between if strategy.os == Placement.G else 0
        )
    states = ModelStates.of(parameters, parameter_bytes=WIDTH, gradient_bytes=WIDTH)
    check(rows, cluster, states, accumulation, exchange=lambda strategy: strategy.exchange(cluster, matrices))


def test_of_partitions_without_stripes_only_matrices_at_their_borders_are_exchanged(ranks: Any) -> None:
    # Of the four partitions two end within a matrix, and the other half is with the other rank of the group.
    halves = Volume(2 * 2 * SIDE**2 / 2 * WIDTH / 4, 0)
    zero = {**BUCKETS, "round_robin_gradients": True}
    parameters, _, rows = ranks(4).run(muon_case, ("NII", "NIG", "NGG"), 2, 1, zero)[0]
    states = ModelStates.of(parameters, parameter_bytes=WIDTH, gradient_bytes=WIDTH)
    check(rows, GroupSizes(4, 2), states, 1, exchange=lambda one: halves if one.os == Placement.G else Volume())


def muon_case(
    names: tuple[str, ...], group: int, accumulation: int, zero: dict[str, Any]
) -> tuple[int, int, list[Row]]:
    """The same as ``bytes_case`` with Muon, without its iteration, which sends nothing and is slow."""
    from unittest import mock

    with mock.patch("deepspeed.runtime.zero.muon.original_muon.muon_update", lambda matrix, *_, **__: matrix):
        return bytes_case(names, group, accumulation, zero, sizes=SQUARES, optimizer="Muon")


def test_a_skipped_step_sends_no_updates_and_puts_a_whole_one_off(ranks: Any, kernels: bool) -> None:
    zero = {**LARGER_BUCKETS, "paro_quantized_updates": {"resync_T": 3}}
    names = ("NNN", "NIG", "NGG", "III", "IIG", "IGG")
    job = {"steps": 4, "dtype": "fp16", "overflow": ((2, 1),), "sizes": LARGER}
    parameters, _, rows = ranks(4).run(bytes_case, names, 2, 1, zero, **job)[0]
    states, width = ModelStates.of(parameters), 2
    coded = Compression(updates=UpdateSettings())
    for name, counted in rows:
        phases = STRATEGIES[name].phases(GroupSizes(4, 2), states)
        *before, update = (coded.volume(phase, width, width).inter for phase in phases)
        # A step goes before those that are counted: the third one would be whole, but is skipped.
        for number, due in enumerate((update, 0, phases[-1].volume.inter, update)):
            assert counted[number][1] == pytest.approx(sum(before) + due, rel=RELATIVE), (name, number)


def bytes_case(
    names: tuple[str, ...],
    group: int,
    accumulation: int,
    zero: dict[str, Any] = BUCKETS,
    steps: int = 1,
    **details: Any,
) -> tuple[int, int, list[Row]]:
    """Parameters, trainable ones, and for each strategy the mean bytes a rank of the micro-steps of some steps."""
    from deepspeed import comm as dist

    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import training

    job = training.Job(**{"sizes": SIZES, "empty": False, "accumulation": accumulation, "zero": zero, **details})
    rows: list[Row] = []
    for name in names:
        engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": group, **TWICE})
        data = training.batches(job)
        meters = [TrafficMeter() for _ in range(steps * accumulation)]
        # A step of one micro-step goes before: it records the order of the modules, which ranks compare once.
        for number, meter in enumerate([TrafficMeter(), *meters]):
            engine.set_gradient_accumulation_boundary(number % accumulation == 0)
            dist.barrier()
            meter.start()
            dist.barrier()
            training.micro_step(engine, job, number, *next(data))
            engine.step()
            if STRATEGIES[name].stage == 3:
                engine.optimizer.drain_parameters()  # or slices are completed during the next forward
            dist.barrier()
            meter.stop()
            dist.barrier()
        splits = [meter.split(group) for meter in meters]
        rows.append((name, [(split.intra_mean, split.inter_mean) for split in splits]))
        numels = [(getattr(p, "ds_numel", p.numel()), p.requires_grad) for p in model.parameters()]
        engine.destroy()
    return sum(numel for numel, _ in numels), sum(numel for numel, trainable in numels if trainable), rows


@pytest.mark.parametrize("world, group", [(4, 2), *deep((8, 4))])
def test_experts_move_among_the_ranks_that_have_them(ranks: Any, world: int, group: int) -> None:
    *_, alone = ranks(world).run(experts_case, group, ("layers", "gate"))[0]
    dense, experts, both = ranks(world).run(experts_case, group, ())[0]
    families = [(dense, GroupSizes(world, group)), (experts, GroupSizes(world // 2, group // 2))]
    for number, name in enumerate(REPLICATED):
        due = [
            STRATEGIES[name].volume(cluster, ModelStates.of(numel, parameter_bytes=WIDTH, gradient_bytes=WIDTH))
            for numel, cluster in families
        ]
        assert alone[number][1] == pytest.approx(due[1].inter, rel=RELATIVE), name
        for kind in (0, 1):  # tokens, which travel inside groups, are not counted in what is more
            more = both[number][kind] - alone[number][kind]
            assert more == pytest.approx((due[0].intra, due[0].inter)[kind], rel=RELATIVE), name


@pytest.mark.parametrize(
    "names, optimizer",
    [(("ING", "IIG", "GGG"), "SGD"), (("IIG",), "Muon"), *deep((("III", "IGG"), "SGD"), (("III", "IGG"), "Muon"))],
    ids=by_strategies,
)
def test_sharded_experts_are_gathered_among_the_ranks_that_have_them(
    ranks: Any, names: tuple[str, ...], optimizer: str
) -> None:
    dense, trained, experts, matrices, rows = ranks(4).run(autoep_case, 2, names, optimizer)[0]
    width = {"parameter_bytes": WIDTH, "gradient_bytes": WIDTH}
    families = [
        (GroupSizes(4, 2), ModelStates.of(dense, trained, **width)),
        (GroupSizes(2, 1), ModelStates.of(experts, **width)),
    ]
    for name, (intra, inter) in zip(names, rows, strict=True):
        due = [STRATEGIES[name].volume(*family) for family in families]
        for (cluster, _), numel in zip(families, matrices, strict=True):
            due.append(STRATEGIES[name].exchange(cluster, numel * WIDTH))
        assert inter == pytest.approx(sum(volume.inter for volume in due), rel=RELATIVE), name
        tokens = 150_000  # to experts and back, in forward and backward
        assert intra == pytest.approx(sum(volume.intra for volume in due), rel=RELATIVE, abs=tokens), name


def autoep_case(
    group: int, names: tuple[str, ...], optimizer: str
) -> tuple[int, int, int, tuple[int, int], list[Bytes]]:
    """Dense parameters, those of them that are trained, those of experts that this rank has; Muon's of dense ones and
    of experts; bytes as above, without Muon's iteration."""
    from unittest import mock

    with mock.patch("deepspeed.runtime.zero.muon.original_muon.muon_update", lambda matrix, *_, **__: matrix):
        return autoep_bytes(group, names, optimizer)


def autoep_bytes(
    group: int, names: tuple[str, ...], optimizer: str
) -> tuple[int, int, int, tuple[int, int], list[Bytes]]:
    """The same."""
    from deepspeed import comm as dist
    from deepspeed.moe.utils import is_moe_param

    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import experts, training

    class Network(experts.SmallMixtral):
        width, inner = 160, 320

    job = training.Job((256, 511, 300), zero=BUCKETS, network=Network, optimizer=optimizer, config=experts.autoep(2))
    rows = []
    for name in names:
        engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": group, **TWICE})
        data, meter = training.batches(job), TrafficMeter()
        for number in range(3):  # the record of the modules is compared in the second forward
            dist.barrier()
            if number == 2:
                meter.start()
            dist.barrier()
            training.micro_step(engine, job, number, *next(data))
            engine.step()
            engine.optimizer.drain_parameters()
            dist.barrier()
        meter.stop()
        dist.barrier()
        split = meter.split(group)
        rows.append((split.intra_mean, split.inter_mean))
        numels = [(p.ds_numel, p.requires_grad, is_moe_param(p)) for p in model.parameters() if p.ds_numel > 48]
        muon = [(p.ds_numel, is_moe_param(p)) for p in model.parameters() if getattr(p, "use_muon", False)]
        engine.destroy()
    own = sum(numel for numel, _, expert in numels if expert)
    dense = [(numel, trained) for numel, trained, expert in numels if not expert]
    matrices = (sum(numel for numel, expert in muon if not expert), sum(numel for numel, expert in muon if expert))
    return sum(numel for numel, _ in dense), sum(numel for numel, trained in dense if trained), own, matrices, rows


def experts_case(group: int, frozen: tuple[str, ...]) -> tuple[int, int, list[Bytes]]:
    """Dense parameters, those of experts that this rank has, and for each strategy the mean bytes a rank of a step."""
    from deepspeed import comm as dist
    from deepspeed.moe.utils import is_moe_param

    from scripts.emulation.traffic import TrafficMeter
    from tests.harness import networks, training

    class Network(networks.RoutedOverTwo):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.unused.requires_grad_(False)
            for name, param in self.named_parameters():
                if any(f".{part}." in f".{name}" for part in frozen):
                    param.requires_grad_(False)

    job = training.Job(sizes=(256, 511, 512, 300), empty=False, zero=BUCKETS, network=Network)
    rows = []
    for name in REPLICATED:
        engine, model = training.make_engine(job, {"paro_strategy": name, "paro_group_size": group})
        data, meter = training.batches(job), TrafficMeter()
        for counted in (False, True):
            dist.barrier()
            if counted:
                meter.start()
            dist.barrier()
            training.micro_step(engine, job, int(counted), *next(data))
            engine.step()
            dist.barrier()
        meter.stop()
        dist.barrier()
        split = meter.split(group)
        rows.append((split.intra_mean, split.inter_mean))
        numels = [(p.numel(), is_moe_param(p)) for p in model.parameters() if p is not model.unused]
        engine.destroy()
    experts = sum(numel for numel, expert in numels if expert)
    return sum(numel for numel, _ in numels) - experts, experts, rows


@pytest.mark.quick
def test_records_and_traces_tell_the_hops_apart(ranks: Any) -> None:
    for records, labels in ranks(4).run(logger_case):
        hops = {"intra_reduce_scatter", "inter_reduce_scatter", "inter_all_gather", "intra_all_gather"}
        assert hops <= records
        assert labels == {f"paro::{name}" for name in records if name.startswith(("intra_", "inter_"))}


def logger_case() -> tuple[set[str], set[str]]:
    """What a step of NIG with collectives leaves: records in DeepSpeed's comms logger, and labels in a trace."""
    from unittest import mock

    import torch
    from deepspeed.comm.comm import comms_logger

    from deepspeed_ext.comm import collectives
    from tests.harness import training

    job = training.Job(steps=1, config={"comms_logger": {"enabled": True, "prof_all": True}})
    with mock.patch.object(collectives, "backend_of", lambda group: "nccl"), torch.profiler.profile() as profile:
        training.train(job, {"paro_strategy": "NIG", "paro_group_size": 2})
    labels = {event.name for event in profile.events() if event.name.startswith("paro::")}
    return set(comms_logger.comms_dict), labels
