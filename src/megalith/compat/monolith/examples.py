"""Monolith's Example, ExampleBatch and Instance messages, decoded into columns by native code.

The `.proto` files in `proto/` define the messages. v1 fids are converted to v2, lists of lists are flattened,
and bytes become ids by `hash_strings`. Raw features are not read. `MonolithReader` checks the values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from megalith.errors import NativeMissingError
from megalith.library import native_module

Kind = Literal["example", "example_batch", "instance"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NO_VALUES, IDS, FLOATS = 0, 1, 2
"""The kinds of a cell: without values (or missing), ids, or floats."""


class RecordColumn(NamedTuple):
    """The cells of one name: kinds uint8 [rows], lengths int64 [rows], and the values of all cells.

    A cell has its values in `ids` (int64) or in `floats` (float32), by its kind.
    """

    ids: NDArray[np.int64]
    floats: NDArray[np.float32]
    kinds: NDArray[np.uint8]
    lengths: NDArray[np.int64]


class RecordError(NamedTuple):
    """Why a record cannot be read. record: its index in the call. byte: the position in the record."""

    record: int
    byte: int
    problem: str


class DecodedRecords(NamedTuple):
    """The rows of some records.

    columns: one for each wanted name. labels, weights: float32 [rows]; a missing label is NaN, a missing
    weight 1. times: int64 [rows], the req_time of the line id where has_time, uint8 [rows], is 1.
    rows: int64 [records], the number of rows of each record. errors: the records that cannot be read; they
    have no rows.
    """

    columns: list[RecordColumn]
    labels: NDArray[np.float32]
    weights: NDArray[np.float32]
    times: NDArray[np.int64]
    has_time: NDArray[np.uint8]
    rows: NDArray[np.int64]
    errors: list[RecordError]


def decode_records(
    kind: Kind, messages: Sequence[bytes], names: Sequence[str], *, label_index: int = 0
) -> DecodedRecords:
    """Decode serialized messages into columns; the GIL is released meanwhile."""
    native = native_module()
    if native is None:
        raise NativeMissingError("Monolith records need megalith's native module, which is not built here")
    decoded = DecodedRecords(
        *native.decode_records(KINDS.index(kind), list(messages), list(names), label_index)
    )
    return decoded._replace(
        columns=[RecordColumn(*column) for column in decoded.columns],
        errors=[RecordError(*error) for error in decoded.errors],
    )
