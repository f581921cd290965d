"""Messages of parameter sync: what a push looks like on the wire, and what of it is believed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers
from megalith.serving.export.row_format import RowFormat, RowPart
from megalith.serving.proto.limits import tensor_of_bytes
from megalith.serving.proto.message_bytes import LARGE, cut_contents
from megalith.serving.proto.message_types import PredictRequest
from megalith.serving.proto.tf_tensors import from_tensor_proto, from_tensor_protos
from megalith.serving.sync.push_messages import (
    DeferredRows,
    NotFiniteRows,
    PushMessage,
    encode_request,
    inputs_of,
    read_push,
    result_of,
)

DIMS = {"table1": 2, "table2": 1}
PUSH = PushMessage(
    rows={
        "table1": (torch.tensor([1, 2]), torch.tensor([[1.0, 2.0], [3.0, 4.0]])),
        "table2": (torch.tensor([3]), torch.tensor([[5.0]])),
    },
    removed={"table2": torch.tensor([-9])},
    dense={"deep.0.weight": torch.eye(2)},
)
SIGNATURES = pytest.mark.parametrize("signature", ["hashtable_assign", "raw_assign", "multi/raw_assign"])


@SIGNATURES
def test_a_push_comes_back_as_it_went(signature: str) -> None:
    data = encode_request("movies:ps_0", signature, inputs_of(PUSH, signature, DIMS))

    request = PredictRequest.FromString(data)
    assert (request.model_spec.name, request.model_spec.signature_name) == ("movies:ps_0", signature)
    read = read_push(signature, from_tensor_protos(request.inputs), DIMS, {"deep.0.weight": (2, 2)})
    for table, (ids, rows) in PUSH.rows.items():
        assert torch.equal(read.rows[table][0], ids)
        assert torch.equal(read.rows[table][1], rows)
    assert torch.equal(read.removed["table2"], torch.tensor([-9]))
    assert torch.equal(read.dense["deep.0.weight"], torch.eye(2))


@SIGNATURES
def test_zeros_of_a_monolith_client_remove_an_id_where_no_row_is_zero(signature: str) -> None:
    codes = {
        "table1": RowFormat((RowPart("float32", 1), RowPart("one_bit", 1, 0.5))),
        "table2": RowFormat((RowPart("fixed_point", 1, 0.5),)),
    }
    push = PushMessage(
        rows={
            "table1": (torch.tensor([1, 2]), torch.tensor([[0.0, 0.0], [0.0, -4.0]])),
            "table2": (torch.tensor([3]), torch.tensor([[0.0]])),
        },
        removed={"table1": torch.tensor([9])},
    )

    request = PredictRequest.FromString(encode_request("m", signature, inputs_of(push, signature, DIMS)))
    read = read_push(signature, from_tensor_protos(request.inputs), DIMS, {}, codes)

    assert {table: ids.tolist() for table, (ids, _) in read.rows.items()} == {"table1": [2], "table2": [3]}
    assert {table: ids.tolist() for table, ids in read.removed.items()} == {"table1": [9, 1]}


def test_the_bytes_are_those_that_protobuf_writes() -> None:
    inputs = {"a_id": torch.tensor([1, 2]), "a_value": torch.ones(2, 3), "none": torch.empty(0, 4)}

    request = PredictRequest.FromString(encode_request("m", "s", inputs))

    assert PredictRequest.FromString(request.SerializeToString()) == request
    for name, tensor in inputs.items():
        assert torch.equal(from_tensor_proto(request.inputs[name]), tensor)
        assert request.inputs[name].ByteSize() == len(request.inputs[name].SerializeToString())


@SIGNATURES
@pytest.mark.parametrize("rows", range(1, 9))
def test_deferred_rows_are_read_into_the_request_and_aligned(signature: str, rows: int) -> None:
    ids, values = torch.arange(rows * 1100), torch.randn(rows * 1100, 16)

    def read_into(out: Tensor) -> bool:
        out.copy_(values)
        return True

    push = {"t" * rows: (ids, DeferredRows((ids.numel(), 16), read_into))}
    data = encode_request("m" * rows, signature, inputs_of(PushMessage(push), signature, push))

    small, contents = cut_contents(data)
    request = PredictRequest.FromString(data)
    read = read_push(signature, from_tensor_protos(request.inputs), {"t" * rows: 16}, {}).rows["t" * rows]
    assert torch.equal(read[0], ids)
    assert torch.equal(read[1], values)
    assert contents
    for name, content in contents.items():
        assert data.index(content) % 8 == 0, name
    buffers = MessageBuffers()
    inputs = PredictRequest.FromString(small).inputs
    shared = from_tensor_protos(inputs, contents=contents, buffers=buffers)
    again = read_push(signature, shared, {"t" * rows: 16}, {}).rows["t" * rows]
    assert torch.equal(again[1], values)


def test_deferred_rows_that_are_not_finite_are_no_request() -> None:
    push = PushMessage({"t": (torch.tensor([1]), DeferredRows((1, 2), lambda out: False))})

    with pytest.raises(NotFiniteRows):
        encode_request("m", "hashtable_assign", inputs_of(push, "hashtable_assign", ["t"]))


@SIGNATURES
def test_a_push_says_how_many_ids_follow(signature: str) -> None:
    push = replace(PUSH, expected={"table1": 7})
    request = PredictRequest.FromString(encode_request("m", signature, inputs_of(push, signature, DIMS)))
    inputs = from_tensor_protos(request.inputs)

    assert read_push(signature, inputs, DIMS, {"deep.0.weight": (2, 2)}).expected == {"table1": 7}
    for wrong in (torch.tensor([-1]), torch.tensor([1, 2]), torch.tensor([1.0])):
        with pytest.raises(InputError, match="expected"):
            read_push(signature, inputs | {"expected:table1": wrong}, DIMS, {"deep.0.weight": (2, 2)})


@pytest.mark.parametrize("shift", range(8))
def test_large_tensors_are_read_where_they_are_if_they_are_aligned(shift: int) -> None:
    values = torch.arange(LARGE // 8)
    data = b"x" * shift + values.numpy().tobytes()

    found = tensor_of_bytes(memoryview(data)[shift:], torch.int64, (len(values),), "x", MessageBuffers())

    memory = np.frombuffer(data, dtype=np.uint8).ctypes.data
    assert torch.equal(found, values)
    assert (found.data_ptr() == memory + shift) == ((memory + shift) % 8 == 0)
    del data
    assert torch.equal(found, values)


def test_raw_assign_goes_by_the_sorted_names_of_all_tables() -> None:
    push = PushMessage(rows={"b": (torch.tensor([7]), torch.tensor([[1.0, 2.0]]))})

    inputs = inputs_of(push, "raw_assign", ["c", "b", "a"])

    assert isinstance(inputs["id_split"], Tensor)
    assert inputs["id_split"].tolist() == [0, 0, 1, 1]
    assert sorted(inputs) == ["flat_value", "id", "id_split"]


def test_what_an_assign_answers() -> None:
    assert {k: v.tolist() for k, v in result_of(PUSH, "hashtable_assign").items()} == {
        "table1_result": [2],
        "table2_result": [1],
    }
    assert result_of(PUSH, "x/raw_assign")["result"].tolist() == [0]


def test_unsigned_ids_are_the_same_bits() -> None:
    inputs = {"table2_id": torch.tensor([2**64 - 1], dtype=torch.uint64), "table2_value": torch.ones(1, 1)}

    assert read_push("hashtable_assign", inputs, DIMS, {}).rows["table2"][0].tolist() == [-1]


IDS, VALUES = torch.tensor([1, 2]), torch.ones(2, 2)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({"table1_id": IDS}, "'table1_value' must be float32"),
        ({"table1_value": VALUES}, "'table1_id' must be int64"),
        ({"table1_id": IDS, "table1_value": torch.ones(2, 3)}, r"float32 \[2, 2\], got float32 \[2, 3\]"),
        ({"table1_id": IDS, "table1_value": VALUES.double()}, "got float64"),
        ({"table1_id": IDS.float(), "table1_value": VALUES}, "must be int64"),
        ({"table1_id": IDS.view(2, 1), "table1_value": VALUES}, r"got int64 \[2, 1\]"),
        ({"table9_id": IDS, "table9_value": VALUES}, "unknown input 'table9_id'.*table1, table2"),
        ({"table1:removed": VALUES}, "'table1:removed' must be int64"),
        ({"dense:w": torch.ones(3)}, r"'dense:w' must be \[2\]"),
        ({"dense:v": torch.ones(3)}, "unknown input 'dense:v'"),
    ],
)
def test_a_wrong_input_is_named(inputs: dict[str, Tensor], message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_push("hashtable_assign", inputs, DIMS, {"w": (2,)})


@pytest.mark.parametrize(
    "splits",
    [[0, 2], [0, 1, 3], [1, 1, 2], [0, 3, 2], [0, -1, 2], [0, 2**62, 2], [-(2**63), 2**63 - 1, 2], []],
)
def test_splits_of_raw_assign_must_be_of_its_ids(splits: list[int]) -> None:
    inputs = {"id": IDS, "id_split": torch.tensor(splits, dtype=torch.int64), "flat_value": torch.ones(4)}

    with pytest.raises(InputError, match="'id_split' must be 3 ascending numbers from 0 to 2"):
        read_push("raw_assign", inputs, DIMS, {})


RAW_INPUTS = ["id", "id_split", "flat_value", "removed", "removed_split"]
NAMED_INPUTS = ["table1_id", "table1_value", "dense:w", "dense_part:w", "dense_begin:w", "expected:table1"]
INTEGERS = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4).map(lambda x: torch.tensor(x).long())
FLOATS = st.lists(st.floats(width=32), max_size=4).map(torch.Tensor) | st.just(torch.ones(2, 2))


@given(
    st.dictionaries(st.sampled_from(RAW_INPUTS + NAMED_INPUTS), INTEGERS | FLOATS, max_size=6),
    st.sampled_from(["hashtable_assign", "raw_assign"]),
)
def test_whatever_comes_is_a_push_or_an_input_error(inputs: dict[str, Tensor], signature: str) -> None:
    try:
        push = read_push(signature, inputs, DIMS, {"w": (2,)})
    except InputError:
        return
    for table, (ids, rows) in push.rows.items():
        assert rows.shape == (ids.numel(), DIMS[table])
