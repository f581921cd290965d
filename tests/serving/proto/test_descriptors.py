"""The committed descriptor sets match the .proto files, without running the compiler."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from megalith.compat.monolith import monolith_protos
from megalith.serving import wire_names
from megalith.serving.proto import message_types
from megalith.serving.proto.message_types import POOL, ModelVersionStatus

FOLDERS = [Path(message_types.__file__).parent, Path(monolith_protos.__file__).with_name("proto")]


@pytest.mark.parametrize("folder", FOLDERS, ids=["serving", "monolith"])
def test_the_set_was_compiled_from_these_files(folder: Path) -> None:
    recorded = dict(
        reversed(line.split()) for line in folder.joinpath("descriptors.sha256").read_text().splitlines()
    )
    files = ["descriptors.binpb", *(str(path.relative_to(folder)) for path in folder.rglob("*.proto"))]

    assert recorded == {file: hashlib.sha256((folder / file).read_bytes()).hexdigest() for file in files}, (
        "run `make protos`"
    )


def test_model_states_are_those_of_the_proto() -> None:
    values = ModelVersionStatus.State.items()
    assert dict(values) == {state.name: state.value for state in wire_names.ModelState}


MONOLITH = {
    "idl.matrix.proto.LineId": "req_time 3",
    "idl.matrix.proto.Feature": (
        "name 1, fid 2, float_value 3, int64_value 4, bytes_value 5, fid_list 6, float_list 7, int64_list 8, "
        "bytes_list 9"
    ),
    "parser.proto.Instance": "fid 1, value 2, label 3, instance_weight 4, line_id 5, feature 9",
    "monolith.io.proto.FidList": "value 1",
    "monolith.io.proto.BytesLists": "list 1",
    "monolith.io.proto.Feature": (
        "fid_v1_list 1, fid_v2_list 2, float_list 3, double_list 4, int64_list 5, bytes_list 6, "
        "fid_v2_lists 7, float_lists 8, double_lists 9, int64_lists 10, bytes_lists 11, int64_value 12, "
        "float_value 13, double_value 14, bytes_value 15, fid_v1_lists 16"
    ),
    "monolith.io.proto.NamedFeature": "name 1, feature 2",
    "monolith.io.proto.Example": "named_feature 1, line_id 100, label 101, instance_weight 102",
    "monolith.io.proto.NamedFeatureList": "name 1, feature 2, type 3",
    "monolith.io.proto.ExampleBatch": "named_feature_list 1, batch_size 3",
    "monolith.io.proto.SliceConfig": (
        "feature_name 1, start 2, end 3, feature_idx 4, slice_idx 5, pooling_type 10, max_sequence_length 11"
    ),
    "monolith.io.proto.TensorShape": "dims 1",
    "monolith.io.proto.OutConfig": "slice_configs 1, out_type 2, shape 3",
    "monolith.io.proto.FeatureConfig": "table 1, pooling_type 2, slice_dims 3, max_sequence_length 4",
    "monolith.io.proto.FeatureConfigs": "feature_configs 1, out_configs 2",
    "monolith.hash_table.EntryDump": "id 1, num 2, opt 3, last_update_ts_sec 4",
    "monolith.hash_table.OptimizerDump": "dump 1",
    "monolith.hash_table.SingleOptimizerDump": "adagrad 1, sgd 2, ftrl 3, adam 7, momentum 9",
    "monolith.hash_table.AdagradOptimizerDump": "norm 1",
    "monolith.hash_table.FtrlOptimizerDump": "zero 1, norm 2",
    "monolith.hash_table.AdamOptimizerDump": "m 1, v 2, beta1_power 3, beta2_power 4",
    "monolith.hash_table.MomentumOptimizerDump": "n 1",
    "monolith.hash_table.MultiHashTableMetadata": "table_name 1, num_entries 2",
}


@pytest.mark.parametrize("name", MONOLITH)
def test_messages_have_the_field_numbers_of_monolith(name: str) -> None:
    found: Any = monolith_protos.message_type(name).DESCRIPTOR
    assert ", ".join(f"{field.name} {field.number}" for field in found.fields) == MONOLITH[name]


TRITON = {
    "ModelConfigRequest": "name 1, version 2",
    "ModelConfigResponse": "config 1",
    "ModelConfig": "name 1, platform 2, version_policy 3, max_batch_size 4, input 5, output 6, backend 17",
    "ModelInput": "name 1, data_type 2, dims 4, optional 8",
    "ModelOutput": "name 1, data_type 2, dims 3",
    "ModelVersionPolicy": "specific 3",
    "ModelVersionPolicy.Specific": "versions 1",
    "ModelStatisticsRequest": "name 1, version 2",
    "ModelStatisticsResponse": "model_stats 1",
    "ModelStatistics": (
        "name 1, version 2, last_inference 3, inference_count 4, execution_count 5, inference_stats 6"
    ),
    "InferStatistics": "success 1, fail 2, queue 3, compute_input 4, compute_infer 5, compute_output 6",
    "StatisticDuration": "count 1, ns 2",
    "RepositoryIndexRequest": "repository_name 1, ready 2",
    "RepositoryIndexResponse": "models 1",
    "RepositoryIndexResponse.ModelIndex": "name 1, version 2, state 3, reason 4",
}


@pytest.mark.parametrize("name", TRITON)
def test_messages_have_the_field_numbers_of_triton(name: str) -> None:
    found: Any = POOL.FindMessageTypeByName(f"inference.{name}")
    assert ", ".join(f"{field.name} {field.number}" for field in found.fields) == TRITON[name]
