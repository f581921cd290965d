"""Responses written as bytes are what protobuf would write."""

from __future__ import annotations

import numpy as np
import pytest

from megalith.serving.proto.message_bytes import encode_infer_response, encode_predict_response
from megalith.serving.proto.message_types import ModelInferResponse, PredictResponse
from megalith.serving.proto.tf_tensors import fill_tensor_proto


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize("version", [0, 7, 2**62, -1])
def test_the_bytes_mean_the_same_message(typed: bool, version: int) -> None:
    outputs = {
        "logits": np.arange(3, dtype=np.float32),
        "é": np.arange(600, dtype=np.float64).reshape(3, 100, 2),
        "one": np.array([np.nan], dtype=np.float32),
        "none": np.empty((0, 2), dtype=np.float32),
        "part": np.arange(12, dtype=np.float32).reshape(4, 3)[1:3],
    }
    expected = PredictResponse()
    expected.model_spec.name = "movies"
    expected.model_spec.signature_name = "serving_default"
    expected.model_spec.version.value = version
    for name, array in outputs.items():
        fill_tensor_proto(expected.outputs[name], array, typed=typed)

    data = encode_predict_response("movies", "serving_default", version, outputs, typed=typed)

    assert data is not None
    got = PredictResponse.FromString(data)
    assert got.SerializeToString(deterministic=True) == expected.SerializeToString(deterministic=True)


def test_other_types_are_left_to_protobuf() -> None:
    assert encode_predict_response("movies", "s", 1, {"ranks": np.arange(3)}, typed=True) is None


@pytest.mark.parametrize("request_id", ["", "é1", "r" * 300])
def test_an_infer_response_is_what_protobuf_writes(request_id: str) -> None:
    outputs = {
        "logits": (np.arange(3, dtype=np.float32), "FP32"),
        "é": (np.arange(600, dtype=np.float64).reshape(3, 100, 2), "FP64"),
        "none": (np.empty((0, 2), dtype=np.int64), "INT64"),
        "part": (np.arange(12, dtype=np.int32).reshape(4, 3)[1:3], "INT32"),
        "flags": (np.array([True, False]), "BOOL"),
        "small": (np.arange(300, dtype=np.int16), "INT16"),
        "bytes": (np.arange(3, dtype=np.uint8), "UINT8"),
        "signed": (np.arange(3, dtype=np.int8), "INT8"),
    }
    expected = ModelInferResponse(model_name="movies", model_version="7", id=request_id)
    for name, (array, datatype) in outputs.items():
        expected.outputs.add(name=name, datatype=datatype, shape=array.shape)
        expected.raw_output_contents.append(array.tobytes())

    arrays = {name: array for name, (array, _) in outputs.items()}
    data = encode_infer_response("movies", 7, request_id, arrays)

    assert data == expected.SerializeToString(deterministic=True)
