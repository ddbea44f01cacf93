# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Who measures with whom, and when: rounds of pairs that have no rank in common. Pure.

Note [Rounds]
    All pairs of k teams can be measured in k - 1 rounds (k, if k is odd), in each of which every team is in one pair
    only, so that pairs do not share a team's links: the schedule of a tournament, by the circle method. At most
    ``most`` of these rounds are run, spread evenly over all. Then each team meets that many others. That is enough to
    tell a slow team, but a slow pair is found only if it is among those that were measured.
"""

from collections.abc import Sequence

Pair = tuple[int, int]


def tournament(teams: int) -> list[list[Pair]]:
    """Return rounds of pairs of 0 to teams - 1, each pair once, the lower one first."""
    circle: list[int | None] = [*range(teams), *([None] if teams % 2 else [])]
    half, found = len(circle) // 2, []
    for _ in range(len(circle) - 1):
        facing = zip(circle[:half], reversed(circle[half:]), strict=True)
        found.append([(min(a, b), max(a, b)) for a, b in facing if a is not None and b is not None])
        circle = [circle[0], circle[-1], *circle[1:-1]]
    return [pairs for pairs in found if pairs]


def some(rounds: Sequence[list[Pair]], most: int) -> list[list[Pair]]:
    """Return at most so many of the rounds, spread evenly."""
    if len(rounds) <= most:
        return list(rounds)
    return [rounds[number * len(rounds) // most] for number in range(most)]


def between(teams: Sequence[Sequence[int]], most: int) -> list[list[Pair]]:
    """Return rounds between teams, in which rank i of a team meets rank i of another one."""
    return [
        [(min(x, y), max(x, y)) for a, b in pairs for x, y in zip(teams[a], teams[b], strict=False)]
        for pairs in some(tournament(len(teams)), most)
    ]


def inside(teams: Sequence[Sequence[int]], most: int) -> list[list[Pair]]:
    """Return rounds within teams, in all of them at the same time."""
    plans = [some(tournament(len(team)), most) for team in teams]
    return [
        [
            (team[a], team[b])
            for team, plan in zip(teams, plans, strict=True)
            if number < len(plan)
            for a, b in plan[number]
        ]
        for number in range(max(map(len, plans), default=0))
    ]
