"""Changed rows of embedding tables, of many peers, to one row per id: streamed in order of ids, within a
budget.

Payloads have their ids sorted, so all peers' rows of a range of ids are read together. A row's value
depends on nothing but what was sent for its id, as for any position of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalith.gather.budget import table_row_bytes, table_rows_per_block
from megalith.gather.ledger import Ledger
from megalith.gather.payload import Payload
from megalith.gather.reduce import reduce_entries
from megalith.gather.settings import UpdateConfig


def reduce_table(
    payloads: Sequence[Payload],
    number: int,
    factors: Tensor,
    config: UpdateConfig,
    ledger: Ledger,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Ids that some peer sent, ascending, and their reduced rows, block by block: int64 [n], float32 [n,
    dim].

    payloads: in canonical order. factors: float32 [peers], what a peer's rows are multiplied with.
    """
    if not payloads:
        return
    table = payloads[0].header.tables[number].spec
    each = table_rows_per_block(table, config, len(payloads), ledger.budget - ledger.used)
    at = [0] * len(payloads)
    ends = [payload.header.tables[number].num_rows for payload in payloads]
    while any(start < end for start, end in zip(at, ends, strict=True)):
        with ledger.hold(each * len(payloads) * table_row_bytes(table, config), "rows of a table"):
            ids = [
                payload.ids(number, start, min(start + each, end))
                for payload, start, end in zip(payloads, at, ends, strict=True)
            ]
            # Up to the lowest last id of those that have more, every peer's rows are here.
            open_ = [
                int(own[-1]) for own, start, end in zip(ids, at, ends, strict=True) if start + len(own) < end
            ]
            counts = [int((own <= min(open_)).sum()) if open_ else len(own) for own in ids]
            taken = [own[:count] for own, count in zip(ids, counts, strict=True)]
            found = torch.cat(taken).unique()
            columns = torch.arange(table.dim)
            sent = (
                (
                    (torch.searchsorted(found, own)[:, None] * table.dim + columns).flatten(),
                    (payload.rows(number, start, start + len(own)) * factor).flatten(),
                )
                for payload, start, own, factor in zip(payloads, at, taken, factors, strict=True)
            )
            rows = reduce_entries(sent, found.numel() * table.dim, len(payloads), config)
            yield found, rows.view(found.numel(), table.dim)
            at = [start + count for start, count in zip(at, counts, strict=True)]
