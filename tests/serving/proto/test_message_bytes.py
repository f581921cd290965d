"""Messages read and written as bytes mean what protobuf reads and writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.message_bytes import (
    LARGE,
    MAX_FIELDS,
    cut_contents,
    encode_infer_response,
    encode_predict_response,
)
from megalith.serving.proto.message_types import DataType, ModelInferResponse, PredictRequest, PredictResponse
from megalith.serving.proto.tf_tensors import fill_tensor_proto, from_tensor_protos, to_tensor_proto


def request(**inputs: Tensor) -> Any:
    made = PredictRequest()
    made.model_spec.name = "movies"
    made.model_spec.signature_name = "hashtable_assign"
    made.model_spec.version.value = 3
    for name, tensor in inputs.items():
        made.inputs[name].CopyFrom(to_tensor_proto(tensor))
    return made


def read(data: bytes) -> dict[str, Any]:
    small, contents = cut_contents(data)
    return from_tensor_protos(PredictRequest.FromString(small).inputs, contents=contents)


def test_large_tensors_are_taken_out_and_small_ones_stay() -> None:
    rows, ids = torch.randn(LARGE // 64 + 1, 16), torch.arange(5)
    whole = request(item_value=rows, item_id=ids)

    small, contents = cut_contents(whole.SerializeToString())

    assert list(contents) == ["item_value"]
    assert len(small) < 300
    assert PredictRequest.FromString(small).model_spec == whole.model_spec
    found = read(whole.SerializeToString())
    assert torch.equal(found["item_value"], rows)
    assert torch.equal(found["item_id"], ids)


def test_what_was_taken_out_is_checked_like_what_stays() -> None:
    longer = request(item_id=torch.zeros(LARGE, dtype=torch.int64))
    longer.inputs["item_id"].tensor_shape.dim[0].size = LARGE + 1
    twice = request(item_id=torch.zeros(LARGE, dtype=torch.int64))
    twice.inputs["item_id"].int64_val.append(1)
    strings = request(item_id=torch.zeros(LARGE, dtype=torch.int64))
    strings.inputs["item_id"].dtype = int(DataType.DT_STRING)

    for wrong in (longer, twice, strings):
        with pytest.raises(InputError, match="item_id"):
            read(wrong.SerializeToString())
    small, contents = cut_contents(request(item_id=torch.zeros(LARGE)).SerializeToString())
    inputs = PredictRequest.FromString(small).inputs
    with pytest.raises(InputError, match="bytes left"):
        from_tensor_protos(inputs, contents=contents, max_bytes=1000)


def test_of_two_inputs_with_one_name_the_last_counts() -> None:
    large = request(item_id=torch.ones(LARGE, dtype=torch.int64)).SerializeToString()
    small = request(item_id=torch.arange(3)).SerializeToString()

    assert torch.equal(read(large + small)["item_id"], torch.arange(3))
    assert torch.equal(read(small + large)["item_id"], torch.ones(LARGE, dtype=torch.int64))


def test_many_small_fields_are_left_to_protobuf() -> None:
    large = request(item_id=torch.ones(LARGE, dtype=torch.int64)).SerializeToString()
    unknown = b"\x78\x01"  # field 15, the number 1
    assert cut_contents(large + 10 * unknown)[1].keys() == {"item_id"}
    for hostile in (large + MAX_FIELDS * unknown, MAX_FIELDS * unknown + large, _entry(unknown) + large):
        assert cut_contents(hostile) == (hostile, {})


def _entry(unknown: bytes) -> bytes:
    """An input whose entry has too many fields."""
    assert len(MAX_FIELDS * unknown) == 0x40 << 7
    return b"\x12\x80\x40" + MAX_FIELDS * unknown


def test_signatures_of_small_tensors_are_left_to_protobuf() -> None:
    data = request(item_id=torch.ones(LARGE, dtype=torch.int64)).SerializeToString()
    assert cut_contents(data, lambda signature: signature == "hashtable_assign")[1].keys() == {"item_id"}
    assert cut_contents(data, lambda signature: signature == "lookup") == (data, {})


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_damaged_requests_are_refused_or_read_as_protobuf_does(behind: bytes, at: int, value: int) -> None:
    data = bytearray(request(a=torch.arange(LARGE // 8), b=torch.ones(2)).SerializeToString())
    data[min(at, 200) if at < 200 else at - 401] = value
    damaged = bytes(data) + behind
    try:
        expected: dict[str, Any] | None = from_tensor_protos(PredictRequest.FromString(damaged).inputs)
    except (InputError, DecodeError):
        expected = None

    try:
        found: dict[str, Any] | None = read(damaged)
    except (InputError, DecodeError):
        found = None

    assert (found is None) == (expected is None)
    if found is not None and expected is not None:
        assert found.keys() == expected.keys()
        for name, each in expected.items():
            same = torch.equal(found[name], each) if isinstance(each, Tensor) else (found[name] == each).all()
            assert same


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
