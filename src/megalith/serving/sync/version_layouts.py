"""Version layouts: what publishers must know about a version, and whether pushed rows outlive it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megalith.serving.sync.message_header import ModelLayout, TableLayout

if TYPE_CHECKING:
    from megalith.serving.export.servable import Servable


def layout_of(servable: Servable) -> ModelLayout:
    """Return the layout of a version."""
    spec = servable.signature
    tables = {
        name: TableLayout(table.dim, table.router(), spec.codes.get(name))
        for name, table in spec.tables.items()
    }
    return ModelLayout(spec.part, spec.sub_graph_num, tables, frozenset(servable.dense_names))


def have_equal_layouts(one: Servable, other: Servable) -> bool:
    """Return whether two versions take the same messages."""
    return layout_of(one).to_json() == layout_of(other).to_json()


def continues(servable: Servable, before: Servable) -> bool:
    """Return whether rows pushed to one version are valid on top of another."""
    # They are not on an older version, and not if its layout differs: publishers would continue to send the
    # ids of the old layout.
    old, new = before.signature, servable.signature
    newer = new.version > old.version and new.step >= old.step
    return newer and have_equal_layouts(servable, before)
