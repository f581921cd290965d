"""Message classes of TF Serving, the Open Inference Protocol v2 and Monolith's parameter sync.

The `.proto` files of this folder define the messages with their public names and field numbers.
`make protos` compiles them to `descriptors.binpb`, which this module loads into a descriptor pool of its own,
so that a process may also import TensorFlow or Triton's client, which register the same names in protobuf's
default pool. There is no generated code, so any supported version of protobuf works.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Any, TypeAlias

from megalith.library import import_extra

Message: TypeAlias = Any
"""A protobuf message. Its class is created at run time, so a type checker does not know its fields."""


def protobuf(module: str) -> Any:
    return import_extra(f"google.protobuf.{module}", "this needs protobuf", "serve")


def load_pool(path: Path) -> Any:
    pool = protobuf("descriptor_pool").DescriptorPool()
    for file in protobuf("descriptor_pb2").FileDescriptorSet.FromString(path.read_bytes()).file:
        pool.Add(file)
    return pool


def message_class(pool: Any, full_name: str) -> Any:
    return protobuf("message_factory").GetMessageClass(pool.FindMessageTypeByName(full_name))


def _enum(full_name: str) -> Any:
    values = POOL.FindEnumTypeByName(full_name).values
    return IntEnum(full_name.rpartition(".")[2], {value.name: value.number for value in values})


def _serving(name: str) -> Any:
    return message_class(POOL, f"tensorflow.serving.{name}")


def _inference(name: str) -> Any:
    return message_class(POOL, f"inference.{name}")


def _sync(name: str) -> Any:
    return message_class(POOL, f"monolith.parameter_sync.{name}")


POOL = load_pool(Path(__file__).with_name("descriptors.binpb"))
"""All files and messages of this package, for gRPC reflection."""

DataType = _enum("tensorflow.DataType")
ErrorCode = _enum("tensorflow.error.Code")
TensorShapeProto = message_class(POOL, "tensorflow.TensorShapeProto")
TensorProto = message_class(POOL, "tensorflow.TensorProto")
TensorInfo = message_class(POOL, "tensorflow.TensorInfo")
SignatureDef = message_class(POOL, "tensorflow.SignatureDef")

ModelSpec = _serving("ModelSpec")
PredictRequest = _serving("PredictRequest")
PredictResponse = _serving("PredictResponse")
SignatureDefMap = _serving("SignatureDefMap")
GetModelMetadataRequest = _serving("GetModelMetadataRequest")
GetModelMetadataResponse = _serving("GetModelMetadataResponse")
StatusProto = _serving("StatusProto")
GetModelStatusRequest = _serving("GetModelStatusRequest")
ModelVersionStatus = _serving("ModelVersionStatus")
GetModelStatusResponse = _serving("GetModelStatusResponse")

ServerLiveRequest = _inference("ServerLiveRequest")
ServerLiveResponse = _inference("ServerLiveResponse")
ServerReadyRequest = _inference("ServerReadyRequest")
ServerReadyResponse = _inference("ServerReadyResponse")
ModelReadyRequest = _inference("ModelReadyRequest")
ModelReadyResponse = _inference("ModelReadyResponse")
ServerMetadataRequest = _inference("ServerMetadataRequest")
ServerMetadataResponse = _inference("ServerMetadataResponse")
ModelMetadataRequest = _inference("ModelMetadataRequest")
ModelMetadataResponse = _inference("ModelMetadataResponse")
InferParameter = _inference("InferParameter")
InferTensorContents = _inference("InferTensorContents")
ModelInferRequest = _inference("ModelInferRequest")
ModelInferResponse = _inference("ModelInferResponse")
ModelConfigRequest = _inference("ModelConfigRequest")
ModelConfigResponse = _inference("ModelConfigResponse")
ModelStatisticsRequest = _inference("ModelStatisticsRequest")
ModelStatisticsResponse = _inference("ModelStatisticsResponse")
RepositoryIndexRequest = _inference("RepositoryIndexRequest")
RepositoryIndexResponse = _inference("RepositoryIndexResponse")

PushRequest = _sync("PushRequest")
PushResponse = _sync("PushResponse")
PushResult = _sync("PushResult")
ClientConfig = _sync("ClientConfig")
