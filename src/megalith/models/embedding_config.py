"""EmbeddingConfig: the features of a model and how its tables are built.

It is plain data, validated at construction and shared by all models. A model defines the segments of its rows
and the tensors that it needs; `collection` builds the EmbeddingCollection.
"""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from difflib import get_close_matches
from typing import Any

from megalith.errors import InputError, UnknownNameError
from megalith.nn import Combiner, EmbeddingCollection, Feature, FirstN, Layout, Mean
from megalith.ops import checks
from megalith.shards import Shards
from megalith.table import (
    Adagrad,
    Admission,
    Eviction,
    Initializer,
    Optimizer,
    Segment,
    ServingPrecision,
    TableConfig,
    Uniform,
)

_CLOSE = 0.7
"""Similarity of two names, 0 to 1 as for difflib, above which one is taken for a misspelling."""

MakeShards = Callable[[list[TableConfig]], Shards]
Serving = ServingPrecision | str


@dataclass(frozen=True)
class TableSettings:
    """The settings of one table. Where a value is for a segment, a list has one for each segment of a row."""

    admission: Admission | None = None
    """Which new ids get a row, as for TableConfig."""
    eviction: Sequence[Eviction] = ()
    """Which rows are removed, as for TableConfig."""
    precision: str | Sequence[str] | None = None
    """The stored type of the embedding, or one type for each segment of a row; None: that of all tables."""
    rounding: str | None = None
    """How a step rounds weights of 16 bits; None: as in all tables."""
    serving: Serving | Sequence[Serving | None] | None = None
    """How servers store the embedding, or each segment of a row, as for Segment; None: as in all tables."""
    trainable: bool = True
    """With False, training does not change the table, as for TableConfig."""
    huge_pages: bool | None = None
    """Whether the table asks for pages of 2 MiB, as for TableConfig; None: as all tables."""
    device_bytes: int | None = None
    """Bytes of rows in GPU memory, as for TableConfig; 0: no limit; None: as all tables."""
    deterministic: bool | None = None
    """Whether updates on a GPU add in a fixed order, as for TableConfig; None: as all tables."""
    optimizer: Optimizer | Sequence[Optimizer | None] | None = None
    """The optimizer of all segments that have that of all tables, or one for each segment of a row; None: as
    all tables."""
    initializer: Initializer | Sequence[Initializer | None] | None = None
    """The initializer of the embedding, or one for each segment of a row; None: as all tables."""
    missing: str | None = None
    """What an id without a row reads as, as for TableConfig; None: as all tables."""
    dist_type: str | None = None
    """How rows are spread over ranks, as for TableConfig; None: as all tables."""


@dataclass(frozen=True)
class EmbeddingConfig:
    """The embeddings of a model. Raises InputError or UnknownNameError for a wrong field."""

    features: Sequence[str] | Mapping[str, Combiner]
    """Names of features, each combined by Mean(), or combiners by name."""
    _: KW_ONLY
    dim: int = 16
    """The dim of an embedding."""
    optimizer: Optimizer = field(default_factory=lambda: Adagrad(0.05))
    """The optimizer of all tables."""
    initializer: Initializer = field(default_factory=Uniform)
    """The initializer of all embeddings."""
    missing: str = "initial"
    """What an id without a row reads as, as for TableConfig."""
    precision: str = "float32"
    """The stored type of all embeddings, as for Segment."""
    rounding: str = "nearest"
    """How a step rounds embeddings of 16 bits, as for Segment."""
    serving: Serving | None = None
    """How servers store all embeddings, as for Segment."""
    huge_pages: bool = True
    """Whether the tables ask for pages of 2 MiB, as for TableConfig."""
    device_bytes: int | None = None
    """Bytes of rows of each table in GPU memory, as for TableConfig."""
    deterministic: bool = True
    """Whether updates on a GPU add in a fixed order, as for TableConfig."""
    tables: Mapping[str, str] = field(default_factory=dict)
    """Table name by feature. A feature that is not listed has its own table with the same name."""
    admission: Admission | None = None
    """Which new ids get a row, in all tables; as for TableConfig."""
    eviction: Eviction | Sequence[Eviction] = ()
    """Which rows are removed, in all tables; as for TableConfig."""
    settings: Mapping[str, TableSettings] = field(default_factory=dict)
    """The settings of single tables by name. `admission` and `eviction` then do not apply to them."""
    evict_every: int | None = None
    """In how many steps the eviction policies pass over the tables; as for EmbeddingCollection."""
    update: str = "backward"
    """When tables are updated, "backward" or "step": as for EmbeddingCollection."""
    shards: Shards | MakeShards | None = None
    """Shards with the tables, or a function from a list of TableConfig to Shards; None: the default."""
    engine: str | None = None
    """As for EmbeddingCollection; not with shards."""
    seed: int | None = None
    """The seed of initial rows; not with shards. Dense weights use torch's seed."""
    dist_type: str | None = None
    """How rows are spread over ranks, as for TableConfig."""
    id_sources: Mapping[str, str] = field(default_factory=dict)
    """Where the ids of a feature come from, such as "integer" or "xxhash64" (see `FeatureColumn.ids`).
    Features that share a table must agree: an integer and the hash of its text are different ids. A feature
    that is not listed is not checked."""

    def __post_init__(self) -> None:
        listed = isinstance(self.features, list | tuple | Mapping)
        if not listed or not self.features or not all(isinstance(name, str) for name in self.features):
            raise InputError(f"EmbeddingConfig: features must be a list of names, got {self.features!r}")
        if len(self.combiners) < len(self.features):
            raise InputError(f"EmbeddingConfig: names of features must differ, got {self.features!r}")
        for name, combiner in self.combiners.items():
            if not isinstance(combiner, Combiner) or isinstance(combiner, FirstN):
                raise InputError(
                    f"feature {name!r}: combiner must be Sum(), Mean() or Sqrtn(), got {combiner!r}"
                )
        if not isinstance(self.tables, Mapping) or not all(isinstance(x, str) for x in self.tables.values()):
            raise InputError(f"EmbeddingConfig: tables must map features to tables, got {self.tables!r}")
        for name in self.tables:
            if name not in self.combiners:
                known = ", ".join(map(repr, self.combiners))
                raise UnknownNameError(f"tables: unknown feature {name!r} (known: {known})")
        checks.mapping(self.settings, "EmbeddingConfig: settings", '{"user": TableSettings(...)}')
        for name, settings in self.settings.items():
            checks.instance(settings, TableSettings, f"EmbeddingConfig: settings of table {name!r}")
        self._warn_of_misspelt_tables()
        self.segment()

    def _warn_of_misspelt_tables(self) -> None:
        """Warn if a feature is given a table that no other feature has, with almost the name of one."""
        used = Counter(self.table(name) for name in self.combiners)
        for feature, table in self.tables.items():
            others = [name for name in used if name != table and not _same_but_digits(name, table)]
            close = get_close_matches(table, others, 1, _CLOSE)
            if used[table] == 1 and table != feature and close:
                warnings.warn(
                    f"feature {feature!r} is the only one of table {table!r}, which will be a new table; did "
                    f"you mean {close[0]!r}?",
                    stacklevel=4,
                )

    @property
    def combiners(self) -> dict[str, Combiner]:
        """The combiner of each feature, in declared order."""
        if isinstance(self.features, Mapping):
            return dict(self.features)
        return {name: Mean() for name in self.features}

    def table(self, feature: str) -> str:
        """Return the name of the table of a feature.

        Args:
            feature: The name of the feature.

        Returns:
            That of `tables`, or the name of the feature itself.
        """
        return self.tables.get(checks.text(feature, "EmbeddingConfig: feature"), feature)

    def segment(self) -> Segment:
        """Return the segment of the embedding."""
        return Segment(
            self.dim,
            optimizer=self.optimizer,
            initializer=self.initializer,
            precision=self.precision,
            rounding=self.rounding,
            serving=self.serving,
        )

    def collection(
        self,
        layouts: Sequence[Layout],
        *,
        segments: Sequence[Segment] | None = None,
        more: Sequence[Feature] = (),
    ) -> EmbeddingCollection:
        """Return a new collection.

        Args:
            layouts: The outputs.
            segments: The segments of a row; None: the embedding alone.
            more: Features in addition to those of the config.

        Returns:
            A collection with one table for each table name of the features.

        Raises:
            UnknownNameError: If the shards do not have a table, or no feature has a table of `settings`.
            InputError: If a table of the shards has other segments, features of one table have ids from
                different sources, or the precision of a table is wrong.
        """
        features = [Feature(name, self.table(name), combiner) for name, combiner in self.combiners.items()]
        if not isinstance(more, list | tuple) or not all(isinstance(each, Feature) for each in more):
            raise InputError(f"EmbeddingConfig: more must be a list of Features, got {more!r}")
        features += more
        self._check_id_sources(features)
        row = [self.segment()] if segments is None else segments
        names = dict.fromkeys(feature.table for feature in features)
        for name in self.settings:
            if name not in names:
                known = ", ".join(map(repr, names))
                raise UnknownNameError(f"settings: unknown table {name!r} (known: {known})")
        configs = [self._table_config(name, row) for name in names]
        tables: Sequence[TableConfig] | Shards = configs
        if self.shards is not None:
            if isinstance(self.shards, Shards) and (self.admission or self.eviction or self.settings):
                raise InputError(
                    "EmbeddingConfig: the shards already have policies and settings; pass them in their "
                    "configs"
                )
            tables = self.shards if isinstance(self.shards, Shards) else self.shards(configs)
            _check_rows(tables, configs)
        return EmbeddingCollection(
            tables,
            features,
            layouts=layouts,
            update=self.update,
            evict_every=self.evict_every,
            engine=self.engine,
            seed=self.seed,
        )

    def _table_config(self, name: str, row: Sequence[Segment]) -> TableConfig:
        own = self.settings.get(name)

        def chosen(key: str) -> Any:
            value = None if own is None else getattr(own, key)
            return getattr(self, key) if value is None else value

        return TableConfig(
            name,
            segments=row if own is None else self._own_segments(name, row, own),
            admission=self.admission if own is None else own.admission,
            eviction=self.eviction if own is None else own.eviction,
            missing=chosen("missing"),
            dist_type=chosen("dist_type"),
            trainable=own is None or own.trainable,
            huge_pages=chosen("huge_pages"),
            device_bytes=chosen("device_bytes") or None,
            deterministic=chosen("deterministic"),
        )

    def _own_segments(self, name: str, row: Sequence[Segment], own: TableSettings) -> list[Segment]:
        """Return the segments of a row with the settings of one table."""
        found = []
        for number, each in enumerate(row):
            values = {
                field: self._of_segment(name, row, number, field, getattr(own, field))
                for field in ("optimizer", "initializer", "precision", "serving")
            }
            rounding = self.rounding if own.rounding is None else own.rounding
            values["rounding"] = "nearest" if values["precision"] == "float32" else rounding
            found.append(replace(each, **values))
        # Shared rounding does not apply to a table of float32; its own rounding must have an effect.
        if own.rounding not in (None, "nearest") and all(each.precision == "float32" for each in found):
            raise InputError(f"table {name!r}: float32 is not rounded; set precision to float16 or bfloat16")
        return found

    def _of_segment(self, name: str, row: Sequence[Segment], number: int, field: str, given: Any) -> Any:
        """Return a setting of one table for a segment of a row; one value is that of the embedding."""
        segment, shared = row[number], getattr(self, field)
        if isinstance(given, list | tuple):
            if len(given) != len(row):
                raise InputError(
                    f"table {name!r}: {field} must be one value, or one for each of the {len(row)} segments "
                    f"of a row, got {given!r}"
                )
            value = given[number]
            # None is a value of serving; elsewhere it stands for that of the segment.
            return getattr(segment, field) if value is None and field != "serving" else value
        if segment == self.segment() or (field == "optimizer" and segment.optimizer == shared):
            return shared if given is None else given
        return getattr(segment, field)

    def _check_id_sources(self, features: Sequence[Feature]) -> None:
        first: dict[str, str] = {}
        for feature in features:
            if feature.name not in self.id_sources:
                continue
            other = first.setdefault(feature.table, feature.name)
            own, others = self.id_sources[feature.name], self.id_sources[other]
            if own != others:
                raise InputError(
                    f"features {other!r} and {feature.name!r} share table {feature.table!r}, but the ids of "
                    f"{other!r} are {others} and those of {feature.name!r} are {own}, so that equal values "
                    "have different rows; give both columns the same type or hash=True (config file: hash = "
                    "true), give each a slot, or give each its own table"
                )


def _same_but_digits(a: str, b: str) -> bool:
    """Return whether names differ in digits alone, as "item1" and "item2" do on purpose."""
    return re.sub(r"\d", "", a) == re.sub(r"\d", "", b)


def _check_rows(shards: Shards, configs: Sequence[TableConfig]) -> None:
    for config in configs:
        shards.check_name(config.name)
        held = [segment.dim for segment in shards.configs[config.name].segments]
        needed = [segment.dim for segment in config.segments]
        if held != needed:
            raise InputError(
                f"shards: table {config.name!r} has segments with dims {held}, but the model needs {needed}"
            )
