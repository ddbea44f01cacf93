# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Tables of measurements on emulated clusters, and of the planner's accuracy on them. Pure."""

import statistics
from collections.abc import Iterator, Sequence

from deepspeed_ext.planner.choice import best
from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import settings
from tests.perf.lib.records import Row, Table, seconds_of, speed
from tests.perf.lib.settings import BLOCKS, BOTH, FP32, LOCO, MUON, NATIVE, OUTER, OVERLAP, RATIOS, WIDE, rate_name

PEERS = ("HSDP", "DDP")
OVERLAP_PEERS = ("DDP", "HSDP kept", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2 kept")
NOISE = 1.02  # of memory: buffers of a few bytes
NEAR = 0.1  # a prediction is


def measured(rows: Sequence[Row], stock: str = "ZeRO-3") -> Table:
    """Return a step of each method at each rate: seconds, floor, speed relative to ``stock``, and bytes; slowest
    first.

    Columns that are empty in all lines are left out.
    """
    header = ["setting, Mbit/s", "", "seconds", "min .. max", "floor", f"times {stock}'s speed", "MB between"]
    header += ["of the formula", "MB within", "of the formula", "of experts", "MB copied", "MB held", "of the formula"]
    places = list(dict.fromkeys((row.setting, row.mbit, row.more.get("wire_of_compute")) for row in rows))
    lines = []
    for row in sorted(rows, key=lambda row: -row.median):
        point = row.setting, row.mbit, row.more.get("wire_of_compute")
        stock_rows = [
            stock_row
            for stock_row in rows
            if stock_row.method == stock and (stock_row.setting, stock_row.mbit) == point[:2]
        ]
        due = row.formula_bytes
        line = [", ".join([point[0], rate_name(point[1])] + ([f"W {point[2]:g}"] if point[2] else [])), row.method]
        least, most = (seconds_of(of(row.steps)) for of in (min, max))
        line += [seconds_of(row.median), f"{least} .. {most}", seconds_of(row.floor)]
        line += [f"{speed(row, stock_rows[0]).value:.1f}" if stock_rows else "", f"{row.bytes_between / 1e6:.4g}"]
        within, due_within, held = (
            row.more.get(key) for key in ("bytes_within", "formula_bytes_within", "formula_held")
        )
        line += [f"{row.bytes_between / due:.3f}" if due else "", _megabytes(within)]
        line += [f"{within / due_within:.3f}" if within and due_within else ""]
        line += [_megabytes(row.more.get(key)) for key in ("formula_expert_bytes", "copied_bytes")]
        line += [_megabytes(row.memory), f"{row.memory / held:.3f}" if held else ""]
        lines.append((places.index(point), line))
    sorted_lines = [line for _, line in sorted(lines, key=lambda pair: pair[0])]
    columns = [at for at in range(len(header)) if any(line[at] for line in sorted_lines)]
    return [header[at] for at in columns], [[line[at] for at in columns] for line in sorted_lines]


def _megabytes(nbytes: float | None) -> str:
    return f"{nbytes / 1e6:.3g}" if nbytes and nbytes < 1e8 else f"{nbytes / 1e6:.0f}" if nbytes else ""


# The emulated cluster #############################################################################


def setting(rows: Sequence[Row], name: str) -> Table:
    """Return a step's seconds of each method at each rate, with gloo's collectives and the floor at the first, and MB
    held; the fastest first."""
    rates = BLOCKS[name].mbit
    rows_by_key = {(row.method, row.mbit): row for row in rows if row.setting == name}
    header = ["", *(f"{rate_name(rate)} Mbit/s" if rate else rate_name(rate) for rate in rates), "MB held"]
    header[2:2] = ["gloo's collectives", "floor"]
    lines = []
    for first in sorted((row for row in rows_by_key.values() if row.mbit == rates[0]), key=lambda row: row.median):
        if NATIVE not in first.method:
            times = [seconds_of(rows_by_key[first.method, rate].median) for rate in rates]
            native = rows_by_key.get((first.method + NATIVE, rates[0]))
            times[1:1] = [seconds_of(native.median) if native else "", seconds_of(first.floor)]
            lines.append([first.method, *times, f"{first.memory / 1e6:.0f}"])
    return header, lines


def all_settings(rows: Sequence[Row]) -> Table:
    """Return NIG compared with peers and its floor, and the planner's order and choice, in each setting at each rate:
    with AdamW, which all peers have, in fp32.
    """
    header = ["setting", "Mbit/s", *(f"NIG against {PEERS[0]}", *PEERS[1:]), "NIG of its floor"]
    header += [f"{quantity}, {form}" for quantity in ("order", "choice") for form in ("exact", "LoCo")]
    lines = []
    for case in BLOCKS.values():
        for rate in case.mbit if case.optimizer != MUON and case.dtype == FP32 else ():
            rows_by_method = {row.method: row for row in rows if (row.setting, row.mbit) == (case.name, rate)}
            if "NIG" in rows_by_method:
                lines.append([case.name, rate_name(rate), *_figures(rows_by_method)])
    return header, lines


def _figures(rows_by_method: dict[str, Row]) -> Iterator[str]:
    ours = rows_by_method["NIG"]
    for peer in PEERS:
        yield f"{speed(ours, rows_by_method[peer]).value:.2f}" if peer in rows_by_method else ""
    yield f"{ours.median / ours.floor:.2f}"
    for judge in (order, regret):
        for suffix in ("", LOCO):
            planned = [rows_by_method[name + suffix] for name in STRATEGIES if name + suffix in rows_by_method]
            yield f"{judge(planned):.3f}" if len(planned) == len(STRATEGIES) else ""  # some say nothing about all


def regret(rows: Sequence[Row]) -> float:
    """Return the worst ratio, over all memory limits, of the choice's time to that of the fastest method that fits."""
    worst = 1.0
    for limit in (row.memory for row in rows):
        fitting = [row for row in rows if row.memory <= limit]
        worst = max(worst, chosen(fitting).median / min(row.median for row in fitting))
    return worst


def chosen(rows: Sequence[Row]) -> Row:
    return best(rows, lambda row: row.predicted or 0.0, lambda row: row.memory)


def order(rows: Sequence[Row]) -> float:
    """Return the rank correlation of predicted and measured seconds."""
    return rank_correlation([row.predicted or 0.0 for row in rows], [row.median for row in rows])


def rank_correlation(values: Sequence[float], others: Sequence[float]) -> float:
    """Return Spearman's; equal values share the mean of their ranks."""
    both = [
        [statistics.mean(at for at, have in enumerate(sorted(s)) if have == v) for v in s] for s in (values, others)
    ]
    return statistics.correlation(*both)


def equal_speed(rows: Sequence[Row], name: str) -> Table:
    """Return for each peer, the fastest first, the smallest of NIG and IIG that is as fast at 100 Mbit/s: exact (with
    reductions in the peer's precision), and in few bits."""
    rows = [row for row in rows if (row.setting, row.mbit) == (name, 100)]
    header = ["peer", "seconds", "MB held", "exact, same speed", "MB", "4 bits, same speed", "MB"]
    lines = []
    for peer in sorted((row for row in rows if row.method[:3] not in STRATEGIES), key=lambda row: row.median):
        line = [peer.method, f"{peer.median:.2f}", f"{peer.memory / 1e6:.0f}"]
        for forms in ([WIDE if peer.method.endswith(WIDE) else ""], [LOCO, BOTH]):
            row = smallest_as_fast(peer, rows, forms)
            line += ["none", ""] if row is None else [f"{row.method}, {row.median:.2f} s", _beside(row, peer)]
        lines.append(line)
    return header, lines


def against(rows: Sequence[Row], name: str, methods: Sequence[str] = ("NNG", "NIG", "IIG", f"NIG{BOTH}")) -> Table:
    """Return how many times as fast as each peer these methods are at each rate, the fastest peer first; in
    parentheses their memory relative to the peer's."""
    rows = [row for row in rows if row.setting == name and NATIVE not in row.method]
    rates = list(dict.fromkeys(row.mbit for row in rows))
    lines = []
    for rate in rates:
        rows_by_method = {row.method: row for row in rows if row.mbit == rate}
        ours = [rows_by_method[method] for method in methods if method in rows_by_method]
        for peer in sorted(rows_by_method.values(), key=lambda row: row.median):
            if not any(strategy in peer.method for strategy in STRATEGIES):
                cells = [f"{speed(row, peer).value:.2f} ({row.memory / peer.memory:.2f})" for row in ours]
                lines.append([f"{rate_name(rate)}, {peer.method}", *cells])
    return ["Mbit/s, peer", *(method for method in methods if any(row.method == method for row in rows))], lines


def _beside(row: Row, peer: Row) -> str:
    return f"{row.memory / 1e6:.0f} ({row.memory / peer.memory:.2f})"


def smallest_as_fast(peer: Row, rows: Sequence[Row], forms: Sequence[str]) -> Row | None:
    """Return the row of NIG or IIG in these forms that takes the least memory, as fast as the peer."""
    names = {name + form for name in ("NIG", "IIG") for form in forms}
    as_fast = [row for row in rows if row.method in names and speed(row, peer).value >= 1]
    return min(as_fast, key=lambda row: (row.memory, row.median), default=None)


# Overlap ##########################################################################################


def overlap_seconds(rows: Sequence[Row]) -> Table:
    """Return a step's seconds of each method with W as long as a micro-batch's compute, and MB held on 2 x 2 ranks;
    the fastest first."""
    rows_by_key = {(row.setting, row.method): row for row in rows if row.more["wire_of_compute"] == 1}
    first = sorted((row for row in rows_by_key.values() if row.setting == "2x2-1"), key=lambda row: row.median)
    lines = [
        [row.method]
        + [f"{rows_by_key[at, row.method].median:.2f}" if (at, row.method) in rows_by_key else "" for at in OVERLAP]
        + [f"{row.memory / 1e6:.1f}"]
        for row in first
    ]
    return ["", *OVERLAP, "MB held"], lines


def overlap_against(rows: Sequence[Row]) -> Table:
    """Return, for each setting and compute: the speed of the best strategy that takes no more memory relative to a
    peer, the planner's order, the cost of its choice, and the share of accurate predictions."""
    header = ["setting", "W", *OVERLAP_PEERS, "order", "choice", "within 10 %"]
    lines = []
    for name, ratio in ((name, ratio) for name in OVERLAP for ratio in RATIOS):
        by_method = {row.method: row for row in rows if (row.setting, row.more["wire_of_compute"]) == (name, ratio)}
        if not by_method:
            continue
        ours = [row for method, row in by_method.items() if method in STRATEGIES]
        line = [name, f"{ratio:g}"]
        for peer in (by_method.get(method) for method in OVERLAP_PEERS):
            rivals = [row for row in ours if peer is not None and row.memory <= NOISE * peer.memory]
            line.append(f"{speed(min(rivals, key=lambda row: row.median), peer).value:.2f}" if rivals else "")
        planned = [row for row in ours if row.predicted is not None]
        if len(planned) == len(STRATEGIES):  # some say nothing about all
            line += [f"{order(planned):.2f}", f"{regret(planned):.3f}"]
            near = [row for row in planned if abs((row.predicted or 0.0) / row.median - 1) <= NEAR]
            line.append(f"{len(near)} of {len(planned)}")
        lines.append(line + [""] * (len(header) - len(line)))
    return header, lines


# Outer steps, and saves ###########################################################################


def outer(rows: Sequence[Row], ranks_per_node: int = 1) -> Table:
    rows_by_key = {(row.setting, row.method): row for row in rows}
    cases = [case for case in OUTER.values() if case.ranks_per_node == ranks_per_node]
    lines = []
    for name in dict.fromkeys(row.method for row in rows):
        method_rows = [row for case in cases if (row := rows_by_key.get((case.name, name)))]
        cells = [f"{row.median:.3f} ({row.exposed:.3f})" for row in method_rows]
        lines.append(
            [name, *cells, f"{method_rows[-1].bytes_between / 1e3:.0f}", f"{method_rows[-1].memory / 1e6:.0f}"]
        )
    return ["", *(rate_name(case.mbit[0]) for case in cases), "kB a step", "MB held"], lines


def saves(rows: Sequence[Row]) -> Table:
    header = ["parameters, Mbit/s, disk", "", "save, s", "min .. max", "stall, s", "of synchronous"]
    header += ["committed after", "a step, s", "during a write", "MB of buffers", "MB between"]
    lines = []

    def median(row: Row, name: str, digits: int = 2) -> str:
        value = row.more.get(f"{name}_median")
        return "" if value is None else f"{value:.{digits}f}"

    order = list(settings.SAVES), ["real", "slow"], list(settings.SAVE_SECTIONS)
    save_rows = [row for row in rows if row.method in settings.SAVE_SECTIONS]
    for row in sorted(
        save_rows, key=lambda row: [*map(list.index, order, (row.setting, row.more["disk"], row.method))]
    ):
        share, (_, size, rate) = stopped_share(row, rows), row.setting.split("-")
        saved = [f"{row.median:.2f}", f"{min(row.steps):.2f} .. {max(row.steps):.2f}"]
        saved += [f"{row.more['critical_seconds']:.2f}", "" if share is None else f"{share:.1%}"]
        steps = [median(row, f"{name}_seconds") for name in ("until_committed", "step")] + [median(row, "beside", 3)]
        buffers = row.more["buffer_bytes"]
        line = [f"{size}, {rate}, {row.more['disk']}", row.method, *saved, *steps]
        lines.append([*line, f"{buffers / 1e6:.0f}" if buffers else "", f"{row.link_bytes / 1e6:.1f}"])
    return header, lines


def stopped_share(row: Row, rows: Sequence[Row]) -> float | None:
    """Return how long an asynchronous save stops training, relative to a synchronous one; None for others."""
    if "asynchronous" not in row.method:
        return None
    key = (row.setting, row.more["disk"], row.method.partition(",")[0])
    synchronous = next((other for other in rows if (other.setting, other.more["disk"], other.method) == key), None)
    return None if synchronous is None else row.more["critical_seconds"] / synchronous.more["critical_seconds"]
