"""How much memory an update takes, and how many rows a block may have for it. Pure arithmetic, before any
weight changes.

The numbers count every buffer a block goes through; the ledger holds the update to them.
"""

from __future__ import annotations

from megalith.errors import BudgetError
from megalith.gather.reduce import reduce_bytes
from megalith.gather.schema import ParameterSpec, Schema, TableSpec
from megalith.gather.settings import UpdateConfig


def row_bytes(spec: ParameterSpec, config: UpdateConfig, num_peers: int, world_size: int = 1) -> int:
    """Memory that one row of a parameter takes, from packed bytes to the weight.

    With several ranks: packed rows of all peers are received and sent, and finished tiles go to all.
    """
    packed = spec.index_bytes + spec.code_bytes
    exchanged = 2 * num_peers * packed if world_size > 1 else packed
    decoding = 12 * spec.size if spec.dct else 0
    stepping = (20 if config.optimizer == "nesterov" else 16) * spec.size
    delivery = 4 * spec.size * world_size if world_size > 1 else 0
    return exchanged + reduce_bytes(spec, num_peers, config) + max(decoding, stepping) + delivery


def lookup_bytes(schema: Schema, num_peers: int) -> int:
    """Memory for the values of codes, of all peers, of one parameter."""
    return 4 * num_peers * max((spec.bins for spec in schema.parameters), default=0)


def rows_per_block(
    spec: ParameterSpec, config: UpdateConfig, num_peers: int, budget: int, world_size: int = 1
) -> int:
    """How many rows of a parameter fit. Raises BudgetError if none does."""
    each = row_bytes(spec, config, num_peers, world_size)
    if budget < each:
        raise BudgetError(
            f"the update: one row of {spec.name!r} of {num_peers} peers takes {each} bytes, "
            f"{budget} are left: raise memory_budget"
        )
    return min(budget // each, max(1, spec.rows))


def table_row_bytes(table: TableSpec, config: UpdateConfig) -> int:
    """Memory that one sent row of a table takes while it is reduced."""
    each = 24 if config.rule == "mean" else 112
    return 48 + each * table.dim


def table_rows_per_block(table: TableSpec, config: UpdateConfig, num_peers: int, budget: int) -> int:
    """How many rows of each peer fit. Raises BudgetError if none does."""
    each = num_peers * table_row_bytes(table, config)
    if budget < each:
        raise BudgetError(
            f"the update: one row of table {table.name!r} of {num_peers} peers takes {each} bytes, "
            f"{budget} are left: raise memory_budget"
        )
    return budget // max(1, each)


def check_update_budget(
    schema: Schema, config: UpdateConfig, num_peers: int, budget: int, world_size: int = 1
) -> None:
    """Raises BudgetError if a step with so many peers would exceed the budget."""
    left = budget - lookup_bytes(schema, num_peers)
    for spec in schema.parameters:
        rows_per_block(spec, config, num_peers, left, world_size)
    for table in schema.tables:
        table_rows_per_block(table, config, num_peers, budget)
