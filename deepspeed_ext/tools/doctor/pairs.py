# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which node or link is slow: pairs of ranks exchange messages, in rounds of a tournament."""

import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, rate_text
from deepspeed_ext.tools.doctor.outliers import LEAST, Outliers, find
from deepspeed_ext.tools.doctor.place import Place
from deepspeed_ext.tools.doctor.rounds import Pair, between, inside, tournament

MOST_ROUNDS = 16  # of each kind; see Note [Rounds]
SIZES = (2**20, 2**24, 2**26)  # bytes each way, the next one if the last took less than ENOUGH
ENOUGH = 0.02  # seconds
_REPEATS = 3
_MUCH = 0.5  # of the usual rate: slower than that is wrong, not only worth a look
_LATE = 1 / 3  # of the usual inverse latency
_SHOWN = 8  # findings of a kind
_MOST_SECONDS = 300.0
_ADVICE = {
    "nodes": "Look at this node's network card, cable and switch port (ethtool, ibstat), and what else uses them.",
    "ranks": "Look at this rank's device and its own link (nvidia-smi topo -m, nvidia-smi nvlink -s).",
    "pair": "Look at the path between the two alone: cables and switches that only it uses.",
}


@dataclass(frozen=True)
class Row:
    """What a pair of ranks has measured.

    Attributes:
        ping: seconds of a message that carries nothing.
        seconds: of each repeat, by bytes that were sent each way at the same time.
        whole: from the first repeat to the last one, likewise: with what the pair waits for between them.
    """

    ping: float
    seconds: Mapping[int, Sequence[float]]
    whole: Mapping[int, float]

    @property
    def rate(self) -> float:
        """Return bytes per second each way, of the largest messages; the median, since ranks may share a link."""
        size = max(self.seconds)
        return size / statistics.median(self.seconds[size])


def joint_rate(rows: Sequence[Row]) -> float:
    """Return the bytes per second each way of pairs that were measured at the same time, together.

    Of the largest messages that all of them sent. They share links, not always fairly, and one pair waits between its
    repeats while another one sends: so what counts is how long all repeats took, of the pair that took longest. Of a
    pair by itself the best repeat counts, since what else a machine does only slows down.
    """
    size = max(set.intersection(*(set(row.seconds) for row in rows)))
    if len(rows) == 1:
        return size / min(rows[0].seconds[size])
    return sum(size * len(row.seconds[size]) for row in rows) / max(row.whole[size] for row in rows)


def examine(place: Place) -> list[list[Any]]:
    """Return what this rank has measured as the lower one of its pairs: both ranks, and the fields of a ``Row``."""
    from deepspeed import comm as dist

    teams, found = place.teams(), []
    for plan in (inside(teams, MOST_ROUNDS), between(teams, MOST_ROUNDS)):
        for pairs in plan:
            dist.barrier()
            mine = next((pair for pair in pairs if place.rank in pair), None)
            if mine is not None:
                measured = _measure(sum(mine) - place.rank)
                found += [[*mine, *measured]] if place.rank == mine[0] else []
    return found


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return which teams, ranks and pairs are slow, and how many rounds were measured."""
    rows = {
        (a, b): Row(ping, *({int(size): times for size, times in by_size.items()} for by_size in (seconds, whole)))
        for told in answers.values()
        for a, b, ping, seconds, whole in told
    }
    teams = place.teams()
    team_of = {rank: number for number, team in enumerate(teams) for rank in team}
    across = {pair: row for pair, row in rows.items() if team_of[pair[0]] != team_of[pair[1]]}
    within = {pair: row for pair, row in rows.items() if pair not in across}
    found = _between(across, teams, team_of, place) if across else []
    if within:
        outliers = find({pair: row.rate for pair, row in within.items()})
        found += _findings(outliers, "inside nodes", _rank_name(place), "ranks", len(within))
    return found or [Finding("pairs", Level.OK, "one rank: nothing is sent")]


def _between(
    rows: Mapping[Pair, Row], teams: list[list[int]], team_of: Mapping[int, int], place: Place
) -> list[Finding]:
    """Return what is slow among nodes; among ranks only what their nodes do not explain."""
    of_nodes: dict[Pair, list[Row]] = {}
    for (a, b), row in rows.items():
        key = (min(team_of[a], team_of[b]), max(team_of[a], team_of[b]))
        of_nodes.setdefault(key, []).append(row)
    rates = {pair: joint_rate(some) for pair, some in of_nodes.items()}
    nodes = find(rates)
    count, most = len(between(teams, MOST_ROUNDS)), len(tournament(len(teams)))
    usual = statistics.median(row.ping for row in rows.values())
    rounds = f"{count} of {most} round(s) of disjoint pairs, {len(rates)} pair(s) of nodes; "
    rounds += f"an empty message takes {1e6 * usual:.0f} us"
    name = lambda number: place.named(teams[number])  # noqa: E731
    found = [Finding("measured", Level.OK, rounds), *_findings(nodes, "between nodes", name, "nodes", len(rates))]
    delays = find({pair: 1 / row.ping for pair, row in rows.items()}, _LATE)
    for rank, inverse in list(delays.players.items())[:_SHOWN]:
        said = f"an empty message takes {1e6 / inverse:.0f} us, usually {1e6 / delays.usual:.0f} us"
        found.append(Finding(_rank_name(place)(rank), Level.LOOK, said, _ADVICE["nodes"]))
    explained = set(nodes.players) | {number for pair in nodes.pairs for number in pair} | set(nodes.lower)
    if any(len(team) > 1 for team in teams):
        rest = {pair: row.rate for pair, row in rows.items() if not explained & {team_of[rank] for rank in pair}}
        slow = find(rest)
        if slow.players or slow.pairs:
            found += _findings(slow, "ranks between nodes", _rank_name(place), "ranks", len(rest))
    return found


def _findings(found: Outliers, what: str, name: Any, kind: str, count: int) -> list[Finding]:
    lines = []
    for player, rate in sorted(found.players.items(), key=lambda item: item[1])[:_SHOWN]:
        said = f"slow with all others: {rate_text(rate)}, usually {rate_text(found.usual)}"
        level = Level.WRONG if rate < _MUCH * found.usual else Level.LOOK
        lines.append(Finding(name(player), level, said, _ADVICE[kind]))
    for (a, b), (rate, expected) in sorted(found.pairs.items(), key=lambda item: item[1][0])[:_SHOWN]:
        said = f"slow with each other: {rate_text(rate)}, otherwise {rate_text(expected)}"
        level = Level.WRONG if rate < _MUCH * expected else Level.LOOK
        lines.append(Finding(f"{name(a)} and {name(b)}", level, said, _ADVICE["pair"]))
    if found.lower:
        slower = ", ".join(name(player) for player in found.lower[:_SHOWN])
        said = f"of two kinds, {rate_text(min(found.rates.values()))} to {rate_text(max(found.rates.values()))}"
        advice = "Training goes at the pace of the slower ones."
        lines.append(Finding(what, Level.LOOK, f"{said}; the slower ones are {slower}", advice))
    if lines:
        return lines
    compared = f"no outlier (none below {LEAST:.0%} of the others)" if len(found.rates) > 2 else "too few to compare"
    return [Finding(what, Level.OK, f"{rate_text(found.usual)} each way, both at once; {compared}, {count} pair(s)")]


def _measure(partner: int) -> list[Any]:
    """Return the fields of a ``Row``. Both partners decide alike when it is enough."""
    from deepspeed_ext.tools.doctor.wire import buffer, exchange, ping

    delay = ping(partner)
    seconds: dict[int, list[float]] = {}
    whole: dict[int, float] = {}
    for size in SIZES:
        payload, landing = buffer(size), buffer(size)
        begin = time.perf_counter()
        seconds[size] = [exchange(partner, payload, landing) for _ in range(_REPEATS)]
        whole[size] = time.perf_counter() - begin
        if min(seconds[size]) > ENOUGH:
            break
    return [delay, seconds, whole]


def _rank_name(place: Place) -> Any:
    return lambda rank: f"rank {rank} on {place.hosts[rank]}"


CHECK = Check("nodes and links", examine, judge, together=True, least_seconds=_MOST_SECONDS)
