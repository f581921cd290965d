"""Calls of Monolith's ops, layouts and fused tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import megalith
from megalith.compat import monolith
from tests.valid_calls.core import column, local
from tests.valid_calls.sweep import Arguments, Call, Fresh, config, ids, methods


def layout_calls() -> Iterator[Call]:
    cut: Arguments = {"feature_name": "f", "start": 0, "end": 1}
    yield monolith.SliceConfig, cut
    feature: Arguments = {"table": "t", "slice_dims": (1, 2)}
    yield monolith.FeatureConfig, feature
    out: Arguments = {"slice_configs": (monolith.SliceConfig(**cut),)}
    yield monolith.OutConfig, out
    given: Arguments = {
        "feature_configs": {"f": monolith.FeatureConfig(**feature)},
        "out_configs": {"o": monolith.OutConfig(**out)},
    }
    yield monolith.FeatureConfigs, given
    configs = monolith.FeatureConfigs(**given)
    yield from methods(
        lambda: configs,
        {
            "features_of": {"table": "t"},
            "output_shapes": {"layout": "o"},
            "from_proto": {"message": configs.to_proto()},
        },
    )
    keys = monolith.unique_key_with_value_and_offset(column(), [1, 2])
    yield from methods(lambda: keys.value_offset)
    yield monolith.ReduceSum, {}
    yield monolith.ReduceMean, {}
    fids: Arguments = {"tensor": {"f": column()}, "ps_num": 1, "feature_cfgs": configs}
    yield monolith.sharding_sparse_fids, fids
    found = monolith.sharding_sparse_fids(**fids)
    encoding: Arguments = {
        "fid_offset": found.fid_offset,
        "feature_offset": found.feature_offset,
        "nfl_offset": found.nfl_offset,
        "batch_size": found.batch_size,
        "embeddings_list": [torch.ones(each.numel(), 3) for each in found.lists],
        "fid_list_row_split": None,
        "variant_type": "example",
        "feature_cfgs": configs,
        "ps_num": 1,
    }
    sizes: Arguments = {n: getattr(found, n) for n in ("nfl_size", "feature_size", "fid_size", "emb_size")}
    encoding |= {**sizes, "version": 5}
    layout, gradient = monolith.fused_embedding_to_layout, monolith.fused_embedding_to_layout_grad
    yield layout, encoding
    yield gradient, encoding | {"layout_tensors_grad": layout(**encoding)}


def partitioned() -> monolith.PartitionedHashTable:
    return monolith.PartitionedHashTable(0, None, True, parser_ctx=partitioned_params())


def partitioned_arguments() -> Arguments:
    return {
        "num_ps": 0,
        "feature_name_to_config": {"f": config("f")},
        "layout_configs": {"o": monolith.OutConfig((monolith.SliceConfig("f", 0, 2),))},
        "feature_to_unmerged_slice_dims": {"f": [2]},
        "feature_to_combiner": {"f": monolith.ReduceSum()},
        "use_native_multi_hash_table": True,
    }


def partitioned_params() -> monolith.ShardingSparseFidsOpParams:
    return monolith.PartitionedHashTable.gen_feature_configs(**partitioned_arguments())


def partitioned_calls() -> Iterator[Call]:
    rows = {0: {"f": (ids(), torch.ones(3, 2))}}
    yield (
        monolith.PartitionedHashTable,
        {
            "num_ps": 0,
            "table_factory": lambda num_ps, configs: megalith.LocalShards(configs),
            "use_native_multi_hash_table": True,
            "parser_ctx": partitioned_params(),
        },
    )
    bundle: Arguments = {}
    table = partitioned()
    layouts = table.lookup({"f": column()}, bundle)
    update = {
        "layout_grads_and_vars": [(torch.ones(2, 2), layouts["o"])],
        "global_step": 0,
        "req_time": 1.0,
        "auxiliary_bundle": Fresh(lambda: filled(table)),
        "async_push": False,
        "grad_scale": 1.0,
    }
    yield table.apply_gradients, update
    given: Arguments = {
        "gen_feature_configs": partitioned_arguments(),
        "shard": {"features": {"f": column()}},
        "lookup": {"features": {"f": column()}, "auxiliary_bundle": {}},
        "assign": {"data": rows},
        "assign_add": {"data": rows},
        "flatten_layout": {"layouts": layouts},
        "nest_layout": {"tensors": [torch.ones(2, 2)]},
        "apply_gradients": update,
    }
    yield from methods(lambda: table, given)
    yield monolith.get_sub_table_name, {"strs": ["a", "b"]}


def filled(table: monolith.PartitionedHashTable) -> Arguments:
    bundle: Arguments = {}
    table.lookup({"f": column()}, bundle)
    return bundle


def monolith_calls() -> Iterator[Call]:
    yield from partitioned_calls()
    rows = torch.ones(3, 2)
    keys = monolith.unique_key_with_value_and_offset(column(), [1, 2])
    pos = megalith.Ragged.from_lists([[0, 0], [0]])
    yield monolith.SharedBuffer, {"size": 4}
    yield (
        monolith.unique_key_with_value_and_offset,
        {
            "key": column(),
            "dims": [1, 2],
            "generate_buffer": True,
        },
    )
    yield (
        monolith.fill_with_offset_map,
        {
            "pos": pos,
            "value": torch.ones(4),
            "value_offset_map": keys.value_offset,
            "value_buffer": monolith.SharedBuffer(4),
            "dims": [1, 2],
        },
    )
    yield (
        monolith.fill_with_offset_map_gradient,
        {
            "pos": pos,
            "grad": torch.ones(4),
            "value_offset_map": keys.value_offset,
            "dims": [1, 2],
        },
    )
    yield (
        monolith.finalize_shared_tensor,
        {
            "shared_tensor_handles": [monolith.SharedBuffer(4)],
            "dtype": torch.float32,
            "shape": (-1,),
        },
    )
    yield monolith.normalize_merged_split, {"row_split": ids(0, 1, 0, 2), "size": ids(2, 2)}
    yield monolith.aligned_flat_concat, {"inputs": [rows, rows], "scale": 1.0, "alignment": 64}
    yield (
        monolith.aligned_flat_split,
        {
            "inputs": [rows],
            "flat": monolith.aligned_flat_concat([rows]),
            "alignment": 64,
        },
    )
    yield monolith.reorder_by_indices, {"input": ids(), "shard_ids": ids(0, 1, 1), "num_of_shards": 2}
    yield monolith.split_by_indices, {"indices": ids(0, 1, 1), "tensor": rows, "num_splits": 2}
    yield monolith.ragged_split_by_indices, {"indices": ids(0, 1, 1), "num": column(), "num_splits": 2}
    yield (
        monolith.fused_reorder_by_indices,
        {
            "inputs": [ids(), ids(4)],
            "num_of_shards": 2,
            "dim_sizes": [1, 2],
        },
    )
    yield (
        monolith.fused_gather_embeddings_by_input,
        {
            "fused_embeddings": torch.ones(4),
            "fused_embedding_offsets": [ids(0, 2)],
            "embedding_dims": [2],
        },
    )
    yield (
        monolith.fused_gather_embeddings_by_input_gradient,
        {
            "fused_embeddings": 4,
            "grads": [torch.ones(2, 2)],
            "embedding_offsets": [ids(0, 2)],
            "embedding_dims": [2],
            "scale": 1.0,
        },
    )
    yield (
        monolith.gather_embeddings_by_input,
        {
            "ids": ids(),
            "embeddings": rows,
            "input": ids(1, 3),
            "use_multi_threads": False,
        },
    )
    yield (
        monolith.gather_embeddings_by_ids_gradient_back_prop,
        {
            "ids": ids(),
            "grads": torch.ones(2, 2),
            "index_mapping": ids(0, 2),
        },
    )
    yield (
        monolith.map_id_to_embedding,
        {
            "ids": [ids()],
            "embeddings": [rows],
            "input": ids(1, 3),
            "use_multi_threads": True,
        },
    )
    yield (
        monolith.map_id_to_embedding_gradient_back_prop,
        {
            "ids": [ids()],
            "input": ids(1, 3),
            "grads": torch.ones(2, 2),
        },
    )
    reduced = {"id_indices": torch.tensor([[0], [0], [1]]), "id_values": rows, "id_length": 2}
    for reduce in (monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn):
        yield reduce, reduced
    yield monolith.fused_reduce_sum_and_split, {**reduced, "split_dims": [1, 1]}
    split = {"splits": [ids(0, 1, 3)], "embeddings": [rows], "slice_dims": [[1, 1]]}
    yield monolith.fused_reduce_and_split, split
    yield monolith.fused_reduce_and_split_gpu, split
    yield (
        monolith.fused_sorted_segment_sum,
        {
            "indices": [ids(0, 0, 1)],
            "values": [rows],
            "shapes": [[2, 2]],
        },
    )
    yield monolith.monolith_aligned_flat_concat, {"inputs": [rows, rows], "scale": 1.0}
    yield monolith.ps_device, {"index": 1}
    for number in ("rank", "local_rank", "size", "local_size"):
        yield getattr(monolith, f"get_mpi_{number}"), {}
    yield monolith.get_device_str, {"num_ps": 1, "environ": {}}
    yield monolith.Fp32Compressor, {}
    yield monolith.Fp16Compressor, {}
    yield monolith.FixedR8Compressor, {"fixed_range": 1.0}
    yield monolith.OneBitCompressor, {"step_size": 10, "amplitude": 0.1}
    yield monolith.PolynomialDecay, {"initial_learning_rate": 1.0, "decay_steps": 10}
    yield monolith.FirstN, {"seq_length": 2}
    for combiner in (monolith.ReduceSum(), monolith.ReduceMean(), monolith.FirstN(2)):
        yield combiner.combine, {"key": column(), "embedding": rows}
    shards = local()
    looked_up: Arguments = {"ids": ids(), "fused_slot_size": ids(2, 1), "num_of_shards": 1}
    found = monolith.fused_lookup(shards, **looked_up)
    yield monolith.fused_lookup, {"shards": shards, **looked_up, "req_time": 1.0}
    yield (
        monolith.fused_apply_gradient,
        {
            "shards": shards,
            **looked_up,
            "indices": found.indices,
            "id_grads": torch.ones(found.embeddings.numel()),
            "id_offsets": found.id_offsets,
            "grad_offsets": found.emb_offsets,
            "global_step": 0,
            "req_time": 1.0,
        },
    )
