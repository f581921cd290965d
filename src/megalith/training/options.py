"""check_options: the keys of [data.options] and [model.options], compared with the arguments of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megalith.errors import InputError, UnknownNameError


def check_options(
    where: str, options: Mapping[str, Any], target: Callable[..., Any], *, passed: Collection[str] = ()
) -> None:
    """Checks that options are arguments of a class, and that no required argument is missing."""
    parameters = {
        name: each for name, each in inspect.signature(target).parameters.items() if name not in passed
    }
    known = f"known: {', '.join(parameters)}" if parameters else "there are no options"
    for name in options:
        if name not in parameters:
            raise UnknownNameError(f"config: {where}: unknown option {name!r} ({known})")
    for name, each in parameters.items():
        if each.default is inspect.Parameter.empty and name not in options:
            raise InputError(f"config: {where}: option {name!r} is required ({known})")
