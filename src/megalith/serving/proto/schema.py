"""Schema: protobuf messages described in Python, and the classes made from them.

No code is generated, so no version of a generator has to fit the protobuf that is installed. Messages live
in a descriptor pool of their own: a process may import TensorFlow, Triton's client or any other owner of the
same public names beside this.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from enum import IntEnum
from typing import Any, Literal, TypeAlias

from megalith.errors import MissingDependencyError

Message: TypeAlias = Any
"""A protobuf message. Its class is made at run time, so a type checker does not know its fields."""


def protobuf(module: str) -> Any:
    """A module of google.protobuf; raises MissingDependencyError if it is not installed."""
    try:
        return importlib.import_module(f"google.protobuf.{module}")
    except ImportError as error:
        raise MissingDependencyError("serving needs protobuf: pip install megalith[serve]") from error


POOL: Any = protobuf("descriptor_pool").DescriptorPool()
"""Every file and message of this package, for gRPC reflection."""
_descriptors = protobuf("descriptor_pb2")
_Field = _descriptors.FieldDescriptorProto
_SCALARS = ["double", "float", "int64", "uint64", "int32", "bool", "string", "bytes", "uint32"]


@dataclass(frozen=True)
class Field:
    """A field. type: a scalar's name, or the full name of a message (of an enum, if `is_enum`)."""

    number: int
    name: str
    type: str
    _: KW_ONLY
    repeated: bool = False
    is_enum: bool = False
    oneof: str | None = None
    default: str | None = None


@dataclass(frozen=True)
class Map:
    """A map from strings. type: the values', as for a field."""

    number: int
    name: str
    type: str


class MessageType:
    """A message: its fields and maps, and the messages and enums declared inside it."""

    def __init__(
        self,
        name: str,
        *fields: Field | Map,
        messages: Sequence[MessageType] = (),
        enums: Sequence[tuple[str, type[IntEnum]]] = (),
    ) -> None:
        self.name = name
        self.fields = fields
        self.messages = messages
        self.enums = enums


@dataclass(frozen=True)
class Service:
    """A gRPC service. methods: (name, full name of the request, full name of the response)."""

    name: str
    methods: Sequence[tuple[str, str, str]]


def define(
    name: str,
    package: str,
    *,
    imports: Sequence[str] = (),
    messages: Sequence[MessageType] = (),
    enums: Sequence[tuple[str, type[IntEnum]]] = (),
    services: Sequence[Service] = (),
    syntax: Literal["proto2", "proto3"] = "proto3",
) -> None:
    """Adds a file to the pool; the files it imports must be there."""
    file = _descriptors.FileDescriptorProto(name=name, package=package, dependency=imports, syntax=syntax)
    for message in messages:
        _fill_message(file.message_type.add(), message, f".{package}")
    for enum_name, values in enums:
        _fill_enum(file.enum_type.add(), enum_name, values)
    for service in services:
        target = file.service.add(name=service.name)
        for method, request, response in service.methods:
            target.method.add(name=method, input_type=f".{request}", output_type=f".{response}")
    POOL.Add(file)


def define_well_known(module: str) -> None:
    """Adds one of protobuf's own files, such as any_pb2, to the pool."""
    POOL.AddSerializedFile(protobuf(module).DESCRIPTOR.serialized_pb)


def message_class(full_name: str) -> Any:
    """The class of a message of the pool; messages and enums inside it are its attributes."""
    return protobuf("message_factory").GetMessageClass(POOL.FindMessageTypeByName(full_name))


def _fill_message(target: Any, message: MessageType, scope: str) -> None:
    target.name = message.name
    inside = f"{scope}.{message.name}"
    oneofs: list[str] = []
    for field in message.fields:
        if isinstance(field, Map):
            entry = "".join(part.capitalize() for part in field.name.split("_")) + "Entry"
            nested = target.nested_type.add(name=entry)
            nested.options.map_entry = True
            _fill_field(nested.field.add(), Field(1, "key", "string"))
            _fill_field(nested.field.add(), Field(2, "value", field.type))
            field = Field(field.number, field.name, f"{inside}.{entry}".removeprefix("."), repeated=True)
        added = target.field.add()
        _fill_field(added, field)
        if field.oneof:
            if field.oneof not in oneofs:
                oneofs.append(field.oneof)
                target.oneof_decl.add(name=field.oneof)
            added.oneof_index = oneofs.index(field.oneof)
    for nested_message in message.messages:
        _fill_message(target.nested_type.add(), nested_message, inside)
    for enum_name, values in message.enums:
        _fill_enum(target.enum_type.add(), enum_name, values)


def _fill_field(target: Any, field: Field) -> None:
    target.name, target.number = field.name, field.number
    target.label = _Field.LABEL_REPEATED if field.repeated else _Field.LABEL_OPTIONAL
    if field.type in _SCALARS:
        target.type = _Field.Type.Value(f"TYPE_{field.type.upper()}")
    else:
        target.type = _Field.TYPE_ENUM if field.is_enum else _Field.TYPE_MESSAGE
        target.type_name = f".{field.type}"
    if field.default is not None:
        target.default_value = field.default


def _fill_enum(target: Any, name: str, values: type[IntEnum]) -> None:
    target.name = name
    for value in values:
        target.value.add(name=value.name, number=value.value)
