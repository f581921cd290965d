"""Contents: large tensors of a PredictRequest, taken out of it before protobuf reads the rest.

Protobuf copies a tensor's bytes when it reads a request and again whenever they are looked at. A push of
training is megabytes of little else, so its tensors are copied once, straight from what arrived. Reading
here is slow where there are many small fields; a push has few, so what has more is left to protobuf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megalith.errors import InputError
from megalith.protowire import BYTES, VARINT, Field, Writer, fields

LARGE = 1 << 16
"""Bytes of a tensor from which it is taken out."""
MAX_FIELDS = 4096
"""Fields that are looked at, those of messages inside included."""
_MODEL_SPEC, _INPUTS, _SIGNATURE_NAME, _TENSOR_CONTENT = 1, 2, 3, 4


def cut_contents(
    data: bytes, wanted: Callable[[str], bool] = lambda signature: True
) -> tuple[bytes, dict[str, memoryview]]:
    """A serialised PredictRequest without the `tensor_content` of its large inputs; and these by name.

    Views of `data`. wanted: whether to do so for a signature. Whatever is not as expected is left to
    protobuf: then the request is `data` itself.
    """
    kept, contents, count = Writer(), dict[str, memoryview](), _FieldCount()
    try:
        for field in count(fields(data)):
            if field.number == _MODEL_SPEC and not wanted(_signature(field, count)):
                return data, {}
            if field.number != _INPUTS:
                _copy(field, kept)
                continue
            name, value = _entry(field, count)
            tensor, entry = Writer(), Writer()
            content = _cut(value, tensor, count)
            contents.pop(name, None)  # of two entries with one name the last counts
            if content is not None:
                contents[name] = content
            entry.text(1, name)
            entry.message(2, tensor)
            kept.message(_INPUTS, entry)
    except InputError:
        return data, {}
    return bytes(kept), contents


class _FieldCount:
    """Counts the fields of a request as they are looked at; raises InputError when there are too many."""

    def __init__(self) -> None:
        self._left = MAX_FIELDS

    def __call__(self, found: Iterator[Field]) -> Iterator[Field]:
        for field in found:
            self._left -= 1
            if self._left < 0:
                raise InputError(f"more than {MAX_FIELDS} fields are left to protobuf")
            yield field


def _signature(spec: Field, count: _FieldCount) -> str:
    name = ""
    for field in count(spec.message()):
        if field.number == _SIGNATURE_NAME:
            name = field.text()
    return name


def _entry(entry: Field, count: _FieldCount) -> tuple[str, Field]:
    """Name and tensor of an input."""
    found = sorted(count(entry.message()), key=lambda field: field.number)
    if [field.number for field in found] != [1, 2]:
        raise InputError("an input without a name or a tensor, or with two, is left to protobuf")
    return found[0].text(), found[1]


def _cut(value: Field, kept: Writer, count: _FieldCount) -> memoryview | None:
    """Copies a TensorProto but for its content, which is returned if it is large."""
    content = None
    for field in count(value.message()):
        if field.number == _TENSOR_CONTENT and len(field.raw()) >= LARGE and content is None:
            content = field.raw()
        else:
            _copy(field, kept)
    return content


def _copy(field: Field, kept: Writer) -> None:
    if field.wire_type == BYTES:
        kept.raw(field.number, field.raw(), always=True)
    elif field.wire_type == VARINT:
        kept.varint(field.number, field.uint64(), always=True)
    else:
        raise InputError(f"field {field.number} is left to protobuf")
