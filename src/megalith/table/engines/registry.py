"""The engines by name. A new engine is one file and one line here."""

from __future__ import annotations

from importlib import import_module

from megalith.errors import InputError
from megalith.table.engines.contract import Engine

ENGINES = {
    "reference": ("megalith.table.engines.reference", "ReferenceEngine"),
    "cpu": ("megalith.table.engines.cpu", "CpuEngine"),
}


def engine_class(engine: str) -> type[Engine]:
    """Return the class of an engine and import its module.

    Args:
        engine: Name of the engine, a key of `ENGINES`.

    Returns:
        The subclass of `Engine`.

    Raises:
        InputError: No engine has this name.
        NativeMissingError: The engine needs the native module, which is not built.
    """
    if not isinstance(engine, str) or engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known engines: {', '.join(ENGINES)}")
    module, name = ENGINES[engine]  # imported on use: the cpu engine needs the native module
    found: type[Engine] = getattr(import_module(module), name)
    return found
