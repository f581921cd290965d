"""The messages on the wire: the bytes of other people's clients, and the public field numbers."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.compat.monolith import feature_configs
from megalith.serving import wire_names
from megalith.serving.proto import message_types
from megalith.serving.proto.infer_tensors import from_infer_request
from megalith.serving.proto.message_types import (
    POOL,
    ClientConfig,
    GetModelMetadataResponse,
    ModelSpec,
    ModelVersionStatus,
    SignatureDefMap,
)
from megalith.serving.proto.tf_tensors import tensor_info
from tests.serving.exports import to_infer_request

RECORDED: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("clients.json").read_text())
TENSORFLOW_ONLY = {"resource_handle_val", "variant_val", "composite_tensor"}


def described(message: Any) -> list[str]:
    """A message's fields as the recording writes them."""
    return [describe(field) for field in message.fields]


def describe(field: Any) -> str:
    kind = field.message_type or field.enum_type
    scalars = {1: "double", 2: "float", 3: "int64", 4: "uint64", 5: "int32", 8: "bool", 9: "string"}
    type_name = kind.full_name if kind else (scalars | {12: "bytes", 13: "uint32"})[field.type]
    oneof = f"oneof:{field.containing_oneof.name}" if field.containing_oneof else ""
    repeated = "repeated" if field.is_repeated else ""
    packed = "packed" if field.is_packed else ""
    return " ".join(filter(None, (str(field.number), field.name, type_name, repeated, packed, oneof)))


def ours(name: str) -> Any:
    """The class of a recorded message."""
    return getattr(message_types, name.partition("/")[0].rpartition(".")[2])


def wire(message: Any) -> str:
    text: str = message.SerializeToString(deterministic=True).hex()
    return text


@pytest.mark.parametrize("name", RECORDED["fields"])
def test_fields_are_those_of_the_public_clients(name: str) -> None:
    theirs = {line for line in RECORDED["fields"][name] if line.split()[1] not in TENSORFLOW_ONLY}
    assert set(described(POOL.FindMessageTypeByName(name))) == theirs


@pytest.mark.parametrize("name", RECORDED["messages"])
def test_recorded_messages_are_read_without_loss(name: str) -> None:
    recorded = bytes.fromhex(RECORDED["messages"][name])

    message = ours(name).FromString(recorded)

    assert not len(unknown_fields(message))
    assert message.SerializeToString(deterministic=True) == recorded


def unknown_fields(message: Any) -> Any:
    from google.protobuf.unknown_fields import UnknownFieldSet  # type: ignore[import-untyped]

    return UnknownFieldSet(message)


def test_metadata_is_packed_as_tensorflow_serving_packs_it() -> None:
    signatures = SignatureDefMap()
    signature = signatures.signature_def["serving_default"]
    signature.method_name = "tensorflow/serving/predict"
    signature.inputs["ids"].CopyFrom(tensor_info("ids", torch.int64, [None, 4]))
    signature.outputs["p"].CopyFrom(tensor_info("p", torch.float32, [-1, 4]))
    response = GetModelMetadataResponse(model_spec=ModelSpec(name="movies"))
    response.model_spec.version.value = 3
    response.metadata["signature_def"].Pack(signatures)

    assert wire(response) == RECORDED["messages"]["tensorflow.serving.GetModelMetadataResponse"]
    unpacked = SignatureDefMap()
    assert response.metadata["signature_def"].Unpack(unpacked)
    assert unpacked == signatures


def test_infer_is_written_as_tritonclient_writes_it() -> None:
    inputs = {
        "dense": torch.arange(6.0).reshape(2, 3),
        "words": np.array([b"a", b"\xff\x00"], dtype=object),
    }
    request = to_infer_request(inputs, model_name="movies", model_version="3", id="r1")
    request.outputs.add(name="p")

    assert wire(request) == RECORDED["messages"]["inference.ModelInferRequest"]


def test_typed_contents_of_tritonclient_are_read() -> None:
    request = ours("inference.ModelInferRequest").FromString(
        bytes.fromhex(RECORDED["messages"]["inference.ModelInferRequest/contents"])
    )

    read = {
        name: (str(value.dtype).removeprefix("torch."), value.tolist())
        for name, value in from_infer_request(request).items()
    }

    assert read == {
        "BOOL": ("bool", [True, False]),
        "INT8": ("int8", [1, -2]),
        "INT64": ("int64", [1, -(2**63)]),
        "UINT32": ("uint32", [1, 2**32 - 1]),
        "UINT64": ("uint64", [1, 2**64 - 1]),
        "FP32": ("float32", [1.5, -2.0]),
        "FP64": ("float64", [1.5, -2.0]),
        "BYTES": ("object", [b"a", b""]),
    }


@pytest.mark.parametrize(
    ("service", "methods"),
    [
        ("tensorflow.serving.PredictionService", ["GetModelMetadata", "Predict"]),
        ("tensorflow.serving.ModelService", ["GetModelStatus"]),
        (
            "inference.GRPCInferenceService",
            [
                *("ModelConfig", "ModelInfer", "ModelMetadata", "ModelReady", "ModelStatistics"),
                *("RepositoryIndex", "ServerLive", "ServerMetadata", "ServerReady"),
            ],
        ),
    ],
)
def test_services_have_their_public_names(service: str, methods: list[str]) -> None:
    found = POOL.FindServiceByName(service)

    assert sorted(method.name for method in found.methods) == methods
    for method in found.methods:
        assert method.input_type.full_name.endswith(f"{method.name}Request")
        assert method.output_type.full_name.endswith(f"{method.name}Response")


DELTA = "monolith.parameter_sync.PushRequest.DeltaEmbeddingHashTable repeated"
SYNC = {
    "PushRequest.DeltaEmbeddingHashTable": (
        "1 unique_id string, 2 dim_size int32, 3 fids int64 repeated, 4 embeddings float repeated"
    ),
    "PushRequest": (
        f"1 model_name string, 2 signature_name string, 3 delta_hash_tables {DELTA}, 4 timeout_in_ms int64, "
        f"5 delta_multi_hash_tables {DELTA}"
    ),
    "PushResponse": "1 status_code int32, 2 error_message string, 3 target string, 4 update_num int32",
    "PushResult": "1 responses monolith.parameter_sync.PushResponse repeated",
    "ClientConfig": (
        "1 model_name string, 2 signature_name string, 3 targets string repeated, 4 timeout_in_ms int64, "
        "5 targets_extra_info monolith.parameter_sync.ClientConfig.TargetExtraInfo repeated"
    ),
    "ClientConfig.TargetExtraInfo": "1 idc string, 2 cluster string, 3 replica_id int64",
}


@pytest.mark.parametrize("name", SYNC)
def test_parameter_sync_has_the_fields_of_monolith(name: str) -> None:
    found = POOL.FindMessageTypeByName(f"monolith.parameter_sync.{name}")
    assert ", ".join(described(found)) == SYNC[name]


def test_parameter_sync_tells_a_default_from_nothing() -> None:
    config = ClientConfig()
    assert (config.timeout_in_ms, config.HasField("timeout_in_ms")) == (1000, False)

    info = config.targets_extra_info.add(replica_id=-1)

    assert info.HasField("replica_id")
    assert config.SerializeToString() == bytes.fromhex("2a0b18ffffffffffffffffff01")
    assert ClientConfig.TargetExtraInfo().replica_id == -1


def test_a_process_may_hold_the_same_names_of_somebody_else() -> None:
    """TensorFlow and Triton's client put their own `tensorflow.TensorProto` into protobuf's default pool."""
    code = (
        "from google.protobuf import descriptor_pb2, descriptor_pool\n"
        "file = descriptor_pb2.FileDescriptorProto(name='tensorflow/core/framework/tensor.proto')\n"
        "file.package = 'tensorflow'\n"
        "file.message_type.add(name='TensorProto').field.add(name='x', number=1, type=5, label=1)\n"
        "descriptor_pool.Default().Add(file)\n"
        "from megalith.serving.proto.message_types import TensorProto\n"
        "assert 'x' not in TensorProto.DESCRIPTOR.fields_by_name\n"
        "theirs = descriptor_pool.Default().FindMessageTypeByName('tensorflow.TensorProto')\n"
        "assert 'x' in theirs.fields_by_name\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_without_protobuf_the_error_names_the_extra() -> None:
    code = (
        "import sys\n"
        "sys.modules['google.protobuf'] = None\n"
        "from megalith.errors import MissingDependencyError\n"
        "try:\n"
        "    import megalith.serving.proto.message_types\n"
        "except MissingDependencyError as error:\n"
        "    assert \"pip install '.[serve]'\" in str(error), error\n"
        "else:\n"
        "    raise SystemExit('no error')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


FOLDERS = [Path(message_types.__file__).parent, Path(feature_configs.__file__).with_name("proto")]


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
    found: Any = feature_configs.message_type(name).DESCRIPTOR
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
