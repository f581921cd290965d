"""Readers of published click logs, with their columns: Criteo, Avazu, Taobao and KuaiRand.

A directory stands for its files of the published names, in the order of their numbers ("day_2" before
"day_10"). Features of users and items that are in files of their own are joined to the lines of the log.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from megalith.data.csv import BLOCK_BYTES, CsvReader
from megalith.data.files import Paths
from megalith.data.reader import SHUFFLE_ROWS, OnError
from megalith.data.schema import DenseColumn, FeatureColumn, Normalise, Schema
from megalith.errors import InputError
from megalith.ops import checks
from megalith.ragged import arrow

CRITEO_INTS = tuple(f"I{i}" for i in range(1, 14))
CRITEO_CATEGORIES = tuple(f"C{i}" for i in range(1, 27))


class PublishedReader(CsvReader):
    """A CsvReader that knows the columns of a published log; see the classes derived from it.

    Args:
        paths: Files or patterns, or the directory of the data.
        batch_size: Rows per batch.
        normalise: Normalisation of numbers. "standard" requires `reader.with_schema(reader.fit())`.
        label: Label column, or several. None: the published one.
        labelled: Whether to read labels. False: of a directory, the test files.
        shuffle: See `Reader`.
        shuffle_rows: See `Reader`.
        prefetch: See `Reader`.
        drop_last: See `Reader`.
        on_error: See `Reader`.
        binary_labels: See `Reader`.
        block_bytes: See `CsvReader`.

    Raises:
        InputError: A file cannot be read, or an argument is out of range.
    """

    click: ClassVar[str]
    """The label column, unless others are given."""
    ids: ClassVar[tuple[str | FeatureColumn, ...]] = ()
    numbers: ClassVar[tuple[str, ...]] = ()
    times: ClassVar[tuple[str, str | None] | None] = None
    """The column of times and its format."""
    train_names: ClassVar[tuple[str, ...]] = ("train",)
    """How the names of files with labels begin."""
    test_names: ClassVar[tuple[str, ...]] = ("test",)
    joins: ClassVar[tuple[tuple[str, str, str], ...]] = ()
    """How the name of another file begins, its key, and the column of the log that holds it."""
    separated_by: ClassVar[str] = ","
    has_header: ClassVar[bool] = True

    def __init__(
        self,
        paths: Paths,
        *,
        batch_size: int,
        normalise: Normalise = "log1p",
        label: str | Sequence[str] | None = None,
        labelled: bool = True,
        shuffle: int | None = None,
        shuffle_rows: int = SHUFFLE_ROWS,
        prefetch: int = 0,
        drop_last: bool = False,
        on_error: OnError = "raise",
        binary_labels: bool = False,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        begins = self.train_names if checks.flag(labelled, "reader: labelled") else self.test_names
        given = paths if isinstance(paths, list | tuple) else [paths]
        found = [file for path in given for file in self._published(path, begins)]
        self._sides = self._read_sides(found[0]) if found and self.joins else []
        joined = {name for side, _ in self._sides for name in side.column_names}
        kept = [each for each in self.ids if _name(each) in joined or not self._is_joined(_name(each))]
        numbers = [x for x in self.numbers if x in joined or not self._is_joined(x)]
        time, form = self.times or (None, None)
        names = [*([self.click] if labelled else []), *self.numbers, *map(_name, self.ids)]
        super().__init__(
            found,
            Schema(
                label=(self.click if label is None else label) if labelled else None,
                features=kept,
                dense=[DenseColumn(name, normalise) for name in numbers],
                time=time,
                time_format=form,
            ),
            batch_size=batch_size,
            columns=None if self.has_header else names,
            delimiter=self.separated_by,
            quote='"' if self.has_header else None,
            shuffle=shuffle,
            shuffle_rows=shuffle_rows,
            prefetch=prefetch,
            drop_last=drop_last,
            on_error=on_error,
            binary_labels=binary_labels,
            block_bytes=block_bytes,
        )

    log_columns: ClassVar[frozenset[str]] = frozenset()
    """Columns of the log itself, if others are joined to it."""

    @classmethod
    def from_config(
        cls, path: str | list[str], schema: Mapping[str, Any], *, labelled: bool = True, **options: Any
    ) -> Self:
        # A schema with features replaces the default one: it is fitted.
        checks.mapping(schema, "config: [data.schema]", '{"features": {"C1": "C1"}}')
        checks.flag(labelled, "reader: labelled")
        reader = cls(path, **(options if labelled else {**options, "labelled": False}))
        return reader.with_schema(Schema.from_dict(schema)) if schema.get("features") else reader

    def _is_joined(self, name: str) -> bool:
        return bool(self.joins) and name not in self.log_columns

    def _published(self, path: Any, begins: tuple[str, ...]) -> list[Any]:
        """The files that a path names: of a directory, those of the published names."""
        try:
            inside = sorted(Path(path).iterdir(), key=_natural) if Path(path).is_dir() else []
        except (TypeError, ValueError, OSError):  # a wrong type or a URI: `list_files` raises about it
            inside = []
        named = [x for x in inside if x.name.startswith(begins) and x.is_file()]
        return list(named) or [path]

    def _read_sides(self, log: Any) -> list[tuple[Any, str]]:
        """The tables of other files of the directory, and the columns of the log with their keys."""
        csv, found = arrow("pyarrow.csv"), []
        if not isinstance(log, str | Path):
            return []
        folder = Path(log) if Path(log).is_dir() else Path(log).parent
        for begin, key, column in self.joins:
            for path in sorted(x for x in folder.glob(f"{begin}*") if x.is_file())[:1]:
                try:
                    given = csv.open_csv(path).schema.names
                    binary = dict.fromkeys(given, arrow().binary())
                    options = csv.ConvertOptions(
                        column_types=binary, null_values=[""], strings_can_be_null=True, check_utf8=False
                    )
                    table = csv.read_csv(path, convert_options=options).combine_chunks()
                except (arrow().ArrowException, OSError) as error:
                    raise InputError(f"{path}: cannot be read: {error}") from None
                names = [name.strip() for name in given]  # a header of Taobao ends in a space
                if key not in names:
                    raise InputError(f"{path}: column {key!r} is missing; the file has {', '.join(names)}")
                found.append((table.rename_columns([column if n == key else n for n in names]), column))
        return found

    @property
    def _line_columns(self) -> list[str]:
        return list(dict.fromkeys([*self._columns, *(column for _, column in self._sides)]))

    def _missing(self, names: list[str], path: Any) -> tuple[str, str] | None:
        joined = (n for side, column in self._sides for n in side.column_names if n != column)
        return super()._missing([*names, *joined], path)

    def _parsed(
        self, path: Any, names: list[str], data: bytes, numbers: NDArray[np.int64]
    ) -> tuple[Any, NDArray[np.int64]]:
        table, numbers = super()._parsed(path, names, data, numbers)
        for side, column in self._sides:
            keys = side.column(column).chunk(0)
            rows = arrow("pyarrow.compute").index_in(table.column(column), value_set=keys)
            for name in self._columns:
                if name not in table.schema.names and name in side.column_names:
                    table = table.append_column(name, side.column(name).chunk(0).take(rows))
        return table, numbers


class CriteoReader(PublishedReader):
    """Reads Criteo's click logs: a label, 13 integers and 26 hexadecimal categories, separated by tabs.

    Both the Kaggle logs (train.txt, test.txt) and the terabyte (day_0 to day_23, plain or .gz). Every value
    except the label may be missing. The features are named C1 to C26; `Batch.dense` is [B, 13] with the
    integers I1 to I13. For the arguments see `PublishedReader`.
    """

    click = "label"
    ids = CRITEO_CATEGORIES
    numbers = CRITEO_INTS
    train_names = ("train", "day_")
    separated_by = "\t"
    has_header = False


class AvazuReader(PublishedReader):
    """Reads Avazu's click log of Kaggle (train.gz, test.gz or .csv): 21 categories and the hour as time.

    For the arguments see `PublishedReader`.
    """

    click = "click"
    ids = (
        *("C1", "banner_pos", "site_id", "site_domain", "site_category", "app_id", "app_domain"),
        *("app_category", "device_id", "device_ip", "device_model", "device_type", "device_conn_type"),
        *(f"C{i}" for i in range(14, 22)),
    )
    times = ("hour", "%y%m%d%H")


class TaobaoReader(PublishedReader):
    """Reads Taobao's display advertising log: raw_sample.csv with ad_feature.csv and user_profile.csv.

    The features of ads and users are left out if their file is not in the directory of the log. For the
    arguments see `PublishedReader`.
    """

    click = "clk"
    ids = (
        *("user", "adgroup_id", "pid", "cate_id", "campaign_id", "customer", "brand", "cms_segid"),
        *("cms_group_id", "final_gender_code", "age_level", "pvalue_level", "shopping_level", "occupation"),
        "new_user_class_level",
    )
    numbers = ("price",)
    times = ("time_stamp", None)
    train_names = test_names = ("raw_sample",)
    joins = (("ad_feature", "adgroup_id", "adgroup_id"), ("user_profile", "userid", "user"))
    log_columns = frozenset(("user", "adgroup_id", "pid"))


class KuaiRandReader(PublishedReader):
    """Reads KuaiRand's logs of videos (log_*.csv) with user_features_*.csv and video_features_basic_*.csv.

    The label is `is_click`; `label=["is_click", "long_view"]` reads several. The features of users and videos
    are left out if their file is not in the directory of the logs. For the arguments see `PublishedReader`.
    """

    click = "is_click"
    ids = (
        *("user_id", "video_id", "tab", "user_active_degree", "follow_user_num_range", "fans_user_num_range"),
        *("friend_user_num_range", "register_days_range", *(f"onehot_feat{i}" for i in range(18))),
        *("author_id", "video_type", "upload_type", "music_id", "music_type"),
        FeatureColumn("tag", separator=","),
    )
    numbers = ("duration_ms",)
    times = ("time_ms", "ms")
    train_names = test_names = ("log_",)
    joins = (("user_features", "user_id", "user_id"), ("video_features_basic", "video_id", "video_id"))
    log_columns = frozenset(("user_id", "video_id", "tab", "duration_ms"))


def _name(column: str | FeatureColumn) -> str:
    return column if isinstance(column, str) else column.column


def _natural(path: Path) -> list[Any]:
    """The order of names by their numbers; every second part is a number."""
    return [int(x) if i % 2 else x for i, x in enumerate(re.split(r"([0-9]+)", path.name))]
