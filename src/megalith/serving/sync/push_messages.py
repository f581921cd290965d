"""Push messages: rows, removed ids and dense weights as the inputs of a PredictRequest.

    signature        | input                  | value
    -----------------+------------------------+--------------------------------------------------
    hashtable_assign | {table}_id             | int64 [n]
                     | {table}_value          | float32 [n, dim], or
                     | {table}_code           | uint8 [n, bytes] for a table with codes (row_format.py)
                     | {table}:removed        | int64 [n], ids without a row
    raw_assign       | id, id_split           | int64 [n], tables sorted by name; int64 [t + 1]
                     | flat_value             | float32 [sum of n * dim], of tables without codes
                     | flat_code              | uint8 [sum of n * bytes], of tables with codes
                     | removed, removed_split | int64 [n], int64 [t + 1]
    both             | expected:{table}       | int64 [1], the ids of the interval from this message on
                     | dense:{name}           | a dense weight that fits into one message
                     | dense_part:{name}      | [k], consecutive elements of a larger one, in row-major order
                     | dense_begin:{name}     | int64 [1], the number of elements before them

The parts of a weight arrive in order, from 0 on; a part that begins at 0 starts the weight again. A part that
does not follow the one before it is refused, and a weight of which a part is missing is never used.

Requests are assembled without protobuf, which would copy every row twice more: rows are read from the table
into the memory of the request, and the server reads them from the memory of the received one. For that, large
contents begin at a multiple of 8 bytes: version numbers of 0, which mean nothing, fill the gap before them.
Received inputs are untrusted until `read_push` has validated them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError, MegalithError
from megalith.library import native_module
from megalith.serving.export.row_format import Formats, RowFormat
from megalith.serving.proto.message_bytes import LARGE
from megalith.serving.proto.message_types import ModelSpec, TensorProto
from megalith.serving.proto.tf_tensors import DTYPES, Strings, field_prefix
from megalith.serving.wire_names import HASHTABLE_ASSIGN, RAW_ASSIGN

DENSE_PART, DENSE_BEGIN = "dense_part:", "dense_begin:"


@dataclass(frozen=True)
class DensePart:
    """Consecutive elements of a dense weight."""

    begin: int  # The number of elements before them
    values: Tensor  # The elements, [k]


def split_weight(name: str, weight: Tensor, room: int) -> Iterator[dict[str, Tensor]]:
    """Divide a weight into parts."""
    flat = weight.reshape(-1)
    step = max(1, room // flat.element_size())
    for begin in range(0, flat.numel(), step):
        yield {
            f"{DENSE_PART}{name}": flat[begin : begin + step],
            f"{DENSE_BEGIN}{name}": torch.tensor([begin], device="cpu"),
        }


def read_dense_parts(left: dict[str, Tensor | Strings], names: Mapping[str, object]) -> dict[str, DensePart]:
    """Validate the parts of a message, and remove their inputs from `left`."""
    parts = {}
    for name in names:
        values, at = left.pop(f"{DENSE_PART}{name}", None), left.pop(f"{DENSE_BEGIN}{name}", None)
        if values is None and at is None:
            continue
        if not isinstance(values, Tensor) or values.dim() != 1 or not values.numel():
            raise InputError(f"input {DENSE_PART + name!r} must be a tensor [k] of at least one element")
        if not isinstance(at, Tensor) or at.dtype != torch.int64 or at.numel() != 1 or int(at) < 0:
            raise InputError(f"input {DENSE_BEGIN + name!r} must be one int64 of 0 or more")
        parts[name] = DensePart(int(at), values)
    return parts


class DenseAssembly:
    """The weights of one publisher of which some parts have arrived. Not safe to share between threads."""

    def __init__(self) -> None:
        self._weights: dict[str, Tensor] = {}
        self._filled: dict[str, int] = {}

    def add(
        self, parts: Mapping[str, DensePart], known: Mapping[str, Tensor], *, is_last: bool
    ) -> dict[str, Tensor]:
        """Add parts; return the weights that are complete with them. Change nothing if a part is wrong."""
        self._check(parts, known)
        if is_last:
            self.check_last(parts, known)
        complete = {}
        for name, part in parts.items():
            like, end = known[name], part.begin + part.values.numel()
            if part.begin == 0:
                self._weights[name] = torch.empty(like.numel(), dtype=like.dtype, device="cpu")
            self._weights[name][part.begin : end] = part.values
            self._filled[name] = end
            if end == like.numel():
                complete[name] = self._weights.pop(name).view(like.shape)
                del self._filled[name]
        return complete

    def _check(self, parts: Mapping[str, DensePart], known: Mapping[str, Tensor]) -> None:
        """Raise unless parts follow those before them."""
        for name, part in parts.items():
            like, count = known[name], part.values.numel()
            if part.values.dtype != like.dtype:
                raise InputError(f"dense weight {name!r}: a part is {part.values.dtype}, not {like.dtype}")
            if part.values.is_floating_point() and not bool(torch.isfinite(part.values).all()):
                raise InputError(f"dense weight {name!r}: a part holds NaN or Inf")
            begun = self._weights.get(name)
            same = begun is not None and (begun.dtype, begun.numel()) == (like.dtype, like.numel())
            expected = self._filled[name] if same else 0
            if part.begin not in (0, expected):
                raise InputError(
                    f"dense weight {name!r}: a part begins at element {part.begin}, not at {expected}"
                )
            if count > like.numel() - part.begin:
                raise InputError(f"dense weight {name!r}: its parts have more than {like.numel()} elements")

    def check_last(self, parts: Mapping[str, DensePart], known: Mapping[str, Tensor]) -> None:
        """Raise unless all weights are complete with the parts of a message; change nothing."""
        missing = set(self._weights) - set(parts)
        missing |= {n for n, part in parts.items() if part.begin + part.values.numel() < known[n].numel()}
        if missing:
            raise InputError(f"dense weight {min(missing)!r}: the interval ends before its last part")


MAX_PUSH_BYTES = 4 * 2**20  # The maximum size of a request
# The part of a request for rows and dense weights; the rest is for names and shapes
MAX_CONTENT_BYTES = MAX_PUSH_BYTES - (1 << 16)
DENSE, EXPECTED = "dense:", "expected:"

_ALIGNMENT = 8
_VERSION_NUMBER = 0x18  # the key of this varint field of a TensorProto


class NotFiniteRows(MegalithError):
    """Rows that were read into a message are not finite."""


@dataclass(frozen=True)
class DeferredRows:
    """Rows that are read directly into the memory of a message."""

    shape: tuple[int, int]  # The number of rows and of their columns
    # Writes the rows to float32 of this shape; returns False if one of them is not finite
    read_into: Callable[[Tensor], bool]

    dtype: ClassVar[torch.dtype] = torch.float32

    @property
    def nbytes(self) -> int:
        return 4 * self.numel()

    def numel(self) -> int:
        return self.shape[0] * self.shape[1]


Content: TypeAlias = Tensor | DeferredRows
# Contents by name. A sequence of contents of one dtype is sent as one flat tensor.
Inputs: TypeAlias = Mapping[str, Content | Sequence[Content]]
MessageInputs: TypeAlias = dict[str, Content | Sequence[Content]]
ReceivedInputs: TypeAlias = Mapping[str, Tensor | Strings]
_NO_IDS = torch.empty(0, dtype=torch.int64, device="cpu")
_NO_CODES: Formats = MappingProxyType({})


@dataclass(frozen=True)
class PushMessage:
    """The content of a message."""

    # The ids, int64 [n], and rows, float32 [n, dim], by table; of tables with codes uint8 [n, bytes], except
    # from Monolith's clients. Rows of a message to send may be deferred.
    rows: Mapping[str, tuple[Tensor, Any]] = field(default_factory=dict)
    # The ids that no longer have a row, int64 [n], by table
    removed: Mapping[str, Tensor] = field(default_factory=dict)
    dense: Mapping[str, Tensor] = field(default_factory=dict)  # The dense weights by name
    # The parts of dense weights that do not fit into a message, by name
    parts: Mapping[str, DensePart] = field(default_factory=dict)
    # The number of ids of each table in this message and the following ones of the interval, so that the
    # server can make room for them
    expected: Mapping[str, int] = field(default_factory=dict)

    @property
    def num_ids(self) -> int:
        """The number of ids with and without a row."""
        with_row = sum(ids.numel() for ids, _ in self.rows.values())
        return with_row + sum(ids.numel() for ids in self.removed.values())

    def encoded(self, codes: Formats) -> PushMessage:
        """Convert the rows of tables with codes."""
        # returns: the same message with codes, uint8 [n, bytes], instead of rows.
        rows = {
            table: (ids, codes[table].encode(values) if table in codes else values)
            for table, (ids, values) in self.rows.items()
        }
        return replace(self, rows=rows)

    def with_zero_rows(self, dims: Mapping[str, int]) -> PushMessage:
        """Replace removals by rows of zeros, which is how an absent id reads on Monolith's servers."""
        rows = dict(self.rows)
        for table, gone in self.removed.items():
            ids, values = rows.get(table, (_NO_IDS, torch.empty(0, dims[table], device="cpu")))
            zeros = values.new_zeros(gone.numel(), dims[table])
            rows[table] = (torch.cat([ids, gone]), torch.cat([values, zeros]))
        return PushMessage(rows, {}, self.dense)


def is_raw(signature: str) -> bool:
    """Return whether a signature is raw_assign, with or without Monolith's prefix of a table set."""
    return signature == RAW_ASSIGN or signature.endswith(f"/{RAW_ASSIGN}")


def is_assign(signature: str) -> bool:
    """Return whether a signature writes rows."""
    return signature == HASHTABLE_ASSIGN or is_raw(signature)


# ---- building


def inputs_of(push: PushMessage, signature: str, tables: Iterable[str]) -> MessageInputs:
    """Convert a push to the inputs of a signature."""
    rest: MessageInputs = {
        f"{EXPECTED}{table}": torch.tensor([n], device="cpu") for table, n in push.expected.items()
    }
    rest |= {f"{DENSE}{name}": weight for name, weight in push.dense.items()}
    if not is_raw(signature):
        named: MessageInputs = {}
        for table, (ids, rows) in push.rows.items():
            named |= {f"{table}_id": ids, f"{table}_{'code' if _is_code(rows) else 'value'}": rows}
        return named | {f"{table}:removed": ids for table, ids in push.removed.items()} | rest
    ordered = sorted(tables)
    rows_of = [push.rows.get(table, (_NO_IDS, torch.empty(0, device="cpu"))) for table in ordered]
    removed = [push.removed.get(table, _NO_IDS) for table in ordered]
    raw: MessageInputs = {
        # An entry has no tables, and an input needs a tensor for its dtype.
        "id": [ids for ids, _ in rows_of] or [_NO_IDS],
        "id_split": splits_of(ids.numel() for ids, _ in rows_of),
        "flat_value": [rows for _, rows in rows_of if not _is_code(rows)] or [torch.empty(0, device="cpu")],
    }
    codes = [rows for _, rows in rows_of if _is_code(rows)]
    if codes:
        raw["flat_code"] = codes
    if any(ids.numel() for ids in removed):
        raw |= {"removed": removed, "removed_split": splits_of(ids.numel() for ids in removed)}
    return raw | rest


def _is_code(rows: Content) -> bool:
    return rows.dtype == torch.uint8


def row_bytes(dims: Mapping[str, int], codes: Formats = _NO_CODES) -> dict[str, int]:
    """Compute the bytes that one id and its row take in a message."""
    return {name: 8 + (codes[name].row_bytes if name in codes else 4 * dim) for name, dim in dims.items()}


def pack_inputs(
    push: PushMessage, dense: Mapping[str, Tensor], signature: str, tables: Iterable[str], room: int
) -> list[MessageInputs]:
    """Distribute a push and dense weights over messages."""
    messages = [inputs_of(push, signature, tables)] if push.num_ids else []
    room_left = room - 8 * push.num_ids - sum(rows.nbytes for _, rows in push.rows.values())
    for name, weight in dense.items():
        if weight.nbytes > room:
            for part in split_weight(name, weight, room):
                messages.append({**inputs_of(PushMessage(), signature, tables), **part})
            room_left = 0
            continue
        if not messages or weight.nbytes > room_left:
            messages.append(inputs_of(PushMessage(), signature, tables))
            room_left = room
        messages[-1][f"{DENSE}{name}"] = weight
        room_left -= weight.nbytes
    return messages


def encode_request(model: str, signature: str, inputs: Inputs) -> bytes:
    """Serialise a PredictRequest; each tensor is copied once, and deferred rows are read once."""
    spec = ModelSpec(name=model, signature_name=signature).SerializeToString()
    parts: list[bytes | memoryview | DeferredRows] = [field_prefix(1, len(spec)) + spec]
    size = len(field_prefix(1, len(spec))) + len(spec)
    for name, given in inputs.items():
        contents = list(given) if isinstance(given, Sequence) else [given]
        bytes_of = sum(content.nbytes for content in contents)
        shape = (sum(c.numel() for c in contents),) if isinstance(given, Sequence) else given.shape
        align = bytes_of >= LARGE or any(isinstance(content, DeferredRows) for content in contents)
        start = _entry_start(name, _head(contents[0].dtype, shape), bytes_of, size if align else None)
        parts += [start, *map(_memory, contents)]
        size += len(start) + bytes_of
    if not any(isinstance(part, DeferredRows) for part in parts):
        return b"".join(parts)  # type: ignore[arg-type]
    return _fill(parts, size)


def _entry_start(name: str, head: bytes, size: int, begin: int | None) -> bytes:
    """Return what precedes the content of an input; with `begin`, where it begins, the content is aligned."""
    key = field_prefix(1, len(name.encode())) + name.encode()
    start = field_prefix(4, size) if size else b""
    for gap in (0, *range(2, 2 + _ALIGNMENT)):
        value = head + _filler(gap) + start
        entry = key + field_prefix(2, len(value) + size) + value
        before = field_prefix(2, len(entry) + size) + entry
        if begin is None or (begin + len(before)) % _ALIGNMENT == 0:
            return before
    raise AssertionError("a gap of some size aligns the content")


def _filler(gap: int) -> bytes:
    """Return version numbers of 0 that take this many bytes, 0 or at least 2."""
    filler = b""
    while gap:
        size = 4 if gap == 6 else min(gap, 5)  # of one field; a field takes at least 2 bytes
        filler += bytes([_VERSION_NUMBER, *[0x80] * (size - 2), 0])
        gap -= size
    return filler


def _fill(parts: Iterable[bytes | memoryview | DeferredRows], size: int) -> bytes:
    """Concatenate parts in the memory of one bytes object."""
    native: Any = native_module()
    message, memory = native.new_bytes(size)
    at, view, out = 0, memoryview(memory), torch.from_numpy(memory)
    for part in parts:
        end = at + (part.nbytes if isinstance(part, DeferredRows) else len(part))
        if not isinstance(part, DeferredRows):
            view[at:end] = part
        elif not part.read_into(out[at:end].view(torch.float32).view(part.shape)):
            raise NotFiniteRows("a row holds NaN or Inf")
        at = end
    made: bytes = message
    return made


def _head(dtype: torch.dtype, shape: Sequence[int]) -> bytes:
    proto = TensorProto(dtype=DTYPES[dtype])
    proto.tensor_shape.SetInParent()
    for size in shape:
        proto.tensor_shape.dim.add(size=size)
    data: bytes = proto.SerializeToString()
    return data


def _memory(content: Content) -> memoryview | DeferredRows:
    if isinstance(content, DeferredRows):
        return content
    flat = content.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def splits_of(sizes: Iterable[int]) -> Tensor:
    """Compute the positions at which consecutive pieces begin and end."""
    # returns: the cumulative sums, starting with 0, int64 [n + 1].
    return torch.from_numpy(np.cumsum([0, *sizes], dtype=np.int64))


# ---- reading


def read_push(
    signature: str,
    inputs: ReceivedInputs,
    dims: Mapping[str, int],
    dense: Mapping[str, Sequence[int]],
    codes: Formats = _NO_CODES,
) -> PushMessage:
    """Validate the inputs of a signature."""
    left = dict(inputs)
    read = _read_raw if is_raw(signature) else _read_named
    rows, removed = read(left, dims, codes)
    for table in rows.keys() & codes.keys():
        if rows[table][1].dtype != torch.uint8:
            _remove_zeros(table, rows, removed, codes[table])
    weights = {}
    for name, shape in dense.items():
        weight = left.pop(f"{DENSE}{name}", None)
        if weight is None:
            continue
        if not isinstance(weight, Tensor) or tuple(weight.shape) != tuple(shape):
            raise InputError(f"input {DENSE + name!r} must be {list(shape)}, got {_describe(weight)}")
        weights[name] = weight.clone()  # a view would keep the whole message in memory
    expected = {
        table: int(_typed(left, f"{EXPECTED}{table}", torch.int64, (1,)))
        for table in dims
        if f"{EXPECTED}{table}" in left
    }
    if any(n < 0 for n in expected.values()):
        raise InputError("input 'expected:' of a table must be 0 or more")
    parts = read_dense_parts(left, dense)
    if left:
        raise InputError(
            f"unknown input {min(left)[:100]!r} of signature {signature[:100]!r}; "
            f"tables here: {', '.join(sorted(dims))}"
        )
    return PushMessage(rows, removed, weights, parts, expected)


def _remove_zeros(
    table: str, rows: dict[str, tuple[Tensor, Tensor]], removed: dict[str, Tensor], format: RowFormat
) -> None:
    """Move the ids of rows of zeros to the removed ids, if the format has no code for zeros."""
    ids, values = rows[table]
    gone = ~values.any(dim=1)
    if bool(gone.any()) and bool(format.decode(format.encode(values[gone][:1])).any()):
        rows[table] = ids[~gone], values[~gone]
        removed[table] = torch.cat([removed.get(table, _NO_IDS), ids[gone]])


def result_of(push: PushMessage, signature: str) -> dict[str, Tensor]:
    """Make the outputs that answer an assign, as Monolith's servers do."""
    # returns: the number of ids with a row as `{table}_result` int64 [1], or `result` [0] for raw_assign.
    if is_raw(signature):
        return {"result": torch.zeros(1, dtype=torch.int64, device="cpu")}
    return {
        f"{table}_result": torch.tensor([ids.numel()], device="cpu") for table, (ids, _) in push.rows.items()
    }


RowsAndRemoved: TypeAlias = tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]


def _read_named(left: dict[str, Tensor | Strings], dims: Mapping[str, int], codes: Formats) -> RowsAndRemoved:
    rows, removed = {}, {}
    for table, dim in dims.items():
        name, value, code = f"{table}_id", f"{table}_value", f"{table}_code"
        if table in codes and code in left:
            ids = _ids(left, name)
            rows[table] = (ids, _typed(left, code, torch.uint8, (ids.numel(), codes[table].row_bytes)))
        elif name in left or value in left:
            ids = _ids(left, name)
            rows[table] = (ids, _typed(left, value, torch.float32, (ids.numel(), dim)))
        if f"{table}:removed" in left:
            removed[table] = _ids(left, f"{table}:removed")
    return rows, removed


def _read_raw(left: dict[str, Tensor | Strings], dims: Mapping[str, int], codes: Formats) -> RowsAndRemoved:
    tables = sorted(dims)
    parts = dict(zip(tables, split_by_table(left, "id", "id_split", len(tables)), strict=True))
    coded = [table for table in tables if table in codes] if "flat_code" in left else []
    plain = [table for table in tables if table not in coded]
    sizes = [parts[table].numel() * dims[table] for table in plain]
    flat = _typed(left, "flat_value", torch.float32, (sum(sizes),))
    rows = {
        table: (parts[table], values.view(parts[table].numel(), dims[table]))
        for table, values in zip(plain, flat.split(sizes), strict=True)
        if parts[table].numel()
    }
    if coded:
        sizes = [parts[table].numel() * codes[table].row_bytes for table in coded]
        stored = _typed(left, "flat_code", torch.uint8, (sum(sizes),)).split(sizes)
        for table, each in zip(coded, stored, strict=True):
            if parts[table].numel():
                rows[table] = (parts[table], each.view(parts[table].numel(), -1))
    if "removed" not in left and "removed_split" not in left:
        return rows, {}
    gone = split_by_table(left, "removed", "removed_split", len(tables))
    return rows, {table: ids for table, ids in zip(tables, gone, strict=True) if ids.numel()}


def split_by_table(left: dict[str, Tensor | Strings], name: str, split: str, tables: int) -> list[Tensor]:
    """Split the ids of all tables, and remove both inputs from `left`."""
    # name: the input with the ids, int64 [n]; split: the input with the positions at which tables begin and
    # end, int64 [tables + 1]; returns: the ids of each table, int64 [n_t].
    ids, splits = _ids(left, name), _ids(left, split)
    sizes = splits.diff() if splits.numel() else splits
    ends = splits.numel() == tables + 1 and int(splits[0]) == 0 and int(splits[-1]) == ids.numel()
    # Each split must be within the ids, so that no difference wraps around to a valid size.
    if not ends or bool(((splits < 0) | (splits > ids.numel())).any()) or bool((sizes < 0).any()):
        raise InputError(f"input {split!r} must be {tables + 1} ascending numbers from 0 to {ids.numel()}")
    return list(ids.split(sizes.tolist()))


def _ids(left: dict[str, Tensor | Strings], name: str) -> Tensor:
    given = left.pop(name, None)
    if not isinstance(given, Tensor) or given.dtype not in (torch.int64, torch.uint64) or given.dim() != 1:
        raise InputError(f"input {name!r} must be int64 [n], got {_describe(given)}")
    return given.view(torch.int64)


def _typed(
    left: dict[str, Tensor | Strings], name: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    given = left.pop(name, None)
    if not isinstance(given, Tensor) or given.dtype != dtype or tuple(given.shape) != shape:
        wanted = f"{str(dtype).removeprefix('torch.')} {list(shape)}"
        raise InputError(f"input {name!r} must be {wanted}, got {_describe(given)}")
    return given


def _describe(given: object) -> str:
    if isinstance(given, Tensor):
        return f"{str(given.dtype).removeprefix('torch.')} {list(given.shape)}"
    return "nothing" if given is None else "strings"
