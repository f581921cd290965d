"""sharding_sparse_fids: splits the ids of all features by table and server, in Monolith's layout encoding.

`fid_offset` packs the number of a list (table * servers + server) and an element of that list into one
integer; `nfl_offset` marks shared features in bit 31. Monolith has five versions of the encoding; 3, 4 and 5
share these offsets and differ in what comes with them:

    version   lists of ids                                             sizes
    3         one per table and server                                 none
    4         one tensor, by server, then table                        ids and elements of each list
    5         one per table and server                                 of every tensor, for several requests

The encoding is for models that come from Monolith; Megalith's own modules pool without it. `layout_ops` reads
it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextvars import ContextVar, Token
from itertools import accumulate
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from megalith.compat.monolith.feature_configs import FeatureConfigs, as_feature_configs, layout_plan
from megalith.errors import InputError
from megalith.library import define_op, new_size
from megalith.ops import checks
from megalith.ops.bucketing import _dedup
from megalith.ragged import Ragged
from megalith.routing import Router
from megalith.table import TableConfig

SHARED = 1 << 31
"""The bit of nfl_offset that marks a shared feature."""
INPUT_TYPES = ("example", "example_batch", "examplebatch", "instance")
"""Monolith's names of records."""


class ShardedFids(NamedTuple):
    """Result of `sharding_sparse_fids`, in the order of Monolith's.

    T tables and F features are numbered in the order of their names; S is the number of servers. A field that
    the version does not have is None.
    """

    fid_list: dict[str, Tensor] | list[Tensor] | Tensor
    """int64 [k] for each table and server, by "table:server", or as a list in that order if
    `fid_list_ret_list`; version 4: one tensor [n], by server, then table."""
    fid_offset: Tensor
    """int64 [n]: for each id the list (high 32 bits) and the element of it where its row begins."""
    feature_offset: Tensor
    """int64 [rows + 1]: where the ids of each row of each feature begin."""
    nfl_offset: Tensor
    """int64 [F + 1]: each feature's first row, plus 2^31 if shared; then the length of feature_offset."""
    batch_size: Tensor
    """int64, the number of rows of the batch: [1] in version 5, otherwise a scalar."""
    nfl_size: Tensor | None = None
    """Version 5: int64 [1], the length of nfl_offset."""
    feature_size: Tensor | None = None
    """Version 5: int64 [1], the length of feature_offset."""
    fid_size: Tensor | None = None
    """Version 5: int64 [1], the length of fid_offset."""
    emb_size: Tensor | None = None
    """Version 5: int64 [T * S], the number of elements of the rows of each list."""
    fid_list_row_splits: dict[str, Tensor] | Sequence[Tensor] | Tensor = ()
    """int64 [features of the table + 1] for each list, in the form of `fid_list`: where the ids of each
    feature begin in the list."""
    fid_list_row_splits_size: dict[str, Tensor] | list[Tensor] | None = None
    """Version 5: int64 [1] for each list, the length of its row splits."""
    fid_list_emb_row_lenth: Tensor | None = None
    """Version 4: int64 [S * T], the number of elements of the rows of each list, by server, then table."""
    fid_list_table_row_length: Tensor | None = None
    """Version 4: int64 [S * T], the number of ids of each list, by server, then table."""
    fid_list_shard_row_lenth: Tensor | None = None
    """Version 4: int64 [S], the number of ids of each server."""

    @property
    def lists(self) -> list[Tensor]:
        """The ids of each list, int64 [k], in the order table * servers + server; not for version 4."""
        if isinstance(self.fid_list, Tensor):
            raise InputError("version 4 has one tensor of ids; split it by fid_list_table_row_length")
        return list(self.fid_list.values()) if isinstance(self.fid_list, dict) else self.fid_list


def sharding_sparse_fids(
    tensor: Mapping[str, Ragged],
    ps_num: int | Router,
    feature_cfgs: FeatureConfigs,
    unique: bool = True,
    input_type: str = "example_batch",
    parallel_flag: int = 0,
    fid_list_ret_list: bool = False,
    version: int = 5,
    *,
    shared: Collection[str] = (),
    batch_size: int | None = None,
) -> ShardedFids:
    """Split the ids of all features by table and server, and record where each id finds its row.

    Args:
        tensor: Ids by feature, where Monolith has a tensor of parsed records. Columns without a config are
            ignored. The encoding has no weights, so a column with weights raises.
        ps_num: The number of servers for roundrobin (0 counts as 1), or a Router.
        feature_cfgs: The features and their tables; also a protobuf message of Monolith's.
        unique: Whether an id is sent only once per feature and server.
        input_type: The record: "example", "example_batch" or "instance". A feature without a column counts as
            a shared feature without ids in an example_batch, and as an empty row per example in the others,
            which have no shared features.
        fid_list_ret_list: Whether the lists of ids are a list instead of a dict by "table:server".
        version: The encoding: 3, 4 or 5.
        shared: Features with one row for the whole batch, for an example_batch. Monolith's records say which
            these are.
        batch_size: The number of rows; required if every feature is shared.

    Returns:
        The lists of ids, and the offsets and sizes that `fused_embedding_to_layout` takes.

    Raises:
        InputError: The columns do not match the config or each other, a column has weights, an example has
            shared features, or the version is not 3, 4 or 5.
    """
    configs = as_feature_configs(feature_cfgs)
    if not isinstance(tensor, Mapping):
        raise InputError(f"tensor must be a dict of Ragged columns by feature, got {checks.kind(tensor)}")
    check_version(version)
    checks.one_of(input_type, INPUT_TYPES, "input_type")
    checks.flag(unique, "unique")
    checks.flag(fid_list_ret_list, "fid_list_ret_list")
    router = ps_num
    if not isinstance(router, Router):
        router = Router("roundrobin", max(1, checks.integer(ps_num, "ps_num", least=0)))
    is_batch = input_type in ("example_batch", "examplebatch")
    taken, one_row, batch = _columns(tensor, configs, shared, batch_size, is_batch)
    names, servers = configs.table_names, router.num_shards
    count = len(names) * servers
    *outputs, fid_offset, feature_offset, nfl_offset, emb_size = _shard(
        [checks.int64(c.values, f"tensor[{n!r}].values") for n, c in taken.items()],
        [c.row_splits for c in taken.values()],
        [int(s) for s in one_row],
        list(router.rule),
        servers,
        unique,
        configs.encoded,
    )
    fids, splits = outputs[:count], outputs[count:]

    def size(length: int) -> Tensor:
        return torch.full((1,), length, dtype=torch.int64, device=fid_offset.device)

    found = ShardedFids(
        fid_list=[],
        fid_offset=fid_offset,
        feature_offset=feature_offset,
        nfl_offset=nfl_offset,
        batch_size=size(batch) if version == 5 else size(batch)[0],
        fid_list_row_splits=[],
    )
    if version == 4:
        order = [table * servers + server for server in range(servers) for table in range(len(names))]
        table_rows = torch.cat([size(fids[k].shape[0]) for k in order])
        return found._replace(
            fid_list=torch.cat([fids[k] for k in order]),
            fid_list_row_splits=torch.cat([splits[k] for k in order]),
            fid_list_emb_row_lenth=emb_size[order],
            fid_list_table_row_length=table_rows,
            fid_list_shard_row_lenth=table_rows.view(servers, len(names)).sum(1),
        )
    keys = [f"{table}:{server}" for table in names for server in range(servers)]

    def listed(items: list[Tensor]) -> dict[str, Tensor] | list[Tensor]:
        return items if fid_list_ret_list else dict(zip(keys, items, strict=True))

    found = found._replace(fid_list=listed(fids), fid_list_row_splits=listed(splits))
    if version == 3:
        return found
    return found._replace(
        nfl_size=size(nfl_offset.shape[0]),
        feature_size=size(feature_offset.shape[0]),
        fid_size=size(fid_offset.shape[0]),
        emb_size=emb_size,
        fid_list_row_splits_size=listed([size(each.shape[0]) for each in splits]),
    )


def check_version(version: int) -> None:
    """Raise unless an encoding is one that these ops read and write."""
    if checks.as_integer(version) not in (3, 4, 5):
        raise InputError(
            f"version must be 3, 4 or 5, got {version!r}: 1 and 2 have another encoding; encode with "
            "sharding_sparse_fids"
        )


def _columns(
    given: Mapping[str, Ragged],
    configs: FeatureConfigs,
    shared: Collection[str],
    batch_size: int | None,
    is_batch: bool,
) -> tuple[dict[str, Ragged], list[bool], int]:
    """Check the columns; return one per feature, which of them have one row, and the batch size."""
    if not isinstance(shared, list | tuple | set | frozenset | dict) or not all(
        isinstance(name, str) for name in shared
    ):
        raise InputError(f"shared must be a list of names of features, got {checks.kind(shared)}")
    if shared and not is_batch:
        raise InputError(f"shared is {list(shared)}, but only an example_batch has shared features")
    names = configs.feature_names
    if not names:
        raise InputError("feature_cfgs has no features")
    for name in names:
        if name in given and not isinstance(given[name], Ragged):
            raise InputError(f"tensor[{name!r}] must be a Ragged, got {checks.kind(given[name])}")
        if name in given and given[name].weights is not None:
            raise InputError(
                f"tensor[{name!r}] has weights, which Monolith's encoding cannot hold; drop them, or use an "
                "EmbeddingCollection, which applies them"
            )
    device = next((given[n].values.device for n in names if n in given), torch.device("cpu"))
    batch = None if batch_size is None else checks.integer(batch_size, "batch_size", least=0)
    for name in names:
        if name not in given:
            continue
        rows, alone = given[name].row_splits.shape[0] - 1, name in shared
        batch = rows if batch is None and not alone else batch
        if rows != (1 if alone else batch):
            wanted = "1 row because it is shared" if alone else f"{batch} rows like the others"
            raise InputError(f"tensor[{name!r}] must have {wanted}, got {rows}")
    if batch is None:
        raise InputError("batch_size is required when every feature is shared or missing")
    empty = torch.zeros(2 if is_batch else batch + 1, dtype=torch.int64, device=device)
    taken = {n: given[n] if n in given else Ragged(empty[:0], empty) for n in names}
    return taken, [n in shared or (n not in given and is_batch) for n in names], batch


def _shard_any(
    values: list[Tensor],
    splits: list[Tensor],
    shared: list[int],
    rule: list[int],
    servers: int,
    unique: bool,
    encoded: str,
) -> list[Tensor]:
    plan = layout_plan(encoded)
    device = values[0].device
    # Features in the order of (table, feature), so that a table's ids of one server are contiguous.
    by_table = sorted(range(len(values)), key=lambda f: (plan.tables[f], f))
    sizes = [values[f].shape[0] for f in by_table]
    ids = torch.cat([values[f] for f in by_table])
    cuts = torch.tensor([0, *sizes], device=device).cumsum(0)
    found, _, counts, index, _ = _dedup(ids, cuts, None, rule, servers, unique, [], "ids")

    counts = counts.view(servers, len(by_table))
    dims = torch.tensor([plan.dims[f] for f in by_table], device=device)
    elements = counts * dims
    table_of = torch.tensor([plan.tables[f] for f in by_table], device=device)
    tables = plan.num_tables
    fids: list[Tensor] = []
    row_splits: list[Tensor] = []
    base = torch.zeros_like(counts)  # elements of the list before a (server, feature)
    emb_size = counts.new_zeros(tables, servers)
    starts = (torch.cumsum(counts.flatten(), 0) - counts.flatten()).view_as(counts)
    for table in range(tables):
        members = (table_of == table).nonzero().flatten()
        inside = elements[:, members]
        base[:, members] = torch.cumsum(inside, 1) - inside
        emb_size[table] = inside.sum(1)
        for server in range(servers):
            lengths = counts[server, members]
            begin = int(starts[server, members[0]])
            fids.append(found[begin : begin + int(lengths.sum())].clone())
            row_splits.append(pad(torch.cumsum(lengths, 0), (1, 0)))
    if bool((emb_size >= 1 << 32).any()):
        raise InputError("columns: a list of rows would exceed the 2^32 elements that fid_offset can address")

    # For each distinct id: the list it is in and the element where its row begins.
    bucket = torch.repeat_interleave(torch.arange(counts.numel(), device=device), counts.flatten())
    rank = torch.arange(found.shape[0], device=device) - starts.flatten()[bucket]
    servers_of = torch.arange(servers, device=device)[:, None].expand_as(counts)
    number = (table_of * servers + servers_of).flatten()[bucket]
    packed = number << 32 | base.flatten()[bucket] + rank * dims.expand_as(counts).flatten()[bucket]

    pieces = dict(zip(by_table, packed[index].split(sizes), strict=True))
    fid_offset = torch.cat([pieces[f] for f in range(len(values))])
    lengths = torch.cat([torch.diff(s) for s in splits])
    feature_offset = pad(torch.cumsum(lengths, 0), (1, 0))
    *rows, total = accumulate((s.shape[0] - 1 for s in splits), initial=0)
    first_rows = [r + (SHARED if s else 0) for r, s in zip(rows, shared, strict=True)]
    nfl_offset = torch.tensor([*first_rows, total + 1], device=device)
    return [*fids, *row_splits, fid_offset, feature_offset, nfl_offset, emb_size.flatten()]


def _shard_fake(
    values: list[Tensor],
    splits: list[Tensor],
    shared: Any,
    rule: Any,
    servers: int,
    unique: bool,
    encoded: str,
) -> list[Tensor]:
    plan = layout_plan(encoded)
    new = values[0].new_empty
    per_table = [sum(t == table for t in plan.tables) for table in range(plan.num_tables)]
    return [
        *(new(new_size()) for _ in range(plan.num_tables * servers)),
        *(new(n + 1) for n in per_table for _ in range(servers)),
        new(sum(v.shape[0] for v in values)),
        new(sum(s.shape[0] - 1 for s in splits) + 1),
        new(len(values) + 1),
        new(plan.num_tables * servers),
    ]


_shard = define_op(
    "shard_fids(Tensor[] values, Tensor[] splits, int[] shared, int[] rule, int servers, bool unique,"
    " str encoded) -> Tensor[]",
    native=_shard_any,
    reference=_shard_any,
    fake=_shard_fake,
)


# ---- contexts

PREFIX = "__sharding_sparse_fids__"
"""Begins the keys of what sharding writes to features and bundles."""
OFFSETS = ("fid_offset", "feature_offset", "nfl_offset", "batch_size")
SIZES = ("nfl_size", "feature_size", "fid_size", "emb_size")


class ShardingSparseFidsOpParams(NamedTuple):
    """What sharding and tables need to know, as `PartitionedHashTable.gen_feature_configs` returns it."""

    num_ps: int
    """The number of servers, at least 1."""
    use_native_multi_hash_table: bool
    """Whether every feature has a table of its own."""
    unique: Callable[[], bool]
    """Whether an id is sent only once per feature and server."""
    transfer_float16: bool
    """Whether rows and gradients travel as float16."""
    sub_table_name_to_config: dict[str, TableConfig]
    """The tables by name, sorted."""
    feature_configs: FeatureConfigs
    """The features and layouts."""
    enable_gpu_emb: bool = False
    """Whether the tables are on GPUs, one part for each rank."""
    use_gpu: bool = False
    """Whether layouts are assembled on a GPU, if there is one."""
    extra_restore_names: Mapping[str, tuple[str, ...]] = {}
    """Further names under which a checkpoint of Monolith may hold a table: for slots named fc_slot_N, the md5
    of their names without "fc_"."""


class ParserCtx:
    """What the parsing of features needs to know of the tables; in a `with` statement, the default.

    Args:
        enable_fused_layout: Whether features are split for layouts; for code that asks.

    Attributes:
        parser_type: The record: "example", "example_batch" or "instance"; None is "example_batch".
        sharding_sparse_fids_op_params: What `PartitionedHashTable.gen_feature_configs` returned.
    """

    sharding_sparse_fids_features_prefix = PREFIX
    sharding_sparse_fids_sparse_features_key = f"{PREFIX}sparse_features"

    def __init__(self, enable_fused_layout: bool = False) -> None:
        self.enable_fused_layout = checks.flag(enable_fused_layout, "ParserCtx: enable_fused_layout")
        self.parser_type: str | None = None
        self.sharding_sparse_fids_op_params: ShardingSparseFidsOpParams | None = None
        self._tokens: list[Token[ParserCtx | None]] = []

    def __enter__(self) -> Self:
        self._tokens.append(_default_ctx.set(self))
        return self

    def __exit__(self, *_: object) -> None:
        _default_ctx.reset(self._tokens.pop())

    @classmethod
    def sharding_sparse_fids_features_insert_to_features(
        cls, inputs: Mapping[str, Any], features: MutableMapping[str, Any]
    ) -> None:
        """Write the results of sharding to features, under the prefix; names of nested dicts are joined by /.

        Args:
            inputs: Tensors, and dicts of tensors, by name.
            features: Receives them.
        """
        checks.mapping(features, "features", "{name: tensor}")
        for name, value in checks.mapping(inputs, "inputs", "{name: tensor}").items():
            nested = value.items() if isinstance(value, Mapping) else [("", value)]
            features.update({f"{PREFIX}{name}/{key}".removesuffix("/"): each for key, each in nested})

    @classmethod
    def sharding_sparse_fids_features_parse_from_features(
        cls, features: MutableMapping[str, Any]
    ) -> dict[str, Any]:
        """Remove from features what `sharding_sparse_fids_features_insert_to_features` has written.

        Args:
            features: Features; the keys with the prefix are removed.

        Returns:
            The tensors, and dicts of tensors, by name.
        """
        checks.mapping(features, "features", "{name: tensor}")
        found: dict[str, Any] = {}
        for key in [key for key in features if isinstance(key, str) and key.startswith(PREFIX)]:
            name, _, inner = key.removeprefix(PREFIX).partition("/")
            if inner:
                found.setdefault(name, {})[inner] = features.pop(key)
            else:
                found[name] = features.pop(key)
        return found


_default_ctx: ContextVar[ParserCtx | None] = ContextVar("parser_ctx", default=None)


def get_default_parser_ctx() -> ParserCtx:
    """Return the context of the innermost `with ParserCtx()`; without one, a context of this thread."""
    found = _default_ctx.get()  # no limit: a context variable
    if found is None:
        _default_ctx.set(found := ParserCtx())
    return found


def sharding_sparse_fids_with_context(
    sparse_features: Mapping[str, Ragged],
    features: MutableMapping[str, Any],
    parser_ctx: ParserCtx | None = None,
) -> None:
    """Split the ids of a batch as the tables of a context need it; `PartitionedHashTable.lookup` takes them.

    Args:
        sparse_features: Ids by feature.
        features: Receives the lists, offsets and sizes, under the prefix "__sharding_sparse_fids__".
        parser_ctx: The context; None: `get_default_parser_ctx()`.
    """
    ctx = get_default_parser_ctx() if parser_ctx is None else parser_ctx
    params = getattr(ctx, "sharding_sparse_fids_op_params", None)
    if not isinstance(params, ShardingSparseFidsOpParams):
        raise InputError(
            "parser_ctx: sharding_sparse_fids_op_params must be what gen_feature_configs returned"
        )
    found = sharding_sparse_fids(
        sparse_features,
        params.num_ps,
        params.feature_configs,
        unique=params.unique(),
        input_type=ctx.parser_type or "example_batch",
        parallel_flag=int(params.use_gpu),
        version=4 if params.enable_gpu_emb else 5,
    )
    fields: dict[str, Any] = {name: getattr(found, name) for name in OFFSETS}
    if params.enable_gpu_emb:
        fields |= {
            "shards_value": found.fid_list,
            "shards_row_lengths": found.fid_list_shard_row_lenth,
            "shards_table_row_lengths": found.fid_list_table_row_length,
            "fid_list_emb_row_lenth": found.fid_list_emb_row_lenth,
        }
    else:
        fields |= {"shards": found.fid_list} | {name: getattr(found, name) for name in SIZES}
        if params.use_native_multi_hash_table:
            fields["shards_row_split"] = found.fid_list_row_splits
            fields["shards_row_split_size"] = found.fid_list_row_splits_size
    ParserCtx.sharding_sparse_fids_features_insert_to_features(fields, features)


def split_features(
    features: MutableMapping[str, Any], params: ShardingSparseFidsOpParams
) -> ShardedFids | None:
    """Take from features what `sharding_sparse_fids_with_context` wrote; None if it did not."""
    if f"{PREFIX}fid_offset" not in features:
        return None
    found: Any = ParserCtx.sharding_sparse_fids_features_parse_from_features(features)
    lists = "shards_value" if params.enable_gpu_emb else "shards"
    if missing := [name for name in (lists, *OFFSETS) if name not in found]:
        name = PREFIX + missing[0]
        raise InputError(f"features must have {name}, which sharding_sparse_fids_with_context writes")
    return ShardedFids(
        found[lists],
        fid_list_row_splits=found.get("shards_row_split", ()),
        fid_list_table_row_length=found.get("shards_table_row_lengths"),
        fid_list_emb_row_lenth=found.get("fid_list_emb_row_lenth"),
        **{name: found[name] for name in (*OFFSETS, *SIZES) if name in found},
    )


def lists_of(found: ShardedFids, params: ShardingSparseFidsOpParams) -> list[Tensor]:
    """Return the ids of each list, in the order table * servers + server, of any encoding."""
    tables, servers = params.feature_configs.table_names, params.num_ps
    if isinstance(found.fid_list, Tensor):
        assert found.fid_list_table_row_length is not None
        flat = found.fid_list.split_with_sizes(found.fid_list_table_row_length.tolist())
        return [flat[ps * len(tables) + t] for t in range(len(tables)) for ps in range(servers)]
    if isinstance(found.fid_list, dict):
        keys = [f"{table}:{ps}" for table in tables for ps in range(servers)]
        if sorted(keys) != sorted(found.fid_list):
            raise InputError(f"features must have the lists {keys}, got {sorted(found.fid_list)}")
        return [found.fid_list[key] for key in keys]
    return found.fid_list
