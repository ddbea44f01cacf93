# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Writes tables into the pages of results, from rows that are kept.

A table replaces what stands between ``<!-- table: tables.py NAME -->`` and ``<!-- end -->``. NAME is a setting of the
emulated cluster, or ``all`` for how the planner does in each of them; or one of ``OVERLAP`` or ``OTHERS``.
"""

import argparse
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from deepspeed_ext.strategy import STRATEGIES
from tests.perf.lib import (
    equal_speed,
    gpt2_rows,
    host_parameter_rows,
    long_runs,
    mixture_rows,
    outer_cluster_rows,
    outer_rows,
    overlap_rows,
    overlap_tables,
    save_rows,
    verdict,
)
from tests.perf.lib.cluster_rows import FP32, KEPT, LOCO, MUON, NATIVE, SETTINGS, MethodRow, rate_name, read
from tests.perf.lib.overlap_rows import OverlapRow

PAGES = Path(__file__).parent / "results"
ALL = "all"
OVERLAP = {
    "overlap-bounds": overlap_tables.bounds,
    "overlap-seconds": overlap_tables.seconds,
    "overlap-against": overlap_tables.against,
}
OTHERS: dict[str, Callable[[], tuple[list[str], list[list[str]]]]] = {  # from the rows that are kept
    "outer": lambda: outer_rows.table(outer_rows.of_defaults(outer_rows.read())),
    "outer-cluster": lambda: outer_cluster_rows.table(outer_cluster_rows.read()),
    "host-parameters": lambda: host_parameter_rows.table(host_parameter_rows.read()),
    "mixture": lambda: mixture_rows.table(mixture_rows.read()),
    "long-training": lambda: long_runs.table(long_runs.read()),
    "gpt2": lambda: gpt2_rows.table(gpt2_rows.measured()),
    "saves": lambda: save_rows.table(save_rows.read()),
    "equal-speed": lambda: equal_speed.table(read(), "2x2-large-4", 100),
    "equal-speed-bf16": lambda: equal_speed.table(read(), "2x2-large-4-bf16", 100),
}
PEERS = ("ZeRO-3", "ZeRO-1", "HSDP", "DDP")
_TABLE = re.compile(r"(<!-- table: tables.py (?P<name>\S+) -->\n).*?(?=<!-- end -->)", re.DOTALL)


def markdown(header: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Return a table."""
    rule = "|" + "---|" * len(header)
    return "\n".join([_line(header), rule, *map(_line, lines), ""])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def setting_table(rows: Sequence[MethodRow], setting: str) -> str:
    """Return a step's seconds of each method at each rate, the floor at the first, and MB held; the fastest first."""
    rates = SETTINGS[setting].mbit
    rows = [row for row in rows if row.setting == setting and NATIVE not in row.method]
    header = ["", *(f"{rate_name(rate)} Mbit/s" if rate else rate_name(rate) for rate in rates), "MB held"]
    header.insert(2, "floor")
    found = {(row.method, row.mbit): row for row in rows}
    lines = []
    for first in sorted((row for row in rows if row.mbit == rates[0]), key=lambda row: row.median):
        times = [_seconds(found[first.method, rate].median) for rate in rates]
        lines.append([first.method, times[0], _seconds(first.floor), *times[1:], f"{first.memory / 1e6:.0f}"])
    return markdown(header, lines)


def _seconds(value: float) -> str:
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def all_table(rows: Sequence[MethodRow]) -> str:
    """Return NIG against peers and its floor, and the planner's order and choice, in each setting at each rate: with
    AdamW, which all peers have, in fp32.
    """
    header = ["setting", "Mbit/s", *(f"NIG against {PEERS[0]}", *PEERS[1:]), "NIG of its floor"]
    header += [f"{what}, {which}" for what in ("order", "choice") for which in ("exact", "LoCo")]
    lines = []
    for setting in (one for one in SETTINGS.values() if one.optimizer != MUON and one.dtype == FP32):
        for rate in setting.mbit:
            some = {row.method: row for row in rows if (row.setting, row.mbit) == (setting.name, rate)}
            if "NIG" in some:
                lines.append([setting.name, rate_name(rate), *_figures(some)])
    return markdown(header, lines)


def _figures(some: dict[str, MethodRow]) -> Iterator[str]:
    ours = some["NIG"]
    for peer in PEERS:
        yield f"{some[peer].median / ours.median:.2f}" if peer in some else ""
    yield f"{ours.median / ours.floor:.2f}"
    for judge in (verdict.order, verdict.regret):
        for suffix in ("", LOCO):
            planned = [some[name + suffix] for name in STRATEGIES if name + suffix in some]
            yield f"{judge(planned):.3f}" if len(planned) == len(STRATEGIES) else ""  # some say nothing about all


def write(pages: Path, rows: Sequence[MethodRow], overlap: Sequence[OverlapRow]) -> None:
    """Put the tables where the pages of a folder want them."""

    def table(match: re.Match[str]) -> str:
        name = match["name"]
        if name in OVERLAP:
            return match[1] + markdown(*OVERLAP[name](overlap))
        if name in OTHERS:
            return match[1] + markdown(*OTHERS[name]())
        return match[1] + (all_table(rows) if name == ALL else setting_table(rows, name))

    for page in sorted(pages.glob("*.md")):
        page.write_text(_TABLE.sub(table, page.read_text(encoding="utf-8")), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--csv", type=Path, default=KEPT, help="rows of the emulated cluster")
    parser.add_argument("--overlap-csv", type=Path, default=overlap_rows.KEPT, help="rows of overlap")
    parser.add_argument("--pages", type=Path, default=PAGES, help="the folder whose pages are written")
    args = parser.parse_args()
    write(args.pages, read(args.csv), overlap_rows.read(args.overlap_csv))


if __name__ == "__main__":
    main()
