# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the rows of ``overlap.py`` say: tables, bounds that are missed, peers that are ahead, and the planner."""

from collections.abc import Sequence

from deepspeed_ext.planner.choice import best
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import verdict
from tests.perf.lib.overlap_rows import OverlapRow

NEAR = 1.15  # of the bound
STOCK = 1.03  # of the time of stock ZeRO of that stage, for what the planner chooses
NOISE = 1.02  # of memory: buffers of a few bytes
DISTURBED = 1.25  # of the emulated compute, for a step without communication: somebody else has used the cores


def print_all(rows: Sequence[OverlapRow]) -> bool:
    """Print a table for each compute; whether methods trained differently, or sent other bytes than they must."""
    return verdict.print_each(rows, lambda row: row.ratio, _print_one)


def _print_one(rows: Sequence[OverlapRow]) -> None:
    _print_table(rows)
    if rows[0].compute > DISTURBED * rows[0].emulated.seconds:
        print("  DISTURBED: compute takes much longer than is emulated; something else keeps the cores busy")
    for line in [*late(rows), *ahead(rows), *planned(rows)]:
        print(f"  {line}")


def _print_table(rows: Sequence[OverlapRow]) -> None:
    first = rows[0]
    emulated, stolen = first.emulated, [share for row in rows for share in row.stolen]
    print(
        f"\n{first.setting}: {first.nodes} nodes of {first.ranks_per_node} ranks, {first.blocks} blocks, accumulation "
        f"{first.accumulation}, {first.mbit:g} Mbit/s; forward {emulated.forward:.3f} s, backward "
        f"{emulated.backward:.3f} s, W {first.ratio:g} times both. A step without communication takes "
        f"{first.compute:.3f} s, of which {first.compute - emulated.seconds:.3f} s are not emulated.\n"
        f"By the probe a link carries {first.payload_mbit:.1f} Mbit/s of payload; "
        f"{sum(share > 0.1 for share in stolen)} of {len(stolen)} steps lost over 10 % of the CPU to the host."
    )
    print(
        f"{'':<16}{'seconds (min .. max)':>26}{'wire':>8}{'exposed':>9}{'of wire':>8}{'hidden':>8}{'bound':>8}"
        f"{'of it':>7}{'measured':>10}{'of it':>7}{'planned':>9}{'MB held':>9}{'weights':>10}"
    )
    for row in rows:
        said = "" if row.predicted is None else f"{row.predicted:.3f}"
        spread = f"{row.median:.3f} ({min(row.seconds):.3f} .. {max(row.seconds):.3f})"
        print(
            f"{row.method:<16}{spread:>26}{row.wire:>8.3f}{row.exposed:>9.3f}{row.exposed / row.wire:>8.2f}"
            f"{row.hidden:>8.2f}{row.bound:>8.3f}{row.median / row.bound:>7.2f}{row.measured_bound:>10.3f}"
            f"{row.median / row.measured_bound:>7.2f}{said:>9}{row.memory / 1e6:>9.1f}{row.difference:>10.1e}"
        )


def late(rows: Sequence[OverlapRow]) -> list[str]:
    """Return the strategies that miss their bound."""
    missed = [row for row in rows if row.method in STRATEGIES and row.median > NEAR * row.bound]
    if not missed:
        return [f"all strategies are within {NEAR:g} of their bounds"]
    names = (f"{row.method} {row.median / row.bound:.2f} ({row.median / row.measured_bound:.2f})" for row in missed)
    return [f"beyond {NEAR:g} of the bound (of the one with measured compute): {', '.join(names)}"]


def ahead(rows: Sequence[OverlapRow]) -> list[str]:
    """Return, for each peer, the best strategy in no more memory; first those that it beats."""
    found = []
    for peer in (row for row in rows if row.method not in STRATEGIES):
        first = best_beside(peer, rows)
        if first is None:
            found.append((0.0, f"{peer.method}: no strategy was measured in its {peer.memory / 1e6:.1f} MB"))
            continue
        speed = peer.median / first.median
        mark = "AHEAD: " if speed < 1 else ""
        could = peer.measured_bound / first.median
        found.append(
            (
                speed,
                f"{mark}{peer.method} {peer.median:.3f} s in {peer.memory / 1e6:.1f} MB, {first.method} "
                f"{first.median:.3f} s in {first.memory / 1e6:.1f} MB: {speed:.2f} times as fast, {could:.2f} if the "
                f"peer hid all that it can",
            )
        )
    return [line for _, line in sorted(found)]


def best_beside(peer: OverlapRow, rows: Sequence[OverlapRow]) -> OverlapRow | None:
    """Return the fastest strategy in no more memory than a peer's, if there is one."""
    rivals = [row for row in rows if row.method in STRATEGIES and row.memory <= NOISE * peer.memory]
    return min(rivals, key=lambda row: row.median, default=None)


def planned(rows: Sequence[OverlapRow]) -> list[str]:
    """Return how well the planner puts strategies in order, what its choice costs, and how it is beside stock ZeRO."""
    some = [row for row in rows if row.predicted is not None and row.method in STRATEGIES]
    if len(some) < 3:
        return []
    lines = [
        f"planner: Spearman {verdict.order(some):.3f} over {len(some)} strategies; its choice in any memory takes at "
        f"most {verdict.regret(some):.3f} of the best one's time"
    ]
    for ratio, chosen, same in beside_stock(rows):
        mark = "LOSES: " if ratio > STOCK else ""
        lines.append(f"{mark}chosen {chosen.method} takes {ratio:.2f} of the time of {same.method}")
    return lines


def beside_stock(rows: Sequence[OverlapRow]) -> list[tuple[float, OverlapRow, OverlapRow]]:
    """Return what the planner chooses, each with ZeRO of the same stage, and its share of the other's time."""
    stock = {row.method: row for row in rows}
    return [
        (chosen.median / same.median, chosen, same)
        for chosen in choices([row for row in rows if row.predicted is not None and row.method in STRATEGIES])
        if (same := stock.get(f"ZeRO-{STRATEGIES[chosen.method].stage}")) is not None
    ]


def choices(rows: Sequence[OverlapRow]) -> list[OverlapRow]:
    """Return what the planner chooses with room for each of these, from the most room to the least."""
    found = {}
    for limit in sorted((row.memory for row in rows), reverse=True):
        fitting = [row for row in rows if row.memory <= limit]
        chosen = best(fitting, lambda row: row.predicted or 0.0, lambda row: row.memory)
        found[chosen.method] = chosen
    return list(found.values())
