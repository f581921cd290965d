"""Calls copied from Monolith's code and documents: the arguments are accepted, and the results are right."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf import descriptor_pool, message_factory

from megalith import SGD, LocalShards, Ragged, Table, TableConfig, Zeros
from megalith.compat import monolith
from megalith.compat.monolith.sync_clients import read_sync_config
from megalith.serving.proto.message_types import ClientConfig

# As Monolith's modules define them. Methods are functions here whose first argument is the object.
SIGNATURES = """
split_by_indices(indices, tensor, num_splits)
ragged_split_by_indices(indices, num, num_splits)
unique_key_with_value_and_offset(key, dims, generate_buffer=True)
fill_with_offset_map(pos, value, value_offset_map, value_buffer, dims)
fill_with_offset_map_gradient(pos, grad, value_offset_map, dims)
finalize_shared_tensor(shared_tensor_handles, dtype, shape)
reorder_by_indices(input, shard_ids, num_of_shards)
fused_reorder_by_indices(inputs, num_of_shards, dim_sizes)
map_id_to_embedding(ids, embeddings, input, use_multi_threads=True)
map_id_to_embedding_gradient_back_prop(ids, input, grads)
gather_embeddings_by_input(ids, embeddings, input, use_multi_threads=False)
gather_embeddings_by_ids_gradient_back_prop(ids, grads, index_mapping)
fused_gather_embeddings_by_input(fused_embeddings, fused_embedding_offsets, embedding_dims)
fused_gather_embeddings_by_input_gradient(fused_embeddings, grads, embedding_offsets, embedding_dims, scale=1)
reduce_sum(id_indices, id_values, id_length, name=None)
reduce_mean(id_indices, id_values, id_length, name=None)
reduce_sqrtn(id_indices, id_values, id_length, name=None)
fused_sorted_segment_sum(indices, values, shapes)
fused_reduce_sum_and_split(id_indices, id_values, id_length, split_dims, name=None)
fused_reduce_and_split_gpu(splits, embeddings, slice_dims, name=None)
normalize_merged_split(row_split, row_split_size)
monolith_aligned_flat_concat(inputs, scale)
monolith_aligned_flat_split(inputs, flat)
fused_embedding_to_layout(embeddings_list, fid_list_row_split, fid_offset, feature_offset, nfl_offset,
 batch_size, variant_type, feature_cfgs, ps_num, fid_list_emb_row_lenth=None, nfl_size=None,
 feature_size=None, fid_size=None, emb_size=None, parallel_flag=0, version=3)
fused_embedding_to_layout_grad(nfl_offset, feature_offset, fid_offset, batch_size, embeddings_list,
 fid_list_row_split, layout_tensors_grad, variant_type, feature_cfgs, ps_num, fid_list_emb_row_lenth=None,
 layout_tensors_grad_scale=None, parallel_flag=0, version=3)
sharding_sparse_fids(tensor, ps_num, feature_cfgs, unique, input_type, parallel_flag=0,
 fid_list_ret_list=False, version=5)
fused_lookup(self, ids, fused_slot_size, num_of_shards, req_time=None)
fused_apply_gradient(self, ids, indices, fused_slot_size, id_grads, id_offsets, grad_offsets, global_step,
 req_time, num_of_shards, enable_grad_accumulation=False)
Combiner(max_seq_length)
Combiner.combine(self, key, embedding, name=None)
ReduceSum()
ReduceSum.combine(self, key, embedding, name=None)
ReduceMean()
ReduceMean.combine(self, key, embedding, name=None)
FirstN(seq_length)
FirstN.combine(self, key, embedding, name=None)
PolynomialDecay(initial_learning_rate, decay_steps, end_learning_rate=0.0001, power=1.0, cycle=False,
 name=None)
get_mpi_rank()
get_mpi_local_rank()
get_mpi_size()
get_mpi_local_size()
get_device_str(force_on_cpu=False)
ps_device(index)
remote_predict(input_tensor_alias, input_tensors, output_tensor_alias, model_name, task, old_model_name,
 model_version=-1, fail_op_on_rpc_error=True, max_rpc_deadline_millis=30, output_types=None, name=None,
 signature_name='serving_default')
create_parameter_sync_clients(ps_num)
parameter_sync_client_from_config(config=None, name_suffix="")
refresh_sync_config(sync_backend, ps_index)
create_dummy_sync_client()
create_dummy_sync_server(address)
ParameterSyncClient(client)
ParameterSyncClient.as_op(self)
DummySyncServer.as_op(self)
DistributedHashTable(ps_num, config, hash_table_factory)
DistributedHashTable.lookup(self, ids, use_multi_threads=False)
DistributedHashTable.assign(self, ids, values, req_time=0)
DistributedHashTable.assign_add(self, ids, values, req_time=0)
DistributedHashTable.apply_gradients(self, ids, grads, global_step, req_time=0)
DistributedHashTable.as_op(self, name=None)
DistributedMultiTypeHashTable(num_ps, slot_to_config, table_factory, transfer_float16=False,
 max_rpc_deadline_millis=30)
DistributedMultiTypeHashTable.lookup(self, slot_to_id)
DistributedMultiTypeHashTable.assign(self, slot_to_id_and_value)
DistributedMultiTypeHashTable.assign_add(self, slot_to_id_and_value)
DistributedMultiTypeHashTable.reinitialize(self, slot, ids)
DistributedMultiTypeHashTable.apply_gradients(self, slot_to_id_and_grad, global_step, req_time=0)
DistributedMultiTypeHashTableMpi(shard_num, table_factory, queue_configs=None)
DistributedMultiTypeHashTableMpi.lookup(self, slot_to_id, auxiliary_bundle,
 early_reorder_indicies_res_pack)
DistributedMultiTypeHashTableMpi.apply_gradients(self, slot_to_grad, auxiliary_bundle, global_step,
 req_time=0, scale=1)
DistributedMultiTypeHashTableMpi.get_table_dim_sizes(self)
PartitionedHashTable(num_ps, table_factory, use_native_multi_hash_table, max_rpc_deadline_millis=30,
 queue_configs=None, parser_ctx=None)
PartitionedHashTable.gen_feature_configs(num_ps, feature_name_to_config, layout_configs,
 feature_to_unmerged_slice_dims, feature_to_combiner, use_native_multi_hash_table, transfer_float16=False,
 unique=None, enable_gpu_emb=False, use_gpu=False)
PartitionedHashTable.merge_feature_config(feature_name_to_config)
PartitionedHashTable.no_merge_feature_config(feature_name_to_config, use_same_table)
PartitionedHashTable.lookup(self, features, auxiliary_bundle=None, ret_fused_layout_callable_fn=False,
 ret_lookup_callable_fn=False, embedding_prefetch_capacity=0)
PartitionedHashTable.apply_gradients(self, layout_grads_and_vars, global_step, req_time=None,
 auxiliary_bundle=None, async_function_mgr=None, async_push=False, grad_scale=None)
PartitionedHashTable.assign(self, data)
PartitionedHashTable.assign_add(self, data)
PartitionedHashTable._lookup_raw(self, lookup_data_on_wk)
PartitionedHashTable.flatten_layout(self, nested)
PartitionedHashTable.nest_layout(self, tensors)
PartitionedHashTable.add_queue_hook(self, hook)
sharding_sparse_fids_with_context(sparse_features, features, parser_ctx)
ParserCtx(enable_fused_layout=False)
enter_export_mode(mode, ctx)
ReplicaWatcher(zk_client, config, use_archon=False)
init_sync_train_and_update_conf(dct_config)
enable_sync_training()
try_init_cuda()
get_sync_run_hooks(is_full_sync=False)
bps_init(uuid)
byteps_benchmark_ar(total_len, total_niter=10000, use_cpu=False, op='pushpull')
byteps_benchmark_a2a(total_len, total_niter=10000, dst_gpu=True, src_gpu=True)
bps_comm_benchmark()
ParameterSyncClient.create_sync_op(self, config_str)
DummySyncServer(address)
SavedModel(model_name, sub_graph)
SavedModelDeployConfig(model_base_path, version_policy)
Container(ctx_cluster, ctx_id)
ContainerServiceInfo(grpc, http, archon, agent, idc, debug_info)
ZKBackend(bzid, zk_servers)
"""
CALLS = SIGNATURES.replace("\n ", " ").strip().splitlines()


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.partition("(")[0])
def test_arguments_have_monoliths_names_positions_and_defaults(call: str) -> None:
    name, _, rest = call.partition("(")
    theirs = inspect.signature(_function(f"def f({rest}: pass"))
    found: Any = monolith
    for part in name.split("."):
        found = getattr(found, part)
    ours = list(inspect.signature(found).parameters.values())

    for number, wanted in enumerate(theirs.parameters.values()):
        own = ours[number]
        assert own.kind == own.POSITIONAL_OR_KEYWORD
        if wanted.name != "self":
            assert own.name == wanted.name
        if wanted.default is not wanted.empty:
            assert own.default == wanted.default
    for own in ours[len(theirs.parameters) :]:
        assert own.default is not own.empty or own.kind in (own.VAR_POSITIONAL, own.VAR_KEYWORD)


def _function(source: str) -> Any:
    names: dict[str, Any] = {}
    exec(compile(ast.parse(source), "monolith", "exec"), names)
    return names["f"]


MODULES = {
    "distribution_ops": """
        split_by_indices ragged_split_by_indices unique_key_with_value_and_offset fill_with_offset_map
        fill_with_offset_map_gradient finalize_shared_tensor reorder_by_indices fused_reorder_by_indices
        map_id_to_embedding map_id_to_embedding_gradient_back_prop gather_embeddings_by_input
        gather_embeddings_by_ids_gradient_back_prop fused_gather_embeddings_by_input
        fused_gather_embeddings_by_input_gradient reduce_sum reduce_mean reduce_sqrtn fused_sorted_segment_sum
        fused_reduce_sum_and_split fused_reduce_and_split_gpu normalize_merged_split
        fused_embedding_to_layout fused_embedding_to_layout_grad
    """,
    "distributed_ps": """
        ps_device get_sub_table_name DistributedHashTable DistributedMultiTypeHashTable PartitionedHashTable
    """,
    "distributed_ps_sync": """
        DistributedMultiTypeHashTableMpi enable_hvd enable_custom_optimized_hvd enable_bps enable_bps_bwd_cast
    """,
    "distributed_serving_ops": """
        remote_predict create_parameter_sync_clients parameter_sync_client_from_config refresh_sync_config
        create_dummy_sync_client create_dummy_sync_server ParameterSyncClient DummySyncServer
    """,
    "distribution_utils": """
        enable_bps bps_init byteps_benchmark_ar byteps_benchmark_a2a bps_comm_benchmark enable_sync_training
        init_sync_train_and_update_conf get_mpi_rank get_mpi_local_rank get_mpi_size get_mpi_local_size
        try_init_cuda get_device_str get_sync_run_hooks update_session_config_for_gpu
    """,
    "embedding_combiners": "Combiner ReduceSum ReduceMean FirstN",
}


@pytest.mark.parametrize("module", MODULES)
def test_names_are_in_the_module_that_has_them_in_monolith(module: str) -> None:
    found = importlib.import_module(f"megalith.compat.monolith.{module}")
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []
    with pytest.raises(AttributeError):
        _ = found.no_such_name


# ---- calls as Monolith's own code makes them


def test_the_fused_path_of_synchronous_training() -> None:
    shards = LocalShards(
        [TableConfig(n, dim=d, optimizer=SGD(1.0), initializer=Zeros()) for n, d in (("1", 1), ("2", 2))]
    )
    slots = [torch.tensor([1, 1]), torch.tensor([2])]
    output, _, sizes, emb_offset_sz, offsets = monolith.fused_reorder_by_indices(
        inputs=slots, num_of_shards=1, dim_sizes=[1, 2]
    )
    embeddings, splits, id_offsets, emb_offsets, indices = monolith.fused_lookup(
        shards, ids=output, fused_slot_size=sizes, num_of_shards=1, req_time=None
    )
    assert splits.tolist() == [3]
    grad_flat = monolith.fused_gather_embeddings_by_input_gradient(
        fused_embeddings=torch.tensor(embeddings.numel(), dtype=torch.int32),
        grads=[torch.full((2, 1), 0.5), torch.tensor([[0.5, 1.0]])],
        embedding_offsets=offsets.split(emb_offset_sz.tolist()),  # type: ignore[arg-type]
        embedding_dims=[1, 2],
        scale=1,
    )
    monolith.fused_apply_gradient(
        shards,
        ids=output,
        indices=indices,
        fused_slot_size=sizes,
        id_grads=grad_flat,
        id_offsets=id_offsets,
        grad_offsets=emb_offsets,
        global_step=torch.tensor(0),
        req_time=torch.tensor(0),
        num_of_shards=1,
        enable_grad_accumulation=False,
    )
    assert shards.lookup({"1": slots[0], "2": slots[1]}).rows["2"].tolist() == [[-0.5, -1.0]]
    assert shards.local["1"].lookup(torch.tensor([1])).tolist() == [[-1.0]]


@pytest.mark.parametrize("make", [list, tuple, np.array, torch.tensor, int])
def test_lengths_and_sizes_as_tensorflow_takes_them(make: Any) -> None:
    """A length of one element as a list, tuple or array, and numpy integers wherever an int is."""
    length = np.int64(2) if make is int else make([2])
    index, values = torch.tensor([[0], [0], [1]]), torch.tensor([[3.0, 3.0], [4.0, 4.0], [4.0, 4.0]])
    assert monolith.reduce_sum(index, values, id_length=length).tolist() == [[7, 7], [4, 4]]
    assert monolith.reduce_mean(index, values, id_length=length).tolist() == [[3.5, 3.5], [4, 4]]
    assert monolith.reduce_sqrtn(index, values, id_length=length).tolist() == [[5, 5], [4, 4]]
    assert monolith.reduce_sum([[0], [0], [1]], values.numpy(), length).tolist() == [[7, 7], [4, 4]]
    found = monolith.fused_reduce_sum_and_split(torch.tensor([0, 0, 1]), values, length, [np.int32(1), 1])
    assert [each.tolist() for each in found] == [[[7], [4]]] * 2
    splits = monolith.normalize_merged_split(row_split=[0, 2, 5, 5, 9, 0, 0, 3, 4], row_split_size=[5, 4])
    assert splits.tolist() == [0, 2, 5, 5, 9, 9, 12, 13]
    key = Ragged.from_lengths(torch.tensor([1, 2, 3]), torch.tensor([1, 2]))
    assert monolith.ReduceSum().combine(key, [[1.0], [2.0], [3.0]]).tolist() == [[1], [5]]  # type: ignore[arg-type]
    assert monolith.FirstN(np.int64(2)).combine(key, np.ones((3, 1), np.float32)).shape == (2, 2, 1)  # type: ignore[arg-type]
    for split in monolith.split_by_indices(torch.tensor([0, 1]), torch.ones(2), np.int64(2)):
        assert split.tolist() == [1.0]
    assert monolith.finalize_shared_tensor([monolith.SharedBuffer(4)], shape=[None, np.int64(2)]).shape == (
        2,
        2,
    )
    configs = monolith.FeatureConfigs({"f": monolith.FeatureConfig("t", slice_dims=(1,))})
    version: Any = np.int64(3)
    encoding = monolith.sharding_sparse_fids({"f": key}, 2, configs, version=version)
    assert encoding.batch_size.tolist() == 2
    assert monolith.ps_device(np.int32(1)) == "/job:ps/task:1/device:CPU:0"  # type: ignore[arg-type]


def test_messages_of_other_generated_code() -> None:
    """A ClientConfig is known by its descriptor's name, whatever module generated it."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(ClientConfig.DESCRIPTOR.file.serialized_pb)
    theirs = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("monolith.parameter_sync.ClientConfig")
    )
    config = theirs(model_name="m", targets=["localhost:1"], timeout_in_ms=7)
    assert not isinstance(config, ClientConfig)
    assert read_sync_config(config).timeout_in_ms == 7
    with monolith.parameter_sync_client_from_config(config, name_suffix="0") as client:
        assert (client.as_op() is client, client.name) == (True, "MonolithSyncClient_0")
    with monolith.DummySyncServer() as server:
        assert server.as_op() is server


def test_a_learning_rate_function() -> None:
    decay = monolith.PolynomialDecay(
        initial_learning_rate=0.01, decay_steps=10, end_learning_rate=0.11, name="lr"
    )
    assert [decay(0), decay(1), decay(2), decay(99)] == pytest.approx([0.01, 0.02, 0.03, 0.11])
    table = TableConfig("t", dim=1, optimizer=SGD(monolith.PolynomialDecay(1.0, 10, end_learning_rate=2.0)))
    shards = LocalShards([table])
    ids = torch.tensor([5])
    before = shards.local["t"].lookup(ids).item()
    shards.apply_gradients({"t": ids}, {"t": torch.ones(1, 1)}, step=1)
    assert shards.local["t"].lookup(ids).item() == pytest.approx(before - 1.1)


def test_parameter_sync_as_monoliths_own_test_makes_it() -> None:
    with (
        monolith.DummySyncServer("localhost:0") as one,
        monolith.create_dummy_sync_server("localhost:0") as two,
    ):
        servers = (one, two)
        config = ClientConfig()
        config.targets.extend(f"localhost:{server.get_port()}" for server in servers)
        with monolith.parameter_sync_client_from_config(config=config) as handle:
            client = monolith.ParameterSyncClient(handle)
            table = Table(TableConfig("t", dim=3, optimizer=SGD(0.1), initializer=Zeros()))
            client.attach(table)
            table.apply_gradients(torch.tensor([0, 0, 1]), -torch.ones(3, 3), step=0)
            text = client.create_sync_op(config.SerializeToString())
            assert "\n" in text  # pretty
            assert json.loads(text)["responses"] == [
                {"status_code": 0, "target": target, "update_num": 2} for target in config.targets
            ]
            for server in servers:
                (request,) = server.wait()
                pushed, rows = request.tables["t"]
                assert (pushed.tolist(), rows.tolist()) == ([0, 1], table.lookup(pushed).tolist())
                torch.testing.assert_close(rows, torch.tensor([[0.2] * 3, [0.1] * 3]))
            assert client.handle is handle.handle
        for server in servers:
            assert server.handle is server
            server.shutdown()
