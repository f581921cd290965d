"""Schema: which columns of a file are features, dense values, label, weight and time.

A schema has a JSON form that includes fitted means, so that evaluation and prediction read their files with
the schema of training.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megalith.errors import InputError, UsageError
from megalith.ops import checks
from megalith.ops.ids import NUM_SLOTS

FLOAT32_MAX = float(np.finfo(np.float32).max)
Normalise = Literal["none", "log1p", "standard"]
IdSource = Literal["integer", "xxhash64"]
"""Where ids come from: integers as they are, or the hash of text."""
NanRule = Literal["error", "missing"]


@dataclass(frozen=True)
class FeatureColumn:
    """A column of ids: one id or a list of ids per row. A missing value is an empty row.

    Raises:
        InputError: A field is out of range or has the wrong type.
    """

    column: str
    """Name of the column in the file."""
    slot: int | None = None
    """0 to 32767: ids become `fid(slot, id)`, so that features that share a table do not collide."""
    hash: bool | None = None
    """None hashes text and uses integers as ids (every value of a CSV file is text). True hashes integers as
    text too. False accepts only integers, also those written as text."""
    separator: str | None = None
    """Splits a text into several ids: "|" splits "a|b"."""
    max_length: int | None = None
    """Largest number of ids of a row; further ids are dropped. None: no limit."""
    keep: Literal["first", "last"] = "first"
    """Which ids of a row `max_length` keeps: the first or the last of the list."""
    ids: IdSource | None = None
    """Whether the ids are integers as they are or hashes of text. A reader records it when it opens its first
    file, and refuses files with other ids: they would name other rows. None: no file has been opened."""

    def __post_init__(self) -> None:
        _name("feature", self.column)
        if self.slot is not None and not (isinstance(self.slot, int) and 0 <= self.slot < NUM_SLOTS):
            most = NUM_SLOTS - 1
            raise InputError(f"schema: slot of column {self.column!r} must be 0 to {most}, got {self.slot!r}")
        if not (self.hash is None or isinstance(self.hash, bool)):
            raise InputError(f"schema: hash of column {self.column!r} must be True, False or None")
        if self.separator is not None and (not isinstance(self.separator, str) or not self.separator):
            raise InputError(f"schema: separator of column {self.column!r} must be non-empty text")
        if self.max_length is not None:
            checks.integer(self.max_length, f"schema: max_length of column {self.column!r}")
        checks.one_of(self.keep, ("first", "last"), f"schema: keep of column {self.column!r}")
        if self.ids is not None:
            checks.one_of(self.ids, get_args(IdSource), f"schema: ids of column {self.column!r}")
        if self.ids is not None and self.hash is not None and (self.ids == "xxhash64") != self.hash:
            raise InputError(
                f"schema: ids of column {self.column!r} are {self.ids}, which contradicts hash={self.hash}"
            )


@dataclass(frozen=True)
class DenseColumn:
    """A column of numbers. A missing value is 0 after normalisation.

    Raises:
        InputError: A field is out of range or has the wrong type.
    """

    column: str
    """Name of the column in the file."""
    normalise: Normalise = "none"
    """"log1p": sign(x) * log(1 + |x|). "standard": (x - mean) / std."""
    mean: float | None = None
    """Mean for "standard", given or computed by `reader.fit()`."""
    std: float | None = None
    """Standard deviation for "standard", above 0."""
    nan: NanRule = "error"
    """"error": a row with NaN is a bad row. "missing": NaN is a missing value, like null."""
    indicator: bool = False
    """Whether a second value follows in `Batch.dense`: 1 where the value is missing, otherwise 0."""

    def __post_init__(self) -> None:
        _name("dense", self.column)
        checks.one_of(self.nan, get_args(NanRule), f"schema: nan of column {self.column!r}")
        if not isinstance(self.indicator, bool):
            raise InputError(f"schema: indicator of column {self.column!r} must be True or False")
        checks.one_of(self.normalise, get_args(Normalise), f"schema: normalise of column {self.column!r}")
        if (self.mean is None) != (self.std is None):
            raise InputError(f"schema: column {self.column!r} needs both mean and std, or neither")
        if self.mean is not None and self.std is not None:
            if self.normalise != "standard":
                raise InputError(f'schema: mean and std of column {self.column!r} need normalise="standard"')
            numbers = all(isinstance(x, int | float) and math.isfinite(x) for x in (self.mean, self.std))
            if not numbers or not self.std > 0:
                raise InputError(f"schema: column {self.column!r} needs a finite mean and a std above 0")

    @property
    def is_fitted(self) -> bool:
        """Whether the column needs no fit."""
        return self.normalise != "standard" or self.mean is not None


@dataclass(frozen=True, kw_only=True)
class Schema:
    """The columns to read from a file. A column name stands for a column with default settings.

    Raises:
        InputError: A field has the wrong type, or there are neither features nor dense columns.
    """

    features: Mapping[str, str | FeatureColumn] | Sequence[str | FeatureColumn]
    """Feature name -> column of ids. A list of columns: the features have the names of their columns."""
    label: str | Sequence[str] | None
    """Label column. A list of columns: `Batch.labels` is [B, columns]. None: the labels are NaN."""
    dense: Sequence[str | DenseColumn] = ()
    """Columns of `Batch.dense`, in order; indicators follow their columns."""
    weight: str | None = None
    """Column of row weights of 0 or more."""
    time: str | None = None
    """Column of event times: seconds or timestamps."""
    time_format: str | None = None
    """Format of times that are not: "ms" for milliseconds, or that of text and digits, such as "%y%m%d%H"."""
    feature_columns: dict[str, FeatureColumn] = field(init=False, repr=False, compare=False)
    """`features` with a FeatureColumn for every name."""
    dense_columns: tuple[DenseColumn, ...] = field(init=False, repr=False, compare=False)
    """`dense` with a DenseColumn for every name."""

    def __post_init__(self) -> None:
        given = _by_own_name(self.features) if isinstance(self.features, list | tuple) else self.features
        if not isinstance(given, Mapping) or not all(isinstance(x, str) for x in given):
            raise InputError(
                'schema: features must map names to columns, such as {"user": "user_id"}, or be a list of '
                f'columns, such as ["user", "item"], got {self.features!r}'
            )
        if not isinstance(self.dense, list | tuple):
            raise InputError(f"schema: dense must be a list of columns, got {self.dense!r}")
        labels = self.label if isinstance(self.label, list | tuple) else [self.label]
        for what, name in (*(("label", x) for x in labels), ("weight", self.weight), ("time", self.time)):
            if name is not None:
                _name(what, name)
        if self.time_format is not None and (self.time is None or not _is_text(self.time_format)):
            raise InputError(f'schema: time_format must be "ms" or a format, got {self.time_format!r}')
        features = {
            name: column if isinstance(column, FeatureColumn) else FeatureColumn(column)
            for name, column in given.items()
        }
        dense = tuple(x if isinstance(x, DenseColumn) else DenseColumn(x) for x in self.dense)
        object.__setattr__(self, "feature_columns", features)
        object.__setattr__(self, "dense_columns", dense)
        if not features and not dense:
            raise InputError("schema: there are neither features nor dense columns")

    @property
    def labels(self) -> list[str]:
        """The names of the label columns."""
        if isinstance(self.label, list | tuple):
            return list(self.label)
        return [] if self.label is None else [str(self.label)]

    @property
    def has_several_labels(self) -> bool:
        """Whether the labels of a batch are [B, columns]."""
        return isinstance(self.label, list | tuple) and len(self.label) > 0

    @property
    def columns(self) -> list[str]:
        """The distinct names of all columns to read."""
        names = [*self.labels, self.weight, self.time]
        names += [x.column for x in self.dense_columns] + [x.column for x in self.feature_columns.values()]
        return list(dict.fromkeys(name for name in names if name is not None))

    @property
    def num_dense(self) -> int:
        """Number of values of a row of `Batch.dense`."""
        return sum(1 + column.indicator for column in self.dense_columns)

    def with_ids(self, sources: Mapping[str, IdSource]) -> Schema:
        """Return the schema with the recorded source of the ids of features.

        Args:
            sources: Feature name -> source. A feature that is not listed keeps its source.

        Returns:
            A new schema.
        """
        checks.mapping(sources, "schema: sources", '{"user": "integer"}')
        features = {
            name: replace(column, ids=sources.get(name, column.ids))
            for name, column in self.feature_columns.items()
        }
        return replace(self, features=features)

    # ---- normalisation

    def normalise(self, raw: NDArray[np.float64]) -> Tensor:
        """Normalise dense values.

        Args:
            raw: float64 [n, k]; NaN is a missing value.

        Returns:
            float32 [n, num_dense].

        Raises:
            UsageError: A "standard" column is not fitted.
        """
        _check_raw(raw, len(self.dense_columns))
        out = np.empty((len(raw), self.num_dense), np.float32)
        at = 0
        for i, column in enumerate(self.dense_columns):
            x = raw[:, i]
            if column.normalise == "log1p":
                x = np.sign(x) * np.log1p(np.abs(x))
            elif column.normalise == "standard":
                if column.mean is None or column.std is None:
                    raise UsageError(
                        f"schema: column {column.column!r} has no mean and std; "
                        "set them, or read with `reader.with_schema(reader.fit())`"
                    )
                x = (x - column.mean) / column.std
            missing = np.isnan(x)
            out[:, at] = np.clip(np.where(missing, 0.0, x), -FLOAT32_MAX, FLOAT32_MAX)
            if column.indicator:
                out[:, at + 1] = missing
            at += 1 + column.indicator
        return torch.from_numpy(out)

    @property
    def unfitted(self) -> Schema | None:
        """A schema of the dense columns that have no mean and standard deviation yet. None: there is none."""
        columns = [column for column in self.dense_columns if not column.is_fitted]
        return Schema(label=None, features={}, dense=columns) if columns else None

    def fitted(self, raw: NDArray[np.float64] | Iterable[NDArray[np.float64]]) -> Schema:
        """Return the schema with the missing means and standard deviations.

        Args:
            raw: Dense values, float64 [n, k]; NaN is a missing value. Or parts of them, one after another.

        Returns:
            A new schema in which every column is fitted.

        Raises:
            InputError: A column has no value.
        """
        moments = [_Moments() for _ in self.dense_columns]
        if isinstance(raw, Tensor) or not isinstance(raw, Iterable):
            raise InputError(f"schema: dense values must be an array [n, k], got {type(raw).__name__}")
        for part in [raw] if isinstance(raw, np.ndarray) else raw:
            _check_raw(part, len(moments))
            for i, column in enumerate(self.dense_columns):
                if not column.is_fitted:
                    moments[i].add(part[:, i])
        return self._with_moments(moments)

    def _with_moments(self, moments: Sequence[_Moments]) -> Schema:
        columns = []
        for column, found in zip(self.dense_columns, moments, strict=True):
            if not column.is_fitted:
                if found.count == 0:
                    raise InputError(f"schema: column {column.column!r} has no value to fit")
                column = replace(column, mean=found.mean, std=found.std or 1.0)
            columns.append(column)
        return replace(self, dense=columns)

    def with_fit_of(self, fitted: Schema) -> Schema:
        """Return the schema with the means and standard deviations of another schema.

        Args:
            fitted: A schema of the columns of `unfitted`, in their order, with all values.

        Returns:
            A new schema in which every column is fitted.

        Raises:
            InputError: The other schema has other columns.
        """
        checks.instance(fitted, Schema, "schema: fitted")
        wanted = [column.column for column in self.dense_columns if not column.is_fitted]
        if wanted != [column.column for column in fitted.dense_columns][: len(wanted)]:
            raise InputError(f"schema: the fitted schema must have the columns {', '.join(wanted)}")
        found = iter(fitted.dense_columns)
        dense = [column if column.is_fitted else next(found) for column in self.dense_columns]
        return replace(self, dense=dense)

    # ---- JSON

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON-compatible form."""
        rest = {} if self.time_format is None else {"time_format": self.time_format}
        return {
            "label": self.labels if self.has_several_labels else self.label,
            "features": {name: _slim(column) for name, column in self.feature_columns.items()},
            "dense": [_slim(column) for column in self.dense_columns],
            "weight": self.weight,
            "time": self.time,
            **rest,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Schema:
        """Create a schema from the form that `to_dict` returns.

        Args:
            data: That form; columns may also be plain names, and features a list of columns.

        Returns:
            The schema.

        Raises:
            InputError: The data does not have this form.
        """
        try:
            rest = dict(data) if isinstance(data, Mapping) else {}
            for key in ("features", "label"):
                if key not in rest:
                    raise InputError(
                        f"schema: {key} is missing; a schema has the keys label, features, dense, weight and "
                        'time, such as {"label": "clicked", "features": {"user": "user_id"}}'
                    )
            features = rest.pop("features")
            if isinstance(features, Mapping):
                features = {name: _column(FeatureColumn, x) for name, x in features.items()}
            dense = [_column(DenseColumn, x) for x in rest.pop("dense", ())]
            label = rest.pop("label")
            known = ("weight", "time", "time_format")
            _known("a schema", rest, known, ("label", "features", "dense", *known))
            return cls(features=features, dense=dense, label=label, **rest)
        except (TypeError, KeyError, AttributeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"schema: not the JSON form of a schema: {error}") from None


class _Moments:
    """Count, mean and sum of squared differences from the mean, over any number of parts."""

    def __init__(self) -> None:
        self.count, self.mean, self.squares = 0, 0.0, 0.0
        self._range = math.inf, -math.inf

    @property
    def std(self) -> float:
        """The standard deviation. 0 if all values are equal, whatever the rounding of their mean."""
        low, high = self._range
        return math.sqrt(self.squares / self.count) if low < high else 0.0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add values, float64 [n]; NaN is left out. The update of Chan, Golub and LeVeque is stable."""
        values = values[~np.isnan(values)]
        if not len(values):
            return
        mean = float(values.mean())
        squares = float(np.square(values - mean).sum())
        total = self.count + len(values)
        difference = mean - self.mean
        if self.count:
            mean = self.mean + difference * (len(values) / total)
            squares += self.squares + difference * difference * (self.count * len(values) / total)
        self.count, self.mean, self.squares = total, mean, squares
        self._range = min(self._range[0], float(values.min())), max(self._range[1], float(values.max()))


def _check_raw(raw: Any, width: int) -> None:
    if not isinstance(raw, np.ndarray) or raw.ndim != 2 or raw.shape[1] != width or raw.dtype.kind != "f":
        got = f"{raw.dtype} {list(raw.shape)}" if isinstance(raw, np.ndarray) else type(raw).__name__
        raise InputError(f"schema: dense values must be a float64 array [n, {width}], got {got}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _name(what: str, name: Any) -> None:
    if not isinstance(name, str) or not name:
        raise InputError(f"schema: {what} must name a column, got {name!r}")


def _slim(column: FeatureColumn | DenseColumn) -> Any:
    given = {x.name: getattr(column, x.name) for x in fields(column) if getattr(column, x.name) != x.default}
    return given if len(given) > 1 else column.column


def _by_own_name(columns: Sequence[Any]) -> dict[str, FeatureColumn]:
    """Features with the names of their columns."""
    found = {}
    for each in columns:
        column = _column(FeatureColumn, each) if not isinstance(each, FeatureColumn) else each
        if column.column in found:
            raise InputError(
                f"schema: features lists column {column.column!r} twice; name the features: "
                f'{{"a": "{column.column}", "b": "{column.column}"}}'
            )
        found[column.column] = column
    return found


def _column(kind: Any, data: Any) -> Any:
    if isinstance(data, str):
        return kind(data)
    if not isinstance(data, Mapping) or "column" not in data:
        raise InputError(f"schema: a column is a name or a section with the key column, got {data!r}")
    names = [x.name for x in fields(kind)]
    _known(f"column {data['column']!r}", data, names, names)
    return kind(**data)


def _known(what: str, data: Mapping[str, Any], allowed: Sequence[str], shown: Sequence[str]) -> None:
    for key in data:
        if key not in allowed:
            raise InputError(f"schema: {what} has no key {key!r} (known: {', '.join(shown)})")
