"""Style sheet and colours of the HTML pages of reports (pure).

All colours are variables with one value for a light and one for a dark page. Text has a contrast of
at least 4.5:1 to its background and graphics of at least 3:1, as level AA of WCAG 2.2 requires
(success criteria 1.4.3 and 1.4.11); a test computes them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from html import escape

from inductor_ext.memory.records import MemoryPlanRecord

OTHER = "other"
NO_MODULE = "none"

# Fill on a light page, its text, fill on a dark page; text on the latter is black. The hues are
# those of Okabe and Ito (2008), which are distinguishable with colour blindness.
_FILLS = {
    "m0": ("#b26b00", "#000", "#e69f00"),
    "m1": ("#2a83b5", "#000", "#56b4e9"),
    "m2": ("#00805d", "#fff", "#1faf85"),
    "m3": ("#7f7600", "#fff", "#f0e442"),
    "m4": ("#004c86", "#fff", "#5a8fff"),
    "m5": ("#bf4a00", "#fff", "#f07530"),
    "m6": ("#a8497b", "#fff", "#d98ab5"),
    OTHER: ("#6e6e6e", "#fff", "#8c8c8c"),
    NO_MODULE: ("#8a8a8a", "#000", "#b9b9b9"),
}

_PALETTE = tuple(name for name in _FILLS if name not in (OTHER, NO_MODULE))

_LIGHT = {
    "back": "#fff",
    "text": "#1c1c1c",
    "dim": "#5c5c5c",
    "line": "#767676",
    "frame": "#f3f3f3",
    "alive": "#8a8a8a",
    "bound": "#7a0016",
    **{name: fill for name, (fill, _, _) in _FILLS.items()},
    **{f"{name}-text": text for name, (_, text, _) in _FILLS.items()},
}

_DARK = {
    "back": "#16181b",
    "text": "#e6e6e6",
    "dim": "#a8a8a8",
    "line": "#80858c",
    "frame": "#22252a",
    "alive": "#666b72",
    "bound": "#ffc4bd",
    **{name: fill for name, (_, _, fill) in _FILLS.items()},
    **{f"{name}-text": "#000" for name in _FILLS},
}


def _declare(colours: dict[str, str]) -> str:
    return " ".join(f"--{name}: {colour};" for name, colour in colours.items())


_RULES = """
body { background: var(--back); color: var(--text); font: 14px/1.45 system-ui, sans-serif;
  max-width: 1040px; margin: 24px auto; padding: 0 16px; }
h1 { font-size: 1.4em; } h2 { font-size: 1.05em; margin: 2em 0 0.4em; }
svg { width: 100%; height: auto; display: block; }
svg text { fill: var(--dim); font-size: 11px; }
svg text.title { fill: var(--text); font-size: 12px; font-weight: 600; }
svg text.label { font-size: 10px; pointer-events: none; }
.frame { fill: var(--frame); stroke: var(--text); stroke-width: 1; }
.axis { stroke: var(--line); fill: none; }
.held { stroke: var(--text); fill: none; stroke-width: 1.6; }
.alive { fill: var(--alive); stroke: none; }
.bound { stroke: var(--bound); stroke-width: 1.6; stroke-dasharray: 6 3; fill: none; }
.halo { stroke: var(--back); stroke-width: 3; fill: none; }
.peak { stroke: var(--text); stroke-width: 1.4; stroke-dasharray: 2 3; fill: none; }
.call { fill: none; stroke: var(--line); }
.s { stroke: var(--back); stroke-width: 0.5; }
.s:hover { stroke: var(--text); stroke-width: 2; }
.input { stroke: var(--text); stroke-dasharray: 3 2; }
.legend span { margin-right: 1em; white-space: nowrap; }
.swatch { display: inline-block; width: 0.9em; height: 0.9em; margin-right: 0.35em;
  vertical-align: -0.1em; border-radius: 2px; }
.key { display: inline-block; width: 1.6em; height: 0; margin-right: 0.35em;
  vertical-align: 0.25em; border-top: 2px solid var(--text); }
.key-bound { border-top: 2px dashed var(--bound); }
.key-peak { border-top: 2px dotted var(--text); }
.key-alive { height: 0.8em; border: 0; background: var(--alive); vertical-align: -0.1em; }
.key-frame { height: 0.8em; border: 1px solid var(--text); background: var(--frame);
  vertical-align: -0.1em; }
.key-call { height: 0.8em; border: 1px solid var(--line); border-bottom: 0;
  vertical-align: -0.1em; }
table { border-collapse: collapse; margin: 8px 0; }
caption { text-align: left; color: var(--dim); }
th, td { text-align: left; padding: 1px 12px 1px 0; vertical-align: top; }
th { font-weight: 600; border-bottom: 1px solid var(--line); }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
dt { font-weight: 600; margin-top: 0.5em; } dd { margin-left: 1.5em; }
summary { cursor: pointer; }
h1, h2, h3, p, dd, caption, summary { overflow-wrap: anywhere; }
h3 { font-size: 1em; margin: 1.6em 0 0.4em; }
a { color: var(--m4); }
:focus-visible { outline: 2px solid var(--text); outline-offset: 2px; }
.skip { position: absolute; left: -999em; }
.skip:focus { position: static; }
nav ul { display: flex; flex-wrap: wrap; gap: 0.2em 1.2em; list-style: none; padding: 0; }
.facts { display: grid; grid-template-columns: max-content 1fr; gap: 0.1em 1em; }
.facts dt { margin: 0; } .facts dd { margin: 0; }
.scroll { overflow-x: auto; }
.scroll > svg { min-width: 720px; }
.scroll caption { max-width: calc(100vw - 32px); }
th[scope="row"] { min-width: 11em; font-weight: 400; border-bottom: 0; overflow-wrap: anywhere; }
td.n { white-space: nowrap; } .scroll td:not(.n) { min-width: 6em; }
section > h2 { font-size: 1.2em; }
svg.bar { width: 12em; height: 1.2em; margin-top: 0.1em; }
.bar-back { fill: var(--frame); }
.bar-time { fill: var(--m1); }
.bar-bound { stroke: var(--bound); stroke-width: 2; fill: none; vector-effect: non-scaling-stroke; }
.key-time { height: 0.8em; border: 0; background: var(--m1); vertical-align: -0.1em; }
.key-roofline { width: 0; height: 0.9em; border: 0; border-left: 2px solid var(--bound);
  vertical-align: -0.1em; }
"""

STYLE = (
    f"\n:root {{ color-scheme: light dark; {_declare(_LIGHT)} }}\n"
    f"@media (prefers-color-scheme: dark) {{ :root {{ {_declare(_DARK)} }} }}"
    f"{_RULES}"
)


class ModuleGroups:
    """Assigns colours to modules, at the deepest level that the palette can distinguish."""

    def __init__(self, records: Iterable[MemoryPlanRecord]) -> None:
        weight: dict[str, int] = {}
        self._without = False
        for record in records:
            for storage in record.storages:
                area = storage.bytes * (storage.end - storage.start)
                weight[storage.module] = weight.get(storage.module, 0) + area
        self._without = weight.pop("", None) is not None
        self._depth = 1
        deepest = max((module.count(".") + 1 for module in weight), default=1)
        for depth in range(2, deepest + 1):
            if len({self._cut(module, depth) for module in weight}) <= len(_PALETTE):
                self._depth = depth
        areas: dict[str, int] = {}
        for module, area in weight.items():
            name = self._cut(module, self._depth)
            areas[name] = areas.get(name, 0) + area
        largest = sorted(areas, key=lambda name: (-areas[name], name))[: len(_PALETTE)]
        self._others = len(areas) - len(largest)
        # Colours are assigned by name, not by size, so that they change little between plans.
        self._colours = {name: i for i, name in enumerate(sorted(largest, key=_natural_key))}

    @staticmethod
    def _cut(module: str, depth: int) -> str:
        return ".".join(module.split(".")[:depth])

    def css_class(self, module: str) -> str:
        """Return the CSS class of a module."""
        if not module:
            return NO_MODULE
        colour = self._colours.get(self._cut(module, self._depth))
        return OTHER if colour is None else _PALETTE[colour]

    def _entries(self) -> Iterator[tuple[str, str]]:
        """Yield the CSS class and the name of every group that occurs."""
        for name, index in self._colours.items():
            yield _PALETTE[index], name
        if self._others:
            yield OTHER, f"{self._others} other modules"
        if self._without:
            yield NO_MODULE, "no module"

    def style(self) -> str:
        """Return the CSS rules of the groups and of the labels on them."""
        names = [name for name, _ in self._entries()]
        if OTHER not in names:
            # The sum of the storages that are not drawn individually has this colour.
            names.append(OTHER)
        return "".join(
            f".{name} {{ fill: var(--{name}); background: var(--{name}); }}\n"
            f"svg text.on-{name} {{ fill: var(--{name}-text); }}\n"
            for name in names
        )

    def legend(self) -> str:
        """Return the HTML of the legend of the modules."""
        entries = "".join(
            f'<span><i class="swatch {name}"></i>{escape(text)}</span> '
            for name, text in self._entries()
        )
        return f'<p class="legend">Modules: {entries or "none"}</p>'


def _natural_key(name: str) -> list[tuple[int, int, str]]:
    """Sort key that puts layers.2 before layers.10."""
    parts = re.split(r"(\d+)", name)
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in parts]
