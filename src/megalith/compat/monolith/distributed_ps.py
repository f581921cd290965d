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
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from hashlib import md5
from typing import Any, Self

import torch
from torch import Tensor

from megalith.compat.monolith import export_context
from megalith.compat.monolith.distributed_ps_sync import (
    Bundle,
    MonolithSlotTables,
    MonolithTables,
    bundle_of,
    configs_or_shards,
    named,
    seconds_of,
    step_of,
)
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
from megalith.compat.monolith.parsers import (
    OFFSETS,
    PREFIX,
    SIZES,
    ShardedFids,
    ShardingSparseFidsOpParams,
    get_default_parser_ctx,
    lists_of,
    sharding_sparse_fids,
    split_features,
)
from megalith.distributed.ranks import has_process_group
from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.ps import ServerShards
from megalith.ragged import Ragged
from megalith.routing import Router
from megalith.shards import LocalShards, Lookup, Shards, SyncShards
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


def restore_names(group: Sequence[str]) -> tuple[str, ...]:
    """Return the further names of a table of several features, see `extra_restore_names`."""
    if not any(_SLOT.fullmatch(name) for name in group):
        return ()
    slots = [name.removeprefix("fc_") if _SLOT.fullmatch(name) else name for name in group]
    return (get_sub_table_name(slots)[1],)


def check_configs(configs: Any, what: str = "feature_name_to_config") -> None:
    if not isinstance(configs, Mapping) or not configs:
        raise InputError(f"{what} must be a dict of TableConfigs by name, got {configs!r}")
    for name, config in configs.items():
        if not isinstance(name, str) or not isinstance(config, TableConfig):
            raise InputError(f"{what}[{name!r}] must be a TableConfig, got {config!r}")


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


def ps_device(index: int) -> str:
    """Return the name of a parameter server, such as "/job:ps/task:1/device:CPU:0"."""
    return f"/job:ps/task:{checks.integer(index, 'index', least=0)}/device:CPU:0"


# ---- tables by id or slot

DEADLINE_MILLIS = 30
"""Monolith's default, which it never applies."""


def _make_tables(
    where: str,
    num_ps: int,
    configs: Mapping[str, TableConfig],
    factory: Callable[[int, Any], Any] | None,
    *,
    own: Any = None,
    half: bool = False,
    millis: float = DEADLINE_MILLIS,
    native: bool = False,
) -> Shards:
    """Return the tables of `num_ps` servers: what the factory makes of `own`, or those of the configs."""
    count = checks.integer(num_ps, f"{where}: num_ps", 0)
    checks.callback(factory, f"{where}: table_factory")
    checks.number(millis, f"{where}: max_rpc_deadline_millis")
    ctx = export_context.get_current_export_ctx() if export_context.is_exporting_distributed() else None
    for i in range(count if ctx else 0):
        assert ctx is not None
        graph = ctx.sub_graph(f"ps_{i}")
        ctx.add_signature(graph, "lookup", dict(configs), dict(configs))
        if native:
            ctx.add_signature(graph, "raw_lookup", {"id": None, "id_split": None}, {"flat_emb": None})
    made: Shards | list[TableConfig] = [config for _, config in sorted(configs.items())]
    for i in range(max(1, count) if factory else 0):
        assert factory is not None
        found = configs_or_shards(factory(i, configs if own is None else own), where)
        if i and found != made:
            raise InputError(f"{where}: table_factory must return the same configs for every server")
        made = found
        if isinstance(made, Shards):
            break
    if isinstance(made, Shards):
        if set(made.configs) != set(configs):
            raise InputError(f"{where}: table_factory must make the tables {sorted(configs)}")
        return made
    if not count or export_context.is_exporting():
        return LocalShards(made)
    timeout: dict[str, Any] = {} if millis == DEADLINE_MILLIS else {"timeout": millis / 1000}
    return ServerShards(made, num_servers=count, wire="float16" if half else "float32", **timeout)


def pairs_of(value: Any, what: str, of: str = "(gradient, layout)") -> list[Any]:
    """Check a list of pairs."""
    found = checks.as_list(value, what)
    if not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in found):
        raise InputError(f"{what} must hold {of}")
    return found


def _columns(parts: Mapping[str, list[tuple[Any, Any]]]) -> Iterator[tuple[str, list[Any]]]:
    """Turn the pairs of each name into two lists."""
    return ((name, list(zip(*pairs, strict=True))) for name, pairs in parts.items())


def _leaf(rows: Tensor) -> Tensor:
    """Rows that require a gradient, if gradients are enabled: backward stops at them."""
    return rows.detach().requires_grad_(torch.is_grad_enabled())


class DistributedHashTable(MonolithTables):
    """One table on parameter servers, under Monolith's calls.

    Args:
        ps_num: The number of servers; 0: the table is in this process.
        config: The config of the table.
        hash_table_factory: Called with the number of each server and the config; returns the TableConfig of
            the server's table, or shards with the table. None: `config` is that of all servers.
    """

    def __init__(
        self, ps_num: int, config: TableConfig, hash_table_factory: Callable[[int, Any], Any] | None = None
    ) -> None:
        where = "DistributedHashTable"
        self._name = checks.instance(config, TableConfig, f"{where}: config").name
        own = named(config, self._name)
        self._take(_make_tables(where, ps_num, {self._name: own}, hash_table_factory, own=own), None)

    @property
    def dim_size(self) -> int:
        """The number of weights of a row."""
        return self.shards.configs[self._name].dim

    def lookup(self, ids: Tensor, use_multi_threads: bool = False) -> Tensor:
        """Read rows; ids without a row read as zeros.

        Returns:
            float32 [n, dim], a leaf that requires a gradient if gradients are enabled.
        """
        return _leaf(self.shards.lookup({self._name: ids}).rows[self._name])

    def assign(self, ids: Tensor, values: Tensor, req_time: Any = 0) -> Self:
        """Set rows. Of repeated ids the last one wins.

        Args:
            req_time: The last-update time in seconds; 0: the clock.
        """
        self.shards.assign({self._name: (ids, values)}, time=seconds_of(req_time))
        return self

    def assign_add(self, ids: Tensor, values: Tensor, req_time: Any = 0) -> Self:
        """Add to rows."""
        self.shards.assign_add({self._name: (ids, values)}, time=seconds_of(req_time))
        return self

    def apply_gradients(
        self, ids: Tensor, grads: Tensor, global_step: int | Tensor, req_time: Any = 0
    ) -> Self:
        """Make one optimizer step per distinct id, with its gradients summed."""
        _apply(self.shards, {self._name: ids}, {self._name: grads}, global_step, req_time)
        return self


def _apply(shards: Shards, ids: Any, grads: Mapping[str, Tensor], global_step: Any, req_time: Any) -> None:
    shards.apply_gradients(ids, grads, step=step_of(global_step), time=seconds_of(req_time))
    shards.flush()


class DistributedMultiTypeHashTable(MonolithSlotTables):
    """The tables of several slots on parameter servers, under Monolith's calls.

    Args:
        num_ps: The number of servers; 0: the tables are in this process.
        slot_to_config: The config of each slot; its name is not used.
        table_factory: Called with the number of each server and slot_to_config; returns the TableConfigs of
            the server's tables, as a list or by slot, or shards with all tables. None: slot_to_config.
        transfer_float16: Whether rows and gradients travel as float16; tables are then not native.
        max_rpc_deadline_millis: The time that a server may take for a call; 30, Monolith's default, which it
            never applies, is the timeout of `ServerShards`.
        use_native_multi_hash_table: How an unknown slot is treated, as in Monolith: `lookup` of native tables
            leaves it out, and that of others raises UnknownNameError, a KeyError.
    """

    def __init__(
        self,
        num_ps: int,
        slot_to_config: Mapping[str, TableConfig],
        table_factory: Callable[[int, Any], Any] | None = None,
        transfer_float16: bool = False,
        max_rpc_deadline_millis: float = DEADLINE_MILLIS,
        *,
        use_native_multi_hash_table: bool = True,
    ) -> None:
        where = "DistributedMultiTypeHashTable"
        check_configs(slot_to_config, "slot_to_config")
        half = checks.flag(transfer_float16, f"{where}: transfer_float16")
        native = checks.flag(use_native_multi_hash_table, f"{where}: use_native_multi_hash_table")
        self._native = native and not half
        configs = {slot: named(config, slot) for slot, config in slot_to_config.items()}
        options: dict[str, Any] = {"half": half, "millis": max_rpc_deadline_millis, "native": self._native}
        self._take(_make_tables(where, num_ps, configs, table_factory, **options), None)

    def lookup(self, slot_to_id: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Read rows; ids without a row read as zeros.

        Args:
            slot_to_id: int64 [n] by slot.

        Returns:
            float32 [n, dim] by slot: leaves that require a gradient if gradients are enabled.

        Raises:
            UnknownNameError: There is no such slot, and the tables are not native.
        """
        found = self.shards.lookup(slot_to_id, missing_ok=self._native)
        return {slot: _leaf(found.rows[slot]) for slot in slot_to_id if slot in found.ids}

    def apply_gradients(
        self,
        slot_to_id_and_grad: Mapping[str, tuple[Tensor, Tensor]],
        global_step: int | Tensor,
        req_time: Any = 0,
    ) -> Self:
        """Make one optimizer step per distinct id of each slot, with its gradients summed.

        Args:
            slot_to_id_and_grad: (ids int64 [n], gradients float32 [n, dim]) by slot.
            req_time: The last-update time of the rows in seconds; 0: the clock of the servers.
        """
        given = checks.mapping(slot_to_id_and_grad, "slot_to_id_and_grad", "{slot: (ids, grads)}")
        pairs = pairs_of(list(given.values()), "slot_to_id_and_grad", "(ids, grads) by slot")
        ids, grads = ({slot: pair[k] for slot, pair in zip(given, pairs, strict=True)} for k in (0, 1))
        _apply(self.shards, ids, grads, global_step, req_time)
        return self


# ---- PartitionedHashTable

_SPLIT, _LOOKUP = f"{PREFIX}split", f"{PREFIX}lookup"
Layouts = dict[str, Tensor | list[Tensor]]
ByServer = Mapping[int, Mapping[str, Any]]


class PartitionedHashTable(MonolithTables):
    """Tables that are read and updated through layouts; see the module.

    Args:
        num_ps: The number of servers; 0: the tables are in this process. With enable_gpu_emb it is the number
            of ranks, and the tables have the engine "cuda".
        table_factory: Called with the number of each server and the configs by table; returns TableConfigs,
            or shards with all tables and the router "roundrobin". None: the configs of the params.
        use_native_multi_hash_table: As passed to `gen_feature_configs`.
        parser_ctx: A ParserCtx with what `gen_feature_configs` returned, or that itself; None: the
            `get_default_parser_ctx()`.

    Attributes:
        params: What `gen_feature_configs` returned.
        shards: The tables. `shards.close()` ends servers that were started here.
    """

    def __init__(
        self,
        num_ps: int,
        table_factory: Callable[[int, Any], Any] | None,
        use_native_multi_hash_table: bool,
        max_rpc_deadline_millis: float = DEADLINE_MILLIS,
        queue_configs: Mapping[str, int] | None = None,
        parser_ctx: Any = None,
    ) -> None:
        where = "PartitionedHashTable"
        count = checks.integer(num_ps, f"{where}: num_ps", 0)
        checks.flag(use_native_multi_hash_table, f"{where}: use_native_multi_hash_table")
        context = get_default_parser_ctx() if parser_ctx is None else parser_ctx
        found = getattr(context, "sharding_sparse_fids_op_params", context)
        if not isinstance(found, ShardingSparseFidsOpParams):
            raise InputError(f"{where}: parser_ctx must have what gen_feature_configs returned")
        self.params = found
        self._input_type = getattr(context, "parser_type", None) or "example_batch"
        if found.num_ps != max(1, count):
            raise InputError(f"{where}: num_ps is {num_ps}, but the params are for {found.num_ps} servers")
        if found.use_native_multi_hash_table != (use_native_multi_hash_table and not found.transfer_float16):
            raise InputError(f"{where}: use_native_multi_hash_table differs from that of the params")
        configs = found.sub_table_name_to_config
        if found.enable_gpu_emb and table_factory is None:
            grouped = has_process_group()
            own = list(configs.values())
            shards: Shards = SyncShards(own, engine="cuda") if grouped else LocalShards(own, engine="cuda")
        else:
            options: dict[str, Any] = {"half": found.transfer_float16, "millis": max_rpc_deadline_millis}
            options["native"] = found.use_native_multi_hash_table
            shards = _make_tables(where, count, configs, table_factory, **options)
        engines = {table.engine for table in shards.local.values()}
        if found.enable_gpu_emb and (engines != {"cuda"} or shards.world_size != found.num_ps):
            raise InputError(
                f"{where}: with enable_gpu_emb the tables need the engine 'cuda' on {found.num_ps} ranks: "
                "start as many, with a process group, or give gen_feature_configs their number as num_ps"
            )
        self._take(shards, queue_configs)
        self._router = Router("roundrobin", found.num_ps)
        # All features of native tables share the lists of one name.
        self._shares_lists = found.feature_configs.table_names == (FAKE_TABLE,)

    @property
    def slot_mapping(self) -> dict[str, str]:
        """The table of each feature."""
        configs = self.params.feature_configs.feature_configs
        return {
            name: name if config.table == FAKE_TABLE else config.table for name, config in configs.items()
        }

    @classmethod
    def merge_feature_config(
        cls, feature_name_to_config: Mapping[str, TableConfig]
    ) -> tuple[dict[str, TableConfig], dict[str, str]]:
        """Let features with equal configs share a table.

        Args:
            feature_name_to_config: The table of each feature. Its name is not used.

        Returns:
            The configs by table, and the table of each feature.
        """
        check_configs(feature_name_to_config)
        groups = [(get_sub_table_name(group)[1], group) for group in _equal_configs(feature_name_to_config)]
        tables = {table: named(feature_name_to_config[group[0]], table) for table, group in sorted(groups)}
        return tables, {name: table for table, group in groups for name in group}

    @classmethod
    def no_merge_feature_config(
        cls, feature_name_to_config: Mapping[str, TableConfig], use_same_table: bool
    ) -> tuple[dict[str, TableConfig], dict[str, str]]:
        """Give each feature a table of its own.

        Args:
            feature_name_to_config: The table of each feature. Its name is not used.
            use_same_table: Whether all features share lists of ids, as of one table.

        Returns:
            The configs by table, and the name in FeatureConfig.table of each feature.
        """
        check_configs(feature_name_to_config)
        same = checks.flag(use_same_table, "no_merge_feature_config: use_same_table")
        tables = {name: named(feature_name_to_config[name], name) for name in sorted(feature_name_to_config)}
        return tables, {name: FAKE_TABLE if same else name for name in tables}

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
        """Decide which table each feature uses; see the table of the module.

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
            enable_gpu_emb: Whether the tables are on GPUs, one part for each rank (num_ps is their number).
            use_gpu: Whether layouts are assembled on a GPU, if there is one.

        Returns:
            The tables and features, for the constructor.
        """
        where = "gen_feature_configs"
        count = max(1, checks.integer(num_ps, f"{where}: num_ps", 0))
        native = checks.flag(use_native_multi_hash_table, f"{where}: use_native_multi_hash_table")
        half = checks.flag(transfer_float16, f"{where}: transfer_float16")
        use_gpu = checks.flag(use_gpu, f"{where}: use_gpu")
        on_gpu = checks.flag(enable_gpu_emb, f"{where}: enable_gpu_emb")
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
        if native:
            tables, table_of = cls.no_merge_feature_config(feature_name_to_config, use_same_table=not on_gpu)
        else:
            tables, table_of = cls.merge_feature_config(feature_name_to_config)
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
        extra = {}
        for table in () if native else tables:
            if names := restore_names([name for name in sorted(table_of) if table_of[name] == table]):
                extra[table] = names
        return ShardingSparseFidsOpParams(
            count, native, unique or (lambda: True), half, tables, configs, on_gpu, use_gpu, extra
        )

    # ---- a batch

    def shard(self, features: Mapping[str, Ragged]) -> ShardedFids:
        """Split the ids of a batch by table and server; a data worker can do that ahead of `lookup`."""
        params = self.params
        unique = checks.flag(params.unique(), "PartitionedHashTable: the result of unique")
        configs, input_type = params.feature_configs, self._input_type
        return sharding_sparse_fids(features, self._router, configs, unique=unique, input_type=input_type)

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
            features: Ids by feature, also under the key "__sharding_sparse_fids__sparse_features"; or what
                `sharding_sparse_fids_with_context` wrote, which is removed; or what `shard` returned.
            auxiliary_bundle: A dict that receives what `apply_gradients` needs, under Monolith's keys.
            ret_fused_layout_callable_fn: Whether to request the rows now and return a function that assembles
                the layouts.
            ret_lookup_callable_fn: Whether to split the ids now, and return a function that does the rest.

        Returns:
            The layouts by name; a list of tensors for OutType.NONE. They are leaves that require a gradient,
            if gradients are enabled. Or a function of (auxiliary_bundle, features) that returns them.
        """
        ahead = checks.integer(embedding_prefetch_capacity, "lookup: embedding_prefetch_capacity", 0)
        late = checks.flag(ret_fused_layout_callable_fn, "lookup: ret_fused_layout_callable_fn")
        bundle: Bundle = {} if auxiliary_bundle is None else bundle_of(auxiliary_bundle)
        if checks.flag(ret_lookup_callable_fn, "lookup: ret_lookup_callable_fn"):
            if features:
                self._split(features, bundle)
            return lambda auxiliary_bundle, features: self._later(bundle_of(auxiliary_bundle), features)
        try:
            self._split(features, bundle)
        except Exception as error:  # the other ranks look up
            self._fail(error, 0 if late else max(self._ahead, ahead))
        if late:
            lookup = self.shards.lookup(self._ids(bundle))
            lookup.fetch()
            return lambda auxiliary_bundle, features: self._layouts(
                lookup, bundle_of(auxiliary_bundle), bundle
            )
        names = sorted(self.params.feature_configs.out_configs)
        return self._started(self._ids(bundle), names, lambda lookup: self._layouts(lookup, bundle), ahead)

    def _later(self, bundle: Bundle, features: Any) -> Layouts:
        if _SPLIT not in bundle:
            self._split(features, bundle)
        return self._layouts(self.shards.lookup(self._ids(bundle)), bundle)

    def _split(self, features: Any, bundle: Bundle) -> None:
        """Split the ids of a batch, unless they are split, and write what that gives to the bundle."""
        found = features
        if isinstance(features, MutableMapping) and (split := split_features(features, self.params)):
            found = split
        elif not isinstance(features, ShardedFids):
            if isinstance(features, Mapping):
                features = features.get(f"{PREFIX}sparse_features", features)
            found = self.shard(features)
        lists, configs, count = lists_of(found, self.params), self.params.feature_configs, self.params.num_ps
        names = configs.table_names
        splits: Any = found.fid_list_row_splits
        if isinstance(splits, Mapping):
            splits = [splits.get(f"{table}:{ps}") for table in names for ps in range(count)]
        if self._shares_lists and (len(splits) != len(lists) or any(each is None for each in splits)):
            raise InputError(f"features must have {PREFIX}shards_row_split of every list of native tables")
        for number, fids in enumerate(lists):
            table, ps = names[number // count], number % count
            own: dict[str, Any] = {f"shards@{ps}@{table}": fids, f"{table}:{ps}:fids": fids}
            if self._shares_lists:
                size = torch.tensor([splits[number].shape[0]], device="cpu")
                own |= {f"shards_row_split@{ps}@{table}": splits[number]}
                own |= {f"shards_row_split_size@{ps}@{table}": size}
                own |= {f"{table}:{ps}:fids_row_split": splits[number]}
            for key, value in own.items():
                if key.startswith("shards") or not export_context.is_exporting():
                    bundle[PREFIX + key] = value
        for name in (*OFFSETS, *SIZES, "fid_list_emb_row_lenth"):
            if getattr(found, name) is not None:
                bundle[PREFIX + name] = getattr(found, name)
        if self._shares_lists:
            bounds = [split.tolist() for split in splits]
            parts = {
                name: [(ps, *bounds[ps][f : f + 2]) for ps in range(count)]
                for f, name in enumerate(configs.feature_names)
            }
        else:
            numbers = {table: range(t * count, (t + 1) * count) for t, table in enumerate(names)}
            parts = {table: [(k, 0, lists[k].numel()) for k in own] for table, own in numbers.items()}
        bundle[_SPLIT] = lists, parts

    def _ids(self, bundle: Bundle) -> dict[str, Tensor]:
        lists, parts = bundle[_SPLIT]
        return {
            table: torch.cat([lists[k][a:b] for k, a, b in own]).to(self.shards.device)
            for table, own in parts.items()
        }

    def _layouts(self, lookup: Lookup, bundle: Bundle, split: Bundle | None = None) -> Layouts:
        bundle.update({key: value for key, value in (split or {}).items() if key not in bundle})
        lists, parts = bundle[_SPLIT]
        pieces: list[list[Tensor]] = [[] for _ in lists]
        for table, own in parts.items():
            rows = lookup.rows[table].split_with_sizes([b - a for _, a, b in own])
            for (k, _, _), piece in zip(own, rows, strict=True):
                pieces[k].append(piece.reshape(-1))
        embeddings = [torch.cat(each) for each in pieces]
        if self.params.use_gpu and torch.cuda.is_available():
            embeddings = [each.cuda() for each in embeddings]
        bundle.update(zip(self._embs, embeddings, strict=True))
        bundle[_LOOKUP] = lookup
        found = fused_embedding_to_layout(embeddings, None, **self._encoding(bundle))
        return self.nest_layout([_leaf(each) for each in found])

    @property
    def _embs(self) -> list[str]:
        """The keys of the rows of each list."""
        tables, count = self.params.feature_configs.table_names, self.params.num_ps
        return [f"{PREFIX}{table}:{ps}:embs" for table in tables for ps in range(count)]

    def _encoding(self, bundle: Bundle) -> dict[str, Any]:
        return {name: bundle[f"{PREFIX}{name}"] for name in OFFSETS if name != "batch_size"} | {
            "batch_size": checks.scalar(bundle[f"{PREFIX}batch_size"], "batch_size"),
            "variant_type": "example_batch",
            "feature_cfgs": self.params.feature_configs,
            "ps_num": self._router,
        }

    def tensor_move_to_gpu(self, tensors: Sequence[tuple[Bundle, Sequence[str]]]) -> None:
        """Move the tensors of dicts to the GPU, if there is one.

        Args:
            tensors: Pairs of a dict, which is changed, and the keys that stay where they are.
        """
        for values, kept in pairs_of(tensors, "tensor_move_to_gpu: tensors", "(dict, keys that stay)"):
            for key, value in bundle_of(values).items():
                if isinstance(value, Tensor) and key not in kept and torch.cuda.is_available():
                    values[key] = value.cuda()

    def apply_gradients(
        self,
        layout_grads_and_vars: Sequence[tuple[Tensor, Any]],
        global_step: int | Tensor,
        req_time: float | Tensor | None = None,
        auxiliary_bundle: Bundle | None = None,
        async_function_mgr: object = None,
        async_push: bool = False,
        grad_scale: float | Tensor | None = None,
    ) -> Self:
        """Make one optimizer step per distinct id with the gradients of the layouts of a lookup.

        Args:
            layout_grads_and_vars: (gradient, layout) in the order of `flatten_layout`.
            req_time: The last-update time of the rows in seconds, the largest of a tensor; 0 and None: the
                clock of the servers.
            auxiliary_bundle: What `lookup` filled; it can be used once.
            async_push: Whether to return before the gradients are applied; `shards.flush()` waits.
            grad_scale: A factor for all gradients.

        Raises:
            UsageError: The bundle is not that of a lookup, or was used.
            InputError: The gradients do not match the layouts.
        """
        bundle = bundle_of(auxiliary_bundle)
        lookup = bundle.get(_LOOKUP)
        if not isinstance(lookup, Lookup):
            raise UsageError("apply_gradients: auxiliary_bundle must be the one that lookup has filled")
        try:
            later = checks.flag(async_push, "apply_gradients: async_push") or self._push
            pairs = pairs_of(layout_grads_and_vars, "apply_gradients: layout_grads_and_vars")
            step, time = step_of(global_step), seconds_of(req_time)
            grads = self._gradients([grad for grad, _ in pairs], grad_scale, bundle)
        except Exception as error:  # the other ranks have gradients
            lookup.fail(error)
        self.shards.apply_gradients(lookup, grads, step=step, time=time, wait=not later)
        if not later:
            self.shards.flush()
        return self

    def _gradients(self, layouts: list[Tensor], scale: Any, bundle: Bundle) -> dict[str, Tensor]:
        """Return the gradients of the rows of each table."""
        grads = fused_embedding_to_layout_grad(
            embeddings_list=[bundle[key] for key in self._embs],
            fid_list_row_split=None,
            layout_tensors_grad=layouts,
            layout_tensors_grad_scale=scale,
            **self._encoding(bundle),
        )
        begins = [0] * len(grads)
        found = {}
        for table, parts in bundle[_SPLIT][1].items():
            dim, pieces = self.shards.configs[table].dim, []
            for k, a, b in parts:
                pieces.append(grads[k][begins[k] : begins[k] + (b - a) * dim].view(-1, dim))
                begins[k] += (b - a) * dim
            found[table] = torch.cat(pieces).to(self.shards.device)
        return found

    # ---- rows

    def assign(self, data: ByServer) -> Self:
        """Set rows. Of repeated ids the last one wins.

        Args:
            data: (fids int64 [n], embeddings float32 [n, dim]) by server and table; a server is a rank with
                enable_gpu_emb, and each rank may give rows of all ranks.

        Raises:
            InputError: An id is not one of that server, or something else is wrong.
        """
        self.shards.assign(self._merged(data))
        return self

    def assign_add(self, data: ByServer) -> Self:
        """Add to rows."""
        self.shards.assign_add(self._merged(data))
        return self

    def _merged(self, data: ByServer) -> dict[str, tuple[Tensor, Tensor]]:
        parts: dict[str, list[tuple[Tensor, Tensor]]] = {}
        for ps, name, pair in self._by_server(data):
            ids, rows = self.shards.checks[name].ids_and_rows(pair)
            parts.setdefault(name, []).append((self._owned(ps, name, ids), rows))
        return {name: (torch.cat(ids), torch.cat(rows)) for name, (ids, rows) in _columns(parts)}

    def _by_server(self, data: ByServer) -> list[tuple[int, str, Any]]:
        if not isinstance(data, Mapping) or not all(isinstance(tables, Mapping) for tables in data.values()):
            raise InputError(f"data must be {{server: {{table: ...}}}}, got {checks.kind(data)}")
        found = [(ps, name, value) for ps, tables in data.items() for name, value in tables.items()]
        for ps in data:
            checks.integer(ps, "data: a server", 0, self.params.num_ps - 1)
        for _, name, _ in found:
            self.shards.check_name(name)
        return found

    def _owned(self, ps: int, table: str, ids: Tensor) -> Tensor:
        wrong = ids[self._router.owner(ids) != ps]
        if wrong.numel():
            raise InputError(f"table {table!r}: id {int(wrong[0])} is not one of server {ps}")
        return ids

    def _lookup_raw(self, lookup_data_on_wk: ByServer) -> dict[int, dict[str, Tensor]]:
        """Read rows by server and table: {server: {table: ids}} -> {server: {table: rows}}."""
        parts: dict[str, list[tuple[int, Tensor]]] = {}
        for ps, name, ids in self._by_server(lookup_data_on_wk):
            parts.setdefault(name, []).append((ps, self._owned(ps, name, self.shards.checks[name].ids(ids))))
        columns = dict(_columns(parts))
        rows = self.shards.lookup({name: torch.cat(ids) for name, (_, ids) in columns.items()}).rows
        found: dict[int, dict[str, Tensor]] = {ps: {} for ps in lookup_data_on_wk}
        for name, (servers, ids) in columns.items():
            own = rows[name].split_with_sizes([each.numel() for each in ids])
            for ps, piece in zip(servers, own, strict=True):
                found[ps][name] = piece
        return found

    # ---- layouts

    def flatten_layout(self, nested: Mapping[str, Tensor | Sequence[Tensor]]) -> list[Tensor]:
        """Return the tensors of all layouts as a list, layouts sorted by name.

        Args:
            nested: The layouts by name; a list of tensors for OutType.NONE.
        """
        configs = self.params.feature_configs.out_configs
        if not isinstance(nested, Mapping) or set(nested) != set(configs):
            raise InputError(f"flatten_layout: nested must have the names {sorted(configs)}")
        flat: list[Tensor] = []
        for name in sorted(configs):
            value = nested[name]
            tensors: list[Any] = list(value) if isinstance(value, list | tuple) else [value]
            if len(tensors) != self._size(name) or not all(isinstance(x, Tensor) for x in tensors):
                raise InputError(f"flatten_layout: layout {name!r} must have {self._size(name)} tensors")
            flat += tensors
        return flat

    def nest_layout(self, tensors: Sequence[Tensor]) -> Layouts:
        """Return the layouts of a list of tensors, the inverse of `flatten_layout`."""
        configs = self.params.feature_configs.out_configs
        total = sum(self._size(name) for name in configs)
        if not isinstance(tensors, list | tuple) or len(tensors) != total:
            raise InputError(f"nest_layout: there must be a list of {total} tensors")
        left, nested = iter(tensors), Layouts()
        for name in sorted(configs):
            own = [next(left) for _ in range(self._size(name))]
            nested[name] = own if configs[name].out_type == OutType.NONE else own[0]
        return nested

    def _size(self, layout: str) -> int:
        out = self.params.feature_configs.out_configs[layout]
        return len(out.slice_configs) if out.out_type == OutType.NONE else 1
