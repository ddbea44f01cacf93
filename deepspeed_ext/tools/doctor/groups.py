# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Which groups would be formed, and whether the ranks of hosts lie so that groups do not cross them."""

from typing import Any

from deepspeed_ext.comm.process_groups import LOCAL_SIZE_VARIABLES, crossings, ranks_per_node
from deepspeed_ext.strategy import GroupSizes
from deepspeed_ext.tools.doctor.check import Answers, Check
from deepspeed_ext.tools.doctor.findings import Finding, Level, by_value, ranks_text
from deepspeed_ext.tools.doctor.place import Place

_SHOWN = 4  # groups or hosts that are listed
_FILL = "Have the launcher fill one host after the other (srun --distribution=block, mpirun --map-by slot)."


def examine(place: Place) -> dict[str, Any]:
    """Return how many ranks the launcher says share this rank's node."""
    return {"per_node": ranks_per_node(place.environment)}


def judge(answers: Answers, place: Place) -> list[Finding]:
    """Return what the hosts hold, and the groups."""
    hosts = place.ranks_of_hosts()
    found = [_hosts(hosts)]
    scattered = {host: ranks for host, ranks in hosts.items() if ranks != list(range(ranks[0], ranks[-1] + 1))}
    if scattered:
        found.append(Finding("order of ranks", Level.WRONG, f"not consecutive: {_listed(scattered)}", _FILL))
    told = by_value({rank: answer["per_node"] for rank, answer in answers.items()})
    size = place.options.group_size or (next(iter(told)) if len(told) == 1 else None)
    if place.world == 1:
        return [*found, Finding("groups", Level.OK, "one rank: nothing to group")]
    if size is None:
        said = "; ".join(f"{value or 'nothing'} on {ranks_text(ranks)}" for value, ranks in told.items())
        said = f"the launcher says in {' or '.join(LOCAL_SIZE_VARIABLES)} how many ranks share a node: {said}"
        return [
            *found,
            Finding("groups", Level.WRONG, said, "Set zero_optimization.paro_group_size, and --group-size."),
        ]
    try:
        sizes = GroupSizes(place.world, size)
    except ValueError as error:
        return [*found, Finding("groups", Level.WRONG, str(error))]
    return [*found, *_groups(sizes, hosts, place)]


def _hosts(hosts: dict[str, list[int]]) -> Finding:
    counts = by_value({number: len(ranks) for number, ranks in enumerate(hosts.values())})
    if len(counts) == 1:
        return Finding("hosts", Level.OK, f"{len(hosts)} of {next(iter(counts))} rank(s): {_listed(hosts)}")
    usual = next(iter(counts))
    others = {host: ranks for host, ranks in hosts.items() if len(ranks) != usual}
    said = f"most hosts hold {usual} rank(s), but others another number: {_listed(others)}"
    advice = "Start as many ranks on every node, or set paro_group_size to a divisor of all these numbers."
    return Finding("hosts", Level.LOOK, said, advice)


def _groups(sizes: GroupSizes, hosts: dict[str, list[int]], place: Place) -> list[Finding]:
    m, ranks = sizes.group_size, range(sizes.ranks)
    groups = [list(ranks[first : first + m]) for first in range(0, sizes.ranks, m)]
    shown = ", ".join(ranks_text(group) for group in groups[:_SHOWN]) + (", ..." if len(groups) > _SHOWN else "")
    said = f"{sizes.groups} of {m}: {shown}"
    spanning = [group for group in groups if len({place.hosts[rank] for rank in group}) > 1]
    numbers = list(hosts)
    mistaken = crossings(ranks, m, [numbers.index(host) for host in place.hosts])
    if spanning:
        where = "; ".join(
            f"{ranks_text(group)} on {', '.join(dict.fromkeys(place.hosts[rank] for rank in group))}"
            for group in spanning[:_SHOWN]
        )
        said += f". {len(spanning)} span hosts, so what is meant to stay close crosses the network: {where}"
    if mistaken:
        return [Finding("groups", Level.WRONG, said, _FILL)]
    if spanning:
        advice = "Leave it, if groups are meant to be larger than a host; otherwise set paro_group_size to a divisor."
        return [Finding("groups", Level.LOOK, said, advice)]
    if m == 1:
        advice = 'See "groups of one rank" in troubleshooting.md.'
        return [Finding("groups", Level.LOOK, f"{said}: I means N, so NIG and IIG are ZeRO-1", advice)]
    if sizes.groups == 1:
        return [Finding("groups", Level.OK, f"{said}: nothing crosses between groups, so NIG is ZeRO-2, IIG ZeRO-3")]
    return [Finding("groups", Level.OK, said)]


def _listed(hosts: dict[str, list[int]]) -> str:
    shown = ", ".join(f"{host} has {ranks_text(ranks)}" for host, ranks in list(hosts.items())[:_SHOWN])
    return shown + (", ..." if len(hosts) > _SHOWN else "")


CHECK = Check("groups", examine, judge)
