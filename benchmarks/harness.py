"""Timing, comparison and reports for all benchmarks.

Variants run in one process and take turns, each round on other batches and in another order. Two variants are
compared by the ratio of their times in each round; the median and the quartiles of these ratios are reported.
`run_sections` is the command of benchmarks that consist of sections. This module does not depend on tables or
peers.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any, TypeVar

RESULTS = Path(__file__).parent / "results"


# ---- timing


@dataclass(frozen=True)
class Spread:
    """A median with its quartiles."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        if len(numbers) < 2:
            return cls(numbers[0], numbers[0], numbers[0])
        low, median, high = statistics.quantiles(numbers, n=4, method="inclusive")
        return cls(median, low, high)

    def __str__(self) -> str:
        return f"{self.median:.2f} [{self.low:.2f}-{self.high:.2f}]"


@dataclass(frozen=True)
class Timings:
    """Seconds of each variant, one number per round."""

    seconds: Mapping[str, list[float]]

    def median(self, variant: str) -> float:
        return statistics.median(self.seconds[variant])

    def ratio(self, slow: str, fast: str) -> Spread:
        """Time of `slow` / time of `fast`, paired by round."""
        pairs = zip(self.seconds[slow], self.seconds[fast], strict=True)
        return Spread.of([a / b for a, b in pairs])


Batch = TypeVar("Batch")


def interleave(
    variants: Mapping[str, Callable[[Batch], object]],
    batches: Sequence[Batch],
    rounds: int,
    clock: Callable[[], float] = time.thread_time,
) -> Timings:
    """Times every variant once per round, after one round that is not counted.

    In a round each variant gets a different batch, so that none benefits from cache contents of another; the
    order of the variants and their batches rotate from round to round.
    """
    names = list(variants)
    stride = max(1, len(batches) // len(names))
    seconds: dict[str, list[float]] = {name: [] for name in names}
    gc.collect()
    gc.disable()
    try:
        for r in range(rounds + 1):
            for v in range(len(names)):
                number = (v + r) % len(names)
                batch = batches[(r + number * stride) % len(batches)]
                call = variants[names[number]]
                start = clock()
                result = call(batch)
                elapsed = clock() - start
                del result
                if r > 0:
                    seconds[names[number]].append(elapsed)
    finally:
        gc.enable()
    return Timings(seconds)


def busiest_thread(work: Callable[[], object]) -> tuple[float, float]:
    """Returns the CPU seconds of the busiest thread, and the wall seconds."""
    before, start = _thread_seconds(), time.perf_counter()
    work()
    wall = time.perf_counter() - start
    return max(s - before.get(tid, 0.0) for tid, s in _thread_seconds().items()), wall


def _thread_seconds() -> dict[int, float]:
    # The kernel's number for "CPU clock of thread tid" (see clock_getcpuclockid).
    tids = [int(entry) for entry in os.listdir("/proc/self/task")]
    return {tid: time.clock_gettime((~tid << 3) | 6) for tid in tids}


def geometric_mean(numbers: Iterable[float]) -> float:
    logs = [math.log(x) for x in numbers]
    return math.exp(sum(logs) / len(logs))


# ---- memory of this process


def _kilobytes(path: str, field: str) -> int:
    for line in Path(path).read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1])
    return 0


def resident_bytes() -> int:
    return _kilobytes("/proc/self/smaps_rollup", "Rss") * 1024


def huge_page_bytes() -> int:
    """Returns the size of this process's anonymous memory on huge pages."""
    return _kilobytes("/proc/self/smaps_rollup", "AnonHugePages") * 1024


# ---- targets


@dataclass(frozen=True)
class Bar:
    """A target for a measured number: at least `required`, or at most if `at_most`.

    `required` None marks a number that is only reported. `note` names the workloads it covers.
    """

    name: str
    measured: float
    required: float | None = None
    goal: float | None = None
    at_most: bool = False
    strict: bool = False
    note: str = ""

    @property
    def verdict(self) -> str:
        if self.required is None:
            return "reported"
        if not self._reaches(self.required):
            return "MISSED"
        return "met" if self.goal is None or self._reaches(self.goal) else "met, goal missed"

    def _reaches(self, wanted: float) -> bool:
        if self.measured == wanted:
            return not self.strict
        return self.measured < wanted if self.at_most else self.measured > wanted

    @property
    def sign(self) -> str:
        return ("<" if self.at_most else ">") + ("" if self.strict else "=")

    def cells(self) -> tuple[str, ...]:
        required = "-" if self.required is None else f"{self.sign} {self.required:g}"
        goal = "-" if self.goal is None else f"{self.sign} {self.goal:g}"
        return (self.name, required, goal, f"{self.measured:.3g}", self.verdict, self.note)


def print_bars(bars: Sequence[Bar]) -> None:
    if not bars:
        return
    columns = ("target", "required", "goal", "measured", "verdict", "workloads")
    print_table("Targets (peer time / ours unless named otherwise)", columns, [b.cells() for b in bars])
    missed = [bar.name for bar in bars if bar.verdict == "MISSED"]
    print(f"MISSED: {'; '.join(missed)}" if missed else "every target is met")


# ---- output


def progress(text: str) -> None:
    """Prints a line of progress; a live display would use CPU time during measurements."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table, with rich if it is installed."""
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(r[i]) for r in (columns, *rows)) for i in range(len(columns))]
        print(f"\n{title}")
        for row in (columns, ["-" * w for w in widths], *rows):
            print("  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip())
        return
    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def machine() -> dict[str, Any]:
    """Returns a description of the hardware, without host names or paths."""
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    policy = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    chosen = policy.read_text().split("[")[-1].split("]")[0] if policy.exists() else "unknown"
    memory = _kilobytes("/proc/meminfo", "MemTotal") * 1024
    return {
        "cpu": model,
        "cores": os.cpu_count(),
        "memory_gib": round(memory / 2**30, 1),
        "transparent_huge_pages": chosen,
        "load_average_at_start": round(os.getloadavg()[0], 2),
    }


def versions(packages: Iterable[str]) -> dict[str, str]:
    """Returns the installed versions; an absent package is "not installed"."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def command_line(arguments: Sequence[str]) -> str:
    """Returns the command line without paths of this machine."""
    kept = [a for i, a in enumerate(arguments) if "--output" not in (a, arguments[max(0, i - 1)])]
    kept = [a for a in kept if not a.startswith("--output=")]
    return " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *kept])


def run_child(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Runs this benchmark again in a child process; returns the result it saves."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "result.json"
        command = [sys.executable, sys.argv[0], *arguments, "--output", str(output)]
        everything = {**os.environ, **environment}
        subprocess.run(command, env=everything, check=True, stdout=subprocess.DEVNULL)
        content: dict[str, Any] = json.loads(output.read_text())
    return content


# ---- a benchmark of several sections


class Run:
    """The sizes of a run and its results so far; a benchmark derives from it what its sections share."""

    def __init__(self, quick: bool) -> None:
        self.quick = quick
        self.sections: dict[str, Any] = {}
        self.bars: list[Bar] = []

    def bar(self, name: str, measured: float, required: float | None = None, **more: Any) -> None:
        self.bars.append(Bar(name, measured, required, **more))

    def facts(self) -> dict[str, Any]:
        """Returns what the result states in addition to machine and versions."""
        return {}


AnyRun = TypeVar("AnyRun", bound=Run)


def run_sections(
    benchmark: str,
    arguments: Sequence[str],
    new_run: Callable[[bool], AnyRun],
    sections: Mapping[str, Callable[[AnyRun], None]],
    packages: Sequence[str],
) -> None:
    """Runs the chosen sections, prints every target and saves the result.

    A full run saves results/BENCHMARK-DATE.json; a --quick or --only run saves only to the path given by
    --output. The result is saved after each section. A section that raises is listed under "errors": the
    others run, and the process ends with exit status 1.
    """
    parser = argparse.ArgumentParser(description=f"benchmarks/{benchmark}.py")
    parser.add_argument("--quick", action="store_true", help="small tables, few rounds")
    parser.add_argument("--only", default="", help=f"sections, of {','.join(sections)}")
    parser.add_argument("--output", type=Path, help="where to save the result as JSON")
    options = parser.parse_args(arguments)
    chosen = options.only.split(",") if options.only else list(sections)
    if unknown := [name for name in chosen if name not in sections]:
        parser.error(f"no section {', '.join(unknown)}; there are {', '.join(sections)}")
    content: dict[str, Any] = {
        "benchmark": benchmark,
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(packages),
    }
    for title in ("machine", "versions"):
        print(f"{title}: " + ", ".join(f"{k} {v}" for k, v in content[title].items()))
    output = options.output
    if output is None and not options.quick and not options.only:
        output = result_path(benchmark)
    run = new_run(options.quick)
    errors: dict[str, str] = {}
    for name in chosen:
        started = time.perf_counter()
        progress(f"{name} ...")
        try:
            sections[name](run)
        except Exception as error:
            traceback.print_exc()
            errors[name] = f"{type(error).__name__}: {error}"
        progress(f"{name}: {time.perf_counter() - started:.0f} s")
        content |= {**run.facts(), "sections": run.sections, "bars": run.bars, "errors": errors}
        if output is not None:
            write_result(output, content)
    print_bars(run.bars)
    if output is not None:
        progress(f"saved {output}")
    if errors:
        sys.exit("\n".join(f"section {name} failed: {error}" for name, error in errors.items()))


def result_path(name: str) -> Path:
    return RESULTS / f"{name}-{date.today().isoformat()}.json"


def write_result(path: Path, content: Mapping[str, Any]) -> None:
    """Saves a result as JSON with its date; dataclasses become objects, long floats are rounded."""
    path.parent.mkdir(parents=True, exist_ok=True)
    dated = {"date": date.today().isoformat(), **content}
    path.write_text(json.dumps(_plain(dated), indent=1) + "\n")


def _plain(value: Any) -> Any:
    if isinstance(value, Bar):
        return {**_plain(asdict(value)), "verdict": value.verdict}
    if isinstance(value, Spread):
        return _plain(asdict(value))
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value
