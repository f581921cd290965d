"""A dense program's archive that is two zip files at once, one for each of torch's readers."""

from __future__ import annotations

import io
import json
import os
import struct
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import ExportError
from megalith.serving.export.dense_program import DenseProgram
from megalith.serving.export.program_safety import check_archive
from tests.serving.exports import export_version

END = "<4s4H2LH"
"""The end of a zip file: among others the number of entries, and the size and place of the directory."""


class Touch:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mknod, (str(self.path),)


def pickled(thing: object) -> bytes:
    file = io.BytesIO()
    torch.save(thing, file)
    return file.getvalue()


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> tuple[bytes, bytes, int]:
    """The files, their directory, and how many there are."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    data = out.getvalue()
    *_, count, size, place, _ = struct.unpack(END, data[-22:])
    return data[:place], data[place : place + size], count


def two_in_one(shown: dict[str, bytes], hidden: dict[str, bytes]) -> bytes:
    """A zip file whose end names the directory of `shown`, while that of `hidden` stands right before it.

    torch's reader goes by the place in the file's end. Python's takes what stands before the end, and thinks
    that all places are as much off as that one.
    """
    files, directory, count = zipped(shown)
    hidden_files, hidden_directory, _ = zipped(hidden, zipfile.ZIP_DEFLATED)
    off = len(directory) + len(hidden_files)
    entries = bytearray(hidden_directory)
    at = last = 0
    while at < len(entries):
        (place,) = struct.unpack_from("<L", entries, at + 42)
        struct.pack_into("<L", entries, at + 42, place + len(files) + len(directory) - off)
        last, at = at, at + 46 + sum(struct.unpack_from("<3H", entries, at + 28))
    fill = len(directory) - len(entries)
    struct.pack_into("<H", entries, last + 32, fill)
    end = struct.pack(END, b"PK\5\6", 0, 0, count, count, len(directory), len(files), 0)
    return files + directory + hidden_files + bytes(entries) + bytes(fill) + end


def test_the_older_format_is_never_read(tmp_path: Path) -> None:
    export_version(tmp_path / "out", version=1)
    with zipfile.ZipFile(tmp_path / "out" / "1" / "dense.pt2") as archive:
        good = {name: archive.read(name) for name in archive.namelist()}
    graph = next(content for name, content in good.items() if name.endswith("models/model.json"))
    version = json.loads(graph)["schema_version"]
    bomb = pickled(Touch(tmp_path / "touched"))
    older = {
        "version": f"{version['major']}.{version['minor']}".encode(),
        "serialized_exported_program.json": graph,
        "serialized_state_dict.pt": bomb,
        "serialized_constants.pt": bomb,
        "serialized_example_inputs.pt": b"",
    }
    # A weight that is too short: torch fails with what makes it look for the older format.
    short = {name: content[:4] if name.endswith("weight_0") else content for name, content in good.items()}
    path = tmp_path / "dense.pt2"
    path.write_bytes(two_in_one(short, older))

    with pytest.raises(ExportError, match="directory is not where its end says"):
        check_archive(path.read_bytes(), "here")
    with zipfile.ZipFile(path) as seen:
        assert seen.namelist() == list(older)
    with pytest.raises(ExportError, match="is not a program"):
        DenseProgram(path)
    assert not (tmp_path / "touched").exists()
