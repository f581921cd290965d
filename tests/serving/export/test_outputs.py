"""Outputs of any name, shape and type, of any module: what is exported is what a server returns."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalith import SGD, EmbeddingCollection, Feature, FirstN, Layout, Mean, Ragged, Slice, TableConfig
from megalith.distributed.dense_parameters import dense_parameters
from megalith.errors import ExportError, InputError, RemoteError
from megalith.serving.export.exporter import export_model
from megalith.serving.export.program_export import ModelParts, ServingModule, export_program
from megalith.serving.export.servable import Servable
from megalith.serving.export.signature import OutputSpec, Signature
from megalith.serving.proto.message_types import SignatureDefMap
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import Batching, ServerConfig
from tests.serving.export.test_dense_program import Wide
from tests.serving.exports import ServerClient

IDS = torch.arange(1, 6)


def filled(name: str, features: list[Feature], dim: int = 3, **options: Any) -> EmbeddingCollection:
    """A collection of one table, whose ids 1 to 5 have rows."""
    collection = EmbeddingCollection([TableConfig(name, dim=dim, optimizer=SGD(0.1))], features, **options)
    rows = torch.randn(len(IDS), dim, generator=torch.Generator().manual_seed(len(name)))
    collection.shards.assign({name: (IDS, rows)})
    return collection


class Watched(nn.Module):
    """The model of the quick start."""

    def __init__(self, head: Callable[[Tensor], Any] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embeddings = filled(
            "movie", [Feature("watched", "movie", Mean()), Feature("candidate", "movie")]
        )
        self.head = nn.Linear(6, 4)
        self.end = head

    def forward(self, batch: Mapping[str, Any]) -> Any:
        rows = self.embeddings(batch)
        hidden = self.head(torch.cat([rows["watched"], rows["candidate"]], dim=1))
        return hidden[:, 0] if self.end is None else self.end(hidden)


BATCH = {"watched": Ragged.from_lists([[1, 2], [3], []]), "candidate": torch.tensor([4, 5, 1])}


def several(hidden: Tensor) -> dict[str, Tensor]:
    return {
        "ctr": hidden[:, 0],
        "topics": hidden[:, :3],
        "best": hidden.topk(2).indices,
        "grid": hidden.reshape(-1, 2, 2).half(),
        "positive": hidden[:, 1:2] > 0,
    }


@torch.no_grad()
def wanted_of(module: nn.Module, *inputs: Any) -> Any:
    return module.eval()(*inputs)


def exported(module: Any, out: Path, **options: Any) -> Servable:
    return Servable(export_model(module, out, name="m", version=1, **options) / "1")


# ---- modules


def test_the_model_of_the_quick_start_is_exported_as_it_is(tmp_path: Path) -> None:
    model = Watched().train()
    servable = exported(model, tmp_path)
    assert model.training
    found = servable.predict(BATCH)
    assert list(found) == ["output"]
    torch.testing.assert_close(found["output"], wanted_of(model, BATCH))
    assert servable.dense_names.keys() == dict(dense_parameters(model)).keys()


def test_several_outputs_have_their_names_shapes_and_dtypes(tmp_path: Path) -> None:
    model = Watched(several)
    servable = exported(model, tmp_path, activations={"ctr": "sigmoid", "topics": "softmax"})
    assert servable.signature.outputs == (
        OutputSpec("ctr"),
        OutputSpec("topics", "float32", (3,)),
        OutputSpec("best", "int64", (2,)),
        OutputSpec("grid", "float32", (2, 2)),
        OutputSpec("positive", "bool", (1,)),
    )
    found, wanted = servable.predict(BATCH), wanted_of(model, BATCH)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found["ctr"], torch.sigmoid(wanted["ctr"]))
    torch.testing.assert_close(found["topics"], torch.softmax(wanted["topics"], 1))
    torch.testing.assert_close(found["grid"], wanted["grid"].float())
    assert torch.equal(found["best"], wanted["best"])
    assert torch.equal(found["positive"], wanted["positive"])


def test_a_tuple_gets_names(tmp_path: Path) -> None:
    parts = ModelParts(Watched(lambda hidden: (hidden[:, 0], hidden)))
    written = export_program(parts, tmp_path / "a")
    assert [each.name for each in written.outputs] == ["output_0", "output_1"]
    written = export_program(parts, tmp_path / "b", names=["score", "all"])
    assert written.outputs == (OutputSpec("score"), OutputSpec("all", "float32", (4,)))
    with pytest.raises(InputError, match="a different name for each of the model's 2 tensors"):
        export_program(parts, tmp_path / "c", names=["score"])


class Scorer(Wide):
    """A model with `score`, whose output is computed by a function of the logits [B, 1]."""

    def __init__(self, end: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.end = end

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Any:
        return self.end(self.deep(rows["rows"]))


def test_a_score_is_a_logit_unless_its_shape_says_otherwise(tmp_path: Path) -> None:
    def outputs(end: Callable[[Tensor], Any], **options: Any) -> dict[str, tuple[int, ...]]:
        written = export_program(ModelParts(Scorer(end)), tmp_path / "p", **options)
        return {each.name: each.shape for each in written.outputs}

    assert outputs(lambda x: x.squeeze(1)) == {"logits": (), "probabilities": ()}
    assert outputs(lambda x: x) == {"logits": (1,), "probabilities": (1,)}
    assert outputs(lambda x: torch.cat([x, -x], 1)) == {"output": (2,)}
    assert outputs(lambda x: x.squeeze(1), names=["rating"]) == {"rating": ()}
    assert outputs(lambda x: {"rating": x[:, 0]}) == {"rating": ()}


@pytest.mark.parametrize(
    ("end", "options", "message"),
    [
        (lambda x: x.sum(), {}, r"output 'output' is \[\] for a batch of"),
        (lambda x: x.t(), {}, "the first dimension of every output must be the batch"),
        (lambda x: x[:, 0].squeeze(), {}, r"is \[\] for a batch of 1 rows"),
        (lambda x: x @ x.t(), {}, "another shape in a batch of another size"),
        (lambda x: {"a": {"b": x}}, {}, "output 'a' must be a tensor, got dict"),
        (lambda x: {}, {}, "returns 0 outputs"),
        (lambda x: x.to(torch.complex64), {}, "complex64, which servers do not return"),
        (lambda x: {"a": x}, {"names": ["b"]}, "names its outputs itself"),
        (lambda x: x, {"activations": {"ctr": "sigmoid"}}, "no output 'ctr'; it has output"),
    ],
    ids=["scalar", "transposed", "squeezed", "square", "nested", "none", "complex", "named", "activation"],
)
def test_what_a_server_cannot_return_is_refused_at_export(
    tmp_path: Path, end: Callable[[Tensor], Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        export_program(ModelParts(Scorer(end)), tmp_path / "p", **options)
    assert not (tmp_path / "p").exists()


# ---- several collections, dense values


class Towers(nn.Module):
    """Two collections, one with layouts and one with a history, and dense values within the batch."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        layouts = [Layout("user_rows", [Slice("user", 0, 3)])]
        self.left = filled("users", [Feature("user", "users")], layouts=layouts)
        self.right = filled("items", [Feature("item", "items"), Feature("past", "items", FirstN(2))])
        self.price = nn.Linear(2, 3)

    def forward(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        left = self.left({"user": batch["user"]})["user_rows"] + self.price(batch["price"])
        right = self.right(batch)
        return {"match": (left * right["item"]).sum(1), "item": right["item"] + right["past"].sum(1)}


def test_several_collections_and_dense_values(tmp_path: Path) -> None:
    model = Towers()
    module = ServingModule(model, num_dense=2, call=lambda m, batch, dense: m({**batch, "price": dense}))
    servable = exported(module, tmp_path, num_shards=0, single_ids=["user", "item"])
    features = {
        "user": torch.tensor([1, 2]),
        "item": torch.tensor([5, 3]),
        "past": Ragged.from_lists([[4], [1, 2]]),
    }
    dense = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    found, wanted = servable.predict(features, dense), wanted_of(model, {**features, "price": dense})
    torch.testing.assert_close(found, wanted)
    assert sorted(servable.signature.tables) == ["items", "users"]


def test_collections_must_not_share_names() -> None:
    class Twice(nn.Module):
        def __init__(self, tables: str, features: str) -> None:
            super().__init__()
            self.a = filled(tables[0], [Feature(features[0], tables[0])])
            self.b = filled(tables[1], [Feature(features[1], tables[1])])

    with pytest.raises(InputError, match="two EmbeddingCollections have a table 't'"):
        _ = ModelParts(Twice("tt", "ab")).shards
    with pytest.raises(InputError, match="two EmbeddingCollections have a feature 'f'"):
        _ = ModelParts(Twice("tu", "ff")).plan


class Misused(Watched):
    def __init__(self, use: Callable[[EmbeddingCollection, dict[str, Any]], Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, batch: Any) -> Tensor:
        return self.use(self.embeddings, batch)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda e, b: e(b)["candidate"] * len(b["watched"]), "reads feature 'watched' itself"),
        (lambda e, b: e(b)["candidate"] * b["candidate"].shape[0], "reads feature 'candidate' itself"),
        (lambda e, b: e(b)["candidate"] + e(b)["watched"], "calls an EmbeddingCollection twice"),
        (
            lambda e, b: e({"watched": b["candidate"], "candidate": b["watched"]})["candidate"],
            "unchanged and under its own name",
        ),
        (lambda e, b: torch.zeros(3), "does not call its EmbeddingCollection of watched, candidate"),
    ],
    ids=["len", "shape", "twice", "renamed", "unused"],
)
def test_a_module_that_needs_the_ids_is_refused(tmp_path: Path, use: Any, message: str) -> None:
    model = Misused(use)
    with pytest.raises(InputError, match=message):
        export_program(ModelParts(model), tmp_path / "p")
    assert model.embeddings(BATCH)["candidate"].shape == (3, 3), "the collection works as before"


def test_what_is_no_model() -> None:
    for model in (nn.Linear(1, 1), None, "model"):
        with pytest.raises(InputError, match="export: "):
            ModelParts(model)


# ---- rows that depend on each other


def test_rows_that_depend_on_each_other_are_computed_alone(tmp_path: Path) -> None:
    model = Watched(lambda hidden: hidden[:, 0] - hidden[:, 0].mean())
    export_model(model, tmp_path, name="m", version=1)
    signature = Signature.read(tmp_path / "1")
    assert signature.joint_rows
    assert not signature.batchable
    assert not Signature.read(export_model(Watched(), tmp_path, name="m", version=2) / "2").joint_rows


@pytest.mark.parametrize("joint", [True, False])
def test_who_exports_may_say_whether_rows_depend_on_each_other(tmp_path: Path, joint: bool) -> None:
    """A run with random rows does not find every dependence, and may find one that does not matter."""
    model = Watched(lambda hidden: hidden[:, 0] - hidden[:, 0].mean()) if not joint else Watched()
    export_model(model, tmp_path, name="m", version=1, joint_rows=joint)
    assert Signature.read(tmp_path / "1").joint_rows is joint


# ---- the format before named outputs


def test_an_export_of_format_version_1_is_served(tmp_path: Path) -> None:
    model = Wide()
    model.embeddings.shards.assign({"t": (IDS, torch.ones(len(IDS), 2))})
    out = export_model(model, tmp_path, name="m", version=1) / "1"
    wanted = Servable(out).predict({"f": IDS})
    data = json.loads((out / "signature.json").read_text())
    del data["joint_rows"]
    for feature in data["features"]:
        del feature["single"]
    data |= {"format_version": 1, "outputs": ["logits", "probabilities"]}
    (out / "signature.json").write_text(json.dumps(data))
    found = Servable(out).predict({"f": IDS})
    assert all(torch.equal(found[name], wanted[name]) for name in ("logits", "probabilities"))


def test_a_program_that_returns_something_else_than_its_signature_is_refused(tmp_path: Path) -> None:
    out = export_model(Watched(several), tmp_path, name="m", version=1) / "1"
    data = json.loads((out / "signature.json").read_text())
    data["outputs"][1]["shape"] = [2]
    (out / "signature.json").write_text(json.dumps(data))
    with pytest.raises(ExportError, match="does not return the outputs that the signature describes"):
        Servable(out).warm_up()


# ---- over the wire


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    out = tmp_path_factory.mktemp("models")
    export_model(Watched(several), out / "movies", name="movies", version=1, single_ids=["candidate"])
    joint = Watched(lambda hidden: hidden[:, 0] - hidden[:, 0].mean())
    export_model(joint, out / "lists", name="lists", version=1)
    with ModelServer(out, ServerConfig(http_port=0, batching=Batching(max_rows=4))) as started:
        yield started


def tensors_of(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    watched = batch["watched"]
    return {
        "watched": watched.values,
        "watched:row_splits": watched.row_splits,
        "candidate": batch["candidate"],
    }


def test_every_output_comes_over_grpc(server: ModelServer) -> None:
    many = {
        "watched": Ragged.from_lists([[k % 5 + 1] for k in range(11)]),
        "candidate": torch.arange(11) % 5 + 1,
    }
    wanted = wanted_of(Watched(several), many)
    with ServerClient(server.address) as ask:
        found = ask(tensors_of(many))  # computed in parts of 4 rows
        assert {name: each.dtype for name, each in found.items()} == {
            "ctr": torch.float32,
            "topics": torch.float32,
            "best": torch.int64,
            "grid": torch.float32,
            "positive": torch.bool,
        }
        for name, tensor in wanted.items():
            torch.testing.assert_close(found[name], tensor.to(found[name].dtype))
        empty = ask({"watched": torch.empty(0, 2, dtype=torch.int64)}, outputs=("grid", "best"))
        assert empty["grid"].shape == (0, 2, 2)
        assert empty["best"].shape == (0, 2)


def test_metadata_has_the_true_shapes(server: ModelServer) -> None:
    with ServerClient(server.address) as ask:
        answer = ask.metadata()
    signatures = SignatureDefMap()
    answer.metadata["signature_def"].Unpack(signatures)
    default = signatures.signature_def["serving_default"]
    shapes = {
        name: [dim.size for dim in info.tensor_shape.dim]
        for name, info in (*default.inputs.items(), *default.outputs.items())
    }
    assert shapes == {
        "watched": [-1, -1],
        "candidate": [-1],
        "ctr": [-1],
        "topics": [-1, 3],
        "best": [-1, 2],
        "grid": [-1, 2, 2],
        "positive": [-1, 1],
    }


def test_every_output_comes_over_rest(server: ModelServer) -> None:
    url = f"http://{server.http_address}/v2/models/movies"
    described = json.loads(urllib.request.urlopen(url, timeout=20).read())
    assert [(o["name"], o["datatype"], o["shape"]) for o in described["outputs"]] == [
        ("ctr", "FP32", [-1]),
        ("topics", "FP32", [-1, 3]),
        ("best", "INT64", [-1, 2]),
        ("grid", "FP32", [-1, 2, 2]),
        ("positive", "BOOL", [-1, 1]),
    ]
    inputs = [
        {"name": "watched", "datatype": "INT64", "shape": [1, 2], "data": [1, 2]},
        {"name": "candidate", "datatype": "INT64", "shape": [1], "data": [4]},
    ]
    body = json.dumps({"inputs": inputs}).encode()
    reply = json.loads(urllib.request.urlopen(f"{url}/infer", body, timeout=20).read())
    wanted = wanted_of(Watched(several), {"watched": Ragged.from_lists([[1, 2]]), "candidate": IDS[3:4]})
    for output in reply["outputs"]:
        tensor = wanted[output["name"]]
        assert output["shape"] == list(tensor.shape)
        np.testing.assert_allclose(output["data"], tensor.float().flatten().tolist(), rtol=1e-3)


def test_joint_rows_are_not_split(server: ModelServer) -> None:
    with ServerClient(server.address) as ask:
        four = ask({"candidate": torch.tensor([1, 2, 3, 4])}, model="lists")["output"]
        assert abs(float(four.mean())) < 1e-6
        with pytest.raises(RemoteError, match="at most 4 rows") as raised:
            ask({"candidate": IDS}, model="lists")
        assert raised.value.code == "INVALID_ARGUMENT"
