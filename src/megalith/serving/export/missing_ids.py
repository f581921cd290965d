"""Missing ids: how many ids of a request have no row, for each feature.

Such an id reads as zeros, so the scores of a request with a wrong kind of id look like any others. This is a
pass of its own over the ids, for requests that ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megalith.nn.batch_preparer import column_of
from megalith.nn.feature_plan import FeaturePlan
from megalith.ragged import Ragged
from megalith.serving.export.frozen_rows import FrozenRows
from megalith.serving.export.overlay import PRESENT, Overlay

HasRows = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
"""{table: ids int64 [n]} -> {table: bool [n]}, whether an id has a row."""


def count_missing(
    plan: FeaturePlan, features: Mapping[str, Ragged | Tensor], has_rows: HasRows
) -> dict[str, int]:
    """Count the ids without a row."""
    ids = {}
    for name, feature in plan.features.items():
        column = column_of(feature, features[name])
        column = column if feature.combiner is None else feature.combiner.cut(column)
        ids[name] = column.values.to(torch.int64)
    asked = {table: torch.cat([ids[f.name] for f in own]) for table, own in plan.tables.items()}
    found = has_rows(asked)
    missing = {}
    for table, own in plan.tables.items():
        parts = found[table].split([ids[feature.name].numel() for feature in own])
        for feature, part in zip(own, parts, strict=True):
            count = part.numel() - int(part.sum())
            if count:
                missing[feature.name] = count
    return missing


def find_rows(
    asked: Mapping[str, Tensor], overlay: Overlay, frozen: Mapping[str, FrozenRows]
) -> dict[str, Tensor]:
    """Look up ids in the rows of a version."""
    # asked: table -> ids int64 [n]; returns: table -> bool [n], whether an id has a row.
    found = {}
    for table, ids in asked.items():
        flags = overlay.read(table, ids)[1]
        exported = torch.zeros_like(ids) if overlay.hides_base else frozen[table].find(ids) + 1
        found[table] = (flags == PRESENT) | ((flags == 0) & (exported > 0))
    return found
