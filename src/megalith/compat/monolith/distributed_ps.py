"""Monolith's tables on parameter servers, as thin objects over a `Shards`.

The tables of PartitionedHashTable are read and updated through layouts:

    lookup            ids of all features, split by table and server  ->  rows of each list  ->  layouts
    apply_gradients   gradients of the layouts  ->  of the rows of each list  ->  one step per distinct id

The lists are those of `sharding_sparse_fids`; `auxiliary_bundle` carries them from one call to the other.

    tables      a feature's ids are in                                            name of the table
    native      a table of its own; all features share one list of ids            the name of the feature
    not native  one table with all features whose config is equal                 md5 of their names
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from hashlib import md5
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from megalith.compat.monolith.embedding_combiners import (
    MonolithCombiner,
    MonolithFirstN,
    ReduceMean,
    ReduceSum,
)
from megalith.compat.monolith.feature_configs import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
)
from megalith.compat.monolith.layout_ops import fused_embedding_to_layout, fused_embedding_to_layout_grad
from megalith.compat.monolith.parsers import ShardedFids, ShardingSparseFidsOpParams, sharding_sparse_fids
from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.ps import ServerShards
from megalith.ragged import Ragged
from megalith.routing import Router
from megalith.shards import LocalShards, Lookup, Shards
from megalith.table import TableConfig

# ---- which table a feature uses

FAKE_TABLE = "native_multi_hash_table_fake_table"
"""The table of all features in the configs of native tables."""
POOLING = {ReduceSum: PoolingType.SUM, ReduceMean: PoolingType.MEAN, MonolithFirstN: PoolingType.FIRSTN}
_SLOT = re.compile(r"fc_slot_[0-9]*")


def get_sub_table_name(strs: Sequence[str]) -> tuple[str, str]:
    """Name a table of several features.

    Args:
        strs: The names of the features.

    Returns:
        The names joined by commas, and the md5 of that in hexadecimal.
    """
    if not isinstance(strs, list | tuple) or not all(isinstance(name, str) for name in strs):
        raise InputError(f"get_sub_table_name: strs must be a list of names, got {strs!r}")
    joined = ",".join(strs)
    return joined, md5(joined.encode(), usedforsecurity=False).hexdigest()


def grouped(configs: Mapping[str, TableConfig], native: bool) -> list[tuple[str, list[str]]]:
    """Return the tables that features use, each with its features."""
    if native:
        return [(name, [name]) for name in sorted(configs)]
    return [(get_sub_table_name(group)[1], group) for group in _equal_configs(configs)]


def restore_names(group: Sequence[str]) -> tuple[str, ...]:
    """Return the further names of a table of several features, see `extra_restore_names`."""
    if not any(_SLOT.fullmatch(name) for name in group):
        return ()
    slots = [name.removeprefix("fc_") if _SLOT.fullmatch(name) else name for name in group]
    return (get_sub_table_name(slots)[1],)


def named(config: TableConfig, name: str) -> TableConfig:
    """Return a config under another name, for Monolith's tables: ids without a row read as zeros."""
    return TableConfig(
        name,
        segments=config.segments,
        admission=config.admission,
        eviction=config.eviction,
        missing="zeros",
        dist_type=config.dist_type,
        trainable=config.trainable,
        huge_pages=config.huge_pages,
    )


def check_configs(configs: Any) -> None:
    if not isinstance(configs, Mapping) or not configs:
        raise InputError(f"feature_name_to_config must be a dict of TableConfigs by feature, got {configs!r}")
    for name, config in configs.items():
        if not isinstance(name, str) or not isinstance(config, TableConfig):
            raise InputError(f"feature_name_to_config[{name!r}] must be a TableConfig, got {config!r}")


def _equal_configs(configs: Mapping[str, TableConfig]) -> list[list[str]]:
    """Group the features whose configs are equal but for the name."""
    groups: list[tuple[TableConfig, list[str]]] = []
    for name in sorted(configs):
        key = named(configs[name], "table")
        group = next((group for known, group in groups if known == key), None)
        if group is None:
            groups.append((key, [name]))
        else:
            group.append(name)
    return [group for _, group in groups]


# ---- PartitionedHashTable

PREFIX = "__sharding_sparse_fids__"
"""Begins the keys of what `lookup` writes to the auxiliary bundle."""
Layouts = dict[str, Tensor | list[Tensor]]
Bundle = MutableMapping[str, Any]
ByServer = Mapping[int, Mapping[str, Any]]


class PartitionedHashTable:
    """See the module. Writes change the tables in place and return this object.

    Args:
        num_ps: The number of servers; 0: the tables are in this process.
        table_factory: Makes the tables: it receives the number of servers and the configs, and returns a
            `Shards` with the router "roundrobin". Monolith's makes the tables of one server. None:
            `ServerShards`, or `LocalShards` if num_ps is 0.
        use_native_multi_hash_table: As passed to `gen_feature_configs`.
        max_rpc_deadline_millis: Ignored; see `ServerShards.timeout`.
        queue_configs: Ignored; lookups and updates of `ServerShards` are asynchronous.
        parser_ctx: What `gen_feature_configs` returned, or an object with that as its attribute
            `sharding_sparse_fids_op_params`.

    Attributes:
        params: What `gen_feature_configs` returned.
        shards: The tables. `shards.close()` ends servers that were started here.
    """

    def __init__(
        self,
        num_ps: int,
        table_factory: Callable[[int, list[TableConfig]], Shards] | None,
        use_native_multi_hash_table: bool,
        max_rpc_deadline_millis: int = 30,
        queue_configs: Mapping[str, int] | None = None,
        parser_ctx: Any = None,
    ) -> None:
        where = "PartitionedHashTable"
        count = checks.integer(num_ps, f"{where}: num_ps", 0)
        checks.flag(use_native_multi_hash_table, f"{where}: use_native_multi_hash_table")
        checks.callback(table_factory, f"{where}: table_factory")
        found = getattr(parser_ctx, "sharding_sparse_fids_op_params", parser_ctx)
        if not isinstance(found, ShardingSparseFidsOpParams):
            raise InputError(f"{where}: parser_ctx must have what gen_feature_configs returned")
        self.params = found
        if found.num_ps != max(1, count):
            raise InputError(f"{where}: num_ps is {num_ps}, but the params are for {found.num_ps} servers")
        if found.use_native_multi_hash_table != (use_native_multi_hash_table and not found.transfer_float16):
            raise InputError(f"{where}: use_native_multi_hash_table differs from that of the params")
        configs = list(found.sub_table_name_to_config.values())
        if table_factory is not None:
            self.shards = table_factory(count, configs)
            if not isinstance(self.shards, Shards):
                raise InputError(
                    f"{where}: table_factory must return shards, got {type(self.shards).__name__}"
                )
        elif not count:
            self.shards = LocalShards(configs)
        else:
            wire = "float16" if found.transfer_float16 else "float32"
            self.shards = ServerShards(configs, num_servers=count, wire=wire)
        if list(self.shards.configs.values()) != configs:
            raise InputError(f"{where}: table_factory must make the tables {[c.name for c in configs]}")
        self._router = Router("roundrobin", found.num_ps)

    @classmethod
    def gen_feature_configs(
        cls,
        num_ps: int,
        feature_name_to_config: Mapping[str, TableConfig],
        layout_configs: Mapping[str, OutConfig],
        feature_to_unmerged_slice_dims: Mapping[str, Sequence[int]],
        feature_to_combiner: Mapping[str, MonolithCombiner],
        use_native_multi_hash_table: bool,
        transfer_float16: bool = False,
        unique: Callable[[], bool] | None = None,
        enable_gpu_emb: bool = False,
        use_gpu: bool = False,
    ) -> ShardingSparseFidsOpParams:
        """Decide which table each feature uses; see `table_grouping`.

        Args:
            num_ps: The number of servers; 0 counts as 1.
            feature_name_to_config: The table of each feature. Its name is not used.
            layout_configs: The layouts by name.
            feature_to_unmerged_slice_dims: The sizes of the parts of each feature's rows.
            feature_to_combiner: ReduceSum, ReduceMean or FirstN for each feature.
            use_native_multi_hash_table: Whether each feature has a table of its own. Otherwise features with
                equal configs share one, and one step is made for an id that several of them have.
            transfer_float16: Whether rows and gradients travel as float16; tables are then not native.
            unique: Returns whether an id is sent once per feature and server; None: it is.
            enable_gpu_emb: Must be False.
            use_gpu: Ignored.

        Returns:
            The tables and features, for the constructor.
        """
        where = "gen_feature_configs"
        count = max(1, checks.integer(num_ps, f"{where}: num_ps", 0))
        native = checks.flag(use_native_multi_hash_table, f"{where}: use_native_multi_hash_table")
        half = checks.flag(transfer_float16, f"{where}: transfer_float16")
        checks.flag(use_gpu, f"{where}: use_gpu")
        if checks.flag(enable_gpu_emb, f"{where}: enable_gpu_emb"):
            raise InputError(
                f'{where}: enable_gpu_emb is not supported: make shards with engine="cuda" instead'
            )
        if unique is not None:
            checks.callback(unique, f"{where}: unique", required=True)
        check_configs(feature_name_to_config)
        for name, value in (
            ("feature_to_unmerged_slice_dims", feature_to_unmerged_slice_dims),
            ("feature_to_combiner", feature_to_combiner),
        ):
            if not isinstance(value, Mapping) or set(value) != set(feature_name_to_config):
                raise InputError(f"{where}: {name} must have the features of feature_name_to_config")
        native = native and not half
        groups = grouped(feature_name_to_config, native)
        table_of = {name: FAKE_TABLE if native else table for table, group in groups for name in group}
        features = {}
        for name, config in sorted(feature_name_to_config.items()):
            combiner = feature_to_combiner[name]
            if type(combiner) not in POOLING:
                raise InputError(f"{where}: the combiner of {name!r} must be ReduceSum, ReduceMean or FirstN")
            dims = tuple(feature_to_unmerged_slice_dims[name])
            feature = FeatureConfig(table_of[name], POOLING[type(combiner)], dims, combiner.max_seq_length)
            if feature.dim != config.dim:
                raise InputError(
                    f"{where}: the slices of {name!r} have {feature.dim} columns, its rows {config.dim}"
                )
            features[name] = feature
        configs = FeatureConfigs(features, layout_configs)
        configs.validate()
        tables = {table: named(feature_name_to_config[group[0]], table) for table, group in groups}
        extra = {table: names for table, group in groups if (names := restore_names(group))}
        return ShardingSparseFidsOpParams(
            count,
            native,
            unique or (lambda: True),
            half,
            dict(sorted(tables.items())),
            configs,
            extra_restore_names={} if native else extra,
        )

    # ---- a batch

    def shard(self, features: Mapping[str, Ragged]) -> ShardedFids:
        """Split the ids of a batch by table and server; a data worker can do that ahead of `lookup`.

        Args:
            features: Ids by feature.

        Returns:
            The lists.
        """
        params = self.params
        unique = checks.flag(params.unique(), "PartitionedHashTable: the result of unique")
        return sharding_sparse_fids(features, self._router, params.feature_configs, unique=unique)

    def lookup(
        self,
        features: Mapping[str, Any] | ShardedFids,
        auxiliary_bundle: Bundle | None = None,
        ret_fused_layout_callable_fn: bool = False,
        ret_lookup_callable_fn: bool = False,
        embedding_prefetch_capacity: int = 0,
    ) -> Any:
        """Read the rows of a batch and assemble the layouts. Ids without a row read as zeros.

        Args:
            features: Ids by feature, or what `shard` returned.
            auxiliary_bundle: A dict that receives what `apply_gradients` needs, under Monolith's keys.
            ret_fused_layout_callable_fn: Whether to request the rows now and return a function that assembles
                the layouts.
            ret_lookup_callable_fn: Whether to return a function that does both.
            embedding_prefetch_capacity: Ignored; `megalith.Pipeline` prefetches.

        Returns:
            The layouts by name; a list of tensors for OutType.NONE. They are leaves that require a gradient,
            if gradients are enabled. Or a function of (auxiliary_bundle, features) that returns them.
        """
        checks.integer(embedding_prefetch_capacity, "lookup: embedding_prefetch_capacity", 0)
        late = checks.flag(ret_fused_layout_callable_fn, "lookup: ret_fused_layout_callable_fn")
        bundle = {} if auxiliary_bundle is None else _bundle(auxiliary_bundle)
        if checks.flag(ret_lookup_callable_fn, "lookup: ret_lookup_callable_fn"):
            return lambda auxiliary_bundle, features: self.lookup(features, auxiliary_bundle)
        self._request(features, bundle)
        if late:
            return lambda auxiliary_bundle, features: self._layouts(_bundle(auxiliary_bundle))
        return self._layouts(bundle)

    def _request(self, features: Any, bundle: Bundle) -> None:
        found = features
        if not isinstance(features, ShardedFids):
            if isinstance(features, Mapping):
                features = features.get(f"{PREFIX}sparse_features", features)
            found = self.shard(features)
        lists = found.lists
        splits = found.fid_list_row_splits
        if isinstance(splits, Mapping):
            splits = list(splits.values())
        assert isinstance(splits, list)
        names = self.params.feature_configs.table_names
        for number, (fids, split) in enumerate(zip(lists, splits, strict=True)):
            key = f"{PREFIX}{names[number // self.params.num_ps]}:{number % self.params.num_ps}"
            bundle[f"{key}:fids"], bundle[f"{key}:fids_row_split"] = fids, split
        for name in ("fid_offset", "feature_offset", "nfl_offset", "batch_size"):
            bundle[f"{PREFIX}{name}"] = getattr(found, name)
        ids = {
            table: torch.cat([fids[a:b] for fids, a, b in parts])
            for table, parts in self._parts(lists, splits)
        }
        lookup = self.shards.lookup(ids)
        lookup.fetch()
        bundle[f"{PREFIX}lists"], bundle[f"{PREFIX}splits"] = lists, splits
        bundle[f"{PREFIX}lookup"] = lookup

    def _parts(
        self, lists: Sequence[Tensor], splits: Sequence[Tensor]
    ) -> list[tuple[str, list[tuple[Tensor, int, int]]]]:
        """Return for each table the lists, and ranges of them, that hold its ids, in order."""
        params, count = self.params, self.params.num_ps
        if not params.use_native_multi_hash_table:
            tables = params.feature_configs.table_names
            return [
                (table, [(fids, 0, fids.numel()) for fids in lists[t * count : (t + 1) * count]])
                for t, table in enumerate(tables)
            ]
        features = params.feature_configs.feature_names
        bounds = [list(pairwise(split.tolist())) for split in splits]
        return [
            (name, [(lists[ps], *bounds[ps][f]) for ps in range(count)]) for f, name in enumerate(features)
        ]

    def _embeddings(self, bundle: Bundle) -> list[Tensor]:
        """Return the rows of each list, flat."""
        lists, splits = bundle[f"{PREFIX}lists"], bundle[f"{PREFIX}splits"]
        rows = bundle[f"{PREFIX}lookup"].rows
        pieces: list[list[Tensor]] = [[] for _ in lists]
        for table, parts in self._parts(lists, splits):
            own = rows[table].split_with_sizes([b - a for _, a, b in parts])
            for number, piece in zip(self._numbers(table), own, strict=True):
                pieces[number].append(piece.reshape(-1))
        return [torch.cat(each) if each else torch.empty(0, device="cpu") for each in pieces]

    def _numbers(self, table: str) -> range:
        """Return the lists that hold ids of a table."""
        params, count = self.params, self.params.num_ps
        first = 0 if params.use_native_multi_hash_table else params.feature_configs.table_names.index(table)
        return range(first * count, (first + 1) * count)

    def _layouts(self, bundle: Bundle) -> Layouts:
        embeddings = self._embeddings(bundle)
        names = self.params.feature_configs.table_names
        for number, rows in enumerate(embeddings):
            table, ps = names[number // self.params.num_ps], number % self.params.num_ps
            bundle[f"{PREFIX}{table}:{ps}:embs"] = rows
        found = fused_embedding_to_layout(embeddings, None, **self._encoding(bundle))
        return self.nest_layout([x.detach().requires_grad_(torch.is_grad_enabled()) for x in found])

    def _encoding(self, bundle: Bundle) -> dict[str, Any]:
        offsets = ("fid_offset", "feature_offset", "nfl_offset")
        return {name: bundle[f"{PREFIX}{name}"] for name in offsets} | {
            "batch_size": int(bundle[f"{PREFIX}batch_size"]),
            "variant_type": "example_batch",
            "feature_cfgs": self.params.feature_configs,
            "ps_num": self._router,
        }

    def apply_gradients(
        self,
        layout_grads_and_vars: Sequence[tuple[Tensor, Any]],
        global_step: int | Tensor,
        req_time: float | Tensor | None = None,
        auxiliary_bundle: Bundle | None = None,
        async_function_mgr: object = None,
        async_push: bool = False,
        grad_scale: float | Tensor | None = None,
    ) -> PartitionedHashTable:
        """Make one optimizer step per distinct id with the gradients of the layouts of a lookup.

        Args:
            layout_grads_and_vars: (gradient, layout) in the order of `flatten_layout`.
            global_step: The step, an int or a tensor of one element.
            req_time: The last-update time of the rows in seconds; the largest element of a tensor; None: the
                clock of the servers.
            auxiliary_bundle: What `lookup` filled; it can be used once.
            async_function_mgr: Ignored.
            async_push: Whether to return before the gradients are applied; `shards.flush()` waits.
            grad_scale: A factor for all gradients.

        Returns:
            This object.

        Raises:
            UsageError: The bundle is not that of a lookup, or was used.
            InputError: The gradients do not match the layouts.
        """
        bundle = _bundle(auxiliary_bundle)
        later = checks.flag(async_push, "apply_gradients: async_push")
        lookup = bundle.get(f"{PREFIX}lookup")
        if not isinstance(lookup, Lookup):
            raise UsageError("apply_gradients: auxiliary_bundle must be the one that lookup has filled")
        if not isinstance(layout_grads_and_vars, list | tuple) or not all(
            isinstance(pair, list | tuple) and len(pair) == 2 for pair in layout_grads_and_vars
        ):
            raise InputError("apply_gradients: layout_grads_and_vars must be a list of (gradient, layout)")
        step = checks.scalar(global_step, "global_step") if isinstance(global_step, Tensor) else global_step
        if isinstance(req_time, Tensor):
            plain = req_time.layout == torch.strided and not req_time.is_meta and not req_time.is_complex()
            if not plain or not req_time.numel():
                raise InputError("apply_gradients: req_time must be numbers")
            req_time = float(req_time.to(torch.float64).max())
        embeddings = self._embeddings(bundle)
        grads = fused_embedding_to_layout_grad(
            embeddings_list=embeddings,
            fid_list_row_split=None,
            layout_tensors_grad=[grad for grad, _ in layout_grads_and_vars],
            layout_tensors_grad_scale=grad_scale,
            **self._encoding(bundle),
        )
        lists, splits = bundle[f"{PREFIX}lists"], bundle[f"{PREFIX}splits"]
        taken = [0] * len(lists)
        by_table: dict[str, Tensor] = {}
        for table, parts in self._parts(lists, splits):
            dim = self.shards.configs[table].dim
            pieces = []
            for number, (_, a, b) in zip(self._numbers(table), parts, strict=True):
                pieces.append(grads[number][taken[number] :][: (b - a) * dim].view(-1, dim))
                taken[number] += (b - a) * dim
            by_table[table] = torch.cat(pieces)
        self.shards.apply_gradients(lookup, by_table, step=step, time=req_time, wait=not later)
        if not later:
            self.shards.flush()
        return self

    # ---- rows

    def assign(self, data: ByServer) -> PartitionedHashTable:
        """Set rows. Of repeated ids the last one wins.

        Args:
            data: (fids int64 [n], embeddings float32 [n, dim]) by server and table.

        Returns:
            This object.

        Raises:
            InputError: An id is not one of that server, or something else is wrong.
        """
        self.shards.assign(self._merged(data))
        return self

    def assign_add(self, data: ByServer) -> PartitionedHashTable:
        """Add to rows.

        Args:
            data: As for `assign`.

        Returns:
            This object.
        """
        self.shards.assign_add(self._merged(data))
        return self

    def _merged(self, data: ByServer) -> dict[str, tuple[Tensor, Tensor]]:
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for ps, tables in self._by_server(data):
            for name, pair in tables.items():
                ids, rows = self.shards.checks[name].ids_and_rows(pair)
                self._check_owner(ps, name, ids)
                parts.setdefault(name, []).append((ids, rows))
        return {
            name: (torch.cat([ids for ids, _ in each]), torch.cat([rows for _, rows in each]))
            for name, each in parts.items()
        }

    def _by_server(self, data: ByServer) -> list[tuple[int, Mapping[str, Any]]]:
        good = isinstance(data, Mapping) and all(isinstance(tables, Mapping) for tables in data.values())
        if not good:
            raise InputError(f"data must be {{server: {{table: ...}}}}, got {checks.kind(data)}")
        for ps, tables in data.items():
            if isinstance(ps, bool) or not isinstance(ps, int) or not 0 <= ps < self.params.num_ps:
                raise InputError(f"data: there is no server {ps!r}; there are {self.params.num_ps}")
            for name in tables:
                self.shards.check_name(name)
        return list(data.items())

    def _check_owner(self, ps: int, table: str, ids: Tensor) -> None:
        wrong = ids[self._router.owner(ids) != ps]
        if wrong.numel():
            raise InputError(f"table {table!r}: id {int(wrong[0])} is not one of server {ps}")

    def _lookup_raw(self, data: ByServer) -> dict[int, dict[str, Tensor]]:
        """Read rows by server and table: {server: {table: ids}} -> {server: {table: rows}}."""
        found: dict[int, dict[str, Tensor]] = {}
        for ps, tables in self._by_server(data):
            for name, ids in tables.items():
                self._check_owner(ps, name, self.shards.checks[name].ids(ids))
            rows = self.shards.lookup(tables).rows
            found[ps] = {name: rows[name] for name in tables}
        return found

    # ---- layouts

    def flatten_layout(self, layouts: Mapping[str, Tensor | Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensors of all layouts as a list.

        Args:
            layouts: The layouts by name; a list of tensors for OutType.NONE.

        Returns:
            The tensors, layouts sorted by name.
        """
        configs = self.params.feature_configs.out_configs
        if not isinstance(layouts, Mapping) or set(layouts) != set(configs):
            raise InputError(f"flatten_layout: layouts must have the names {sorted(configs)}")
        flat: list[Tensor] = []
        for name in sorted(configs):
            value = layouts[name]
            tensors: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
            if len(tensors) != self._size(name) or not all(isinstance(x, Tensor) for x in tensors):
                raise InputError(f"flatten_layout: layout {name!r} must have {self._size(name)} tensors")
            flat += tensors
        return flat

    def nest_layout(self, tensors: Sequence[Tensor]) -> Layouts:
        """Return the layouts of a list of tensors, the inverse of `flatten_layout`.

        Args:
            tensors: The tensors, layouts sorted by name.

        Returns:
            The layouts by name.
        """
        configs = self.params.feature_configs.out_configs
        total = sum(self._size(name) for name in configs)
        if not isinstance(tensors, list | tuple) or len(tensors) != total:
            raise InputError(f"nest_layout: there must be a list of {total} tensors")
        nested: Layouts = {}
        at = 0
        for name in sorted(configs):
            own = list(tensors[at : at + self._size(name)])
            at += len(own)
            nested[name] = own if configs[name].out_type == OutType.NONE else own[0]
        return nested

    def _size(self, layout: str) -> int:
        out = self.params.feature_configs.out_configs[layout]
        return len(out.slice_configs) if out.out_type == OutType.NONE else 1

    def get_queue_hooks(self) -> list[object]:
        """Return the hooks of prefetch queues: there are none."""
        return []


def _bundle(value: Any) -> Bundle:
    if not isinstance(value, MutableMapping):
        raise InputError(f"auxiliary_bundle must be a dict, got {checks.kind(value)}")
    return value


def ps_device(index: int) -> str:
    """Return the name of a parameter server.

    Args:
        index: The number of the server, from 0.

    Returns:
        The name, such as "/job:ps/task:1/device:CPU:0".
    """
    return f"/job:ps/task:{checks.integer(index, 'index', least=0)}/device:CPU:0"
