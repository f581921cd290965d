"""The results of `megalith bench comm` as table cells and as one HTML page with two plots."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from html import escape
from typing import Any

import torch

from megalith.distributed.comm_bench import Measurement
from megalith.reporting import charts
from megalith.reporting.charts import Axis, Series, line_chart
from megalith.units import show_bytes

HEAD = ("pattern", "transport", "bytes per rank", "latency", "best", "goodput", "calls")
PATTERN_NAMES = {
    "all_reduce": "all-reduce",
    "even": "all-to-all, even",
    "uneven": "all-to-all, uneven",
    "ids": "all-to-all, ids",
    "rows": "all-to-all, rows",
}
TRANSPORT_NAMES = {"gloo": "gloo", "shared_memory": "shared memory"}
_STYLE = (
    ":root{color-scheme:light dark} h1{font-size:20px} body{margin:24px auto;max-width:1100px;padding:0 16px;"
    "font:15px/1.5 system-ui,'DejaVu Sans',sans-serif} table{border-collapse:collapse;margin-top:24px}"
    ".plots{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}"
    "th,td{padding:2px 16px 2px 0;text-align:right;font-size:13px;white-space:nowrap}"
    "th:first-child,td:first-child{text-align:left} main{overflow-x:auto}"
)


def machine() -> dict[str, Any]:
    """Return the machine and versions that a result belongs to."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
    }


def title(ranks: int) -> str:
    """Return the title of a result measured on this machine with this number of ranks."""
    found = machine()
    return f"{ranks} ranks, gloo and shared memory, {found['cores']} cores, torch {found['torch']}"


def cells(measurement: Measurement) -> list[str]:
    """Return the columns of `HEAD` after the pattern."""
    return [
        TRANSPORT_NAMES[measurement.transport],
        show_bytes(measurement.size),
        _span(measurement.latency),
        _span(measurement.best),
        f"{show_bytes(measurement.goodput)}/s",
        str(measurement.calls),
    ]


def comm_page(ranks: int, found: Sequence[Measurement]) -> str:
    """Return a self-contained HTML page with plots of latency and goodput and a table."""
    x = Axis("bytes per rank", log=True)
    plots = []
    for transport in dict.fromkeys(m.transport for m in found):
        own, name = [m for m in found if m.transport == transport], TRANSPORT_NAMES[transport]
        latency, goodput = _series(own, "latency", 1e6), _series(own, "goodput", 1e-6)
        plots += [
            line_chart(f"Latency by size, {name}", latency, x, Axis("latency, us", log=True)),
            line_chart(f"Goodput by size, {name}", goodput, x, Axis("goodput, MB/s", log=True)),
        ]
    rows = [f"<tr>{''.join(f'<th>{escape(name)}</th>' for name in HEAD)}</tr>"]
    for each in found:
        texts = (PATTERN_NAMES[each.pattern], *cells(each))
        rows.append(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in texts)}</tr>")
    heading = f"Communication: {title(ranks)}"
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f"<style>{_STYLE}{charts.STYLE}</style></head><body><h1>{escape(heading)}</h1>"
        f'<div class="plots">{"".join(plots)}</div><main><table>{"".join(rows)}</table></main>'
        "</body></html>\n"
    )


def _span(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _series(found: Sequence[Measurement], field: str, scale: float) -> list[Series]:
    return [
        Series(
            PATTERN_NAMES[pattern],
            [(float(m.size), getattr(m, field) * scale) for m in found if m.pattern == pattern],
            "line and points",
            colour=list(PATTERN_NAMES).index(pattern),
        )
        for pattern in dict.fromkeys(m.pattern for m in found)
    ]
