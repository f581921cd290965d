"""Messages of parameter sync: pushed rows as PredictRequests, and back.

A `PushMessage` is rows, removed ids and dense weights. It travels as the inputs of signature
`hashtable_assign` (named by table) or `raw_assign` (all tables in one). Requests are assembled from the
tensors' own memory, since protobuf would copy every row twice more. What arrives is hostile until `read_push`
has seen it.

`split_push` and `to_predict_request` are the same for Monolith's PushRequest.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.parameter_sync import PushRequest
from megalith.serving.proto.schema import Message
from megalith.serving.proto.tensorflow import TensorProto
from megalith.serving.proto.tf_serving import ModelSpec, PredictRequest
from megalith.serving.proto.tf_tensors import DTYPES, Strings, to_tensor_proto
from megalith.serving.wire_names import HASHTABLE_ASSIGN, RAW_ASSIGN

MAX_PUSH_BYTES = 4 * 2**20
"""The largest request that is built, unless one dense weight alone is larger."""
PUSH_ROOM = MAX_PUSH_BYTES - (1 << 16)
"""What rows and dense weights may take of it; the rest is for names and shapes."""
DENSE = "dense:"

Inputs: TypeAlias = Mapping[str, Tensor | Sequence[Tensor]]
"""Tensors by name; several of one dtype travel as one, flat and in order."""
Given: TypeAlias = Mapping[str, Tensor | Strings]
_NO_IDS = torch.empty(0, dtype=torch.int64)


@dataclass(frozen=True)
class PushMessage:
    """What a message brings: rows {table: (ids int64 [n], float32 [n, dim])}, removed ids, dense weights."""

    rows: Mapping[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    removed: Mapping[str, Tensor] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def num_ids(self) -> int:
        """Ids with a row and ids without."""
        with_row = sum(ids.numel() for ids, _ in self.rows.values())
        return with_row + sum(ids.numel() for ids in self.removed.values())


def is_raw(signature: str) -> bool:
    """Whether a signature is raw_assign, perhaps below the name of a table set, as Monolith writes it."""
    return signature == RAW_ASSIGN or signature.endswith(f"/{RAW_ASSIGN}")


def is_assign(signature: str) -> bool:
    """Whether a signature writes rows."""
    return signature == HASHTABLE_ASSIGN or is_raw(signature)


# ---- building


def inputs_of(push: PushMessage, signature: str, tables: Iterable[str]) -> dict[str, Tensor | list[Tensor]]:
    """A push as inputs of a signature. tables: all of the target's, whose order raw_assign goes by."""
    dense = {f"{DENSE}{name}": weight for name, weight in push.dense.items()}
    if not is_raw(signature):
        named: dict[str, Tensor | list[Tensor]] = {}
        for table, (ids, rows) in push.rows.items():
            named |= {f"{table}_id": ids, f"{table}_value": rows}
        return named | {f"{table}:removed": ids for table, ids in push.removed.items()} | dense
    ordered = sorted(tables)
    rows_of = [push.rows.get(table, (_NO_IDS, torch.empty(0))) for table in ordered]
    removed = [push.removed.get(table, _NO_IDS) for table in ordered]
    raw: dict[str, Tensor | list[Tensor]] = {
        "id": [ids for ids, _ in rows_of],
        "id_split": _splits(ids.numel() for ids, _ in rows_of),
        "flat_value": [rows.reshape(-1) for _, rows in rows_of],
    }
    if any(ids.numel() for ids in removed):
        raw |= {"removed": removed, "removed_split": _splits(ids.numel() for ids in removed)}
    return raw | dense


def encode_request(model: str, signature: str, inputs: Inputs) -> bytes:
    """A serialised PredictRequest; each tensor is copied once, into it."""
    spec = ModelSpec(name=model, signature_name=signature).SerializeToString()
    parts: list[bytes | memoryview] = [_field(1, len(spec)), spec]
    for name, given in inputs.items():
        tensors = [given] if isinstance(given, Tensor) else list(given)
        contents = [_memory(tensor) for tensor in tensors]
        shape = given.shape if isinstance(given, Tensor) else (sum(t.numel() for t in tensors),)
        head = _head(tensors[0].dtype, shape)
        size = sum(len(content) for content in contents)
        start = _field(4, size) if size else b""
        key = name.encode()
        value_bytes = len(head) + len(start) + size
        entry = [_field(1, len(key)), key, _field(2, value_bytes), head, start]
        parts += [_field(2, sum(map(len, entry)) + size), *entry, *contents]
    return b"".join(parts)


def _head(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    proto = TensorProto(dtype=DTYPES[dtype])
    proto.tensor_shape.SetInParent()
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    data: bytes = proto.SerializeToString()
    return data


def _memory(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def _field(number: int, length: int) -> bytes:
    """The tag of a length-delimited field, and its length."""
    out = bytearray([number << 3 | 2])
    while length >= 0x80:
        out.append(length & 0x7F | 0x80)
        length >>= 7
    out.append(length)
    return bytes(out)


def _splits(sizes: Iterable[int]) -> Tensor:
    return torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int64))


# ---- reading


def read_push(
    signature: str, inputs: Given, dims: Mapping[str, int], dense: Mapping[str, Sequence[int]]
) -> PushMessage:
    """The push that inputs of a signature hold. dims: of the tables; dense: shapes of the dense weights.

    Raises InputError naming the input that is unknown, missing, or of another type or shape.
    """
    left = dict(inputs)
    read = _read_raw if is_raw(signature) else _read_named
    rows, removed = read(left, dims)
    weights = {}
    for name, shape in dense.items():
        weight = left.pop(f"{DENSE}{name}", None)
        if weight is None:
            continue
        if not isinstance(weight, Tensor) or tuple(weight.shape) != tuple(shape):
            raise InputError(f"input {DENSE + name!r} must be a tensor {list(shape)}, got {_told(weight)}")
        weights[name] = weight
    if left:
        raise InputError(
            f"unknown input {min(left)[:100]!r} of signature {signature[:100]!r}; "
            f"tables here: {', '.join(sorted(dims))}"
        )
    return PushMessage(rows, removed, weights)


def result_of(push: PushMessage, signature: str) -> dict[str, Tensor]:
    """What an assign answers: the number of ids of each table, or 0."""
    if is_raw(signature):
        return {"result": torch.zeros(1, dtype=torch.int64)}
    return {f"{table}_result": torch.tensor([ids.numel()]) for table, (ids, _) in push.rows.items()}


Read: TypeAlias = tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]


def _read_named(left: dict[str, Tensor | Strings], dims: Mapping[str, int]) -> Read:
    rows, removed = {}, {}
    for table, dim in dims.items():
        name, value = f"{table}_id", f"{table}_value"
        if name in left or value in left:
            ids = _ids(left, name)
            rows[table] = (ids, _floats(left, value, (ids.numel(), dim)))
        if f"{table}:removed" in left:
            removed[table] = _ids(left, f"{table}:removed")
    return rows, removed


def _read_raw(left: dict[str, Tensor | Strings], dims: Mapping[str, int]) -> Read:
    tables = sorted(dims)
    parts = _cut(left, "id", "id_split", len(tables))
    sizes = [ids.numel() * dims[table] for table, ids in zip(tables, parts, strict=True)]
    flat = _floats(left, "flat_value", (sum(sizes),))
    rows = {
        table: (ids, values.view(ids.numel(), dims[table]))
        for table, ids, values in zip(tables, parts, flat.split(sizes), strict=True)
        if ids.numel()
    }
    if "removed" not in left and "removed_split" not in left:
        return rows, {}
    gone = _cut(left, "removed", "removed_split", len(tables))
    return rows, {table: ids for table, ids in zip(tables, gone, strict=True) if ids.numel()}


def _cut(left: dict[str, Tensor | Strings], name: str, split: str, tables: int) -> list[Tensor]:
    """One tensor of ids per table."""
    ids, splits = _ids(left, name), _ids(left, split)
    sizes = splits.diff() if splits.numel() else splits
    ends = splits.numel() == tables + 1 and int(splits[0]) == 0 and int(splits[-1]) == ids.numel()
    # Each split within the ids, so that no difference of hostile ones wraps around to a fitting size.
    if not ends or bool(((splits < 0) | (splits > ids.numel())).any()) or bool((sizes < 0).any()):
        raise InputError(
            f"input {split!r} must be {tables + 1} numbers that go up from 0 to the {ids.numel()} of {name!r}"
        )
    return list(ids.split(sizes.tolist()))


def _ids(left: dict[str, Tensor | Strings], name: str) -> Tensor:
    given = left.pop(name, None)
    if not isinstance(given, Tensor) or given.dtype not in (torch.int64, torch.uint64) or given.dim() != 1:
        raise InputError(f"input {name!r} must be int64 [n], got {_told(given)}")
    return given.view(torch.int64)


def _floats(left: dict[str, Tensor | Strings], name: str, shape: tuple[int, ...]) -> Tensor:
    given = left.pop(name, None)
    if not isinstance(given, Tensor) or given.dtype != torch.float32 or tuple(given.shape) != shape:
        raise InputError(f"input {name!r} must be float32 {list(shape)}, got {_told(given)}")
    return given


def _told(given: object) -> str:
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    return "nothing" if given is None else "strings"


# ---- Monolith's PushRequest


def split_push(request: Message, limit: int = MAX_PUSH_BYTES) -> list[Message]:
    """A PushRequest in pieces, where it takes more than `limit` bytes.

    There are size / limit of them, rounded up; every table is cut into as many parts of equal length, of
    which the last has the rest.
    """
    count = math.ceil(request.ByteSize() / limit)
    if count <= 1:
        return [request]
    pieces = []
    for number in range(count):
        piece = PushRequest()
        piece.CopyFrom(request)
        for deltas in (piece.delta_hash_tables, piece.delta_multi_hash_tables):
            for delta in deltas:
                each = len(delta.fids) // count
                begin, end = number * each, (number + 1) * each if number < count - 1 else len(delta.fids)
                ids, values = delta.fids[begin:end], delta.embeddings
                del delta.fids[:]
                delta.fids.extend(ids)
                kept = values[begin * delta.dim_size : end * delta.dim_size]
                del delta.embeddings[:]
                delta.embeddings.extend(kept)
        pieces.append(piece)
    return pieces


def to_predict_request(request: Message) -> Message:
    """The PredictRequest of a PushRequest: hashtable_assign's inputs, or raw_assign's for multi tables.

    Raises InputError if a delta has not dim_size values an id.
    """
    predict = PredictRequest()
    predict.model_spec.name = request.model_name
    predict.model_spec.signature_name = request.signature_name
    inputs: dict[str, Tensor] = {}
    for delta in request.delta_hash_tables:
        ids, rows = _delta(delta)
        inputs |= {f"{delta.unique_id}_id": ids, f"{delta.unique_id}_value": rows}
    if request.delta_multi_hash_tables:
        deltas = [_delta(delta) for delta in request.delta_multi_hash_tables]
        inputs["id"] = torch.cat([ids for ids, _ in deltas])
        inputs["id_split"] = _splits(ids.numel() for ids, _ in deltas)
        inputs["flat_value"] = torch.cat([rows.reshape(-1) for _, rows in deltas])
    for name, tensor in inputs.items():
        predict.inputs[name].CopyFrom(to_tensor_proto(tensor))
    return predict


def _delta(delta: Message) -> tuple[Tensor, Tensor]:
    count, dim = len(delta.fids), delta.dim_size
    if dim < 0 or len(delta.embeddings) != count * dim:
        raise InputError(
            f"table {delta.unique_id[:100]!r}: {len(delta.embeddings)} values for {count} ids of dim {dim}"
        )
    ids = torch.from_numpy(np.fromiter(delta.fids, np.int64, count))
    rows = torch.from_numpy(np.fromiter(delta.embeddings, np.float32, count * dim))
    return ids, rows.view(count, dim)
