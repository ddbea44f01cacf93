# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Windows of striped flat buffers, in the order in which a model uses what is in them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deepspeed_ext.comm.layout import FlatLayout


class Window(NamedTuple):
    """Columns ``start`` to ``start + width`` of all chunks of flat buffer number ``buffer``.

    Attributes:
        members: places of its parameters in the model; of all that are in its stripe.
    """

    buffer: int
    start: int
    width: int
    members: frozenset[int]


def windows_in_forward_order(
    layouts: Sequence[FlatLayout], rows: Sequence[int], most: int, params: Sequence[Mapping[int, tuple[int, int]]]
) -> list[Window]:
    """Return windows of all flat buffers, those of the model's first parameters first.

    A backward completes them the other way round: the first of a window's parameters gets its gradient last.

    Args:
        layouts: of the flat buffers.
        rows: of what travels of each flat buffer.
        most: elements (of all rows) of a window at most.
        params: of each flat buffer, by their places in the model: start and elements in the buffer.
    """
    windows: list[Window] = []
    for buffer, (layout, count, placed) in enumerate(zip(layouts, rows, params, strict=True)):
        for number, stripe in enumerate(layout.stripes):
            end = stripe.start + stripe.numel
            members = frozenset(
                place for place, (start, numel) in placed.items() if numel and stripe.start <= start < end
            )
            windows += [Window(buffer, *window, members) for window in layout.windows(count, most, number)]
    return sorted(windows, key=lambda window: (min(window.members, default=0), window.buffer, window.start))
