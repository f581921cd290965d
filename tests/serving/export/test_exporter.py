"""Export: what is written, where it is spread, and what cannot be exported."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megalith import SGD, EmbeddingCollection, Feature, Layout, Router, Slice, TableConfig, checkpoint
from megalith.checkpoint.manifest import Routing
from megalith.errors import ExportError, InputError
from megalith.models import Model
from megalith.serving.export.exporter import Provenance, export_model
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import Signature
from tests.models.support import make
from tests.serving.export.export_support import files, wide
from tests.serving.export.test_dense_program import Wide
from tests.serving.exported import NUM_IDS, logits_of, request, rows_of, served, train, trained

MODES = ("roundrobin", "hash_roundrobin", "continuous")


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


def test_a_table_without_rows_and_one_of_zeros(tmp_path: Path, fast: None) -> None:
    for version, precision in enumerate(("float32", "float16", "int8")):
        servable = served(Wide(), tmp_path, version=version, precision=precision)
        servable.warm_up()
        assert not servable.lookup("t", torch.arange(3)).any()
    zeros = served(wide(rows=torch.zeros(10, 2)), tmp_path, version=3, precision="int8")
    assert not zeros.lookup("t", torch.arange(10)).any()


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
        (Wide, {"id_kinds": {"nobody": "integer"}}, InputError, "id_kinds"),
        (Wide, {"id_kinds": {"f": "text"}}, InputError, "id_kinds"),
        (Wide, {"id_kinds": {"f": None}}, InputError, "id_kinds"),
        (Wide, {"id_kinds": 3}, InputError, "id_kinds"),
        (Wide, {"outputs": "ctr"}, InputError, "export: outputs"),
        (Wide, {"activations": {"a": "cube"}}, InputError, "export: activation of 'a'"),
        (Wide, {"single_ids": ["x"]}, InputError, "export: single_ids"),
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


@pytest.mark.parametrize("chunks", [None, 3, [None], [(torch.arange(2),)], [(torch.arange(2), [1.0])]])
def test_what_a_source_of_rows_returns_is_checked(tmp_path: Path, fast: None, chunks: Any) -> None:
    with pytest.raises(InputError, match=r"rows\('t'\) must return"):
        export_model(Wide(), tmp_path, name="m", version=1, rows=lambda table: chunks)
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
