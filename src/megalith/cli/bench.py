"""megalith bench: measures this machine, and compares it with other libraries.

`comm` measures collectives between ranks. The other suites are the scripts in `benchmarks/` of a checkout.
Each runs as a process and saves a result as JSON; this command finds the peers, runs the scripts one after
the other, and shows the targets of all results as a table and a page.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from html import escape
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.table import Table
from rich.text import Text

import megalith
from megalith.cli.config_options import config_options
from megalith.cli.output import AsJson, console, exit_on_error, grid, print_json, print_line, progress
from megalith.distributed.comm_bench import (
    PATTERNS,
    TRANSPORTS,
    CommSettings,
    Measurement,
    measure_launched,
    measure_local,
)
from megalith.distributed.launcher_environment import Launch, LaunchWarning, read_launch
from megalith.errors import InputError
from megalith.reporting import charts
from megalith.reporting.charts import Axis, Series, line_chart
from megalith.units import show_bytes

app = typer.Typer()


# ---- suites: the scripts of a checkout


@dataclass(frozen=True)
class Suite:
    """A benchmark with a result file. Its peers are packages; comparisons with absent ones are left out."""

    script: str  # its file in benchmarks/, without .py; the result file has the same name
    measures: str
    peers: tuple[str, ...] = ()
    quick: tuple[str, ...] = ("--quick",)
    gpu: bool = False


_FBGEMM, _TORCHREC = "fbgemm-gpu-cpu", "torchrec"
SUITES = {
    "table": Suite("table_cpu", "steps, lookups and growth of a table", (_FBGEMM, _TORCHREC)),
    "touched": Suite("touched_cpu", "changed rows, drained while a table is trained"),
    "policies": Suite("policies_cpu", "every optimizer against torch.optim; admission and eviction"),
    "ops": Suite("ops_cpu", "ops on ids and rows", (_FBGEMM,)),
    "train": Suite("train_cpu", "a whole model of 26 features in one process", (_FBGEMM, _TORCHREC)),
    "overhead": Suite("overhead", "Python per step", quick=("--batch", "1024")),
    "train-overhead": Suite(
        "train_overhead", "Python per step of `megalith train`", quick=("--steps", "20"), gpu=True
    ),
    "sync": Suite("sync_cpu", "exchanges and steps on two ranks", (_FBGEMM, _TORCHREC)),
    "servers": Suite("servers", "lookups and pushes of parameter servers", ("ray",)),
    "server-training": Suite("server_training", "AUC of asynchronous and synchronous workers", ("ray",)),
    "checkpoint": Suite(
        "checkpoint_cpu", "saves and loads, and torch.save", quick=("--rows", "100000", "--rounds", "1")
    ),
    "data": Suite(
        "data",
        "reading Parquet, CSV and records into batches",
        ("datasets", "protobuf"),
        quick=("--rows", "20000", "--rounds", "1"),
    ),
    "records": Suite(
        "records_cpu", "Monolith's records", ("protobuf",), quick=("--examples", "2000", "--rounds", "2")
    ),
    "gather": Suite("gather_ranks", "downloads, checks and outer steps of peers' updates"),
    "serving": Suite("serving", "requests per second, latency, parameter sync, staleness", ("grpcio",)),
    "sync-interval": Suite("sync_interval", "AUC by how often servers are synchronised", ("grpcio",)),
    "quality": Suite("quality", "AUC of separate rows, remapped and hashed ids"),
    "quality-policies": Suite("quality_policies", "AUC and memory with admission and a capacity"),
    "table-gpu": Suite("table_gpu", "steps, lookups and scans on a GPU", ("triton",), gpu=True),
    "mixed-dims-gpu": Suite("mixed_dims_gpu", "tables of different dims on a GPU", ("triton",), gpu=True),
    "published-gpu": Suite("published_gpu", "DynamicEmb's published benchmark", ("triton",), gpu=True),
    "initial-rows-gpu": Suite(
        "initial_rows_gpu", "bits of initial rows on a GPU and on the CPU", quick=("--ids", "1000"), gpu=True
    ),
}
"""Name of the command -> the suite, in the order of `megalith bench all`."""

_LONGEST = 4 * 3600
"""Seconds after which a suite is stopped."""
_OTHER_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}

Quick = Annotated[
    bool, typer.Option("--quick", help="Small sizes, to see that it runs: no numbers to quote.")
]
Output = Annotated[
    Path | None,
    typer.Option(
        help="Directory for results and the page. Default: benchmarks/results of the checkout for complete "
        "runs, runs/bench for others."
    ),
]


@app.callback(invoke_without_command=True)
def bench(context: typer.Context) -> None:
    """Measure this machine, side by side with the libraries that are installed.

    Without a suite, the suites and their peers are listed. `comm` measures collectives between ranks and
    needs nothing else. The other suites are scripts in benchmarks/ of a checkout; wheels do not contain them.

    \b
    Example:
      megalith bench
      megalith bench train
      megalith bench table --only find,step --output runs/bench
      megalith bench all --quick
    """
    if context.invoked_subcommand is None:
        table = grid(("suite", "measures", "peers"), left=("suite", "measures", "peers"))
        table.add_row("comm", "collectives between ranks", "-")
        for name, suite in SUITES.items():
            table.add_row(name, suite.measures, _peers([suite]) or "-")
        console().print(table)
        print_line(f"scripts: {_scripts() or 'not here: run the command in a checkout of Megalith'}")


@app.command("all", context_settings=_OTHER_ARGUMENTS)
def all_suites(context: typer.Context, quick: Quick = False, output: Output = None) -> None:
    """Run all suites, one after the other: those for a GPU only if there is one. It takes an hour or more.

    \b
    Example:
      megalith bench all --quick
    """
    chosen = [name for name, suite in SUITES.items() if torch.cuda.is_available() or not suite.gpu]
    _run_suites(chosen, context.args, quick, output)


def _add_command(name: str, suite: Suite) -> None:
    about = (
        f"Measure {suite.measures}.\n\nOther options: `python benchmarks/{suite.script}.py --help`.\n\n"
        f"\b\nExample:\n  megalith bench {name} --quick"
    )

    @app.command(name, context_settings=_OTHER_ARGUMENTS, help=about)
    def command(context: typer.Context, quick: Quick = False, output: Output = None) -> None:
        _run_suites([name], context.args, quick, output)


for _name, _suite in SUITES.items():
    _add_command(_name, _suite)


def _run_suites(names: Sequence[str], arguments: Sequence[str], quick: bool, output: Path | None) -> None:
    with exit_on_error():
        scripts = _scripts()
        if scripts is None:
            raise InputError(
                "the scripts of the benchmarks are not here: a wheel does not contain them. Run the command "
                "in a checkout of Megalith; `megalith bench comm` runs anywhere"
            )
        partial = quick or bool(arguments)
        folder = (output or (Path("runs/bench") if partial else scripts / "results")).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        print_line(f"peers: {_peers(SUITES[name] for name in names) or 'none'}")
        results, failed = {}, []
        for name in names:
            suite = SUITES[name]
            path = folder / f"{suite.script}-{date.today().isoformat()}.json"
            before = path.stat().st_mtime_ns if path.exists() else None
            chosen = [*(suite.quick if quick else ()), *arguments, "--output", str(path)]
            print_line(f"{name}: {suite.measures}")
            done = subprocess.run([sys.executable, scripts / f"{suite.script}.py", *chosen], timeout=_LONGEST)
            if done.returncode:
                failed.append(name)
            if path.exists() and path.stat().st_mtime_ns != before:
                results[name] = json.loads(path.read_text(encoding="utf-8"))
        if results:
            title = names[0] if len(names) == 1 else "all"
            page = folder / f"bench-{title}-{date.today().isoformat()}.html"
            page.write_text(_results_page(results), encoding="utf-8")
            _print_results(results)
            print_line(f"results: {folder}\npage: {page}")
        if failed:
            raise InputError(f"these suites failed: {', '.join(failed)}. Their output above has the reason")


def _scripts() -> Path | None:
    """The folder of the benchmarks: of the working directory, or of the checkout that is installed."""
    roots = (Path.cwd(), Path(megalith.__file__).parents[2])
    return next(
        (root / "benchmarks" for root in roots if (root / "benchmarks" / "harness.py").exists()), None
    )


def _peers(suites: Iterable[Suite]) -> str:
    found = []
    for package in dict.fromkeys(peer for suite in suites for peer in suite.peers):
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            found.append(f"{package} (not installed)")
    return ", ".join(found)


_RESULT_HEAD = ("suite", "measurement", "measured", "target", "verdict")


def _result_rows(results: Mapping[str, Any]) -> list[tuple[tuple[str, ...], float | None]]:
    """For each measurement its columns of _RESULT_HEAD, and how far it exceeds its target: 1 reaches it."""
    rows: list[tuple[tuple[str, ...], float | None]] = []
    for name, content in results.items():
        for bar in content.get("bars", ()):
            measured, required = bar["measured"], bar["required"]
            sign = "at most" if bar["at_most"] else "at least"
            target = "-" if required is None else f"{sign} {required:g}"
            reached = None
            if required and measured:
                reached = required / measured if bar["at_most"] else measured / required
            rows.append(((name, bar["name"], f"{measured:.3g}", target, bar["verdict"]), reached))
    return rows


def _facts(results: Mapping[str, Any]) -> dict[str, str]:
    """The machine and the versions of all results."""
    first = next(iter(results.values()))
    versions = {key: value for content in results.values() for key, value in content["versions"].items()}
    return {
        title: ", ".join(f"{key} {value}" for key, value in found.items())
        for title, found in (("machine", first.get("machine", {})), ("versions", versions))
    }


def _print_results(results: Mapping[str, Any]) -> None:
    for title, text in _facts(results).items():
        print_line(f"{title}: {text}")
    table = grid(_RESULT_HEAD, left=("suite", "measurement", "verdict"))
    for cells, _ in _result_rows(results):
        table.add_row(*map(Text, cells))
    console().print(table)


def _results_page(results: Mapping[str, Any]) -> str:
    """Return a self-contained HTML page: every measurement, and a bar that shows it divided by its target."""
    rows = [_html_row("th", (*_RESULT_HEAD, "measured / target, 3 at most; the line is the target"))]
    for cells, reached in _result_rows(results):
        share = 0.0 if reached is None else min(reached, 3.0) / 3.0
        mark = "" if reached is None else f'<div class="bar"><i style="width:{share:.1%}"></i></div>'
        rows.append(_html_row("td", cells, mark))
    facts = "".join(f"<p>{escape(title)}: {escape(text)}</p>" for title, text in _facts(results).items())
    return _document(
        f"Benchmarks: {', '.join(results)}", f"{facts}<main><table>{''.join(rows)}</table></main>"
    )


# ---- comm: collectives between ranks

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@app.command()
@config_options("settings", CommSettings, omit=("patterns", "transports", "sizes"))
def comm(
    ranks: Annotated[
        int | None,
        typer.Option(min=2, help="Number of local processes to start. Default: 2, or the launcher's ranks."),
    ] = None,
    pattern: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(PATTERNS)}. May be repeated. Default: all."),
    ] = None,
    transport: Annotated[
        list[str] | None,
        typer.Option(help=f"One of {', '.join(TRANSPORTS)}. May be repeated. Default: both."),
    ] = None,
    sizes: Annotated[
        str, typer.Option(help="Bytes that a rank contributes to an exchange, comma-separated: 512,64KiB,1M.")
    ] = "1KiB,8KiB,64KiB,512KiB,4MiB,32MiB",
    *,
    settings: dict[str, Any],
    plot: Annotated[
        Path | None, typer.Option(help="Write a page with plots and the table to this file.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Measure collectives between ranks: latency and goodput by size, over gloo and through shared memory.

    Started directly, it measures processes of this machine; under torchrun, the ranks of torchrun. Tables use
    shared memory if all ranks are on one host, and gloo otherwise; all-reduce uses gloo only. Latency is
    the median time of a call on its slowest rank. Goodput is the number of bytes that leave a rank per second
    (all-reduce: the bytes of the buffer).

    \b
    Patterns:
      all_reduce  float32
      even        all-to-all of float32 in equal parts
      uneven      ... in parts of 1, 1/2, 1/3, ...: rank 0 receives most
      ids         ... of int64 in small pieces, concatenated before and split after
      rows        ... of float32 rows, --dim wide

    \b
    Example:
      megalith bench comm
      megalith bench comm --ranks 4 --pattern rows --transport shared_memory
      megalith bench comm --ranks 4 --pattern rows --sizes 64KiB,1M --plot comm.html
      torchrun --nproc-per-node 2 -m megalith bench comm --json
    """
    with exit_on_error():
        chosen = CommSettings(
            patterns=tuple(pattern or PATTERNS),
            transports=tuple(transport or TRANSPORTS),
            sizes=tuple(map(_bytes, sizes.split(","))),
            **settings,
        )
        if plot is not None and not plot.parent.is_dir():
            raise InputError(f"--plot: {plot.parent} is not a directory")
        launch = _launch(ranks)
        num_ranks = launch.size if launch.launcher else ranks or 2
        stream = measure_launched(chosen, launch) if launch.launcher else measure_local(chosen, num_ranks)
        if launch.rank > 0:
            deque(stream, maxlen=0)
            return
        found = []
        with progress("measuring", chosen.num_points) as advance:
            for measurement in stream:
                found.append(measurement)
                advance(len(found))
        if plot is not None:
            try:
                plot.write_text(_page(num_ranks, found), encoding="utf-8")
            except OSError as error:
                raise InputError(f"--plot: {plot} cannot be written: {error.strerror}") from None
    left_out = chosen.num_points - len(found)
    if as_json:
        about = {"ranks": num_ranks, "machine": _machine(), "settings": asdict(chosen)}
        results = [asdict(measurement) for measurement in found]
        print_json({"date": date.today().isoformat(), **about, "results": results, "left_out": left_out})
        return
    out = console()
    out.print(_grid(num_ranks, found))
    if left_out:
        alone = launch.local_size < launch.size and not any(m.transport == "shared_memory" for m in found)
        reason = "the ranks are on several hosts or --budget" if alone else "--budget"
        out.print(Text(f"not measured: {left_out} of {chosen.num_points}, because {reason} was used up"))
    if plot is not None:
        out.print(Text(f"plots: {plot}"))


def _launch(ranks: int | None) -> Launch:
    """The launcher's ranks, if there is a launcher. Raises InputError if their number is not `ranks`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no launcher", LaunchWarning)
        launch = read_launch()
    if launch.launcher and (launch.size < 2 or ranks not in (None, launch.size)):
        raise InputError(
            f"{launch.launcher} started {launch.size} rank(s), but {ranks or 'at least two'} are needed: "
            "start that number of ranks, or run the command without a launcher"
        )
    return launch


def _bytes(text: str) -> int:
    found = re.fullmatch(r"\s*([0-9]{1,12})\s*([kmg]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if found is None:
        raise InputError(f"--sizes: {text!r} is not a number of bytes such as 512, 64KiB or 1M")
    return int(found[1]) * _UNITS[found[2].lower()]


def _grid(ranks: int, found: Sequence[Measurement]) -> Table:
    table = grid(_HEAD, left=("pattern", "transport"), title=_title(ranks))
    for before, each in zip([None, *found], found, strict=False):
        same = before is not None and before.pattern == each.pattern
        if before is not None and not same:
            table.add_section()
        table.add_row("" if same else _PATTERN_NAMES[each.pattern], *_cells(each))
    return table


# ---- the results as table cells, and as one HTML page with two plots

_HEAD = ("pattern", "transport", "bytes per rank", "latency", "best", "goodput", "calls")
_PATTERN_NAMES = {
    "all_reduce": "all-reduce",
    "even": "all-to-all, even",
    "uneven": "all-to-all, uneven",
    "ids": "all-to-all, ids",
    "rows": "all-to-all, rows",
}
_TRANSPORT_NAMES = {"gloo": "gloo", "shared_memory": "shared memory"}
_STYLE = (
    ":root{color-scheme:light dark} h1{font-size:20px} body{margin:24px auto;max-width:1100px;padding:0 16px;"
    "font:15px/1.5 system-ui,'DejaVu Sans',sans-serif} table{border-collapse:collapse;margin-top:24px}"
    ".plots{display:grid;gap:20px;grid-template-columns:repeat(auto-fit,minmax(min(100%,420px),1fr))}"
    "th,td{padding:2px 16px 2px 0;text-align:right;font-size:13px;white-space:nowrap}"
    "th:nth-child(-n+2),td:nth-child(-n+2){text-align:left} main{overflow-x:auto}"
    ".bar{width:240px;height:11px;background:linear-gradient(90deg,transparent 79px,currentColor 79px,"
    "currentColor 81px,transparent 81px)} .bar i{display:block;height:11px;background:#2a6fbb;opacity:.75}"
)


def _machine() -> dict[str, Any]:
    """Return the machine and versions that a result belongs to."""
    return {
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "backend": "gloo",
    }


def _title(ranks: int) -> str:
    """Return the title of a result measured on this machine with this number of ranks."""
    found = _machine()
    return f"{ranks} ranks, gloo and shared memory, {found['cores']} cores, torch {found['torch']}"


def _cells(measurement: Measurement) -> list[str]:
    """Return the columns of _HEAD after the pattern."""
    return [
        _TRANSPORT_NAMES[measurement.transport],
        show_bytes(measurement.size),
        _span(measurement.latency),
        _span(measurement.best),
        f"{show_bytes(measurement.goodput)}/s",
        str(measurement.calls),
    ]


def _page(ranks: int, found: Sequence[Measurement]) -> str:
    """Return a self-contained HTML page with plots of latency and goodput and a table."""
    x = Axis("bytes per rank", log=True)
    plots = []
    for transport in dict.fromkeys(m.transport for m in found):
        own, name = [m for m in found if m.transport == transport], _TRANSPORT_NAMES[transport]
        latency, goodput = _series(own, "latency", 1e6), _series(own, "goodput", 1e-6)
        plots += [
            line_chart(f"Latency by size, {name}", latency, x, Axis("latency, us", log=True)),
            line_chart(f"Goodput by size, {name}", goodput, x, Axis("goodput, MB/s", log=True)),
        ]
    rows = [_html_row("th", _HEAD)]
    rows += [_html_row("td", (_PATTERN_NAMES[each.pattern], *_cells(each))) for each in found]
    body = f'<div class="plots">{"".join(plots)}</div><main><table>{"".join(rows)}</table></main>'
    return _document(f"Communication: {_title(ranks)}", body)


def _html_row(cell: str, texts: Sequence[str], last: str = "") -> str:
    """Return a row of a table; `last` is the HTML of one more cell."""
    cells = "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts)
    return f"<tr>{cells}{f'<{cell}>{last}</{cell}>' if last else ''}</tr>"


def _document(heading: str, body: str) -> str:
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(heading)}</title>'
        f"<style>{_STYLE}{charts.STYLE}</style></head><body><h1>{escape(heading)}</h1>{body}</body></html>\n"
    )


def _span(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e6:.3g} us"


def _series(found: Sequence[Measurement], field: str, scale: float) -> list[Series]:
    return [
        Series(
            _PATTERN_NAMES[pattern],
            [(float(m.size), getattr(m, field) * scale) for m in found if m.pattern == pattern],
            "line and points",
            colour=list(_PATTERN_NAMES).index(pattern),
        )
        for pattern in dict.fromkeys(m.pattern for m in found)
    ]
