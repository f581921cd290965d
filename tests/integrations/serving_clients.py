"""Clients that are not ours, each as a function that sends one request; run in an environment of their own.

Run as a program: python serving_clients.py KIND GRPC_ADDRESS HTTP_ADDRESS, with the inputs as JSON on
standard input. Prints the logits, and what else the client has learned, as JSON. Imports nothing of Megalith.
"""

from __future__ import annotations

import json
import sys
from typing import Any

MODEL = "movies"


def tensorflow_serving(grpc_address: str, http_address: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """TensorFlow Serving's own API: predict by label, metadata, status."""
    import grpc
    import tensorflow as tf
    from tensorflow_serving.apis import (
        get_model_metadata_pb2,
        get_model_status_pb2,
        model_service_pb2_grpc,
        predict_pb2,
        prediction_service_pb2_grpc,
    )

    with grpc.insecure_channel(grpc_address) as channel:
        prediction = prediction_service_pb2_grpc.PredictionServiceStub(channel)
        request = predict_pb2.PredictRequest()
        request.model_spec.name = MODEL
        request.model_spec.version_label = "stable"
        for name, values in inputs.items():
            kind = tf.float32 if name == "dense" else tf.int64
            request.inputs[name].CopyFrom(tf.make_tensor_proto(values, dtype=kind))
        response = prediction.Predict(request, timeout=60)
        metadata = get_model_metadata_pb2.GetModelMetadataRequest(metadata_field=["signature_def"])
        metadata.model_spec.name = MODEL
        described = prediction.GetModelMetadata(metadata, timeout=60)
        signatures = get_model_metadata_pb2.SignatureDefMap()
        described.metadata["signature_def"].Unpack(signatures)
        status = get_model_status_pb2.GetModelStatusRequest()
        status.model_spec.name = MODEL
        states = model_service_pb2_grpc.ModelServiceStub(channel).GetModelStatus(status, timeout=60)
    array = tf.make_ndarray(response.outputs["logits"])
    assert list(response.outputs["logits"].float_val) == array.tolist()  # typed fields
    return {
        "logits": array.tolist(),
        "version": response.model_spec.version.value,
        "inputs": sorted(signatures.signature_def["serving_default"].inputs),
        "state": states.model_version_status[0].state,
    }


def triton_grpc(grpc_address: str, http_address: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Triton's client over gRPC."""
    import tritonclient.grpc as client

    server = client.InferenceServerClient(grpc_address)
    found = _triton(server, client, inputs)
    config = server.get_model_config(MODEL).config
    statistics = server.get_inference_statistics(MODEL).model_stats[0]
    index = server.get_model_repository_index().models
    return found | {
        "inputs": sorted(each.name for each in config.input),
        "count": statistics.inference_count,
        "index": [[each.name, each.version, each.state] for each in index],
    }


def triton_http(grpc_address: str, http_address: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """Triton's client over HTTP, with gzip both ways."""
    import tritonclient.http as client

    server = client.InferenceServerClient(http_address)
    gzip = {"request_compression_algorithm": "gzip", "response_compression_algorithm": "gzip"}
    found = _triton(server, client, inputs, **gzip)
    config = server.get_model_config(MODEL)
    statistics = server.get_inference_statistics(MODEL)["model_stats"][0]
    index = server.get_model_repository_index()
    return found | {
        "inputs": sorted(each["name"] for each in config["input"]),
        "count": statistics["inference_count"],
        "index": [[each["name"], each["version"], each["state"]] for each in index],
    }


def _triton(server: Any, client: Any, inputs: dict[str, Any], **options: Any) -> dict[str, Any]:
    import numpy as np

    assert server.is_server_live()
    assert server.is_server_ready()
    assert server.is_model_ready(MODEL)
    server.get_model_metadata(MODEL)
    sent = []
    for name, values in inputs.items():
        array = np.array(values, np.float32 if name == "dense" else np.int64)
        tensor = client.InferInput(name, list(array.shape), "FP32" if name == "dense" else "INT64")
        tensor.set_data_from_numpy(array)
        sent.append(tensor)
    result = server.infer(MODEL, sent, **options)
    return {"logits": result.as_numpy("logits").tolist()}


def reflection(grpc_address: str, http_address: str, inputs: dict[str, Any]) -> dict[str, Any]:
    """A client that knows no message: it asks the server for them, as grpcurl does."""
    import grpc
    from google.protobuf import descriptor_pool, json_format, message_factory
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    with grpc.insecure_channel(grpc_address) as channel:
        database = ProtoReflectionDescriptorDatabase(channel)
        pool = descriptor_pool.DescriptorPool(database)
        method = pool.FindServiceByName("inference.GRPCInferenceService").FindMethodByName("ModelInfer")
        request = message_factory.GetMessageClass(method.input_type)()
        tensors = []
        for name, values in inputs.items():
            if name == "dense":
                flat = [value for row in values for value in row]
                contents = {"fp32_contents": flat}
                shape, kind = [len(values), len(values[0])], "FP32"
            else:
                contents, shape, kind = {"int64_contents": values}, [len(values)], "INT64"
            tensors.append({"name": name, "datatype": kind, "shape": shape, "contents": contents})
        json_format.ParseDict({"model_name": MODEL, "inputs": tensors}, request)
        call = channel.unary_unary(
            "/inference.GRPCInferenceService/ModelInfer",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=message_factory.GetMessageClass(method.output_type).FromString,
        )
        response = call(request, timeout=60)
        services = sorted(database.get_services())
    import array

    numbers = array.array("f")
    numbers.frombytes(response.raw_output_contents[[each.name for each in response.outputs].index("logits")])
    return {"logits": numbers.tolist(), "services": services}


KINDS = {each.__name__: each for each in (tensorflow_serving, triton_grpc, triton_http, reflection)}

if __name__ == "__main__":
    print(json.dumps(KINDS[sys.argv[1]](sys.argv[2], sys.argv[3], json.load(sys.stdin))))
