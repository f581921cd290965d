"""megalith export: writes a version of a run; errors are one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import Signature
from megalith.training import Run
from tests.cli.support import megalith, plain, words
from tests.serving.export.export_support import run_config


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps."""
    run = Run(run_config(), tmp_path_factory.mktemp("cli") / "run")
    run.train()
    return run.directory


def test_a_run_becomes_a_version_called_after_its_step(run: Path, tmp_path: Path) -> None:
    assert f"rows in {tmp_path / 'out'}" in words("export", run, tmp_path / "out")
    servable = Servable(tmp_path / "out" / "4")
    servable.warm_up()
    assert (servable.signature.model, servable.signature.precision) == ("deepfm", "float32")
    again = megalith("export", run, tmp_path / "out")
    assert again.exit_code == 1
    assert "exists: choose another version (--version, in Python version=...)" in plain(again.output)


def test_options(run: Path, tmp_path: Path) -> None:
    flags = ("--model-name", "clicks", "--precision", "int8", "--num-shards", 2, "--version", 7)
    words("export", run / "checkpoint", tmp_path, *flags)
    for part in ("entry", "ps_0", "ps_1"):
        signature = Signature.read(tmp_path / part / "7")
        assert (signature.name, signature.precision) == (f"clicks:{part}", "int8")


def test_a_directory_without_a_run(tmp_path: Path) -> None:
    nothing = megalith("export", tmp_path / "nowhere", tmp_path / "out")
    assert nothing.exit_code == 1
    assert "no complete checkpoint" in plain(nothing.output)
