# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""The planner's figures against the formulas, its choices, and their reasons. Pure."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from deepspeed_ext.comm import transfer_queue
from deepspeed_ext.config.settings import ORDERED_LEVELS, LocoSettings, UpdateSettings
from deepspeed_ext.planner.choice import TIE, plan
from deepspeed_ext.planner.compression import Compression
from deepspeed_ext.planner.costs import predict, predict_plain_stage
from deepspeed_ext.planner.memory import IN_FLIGHT, Model, Part
from deepspeed_ext.planner.models import describe
from deepspeed_ext.planner.rates import HopRates, Latencies, Rate, Rates, fit, hop_latency
from deepspeed_ext.strategy import STRATEGIES, Direction, GroupSizes, ModelStates, Placement, Volume

pytestmark = pytest.mark.quick

GIGA = 1e9
CLUSTER = GroupSizes(16, 4)
STATES = ModelStates.of(10**9, 6 * 10**8)
RATES = Rates.of_links(CLUSTER, 4, intra_gbps=800, inter_gbps=80)
MODEL = Model(STATES, accumulation=4)


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n, m, s", [(4, 2, 1), (64, 8, 16), (8, 8, 2), (8, 1, 2)])
def test_bytes_and_memory_are_those_of_the_formulas(name: str, n: int, m: int, s: int) -> None:
    row, cluster = STRATEGIES[name], GroupSizes(n, m)
    prediction = predict(row, cluster, replace(MODEL, accumulation=s), Rates.of_links(cluster, m, 100, 10))
    assert prediction.volume == pytest.approx(row.volume(cluster, STATES, s))
    assert prediction.memory == row.memory(cluster, STATES)
    assert prediction.total_memory == pytest.approx(prediction.memory.total + 4 * 6e8 / cluster.shards(row.os))


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.parametrize("n, m, ep, groups", [(64, 8, 4, (16, 2)), (64, 8, 16, (4, 1)), (8, 8, 8, (1, 1))])
def test_experts_count_among_their_ranks(name: str, n: int, m: int, ep: int, groups: tuple[int, int]) -> None:
    row, cluster, own = STRATEGIES[name], GroupSizes(n, m), ModelStates.of(3 * 10**8)
    assert cluster.of_experts(ep) == GroupSizes(*groups)
    rates = Rates.of_links(cluster, m, 100, 10)
    with_experts = replace(MODEL, experts=(Part(ep, own),))
    dense, prediction = (predict(row, cluster, model, rates) for model in (MODEL, with_experts))
    experts = row.volume(GroupSizes(*groups), own, 4)
    assert (prediction.of_experts.intra, prediction.of_experts.inter) == pytest.approx((experts.intra, experts.inter))
    assert dense.of_experts == Volume()
    assert prediction.volume == Volume(
        pytest.approx(dense.volume.intra + experts.intra), pytest.approx(dense.volume.inter + experts.inter)
    )
    states_of_rank = row.memory(GroupSizes(*groups), own)
    assert prediction.memory.total == pytest.approx(dense.memory.total + states_of_rank.total)
    hops = rates.gather
    busy = [prediction.busy[part] - dense.busy[part] for part in ("within", "between")]
    assert busy == pytest.approx([hops.intra.seconds(experts.intra), hops.inter.seconds(experts.inter)])
    muon = replace(MODEL, matrices=STATES.gradients, experts=(Part(ep, own, matrices=own.gradients),))
    exchanged = row.exchange(GroupSizes(*groups), own.gradients) + row.exchange(cluster, STATES.gradients)
    assert predict(row, cluster, muon, rates).volume == pytest.approx(prediction.volume + exchanged)


@pytest.mark.parametrize("placement", [Placement.N, Placement.I])
@pytest.mark.parametrize("name", STRATEGIES)
def test_placed_parameters_are_sent_as_with_that_p(name: str, placement: Placement) -> None:
    row, whole, rest = STRATEGIES[name], ModelStates.of(2 * 10**8, 10**8), ModelStates.of(8 * 10**8, 5 * 10**8)
    without = predict(row, CLUSTER, MODEL, RATES)
    prediction = predict(row, CLUSTER, replace(MODEL, placed={placement: Part(1, whole)}), RATES)
    coarser = replace(row, p=min(row.p, placement))
    assert prediction.volume == pytest.approx(row.volume(CLUSTER, rest, 4) + coarser.volume(CLUSTER, whole, 4))
    sharded, kept = row.p > placement, placement == Placement.N
    more = 4e8 if kept else 4e8 / CLUSTER.group_size - 4e8 / CLUSTER.ranks  # whole parameters also have shards
    assert prediction.memory.total == pytest.approx(without.memory.total + sharded * more)
    more = sharded and kept and row.g != Placement.N
    assert prediction.transient == pytest.approx(without.transient + more * 2e8) and without.of_experts == Volume()
    assert sharded or prediction == without
    few, sent = Compression(None, UpdateSettings()), row.phases(CLUSTER, whole, whole=row.p != Placement.N)[-1]
    if (
        row.p != Placement.N and row.os == Placement.G
    ):  # decoded on the ranks with p, so within the group they are sent exactly
        assert few.volume(sent, 2, 2).intra == sent.volume.intra and few.volume(sent, 2, 2).inter < sent.volume.inter


@pytest.mark.parametrize("name", STRATEGIES)
def test_loco_shrinks_only_reductions_between_groups(name: str) -> None:
    row, settings = STRATEGIES[name], LocoSettings(bits=4, block_size=32)
    plain, loco = predict(row, CLUSTER, MODEL, RATES), predict(row, CLUSTER, MODEL, RATES, Compression(settings))
    reduced = sum(p.volume.inter * p.times(4) for p in row.phases(CLUSTER, STATES) if p.kind == Direction.REDUCE)
    assert reduced > 0
    assert plain.volume.inter - loco.volume.inter == pytest.approx(reduced * (1 - 4.5 / 16))
    assert plain.volume.intra == loco.volume.intra and plain.memory == loco.memory
    # Errors of 8 bits with a scale of 16 bits a block, of the rank's 1/m of the gradients; until a step ends, twice.
    assert loco.transient - plain.transient == pytest.approx(2 * 6e8 / 4 * (1 + 2 / 32))


@pytest.mark.parametrize("name", STRATEGIES)
def test_ordered_sums_hold_the_parts_of_all_ranks(name: str) -> None:
    row, model = STRATEGIES[name], replace(MODEL, bucket=10**8)
    plain, between, everywhere = (
        predict(row, CLUSTER, replace(model, ordered=ORDERED_LEVELS[value]), RATES) for value in ORDERED_LEVELS
    )
    # Twice the part of a bucket for one of 4 ranks; within groups twice a bucket. In 2 bytes.
    assert between.transient - plain.transient == pytest.approx(2 * 2 * 1e8 / 4)
    assert everywhere.transient - between.transient == pytest.approx(2 * 2e8)
    assert everywhere.volume == plain.volume
    alone = predict(row, CLUSTER, replace(model, overlap=False, ordered=ORDERED_LEVELS["ordered"]), RATES)
    assert alone.transient - plain.transient == pytest.approx(2 * 1e8 / 4)
    assert IN_FLIGHT == transfer_queue._SIDE_STREAMS


def test_ordered_sums_between_groups_exclude_loco() -> None:
    for value, allowed in (("backend", 2), ("ordered", 1), ("ordered_everywhere", 2)):
        model = replace(MODEL, ordered=ORDERED_LEVELS[value])
        rows = plan(CLUSTER, model, RATES, compressions=[Compression(), Compression(LocoSettings())]).predictions
        assert len(rows) == allowed * len(STRATEGIES) and any(row.loco for row in rows) == (allowed == 2)


def test_plain_zero_3_is_predicted_without_units() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16)  # six of its modules have parameters
    model = describe(nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    assert (model.fetches, model.without_units) == (4, (24, 4 * 3 * 8 * 9))
    rates = Rates(*[HopRates(Rate(1.0, 1e9), Rate(1.0, 1e9))] * 2)
    plain, ours = predict_plain_stage("GGG", CLUSTER, model, rates), predict(STRATEGIES["GGG"], CLUSTER, model, rates)
    assert (round(plain.busy["within"]), round(ours.busy["within"])) == (2 * 24 + 1, 2 * 4 + 1)
    assert ours.transient > plain.transient
    # With one group, p = N equals its plain stage. No plan prefers ZeRO-3: host time for modules is not predicted.
    alone, rates = GroupSizes(8, 8), Rates(*[HopRates(Rate(0.0, 3e9), Rate(0.0, 3e9))] * 2)
    model = Model(ModelStates.of(24_000_000), fetches=3, without_units=(24, 0.0), compute=0.05, bucket=5_000_000)
    for name in ("NNG", "NGG"):
        of_strategy = predict(STRATEGIES[name], alone, model, rates)
        assert of_strategy.seconds == predict_plain_stage(name, alone, model, rates).seconds
    planned = plan(alone, model, rates, allowed=STRATEGIES["GGG"].__eq__)
    assert planned.plain[-1].total_seconds < planned.choice.total_seconds and "plain" not in planned.reason


# Of all trained parameters, 3/16 cross to a rank at once: how often reductions, sums that come back, and updates do.
CROSSINGS = {
    **dict.fromkeys(("NNN", "NNI", "NII", "INI", "III"), (1, 1, 0)),
    **dict.fromkeys(("NNG", "NIG", "ING", "IIG"), (1, 0, 1)),
    **dict.fromkeys(("NGG", "IGG"), (4, 0, 1)),
}


@pytest.mark.parametrize("name", CROSSINGS)
@pytest.mark.parametrize(
    ("given", "bits_of_sums", "bits_of_updates", "block"),
    [({"bits": 8, "block_size": 64}, 8.25, 8.25, 64), ({}, 4.5, 4.125, 32)],
    ids=["8 bits", "defaults"],
)
def test_updates_and_sums_in_few_bits_by_hand(
    name: str, given: dict[str, Any], bits_of_sums: float, bits_of_updates: float, block: int
) -> None:
    """Gradients in 4 bytes, parameters in 2; in few bits LoCo's in 4.5; one update of 10 is sent unquantized."""
    row, (reduced, back, updated) = STRATEGIES[name], CROSSINGS[name]
    model = replace(MODEL, states=ModelStates.of(10**9, 6 * 10**8, gradient_bytes=4), gradient_bytes=4)
    loco, updates = LocoSettings(block_size=32), UpdateSettings(**given, resync_T=10)
    crossing, often = 3 / 16 * 6e8, (9 * bits_of_updates + 16) / 10 / 8
    plain = predict(row, CLUSTER, model, RATES)
    assert plain.volume.inter == pytest.approx(crossing * (4 * reduced + 4 * back + 2 * updated))
    for settings, gradient_bytes in ((None, 4), (loco, 4.5 / 8)):
        prediction = predict(row, CLUSTER, model, RATES, Compression(settings, updates))
        expected = gradient_bytes * reduced + bits_of_sums / 8 * back + often * updated
        assert prediction.volume.inter == pytest.approx(crossing * expected)
        # With p = N, updated parameters are whole on a rank only after the hop inside the group.
        decoded_late = 3 / 4 * 6e8 * (2 - often) if row.p.name == "N" and updated else 0
        assert plain.volume.intra - prediction.volume.intra == pytest.approx(decoded_late)
        # An owner keeps what its sums lack in 8 bits with a scale of 16 a block; until a step ends, twice.
        without = predict(row, CLUSTER, model, RATES, Compression(settings))
        assert prediction.transient - without.transient == pytest.approx(back * 2 * 6e8 / 16 * (1 + 2 / block))
        assert prediction.memory == plain.memory and prediction.total_seconds < without.total_seconds
        assert prediction.name == name + (" + LoCo" if settings else "") + " + updates"


def test_updates_in_few_bits_need_parameters_on_the_ranks() -> None:
    few, lossless = Compression(None, UpdateSettings()), Compression(None, UpdateSettings(bits="exact"))
    prediction, both, exact = (
        plan(CLUSTER, MODEL, RATES, compressions=forms) for forms in ([few], [Compression(), few], [lossless])
    )
    assert {row.strategy for row in prediction.predictions} == set(CROSSINGS)
    assert {name for name, row in STRATEGIES.items() if row.p.name != "G"} == set(CROSSINGS)
    assert {row.strategy for row in exact.predictions} == {name for name, row in CROSSINGS.items() if not row[1]}
    assert len(both.predictions) == 14 + 11 and both.choice is not None and both.choice.updates


def test_seconds_of_a_strategy_by_hand() -> None:
    """IIG: parameters 2 GB, gradients 1.2 GB, n = 16, m = 4, s = 4; a = 3/4, b = 3/16."""
    hops = HopRates(Rate(1e-3, 10e9), Rate(1e-2, 2e9))
    slow = HopRates(Rate(2e-3, 5e9), Rate(2e-2, 1e9))
    model = Model(STATES, accumulation=4, compute=0.5, fetches=10, bucket=10**8)
    prediction = predict(STRATEGIES["IIG"], CLUSTER, model, Rates(hops, slow, memory=100e9)).busy
    gather = 10 * 1e-3 + 0.75 * 2e9 / 10e9
    reduce = 6 * 2e-3 + 0.75 * 1.2e9 / 5e9
    assert prediction["compute"] == pytest.approx(2.0)
    assert prediction["within"] == pytest.approx(4 * (2 * gather + reduce))
    boundary = 6 * 2e-2 + 3 / 16 * 1.2e9 / 1e9
    update = 10 * 1e-2 + 3 / 16 * 1.2e9 / 2e9
    assert prediction["between"] == pytest.approx(boundary + update)
    assert prediction["update"] == pytest.approx(2.5 * 12 * 6e8 / 16 / 100e9)


@pytest.mark.parametrize(
    "n, m, per_node, intra, inter",
    [
        (16, 4, 4, 100, 10),  # groups are nodes: four ranks share a link
        (16, 2, 4, 100, 20),  # two groups on a node: its link carries one flow for each number in a group
        (16, 8, 4, 40, 10),  # a group over two nodes: one ring goes through each link, and four between groups
        (4, 2, 4, 100, 100),  # all on one node
        (16, 16, 4, 40, 10),  # one group
        (12, 3, 4, 20, 40 / 3),  # groups that reach over nodes: two of them into the one in the middle
        (12, 6, 4, 20, 10),
        (6, 2, 3, 40, 20),  # one group reaches over the border of two nodes
    ],
)
def test_rates_of_links_share_them(n: int, m: int, per_node: int, intra: float, inter: float) -> None:
    rates = Rates.of_links(GroupSizes(n, m), per_node, intra_gbps=800, inter_gbps=320).gather
    assert (rates.intra.bandwidth / GIGA, rates.inter.bandwidth / GIGA) == pytest.approx((intra, inter))


def test_latencies_are_those_of_nccl_and_gloo() -> None:
    """By hand, in us: of 4 nodes with 8 ranks, rings within and PAT between; rings of few steps."""
    prediction = Latencies.for_groups(GroupSizes(32, 8), 8)
    assert prediction == pytest.approx((8.4e-6 + 7 * 3.4e-6, 8e-6 + 2 * 4e-6 + 4 * 2.8e-6))
    assert hop_latency(128, 128) == pytest.approx(394.4e-6) and hop_latency(2, 2, step=1e-6) == pytest.approx(9.4e-6)
    assert hop_latency(8, 4) == pytest.approx((8.4 + 4 * 3.4 + 3 * 14) * 1e-6)  # two ranks on each node: no PAT
    assert Latencies.for_groups(GroupSizes(32, 4), 8).inter == hop_latency(8, 4)
    assert Latencies.for_groups(GroupSizes(4, 1), 1, step=2e-4, backend="gloo") == pytest.approx((0.0, 6e-4))


@pytest.mark.parametrize("figure, bad", [("intra_gbps", 0), ("inter_gbps", 0), ("ranks_per_node", 0), ("host", -1)])
def test_figures_out_of_bounds_are_refused(figure: str, bad: int) -> None:
    given = {"ranks_per_node": 4, "intra_gbps": 800, "inter_gbps": 320} | {figure: bad}
    with pytest.raises(ValueError, match=f"{figure} must be above 0, got {bad}"):
        Rates.of_links(CLUSTER, **given)
    with pytest.raises(ValueError, match="a multiple or a divisor of paro_group_size, got 4 with 24 ranks in groups"):
        GroupSizes(24, 6).of_experts(4)


def test_fit_finds_latency_and_bandwidth() -> None:
    sizes = [2**16, 2**20, 2**22, 2**24]
    exact = fit([(x, 3e-4 + x / 5e9) for x in sizes])
    assert (exact.latency, exact.bandwidth) == pytest.approx((3e-4, 5e9))
    # A link that passes 128 KiB at once, and the rest at its rate.
    burst = fit([(x, 1e-4 + max(0, x - 2**17) / 12.5e6) for x in sizes])
    assert burst.bandwidth == pytest.approx(12.5e6)
    assert burst.latency == 0.0
    disturbed = fit([(1000, 1e-3), (2000, 2e-3), (4000, 2.01e-3)])  # as steep as over all, not as between the last
    assert disturbed.bandwidth == pytest.approx(3000 / 1.01e-3)
    upside_down = fit([(1000, 2e-3), (2000, 2e-3), (4000, 1.9e-3)])
    assert upside_down.bandwidth == pytest.approx(4000 / 1.9e-3)
    with pytest.raises(ValueError, match="at least 2 sizes"):
        fit([(1000, 1e-3), (1000, 2e-3)])


def test_what_is_held_elsewhere_or_kept_between() -> None:
    """Offloaded states take no memory, but their bytes are moved; parameters that are kept are gathered once."""
    row = STRATEGIES["IIG"]
    plain = predict(row, CLUSTER, MODEL, RATES)
    offloaded = predict(row, CLUSTER, replace(MODEL, held=replace(STATES, optimizer=0.0, parameters=0.0)), RATES)
    assert offloaded.volume == plain.volume
    assert (offloaded.memory.parameters, offloaded.memory.optimizer, offloaded.transient) == (0.0, 0.0, 0.0)
    not_regathered = predict(row, CLUSTER, replace(MODEL, regathered=False), RATES)
    assert plain.volume.intra - not_regathered.volume.intra == pytest.approx(4 * 0.75 * 2e9)
    assert not_regathered.volume.inter == plain.volume.inter
    assert not_regathered.transient - plain.transient == pytest.approx(2e9)
    whole = predict(STRATEGIES["NIG"], CLUSTER, replace(MODEL, regathered=False), RATES)
    assert whole == predict(STRATEGIES["NIG"], CLUSTER, MODEL, RATES)


def test_the_fastest_that_fits_is_chosen() -> None:
    free = plan(CLUSTER, MODEL, RATES)
    assert free.choice is not None and free.choice.strategy == "NNG"  # as fast as NNN and NNI, and smaller
    assert [row.total_seconds for row in free.predictions] == sorted(row.total_seconds for row in free.predictions)
    assert len(free.predictions) == 14
    close = free.reason.partition("as fast within 3%, with more memory: ")[2].partition(";")[0]
    assert set(close.split(", ")) == {"N-N-I", "N-N-N"}
    # Where groups cost almost nothing, all that cross between them once a step tie: then the smallest is chosen.
    tied = plan(CLUSTER, MODEL, Rates.of_links(CLUSTER, 4, intra_gbps=1e5, inter_gbps=80))
    assert tied.choice is not None and tied.choice.strategy == "IIG" != tied.predictions[0].strategy
    tight = plan(CLUSTER, MODEL, RATES, budget=2.9e9)
    assert tight.choice is not None and tight.choice.total_memory <= 2.9e9
    fitting = [row for row in tight.predictions if tight.fits(row)]
    assert len(fitting) < 14
    assert tight.choice.total_seconds <= (1 + TIE) * fitting[0].total_seconds
    assert "faster, but too large: " in tight.reason
    none = plan(CLUSTER, MODEL, RATES, budget=1e8)
    assert none.choice is None and none.as_dict()["choice"] is None
    assert "no strategy fits: G-G-G needs the least memory" in none.reason and "of 0.1 GB" in none.reason
    with pytest.raises(ValueError, match="no strategy is allowed"):
        plan(CLUSTER, MODEL, RATES, allowed=lambda row: False)


def test_a_key_that_would_not_help_is_named() -> None:
    """On quick links ZeRO-3 hides all of its gathers; on slow ones ZeRO-1 is as fast, in more memory."""
    model = replace(MODEL, fetches=20, bucket=10**8, compute=0.2)
    said = {}
    for inter in (800, 80, 8):
        prediction = plan(CLUSTER, model, Rates.of_links(CLUSTER, 4, 8000, inter))
        said[inter] = prediction.reason.partition("plain ")[2]
        assert [row.name for row in prediction.plain] == ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3"]
    assert said[800] == "ZeRO-3 (0.809 s, 0.8 GB): no strategy is needed"
    assert said[8] == "ZeRO-1 (2.49 s, 3.8 GB), with more memory"
    tight = plan(CLUSTER, model, Rates.of_links(CLUSTER, 4, 8000, 8), budget=3e9)
    assert "plain" not in tight.reason
    sharded = plan(CLUSTER, model, RATES, allowed=lambda row: row.stage == 3)
    assert {row.strategy for row in sharded.predictions} == {n for n, row in STRATEGIES.items() if row.stage == 3}
    assert [row["strategy"] for row in sharded.as_dict()["plain"]] == ["GGG"]


def test_a_key_that_would_help_is_named() -> None:
    model = replace(MODEL, fetches=20, bucket=10**8, compute=0.5)
    rates = Rates.of_links(CLUSTER, 4, 8000, 20)
    prediction = plan(CLUSTER, model, rates, allowed=lambda row: row.stage < 3)
    _, _, said = prediction.reason.partition("; faster with paro_overlap_updates true: ")
    assert said.startswith("N-I-G (2.3 s, 2.9 GB)")
    on = plan(CLUSTER, replace(model, overlap_updates=True), rates, allowed=lambda row: row.stage < 3)
    assert "paro_overlap_updates" not in on.reason
    assert on.choice is not None and prediction.overlapped == on.choice
    assert "paro_overlap_updates" not in plan(CLUSTER, model, rates).reason  # IIG needs no key for it


def test_muon_moves_the_choice_to_where_its_matrices_are() -> None:
    """On slow links nothing is as quick as owners inside the group; but there each rank orthogonalizes more."""
    free = replace(MODEL, matrices=1.2e9)
    chosen = {}
    for orthogonalizing in (0.0, 4.0):
        prediction = plan(CLUSTER, replace(free, orthogonalizing=orthogonalizing), RATES)
        assert prediction.choice is not None and prediction.plain == ()
        assert "; not compared with plain stages: with Muon they also send" in prediction.reason
        chosen[orthogonalizing] = prediction.choice.strategy
    assert chosen == {0.0: "NNI", 4.0: "NNG"}
    assert "not compared" not in plan(CLUSTER, MODEL, RATES).reason
    sums = replace(free, held=replace(free.states, gradients=4 * 6e8))
    for name, shards in (("NNN", 1), ("NII", 4), ("IIG", 16)):
        with_muon, without, whole, none = (
            predict(STRATEGIES[name], CLUSTER, model, RATES)
            for model in (free, MODEL, sums, replace(sums, matrices=0.0))
        )
        assert with_muon.transient == without.transient  # gradients are taken in fp32 when the momentum is decided on
        assert whole.transient - none.transient == pytest.approx(4 * 6e8 / shards)  # nothing else is in fp32
        exchanged = STRATEGIES[name].exchange(CLUSTER, 1.2e9)
        assert with_muon.volume == pytest.approx(without.volume + exchanged)
