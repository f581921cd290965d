"""The report of a run: one HTML page with numbers and plots that needs no network and no scripts.

The input is the files of a run (`RunFiles`): config.json, metrics.jsonl, evaluation.json, frequencies.json
and checkpoint/. A missing or damaged file is `Absent`, and its section reports that. All text is escaped.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from megalith.checkpoint import read_manifest
from megalith.checkpoint.manifest import full_name
from megalith.errors import InputError, MegalithError
from megalith.reporting import charts, inspection
from megalith.reporting.charts import Axis, Series, bar_chart, line_chart, scatter_chart, thin
from megalith.units import byte_unit, show_bytes, show_number, show_span, show_time

_MAX_BYTES = 1 << 28


class Absent(Exception):
    """The input of a section is missing; the message names it."""


class RunFiles:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = _optional(lambda: read_object(directory / "config.json"))
        self.evaluation = _optional(lambda: read_object(directory / "evaluation.json"))
        self.records, self.unread = _records(directory / "metrics.jsonl")

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        return [r for r in self.records if r.get("kind") == kind]

    def points(self, kind: str, field: str) -> list[tuple[float, float]]:
        pairs = [(finite_number(r.get("step")), finite_number(r.get(field))) for r in self.of_kind(kind)]
        return [(step, value) for step, value in pairs if step is not None and value is not None]

    @property
    def evaluated_before(self) -> str:
        """Which step the evaluation is of, if the run has continued since then. Otherwise empty."""
        step, newest = finite_number((self.evaluation or {}).get("step")), self.last("step")
        if step is None or newest is None or step == newest:
            return ""
        return f"step {show_number(step)} of {show_number(newest)}"

    def last(self, field: str) -> float | None:
        found = [finite_number(r.get(field)) for r in self.of_kind("train") or self.records]
        return next((value for value in reversed(found) if value is not None), None)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise Absent(f"{path.name} is too large to show")
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise Absent(f"{path.name} is missing") from None
    except (OSError, UnicodeDecodeError):
        raise Absent(f"{path.name} cannot be read") from None


def read_object(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(_text(path))
    except (ValueError, RecursionError):
        raise Absent(f"{path.name} is not valid JSON") from None
    if not isinstance(data, dict):
        raise Absent(f"{path.name} is not a JSON object")
    return data


def _records(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The lines that are JSON objects, and the number of other lines."""
    try:
        lines = [line for line in _text(path).splitlines() if line.strip()]
    except Absent:
        return [], 0
    records = []
    for line in lines:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            records.append(record)
    return records, len(lines) - len(records)


def _optional(read: Callable[[], dict[str, Any]]) -> dict[str, Any] | None:
    try:
        return read()
    except Absent:
        return None


def finite_number(value: Any) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        return float(value) if is_number and math.isfinite(value) else None
    except OverflowError:
        return None


STYLE = """
:root { color-scheme:light dark;
  --page:#f5f6f8; --card:#ffffff; --text:#1d232b; --muted:#5c6570; --edge:#dfe3e8; }
@media (prefers-color-scheme: dark) {
  :root { --page:#14181d; --card:#1d2229; --text:#e4e8ed; --muted:#9aa4b0; --edge:#2e353e; } }
* { box-sizing:border-box; }
body { margin:0; background:var(--page); color:var(--text);
  font:15px/1.5 system-ui, "DejaVu Sans", sans-serif; }
main { max-width:1180px; margin:0 auto; padding:28px 20px 60px; }
h1 { font-size:26px; margin:0 0 4px; overflow-wrap:anywhere; }
h2 { font-size:18px; margin:36px 0 10px; }
h3 { font-size:14px; margin:0 0 8px; font-weight:600; overflow-wrap:anywhere; }
p { margin:6px 0; } .muted { color:var(--muted); }
.numbers { display:flex; flex-wrap:wrap; gap:12px; margin-top:18px; } .number { flex:1 1 190px; }
.plots { display:grid; grid-template-columns:repeat(auto-fit, minmax(min(100%, 430px), 1fr)); gap:14px; }
.card { background:var(--card); border:1px solid var(--edge); border-radius:8px; padding:14px 16px;
  min-width:0; }
.number b { display:block; font-size:21px; line-height:1.3; overflow-wrap:anywhere; }
table { border-collapse:collapse; width:100%; } .scroll { overflow-x:auto; }
th, td { text-align:left; padding:6px 14px 6px 0; border-bottom:1px solid var(--edge);
  overflow-wrap:anywhere; }
td.value, th.value { text-align:right; font-variant-numeric:tabular-nums; }
td.value { white-space:nowrap; } th { overflow-wrap:normal; }
tr.best td { font-weight:600; } details summary { cursor:pointer; }
"""


def section(title: str, body: Callable[[], str]) -> str:
    try:
        content = body()
    except Absent as absent:
        content = f'<p class="muted">Not shown: {escape(str(absent))}.</p>'
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def plots(cards: Sequence[str], note: str = "") -> str:
    below = f'<p class="muted">{escape(note)}</p>' if note else ""
    return f'<div class="plots">{"".join(cards)}</div>{below}'


def card(title: str, body: str) -> str:
    return f'<div class="card"><h3>{escape(title)}</h3>{body}</div>'


def html_table(
    head: Sequence[str] | None,
    rows: Sequence[Sequence[str]],
    *,
    best: set[int] | None = None,
    plain: bool = False,
) -> str:
    value = "" if plain else ' class="value"'
    parts = []
    if head:
        names = [f"<th{value if i else ''}>{escape(name)}</th>" for i, name in enumerate(head)]
        parts.append(f"<thead><tr>{''.join(names)}</tr></thead>")
    for i, row in enumerate(rows):
        cells = [f"<td{value if j else ''}>{escape(cell)}</td>" for j, cell in enumerate(row)]
        mark = ' class="best"' if best and i in best else ""
        parts.append(f"<tr{mark}>{''.join(cells)}</tr>")
    return f'<div class="scroll"><table>{"".join(parts)}</table></div>'


MAX_POINTS, MEAN_POINTS = 300, 60
MAX_SERIES = 6
MAX_PERIODS = 10
MIN_ROWS = 30
"""Smallest number of rows of which an AUC is shown."""
MAX_AGE_CHARTS = 4
RUN_FILES = ("config.json", "metrics.jsonl", "evaluation.json", "frequencies.json", "checkpoint")
DASH = "\N{EN DASH}"
_COUNTERS = ("created", "evicted", "removed", "refused", "pending")


def write_report(run_dir: Path, out: Path | None = None, *, comparison: Path | None = None) -> Path:
    """Write the report of a run. The file is replaced as a whole."""
    if not any((run_dir / name).exists() for name in RUN_FILES):
        raise InputError(
            f"{run_dir} is not the directory of a run: it has none of {', '.join(RUN_FILES)}; give the "
            "directory that `megalith train --run` wrote"
        )
    run = RunFiles(run_dir)
    target = run_dir / "report.html" if out is None else out
    sections = [
        section("Learning", lambda: _learning(run)),
        *([section("Scored before training", lambda: _periods(run))] if run.of_kind("period") else []),
        section("Calibration", lambda: _calibration(run)),
        section("Table growth", lambda: _growth(run)),
        section("Id frequency", lambda: _frequency(run)),
        section("Age of rows", lambda: _ages(run)),
    ]
    if comparison is not None:
        sections.append(section("Comparison", lambda: _comparison(comparison)))
    sections.append(section("Configuration", lambda: _configuration(run)))
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".tmp")
    temporary.write_text(_page(run, sections), encoding="utf-8")
    os.replace(temporary, target)
    return target


# ---- sections


def _learning(run: RunFiles) -> str:
    if not run.records:
        raise Absent("metrics.jsonl is missing or has no records")
    note = "Training: each batch before its update."
    if run.unread:
        note += f" Lines of metrics.jsonl that could not be read: {run.unread}."
    return plots([_curves(run, "Loss", "loss", "loss"), _curves(run, "AUC", "auc", "AUC")], note)


def _curves(run: RunFiles, title: str, field: str, label: str) -> str:
    raw = run.points("train", field)
    if len(raw) > MEAN_POINTS:
        series = [Series("", thin(raw, MAX_POINTS), "faint", colour=0)]
        series.append(Series("training", thin(raw, MEAN_POINTS), colour=0))
    else:
        series = [Series("training", raw, "line and points", colour=0)]
    held_out = run.points("eval", field)
    if held_out:
        series.append(Series("validation", thin(held_out, MAX_POINTS), "line and points", colour=1))
    if not raw and not held_out:
        return card(title, f'<p class="muted">No record has {escape(field)}.</p>')
    of = "the training and the validation data" if held_out else "the training data"
    return card(f"{title} of {of}", line_chart(f"{title} over steps", series, Axis("step"), Axis(label)))


def _periods(run: RunFiles) -> str:
    """AUC by period of rows scored before the model was trained on them, and of those with new ids."""
    lines: list[dict[str, dict[str, Any]]] = []
    for record in run.of_kind("period"):
        new = record["new"] if isinstance(record.get("new"), dict) else {}
        known = {f"new {name}": numbers for name, numbers in new.items() if isinstance(numbers, dict)}
        lines.append({"all rows": record, **known})

    def auc(line: dict[str, dict[str, Any]], name: str) -> float | None:
        numbers = line.get(name, {})
        enough = (finite_number(numbers.get("samples")) or 0) >= MIN_ROWS
        return finite_number(numbers.get("auc")) if enough else None

    found: dict[str, list[tuple[float, float]]] = {}
    for number, line in enumerate(lines, start=1):
        for name in line:
            if (value := auc(line, name)) is not None:
                found.setdefault(name, []).append((number, value))
    shown = list(found)[:MAX_SERIES]
    if not shown:
        raise Absent(f"no period has {MIN_ROWS} rows with both labels")
    series = [Series(name, thin(found[name], MAX_POINTS), "line and points") for name in shown]
    chart = line_chart("AUC by period", series, Axis("number of the period"), Axis("AUC"))
    rows = [
        [
            str(line["all rows"].get("period")).replace("-", "\N{NON-BREAKING HYPHEN}"),
            _or_dash(finite_number(line["all rows"].get("samples")), show_number),
            _or_dash(finite_number(line["all rows"].get("loss")), _four_places),
            *(_or_dash(auc(line, name), _four_places) for name in shown),
        ]
        for line in lines[-MAX_PERIODS:]
    ]
    heads = [
        "period",
        "samples",
        "log loss",
        *(f"AUC {name.removeprefix('all rows')}".strip() for name in shown),
    ]
    note = "Each batch before the model was trained on it. New: rows with an id that had no row of its table"
    note += f" yet. AUCs of fewer than {MIN_ROWS} rows are not shown."
    left = len(found) - len(shown)
    note += f" Features not shown: {left}." if left else ""
    return plots([card("AUC by period", chart), card("Last periods", html_table(heads, rows))], note)


def _calibration(run: RunFiles) -> str:
    given = (run.evaluation or {}).get("calibration")
    bins = [b for b in given if isinstance(b, dict)] if isinstance(given, list) else []
    values = [[finite_number(b.get(key)) for key in ("predicted", "observed", "count")] for b in bins]
    full = [(p, o, c) for p, o, c in values if p is not None and o is not None and c is not None]
    full = [(p, o, c) for p, o, c in full if 0 <= p <= 1 and 0 <= o <= 1 and c > 0]
    if not full:
        raise Absent("evaluation.json is missing or has no calibration")
    points = Series("bins of predictions", [(p, o) for p, o, _ in full], sizes=[c for _, _, c in full])
    high = max(max(p, o) for p, o, _ in full)
    chart = scatter_chart(
        "Calibration: observed against predicted rate",
        [points],
        Axis("predicted rate", low=0, high=high),
        Axis("observed rate", low=0, high=high),
        diagonal=True,
    )
    total = sum(c for _, _, c in full)
    predicted, observed = (sum(v[i] * v[2] for v in full) / total for i in (0, 1))
    error = sum(abs(p - o) * c for p, o, c in full) / total
    facts = {
        "samples": show_number(total),
        "mean prediction": f"{predicted:.4f}",
        "observed rate": f"{observed:.4f}",
        "predicted / observed": f"{predicted / observed:.3f}" if observed else "no positives",
        "weighted mean error": f"{error:.4f}",
    }
    hint = "Points on the dashed line are calibrated. Below it, predictions are too high. Area: samples."
    numbers = f'{html_table(None, list(facts.items()))}<p class="muted">{hint}</p>'
    note = f"Evaluated at {run.evaluated_before}." if run.evaluated_before else ""
    return plots([card("Observed against predicted", chart), card("Statistics", numbers)], note)


def _growth(run: RunFiles) -> str:
    tables = _totals(run.records, "rows", lambda rows: rows)
    if not tables:
        raise Absent("metrics.jsonl is missing or has no row counts")
    shown, left = _largest(tables, lambda points: points[-1][1])
    series = [Series(name, thin(sorted(points), MAX_POINTS)) for name, points in shown.items()]
    rows = line_chart("Rows of each table over steps", series, Axis("step"), Axis("rows", low=0))
    cards = [card("Rows", rows), *_memory_card(run), *_policy_cards(run), *_tier_card(run)]
    return plots(cards, f"Smaller tables not shown: {left}." if left else "")


def _memory_card(run: RunFiles) -> list[str]:
    memory = run.points("train", "memory") or run.points("eval", "memory")
    if not memory:
        return []
    unit, size = byte_unit(max(value for _, value in memory))

    def line(name: str, points: list[tuple[float, float]]) -> Series:
        return Series(name, [(step, value / size) for step, value in thin(points, MAX_POINTS)])

    parts = _totals(run.of_kind("train"), "memory_parts", lambda parts: parts)
    shown = {name: points for name, points in parts.items() if any(value for _, value in points)}
    series = [line("memory", memory), *(line(name, points) for name, points in shown.items())]
    chart = line_chart("Memory over steps", series, Axis("step"), Axis(f"memory, {unit}", low=0))
    return [card("Memory of all tables", chart)]


def _policy_cards(run: RunFiles) -> list[str]:
    """Rows created, evicted and removed and ids refused: over steps, and by table at the end."""
    totals = _totals(run.of_kind("train"), "counters", _sum_over_tables)
    if not totals:
        return []
    series = [Series(name, thin(totals[name], MAX_POINTS)) for name in _COUNTERS if name in totals]
    chart = line_chart("Rows created, evicted and refused", series, Axis("step"), Axis("rows or ids", low=0))
    tables = [r["counters"] for r in run.records if isinstance(r.get("counters"), dict)][-1]
    lines = [
        [name, *(_or_dash(finite_number(counts.get(key)), show_number) for key in _COUNTERS)]
        for name, counts in tables.items()
        if isinstance(counts, dict)
    ]
    heads = ("table", *_COUNTERS)
    return [card("Rows created, evicted and refused", chart), card("By table", html_table(heads, lines))]


def _tier_card(run: RunFiles) -> list[str]:
    """The part of the rows in use that were in GPU memory, of tables with rows in host memory."""

    def rates(tables: dict[str, Any]) -> dict[str, Any]:
        return {name: use.get("hit_rate") for name, use in tables.items() if isinstance(use, dict)}

    found = _totals(run.of_kind("train"), "host_tier", rates)
    if not found:
        return []
    series = [Series(name, thin(points, MAX_POINTS)) for name, points in found.items()]
    chart = line_chart("Hit rate of GPU memory", series, Axis("step"), Axis("hit rate", low=0))
    return [card("Rows in use that were in GPU memory", chart)]


def _sum_over_tables(counters: dict[str, Any]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for counts in counters.values():
        for key, value in counts.items() if isinstance(counts, dict) else ():
            sums[key] = sums.get(key, 0.0) + (finite_number(value) or 0.0)
    return sums


def _totals(
    records: Sequence[Mapping[str, Any]], field: str, numbers: Callable[[dict[str, Any]], Mapping[str, Any]]
) -> dict[str, list[tuple[float, float]]]:
    """(step, value) of each number that a field of the records holds."""
    found: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        step, given = finite_number(record.get("step")), record.get(field)
        if step is None or not isinstance(given, dict):
            continue
        for name, value in numbers(given).items():
            if (number := finite_number(value)) is not None:
                found.setdefault(name, []).append((step, number))
    return found


def _frequency(run: RunFiles) -> str:
    data = read_object(run.directory / "frequencies.json")
    given = data.get("features")
    features, shares = {}, {}
    for name, feature in given.items() if isinstance(given, dict) else ():
        pairs, share = _histogram(feature)
        if pairs:
            features[name], shares[name] = pairs, share
    if not features:
        raise Absent("frequencies.json has no features")
    shown, left = _largest(features, lambda points: sum(ids for _, ids in points))
    series = [Series(name, _log_thin(points)) for name, points in shown.items()]
    chart = scatter_chart(
        "Id frequency: number of ids by number of occurrences",
        series,
        Axis("occurrences of an id", log=True),
        Axis("number of ids", log=True),
    )
    rows = [_concentration(name, points, shares[name]) for name, points in shown.items()]
    table = html_table(("feature", "ids", "seen once", "most frequent id"), rows)
    notes = [_counted(data, min(shares[name] for name in shown))]
    notes += [f"Features with fewer ids not shown: {left}."] if left else []
    return plots([card("Ids by frequency", chart), card("Statistics", table)], " ".join(notes).strip())


def _histogram(feature: Any) -> tuple[list[tuple[float, float]], float]:
    """(occurrences, number of ids), scaled to all ids, and the share of ids that were counted."""
    if not isinstance(feature, dict):
        return [], 1.0
    share = finite_number(feature.get("share"))
    share = share if share is not None and 0 < share <= 1 else 1.0
    given = feature.get("counts")
    points = [_pair(pair) for pair in given] if isinstance(given, list) else []
    good = [(times, ids / share) for times, ids in filter(None, points) if min(times, ids) > 0]
    return good, share


def _counted(data: Mapping[str, Any], share: float) -> str:
    samples, total = finite_number(data.get("samples")), finite_number(data.get("samples_of_run"))
    texts = []
    if samples is not None and total is not None:
        part = f"{show_number(samples)} of {show_number(total)} samples" if samples < total else "all samples"
        texts.append(f"Counted in {part} of the run.")
    if share < 1:
        texts.append(
            f"Features marked * are a sample of their ids, at least 1 in {show_number(1 / share)}: the "
            "occurrences of an id are exact, the number of ids is scaled up."
        )
    return " ".join(texts)


def _concentration(name: str, points: Sequence[tuple[float, float]], share: float) -> list[str]:
    ids = sum(n for _, n in points)
    total = sum(times * n for times, n in points)
    once = sum(n for times, n in points if times == 1)
    top = max(times for times, _ in points)
    mark = "*" if share < 1 else ""
    return [name + mark, show_number(ids), f"{once / ids:.1%}", f"{top / total:.2%} of all"]


def _ages(run: RunFiles) -> str:
    root = run.directory / "checkpoint"
    if not root.exists():
        raise Absent("checkpoint/ is missing")
    try:
        manifest = read_manifest(root)
        found = []
        for summary in inspection.summarize(manifest):
            entries = manifest.tables()[full_name(summary.collection, summary.name)]
            newest = inspection.newest_time(root, entries)
            if newest is not None:
                found.append((summary, newest, entries))
        if not found:
            raise Absent("the checkpoint has no rows")
        found.sort(key=lambda item: -item[0].rows)
        now = max(newest for _, newest, _ in found)
        cards = [
            _age_card(summary.name, inspection.measure_ages(root, entries, now=now))
            for summary, _, entries in found[:MAX_AGE_CHARTS]
        ]
    except MegalithError as error:
        raise Absent(f"the checkpoint cannot be read: {error}") from None
    left = len(found) - len(cards)
    note = f"Ages are relative to the newest update, {show_time(now)}."
    return plots(cards, f"{note} Smaller tables not shown: {left}." if left else note)


def _age_card(name: str, ages: inspection.Ages) -> str:
    bars = [(label, float(count)) for label, count in ages.bins]
    chart = bar_chart(f"Age of rows of {name}", bars, Axis("rows"), label="time since the last update")
    median = show_span(ages.median or 0)
    return card(f"{name}: {ages.rows:,} rows, median age {median}", chart)


def _comparison(path: Path) -> str:
    data = read_object(path)
    given = data.get("rows")
    rows = [row for row in given if isinstance(row, dict)] if isinstance(given, list) else []
    if not rows:
        raise Absent(f"{path.name} has no rows")
    aucs = [finite_number(row.get("auc")) for row in rows]
    best = max((a for a in aucs if a is not None), default=None)
    lines = [
        [
            str(row.get("name", "")),
            _or_dash(auc, _four_places),
            _or_dash(finite_number(row.get("log_loss")), _four_places),
            _or_dash(finite_number(row.get("bytes")), show_bytes),
        ]
        for row, auc in zip(rows, aucs, strict=True)
    ]
    marked = {i for i, auc in enumerate(aucs) if auc is not None and auc == best}
    body = html_table(("model", "AUC", "log loss", "memory of embeddings"), lines, best=marked)
    about = " · ".join(str(data[key]) for key in ("title", "date") if data.get(key))
    note = f'<p class="muted">{escape(str(data["note"]))}</p>' if data.get("note") else ""
    return f'<div class="card"><h3>{escape(about)}</h3>{body}{note}</div>'


def _configuration(run: RunFiles) -> str:
    config = read_object(run.directory / "config.json")
    rows = [[key, value] for key, value in _flat(config, "")]
    table = html_table(None, rows, plain=True)
    return f'<details class="card"><summary>{len(rows)} settings</summary>{table}</details>'


# ---- the summary


def _numbers(run: RunFiles) -> str:
    evaluation = run.evaluation or {}
    samples, seconds = run.last("samples"), run.last("seconds")
    rows = [r["rows"] for r in run.records if r.get("rows") and isinstance(r["rows"], dict)]
    counts = [finite_number(value) for value in rows[-1].values()] if rows else []
    speed = samples / seconds if samples is not None and seconds else None
    at = f", {run.evaluated_before}" if run.evaluated_before else ""
    shown = {
        "model": _named(run.config, "model", ("name", "kind", "class")),
        "data": _data_name(run.config),
        "samples trained": _or_dash(samples, show_number),
        "time": _or_dash(seconds, show_span),
        "samples / s": _or_dash(speed, lambda x: f"{x:,.0f}"),
        f"held-out AUC{at}": _or_dash(finite_number(evaluation.get("auc")), _four_places),
        f"held-out log loss{at}": _or_dash(finite_number(evaluation.get("log_loss")), _four_places),
        "rows": _or_dash(sum(c for c in counts if c is not None) if counts else None, show_number),
        "memory": _or_dash(run.last("memory"), show_bytes),
    }
    cards = [
        f'<div class="card number"><span class="muted">{escape(name)}</span><b>{escape(value)}</b></div>'
        for name, value in shown.items()
    ]
    return f'<div class="numbers">{"".join(cards)}</div>{_held_out_name(run)}'


def _data_name(config: Mapping[str, Any] | None) -> str:
    """The kind of the training data and, if it is read from files, their path."""
    kind, path = _named(config, "data", ("kind", "name")), _named(config, "data", ("path",))
    return kind if path == DASH else path if kind == DASH else f"{kind}: {path}"


def _held_out_name(run: RunFiles) -> str:
    """A line of HTML that names the data of the evaluation."""
    if run.evaluation is None:
        return ""
    path = _named(run.config, "data", ("test_path",))
    name = path if path != DASH else f"the held-out part of {_named(run.config, 'data', ('kind', 'name'))}"
    time = _named(run.config, "data", ("split_time",))
    name = f"rows since {time}" if path == DASH and time != DASH else name
    samples = _or_dash(finite_number(run.evaluation.get("samples")), show_number)
    return f'<p class="muted">{escape(f"Held-out data: {samples} samples of {name}.")}</p>'


def _named(config: Mapping[str, Any] | None, key: str, names: Sequence[str]) -> str:
    """config[key], or the first of `names` in it, if it is a string or a list."""
    found = (config or {}).get(key)
    if isinstance(found, dict):
        found = next((found[name] for name in names if isinstance(found.get(name), str | list)), None)
    if isinstance(found, list):
        found = ", ".join(map(str, found))
    return found if isinstance(found, str) and found else DASH


# ---- HTML


def _page(run: RunFiles, sections: Sequence[str]) -> str:
    name = escape(run.directory.resolve().name)
    steps = [step for r in run.records if (step := finite_number(r.get("step"))) is not None]
    about = f"{show_number(max(steps))} steps" if steps else "no steps recorded"
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Megalith run {name}</title><style>{STYLE}{charts.STYLE}</style></head>"
        f'<body><main><h1>Run {name}</h1><p class="muted">Megalith · {about}</p>'
        f"{_numbers(run)}{''.join(sections)}</main></body></html>\n"
    )


# ---- helpers


def _four_places(value: float) -> str:
    return f"{value:.4f}"


def _or_dash(value: float | None, show: Callable[[float], str]) -> str:
    return DASH if value is None else show(value)


def _pair(pair: Any) -> tuple[float, float] | None:
    if not isinstance(pair, list) or len(pair) != 2:
        return None
    a, b = finite_number(pair[0]), finite_number(pair[1])
    return None if a is None or b is None else (a, b)


def _largest(
    named: Mapping[str, list[tuple[float, float]]], size: Callable[[list[tuple[float, float]]], float]
) -> tuple[dict[str, list[tuple[float, float]]], int]:
    """The largest series, and the number of others."""
    order = sorted(named, key=lambda name: -size(named[name]))
    return {name: named[name] for name in order[:MAX_SERIES]}, max(0, len(order) - MAX_SERIES)


def _log_thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """One of the points that coincide on a log-log plot."""
    kept: dict[tuple[int, int], tuple[float, float]] = {}
    for a, b in points:
        kept.setdefault((round(40 * math.log10(a)), round(40 * math.log10(b))), (a, b))
    return list(kept.values())


def _flat(data: Any, path: str) -> list[tuple[str, str]]:
    """Nested settings as (path, value)."""
    if isinstance(data, dict) and data:
        return [pair for key, value in data.items() for pair in _flat(value, f"{path}.{key}".lstrip("."))]
    return [(path, _shown(data))]


def _shown(value: Any) -> str:
    if value is None:
        return DASH
    if isinstance(value, float) and not math.isfinite(value):
        return "not finite"
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return value if isinstance(value, str) else json.dumps(value)
