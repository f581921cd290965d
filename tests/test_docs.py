"""Every Python snippet of the README, the pages and the notebook runs and prints what its comments say.

Links lead to pages that exist, and what is generated is what the tree holds: diagrams, benchmarks, the API.
"""

import ast
import contextlib
import importlib
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest
from docs import benchmark_page, diagrams, generated_pages

from tests.test_docstrings import PUBLIC

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def claims(code: str) -> list[tuple[ast.stmt, str]]:
    """Each statement, and what its comments say that it prints: those on its lines and directly below it."""
    comments = {
        token.start[0]: token.string.removeprefix("#").strip()
        for token in tokenize.generate_tokens(io.StringIO(code).readline)
        if token.type == tokenize.COMMENT
    }
    found = []
    for statement in ast.parse(code).body:
        last = statement.end_lineno or statement.lineno
        lines = [n for n in range(statement.lineno, last + 1) if n in comments]
        while last + 1 in comments and code.splitlines()[last].startswith("#"):
            lines.append(last := last + 1)
        found.append((statement, " ".join(comments[n] for n in lines)))
    return found


def says(claim: str, printed: str) -> bool:
    """Whether a comment states the output: as it is, or followed by an explanation; "..." is any text."""
    text = " ".join(printed.split())
    wanted = ".*".join(map(re.escape, claim.split("...")))
    return bool(re.fullmatch(wanted, text)) or any(claim.startswith(text + mark) for mark in ":;,")


def result(options: str = "", **measured: float) -> str:
    common = {"required": 3.5, "at_most": False, "strict": False, "note": ""}
    bars = [
        {**common, "name": name, "measured": value, "verdict": "met" if value > 3.5 else "MISSED"}
        for name, value in measured.items()
    ]
    machine = {"cpu": "Test CPU", "cores": 2, "load_average_at_start": 1.0}
    content = {"benchmark": "train_cpu", "command": f"python train_cpu.py {options}", "machine": machine}
    return json.dumps({**content, "versions": {"torch": "2.13.0"}, "bars": bars})


ELSEWHERE = {
    "docs/guides/frameworks.md": "needs Lightning: tests/integrations/test_frameworks_page.py runs it",
    "docs/guides/servers.md": "needs Ray: tests/ps/worker/shards_tests.py runs it",
    "docs/guides/server-training.md": "needs Ray: tests/distributed/test_server_training.py runs it",
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if snippets(p) and name_of(p) not in ELSEWHERE], ids=name_of
)
def test_snippets_run_and_print_what_their_comments_say(page: Path) -> None:
    scope: dict[str, object] = {}
    for number, code in enumerate(snippets(page), start=1):
        name = f"{page.name} snippet {number}"
        for statement, claim in claims(code):
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(ast.Module([statement], []), name, "exec"), scope)
            prints = printed.getvalue() or ast.unparse(statement).startswith("print(")
            if prints and claim:
                assert says(claim, printed.getvalue()), (name, claim, printed.getvalue())


def test_pages_link_to_files_that_exist() -> None:
    generated = {ROOT / "docs" / path: text for path, text in generated_pages.generated_pages().items()}
    for page, text in {**{page: page.read_text() for page in PAGES}, **generated}.items():
        for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
            path = (page.parent / target).resolve()
            assert path.exists() or path in generated, f"{name_of(page)} links to {target}"


def test_the_navigation_and_the_start_page_have_every_page() -> None:
    docs = ROOT / "docs"
    pages = {page.relative_to(docs).as_posix() for page in PAGES if page.is_relative_to(docs)} - {"index.md"}
    navigation = set(re.findall(r"[\w/-]+\.md(?=\s*$)", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE))
    start = set(re.findall(r"\]\(([^)#:]+\.md)\)", (docs / "index.md").read_text()))
    assert not pages - navigation, "add a line to `nav` of mkdocs.yml"
    assert not pages - start, "add a row to docs/index.md"


def test_columns_of_tables_have_names() -> None:
    for page in PAGES:
        for header in re.findall(r"^(\|.*\|)\n\|(?: *:?-+:? *\|)+$", page.read_text(), re.MULTILINE):
            assert all(cell.strip() for cell in header[1:-1].split("|")), f"{name_of(page)}: {header}"


def test_the_api_reference_has_every_public_name() -> None:
    pages = generated_pages.api_pages()
    for package in set(PUBLIC) - {"megalith"}:
        text = pages[generated_pages.api_path(package)]
        module = importlib.import_module(package)
        lacking = [name for name in module.__all__ if f"::: {package}.{name}\n" not in text]
        assert lacking == [name for name in lacking if isinstance(vars(module).get(name), type(ast))], package
    names = importlib.import_module("megalith").__all__
    assert [name for name in names if f"[`{name}`]" not in pages["reference/api/index.md"]] == ["checkpoint"]


def test_the_page_of_options_has_every_command() -> None:
    text = generated_pages.options_page()
    for name in ("megalith train", "megalith serve", "megalith checkpoint ls", "megalith bench comm"):
        assert f"\n## {name}\n" in text
    assert "| `--publish-interval` | " in text


def test_diagrams_are_what_their_script_draws() -> None:
    for name, svg in diagrams.pictures().items():
        assert (diagrams.IMAGES / name).read_text() == svg, "run `python docs/diagrams.py`"


def test_the_benchmark_page_is_what_its_script_writes() -> None:
    found = benchmark_page.read_results()
    assert benchmark_page.PAGE.read_text() == benchmark_page.page_text(found), (
        "run `python docs/benchmark_page.py`"
    )
    assert benchmark_page.CHART.read_text() == benchmark_page.headline_chart(found), "run the same"


def test_a_newer_result_replaces_an_older_one(tmp_path: Path) -> None:
    (tmp_path / "train_cpu-2026-01-01.json").write_text(result(a=1.0, b=2.0))
    (tmp_path / "train_cpu-2026-01-02.json").write_text(result(a=3.0))
    (tmp_path / "train_cpu_part-2026-01-03.json").write_text(result("--only c", c=4.0))

    text = benchmark_page.results_text(benchmark_page.read_results(tmp_path))

    assert "## Test CPU, 2 cores\n\n2 targets, 1 missed." in text
    assert "| a | 3 | at least 3.5 | **missed** | 2026-01-02 |" in text
    assert "| c | 4 | at least 3.5 | met | 2026-01-03 |" in text
    assert "| b |" not in text


def test_the_numbers_of_the_sizing_example_are_those_of_its_snippet() -> None:
    page = ROOT / "docs" / "guides" / "server-sizing.md"
    scope: dict[str, Any] = {}
    exec(compile(snippets(page)[0], page.name, "exec"), scope)
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("|")]
    assert {name: value for name, _, value in rows[2:]} == scope["example"]
