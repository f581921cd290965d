"""The messages on the wire: the same bytes as other people's clients, and Monolith's field numbers."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith.serving.proto import message_types
from megalith.serving.proto.infer_tensors import datatype_of, from_infer_request, to_infer_request
from megalith.serving.proto.message_types import (
    POOL,
    ClientConfig,
    ErrorCode,
    GetModelMetadataResponse,
    GetModelStatusResponse,
    ModelInferResponse,
    ModelSpec,
    PredictRequest,
    PredictResponse,
    SignatureDefMap,
    StatusProto,
)
from megalith.serving.proto.tf_tensors import tensor_info, to_tensor_proto
from megalith.serving.wire_names import ModelState

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


def test_predict_is_written_as_ovmsclient_writes_it() -> None:
    request = PredictRequest(model_spec=ModelSpec(name="movies"))
    request.model_spec.version.value = 3
    request.inputs["ids"].CopyFrom(to_tensor_proto(torch.arange(6).reshape(2, 3)))
    request.inputs["dense"].CopyFrom(to_tensor_proto(torch.arange(6.0).reshape(2, 3)))

    assert wire(request) == RECORDED["messages"]["tensorflow.serving.PredictRequest"]


def test_predict_response_is_written_as_ovmsclient_reads_it() -> None:
    response = PredictResponse(model_spec=ModelSpec(name="movies", signature_name="serving_default"))
    response.model_spec.version.value = 3
    response.outputs["p"].CopyFrom(to_tensor_proto(torch.arange(6.0).reshape(2, 3)))

    assert wire(response) == RECORDED["messages"]["tensorflow.serving.PredictResponse"]


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


def test_status_is_written_as_ovmsclient_reads_it() -> None:
    response = GetModelStatusResponse()
    response.model_version_status.add(version=3, state=ModelState.AVAILABLE).status.SetInParent()
    status = StatusProto(error_code=ErrorCode.INTERNAL, error_message="no such file")
    response.model_version_status.add(version=4, state=ModelState.END, status=status)

    assert wire(response) == RECORDED["messages"]["tensorflow.serving.GetModelStatusResponse"]


def test_infer_is_written_as_tritonclient_writes_it() -> None:
    inputs = {
        "dense": torch.arange(6.0).reshape(2, 3),
        "words": np.array([b"a", b"\xff\x00"], dtype=object),
    }
    request = to_infer_request(inputs, model_name="movies", model_version="3", id="r1")
    request.outputs.add(name="p")

    assert wire(request) == RECORDED["messages"]["inference.ModelInferRequest"]


def test_infer_response_is_written_as_tritonclient_reads_it() -> None:
    p = torch.arange(6.0).reshape(2, 3)
    response = ModelInferResponse(model_name="movies", model_version="3", id="r1")
    response.outputs.add(name="p", datatype=datatype_of(p), shape=p.shape)
    response.raw_output_contents.append(p.numpy().tobytes())

    assert wire(response) == RECORDED["messages"]["inference.ModelInferResponse"]


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


def test_parameter_sync_has_the_fields_of_monolith() -> None:
    def of(name: str) -> list[str]:
        return described(POOL.FindMessageTypeByName(f"monolith.parameter_sync.{name}"))

    package = "monolith.parameter_sync"
    delta = f"{package}.PushRequest.DeltaEmbeddingHashTable repeated"
    assert of("PushRequest.DeltaEmbeddingHashTable") == [
        "1 unique_id string",
        "2 dim_size int32",
        "3 fids int64 repeated",
        "4 embeddings float repeated",
    ]
    assert of("PushRequest") == [
        "1 model_name string",
        "2 signature_name string",
        f"3 delta_hash_tables {delta}",
        "4 timeout_in_ms int64",
        f"5 delta_multi_hash_tables {delta}",
    ]
    assert of("PushResponse") == [
        "1 status_code int32",
        "2 error_message string",
        "3 target string",
        "4 update_num int32",
    ]
    assert of("PushResult") == [f"1 responses {package}.PushResponse repeated"]
    assert of("ClientConfig") == [
        "1 model_name string",
        "2 signature_name string",
        "3 targets string repeated",
        "4 timeout_in_ms int64",
        f"5 targets_extra_info {package}.ClientConfig.TargetExtraInfo repeated",
    ]
    assert of("ClientConfig.TargetExtraInfo") == ["1 idc string", "2 cluster string", "3 replica_id int64"]


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
