"""The directory of a run: its lock, its newest checkpoint, and the earlier checkpoints that it keeps.

`RunLock`: one process trains in the directory of a run, and its training sessions have rising numbers.
Servers refuse what a session with a lower number pushes. So a rank of a killed run that is still alive cannot
overwrite what the resumed run pushes, and of two trainers of one model the one that began later wins.

`RunCheckpoints` keeps earlier checkpoints in checkpoints/step-000000001200 and deletes old ones. A kept
checkpoint shares its files with the newest checkpoint by hard links, so that keeping it writes no data. The
files are copied if the file system has no hard links. Files of a checkpoint are never changed, only replaced,
so the linked files stay valid.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import time
import weakref
from pathlib import Path
from types import TracebackType
from typing import Self

from megalith.checkpoint import Rotation, read_manifest
from megalith.checkpoint.manifest import NAME, commit
from megalith.errors import UsageError
from megalith.ops import checks
from megalith.storage.store import LocalStore
from megalith.training.config import TrainConfig

LOCK_FILE = ".lock"
"""The file in the directory of the run; it holds the number of the last session."""
_UNSUPPORTED = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)


class RunLock:
    """Locks the directory of a run for this process, as a context manager.

    A process that ends, or is killed, releases the lock; processes that it forked, such as data workers, do
    not hold it. On a file system without locks nothing is locked.
    """

    def __init__(self, directory: str | Path) -> None:
        self._path = checks.path(directory, "run lock: directory") / LOCK_FILE
        self._file: int | None = None

    def __enter__(self) -> Self:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        _close_in_children(weakref.ref(self))
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _UNSUPPORTED:
                return self
            self._close()
            raise UsageError(
                f"another process trains in {self._path.parent}: stop it first, or use another --run"
            ) from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def next_session(self) -> int:
        """Return the number of a new session: microseconds since 1970, but above that of the last one."""
        assert self._file is not None
        text = os.pread(self._file, 32, 0).decode("ascii", "replace").strip()
        last = int(text) if text.isdecimal() else 0
        number = max(last + 1, time.time_ns() // 1000)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"{number}\n".encode(), 0)
        return number

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)  # releases the lock
            self._file = None


def is_training(directory: Path) -> bool:
    """Return whether a process trains in the directory of a run, as far as its file system has locks."""
    try:
        file = os.open(directory / LOCK_FILE, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


def _close_in_children(lock: weakref.ref[RunLock]) -> None:
    """Close the file of a lock in every process that is forked, which would keep it if this one is killed."""

    def close() -> None:
        found = lock()
        if found is not None:
            found._close()

    os.register_at_fork(after_in_child=close)


KEPT_CHECKPOINTS = "checkpoints"


class RunCheckpoints:
    def __init__(self, directory: Path, *, keep_last: int, keep_every: int | None) -> None:
        self._rotation = Rotation(directory, keep_last=keep_last, keep_every=keep_every)

    @classmethod
    def of(cls, config: TrainConfig, run: Path) -> RunCheckpoints | None:
        if config.keep_last is None and config.keep_every is None:
            return None
        return cls(run / KEPT_CHECKPOINTS, keep_last=config.keep_last or 1, keep_every=config.keep_every)

    def add(self, checkpoint: Path, step: int) -> None:
        """Keep a checkpoint, then delete the checkpoints that the rules do not keep."""
        _link_all(checkpoint, Path(self._rotation.path(step)))
        self._rotation.clean()


BEST = "best"
"""The folder of a run with the checkpoint of its best validation."""


def keep_best(run: Path) -> None:
    """Keep the newest checkpoint of a run as its best, instead of the one that was."""
    # As in every save: new files first, then the manifest that names them, then the old files go.
    kept = {path.resolve() for path in _link_all(run / CHECKPOINT, run / BEST)}
    for path in (run / BEST).rglob("*"):
        if path.is_file() and path.resolve() not in kept and path.name != NAME:
            path.unlink()


def _link_all(checkpoint: Path, target: Path) -> list[Path]:
    """Make a checkpoint of the same files; return them."""
    manifest, store = read_manifest(checkpoint), LocalStore(target)
    files = [file.path for file in manifest.all_files()]
    for path in files:
        _link(checkpoint / path, store.root / path)
    commit(store, manifest)
    return [store.root / path for path in files]


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


CHECKPOINT = "checkpoint"
"""The folder of a run with its newest checkpoint."""


def find_checkpoint(path: str | Path) -> Path:
    """Return the checkpoint of a run's directory. Another path is returned unchanged."""
    root = Path(path)
    return root / CHECKPOINT if (root / CHECKPOINT / "manifest.json").exists() else root


def run_of(checkpoint: Path) -> Path:
    """Return the directory of the run of one of its checkpoints."""
    return checkpoint.parent.parent if checkpoint.parent.name == KEPT_CHECKPOINTS else checkpoint.parent
