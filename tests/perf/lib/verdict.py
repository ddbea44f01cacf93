# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""What the rows of ``emulated_cluster.py`` say: tables, what must hold, and how well the planner predicts."""

import statistics
from collections.abc import Callable, Sequence
from typing import TypeVar

from deepspeed_ext.planner.choice import best
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib.cluster_rows import BF16, BOTH, LOCO, NATIVE, SETTINGS, WIDE, MethodRow

BYTES_BOUND = 0.05
PARITY_BOUND = 1e-4  # of the largest weight
# In bf16 the largest weight is known to half of its last place, 2^-9; sums in another order change gradients besides.
BF16_BOUND = 2**-7
NEAR = 1.10  # of the best measured time, for a choice to be right
PROMISED = {  # a method at a setting and rate: how many times as fast as others it is there, at least
    ("2x2-large-4", 100): ("NIG" + BOTH, (("NIG", 3.0), ("ZeRO-3", 30.0))),
    ("2x2-large-4-muon", 100): ("IIG", (("ZeRO-3", 6.0),)),
}
_Row = TypeVar("_Row", bound=MethodRow)


def print_all(rows: Sequence[MethodRow]) -> bool:
    """Print a table a rate; whether something is wrong."""
    return print_each(rows, lambda row: row.mbit, _print_one)


def print_each(
    rows: Sequence[_Row],
    by: Callable[[_Row], object],
    say: Callable[[list[_Row]], None],
    wrong: Callable[[list[_Row]], list[str]] | None = None,
) -> bool:
    """Say something of the rows that share a value, the fastest first, and what is wrong with them, if anything is.

    Args:
        rows: of a setting.
        by: gives the value.
        say: prints what there is to say.
        wrong: tells what is wrong; ``problems`` by default.

    Returns:
        Whether methods trained differently, or sent other bytes than they must.
    """
    failed = False
    for value in dict.fromkeys(map(by, rows)):
        some = sorted((row for row in rows if by(row) == value), key=lambda row: row.median)
        say(some)
        for problem in (wrong or problems)(some):
            print(f"  FAIL: {problem}")
            failed = True
    return failed


def _print_one(rows: Sequence[MethodRow]) -> None:
    _print_table(rows)
    _print_ratios(rows)
    for line in promised(rows):
        print(f"  {line}")
    _print_planner(rows)


def problems(rows: Sequence[MethodRow], slack: float = 0.0) -> list[str]:
    """Return what shows that methods did not train the same, or sent other bytes than they must.

    Args:
        rows: of methods that were measured together.
        slack: bytes that a node may send in a step beside the formula's.
    """
    found = []
    for row in rows:
        setting = SETTINGS.get(row.setting)  # other programs have their own
        bound = BF16_BOUND if setting is not None and setting.dtype == BF16 else PARITY_BOUND
        if LOCO not in row.method and not row.difference <= bound:  # NaN is not
            found.append(
                f"{row.method}: weights differ by {row.difference:.1e} of the largest from the first method's"
            )
        found += other_bytes(row, slack)
    return found


def other_bytes(row: MethodRow, slack: float = 0.0) -> list[str]:
    """Return what shows that a method sent other bytes than it must; ``slack`` is that of ``problems``."""
    if not row.formula_bytes or NATIVE in row.method:
        return []
    error = row.bytes_between / row.formula_bytes - 1
    if abs(error) <= BYTES_BOUND + slack / row.formula_bytes:
        return []
    return [f"{row.method}: bytes between nodes differ by {error:+.1%} from the formula"]


def _print_table(rows: Sequence[MethodRow]) -> None:
    first = rows[0]
    sizes = SETTINGS[first.setting].sizes
    rate = "unlimited links" if first.mbit is None else f"{first.mbit:g} Mbit/s"
    stolen = [share for row in rows for share in row.stolen]
    print(
        f"\n{first.setting}: {sizes.groups} nodes of {sizes.group_size} ranks, {rate}; compute alone "
        f"{first.compute:.3f} s; the interface counts {first.headers:.4f} bytes for each of a known transfer; "
        f"{sum(share > 0.1 for share in stolen)} of {len(stolen)} steps lost over 10 % of the CPU to the host.\n"
        f"MB of a node's interface a step without headers (of the formula), MB of model states on a rank."
    )
    print(
        f"{'':<32}{'seconds (min .. max)':>26}{'floor':>8}{'of it':>7}{'planned':>9}{'MB between':>12}{'of it':>8}"
        f"{'MB held':>9}{'p':>7}{'g':>7}{'os':>7}{'weights':>10}"
    )
    for row in rows:
        planned = "" if row.predicted is None else f"{row.predicted:.3f}"
        due = "" if not row.formula_bytes else f"{row.bytes_between / row.formula_bytes:.3f}"
        spread = f"{row.median:.3f} ({min(row.seconds):.3f} .. {max(row.seconds):.3f})"
        print(
            f"{row.method:<32}{spread:>26}{row.floor:>8.3f}{row.median / row.floor:>7.2f}{planned:>9}"
            f"{row.bytes_between / 1e6:>12.2f}{due:>8}{row.memory / 1e6:>9.1f}"
            + "".join(f"{part / 1e6:>7.1f}" for part in row.held)
            + f"{row.difference:>10.1e}"
        )


def _print_ratios(rows: Sequence[MethodRow]) -> None:
    """Print what users would switch for."""
    by_name = {row.method: row for row in rows}
    ours = by_name.get("NIG")
    if ours is None:
        return
    # Peers use gloo's collectives; the strategies that are the same thing use our messages, as NIG does.
    peers = [name for name in ("ZeRO-3", "ZeRO-1", "HSDP", "DDP", "GGG", "NNG", "III", "NNN") if name in by_name]
    if peers:
        print("NIG: " + ", ".join(f"{by_name[name].median / ours.median:.2f} times {name}'s speed" for name in peers))
    for name in ("NIG", "IIG"):
        row, native = by_name.get(name), by_name.get(name + NATIVE)
        if row is None:
            continue
        said = [
            f"{row.median / row.floor:.2f} of its floor, {row.median - row.floor:.2f} s more (by the planner: hops "
            f"within the node {row.parts['within']:.2f} s, the update {row.parts['update']:.2f} s)"
        ]
        if native is not None:
            said.append(f"with gloo's own collectives {native.median / row.median:.2f} of its time")
        said += [
            f"with{suffix.replace(' +', '', 1)} {row.median / by_name[name + suffix].median:.2f} times as fast"
            for suffix in (LOCO, BOTH)
            if name + suffix in by_name
        ]
        print(f"{name}: " + ", ".join(said))
    for peer in (row for row in rows if row.predicted is None and row.formula_bytes is None):
        exact = STRATEGIES if not peer.method.endswith(WIDE) else {name + WIDE for name in STRATEGIES}
        rivals = [row for row in rows if row.method in exact and row.memory <= 1.02 * peer.memory]
        if rivals:
            first = min(rivals, key=lambda row: row.median)
            print(
                f"  {peer.method:<16} {peer.median:.3f} s with {peer.memory / 1e6:.1f} MB: the best strategy in no "
                f"more memory is {first.method}, {first.median:.3f} s ({peer.median / first.median:.2f} times as fast)"
            )


def promised(rows: Sequence[MethodRow]) -> list[str]:
    """Return how many times as fast as others a method is, where that is promised."""
    found = []
    for at, (ours, others) in PROMISED.items():
        seconds = {row.method: row.median for row in rows if (row.setting, row.mbit) == at}
        for name, least in others if ours in seconds else ():
            if name in seconds:
                speed = seconds[name] / seconds[ours]
                missed = "" if speed >= least else "MISSED: "
                found.append(f"{missed}{ours} {speed:.2f} times as fast as {name} (at least {least:g})")
    return found


def _print_planner(rows: Sequence[MethodRow]) -> None:
    for suffix, what in (("", "exact"), (LOCO, "with LoCo"), (BOTH, "with LoCo and updates")):
        some = [row for row in rows if row.predicted is not None and row.method in {n + suffix for n in STRATEGIES}]
        if len(some) < 3:
            continue
        print(
            f"planner, {what}: Spearman {order(some):.3f} over {len(some)} strategies; its choice in any memory "
            f"takes at most {regret(some):.3f} of the best one's time"
        )


def regret(rows: Sequence[MethodRow]) -> float:
    """Return the worst ratio, over all limits of memory, of the choice's time to that of the best that fits."""
    worst = 1.0
    for limit in (row.memory for row in rows):
        fitting = [row for row in rows if row.memory <= limit]
        chosen = best(fitting, lambda row: row.predicted or 0.0, lambda row: row.memory)
        worst = max(worst, chosen.median / min(row.median for row in fitting))
    return worst


def order(rows: Sequence[MethodRow]) -> float:
    """Return the rank correlation of predicted and measured seconds."""
    return spearman([row.predicted or 0.0 for row in rows], [row.median for row in rows])


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Return the rank correlation; equal values share the mean of their ranks."""
    return statistics.correlation(_ranks(one), _ranks(other))


def _ranks(values: Sequence[float]) -> list[float]:
    ordered = sorted(values)
    return [statistics.mean(rank for rank, have in enumerate(ordered) if have == value) for value in values]
