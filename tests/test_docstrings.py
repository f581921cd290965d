"""Every public class and function explains its arguments and results: the API reference is made from this."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import is_dataclass
from typing import Any

import pytest

from megalith.cli.config_options import field_docstrings

PACKAGES = [
    "megalith",
    "megalith.checkpoint",
    "megalith.checkpoint.importers",
    "megalith.compat.dynamicemb",
    "megalith.compat.monolith",
    "megalith.data",
    "megalith.metrics",
    "megalith.models",
    "megalith.nn",
    "megalith.ops",
    "megalith.serving",
    "megalith.serving.discovery",
    "megalith.shards",
    "megalith.table",
    "megalith.training",
]


def public(package: str) -> Iterator[tuple[str, Any]]:
    """The public classes and functions of a package, and the public methods of its classes."""
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == package
    ]
    for name in names:
        value = getattr(module, name)
        if inspect.isclass(value) and value.__module__.startswith("megalith"):
            yield name, value
            for attribute, member in vars(value).items():
                function = getattr(member, "__func__", member)  # of a classmethod or staticmethod
                if not attribute.startswith("_") and inspect.isfunction(function):
                    yield f"{name}.{attribute}", function
        elif inspect.isfunction(value):
            yield name, value


def arguments(value: Any) -> list[str]:
    """The names of the parameters that a docstring must explain."""
    if inspect.isclass(value) and "__init__" not in vars(value):
        return []
    parameters = list(inspect.signature(value).parameters)
    explained = {"self", "cls", "args", "kwargs"}
    if is_dataclass(value):
        explained |= field_docstrings(value).keys()  # type: ignore[arg-type]
    return [name for name in parameters if name not in explained]


def problems(name: str, value: Any) -> Iterator[str]:
    text = inspect.getdoc(value) or ""  # a method without its own docstring inherits its base's
    if not text:
        yield f"{name} has no docstring"
        return
    if not text.split("\n\n")[0].rstrip().endswith((".", ":")):
        yield f"{name}: the first paragraph does not end with a period"
    if text.startswith("See `"):
        return
    if arguments(value) and not any(word in text for word in ("Args:", "Attributes:")):
        yield f"{name}: no Args: for {', '.join(arguments(value))}"
    missing = [
        a for a in arguments(value) if "Args:" in text and f"{a}:" not in text and f"{a} (" not in text
    ]
    if missing:
        yield f"{name}: Args: lacks {', '.join(missing)}"


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_documented(package: str) -> None:
    assert [line for name, value in public(package) for line in problems(name, value)] == []
