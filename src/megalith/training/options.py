"""check_options: the keys of [data.options] and [model.options], compared with the arguments of a class."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megalith.errors import InputError, UnknownNameError


def check_options(
    where: str, options: Mapping[str, Any], target: Callable[..., Any], *, passed: Collection[str] = ()
) -> None:
    """Checks that options are arguments of a class, and that no required argument is missing.

    Args:
        where: The key of the config, for messages: "data.options".
        options: The options.
        target: The class that takes them.
        passed: Arguments that the caller passes itself. They are not options.

    Raises:
        UnknownNameError: An option is not an argument; the message lists the known ones.
        InputError: A required argument is missing.
    """
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
