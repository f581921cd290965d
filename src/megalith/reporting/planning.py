"""Forecast of routing from a sample of ids: rows and traffic per rank in each mode, and advice about skew.

`read_sample` reads the sample from a checkpoint, data files or a text file. `forecast` is a pure function of
it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.bits import signed
from megalith.checkpoint import read_manifest
from megalith.checkpoint.manifest import NAME
from megalith.data.compression import open_bytes
from megalith.data.csv import CsvReader
from megalith.data.files import list_files
from megalith.data.reader import Reader
from megalith.data.schema import FeatureColumn, Schema
from megalith.data.table_reader import ParquetReader
from megalith.errors import InputError
from megalith.hashing import hash_strings
from megalith.ragged import NOT_AN_ID, arrow
from megalith.reporting.inspection import find_table, read_ids
from megalith.routing import Router

MAX_LINE = 1 << 20
_ROWS = 65_536
_INTEGER = re.compile(rb"[+-]?[0-9]{1,20}")


@dataclass(frozen=True)
class Sample:
    """n ids in the order of the data."""

    ids: Tensor
    """int64 [n]."""
    counts: Tensor | None
    """Number of updates of each id, int64 [n], if a checkpoint has them."""
    distinct: bool
    """Whether the ids are the rows of a table, each once."""
    source: str
    """Description of the source, for the user."""


def read_sample(
    source: Path,
    *,
    size: int,
    column: str | None = None,
    table: str | None = None,
    hash: bool | None = None,
) -> Sample:
    """Read about `size` ids of a source."""
    # Ids of a checkpoint or of Parquet files are drawn from all of it; of other sources, the first are read.
    if (source / NAME).exists():
        return _from_checkpoint(source, size, table)
    if table is not None:
        raise InputError(f"{source} is not a checkpoint: use --column instead of --table")
    if not source.exists():
        raise InputError(f"{source}: no such file or directory")
    kind = _kind(source)
    if kind == "parquet":
        return _from_parquet(source, size, _column_name(column, source, kind), hash)
    if kind == "csv":
        ids = _take(_csv(source, _column_name(column, source, kind), hash), size)
        return Sample(ids, None, False, f"the first {len(ids):,} ids of column {column}")
    if column is not None:
        raise InputError(f"{source} is read as one id per line; --column is for Parquet, CSV and TSV files")
    ids = _from_lines(source, size, hash)
    return Sample(ids, None, False, f"the first {len(ids):,} lines")


# ---- sources


def _from_checkpoint(root: Path, size: int, table: str | None) -> Sample:
    summary, entries = find_table(read_manifest(root), table)
    if not summary.rows:
        raise InputError(f"{root}: table {summary.name!r} has no rows")
    ids, counts = [], []
    generator = torch.Generator().manual_seed(0)
    for found, count in read_ids(root, entries):
        # Random rows: every n-th row of consecutive ids would introduce a pattern.
        part = -(-size * len(found) // summary.rows)
        chosen = torch.randperm(len(found), generator=generator, device="cpu")[:part]
        ids.append(found[chosen])
        if count is not None:
            counts.append(count[chosen])
    known = torch.cat(counts) if len(counts) == len(ids) else None
    every = torch.cat(ids)
    text = f"{len(every):,} of {summary.rows:,} rows of table {summary.name}"
    return Sample(every, known, known is None, text)


def _from_parquet(source: Path, size: int, column: str, hash: bool | None) -> Sample:
    reader = ParquetReader(source, _schema(column, hash), batch_size=_ROWS, on_error="skip")
    total = reader.num_rows or 0
    if total > size:
        reader = reader.shard(0, -(-total // size))  # row groups, or a part of each, from all files
    ids = _take(_column(reader), size)
    return Sample(ids, None, False, f"{len(ids):,} ids of column {column} ({total:,} rows in total)")


def _csv(source: Path, column: str, hash: bool | None) -> Iterator[Tensor]:
    if hash is not None:
        return _column(CsvReader(source, _schema(column, hash), batch_size=_ROWS, on_error="skip"))
    # Every value of a CSV file is text. The ids are integers if the first ones are.
    try:
        reader = CsvReader(source, _schema(column, False), batch_size=1000)
        next(iter(reader), None)
    except InputError as error:
        if NOT_AN_ID not in str(error):
            raise
        return _csv(source, column, True)
    return _csv(source, column, False)


def _from_lines(source: Path, size: int, hash: bool | None) -> Tensor:
    files = list_files(source, (".txt", ".txt.gz", ".ids"))
    lines = list(islice(_lines(files), size))
    if not lines:
        raise InputError(f"{source} contains no ids")
    if not hash and all(_INTEGER.fullmatch(line) for line in lines):
        return torch.tensor([_integer(line, source) for line in lines], device="cpu")
    if hash is False:
        wrong = next(line for line in lines if not _INTEGER.fullmatch(line))
        raise InputError(f"{source}: {wrong[:60]!r} is not an integer")
    return hash_strings(lines)


def _lines(files: list[Path]) -> Iterator[bytes]:
    for path in files:
        try:
            with open_bytes(path) as file:
                while line := file.readline(MAX_LINE):
                    if len(line) == MAX_LINE:
                        raise InputError(f"{path}: a line has more than {MAX_LINE:,} bytes")
                    if stripped := line.strip():
                        yield stripped
        except (EOFError, OSError) as error:
            raise InputError(f"{path} cannot be read: {error}") from None


# ---- helpers


def _kind(source: Path) -> str:
    def has(suffixes: tuple[str, ...]) -> bool:
        if source.is_dir():
            return any(path.name.endswith(suffixes) for path in source.rglob("*"))
        return source.name.endswith(suffixes)

    if has(ParquetReader.suffixes):
        return "parquet"
    return "csv" if has((".csv", ".tsv", ".csv.gz", ".tsv.gz")) else "lines"


def _column_name(column: str | None, source: Path, kind: str) -> str:
    if column is not None:
        return column
    known = ""
    if kind == "parquet":
        first = list_files(source, ParquetReader.suffixes)[0]
        try:
            names = arrow("pyarrow.parquet").read_schema(first).names
        except (arrow().ArrowException, OSError) as error:
            raise InputError(f"{first} cannot be read as Parquet: {error}") from None
        known = f" (the file has {', '.join(names[:20])})"
    raise InputError(f"{source}: name the column of ids with --column{known}")


def _schema(column: str, hash: bool | None) -> Schema:
    return Schema(features={"ids": FeatureColumn(column, hash=hash)}, label=None)


def _column(reader: Reader) -> Iterator[Tensor]:
    for batch in reader:
        yield batch.features["ids"].values


def _take(parts: Iterator[Tensor], size: int) -> Tensor:
    taken: list[Tensor] = []
    left = size
    for part in parts:
        taken.append(part[:left])
        left -= len(taken[-1])
        if left <= 0:
            break
    ids = torch.cat(taken) if taken else torch.empty(0, dtype=torch.int64, device="cpu")
    if not len(ids):
        raise InputError("the source contains no ids")
    return ids


def _integer(line: bytes, source: Path) -> int:
    value = int(line)
    if not -(2**63) <= value < 2**64:
        raise InputError(f"{source}: {value} does not fit in 64 bits")
    return signed(value)


SKEWED = 1.25
"""A rank with more than this multiple of the mean load is reported."""

MAX_RANKS = 65_536
_TOP = 10
_NOISE = 5.0

Kind = Literal["pattern", "hot ids", "block size", "continuous", "small sample"]


@dataclass(frozen=True)
class Load:
    """The load of each rank: a number of rows, occurrences or sent ids."""

    per_rank: list[int]

    @property
    def mean(self) -> float:
        return sum(self.per_rank) / len(self.per_rank)

    @property
    def imbalance(self) -> float:
        """(max - min) / mean. 0 is balanced."""
        return (max(self.per_rank) - min(self.per_rank)) / self.mean if self.mean else 0.0

    @property
    def peak(self) -> float:
        """max / mean. 1 is balanced; the number of ranks means that one rank has everything."""
        return max(self.per_rank) / self.mean if self.mean else 1.0


@dataclass(frozen=True)
class ModeForecast:
    mode: str
    block_size: int | None
    rows: Load
    """Distinct ids."""
    traffic: Load | None
    """Occurrences. None if they are unknown."""
    sent: Load | None
    """Ids sent, each once per batch. None without a batch size."""


class HotId(NamedTuple):
    id: int
    occurrences: int
    share: float


@dataclass(frozen=True)
class Advice:
    """An observation about the ids and the remedy."""

    kind: Kind
    text: str
    is_warning: bool = True
    """Whether it is a warning about skew, or only a note."""


@dataclass(frozen=True)
class Forecast:
    ranks: int
    num_distinct: int
    occurrences: int | None
    """None if only distinct ids are known."""
    batch_size: int | None
    modes: dict[str, ModeForecast]
    hottest: list[HotId]
    advice: list[Advice]
    recommended: str


def forecast(
    ids: Tensor,
    *,
    ranks: int,
    counts: Tensor | None = None,
    distinct: bool = False,
    block_size: int | None = None,
    batch_size: int | None = None,
) -> Forecast:
    """Compute the load of each rank in each routing mode for a sample of ids."""
    # ids: int64 [n], in the order of the data; counts: number of occurrences of each id, int64 [n].
    if ranks > MAX_RANKS:
        raise InputError(f"plan: ranks must be 1 to {MAX_RANKS}, got {ranks}")
    unique, inverse = torch.unique(ids, return_inverse=True)
    weights = torch.ones_like(ids) if counts is None else counts
    per_id = torch.zeros_like(unique).index_add_(0, inverse, weights)
    per_id = per_id if not distinct else torch.ones_like(unique)
    batches = None if batch_size is None or distinct else _times_sent(inverse, len(unique), batch_size)
    fitted = fitting_block(unique, ranks)

    def under(router: Router) -> ModeForecast:
        owner = router.owner(unique)
        return ModeForecast(
            router.mode,
            router.block_size,
            _load(owner, torch.ones_like(unique), ranks),
            None if distinct else _load(owner, per_id, ranks),
            None if batches is None else _load(owner, batches, ranks),
        )

    modes = {
        mode: under(Router(mode, ranks, block_size=(block_size or fitted) if mode == "continuous" else None))
        for mode in ("roundrobin", "hash_roundrobin", "continuous")
    }
    hottest = [] if distinct else _hottest(unique, per_id)
    facts = _Facts(unique, ranks, modes, hottest, batch_size, block_size)
    fixed = under(Router("continuous", ranks, block_size=fitted))
    pattern = _pattern(facts)
    recommended = "hash_roundrobin" if pattern else "roundrobin"
    return Forecast(
        ranks=ranks,
        num_distinct=len(unique),
        occurrences=None if distinct else int(weights.sum()),
        batch_size=batch_size,
        modes=modes,
        hottest=hottest,
        advice=[*_small(facts), *pattern, *_hot(facts), *_blocks(facts, fixed, recommended)],
        recommended=recommended,
    )


def fitting_block(unique: Tensor, ranks: int) -> int:
    """Return the block size with which "continuous" covers all ids from 0 to the largest."""
    # unique: distinct ids, int64 [n].
    largest = max(int(unique.max()), 0)
    return min(-(-(largest + 1) // ranks), (2**63 - 1) // ranks)


# ---- counting


def _load(owner: Tensor, weights: Tensor, ranks: int) -> Load:
    total = torch.zeros(ranks, dtype=torch.int64, device="cpu").index_add_(0, owner.long(), weights)
    return Load(total.tolist())


def _times_sent(inverse: Tensor, num_distinct: int, batch_size: int) -> Tensor:
    """Number of batches that contain each distinct id, int64 [num_distinct]."""
    batch = torch.arange(len(inverse), device="cpu") // batch_size
    once = torch.unique(batch * num_distinct + inverse)
    return torch.bincount(once % num_distinct, minlength=num_distinct)


def _hottest(unique: Tensor, per_id: Tensor) -> list[HotId]:
    total = int(per_id.sum())
    order = torch.sort(per_id, descending=True, stable=True).indices[:_TOP].tolist()
    return [HotId(int(unique[i]), int(per_id[i]), int(per_id[i]) / total) for i in order if total]


# ---- advice


@dataclass(frozen=True)
class _Facts:
    unique: Tensor
    ranks: int
    modes: dict[str, ModeForecast]
    hottest: list[HotId]
    batch_size: int | None
    block_size: int | None

    @property
    def limit(self) -> float:
        """The largest peak that chance explains: random placement is not perfectly balanced either."""
        return max(SKEWED, 1 + _NOISE * math.sqrt(self.ranks / len(self.unique)))

    @property
    def fair(self) -> float:
        return 1 / self.ranks

    def is_skewed(self, load: Load) -> bool:
        return self.ranks > 1 and load.peak > self.limit


def _small(facts: _Facts) -> list[Advice]:
    if facts.ranks == 1 or len(facts.unique) >= 100 * facts.ranks:
        return []
    text = (
        f"{len(facts.unique):,} distinct ids are few for {facts.ranks:,} ranks: "
        "differences may be random; use a larger sample"
    )
    return [Advice("small sample", text, is_warning=False)]


def _pattern(facts: _Facts) -> list[Advice]:
    """Ids that fall on few ranks, which hashing fixes."""
    plain, hashed = facts.modes["roundrobin"], facts.modes["hash_roundrobin"]
    if facts.is_skewed(plain.rows) and not facts.is_skewed(hashed.rows):
        what, before, after = "rows", plain.rows, hashed.rows
    elif (
        plain.traffic is not None
        and hashed.traffic is not None
        and facts.is_skewed(plain.traffic)
        and not facts.is_skewed(hashed.traffic)
        and facts.hottest[0].share < facts.fair / 4  # otherwise it is one id, and its rank is chance
    ):
        what, before, after = "traffic", plain.traffic, hashed.traffic
    else:
        return []
    text = (
        f"the ids follow a pattern{_stride(facts.unique, facts.ranks)}: with roundrobin "
        f"{_busiest(before, what)}; use hash_roundrobin, where {_busiest(after, what)}"
    )
    return [Advice("pattern", text)]


def _hot(facts: _Facts) -> list[Advice]:
    """Ids so frequent that their owner has too much traffic in every mode."""
    hashed = facts.modes["hash_roundrobin"]
    if hashed.traffic is None or not facts.is_skewed(hashed.traffic) or facts.is_skewed(hashed.rows):
        return []
    named = [hot for hot in facts.hottest if hot.share >= facts.fair / 4][:3] or facts.hottest[:1]
    names = ", ".join(f"{hot.id} ({hot.share:.1%} of the traffic)" for hot in named)
    text = (
        f"hot id{'' if len(named) == 1 else 's'} {names}; the mean is {facts.fair:.1%} per rank. "
        f"Hashing does not help, because an id has one owner: {_busiest(hashed.traffic, 'traffic')}."
    )
    if hashed.sent is None:
        remedy = (
            "An id is sent once per batch, which reduces the skew; else cache the hottest rows on every rank"
        )
        return [Advice("hot ids", f"{text} {remedy}")]
    after = f"{text} Each id is sent once per batch: with batches of {facts.batch_size:,} max/mean is "
    if facts.is_skewed(hashed.sent):
        remedy = "use larger batches, or cache the hottest rows on every rank"
        return [Advice("hot ids", f"{after}still {hashed.sent.peak:.2f}; {remedy}")]
    return [Advice("hot ids", f"{after}{hashed.sent.peak:.2f}, no action is needed", is_warning=False)]


def _blocks(facts: _Facts, fixed: ModeForecast, recommended: str) -> list[Advice]:
    """A wrong block size, or ids for which no block size works."""
    now, hashed = facts.modes["continuous"], facts.modes["hash_roundrobin"]
    asked = facts.block_size is not None
    low, high = int(facts.unique.min()), int(facts.unique.max())
    if facts.is_skewed(now.rows) and asked and not facts.is_skewed(fixed.rows):
        text = (
            f"continuous with block size {facts.block_size:,} does not match ids up to {high:,}: "
            f"{_busiest(now.rows, 'rows')}; use --block-size {fixed.block_size}, "
            f"where {_busiest(fixed.rows, 'rows')}"
        )
        return [Advice("block size", text)]
    if facts.is_skewed(now.rows):
        text = (
            f"continuous does not suit these ids ({low} to {high}) with any block size: they do not "
            f"fill 0 to n evenly, {_busiest(now.rows, 'rows')}; use {recommended}"
        )
        return [Advice("continuous", text, is_warning=asked)]
    for what, load, other in (("sent ids", now.sent, hashed.sent), ("traffic", now.traffic, hashed.traffic)):
        if load and other and facts.is_skewed(load) and load.peak > SKEWED * other.peak:
            text = (
                f"continuous does not suit these ids: frequent ids are next to each other, "
                f"{_busiest(load, what)}; use {recommended}"
            )
            return [Advice("continuous", text, is_warning=asked)]
    return []


def _busiest(load: Load, what: str) -> str:
    top = max(load.per_rank)
    share = top / max(sum(load.per_rank), 1)
    return f"rank {load.per_rank.index(top)} has {share:.0%} of the {what} (max/mean {load.peak:.2f})"


def _stride(unique: Tensor, ranks: int) -> str:
    """ " (all are 0 mod 8)" if the common step of the ids shares a factor with the number of ranks."""
    values = np.sort(unique.numpy().view(np.uint64))
    step = int(np.gcd.reduce(np.diff(values))) if len(values) > 1 else 0
    if math.gcd(step, ranks) > 1:
        return f" (all are {int(values[0]) % step} mod {step})"
    return ""
