"""DataSource: the readers a run's config asks for, and what they will give.

A checkpoint keeps the config with the fitted schema, so that evaluation and prediction read their files
as training did.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from megalith.data import (
    CriteoReader,
    CsvReader,
    MemoryReader,
    ParquetReader,
    Reader,
    Schema,
    SyntheticReader,
    load_movielens,
    read_movielens,
)
from megalith.errors import InputError
from megalith.training.run_config import DataConfig, RunConfig

TEACHER_BATCHES = 400
TEST_SHARE = 0.1


@dataclass(frozen=True)
class DataSource:
    """Readers for training and testing, and what a batch of them holds.

    config: the data's config with everything fitted.
    """

    title: str
    train: Reader
    test: Reader | None
    features: list[str]
    num_dense: int
    config: DataConfig


def open_source(config: RunConfig) -> DataSource:
    """The readers of a config. Raises InputError, naming the key, where something is missing."""
    opened: DataSource = _OPEN[config.data.kind](config)
    return opened


def open_reader(config: DataConfig, path: Path, *, labelled: bool = True) -> Reader:
    """A reader of one file or directory, read as this config's data was; without labels if asked."""
    if config.kind in ("movielens", "teacher"):
        raise InputError(f"{config.kind} data are not read from a file; give data of kind parquet or csv")
    if not labelled:
        config = replace(config, schema={**config.schema, "label": None, "weight": None})
        if config.kind == "criteo":
            config = replace(config, options={**config.options, "labelled": False})
    return _file_reader(config, str(path))


def _movielens(config: RunConfig) -> DataSource:
    options = dict(config.data.options)
    history = int(options.pop("history", 0))
    _no_more("movielens", options)
    path = config.data.path
    data = load_movielens(history=history) if path is None else read_movielens(path, history=history)
    splits = data.split(1 - TEST_SHARE, 0)
    size = config.data.batch_size
    return DataSource(
        title=f"MovieLens-1M, {len(data.samples):,} ratings, label rating >= 4, the last tenth held back",
        train=MemoryReader(splits.train, batch_size=size, shuffle=config.train.seed),
        test=MemoryReader(splits.test, batch_size=size),
        features=list(data.samples.features),
        num_dense=0,
        config=config.data,
    )


def _teacher(config: RunConfig) -> DataSource:
    options = dict(config.data.options)
    batches = int(options.pop("num_batches", TEACHER_BATCHES))
    held = max(1, int(batches * TEST_SHARE))
    try:
        train = SyntheticReader(batch_size=config.data.batch_size, num_batches=batches, **options)
        test = _After(batches, batch_size=config.data.batch_size, num_batches=batches + held, **options)
    except TypeError as error:
        raise InputError(f"config: data.options: {error}") from None
    names = [feature.name for feature in train.features]
    title = f"made-up clicks of a known teacher, {batches:,} batches and {held:,} after them held back"
    return DataSource(title, train, test, names, train.num_dense, config.data)


class _After(SyntheticReader):
    """Teacher data from a batch on."""

    def __init__(self, first: int, **options: Any) -> None:
        super().__init__(**options)
        self.first = first

    def _start(self) -> dict[str, Any]:
        return {"batch": self.first // self.world_size}


def _files(config: RunConfig) -> DataSource:
    data = config.data
    if data.path is None:
        raise InputError(f"config: data.path must name the {data.kind} files to train on")
    train = _file_reader(data, data.path)
    schema = getattr(train, "schema", None)
    if schema is not None:
        fitted = train.fit()  # type: ignore[attr-defined]
        train.schema = fitted  # type: ignore[attr-defined]
        data = replace(data, schema=fitted.to_dict())
    test = None if data.test_path is None else _file_reader(data, data.test_path)
    if data.kind == "monolith":
        names, dense = list(train.features), sum(train.dense.values())  # type: ignore[attr-defined]
    else:
        names, dense = list(fitted.feature_columns), len(fitted.dense_columns)
    return DataSource(f"{data.kind} files {data.path}", train, test, names, dense, data)


def _file_reader(config: DataConfig, path: str) -> Reader:
    options: dict[str, Any] = {
        "batch_size": config.batch_size,
        "on_error": config.on_error,
        **config.options,
    }
    try:
        if config.kind == "criteo":
            reader = CriteoReader(path, **options)
            if config.schema.get("features"):
                reader.schema = Schema.from_dict(config.schema)
            return reader
        if config.kind == "monolith":
            # By name: the core does not import compat.
            reader_class = import_module("megalith.compat.monolith").MonolithReader
            return cast(Reader, reader_class(path, **options))
        if not config.schema.get("features"):
            raise InputError(f"config: [data.schema] must say which columns of {path} are features and label")
        schema = Schema.from_dict({"label": None, **config.schema})
        return (ParquetReader if config.kind == "parquet" else CsvReader)(path, schema, **options)
    except TypeError as error:
        raise InputError(f"config: data.options: {error}") from None


def _no_more(kind: str, options: Mapping[str, Any]) -> None:
    if options:
        raise InputError(f"config: data.options of {kind} data: unknown {', '.join(options)}")


_OPEN: dict[str, Any] = {
    "movielens": _movielens,
    "teacher": _teacher,
    "parquet": _files,
    "csv": _files,
    "criteo": _files,
    "monolith": _files,
}
