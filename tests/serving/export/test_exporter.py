"""Export: what is written, where it is spread, and that a version is there complete or not at all."""

from __future__ import annotations

import errno
import os
import resource
import signal
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest
import torch
from torch import Tensor, nn

from megalith import (
    SGD,
    EmbeddingCollection,
    Feature,
    Layout,
    LocalShards,
    Router,
    Slice,
    TableConfig,
    checkpoint,
)
from megalith.checkpoint.manifest import Routing
from megalith.errors import CheckpointError, ExportError, InputError, MegalithError, UsageError
from megalith.models import Model
from megalith.serving.export import exporter as module
from megalith.serving.export.exporter import Provenance, export_model
from megalith.serving.export.model_parts import ModelParts
from megalith.serving.export.servable import Fetch, Servable
from megalith.serving.export.signature import Signature
from megalith.serving.server.tf_metadata import inputs_of
from megalith.training import Run, RunConfig
from megalith.training.exporting import _block_size, export_run
from tests.models.support import make
from tests.serving.export.test_dense_program import Wide
from tests.serving.exported import NUM_IDS, logits_of, request, rows_of, served, train, trained

SECONDS = 60
MODES = ("roundrobin", "hash_roundrobin", "continuous")


def wide(ids: Tensor | None = None, rows: Tensor | None = None) -> Wide:
    """A model of one table of two columns, by default of ten rows of ones."""
    model = Wide()
    ids = torch.arange(10) if ids is None else ids
    model.embeddings.shards.assign({"t": (ids, torch.ones(ids.numel(), 2) if rows is None else rows)})
    return model


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Exports write a program that was traced before: most tests are about the rest."""
    made = tmp_path_factory.mktemp("program") / "dense.pt2"
    entry = module.export_program(ModelParts(Wide()), made)
    data = made.read_bytes()

    def write(parts: Any, path: Path, **options: Any) -> Any:
        path.write_bytes(data)
        return entry

    monkeypatch.setattr(module, "export_program", write)


def files(out: Path) -> set[str]:
    return {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}


# ---- standing alone


def test_a_version_has_a_signature_rows_a_program_and_examples(tmp_path: Path) -> None:
    model = trained("dlrm", 3)
    assert export_model(model, tmp_path, name="movies", precision="float16", version=5) == tmp_path
    tables = model.embeddings.shards.configs
    rows = {f"5/{table}.safetensors" for table in tables}
    assert files(tmp_path) == rows | {"5/signature.json", "5/dense.pt2", "5/examples.json"}
    signature = Signature.read(tmp_path / "5")
    assert (signature.model, signature.version, signature.part) == ("movies", 5, "standalone")
    assert (signature.sub_graph_num, signature.precision, signature.num_dense) == (0, "float16", 3)
    assert signature.step == model.embeddings.global_step
    assert [feature.name for feature in signature.features] == ["user", "item", "tags", "context"]
    assert {name: table.rows for name, table in signature.tables.items()} == dict.fromkeys(tables, NUM_IDS)


def test_the_version_is_the_step_unless_it_is_given(tmp_path: Path, fast: None) -> None:
    export_model(wide(), tmp_path, name="m", source=Provenance("save-1", 42))
    signature = Signature.read(tmp_path / "42")
    assert (signature.version, signature.step, signature.base) == (42, 42, "save-1")
    export_model(wide(), tmp_path, name="m", source=Provenance("save-1", 42), version=0)
    assert Signature.read(tmp_path / "0").step == 42


def test_a_model_in_training_is_exported_as_it_evaluates(tmp_path: Path) -> None:
    model = train(make("deepfm", dropout=0.5))
    model.train()
    servable = served(model, tmp_path)
    assert model.training
    features, _ = request(20)
    wanted = logits_of(model, features)
    assert torch.allclose(servable.predict(features)["logits"], wanted, rtol=1e-6, atol=1e-6)


def test_a_compiled_model_is_exported(tmp_path: Path) -> None:
    model = train(make("deepfm"))
    model.compile()
    servable = served(model, tmp_path)
    assert servable.predict(request(3)[0])["logits"].shape == (3,)


def test_a_table_without_rows(tmp_path: Path) -> None:
    for version, precision in enumerate(("float32", "float16", "int8")):
        servable = served(Wide(), tmp_path, version=version, precision=precision)
        servable.warm_up()
        assert not servable.lookup("t", torch.arange(3)).any()


def test_a_table_of_zeros_in_int8(tmp_path: Path, fast: None) -> None:
    servable = served(wide(rows=torch.zeros(10, 2)), tmp_path, precision="int8")
    assert not servable.lookup("t", torch.arange(10)).any()


def test_every_segment_has_a_step_of_its_own(tmp_path: Path) -> None:
    model = trained()
    spec = served(model, tmp_path, precision="int8").signature.tables["user"]
    rows = torch.stack(list(rows_of(model, "user").values()))
    largest = [float(part.abs().max()) for part in rows.split(list(spec.segments), 1)]
    assert len(largest) == 2
    assert list(spec.steps) == [pytest.approx(each / 127) for each in largest]


# ---- parts


@pytest.mark.parametrize("mode", MODES)
def test_parts_hold_the_rows_they_own_and_the_entry_answers_through_them(tmp_path: Path, mode: str) -> None:
    model = trained("deepfm", dist_type=mode)
    block = 15 if mode == "continuous" else None
    export_model(model, tmp_path, name="movies", version=1, num_shards=2, block_size=block)
    assert {path.name for path in tmp_path.iterdir()} == {"entry", "ps_0", "ps_1"}
    parts = [Servable(tmp_path / f"ps_{number}" / "1") for number in range(2)]
    for number, part in enumerate(parts):
        assert (part.signature.part, part.signature.sub_graph_num) == (f"ps_{number}", 2)
        assert part.signature.features == ()
        assert not (part.directory / "dense.pt2").exists()
    for table in model.embeddings.shards.configs:
        whole = rows_of(model, table)
        owned = [part._frozen[table].ids for part in parts]
        assert sorted(torch.cat(owned).tolist()) == sorted(whole)
        for number, (part, ids) in enumerate(zip(parts, owned, strict=True)):
            assert ids.numel() > 0
            assert set(part.signature.tables[table].router().owner(ids).tolist()) == {number}
            assert torch.equal(part.lookup(table, ids), torch.stack([whole[id] for id in ids.tolist()]))

    def fetch(asked: dict[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for table, ids in asked.items():
            owner = entry.signature.tables[table].router().owner(ids)
            found[table] = torch.zeros(ids.numel(), entry.signature.dims[table])
            for number, part in enumerate(parts):
                found[table][owner == number] = part.lookup(table, ids[owner == number])
        return found

    entry = Servable(tmp_path / "entry" / "1", fetch=fetch)
    assert (entry.signature.name, entry.signature.sub_graph_num) == ("movies:entry", 2)
    assert files(tmp_path / "entry") == {"1/signature.json", "1/dense.pt2", "1/examples.json"}
    alone = served(model, tmp_path / "alone")
    features, _ = request(30)
    assert torch.equal(entry.predict(features)["logits"], alone.predict(features)["logits"])
    assert entry.predict(request(0)[0])["logits"].shape == (0,)


@pytest.mark.parametrize("num_shards", [0, 2])
def test_a_mode_that_was_carried_over_by_a_load_is_exported(
    tmp_path: Path, fast: None, num_shards: int
) -> None:
    """Given a checkpoint of another routing mode, its load in one process and an export keep the mode."""
    saved = wide()
    saved.embeddings.checkpoint_state.routing["t"] = ("hash_roundrobin", None)
    checkpoint.save(saved, tmp_path / "saved")
    loaded = Wide()
    checkpoint.load(loaded, tmp_path / "saved")

    export_model(loaded, tmp_path / "out", name="m", version=1, num_shards=num_shards)

    part = Servable(tmp_path / "out" / ("ps_1" if num_shards else "") / "1")
    table = part.signature.tables["t"]
    assert table.routing == Routing("hash_roundrobin", max(1, num_shards))
    assert table.rows == int(
        (Router("hash_roundrobin", 2).owner(torch.arange(10)) == 1).sum() if num_shards else 10
    )


def test_a_part_refuses_ids_of_another(tmp_path: Path, fast: None) -> None:
    export_model(wide(), tmp_path, name="m", version=1, num_shards=2)
    part = Servable(tmp_path / "ps_1" / "1")
    row = torch.ones(1, 2)
    part.apply({"t": (torch.tensor([3]), row)}, {"t": torch.tensor([5])})
    for writes in (
        {"rows": {"t": (torch.tensor([4]), row)}},
        {"rows": {}, "removed": {"t": torch.tensor([4])}},
    ):
        with pytest.raises(InputError, match="id 4 belongs to another part than ps_1"):
            part.apply(**writes)
    assert len(part.overlay) == 2
    with pytest.raises(InputError, match="id 4 belongs to another part than ps_1 of 2, version 1"):
        part.lookup("t", torch.tensor([3, 4]))


def test_one_part_and_more_parts_than_rows(tmp_path: Path, fast: None) -> None:
    export_model(wide(), tmp_path / "a", name="m", version=1, num_shards=1)
    assert len(Servable(tmp_path / "a" / "ps_0" / "1")._frozen["t"]) == 10
    export_model(wide(torch.arange(2)), tmp_path / "b", name="m", version=1, num_shards=5)
    counts = [len(Servable(tmp_path / "b" / f"ps_{n}" / "1")._frozen["t"]) for n in range(5)]
    assert counts == [1, 1, 0, 0, 0]


# ---- what cannot be exported


class Two(Wide):
    """A second collection, of which an export would know nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.more = EmbeddingCollection([TableConfig("u", dim=2, optimizer=SGD(0.1))], [Feature("g", "u")])


class Unpooled(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = EmbeddingCollection(
            [TableConfig("t", dim=2, optimizer=SGD(0.1))], [Feature("f", "t", None)]
        )


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (Wide, {"name": "a/b"}, InputError, "must not contain"),
        (Wide, {"name": ""}, InputError, "1 to 4096"),
        (Wide, {"version": -1}, InputError, "must be an integer"),
        (Wide, {"version": True}, InputError, "must be an integer"),
        (Wide, {"version": 2**63}, InputError, "must be an integer"),
        (Wide, {"precision": "int4"}, InputError, "precision"),
        (Wide, {"num_shards": -1}, InputError, "num_shards"),
        (lambda: nn.Linear(1, 1), {}, InputError, "Linear has no EmbeddingCollection"),
        (object, {}, InputError, "expected a model or Shards, got object"),
        (Two, {}, InputError, "2 EmbeddingCollections"),
        (Unpooled, {}, InputError, "give it a combiner"),
    ],
)
def test_wrong_arguments_leave_nothing(
    tmp_path: Path, model: Any, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    out = tmp_path / "out"
    with pytest.raises(error, match=message):
        export_model(model(), out, **{"name": "m", "version": 1, **options})
    assert not out.exists()


def test_blocks_need_a_size(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"'user' has dist_type 'continuous': give block_size"):
        export_model(trained("deepfm", dist_type="continuous"), tmp_path, name="m", num_shards=2)
    assert files(tmp_path) == set()


@pytest.mark.parametrize(
    ("value", "precision", "message"),
    [
        (1e6, "float16", "table 't'.*beyond float16: export as float32"),
        (float("nan"), "float32", "table 't'.*NaN or Inf"),
        (float("inf"), "int8", "table 't'.*NaN or Inf"),
    ],
)
def test_rows_that_cannot_be_stored_name_their_table(
    tmp_path: Path, fast: None, value: float, precision: str, message: str
) -> None:
    def rows(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        yield torch.arange(2), torch.tensor([[1.0, 1.0], [1.0, value]])

    with pytest.raises(InputError, match=message):
        export_model(Wide(), tmp_path, name="m", version=1, precision=precision, rows=rows)
    assert list(tmp_path.iterdir()) == []


def test_a_table_that_changes_meanwhile_is_noticed(tmp_path: Path, fast: None) -> None:
    calls = []

    def rows(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        calls.append(table)
        yield torch.arange(5) + len(calls), torch.ones(5, 2)

    with pytest.raises(ExportError, match="changed while it was exported"):
        export_model(Wide(), tmp_path, name="m", version=1, rows=rows)
    assert list(tmp_path.iterdir()) == []


def test_tables_whose_names_differ_only_in_case_or_signs(tmp_path: Path) -> None:
    class Named(Model):
        def __init__(self) -> None:
            super().__init__()
            self.names = ["a b", "a.b", "a/b", "a_b", "..", "ä" * 200, "x" * 200, "x" * 201]
            configs = [TableConfig(name, dim=1, optimizer=SGD(0.1)) for name in self.names]
            features = [Feature(f"f{number}", name) for number, name in enumerate(self.names)]
            layouts = [Layout("rows", [Slice(feature.name, 0, 1) for feature in features])]
            self.embeddings = EmbeddingCollection(configs, features, layouts=layouts)

        def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
            return rows["rows"].sum(1)

    model = Named()
    for number, name in enumerate(model.names):
        model.embeddings.shards.assign({name: (torch.tensor([1]), torch.tensor([[2.0**number]]))})
    servable = served(model, tmp_path)
    assert [float(servable.lookup(name, torch.tensor([1]))) for name in model.names] == [
        2.0**number for number in range(8)
    ]


# ---- complete or not at all


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


def in_child(work: Callable[[], object]) -> int:
    """Runs work in a forked process; its status: 0, 1 for an error, or minus the signal that ended it."""
    child = os.fork()
    if not child:
        code = 1
        try:
            signal.alarm(SECONDS)
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_full_disk_is_an_error_and_not_a_crash(tmp_path: Path, fast: None) -> None:
    """Rows are written through a mapping, where a full disk would be a signal; room is taken before."""
    model = wide(torch.arange(20_000))

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        with pytest.raises(ExportError, match=r"cannot write.*File too large"):
            export_model(model, tmp_path, name="m", version=1)

    assert in_child(limited) == 0
    assert list(tmp_path.iterdir()) == []


class Trap:
    """Kills the process at one of its steps: around each call that the disk remembers, after each piece."""

    def __init__(self, at: int | None) -> None:
        self.at, self.steps = at, 0

    def step(self) -> None:
        if self.steps == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.steps += 1

    def set(self) -> None:
        for name in ("fsync", "rename", "mkdir", "posix_fallocate", "rmdir"):
            setattr(os, name, self._around(getattr(os, name)))

    def _around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def trapped(*args: Any, **options: Any) -> Any:
            self.step()
            result = call(*args, **options)
            self.step()
            return result

        return trapped


@pytest.mark.parametrize("num_shards", [0, 2])
def test_killed_at_any_step_a_version_is_complete_or_not_there(
    tmp_path: Path, fast: None, num_shards: int
) -> None:
    model = wide()

    def export_to(out: Path, trap: Trap) -> None:
        trap.set()
        export_model(model, out, name="m", version=1, num_shards=num_shards, on_rows=lambda _: trap.step())
        (out / "steps").write_text(str(trap.steps))

    assert in_child(lambda: export_to(tmp_path / "whole", Trap(None))) == 0
    steps = int((tmp_path / "whole" / "steps").read_text())
    assert steps > 10
    complete = 0
    for at in range(steps):
        out = tmp_path / str(at)
        assert in_child(lambda out=out, at=at: export_to(out, Trap(at))) == -signal.SIGKILL  # type: ignore[misc]
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


# ---- memory


def test_rows_are_held_a_piece_at_a_time(tmp_path: Path, fast: None) -> None:
    """A ledger of the pieces that are alive: never more than the one in hand and the one being made."""
    alive: set[int] = set()
    most = 0

    def rows(table: str) -> Iterator[tuple[Tensor, Tensor]]:
        nonlocal most
        for number in range(50):
            piece = torch.ones(100, 2)
            alive.add(number)
            weakref.finalize(piece, alive.discard, number)
            most = max(most, len(alive))
            yield torch.arange(number * 100, number * 100 + 100), piece
            del piece

    export_model(Wide(), tmp_path, name="m", version=1, num_shards=2, rows=rows)
    assert most <= 2
    assert alive == set()


# ---- runs


def run_config(**train: Any) -> RunConfig:
    return RunConfig.from_dict(
        {
            "data": {"kind": "synthetic", "batch_size": 64, "options": {"num_batches": 4, "num_dense": 2}},
            "model": {"dim": 4, "options": {"hidden": [8]}},
            "train": {"threads": 1, **train},
        }
    )


@pytest.fixture
def run(tmp_path: Path, restore_threads: None) -> Run:
    run = Run(run_config(), tmp_path / "run")
    run.train()
    return run


def test_a_run_is_exported_from_its_checkpoint(run: Run, tmp_path: Path) -> None:
    written: list[int] = []
    export_run(run.directory, tmp_path / "out", on_rows=written.append)
    manifest = checkpoint.read_manifest(run.directory / "checkpoint")
    servable = Servable(tmp_path / "out" / str(run.step))
    assert (servable.signature.model, servable.signature.base) == ("deepfm", manifest.tip)
    assert sum(written) == sum(len(table) for table in run.model.embeddings.shards.local.values())
    for table in run.model.embeddings.shards.configs:
        rows = rows_of(run.model, table)
        ids = torch.tensor(list(rows))
        assert torch.equal(servable.lookup(table, ids), torch.stack(list(rows.values())))


def test_an_export_records_whether_ids_are_integers_or_text(tmp_path: Path, restore_threads: None) -> None:
    columns = {"y": [0, 1], "user": ["7", "8"], "item": [7, 8], "tag": ["a", "b"]}
    parquet.write_table(pa.table(columns), tmp_path / "a.parquet")
    features = {"user": "user", "item": "item", "tag": {"column": "tag", "slot": 3}}
    data = {
        "kind": "parquet",
        "path": str(tmp_path / "a.parquet"),
        "schema": {"label": "y", "features": features},
    }
    run = Run(RunConfig.from_dict({**run_config().to_dict(), "data": data}), tmp_path / "run")
    run.train()
    export_run(run.directory, tmp_path / "out")
    signature = Signature.read(tmp_path / "out" / str(run.step))
    kinds = {feature.name: feature.ids for feature in signature.features}
    assert kinds == {"user": "xxhash64", "item": "integer", "tag": "fid"}
    types = {name: dtype for name, dtype, _ in inputs_of(signature)}
    assert types == {"user": None, "item": torch.int64, "tag": torch.int64}


@pytest.mark.parametrize("kinds", [{"nobody": "integer"}, {"user": "text"}, {"user": None}, 3])
def test_wrong_kinds_of_ids(tmp_path: Path, kinds: Any) -> None:
    with pytest.raises(InputError, match="id_kinds"):
        export_model(trained(), tmp_path, name="m", id_kinds=kinds)


def test_deltas_are_exported_with_their_base(run: Run, tmp_path: Path) -> None:
    """Rows changed, made and removed since the base are in the export as the tip has them."""
    root = run.directory / "checkpoint"
    progress = checkpoint.read_manifest(root).progress
    shards = run.model.embeddings.shards
    checkpoint.save(run.model, root, progress=progress)
    ids = torch.tensor(sorted(rows_of(run.model, "user"))[:4])
    dim = shards.configs["user"].dim
    shards.assign({"user": (torch.cat([ids[:2], torch.tensor([10**9])]), torch.full((3, dim), 3.0))})
    shards.remove({"user": ids[2:3]})
    checkpoint.save_delta(run.model, root, progress=progress)
    shards.assign({"user": (ids[:1], torch.full((1, dim), 4.0))})
    manifest = checkpoint.save_delta(run.model, root, progress=progress)

    export_run(run.directory, tmp_path / "out", version=1)
    servable = Servable(tmp_path / "out" / "1")
    assert servable.signature.base == manifest.tip
    asked = torch.cat([ids, torch.tensor([10**9])])
    last = rows_of(run.model, "user")[int(ids[3])]
    wanted = torch.stack([torch.full((dim,), 4.0), torch.full((dim,), 3.0), torch.zeros(dim), last])
    assert torch.equal(servable.lookup("user", asked), torch.cat([wanted, torch.full((1, dim), 3.0)]))
    assert servable.signature.tables["user"].rows == len(shards.local["user"])


def test_a_checkpoint_that_is_replaced_meanwhile_is_read_again(run: Run, tmp_path: Path) -> None:
    root = run.directory / "checkpoint"
    old = checkpoint.read_manifest(root)
    replaced: list[str] = []

    def replace(_: int) -> None:
        if not replaced:
            replaced.append(checkpoint.save(run.model, root, progress=old.progress).tip)

    export_run(run.directory, tmp_path / "out", version=1, on_rows=replace)
    assert Servable(tmp_path / "out" / "1").signature.base == replaced[0] != old.tip
    assert not list((tmp_path / "out").glob(".draft*"))


def test_a_damaged_checkpoint_is_not_exported(run: Run, tmp_path: Path) -> None:
    root = run.directory / "checkpoint"
    (piece,) = [root / file.path for file in checkpoint.read_manifest(root).all_files()][:1]
    piece.write_bytes(piece.read_bytes()[:-1])
    with pytest.raises(CheckpointError):
        export_run(run.directory, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_what_is_no_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(MegalithError, match="no complete checkpoint"):
        export_run(tmp_path, tmp_path / "out")
    checkpoint.save(Wide(), tmp_path / "c")
    with pytest.raises(CheckpointError, match="was not saved by `megalith train`"):
        export_run(tmp_path / "c", tmp_path / "out")


def test_blocks_are_as_large_as_in_training(run: Run, tmp_path: Path) -> None:
    """A checkpoint spread in two blocks of 1000 ids goes to four parts of 500."""
    spread = tmp_path / "spread"
    checkpoint.reshard(
        run.directory / "checkpoint", spread, num_shards=2, dist_type="continuous", block_size=1000
    )
    manifest = checkpoint.read_manifest(spread)
    assert _block_size(manifest, 4) == 500
    assert _block_size(manifest, 0) is None
    assert _block_size(checkpoint.read_manifest(run.directory / "checkpoint"), 4) is None


# ---- shards without a model


def bare() -> LocalShards:
    """Two tables of ten rows of ones, without a collection."""
    shards = LocalShards([TableConfig(name, dim=dim, optimizer=SGD()) for name, dim in (("a", 2), ("b", 3))])
    shards.assign({name: (torch.arange(10), torch.ones(10, dim)) for name, dim in (("a", 2), ("b", 3))})
    return shards


def test_shards_are_exported_as_rows(tmp_path: Path) -> None:
    assert export_model(bare(), tmp_path, name="rows", precision="int8") == tmp_path
    assert files(tmp_path) == {"0/signature.json", "0/a.safetensors", "0/b.safetensors"}
    with closing(Servable(tmp_path / "0")) as servable:
        signature = servable.signature
        assert (signature.name, signature.part, signature.step) == ("rows", "standalone", 0)
        assert (signature.predicts, signature.features, servable.dense_names) == (False, (), {})
        assert servable.lookup("b", torch.tensor([3, 10])).tolist() == [[1.0] * 3, [0.0] * 3]
        servable.warm_up()
        servable.apply({"a": (torch.tensor([10]), torch.full((1, 2), 4.0))})
        assert servable.lookup("a", torch.tensor([10])).tolist() == [[4.0, 4.0]]
        with pytest.raises(UsageError, match="rows holds rows without a model"):
            servable.predict({"a": torch.tensor([1])})


def test_shards_are_exported_in_parts_without_an_entry(tmp_path: Path) -> None:
    export_model(bare(), tmp_path, name="rows", version=2, num_shards=3)
    parts = [f"ps_{number}/2" for number in range(3)]
    assert files(tmp_path) == {
        f"{part}/{file}" for part in parts for file in ("signature.json", "a.safetensors", "b.safetensors")
    }
    assert [Signature.read(tmp_path / part).tables["a"].rows for part in parts] == [4, 3, 3]


def test_a_collection_is_not_a_model(tmp_path: Path) -> None:
    collection = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SGD())], [Feature("f", "t")])
    with pytest.raises(InputError, match="to export its rows alone, pass its `shards`"):
        export_model(collection, tmp_path, name="m")  # type: ignore[arg-type]
