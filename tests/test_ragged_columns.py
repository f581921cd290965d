"""Ragged from columns of Arrow, pandas, polars and numpy, compared with the plain loop over Python lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset, default_collate

from megalith import SGD, EmbeddingCollection, Feature, Ragged, TableConfig, hash_strings
from megalith.errors import InputError
from tests.fixed_examples import fixed_examples

Row = list[Any] | Any | None


def loop(rows: list[Row]) -> list[list[int]]:
    """The ids of rows, one value after the other."""
    ids: list[list[int]] = []
    for row in rows:
        values = row if isinstance(row, list) else [row]
        known = [value for value in values if value is not None]
        ids.append([int(hash_strings([x])[0]) if isinstance(x, str) else x for x in known])
    return ids


def objects(rows: list[Row]) -> np.ndarray[Any, Any]:
    array = np.empty(len(rows), object)
    array[:] = rows
    return array


CONVERSIONS: dict[str, Callable[[list[Row]], Ragged]] = {
    "arrow": lambda rows: Ragged.from_arrow(pa.array(rows)),
    "chunked": lambda rows: Ragged.from_arrow(pa.chunked_array([pa.array(rows)[:2], pa.array(rows)[2:]])),
    "capsule": lambda rows: Ragged.from_arrow(pl.Series(rows, strict=False)),
    "pandas": lambda rows: Ragged.from_pandas(pd.Series(objects(rows))),
    "polars": lambda rows: Ragged.from_polars(pl.Series(rows, strict=False)),
    "numpy": lambda rows: Ragged.from_numpy(objects(rows)),
}
ID = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x00"), max_size=4)


def columns(values: Any) -> Any:
    rows = st.lists(st.none() | values, min_size=1, max_size=8)
    lists = st.lists(st.none() | st.lists(st.none() | values, max_size=3), min_size=1, max_size=8)
    return (rows | lists).filter(lambda rows: any(x is not None and x != [] for x in rows))


@pytest.mark.parametrize("kind", CONVERSIONS)
@fixed_examples(40)
@given(rows=columns(ID) | columns(TEXT))
def test_columns_of_ids_and_texts_are_those_of_a_plain_loop(kind: str, rows: list[Row]) -> None:
    ragged = CONVERSIONS[kind](rows)
    assert ragged.values.dtype == torch.int64
    assert ragged.to_lists() == loop(rows)
    assert ragged.single == (not any(isinstance(x, list) for x in rows) and None not in rows)


@pytest.mark.parametrize(
    ("series", "rows"),
    [
        (pd.Series([1, None, 3], dtype="Int64"), [[1], [], [3]]),
        (pd.Series([2**64 - 1], dtype="uint64"), [[-1]]),
        (pd.Series(["b", "a", None, "b"], dtype="category"), loop(["b", "a", None, "b"])),
        (pd.Series(["a", None], dtype="string"), loop(["a", None])),
        (pd.Series([7, 8, 7], dtype="category"), [[7], [8], [7]]),
        (pd.Series([1, 2], dtype=pd.ArrowDtype(pa.int8())), [[1], [2]]),
        (pd.Series([True, False], index=[5, 3]), [[1], [0]]),
        (pl.Series(["b", "a", None], dtype=pl.Categorical), loop(["b", "a", None])),
        (pl.Series([[1], None, []], dtype=pl.List(pl.UInt8)), [[1], [], []]),
        (pl.Series([[1, 2], [3, 4]], dtype=pl.Array(pl.Int64, 2)), [[1, 2], [3, 4]]),
        (np.array([3, -1], np.int16), [[3], [-1]]),
        (np.array([[1, 2], [3, 4]], np.uint64), [[1, 2], [3, 4]]),
        (np.array(["a", "b"]), loop(["a", "b"])),
        (np.array([[b"a", b"b"]]), loop([["a", "b"]])),
        (np.arange(6)[::-2], [[5], [3], [1]]),
        (np.array([], np.int64), []),
    ],
    ids=range(16),
)
def test_types_of_columns(series: Any, rows: list[list[int]]) -> None:
    name = {"pandas": "from_pandas", "polars": "from_polars"}.get(type(series).__module__.split(".")[0])
    assert getattr(Ragged, name or "from_numpy")(series).to_lists() == rows


def test_texts_of_hashed_ids_and_options() -> None:
    texts: dict[int, str] = {}
    ragged = Ragged.from_pandas(pd.Series(["ann", None, "bob"]), texts=texts)
    assert [[texts[id] for id in row] for row in ragged.to_lists()] == [["ann"], [], ["bob"]]
    assert Ragged.from_polars(pl.Series(["a|b", ""]), separator="|", texts=texts).to_lists() == loop(
        [["a", "b"], []]
    )
    assert Ragged.from_numpy(np.array([7]), hash=True, texts=texts).to_lists() == loop(["7"])
    assert Ragged.from_numpy(np.array(["x"]), texts=texts).to_lists() == loop(["x"])
    assert sorted(texts.values()) == ["7", "a", "ann", "b", "bob", "x"]
    assert Ragged.from_arrow(pa.array(["12", None]), hash=False, texts=texts).to_lists() == [[12], []]
    weighted = Ragged.from_arrow(pa.array([[1, None], [3]]), weights=pa.array([[0.5, 9.0], [2.0]]))
    assert weighted.to_lists() == [[1], [3]]
    assert weighted.weights is not None
    assert weighted.weights.tolist() == [0.5, 2.0]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ragged.from_arrow([1, 2]), "column must be an Arrow array or have its PyCapsule interface"),
        (lambda: Ragged.from_arrow(pa.array([1.5])), r"the column holds double; ids are integers or text"),
        (
            lambda: Ragged.from_arrow(pa.array(["1", "x"]), hash=False),
            "row 1 of the column holds 'x', is not a",
        ),
        (
            lambda: Ragged.from_arrow(pa.array([[1]]), weights=pa.array([[1.0, 2.0]])),
            "one number for each value",
        ),
        (lambda: Ragged.from_arrow(pa.array([1]), texts=[]), "texts must be a dict"),
        (
            lambda: Ragged.from_pandas(pd.Series([1, None])),
            r'floats: convert them with series.astype\("Int64"\)',
        ),
        (lambda: Ragged.from_pandas(pd.DataFrame({"a": [1]})), "must be a pandas Series, got DataFrame"),
        (lambda: Ragged.from_pandas(pd.Series([1, "a"])), "values of several types"),
        (lambda: Ragged.from_polars([1]), "must be a polars Series, got list"),
        (lambda: Ragged.from_numpy(np.array([0.5])), "the array holds float64; ids are integers or text"),
        (lambda: Ragged.from_numpy(np.zeros((1, 1, 1))), r"\[batch\] or \[batch, length\], got \[1, 1, 1\]"),
    ],
)
def test_columns_that_are_no_ids(make: Callable[[], Ragged], message: str) -> None:
    with pytest.raises(InputError, match=message):
        make()


def test_numpy_arrays_are_accepted_where_tensors_are() -> None:
    values, splits = np.array([1, 2, 3]), np.array([0, 2, 3])
    assert Ragged(values, splits, np.ones(3, np.float32)).to_lists() == [[1, 2], [3]]
    assert Ragged.from_lengths(values, np.array([1, 2])).to_lists() == [[1], [2, 3]]
    assert Ragged.from_padded(np.array([[1, 0], [2, 3]])).to_lists() == [[1], [2, 3]]
    frozen = np.array([4, 5])
    frozen.flags.writeable = False
    assert Ragged.from_lengths(frozen, np.array([2])).to_lists() == [[4, 5]]

    rows = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD(0.1))], [Feature("f", "t")])
    expected = rows({"f": Ragged.from_lists([[1, 2], [3]])})["f"]
    for column in ([torch.tensor([1, 2]), torch.tensor([3])], [[1, 2], [3]], np.array([[1, 2], [3, -1]])):
        assert torch.equal(rows({"f": column})["f"], expected)
    assert torch.equal(rows({"f": np.array([1, 3])})["f"], rows({"f": torch.tensor([1, 3])})["f"])


@fixed_examples(20)
@given(rows=st.lists(st.lists(ID, max_size=3), min_size=1, max_size=5))
def test_nested_tensors_and_lists_of_tensors_give_the_rows_back(rows: list[list[int]]) -> None:
    ragged = Ragged.from_lists(rows)
    nested = ragged.to_nested()
    assert nested.layout == torch.jagged
    assert [row.tolist() for row in nested.unbind()] == rows
    assert Ragged.from_nested(nested).to_lists() == rows
    assert Ragged.from_lists([torch.tensor(row, dtype=torch.int64) for row in rows]).to_lists() == rows


def test_a_ragged_is_a_pytree_node() -> None:
    plain = Ragged.from_lists([[1, 2], []])
    weighted = Ragged.from_lists([[1, 2], []], weights=[[0.5, 1.0], []])
    single = Ragged.from_numpy(np.array([1, 2]))
    tree = {"a": plain, "b": [weighted, single]}
    leaves, spec = pytree.tree_flatten(tree)
    assert [len(leaf) for leaf in leaves] == [2, 3, 2, 3, 2, 2, 3]
    back = pytree.tree_unflatten(leaves, spec)
    assert back["a"].weights is None
    assert back["b"][0].weights.tolist() == [0.5, 1.0]
    doubled = pytree.tree_map(lambda x: x * 2, tree)
    assert doubled["b"][1].to_lists() == pytree.tree_map(lambda x: x * 2, single).to_lists()
    assert pytree.tree_map(str, tree)["a"].values == "tensor([1, 2])", "leaves may be of any type"


class Rows(Dataset[Any]):
    """Row i has i ids."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        return {"ids": Ragged.from_lists([[7] * index]), "label": float(index)}


def test_collate_pin_and_move_keep_every_row() -> None:
    batches = list(DataLoader(Rows(), batch_size=3))
    assert [batch["ids"].to_lists() for batch in batches] == [[[], [7], [7, 7]], [[7] * 3, [7] * 4]]
    joined = default_collate([{"ids": Ragged.from_lists([[1]])}, {"ids": Ragged.from_lists([[], [2, 3]])}])
    assert joined["ids"].to_lists() == [[1], [], [2, 3]]
    single = Ragged.from_numpy(np.array([1, 2]))
    assert single.to("cpu", non_blocking=True).single
    assert single.to("meta", non_blocking=True).device.type == "meta"
