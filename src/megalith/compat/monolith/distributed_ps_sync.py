"""DistributedMultiTypeHashTableMpi, Monolith's synchronous tables, over a `SyncShards`; and its fused calls.

    lookup            the pack of fused_reorder_by_indices  ->  rows of each slot, in the order of its input
    apply_gradients   gradients of those rows  ->  one step per distinct id, from the sum over all ranks

`auxiliary_bundle` carries tensors from one call to the other, under Monolith's keys. fused_lookup and
fused_apply_gradient are the calls of one owner: block n * K + k holds the ids that shard n requests from
table k (tables sorted by name). Embeddings and gradients have the same order; each id takes as many floats as
its table's dim.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from megalith.compat.monolith.distribution_ops import (
    fused_gather_embeddings_by_input,
    fused_gather_embeddings_by_input_gradient,
)
from megalith.compat.monolith.distribution_utils import FLAGS, int_variable, warn_of_ignored_variables
from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.shards import LocalShards, Lookup, Shards, SyncLookup, SyncShards
from megalith.shards.lookup import LookupSeries
from megalith.table import TableConfig

Bundle = MutableMapping[str, Any]
SlotRows = Mapping[str, tuple[Tensor, Tensor]]
QUEUES = (
    "enable_pipelined_fwda2a",
    "embedding_prefetch_capacity",
    "enable_async_optimize",
    "enable_pipelined_bwda2a",
)
"""The keys of queue_configs."""
_VARIABLES: dict[str, tuple[str, int | None]] = {
    "enable_hvd": ("MONOLITH_WITH_HOROVOD", None),
    "enable_custom_optimized_hvd": ("MONOLITH_WITH_OPTIMIZED_HOROVOD", None),
    "enable_hvd_fid_g2g": ("MONOLITH_WITH_HOROVOD_FID_G2G", 1),
    "enable_hvd_fwd_g2g": ("MONOLITH_WITH_HOROVOD_FWD_G2G", 1),
    "enable_hvd_bwd_g2g": ("MONOLITH_WITH_HOROVOD_BWD_G2G", 1),
    "enable_bps": ("MONOLITH_WITH_BYTEPS", 0),
    "enable_bps_fid": ("MONOLITH_WITH_BYTEPS_FID", 1),
    "enable_bps_fwd": ("MONOLITH_WITH_BYTEPS_FWD", 1),
    "enable_bps_bwd": ("MONOLITH_WITH_BYTEPS_BWD", 1),
    "enable_bps_bwd_cast": ("MONOLITH_WITH_BYTEPS_BWD_CAST", 32),
    "enable_bps_bwd_fake_cast": ("MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST", 0),
    "enable_bps_fwd_gdr": ("MONOLITH_WITH_BYTEPS_FWD_GDR", 0),
    "enable_bps_fwd_gdr_g2g": ("MONOLITH_WITH_BYTEPS_FWD_GDR_G2G", 0),
    "enable_bps_bwd_gdr": ("MONOLITH_WITH_BYTEPS_BWD_GDR", 0),
    "enable_bps_bwd_gdr_g2g": ("MONOLITH_WITH_BYTEPS_BWD_GDR_G2G", 0),
}


def __getattr__(name: str) -> Any:
    # Monolith's module reads them when it is imported; here they are read when they are used.
    if name not in _VARIABLES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    variable, default = _VARIABLES[name]
    return os.environ.get(variable) if default is None else int_variable(variable, default)


# ---- what Monolith's tables have in common


class FlushHook:
    """Waits for the pushed gradients of a table at the end of training, as Monolith's AsyncPushHook does."""

    def __init__(self, shards: Shards) -> None:
        self._shards = shards

    def end(self, session: object = None) -> None:
        """Wait, and raise the errors of the pushes."""
        self._shards.flush()


class LateTensors(Mapping[str, Any]):
    """The result of a lookup that is in progress; it is fetched when the first tensor is read."""

    def __init__(self, names: Sequence[str], make: Callable[[], Mapping[str, Any]]) -> None:
        self._names, self._make = names, make
        self._found: Mapping[str, Any] | None = None
        self.is_fetched = False

    def fetch(self) -> Mapping[str, Any]:
        if self._found is None:
            self.is_fetched = True  # also if it fails: nothing waits for it then
            self._found = self._make()
        return self._found

    def __getitem__(self, name: str) -> Any:
        return self.fetch()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


class MonolithTables:
    """Tables under Monolith's calls, over a `Shards`. Writes change them in place and return this object.

    Attributes:
        shards: The tables.
    """

    shards: Shards

    def _take(self, shards: Shards, queue_configs: Mapping[str, int] | None) -> None:
        where, given = type(self).__name__, {} if queue_configs is None else queue_configs
        if not isinstance(given, Mapping) or not set(given) <= set(QUEUES):
            raise InputError(
                f"{where}: queue_configs must be a dict with keys of {', '.join(QUEUES)}, got {given!r}"
            )
        sizes = {name: checks.integer(given.get(name, 0), f"{where}: {name}", 0) for name in QUEUES}
        self.shards = shards
        self._prefetch_rows = sizes["embedding_prefetch_capacity"]
        self._ahead = max(sizes["enable_pipelined_fwda2a"], self._prefetch_rows)
        self._push = bool(sizes["enable_async_optimize"] or sizes["enable_pipelined_bwda2a"])
        self._hooks: list[Any] = [FlushHook(shards)] if self._push else []
        self._pending: deque[LateTensors] = deque()
        self._series = LookupSeries()

    def _started(
        self,
        ids: Mapping[str, Tensor],
        names: Sequence[str],
        make: Callable[[Lookup], Any],
        rows_ahead: int = 0,
    ) -> Any:
        """Look up ids; return `make(lookup)`, with prefetch queues as a mapping that does so when read."""
        ahead = max(self._ahead, rows_ahead)
        if not ahead:
            return make(self.shards.lookup(ids))
        lookup = self.shards.lookup(ids, series=self._current_series())
        if self._prefetch_rows or rows_ahead:
            lookup.fetch()
        late = LateTensors(names, lambda: make(lookup))
        self._pending.append(late)
        if len(self._pending) > ahead:
            self._pending.popleft().fetch()
        return late

    def _fail(self, error: Exception, ahead: int) -> NoReturn:
        """Fail a lookup that this rank cannot make: the other ranks make it."""
        self.shards.fail(error, series=self._current_series() if ahead else None)

    def _current_series(self) -> LookupSeries:
        """Return the series of lookups in progress; a new one if there are none, the same on all ranks."""
        while self._pending and self._pending[0].is_fetched:
            self._pending.popleft()
        if not self._pending:
            self._series = LookupSeries()
        return self._series

    def as_op(self, name: str | None = None) -> Self:
        """Return this object: a call has taken effect when it returns."""
        return self

    def get_table_dim_sizes(self) -> list[int]:
        """Return the dims of the tables, sorted by name."""
        return [self.shards.configs[name].dim for name in sorted(self.shards.configs)]

    def add_queue_hook(self, hook: Any) -> None:
        """Add a hook to those of `get_queue_hooks`.

        Args:
            hook: An object with methods of a session hook.
        """
        self._hooks.append(hook)

    def get_queue_hooks(self) -> list[Any]:
        """Return the hooks of queues; call their `end` after training."""
        return list(self._hooks)


class MonolithSlotTables(MonolithTables):
    """Tables that calls name by slot."""

    def assign(self, slot_to_id_and_value: SlotRows, req_time: Any = 0) -> Self:
        """Set rows. Of repeated ids the last one wins.

        Args:
            slot_to_id_and_value: (ids int64 [n], rows float32 [n, dim]) by slot.
            req_time: The last-update time in seconds; 0: the clock.
        """
        self.shards.assign(slot_to_id_and_value, time=seconds_of(req_time))
        return self

    def assign_add(self, slot_to_id_and_value: SlotRows, req_time: Any = 0) -> Self:
        """Add to rows."""
        self.shards.assign_add(slot_to_id_and_value, time=seconds_of(req_time))
        return self

    def reinitialize(self, slot: str, ids: Tensor) -> tuple[Self, Tensor]:
        """Reset rows to their initial values.

        Args:
            slot: The name of a table.

        Returns:
            This object and the status of each id, int32 [n] in the order of the input: 0 created, 1 existed,
            -1 if there is no such table.
        """
        name = checks.text(slot, "reinitialize: slot")
        return self, self.shards.reinitialize({name: ids}, missing_ok=True)[name]


def seconds_of(req_time: Any) -> float | None:
    """Return the time of a write: the latest of a tensor; None, the clock of the owner, for 0 and None."""
    if isinstance(req_time, Tensor):
        plain = req_time.layout == torch.strided and not req_time.is_meta and not req_time.is_complex()
        if not plain or not req_time.numel():
            raise InputError("req_time must be numbers")
        req_time = float(req_time.to(torch.float64).max())
    return req_time or None


def step_of(global_step: int | Tensor) -> int:
    """Return a step that may be a tensor of one element."""
    return checks.scalar(global_step, "global_step")


def bundle_of(value: Any) -> Bundle:
    """Check an auxiliary bundle."""
    if not isinstance(value, MutableMapping):
        raise InputError(f"auxiliary_bundle must be a dict, got {checks.kind(value)}")
    return value


def named(config: TableConfig, name: str) -> TableConfig:
    """Return a config under another name, for Monolith's tables: ids without a row read as zeros."""
    return replace(config, name=name, missing="zeros")


def configs_or_shards(made: Any, where: str) -> Shards | list[TableConfig]:
    """Return what a table factory has made: shards, or configs, whose missing ids then read as zeros."""
    if isinstance(made, Shards):
        return made
    made = [made] if isinstance(made, TableConfig) else made
    pairs = list(made.items()) if isinstance(made, Mapping) else None
    if pairs is None and isinstance(made, list | tuple):
        pairs = [(getattr(each, "name", None), each) for each in made]
    if not pairs or not all(isinstance(each, TableConfig) for _, each in pairs):
        raise InputError(
            f"{where}: table_factory must return TableConfigs, as a list or by slot, or shards, "
            f"got {type(made).__name__}"
        )
    return [named(config, name) for name, config in sorted(pairs)]


# ---- the synchronous table

_LOOKUP = "__lookup__"
_POPPED = (
    *("shard_sizes", "fused_embedding_offsets", "id_flat_t", "id_size_flat_t", "embedding_splits"),
    *("id_offsets", "emb_offsets", "indices", "recv_emb_splits", "recv_embeddings_size"),
)


class _Pack(NamedTuple):
    """The checked pack of a lookup over N ranks and K tables."""

    ids: list[Tensor]  # int64 by table: the distinct ids, by rank
    shard_sizes: Tensor
    sizes: Tensor  # int64 [N, K]
    emb_offset_sz: Tensor
    offsets: list[Tensor]


class DistributedMultiTypeHashTableMpi(MonolithSlotTables):
    """Monolith's synchronous tables: a `SyncShards` under Monolith's calls. All calls are collective.

    Args:
        shard_num: The number of ranks, that of the process group.
        table_factory: Makes the tables: it receives the rank, and returns TableConfigs, as a list or by slot,
            or shards. With MONOLITH_WITH_BYTEPS_BWD_CAST=16, the gradients of tables that are made here
            travel as float16.
        queue_configs: Capacities, 0 for off. enable_pipelined_fwda2a: lookups are fetched when their result
            is first read, so that this many may be started ahead of updates. embedding_prefetch_capacity:
            their rows are fetched ahead too, before the updates in between. enable_async_optimize and
            enable_pipelined_bwda2a: `apply_gradients` returns while gradients are sent and applied.

    Raises:
        InputError: An argument is wrong, or the process group has another number of ranks.
    """

    shards: SyncShards | LocalShards

    def __init__(
        self,
        shard_num: int,
        table_factory: Callable[[int], Any],
        queue_configs: Mapping[str, int] | None = None,
    ) -> None:
        where = type(self).__name__
        count = checks.integer(shard_num, f"{where}: shard_num")
        checks.callback(table_factory, f"{where}: table_factory", required=True)
        warn_of_ignored_variables()
        group = torch.distributed if has_process_group() else None
        rank, size = (group.get_rank(), group.get_world_size()) if group else (0, 1)
        if size != count:
            raise InputError(f"{where}: shard_num is {count}, but there are {size} ranks")
        made = configs_or_shards(table_factory(rank), where)
        if not isinstance(made, Shards):
            cast = __getattr__("enable_bps_bwd_cast") == 16
            wire = {"rows": "float32", "grads": "float16" if cast else "float32"}
            made = SyncShards(made, wire=wire) if group else LocalShards(made)
        if not isinstance(made, SyncShards | LocalShards) or made.world_size != count:
            raise InputError(f"{where}: table_factory must return shards over {count} ranks, got {made!r}")
        self._take(made, queue_configs)
        self._names = sorted(made.configs)
        self._output_dims = self.get_table_dim_sizes()
        self._shard_num, self._index, self._lookups = count, rank, 0
        self.summary_writer: Any = None
        """What receives summaries; None: a SummaryWriter of FLAGS.model_dir, made by the first summary."""

    def lookup(
        self,
        slot_to_id: Mapping[str, Any],
        auxiliary_bundle: Bundle,
        early_reorder_indicies_res_pack: Sequence[Any] | None = None,
    ) -> tuple[Mapping[str, Tensor], Bundle]:
        """Read the rows of a batch; ids without a row read as zeros.

        Args:
            slot_to_id: The slots; what they map to is ignored, because the pack has the ids.
            auxiliary_bundle: Receives what `apply_gradients` needs.
            early_reorder_indicies_res_pack: What fused_reorder_by_indices returned for the slots in sorted
                order and `shard_num` shards; a sixth element, the time, is ignored. Required.

        Returns:
            The rows by slot, in the order of the input, and the bundle. The rows are leaves that require a
            gradient, if gradients are enabled.

        Raises:
            InputError: The pack is missing, or does not fit the tables and ranks.
        """
        bundle = bundle_of(auxiliary_bundle)
        try:
            pack = self._check_pack(slot_to_id, early_reorder_indicies_res_pack)
        except Exception as error:  # the other ranks look up
            self._fail(error, self._ahead)
        summaries = {
            "all_fids_size": sum(ids.numel() for ids in pack.ids),
            "shard_sizes": pack.shard_sizes,
            "sharded_slot_sizes": pack.sizes.flatten(),
        }
        if (slot := FLAGS.enable_alltoall_metrics_for_slot) in self._names:
            summaries[f"{slot}_size"] = int(pack.sizes[:, self._names.index(slot)].sum())
        self._summarise(summaries, self._lookups)
        self._lookups += 1
        ids = dict(zip(self._names, pack.ids, strict=True))
        return self._started(ids, self._names, lambda lookup: self._rows(lookup, pack, bundle)), bundle

    def _check_pack(self, slots: Mapping[str, Any], pack: Any) -> _Pack:
        if not isinstance(slots, Mapping) or sorted(slots) != self._names:
            raise InputError(f"slot_to_id must have the slots {self._names}, got {slots!r}")
        if not isinstance(pack, list | tuple) or len(pack) not in (5, 6):
            raise InputError(
                "early_reorder_indicies_res_pack must be what fused_reorder_by_indices returned for all "
                f"slots in sorted order, and a time, got {checks.kind(pack)}"
            )
        fids, shard_sizes, slot_sizes, emb_offset_sz, offsets = pack[:5]
        tables = len(self._names)
        sizes = checks.int64(slot_sizes, "sharded_slot_sizes", (self._shard_num * tables,)).cpu()
        fids = checks.int64(fids, "all_fids", (int(sizes.sum()),))
        emb_offset_sz = checks.int64(emb_offset_sz, "emb_offset_sz", (tables,)).cpu()
        flat = torch.cat(list(offsets)) if isinstance(offsets, list | tuple) else offsets
        flat = checks.int64(flat, "fused_embedding_offsets", (int(emb_offset_sz.sum()),))
        sizes = sizes.view(self._shard_num, tables)
        return _Pack(
            [each.to(self.shards.device) for each in by_table(fids, sizes)],
            checks.integers(shard_sizes, "shard_sizes", (self._shard_num,)),
            sizes,
            emb_offset_sz,
            list(flat.to(self.shards.device).split_with_sizes(emb_offset_sz.tolist())),
        )

    def _rows(self, lookup: Lookup, pack: _Pack, bundle: Bundle) -> dict[str, Tensor]:
        """Return the rows by slot, and fill the bundle."""
        dims = torch.tensor(self._output_dims, dtype=torch.int64, device="cpu")
        flat = by_rank([lookup.rows[name].flatten() for name in self._names], pack.sizes * dims)
        if isinstance(lookup, SyncLookup):
            requested = lookup.requested.result()  # no limit: the rows have arrived
            order = list(self.shards.configs)
            counts = requested.counts[:, [order.index(name) for name in self._names]]
            received = by_rank([requested.ids[name] for name in self._names], counts)
        else:
            received, counts = by_rank(pack.ids, pack.sizes), pack.sizes
        added = {
            "shard_sizes": pack.shard_sizes,
            "fused_embedding_offsets": pack.offsets,
            "emb_offset_sz": pack.emb_offset_sz,
            "id_flat_t": received,
            "id_size_flat_t": counts.flatten(),
            "embedding_splits": counts @ dims,
            "id_offsets": _starts(counts),
            "emb_offsets": _starts(counts * dims),
            "indices": received,
            "recv_emb_splits": pack.sizes @ dims,
            "recv_embeddings_size": flat.numel(),
            _LOOKUP: (lookup, pack.sizes),
        }
        bundle.update(added)
        self._summarise({"fused_embedding_splits": added["embedding_splits"]}, self._lookups - 1)
        rows = fused_gather_embeddings_by_input(flat, pack.offsets, self._output_dims)
        grads = torch.is_grad_enabled()
        return {n: each.detach().requires_grad_(grads) for n, each in zip(self._names, rows, strict=True)}

    def apply_gradients(
        self,
        slot_to_grad: Mapping[str, Tensor],
        auxiliary_bundle: Bundle,
        global_step: int | Tensor,
        req_time: float | Tensor | None = 0,
        scale: float | Tensor = 1,
    ) -> Self:
        """Make one optimizer step per distinct id, with the gradients of all its occurrences on all ranks.

        Args:
            slot_to_grad: A gradient for each row of the lookup, float32 [n, dim] by slot.
            auxiliary_bundle: The bundle of the lookup; what the lookup added is removed.
            req_time: The last-update time of the rows in seconds; 0 and None: the clock of the owner.
            scale: A factor for all gradients.

        Raises:
            UsageError: The bundle is not that of a lookup, or was used.
            InputError: The gradients do not fit the lookup; nothing is written on any rank.
        """
        bundle = bundle_of(auxiliary_bundle)
        if _LOOKUP not in bundle:
            raise UsageError("apply_gradients: auxiliary_bundle must be the one that lookup has filled")
        lookup, sizes = bundle.pop(_LOOKUP)
        taken = {key: bundle.pop(key, None) for key in _POPPED}
        try:
            if missing := [key for key in _POPPED if taken[key] is None]:
                raise UsageError(f"apply_gradients: auxiliary_bundle lacks {missing[0]}, which lookup added")
            if not isinstance(slot_to_grad, Mapping) or sorted(slot_to_grad) != self._names:
                raise InputError(f"slot_to_grad must have the slots {self._names}, got {slot_to_grad!r}")
            flat = fused_gather_embeddings_by_input_gradient(
                taken["recv_embeddings_size"],
                [slot_to_grad[name] for name in self._names],
                taken["fused_embedding_offsets"],
                self._output_dims,
                scale,
            )
            dims = torch.tensor(self._output_dims, dtype=torch.int64, device="cpu")
            own = zip(self._names, by_table(flat, sizes * dims), self._output_dims, strict=True)
            grads = {name: each.view(-1, dim) for name, each, dim in own}
            step, time = step_of(global_step), seconds_of(req_time)
        except Exception as error:  # the other ranks have gradients
            lookup.fail(error)
        self.shards.apply_gradients(lookup, grads, step=step, time=time, wait=not self._push)
        self._summarise_exchange(taken, step)
        return self

    # ---- summaries

    def _summarise(self, values: Mapping[str, Any], step: int) -> None:
        """Write numbers as scalars and vectors as histograms, if FLAGS say so."""
        if not FLAGS.enable_alltoall_metrics:
            return
        if self.summary_writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self.summary_writer = SummaryWriter(
                FLAGS.model_dir or None, filename_suffix=f".rank{self._index}"
            )
        for name, value in values.items():
            if isinstance(value, Tensor):
                self.summary_writer.add_histogram(name, value.float(), step)
            else:
                self.summary_writer.add_scalar(name, value, step)

    def _summarise_exchange(self, bundle: Mapping[str, Any], step: int) -> None:
        """Write what rank 0 exchanges with the others and what each rank does, as Monolith without rank 0."""
        if not FLAGS.enable_alltoall_metrics or self._shard_num < 2:
            return
        keys = {"id": "shard_sizes", "emb": "recv_emb_splits", "grad": "embedding_splits"}
        splits = {kind: bundle[key][1:].cpu() for kind, key in keys.items()}
        totals = self.shards.ranks.gather([int(splits[kind].sum()) for kind in ("id", "emb")])
        values: dict[str, Any] = {
            f"Alltoall_{kind}_dist": torch.tensor([own[k] for own in totals], device="cpu")
            for k, kind in enumerate(("id", "emb"))
        }
        for kind, own in splits.items() if self._index == 0 else ():
            values |= {f"Alltoall_{kind}_splits": own, f"Alltoall_{kind}_sizes": int(own.sum())}
            for which in ("min", "max") if kind != "grad" else ():
                index = int(getattr(own, f"arg{which}")())
                values[f"Alltoall_{kind}_{which}_idx"] = index
                values[f"Alltoall_{kind}_{which}_size"] = int(own[index])
        self._summarise(values, step)


def by_rank(tables: Sequence[Tensor], sizes: Tensor) -> Tensor:
    """Join tensors that are concatenated by rank within each table: by rank, then table. sizes: [N, K]."""
    pieces = [each.split_with_sizes(sizes[:, k].tolist()) for k, each in enumerate(tables)]
    return torch.cat([piece for row in zip(*pieces, strict=True) for piece in row])


def by_table(flat: Tensor, sizes: Tensor) -> list[Tensor]:
    """Split what is ordered by rank, then table, into one tensor per table: the inverse of `by_rank`."""
    blocks = flat.split_with_sizes(sizes.flatten().tolist())
    return [torch.cat(blocks[k :: sizes.shape[1]]) for k in range(sizes.shape[1])]


def _starts(sizes: Tensor) -> Tensor:
    """Return where each block begins, and the end of the last one."""
    sizes = sizes.flatten()
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])


# ---- the calls of one owner


class FusedLookup(NamedTuple):
    """Result of `fused_lookup` for N shards and K tables."""

    embeddings: Tensor
    """float32 [floats]: the rows, block by block."""
    embedding_splits: Tensor
    """int32 [N]: the number of floats of each shard."""
    id_offsets: Tensor
    """int32 [K * N + 1]: where the ids of each block begin."""
    emb_offsets: Tensor
    """int32 [K * N + 1]: where the floats of each block begin."""
    indices: Tensor
    """int64 [n]: the ids."""


def fused_lookup(
    shards: LocalShards,
    ids: Tensor,
    fused_slot_size: Tensor,
    num_of_shards: int,
    req_time: float | Tensor | None = None,
    global_step: int | Tensor | None = None,
) -> FusedLookup:
    """Look up the ids of many tables, grouped by requesting shard, in one call.

    Args:
        shards: The tables.
        ids: int64 [n], block by block.
        fused_slot_size: int32 [num_of_shards * tables], the number of ids of each block.
        num_of_shards: The number of requesting shards.
        req_time: Ignored; a lookup does not change a row's last-update time.
        global_step: The step of the training that uses the rows, an int or a tensor of one element. Needed
            for tables with `OneBit`, whose rows depend on it.

    Returns:
        The rows, block by block, and where the ids and rows of each block begin.

    Raises:
        InputError: The sizes do not match the ids or the tables.
        UsageError: A table has `OneBit`, and there is no global_step. `shards.lookup` returns what is served.
    """
    blocks = _blocks(shards, ids, fused_slot_size, num_of_shards)
    step = None if global_step is None else checks.scalar(global_step, "global_step")
    if step is None and shards.stepwise:
        raise UsageError(
            f"table {shards.stepwise[0]!r}: what a lookup returns depends on the step (OneBit); pass "
            "global_step to fused_lookup, the one of fused_apply_gradient"
        )
    rows = [shards.local[name].lookup(own, step=step).flatten() for name, own in blocks.ids.items()]
    return FusedLookup(
        by_rank(rows, blocks.floats), blocks.splits, blocks.id_offsets, blocks.emb_offsets, ids
    )


def fused_apply_gradient(
    shards: LocalShards,
    ids: Tensor,
    indices: Tensor,
    fused_slot_size: Tensor,
    id_grads: Tensor,
    id_offsets: Tensor,
    grad_offsets: Tensor,
    global_step: int | Tensor,
    req_time: float | Tensor | None,
    num_of_shards: int,
    enable_grad_accumulation: bool = False,
) -> None:
    """Apply the gradients of a `fused_lookup`: one summed step per distinct id, also across shards.

    Args:
        shards: The tables.
        ids: int64 [n], as in the lookup.
        indices: `FusedLookup.indices`.
        id_grads: float32 [floats], in the order of the embeddings.
        id_offsets: `FusedLookup.id_offsets`.
        grad_offsets: `FusedLookup.emb_offsets`.
        global_step: The step for learning rates, an int or a tensor of one element.
        req_time: The last-update time of the rows in seconds, the latest of a tensor; 0 and None: the clock.
        enable_grad_accumulation: Ignored; the gradients of an id are always summed.

    Raises:
        InputError: The sizes, offsets or gradients do not match the lookup; nothing is written.
    """
    blocks = _blocks(shards, ids, fused_slot_size, num_of_shards)
    step = checks.scalar(global_step, "global_step")
    for name, given, own in (
        ("id_offsets", id_offsets, blocks.id_offsets),
        ("grad_offsets", grad_offsets, blocks.emb_offsets),
    ):
        given = checks.integers(given, name)
        if given.shape != own.shape or not given.is_cpu or not torch.equal(given.long(), own.long()):
            raise InputError(f"{name} do not belong to these ids and sizes; pass those of the lookup")
    checks.integers(indices, "indices", tuple(ids.shape))
    flat = checks.floats(id_grads, "id_grads", (int(blocks.floats.sum()),))
    if flat.dtype != torch.float32 or not flat.is_cpu:
        raise InputError(f"id_grads must be float32 on the CPU, got {flat.dtype} on {flat.device}")
    grads = dict(zip(blocks.ids, by_table(flat, blocks.floats), strict=True))
    present = {name: own for name, own in blocks.ids.items() if own.numel()}
    shards.apply_gradients(
        present,
        {name: grads[name].view(own.numel(), -1) for name, own in present.items()},
        step=step,
        time=seconds_of(req_time),
    )


fused_apply_gradients = fused_apply_gradient
"""An earlier name of this package for `fused_apply_gradient`."""


class _Blocks(NamedTuple):
    """The checked blocks of N requesting shards and K tables."""

    ids: dict[str, Tensor]  # by table, sorted: its ids, by shard
    floats: Tensor  # int64 [N, K]: the number of floats of each block
    id_offsets: Tensor
    emb_offsets: Tensor
    splits: Tensor


def _blocks(shards: LocalShards, ids: Tensor, sizes: Tensor, num_of_shards: int) -> _Blocks:
    names = sorted(checks.instance(shards, LocalShards, "shards").configs)
    for name, tensor in (("ids", ids), ("fused_slot_size", sizes)):
        if not checks.integers(tensor, name).is_cpu:
            raise InputError(f"{name} must be on the CPU, got {tensor.device}")
    count = checks.integer(num_of_shards, "num_of_shards")
    if sizes.numel() != count * len(names):
        raise InputError(
            f"fused_slot_size must have {count} shards x {len(names)} tables entries, got {sizes.numel()}"
        )
    sizes = sizes.long().view(count, len(names))
    if bool((sizes < 0).any()) or int(sizes.sum()) != ids.numel():
        raise InputError(
            f"fused_slot_size must not be negative and must add up to {ids.numel()} ids, got {sizes.tolist()}"
        )
    floats = sizes * torch.tensor([shards.configs[name].dim for name in names], device="cpu")
    own = dict(zip(names, by_table(ids, sizes), strict=True))
    return _Blocks(own, floats, *map(_small, (_starts(sizes), _starts(floats), floats.sum(1))))


def _small(x: Tensor) -> Tensor:
    """Convert to int32, Monolith's type, unless that would overflow."""
    return x.to(torch.int32) if not x.numel() or int(x.max()) < 2**31 else x
