"""Export: a version is there complete or not at all."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import ExportError
from megalith.serving.export import exporter
from megalith.serving.export import exporter as module
from megalith.serving.export.exporter import export_model
from megalith.serving.export.servable import Fetch, Servable
from megalith.serving.export.signature import Signature
from tests.checkpoint.test_crashes import Child, Trap
from tests.serving.export.export_support import files, wide


def test_a_version_is_never_replaced(tmp_path: Path, fast: None) -> None:
    export_model(wide(), tmp_path, name="m", version=1)
    before = files(tmp_path)
    with pytest.raises(ExportError, match="exists: choose another version"):
        export_model(wide(), tmp_path, name="other", version=1)
    assert files(tmp_path) == before
    assert Signature.read(tmp_path / "1").model == "m"


@pytest.mark.parametrize("num_shards", [0, 2])
@pytest.mark.parametrize(
    "error", [RuntimeError("x"), KeyboardInterrupt(), OSError(errno.ENOSPC, "disk full")]
)
def test_a_failed_export_leaves_no_staging_directory(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch, num_shards: int, error: BaseException
) -> None:
    def fail(*_: object) -> Any:
        raise error

    monkeypatch.setattr(module, "write_examples", fail)
    with pytest.raises(ExportError if isinstance(error, OSError) else type(error)):
        export_model(wide(), tmp_path, name="m", version=1, num_shards=num_shards)
    assert files(tmp_path) == set()
    assert not list(tmp_path.rglob(".draft*"))


def test_parts_appear_all_or_none(tmp_path: Path, fast: None) -> None:
    """The entry's place is taken while the parts are written: the parts take back their names."""

    def occupy(_: int) -> None:
        (tmp_path / "entry" / "1" / "x").mkdir(parents=True, exist_ok=True)

    with pytest.raises(ExportError, match="cannot write"):
        export_model(wide(), tmp_path, name="m", version=1, num_shards=2, on_rows=occupy)
    assert not list(tmp_path.glob("ps_*/*"))
    assert not list(tmp_path.rglob(".draft*"))


@pytest.mark.parametrize("num_shards", [0, 2])
def test_the_staging_directory_of_an_export_in_progress_is_kept(
    tmp_path: Path, fast: None, num_shards: int
) -> None:
    def meanwhile(_: int) -> None:
        if not (tmp_path / parts[0] / "2").exists():
            export_model(wide(), tmp_path, name="m", version=2, num_shards=num_shards)

    parts = ["entry", "ps_0", "ps_1"] if num_shards else ["."]
    export_model(wide(), tmp_path, name="m", version=1, num_shards=num_shards, on_rows=meanwhile)
    for part in parts:
        assert {"1", "2"} <= {path.name for path in (tmp_path / part).iterdir()}
    assert not list(tmp_path.rglob(".draft*"))


def test_another_export_that_hangs_is_not_waited_for_without_end(
    tmp_path: Path, fast: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporter, "_LOCK_SECONDS", 0.05)
    held = os.open(tmp_path, os.O_RDONLY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(ExportError, match=f"{tmp_path}: another process has held the lock .* for 0.05 s"):
            export_model(wide(), tmp_path, name="m", version=1)
    finally:
        os.close(held)
    assert list(tmp_path.iterdir()) == []


def test_a_place_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / ("x" * 300)):
        with pytest.raises(ExportError, match="cannot write"):
            export_model(wide(), out, name="m", version=1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "ps_1").write_text("")
    with pytest.raises(ExportError, match="cannot write"):
        export_model(wide(), tmp_path / "out", name="m", version=1, num_shards=2)
    assert files(tmp_path / "out") == {"ps_1"}
    assert not list(tmp_path.rglob(".draft*"))


def test_a_full_disk_is_an_error_and_not_a_crash(tmp_path: Path, fast: None) -> None:
    """Rows are written through a mapping, where a full disk would be a signal; room is taken before."""
    model = wide(torch.arange(20_000))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(ExportError, match=r"cannot write.*File too large"):
            export_model(model, tmp_path, name="m", version=1)

    assert not in_child(limited, ExportTrap(None)).killed
    assert list(tmp_path.iterdir()) == []


class ExportTrap(Trap):
    """Kills the process around each call that the disk remembers, or after a piece of rows."""

    def set(self) -> None:
        for name in ("fsync", "rename", "mkdir", "posix_fallocate", "rmdir"):
            setattr(os, name, self._around(getattr(os, name), after=True))


def in_child(work: Callable[[], object], trap: Trap) -> Child:
    child = Child(work, trap)
    child.wait()
    return child


@pytest.mark.parametrize("num_shards", [0, 2])
def test_killed_at_any_step_a_version_is_complete_or_not_there(
    tmp_path: Path, fast: None, num_shards: int
) -> None:
    model = wide()

    def export_to(out: Path, trap: Trap) -> Child:
        options: dict[str, Any] = {"num_shards": num_shards, "on_rows": lambda _: trap.step()}
        return in_child(lambda: export_model(model, out, name="m", version=1, **options), trap)

    steps = export_to(tmp_path / "whole", ExportTrap(None)).steps
    assert steps > 10
    complete = 0
    for at in range(steps):
        out = tmp_path / str(at)
        assert export_to(out, ExportTrap(at)).killed
        there = [path.parent for path in out.rglob("1") if path.is_dir()]
        for base in there:
            fetch: Fetch | None = (lambda ids: {}) if base.name == "entry" else None
            Servable(base / "1", fetch=fetch).close()
        if out / "entry" in there:
            assert len(there) == 1 + num_shards
        complete += len(there) == 1 + num_shards
        export_model(model, out, name="m", version=2, num_shards=num_shards)
        assert not list(out.rglob(".draft*"))
    assert 0 < complete < steps
