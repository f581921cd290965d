"""Calls of Monolith's ops, layouts and fused tables."""

from __future__ import annotations

from collections.abc import Iterator

import torch

import megalith
from megalith.compat import monolith
from tests.valid_calls.core import ROWS, column, local
from tests.valid_calls.sweep import Arguments, Call, Fresh, Given, calls, config, ids, methods


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
    yield from methods(lambda: configs, {"*": {"table": "t", "layout": "o", "message": configs.to_proto()}})
    keys = monolith.unique_key_with_value_and_offset(column(), [1, 2])
    yield from methods(lambda: keys.value_offset)
    yield from calls(monolith.ReduceSum, monolith.ReduceMean)
    shared: Arguments = {"ps_num": 1, "feature_cfgs": configs}
    fids: Arguments = {"tensor": {"f": column()}, **shared}
    yield monolith.sharding_sparse_fids, fids
    found = monolith.sharding_sparse_fids(**fids)
    encoding: Arguments = {**shared, "batch_size": found.batch_size, "version": 5}
    encoding |= {f"{kind}_offset": getattr(found, f"{kind}_offset") for kind in ("fid", "feature", "nfl")}
    encoding |= {f"{kind}_size": getattr(found, f"{kind}_size") for kind in ("fid", "feature", "nfl", "emb")}
    encoding |= {"embeddings_list": [torch.ones(each.numel(), 3) for each in found.lists]}
    encoding |= {"fid_list_row_split": None, "variant_type": "example"}
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
    made = {"num_ps": 0, "use_native_multi_hash_table": True, "parser_ctx": partitioned_params()}
    factory = {"table_factory": lambda server, configs: configs}
    yield monolith.PartitionedHashTable, made | factory
    table = partitioned()
    features: Arguments = {"features": {"f": column()}}
    layouts = table.lookup({"f": column()}, {})
    update: Arguments = {"layout_grads_and_vars": [(torch.ones(2, 2), layouts["o"])], "global_step": 0}
    update |= {"req_time": 1.0, "auxiliary_bundle": Fresh(lambda: filled(table)), "grad_scale": 1.0}
    yield table.apply_gradients, update
    given: Given = {
        "*": {"data": {0: {"f": (ids(), ROWS)}}, "nested": layouts, "tensors": [torch.ones(2, 2)]},
        "gen_feature_configs": partitioned_arguments(),
        "shard": features,
        "tensor_move_to_gpu": {"tensors": []},
        "add_queue_hook": {"hook": 1},
        "merge_feature_config": {"feature_name_to_config": {"f": config()}},
        "no_merge_feature_config": {"feature_name_to_config": {"f": config()}, "use_same_table": True},
        "lookup": features | {"auxiliary_bundle": {}},
        "apply_gradients": update,
    }
    yield from methods(lambda: table, given)
    yield monolith.get_sub_table_name, {"strs": ["a", "b"]}


def monolith_table_calls() -> Iterator[Call]:
    rows, step = {"a": (ids(), ROWS)}, {"global_step": 0, "req_time": 1.0}
    made: Arguments = {"ps_num": 0, "config": config(), "hash_table_factory": lambda i, config: config}
    yield monolith.DistributedHashTable, made
    table = monolith.DistributedHashTable(**made)
    yield from methods(lambda: table, {"*": {"ids": ids(), "values": ROWS, "grads": ROWS, "hook": 1} | step})
    made = {"num_ps": 0, "slot_to_config": {"a": config()}, "table_factory": lambda i, configs: configs}
    yield monolith.DistributedMultiTypeHashTable, made
    slots = monolith.DistributedMultiTypeHashTable(**made)
    given: Arguments = {"slot_to_id_and_value": rows, "slot_to_id_and_grad": rows, "slot_to_id": {"a": ids()}}
    yield from methods(lambda: slots, {"*": given | step | {"slot": "a", "ids": ids(), "hook": 1}})
    yield (
        monolith.DistributedMultiTypeHashTableMpi,
        {"shard_num": 1, "table_factory": lambda rank: [config()]},
    )
    mpi = monolith.DistributedMultiTypeHashTableMpi(1, lambda rank: [config()])
    pack = (*monolith.fused_reorder_by_indices([ids()], 1, [2]), None)
    given["early_reorder_indicies_res_pack"], given["slot_to_grad"] = pack, {"a": ROWS}
    given["auxiliary_bundle"] = Fresh(lambda: mpi.lookup({"a": ids()}, {}, pack)[1])
    yield from methods(lambda: mpi, {"*": given | step | {"slot": "a", "ids": ids(), "hook": 1}})
    yield monolith.ParserCtx, {}
    ctx = monolith.ParserCtx()
    ctx.sharding_sparse_fids_op_params = partitioned_params()
    split: Arguments = {"inputs": {"a": ids()}, "features": Fresh(dict), "parser_ctx": ctx}
    yield from methods(lambda: ctx, {"*": split})
    split = {"sparse_features": {"f": column()}, "features": Fresh(dict), "parser_ctx": ctx}
    yield from calls(monolith.sharding_sparse_fids_with_context, monolith.get_default_parser_ctx, **split)
    export = monolith.ExportContext()
    yield monolith.ExportContext, {}
    part: Arguments = {"graph": export.sub_graph("ps_0"), "name": "lookup", "inputs": {}, "outputs": {}}
    yield from methods(lambda: export, {"*": part})
    yield monolith.enter_export_mode, {"mode": monolith.ExportMode.STANDALONE, "ctx": export}
    yield from calls(
        *(monolith.is_exporting, monolith.is_exporting_standalone, monolith.is_exporting_distributed),
        *(monolith.get_current_export_ctx, monolith.enable_sync_training, monolith.get_sync_run_hooks),
    )


def filled(table: monolith.PartitionedHashTable) -> Arguments:
    bundle: Arguments = {}
    table.lookup({"f": column()}, bundle)
    return bundle


def monolith_calls() -> Iterator[Call]:
    keys = monolith.unique_key_with_value_and_offset(column(), [1, 2])
    pos = megalith.Ragged.from_lists([[0, 0], [0]])
    yield monolith.SharedBuffer, {"size": 4}
    unique = monolith.unique_key_with_value_and_offset
    yield from calls(unique, key=column(), dims=[1, 2], generate_buffer=True)
    places: Arguments = {"pos": pos, "value_offset_map": keys.value_offset, "dims": [1, 2]}
    values: Arguments = {"value": torch.ones(4), "value_buffer": monolith.SharedBuffer(4)}
    yield monolith.fill_with_offset_map, places | values
    yield monolith.fill_with_offset_map_gradient, places | {"grad": torch.ones(4)}
    shared: Arguments = {"shared_tensor_handles": [monolith.SharedBuffer(4)], "shape": (-1,)}
    yield monolith.finalize_shared_tensor, shared | {"dtype": torch.float32}
    yield monolith.normalize_merged_split, {"row_split": ids(0, 1, 0, 2), "row_split_size": ids(2, 2)}
    yield from calls(monolith.aligned_flat_concat, monolith.monolith_aligned_flat_concat, inputs=[ROWS, ROWS])
    flat = monolith.aligned_flat_concat([ROWS])
    yield monolith.aligned_flat_split, {"inputs": [ROWS], "flat": flat}
    owners = ids(0, 1, 1)
    yield from calls(monolith.reorder_by_indices, input=ids(), shard_ids=owners, num_of_shards=2)
    split = [monolith.split_by_indices, monolith.ragged_split_by_indices]
    yield from calls(*split, indices=owners, tensor=ROWS, num=column(), num_splits=2)
    reorder = monolith.fused_reorder_by_indices
    yield from calls(reorder, inputs=[ids(), ids(4)], num_of_shards=2, dim_sizes=[1, 2])
    fused = monolith.fused_gather_embeddings_by_input
    offsets, dims = [ids(0, 2)], [2]
    yield (
        fused,
        {"fused_embeddings": torch.ones(4), "fused_embedding_offsets": offsets, "embedding_dims": dims},
    )
    gradient: Arguments = {"fused_embeddings": 4, "grads": [torch.ones(2, 2)]}
    gradient |= {"embedding_offsets": offsets, "embedding_dims": dims}
    yield monolith.fused_gather_embeddings_by_input_gradient, gradient
    yield from calls(monolith.gather_embeddings_by_input, ids=ids(), embeddings=ROWS, input=ids(1, 3))
    back: Arguments = {"grads": torch.ones(2, 2)}
    gathered = monolith.gather_embeddings_by_ids_gradient_back_prop
    yield from calls(gathered, ids=ids(), index_mapping=ids(0, 2), **back)
    mapped = [monolith.map_id_to_embedding, monolith.map_id_to_embedding_gradient_back_prop]
    yield from calls(*mapped, ids=[ids()], embeddings=[ROWS], input=ids(1, 3), **back)
    reduced = {"id_indices": torch.tensor([[0], [0], [1]]), "id_values": ROWS, "id_length": 2}
    yield from calls(monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn, **reduced)
    yield monolith.fused_reduce_sum_and_split, {**reduced, "split_dims": [1, 1]}
    reduce = [monolith.fused_reduce_and_split, monolith.fused_reduce_and_split_gpu]
    yield from calls(*reduce, splits=[ids(0, 1, 3)], embeddings=[ROWS], slice_dims=[[1, 1]])
    segments = monolith.fused_sorted_segment_sum
    yield from calls(segments, indices=[ids(0, 0, 1)], values=[ROWS], shapes=[[2, 2]])
    yield monolith.ps_device, {"index": 1}
    yield from calls(
        *(getattr(monolith, f"get_mpi_{n}") for n in ("rank", "local_rank", "size", "local_size"))
    )
    yield monolith.get_device_str, {"force_on_cpu": True}
    yield from calls(monolith.Fp32Compressor, monolith.Fp16Compressor, monolith.FixedR8Compressor)
    yield monolith.OneBitCompressor, {"step_size": 10, "amplitude": 0.1}
    yield monolith.PolynomialDecay, {"initial_learning_rate": 1.0, "decay_steps": 10}
    yield monolith.FirstN, {"seq_length": 2}
    for combiner in (monolith.ReduceSum(), monolith.ReduceMean(), monolith.FirstN(2)):
        yield combiner.combine, {"key": column(), "embedding": ROWS}
    shards = local()
    looked_up: Arguments = {"ids": ids(), "fused_slot_size": ids(2, 1), "num_of_shards": 1}
    found = monolith.fused_lookup(shards, **looked_up)
    looked_up |= {"shards": shards, "req_time": 1.0}
    yield monolith.fused_lookup, looked_up
    update: Arguments = {"id_grads": torch.ones(found.embeddings.numel()), "indices": found.indices}
    update |= {"id_offsets": found.id_offsets, "grad_offsets": found.emb_offsets, "global_step": 0}
    yield monolith.fused_apply_gradient, looked_up | update
