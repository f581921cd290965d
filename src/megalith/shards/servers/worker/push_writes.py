"""push_writes: what a worker sends to each server for an update: ids with one summed gradient each."""

from __future__ import annotations

import torch
from torch import Tensor

from megalith.shards.contract import Shards
from megalith.shards.owner_rows import blocks_by_table
from megalith.shards.preparer import RoutedIds
from megalith.shards.routed_gradients import RoutedGradients
from megalith.shards.servers.server_messages import ServerWrite, array_of
from megalith.shards.wire import Wire
from megalith.table.table_data import Step


def push_writes(
    shards: Shards,
    routed: RoutedIds,
    summed: RoutedGradients,
    numbers: Step,
    seen: Tensor | None,
    *,
    timed: bool,
    wire: Wire,
    everyone: bool,
) -> list[ServerWrite | None]:
    dims = [config.dim for config in shards.configs.values()]
    widths = torch.tensor(dims, dtype=torch.int64, device="cpu")
    header = {
        "step": numbers.step,
        "time": numbers.time if timed else None,
        "scale": numbers.scale,
        "clip_norm": numbers.clip_norm,
        # Evaluated now: a callable without an argument may return something else later.
        "rates": {name: shards.checks[name].rates(numbers.step) for name in summed.names},
    }
    ids, flat, counts, seen = _selected(routed, summed.flat, summed.mask(routed), seen, widths)
    sizes = counts.sum(1).tolist()
    own_ids = ids.split_with_sizes(sizes)
    own_flat = flat.split_with_sizes((counts @ widths).tolist())
    own_seen = None if seen is None else seen.split_with_sizes(sizes)
    writes: list[ServerWrite | None] = []
    for server, size in enumerate(sizes):
        if not size and not everyone:
            writes.append(None)
            continue
        row = counts[server : server + 1]
        arrays = {
            "ids": array_of(own_ids[server]),
            "grads": array_of(wire.encode(own_flat[server], row, dims)),
        }
        if own_seen is not None:
            arrays["seen"] = array_of(own_seen[server])
        writes.append(ServerWrite("push", header | {"counts": row[0].tolist()}, arrays))
    return writes


def _selected(
    routed: RoutedIds, flat: Tensor, mask: Tensor | None, seen: Tensor | None, widths: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return ids, gradients, counts and occurrences of the distinct ids that have a gradient."""
    ids, counts = routed.deduped.ids, routed.deduped.counts
    if mask is None:
        return ids, flat, counts, seen
    blocks = blocks_by_table(flat, counts * widths)
    masks = blocks_by_table(mask, counts)
    kept = torch.zeros_like(counts)
    pieces: list[Tensor] = []
    for server in range(counts.shape[0]):
        for t, dim in enumerate(widths.tolist()):
            own = masks[t][server]
            pieces.append(blocks[t][server].view(-1, dim)[own].view(-1))
            kept[server, t] = own.sum()
    return ids[mask], torch.cat(pieces), kept, None if seen is None else seen[mask]
