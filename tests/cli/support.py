"""What the tests of the commands share: calls of the command line, and their output."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from megalith.cli.main import app


def megalith(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def plain(text: str) -> str:
    """Text without the line breaks and columns of a terminal."""
    return " ".join(text.split())


def words(*arguments: object) -> str:
    """What a command that succeeds prints."""
    result = megalith(*arguments)
    assert result.exit_code == 0, result.output
    return plain(result.output)


def as_json(*arguments: object, code: int = 0) -> Any:
    result = megalith(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def error(*arguments: object) -> str:
    """The error of a command that fails, on one line; it prints nothing else."""
    result = megalith(*arguments)
    assert (result.exit_code, result.stdout) == (1, ""), result.output
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    return str(result.stderr)
