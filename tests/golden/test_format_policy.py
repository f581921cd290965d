"""docs/formats/policy.md states the versions that the code writes and reads, and golden files of each."""

from __future__ import annotations

import json
import re
from pathlib import Path

from megalith.checkpoint import manifest
from megalith.gather import artifact, payload
from megalith.serving.export import signature

FILES = Path(__file__).parent / "files"
PAGE = Path(__file__).parents[2] / "docs" / "formats" / "policy.md"


def table(first_column: str) -> list[list[str]]:
    """The rows of the table whose first column has this heading."""
    lines = PAGE.read_text().split(f"\n| {first_column} |")[1].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def versions_in(folders: list[str], format: str) -> set[int]:
    """The version numbers of the files of a format."""
    found = set()
    for path in (path for folder in folders for path in (FILES / folder).rglob("*")):
        if path.suffix == ".json":
            data = json.loads(path.read_text())
            if isinstance(data, dict) and data.get("format") == format:
                found.add(data.get("version" if "format_version" not in data else "format_version"))
        if path.suffix == ".gather" and format == payload.FORMAT:
            found.add(int.from_bytes(path.read_bytes()[8:12], "little"))
    return found


def test_the_page_states_the_versions_of_the_code_and_of_the_golden_files() -> None:
    code = [
        ("checkpoint", manifest.FORMAT, [manifest.VERSION], [manifest.VERSION]),
        ("export", signature.FORMAT, [signature.VERSION], [*range(1, signature.VERSION + 1)]),
        ("gather payload", payload.FORMAT, list(payload.VERSIONS), list(payload.VERSIONS)),
        ("decisions and artifacts", artifact.FORMAT, [artifact.VERSION], [2, artifact.VERSION]),
    ]
    for (name, format, writes, reads), row in zip(code, table("format"), strict=True):
        assert name in row[0]
        assert [int(each) for each in row[1].split(",")] == writes
        assert [int(each) for each in row[2].split(",")] == reads
        without_file = {1} if name == "export" else set()  # the page says so
        assert versions_in(re.findall("`(.+?)`", row[3]), format) == set(reads) - without_file


def test_every_golden_folder_is_on_the_page() -> None:
    listed = {
        name
        for rows in (table("format"), table("file"))
        for row in rows
        for name in re.findall("`(.+?)`", row[-1 if len(row) == 2 else 3])
    }
    folders = {path.name for path in FILES.iterdir() if path.is_dir()} - {"earlier"}
    folders |= {f"earlier/{path.name}" for path in (FILES / "earlier").iterdir()}
    assert listed == folders
