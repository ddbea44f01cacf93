# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Checks over process groups: their formation, rates of their hops, slow nodes and links, and clocks of hosts."""

import logging
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from torch import Tensor, distributed

from deepspeed_ext.planner.rates import fit
from deepspeed_ext.tools.doctor.findings import Finding, Level, bar, bytes_text, finding_for, rate_text
from deepspeed_ext.tools.doctor.launch import Answers, Check, Launch
from deepspeed_ext.tools.doctor.outliers import (
    OUTLIER_RATIO,
    Outliers,
    Pair,
    find_outliers,
    rounds_between,
    rounds_inside,
    tournament,
)

_WATCHDOG = 60.0  # seconds after the check's limit at which NCCL's watchdog may end the process


def _examine_groups(launch: Launch) -> dict[str, Any]:
    """Form the process group of all ranks, unless it exists, and the groups that training would form."""
    import deepspeed
    from deepspeed import comm as dist
    from deepspeed.utils import logger

    from deepspeed_ext.comm.agreement import all_reduce_sum
    from deepspeed_ext.comm.process_groups import get_topology

    logger.setLevel(logging.WARNING)
    begin = time.perf_counter()
    if not distributed.is_initialized():
        _form_world(launch)
    # On a host, DeepSpeed would compile this operator, which takes a minute and is only for training.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(verbose=False)
    refused = ""
    try:
        get_topology(None, launch.options.group_size)
    except ValueError as error:  # the same on all ranks
        refused = str(error)
    return {
        "ranks": all_reduce_sum(1),
        "backend": distributed.get_backend(),
        "seconds": time.perf_counter() - begin,
        "refused": refused,
        "initialized": dist.is_initialized(),
    }


def _form_world(launch: Launch) -> None:
    device = get_accelerator()
    # Bind the process group to its device as DeepSpeed does, which changes how subgroups are formed.
    device_id = (
        torch.device(device.current_device_name()) if device.device_name() == "cuda" and launch.world > 1 else None
    )
    distributed.init_process_group(
        device.communication_backend_name(),
        store=distributed.PrefixStore("groups", launch.store),
        rank=launch.rank,
        world_size=launch.world,
        # NCCL's watchdog must not end the process before the check has reported the hang.
        timeout=timedelta(seconds=launch.options.timeout + (0 if device.is_synchronized_device() else _WATCHDOG)),
        device_id=device_id,
    )


def _judge_groups(answers: Answers, launch: Launch) -> list[Finding]:
    first = answers[min(answers)]
    if first["refused"]:
        return [Finding("groups", Level.WRONG, first["refused"], "See groups above.")]
    if first["ranks"] != launch.world:
        text = f"an all-reduce counts {first['ranks']} of {launch.world} ranks"
        return [Finding(first["backend"], Level.WRONG, text, "The backend computes wrong sums: suspect its version.")]
    slowest = max(answer["seconds"] for answer in answers.values())
    return [Finding(first["backend"], Level.OK, f"formed in {slowest:.1f} s")]


PROCESS_GROUPS = Check(_examine_groups, _judge_groups, collective=True)

_SUBJECTS = {"intra": "inside groups", "inter": "between groups"}
_SIMILAR_RATIO = 1.5  # ratio of rates below which strategies have little to gain
_LINK_SECONDS = 240.0


def _examine_links(launch: Launch) -> dict[str, list[tuple[float, float]]] | None:
    """Return (bytes, seconds) of gathers within and between groups on rank 0, which are the same on all ranks."""
    from deepspeed_ext.comm.hops import GatherHop
    from deepspeed_ext.comm.process_groups import get_topology
    from deepspeed_ext.planner import probe

    topology = get_topology(None, launch.options.group_size)
    hops = {level: GatherHop(getattr(topology, level), level) for level in _SUBJECTS}
    samples = {level: probe.sample_hop(hop, torch.float32) for level, hop in hops.items()}
    return None if launch.rank else samples


def judge_hops(answers: Answers, launch: Launch) -> list[Finding]:
    """Return a plot for each level, and their ratio."""
    findings, bandwidths = [], []
    for level, subject in _SUBJECTS.items():
        samples = answers[0][level]
        if not samples:
            continue
        bandwidths.append(fit(samples).bandwidth)
        rates = {nbytes: nbytes / seconds for nbytes, seconds in samples}
        details = tuple(
            f"{bytes_text(nbytes):>8} {bar(rate, max(rates.values()))} {rate_text(rate)}"
            for nbytes, rate in rates.items()
        )
        nbytes, seconds = samples[0]
        text = f"{rate_text(bandwidths[-1])} that each rank receives, all at once; "
        text += f"{bytes_text(nbytes)} take {seconds * 1e3:.3g} ms"
        findings.append(Finding(subject, Level.OK, text, details=details))
    if len(bandwidths) == 2:
        ratio = bandwidths[0] / bandwidths[1]
        text = f"between groups a rank receives {ratio:.3g} times more slowly than inside"
        text += ": strategies gain little if links are similarly fast" if ratio < _SIMILAR_RATIO else ""
        findings.append(Finding("compared", Level.OK, text))
    return findings or [Finding("hops", Level.OK, "one rank: nothing is sent")]


LINKS = Check(_examine_links, judge_hops, collective=True, least_seconds=_LINK_SECONDS)

MAX_ROUNDS = 16  # inside teams, and between teams; see Note [Rounds] in outliers.py
SIZES = (2**20, 2**24, 2**26)  # bytes each way; a larger size is measured if the previous took less than ENOUGH
ENOUGH_SECONDS = 0.02  # seconds
_REPEATS = 3
_PINGS = 12
_WRONG_RATIO = 0.5  # share of the usual rate below which an outlier is wrong
_LATE_RATIO = 1 / 3  # share of the usual inverse latency below which a rank is late
_MAX_LISTED = 8  # maximum number of findings of a type
_PAIR_SECONDS = 300.0
_NODE_ADVICE = "Look at this node's network card, cable and switch port (ethtool, ibstat), and at other users of them."
_RANK_ADVICE = "Look at this rank's device and its own link (nvidia-smi topo -m, nvidia-smi nvlink -s)."
_PAIR_ADVICE = "Look at the path between the two alone: cables and switches that only it uses."


@dataclass(frozen=True)
class PairTimes:
    """Measurements of a pair of ranks.

    Attributes:
        ping: seconds of an empty message.
        seconds: seconds of each repeat, by the bytes that were sent each way at the same time.
        whole: seconds from the start of the first repeat to the end of the last, by these bytes.
    """

    ping: float
    seconds: Mapping[int, Sequence[float]]
    whole: Mapping[int, float]

    @property
    def rate(self) -> float:
        """Return the median bytes per second each way of the largest messages, since ranks may share a link."""
        size = max(self.seconds)
        return size / statistics.median(self.seconds[size])


def joint_rate(pairs: Sequence[PairTimes]) -> float:
    """Return the total bytes per second each way of pairs that were measured at the same time.

    The largest messages that all pairs sent are used. Pairs share links, not always fairly, and one pair waits between
    its repeats while another sends. Therefore the time of all repeats of the slowest pair is used. For a single pair
    it is the best repeat, since other load on a machine only slows it down.
    """
    size = max(set.intersection(*(set(times.seconds) for times in pairs)))
    if len(pairs) == 1:
        return size / min(pairs[0].seconds[size])
    return sum(size * len(times.seconds[size]) for times in pairs) / max(times.whole[size] for times in pairs)


def _examine_pairs(launch: Launch) -> list[list[Any]]:
    """Return both ranks and the fields of ``PairTimes`` for the pairs in which this rank is the lower rank."""
    rows, teams = [], launch.teams()
    for pairs in (*rounds_inside(teams, MAX_ROUNDS), *rounds_between(teams, MAX_ROUNDS)):
        # The barrier separates rounds: the pairs of one round, and no others, share links at a time.
        if distributed.get_backend() == "gloo":  # its monitored barrier names the missing ranks
            distributed.monitored_barrier(timeout=timedelta(seconds=launch.options.timeout), wait_all_ranks=True)
        else:
            distributed.barrier()
        pair = next((pair for pair in pairs if launch.rank in pair), None)
        if pair is not None:
            times = _measure(sum(pair) - launch.rank)
            rows += [[*pair, *times]] if launch.rank == pair[0] else []
    return rows


def _measure(partner: int) -> list[Any]:
    """Return the fields of ``PairTimes``; both ranks measure the same sizes."""
    # ``_exchange_seconds`` is equal on both ranks, so both end the loop together.
    seconds: dict[int, list[float]] = {}
    totals: dict[int, float] = {}
    ping, _ = _ping(partner)
    for size in SIZES:
        payload, received = _zeros(size, torch.uint8), _zeros(size, torch.uint8)
        begin = time.perf_counter()
        seconds[size] = [_exchange_seconds(partner, payload, received) for _ in range(_REPEATS)]
        totals[size] = time.perf_counter() - begin
        if min(seconds[size]) > ENOUGH_SECONDS:
            break
    return [ping, seconds, totals]


def _ping(partner: int) -> tuple[float, float]:
    """Return the seconds of an empty message and, on the lower rank, how many seconds the partner's clock is ahead.

    The fastest of several round trips is used. As in NTP, the partner's time is that of the middle of a trip.
    """
    note, best = _zeros(1, torch.int64), (float("inf"), 0.0)
    for _ in range(_PINGS):
        clock, begin = time.time(), time.perf_counter()
        # Opposite orders: if both ranks sent first, blocking sends could deadlock.
        if distributed.get_rank() < partner:
            distributed.send(note, partner)
            distributed.recv(note, partner)
        else:
            distributed.recv(note, partner)
            distributed.send(note.fill_(time.time_ns()), partner)
        get_accelerator().synchronize()
        seconds = (time.perf_counter() - begin) / 2
        best = min(best, (seconds, note.item() / 1e9 - clock - seconds))
    return best


def _exchange_seconds(partner: int, payload: Tensor, received: Tensor) -> float:
    """Send and receive the same number of bytes at the same time. Returns the seconds of the slower rank."""
    own_time, partner_time = _zeros(1, torch.int64), _zeros(1, torch.int64)
    _exchange(partner, own_time, partner_time)  # synchronizes both ranks before the timed exchange
    begin = time.perf_counter()
    _exchange(partner, payload, received)
    _exchange(partner, own_time.fill_(round((time.perf_counter() - begin) * 1e9)), partner_time)
    return max(own_time.item(), partner_time.item()) / 1e9


def _exchange(partner: int, sent: Tensor, received: Tensor) -> None:
    messages = (distributed.irecv, received), (distributed.isend, sent)
    for work in distributed.batch_isend_irecv([distributed.P2POp(kind, data, partner) for kind, data in messages]):
        work.wait()
    get_accelerator().synchronize()


def _zeros(count: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(count, dtype=dtype, device=get_accelerator().current_device_name())


def judge_pairs(answers: Answers, launch: Launch) -> list[Finding]:
    """Return slow nodes, ranks and pairs, and the number of measured rounds."""
    times = {
        (a, b): PairTimes(ping, *({int(size): value for size, value in sizes.items()} for sizes in (seconds, totals)))
        for rows in answers.values()
        for a, b, ping, seconds, totals in rows
    }
    team_of = {rank: number for number, team in enumerate(launch.teams()) for rank in team}
    across = {pair: row for pair, row in times.items() if team_of[pair[0]] != team_of[pair[1]]}
    rates = {pair: row.rate for pair, row in times.items() if pair not in across}
    findings = _judge_nodes(across, team_of, launch) if across else []
    findings += _outlier_findings(find_outliers(rates), "inside nodes", launch, rates) if rates else []
    return findings or [Finding("pairs", Level.OK, "one rank: nothing is sent")]


def _judge_nodes(times: Mapping[Pair, PairTimes], team_of: Mapping[int, int], launch: Launch) -> list[Finding]:
    """Return slow nodes, and slow ranks and pairs of ranks on other nodes."""
    teams = launch.teams()
    of_nodes: dict[Pair, list[PairTimes]] = {}
    for (a, b), row in times.items():
        of_nodes.setdefault((min(team_of[a], team_of[b]), max(team_of[a], team_of[b])), []).append(row)
    rates = {pair: joint_rate(rows) for pair, rows in of_nodes.items()}
    nodes, usual = find_outliers(rates), statistics.median(row.ping for row in times.values())
    text = f"{len(rounds_between(teams, MAX_ROUNDS))} of {len(tournament(len(teams)))} round(s) of disjoint pairs, "
    text += f"{len(rates)} pair(s) of nodes; an empty message takes {1e6 * usual:.0f} us"
    findings = [Finding("measured", Level.OK, text)]
    findings += _outlier_findings(nodes, "between nodes", launch, rates, teams)
    delays = find_outliers({pair: 1 / row.ping for pair, row in times.items()}, _LATE_RATIO)
    for rank, inverse in list(delays.players.items())[:_MAX_LISTED]:
        text = f"an empty message takes {1e6 / inverse:.0f} us, usually {1e6 / delays.usual:.0f} us"
        findings.append(Finding(launch.ranks_with_hosts([rank]), Level.LOOK, text, _NODE_ADVICE))
    explained = {*nodes.players, *nodes.lower, *(number for pair in nodes.pairs for number in pair)}
    unexplained_rates = {
        pair: row.rate for pair, row in times.items() if not explained & {team_of[rank] for rank in pair}
    }
    ranks = find_outliers(unexplained_rates)
    if any(len(team) > 1 for team in teams) and (ranks.players or ranks.pairs):
        findings += _outlier_findings(ranks, "ranks between nodes", launch, unexplained_rates)
    return findings


def _outlier_findings(
    outliers: Outliers, subject: str, launch: Launch, rates: Mapping[Pair, float], teams: list[list[int]] | None = None
) -> list[Finding]:
    """Return a finding for each outlier among ranks, or among teams if given; without outliers, one for all pairs."""
    findings, usual, advice = [], outliers.usual, _NODE_ADVICE if teams else _RANK_ADVICE

    def name(player: int) -> str:
        return launch.team_text(teams[player]) if teams else launch.ranks_with_hosts([player])

    def add(subject: str, rate: float, expected: float, text: str, advice: str) -> None:
        level = Level.WRONG if rate < _WRONG_RATIO * expected else Level.LOOK
        findings.append(Finding(subject, level, f"{text} {rate_text(expected)}", advice))

    for player, rate in sorted(outliers.players.items(), key=lambda item: item[1])[:_MAX_LISTED]:
        add(name(player), rate, usual, f"slow with all others: {rate_text(rate)}, usually", advice)
    for (a, b), (rate, expected) in sorted(outliers.pairs.items(), key=lambda item: item[1][0])[:_MAX_LISTED]:
        text = f"slow with each other: {rate_text(rate)}, otherwise"
        add(f"{name(a)} and {name(b)}", rate, expected, text, _PAIR_ADVICE)
    if outliers.lower:
        speeds, slower = outliers.rates.values(), ", ".join(map(name, outliers.lower[:_MAX_LISTED]))
        text = f"of two kinds, {rate_text(min(speeds))} to {rate_text(max(speeds))}; the slower ones are {slower}"
        findings.append(Finding(subject, Level.LOOK, text, "The slower ones determine the speed of training."))
    few = len(outliers.rates) < 3
    compared = "too few to compare" if few else f"no outlier (none below {OUTLIER_RATIO:.0%} of the others)"
    text = f"{rate_text(usual)} each way, both at once; {compared}, {len(rates)} pair(s)"
    return findings or [Finding(subject, Level.OK, text)]


PAIRS = Check(_examine_pairs, judge_pairs, collective=True, least_seconds=_PAIR_SECONDS)

_MAX_CLOCK_OFFSET = 1.0  # seconds


def _examine_clocks(launch: Launch) -> dict[str, float] | None:
    """Return on rank 0 the seconds by which the clock of each other team's first rank is ahead."""
    offsets = {}
    for first in (team[0] for team in launch.teams()[1:]):
        # Rank 0 exchanges messages with one rank at a time: others would disturb the round trip.
        if launch.rank in (0, first):
            _, offsets[str(first)] = _ping(0 if launch.rank else first)
    return None if launch.rank else offsets


def judge_clocks(answers: Answers, launch: Launch) -> list[Finding]:
    """Return hosts whose clocks differ from rank 0's."""
    offsets: dict[str, float] = answers[0]
    apart = {int(rank): seconds for rank, seconds in offsets.items() if abs(seconds) > _MAX_CLOCK_OFFSET}
    text = ", ".join(f"{launch.hosts[rank]} (rank {rank}) {seconds:+.1f} s" for rank, seconds in apart.items())
    text = text and f"compared with {launch.hosts[0]}: {text}"
    advice = "Run an NTP client. Logs do not line up, and files that are newer seem older on shared disks."
    most = max(map(abs, offsets.values()), default=0.0)
    ok_text = f"of {len(offsets) + 1} node(s), at most {most * 1e3:.1f} ms apart"
    return [finding_for("clocks", text, advice, ok_text)]


CLOCKS = Check(_examine_clocks, judge_clocks, collective=True)
