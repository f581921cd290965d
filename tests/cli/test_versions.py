"""megalith versions: labels and the split of requests."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.serving.server.versions import TRAFFIC, VersionRules
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


def test_labels_and_shares_are_shown_set_and_removed(directory: Path) -> None:
    assert run(directory) == ["4  100 %", "3  0 %"]
    assert not (directory / TRAFFIC).exists()
    labels = ("--label", "stable=3", "--label", "canary=4")
    assert run(directory, *labels, "--traffic", "stable=97.5", "--traffic", "canary=2.5") == [
        "4  2.5 %  canary",
        "3  97.5 %  stable",
    ]
    assert VersionRules.read(directory).shares == ((4, 2.5), (3, 97.5))
    assert run(directory, "--label", "stable=4") == ["4  100 %  stable, canary", "3  0 %"]
    assert run(directory, "--newest", "--label", "canary=") == ["4  100 %  stable", "3  0 %"]
    (directory / "4").rmdir()
    assert run(directory) == ["4  0 %  stable  (no such version)", "3  100 %"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--label", "stable=9"], "write NAME=VERSION, with one of 4, 3"),
        (["--label", "stable"], "write NAME=VERSION"),
        (["--label", "9=3"], "not a number"),
        (["--traffic", "3=50"], "add up to 100"),
        (["--traffic", "other=100"], "neither a label nor a version"),
        (["--traffic", "3"], "write LABEL=PERCENT"),
        (["--newest", "--traffic", "3=100"], "either --newest or --traffic"),
    ],
)
def test_errors_are_one_line_and_change_nothing(directory: Path, arguments: list[str], message: str) -> None:
    ended = megalith("versions", directory, *arguments)
    assert ended.exit_code == 1
    assert message in ended.stderr
    assert not (directory / TRAFFIC).exists()


def test_a_directory_without_versions(tmp_path: Path) -> None:
    ended = megalith("versions", tmp_path)
    assert ended.exit_code == 1
    assert "has no versions" in ended.stderr
