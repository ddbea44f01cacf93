# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Windows of striped flat buffers, in the order in which a model uses what is in them."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from deepspeed_ext.zero.flat.buffers import FlatBuffer


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
    buffers: Sequence[FlatBuffer], rows: Sequence[int], most: int, places: Mapping[int, int]
) -> list[Window]:
    """Return windows of all flat buffers, those of the model's first parameters first.

    A backward completes them the other way round: the first of a window's parameters gets its gradient last.

    Args:
        buffers: all.
        rows: of what travels of each of them.
        most: elements (of all rows) of a window at most.
        places: of parameters in the model, by their ids.
    """
    windows: list[Window] = []
    for buffer, count in zip(buffers, rows, strict=True):
        placed = [(places[id(param)], buffer.offset(param)) for param in buffer.params if param.numel()]
        for number, stripe in enumerate(buffer.layout.stripes):
            end = stripe.start + stripe.numel
            members = frozenset(place for place, start in placed if stripe.start <= start < end)
            windows += [
                Window(buffer.number, *window, members) for window in buffer.layout.windows(count, most, number)
            ]
    return sorted(windows, key=lambda window: (min(window.members, default=0), window.buffer, window.start))
