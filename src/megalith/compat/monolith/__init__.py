"""Monolith's public names: one module per Monolith module, and every name in this namespace.

    from megalith.compat.monolith import distributed_ps_sync, distributed_ps, distribution_ops
    from megalith.compat import monolith  # monolith.reduce_sum, monolith.ZKBackend, ...

A name is imported when it is first used, because some modules need optional packages. Nothing in the core
imports this package. A wrong argument raises InputError, which names it, before anything is written.
"""

# ruff: noqa: F403 (for type checkers only: what each module defines)

from __future__ import annotations

from typing import TYPE_CHECKING

from megalith.lazy import lazy_names

if TYPE_CHECKING:
    from megalith.compat.monolith.agent_service import *
    from megalith.compat.monolith.distributed_ps import *
    from megalith.compat.monolith.distributed_ps_sync import *
    from megalith.compat.monolith.distributed_serving_ops import *
    from megalith.compat.monolith.distribution_ops import *
    from megalith.compat.monolith.distribution_utils import *
    from megalith.compat.monolith.embedding_combiners import *
    from megalith.compat.monolith.entry import *
    from megalith.compat.monolith.example_reader import *
    from megalith.compat.monolith.export_context import *
    from megalith.compat.monolith.feature_configs import *
    from megalith.compat.monolith.importer import *
    from megalith.compat.monolith.layout_ops import *
    from megalith.compat.monolith.parsers import *
    from megalith.ops import fid_v1_to_v2 as fid_v1_to_v2
    from megalith.ops import slot_of as slot_of
    from megalith.serving.discovery import SyncBackend as SyncBackend
    from megalith.serving.discovery.zookeeper import Container as Container
    from megalith.serving.discovery.zookeeper import ContainerServiceInfo as ContainerServiceInfo

__getattr__, __dir__, __all__ = lazy_names(
    __name__,
    {
        ".agent_service": "AgentConfig ReplicaMeta ReplicaWatcher SavedModel SavedModelDeployConfig"
        " TargetExtraInfo ZKBackend",
        ".distributed_ps": "DistributedHashTable DistributedMultiTypeHashTable PartitionedHashTable"
        " get_sub_table_name ps_device",
        ".distributed_ps_sync": "DistributedMultiTypeHashTableMpi FusedLookup fused_apply_gradient"
        " fused_apply_gradients fused_lookup",
        ".distributed_serving_ops": "DummySyncServer ParameterSyncClient create_dummy_sync_client"
        " create_dummy_sync_server create_parameter_sync_clients parameter_sync_client_from_config"
        " refresh_sync_config remote_predict set_default_discovery",
        ".distribution_ops": "FusedReorder OffsetMap SharedBuffer UniqueKeys aligned_flat_concat"
        " aligned_flat_split fill_with_offset_map fill_with_offset_map_gradient finalize_shared_tensor"
        " fused_gather_embeddings_by_input fused_gather_embeddings_by_input_gradient fused_reduce_and_split"
        " fused_reduce_and_split_gpu fused_reduce_sum_and_split fused_reorder_by_indices"
        " fused_sorted_segment_sum gather_embeddings_by_ids_gradient_back_prop gather_embeddings_by_input"
        " map_id_to_embedding map_id_to_embedding_gradient_back_prop monolith_aligned_flat_concat"
        " monolith_aligned_flat_split normalize_merged_split ragged_split_by_indices reduce_mean reduce_sqrtn"
        " reduce_sum reorder_by_indices split_by_indices unique_key_with_value_and_offset",
        ".distribution_utils": "FLAGS bps_comm_benchmark bps_init byteps_benchmark_a2a byteps_benchmark_ar"
        " enable_sync_training get_device_str get_mpi_local_rank get_mpi_local_size get_mpi_rank get_mpi_size"
        " get_sync_run_hooks init_sync_train_and_update_conf try_init_cuda update_session_config_for_gpu",
        ".embedding_combiners": "Combiner FirstN ReduceMean ReduceSum",
        ".entry": "FixedR8Compressor Fp16Compressor Fp32Compressor OneBitCompressor PolynomialDecay",
        ".example_reader": "MonolithReader",
        ".export_context": "ExportContext ExportMode enter_export_mode get_current_export_ctx is_exporting"
        " is_exporting_distributed is_exporting_standalone",
        ".feature_configs": "FeatureConfig FeatureConfigs OutConfig OutType PoolingType SliceConfig",
        ".importer": "import_monolith",
        ".layout_ops": "fused_embedding_to_layout fused_embedding_to_layout_grad",
        ".parsers": "ParserCtx ShardedFids ShardingSparseFidsOpParams get_default_parser_ctx"
        " sharding_sparse_fids sharding_sparse_fids_with_context",
        "megalith.ops": "fid_v1_to_v2 slot_of",
        "megalith.serving.discovery": "SyncBackend",
        "megalith.serving.discovery.zookeeper": "Container ContainerServiceInfo",
    },
)
