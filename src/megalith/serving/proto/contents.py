"""Contents: large tensors of a PredictRequest, taken out of it before protobuf reads the rest.

Protobuf copies a tensor's bytes when it reads a request and again whenever they are looked at. A push of
training is megabytes of little else, so its tensors are copied once, straight from what arrived.
"""

from __future__ import annotations

from megalith.errors import InputError
from megalith.protowire import BYTES, VARINT, Field, Writer, fields

LARGE = 1 << 16
"""Bytes of a tensor from which it is taken out."""
_INPUTS, _TENSOR_CONTENT = 2, 4


def cut_contents(data: bytes) -> tuple[bytes, dict[str, memoryview]]:
    """A serialised PredictRequest without the `tensor_content` of its large inputs; and these by name.

    Views of `data`. Whatever is not as expected is left to protobuf: then the request is `data` itself.
    """
    kept, contents = Writer(), dict[str, memoryview]()
    try:
        for field in fields(data):
            if field.number != _INPUTS:
                _copy(field, kept)
                continue
            key, value = field.map_entry()
            if key is None or value is None:
                return data, {}
            name, tensor, entry = key.text(), Writer(), Writer()
            content = _cut(value, tensor)
            contents.pop(name, None)  # of two entries with one name the last counts
            if content is not None:
                contents[name] = content
            entry.text(1, name)
            entry.message(2, tensor)
            kept.message(_INPUTS, entry)
    except InputError:
        return data, {}
    return bytes(kept), contents


def _cut(value: Field, kept: Writer) -> memoryview | None:
    """Copies a TensorProto but for its content, which is returned if it is large."""
    content = None
    for field in value.message():
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
