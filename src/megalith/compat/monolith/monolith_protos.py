"""Message classes of Monolith's records, feature configs and checkpoint entries.

The `.proto` files are in `proto/`; `make protos` compiles them to `proto/descriptors.binpb`, which is loaded
at first use into a descriptor pool of its own. Records are read by native code, not by these classes.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from megalith.errors import InputError
from megalith.serving.proto.message_types import Message, load_pool, message_class, protobuf


@cache
def message_type(full_name: str) -> Any:
    """Return the class of a message."""
    return message_class(_pool(), full_name)


def parse_message(full_name: str, data: bytes) -> Message:
    """Parse a serialized message."""
    try:
        return message_type(full_name).FromString(data)
    except protobuf("message").DecodeError:
        name = full_name.rpartition(".")[2]
        raise InputError(f"{name}: {len(data)} bytes are not a valid protobuf message") from None


@cache
def _pool() -> Any:
    return load_pool(Path(__file__).with_name("proto") / "descriptors.binpb")
