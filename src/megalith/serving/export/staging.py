"""Staging directories: a version appears complete, or not at all.

The parts of a version are written to directories whose names begin with `.draft-`, and renamed when all are
complete. Such a directory is locked while its process lives; those of killed processes are removed by the
next export to the same place.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from megalith.errors import ExportError, InputError
from megalith.serving.export.signature import NAME, STANDALONE, Signature
from megalith.storage.local_files import sync_path, take_lock

_STAGING_PREFIX = ".draft-"
_LOCK_SECONDS = 60.0
"""Seconds that another export to the same place may take to make its directory."""


class StagingDirectories:
    """The directories in which the parts of a version are written, next to their final places.

    As a context manager it creates them, and removes those that were not published.
    """

    def __init__(self, out: Path, version: int, parts: Sequence[str]) -> None:
        self._out, self._version = out, version
        self.parts = list(parts)
        if isinstance(version, bool) or not isinstance(version, int) or not 0 <= version < 2**63:
            raise InputError(f"export: version must be an integer from 0 to 2^63 - 1, got {version!r}")
        self._name = f"{_STAGING_PREFIX}{version}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        self._locks = ExitStack()

    def _base(self, part: str) -> Path:
        return self._out if part == STANDALONE else self._out / part

    def path(self, part: str) -> Path:
        """Return the staging directory of a part."""
        return self._base(part) / self._name

    def __enter__(self) -> StagingDirectories:
        for part in self.parts:
            if (self._base(part) / str(self._version)).exists():
                raise ExportError(
                    f"{self._base(part) / str(self._version)} exists: choose another version "
                    "(--version, in Python version=...), or another directory"
                )
        try:
            for part in self.parts:
                self._make(part)
        except (OSError, ExportError):
            self.__exit__()
            raise
        return self

    def _make(self, part: str) -> None:
        """Create a staging directory, locked while this process lives, and remove abandoned ones."""
        base = self._base(part)
        base.mkdir(parents=True, exist_ok=True)
        with ExitStack() as exclusive:
            with suppress(OSError):  # without locks, no staging directory is removed
                # Otherwise another process could see a directory before it is locked.
                exclusive.enter_context(_locked(base, _LOCK_SECONDS))
            for abandoned in base.glob(f"{_STAGING_PREFIX}*"):
                with suppress(OSError, ExportError), _locked(abandoned):
                    shutil.rmtree(abandoned, ignore_errors=True)
            self.path(part).mkdir()
            with suppress(OSError):
                self._locks.enter_context(_locked(self.path(part), _LOCK_SECONDS))

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            shutil.rmtree(self.path(part), ignore_errors=True)
        self._locks.close()

    def write(self, part: str, signature: Signature) -> None:
        """Write the signature of a part, the last of its files, and flush all files to disk."""
        path = self.path(part)
        text = signature.to_json()
        # A signature that servers cannot read must not be published.
        Signature.from_dict(json.loads(text), f"export: {NAME}")
        (path / NAME).write_text(text)
        for each in path.iterdir():
            sync_path(each)
        sync_path(path)

    def publish(self) -> None:
        """Rename all parts to their final names, in their order; if one fails, rename the others back."""
        done: list[str] = []
        try:
            for part in self.parts:
                os.rename(self.path(part), self._base(part) / str(self._version))
                done.append(part)
                sync_path(self._base(part))
        except OSError:
            for part in done:
                os.rename(self._base(part) / str(self._version), self.path(part))
            raise


@contextmanager
def _locked(directory: Path, seconds: float = 0.0) -> Iterator[None]:
    """Hold a lock that the system releases when the process ends, even if it is killed."""
    handle = os.open(directory, os.O_RDONLY | os.O_NOFOLLOW)
    try:
        if not take_lock(handle, seconds):
            raise ExportError(
                f"{directory}: another process has held the lock of this directory for {seconds:g} s: end it "
                "if it hangs (`fuser` of the directory names it), or choose another directory"
            )
        yield
    finally:
        os.close(handle)
