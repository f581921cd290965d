"""charts: well-formed SVG for any numbers, ticks that cover them, labels that do not overlap."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.reporting.charts import (
    HEIGHT,
    WIDTH,
    Axis,
    Series,
    as_file,
    bar_chart,
    line_chart,
    scatter_chart,
    thin,
    ticks_of,
)

SVG = "{http://www.w3.org/2000/svg}"
X, Y = Axis("step"), Axis("loss")
FINITE = st.floats(-1e90, 1e90)


def parse(svg: str) -> ElementTree.Element:
    assert not re.search(r"nan|inf\b|undefined|None", svg, re.IGNORECASE)
    return ElementTree.fromstring(svg.replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1))


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


@pytest.mark.parametrize(
    ("values", "axis", "ticks"),
    [
        ([0.0, 10.0], Axis(""), [0, 2, 4, 6, 8, 10]),
        ([0.52, 0.71], Axis(""), [0.5, 0.55, 0.6, 0.65, 0.7, 0.75]),
        ([-3.0, 4.0], Axis(""), [-4, -2, 0, 2, 4]),
        ([5.0], Axis(""), [4.4, 4.6, 4.8, 5.0, 5.2, 5.4, 5.6]),
        ([0.0], Axis(""), [-1, -0.5, 0, 0.5, 1]),
        ([3.0], Axis("", low=0), [0, 1, 2, 3]),
        ([1.0, 5000.0], Axis("", log=True), [1, 10, 100, 1000, 10_000]),
        ([7.0], Axis("", log=True), [1, 10]),
        ([1e-3, 1e9], Axis("", log=True), [1e-3, 1e-1, 1e1, 1e3, 1e5, 1e7, 1e9]),
    ],
)
def test_ticks_are_round_and_cover_the_values(values: list[float], axis: Axis, ticks: list[float]) -> None:
    assert ticks_of(values, axis) == pytest.approx(ticks)


@given(st.lists(FINITE, min_size=1, max_size=20), st.booleans())
def test_any_values_lie_between_the_first_and_the_last_tick(values: list[float], log: bool) -> None:
    values = [abs(v) + 1e-90 for v in values] if log else values
    ticks = ticks_of(values, Axis("", log=log))
    assert 2 <= len(ticks) <= 15
    assert ticks == sorted(set(ticks))
    slack = 1e-8 * max(map(abs, values))
    assert ticks[0] - slack <= min(values)
    assert max(values) <= ticks[-1] + slack


@given(st.lists(st.tuples(st.floats(), st.floats()), max_size=12), st.booleans(), st.booleans())
def test_any_points_make_a_chart_or_an_error(
    points: list[tuple[float, float]], log: bool, diagonal: bool
) -> None:
    x, y = Axis("x", log=log), Axis("y", log=log)
    series = [Series("a", points)]
    least = 1e-100 if log else -1e100
    if not any(least < a < 1e100 and least < b < 1e100 for a, b in points):
        with pytest.raises(InputError, match="no point to draw"):
            line_chart("t", series, x, y)
        return
    for svg in (line_chart("t", series, x, y), scatter_chart("t", series, x, y, diagonal=diagonal)):
        parse(svg)
        width, height = WIDTH + 1.0, HEIGHT + 60.0
        for attribute, most in (("x", width), ("cx", width), ("y", height), ("cy", height)):
            assert all(-1 <= float(v) <= most for v in re.findall(rf'\b{attribute}="([^"]+)"', svg))


def test_text_is_escaped_and_spoken() -> None:
    svg = line_chart("a <b> & c", [Series('"x"<i>', [(0, 1), (1, 2)])], Axis("<step>"), Axis("loss & more"))
    root = parse(svg)
    assert root.attrib["role"] == "img"
    assert root.findtext(f"{SVG}title") == "a <b> & c"
    assert '"x"<i>: 2 points, from 1 to 2' in (root.findtext(f"{SVG}desc") or "")
    assert "<b>" not in svg
    assert "<i>" not in svg


def test_a_legend_names_series_that_have_a_name_and_wraps() -> None:
    points = [(0.0, 1.0), (1.0, 2.0)]
    assert "only" not in texts(parse(line_chart("t", [Series("only", points)], X, Y)))
    names = [f"a rather long name, number {i}" for i in range(5)]
    root = parse(line_chart("t", [Series("", points, "faint"), *(Series(n, points) for n in names)], X, Y))
    legend = [e for e in root.iter(f"{SVG}text") if e.text in names]
    assert [e.text for e in legend] == names
    places = [(e.attrib["x"], e.attrib["y"]) for e in legend]
    assert len(set(places)) == 5
    assert len({y for _, y in places}) == 3


def test_ticks_close_together_have_texts_of_their_own() -> None:
    shown = texts(parse(line_chart("t", [Series("a", [(0, 0.780011), (1, 0.780019)])], X, Y)))
    assert "0.780012" in shown
    assert len(set(shown)) == len(shown)


def test_points_know_their_values_and_sizes() -> None:
    series = Series("bins", [(0.1, 0.2), (0.3, 0.4)], sizes=[100, 25])
    root = parse(scatter_chart("t", [series], Axis("predicted"), Axis("observed"), diagonal=True))
    dots = list(root.iter(f"{SVG}circle"))
    assert [dot.attrib["r"] for dot in dots] == ["10.0", "6.2"]
    assert dots[0].findtext(f"{SVG}title") == "bins: predicted 0.1, observed 0.2, 100 samples"
    assert sum(e.attrib.get("class") == "guide" for e in root.iter(f"{SVG}path")) == 1


def test_bars_stand_on_the_axis_and_are_as_high_as_their_values() -> None:
    root = parse(bar_chart("t", [("a", 1), ("b", 4), ("c", 0)], Axis("rows"), label="age"))
    bars = list(root.iter(f"{SVG}rect"))
    heights = [float(bar.attrib["height"]) for bar in bars]
    assert heights[1] == pytest.approx(4 * heights[0], abs=0.3)
    assert heights[2] == 0
    assert len({round(float(b.attrib["y"]) + float(b.attrib["height"]), 1) for b in bars}) == 1
    assert bars[1].findtext(f"{SVG}title") == "b: 4"
    assert "age" in texts(root)


def test_long_labels_of_bars_are_slanted() -> None:
    few = bar_chart("t", [("short", 1)] * 3, Axis("rows"), label="age")
    many = bar_chart("t", [("10 to 60 minutes", 1)] * 12, Axis("rows"), label="age")
    assert "rotate(-35" not in few
    assert many.count("rotate(-35") == 12


@pytest.mark.parametrize("bars", [[], [("a", -1.0)], [("a", float("nan"))], [("a", float("inf"))]])
def test_bars_that_cannot_be_drawn(bars: list[tuple[str, float]]) -> None:
    with pytest.raises(InputError, match="needs at least one bar"):
        bar_chart("t", bars, Axis("rows"), label="age")


def test_long_lines_are_thinned_to_means() -> None:
    assert thin([(0, 1), (1, 3), (2, 5), (3, 7)], 2) == [(0.5, 2.0), (2.5, 6.0)]
    assert thin([(0, 1)], 2) == [(0, 1)]
    assert len(thin([(float(i), 0.0) for i in range(1001)], 300)) == 300


def test_a_chart_as_a_file_is_self_contained() -> None:
    text = as_file(line_chart("loss", [Series("a", [(0, 1), (1, 2)])], X, Y))

    root = ElementTree.fromstring(text)
    assert root.tag == f"{SVG}svg"
    style, title = root[0], root[1]
    assert style.tag == f"{SVG}style"
    assert "--c0:" in (style.text or "")
    assert "prefers-color-scheme: dark" in (style.text or "")
    assert title.text == "loss"
