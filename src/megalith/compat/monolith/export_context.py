"""Monolith's export contexts: which parts a model that is being exported has, and their signatures.

Code that builds a model asks for the mode; tables on parameter servers register a part for each server.
`megalith.serving.export_model` writes the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from megalith.errors import UsageError
from megalith.ops import checks


class ExportMode(IntEnum):
    """Whether a model is being exported: not at all, in one part, or as an entry and parts with rows."""

    NONE = 0
    STANDALONE = 1
    DISTRIBUTED = 2


@dataclass
class SubGraph:
    """A part of an exported model: its name, and by signature the names of inputs and outputs."""

    name: str
    signatures: dict[str, tuple[dict[str, Any], dict[str, Any]]] = field(default_factory=dict)


class ExportContext:
    """The parts of one export.

    Args:
        with_remote_gpu: Whether the parts run on GPUs.
    """

    def __init__(self, with_remote_gpu: bool = False) -> None:
        self.with_remote_gpu = checks.flag(with_remote_gpu, "ExportContext: with_remote_gpu")
        self._sub_graphs: dict[str, SubGraph] = {}

    def sub_graph(self, name: str) -> SubGraph:
        """Return the part of a name, such as "ps_0", which the first call makes."""
        return self._sub_graphs.setdefault(checks.text(name, "sub_graph: name"), SubGraph(name))

    @property
    def sub_graph_num(self) -> int:
        """The number of parts."""
        return len(self._sub_graphs)

    def add_signature(
        self, graph: SubGraph, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> None:
        """Set a signature of a part: its inputs and outputs by name."""
        checks.instance(graph, SubGraph, "add_signature: graph")
        pair = (checks.mapping(x, "signature", "{name: tensor}") for x in (inputs, outputs))
        graph.signatures[checks.text(name, "add_signature: name")] = (dict(next(pair)), dict(next(pair)))

    def merge_signature(
        self, graph: SubGraph, name: str, inputs: Mapping[str, Any], outputs: Mapping[str, Any]
    ) -> None:
        """Add inputs and outputs to a signature of a part, which may be new."""
        found = checks.instance(graph, SubGraph, "merge_signature: graph").signatures
        old = found.get(checks.text(name, "merge_signature: name"), ({}, {}))
        self.add_signature(graph, name, inputs, outputs)
        found[name] = (old[0] | found[name][0], old[1] | found[name][1])


_current: ContextVar[tuple[ExportMode, ExportContext | None]] = ContextVar(
    "export", default=(ExportMode.NONE, None)
)


@contextmanager
def enter_export_mode(mode: ExportMode, ctx: ExportContext | None = None) -> Iterator[ExportContext]:
    """Build a model for an export, inside a `with` statement. It cannot be nested.

    Args:
        mode: The mode.
        ctx: The context to fill; None: a new one.

    Yields:
        The context.
    """
    if is_exporting():
        raise UsageError("enter_export_mode: another export is in progress; it cannot be nested")
    found = ExportContext() if ctx is None else checks.instance(ctx, ExportContext, "enter_export_mode: ctx")
    token = _current.set((checks.instance(mode, ExportMode, "enter_export_mode: mode"), found))
    try:
        yield found
    finally:
        _current.reset(token)


def _mode() -> ExportMode:
    return _current.get()[0]  # no limit: a context variable


def is_exporting() -> bool:
    """Return whether a model is being exported."""
    return _mode() != ExportMode.NONE


def is_exporting_standalone() -> bool:
    """Return whether a model is being exported in one part."""
    return _mode() == ExportMode.STANDALONE


def is_exporting_distributed() -> bool:
    """Return whether a model is being exported as an entry and parts with rows."""
    return _mode() == ExportMode.DISTRIBUTED


def get_current_export_ctx() -> ExportContext | None:
    """Return the context of the export in progress; None if there is none."""
    return _current.get()[1]  # no limit: a context variable
