"""Exports of a run for its servers, below RUN/exports/NAME, where NAME is the name of the model in requests.

Servers that are started together on one run, under one name, share its exports: one writes the newest
checkpoint, the others wait for it. Older exports are deleted, unless they have a label or a share of the
requests: they can be written again from checkpoints that are kept.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from megalith.checkpoint import read_manifest
from megalith.errors import ExportError, InputError
from megalith.serving.discovery.contract import check_name
from megalith.serving.export.signature import Signature
from megalith.serving.server.versions import VersionRules, is_named, versions_of
from megalith.storage.local_files import take_lock
from megalith.training.exporting import export_run
from megalith.training.run_model import CHECKPOINT, config_of

EXPORTS = "exports"
KEPT_EXPORTS = 2
"""Exports that stay: the newest, and the one before, to which an operator may return."""
LOCK_SECONDS = 1800.0
"""Seconds that the export of another process may take."""
_LOCK = ".lock"


def export_newest(run: Path, name: str | None) -> Path:
    """Export the newest checkpoint of a run as a new version, unless the newest version is of it."""
    name = name or config_of(read_manifest(run / CHECKPOINT), run).model.name
    out = run / EXPORTS / check_name(name, "the name of the model")
    out.mkdir(parents=True, exist_ok=True)
    with _locked(out / _LOCK):
        newest = max(versions_of(out), default=None)
        version = None
        if newest is not None:
            manifest = read_manifest(run / CHECKPOINT)
            with suppress(ExportError):  # a version that cannot be read is replaced by a newer one
                signature = Signature.read(out / str(newest))
                if signature.base == manifest.tip:
                    return out
            steps = [each.global_step for each in manifest.latest.collections.values()]
            version = max(newest + 1, *steps)
        export_run(run, out, name=name, version=version)
        try:
            rules = VersionRules.read(out)
        except InputError:  # servers log it; nothing is deleted that it may name
            return out
        for old in sorted(versions_of(out))[:-KEPT_EXPORTS]:
            if is_named(rules, old):
                continue
            shutil.rmtree(out / str(old), ignore_errors=True)  # a server that has it open keeps its files
    return out


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Wait for the lock of a file, and hold it; on a file system without locks, hold nothing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        locked = True
        with suppress(OSError):
            locked = take_lock(file, LOCK_SECONDS)
        if not locked:
            raise ExportError(
                f"{path}: another process has held the lock of the exports for {LOCK_SECONDS:g} s: end it if "
                "it hangs (`fuser` of this file names it), then start again"
            )
        yield
    finally:
        os.close(file)
