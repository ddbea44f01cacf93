# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which player is slow, and which pair only, from the rates of pairs. Pure.

Note [Outliers]
    A pair is as fast as the slower of its two players. So a player is as fast as it is with its better partners: the
    upper quartile of its pairs' rates, which a slow partner does not lower. A player is slow if that is far below the
    median of all players: by 3 robust standard deviations (1.4826 times the median absolute deviation, in logarithms),
    and by 30 %, since rates of equal players may lie very close. A pair is slow if it is as far below what its slower
    player does with others. If half of the players are slow the median is none, and nobody is an outlier: then only
    the spread says so.
"""

import math
import statistics
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from deepspeed_ext.tools.doctor.rounds import Pair

_DEVIATIONS = 3
_TO_SIGMA = 1.4826  # of a normal distribution, from the median absolute deviation
_FASTER_PAIRS = 0.75
LEAST = 0.7  # of the usual rate; what is slower than that is far below
_SPREAD = 2.0  # of the rates of players, beyond which they are of two kinds


@dataclass(frozen=True)
class Outliers:
    """What stands out.

    Attributes:
        usual: median rate of players.
        players: rates of slow ones.
        pairs: rates of slow ones, each with what its players do with others, or is usual if they met no others.
        lower: players of the slower kind, if none is an outlier and rates are of two kinds.
        rates: of all players.
    """

    usual: float
    players: Mapping[int, float]
    pairs: Mapping[Pair, tuple[float, float]]
    lower: tuple[int, ...]
    rates: Mapping[int, float]


def find(rates: Mapping[Pair, float], least: float = LEAST) -> Outliers:
    """Return the slow players and pairs; see Note [Outliers]. Fewer than three players cannot be compared.

    Args:
        rates: of pairs, above 0.
        least: share of the usual rate below which a rate may be an outlier.
    """
    players = sorted({player for pair in rates for player in pair})
    speeds = {player: _upper([rate for pair, rate in rates.items() if player in pair]) for player in players}
    if len(players) < 3:
        usual = statistics.median(speeds.values()) if speeds else 0.0
        return Outliers(usual, {}, {}, (), speeds)
    usual = statistics.median(speeds.values())
    below = {player: math.log2(usual / speed) for player, speed in speeds.items()}
    limit = _limit(list(below.values()), least)
    slow = {player: speeds[player] for player in players if below[player] > limit}
    expected = {pair: min(speeds[pair[0]], speeds[pair[1]]) for pair in rates}
    short = {pair: math.log2(expected[pair] / rate) for pair, rate in rates.items()}
    limit = _limit(list(short.values()), least)
    pairs = {pair: (rates[pair], expected[pair]) for pair in rates if short[pair] > limit}
    # Of two that met nobody else, nobody knows which one it is.
    meetings = Counter(player for pair in rates for player in pair)
    lone = [pair for pair in rates if all(player in slow and meetings[player] == 1 for player in pair)]
    pairs |= {pair: (rates[pair], usual) for pair in lone}
    slow = {player: speed for player, speed in slow.items() if not any(player in pair for pair in lone)}
    fastest, slowest = max(speeds.values()), min(speeds.values())
    split = math.sqrt(fastest * slowest)
    two_kinds = not slow and not lone and fastest > _SPREAD * slowest
    lower = tuple(player for player in players if speeds[player] < split) if two_kinds else ()
    return Outliers(usual, slow, pairs, lower, speeds)


def _limit(distances: list[float], least: float) -> float:
    middle = statistics.median(distances)
    deviation = _TO_SIGMA * statistics.median(abs(distance - middle) for distance in distances)
    return max(middle + _DEVIATIONS * deviation, -math.log2(least))


def _upper(rates: list[float]) -> float:
    """Return the upper quartile, of few rates the largest."""
    ordered = sorted(rates)
    return ordered[math.ceil(_FASTER_PAIRS * (len(ordered) - 1))]
