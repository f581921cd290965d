"""Monolith's PushRequest: how it is split, and the PredictRequest it becomes."""

from __future__ import annotations

from typing import Any

import pytest

from megalith.compat.monolith.push_requests import split_push, to_predict_request
from megalith.errors import InputError
from megalith.serving.proto.message_types import PushRequest
from megalith.serving.proto.tf_tensors import from_tensor_protos


def monolith_push(**deltas: tuple[int, list[int]]) -> Any:
    """A PushRequest of tables: their dim and ids, with values that count up."""
    request = PushRequest(model_name="movies", signature_name="hashtable_assign")
    value = 0.0
    for name, (dim, ids) in deltas.items():
        delta = request.delta_hash_tables.add(unique_id=name, dim_size=dim, fids=ids)
        for _ in range(dim * len(ids)):
            value += 1.0
            delta.embeddings.append(value)
    return request


def test_monolith_tables_become_an_id_and_a_value_each_and_multi_tables_three_inputs() -> None:
    request = monolith_push(table1=(2, [1, 2]), table2=(1, [3]))
    inputs = from_tensor_protos(to_predict_request(request).inputs)
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "table1_id": [1, 2],
        "table1_value": [[1.0, 2.0], [3.0, 4.0]],
        "table2_id": [3],
        "table2_value": [[5.0]],
    }

    request.delta_multi_hash_tables.extend(request.delta_hash_tables)
    del request.delta_hash_tables[:]
    inputs = from_tensor_protos(to_predict_request(request).inputs)
    assert {name: tensor.tolist() for name, tensor in inputs.items()} == {
        "id": [1, 2, 3],
        "id_split": [0, 2, 3],
        "flat_value": [1.0, 2.0, 3.0, 4.0, 5.0],
    }


def test_a_delta_with_too_few_values_is_refused() -> None:
    request = monolith_push(table1=(2, [1, 2]))
    del request.delta_hash_tables[0].embeddings[-1]

    with pytest.raises(InputError, match="table 'table1': 3 values for 2 ids of dim 2"):
        to_predict_request(request)


@pytest.mark.parametrize("field", ["delta_hash_tables", "delta_multi_hash_tables"])
def test_a_push_is_split_into_nearly_equal_parts_with_the_rest_in_the_last(field: str) -> None:
    request = monolith_push(a=(1, []), b=(1, [1, 2]), c=(2, [3, 4, 5]))
    deltas = list(request.delta_hash_tables)
    del request.delta_hash_tables[:]
    getattr(request, field).extend(deltas)
    assert 60 < request.ByteSize() <= 120

    pieces = split_push(request, 60)

    counts = [[len(delta.fids) for delta in getattr(piece, field)] for piece in pieces]
    assert counts == [[0, 1, 1], [0, 1, 2]]
    assert [list(piece.__getattribute__(field)[2].embeddings) for piece in pieces] == [[3, 4], [5, 6, 7, 8]]
    assert all(piece.model_name == "movies" for piece in pieces)
    assert split_push(request) == [request]  # within the limit
