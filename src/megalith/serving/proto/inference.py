"""The messages and the service of package `inference`: the Open Inference Protocol, version 2.

Field numbers are the protocol's. What single servers add to it (shared memory, repositories, statistics) is
not here.
"""

from __future__ import annotations

from megalith.serving.proto.schema import Field, Map, MessageType, Service, define, message_class

GRPC_PREDICT = "grpc_predict_v2.proto"
_PARAMETER = "inference.InferParameter"
_CONTENTS = "inference.InferTensorContents"


def _tensor(name: str) -> MessageType:
    return MessageType(
        name,
        Field(1, "name", "string"),
        Field(2, "datatype", "string"),
        Field(3, "shape", "int64", repeated=True),
        Map(4, "parameters", _PARAMETER),
        Field(5, "contents", _CONTENTS),
    )


define(
    GRPC_PREDICT,
    "inference",
    messages=[
        MessageType("ServerLiveRequest"),
        MessageType("ServerLiveResponse", Field(1, "live", "bool")),
        MessageType("ServerReadyRequest"),
        MessageType("ServerReadyResponse", Field(1, "ready", "bool")),
        MessageType("ModelReadyRequest", Field(1, "name", "string"), Field(2, "version", "string")),
        MessageType("ModelReadyResponse", Field(1, "ready", "bool")),
        MessageType("ServerMetadataRequest"),
        MessageType(
            "ServerMetadataResponse",
            Field(1, "name", "string"),
            Field(2, "version", "string"),
            Field(3, "extensions", "string", repeated=True),
        ),
        MessageType("ModelMetadataRequest", Field(1, "name", "string"), Field(2, "version", "string")),
        MessageType(
            "ModelMetadataResponse",
            Field(1, "name", "string"),
            Field(2, "versions", "string", repeated=True),
            Field(3, "platform", "string"),
            Field(4, "inputs", "inference.ModelMetadataResponse.TensorMetadata", repeated=True),
            Field(5, "outputs", "inference.ModelMetadataResponse.TensorMetadata", repeated=True),
            messages=[
                MessageType(
                    "TensorMetadata",
                    Field(1, "name", "string"),
                    Field(2, "datatype", "string"),
                    Field(3, "shape", "int64", repeated=True),
                )
            ],
        ),
        MessageType(
            "InferParameter",
            Field(1, "bool_param", "bool", oneof="parameter_choice"),
            Field(2, "int64_param", "int64", oneof="parameter_choice"),
            Field(3, "string_param", "string", oneof="parameter_choice"),
            Field(4, "double_param", "double", oneof="parameter_choice"),
            Field(5, "uint64_param", "uint64", oneof="parameter_choice"),
        ),
        MessageType(
            "InferTensorContents",
            Field(1, "bool_contents", "bool", repeated=True),
            Field(2, "int_contents", "int32", repeated=True),
            Field(3, "int64_contents", "int64", repeated=True),
            Field(4, "uint_contents", "uint32", repeated=True),
            Field(5, "uint64_contents", "uint64", repeated=True),
            Field(6, "fp32_contents", "float", repeated=True),
            Field(7, "fp64_contents", "double", repeated=True),
            Field(8, "bytes_contents", "bytes", repeated=True),
        ),
        MessageType(
            "ModelInferRequest",
            Field(1, "model_name", "string"),
            Field(2, "model_version", "string"),
            Field(3, "id", "string"),
            Map(4, "parameters", _PARAMETER),
            Field(5, "inputs", "inference.ModelInferRequest.InferInputTensor", repeated=True),
            Field(6, "outputs", "inference.ModelInferRequest.InferRequestedOutputTensor", repeated=True),
            Field(7, "raw_input_contents", "bytes", repeated=True),
            messages=[
                _tensor("InferInputTensor"),
                MessageType(
                    "InferRequestedOutputTensor", Field(1, "name", "string"), Map(2, "parameters", _PARAMETER)
                ),
            ],
        ),
        MessageType(
            "ModelInferResponse",
            Field(1, "model_name", "string"),
            Field(2, "model_version", "string"),
            Field(3, "id", "string"),
            Map(4, "parameters", _PARAMETER),
            Field(5, "outputs", "inference.ModelInferResponse.InferOutputTensor", repeated=True),
            Field(6, "raw_output_contents", "bytes", repeated=True),
            messages=[_tensor("InferOutputTensor")],
        ),
    ],
    services=[
        Service(
            "GRPCInferenceService",
            [
                (name, f"inference.{name}Request", f"inference.{name}Response")
                for name in (
                    "ServerLive",
                    "ServerReady",
                    "ModelReady",
                    "ServerMetadata",
                    "ModelMetadata",
                    "ModelInfer",
                )
            ],
        )
    ],
)

ServerLiveRequest = message_class("inference.ServerLiveRequest")
ServerLiveResponse = message_class("inference.ServerLiveResponse")
ServerReadyRequest = message_class("inference.ServerReadyRequest")
ServerReadyResponse = message_class("inference.ServerReadyResponse")
ModelReadyRequest = message_class("inference.ModelReadyRequest")
ModelReadyResponse = message_class("inference.ModelReadyResponse")
ServerMetadataRequest = message_class("inference.ServerMetadataRequest")
ServerMetadataResponse = message_class("inference.ServerMetadataResponse")
ModelMetadataRequest = message_class("inference.ModelMetadataRequest")
ModelMetadataResponse = message_class("inference.ModelMetadataResponse")
InferParameter = message_class("inference.InferParameter")
InferTensorContents = message_class("inference.InferTensorContents")
ModelInferRequest = message_class("inference.ModelInferRequest")
ModelInferResponse = message_class("inference.ModelInferResponse")
