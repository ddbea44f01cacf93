# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tables of what ``overlap.py`` has measured: steps against their bounds, and against peers."""

from collections.abc import Callable, Iterator, Sequence

from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import overlap_verdict, verdict
from tests.perf.lib.overlap_rows import RATIOS, SETTINGS, OverlapRow

PEERS = ("DDP", "HSDP kept", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2 kept")
Table = tuple[list[str], list[list[str]]]  # header, lines
Rows = Sequence[OverlapRow]


def bounds(rows: Rows) -> Table:
    """Return a step of each strategy over its bound; and the worst of these, with measured compute, and also at the
    rate that the probe has measured."""
    found = {(row.setting, row.ratio, row.method): row for row in rows}
    cases = [(setting, ratio) for setting in SETTINGS for ratio in RATIOS]
    lines = []
    for name in STRATEGIES:
        cells = [found.get((*case, name)) for case in cases]
        lines.append(
            [name]
            + ["" if row is None else f"{row.median / row.bound:.2f}" for row in cells]
            + [_worst(cells, lambda row: row.median / row.measured_bound)]
            + [_worst(cells, lambda row: row.median / row.payload_bound)]
        )
    return ["", *(f"{setting}, {ratio:g}" for setting, ratio in cases), "worst, measured", "and payload"], lines


def _worst(rows: Sequence[OverlapRow | None], of: Callable[[OverlapRow], float]) -> str:
    known = [of(row) for row in rows if row is not None]
    return f"{max(known):.2f}" if known else ""


def seconds(rows: Rows) -> Table:
    """Return a step's seconds of each method with W as long as a micro-batch's compute, and MB held on 2 x 2 ranks;
    the fastest first."""
    some = {(row.setting, row.method): row for row in rows if row.ratio == 1}
    first = sorted((row for row in some.values() if row.setting == "2x2-1"), key=lambda row: row.median)
    lines = [
        [row.method]
        + [f"{some[at, row.method].median:.2f}" if (at, row.method) in some else "" for at in SETTINGS]
        + [f"{row.memory / 1e6:.1f}"]
        for row in first
    ]
    return ["", *SETTINGS, "MB held"], lines


def against(rows: Rows) -> Table:
    """Return, for each setting and compute: how many times as fast as a peer the best strategy is in no more memory;
    the planner's order, what its choice costs, and its worst choice beside ZeRO of the same stage."""
    header = ["setting", "W", *PEERS, "order", "choice", "chosen, of ZeRO's time"]
    lines = []
    for setting in SETTINGS:
        for ratio in RATIOS:
            some = [row for row in rows if (row.setting, row.ratio) == (setting, ratio)]
            if some:
                lines.append([setting, f"{ratio:g}", *_speeds(some), *_planned(some)])
    return header, lines


def _speeds(some: Rows) -> Iterator[str]:
    peers = {row.method: row for row in some if row.method not in STRATEGIES}
    for name in PEERS:
        rival = overlap_verdict.best_beside(peers[name], some) if name in peers else None
        yield "" if rival is None else f"{peers[name].median / rival.median:.2f}"


def _planned(some: Rows) -> Iterator[str]:
    planned = [row for row in some if row.predicted is not None and row.method in STRATEGIES]
    if len(planned) < len(STRATEGIES):
        yield from ("", "", "")  # some say nothing about all
        return
    yield f"{verdict.order(planned):.2f}"
    yield f"{verdict.regret(planned):.3f}"
    yield f"{max(ratio for ratio, *_ in overlap_verdict.beside_stock(some)):.2f}"
