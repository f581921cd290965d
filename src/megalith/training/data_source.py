"""DataSource: the readers of a run's training and test data.

Data is either a dataset that splits itself (MovieLens, synthetic clicks) or files that a reader of
`megalith.data.reader_registry` reads. A checkpoint stores the data config with the fitted schema, so that
evaluation and prediction read their files as training did.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megalith.data import MemoryReader, Reader, SyntheticReader, load_movielens, read_movielens
from megalith.data.reader_registry import reader_class
from megalith.data.table_reader import TableReader
from megalith.errors import InputError
from megalith.ops import checks
from megalith.training.config import DataConfig, RunConfig, check_options

SYNTHETIC_BATCHES = 400
TEST_SHARE = 0.1


@dataclass(frozen=True)
class DataSource:
    """The readers of a run."""

    title: str
    """A line about the data, for the user, and a line with the fitted normalisation if there is any."""
    train: Reader
    """The training data."""
    test: Reader | None
    """The test data. None if the config names no test data."""
    validation: Reader | None
    """The data to validate on during training. None if the config names no validation or test data."""
    config: DataConfig
    """The config of the data with the fitted schema."""


def open_source(config: RunConfig) -> DataSource:
    """Open the training and test data of a config.

    Args:
        config: The config of the run.

    Returns:
        The readers. Normalisation is fitted, if the config asks for it.

    Raises:
        InputError: A key is missing or wrong; the message names it.
        DataUnavailableError: MovieLens cannot be downloaded.
    """
    checks.instance(config, RunConfig, "open_source: config")
    return _DATASETS.get(config.data.kind, _files)(config)


def open_test(config: RunConfig) -> Reader | None:
    """Open the test data of a trained run. Its training files may be gone."""
    data = config.data
    if data.kind in _DATASETS:
        return open_source(config).test
    if data.test_path is not None:
        return _file_reader(data, data.test_path)
    if data.split_seconds is None or data.path is None:
        return None
    return _file_reader(data, data.path).between(start=data.split_seconds)


def open_reader(config: DataConfig, path: Path, *, labelled: bool = True) -> Reader:
    """Open other files with the reader and schema of a config.

    Args:
        config: The data config of a trained run. Its `split_time` does not apply to other files.
        path: File or directory.
        labelled: Whether the files have labels.

    Returns:
        The reader of the files.

    Raises:
        InputError: The config's data is a dataset, not files, or a file cannot be read.
    """
    checks.instance(config, DataConfig, "open_reader: config")
    path = checks.path(path, "open_reader: path")
    checks.flag(labelled, "open_reader: labelled")
    if config.kind in _DATASETS:
        raise InputError(f"{config.kind} data is not read from files; train on parquet or csv data instead")
    if not labelled:
        config = replace(config, schema={**config.schema, "label": None, "weight": None})
    return _file_reader(config, str(path), labelled).in_order()


def id_sources(config: DataConfig) -> dict[str, str]:
    """Return where the ids of the features come from, as recorded in the schema; see `FeatureColumn.ids`."""
    # Features with a slot are left out: ids of different slots never meet.
    columns = config.schema.get("features", {})
    return {
        name: column["ids"]
        for name, column in columns.items()
        if isinstance(column, Mapping) and column.get("ids") and column.get("slot") is None
    }


def _movielens(config: RunConfig) -> DataSource:
    check_options("data.options", config.data.options, load_movielens, passed=("cache_dir",))
    history = _integer(config.data.options, "history", 0)
    path = config.data.path
    if isinstance(path, list):
        raise InputError(f"config: data.path must be one directory for movielens, got {path!r}")
    data = load_movielens(history=history) if path is None else read_movielens(path, history=history)
    splits = data.split(1 - TEST_SHARE, 0)
    size = config.data.batch_size
    return DataSource(
        title=f"MovieLens-1M, {len(data.samples):,} ratings, label rating >= 4, the last tenth held out",
        train=MemoryReader(splits.train, batch_size=size, shuffle=config.train.seed),
        **_held_out(config.data, MemoryReader(splits.test, batch_size=size)),
        config=config.data,
    )


def _synthetic(config: RunConfig) -> DataSource:
    options = dict(config.data.options)
    check_options("data.options", options, SyntheticReader, passed=("batch_size",))
    batches = _integer(options, "num_batches", SYNTHETIC_BATCHES)
    options.pop("num_batches", None)
    held_out = max(1, int(batches * TEST_SHARE))
    size = config.data.batch_size
    train = SyntheticReader(batch_size=size, num_batches=batches, **options)
    test = _LaterBatches(batches, batch_size=size, num_batches=batches + held_out, **options)
    title = f"synthetic clicks with known probabilities, {batches:,} batches and {held_out:,} held out"
    return DataSource(title, train, **_held_out(config.data, test), config=config.data)


def _integer(options: Mapping[str, Any], name: str, default: int) -> int:
    value = options.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise InputError(f"config: data.options.{name} must be an integer, got {value!r}")
    return value


class _LaterBatches(SyntheticReader):
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
    if data.split_seconds is not None:
        train = train.between(end=data.split_seconds)
    if isinstance(train, TableReader):
        train = train.with_schema(train.fit())
        data = replace(data, schema=train.schema.to_dict())
    title = f"{data.title}{_normalisation(train)}"
    test = open_test(replace(config, data=data))
    return DataSource(title, train, **_held_out(data, test), config=data)


def _held_out(data: DataConfig, test: Reader | None) -> dict[str, Any]:
    """The test and validation data of a source."""
    for key in ("validation_path", "split_time"):
        if getattr(data, key) is not None and data.kind in _DATASETS:
            raise InputError(f"config: data.{key}: {data.kind} data validates on its held-out part")
    path, time = data.validation_path, data.split_seconds
    if path is not None and time is not None:
        raise InputError(
            "config: data.validation_path and data.split_time both name data to validate on: leave out one"
        )
    if time is not None and data.test_path is not None and data.path is not None:
        return {"test": test, "validation": _file_reader(data, data.path).between(start=time)}
    return {"test": test, "validation": test if path is None else _file_reader(data, path)}


def _normalisation(reader: Reader) -> str:
    """A line with means and standard deviations, if there are any."""
    columns = reader.schema.dense_columns if isinstance(reader, TableReader) else ()
    fitted = [f"{x.column} mean {x.mean:.6g} std {x.std:.6g}" for x in columns if x.mean is not None]
    return f"\nnormalised by {', '.join(fitted)}" if fitted else ""


def _file_reader(config: DataConfig, path: str | list[str], labelled: bool = True) -> Reader:
    options = {"batch_size": config.batch_size, "on_error": config.on_error, **config.options}
    passed = ("paths", "schema", "labelled", "binary_labels")
    check_options("data.options", options, reader_class(config.kind), passed=passed)
    return reader_class(config.kind).from_config(
        path, config.schema, labelled=labelled, binary_labels=labelled, **options
    )


_DATASETS: Mapping[str, Callable[[RunConfig], DataSource]] = {
    "movielens": _movielens,
    "synthetic": _synthetic,
}
