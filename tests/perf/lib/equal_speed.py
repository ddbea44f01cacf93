# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Memory at equal speed: for each peer, the smallest of NIG and IIG that is at least as fast."""

from collections.abc import Sequence

from tests.perf.lib.cluster_rows import BOTH, LOCO, WIDE, MethodRow

FAMILY = ("NIG", "IIG")
NONE = "none"


def smallest(peer: MethodRow, rows: Sequence[MethodRow], forms: Sequence[str]) -> MethodRow | None:
    """Return the row of NIG or IIG in one of these forms that takes no longer than the peer and holds least.

    Args:
        peer: of the same setting and rate.
        rows: of them all.
        forms: suffixes of names.

    Returns:
        None if all of them take longer.
    """
    names = {name + form for name in FAMILY for form in forms}
    as_fast = [row for row in rows if row.method in names and row.median <= peer.median]
    return min(as_fast, key=lambda row: (row.memory, row.median), default=None)


def table(rows: Sequence[MethodRow], setting: str, mbit: float) -> tuple[list[str], list[list[str]]]:
    """Return a line for each peer, the fastest first: seconds and MB of its own, and of the smallest that is as fast,
    exact (with reductions in the peer's precision) and in few bits.
    """
    rows = [row for row in rows if (row.setting, row.mbit) == (setting, mbit)]
    peers = sorted((row for row in rows if row.formula_bytes is None), key=lambda row: row.median)
    header = ["peer", "seconds", "MB held", "exact, as fast", "its MB", "in few bits, as fast", "its MB"]
    lines = []
    for peer in peers:
        exact = smallest(peer, rows, [WIDE if peer.method.endswith(WIDE) else ""])
        few_bits = smallest(peer, rows, [LOCO, BOTH])
        lines.append(
            [peer.method, f"{peer.median:.2f}", _megabytes(peer), *_cells(exact, peer), *_cells(few_bits, peer)]
        )
    return header, lines


def _cells(row: MethodRow | None, peer: MethodRow) -> list[str]:
    if row is None:
        return [NONE, ""]
    return [f"{row.method}, {row.median:.2f} s", f"{_megabytes(row)} ({row.memory / peer.memory:.2f})"]


def _megabytes(row: MethodRow) -> str:
    return f"{row.memory / 1e6:.0f}"
