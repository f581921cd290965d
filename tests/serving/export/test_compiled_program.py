"""Compiled programs: for the machine of the export only, compared before use, and with exported weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megalith.errors import ExportError, InputError
from megalith.serving.export import compiled_program
from megalith.serving.export.compiled_program import library_name
from megalith.serving.export.exporter import export_model
from megalith.serving.export.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import export_version, make_model, rows


def logits(servable: Servable) -> list[float]:
    return servable.predict(*rows(2))["logits"].tolist()


def library_of(directory: Path) -> Path:
    """Where a servable looks for the library of an export."""
    return directory / library_name((directory / "dense.pt2").read_bytes())


def test_a_library_belongs_to_one_program() -> None:
    assert library_name(b"a") == library_name(b"a") != library_name(b"b")


def test_a_library_belongs_to_one_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has instructions that another CPU of the same capability may lack."""
    info = tmp_path / "cpuinfo"
    monkeypatch.setattr(compiled_program, "CPU_INFO", info)
    names = []
    for flags, speed in (("avx512f amx_tile", 2000), ("avx512f amx_tile", 2100), ("avx512f", 2000)):
        info.write_text(f"processor\t: 0\nmodel name\t: x\ncpu MHz\t\t: {speed}\nflags\t\t: {flags}\n\nnext")
        names.append(library_name(b"a"))
    assert names[0] == names[1] != names[2]
    info.unlink()
    assert library_name(b"a") not in names


def test_without_a_library_that_fits_the_program_answers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_version(tmp_path)
    library = library_of(tmp_path / "1")
    expected = logits(Servable(tmp_path / "1"))
    assert logits(Servable(tmp_path / "1", compiled=True)) == expected
    assert "has no compiled program for this CPU" in caplog.text
    library.write_bytes(b"not a library")
    assert logits(Servable(tmp_path / "1", compiled=True)) == expected
    assert f"{library} is not used" in caplog.text


class Library:
    """Stands for a library whose outputs are those of the program plus a number."""

    def __init__(self, directory: Path, added: float) -> None:
        self._program, self._added = Servable(directory).dense_program, added
        self.loader = self

    def run(self, flat: list[torch.Tensor]) -> list[torch.Tensor]:
        assert self._program is not None
        copy = self._program.front
        names = [node.name for node in copy.module.graph.nodes if node.op == "placeholder"]
        assert len(names) >= len(flat)
        graph: Any = torch.fx.Interpreter(copy.module)
        outputs = graph.run(*flat)
        return [each + self._added for each in outputs]


@pytest.mark.parametrize("added", [0.0, 1.0])
def test_a_library_is_loaded_on_request_if_its_outputs_are_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, added: float
) -> None:
    export_version(tmp_path)
    library_of(tmp_path / "1").write_bytes(b"")
    loaded: list[str] = []

    def load(path: str) -> Library:
        loaded.append(path)
        return Library(tmp_path / "1", added)

    monkeypatch.setattr(torch._inductor, "aoti_load_package", load)
    with ModelServer(tmp_path, ServerConfig(trial="never")):
        assert loaded == []
    with ModelServer(tmp_path, ServerConfig(trial="never", compiled=True)) as server:
        assert loaded == [str(library_of(tmp_path / "1"))]
        version = server.models[0].newest
        assert version is not None
        assert version.servable.dense_program is not None
        assert (version.servable.dense_program.front.compiled is None) == bool(added)
    assert ("its outputs differ" in caplog.text) == bool(added)


def test_it_is_used_while_the_exported_weights_are(tmp_path: Path) -> None:
    export_version(tmp_path)
    opened = Servable(tmp_path / "1")
    program = opened.dense_program
    assert program is not None
    name, weight = next(iter(program.weights.items()))
    exported, sevens = logits(opened), [7.0, 7.0]
    program.use_compiled(lambda flat: [torch.tensor(sevens), torch.tensor(sevens)])
    assert logits(opened) == sevens
    opened.apply({}, {}, {name: weight + 1})
    assert logits(opened) not in (sevens, exported)
    opened.reset()
    assert logits(opened) == sevens


def test_without_a_compiler_nothing_is_exported(tmp_path: Path) -> None:
    import torch._inductor.config as inductor

    with (
        inductor.patch({"cpp.cxx": (str(tmp_path / "absent"),)}),
        pytest.raises(ExportError, match="cannot be compiled, which needs a C"),
    ):
        export_version(tmp_path / "out", compile=True)
    assert list((tmp_path / "out").iterdir()) == []
    with pytest.raises(InputError, match="compile=True needs a model"):
        export_model(make_model().embeddings.shards, tmp_path, name="rows", compile=True)


@pytest.mark.soak
def test_a_compiled_program_computes_the_same_scores(tmp_path: Path) -> None:
    export_version(tmp_path, num_shards=0, compile=True)
    assert library_of(tmp_path / "1").exists()
    features, dense = rows(5)
    compiled = Servable(tmp_path / "1", compiled=True)
    assert compiled.dense_program is not None
    assert compiled.dense_program.front.compiled is not None
    expected = Servable(tmp_path / "1").predict(features, dense)["logits"]
    assert torch.allclose(compiled.predict(features, dense)["logits"], expected, 1e-4, 1e-5)
