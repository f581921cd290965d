"""The engines by name. A new engine is one file and one line here."""

from __future__ import annotations

from importlib import import_module

from megalith.errors import InputError
from megalith.table.table import Table

ENGINES = {
    "reference": ("megalith.table.engines.reference", "ReferenceTable"),
    "cpu": ("megalith.table.engines.cpu", "CpuTable"),
}


def engine_class(engine: str) -> type[Table]:
    """The class of an engine. Raises InputError for an unknown name."""
    if engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known engines: {', '.join(ENGINES)}")
    module, name = ENGINES[engine]
    found: type[Table] = getattr(import_module(module), name)
    return found
