"""Calls copied from Monolith's code and documents: the arguments are accepted, and the results are right."""

from __future__ import annotations

import ast
import inspect
import json
from typing import Any

import pytest
import torch

from megalith import SGD, LocalShards, Table, TableConfig, Zeros
from megalith.compat import monolith
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
        monolith.parameter_sync_client_from_config() as client,
    ):
        servers = (one, two)
        config = ClientConfig(model_name="m", signature_name="hashtable_assign", timeout_in_ms=3000)
        config.targets.extend(f"localhost:{server.get_port()}" for server in servers)
        table = Table(TableConfig("t", dim=3, optimizer=SGD(0.1), initializer=Zeros()))
        client.attach(table)
        table.apply_gradients(torch.tensor([0, 0, 1]), -torch.ones(3, 3), step=0)
        sync_client = monolith.ParameterSyncClient(client)
        text = sync_client.create_sync_op(config_str=config.SerializeToString())
        assert "\n" in text  # pretty
        assert json.loads(text)["responses"] == [
            {"status_code": 0, "target": target, "update_num": 2} for target in config.targets
        ]
        for server in servers:
            (request,) = server.wait()
            pushed, rows = request.tables["t"]
            assert (pushed.tolist(), rows.tolist()) == ([0, 1], table.lookup(pushed).tolist())
            torch.testing.assert_close(rows, torch.tensor([[0.2] * 3, [0.1] * 3]))
        assert sync_client.handle is client.handle
        assert one.handle is one
