# Copyright (c) deepspeed_ext contributors
# SPDX-License-Identifier: Apache-2.0
"""Plots as SVG: curves over one horizontal axis, both logarithmic."""

import math
from collections.abc import Callable, Mapping
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 760, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 180, 30, 80
BASE, CENTER = HEIGHT - BOTTOM, (LEFT + WIDTH - RIGHT) / 2
COLORS = ("#444444", "#888888", "#aaaaaa", "#0b6bcb", "#d9480f", "#2b8a3e")


class Plot:
    """A plot; its parts are drawn in the order of calls.

    Args:
        curves: points by name, all over the same values of the horizontal axis; infinity has a place of its own, to
            the right of the largest.
        unit: format of a value of the vertical axis, a power of ten.
        title: title of the vertical axis.
    """

    def __init__(self, curves: Mapping[str, Mapping[float, float]], unit: Callable[[float], str], title: str) -> None:
        self._curves, self._title = curves, title
        values = [value for points in curves.values() for value in points.values()]
        self._low, self._high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
        self._finite = [at for at in next(iter(curves.values())) if not math.isinf(at)]
        self._has_infinity = len(self._finite) < len(next(iter(curves.values())))
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
            'font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        ]
        for power in range(self._low, self._high + 1):
            at = self.y(10.0**power)
            self.add(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#dddddd"/>')
            self.add(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{unit(10.0**power)}</text>')

    def x(self, value: float) -> float:
        """Return the place of a value of the horizontal axis."""
        most = 1.12 if self._has_infinity else 1.0
        first, *_, last = self._finite
        position = 1.12 if math.isinf(value) else math.log(value / first) / math.log(last / first)
        return LEFT + position / most * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        """Return the place of a value of the vertical axis."""
        return TOP + (self._high - math.log10(value)) / (self._high - self._low) * (HEIGHT - TOP - BOTTOM)

    def add(self, part: str) -> None:
        """Draw an element."""
        self._parts.append(part)

    def add_tick(self, value: float, label: str) -> None:
        """Draw a line and a label at a value of the horizontal axis."""
        self.add(f'<path d="M{self.x(value):.1f} {TOP}V{BASE}" stroke="#eeeeee"/>')
        self.add(f'<text x="{self.x(value):.1f}" y="{BASE + 16}" text-anchor="middle">{label}</text>')

    def add_title(self, offset: int, text: str) -> None:
        """Draw a title of the horizontal axis, ``offset`` below it."""
        self.add(f'<text x="{CENTER:.0f}" y="{BASE + offset}" text-anchor="middle">{text}</text>')

    def add_vertical_title(self) -> None:
        """Draw the title of the vertical axis."""
        self.add(f'<text x="{LEFT}" y="{TOP - 10}">{self._title}</text>')

    def svg(self) -> str:
        """Return the plot with its curves."""
        ends = _spread([self.y(list(points.values())[-1]) for points in self._curves.values()])
        for (name, points), color, end in zip(self._curves.items(), COLORS[-len(ends) :], ends, strict=True):
            line = " ".join(f"{self.x(at):.1f},{self.y(value):.1f}" for at, value in points.items())
            self.add(f'<polyline points="{line}" fill="none" stroke="{color}" stroke-width="2"/>')
            for at, value in points.items():
                self.add(f'<circle cx="{self.x(at):.1f}" cy="{self.y(value):.1f}" r="3" fill="{color}"/>')
            self.add(f'<text x="{WIDTH - RIGHT + 14}" y="{end + 4:.1f}" fill="{color}">{escape(name)}</text>')
        return "\n".join([*self._parts, "</svg>", ""])


def _spread(heights: list[float], gap: float = 15.0) -> list[float]:
    """Return heights of labels, moved down until they are ``gap`` apart."""
    order = sorted(range(len(heights)), key=heights.__getitem__)
    moved, previous = list(heights), -math.inf
    for index in order:
        previous = moved[index] = max(moved[index], previous + gap)
    return moved
