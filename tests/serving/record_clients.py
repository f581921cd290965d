"""Writes clients.json: what other people's clients put on the wire, for tests to compare with byte by byte.

Run in an environment of its own, whose protobuf is the clients':
    pip install ovmsclient==2023.1 "tritonclient[grpc]==2.73.0"
    python tests/serving/record_clients.py
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import ovmsclient.tfs_compat.protos.tensorflow_serving.apis.get_model_metadata_pb2 as metadata
import ovmsclient.tfs_compat.protos.tensorflow_serving.apis.get_model_status_pb2 as status
import ovmsclient.tfs_compat.protos.tensorflow_serving.apis.predict_pb2 as predict
from google.protobuf.descriptor import FieldDescriptor
from ovmsclient.tfs_compat.grpc.requests import (
    make_metadata_request,
    make_predict_request,
    make_status_request,
)
from ovmsclient.tfs_compat.grpc.tensors import make_tensor_proto
from ovmsclient.tfs_compat.protos.tensorflow.core.framework import tensor_pb2
from ovmsclient.tfs_compat.protos.tensorflow.core.protobuf import meta_graph_pb2
from tritonclient.grpc import InferInput, InferRequestedOutput, service_pb2
from tritonclient.grpc._utils import _get_inference_request

DTYPES = ["float32", "float64", "float16", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"]
DTYPES += ["uint64", "bool"]
TYPED = {
    "DT_FLOAT": ("float_val", [1.5, -2.0]),
    "DT_DOUBLE": ("double_val", [1.5, -2.0]),
    "DT_HALF": ("half_val", [15872, 49152]),
    "DT_BFLOAT16": ("half_val", [16320, 49152]),
    "DT_INT32": ("int_val", [1, -2]),
    "DT_INT8": ("int_val", [1, -2]),
    "DT_UINT8": ("int_val", [1, 254]),
    "DT_INT64": ("int64_val", [1, -(2**63)]),
    "DT_UINT32": ("uint32_val", [1, 2**32 - 1]),
    "DT_UINT64": ("uint64_val", [1, 2**64 - 1]),
    "DT_BOOL": ("bool_val", [True, False]),
}
"""dtype -> the field of its typed values (the alternative to tensor_content), and two values."""


def array(dtype: str) -> np.ndarray:
    return np.arange(6).reshape(2, 3).astype(dtype)


def hexed(message: Any) -> str:
    return message.SerializeToString(deterministic=True).hex()


def typed_tensor(dtype: str) -> Any:
    field, values = TYPED[dtype]
    proto = tensor_pb2.TensorProto(dtype=dtype)
    proto.tensor_shape.dim.add(size=2)
    getattr(proto, field).extend(values)
    return proto


def model_metadata() -> Any:
    signatures = metadata.SignatureDefMap()
    signature = signatures.signature_def["serving_default"]
    signature.method_name = "tensorflow/serving/predict"
    for names, name, dtype in ((signature.inputs, "ids", "DT_INT64"), (signature.outputs, "p", "DT_FLOAT")):
        names[name].name = name
        names[name].dtype = meta_graph_pb2.TensorInfo(dtype=dtype).dtype
        for size in (-1, 4):
            names[name].tensor_shape.dim.add(size=size)
    response = metadata.GetModelMetadataResponse()
    response.model_spec.name = "movies"
    response.model_spec.version.value = 3
    # The client's own package is called otherwise than TensorFlow's, so the name is given, not packed.
    response.metadata["signature_def"].type_url = "type.googleapis.com/tensorflow.serving.SignatureDefMap"
    response.metadata["signature_def"].value = signatures.SerializeToString(deterministic=True)
    return response


def model_status() -> Any:
    response = status.GetModelStatusResponse()
    response.model_version_status.add(version=3, state="AVAILABLE").status.SetInParent()
    failed = response.model_version_status.add(version=4, state="END")
    failed.status.error_code = 13
    failed.status.error_message = "no such file"
    return response


def predict_response() -> Any:
    response = predict.PredictResponse()
    response.model_spec.name = "movies"
    response.model_spec.version.value = 3
    response.model_spec.signature_name = "serving_default"
    response.outputs["p"].CopyFrom(make_tensor_proto(array("float32")))
    return response


def infer_request() -> Any:
    dense = InferInput("dense", [2, 3], "FP32").set_data_from_numpy(array("float32"))
    words = InferInput("words", [2], "BYTES").set_data_from_numpy(np.array([b"a", b"\xff\x00"], object))
    return _get_inference_request(
        model_name="movies",
        inputs=[dense, words],
        model_version="3",
        request_id="r1",
        outputs=[InferRequestedOutput("p")],
        sequence_id=0,
        sequence_start=False,
        sequence_end=False,
        priority=0,
        timeout=None,
        parameters=None,
    )


def infer_contents() -> Any:
    request = service_pb2.ModelInferRequest(model_name="movies")
    for datatype, field, values in (
        ("BOOL", "bool_contents", [True, False]),
        ("INT8", "int_contents", [1, -2]),
        ("INT64", "int64_contents", [1, -(2**63)]),
        ("UINT32", "uint_contents", [1, 2**32 - 1]),
        ("UINT64", "uint64_contents", [1, 2**64 - 1]),
        ("FP32", "fp32_contents", [1.5, -2.0]),
        ("FP64", "fp64_contents", [1.5, -2.0]),
        ("BYTES", "bytes_contents", [b"a", b""]),
    ):
        tensor = request.inputs.add(name=datatype, datatype=datatype, shape=[2])
        getattr(tensor.contents, field).extend(values)
    return request


def infer_response() -> Any:
    response = service_pb2.ModelInferResponse(model_name="movies", model_version="3", id="r1")
    response.outputs.add(name="p", datatype="FP32", shape=[2, 3])
    response.raw_output_contents.append(array("float32").tobytes())
    return response


def infer_parameters() -> Any:
    request = service_pb2.ModelInferRequest(model_name="movies")
    request.parameters["b"].bool_param = False
    request.parameters["i"].int64_param = -1
    request.parameters["s"].string_param = ""
    request.parameters["d"].double_param = 0.5
    request.parameters["u"].uint64_param = 2**64 - 1
    return request


def infer_metadata() -> Any:
    response = service_pb2.ModelMetadataResponse(name="movies", versions=["3"], platform="megalith")
    response.inputs.add(name="ids", datatype="INT64", shape=[-1, 4])
    response.outputs.add(name="p", datatype="FP32", shape=[-1])
    return response


MESSAGES = {
    "tensorflow.serving.PredictRequest": lambda: (
        make_predict_request({"ids": array("int64"), "dense": array("float32")}, "movies", 3).raw_request
    ),
    "tensorflow.serving.PredictResponse": predict_response,
    "tensorflow.serving.GetModelMetadataRequest": lambda: make_metadata_request("movies", 3).raw_request,
    "tensorflow.serving.GetModelMetadataResponse": model_metadata,
    "tensorflow.serving.GetModelStatusRequest": lambda: make_status_request("movies", 0).raw_request,
    "tensorflow.serving.GetModelStatusResponse": model_status,
    "inference.ModelInferRequest": infer_request,
    "inference.ModelInferRequest/contents": infer_contents,
    "inference.ModelInferRequest/parameters": infer_parameters,
    "inference.ModelInferResponse": infer_response,
    "inference.ModelMetadataRequest": lambda: service_pb2.ModelMetadataRequest(name="movies", version="3"),
    "inference.ModelMetadataResponse": infer_metadata,
    "inference.ModelReadyRequest": lambda: service_pb2.ModelReadyRequest(name="movies", version="3"),
    "inference.ModelReadyResponse": lambda: service_pb2.ModelReadyResponse(ready=True),
    "inference.ServerLiveResponse": lambda: service_pb2.ServerLiveResponse(live=True),
    "inference.ServerReadyResponse": lambda: service_pb2.ServerReadyResponse(ready=True),
    "inference.ServerMetadataResponse": lambda: service_pb2.ServerMetadataResponse(
        name="megalith", version="1", extensions=["health"]
    ),
}


TYPE_NAMES = {
    getattr(FieldDescriptor, name): name.removeprefix("TYPE_").lower()
    for name in dir(FieldDescriptor)
    if name.startswith("TYPE_")
}
TENSORFLOW_ONLY = ("ResourceHandleProto", "VariantTensorDataProto", "CompositeTensor")


def field_of(field: Any) -> str:
    """Number, name and type, and what else is so of the field."""
    kind = field.message_type or field.enum_type
    type_name = kind.full_name.replace("ovmsclient", "tensorflow") if kind else TYPE_NAMES[field.type]
    oneof = f"oneof:{field.containing_oneof.name}" if field.containing_oneof else ""
    repeated = "repeated" if field.is_repeated else ""
    packed = "packed" if field.is_packed else ""
    return " ".join(filter(None, (str(field.number), field.name, type_name, repeated, packed, oneof)))


def fields() -> dict[str, list[str]]:
    """Every message reachable from those above: its fields."""
    found: dict[str, list[str]] = {}
    queue = [make().DESCRIPTOR for make in MESSAGES.values()]
    queue.append(metadata.SignatureDefMap.DESCRIPTOR)
    while queue:
        message = queue.pop()
        name = message.full_name.replace("ovmsclient", "tensorflow")
        if name not in found and message.name not in TENSORFLOW_ONLY:
            found[name] = [field_of(field) for field in message.fields]
            queue += [field.message_type for field in message.fields if field.message_type]
    return dict(sorted(found.items()))


def main() -> None:
    recorded = {
        "versions": {name: version(name) for name in ("ovmsclient", "tritonclient", "protobuf")},
        "tensors": {dtype: hexed(make_tensor_proto(array(dtype))) for dtype in DTYPES},
        "typed_tensors": {dtype: hexed(typed_tensor(dtype)) for dtype in TYPED},
        "strings": hexed(make_tensor_proto(np.array([b"a", b"\xff"]))),
        "messages": {name: hexed(make()) for name, make in MESSAGES.items()},
        "fields": fields(),
    }
    path = Path(__file__).with_name("clients.json")
    path.write_text(json.dumps(recorded, indent=1) + "\n")


if __name__ == "__main__":
    main()
