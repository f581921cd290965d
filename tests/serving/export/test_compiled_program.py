"""Compiled programs: from a private directory only, compared before use, and with exported weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith.errors import ExportError
from megalith.serving.export import compiled_program
from megalith.serving.export.compiled_program import (
    compile_servable,
    find_library,
    library_name,
    load_library,
    open_cache,
)
from megalith.serving.export.servable import Servable
from tests.serving.exports import export_version, rows


def servable(directory: Path) -> Servable:
    export_version(directory)
    return Servable(directory / "1")


def program_of(opened: Servable) -> Path:
    assert opened.signature.program is not None
    return opened.directory / opened.signature.program.path


def test_the_directory_must_be_private(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    assert open_cache(cache).stat().st_mode & 0o777 == 0o700
    cache.chmod(0o770)
    with pytest.raises(ExportError, match="nobody else may write"):
        open_cache(cache)
    with pytest.raises(ExportError, match="nobody else may write"):
        compile_servable(servable(tmp_path), cache)
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="cannot hold"):
        open_cache(tmp_path / "file" / "cache")
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    with pytest.raises(ExportError, match="anyone may replace it"):
        open_cache(shared / "cache")
    shared.chmod(0o1777)
    assert open_cache(shared / "cache").is_dir()


def test_a_library_belongs_to_one_program() -> None:
    assert library_name(b"a") == library_name(b"a") != library_name(b"b")


def test_a_library_belongs_to_one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has instructions that another CPU of the same capability may lack: the cache may be shared."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiled_program, "CPU_INFO", info)
    names = []
    for flags, speed in (("avx512f amx_tile", 2000), ("avx512f amx_tile", 2100), ("avx512f", 2000)):
        info.write_text(f"processor\t: 0\nmodel name\t: x\ncpu MHz\t\t: {speed}\nflags\t\t: {flags}\n\nnext")
        names.append(library_name(b"a"))
    assert names[0] == names[1] != names[2]
    info.unlink()
    assert library_name(b"a") not in names


def executable(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines)) + "\n")
    path.chmod(0o700)
    return str(path)


def test_the_child_keeps_its_files_in_the_private_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    opened, cache = servable(tmp_path), tmp_path / "cache"
    seen, left = tmp_path / "seen", cache / "work-of-a-killed-process"
    left.mkdir(parents=True)
    cache.chmod(0o700)
    script = executable(
        tmp_path / "python", f'echo "$TORCHINDUCTOR_CACHE_DIR" > {seen}', "echo bad >&2", "exit 3"
    )
    monkeypatch.setattr(compiled_program.sys, "executable", script)

    assert find_library(program_of(opened), cache) is None

    assert Path(seen.read_text().strip()).parent == cache
    assert list(cache.iterdir()) == []
    assert "is not compiled: bad" in caplog.text
    assert not compile_servable(opened, cache)
    assert opened.predict(*rows(2))["logits"].shape == (2,)  # the program itself answers


def test_a_server_that_stops_ends_the_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened, cache = servable(tmp_path), tmp_path / "cache"
    started = tmp_path / "started"
    # The compiler is a child of the child.
    script = executable(
        tmp_path / "python", "sleep 3600 &", f"echo $! > {started}.new", f"mv {started}.new {started}", "wait"
    )
    monkeypatch.setattr(compiled_program.sys, "executable", script)
    stopped = threading.Event()
    found: list[Path | None] = []
    thread = threading.Thread(
        target=lambda: found.append(find_library(program_of(opened), cache, stopped=stopped))
    )
    thread.start()
    wait_until(started.exists)
    stopped.set()
    thread.join(60.0)

    assert found == [None]
    assert list(cache.iterdir()) == []
    wait_until(lambda: has_ended(int(started.read_text())))


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def has_ended(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"  # nobody has asked for its status


def test_a_program_that_changed_is_not_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its library would answer instead of the program that was loaded."""
    opened = servable(tmp_path)
    program = program_of(opened)
    program.write_bytes(program.read_bytes() + b"x")
    assert not compile_servable(opened, tmp_path / "cache")
    assert "changed since it was loaded" in caplog.text
    with pytest.raises(ExportError, match="changed meanwhile"):
        compiled_program.compile_archive(program, tmp_path / "cache" / library_name(b"of before"))


def test_a_damaged_library_is_not_used(tmp_path: Path) -> None:
    opened = servable(tmp_path)
    cache = open_cache(tmp_path / "cache")
    (cache / library_name(program_of(opened).read_bytes())).write_bytes(b"not a library")
    before = opened.predict(*rows(2))["logits"]
    assert not compile_servable(opened, cache)
    assert torch.equal(opened.predict(*rows(2))["logits"], before)


def test_a_library_with_other_outputs_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Loaded:
        """Stands for a library that computes something else."""

        class loader:
            run = staticmethod(lambda flat: [flat[0] + 1])

    monkeypatch.setattr(torch._inductor, "aoti_load_package", lambda path: Loaded)

    def inputs(size: int) -> tuple[dict[str, Any], Tensor | None]:
        return {"a": torch.zeros(size)}, None

    def reference(rows: dict[str, Any], dense: Tensor | None) -> Sequence[Tensor]:
        return [rows["a"]]

    assert load_library(tmp_path / "x", reference, inputs) is None
    assert "its outputs differ" in caplog.text
    same = load_library(tmp_path / "x", lambda rows, dense: [rows["a"] + 1], inputs)
    assert same is not None
    assert same([torch.zeros(1)])[0].tolist() == [1.0]


def test_it_is_used_while_the_exported_weights_are(tmp_path: Path) -> None:
    opened = servable(tmp_path)
    program = opened.dense_program
    assert program is not None
    name, weight = next(iter(program.weights.items()))

    def logits() -> list[float]:
        return opened.predict(*rows(2))["logits"].tolist()

    exported, sevens = logits(), [7.0, 7.0]
    program.use_compiled(lambda flat: [torch.tensor(sevens), torch.tensor(sevens)])
    assert logits() == sevens
    opened.apply({}, {}, {name: weight + 1})
    assert logits() not in (sevens, exported)
    opened.reset()
    assert logits() == sevens


@pytest.mark.soak
def test_a_compiled_program_computes_the_same_scores(tmp_path: Path) -> None:
    opened = servable(tmp_path)
    features, dense = rows(5)
    before = opened.predict(features, dense)["logits"]

    assert compile_servable(opened, tmp_path / "cache")

    assert torch.allclose(opened.predict(features, dense)["logits"], before, 1e-4, 1e-5)
    (library,) = (tmp_path / "cache").iterdir()
    assert library.stat().st_mode & 0o777 == 0o600
    compiled_at = library.stat().st_mtime_ns
    assert compile_servable(Servable(tmp_path / "1"), tmp_path / "cache")  # without a compiler
    assert library.stat().st_mtime_ns == compiled_at
