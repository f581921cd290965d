"""Which table each feature of a model uses, as Monolith's `gen_feature_configs` decides it.

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
    MonolithFirstN,
    ReduceMean,
    ReduceSum,
)
from megalith.compat.monolith.feature_configs import FeatureConfigs, PoolingType
from megalith.errors import InputError
from megalith.table import TableConfig

FAKE_TABLE = "native_multi_hash_table_fake_table"
"""The table of all features in the configs of native tables."""
POOLING = {ReduceSum: PoolingType.SUM, ReduceMean: PoolingType.MEAN, MonolithFirstN: PoolingType.FIRSTN}
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
