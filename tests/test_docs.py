"""Every Python snippet of the README and the guides runs, page by page, top to bottom."""

import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def snippets(page: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


ELSEWHERE = {
    "servers.md": "needs Ray: tests/ps/worker/shards_tests.py runs it",
    "server-training.md": "needs Ray: tests/distributed/test_server_training.py runs it",
}


@pytest.mark.parametrize(
    "page", [p for p in PAGES if snippets(p) and p.name not in ELSEWHERE], ids=lambda p: p.name
)
def test_snippets_run(page: Path) -> None:
    scope: dict[str, object] = {}
    for number, code in enumerate(snippets(page), start=1):
        exec(compile(code, f"{page.name} snippet {number}", "exec"), scope)


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
