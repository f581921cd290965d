"""Ragged: constructors, views, and what it refuses."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import Ragged
from megalith.errors import InputError
from tests.fixed_examples import fixed_examples
from tests.nn.support import Keyed

ROWS = st.lists(st.lists(st.integers(1, 2**40), max_size=5), max_size=8)


def lists(*rows: list[int]) -> Ragged:
    return Ragged.from_lists(list(rows))


@fixed_examples(40)
@given(rows=ROWS)
def test_every_way_round_gives_the_rows_back(rows: list[list[int]]) -> None:
    ragged = Ragged.from_lists(rows)
    assert len(ragged) == len(rows)
    assert ragged.to_lists() == rows
    assert [row.tolist() for row in ragged] == rows
    assert ragged.lengths().tolist() == [len(row) for row in rows]
    assert ragged.row_ids().tolist() == [i for i, row in enumerate(rows) for _ in row]
    assert Ragged.from_padded(ragged.to_padded(pad=0), pad=0).to_lists() == rows
    assert Ragged.from_lengths(ragged.values, ragged.lengths().int()).to_lists() == rows


@given(rows=ROWS, start=st.integers(-9, 9), stop=st.integers(-9, 9), step=st.sampled_from([1, 2, -1, 3]))
def test_slices_are_those_of_a_list(rows: list[list[int]], start: int, stop: int, step: int) -> None:
    assert Ragged.from_lists(rows)[start:stop:step].to_lists() == rows[start:stop:step]


def test_rows_by_number_and_slices_that_share_memory_and_keep_weights() -> None:
    ragged = Ragged(torch.arange(4), torch.tensor([0, 1, 1, 4]), torch.tensor([0.1, 0.2, 0.3, 0.4]))
    part = ragged[1:]
    assert part.to_lists() == [[], [1, 2, 3]]
    assert part.weights.tolist() == pytest.approx([0.2, 0.3, 0.4])
    assert part.values.data_ptr() == ragged.values[1:].data_ptr()

    ragged = lists([1, 2], [], [3])
    assert ragged[0].tolist() == [1, 2]
    assert ragged[-1].tolist() == [3]
    with pytest.raises(IndexError, match="row 3 is out of range: the Ragged has 3 rows"):
        ragged[3]


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        ([3, 1], [[4, 5, 6], []]),
        (torch.tensor([0, -1, 0]), [[1, 2], [4, 5, 6], [1, 2]]),
        (torch.tensor([True, False, True, False]), [[1, 2], [3]]),
        (np.array([2]), [[3]]),
        ([], []),
    ],
)
def test_rows_by_a_list_or_tensor_of_numbers_or_bools(index: Any, rows: list[list[int]]) -> None:
    ragged = Ragged(torch.arange(1, 7), torch.tensor([0, 2, 2, 3, 6]), torch.arange(1.0, 7.0))
    assert ragged[index].to_lists() == rows
    assert ragged[index].weights.tolist() == [x for row in rows for x in row]


def test_an_index_that_names_no_rows() -> None:
    for index, error, message in (
        ([1, 4], IndexError, "row 4 is out of range: the Ragged has 2 rows"),
        ([True], IndexError, "the index has 1 bools, but the Ragged has 2 rows"),
        (
            [0.5],
            InputError,
            r"an index must be an integer, a slice, or integers or bools \[rows\], got \[0.5\]",
        ),
    ):
        with pytest.raises(error, match=message):
            lists([1], [2])[index]


def test_a_pickled_view_carries_only_its_own_values() -> None:
    part = Ragged(torch.arange(10**5), torch.arange(10**5 + 1), torch.ones(10**5))[7:9]
    sent = pickle.dumps(part)
    assert len(sent) < 2000
    assert pickle.loads(sent).to_lists() == [[7], [8]]


def test_padding_cuts_and_fills_with_weights_and_gaps() -> None:
    ragged = lists([1, 2, 3], [], [4])
    assert ragged.to_padded(pad=-1).tolist() == [[1, 2, 3], [-1, -1, -1], [4, -1, -1]]
    assert ragged.to_padded(length=2).tolist() == [[1, 2], [0, 0], [4, 0]]
    assert ragged.to_padded(length=0).shape == (3, 0)
    rows = Ragged(torch.ones(2, 3), torch.tensor([0, 2]))
    assert rows.to_padded(length=3).shape == (1, 3, 3)

    x = torch.tensor([[0, 7, 0], [8, 0, 9]])
    ragged = Ragged.from_padded(x, pad=0, weights=x / 10)
    assert ragged.to_lists() == [[7], [8, 9]]
    assert ragged.weights.tolist() == pytest.approx([0.7, 0.8, 0.9])


def test_concat_joins_rows_and_weights() -> None:
    one = Ragged.from_lists([[1], []], weights=[[0.5], []])
    two = Ragged.from_lists([[2, 3]], weights=[[1.0, 2.0]])
    joined = Ragged.concat([one, two])
    assert joined.to_lists() == [[1], [], [2, 3]]
    assert joined.weights.tolist() == [0.5, 1.0, 2.0]
    with pytest.raises(InputError, match="all parts or no part"):
        Ragged.concat([one, lists([1])])
    with pytest.raises(InputError, match="at least one part"):
        Ragged.concat([])


def test_from_a_jagged_nested_tensor() -> None:
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    assert Ragged.from_nested(nested).to_lists() == [[0, 1], [0, 1, 2]]
    narrowed = torch.nested.narrow(
        torch.arange(8).view(2, 4), 1, torch.tensor([0, 1]), torch.tensor([2, 3]), layout=torch.jagged
    )
    assert Ragged.from_nested(narrowed).to_lists() == [[0, 1], [5, 6, 7]]
    with pytest.raises(InputError, match="jagged"):
        Ragged.from_nested(torch.ones(2, 2))


def test_from_something_shaped_like_a_keyed_jagged_tensor() -> None:
    def keyed(values: list[int], lengths: list[int], weights: torch.Tensor | None = None) -> Keyed:
        return Keyed(["a", "b"], torch.tensor(values), torch.tensor(lengths), weights)

    columns = Ragged.from_keyed(keyed([1, 2, 3, 4], [1, 0, 2, 1], torch.arange(4.0)))
    lists = {name: column.to_lists() for name, column in columns.items()}
    assert lists == {"a": [[1], []], "b": [[2, 3], [4]]}
    assert columns["b"].weights.tolist() == [1, 2, 3]
    with pytest.raises(InputError, match="do not divide"):
        Ragged.from_keyed(keyed([1], [1, 0, 0]))
    with pytest.raises(InputError, match="add up to 2"):
        Ragged.from_keyed(keyed([1], [2, 0]))


@pytest.mark.parametrize(
    ("values", "splits", "weights", "message"),
    [
        (torch.arange(3), torch.tensor([0, 2]), None, "start at 0 and end at 3"),
        (torch.arange(3), torch.tensor([0, 4, 3]), None, "ascending"),
        (torch.arange(3), torch.tensor([], dtype=torch.int64), None, "batch"),
        (torch.arange(3), torch.tensor([0.0, 3.0]), None, "int64 or int32"),
        (torch.tensor(3), torch.tensor([0, 1]), None, "at least one dimension"),
        (torch.arange(3), torch.tensor([0, 3]), torch.ones(2), "weights must be"),
        (torch.arange(3), torch.tensor([0, 3]), torch.arange(3), "float"),
        (torch.arange(3), torch.tensor([0, 3], device="meta"), None, "on meta"),
    ],
)
def test_parts_that_do_not_fit(values: Any, splits: Any, weights: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ragged(values, splits, weights)


def test_moving_keeps_everything() -> None:
    ragged = Ragged.from_lists([[1, 2], [3]], weights=[[1.0, 2.0], [3.0]])
    moved = ragged.to("meta")
    assert moved.device.type == "meta"
    assert moved.weights.device.type == "meta"
    assert len(moved) == 2
    assert repr(ragged) == "Ragged(2 rows, 3 values, torch.int64, weighted)"


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([[1.5]], r"rows\[0\]\[0\] is 1.5, not an integer: ids must be integers; pass dtype=torch.float32"),
        ([[1], [2, 2.0]], r"rows\[1\]\[1\] is 2.0, not an integer"),
        ([["ann"]], r"rows\[0\]\[0\] is 'ann', .* convert text to ids with megalith.hash_strings"),
        ([[1, None]], r"rows\[0\]\[1\] is None, not an integer: leave the value out"),
        ([[1, [2]]], "each row must be a flat list of numbers"),
        ([[2**63]], r"subtract 2\*\*64"),
        ([1, 2], r"rows\[0\] is 1: put the values of a row, also a single one, into a list"),
        (["ann"], r"rows\[0\] is 'ann': convert text to ids with megalith.hash_strings"),
        ([[1], None], r"rows\[1\] is None: a row without values is \[\]"),
        ("ann", "rows must be a list of lists, got str"),
        ({"a": [1]}, "rows must be a list of lists, got dict"),
    ],
    ids=repr,
)
def test_from_lists_names_what_is_not_an_id_and_the_remedy(rows: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        Ragged.from_lists(rows)


def test_from_lists_takes_floats_of_a_float_type_and_integers_of_any_kind() -> None:
    rows: Any = [torch.tensor([1, 2]), range(2), [], (torch.tensor(7),)]
    assert Ragged.from_lists(rows).to_lists() == [[1, 2], [0, 1], [], [7]]
    arrays: Any = [np.array([1, 2]), np.array([]), np.array([3])]
    assert Ragged.from_lists(arrays).to_lists() == [[1, 2], [], [3]]
    assert Ragged.from_lists([torch.arange(2), torch.empty(0)]).to_lists() == [[0, 1], []]
    for bad in ([np.array([1.5])], [torch.tensor([1.5])]):
        with pytest.raises(InputError, match=r"rows\[0\]\[0\] is .*1.5.*, not an integer"):
            Ragged.from_lists(bad)
    with pytest.raises(InputError, match=r"rows\[1\] is array\(2\): put the values of a row"):
        Ragged.from_lists([np.array([1]), np.array(2)])
    assert Ragged.from_lists([[1.5], [2]], dtype=torch.float32).to_lists() == [[1.5], [2.0]]
    assert Ragged.from_lists([[2**63 - 1, -(2**63)]]).to_lists() == [[2**63 - 1, -(2**63)]]
    with pytest.raises(InputError, match=r"fit torch.int8"):
        Ragged.from_lists([[300]], dtype=torch.int8)
    with pytest.raises(InputError, match=r"weights\[0\]\[0\] is 'a', not a number"):
        Ragged.from_lists([[1]], weights=[["a"]])  # type: ignore[list-item]
