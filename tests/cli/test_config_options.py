"""config_options: the fields of a dataclass become options of a command."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from megalith.cli.config_options import config_options


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Settings of a test."""

    host: str = "127.0.0.1"
    """Address to listen
    on."""
    port: int = 0
    """Port."""
    rate: float | None = None
    """Requests per second."""
    key: Path | None = None
    """File of the key."""
    soft: bool = False
    """Do not fail."""
    saves: bool = False
    """Whether to save."""
    secret: str = "x"


def run(*arguments: str, only_given: bool = False) -> Any:
    given: dict[str, Any] = {}
    app = typer.Typer()

    @app.command()
    @config_options(
        "settings",
        Settings,
        flags={"rate": "--max-rate", "saves": "--saves/--no-saves"},
        omit=["secret"],
        defaults={"port": 8500},
        metavars={"host": "HOST"},
        only_given=only_given,
    )
    def command(
        name: Annotated[str, typer.Argument()],
        settings: dict[str, Any],
        last: Annotated[int, typer.Option(help="The last.")] = 1,
    ) -> None:
        """Run it."""
        given.update(settings, name=name, last=last)

    result = CliRunner().invoke(app, list(arguments), env={"COLUMNS": "110"})
    return given if result.exit_code == 0 and given else result


GIVEN = ("--port", "0", "--max-rate", "2", "--key", "k", "--soft", "--no-saves", "--last", "3")
VALUES = {"port": 0, "rate": 2.0, "key": Path("k"), "soft": True, "saves": False}


def test_values_arrive_under_the_names_of_the_fields() -> None:
    plain = {"host": "127.0.0.1", "port": 8500, "rate": None, "key": None, "soft": False, "saves": False}
    assert run("a") == {"name": "a", "last": 1, **plain}
    assert run("a", *GIVEN) == {"name": "a", "last": 3, "host": "127.0.0.1", **VALUES}


def test_only_given_values_arrive_where_a_file_may_hold_others() -> None:
    assert run("a", only_given=True) == {"name": "a", "last": 1}
    assert run("a", *GIVEN, only_given=True) == {"name": "a", "last": 3, **VALUES}


def test_help_shows_docstrings_and_defaults_in_order() -> None:
    text = run("--help").output
    lines = [
        "Address to listen on. [default: 127.0.0.1]",
        "Port. [default: 8500]",
        "Requests per",
        "The last.",
    ]
    assert [line for line in lines if line in text] == lines
    assert sorted(lines, key=text.index) == lines
    assert "HOST" in text
    assert "--secret" not in text


def test_a_value_of_the_wrong_type_is_a_usage_error() -> None:
    assert run("a", "--port", "x").exit_code == 2


def test_wrong_names_and_missing_docstrings_raise() -> None:
    with pytest.raises(ValueError, match="Settings has no field pot"):
        config_options("settings", Settings, omit=["pot"])
    with pytest.raises(ValueError, match=r"Settings\.secret needs a docstring"):
        config_options("settings", Settings)
