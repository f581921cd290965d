"""Torch files: what `torch.save` wrote, read without unpickling; nothing in it is imported or called.

An own reader, because `torch.load(weights_only=True)` reads all tensors into memory before anything can be
checked: here sizes are known first, and tensors of an untrusted file of any size are read by range.

The archive's directory and the opcodes that `torch.save` uses for dicts, lists, tuples, numbers, texts and
tensors are interpreted as data; anything else raises TorchFileError.
"""

from __future__ import annotations

import pickletools
import struct
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalith.errors import MegalithError
from megalith.storage.bodies import Body
from megalith.storage.json_codec import MAX_INT
from megalith.storage.local_files import crc32

_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_BLOCK_BYTES = 1 << 18
_ENTRY_BYTES = 512  # a directory entry with its name, generously
_STORAGES = {
    "torch.ByteStorage": torch.uint8,
    "torch.FloatStorage": torch.float32,
    "torch.DoubleStorage": torch.float64,
    "torch.HalfStorage": torch.float16,
    "torch.BFloat16Storage": torch.bfloat16,
    "torch.LongStorage": torch.int64,
    "torch.IntStorage": torch.int32,
}


class TorchFileError(MegalithError, ValueError):
    """A file is not an archive of `torch.save` with plain tensors, or is damaged."""


@dataclass(frozen=True)
class PickledName:
    """Something that the pickle names: a function, a class or a dtype. Never imported."""

    path: str


@dataclass(frozen=True)
class StoredBytes:
    """The bytes of tensors: their file in the archive, and what they are."""

    key: str
    dtype: torch.dtype
    length: int


@dataclass(frozen=True)
class StoredTensor:
    """A contiguous tensor in the archive."""

    storage: StoredBytes
    offset: int
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements."""
        return prod(self.shape)


class TorchFile:
    """An archive of `torch.save`."""

    def __init__(self, body: Body, *, longest_pickle: int) -> None:
        self._body = body
        self._files = _directory(body, longest_pickle)
        roots = [name for name in self._files if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(roots) != 1:
            raise TorchFileError("is not an archive of torch.save: it must have one data.pkl")
        self._root = roots[0].removesuffix("data.pkl")
        self._verified: set[str] = set()
        order = self._files.get(self._root + "byteorder")
        if order is not None and body.read(order.start, min(order.size, 8)) != b"little":
            raise TorchFileError("was written on a big-endian machine")
        start, length, _ = self._files[roots[0]]
        if length > longest_pickle:
            raise TorchFileError(f"has a pickle of {length} bytes where {longest_pickle} are enough")
        self._verify(roots[0])
        self.value = _Machine().run(bytes(body.read(start, length)))

    def read(self, tensor: StoredTensor, start: int, stop: int) -> Tensor:
        """Read some elements of a tensor."""
        # returns: [stop - start], in memory of its own.
        storage = tensor.storage
        name = f"{self._root}data/{storage.key}"
        place, size = self._files.get(name), storage.dtype.itemsize
        if place is None or storage.length * size != place.size:
            raise TorchFileError(f"storage {storage.key!r:.40} is missing or has the wrong length")
        if not 0 <= start <= stop <= tensor.numel or tensor.offset + tensor.numel > storage.length:
            raise TorchFileError(f"a tensor reaches past its storage {storage.key!r:.40}")
        self._verify(name)
        data = self._body.read(place.start + size * (tensor.offset + start), size * (stop - start))
        return (
            torch.frombuffer(data, dtype=storage.dtype)
            if data
            else torch.zeros(0, dtype=storage.dtype, device="cpu")
        )

    def _verify(self, name: str) -> None:
        """Compare the CRC of a file of the archive, once, block by block."""
        if name in self._verified:
            return
        place, found = self._files[name], 0
        for at in range(0, place.size, _BLOCK_BYTES):
            found = crc32(self._body.read(place.start + at, min(_BLOCK_BYTES, place.size - at)), found)
        if found != place.crc:
            raise TorchFileError(f"has a wrong CRC: {name!r:.80} is damaged")
        self._verified.add(name)


class _ArchivedFile(NamedTuple):
    """A file in the archive."""

    start: int
    size: int
    crc: int


def _directory(body: Body, longest_pickle: int) -> dict[str, _ArchivedFile]:
    """Each file of a zip archive of stored, uncompressed files."""
    if body.size < _END.size:
        raise TorchFileError("is not a zip archive")
    signature, _, _, _, count, length, start, comment = _END.unpack(
        body.read(body.size - _END.size, _END.size)
    )
    if signature != b"PK\x05\x06" or comment:
        raise TorchFileError("is not a zip archive")
    if 0xFFFFFFFF in (length, start) or count == 0xFFFF:
        count, length, start = _end64(body)
    if length > longest_pickle + _ENTRY_BYTES * 64 or start + length > body.size:
        raise TorchFileError(f"has a directory of {length} bytes at {start}")
    data = bytes(body.read(start, length))
    files: dict[str, _ArchivedFile] = {}
    at = 0
    while at < length:
        if length - at < _ENTRY.size:
            raise TorchFileError("has a directory that ends within an entry")
        entry = _ENTRY.unpack_from(data, at)
        fields = (entry[i] for i in (4, 7, 8, 9, 10, 11, 12, 16))
        method, crc, packed, size, name_bytes, extra, remark, place = fields
        name = data[at + _ENTRY.size : at + _ENTRY.size + name_bytes].decode("utf-8", "replace")
        extras = data[at + _ENTRY.size + name_bytes : at + _ENTRY.size + name_bytes + extra]
        if 0xFFFFFFFF in (packed, size, place):
            packed, size, place = _wide(extras, packed, size, place)
        if entry[0] != b"PK\x01\x02" or method != 0 or packed != size or name in files:
            raise TorchFileError("has an entry that is compressed, repeated or damaged")
        files[name] = _ArchivedFile(_data_start(body, place, size), size, crc)
        at += _ENTRY.size + name_bytes + extra + remark
    if len(files) != count:
        raise TorchFileError(f"has {len(files)} files, its end says {count}")
    return files


def _end64(body: Body) -> tuple[int, int, int]:
    at = body.size - _END.size - _LOCATOR.size
    if at < 0:
        raise TorchFileError("is not a zip archive")
    signature, _, start, _ = _LOCATOR.unpack(body.read(at, _LOCATOR.size))
    if signature != b"PK\x06\x07" or start + _END64.size > body.size:
        raise TorchFileError("is not a zip archive")
    record = _END64.unpack(body.read(start, _END64.size))
    if record[0] != b"PK\x06\x06":
        raise TorchFileError("is not a zip archive")
    return record[7], record[8], record[9]


def _wide(extras: bytes, packed: int, size: int, place: int) -> tuple[int, int, int]:
    """The 64-bit numbers of an entry: in field 1 of its extras, those that did not fit, in this order."""
    at = 0
    while at + 4 <= len(extras):
        kind, length = struct.unpack_from("<HH", extras, at)
        if kind == 1 and length % 8 == 0 and at + 4 + length <= len(extras):
            wide = list(struct.unpack_from(f"<{length // 8}Q", extras, at + 4))
            numbers = [wide.pop(0) if each == 0xFFFFFFFF and wide else each for each in (size, packed, place)]
            return numbers[1], numbers[0], numbers[2]
        at += 4 + length
    raise TorchFileError("has an entry without its 64-bit sizes")


def _data_start(body: Body, place: int, size: int) -> int:
    if place + _LOCAL.size > body.size:
        raise TorchFileError("has a file outside of the archive")
    local = _LOCAL.unpack(body.read(place, _LOCAL.size))
    start = place + _LOCAL.size + int(local[9]) + int(local[10])
    if local[0] != b"PK\x03\x04" or start + size > body.size:
        raise TorchFileError("has a file outside of the archive")
    return start


class _Machine:
    """A pickle machine that builds plain data and knows nothing else."""

    def __init__(self) -> None:
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[int, Any] = {}

    def run(self, text: bytes) -> Any:
        try:
            for op, arg, _ in pickletools.genops(text):
                if op.name == "STOP":
                    break
                self._step(op.name, arg)
            (value,) = self._stack
        except TorchFileError:
            raise
        except (ValueError, IndexError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise TorchFileError(f"has a pickle that cannot be read: {error}") from None
        return value

    def _step(self, name: str, arg: Any) -> None:
        stack = self._stack
        if name in ("PROTO", "FRAME"):
            return
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[arg] = stack[-1]
        elif name == "MEMOIZE":
            self._memo[len(self._memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[arg])
        elif name in ("BINUNICODE", "SHORT_BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"):
            stack.append(arg)
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif name == "GLOBAL":
            stack.append(PickledName(str(arg).replace(" ", ".")))
        elif name in ("EMPTY_DICT", "EMPTY_TUPLE", "EMPTY_LIST"):
            stack.append({"EMPTY_DICT": {}, "EMPTY_TUPLE": (), "EMPTY_LIST": []}[name])
        elif name in ("APPEND", "APPENDS"):
            items = self._to_mark() if name == "APPENDS" else self._pop(1)
            if not isinstance(stack[-1], list):
                raise TypeError("items for something that is not a list")
            stack[-1] += items
        elif name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            items = self._to_mark() if name == "TUPLE" else self._pop(int(name[-1]))
            stack.append(tuple(items))
        elif name in ("SETITEM", "SETITEMS"):
            self._set(self._to_mark() if name == "SETITEMS" else self._pop(2))
        elif name == "BINPERSID":
            stack.append(_storage(stack.pop()))
        elif name == "REDUCE":
            function, arguments = self._pop(2)
            stack.append(_call(function, arguments))
        else:
            raise TorchFileError(f"has a pickle with {name}, which plain tensors do not need")

    def _pop(self, count: int) -> list[Any]:
        if len(self._stack) < count:
            raise IndexError("stack is empty")
        items = self._stack[-count:]
        del self._stack[-count:]
        return items

    def _to_mark(self) -> list[Any]:
        at = self._marks.pop()
        items = self._stack[at:]
        del self._stack[at:]
        return items

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if not isinstance(target, dict) or len(items) % 2:
            raise TypeError("items for something that is not a dict")
        for key, value in zip(items[0::2], items[1::2], strict=True):
            if not isinstance(key, str):
                raise TypeError("a key that is not text")
            target[key] = value


def _storage(given: Any) -> StoredBytes:
    kind, name, key, _, length = given
    dtype = _STORAGES.get(name.path) if isinstance(name, PickledName) else None
    if kind != "storage" or dtype is None or not isinstance(key, str) or not _whole(length):
        raise TorchFileError("has a tensor of a kind that no payload has")
    return StoredBytes(key, dtype, length)


def _call(function: Any, arguments: Any) -> Any:
    """The two calls that `torch.save` writes for tensors, as data."""
    if function == PickledName("collections.OrderedDict") and arguments == ():
        return {}
    if function != PickledName("torch._utils._rebuild_tensor_v2") or len(arguments) < 4:
        raise TorchFileError(f"has a pickle that calls {function!r:.60}")
    storage, offset, shape, stride = arguments[:4]
    if not isinstance(storage, StoredBytes) or not _whole(offset) or max(len(shape), len(stride)) > 8:
        raise TorchFileError("has a tensor that cannot be read")
    if not all(map(_whole, (*shape, *stride))):
        raise TorchFileError("has a tensor that cannot be read")
    wanted = [prod(shape[i + 1 :]) for i in range(len(shape))]
    if len(stride) != len(shape) or any(
        s != w and n > 1 for s, w, n in zip(stride, wanted, shape, strict=True)
    ):
        raise TorchFileError("has a tensor that is not contiguous")
    return StoredTensor(storage, offset, tuple(shape))


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_INT
