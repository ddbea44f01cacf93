# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Finds slow players and slow pairs: rounds of pairs to measure, and outliers among their rates. Pure.

A player is a rank, or a team of ranks such as those of a node.

Note [Rounds]
    All pairs of k teams can be measured in k - 1 rounds (k, if k is odd). In each round every team is in only one
    pair, so that pairs do not share a team's links: a tournament schedule by the circle method. At most ``most`` of
    these rounds are run, spread evenly over all. Then each team meets that many others. This is enough to find a slow
    team, but a slow pair is found only if it was measured.

Note [Outliers]
    A pair is as fast as the slower of its two players. So a player's speed is that with its better partners: the upper
    quartile of its pairs' rates, which a slow partner does not lower. A player is slow if its speed is far below the
    median of all players: by 3 robust standard deviations (1.4826 times the median absolute deviation, in logarithms),
    and by 30 %, since rates of equal players may be very close. A pair is slow if it is as far below its slower
    player's speed. If half of the players are slow, the median is typical of neither half, and there are no outliers:
    then only the spread shows the difference.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from typing import TypeVar

Pair = tuple[int, int]
_Key = TypeVar("_Key", int, Pair)

OUTLIER_RATIO = 0.7  # share of the usual rate below which a player may be an outlier
_DEVIATIONS = 3
_TO_SIGMA = 1.4826  # standard deviation / median absolute deviation of a normal distribution
_FASTER_PAIRS = 0.75
_SPREAD = 2.0  # ratio of the highest to the lowest rate beyond which players are of two kinds


def tournament(teams: int, most: int | None = None) -> list[list[Pair]]:
    """Return rounds of pairs of 0 to teams - 1, each pair once, its lower member first; see Note [Rounds]."""
    circle, rounds = list(range(teams + teams % 2)), []  # if the number is odd, the last entry is a bye
    for _ in range(len(circle) - 1):
        facing = zip(circle[: len(circle) // 2], reversed(circle), strict=False)
        rounds.append([(min(pair), max(pair)) for pair in facing if max(pair) < teams])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    rounds = [pairs for pairs in rounds if pairs]
    chosen = min(len(rounds), most or len(rounds))
    return [rounds[number * len(rounds) // chosen] for number in range(chosen)]


def rounds_between(teams: Sequence[Sequence[int]], most: int) -> list[list[Pair]]:
    """Return rounds between teams, in which rank i of a team meets rank i of another team."""
    return [
        [(min(x, y), max(x, y)) for a, b in pairs for x, y in zip(teams[a], teams[b], strict=False)]
        for pairs in tournament(len(teams), most)
    ]


def rounds_inside(teams: Sequence[Sequence[int]], most: int) -> list[list[Pair]]:
    """Return rounds within teams, in all teams at the same time."""
    of_teams = ([[(team[a], team[b]) for a, b in pairs] for pairs in tournament(len(team), most)] for team in teams)
    return [list(chain(*together)) for together in zip_longest(*of_teams, fillvalue=[])]


@dataclass(frozen=True)
class Outliers:
    """Slow players and pairs.

    Attributes:
        usual: median rate of players.
        players: rates of slow players.
        pairs: rates of slow pairs, each with the rate of its slower player, or the usual rate if they met no others.
        lower: players of the slower kind, if none is an outlier and rates are of two kinds.
        rates: rates of all players.
    """

    usual: float
    players: Mapping[int, float]
    pairs: Mapping[Pair, tuple[float, float]]
    lower: tuple[int, ...]
    rates: Mapping[int, float]


def find_outliers(rates: Mapping[Pair, float], least: float = OUTLIER_RATIO) -> Outliers:
    """Return the slow players and pairs; see Note [Outliers]. Fewer than three players cannot be compared.

    Args:
        rates: rates of pairs, above 0.
        least: share of the usual rate below which a rate may be an outlier.
    """
    meetings = Counter(player for pair in rates for player in pair)
    speeds = {
        player: _upper_quartile([rate for pair, rate in rates.items() if player in pair])
        for player in sorted(meetings)
    }
    usual = statistics.median(speeds.values()) if speeds else 0.0
    if len(speeds) < 3:
        return Outliers(usual, {}, {}, (), speeds)
    # Compare speeds with the median, and then pairs with the speeds of their own players.
    slow = _far_below(speeds, dict.fromkeys(speeds, usual), least)
    expected = {pair: min(speeds[player] for player in pair) for pair in rates}
    pairs = {pair: (rates[pair], expected[pair]) for pair in _far_below(rates, expected, least)}
    # If two players met no others, either may be slow.
    lone = [pair for pair in rates if all(player in slow and meetings[player] == 1 for player in pair)]
    pairs |= {pair: (rates[pair], usual) for pair in lone}
    players = {player: speeds[player] for player in slow if not any(player in pair for pair in lone)}
    fastest, slowest = max(speeds.values()), min(speeds.values())
    two_kinds = not slow and fastest > _SPREAD * slowest
    lower = tuple(player for player in speeds if two_kinds and speeds[player] < math.sqrt(fastest * slowest))
    return Outliers(usual, players, pairs, lower, speeds)


def _far_below(rates: Mapping[_Key, float], expected: Mapping[_Key, float], least: float) -> list[_Key]:
    """Return the keys of rates that are outliers below the expected rates."""
    below = {key: math.log2(expected[key] / rate) for key, rate in rates.items()}
    middle = statistics.median(below.values())
    deviation = _TO_SIGMA * statistics.median(abs(distance - middle) for distance in below.values())
    limit = max(middle + _DEVIATIONS * deviation, -math.log2(least))
    return [key for key, distance in below.items() if distance > limit]


def _upper_quartile(rates: list[float]) -> float:
    """Return the upper quartile; for few rates, the largest."""
    return sorted(rates)[math.ceil(_FASTER_PAIRS * (len(rates) - 1))]
