"""ServingView: what lookups of a table return instead of its stored weights.

It applies the serving precision of each segment that has one (`serving_precision.py`) to its columns. Engines
apply it to rows that they have read, and to the summed gradients of an update.
"""

from __future__ import annotations

from torch import Tensor

from megalith.table.serving_precision import ServingPrecision
from megalith.table.table_config import TableConfig


class ServingView:
    """The view of the rows of one table. Use `of`, which returns None for a table without a view."""

    def __init__(self, columns: list[tuple[slice, ServingPrecision]]) -> None:
        self._columns = columns
        self.depends_on_step = any(precision.depends_on_step for _, precision in columns)

    @classmethod
    def of(cls, config: TableConfig) -> ServingView | None:
        columns, start = [], 0
        for segment in config.segments:
            if isinstance(segment.serving, ServingPrecision):
                columns.append((slice(start, start + segment.dim), segment.serving))
            start += segment.dim
        return cls(columns) if columns else None

    def apply(self, rows: Tensor, step: int | None) -> Tensor:
        """Replace stored weights by what a lookup returns, in place."""
        # rows: float32 [n, dim].
        for columns, precision in self._columns:
            stored = rows[:, columns]
            stored.copy_(precision.served(stored) if step is None else precision.trained(stored, step))
        return rows

    def native_parts(self, step: int | None) -> list[tuple[int, int, int, float, float]]:
        """Return the arguments of the native module, which computes the same bits."""
        parts = []
        for columns, precision in self._columns:
            view, first, second = precision.native_view(step)
            parts.append((view, columns.start, columns.stop, first, second))
        return parts

    def slopes(self, step: int) -> list[float]:
        """Return the largest factor of the gradients of each segment with a view; see `native_parts`."""
        return [precision.slope(step) for _, precision in self._columns]

    def gradient(self, grads: Tensor, rows: Tensor, step: int) -> Tensor:
        """Compute the gradients of stored weights from those of what training sees."""
        # grads: float32 [n, dim]; rows: float32 [n, dim], the stored weights; returns: float32 [n, dim].
        if not self.depends_on_step:
            return grads
        result = grads.clone()
        for columns, precision in self._columns:
            result[:, columns] = precision.gradient(grads[:, columns], rows[:, columns], step)
        return result
