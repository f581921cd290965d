"""Charts as inline SVG: lines, points and bars with axes, ticks and legends, for self-contained pages.

Colours are CSS variables in `STYLE`, so that a chart works on light and dark pages. Each chart has a title
and a description for screen readers, and marks show their values as tooltips.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Literal

from megalith.errors import InputError
from megalith.units import show_number, show_short

WIDTH, HEIGHT = 520, 300
NUM_COLOURS = 8
_FONT, _CHAR = 12, 7.0  # font size of a label, and the width of a character
_TOP, _RIGHT, _BOTTOM = 14, 18, 46
_SLANT = math.radians(35)
_LARGEST = 1e100
_WIDEST_BAR = 70

STYLE = """
.chart { --c0:#2a6fbb; --c1:#d2691e; --c2:#2e8b57; --c3:#b0499a; --c4:#8a6d00; --c5:#2a97a8; --c6:#7a5ccc;
  --c7:#6b6b6b; --axis:#9aa1ab; --grid:#e3e6ea; --ink:#3b424c; }
@media (prefers-color-scheme: dark) { .chart { --c0:#6cb0f5; --c1:#f0985a; --c2:#63c993; --c3:#e08acb;
  --c4:#d9b84a; --c5:#62cfe0; --c6:#b29bf5; --c7:#a5acb5; --axis:#6c747f; --grid:#30363e; --ink:#c5cbd3; } }
.chart { display:block; width:100%; height:auto; }
.chart text { font:12px system-ui, "DejaVu Sans", sans-serif; fill:var(--ink); }
.chart .grid { stroke:var(--grid); stroke-width:1; }
.chart .axis { stroke:var(--axis); stroke-width:1; }
.chart .line { fill:none; stroke-width:2; stroke-linejoin:round; stroke-linecap:round; }
.chart .faint { stroke-width:1; opacity:0.4; }
.chart .guide { stroke:var(--axis); stroke-width:1.5; stroke-dasharray:4 4; fill:none; }
.chart .dot { opacity:0.8; }
"""

Mark = Literal["line", "faint", "points", "line and points"]
_LINES = {"line": "line", "faint": "line faint", "line and points": "line"}


@dataclass(frozen=True)
class Series:
    name: str
    """Name in the legend. Empty: the series is not in the legend."""
    points: Sequence[tuple[float, float]]
    mark: Mark = "line"
    sizes: Sequence[float] | None = None
    """Relative area of each point."""
    colour: int | None = None
    """Colour from 0 to 7. None: given by the position of the series."""


@dataclass(frozen=True)
class Axis:
    label: str
    log: bool = False
    low: float | None = None
    """Lower end. None: the smallest value."""
    high: float | None = None
    """Upper end. None: the largest value."""


def scatter_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, diagonal: bool = False) -> str:
    points = [Series(s.name, s.points, "points", s.sizes, s.colour) for s in series]
    return line_chart(title, points, x, y, diagonal=diagonal)


def bar_chart(title: str, bars: Sequence[tuple[str, float]], y: Axis, *, label: str, colour: int = 0) -> str:
    if not bars or not all(0 <= value < _LARGEST for _, value in bars):
        raise InputError(f"chart {title!r}: needs at least one bar, and values between 0 and 1e100")
    ticks = _linear_ticks(0.0, max(value for _, value in bars) or 1.0)
    left = _left(ticks)
    widest = max(len(text) for text, _ in bars) * _CHAR
    slanted = widest > (WIDTH - left - _RIGHT) / len(bars) - 4
    if slanted:
        left = max(left, len(bars[0][0]) * _CHAR * math.cos(_SLANT) - (WIDTH - left) / len(bars) / 2)
    below = _BOTTOM + (widest * math.sin(_SLANT) if slanted else 0)
    frame = _Frame(
        left, Scale(0, len(bars), False), Scale(0, ticks[-1], False), HEIGHT + below - _BOTTOM, below=below
    )
    step = frame.width / len(bars)
    parts = [frame.y_axis(ticks, y), frame.base()]
    for i, (text, value) in enumerate(bars):
        left, top = frame.left + i * step, frame.y(value)
        width = min(step * 0.78, _WIDEST_BAR)
        parts.append(
            f'<rect x="{left + (step - width) / 2:.1f}" y="{top:.1f}" width="{width:.1f}" rx="1.5" '
            f'height="{frame.bottom - top:.1f}" fill="var(--c{colour})">'
            f"<title>{escape(text)}: {escape(show_number(value))}</title></rect>"
        )
        centre = left + step / 2
        turn = f' text-anchor="end" transform="rotate(-35 {centre + 4:.1f} {frame.bottom + 16:.1f})"'
        parts.append(
            f'<text x="{centre + (4 if slanted else 0):.1f}" y="{frame.bottom + 16:.1f}"'
            f"{turn if slanted else _MIDDLE}>{escape(text)}</text>"
        )
    parts.append(frame.x_label(label))
    spoken = f"{y.label} by {label}: " + ", ".join(f"{text} {show_number(value)}" for text, value in bars)
    return _svg(title, spoken, frame.full_height, parts)


# ---- scales


@dataclass(frozen=True)
class Scale:
    low: float
    high: float
    log: bool

    def __call__(self, value: float) -> float:
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def ticks_of(values: Sequence[float], axis: Axis) -> list[float]:
    """Return round numbers that cover all values. The first and last are the ends of the axis."""
    low = min(values) if axis.low is None else axis.low
    high = max(values) if axis.high is None else axis.high
    return _log_ticks(low, high) if axis.log else _linear_ticks(low, high)


def _linear_ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        pad = max(abs(low), abs(high)) * 0.1 or 1.0
        low, high = low - pad, high + pad
    rough = (high - low) / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12 - math.floor(math.log10(step))) for i in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)
    every = max(1, math.ceil((last - first) / 6))
    last += -(last - first) % every
    return [10.0**i for i in range(first, last + 1, every)]


# ---- drawing

_MIDDLE = ' text-anchor="middle"'


@dataclass(frozen=True)
class _Frame:
    """The plot area of the SVG, with the legend above and labels to the left and below."""

    left: float
    x_scale: Scale
    y_scale: Scale
    full_height: float
    top: float = _TOP
    below: float = _BOTTOM

    @property
    def width(self) -> float:
        return WIDTH - self.left - _RIGHT

    @property
    def bottom(self) -> float:
        return self.full_height - self.below

    def x(self, value: float) -> float:
        return self.left + self.x_scale(value) * self.width

    def y(self, value: float) -> float:
        return self.bottom - self.y_scale(value) * (self.bottom - self.top)

    def base(self) -> str:
        end = WIDTH - _RIGHT
        return f'<path class="axis" d="M{self.left:.1f} {self.bottom:.1f}H{end}"/>'

    def x_axis(self, ticks: Sequence[float], axis: Axis) -> str:
        parts = []
        free = 0.0
        for tick, text in zip(ticks, _texts(ticks), strict=True):
            at = self.x(tick)
            half = len(text) * _CHAR / 2
            parts.append(f'<path class="grid" d="M{at:.1f} {self.top:.1f}V{self.bottom:.1f}"/>')
            if at - half >= free:
                at = min(at, WIDTH - half)
                parts.append(f'<text x="{at:.1f}" y="{self.bottom + 16:.1f}"{_MIDDLE}>{escape(text)}</text>')
                free = at + half + 8
        return "".join([*parts, self.x_label(axis.label)])

    def x_label(self, text: str) -> str:
        middle = self.left + self.width / 2
        return f'<text x="{middle:.1f}" y="{self.full_height - 6:.1f}"{_MIDDLE}>{escape(text)}</text>'

    def y_axis(self, ticks: Sequence[float], axis: Axis) -> str:
        parts = []
        for tick, text in zip(ticks, _texts(ticks), strict=True):
            at = self.y(tick)
            parts.append(f'<path class="grid" d="M{self.left:.1f} {at:.1f}H{WIDTH - _RIGHT}"/>')
            parts.append(
                f'<text x="{self.left - 6:.1f}" y="{at + 4:.1f}" text-anchor="end">{escape(text)}</text>'
            )
        middle = (self.top + self.bottom) / 2
        turn = f'transform="rotate(-90 12 {middle:.1f})"'
        parts.append(f'<text x="12" y="{middle:.1f}" {turn}{_MIDDLE}>{escape(axis.label)}</text>')
        return "".join(parts)


def line_chart(title: str, series: Sequence[Series], x: Axis, y: Axis, *, diagonal: bool = False) -> str:
    """Draw lines. Points beyond 1e100, and points of 0 or less on a log axis, are left out."""
    drawn = [_clean(s, i, x, y) for i, s in enumerate(series)]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        raise InputError(f"chart {title!r}: has no point to draw")
    x_ticks = ticks_of([px for s in drawn for px, _ in s.points], x)
    y_ticks = ticks_of([py for s in drawn for _, py in s.points], y)
    legend, legend_height = _legend(drawn)
    frame = _Frame(
        _left(y_ticks),
        Scale(x_ticks[0], x_ticks[-1], x.log),
        Scale(y_ticks[0], y_ticks[-1], y.log),
        HEIGHT + legend_height,
        _TOP + legend_height,
    )
    parts = [legend, frame.x_axis(x_ticks, x), frame.y_axis(y_ticks, y), frame.base()]
    low, high = max(x_ticks[0], y_ticks[0]), min(x_ticks[-1], y_ticks[-1])
    if diagonal and low < high:
        line = f"M{frame.x(low):.1f} {frame.y(low):.1f}L{frame.x(high):.1f} {frame.y(high):.1f}"
        parts.append(f'<path class="guide" d="{line}"/>')
    parts += [_marks(s, frame, x, y) for s in drawn]
    ranges = "; ".join(f"{s.name}: {len(s.points)} points, {_range(s)}" for s in drawn if s.name)
    return _svg(title, f"{y.label} over {x.label}. {ranges}", frame.full_height, parts)


def _clean(series: Series, number: int, x: Axis, y: Axis) -> Series:
    def fits(value: float, axis: Axis) -> bool:
        return abs(value) < _LARGEST and (value > 1 / _LARGEST or not axis.log)

    kept = [i for i, (a, b) in enumerate(series.points) if fits(a, x) and fits(b, y)]
    sizes = None if series.sizes is None else [series.sizes[i] for i in kept]
    colour = number % NUM_COLOURS if series.colour is None else series.colour
    return Series(series.name, [series.points[i] for i in kept], series.mark, sizes, colour)


def _marks(series: Series, frame: _Frame, x: Axis, y: Axis) -> str:
    parts = []
    colour = f"var(--c{series.colour})"
    places = [(frame.x(a), frame.y(b)) for a, b in series.points]
    if series.mark in _LINES:
        path = "M" + "L".join(f"{a:.1f} {b:.1f}" for a, b in places)
        if len(places) == 1:
            path += "h0.01"  # a line of one point is drawn as its round cap
        parts.append(f'<path class="{_LINES[series.mark]}" stroke="{colour}" d="{path}"/>')
    if series.mark in ("points", "line and points"):
        largest = max(series.sizes or [1.0]) or 1.0
        for i, (a, b) in enumerate(places):
            radius = 3.0 if series.sizes is None else 2.5 + 7.5 * math.sqrt(series.sizes[i] / largest)
            px, py = series.points[i]
            size = "" if series.sizes is None else f", {show_number(series.sizes[i])} samples"
            spoken = f"{series.name}: {x.label} {show_number(px)}, {y.label} {show_number(py)}{size}"
            parts.append(
                f'<circle class="dot" cx="{a:.1f}" cy="{b:.1f}" r="{radius:.1f}" fill="{colour}">'
                f"<title>{escape(spoken)}</title></circle>"
            )
    return "".join(parts)


def _legend(series: Sequence[Series]) -> tuple[str, float]:
    """The legend above the plot and its height. Empty for one series."""
    series = [s for s in series if s.name]
    if len(series) < 2:
        return "", 0.0
    parts = []
    x, y = 8.0, 16.0
    for s in series:
        name = s.name if len(s.name) <= 40 else s.name[:39] + "…"
        width = 26 + len(name) * _CHAR + 14
        if x + width > WIDTH and x > 8:
            x, y = 8.0, y + 20
        colour = f"var(--c{s.colour})"
        if s.mark == "points":
            parts.append(f'<circle class="dot" cx="{x + 10:.1f}" cy="{y - 4:.1f}" r="4" fill="{colour}"/>')
        else:
            line = f"M{x:.1f} {y - 4:.1f}h20"
            parts.append(f'<path class="{_LINES[s.mark]}" stroke="{colour}" d="{line}"/>')
        parts.append(f'<text x="{x + 26:.1f}" y="{y:.1f}">{escape(name)}</text>')
        x += width
    return "".join(parts), y + 6


def _left(ticks: Sequence[float]) -> float:
    """Width of the tick labels and the rotated axis label."""
    return 28 + max(map(len, _texts(ticks))) * _CHAR


def _texts(ticks: Sequence[float]) -> list[str]:
    """The tick labels, with enough digits to be distinct."""
    texts = [show_short(tick) for tick in ticks]
    digits = 5
    while len(set(texts)) < len(texts) and digits < 17:
        texts = [f"{tick:.{digits}g}" for tick in ticks]
        digits += 1
    return texts


def _range(series: Series) -> str:
    ys = [b for _, b in series.points]
    return f"from {show_number(ys[0])} to {show_number(ys[-1])}" if len(ys) > 1 else show_number(ys[0])


def _svg(title: str, description: str, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img"><title>{escape(title)}</title>'
        f"<desc>{escape(description)}</desc>{''.join(parts)}</svg>"
    )


def as_file(chart: str) -> str:
    """Return a chart as an SVG file with its style and a light or dark background."""
    background = (
        ".chart { background:#fff; } @media (prefers-color-scheme: dark) { .chart { background:#14171c; } }"
    )
    inside = f"<style>{STYLE}{background}</style>"
    opened, rest = chart.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1).split(">", 1)
    return f"{opened}>{inside}{rest}\n"


def thin(points: Sequence[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Reduce points to means of neighbours, so that pages of long runs stay small."""
    if len(points) <= most:
        return list(points)
    edges = [len(points) * i // most for i in range(most + 1)]
    groups = [points[a:b] for a, b in pairwise(edges)]
    return [(sum(a for a, _ in g) / len(g), sum(b for _, b in g) / len(g)) for g in groups]
