"""Tensors in messages: nothing is lost, and nothing that a stranger writes does harm."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.serving.proto.infer_tensors import (
    datatype_of,
    from_infer_request,
    from_values,
)
from megalith.serving.proto.limits import BITS
from megalith.serving.proto.message_types import (
    DataType,
    InferTensorContents,
    ModelInferRequest,
    PredictRequest,
    TensorProto,
)
from megalith.serving.proto.tf_tensors import (
    DTYPES,
    from_tensor_proto,
    from_tensor_protos,
    strings_from_tensor_proto,
    strings_to_tensor_proto,
    tensor_info,
    to_tensor_proto,
)
from tests.serving.exports import to_infer_request

RECORDED: dict[str, Any] = json.loads(Path(__file__).parents[1].joinpath("clients.json").read_text())
LIMIT = 1 << 12
TYPED_VALUES: dict[str, list[Any]] = {
    "DT_FLOAT": [1.5, -2.0],
    "DT_DOUBLE": [1.5, -2.0],
    "DT_HALF": [1.5, -2.0],
    "DT_BFLOAT16": [1.5, -2.0],
    "DT_INT32": [1, -2],
    "DT_INT8": [1, -2],
    "DT_UINT8": [1, 254],
    "DT_INT64": [1, -(2**63)],
    "DT_UINT32": [1, 2**32 - 1],
    "DT_UINT64": [1, 2**64 - 1],
    "DT_BOOL": [True, False],
}


def tensor_proto(dtype: DataType | int, shape: list[int], **fields: Any) -> Any:
    message = TensorProto(dtype=dtype, **fields)
    for size in shape:
        message.tensor_shape.dim.add(size=size)
    return message


def bits(tensor: torch.Tensor) -> list[int]:
    """Equal where NaNs are too."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(DTYPES)))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    size = int(np.prod(shape)) * dtype.itemsize
    if dtype == torch.bool:
        data = draw(st.lists(st.sampled_from([0, 1]), min_size=size, max_size=size))
        return torch.tensor(data, dtype=torch.bool).reshape(shape)
    data_bytes = draw(st.binary(min_size=size, max_size=size))
    if not data_bytes:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(data_bytes), dtype=dtype).reshape(shape)


# ---- what goes through


@given(tensors())
def test_a_tensor_comes_back_bit_by_bit(tensor: torch.Tensor) -> None:
    message = TensorProto.FromString(to_tensor_proto(tensor).SerializeToString())
    back = from_tensor_proto(message)
    assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))

    request = to_infer_request({"x": tensor}, model_name="m")
    back = from_infer_request(type(request).FromString(request.SerializeToString()))["x"]
    assert isinstance(back, torch.Tensor)
    assert (back.dtype, back.shape, bits(back)) == (tensor.dtype, tensor.shape, bits(tensor))


@pytest.mark.parametrize("dtype", RECORDED["tensors"])
def test_tensors_are_written_as_ovmsclient_writes_them(dtype: str) -> None:
    tensor = torch.from_numpy(np.arange(6).reshape(2, 3).astype(dtype))
    assert to_tensor_proto(tensor).SerializeToString().hex() == RECORDED["tensors"][dtype]


@pytest.mark.parametrize("dtype", RECORDED["typed_tensors"])
def test_typed_values_of_ovmsclient_are_read(dtype: str) -> None:
    message = TensorProto.FromString(bytes.fromhex(RECORDED["typed_tensors"][dtype]))
    tensor = from_tensor_proto(message)
    assert DTYPES[tensor.dtype].name == dtype
    assert tensor.tolist() == TYPED_VALUES[dtype]


def test_strings_are_written_as_ovmsclient_writes_them() -> None:
    message = strings_to_tensor_proto([b"a", b"\xff"])
    assert message.SerializeToString().hex() == RECORDED["strings"]
    assert strings_from_tensor_proto(message).tolist() == [b"a", b"\xff"]


def test_strings_keep_their_shape() -> None:
    words = np.array([[b"a", b""], [b"c", b"d"]], dtype=object)
    message = strings_to_tensor_proto(words)
    np.testing.assert_array_equal(strings_from_tensor_proto(message), words)
    request = to_infer_request({"w": words}, model_name="m")
    np.testing.assert_array_equal(from_infer_request(request)["w"], words)


def test_a_view_is_written_as_it_reads() -> None:
    tensor = torch.arange(6).reshape(2, 3).T
    assert from_tensor_proto(to_tensor_proto(tensor)).tolist() == [[0, 3], [1, 4], [2, 5]]


def test_a_scalar_has_the_empty_shape() -> None:
    message = to_tensor_proto(torch.tensor(2.0))
    assert message.HasField("tensor_shape")
    assert from_tensor_proto(message).shape == ()


def test_a_tensor_read_is_its_own() -> None:
    message = to_tensor_proto(torch.zeros(3))
    from_tensor_proto(message).add_(1)
    assert from_tensor_proto(message).tolist() == [0, 0, 0]


def test_too_few_typed_values_are_filled_up_as_tensorflow_does() -> None:
    last = tensor_proto(DataType.DT_FLOAT, [2, 2], float_val=[1, 2])
    none = tensor_proto(DataType.DT_INT64, [2])
    words = tensor_proto(DataType.DT_STRING, [3], string_val=[b"a"])
    empty = tensor_proto(DataType.DT_STRING, [2])
    assert from_tensor_proto(last).tolist() == [[1, 2], [2, 2]]
    assert from_tensor_proto(none).tolist() == [0, 0]
    assert strings_from_tensor_proto(words).tolist() == [b"a", b"a", b"a"]
    assert strings_from_tensor_proto(empty).tolist() == [b"", b""]


def test_any_byte_but_zero_is_true() -> None:
    message = tensor_proto(DataType.DT_BOOL, [3], tensor_content=b"\x00\x02\xff")
    assert from_tensor_proto(message).tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("datatype", "values", "expected"),
    [
        ("FP32", [1, 2.5], [1.0, 2.5]),
        ("FP16", [1, 2.5], [1.0, 2.5]),
        ("BF16", [1, 2.5], [1.0, 2.5]),
        ("FP64", [2**53, 0.1], [2.0**53, 0.1]),
        ("INT64", [-(2**63), 2**63 - 1], [-(2**63), 2**63 - 1]),
        ("UINT64", [0, 2**64 - 1], [0, 2**64 - 1]),
        ("BOOL", [True, False], [True, False]),
    ],
)
def test_json_numbers_become_tensors(datatype: str, values: list[Any], expected: list[Any]) -> None:
    tensor = from_values(datatype, [2], values)
    assert datatype_of(tensor) == datatype
    assert tensor.tolist() == expected


# ---- what does not


def refused(match: str, read: Callable[[], object]) -> None:
    with pytest.raises(InputError, match=match):
        read()


@pytest.mark.parametrize(
    ("match", "message"),
    [
        ("exceeds the 4096 bytes", tensor_proto(1, [2**40], float_val=[1])),
        ("exceeds the 4096 bytes", tensor_proto(1, [2**62, 2**62, 0])),
        ("exceeds the 4096 bytes", tensor_proto(7, [513], string_val=[b"x"])),
        ("the shape is unknown", TensorProto(dtype=1, tensor_shape={"unknown_rank": True})),
        ("more than 32 dimensions", tensor_proto(1, [1] * 33)),
        ("more than 32 dimensions", tensor_proto(1, [0] * 100_000)),
        ("negative size", tensor_proto(1, [-1])),
        ("negative size", tensor_proto(1, [-2, -2], float_val=[1, 2, 3, 4])),
        ("7 bytes, but float32 \\[2\\] takes 8", tensor_proto(1, [2], tensor_content=b"1234567")),
        ("3 values for a shape of 2", tensor_proto(1, [2], float_val=[1, 2, 3])),
        ("2 values for a shape of 0", tensor_proto(1, [0], float_val=[1, 2])),
        ("dtype DT_INVALID", tensor_proto(0, [1])),
        ("dtype DT_COMPLEX64", tensor_proto(8, [1], scomplex_val=[1, 2])),
        ("dtype 9999", tensor_proto(9999, [1])),
        ("dtype -1", tensor_proto(-1, [1])),
        ("must be in tensor_content or in float_val", tensor_proto(1, [1], int64_val=[1])),
        ("not in both", tensor_proto(1, [1], float_val=[1], tensor_content=b"1234")),
        ("70000 is not within 0 .. 65535", tensor_proto(19, [1], half_val=[70000])),
        ("-1 is not within 0 .. 65535", tensor_proto(14, [1], half_val=[-1])),
        ("300 is not within -128 .. 127", tensor_proto(6, [1], int_val=[300])),
        ("string_val, not in tensor_content", tensor_proto(7, [1], tensor_content=b"\x01a")),
    ],
)
def test_protos_that_do_not_fit_are_refused(match: str, message: Any) -> None:
    refused(match, lambda: from_tensor_protos({"x": message}, max_bytes=LIMIT))


def test_strings_are_no_tensor_and_a_tensor_no_strings() -> None:
    words, numbers = strings_to_tensor_proto([b"a"]), to_tensor_proto(torch.zeros(1))
    refused("strings_from_tensor_proto", lambda: from_tensor_proto(words))
    refused("DT_FLOAT is not DT_STRING", lambda: strings_from_tensor_proto(numbers))
    refused("encode them first", lambda: strings_to_tensor_proto(["a"]))  # type: ignore[list-item]


def test_errors_name_the_input() -> None:
    message = tensor_proto(1, [2], tensor_content=b"")
    bad = tensor_proto(1, [-1])
    assert from_tensor_protos({"zeros": message})["zeros"].tolist() == [0, 0]
    refused("input 'ids'", lambda: from_tensor_protos({"ids": bad}))


def test_small_requests_cannot_ask_for_much_memory_in_parts() -> None:
    part = tensor_proto(1, [512], float_val=[1])  # 2048 bytes from a few
    inputs = {"a": part, "b": part}
    assert len(from_tensor_protos(inputs, max_bytes=LIMIT)) == 2
    refused("exceeds the 0 bytes", lambda: from_tensor_protos(inputs | {"c": part}, max_bytes=LIMIT))


def test_complex_numbers_cannot_be_sent() -> None:
    refused("complex64 cannot be sent", lambda: to_tensor_proto(torch.zeros(1, dtype=torch.complex64)))
    refused(
        "not have the dtype torch.complex64",
        lambda: tensor_info("x", torch.complex64, []),
    )
    refused("not have the type torch.complex64", lambda: datatype_of(torch.complex64))


def infer(*inputs: dict[str, Any], raw: list[bytes] | None = None) -> Any:
    return ModelInferRequest(
        inputs=[ModelInferRequest.InferInputTensor(**each) for each in inputs], raw_input_contents=raw
    )


CONTENTS = InferTensorContents


@pytest.mark.parametrize(
    ("match", "request_"),
    [
        ("1 raw_input_contents for 0 inputs", infer(raw=[b""])),
        (
            "'a' has contents",
            infer({"name": "a", "contents": CONTENTS(int_contents=[1])}, raw=[b"1"]),
        ),
        ("'a' occurs twice", infer(*[{"name": "a", "datatype": "INT8", "shape": [0]}] * 2)),
        ("datatype 'FLOAT' is unknown", infer({"datatype": "FLOAT", "shape": [1]}, raw=[b""])),
        ("datatype 'FLOAT' is unknown", infer({"datatype": "FLOAT", "shape": [1]})),
        ("FP16 must be sent as raw", infer({"datatype": "FP16", "shape": [1]})),
        ("negative size", infer({"datatype": "FP32", "shape": [-1]}, raw=[b""])),
        ("exceeds the 4096 bytes", infer({"datatype": "FP32", "shape": [2**60, 2**60]}, raw=[b""])),
        ("more than 32 dimensions", infer({"datatype": "FP32", "shape": [1] * 40}, raw=[b"1234"])),
        ("3 bytes, but float32 \\[1\\] takes 4", infer({"datatype": "FP32", "shape": [1]}, raw=[b"123"])),
        ("0 values, but shape \\[1\\] takes 1", infer({"datatype": "FP32", "shape": [1]})),
        (
            "must be in fp32_contents; found int_contents",
            infer({"datatype": "FP32", "shape": [1], "contents": CONTENTS(int_contents=[1])}),
        ),
        (
            "300 is not within 0 .. 255",
            infer({"datatype": "UINT8", "shape": [1], "contents": CONTENTS(uint_contents=[300])}),
        ),
        ("cannot hold 2", infer({"datatype": "BYTES", "shape": [2]}, raw=[b"\0\0\0\0"])),
        (
            "element 0 has 4294967295 bytes, but 0 are left",
            infer({"datatype": "BYTES", "shape": [1]}, raw=[b"\xff" * 4]),
        ),
        ("end in element 1", infer({"datatype": "BYTES", "shape": [2]}, raw=[b"\x04\0\0\0abcd"])),
        ("1 bytes follow", infer({"datatype": "BYTES", "shape": [1]}, raw=[b"\0\0\0\0x"])),
    ],
)
def test_infer_requests_that_do_not_fit_are_refused(match: str, request_: Any) -> None:
    refused(match, lambda: from_infer_request(request_, max_bytes=LIMIT))


@pytest.mark.parametrize(
    ("datatype", "values"),
    [
        ("INT64", [1.5]),
        ("INT64", [2**63]),
        ("INT64", [2**70]),
        ("INT64", [True]),
        ("UINT8", [-1]),
        ("BOOL", [1]),
        ("FP32", ["1"]),
        ("FP32", [None]),
        ("FP32", [[1.0]]),
        ("FP32", [{}]),
        ("FP64", [10**400]),
        ("BYTES", ["text"]),
        ("BYTES", [1]),
    ],
)
def test_json_values_of_another_type_are_refused(datatype: str, values: list[Any]) -> None:
    refused("are not all|is not within|too large", lambda: from_values(datatype, [1], values))


# ---- fuzzing

SIZES = st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**62, 2**63 - 1, -(2**63)]))
REQUESTS = ("PredictRequest", "ModelInferRequest")
NUMBERS = st.integers(-(2**31), 2**31 - 1)


@st.composite
def strange_protos(draw: st.DrawFn) -> Any:
    message = TensorProto(dtype=draw(st.one_of(st.sampled_from(list(DataType)), NUMBERS)))
    message.tensor_shape.unknown_rank = draw(st.sampled_from([False] * 9 + [True]))
    for size in draw(st.lists(SIZES, max_size=4)):
        message.tensor_shape.dim.add(size=size)
    if draw(st.booleans()):
        message.tensor_content = draw(st.binary(max_size=100))
    for field in draw(
        st.lists(st.sampled_from(["float_val", "int_val", "half_val", "bool_val"]), max_size=2)
    ):
        getattr(message, field).extend(draw(st.lists(st.integers(0, 1), max_size=5)))
    message.int64_val.extend(draw(st.lists(NUMBERS, max_size=3)))
    message.string_val.extend(draw(st.lists(st.binary(max_size=3), max_size=3)))
    return message


def check_read(value: object) -> None:
    if isinstance(value, torch.Tensor):
        assert value.dtype in BITS
        assert value.nbytes <= LIMIT
    else:
        assert isinstance(value, np.ndarray)
        assert value.size * 8 <= LIMIT
        assert all(isinstance(item, bytes) for item in value.flat)


@given(strange_protos())
def test_any_tensor_proto_is_read_or_refused(message: Any) -> None:
    try:
        read = from_tensor_protos({"x": message}, max_bytes=LIMIT)
    except InputError:
        return
    check_read(read["x"])


@st.composite
def strange_requests(draw: st.DrawFn) -> Any:
    datatypes = st.one_of(st.sampled_from(["BYTES", "FP16", *map(datatype_of, BITS)]), st.text(max_size=4))
    request = ModelInferRequest(raw_input_contents=draw(st.lists(st.binary(max_size=30), max_size=2)))
    for _ in range(draw(st.integers(0, 2))):
        tensor = request.inputs.add(
            name=draw(st.text(max_size=2)), datatype=draw(datatypes), shape=draw(st.lists(SIZES, max_size=3))
        )
        tensor.contents.int_contents.extend(draw(st.lists(NUMBERS, max_size=3)))
        tensor.contents.bytes_contents.extend(draw(st.lists(st.binary(max_size=3), max_size=2)))
    return request


@given(strange_requests())
def test_any_infer_request_is_read_or_refused(request: Any) -> None:
    try:
        read = from_infer_request(request, max_bytes=LIMIT)
    except InputError:
        return
    for value in read.values():
        check_read(value)


@given(
    st.sampled_from(
        [
            "tensorflow.serving.PredictRequest",
            "inference.ModelInferRequest",
            "inference.ModelInferRequest/contents",
        ]
    ),
    st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), max_size=4),
    st.integers(0, 40),
)
def test_damaged_requests_are_read_or_refused(name: str, changes: list[tuple[int, int]], cut: int) -> None:
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]

    data = bytearray.fromhex(RECORDED["messages"][name])
    for at, value in changes:
        data[at % len(data)] = value
    try:
        if name.startswith("inference"):
            request = ModelInferRequest.FromString(bytes(data[: len(data) - cut]))
            read = from_infer_request(request, max_bytes=LIMIT)
        else:
            request = PredictRequest.FromString(bytes(data[: len(data) - cut]))
            read = from_tensor_protos(request.inputs, max_bytes=LIMIT)
    except (DecodeError, InputError):
        return
    for value in read.values():
        check_read(value)
