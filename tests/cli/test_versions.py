"""megalith versions: labels."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.serving.server.versions import LABELS, read_labels
from tests.cli.support import megalith


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for number in (3, 4):
        (tmp_path / str(number)).mkdir()
    return tmp_path


def run(directory: Path, *arguments: str) -> list[str]:
    ended = megalith("versions", directory, *arguments)
    assert ended.exit_code == 0, ended.stderr
    return ended.stdout.splitlines()


def test_labels_are_shown_set_and_removed(directory: Path) -> None:
    assert run(directory) == ["4", "3"]
    assert not (directory / LABELS).exists()
    assert run(directory, "--label", "stable=3", "--label", "canary=4") == ["4  canary", "3  stable"]
    assert read_labels(directory) == {"stable": 3, "canary": 4}
    assert run(directory, "--label", "stable=4") == ["4  stable, canary", "3"]
    assert run(directory, "--label", "canary=") == ["4  stable", "3"]
    (directory / "4").rmdir()
    assert run(directory) == ["4  stable  (no such version)", "3"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--label", "stable=9"], "write NAME=VERSION, with one of 4, 3"),
        (["--label", "stable"], "write NAME=VERSION"),
        (["--label", "9=3"], "not a number"),
    ],
)
def test_errors_are_one_line_and_change_nothing(directory: Path, arguments: list[str], message: str) -> None:
    ended = megalith("versions", directory, *arguments)
    assert ended.exit_code == 1
    assert message in ended.stderr
    assert not (directory / LABELS).exists()


def test_a_directory_without_versions(tmp_path: Path) -> None:
    ended = megalith("versions", tmp_path)
    assert ended.exit_code == 1
    assert "has no versions" in ended.stderr
