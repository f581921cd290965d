"""The HTML of a report: sections, cards and tables. All text is escaped."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from megalith.reporting.run_files import Absent

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
tr.best td { font-weight:600; } details summary { cursor:pointer; }
"""


def section(title: str, body: Callable[[], str]) -> str:
    """Return a section of the page."""
    try:
        content = body()
    except Absent as absent:
        content = f'<p class="muted">Not shown: {escape(str(absent))}.</p>'
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def plots(cards: Sequence[str], note: str = "") -> str:
    """Return cards side by side."""
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
    """Return a table of text."""
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


def facts_table(facts: Mapping[str, str]) -> str:
    """Return a table of names and values."""
    return html_table(None, [list(item) for item in facts.items()])
