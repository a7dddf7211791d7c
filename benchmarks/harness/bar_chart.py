"""Horizontal bars as SVG, for pages with a light or a dark background (pure)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from html import escape

__all__ = ["BarChart", "Group"]

_WIDTH = 680
_LEFT = 216
_RIGHT = 64
_BAR = 13
_GAP = 9
_TOP = 64

_STYLE = """
text { font: 12px system-ui, sans-serif; fill: #24292f; }
.title { font-size: 14px; font-weight: 600; }
.value { font-size: 11px; }
.back { fill: #ffffff; stroke: #d0d7de; }
.axis { stroke: #6e7781; fill: none; }
.bar0 { fill: #8c959f; }
.bar1 { fill: #bf8700; }
.bar2 { fill: #0969da; }
.bar3 { fill: #1a7f37; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; }
  .back { fill: #161b22; stroke: #30363d; }
  .axis { stroke: #8b949e; }
  .bar0 { fill: #7d8590; }
  .bar1 { fill: #d29922; }
  .bar2 { fill: #58a6ff; }
  .bar3 { fill: #3fb950; }
}
"""


@dataclasses.dataclass(frozen=True)
class Group:
    """The bars of one case."""

    label: str
    values: Sequence[float | None]
    """One value for each series; None for a series without a value, which gets no bar."""


@dataclasses.dataclass(frozen=True)
class BarChart:
    """Groups of bars, one below the other, that begin at 0."""

    title: str
    description: str
    """What a screen reader reads after the title."""
    series: Sequence[tuple[str, int]]
    """The name of each series, and the number of its colour (0 to 3)."""
    groups: Sequence[Group]
    digits: int = 2
    """Digits after the decimal point of the values."""
    reference: float | None = None
    """A value that a vertical line marks, for ratios."""

    @property
    def height(self) -> int:
        """The height of the drawing in pixels."""
        return _TOP + 14 + sum(self._group_height(group) for group in self.groups)

    def _group_height(self, group: Group) -> int:
        return _GAP + _BAR * sum(value is not None for value in group.values)

    def draw(self) -> str:
        """Return the SVG file."""
        highest = max(v for group in self.groups for v in group.values if v is not None)
        scale = (_WIDTH - _LEFT - _RIGHT) / highest
        size = f'viewBox="0 0 {_WIDTH} {self.height}" width="{_WIDTH}" height="{self.height}"'
        edge = f'width="{_WIDTH - 1}" height="{self.height - 1}"'
        line = f"{_TOP - 6}V{self.height - 10}"
        lines = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" aria-labelledby="t d">',
            f'<title id="t">{escape(self.title)}</title>',
            f'<desc id="d">{escape(self.description)}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" x="0.5" y="0.5" {edge} rx="6"/>',
            f'<text class="title" x="14" y="24">{escape(self.title)}</text>',
            *self._draw_legend(),
            *self._draw_bars(scale),
            f'<path class="axis" d="M{_LEFT} {line}"/>',
        ]
        if self.reference is not None:
            x = round(_LEFT + self.reference * scale, 1)
            lines.append(f'<path class="axis" stroke-dasharray="4 3" d="M{x} {line}"/>')
        return "\n".join([*lines, "</svg>", ""])

    def _draw_legend(self) -> Iterator[str]:
        x = 14.0
        for name, colour in self.series:
            yield f'<rect class="bar{colour}" x="{x:.0f}" y="36" width="11" height="11"/>'
            yield f'<text x="{x + 16:.0f}" y="46">{escape(name)}</text>'
            x += 34 + 6.6 * len(name)

    def _draw_bars(self, scale: float) -> Iterator[str]:
        y = _TOP
        for group in self.groups:
            middle = y + (self._group_height(group) - _GAP) / 2 + 4
            yield (
                f'<text x="{_LEFT - 8}" y="{middle:.1f}" text-anchor="end">'
                f"{escape(group.label)}</text>"
            )
            for value, (_, colour) in zip(group.values, self.series, strict=True):
                if value is None:
                    continue
                end = round(value * scale, 1)
                yield (
                    f'<rect class="bar{colour}" x="{_LEFT}" y="{y}" width="{end}" '
                    f'height="{_BAR - 2}"/>'
                )
                yield (
                    f'<text class="value" x="{round(_LEFT + end + 5, 1)}" y="{y + 10}">'
                    f"{value:,.{self.digits}f}</text>"
                )
                y += _BAR
            y += _GAP
