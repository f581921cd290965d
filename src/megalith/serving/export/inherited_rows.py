"""Inherited rows: the rows written to one version, on top of the exported rows of another."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.overlay import PRESENT, Overlay

_PIECE = 1 << 16
"""Rows compared at once."""


def inherit_rows(own: Overlay, overlay: Overlay, frozen: Mapping[str, FrozenRows]) -> None:
    """Write what differs from the exported rows, so that overlays do not grow from version to version."""
    for table, exported in frozen.items():
        for ids, rows, flags in overlay.scan(table):
            there = flags == PRESENT
            known = exported.find(ids) >= 0
            before = torch.empty_like(rows, memory_format=torch.contiguous_format)
            exported.read(ids, before)
            new = there & ~(known & (before == rows).all(1))
            own.apply({table: (ids[new], rows[new])}, {table: ids[~there & known]})
        for ids in exported.ids.split(_PIECE) if overlay.hides_base else ():
            own.apply({}, {table: ids[overlay.read(table, ids)[1] != PRESENT]})
