"""sharding_params: which table each feature of a model uses, as Monolith's `gen_feature_configs` decides it.

tables      a feature's ids are in                                            name of the table
native      a table of its own; all features share one list of ids            the name of the feature
not native  one table with all features whose config is equal                 md5 of their names
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import md5
from typing import Any, NamedTuple

from megalith.compat.monolith.embedding_combiners import (
    MonolithCombiner,
    MonolithFirstN,
    ReduceMean,
    ReduceSum,
)
from megalith.compat.monolith.feature_configs import FeatureConfig, FeatureConfigs, OutConfig, PoolingType
from megalith.errors import InputError
from megalith.ops import checks
from megalith.table import TableConfig

FAKE_TABLE = "native_multi_hash_table_fake_table"
"""The table of all features in the configs of native tables."""
_POOLING = {ReduceSum: PoolingType.SUM, ReduceMean: PoolingType.MEAN, MonolithFirstN: PoolingType.FIRSTN}
_SLOT = re.compile(r"fc_slot_[0-9]*")


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
    """Always False: an engine decides where rows are."""
    use_gpu: bool = False
    """Ignored."""
    extra_restore_names: Mapping[str, tuple[str, ...]] = {}
    """Further names under which a checkpoint of Monolith may hold a table: for slots named fc_slot_N, the md5
    of their names without "fc_"."""


def get_sub_table_name(strs: Sequence[str]) -> tuple[str, str]:
    """Name a table of several features.

    Args:
        strs: The names of the features.

    Returns:
        The names joined by commas, and the md5 of that in hexadecimal.

    Raises:
        InputError: It is not a list of names.
    """
    if not isinstance(strs, list | tuple) or not all(isinstance(name, str) for name in strs):
        raise InputError(f"get_sub_table_name: strs must be a list of names, got {strs!r}")
    joined = ",".join(strs)
    return joined, md5(joined.encode(), usedforsecurity=False).hexdigest()


def sharding_params(
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
    where = "gen_feature_configs"
    count = max(1, checks.integer(num_ps, f"{where}: num_ps", 0))
    native = checks.flag(use_native_multi_hash_table, f"{where}: use_native_multi_hash_table")
    half = checks.flag(transfer_float16, f"{where}: transfer_float16")
    checks.flag(use_gpu, f"{where}: use_gpu")
    if checks.flag(enable_gpu_emb, f"{where}: enable_gpu_emb"):
        raise InputError(f'{where}: enable_gpu_emb is not supported: make shards with engine="cuda" instead')
    if unique is not None:
        checks.callback(unique, f"{where}: unique", required=True)
    _check_configs(feature_name_to_config)
    for name, value in (
        ("feature_to_unmerged_slice_dims", feature_to_unmerged_slice_dims),
        ("feature_to_combiner", feature_to_combiner),
    ):
        if not isinstance(value, Mapping) or set(value) != set(feature_name_to_config):
            raise InputError(f"{where}: {name} must have the features of feature_name_to_config")
    native = native and not half
    names = sorted(feature_name_to_config)
    groups = [[name] for name in names] if native else _equal_configs(feature_name_to_config)
    tables: dict[str, TableConfig] = {}
    table_of: dict[str, str] = {}
    extra: dict[str, tuple[str, ...]] = {}
    for group in groups:
        table = group[0] if native else get_sub_table_name(group)[1]
        tables[table] = named(feature_name_to_config[group[0]], table)
        table_of |= dict.fromkeys(group, table)
        if not native and any(_SLOT.fullmatch(name) for name in group):
            slots = [name.removeprefix("fc_") if _SLOT.fullmatch(name) else name for name in group]
            extra[table] = (get_sub_table_name(slots)[1],)
    features = {}
    for name in names:
        combiner = feature_to_combiner[name]
        if type(combiner) not in _POOLING:
            raise InputError(f"{where}: the combiner of {name!r} must be ReduceSum, ReduceMean or FirstN")
        features[name] = FeatureConfig(
            FAKE_TABLE if native else table_of[name],
            _POOLING[type(combiner)],
            tuple(feature_to_unmerged_slice_dims[name]),
            combiner.max_seq_length,
        )
        dim = feature_name_to_config[name].dim
        if features[name].dim != dim:
            raise InputError(
                f"{where}: the slices of {name!r} have {features[name].dim} columns, its rows {dim}"
            )
    configs = FeatureConfigs(features, layout_configs)
    configs.validate()
    return ShardingSparseFidsOpParams(
        count,
        native,
        unique or _unique,
        half,
        dict(sorted(tables.items())),
        configs,
        extra_restore_names=extra,
    )


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


def _unique() -> bool:
    return True


def _check_configs(configs: Any) -> None:
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
