# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Outliers among many rates, from planted times: a node, a pair, two kinds of nodes, a rank of a node."""

import random
from itertools import combinations

import pytest

from deepspeed_ext.tools.doctor.findings import Level
from deepspeed_ext.tools.doctor.launch import Launch
from deepspeed_ext.tools.doctor.links import MAX_ROUNDS, PairTimes, joint_rate, judge_pairs
from deepspeed_ext.tools.doctor.outliers import find_outliers, rounds_between, rounds_inside, tournament

pytestmark = pytest.mark.quick

NOISE = 0.05  # of a rate, either way


def planted(players: int, slow: dict[int, float], pair: tuple[int, int] | None = None) -> dict[tuple[int, int], float]:
    """Rates of all pairs: 1 with some noise, times the speed of the slower player; a third of that for one pair."""
    chance = random.Random(players)
    rates = {both: min(slow.get(one, 1.0) for one in both) for both in combinations(range(players), 2)}
    rates |= {} if pair is None else {pair: rates[pair] / 3}
    return {both: rate * chance.uniform(1 - NOISE, 1 + NOISE) for both, rate in rates.items()}


@pytest.mark.parametrize("players", [3, 4, 16, 65])
def test_a_slow_player_and_a_slow_pair_are_told_apart(players: int) -> None:
    nothing = find_outliers(planted(players, {}))
    assert not nothing.players and not nothing.pairs and not nothing.lower
    one = find_outliers(planted(players, {1: 0.4}))
    assert set(one.players) == {1} and not one.pairs
    pair = find_outliers(planted(players, {}, (0, 2)))
    assert not pair.players and set(pair.pairs) == {(0, 2)}
    assert pair.pairs[0, 2][0] == pytest.approx(1 / 3, rel=0.1) and pair.pairs[0, 2][1] > 0.9


def test_several_slow_ones_are_found_beside_what_varies() -> None:
    found = find_outliers(planted(20, {3: 0.5, 7: 0.2, 19: 0.6}, (4, 5)))
    assert set(found.players) == {3, 7, 19} and set(found.pairs) == {(4, 5)}
    halves = find_outliers(planted(8, dict.fromkeys(range(4), 0.1)))
    assert not halves.players and halves.lower == (0, 1, 2, 3)
    assert not find_outliers(planted(2, {1: 0.1})).players  # of one pair nobody knows which
    # What varies is no outlier; what is far beyond is.
    varied = {player: 2 ** -(player / 8) for player in range(8)}  # down to 0.55 of the fastest
    assert not find_outliers(planted(8, varied)).players
    assert set(find_outliers(planted(9, varied | {8: 0.05})).players) == {8}
    met = find_outliers({(0, 1): 1.0, (2, 3): 0.2, (4, 5): 1.0, (6, 7): 1.0})  # two that met no other
    assert not met.players and met.pairs == {(2, 3): (0.2, 1.0)} and not met.lower


@pytest.mark.parametrize("teams", [2, 3, 7, 64])
def test_each_pair_meets_once_in_disjoint_rounds(teams: int) -> None:
    rounds = tournament(teams)
    assert len(rounds) == teams - 1 + teams % 2
    assert sorted(pair for pairs in rounds for pair in pairs) == sorted(combinations(range(teams), 2))
    for chosen in (rounds, tournament(teams, 5)):
        assert len(chosen) <= max(5, len(rounds))
        assert all(len({one for pair in pairs for one in pair}) == 2 * len(pairs) for pairs in chosen)


def test_rounds_of_large_clusters_are_bounded() -> None:
    teams = [list(range(8 * node, 8 * node + 8)) for node in range(512)]
    rounds = rounds_between(teams, 16)
    assert len(rounds) == 16 and all(len(pairs) == 8 * 256 for pairs in rounds)
    assert len({pair for pairs in rounds for pair in pairs}) == 16 * 8 * 256
    assert all(a % 8 == b % 8 and a // 8 != b // 8 for pairs in rounds for a, b in pairs)
    assert len(rounds_inside(teams, 16)) == 7 and rounds_inside([[0], [1, 2]], 16) == [[(1, 2)]]


def measured(launch: Launch, seconds: float, slow: dict[frozenset[int], float]) -> dict[int, list[list[object]]]:
    """Answers of all ranks where a message of a MiB takes so long, and pairs with all these ranks that much longer."""
    answers: dict[int, list[list[object]]] = {rank: [] for rank in range(launch.world)}
    for rounds in (rounds_inside(launch.teams(), MAX_ROUNDS), rounds_between(launch.teams(), MAX_ROUNDS)):
        for a, b in (pair for some_pairs in rounds for pair in some_pairs):
            factor = max([1.0, *(times for who, times in slow.items() if who & {a, b} == who or who == {a, b} & who)])
            answers[a].append([a, b, 1e-5, {str(2**20): [seconds * factor] * 3}, {str(2**20): 3 * seconds * factor}])
    return answers


def said(launch: Launch, slow: dict[frozenset[int], float]) -> dict[str, Level]:
    findings = judge_pairs(measured(launch, 0.01, slow), launch)
    return {one.subject: one.level for one in findings if one.level > Level.OK}


def test_a_node_a_link_and_a_rank_are_named() -> None:
    launch = Launch(0, 0, [f"node{rank // 2}" for rank in range(12)])
    assert not said(launch, {})
    of_node = {frozenset({rank, other}): 4.0 for rank in (4, 5) for other in range(12) if other // 2 != 2}
    assert said(launch, of_node) == {"node2 (ranks 4-5)": Level.WRONG}  # not its ranks as well
    assert said(launch, {frozenset({4, 5}): 4.0}) == {"rank 4 on node2 and rank 5 on node2": Level.WRONG}
    link = said(launch, {frozenset({2, 8}): 4.0, frozenset({3, 9}): 4.0})
    assert link == {"node1 (ranks 2-3) and node4 (ranks 8-9)": Level.WRONG}
    assert said(launch, {frozenset({7}): 1.6})["node3 (ranks 6-7)"] == Level.LOOK  # what its ranks do together


def test_the_last_of_ranks_that_share_a_link_counts() -> None:
    first = PairTimes(1e-5, {10: [1.0, 4.0], 20: [9.0, 9.0]}, {10: 5.5, 20: 18.0})
    second = PairTimes(1e-5, {10: [2.0, 1.0]}, {10: 6.0})
    assert joint_rate([first, second]) == 4 * 10 / 6.0  # of the size that both sent
    assert joint_rate([first]) == 20 / 9.0 and joint_rate([second]) == 10 / 1.0
