"""Every Monolith name in one namespace: ops, configs, importers and sync clients over Megalith's core.

A name is imported when it is first used, because some modules need optional packages. Nothing in the core
imports this package. A wrong argument raises InputError, which names it, before anything is written.
"""

# ruff: noqa: F403 (for type checkers only: what each module defines)

from __future__ import annotations

from typing import TYPE_CHECKING

from megalith.library import lazy_names

if TYPE_CHECKING:
    from megalith.compat.monolith.buffer_ops import *
    from megalith.compat.monolith.compressors import *
    from megalith.compat.monolith.device_names import *
    from megalith.compat.monolith.distribution_ops import *
    from megalith.compat.monolith.dummy_server import *
    from megalith.compat.monolith.embedding_combiners import *
    from megalith.compat.monolith.example_reader import *
    from megalith.compat.monolith.feature_configs import *
    from megalith.compat.monolith.fid_sharding import *
    from megalith.compat.monolith.fused_tables import *
    from megalith.compat.monolith.importer import *
    from megalith.compat.monolith.layout_ops import *
    from megalith.compat.monolith.learning_rates import *
    from megalith.compat.monolith.mpi_ranks import *
    from megalith.compat.monolith.partitioned_tables import *
    from megalith.compat.monolith.reduce_ops import *
    from megalith.compat.monolith.remote_prediction import *
    from megalith.compat.monolith.replica_watcher import *
    from megalith.compat.monolith.sync_clients import *
    from megalith.compat.monolith.sync_config import *
    from megalith.compat.monolith.table_grouping import *
    from megalith.compat.monolith.zk_backend import *
    from megalith.compat.monolith.znode_records import *
    from megalith.ops import fid_v1_to_v2 as fid_v1_to_v2
    from megalith.ops import slot_of as slot_of
    from megalith.serving.discovery import SyncBackend as SyncBackend
    from megalith.serving.discovery.zookeeper import Container as Container
    from megalith.serving.discovery.zookeeper import ContainerServiceInfo as ContainerServiceInfo

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".buffer_ops": "OffsetMap SharedBuffer UniqueKeys aligned_flat_concat aligned_flat_split"
        " fill_with_offset_map fill_with_offset_map_gradient finalize_shared_tensor"
        " monolith_aligned_flat_concat monolith_aligned_flat_split normalize_merged_split"
        " unique_key_with_value_and_offset",
        ".compressors": "FixedR8Compressor Fp16Compressor Fp32Compressor OneBitCompressor",
        ".device_names": "get_device_str ps_device",
        ".distribution_ops": "FusedReorder fused_gather_embeddings_by_input"
        " fused_gather_embeddings_by_input_gradient fused_reorder_by_indices"
        " gather_embeddings_by_ids_gradient_back_prop gather_embeddings_by_input map_id_to_embedding"
        " map_id_to_embedding_gradient_back_prop ragged_split_by_indices reorder_by_indices split_by_indices",
        ".dummy_server": "DummySyncServer create_dummy_sync_server",
        ".embedding_combiners": "Combiner FirstN ReduceMean ReduceSum",
        ".example_reader": "MonolithReader",
        ".feature_configs": "FeatureConfig FeatureConfigs OutConfig OutType PoolingType SliceConfig",
        ".fid_sharding": "ShardedFids sharding_sparse_fids",
        ".fused_tables": "FusedLookup fused_apply_gradient fused_apply_gradients fused_lookup",
        ".importer": "import_monolith",
        ".layout_ops": "fused_embedding_to_layout fused_embedding_to_layout_grad",
        ".learning_rates": "PolynomialDecay",
        ".mpi_ranks": "get_mpi_local_rank get_mpi_local_size get_mpi_rank get_mpi_size",
        ".partitioned_tables": "PartitionedHashTable",
        ".reduce_ops": "fused_reduce_and_split fused_reduce_and_split_gpu fused_reduce_sum_and_split"
        " fused_sorted_segment_sum reduce_mean reduce_sqrtn reduce_sum",
        ".remote_prediction": "remote_predict set_default_discovery",
        ".replica_watcher": "ReplicaWatcher",
        ".sync_clients": "ParameterSyncClient create_dummy_sync_client create_parameter_sync_clients"
        " parameter_sync_client_from_config",
        ".sync_config": "refresh_sync_config",
        ".table_grouping": "ShardingSparseFidsOpParams get_sub_table_name",
        ".zk_backend": "ZKBackend",
        ".znode_records": "ReplicaMeta SavedModel SavedModelDeployConfig TargetExtraInfo",
        "megalith.ops": "fid_v1_to_v2 slot_of",
        "megalith.serving.discovery": "SyncBackend",
        "megalith.serving.discovery.zookeeper": "Container ContainerServiceInfo",
    },
)
