"""Writes the results in docs/benchmarks.md and the chart docs/images/headline.svg from benchmarks/results.

`python docs/benchmark_page.py` replaces the text between the two markers of the page. A test compares the
committed page and chart with what this writes. Current is the newest result of each measurement on each
machine: a full run of a benchmark replaces all that it measured before there, a run with `--only` what it
measured again.
"""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "benchmarks" / "results"
PAGE = DOCS / "benchmarks.md"
CHART = DOCS / "images" / "headline.svg"
BEGIN, END = "<!-- results: python docs/benchmark_page.py -->", "<!-- end of results -->"

TITLES = {
    "table_cpu": "One table",
    "touched_cpu": "Touched rows",
    "policies_cpu": "Optimizers and policies",
    "ops_cpu": "Ops",
    "train_cpu": "A model with 26 features",
    "overhead": "Step without a dense part",
    "sync_cpu": "Two ranks",
    "servers": "Parameter servers",
    "server_training": "Training on parameter servers",
    "checkpoint_cpu": "Checkpoints",
    "data": "Reading data",
    "records_cpu": "Monolith's records",
    "gather_ranks": "Gather",
    "serving": "Serving",
    "sync_interval": "How often to sync servers",
    "quality": "AUC: a row for every id",
    "quality_policies": "AUC: policies",
    "table_gpu": "Tables on a GPU",
    "published_gpu": "DynamicEmb's published benchmark",
    "mixed_dims_gpu": "Tables of different dims on a GPU",
    "initial_rows_gpu": "Initial rows: GPU and CPU",
}
"""The benchmarks in the order of the page; others follow under their own names."""


@dataclass
class Measured:
    """The current results of a benchmark on a machine."""

    bars: dict[tuple[str, int], tuple[dict[str, Any], str]] = field(default_factory=dict)
    """Measurements by name and number of the name in its file, each with the date."""
    contents: dict[str, tuple[dict[str, Any], str]] = field(default_factory=dict)
    """Results without targets, by kind of table, each with the date."""
    runs: dict[str, list[str]] = field(default_factory=dict)
    """The load of the machine when a run began, by date."""
    peers: dict[str, str] = field(default_factory=dict)


def machine_of(content: dict[str, Any]) -> str:
    if gpu := content.get("gpu"):
        return str(gpu)
    machine = content["machine"]
    if machine["cores"] == 16:
        return "NVIDIA H200"
    cpu = re.sub(r"\(R\)|Processor", "", machine["cpu"])
    return f"{' '.join(cpu.split()).replace('@', 'at')}, {machine['cores']} cores"


def load_of(content: dict[str, Any]) -> float:
    return float(content.get("machine", {}).get("load_average_at_start", 0))


def read_results(folder: Path = RESULTS) -> dict[str, dict[str, Measured]]:
    """Return the current results by machine and benchmark."""
    found: dict[str, dict[str, Measured]] = {}
    dated = [path for path in folder.glob("*.json") if re.search(r"-\d{4}-\d\d-\d\d$", path.stem)]
    for path in sorted(dated, key=lambda path: (path.stem[-10:], path.stem)):
        content, date = json.loads(path.read_text()), path.stem[-10:]
        name = content.get("benchmark") or path.stem[:-11].removesuffix("_policies")
        command = str(content.get("command", ""))
        benchmarks = found.setdefault(machine_of(content), {})
        partial = any(word in command for word in ("--only", "--shapes", "section"))
        if name not in benchmarks or not partial:
            benchmarks[name] = Measured()
        here, seen = benchmarks[name], dict[str, int]()
        for bar in content.get("bars") or ():
            number = seen[bar["name"]] = seen.get(bar["name"], 0) + 1
            here.bars[bar["name"], number] = (bar, date)
        for kind in ("results", "checks", "paths"):
            old, day = here.contents.get(kind, (content, date))
            # Times of one day: those of the idler machine. The counts of paths do not depend on the load.
            if content.get(kind) and (kind != "results" or day < date or load_of(content) <= load_of(old)):
                here.contents[kind] = (content, date)
        here.runs.setdefault(date, []).extend([f"{load_of(content):g}"] if "machine" in content else [])
        here.peers |= {
            k: v for k, v in content["versions"].items() if v != "not installed" and k != "megalith"
        }
    return found


def number(value: float) -> str:
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return (
        "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        + "\n"
    )


def bar_row(bar: dict[str, Any], date: str) -> list[str]:
    sign = "at most" if bar["at_most"] else "more than" if bar["strict"] else "at least"
    target = "" if bar["required"] is None else f"{sign} {number(bar['required'])}"
    result = {"reported": "", "MISSED": "**missed**"}.get(bar["verdict"], bar["verdict"])
    name = bar["name"] + (f" ({bar['note']})" if bar["note"] else "")
    return [name, number(bar["measured"]), target or "none", result or "reported", date]


def other_tables(measured: Measured) -> str:
    text = ""
    if "results" in measured.contents:
        content, date = measured.contents["results"]
        if isinstance(content["results"], dict):
            rows = [
                [name, number(one["wall_ms"]), number(one["functions"]), number(one["calls"]), date]
                for name, one in content["results"].items()
            ]
            text += table(["step", "ms", "functions of ours", "calls of them", "date"], rows)
        elif content["results"] and "auc" in content["results"][0]:
            rows = [
                [one["name"], f"{one['auc']:.4f}", f"{one['log_loss']:.4f}", number(one["bytes"]), date]
                for one in content["results"]
            ]
            text += table(["model", "AUC", "log loss", "bytes", "date"], rows)
    if "paths" in measured.contents:
        content, date = measured.contents["paths"]
        rows = [
            [name, number(one["functions"]), number(one["calls"]), date]
            for name, one in content["paths"].items()
        ]
        text += "\n" + table(["path", "functions of ours", "calls of them", "date"], rows)
    if "checks" in measured.contents:
        content, date = measured.contents["checks"]
        rows = [
            [name, number(one["values"]), number(one["gpu_differs"] + one["native_differs"]), date]
            for name, one in content["checks"].items()
        ]
        text += table(["initializer", "values compared", "values that differ", "date"], rows)
    return text


def results_text(found: dict[str, dict[str, Measured]]) -> str:
    """Return the part of the page that is generated."""
    order = [*TITLES, *sorted({name for each in found.values() for name in each} - set(TITLES))]
    newest = {
        machine: max(date for each in benchmarks.values() for date in each.runs)
        for machine, benchmarks in found.items()
    }
    text = ""
    for machine in sorted(found, key=lambda machine: (newest[machine], len(found[machine])), reverse=True):
        bars = [bar for each in found[machine].values() for bar, _ in each.bars.values()]
        targets = [bar for bar in bars if bar["required"] is not None]
        missed = sum(bar["verdict"] == "MISSED" for bar in targets)
        text += f"## {machine}\n\n{len(targets)} targets, {missed} missed.\n\n"
        for name in order:
            if name not in found[machine]:
                continue
            measured = found[machine][name]
            loads = ", ".join(
                date + (f" (load {', '.join(load)})" if load else "") for date, load in measured.runs.items()
            )
            versions = ", ".join(
                f"{package} {version}" for package, version in sorted(measured.peers.items())
            )
            text += f"### {TITLES.get(name, name)}: `{name}.py`\n\nMeasured {loads}; {versions}.\n\n"
            if measured.bars:
                rows = [bar_row(bar, date) for bar, date in measured.bars.values()]
                text += table(["measurement", "measured", "target", "result", "date"], rows) + "\n"
            if others := other_tables(measured):
                text += others + "\n"
    return text


# ---- the chart of the README


@dataclass(frozen=True)
class Headline:
    """A ratio of the chart: peer's time / ours; above 1 Megalith is faster."""

    label: str
    benchmark: str
    bar: str
    machine: str = "AMD EPYC"
    peer_ms: float | None = None
    """The peer's time, for a measurement of ours in milliseconds; else the measurement is the ratio."""


H200, PUBLISHED = "NVIDIA H200", "published_gpu"
STEP, LOOKUP = "1048576 ids, SGD, ms", "65536 ids, SGD, lookup alone, ms"
STEP_BAG = "Adagrad step vs EmbeddingBag+Adagrad, geomean"
HEADLINES = {
    "2 CPU cores (AMD EPYC, Zen 4)": [
        Headline("Adagrad step vs nn.EmbeddingBag + torch Adagrad", "table_cpu", STEP_BAG),
        Headline("Adagrad step vs FBGEMM TBE", "table_cpu", "Adagrad step vs TBE, geomean"),
        Headline("two ranks: model step vs torchrec, row-wise", "sync_cpu", "step vs torchrec row-wise"),
        Headline(
            "model step vs torchrec, fused tables", "train_cpu", "step vs torchrec fused EBC, 2 thread(s)"
        ),
        Headline("parameter servers: step vs torch RPC", "servers", "torch RPC with EmbeddingBags / ours"),
        Headline("32 clients: requests vs a gRPC handler", "serving", "requests/s, 32 clients: ours / plain"),
        Headline(
            "1 client: requests vs a handler for one model", "serving", "requests/s, 1 client: ours / lean"
        ),
        Headline("save vs torch.save", "checkpoint_cpu", "torch.save / save"),
        Headline("pooled lookup vs FBGEMM TBE", "table_cpu", "lookup vs TBE, geomean"),
        Headline("pooled lookup vs nn.EmbeddingBag", "table_cpu", "lookup vs EmbeddingBag, geomean"),
    ],
    "GPU (NVIDIA H200)": [
        Headline("model step vs 26 nn.EmbeddingBag", "table_gpu", "26 nn.EmbeddingBag / ours", H200),
        Headline("model step vs one nn.EmbeddingBag", "table_gpu", "one nn.EmbeddingBag / ours", H200),
        Headline("SGD step, 1 Mi ids vs DynamicEmb (its published time)", PUBLISHED, STEP, H200, 2.46),
        Headline("SGD step, 1 Mi ids vs FBGEMM TBE (DynamicEmb's time)", PUBLISHED, STEP, H200, 0.89),
        Headline("lookup, 64 Ki ids vs FBGEMM TBE (DynamicEmb's time)", PUBLISHED, LOOKUP, H200, 0.07),
    ],
}
"""The rows of the chart; times that DynamicEmb published are in benchmarks/published_gpu.py."""
STYLE = """
.h { --ink:#1b2a3a; --soft:#4a5a6b; --page:#ffffff; --grid:#dfe4ea; --one:#37587a;
  --win:#3c7a46; --loss:#c2570c; }
@media (prefers-color-scheme: dark) { .h { --ink:#eef2f6; --soft:#b4c0cc; --page:#14171c; --grid:#2d343d;
  --one:#9db8d3; --win:#62a870; --loss:#f0985a; } }
.h { background:var(--page); font-family:"DejaVu Sans",Verdana,system-ui,sans-serif; }
.h text { font-size:12.5px; fill:var(--ink); } .h .soft { fill:var(--soft); } .h .name { font-weight:bold; }
.h .end { text-anchor:end; } .h .middle { text-anchor:middle; }
.h .win { fill:var(--win); } .h .loss { fill:var(--loss); }
.h .grid { stroke:var(--grid); } .h .one { stroke:var(--one); stroke-width:2; }
""".strip()


def headline_ratios(found: dict[str, dict[str, Measured]]) -> dict[str, list[tuple[str, float]]]:
    """Return the labels and ratios of the chart, by group, the largest first."""
    groups = {}
    for group, headlines in HEADLINES.items():
        rows = []
        for one in headlines:
            machine = next(name for name in found if one.machine in name)
            try:
                bar, _ = found[machine][one.benchmark].bars[one.bar, 1]
            except KeyError:
                raise SystemExit(
                    f"{one.benchmark} on {machine} has no measurement {one.bar!r}: correct HEADLINES"
                ) from None
            rows.append((one.label, one.peer_ms / bar["measured"] if one.peer_ms else bar["measured"]))
        groups[group] = sorted(rows, key=lambda row: -row[1])
    return groups


def headline_chart(found: dict[str, dict[str, Measured]]) -> str:
    """Return the chart as SVG: one bar per ratio, on a logarithmic axis around 1."""
    left, right, top, step = 400, 820, 66, 24
    groups = headline_ratios(found)
    low, high = math.log(0.5), math.log(16)

    def x(ratio: float) -> float:
        return left + (math.log(ratio) - low) / (high - low) * (right - left)

    height = top + sum(step * len(rows) + 34 for rows in groups.values()) + 30
    parts = ['<text class="name" x="20" y="26">Speed relative to other libraries</text>']
    parts.append('<text class="soft" x="20" y="46">peer\'s time / ours; logarithmic</text>')
    parts.append(f'<text class="soft end" x="{x(1) - 8:.1f}" y="46">slower</text>')
    parts.append(f'<text class="soft" x="{x(1) + 8:.1f}" y="46">Megalith is faster</text>')
    for ratio in (0.5, 1, 2, 4, 8, 16):
        kind = "one" if ratio == 1 else "grid"
        parts.append(
            f'<line class="{kind}" x1="{x(ratio):.1f}" x2="{x(ratio):.1f}" y1="56" y2="{height - 28}"/>'
        )
        parts.append(f'<text class="soft middle" x="{x(ratio):.1f}" y="{height - 10}">{ratio:g}</text>')
    y, said = top, []
    for group, rows in groups.items():
        parts.append(f'<text class="name" x="20" y="{y + 14}">{escape(group)}</text>')
        y += 24
        for label, ratio in rows:
            start, end = sorted((x(1), x(ratio)))
            kind, shown = ("win" if ratio >= 1 else "loss"), f"{ratio:.1f}" if ratio >= 10 else f"{ratio:.2f}"
            parts.append(f'<text class="end" x="{left - 12}" y="{y + 14}">{escape(label)}</text>')
            parts.append(
                f'<rect class="{kind}" x="{start:.1f}" y="{y + 3}" width="{end - start:.1f}" height="14"/>'
            )
            place = f'x="{end + 6:.1f}"' if ratio >= 1 else f'class="end" x="{start - 6:.1f}"'
            parts.append(f'<text {place} y="{y + 14}">{shown}</text>')
            said.append(f"{label}: {shown}")
            y += step
        y += 10
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="h" viewBox="0 0 880 {height}" '
        f'width="880" height="{height}" role="img">\n<style>{STYLE}</style>\n'
        "<title>Speed relative to other libraries</title>\n"
        f"<desc>Peer's time divided by ours. {escape('; '.join(said))}</desc>"
    )
    return "\n".join([head, *parts, "</svg>", ""])


def page_text(found: dict[str, dict[str, Measured]]) -> str:
    """Return the page with the current results between its markers."""
    before, rest = PAGE.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{results_text(found)}{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    argparse.ArgumentParser(description="Write docs/benchmarks.md and the chart of the README.").parse_args()
    current = read_results()
    PAGE.write_text(page_text(current))
    CHART.write_text(headline_chart(current))
