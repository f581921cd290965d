"""Versions that would end the server, or that change after they were loaded."""

from __future__ import annotations

import io
import shutil
import threading
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megalith.errors import ExportError
from megalith.serving.export import canary
from megalith.serving.export.canary import run_canary
from megalith.serving.export.exporter import export_model
from megalith.serving.export.program_safety import check_archive
from megalith.serving.export.servable import Servable
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.forked import Forked
from tests.serving.export.test_dense_program import Wide
from tests.serving.exports import request_of, serving

INPUTS = {"f": torch.tensor([1, 2])}


class Dividing(Wide):
    """Divides the smallest integer by -1 where a row begins with 7, which raises SIGFPE."""

    smallest: Tensor

    def __init__(self, value: float) -> None:
        super().__init__()
        self.embeddings.shards.assign({"t": (torch.arange(5), torch.full((5, 2), value))})
        self.register_buffer("smallest", torch.tensor([-(2**63)]))

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        divisor = torch.where(rows["rows"][:, 0] == 7, -1, 1)
        quotient = torch.div(self.smallest, divisor, rounding_mode="trunc")
        return rows["rows"].sum(1) + quotient.float()


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples of version 2 end a process."""
    out = tmp_path_factory.mktemp("exports")
    for version, value in ((1, 1.0), (2, 7.0)):
        export_model(Dividing(value), out, name="movies", version=version)
    return out


@pytest.fixture
def served(exports: Path, tmp_path: Path) -> Path:
    """A directory with version 1 only."""
    shutil.copytree(exports / "1", tmp_path / "served" / "1")
    return tmp_path / "served"


def test_a_version_that_ends_a_process_does_not_end_the_server(exports: Path, served: Path) -> None:
    with serving(served, poll_seconds=3600) as (server, ask):
        shutil.copytree(exports / "2", served / "2")
        server.refresh()
        assert ask.send(request_of(INPUTS))[1].version.value == 1
        (model,) = server.models
        assert "ends a process with SIGFPE" in model.statuses[2].error
        assert 'megalith_failed_versions_total{model="movies"} 1.0' in server.metrics.text().decode()


def test_versions_that_work_pass_their_trial(exports: Path, tmp_path: Path) -> None:
    run_canary(exports / "1", threading.Event())
    export_model(Dividing(1.0), tmp_path, name="movies", version=1, num_shards=2)
    for part in ("ps_0", "ps_1", "entry"):
        canary._run(tmp_path / part / "1")  # as the child does, which hides other errors than signals


def test_a_trial_stops_with_the_server(exports: Path) -> None:
    stopping = threading.Event()
    stopping.set()
    run_canary(exports / "2", stopping)  # its child is killed at once


def test_a_trial_is_ended_before_the_server_for_lack_of_memory(tmp_path: Path) -> None:
    with Forked(tmp_path / "output", die_first) as process:
        assert process.end() == 0, process.output
        assert process.output.strip() == "1000"


def die_first() -> None:
    canary._die_first()
    print(Path("/proc/self/oom_score_adj").read_text())


def test_versions_that_were_deleted_are_forgotten(exports: Path, served: Path) -> None:
    with ModelServer(served, ServerConfig(poll_seconds=3600, trial="never")) as server:
        (served / "7").mkdir()
        server.refresh()
        repository = server._repository
        assert (list(repository._failed), list(repository._loaded)) == ([served / "7"], [served / "1"])
        for number in ("7", "1"):
            shutil.rmtree(served / number)
        server.refresh()
        assert (repository._failed, repository._loaded) == ({}, {})
        (model,) = server.models
        assert list(model.versions) == [1]  # it still answers


def test_a_version_replaced_under_its_number_is_reported(
    served: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(served, poll_seconds=3600) as (server, ask):
        (served / "1" / "examples.json").write_text('{"examples": []}')
        server.refresh()
        server.refresh()
        (model,) = server.models
        assert "its files have changed since it was loaded" in model.statuses[1].error
        assert 'megalith_changed_versions_total{model="movies"} 1.0' in server.metrics.text().decode()
        assert ask(INPUTS)["logits"].shape == (2,)
    assert caplog.text.count("its files have changed") == 1


def test_compressed_entries_of_an_archive_are_refused(exports: Path) -> None:
    """A few bytes of zeros, compressed, could take any amount of memory."""
    written = io.BytesIO()
    with (
        zipfile.ZipFile(exports / "1" / "dense.pt2") as old,
        zipfile.ZipFile(written, "w", zipfile.ZIP_DEFLATED) as new,
    ):
        for name in old.namelist():
            new.writestr(name, old.read(name))
    check_archive((exports / "1" / "dense.pt2").read_bytes(), "the program")
    with pytest.raises(ExportError, match="is compressed"):
        check_archive(written.getvalue(), "the program")


def test_rows_in_memory_do_not_depend_on_their_file(served: Path) -> None:
    servable = Servable(served / "1", in_memory=True)
    wanted = servable.lookup("t", torch.arange(5))
    with open(served / "1" / "t.safetensors", "r+b") as file:
        file.truncate(0)
    assert torch.equal(servable.lookup("t", torch.arange(5)), wanted)
    assert bool((wanted == 1).all())


def test_a_file_that_is_overwritten_in_place_leads_no_lookup_outside(served: Path) -> None:
    servable = Servable(served / "1")
    path = served / "1" / "t.safetensors"
    size = path.stat().st_size
    for byte in (b"\xff", b"\x7f", b"\x80"):
        with open(path, "r+b") as file:
            file.write(byte * size)
        assert servable.lookup("t", torch.arange(100)).shape == (100, 2)
