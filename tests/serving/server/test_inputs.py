"""Inputs: a batch is its requests in any form; requests read from bytes are read as by protobuf."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import Ragged
from megalith.checkpoint.manifest import Routing
from megalith.errors import InputError
from megalith.serving.export.signature import ExportedTable, FeatureSpec
from megalith.serving.proto.infer_tensors import DATATYPES
from megalith.serving.proto.message_bytes import ScoreMessage, read_infer_message, read_predict_message
from megalith.serving.proto.message_types import ModelInferRequest, PredictRequest
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.inputs import InputReader, Rows
from tests.serving.exports import request_of, to_infer_request
from tests.serving.score_requests import (
    CONTENTS,
    INFER_CHANGES,
    INPUTS,
    NAMES,
    PREDICT_CHANGES,
    READER,
    SIGNATURE,
    damaged_messages,
    infer_request,
    predict_request,
    typed_infer_request,
    typed_predict_request,
)

PAD = SIGNATURE.features[0].pad

ids = st.integers(-(2**63), 2**63 - 1).filter(lambda id: id != PAD)
lists = st.lists(ids, max_size=3)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_dense_values_that_are_not_finite_are_refused_if_asked_for(value: float) -> None:
    inputs = {"user": torch.tensor([1]), "dense": torch.tensor([[value]])}
    assert READER.read(inputs).count == 1
    with pytest.raises(InputError, match="input 'dense' holds NaN or infinity"):
        InputReader(SIGNATURE, refuse_nan=True).read(inputs)


Inputs = dict[str, Tensor | Strings]


@st.composite
def columns(draw: st.DrawFn, name: str, count: int) -> tuple[Inputs, list[list[int]], list[list[float]]]:
    """A column in one of its forms, and what is in its rows: ids, weights."""
    form = draw(
        st.sampled_from(["absent", "single", "padded", "ragged"] if name == "tags" else ["single", "ragged"])
    )
    if form == "absent":
        return {}, [[] for _ in range(count)], [[] for _ in range(count)]
    rows = [[draw(ids)] for _ in range(count)] if form == "single" else [draw(lists) for _ in range(count)]
    flat = [id for row in rows for id in row]
    inputs: Inputs = {name: torch.tensor(flat, dtype=torch.int64)}
    if form == "ragged":
        inputs[f"{name}:row_splits"] = torch.tensor(np.cumsum([0, *map(len, rows)]))
    if form == "padded":
        inputs[name] = torch.tensor(
            [row + [PAD] * (3 - len(row)) for row in rows], dtype=torch.int64
        ).reshape(-1, 3)
        return inputs, rows, [[1.0] * len(row) for row in rows]
    weights = [1.0] * len(flat)
    if draw(st.booleans()):
        weights = draw(st.lists(st.floats(-4, 4, width=32), min_size=len(flat), max_size=len(flat)))
        inputs[f"{name}:weights"] = torch.tensor(weights, dtype=torch.float32)
    parts = iter(weights)
    return inputs, rows, [[next(parts) for _ in row] for row in rows]


@st.composite
def requests(draw: st.DrawFn) -> tuple[Inputs, dict[str, list[list[int]]], dict[str, list[list[float]]]]:
    count = draw(st.integers(0, 3))
    inputs: Inputs = {"dense": torch.full((count, 1), draw(st.floats(-1, 1, width=32)))}
    rows, weights = {}, {}
    for name in NAMES:
        given_, rows[name], weights[name] = draw(columns(name, count))
        inputs |= given_
    return inputs, rows, weights


def read(inputs: Inputs, how: str) -> Rows:
    if how == "protos":
        return READER.read_protos(request_of(inputs).inputs)
    if how == "infer":
        return READER.read_infer(to_infer_request(inputs, model_name="movies"))
    return READER.read(inputs)


@given(
    st.lists(st.tuples(requests(), st.sampled_from(["tensors", "protos", "infer"])), min_size=1, max_size=4)
)
def test_a_batch_is_its_requests(batch: list) -> None:  # type: ignore[type-arg]
    features, dense = READER.join([read(inputs, how) for (inputs, _, _), how in batch])
    assert dense is not None
    assert torch.equal(dense, torch.cat([inputs["dense"] for (inputs, _, _), _ in batch]))
    for name in NAMES:
        expected = [row for (_, rows, _), _ in batch for row in rows[name]]
        weights = [row for (_, _, weights), _ in batch for row in weights[name]]
        column = features[name]
        if isinstance(column, Tensor):
            assert [[id] for id in column.tolist()] == expected
            assert all(row == [1.0] for row in weights)
            continue
        assert column.to_lists() == expected
        if column.weights is None:
            assert all(weight == 1.0 for row in weights for weight in row)
        else:
            assert Ragged(column.weights, column.row_splits).to_lists() == weights


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int8])
def test_the_common_request_makes_no_columns(dtype: torch.dtype) -> None:
    inputs: Inputs = {
        "user": torch.tensor([PAD, 2], dtype=dtype),
        "tags": torch.tensor([3, 4]),
        "dense": torch.ones(2, 1),
    }
    for how in ("tensors", "protos", "infer"):
        rows = read(inputs, how)
        assert rows.plain is not None
        assert READER.missing(rows) == []
        joined, _ = READER.join([rows, rows])
        # One id each is an id, also if it is the pad.
        assert joined["user"].tolist() == [PAD, 2, PAD, 2]  # type: ignore[union-attr]


def test_no_request_gathers_more_than_it_may() -> None:
    """TensorFlow fills typed values up with the last, so a few bytes may ask for any number of rows."""
    tables = {name: ExportedTable((8,), (1.0,), Routing("roundrobin", 1)) for name in NAMES}
    signature = replace(SIGNATURE, tables=tables)
    inputs: Inputs = {name: torch.zeros(10, dtype=torch.int64) for name in NAMES}
    inputs["dense"] = torch.zeros(10, 1)
    plain = request_of(inputs).inputs
    with pytest.raises(InputError, match="take 680 bytes, more than the limit of 679"):
        InputReader(signature, max_bytes=679).read_protos(plain)
    assert InputReader(signature, max_bytes=680).read_protos(plain).plain is not None

    filled = request_of({"user": torch.zeros(1, 30, dtype=torch.int64), "dense": torch.zeros(1, 1)}).inputs
    filled["user"].ClearField("tensor_content")
    filled["user"].int64_val.append(7)
    with pytest.raises(InputError, match="take 964 bytes"):
        InputReader(signature, max_bytes=680).read_protos(filled)


@given(requests(), st.sampled_from(["tensors", "protos"]), st.integers(1, 3))
def test_the_pieces_of_a_request_join_to_it(made: tuple, how: str, size: int) -> None:  # type: ignore[type-arg]
    rows = read(made[0], how)
    pieces = READER.pieces(rows, size)
    assert all(piece.count <= size for piece in pieces)
    assert sum(piece.cost for piece in pieces) == rows.cost
    (whole, dense), (joined, same) = READER.join([rows]), READER.join(pieces)
    assert dense is not None
    assert same is not None
    assert torch.equal(dense, same)
    for name in NAMES:
        one, other = whole[name], joined[name]
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert torch.equal(one, other)
        else:
            assert isinstance(one, Ragged)
            assert isinstance(other, Ragged)
            assert one.to_lists() == other.to_lists()
            assert (one.weights is None) == (other.weights is None)
            assert one.weights is None or torch.equal(one.weights, other.weights)


def test_strings_are_padded_with_empty_ones() -> None:
    words = np.array([[b"a", b""], [b"", b""]], dtype=object)
    given_: Inputs = {"user": torch.tensor([1, 2]), "tags": words, "dense": torch.ones(2, 1)}
    (features, _) = READER.join([READER.read(given_)])
    assert isinstance(features["tags"], Ragged)
    assert [len(row) for row in features["tags"].to_lists()] == [1, 0]


@pytest.mark.parametrize(
    ("kind", "accepted", "words"),
    [
        ("xxhash64", "strings", "'user' must be strings, not numbers: the ids were hashes of text"),
        ("integer", "integers", "'user' must be integers, not strings: they were integers in training"),
        ("fid", "integers", r"'user' must be integers, not strings: the results of megalith.fid\(slot, id\)"),
    ],
)
def test_ids_are_of_the_kind_of_training(kind: str, accepted: str, words: str) -> None:
    reader = InputReader(
        replace(SIGNATURE, features=(FeatureSpec("user", "user", "sum", ids=kind),), num_dense=0)
    )
    values = {"strings": np.array([b"7", b"8"], object), "integers": torch.tensor([7, 8])}
    for name, value in values.items():
        inputs: Inputs = {"user": value}
        forms: list[Callable[[], Rows]] = [
            partial(reader.read, inputs),
            partial(reader.read_protos, request_of(inputs).inputs),
            partial(reader.read_infer, to_infer_request(inputs, model_name="m")),
        ]
        for form in forms:
            if name == accepted:
                assert form().count == 2
            else:
                with pytest.raises(InputError, match=words):
                    form()


def test_a_shared_feature_has_one_row_for_all() -> None:
    shared = replace(
        SIGNATURE,
        features=(FeatureSpec("user", "user", "sum", shared=True), FeatureSpec("tags", "tags", "sum")),
        num_dense=0,
    )
    assert not shared.batchable
    reader = InputReader(shared)
    inputs: Inputs = {"user": torch.tensor([5]), "tags": torch.tensor([1, 2, 3])}
    for rows in (reader.read(inputs), reader.read_protos(request_of(inputs).inputs)):
        assert rows.count == 3
        features, dense = reader.join([rows])
        assert isinstance(features["user"], Ragged)
        assert isinstance(features["tags"], Ragged)
        assert (features["user"].to_lists(), features["tags"].to_lists(), dense) == (
            [[5]],
            [[1], [2], [3]],
            None,
        )
    with pytest.raises(InputError, match="'user' is shared by the batch: it must have 1 row, not 3"):
        reader.read({**inputs, "user": torch.tensor([1, 2, 3])})


# ---- requests that are read from their bytes


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
    inputs: dict[str, Tensor] = {**INPUTS, "dense": torch.from_numpy(signaling.copy())}
    raw = rows_of(infer_request(inputs))
    assert raw is not None
    assert raw.dense == signaling.tobytes()
    assert rows_of(typed_infer_request({**INPUTS, "dense": torch.tensor([[float("nan")], [0.0]])})) is None
    infinite: dict[str, Tensor] = {**INPUTS, "dense": torch.tensor([[float("inf")], [-0.0]])}
    assert rows_of(typed_infer_request(infinite)) == by_protobuf(infer_request(infinite))
    with pytest.raises(InputError, match="holds NaN or infinity"):
        rows_of(infer_request(inputs), InputReader(SIGNATURE, refuse_nan=True))


shapes = st.sampled_from([(2,), (2, 1), (1,), (0,), (2, 2), (), (1, 2, 1)])
dtypes = st.sampled_from(sorted(DATATYPES, key=str))


@st.composite
def any_inputs(draw: st.DrawFn) -> dict[str, Tensor]:
    """Inputs of any dtype and shape; some are absent, some unknown."""
    inputs: dict[str, Tensor] = {}
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
def test_inputs_of_all_dtypes_and_shapes(inputs: dict[str, Tensor]) -> None:
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
