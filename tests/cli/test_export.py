"""megalith export: writes a version of a run; errors are one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from megalith.cli.main import app
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import Signature
from megalith.training import Run
from tests.serving.export.export_support import run_config


def megalith(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["export", *map(str, arguments)])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps."""
    run = Run(run_config(), tmp_path_factory.mktemp("cli") / "run")
    run.train()
    return run.directory


def test_help_shows_an_example() -> None:
    result = megalith("--help")
    assert result.exit_code == 0
    assert "Example: megalith export" in " ".join(result.output.split())


def test_a_run_becomes_a_version_called_after_its_step(run: Path, tmp_path: Path) -> None:
    result = megalith(run, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert f"rows in {tmp_path / 'out'}" in " ".join(result.output.split())
    servable = Servable(tmp_path / "out" / "4")
    servable.warm_up()
    assert (servable.signature.model, servable.signature.precision) == ("deepfm", "float32")


def test_options(run: Path, tmp_path: Path) -> None:
    result = megalith(
        run / "checkpoint",
        tmp_path,
        "--model-name",
        "clicks",
        "--precision",
        "int8",
        "--num-shards",
        2,
        "--version",
        7,
    )
    assert result.exit_code == 0, result.output
    for part in ("entry", "ps_0", "ps_1"):
        signature = Signature.read(tmp_path / part / "7")
        assert (signature.name, signature.precision) == (f"clicks:{part}", "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--precision", "int4"], "precision must be one of float32, float16, int8"),
        (["--model-name", "a/b"], "must not contain"),
    ],
)
def test_errors_are_one_line(run: Path, tmp_path: Path, arguments: list[str], message: str) -> None:
    result = megalith(run, tmp_path / "out", *arguments)
    assert result.exit_code != 0
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_and_a_version_that_is_there(run: Path, tmp_path: Path) -> None:
    nothing = megalith(tmp_path / "nowhere", tmp_path / "out")
    assert nothing.exit_code != 0
    assert "no complete checkpoint" in " ".join(nothing.output.split())
    assert megalith(run, tmp_path / "out").exit_code == 0
    again = megalith(run, tmp_path / "out")
    assert again.exit_code != 0
    remedy = "exists: choose another version (--version, in Python version=...)"
    assert remedy in " ".join(again.output.split())
