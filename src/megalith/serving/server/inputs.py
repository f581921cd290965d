"""Inputs: reads the tensors of requests into columns of a model, and many requests into one batch.

A feature is sent as `name` [B] with one id per row; or as [B, L], padded with the feature's pad; or as values
[n] with `name:row_splits` [B + 1]. Weights are sent as `name:weights`, shaped like the values. Ids are
integers, or strings, which are hashed. Dense values are floats [B, k].

Columns are bytes, so most requests are read without creating a tensor (score_messages.py), and a batch is a
concatenation of bytes. Input is untrusted until validated: an InputError names the input.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import InputError
from megalith.hashing import hash_strings
from megalith.library import native_module
from megalith.ragged import Ragged
from megalith.serving.export.signature import FeatureSpec, Signature
from megalith.serving.proto.infer_tensors import from_infer_request
from megalith.serving.proto.limits import MAX_BYTES
from megalith.serving.proto.message_bytes import ScoreMessage
from megalith.serving.proto.message_types import Message
from megalith.serving.proto.tf_tensors import Strings, from_tensor_protos

SPLITS, WEIGHTS = ":row_splits", ":weights"
Inputs = Mapping[str, Tensor | Strings]
_EXPECTED = {
    "integer": "integers, not strings: they were integers in training, and the hash of a text is another id",
    "fid": "integers, not strings: the results of megalith.fid(slot, id), as in training",
    "xxhash64": "strings, not numbers: the ids were hashes of text in training; send integers as text",
}
_INTEGERS = {torch.int64, torch.int32, torch.int16, torch.int8}
_INTEGERS |= {torch.uint64, torch.uint32, torch.uint16, torch.uint8}


@dataclass(frozen=True, slots=True)
class Column:
    """A feature of a request, as bytes: ids int64, weights float32, and the int64 lengths of its rows.

    Without lengths every row has one id.
    """

    ids: bytes
    lengths: bytes | None = None
    weights: bytes | None = None

    def piece(self, begin: int, end: int) -> Column:
        lengths, first, last = None, begin, end
        if self.lengths is not None:
            lengths = self.lengths[8 * begin : 8 * end]
            every = np.frombuffer(self.lengths, np.int64)
            first, last = int(every[:begin].sum()), int(every[:end].sum())
        weights = None if self.weights is None else self.weights[4 * first : 4 * last]
        return Column(self.ids[8 * first : 8 * last], lengths, weights)


@dataclass(frozen=True, slots=True)
class Rows:
    count: int
    """Number of rows."""
    columns: tuple[Column | None, ...]
    """The features in the signature's order; None: the request lacks the feature."""
    dense: bytes | None
    """Dense values, float32 [count, num_dense]."""
    cost: int
    """Bytes that the embedding rows of all ids and the dense values take."""
    plain: bytes | None = None
    """The ids instead of columns, if every feature has one id per row and no weights: bytes of int64
    [features, count], in the order of `InputReader.plain_features`."""


class InputReader:
    """Reads the requests to one model, and concatenates them."""

    def __init__(self, signature: Signature, *, max_bytes: int = MAX_BYTES, refuse_nan: bool = False) -> None:
        self._refuse_nan = refuse_nan
        self.features = signature.features
        self.names = tuple(feature.name for feature in signature.features)
        self.num_dense = signature.num_dense
        self.dense_name = signature.dense_name
        self.max_bytes = max_bytes
        self._position = {name: k for k, name in enumerate(self.names)}
        self._dims = tuple(signature.tables[feature.table].dim for feature in signature.features)
        self._row_bytes = 4 * sum(self._dims)
        by_table: dict[str, list[str]] = {}
        for feature in signature.features:
            by_table.setdefault(feature.table, []).append(feature.name)
        self.plain_features = tuple(name for own in by_table.values() for name in own)
        """The features in the order of the tables, as `Servable.plain_features`."""
        self._place = {name: k for k, name in enumerate(self.plain_features)}
        self._takes_plain = bool(self.plain_features) and not any(
            feature.shared for feature in signature.features
        )
        native: Any = native_module()
        hashes = any(feature.ids == "xxhash64" for feature in signature.features)
        self._native: Any = None
        if native is not None and self._takes_plain and not hashes:
            self._native = native.ScoreReader(list(self.plain_features), self.dense_name, self.num_dense)

    def read_message(self, message: ScoreMessage) -> Rows | None:
        """Read the inputs of a request in the usual form in one native pass."""
        found = None if self._native is None else self._native.read(message)
        if found is None:
            return None
        count, ids, dense = found
        if len(ids) + len(dense) > self.max_bytes:
            return None  # protobuf's path has the error, which names the input
        rows = self._plain_rows(count, ids, dense if self.num_dense else None)
        return self._check_cost(rows) if self._refuse_nan or rows.cost > self.max_bytes else rows

    def read_protos(self, protos: Mapping[str, Message]) -> Rows:
        return self.read(from_tensor_protos(protos, max_bytes=self.max_bytes))

    def read_infer(self, request: Message) -> Rows:
        return self.read(from_infer_request(request, max_bytes=self.max_bytes))

    def read(self, inputs: Inputs) -> Rows:
        """Read inputs that are decoded already."""
        for name in inputs:
            self._check_known(name, inputs)
        counts: dict[str, int] = {}
        columns: list[Column | None] = []
        for feature in self.features:
            if feature.name not in inputs:
                columns.append(None)
                continue
            column, count = _read_column(feature, inputs)
            columns.append(column)
            if not feature.shared:
                counts[feature.name] = count
            elif count != 1:
                raise InputError(
                    f"input {feature.name!r} is shared by the batch: it must have 1 row, not {count}"
                )
        if self.names and not any(columns):
            raise InputError(f"the request has none of the model's features {_shorten(self.names)}")
        dense = None
        if self.num_dense:
            dense, counts[self.dense_name] = self._read_dense(inputs)
        count = next(iter(counts.values()), 1)
        for name, other in counts.items():
            if other != count:
                first = next(iter(counts))
                raise InputError(f"input {name!r} has {other} rows, but {first!r} has {count}")
        return self._check_cost(self._rows_of(count, tuple(columns), dense))

    def pieces(self, rows: Rows, size: int) -> list[Rows]:
        if rows.count <= size:
            return [rows]
        ends = [*range(size, rows.count, size), rows.count]
        return [self._piece(rows, begin, end) for begin, end in zip([0, *ends], ends, strict=False)]

    def join(self, batch: Sequence[Rows]) -> tuple[dict[str, Ragged | Tensor], Tensor | None]:
        """Concatenate the features and the dense values of requests."""
        # returns: features by name, and the dense values float32 [B, num_dense].
        features: dict[str, Ragged | Tensor] = {}
        if all(rows.plain is not None for rows in batch):
            for name in self.names:
                features[name] = _int64([self._column(rows, name).ids for rows in batch])  # type: ignore[union-attr]
        else:
            for k, name in enumerate(self.names):
                shared = self.features[k].shared
                features[name] = _concatenate(
                    [(self._column(r, name), 1 if shared else r.count) for r in batch]
                )
        return features, self.join_dense(batch)

    def join_dense(self, batch: Sequence[Rows]) -> Tensor | None:
        # returns: float32 [B, num_dense].
        if not self.num_dense:
            return None
        return _float32([rows.dense or b"" for rows in batch]).view(-1, self.num_dense)

    def _column(self, rows: Rows, name: str) -> Column | None:
        if rows.plain is None:
            return rows.columns[self._position[name]]
        at, width = self._place[name], 8 * rows.count
        return Column(rows.plain[at * width : (at + 1) * width])

    def missing(self, rows: Rows) -> list[str]:
        if rows.plain is not None:
            return []
        return [name for name, column in zip(self.names, rows.columns, strict=True) if column is None]

    def _rows_of(self, count: int, columns: tuple[Column | None, ...], dense: bytes | None) -> Rows:
        """Return rows, plain ones if every feature has one id for each row."""
        ids = []
        if self._takes_plain and count:
            for name in self.plain_features:
                column = columns[self._position[name]]
                if column is None or column.lengths is not None or column.weights is not None:
                    return self._rows(count, columns, dense)
                ids.append(column.ids)
            return self._plain_rows(count, b"".join(ids), dense)
        return self._rows(count, columns, dense)

    def _rows(self, count: int, columns: tuple[Column | None, ...], dense: bytes | None) -> Rows:
        given = zip(columns, self._dims, strict=True)
        values = sum(len(column.ids) // 8 * dim for column, dim in given if column is not None)
        return Rows(count, columns, dense, 4 * values + len(dense or b""))

    def _plain_rows(self, count: int, ids: bytes, dense: bytes | None) -> Rows:
        return Rows(count, (), dense, count * self._row_bytes + len(dense or b""), ids)

    def _check_cost(self, rows: Rows) -> Rows:
        if self._refuse_nan and not np.isfinite(np.frombuffer(rows.dense or b"", np.float32)).all():
            raise InputError(f"input {self.dense_name!r} holds NaN or infinity")
        # A few bytes can represent many ids: TensorProto repeats the last of its typed values.
        if rows.cost > self.max_bytes:
            raise InputError(
                f"the rows of the request's ids and its dense values take {rows.cost} bytes, more than the "
                f"limit of {self.max_bytes}; send the request in parts"
            )
        return rows

    def _piece(self, rows: Rows, begin: int, end: int) -> Rows:
        width = 4 * self.num_dense
        dense = None if rows.dense is None else rows.dense[begin * width : end * width]
        if rows.plain is not None:
            every = np.frombuffer(rows.plain, np.int64).reshape(-1, rows.count)
            return self._plain_rows(end - begin, every[:, begin:end].tobytes(), dense)
        columns = (
            column if column is None or feature.shared else column.piece(begin, end)
            for feature, column in zip(self.features, rows.columns, strict=True)
        )
        return self._rows(end - begin, tuple(columns), dense)

    def _check_known(self, name: str, inputs: Inputs) -> None:
        if name in self._position or (name == self.dense_name and self.num_dense):
            return
        for suffix in (SPLITS, WEIGHTS):
            feature = name.removesuffix(suffix)
            if name.endswith(suffix) and feature in self._position:
                if feature not in inputs:
                    raise InputError(f"input {name!r} is given without {feature!r}")
                return
        dense = (self.dense_name,) if self.num_dense else ()
        raise InputError(f"input {name[:100]!r} is unknown; the model takes {_shorten(self.names + dense)}")

    def _read_dense(self, inputs: Inputs) -> tuple[bytes, int]:
        name = self.dense_name
        given = inputs.get(name)
        if given is None:
            raise InputError(f"input {name!r} is missing: floats [rows, {self.num_dense}]")
        if not isinstance(given, Tensor) or given.dtype == torch.bool:
            raise InputError(f"input {name!r} must be floats [rows, {self.num_dense}]")
        if given.dim() != 2 or given.shape[1] != self.num_dense:
            raise InputError(f"input {name!r} must be [rows, {self.num_dense}], not {list(given.shape)}")
        return given.to(torch.float32).contiguous().numpy().tobytes(), given.shape[0]


def _read_column(feature: FeatureSpec, inputs: Inputs) -> tuple[Column, int]:
    """Read the column of a feature; return it and its number of rows."""
    name = feature.name
    ids, absent = _ids(feature, inputs[name])
    given = inputs.get(name + WEIGHTS)
    weights = None if given is None else _weights(name, given, ids.shape)
    if name + SPLITS in inputs:
        if ids.ndim != 1:
            raise InputError(f"input {name!r} has row_splits, so it must be [values], not {list(ids.shape)}")
        lengths = _lengths(name, inputs[name + SPLITS], ids.size)
    elif ids.ndim == 2:
        kept = ~absent
        lengths = kept.sum(1, dtype=np.int64)
        ids = ids[kept]
        weights = None if weights is None else weights[kept]
    elif ids.ndim == 1:
        return Column(ids.tobytes(), None, None if weights is None else weights.tobytes()), ids.size
    else:
        raise InputError(f"input {name!r} must be [rows] or [rows, length], not {list(ids.shape)}")
    return (
        Column(ids.tobytes(), lengths.tobytes(), None if weights is None else weights.tobytes()),
        lengths.size,
    )


def _ids(feature: FeatureSpec, given: Tensor | Strings) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Return ids of any shape, and where they are padding: the feature's pad, or an empty string."""
    is_text = not isinstance(given, Tensor)
    if feature.ids is not None and is_text != (feature.ids == "xxhash64"):
        raise InputError(f"input {feature.name!r} must be {_EXPECTED[feature.ids]}")
    if not isinstance(given, Tensor):
        ids: NDArray[np.int64] = hash_strings(given).numpy()
        return ids, np.asarray(given == b"", dtype=bool).reshape(given.shape)
    if given.dtype not in _INTEGERS:
        raise InputError(f"input {feature.name!r} must be integers or strings, not {given.dtype}")
    array = given.numpy()
    ids = array.view(np.int64) if array.dtype == np.uint64 else array.astype(np.int64, copy=False)
    return ids, ids == feature.pad


def _weights(name: str, given: Tensor | Strings, shape: tuple[int, ...]) -> NDArray[np.float32]:
    if not isinstance(given, Tensor) or not given.is_floating_point():
        raise InputError(f"input {name + WEIGHTS!r} must be floats")
    if tuple(given.shape) != tuple(shape):
        raise InputError(
            f"input {name + WEIGHTS!r} must be {list(shape)} like {name!r}, not {list(given.shape)}"
        )
    array: NDArray[np.float32] = given.to(torch.float32).numpy()
    return array


def _lengths(name: str, given: Tensor | Strings, num_values: int) -> NDArray[np.int64]:
    name = name + SPLITS
    if not isinstance(given, Tensor) or given.dtype not in (torch.int64, torch.int32) or given.dim() != 1:
        raise InputError(f"input {name!r} must be int64 [rows + 1]")
    splits = given.numpy().astype(np.int64, copy=False)
    if not splits.size or splits[0] != 0 or splits[-1] != num_values or (splits[1:] < splits[:-1]).any():
        raise InputError(
            f"input {name!r} must start at 0, end at {num_values} (the number of values) and not decrease"
        )
    return np.diff(splits)


def _concatenate(columns: Sequence[tuple[Column | None, int]]) -> Ragged:
    """Concatenate a feature of several requests; a request without it has empty rows."""
    ids, lengths = [], []
    for column, count in columns:
        if column is None:
            lengths.append(np.zeros(count, np.int64))
            continue
        ids.append(column.ids)
        given = column.lengths
        lengths.append(np.ones(count, np.int64) if given is None else np.frombuffer(given, np.int64))
    values = _int64(ids)
    splits = np.zeros(sum(map(len, lengths)) + 1, np.int64)
    np.cumsum(np.concatenate(lengths), out=splits[1:])
    weights = None
    if any(column is not None and column.weights is not None for column, _ in columns):
        weights = _float32([_weights_of(column) for column, _ in columns if column is not None])
    return Ragged.trusted(values, torch.from_numpy(splits), weights)


def _weights_of(column: Column) -> bytes:
    if column.weights is not None:
        return column.weights
    return np.ones(len(column.ids) // 8, np.float32).tobytes()


def _int64(parts: Sequence[bytes]) -> Tensor:
    data = bytearray().join(parts)
    return (
        torch.frombuffer(data, dtype=torch.int64) if data else torch.empty(0, dtype=torch.int64, device="cpu")
    )


def _float32(parts: Sequence[bytes]) -> Tensor:
    data = bytearray().join(parts)
    return torch.frombuffer(data, dtype=torch.float32) if data else torch.empty(0, device="cpu")


def _shorten(names: Sequence[str]) -> str:
    shown = ", ".join(names[:20])
    return shown if len(names) <= 20 else f"{shown} and {len(names) - 20} more"


def inputs_of(signature: Signature) -> list[tuple[str, torch.dtype | None, list[int | None]]]:
    """Return the inputs of serving_default."""
    described: list[tuple[str, torch.dtype | None, list[int | None]]] = []
    for feature in signature.features:
        length: list[int | None] = [] if feature.single or feature.max_length == 1 else [None]
        dtype = None if feature.ids == "xxhash64" else torch.int64
        described.append((feature.name, dtype, [None, *length]))
    if signature.num_dense:
        described.append((signature.dense_name, torch.float32, [None, signature.num_dense]))
    return described
