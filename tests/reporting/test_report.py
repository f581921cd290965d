"""The report: its content, that it is self-contained, and its layout in headless Chromium."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import Adagrad, EmbeddingCollection, Feature, TableConfig, checkpoint
from megalith.errors import InputError
from megalith.reporting.report import write_report

SECTIONS = ["Learning", "Calibration", "Table growth", "Id frequency", "Age of rows", "Configuration"]
NEWEST = 1_000_000_000
HOSTILE = '"><script>alert(1)</script>&amp;<b>'

# Marks every label that leaves its chart or overlaps another one. Slanted labels are parallel: their boxes
# overlap where they do not.
LAYOUT_PROBE = """<script>
const wrong = [];
for (const svg of document.querySelectorAll('svg.chart')) {
  const frame = svg.getBoundingClientRect();
  const labels = [...svg.querySelectorAll('text')].map(t => ({
    text: t.textContent, box: t.getBoundingClientRect(), slanted: !!t.getAttribute('transform') }));
  labels.forEach((a, i) => {
    if (a.box.left < frame.left - 1 || a.box.right > frame.right + 1 ||
        a.box.top < frame.top - 1 || a.box.bottom > frame.bottom + 1) wrong.push('outside: ' + a.text);
    labels.slice(i + 1).forEach(b => {
      if (a.slanted && b.slanted) return;
      if (Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left) > 1 &&
          Math.min(a.box.bottom, b.box.bottom) - Math.max(a.box.top, b.box.top) > 2)
        wrong.push(a.text + ' over ' + b.text);
    });
  });
}
if (document.documentElement.scrollWidth > window.innerWidth) wrong.push('the page is too wide');
document.body.dataset.found = JSON.stringify({
  wrong, charts: document.querySelectorAll('svg.chart').length,
  page: getComputedStyle(document.body).backgroundColor,
  line: getComputedStyle(document.querySelector('svg.chart .line')).stroke });
</script>"""


# ---- a run


def write_lines(path: Path, records: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def records(steps: int, tables: list[str]) -> list[dict[str, Any]]:
    made: list[dict[str, Any]] = []
    for step in range(0, steps, 10):
        fall = math.exp(-step / 300)
        common = {"step": step, "samples": step * 100, "seconds": step * 0.5}
        loss, auc = 0.55 + 0.14 * fall + 0.01 * math.sin(step), 0.78 - 0.2 * fall
        rows = {name: int(1000 * (i + 1) * (1 - fall)) for i, name in enumerate(tables)}
        numbers = {"loss": loss, "auc": auc if step else None, "rows": rows, "memory": step << 12}
        made.append({"kind": "train", **common, **numbers})
        if step % 250 == 240:
            made.append({"kind": "eval", **common, "loss": loss + 0.01, "auc": auc - 0.01, "rows": {}})
    return made


def save_checkpoint(path: Path, names: list[str]) -> None:
    tables = [TableConfig(name, dim=2, optimizer=Adagrad(0.1)) for name in names]
    collection = EmbeddingCollection(tables, [Feature(name, name) for name in names])
    for i, table in enumerate(collection.shards.local.values()):
        for k in range(24):
            ids = torch.arange(k * 10, k * 10 + 5 + 2 * k)
            table.assign(ids, torch.ones(len(ids), 2), time=NEWEST - 4**k // (i + 1) % 400_000_000)
    checkpoint.save(collection, path)


def write_frequencies(root: Path, counts: dict[str, Any], share: float = 1.0, samples: int = 199_000) -> None:
    features = {name: {"share": share, "occurrences": 0, "counts": pairs} for name, pairs in counts.items()}
    data = {"samples": samples, "samples_of_run": 199_000, "features": features}
    (root / "frequencies.json").write_text(json.dumps(data))


def make_run(root: Path, names: list[str]) -> Path:
    root.mkdir()
    config = {"model": {"name": "deepfm", "dim": 16}, "data": {"kind": "movielens"}, "train": {"lr": 0.001}}
    (root / "config.json").write_text(json.dumps(config))
    write_lines(root / "metrics.jsonl", records(2000, names))
    bins = [
        {"predicted": (i + 0.5) / 20, "observed": min(1.0, (i + 0.7) / 20), "count": 50 * i * (20 - i)}
        for i in range(20)
    ]
    evaluation = {"samples": 66_500, "auc": 0.78125, "log_loss": 0.55, "calibration": bins}
    (root / "evaluation.json").write_text(json.dumps(evaluation))
    counts = [[n, max(1, 20_000 // n**2)] for n in range(1, 300)]
    write_frequencies(root, {name: counts[i:] for i, name in enumerate(names)})
    save_checkpoint(root / "checkpoint", names)
    return root


def comparison(path: Path) -> Path:
    rows = [
        {"name": "Megalith", "auc": 0.7812, "log_loss": 0.55, "bytes": 5 << 20},
        {"name": "fixed table, ids hashed", "auc": 0.77, "log_loss": 0.56, "bytes": 5 << 20},
    ]
    data = {"title": "MovieLens-1M", "date": "2026-11-01", "rows": rows, "note": "One epoch."}
    path.write_text(json.dumps(data))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return make_run(tmp_path / "demo", ["user", "item"])


def section(page: str, title: str) -> str:
    found = re.search(rf"<h2>{title}</h2>(.*?)</section>", page, re.DOTALL)
    assert found, title
    return found[1]


def numbers(page: str) -> dict[str, str]:
    return dict(re.findall(r'class="card number"><span class="muted">(.*?)</span><b>(.*?)</b>', page))


# ---- content


def test_the_summary(run: Path) -> None:
    path = write_report(run)
    assert path == run / "report.html"
    assert numbers(path.read_text()) == {
        "model": "deepfm",
        "data": "movielens",
        "samples trained": "199,000",
        "time": "16.6 minutes",
        "samples / s": "200",
        "held-out AUC": "0.7812",
        "held-out log loss": "0.5500",
        "rows": "2,995",
        "memory": "7.8 MiB",
    }


def test_every_section_has_its_charts(run: Path) -> None:
    page = write_report(run).read_text()
    charts = {title: section(page, title).count("<svg") for title in SECTIONS}
    assert charts == {
        "Learning": 2,
        "Calibration": 1,
        "Table growth": 2,
        "Id frequency": 1,
        "Age of rows": 2,
        "Configuration": 0,
    }
    assert "Not shown" not in page
    assert "<td>train.lr</td><td>0.001</td>" in section(page, "Configuration")
    assert "2001-09-09 01:46:40 UTC" in section(page, "Age of rows")
    assert "<h2>Comparison" not in page


def test_the_comparison_is_a_table_with_the_best_marked(run: Path, tmp_path: Path) -> None:
    out = write_report(run, tmp_path / "new" / "page.html", comparison=comparison(tmp_path / "c.json"))
    assert out == tmp_path / "new" / "page.html"
    shown = section(out.read_text(), "Comparison")
    assert "MovieLens-1M · 2026-11-01" in shown
    assert '<tr class="best"><td>Megalith</td><td class="value">0.7812</td>' in shown
    assert shown.count('class="best"') == 1
    assert "5.0 MiB" in shown
    assert "One epoch." in shown


def test_calibration_in_numbers(run: Path) -> None:
    bins = [
        {"predicted": 0.2, "observed": 0.1, "count": 300},
        {"predicted": 0.6, "observed": 0.5, "count": 100},
        {"predicted": None, "observed": None, "count": 0},
    ]
    (run / "evaluation.json").write_text(json.dumps({"calibration": bins}))
    shown = section(write_report(run).read_text(), "Calibration")
    for name, value in {
        "samples": "400",
        "mean prediction": "0.3000",
        "observed rate": "0.2000",
        "predicted / observed": "1.500",
        "weighted mean error": "0.1000",
    }.items():
        assert f'<td>{name}</td><td class="value">{value}</td>' in shown


def test_frequencies_of_a_sample_are_scaled_and_marked(run: Path) -> None:
    write_frequencies(run, {"user": [[1, 6], [2, 3], [8, 1]]}, share=0.25, samples=99_500)
    shown = section(write_report(run).read_text(), "Id frequency")
    assert '<td>user*</td><td class="value">40</td><td class="value">60.0%</td>' in shown
    assert "Counted in 99,500 of 199,000 samples of the run." in shown
    assert "a sample of their ids, at least 1 in 4" in shown


def test_the_held_out_data_is_named(run: Path) -> None:
    cards = write_report(run).read_text().partition("<section>")[0]
    assert "Held-out data: 66,500 samples of the held-out part of movielens." in cards
    data = {"kind": "parquet", "path": "week-*.parquet", "test_path": "week-9.parquet"}
    (run / "config.json").write_text(json.dumps({"data": data}))
    page = write_report(run).read_text()
    assert numbers(page)["data"] == "parquet: week-*.parquet"
    assert "Held-out data: 66,500 samples of week-9.parquet." in page.partition("<section>")[0]


@pytest.mark.parametrize(
    ("missing", "title"),
    [
        ("metrics.jsonl", "Learning"),
        ("metrics.jsonl", "Table growth"),
        ("evaluation.json", "Calibration"),
        ("frequencies.json", "Id frequency"),
        ("checkpoint", "Age of rows"),
        ("config.json", "Configuration"),
    ],
)
def test_a_section_without_input_reports_that_and_the_others_stay(
    run: Path, missing: str, title: str
) -> None:
    shutil.move(run / missing, run.parent / "away")
    page = write_report(run).read_text()
    assert f"Not shown: {missing}" in section(page, title)
    absent = [t for t in SECTIONS if "Not shown" in section(page, t)]
    assert absent == (["Learning", "Table growth"] if missing == "metrics.jsonl" else [title])


@pytest.mark.parametrize("name", ["", "missing"])
def test_a_directory_without_a_run_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"not the directory of a run.*megalith train --run"):
        write_report(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "[" * 100_000, "\x00", '{"calibration": 3}'])
def test_damaged_files_are_reported_as_not_shown(run: Path, text: str) -> None:
    for name in ("config.json", "metrics.jsonl", "evaluation.json", "frequencies.json"):
        (run / name).write_text(text)
    (run / "checkpoint" / "manifest.json").write_text(text)
    (run.parent / "c.json").write_text(text)
    page = write_report(run, comparison=run.parent / "c.json").read_text()
    usable = 2 if text.startswith('{"') else 0  # a configuration, and a record without numbers
    assert page.count("Not shown") == len([*SECTIONS, "Comparison"]) - usable


def test_odd_records_are_left_out(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    odd = [
        '{"kind": "train", "step": NaN, "loss": Infinity, "auc": -Infinity}',
        '{"kind": "train", "step": 5, "loss": "low", "rows": [1], "memory": true}',
        '{"step": ' + "9" * 400 + "}",
        "[1, 2]",
        '{"kind": "tra',
    ]
    (run / "metrics.jsonl").write_text("\n".join([*lines, *odd]))
    page = write_report(run).read_text()
    assert "Lines of metrics.jsonl that could not be read: 2." in section(page, "Learning")
    assert section(page, "Learning").count("<svg") == 2
    assert not re.search("NaN|Infinity|undefined", page)


def test_a_damaged_checkpoint_is_named(run: Path) -> None:
    piece = next((run / "checkpoint").rglob("0-*.safetensors"))
    piece.write_bytes(b"x" * 100)
    assert "its manifest states" in section(write_report(run).read_text(), "Age of rows")


def test_many_tables_and_features_are_cut_and_counted(tmp_path: Path) -> None:
    root = make_run(tmp_path / "wide", [f"feature number {i}" for i in range(26)])
    page = write_report(root).read_text()
    assert "Smaller tables not shown: 20." in section(page, "Table growth")
    assert "Features with fewer ids not shown: 20." in section(page, "Id frequency")
    assert "Smaller tables not shown: 22." in section(page, "Age of rows")


# ---- safety


def test_everything_a_run_names_is_escaped(tmp_path: Path) -> None:
    root = make_run(tmp_path / "<i>run", [HOSTILE, "item"])
    config = {"model": HOSTILE, "data": {"kind": HOSTILE}, HOSTILE: [HOSTILE], "x": float("nan")}
    (root / "config.json").write_text(json.dumps(config))
    other = {"title": HOSTILE, "date": HOSTILE, "note": HOSTILE, "rows": [{"name": HOSTILE, "auc": HOSTILE}]}
    (tmp_path / "c.json").write_text(json.dumps(other))
    page = write_report(root, comparison=tmp_path / "c.json").read_text()
    assert "<script" not in page
    assert "<i>" not in page
    assert "&amp;<b>" not in page
    assert HOSTILE in unescape(page)
    assert "NaN" not in page


def test_the_page_is_self_contained(run: Path, tmp_path: Path) -> None:
    page = write_report(run, comparison=comparison(tmp_path / "c.json")).read_text()
    assert not re.search(r"https?:|//|src=|href=|url\(|@import|<script|<link|<iframe", page)
    assert "default-src 'none'" in page


def test_writing_again_replaces_the_page_and_leaves_nothing_else(run: Path) -> None:
    before = {path.name for path in run.iterdir()}
    first = write_report(run).read_bytes()
    assert write_report(run).read_bytes() == first
    assert {path.name for path in run.iterdir()} == before | {"report.html"}


# ---- in a browser


def probe(tmp_path: Path, page: Path, width: int, *flags: str) -> tuple[str, dict[str, Any]]:
    """The page as headless Chromium has it, and what LAYOUT_PROBE found in it."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if program is None:
        pytest.fail(
            "the report is looked at in a browser, and there is none: "
            "apt-get install -y chromium fonts-dejavu-core"
        )
    copy = tmp_path / "probed.html"  # its policy permits the probe too
    text = page.read_text().replace("default-src 'none'", "default-src 'none'; script-src 'unsafe-inline'")
    copy.write_text(text.replace("</body>", f"{LAYOUT_PROBE}</body>"))
    plain = "headless no-sandbox disable-gpu disable-quic no-first-run disable-background-networking"
    plain += " disable-component-update disable-sync hide-scrollbars dump-dom"
    command = [program, *(f"--{flag}" for flag in plain.split()), f"--user-data-dir={tmp_path / 'profile'}"]
    command += [f"--window-size={width},1000", *flags, copy.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r'data-found="(.*?)"', dom)
    assert found is not None
    return dom, json.loads(unescape(found[1]))


@pytest.mark.parametrize(
    ("width", "names", "flags", "page_colour", "line_colour"),
    [
        (1280, ["user", "item"], [], "rgb(245, 246, 248)", "rgb(42, 111, 187)"),
        (
            560,
            [f"feature number {i} of many" for i in range(9)],
            ["--blink-settings=preferredColorScheme=0"],  # dark
            "rgb(20, 24, 29)",
            "rgb(108, 176, 245)",
        ),
    ],
)
def test_a_browser_shows_every_section_in_its_colours_and_labels_have_room(
    tmp_path: Path, width: int, names: list[str], flags: list[str], page_colour: str, line_colour: str
) -> None:
    page = write_report(make_run(tmp_path / "demo", names), comparison=comparison(tmp_path / "c.json"))
    dom, found = probe(tmp_path, page, width, *flags)
    for title in [*SECTIONS, "Comparison"]:
        assert f"<h2>{title}</h2>" in dom
    assert not re.search("NaN|undefined", dom)
    charts = 6 + min(len(names), 4)
    assert found == {"wrong": [], "charts": charts, "page": page_colour, "line": line_colour}
