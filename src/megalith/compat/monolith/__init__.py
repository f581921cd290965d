"""Monolith's names over Megalith's core: every op, config, importer and client in one namespace.

Names are imported when they are first used, since some of them need optional packages. Nothing in the core
imports this package.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megalith.compat.monolith.distribution_ops import (
        FusedReorder,
        OffsetMap,
        ShardedFids,
        SharedBuffer,
        UniqueKeys,
        aligned_flat_concat,
        aligned_flat_split,
        fill_with_offset_map,
        fill_with_offset_map_gradient,
        finalize_shared_tensor,
        fused_embedding_to_layout,
        fused_embedding_to_layout_grad,
        fused_gather_embeddings_by_input,
        fused_gather_embeddings_by_input_gradient,
        fused_reduce_and_split,
        fused_reduce_and_split_gpu,
        fused_reduce_sum_and_split,
        fused_reorder_by_indices,
        fused_sorted_segment_sum,
        gather_embeddings_by_ids_gradient_back_prop,
        gather_embeddings_by_input,
        map_id_to_embedding,
        map_id_to_embedding_gradient_back_prop,
        normalize_merged_split,
        ragged_split_by_indices,
        reduce_mean,
        reduce_sqrtn,
        reduce_sum,
        reorder_by_indices,
        sharding_sparse_fids,
        split_by_indices,
        unique_key_with_value_and_offset,
    )
    from megalith.compat.monolith.dummy_server import DummySyncServer
    from megalith.compat.monolith.example_reader import MonolithReader
    from megalith.compat.monolith.feature_configs import (
        FeatureConfig,
        FeatureConfigs,
        OutConfig,
        OutType,
        PoolingType,
        SliceConfig,
    )
    from megalith.compat.monolith.fused_tables import FusedLookup, fused_apply_gradients, fused_lookup
    from megalith.compat.monolith.importer import import_monolith
    from megalith.compat.monolith.sync_clients import (
        ParameterSyncClient,
        create_dummy_sync_client,
        create_parameter_sync_clients,
        parameter_sync_client_from_config,
    )
    from megalith.compat.monolith.sync_config import refresh_sync_config

_MODULES = {
    "DummySyncServer": "dummy_server",
    "FeatureConfig": "feature_configs",
    "FeatureConfigs": "feature_configs",
    "FusedLookup": "fused_tables",
    "FusedReorder": "distribution_ops",
    "MonolithReader": "example_reader",
    "OffsetMap": "distribution_ops",
    "OutConfig": "feature_configs",
    "OutType": "feature_configs",
    "ParameterSyncClient": "sync_clients",
    "PoolingType": "feature_configs",
    "ShardedFids": "distribution_ops",
    "SharedBuffer": "distribution_ops",
    "SliceConfig": "feature_configs",
    "UniqueKeys": "distribution_ops",
    "aligned_flat_concat": "distribution_ops",
    "aligned_flat_split": "distribution_ops",
    "create_dummy_sync_client": "sync_clients",
    "create_parameter_sync_clients": "sync_clients",
    "fill_with_offset_map": "distribution_ops",
    "fill_with_offset_map_gradient": "distribution_ops",
    "finalize_shared_tensor": "distribution_ops",
    "fused_apply_gradients": "fused_tables",
    "fused_embedding_to_layout": "distribution_ops",
    "fused_embedding_to_layout_grad": "distribution_ops",
    "fused_gather_embeddings_by_input": "distribution_ops",
    "fused_gather_embeddings_by_input_gradient": "distribution_ops",
    "fused_lookup": "fused_tables",
    "fused_reduce_and_split": "distribution_ops",
    "fused_reduce_and_split_gpu": "distribution_ops",
    "fused_reduce_sum_and_split": "distribution_ops",
    "fused_reorder_by_indices": "distribution_ops",
    "fused_sorted_segment_sum": "distribution_ops",
    "gather_embeddings_by_ids_gradient_back_prop": "distribution_ops",
    "gather_embeddings_by_input": "distribution_ops",
    "import_monolith": "importer",
    "map_id_to_embedding": "distribution_ops",
    "map_id_to_embedding_gradient_back_prop": "distribution_ops",
    "normalize_merged_split": "distribution_ops",
    "parameter_sync_client_from_config": "sync_clients",
    "ragged_split_by_indices": "distribution_ops",
    "reduce_mean": "distribution_ops",
    "reduce_sqrtn": "distribution_ops",
    "reduce_sum": "distribution_ops",
    "refresh_sync_config": "sync_config",
    "reorder_by_indices": "distribution_ops",
    "sharding_sparse_fids": "distribution_ops",
    "split_by_indices": "distribution_ops",
    "unique_key_with_value_and_offset": "distribution_ops",
}

__all__ = [
    "DummySyncServer",
    "FeatureConfig",
    "FeatureConfigs",
    "FusedLookup",
    "FusedReorder",
    "MonolithReader",
    "OffsetMap",
    "OutConfig",
    "OutType",
    "ParameterSyncClient",
    "PoolingType",
    "ShardedFids",
    "SharedBuffer",
    "SliceConfig",
    "UniqueKeys",
    "aligned_flat_concat",
    "aligned_flat_split",
    "create_dummy_sync_client",
    "create_parameter_sync_clients",
    "fill_with_offset_map",
    "fill_with_offset_map_gradient",
    "finalize_shared_tensor",
    "fused_apply_gradients",
    "fused_embedding_to_layout",
    "fused_embedding_to_layout_grad",
    "fused_gather_embeddings_by_input",
    "fused_gather_embeddings_by_input_gradient",
    "fused_lookup",
    "fused_reduce_and_split",
    "fused_reduce_and_split_gpu",
    "fused_reduce_sum_and_split",
    "fused_reorder_by_indices",
    "fused_sorted_segment_sum",
    "gather_embeddings_by_ids_gradient_back_prop",
    "gather_embeddings_by_input",
    "import_monolith",
    "map_id_to_embedding",
    "map_id_to_embedding_gradient_back_prop",
    "normalize_merged_split",
    "parameter_sync_client_from_config",
    "ragged_split_by_indices",
    "reduce_mean",
    "reduce_sqrtn",
    "reduce_sum",
    "refresh_sync_config",
    "reorder_by_indices",
    "sharding_sparse_fids",
    "split_by_indices",
    "unique_key_with_value_and_offset",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
