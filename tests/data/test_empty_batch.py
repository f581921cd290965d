"""Columns that travel as JSON: what comes out is the same columns without rows; anything else is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith.data import Batch
from megalith.data.equal_batches import describe_columns, make_empty_batch
from megalith.errors import InputError
from megalith.ragged import Ragged

WHERE = "rank 1"
GOOD: dict[str, Any] = {
    "features": {"a": {"values": ["int64", []], "weights": None}},
    "labels": ["float32", []],
    "dense": ["float32", [3]],
    "weights": None,
}


def test_a_blank_has_the_columns_described() -> None:
    ids = Ragged.from_lists([[1, 2], [3]], weights=[[0.5, 0.5], [1.0]])
    vectors = Ragged(torch.ones(1, 4, 2, dtype=torch.bfloat16), torch.tensor([0, 0, 1]))
    batch = Batch(
        {"ids": ids, "vectors": vectors}, torch.ones(2), torch.ones(2, 7), torch.ones(2), 9, {"row": 1}
    )
    blank = make_empty_batch(describe_columns(batch), where=WHERE)
    assert describe_columns(blank) == describe_columns(batch)
    assert [len(x) for x in (blank, *blank.features.values())] == [0, 0, 0]
    assert blank.features["vectors"].values.shape == (0, 4, 2)
    assert blank.features["vectors"].values.dtype == torch.bfloat16
    assert blank.dense is not None
    assert blank.dense.shape == (0, 7)
    assert (blank.time, blank.position) == (None, {})


@pytest.mark.parametrize(
    "text",
    [
        *(b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000),
        *(
            json.dumps(found).encode()
            for found in (
                {},
                {**GOOD, "features": []},
                {**GOOD, "features": {"a": None}},
                {**GOOD, "features": {"a": {"values": None, "weights": None}}},
                {**GOOD, "features": {"a": {"values": ["int64", []], "weights": ["int64", []]}}},
                {**GOOD, "labels": None},
                {**GOOD, "labels": "float32"},
                {**GOOD, "dense": ["float32", [-1]]},
                {**GOOD, "dense": ["float32", [True]]},
                {**GOOD, "dense": ["float32", [2**40]]},
                {**GOOD, "dense": ["float32", [1] * 100]},
                {**GOOD, "dense": ["float32", [2**31] * 8]},
                {**GOOD, "dense": ["float32", 3]},
                {**GOOD, "dense": ["os.system", [3]]},
                {**GOOD, "dense": [["float32"], [3]]},
            )
        ),
    ],
    ids=range(21),
)
def test_anything_else_is_refused_and_its_sender_named(text: bytes) -> None:
    make_empty_batch(json.dumps(GOOD).encode(), where=WHERE)
    with pytest.raises(InputError, match="rank 1 sent an invalid description of the columns"):
        make_empty_batch(text, where=WHERE)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.sampled_from(sorted(GOOD)), JSON)
def test_no_description_does_more_than_raise(key: str, value: Any) -> None:
    try:
        blank = make_empty_batch(json.dumps({**GOOD, key: value}).encode(), where=WHERE)
    except InputError:
        return
    assert len(blank) == 0
