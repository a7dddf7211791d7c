"""Axes of the drawings of a memory report, as SVG (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from html import escape
from itertools import pairwise

from inductor_ext.memory.planner.peak_report import human_bytes

WIDTH = 1000
LEFT = 112
RIGHT = 16

Scale = Callable[[float], float]


@dataclasses.dataclass(frozen=True)
class Plot:
    """An area with a horizontal and a vertical axis."""

    top: int
    height: int
    """Pixels."""
    length: float
    """The x axis ends at this value; it begins at 0."""
    lowest: float
    """The y axis begins at this value, 0 or less."""
    highest: float

    @property
    def bottom(self) -> int:
        """The y coordinate of the lower edge."""
        return self.top + self.height

    def x(self, value: float) -> float:
        """Return the x coordinate of a value."""
        return round(LEFT + value / self.length * (WIDTH - LEFT - RIGHT), 2)

    def y(self, value: float) -> float:
        """Return the y coordinate of a value."""
        share = (value - self.lowest) / (self.highest - self.lowest)
        return round(self.top + self.height * (1 - share), 2)

    def draw_axes(
        self, title: str, x_label: str, y_label: str, x_ticks: Sequence[tuple[float, str]]
    ) -> Iterator[str]:
        """Draw the axes with ticks and labels. The ticks of the y axis are bytes."""
        right = WIDTH - RIGHT
        yield f'<text class="title" x="{LEFT}" y="{self.top - 10}">{escape(title)}</text>'
        yield f'<path class="axis" d="M{LEFT} {self.top}V{self.bottom}H{right}"/>'
        if self.lowest < 0:
            yield f'<path class="axis" d="M{LEFT} {self.y(0)}H{right}"/>'
        for value in find_byte_ticks(self.lowest, self.highest):
            at = self.y(value)
            yield f'<path class="axis" d="M{LEFT - 5} {at}H{LEFT}"/>'
            yield (
                f'<text class="y-tick" x="{LEFT - 8}" y="{round(at + 4, 2)}" text-anchor="end">'
                f"{human_bytes(value)}</text>"
            )
        for position, text in x_ticks:
            at = self.x(position)
            yield f'<path class="axis" d="M{at} {self.bottom}V{self.bottom + 5}"/>'
            yield (
                f'<text class="x-tick" x="{at}" y="{self.bottom + 17}" text-anchor="middle">'
                f"{escape(text)}</text>"
            )
        middle = self.top + self.height // 2
        yield (
            f'<text class="x-label" x="{(LEFT + right) // 2}" y="{self.bottom + 34}" '
            f'text-anchor="middle">{escape(x_label)}</text>'
        )
        yield (
            f'<text class="y-label" x="14" y="{middle}" text-anchor="middle" '
            f'transform="rotate(-90 14 {middle})">{escape(y_label)}</text>'
        )


def find_byte_ticks(lowest: float, highest: float) -> list[int]:
    """Return at most seven multiples of a power of two between two values, 0 among them."""
    step = 1
    while (highest - lowest) // step > 5:
        step *= 2
    first = -int(-lowest // step)
    return [step * number for number in range(first, int(highest // step) + 1)]


def find_step_ticks(length: int) -> list[tuple[float, str]]:
    """Return at most eleven round numbers from 0 to `length`, as positions and labels."""
    scale = 1
    while length // scale > 10:
        for multiple in (2, 5, 10):
            if length // (scale * multiple) <= 10:
                break
        scale *= multiple
    return [(step, str(step)) for step in range(0, length + 1, scale)]


def draw_step_path(profile: Sequence[int], x: Scale, y: Scale) -> str:
    """Return an SVG path along a profile, with points only where the value changes."""
    path = [f"M{x(0)} {y(profile[0])}"]
    for step, (before, after) in enumerate(pairwise(profile), 1):
        if before != after:
            path.append(f"H{x(step)}V{y(after)}")
    path.append(f"H{x(len(profile))}")
    return "".join(path)


def wrap_svg(prefix: str, height: int, title: str, description: str, parts: Sequence[str]) -> str:
    """Return the SVG element of a drawing.

    Args:
        prefix: makes its ids unique in the page.
        height: of the drawing, in pixels of `WIDTH`.
        title, description: what a screen reader reads.
        parts: the elements inside.
    """
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-labelledby="{prefix}t {prefix}w">\n<title id="{prefix}t">{escape(title)}</title>\n'
        f'<desc id="{prefix}w">{escape(description)}</desc>\n' + "\n".join(parts) + "\n</svg>"
    )
