"""Requests that are read from their bytes are read as protobuf reads them, or left to protobuf."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.errors import InputError
from megalith.serving.proto.infer_tensors import DATATYPES, to_infer_request
from megalith.serving.proto.message_bytes import ScoreMessage, read_infer_message, read_predict_message
from megalith.serving.proto.message_types import ModelInferRequest, PredictRequest
from megalith.serving.server.inputs import InputReader, Rows
from tests.serving.exports import request_of
from tests.serving.score_requests import (
    CONTENTS,
    INFER_CHANGES,
    INPUTS,
    NAMES,
    PREDICT_CHANGES,
    READER,
    SIGNATURE,
    Inputs,
    damaged_messages,
    infer_request,
    predict_request,
    typed_infer_request,
    typed_predict_request,
)


def message_of(request: Any) -> ScoreMessage | None:
    data = request.SerializeToString()
    return read_infer_message(data) if isinstance(request, ModelInferRequest) else read_predict_message(data)


def rows_of(request: Any, reader: InputReader = READER) -> Rows | None:
    message = message_of(request)
    return None if message is None else reader.read_message(message)


def by_protobuf(request: Any, reader: InputReader = READER) -> Rows:
    if isinstance(request, ModelInferRequest):
        return reader.read_infer(request)
    return reader.read_protos(request.inputs)


def asked_by(request: Any) -> tuple[Any, ...]:
    """What the message of a request must say besides its inputs, as protobuf reads it."""
    if isinstance(request, ModelInferRequest):
        names = [output.name for output in request.outputs]
        return request.model_name, "", None, request.model_version, request.id, names
    spec = request.model_spec
    version = spec.version.value if spec.HasField("version") else None
    return spec.name, spec.signature_name, version, spec.version_label, "", list(request.output_filter)


def asked_in(message: ScoreMessage) -> tuple[Any, ...]:
    return (
        message.model,
        message.signature,
        message.version,
        message.version_text,
        message.id,
        message.outputs,
    )


USUAL = [predict_request, typed_predict_request, infer_request, typed_infer_request]


@pytest.mark.parametrize("request_", USUAL)
def test_the_usual_request_is_read_from_its_bytes(request_: Callable[[], Any]) -> None:
    request = request_()

    message = message_of(request)

    assert message is not None
    assert asked_in(message) == asked_by(request)
    rows = READER.read_message(message)
    assert rows is not None
    assert rows == by_protobuf(request)
    assert rows.plain is not None
    assert np.frombuffer(rows.plain, np.int64).tolist() == [-7, 2, 3, 2**63 - 1]


def test_a_model_without_dense_values_or_with_hashed_ids() -> None:
    reader = InputReader(replace(SIGNATURE, num_dense=0))
    features = {name: INPUTS[name] for name in NAMES}
    for request in (request_of(features), to_infer_request(features, model_name="movies")):
        assert rows_of(request, reader) == by_protobuf(request, reader)
        assert rows_of(request) is None
    with pytest.raises(InputError, match="'dense' is unknown"):
        by_protobuf(predict_request(), reader)
    hashed = tuple(replace(feature, ids="xxhash64") for feature in SIGNATURE.features)
    reader = InputReader(replace(SIGNATURE, features=hashed))
    for request in (predict_request(), infer_request()):
        assert rows_of(request, reader) is None
        with pytest.raises(InputError, match="must be strings, not numbers"):
            by_protobuf(request, reader)


def test_limits_are_those_of_protobuf() -> None:
    for limit in (39, 40):  # bytes of the tensors, and of the rows of the ids
        reader = InputReader(SIGNATURE, max_bytes=limit)
        for request in (predict_request(), infer_request(), typed_infer_request()):
            if limit == 40:
                assert rows_of(request, reader) == by_protobuf(request, reader)
                continue
            assert rows_of(request, reader) is None
            with pytest.raises(InputError, match="bytes left for this request"):
                by_protobuf(request, reader)


def same_result(request: Any, reader: InputReader = READER) -> bool:
    """Check that the bytes give the rows that protobuf gives, or none; return whether there are rows."""
    direct = rows_of(request, reader)
    try:
        expected = by_protobuf(request, reader)
    except InputError:
        assert direct is None
        return False
    assert direct in (None, expected)
    return True


OTHERS = [(predict_request, change) for change in PREDICT_CHANGES.values()]
OTHERS += [(infer_request, change) for change in INFER_CHANGES.values()]


@pytest.mark.parametrize(("usual", "change"), OTHERS, ids=[*PREDICT_CHANGES, *INFER_CHANGES])
def test_other_requests_are_left_to_protobuf(
    usual: Callable[[], Any], change: Callable[[Any], object]
) -> None:
    request = usual()
    change(request)
    assert rows_of(request) is None
    same_result(request)


def test_typed_values_that_are_not_numbers_are_left_to_protobuf() -> None:
    """Python reads a float as a double, which makes a signaling NaN a quiet one."""
    signaling = np.array([[0x7FA00000], [0]], np.uint32).view(np.float32)
    inputs: Inputs = {**INPUTS, "dense": torch.from_numpy(signaling.copy())}
    raw = rows_of(infer_request(inputs))
    assert raw is not None
    assert raw.dense == signaling.tobytes()
    assert rows_of(typed_infer_request({**INPUTS, "dense": torch.tensor([[float("nan")], [0.0]])})) is None
    infinite: Inputs = {**INPUTS, "dense": torch.tensor([[float("inf")], [-0.0]])}
    assert rows_of(typed_infer_request(infinite)) == by_protobuf(infer_request(infinite))
    with pytest.raises(InputError, match="holds NaN or infinity"):
        rows_of(infer_request(inputs), InputReader(SIGNATURE, refuse_nan=True))


shapes = st.sampled_from([(2,), (2, 1), (1,), (0,), (2, 2), (), (1, 2, 1)])
dtypes = st.sampled_from(sorted(DATATYPES, key=str))


@st.composite
def any_inputs(draw: st.DrawFn) -> Inputs:
    """Inputs of any dtype and shape; some are absent, some unknown."""
    inputs: dict[str, torch.Tensor] = {}
    for name in draw(st.permutations(["user", "tags", "dense", "tags:row_splits", "user:weights", "more"])):
        usual = {"user": (torch.int64, (2,)), "tags": (torch.int64, (2,)), "dense": (torch.float32, (2, 1))}
        if name not in usual and draw(st.integers(0, 5)):
            continue
        dtype, shape = usual.get(name, (torch.int64, (3,)))
        if draw(st.integers(0, 4)) == 0:
            dtype, shape = draw(dtypes), draw(shapes)
        elif draw(st.integers(0, 6)) == 0:
            continue
        numbers = torch.arange(int(np.prod(shape)), dtype=torch.int64).reshape(shape)
        inputs[name] = numbers.to(dtype)
    return inputs


@given(any_inputs())
def test_inputs_of_all_dtypes_and_shapes(inputs: Inputs) -> None:
    raw = to_infer_request(inputs, model_name="movies")
    same_result(raw)
    if {tensor.datatype for tensor in raw.inputs} <= CONTENTS.keys():
        same_result(typed_infer_request(inputs))
    if not {torch.uint16, torch.uint32, torch.uint64} & {value.dtype for value in inputs.values()}:
        same_result(request_of(inputs))


@pytest.mark.parametrize("request_", USUAL)
def test_damaged_bytes_are_read_as_protobuf_reads_them_or_not_at_all(request_: Callable[[], Any]) -> None:
    whole = request_()
    kind = type(whole)
    read = read_infer_message if kind is ModelInferRequest else read_predict_message
    taken = 0
    for data in damaged_messages(whole.SerializeToString(), 3000):
        message = read(data)
        if message is None:
            continue
        request = kind.FromString(data)  # so it is not malformed
        assert asked_in(message) == asked_by(request)
        rows = READER.read_message(message)
        taken += rows is not None
        assert rows is None or repr(rows) == repr(by_protobuf(request))
    assert taken > 100  # values of ids and of dense numbers change without harm


def test_random_bytes_are_read_as_protobuf_reads_them_or_not_at_all() -> None:
    dice = random.Random(0)
    for read, kind in ((read_predict_message, PredictRequest), (read_infer_message, ModelInferRequest)):
        for _ in range(5000):
            data = bytes(dice.choices((*range(64), 255), k=dice.randrange(40)))
            message = read(data)
            if message is not None:
                assert asked_in(message) == asked_by(kind.FromString(data))
