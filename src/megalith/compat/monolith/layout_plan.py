"""The part of a layout that all batches share, compiled once from FeatureConfigs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any

import torch

from megalith.compat.monolith.feature_configs import FeatureConfigs, OutType, PoolingType
from megalith.ops.pooling import Bags, OutputSlice, covered


@dataclass(frozen=True)
class LayoutPlan:
    """Facts about the features, tables and outputs of a config, each in the order of their names."""

    tables: tuple[int, ...]
    """The table number of each feature."""
    num_tables: int
    dims: tuple[int, ...]
    """The row size of each feature."""
    means: tuple[bool, ...]
    """Whether each feature is averaged."""
    firsts: tuple[int, ...]
    """The number of rows that FIRSTN keeps of each feature, 0 for pooled features."""
    parts: tuple[tuple[OutputSlice, ...], ...]
    """The output slices of each feature."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each output, the batch first."""
    order: tuple[int, ...]
    """The features in the order of the pooling: FIRSTN features come last."""
    native_parts: tuple[Any, ...]
    """The output slices of each feature in the native module's form."""
    covered: tuple[bool, ...]
    """Whether the slices write all of each output."""


@lru_cache(maxsize=64)
def layout_plan(encoded: str) -> LayoutPlan:
    """Compile a config."""
    configs = FeatureConfigs.from_encoded(encoded)
    configs.validate()
    names, tables = configs.feature_names, configs.table_names
    features = [configs.feature_configs[n] for n in names]
    firsts = [f.max_sequence_length if f.pooling_type == PoolingType.FIRSTN else 0 for f in features]
    parts: list[list[OutputSlice]] = [[] for _ in names]
    shapes: list[tuple[int, ...]] = []
    for layout in configs.layout_names:
        out = configs.out_configs[layout]
        kind, given = out.out_type, configs.output_shapes(layout)
        column = 0
        for number, cut in enumerate(out.slice_configs):
            feature = names.index(cut.feature_name)
            inner = firsts[feature] or 1
            output = len(shapes) + (number if kind == OutType.NONE else 0)
            # CONCAT puts the k-th rows of all features next to each other: [B, L, sum of widths].
            step = given[0][-1] if kind == OutType.CONCAT else 0
            parts[feature].append(
                OutputSlice(output, column, cut.start, cut.end, inner, kind == OutType.ADDN, step)
            )
            if kind == OutType.CONCAT:
                column += cut.width
            elif kind == OutType.STACK:
                column += inner * cut.width
        shapes += given
    flat = [(-1, num_columns(shape)) for shape in shapes]
    bags = [Bags(torch.zeros(1, device="cpu"), tuple(p)) for p in parts]
    return LayoutPlan(
        tables=tuple(tables.index(f.table) for f in features),
        num_tables=len(tables),
        dims=tuple(f.dim for f in features),
        means=tuple(f.pooling_type == PoolingType.MEAN for f in features),
        firsts=tuple(firsts),
        parts=tuple(tuple(p) for p in parts),
        shapes=tuple(shapes),
        order=tuple(sorted(range(len(names)), key=lambda f: (bool(firsts[f]), f))),
        native_parts=tuple(b.native[-1] for b in bags),
        covered=tuple(covered(bags, flat)),
    )


def num_columns(shape: Sequence[int]) -> int:
    """Return the number of elements of one batch row."""
    return prod(shape[1:])
