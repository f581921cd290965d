"""Every Python snippet of the README and the guides runs, page by page, and prints what its comments say."""

import ast
import contextlib
import io
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


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


ELSEWHERE = {
    "servers.md": "needs Ray: tests/ps/worker/shards_tests.py runs it",
    "server-training.md": "needs Ray: tests/distributed/test_server_training.py runs it",
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if snippets(p) and p.name not in ELSEWHERE], ids=lambda p: p.name
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
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_numbers_of_the_sizing_example_are_those_of_its_snippet() -> None:
    page = ROOT / "docs" / "guides" / "server-sizing.md"
    scope: dict[str, Any] = {}
    exec(compile(snippets(page)[0], page.name, "exec"), scope)
    rows = [line.strip("| ").split(" | ") for line in page.read_text().splitlines() if line.startswith("|")]
    assert {name: value for name, _, value in rows[2:]} == scope["example"]
