"""Engines: storage and kernels of one table, by name. A new engine is one file and one line here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

from megalith.errors import InputError
from megalith.table.engines.contract import Engine
from megalith.table.engines.group import EngineGroup

ENGINES = {
    "reference": ("megalith.table.engines.reference", "ReferenceEngine"),
    "cpu": ("megalith.table.engines.cpu", "CpuEngine"),
    "cuda": ("megalith.table.engines.cuda.engine", "CudaEngine"),
}
GROUPS = {
    "cpu": ("megalith.table.engines.cpu", "CpuEngineGroup"),
    "cuda": ("megalith.table.engines.cuda.engine_group", "CudaEngineGroup"),
}
"""Engines that run all tables in one call."""


def engine_class(engine: str) -> type[Engine]:
    """Return the class of an engine and import its module."""
    if not isinstance(engine, str) or engine not in ENGINES:
        raise InputError(f"unknown engine {engine!r}; known engines: {', '.join(ENGINES)}")
    module, name = ENGINES[engine]  # imported on use: the cpu engine needs the native module
    found: type[Engine] = getattr(import_module(module), name)
    return found


def engine_group(engines: Mapping[str, Engine]) -> EngineGroup:
    """Join the engines of one LocalShards."""
    kinds = {engine.engine for engine in engines.values()}
    if len(kinds) != 1 or not kinds <= GROUPS.keys():
        return EngineGroup(engines)
    module, name = GROUPS[kinds.pop()]
    found: type[EngineGroup] = getattr(import_module(module), name)
    return found(engines)
