"""FeatureConfigs: the features of a model, and the layouts built from slices of their rows.

Monolith's sharding and layout ops take them as one serialized message. Here they are frozen dataclasses that
are read from and written to the same bytes. The type and range of a value are checked at construction;
`FeatureConfigs.validate` checks that the messages match each other (a slice is inside its feature, a declared
shape is that of its slices). `layout_plan` compiles them once for all batches.

The `.proto` files are in `proto/`; `make protos` compiles them to `proto/descriptors.binpb`, which is loaded
at first use into a descriptor pool of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from enum import IntEnum
from functools import cache, lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, get_args, get_origin, get_type_hints

import torch

from megalith.errors import InputError, UnknownNameError
from megalith.ops import checks
from megalith.ops.pooling import Bags, OutputSlice, covered
from megalith.serving.proto.message_types import Message, load_pool, message_class, protobuf
from megalith.storage.json_codec import canonical_json, from_json, parse_json_object, to_json

if TYPE_CHECKING:
    from typing_extensions import Buffer


# ---- messages


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


# ---- configs

Shape = tuple[int, ...]
_PACKAGE = "monolith.io.proto"


class PoolingType(IntEnum):
    """How the rows of a feature in one example are reduced: to one row, or to a sequence of the first n."""

    SUM = 0
    MEAN = 1
    FIRSTN = 3


class OutType(IntEnum):
    """How the slices of a layout are combined: concatenated, stacked, added, or one tensor each (NONE)."""

    CONCAT = 0
    STACK = 1
    ADDN = 2
    NONE = 3


class _ConfigMessage:
    """Base of all messages: converts their fields, and reads and writes Monolith's protobuf bytes."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        own: Any = type(self)
        for name, kind in _kinds(own).items():
            value = _converted(kind, getattr(self, name), f"{own.__name__}: {name}")
            object.__setattr__(self, name, value)

    def to_proto(self) -> bytes:
        """Serialize the message; equal messages give equal bytes.

        Raises:
            InputError: A string cannot be encoded in UTF-8.
            MissingDependencyError: Protobuf is not installed.
        """
        message = message_type(f"{_PACKAGE}.{type(self).__name__}")()
        try:
            self._write(message)
        except (UnicodeEncodeError, ValueError) as error:
            raise InputError(f"{type(self).__name__}: a string cannot be encoded in UTF-8: {error}") from None
        data: bytes = message.SerializeToString(deterministic=True)
        return data

    @classmethod
    def from_proto(cls, message: Buffer) -> Self:
        """Parse a serialized message; unknown fields are ignored.

        Raises:
            InputError: The bytes are not a valid message, or an enum has an unknown value.
            MissingDependencyError: Protobuf is not installed.
        """
        if not isinstance(message, bytes | bytearray | memoryview):
            raise InputError(f"{cls.__name__}: a message must be bytes, got {type(message).__name__}")
        parsed: Self = _converted(cls, parse_message(f"{_PACKAGE}.{cls.__name__}", bytes(message)), "")
        return parsed

    def _write(self, message: Any) -> None:
        """Copy the fields to a protobuf message, which has the same names."""
        own: Any = type(self)
        for name in _kinds(own):
            value, field = getattr(self, name), getattr(message, name)
            if isinstance(value, dict):
                for key, config in value.items():
                    config._write(field[key])
            elif not isinstance(value, tuple):
                setattr(message, name, value)
            else:
                for each in value:
                    if isinstance(each, _ConfigMessage):
                        each._write(field.add())
                    elif isinstance(each, tuple):
                        field.add(dims=each)
                    else:
                        field.append(each)


@cache
def _kinds(config: type) -> dict[str, Any]:
    """The types of the fields of a message."""
    hints = get_type_hints(config)
    return {each.name: hints[each.name] for each in fields(config) if each.init}


def _converted(kind: Any, value: Any, what: str) -> Any:
    """Convert a value, which may be a protobuf message, to the type of its field."""
    inner, message = get_args(kind), getattr(getattr(value, "DESCRIPTOR", None), "name", None)
    if message == getattr(kind, "__name__", "") and issubclass(kind, _ConfigMessage):
        return kind(**{name: getattr(value, name) for name in _kinds(kind)})
    if message == "TensorShape":
        value = value.dims
    if get_origin(kind) is tuple:
        items = checks.items(value, what, "values")
        return tuple(_converted(inner[0], each, f"{what}[{i}]") for i, each in enumerate(items))
    if inner:
        named = checks.mapping(value, what, f"{{name: {inner[1].__name__}}}")
        return {key: _converted(inner[1], each, f"{what}[{key!r}]") for key, each in named.items()}
    if kind is int:
        number = checks.as_integer(value)
        if number is None or not -(2**31) <= number < 2**31:
            raise InputError(f"{what} must be a 32-bit int, got {value!r}")
        return number
    if issubclass(kind, IntEnum):
        try:
            return kind(value)
        except ValueError:
            known = ", ".join(f"{each.name} ({each.value})" for each in kind)
            raise InputError(f"{what} must be one of {known}, got {value!r}") from None
    if not isinstance(value, kind):
        raise InputError(f"{what} must be a {kind.__name__}, got {value!r}")
    return value


@dataclass(frozen=True, slots=True)
class SliceConfig(_ConfigMessage):
    """Columns `start:end` of a feature's rows.

    Monolith's op fills the keyword-only fields from the config of the feature. Here they are only stored; the
    config of the feature decides.
    """

    feature_name: str = ""
    """The name of the feature."""
    start: int = 0
    """The first column."""
    end: int = 0
    """The column after the last one."""
    _: KW_ONLY
    feature_idx: int = 0
    """The number of the feature."""
    slice_idx: int = 0
    """The number of the slice."""
    pooling_type: PoolingType = PoolingType.SUM
    """As in the feature's config."""
    max_sequence_length: int = 0
    """As in the feature's config."""

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class OutConfig(_ConfigMessage):
    """A layout: slices of features, combined into one tensor, or into one per slice (NONE)."""

    slice_configs: tuple[SliceConfig, ...] = ()
    """The slices, in order."""
    out_type: OutType = OutType.CONCAT
    """How the slices are combined."""
    shape: tuple[Shape, ...] = ()
    """The shape of each tensor; the first size is the batch size or -1. Empty: the shapes follow from the
    slices (`FeatureConfigs.output_shapes`)."""


@dataclass(frozen=True, slots=True)
class FeatureConfig(_ConfigMessage):
    """A feature: the table of its ids, and how its rows are pooled."""

    table: str = ""
    """The name of the table."""
    pooling_type: PoolingType = PoolingType.SUM
    """How the rows of a batch row are pooled."""
    slice_dims: tuple[int, ...] = ()
    """The sizes of the parts of a row."""
    max_sequence_length: int = 0
    """The number of rows that FIRSTN keeps."""

    @property
    def dim(self) -> int:
        """Number of columns of its rows."""
        return sum(self.slice_dims)


@dataclass(frozen=True, slots=True)
class FeatureConfigs(_ConfigMessage):
    """All features and layouts of a model, by name."""

    feature_configs: Mapping[str, FeatureConfig] = field(default_factory=dict)
    """The features by name."""
    out_configs: Mapping[str, OutConfig] = field(default_factory=dict)
    """The layouts by name."""
    encoded: str = field(init=False, repr=False, compare=False)
    """The configs as JSON, the form that ops take; equal configs give equal text."""

    def __post_init__(self) -> None:
        _ConfigMessage.__post_init__(self)
        object.__setattr__(self, "encoded", canonical_json(to_json(self)).decode())

    # ---- names, in the order that numbers them in Monolith's encodings

    @property
    def feature_names(self) -> tuple[str, ...]:
        """All features, sorted."""
        return tuple(sorted(self.feature_configs))

    @property
    def table_names(self) -> tuple[str, ...]:
        """All tables of the features, sorted."""
        return tuple(sorted({feature.table for feature in self.feature_configs.values()}))

    @property
    def layout_names(self) -> tuple[str, ...]:
        """All layouts, sorted: the order of the layout op's outputs."""
        return tuple(sorted(self.out_configs))

    # ---- consistency

    def validate(self) -> None:
        """Check that the messages match each other.

        Every feature has a table and positive slice_dims, and a FIRSTN feature keeps at least one row; every
        slice is inside an existing feature; every declared shape is that of its slices.

        Raises:
            InputError: They do not. The message names the layout, the slice and the field.
        """
        for name in self.feature_names:
            self._check_feature(name)
        for layout in self.layout_names:
            self.output_shapes(layout)

    def output_shapes(self, layout: str) -> tuple[Shape, ...]:
        """Return the shape of each tensor of a layout: the declared one, or else that of its slices.

        For slices of width w (L is the max_sequence_length of FIRSTN features):

            out_type   pooled features       FIRSTN features
            CONCAT     [batch, sum w]        [batch, L, sum w]
            STACK      [batch, slices, w]    [batch, slices, L, w]
            ADDN       [batch, w]            not possible
            NONE       [batch, w] each       [batch, L, w] each

        The batch is -1 unless declared.

        Args:
            layout: The name of the layout.

        Returns:
            One shape for each tensor of the layout: one per slice for NONE, otherwise one.

        Raises:
            UnknownNameError: There is no such layout.
            InputError: The slices and the declared shapes do not match.
        """
        if not isinstance(layout, str) or layout not in self.out_configs:
            known = ", ".join(self.layout_names)
            raise UnknownNameError(f"FeatureConfigs: no layout {layout!r}; layouts: {known}")
        declared, given = self.out_configs[layout].shape, self._shapes_given(layout)
        if not declared:
            return given
        if len(declared) != len(given):
            raise _mismatch(
                layout, f"shape declares {len(declared)} tensors, but its slices give {len(given)}"
            )
        for i, (shape, wanted) in enumerate(zip(declared, given, strict=True)):
            if len(shape) != len(wanted) or shape[1:] != wanted[1:]:
                rest = ", ".join(map(str, wanted[1:]))
                raise _mismatch(layout, f"shape[{i}] is {list(shape)}, but its slices give [batch, {rest}]")
            if shape[0] < 1 and shape[0] != -1:
                raise _mismatch(layout, f"shape[{i}] is {list(shape)}, but its batch must be -1 or positive")
        return declared

    def _shapes_given(self, layout: str) -> tuple[Shape, ...]:
        out = self.out_configs[layout]
        own = [self._slice_shape(layout, i) for i in range(len(out.slice_configs))]
        if not own:
            raise _mismatch(layout, "slice_configs is empty; add a slice or remove the layout")
        kind, first = out.out_type, own[0]
        if kind == OutType.NONE:
            return tuple((-1, *shape) for shape in own)
        for i, shape in enumerate(own):
            if kind == OutType.ADDN and len(shape) > 1:
                raise _mismatch(layout, "ADDN cannot add a FIRSTN feature", out, i)
            if shape[:-1] != first[:-1]:
                is_, was = (f"FIRSTN of {s[0]}" if len(s) > 1 else "pooled" for s in (shape, first))
                raise _mismatch(layout, f"its feature is {is_}, but that of slice 0 is {was}", out, i)
            if kind != OutType.CONCAT and shape != first:
                raise _mismatch(
                    layout, f"its width is {shape[-1]}, but that of slice 0 is {first[-1]}", out, i
                )
        if kind == OutType.CONCAT:
            return ((-1, *first[:-1], sum(shape[-1] for shape in own)),)
        return ((-1, len(own), *first) if kind == OutType.STACK else (-1, *first),)

    def _slice_shape(self, layout: str, i: int) -> Shape:
        """The shape of a slice of one example: (width,), or (max_sequence_length, width) for FIRSTN."""
        out = self.out_configs[layout]
        cut = out.slice_configs[i]
        if cut.feature_name not in self.feature_configs:
            raise _mismatch(layout, "feature_name is not in feature_configs", out, i)
        feature = self._check_feature(cut.feature_name)
        if not 0 <= cut.start < cut.end <= feature.dim:
            rule = f"must satisfy 0 <= start < end <= {feature.dim}, the sum of slice_dims"
            raise _mismatch(layout, f"start {cut.start} and end {cut.end} {rule}", out, i)
        if feature.pooling_type == PoolingType.FIRSTN:
            return (feature.max_sequence_length, cut.width)
        return (cut.width,)

    def _check_feature(self, name: str) -> FeatureConfig:
        feature = self.feature_configs[name]
        firstn = feature.pooling_type == PoolingType.FIRSTN
        if not feature.table:
            problem = "table is empty; name the table of its ids"
        elif not feature.slice_dims or min(feature.slice_dims) < 1:
            problem = f"slice_dims must be positive sizes, got {list(feature.slice_dims)}"
        elif feature.max_sequence_length < int(firstn):
            rule = "at least 1 for FIRSTN" if firstn else "0 or more"
            problem = f"max_sequence_length must be {rule}, got {feature.max_sequence_length}"
        else:
            return feature
        raise InputError(f"FeatureConfigs: feature {name!r}: {problem}")

    @classmethod
    def from_encoded(cls, encoded: str) -> Self:
        """Return the configs that `encoded` was made of.

        Args:
            encoded: What `FeatureConfigs.encoded` returns.

        Returns:
            Configs that are equal to those.
        """
        return from_json(cls, parse_json_object(encoded, InputError))


def as_feature_configs(value: Any) -> FeatureConfigs:
    """Return the configs that an op got as `feature_cfgs`."""
    if isinstance(value, FeatureConfigs):
        return value
    descriptor = getattr(value, "DESCRIPTOR", None)
    if getattr(descriptor, "full_name", None) == f"{_PACKAGE}.FeatureConfigs":
        return _parsed(value.SerializeToString(deterministic=True))
    raise InputError(f"feature_cfgs must be FeatureConfigs, got {type(value).__name__}")


@lru_cache(maxsize=64)
def _parsed(data: bytes) -> FeatureConfigs:
    return FeatureConfigs.from_proto(data)


def _mismatch(layout: str, problem: str, out: OutConfig | None = None, i: int = 0) -> InputError:
    cut = f", slice {i} (feature {out.slice_configs[i].feature_name!r})" if out else ""
    return InputError(f"FeatureConfigs: layout {layout!r}{cut}: {problem}")


# ---- the plan of a config


@dataclass(frozen=True)
class LayoutPlan:
    """Facts about the features, tables and outputs of a config, each in the order of their names."""

    tables: tuple[int, ...]
    """The table number of each feature."""
    num_tables: int
    dims: tuple[int, ...]
    """The row size of each feature."""
    means: tuple[bool, ...]
    """Whether each feature is averaged."""
    firsts: tuple[int, ...]
    """The number of rows that FIRSTN keeps of each feature, 0 for pooled features."""
    parts: tuple[tuple[OutputSlice, ...], ...]
    """The output slices of each feature."""
    shapes: tuple[tuple[int, ...], ...]
    """The shape of each output, the batch first."""
    order: tuple[int, ...]
    """The features in the order of the pooling: FIRSTN features come last."""
    native_parts: tuple[Any, ...]
    """The output slices of each feature in the native module's form."""
    covered: tuple[bool, ...]
    """Whether the slices write all of each output."""


@lru_cache(maxsize=64)
def layout_plan(encoded: str) -> LayoutPlan:
    """Compile a config."""
    configs = FeatureConfigs.from_encoded(encoded)
    configs.validate()
    names, tables = configs.feature_names, configs.table_names
    features = [configs.feature_configs[n] for n in names]
    firsts = [f.max_sequence_length if f.pooling_type == PoolingType.FIRSTN else 0 for f in features]
    parts: list[list[OutputSlice]] = [[] for _ in names]
    shapes: list[tuple[int, ...]] = []
    for layout in configs.layout_names:
        out = configs.out_configs[layout]
        kind, given = out.out_type, configs.output_shapes(layout)
        column = 0
        for number, cut in enumerate(out.slice_configs):
            feature = names.index(cut.feature_name)
            inner = firsts[feature] or 1
            output = len(shapes) + (number if kind == OutType.NONE else 0)
            # CONCAT puts the k-th rows of all features next to each other: [B, L, sum of widths].
            step = given[0][-1] if kind == OutType.CONCAT else 0
            parts[feature].append(
                OutputSlice(output, column, cut.start, cut.end, inner, kind == OutType.ADDN, step)
            )
            if kind == OutType.CONCAT:
                column += cut.width
            elif kind == OutType.STACK:
                column += inner * cut.width
        shapes += given
    flat = [(-1, num_columns(shape)) for shape in shapes]
    bags = [Bags(torch.zeros(1, device="cpu"), tuple(p)) for p in parts]
    return LayoutPlan(
        tables=tuple(tables.index(f.table) for f in features),
        num_tables=len(tables),
        dims=tuple(f.dim for f in features),
        means=tuple(f.pooling_type == PoolingType.MEAN for f in features),
        firsts=tuple(firsts),
        parts=tuple(tuple(p) for p in parts),
        shapes=tuple(shapes),
        order=tuple(sorted(range(len(names)), key=lambda f: (bool(firsts[f]), f))),
        native_parts=tuple(b.native[-1] for b in bags),
        covered=tuple(covered(bags, flat)),
    )


def num_columns(shape: Sequence[int]) -> int:
    """Return the number of elements of one batch row."""
    return prod(shape[1:])
