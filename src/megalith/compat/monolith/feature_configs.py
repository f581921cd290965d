"""FeatureConfigs: which features there are, and how slices of their rows make layouts.

Monolith's sharding and layout ops take this as one serialised message; here it is frozen dataclasses
that read and write the same bytes. A single value's type and range are checked when a message is
made; what must fit between messages (a slice inside its feature, a shape its slices give) is
checked by `FeatureConfigs.validate`.

It computes no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from enum import IntEnum
from operator import index
from typing import TYPE_CHECKING, Any, Self

from megalith.errors import InputError, UnknownNameError
from megalith.protowire import Field, Writer, fields

if TYPE_CHECKING:
    from typing_extensions import Buffer

Shape = tuple[int, ...]


class PoolingType(IntEnum):
    """What becomes of a feature's rows in one example: reduced to one, or the first n kept in a sequence."""

    SUM = 0
    MEAN = 1
    FIRSTN = 3


class OutType(IntEnum):
    """What becomes of a layout's slices: joined, stacked, added up, or a tensor each (NONE)."""

    CONCAT = 0
    STACK = 1
    ADDN = 2
    NONE = 3


class _ConfigMessage:
    """What all messages share: they are written to and read from Monolith's bytes."""

    __slots__ = ()

    def to_proto(self) -> bytes:
        """The message as protobuf; equal messages give equal bytes."""
        return bytes(self._write())

    @classmethod
    def from_proto(cls, message: Buffer) -> Self:
        """The message in some bytes, fields it does not know left out.

        Raises InputError if they are not protobuf, or hold another message or an unknown enum value.
        """
        return cls._read(fields(message))

    def _write(self) -> Writer:
        raise NotImplementedError

    @classmethod
    def _read(cls, message: Iterable[Field]) -> Self:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SliceConfig(_ConfigMessage):
    """Columns `start:end` of a feature's rows.

    Monolith's op fills the keyword-only fields from the feature's config. Here they are only kept: the
    feature's own config is what counts.
    """

    feature_name: str = ""
    start: int = 0
    end: int = 0
    _: KW_ONLY
    feature_idx: int = 0
    slice_idx: int = 0
    pooling_type: PoolingType = PoolingType.SUM
    max_sequence_length: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "feature_name")
        _fix_int32s(self, "start", "end", "feature_idx", "slice_idx", "max_sequence_length")
        _fix_enum(self, "pooling_type", PoolingType)

    @property
    def width(self) -> int:
        """Number of columns."""
        return self.end - self.start

    def _write(self) -> Writer:
        writer = Writer()
        writer.text(1, self.feature_name)
        for number, name in _SLICE_INTS.items():
            writer.varint(number, getattr(self, name))
        return writer

    @classmethod
    def _read(cls, message: Iterable[Field]) -> Self:
        values: dict[str, Any] = {}
        for part in message:
            if part.number == 1:
                values["feature_name"] = part.text()
            elif part.number in _SLICE_INTS:
                values[_SLICE_INTS[part.number]] = part.int32()
        return cls(**values)


_SLICE_INTS = {
    2: "start",
    3: "end",
    4: "feature_idx",
    5: "slice_idx",
    10: "pooling_type",
    11: "max_sequence_length",
}


@dataclass(frozen=True, slots=True)
class OutConfig(_ConfigMessage):
    """A layout: slices of features, made into one tensor, or into one per slice (NONE).

    shape: each tensor's shape, the batch first as -1 or its size. Empty: what the slices give
    (`FeatureConfigs.output_shapes`).
    """

    slice_configs: tuple[SliceConfig, ...] = ()
    out_type: OutType = OutType.CONCAT
    shape: tuple[Shape, ...] = ()

    def __post_init__(self) -> None:
        _fix_enum(self, "out_type", OutType)
        object.__setattr__(self, "slice_configs", _items(self, "slice_configs", self.slice_configs))
        for i, each in enumerate(self.slice_configs):
            if not isinstance(each, SliceConfig):
                raise _wrong(self, f"slice_configs[{i}]", "a SliceConfig", each)
        shapes = enumerate(_items(self, "shape", self.shape))
        object.__setattr__(self, "shape", tuple(_int32s(self, f"shape[{i}]", dims) for i, dims in shapes))

    def _write(self) -> Writer:
        writer = Writer()
        for each in self.slice_configs:
            writer.message(1, each._write())
        writer.varint(2, self.out_type)
        for dims in self.shape:
            shape = Writer()
            shape.varints(1, dims)
            writer.message(3, shape)
        return writer

    @classmethod
    def _read(cls, message: Iterable[Field]) -> Self:
        slices: list[SliceConfig] = []
        shapes: list[list[int]] = []
        values: dict[str, Any] = {"slice_configs": slices, "shape": shapes}
        for part in message:
            if part.number == 1:
                slices.append(SliceConfig._read(part.message()))
            elif part.number == 2:
                values["out_type"] = part.int32()
            elif part.number == 3:
                dims = [d for dim in part.message() if dim.number == 1 for d in dim.int32s().tolist()]
                shapes.append(dims)
        return cls(**values)


@dataclass(frozen=True, slots=True)
class FeatureConfig(_ConfigMessage):
    """A feature: the table its ids are looked up in, how its rows are pooled, and their parts' sizes.

    slice_dims: the sizes that add up to the row's. max_sequence_length: how many rows FIRSTN keeps.
    """

    table: str = ""
    pooling_type: PoolingType = PoolingType.SUM
    slice_dims: tuple[int, ...] = ()
    max_sequence_length: int = 0

    def __post_init__(self) -> None:
        _check_text(self, "table")
        _fix_enum(self, "pooling_type", PoolingType)
        object.__setattr__(self, "slice_dims", _int32s(self, "slice_dims", self.slice_dims))
        _fix_int32s(self, "max_sequence_length")

    @property
    def dim(self) -> int:
        """Number of columns of its rows."""
        return sum(self.slice_dims)

    def _write(self) -> Writer:
        writer = Writer()
        writer.text(1, self.table)
        writer.varint(2, self.pooling_type)
        writer.varints(3, self.slice_dims)
        writer.varint(4, self.max_sequence_length)
        return writer

    @classmethod
    def _read(cls, message: Iterable[Field]) -> Self:
        dims: list[int] = []
        values: dict[str, Any] = {"slice_dims": dims}
        for part in message:
            if part.number == 1:
                values["table"] = part.text()
            elif part.number == 2:
                values["pooling_type"] = part.int32()
            elif part.number == 3:
                dims += part.int32s().tolist()
            elif part.number == 4:
                values["max_sequence_length"] = part.int32()
        return cls(**values)


@dataclass(frozen=True, slots=True)
class FeatureConfigs(_ConfigMessage):
    """All features and layouts of a model, by name."""

    feature_configs: Mapping[str, FeatureConfig] = field(default_factory=dict)
    out_configs: Mapping[str, OutConfig] = field(default_factory=dict)
    encoded: str = field(init=False, repr=False, compare=False)
    """The bytes of `to_proto`, a character each: the form in which ops take it."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "feature_configs", _named(self, "feature_configs", FeatureConfig))
        object.__setattr__(self, "out_configs", _named(self, "out_configs", OutConfig))
        object.__setattr__(self, "encoded", self.to_proto().decode("latin-1"))

    # ---- names, in the order that numbers them in Monolith's encodings

    @property
    def feature_names(self) -> tuple[str, ...]:
        """All features, sorted."""
        return tuple(sorted(self.feature_configs))

    @property
    def table_names(self) -> tuple[str, ...]:
        """All tables that features look into, sorted."""
        return tuple(sorted({feature.table for feature in self.feature_configs.values()}))

    @property
    def layout_names(self) -> tuple[str, ...]:
        """All layouts, sorted: the order of the layout op's outputs."""
        return tuple(sorted(self.out_configs))

    def features_of(self, table: str) -> tuple[str, ...]:
        """The features that look into a table, sorted. Raises UnknownNameError if there are none."""
        names = tuple(name for name in self.feature_names if self.feature_configs[name].table == table)
        if not names:
            known = ", ".join(self.table_names)
            raise UnknownNameError(f"FeatureConfigs: no feature looks into table {table!r}; tables: {known}")
        return names

    # ---- what fits

    def validate(self) -> None:
        """Raises InputError, naming layout, slice and field, if the messages do not fit each other.

        Every feature has a table and positive slice_dims, and a FIRSTN feature keeps at least one row;
        every slice lies in a feature there is; every declared shape is what `output_shapes` says.
        """
        for name in self.feature_names:
            self._check_feature(name)
        for layout in self.layout_names:
            self.output_shapes(layout)

    def output_shapes(self, layout: str) -> tuple[Shape, ...]:
        """The shape of each tensor of a layout: as declared, which its slices must give, or what they give.

        For slices of widths w of pooled features: CONCAT [batch, sum w], STACK [batch, slices, w],
        ADDN [batch, w], NONE [batch, w] each. For FIRSTN features of one max_sequence_length L:
        [batch, L, sum w], [batch, slices, L, w], no ADDN, and for NONE [batch, L, w] each.
        The batch is -1 unless declared.
        Raises UnknownNameError if there is no such layout, InputError if slices and shapes do not fit.
        """
        if layout not in self.out_configs:
            known = ", ".join(self.layout_names)
            raise UnknownNameError(f"FeatureConfigs: no layout {layout!r}; layouts: {known}")
        declared, given = self.out_configs[layout].shape, self._shapes_given(layout)
        if not declared:
            return given
        if len(declared) != len(given):
            raise _unfit(layout, f"shape declares {len(declared)} tensors, its slices give {len(given)}")
        for i, (shape, wanted) in enumerate(zip(declared, given, strict=True)):
            if len(shape) != len(wanted) or shape[1:] != wanted[1:]:
                rest = ", ".join(map(str, wanted[1:]))
                raise _unfit(layout, f"shape[{i}] is {list(shape)}, its slices give [batch, {rest}]")
            if shape[0] < 1 and shape[0] != -1:
                raise _unfit(layout, f"shape[{i}] is {list(shape)}, its batch must be -1 or positive")
        return declared

    def _shapes_given(self, layout: str) -> tuple[Shape, ...]:
        out = self.out_configs[layout]
        own = [self._slice_shape(layout, i) for i in range(len(out.slice_configs))]
        if not own:
            raise _unfit(layout, "slice_configs is empty; give it a slice or leave the layout out")
        kind, first = out.out_type, own[0]
        if kind == OutType.NONE:
            return tuple((-1, *shape) for shape in own)
        for i, shape in enumerate(own):
            if kind == OutType.ADDN and len(shape) > 1:
                raise _unfit(layout, "ADDN cannot add up a FIRSTN feature", out, i)
            if shape[:-1] != first[:-1]:
                is_, was = (f"FIRSTN of {s[0]}" if len(s) > 1 else "pooled" for s in (shape, first))
                raise _unfit(layout, f"its feature is {is_}, that of slice 0 is {was}", out, i)
            if kind != OutType.CONCAT and shape != first:
                raise _unfit(layout, f"it is {shape[-1]} wide, slice 0 is {first[-1]} wide", out, i)
        if kind == OutType.CONCAT:
            return ((-1, *first[:-1], sum(shape[-1] for shape in own)),)
        return ((-1, len(own), *first) if kind == OutType.STACK else (-1, *first),)

    def _slice_shape(self, layout: str, i: int) -> Shape:
        """What a slice gives for one example: (width,) or, FIRSTN, (max_sequence_length, width)."""
        out = self.out_configs[layout]
        cut = out.slice_configs[i]
        if cut.feature_name not in self.feature_configs:
            raise _unfit(layout, "feature_name is not in feature_configs", out, i)
        feature = self._check_feature(cut.feature_name)
        if not 0 <= cut.start < cut.end <= feature.dim:
            rule = f"must satisfy 0 <= start < end <= {feature.dim}, the sum of slice_dims"
            raise _unfit(layout, f"start {cut.start} and end {cut.end} {rule}", out, i)
        if feature.pooling_type == PoolingType.FIRSTN:
            return (feature.max_sequence_length, cut.width)
        return (cut.width,)

    def _check_feature(self, name: str) -> FeatureConfig:
        feature = self.feature_configs[name]
        firstn = feature.pooling_type == PoolingType.FIRSTN
        if not feature.table:
            problem = "table is empty; name the table its ids are looked up in"
        elif not feature.slice_dims or min(feature.slice_dims) < 1:
            problem = f"slice_dims must be positive sizes, got {list(feature.slice_dims)}"
        elif feature.max_sequence_length < int(firstn):
            told = "at least 1 for FIRSTN" if firstn else "0 or more"
            problem = f"max_sequence_length must be {told}, got {feature.max_sequence_length}"
        else:
            return feature
        raise InputError(f"FeatureConfigs: feature {name!r}: {problem}")

    # ---- bytes

    def _write(self) -> Writer:
        writer = Writer()
        for number, configs in ((1, self.feature_configs), (2, self.out_configs)):
            for name, config in sorted(configs.items()):
                entry = Writer()
                entry.text(1, name, always=True)
                entry.message(2, config._write())
                writer.message(number, entry)
        return writer

    @classmethod
    def _read(cls, message: Iterable[Field]) -> Self:
        features: dict[str, FeatureConfig] = {}
        layouts: dict[str, OutConfig] = {}
        for part in message:
            if part.number not in (1, 2):
                continue
            key, value = part.map_entry()
            name = key.text() if key else ""
            if part.number == 1:
                features[name] = FeatureConfig._read(value.message() if value else ())
            else:
                layouts[name] = OutConfig._read(value.message() if value else ())
        return cls(features, layouts)


def _unfit(layout: str, problem: str, out: OutConfig | None = None, i: int = 0) -> InputError:
    cut = f", slice {i} (feature {out.slice_configs[i].feature_name!r})" if out else ""
    return InputError(f"FeatureConfigs: layout {layout!r}{cut}: {problem}")


def _wrong(owner: _ConfigMessage, name: str, wanted: str, got: object) -> InputError:
    return InputError(f"{type(owner).__name__}: {name} must be {wanted}, got {got!r}")


def _check_text(owner: _ConfigMessage, name: str) -> None:
    if not isinstance(getattr(owner, name), str):
        raise _wrong(owner, name, "a str", getattr(owner, name))


def _fix_enum(owner: _ConfigMessage, name: str, kind: type[IntEnum]) -> None:
    value = getattr(owner, name)
    try:
        object.__setattr__(owner, name, kind(value))
    except ValueError:
        known = ", ".join(f"{each.name} ({each.value})" for each in kind)
        raise _wrong(owner, name, f"one of {known}", value) from None


def _fix_int32s(owner: _ConfigMessage, *names: str) -> None:
    for name in names:
        object.__setattr__(owner, name, _int32(owner, name, getattr(owner, name)))


def _int32(owner: _ConfigMessage, name: str, value: Any) -> int:
    try:
        number = index(value)
    except TypeError:
        number = 2**31
    if isinstance(value, bool) or not -(2**31) <= number < 2**31:
        raise _wrong(owner, name, "an int of 32 bits", value)
    return number


def _int32s(owner: _ConfigMessage, name: str, values: Any) -> tuple[int, ...]:
    return tuple(_int32(owner, f"{name}[{i}]", value) for i, value in enumerate(_items(owner, name, values)))


def _items(owner: _ConfigMessage, name: str, values: Any) -> tuple[Any, ...]:
    if isinstance(values, str | bytes) or not isinstance(values, Iterable):
        raise _wrong(owner, name, "a sequence", values)
    return tuple(values)


def _named(owner: _ConfigMessage, name: str, kind: type[_ConfigMessage]) -> dict[str, Any]:
    values = getattr(owner, name)
    if not isinstance(values, Mapping):
        raise _wrong(owner, name, f"a dict of {kind.__name__} by name", values)
    for key, value in values.items():
        if not isinstance(key, str):
            raise _wrong(owner, name, "a dict by str", key)
        if not isinstance(value, kind):
            raise _wrong(owner, f"{name}[{key!r}]", f"of type {kind.__name__}", value)
    return dict(values)
