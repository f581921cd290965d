"""Messages as bytes: requests are read and responses are written without protobuf's objects.

Creating the objects of a message takes as long as computing a small model, and protobuf copies the bytes of
a tensor at each access. These functions handle the common forms. They leave a message in another form to
protobuf, which also reports what is wrong with a malformed one. Every message that they read, protobuf can
read too.

    function                 message             what it handles
    cut_contents             PredictRequest      tensor_content of large inputs: a push from training is
                                                 megabytes of tensors in few fields, copied once from here
    read_predict_message     PredictRequest      requests for scores; values in tensor_content; int64_val,
                                                 float_val
    read_infer_message       ModelInferRequest   requests for scores; values in raw_input_contents;
                                                 int64_contents, fp32_contents
    encode_predict_response  PredictResponse     responses with scores
    encode_infer_response    ModelInferResponse  responses with scores

A request for scores has the usual form if it has one id for each feature and row as int64 [rows], and dense
values as float32 [rows, k]; one native pass over its bytes finds them. Field numbers of the responses:

    PredictResponse      1 outputs, entries of a map (1 name, 2 TensorProto)   2 model_spec
    ModelSpec            1 name   2 version (1 value)   3 signature_name
    TensorProto          1 dtype  2 tensor_shape (2 dim (1 size))  4 tensor_content  5 float_val  6 double_val
    ModelInferResponse   1 model_name   2 model_version   3 id   5 outputs   6 raw_output_contents
    InferOutputTensor    1 name   2 datatype   3 shape
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megalith.errors import InputError
from megalith.library import native_module
from megalith.serving.proto.infer_tensors import DATATYPES
from megalith.serving.proto.message_types import DataType
from megalith.serving.proto.tf_tensors import field_prefix, varint_bytes

LARGE = 1 << 16
"""Minimum number of bytes of a tensor that is cut out."""
MAX_FIELDS = 4096
"""Maximum number of fields that are scanned, including those of nested messages."""
_MODEL_SPEC, _INPUTS, _SIGNATURE_NAME, _TENSOR_CONTENT = 1, 2, 3, 4
_VARINT, _BYTES = 0, 2


def cut_contents(
    data: bytes, wanted: Callable[[str], bool] = lambda signature: True
) -> tuple[bytes, dict[str, memoryview]]:
    """Cut the `tensor_content` of large inputs out of a serialized PredictRequest."""
    kept: list[bytes | memoryview] = []
    contents: dict[str, memoryview] = {}
    scanner = _Scanner()
    try:
        for field in scanner.fields(memoryview(data)):
            if field.number == _MODEL_SPEC and not wanted(_signature(field, scanner)):
                return data, {}
            if field.number != _INPUTS:
                kept.append(field.encoded)
                continue
            name, tensor = _entry(field, scanner)
            small, content = _cut(tensor, scanner)
            contents.pop(_read_text(name), None)  # of two entries with the same name, the last counts
            if content is not None:
                contents[_read_text(name)] = content
            entry = bytes(name.encoded) + field_prefix(2, len(small)) + small
            kept += [field_prefix(_INPUTS, len(entry)), entry]
    except InputError:
        return data, {}
    return b"".join(kept), contents


class _WireField(NamedTuple):
    """A varint or a length-delimited field. payload: None for a varint. encoded: with its key."""

    number: int
    payload: memoryview | None
    encoded: memoryview

    def message(self) -> memoryview:
        if self.payload is None:
            raise InputError(f"field {self.number} is not length-delimited")
        return self.payload


class _Scanner:
    """Scans the fields of messages; raises InputError after MAX_FIELDS, or for what protobuf must judge."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def fields(self, data: memoryview) -> Iterator[_WireField]:
        start, end = 0, len(data)
        while start < end:
            self._left -= 1
            key, at = _read_varint(data, start)
            if self._left < 0 or not key >> 3:
                raise InputError(f"more than {MAX_FIELDS} fields, or a field number of 0")
            payload = None
            if key & 7 == _BYTES:
                size, begin = _read_varint(data, at)
                at = begin + size
                payload = data[begin:at]
            elif key & 7 == _VARINT:
                _, at = _read_varint(data, at)
            else:
                raise InputError(f"field {key >> 3} is not a varint or length-delimited")
            if at > end:
                raise InputError(f"field {key >> 3} is truncated")
            yield _WireField(key >> 3, payload, data[start:at])
            start = at


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """The varint at `at`, of at most 35 bits, and its end. Longer ones are left to protobuf."""
    value = 0
    for k, byte in enumerate(data[at : at + 5]):
        value |= (byte & 0x7F) << 7 * k
        if byte < 0x80:
            return value, at + k + 1
    raise InputError("a varint is truncated or has more than 5 bytes")


def _signature(spec: _WireField, scanner: _Scanner) -> str:
    name = ""
    for field in scanner.fields(spec.message()):
        if field.number == _SIGNATURE_NAME:
            name = _read_text(field)
    return name


def _entry(entry: _WireField, scanner: _Scanner) -> tuple[_WireField, _WireField]:
    """The name and the tensor of an input."""
    found = sorted(scanner.fields(entry.message()), key=lambda field: field.number)
    if [field.number for field in found] != [1, 2]:
        raise InputError("an input must have one name and one tensor")
    return found[0], found[1]


def _cut(tensor: _WireField, scanner: _Scanner) -> tuple[bytes, memoryview | None]:
    """A TensorProto without its content if that is large, and the content."""
    kept: list[memoryview] = []
    content = None
    for field in scanner.fields(tensor.message()):
        if field.number == _TENSOR_CONTENT and len(field.message()) >= LARGE and content is None:
            content = field.message()
        else:
            kept.append(field.encoded)
    return b"".join(kept), content


def _read_text(field: _WireField) -> str:
    try:
        return str(field.message(), "utf-8")
    except UnicodeDecodeError:
        raise InputError(f"field {field.number} is not UTF-8") from None


class ScoreMessage(Protocol):
    """A request in the usual form; `InputReader.read_message` reads its inputs."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def signature(self) -> str:
        """Name of the signature; a ModelInferRequest has none."""

    @property
    def version(self) -> int | None:
        """Number of the version; None: not given as a number."""

    @property
    def version_text(self) -> str:
        """Label of the version, or its number as text in a ModelInferRequest; "": none."""

    @property
    def id(self) -> str:
        """Id of the request, which the response repeats."""

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs to return; empty: all."""


def read_predict_message(data: bytes) -> ScoreMessage | None:
    native: Any = native_module()
    message: ScoreMessage | None = None if native is None else native.read_predict_request(data)
    return message


def read_infer_message(data: bytes) -> ScoreMessage | None:
    native: Any = native_module()
    message: ScoreMessage | None = None if native is None else native.read_infer_request(data)
    return message


_TYPES = {
    np.dtype(np.float32): (int(DataType.DT_FLOAT), 5),
    np.dtype(np.float64): (int(DataType.DT_DOUBLE), 6),
}
"""dtype -> its number, and the number of its typed field."""
_DATATYPES = {str(dtype).removeprefix("torch."): datatype for dtype, datatype in DATATYPES.items()}
_CONTENT = 4
_MAX_HEADS = 1024
"""Kept beginnings of outputs: a server has few outputs, but batches of many sizes."""


def encode_predict_response(
    model: str, signature: str, version: int, outputs: Mapping[str, NDArray[Any]], *, typed: bool
) -> bytes | None:
    parts: list[bytes] = []
    for name, array in outputs.items():
        head = _output_head(name, array.dtype, array.shape, typed)
        if head is None:
            return None
        parts += (head, array.tobytes())
    parts.append(_spec(model, signature, version))
    return b"".join(parts)


def encode_infer_response(
    model: str, version: int, request_id: str, outputs: Mapping[str, NDArray[Any]]
) -> bytes:
    parts = [_infer_head(model, version)]
    if request_id:
        parts.append(_field(3, request_id.encode()))
    parts += [_infer_output(name, array.dtype, array.shape) for name, array in outputs.items()]
    for array in outputs.values():
        parts += (field_prefix(6, array.nbytes), array.tobytes())
    return b"".join(parts)


# Requests to one model differ in their elements only, so what precedes the elements is made once.
@functools.lru_cache(_MAX_HEADS)
def _output_head(name: str, dtype: np.dtype[Any], shape: tuple[int, ...], typed: bool) -> bytes | None:
    """Return the bytes of an output before its elements; None for another dtype than those of _TYPES."""
    known = _TYPES.get(dtype)
    if known is None:
        return None
    number, field = known
    sizes = b"".join([_field(2, b"\x08" + varint_bytes(size)) for size in shape])
    elements = math.prod(shape) * dtype.itemsize
    tensor = bytes((8, number)) + _field(2, sizes) + field_prefix(field if typed else _CONTENT, elements)
    entry = _field(1, name.encode()) + field_prefix(2, len(tensor) + elements) + tensor
    return field_prefix(1, len(entry) + elements) + entry


@functools.lru_cache(_MAX_HEADS)
def _spec(model: str, signature: str, version: int) -> bytes:
    spec = (
        _field(1, model.encode()) + _field(2, b"\x08" + varint_bytes(version)) + _field(3, signature.encode())
    )
    return _field(2, spec)


@functools.lru_cache(_MAX_HEADS)
def _infer_head(model: str, version: int) -> bytes:
    return (_field(1, model.encode()) if model else b"") + _field(2, str(version).encode())


@functools.lru_cache(_MAX_HEADS)
def _infer_output(name: str, dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    sizes = b"".join(map(varint_bytes, shape))
    described = _field(1, name.encode()) + _field(2, _DATATYPES[dtype.name].encode())
    return _field(5, described + (_field(3, sizes) if sizes else b""))


def _field(number: int, data: bytes) -> bytes:
    return field_prefix(number, len(data)) + data
