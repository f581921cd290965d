"""docs/coming-from-monolith.md: no Monolith name is missing, and everything the page names exists."""

import ast
import importlib
import inspect
import re
import subprocess
import sys
from functools import cache
from itertools import groupby, product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from megalith.compat import monolith

TESTS = Path(__file__).parents[2]
PAGE = TESTS.parent / "docs" / "coming-from-monolith.md"
CASES = Path(__file__).with_name("cases.md")
COLUMNS = ["Monolith's name", "ours", "what differs", "test", "cost"]

# Copied by hand from Monolith's modules: each must be in a row under its heading.
NAMES = {
    "Distribution ops": """
        split_by_indices ragged_split_by_indices unique_key_with_value_and_offset fill_with_offset_map
        fill_with_offset_map_gradient finalize_shared_tensor reorder_by_indices fused_reorder_by_indices
        map_id_to_embedding map_id_to_embedding_gradient_back_prop gather_embeddings_by_input
        gather_embeddings_by_ids_gradient_back_prop fused_gather_embeddings_by_input
        fused_gather_embeddings_by_input_gradient reduce_sum reduce_mean reduce_sqrtn fused_sorted_segment_sum
        fused_reduce_sum_and_split fused_reduce_and_split_gpu normalize_merged_split sharding_sparse_fids
        fused_embedding_to_layout fused_embedding_to_layout_grad monolith_aligned_flat_concat
        monolith_aligned_flat_split FeatureConfigs FeatureConfig OutConfig SliceConfig Combiner max_seq_length
        ReduceSum ReduceMean FirstN PolynomialDecay
    """,
    "Tables on parameter servers": """
        DistributedHashTable ps_num config hash_table_factory dim_size lookup assign assign_add
        apply_gradients DistributedMultiTypeHashTable num_ps slot_to_config transfer_float16 reinitialize
        max_rpc_deadline_millis
        PartitionedHashTable gen_feature_configs flatten_layout nest_layout _lookup_raw merge_feature_config
        no_merge_feature_config slot_mapping add_queue_hook get_queue_hooks tensor_move_to_gpu use_gpu
        enable_gpu_emb fid_offset feature_offset nfl_offset batch_size nfl_size feature_size fid_size emb_size
        fid_list_emb_row_lenth fids fids_row_split embs shards shards_row_split shards_row_split_size
        sharding_sparse_fids_with_context ParserCtx get_default_parser_ctx ShardingSparseFidsOpParams
        ExportContext ExportMode enter_export_mode sub_graph sub_graph_num is_exporting
        is_exporting_standalone is_exporting_distributed get_current_export_ctx
    """,
    "The synchronous table": """
        DistributedMultiTypeHashTableMpi shard_num table_factory queue_configs _output_dims
        lookup slot_to_id early_reorder_indicies_res_pack all_fids shard_sizes sharded_slot_sizes
        emb_offset_sz fused_embedding_offsets req_time fused_lookup recv_emb_splits recv_embeddings_size
        auxiliary_bundle id_flat_t id_size_flat_t fused_embeddings embedding_splits id_offsets emb_offsets
        indices recv_embeddings global_step grad_flat grad_flat_t
        apply_gradients slot_to_grad scale fused_apply_gradient enable_grad_accumulation
        enable_pipelined_fwda2a queue_lookup_to_fusedEmbA2A embedding_prefetch_capacity
        queue_fusedEmbA2A_to_fusedGather enable_async_optimize queue_fusedGatherGrad_to_fusedEmbGradA2A
        AsyncPushHook enable_pipelined_bwda2a queue_fusedEmbGradA2A_to_sparseOptimize
        assign assign_add _update reinitialize get_table_dim_sizes as_op
        enable_alltoall_metrics enable_alltoall_metrics_for_slot
        Alltoall_id_dist Alltoall_emb_dist Alltoall_id_splits Alltoall_emb_splits Alltoall_grad_splits
        Alltoall_id_sizes Alltoall_emb_sizes Alltoall_grad_sizes
        Alltoall_id_min_idx Alltoall_id_min_size Alltoall_id_max_idx Alltoall_id_max_size
        Alltoall_emb_min_idx Alltoall_emb_min_size Alltoall_emb_max_idx Alltoall_emb_max_size
        all_fids_size fused_embedding_splits {slot}_size
        MONOLITH_WITH_HOROVOD MONOLITH_WITH_OPTIMIZED_HOROVOD MONOLITH_WITH_HOROVOD_FID_G2G
        MONOLITH_WITH_HOROVOD_FWD_G2G MONOLITH_WITH_HOROVOD_BWD_G2G MONOLITH_WITH_BYTEPS
        MONOLITH_WITH_BYTEPS_FID MONOLITH_WITH_BYTEPS_FWD MONOLITH_WITH_BYTEPS_BWD
        MONOLITH_WITH_BYTEPS_BWD_CAST MONOLITH_WITH_BYTEPS_BWD_FAKE_CAST MONOLITH_WITH_BYTEPS_FWD_GDR
        MONOLITH_WITH_BYTEPS_BWD_GDR MONOLITH_WITH_BYTEPS_FWD_GDR_G2G MONOLITH_WITH_BYTEPS_BWD_GDR_G2G
        MONOLITH_SYNC_EMPTY_RANK0_PS_SHARD
    """,
    "Ranks, devices and launch": """
        _SYNC_TRAIN_INITED enable_bps get_mpi_rank get_mpi_local_rank get_mpi_size get_mpi_local_size
        OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_SIZE
        enable_sync_training init_sync_train_and_update_conf merge_sync_training_ckpt model_dir uuid num_ps
        reorder_fids_in_data_pipeline index num_workers enable_variable_partition
        MONOLITH_WITH_BYTEPS_BCAST MONOLITH_WITH_BYTEPS_ALLREDUCE
        try_init_cuda CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER get_device_str ps_device
        enable_gpu_training get_sync_run_hooks ByteCCLTelemetryHook update_session_config_for_gpu
        MONOLITH_FORCE_GPU_COMPATIBLE
        bps_init BYTEPS_ALLTOALL_SESSION_SIZE BYTEPS_LOCAL_SIZE DMLC_INTERFACE BYTEPS_GPU_NIC_BINDING_MODE
        BYTEPS_WITH_ALL_NICS UCX_NET_DEVICES PSLITE_UCX_TLS BYTEPS_KEY_HASH_FN PSLITE_UCX_RNDV_THRESH
        BYTEPS_SERVER_DIRECT_RESPONSE BYTEPS_P2P_PARTITION_BYTES BYTEPS_PARTITION_BYTES
        byteps_benchmark_ar byteps_benchmark_a2a bps_comm_benchmark MONOLITH_BENCHMARK_BPS
        MONOLITH_BENCHMARK_ITERS MONOLITH_BENCHMARK_BPS_AR_LEN MONOLITH_BENCHMARK_BPS_A2A_LEN
    """,
    "Ids, records and checkpoints": "fid_v1_list fid_v2_list Example ExampleBatch Instance EntryDump",
    "Compressors": "Fp32Compressor Fp16Compressor FixedR8Compressor OneBitCompressor fixed_r8 one_bit",
    "Admission and expiry": """
        slot_expire_time_config default_expire_time expire_time enable_feature_eviction
        feature_evict_every_n_hours feature_eviction_on_save slot_occurrence_threshold_config
        occurrence_threshold sliding_hash_filter probabilistic_filter intercept_gradient
    """,
    "Serving and parameter sync": """
        remote_predict create_parameter_sync_clients parameter_sync_client_from_config refresh_sync_config
        ParameterSyncClient create_sync_op create_dummy_sync_client create_dummy_sync_server DummySyncServer
        get_port shutdown hashtable_assign raw_assign lookup ZKBackend ReplicaWatcher SyncBackend AgentService
        GetReplicas HeartBeat
    """,
    "TensorFlow's own concepts": "as_op variant_type input_type",
}
CONCEPTS = (
    "control dependencies",
    "op versions 1 to 5",
    "variant",
    "colocation",
    "session config",
    "run hooks",
)


class Row(NamedTuple):
    """A row of a table of the page."""

    heading: str
    cells: dict[str, str]

    def __str__(self) -> str:
        return f"{self.heading}: {next(iter(self.cells.values()))}"


def read(page: Path = PAGE) -> list[Row]:
    """All rows of all tables, with their second-level heading."""
    rows = []
    for heading, section in re.findall(r"^##? (.+?)\n(.*?)(?=^##? |\Z)", page.read_text(), re.M | re.S):
        for is_table, lines in groupby(section.splitlines(), lambda line: line.startswith("|")):
            if is_table:
                columns, _, *table = [[c.strip() for c in line.strip("|").split("|")] for line in lines]
                rows += [Row(heading, dict(zip(columns, cells, strict=True))) for cells in table]
    return rows


ROWS = read()
MAPPED = [row for row in ROWS if list(row.cells) == COLUMNS]


def spans(cell: str) -> list[str]:
    """The texts in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def exists(name: str) -> bool:
    """Whether a dotted name can be imported, without its arguments."""
    name = re.sub(r"^ops\.", "megalith.ops.", name.partition("(")[0])
    name = re.sub(r"^monolith\.", "megalith.compat.monolith.", name)
    parts = name.split(".")
    found: Any = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], start=2):
        if any(part in inspect.get_annotations(base) for base in getattr(found, "__mro__", ())):
            return number == len(parts)  # a field that instances have
        if not hasattr(found, part):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@cache
def functions(file: str) -> set[str]:
    """The functions of a file under tests."""
    tree = ast.parse((TESTS / file).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("heading", NAMES)
def test_no_name_is_missing(heading: str) -> None:
    rows = [row for row in MAPPED if row.heading == heading]
    named = {name for row in rows for name in spans(row.cells["Monolith's name"])}
    assert [name for name in NAMES[heading].split() if name not in named] == []


def test_tensorflow_concepts_have_a_row() -> None:
    named = [row.cells["Monolith's name"] for row in MAPPED if row.heading == "TensorFlow's own concepts"]
    assert [concept for concept in CONCEPTS if not any(concept in name for name in named)] == []


def test_every_public_name_of_ours_is_on_the_page() -> None:
    ours = {f"monolith.{name}" for name in monolith.__all__}
    on_the_page = {name for row in ROWS for name in spans(row.cells["ours"])}
    assert {name for name in ours if not any(f"{x}.".startswith(f"{name}.") for x in on_the_page)} == set()


def test_no_cell_is_empty() -> None:
    assert {row.heading for row in MAPPED} == NAMES.keys()
    assert [row for row in ROWS if not all(row.cells.values())] == []


def test_our_names_can_be_imported_and_planned_names_cannot() -> None:
    wrong = []
    for row in ROWS:
        here, _, planned = row.cells["ours"].partition("not yet: ")
        wrong += [f"{row}: {name} does not exist" for name in spans(here) if not exists(name)]
        wrong += [f"{row}: {name} exists now" for name in spans(planned) if exists(name)]
        if not spans(here) and not spans(planned) and here != "nothing":
            wrong.append(f"{row}: name something, or write nothing")
    assert wrong == []


READS_AT_IMPORT = """
import importlib.util, os, sys
import torch, torch.distributed, numpy, google.protobuf, grpc

package = os.path.dirname(importlib.util.find_spec("megalith").origin)
reads = []

class Recorded(type(os.environ)):
    def __getitem__(self, key):
        frame = sys._getframe(1)
        while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
            if frame.f_code.co_filename.startswith(package):
                reads.append((key, frame.f_code.co_filename))
            frame = frame.f_back
        return super().__getitem__(key)

os.environ.__class__ = Recorded
exec(compile("os.environ.get('SEEN')", os.path.join(package, "seen.py"), "exec"))
import megalith, megalith.distributed.launcher_environment, megalith.serving, megalith.training
from megalith.compat import monolith
for name in monolith.__all__:
    getattr(monolith, name)
print(*(key for key, _ in reads))
"""


def test_importing_reads_no_environment_variable() -> None:
    """The page says so; Monolith reads its settings when it is imported."""
    command = [sys.executable, "-c", READS_AT_IMPORT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["SEEN"]  # the one read that the script itself makes, to show that it looks


def collected(test: str) -> bool:
    """Whether a test exists, with its parameters in brackets as pytest names them."""
    file, name, _, parameters = re.fullmatch(r"([^:]+)::(\w+)(\[(.+)\])?", test).groups()  # type: ignore[union-attr]
    if name not in functions(file) or parameters is None:
        return name in functions(file)
    function = getattr(importlib.import_module("tests." + file.removesuffix(".py").replace("/", ".")), name)
    marks = [mark for mark in function.pytestmark if mark.name == "parametrize"]
    names = [[ids(x) for x in mark.args[1]] if callable(ids := mark.kwargs["ids"]) else ids for mark in marks]
    return parameters in {"-".join(each) for each in product(*names)}


def test_each_of_monoliths_own_cases_has_a_test() -> None:
    found = [row for row in read(CASES) if "case" in row.cells]
    assert len({(row.heading, row.cells["case"]) for row in found}) == len(found) == 69
    tests = [test for row in found for cell in list(row.cells.values())[1:] for test in spans(cell)]
    assert [test for test in tests if not collected(test)] == []


def test_named_tests_exist() -> None:
    wrong = []
    for row in MAPPED:
        tests = [test.split("::") for test in spans(row.cells["test"])]
        wrong += [f"{row}: no {name} in tests/{file}" for file, name in tests if name not in functions(file)]
        if not tests and not re.match(r"- \w", row.cells["test"]):
            wrong.append(f"{row}: name a test, or write why there is none")
    assert wrong == []
