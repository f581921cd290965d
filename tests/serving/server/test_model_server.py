"""The server returns the scores of the model for every form of a request, and names errors in others."""

from __future__ import annotations

import errno
import json
import re
import socket
import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
import torch
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from torch import Tensor

from megalith import Ragged, hash_strings
from megalith.errors import InputError, RemoteError, UsageError
from megalith.models import Model
from megalith.serving.proto import message_types as messages
from megalith.serving.proto.infer_tensors import from_infer_request
from megalith.serving.server.grpc_calls import remaining
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import (
    DENSE,
    FEATURES,
    INPUTS,
    NAMES,
    NUM_DENSE,
    NUM_IDS,
    ServerClient,
    export_version,
    fails,
    is_healthy,
    logits,
    request_of,
    rows,
    serving,
    to_infer_request,
)

RAW = "raw_lookup"


@pytest.fixture(scope="module")
def model_and_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, ModelServer]]:
    out = tmp_path_factory.mktemp("exports")
    model = export_version(out, version=3)
    with ModelServer(out, ServerConfig(metrics_port=0)) as server:
        yield model, server


@pytest.fixture
def model(model_and_server: tuple[Model, ModelServer]) -> Model:
    return model_and_server[0]


@pytest.fixture
def server(model_and_server: tuple[Model, ModelServer]) -> ModelServer:
    return model_and_server[1]


@pytest.fixture
def ask(server: ModelServer) -> Iterator[ServerClient]:
    with ServerClient(server.address) as asked:
        yield asked


@pytest.fixture
def channel(server: ModelServer) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.address) as opened:
        yield opened


def refused(
    ask: ServerClient, inputs: Mapping[str, Any], text: str, code: str = "INVALID_ARGUMENT", **spec: Any
) -> None:
    with fails(code, text):
        ask(inputs, **spec)


# ---- scores


@pytest.mark.parametrize("count", [1, 7, 2000])
def test_scores_are_the_model_s(model: Model, ask: ServerClient, count: int) -> None:
    features, dense = rows(count)
    outputs = ask({**features, "dense": dense})
    expected = logits(model, features, dense)
    torch.testing.assert_close(outputs["logits"], expected)
    torch.testing.assert_close(outputs["probabilities"], expected.sigmoid())


def test_an_empty_request_has_empty_scores(ask: ServerClient) -> None:
    features, dense = rows(0)
    assert {name: list(value.shape) for name, value in ask({**features, "dense": dense}).items()} == {
        "logits": [0],
        "probabilities": [0],
    }


TAGS = Ragged.from_lists([[1, 2], [], [3]])


@pytest.mark.parametrize(
    "tags",
    [
        {"tags": torch.tensor([[1, 2], [-1, -1], [-1, 3]])},
        {"tags": torch.tensor([[1, 2], [-1, -1], [3, -1]], dtype=torch.int32)},
        {"tags": torch.tensor([1, 2, 3]), "tags:row_splits": torch.tensor([0, 2, 2, 3])},
        {"tags": torch.tensor([1, 2, 3], dtype=torch.uint64), "tags:row_splits": torch.tensor([0, 2, 2, 3])},
        {"tags": torch.tensor([1, 2, 3]), "tags:row_splits": torch.tensor([0, 2, 2, 3], dtype=torch.int32)},
    ],
    ids=["padded", "padded int32", "ragged", "ragged uint64", "int32 splits"],
)
def test_lists_come_padded_or_ragged(model: Model, ask: ServerClient, tags: dict[str, Tensor]) -> None:
    features, dense = rows(3)
    outputs = ask({**features, **tags, "dense": dense})
    torch.testing.assert_close(outputs["logits"], logits(model, {**features, "tags": TAGS}, dense))


def test_weights_stand_beside_values(model: Model, ask: ServerClient) -> None:
    features, dense = rows(3)
    given = {
        "tags": TAGS.values,
        "tags:row_splits": TAGS.row_splits,
        "tags:weights": torch.tensor([0.5, 2.0, -1.0]),
    }
    weighted = Ragged(TAGS.values, TAGS.row_splits, given["tags:weights"])
    outputs = ask({**features, **given, "dense": dense})
    torch.testing.assert_close(outputs["logits"], logits(model, {**features, "tags": weighted}, dense))


def test_strings_are_hashed(model: Model, ask: ServerClient) -> None:
    words = [b"a", "ü".encode()]
    ids = hash_strings(words)
    model.embeddings.shards.local["item"].lookup(ids)
    by_string = ask({**FEATURES, "item": words, "dense": DENSE})
    by_id = ask({**FEATURES, "item": ids, "dense": DENSE})
    assert torch.equal(by_string["logits"], by_id["logits"])


def test_a_feature_that_is_not_sent_is_empty_and_counted(
    model: Model, server: ModelServer, ask: ServerClient
) -> None:
    features, dense = rows(2)
    del features["tags"]
    outputs = ask({**features, "dense": dense})
    empty = Ragged.from_lists([[], []])
    torch.testing.assert_close(outputs["logits"], logits(model, {**features, "tags": empty}, dense))
    assert (
        'megalith_missing_features_total{feature="tags",model="movies"} 1.0' in server.metrics.text().decode()
    )


@pytest.mark.parametrize("protocol", ["tf", "oip"])
def test_ids_without_a_row_are_reported_to_who_asks(channel: grpc.Channel, protocol: str) -> None:
    features, dense = rows(3)
    inputs = {**features, "user": torch.tensor([1, -7, NUM_IDS]), "dense": dense}
    if protocol == "tf":
        method, request = "/tensorflow.serving.PredictionService/Predict", request_of(inputs)
    else:
        method = "/inference.GRPCInferenceService/ModelInfer"
        request = to_infer_request(inputs, model_name="movies")
    call = channel.unary_unary(method).with_call
    data = request.SerializeToString()
    _, answered = call(data, timeout=20, metadata=[("megalith-missing-ids", "1")])
    assert json.loads(dict(answered.trailing_metadata())["megalith-missing-ids"]) == {"user": 2}
    _, answered = call(data, timeout=20)
    assert "megalith-missing-ids" not in dict(answered.trailing_metadata())


def test_the_outputs_asked_for(ask: ServerClient) -> None:
    assert list(ask(INPUTS, outputs=("probabilities",))) == ["probabilities"]
    refused(ask, INPUTS, "output 'nope' is unknown", outputs=("nope",))


@pytest.mark.parametrize("name", ["movies", "movies:standalone", "movies:entry", "movies:ps_0"])
def test_a_model_that_stands_alone_answers_for_its_parts(ask: ServerClient, name: str) -> None:
    _, spec = ask.send(request_of(INPUTS, model=name))
    assert (spec.name, spec.version.value, spec.signature_name) == (name, 3, "serving_default")


# ---- what is wrong


def test_bad_inputs_are_named(ask: ServerClient) -> None:
    good = dict(INPUTS)
    refused(ask, {}, "none of the model's features user, item, tags")
    refused(ask, {"dense": DENSE}, "none of the model's features")
    refused(ask, {**good, "colour": DENSE}, "input 'colour' is unknown; the model takes user")
    refused(ask, {**good, "item": torch.tensor([1, 2, 3])}, "'item' has 3 rows, but 'user' has 2")
    refused(ask, {**good, "dense": torch.zeros(3, NUM_DENSE)}, "'dense' has 3 rows, but 'user' has 2")
    refused(ask, {**good, "dense": torch.zeros(2, 9)}, r"'dense' must be \[rows, 3\], not \[2, 9\]")
    refused(ask, FEATURES, "'dense' is missing")
    refused(ask, {**good, "item": torch.zeros(2)}, "'item' must be integers or strings, not torch.float32")
    refused(ask, {**good, "item": torch.zeros(2, 1, 1, dtype=torch.int64)}, "'item' must be .rows. or")
    refused(ask, {**good, "item:row_splits": torch.tensor([0, 1])}, "must start at 0, end at 2")
    refused(ask, {**good, "item:row_splits": torch.tensor([0, 2, 1, 2])}, "not decrease")
    refused(ask, {**good, "item:row_splits": torch.zeros(0, dtype=torch.int64)}, "must start at 0, end at 2")
    refused(ask, {**good, "item:weights": torch.zeros(3)}, r"must be \[2\] like 'item', not \[3\]")
    del good["item"]
    refused(ask, {**good, "item:weights": torch.zeros(2)}, "'item:weights' is given without 'item'")


def test_unknown_models_versions_and_signatures(ask: ServerClient) -> None:
    good = dict(INPUTS)
    refused(ask, good, "model 'films' is unknown; known models: movies", "NOT_FOUND", model="films")
    refused(ask, good, "has no version 4; it has 3", "NOT_FOUND", version=4)
    refused(ask, good, "signature 'classify' is unknown", signature="classify")


def test_malformed_messages(channel: grpc.Channel) -> None:
    for method in (
        "tensorflow.serving.PredictionService/Predict",
        "inference.GRPCInferenceService/ModelInfer",
    ):
        with pytest.raises(grpc.RpcError) as raised:
            channel.unary_unary(f"/{method}")(b"\xff\xff\xff", timeout=20)
        assert raised.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_a_request_that_is_too_large(tmp_path: Path) -> None:
    export_version(tmp_path)
    with serving(tmp_path, max_request_bytes=1000) as (_, ask):
        # In the message, whose size is checked when it is read ...
        refused(ask, {**FEATURES, "item": torch.zeros(200, dtype=torch.int64)}, "bytes left for this request")
        # ... and as a message, which gRPC does not even read.
        big = torch.zeros(2**18, dtype=torch.int64)
        refused(ask, {"item": big}, "larger than max", "RESOURCE_EXHAUSTED")
        assert ask(INPUTS)["logits"].shape == (2,)


# ---- the other methods


def test_model_metadata(server: ModelServer, ask: ServerClient) -> None:
    answer = ask.metadata()
    assert answer.model_spec.version.value == 3
    signatures = messages.SignatureDefMap()
    answer.metadata["signature_def"].Unpack(signatures)
    assert sorted(signatures.signature_def) == ["lookup", "raw_lookup", "serving_default"]
    default = signatures.signature_def["serving_default"]
    assert sorted(default.inputs) == sorted([*NAMES, "dense"])
    assert sorted(default.outputs) == ["logits", "probabilities"]
    assert [dim.size for dim in default.inputs["dense"].tensor_shape.dim] == [-1, NUM_DENSE]
    lookup, raw = signatures.signature_def["lookup"], signatures.signature_def["raw_lookup"]
    assert sorted(lookup.inputs) == sorted(lookup.outputs) == sorted(NAMES)
    assert [dim.size for dim in lookup.outputs["user"].tensor_shape.dim] == [-1, 5]
    assert (sorted(raw.inputs), list(raw.outputs)) == (["id", "id_split"], ["flat_emb"])


def test_model_status(ask: ServerClient) -> None:
    assert ask.status() == {3: (30, "")}
    with pytest.raises(RemoteError, match="no version 9"):
        ask.status(version=9)


def known_rows(model: Model, table: str, ids: Tensor) -> Tensor:
    """The rows of ids, zeros for those that training never saw."""
    rows = model.embeddings.shards.local[table].lookup(ids)
    rows[(ids < 0) | (ids >= NUM_IDS)] = 0.0
    return rows


def test_rows_are_looked_up_by_table(model: Model, ask: ServerClient) -> None:
    ids, items = torch.tensor([4, 1000, 4, -1]), torch.tensor([7])
    outputs = ask({"user": ids, "item": items}, signature="lookup")
    assert sorted(outputs) == ["item", "user"]
    assert torch.equal(outputs["user"], known_rows(model, "user", ids))
    assert torch.equal(outputs["item"], known_rows(model, "item", items))
    assert list(ask({"user": ids, "item": items}, signature="lookup", outputs=("item",))) == ["item"]


def test_rows_of_all_tables_are_looked_up_flat(model: Model, ask: ServerClient) -> None:
    ids = {"item": [7], "tags": [], "user": [4, 1000, 4]}
    flat = ask({"id": torch.tensor([7, 4, 1000, 4]), "id_split": torch.tensor([0, 1, 1, 4])}, signature=RAW)
    expected = [known_rows(model, name, torch.tensor(each, dtype=torch.int64)) for name, each in ids.items()]
    assert list(flat) == ["flat_emb"]
    assert torch.equal(flat["flat_emb"], torch.cat(expected).reshape(-1))
    nothing = {"id": torch.empty(0, dtype=torch.int64), "id_split": torch.zeros(4, dtype=torch.int64)}
    assert ask(nothing, signature=RAW)["flat_emb"].shape == (0,)


ONE = torch.tensor([1])
SPLIT = torch.tensor([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("signature", "inputs", "outputs", "message"),
    [
        ("lookup", {"nobody": ONE}, (), "input 'nobody' is unknown; lookup takes user, item, tags"),
        ("lookup", {"user": ONE.float()}, (), "input 'user' must be int64"),
        ("lookup", {"user": ONE}, ("usr",), "output 'usr' is unknown; this lookup returns user"),
        ("lookup", {"user": ONE}, ("item",), "output 'item' is unknown; this lookup returns user"),
        (RAW, {"id": ONE, "id_split": SPLIT}, ("emb",), "this raw_lookup returns flat_emb"),
        (RAW, {"ids": ONE, "id_split": SPLIT}, (), "input 'id' must be int64 .n., got nothing"),
        (RAW, {"id": ONE, "id_split": SPLIT, "x": ONE}, (), "input 'x' is unknown; raw_lookup takes id"),
        (RAW, {"id": ONE, "id_split": SPLIT[:3]}, (), "'id_split' must be 4 ascending numbers from 0 to 1"),
        (RAW, {"id": ONE, "id_split": SPLIT * 2}, (), "'id_split' must be 4 ascending numbers from 0 to 1"),
    ],
)
def test_a_wrong_lookup_is_refused(
    ask: ServerClient, signature: str, inputs: dict[str, Tensor], outputs: tuple[str, ...], message: str
) -> None:
    refused(ask, inputs, message, signature=signature, outputs=outputs)


def test_open_inference_protocol(model: Model, channel: grpc.Channel) -> None:
    def call(method: str, data: bytes = b"") -> bytes:
        answer: bytes = channel.unary_unary(f"/inference.GRPCInferenceService/{method}")(data, timeout=20)
        return answer

    assert messages.ServerLiveResponse.FromString(call("ServerLive")).live
    assert messages.ServerReadyResponse.FromString(call("ServerReady")).ready
    assert messages.ServerMetadataResponse.FromString(call("ServerMetadata")).name == "megalith"
    for name, version, ready in (
        ("movies", "", True),
        ("movies", "3", True),
        ("movies", "4", False),
        ("x", "", False),
    ):
        asked = messages.ModelReadyRequest(name=name, version=version).SerializeToString()
        assert messages.ModelReadyResponse.FromString(call("ModelReady", asked)).ready == ready
    asked = messages.ModelMetadataRequest(name="movies").SerializeToString()
    metadata = messages.ModelMetadataResponse.FromString(call("ModelMetadata", asked))
    assert [given.name for given in metadata.inputs] == [*NAMES, "dense"]
    assert (metadata.versions, metadata.platform) == (["3"], "megalith")

    request = to_infer_request(INPUTS, model_name="movies", id="r7")
    response = messages.ModelInferResponse.FromString(call("ModelInfer", request.SerializeToString()))
    assert (response.id, response.model_version) == ("r7", "3")
    scores = torch.frombuffer(bytearray(response.raw_output_contents[0]), dtype=torch.float32)
    torch.testing.assert_close(scores, logits(model, FEATURES, DENSE))
    assert from_infer_request(request).keys() == {*FEATURES, "dense"}


def test_health(server: ModelServer) -> None:
    for service in ("", "movies", "tensorflow.serving.PredictionService", "inference.GRPCInferenceService"):
        assert is_healthy(server, service)


def test_reflection_knows_every_service(channel: grpc.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    asked = reflection_pb2.ServerReflectionRequest(list_services="")
    (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=20)
    services = [service.name for service in answer.list_services_response.service]
    assert "tensorflow.serving.PredictionService" in services
    for service in services:
        asked = reflection_pb2.ServerReflectionRequest(file_containing_symbol=service)
        (answer,) = stub.ServerReflectionInfo(iter([asked]), timeout=20)
        assert answer.file_descriptor_response.file_descriptor_proto, service


def test_metrics(server: ModelServer, ask: ServerClient) -> None:
    ask(INPUTS)
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=20) as answer:
        text = answer.read().decode()
    for pattern in (
        r'megalith_request_seconds_count{code="OK",model="movies",signature="serving_default"} [1-9]',
        r'megalith_batch_rows_sum{model="movies"} [1-9]',
        r'megalith_queue_rows{model="movies"} 0\.0',
        r'megalith_version_state{model="movies",version="3"} 30\.0',
        r'megalith_ids_looked_up_total{model="movies",version="3"} [1-9]',
        r'megalith_overlay_rows{model="movies"} 0\.0',
    ):
        assert re.search(pattern, text), pattern


def test_unknown_names_are_not_labels(server: ModelServer, ask: ServerClient) -> None:
    refused(ask, {}, "unknown", "NOT_FOUND", model="made-up")
    assert "made-up" not in server.metrics.text().decode()


# ---- life


def test_nothing_to_serve(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no exported model that can be served"):
        ModelServer(tmp_path).start()


def test_a_port_that_is_taken(tmp_path: Path) -> None:
    export_version(tmp_path)
    with ModelServer(tmp_path) as first:
        port = int(first.address.rpartition(":")[2])
        with pytest.raises(OSError, match="cannot listen on"):
            ModelServer(tmp_path, ServerConfig(port=port)).start()


def test_a_server_is_started_once(tmp_path: Path) -> None:
    export_version(tmp_path)
    server = ModelServer(tmp_path)
    with server:
        pass
    server.stop()
    with pytest.raises(UsageError, match="started only once"):
        server.start()


@pytest.mark.parametrize("port", ["http_port", "metrics_port"])
def test_a_second_port_that_is_taken(tmp_path: Path, port: str) -> None:
    export_version(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = {"http_port": 0, "metrics_port": 0, port: taken.getsockname()[1]}
        server = ModelServer(tmp_path, ServerConfig(**ports))
        raised: list[OSError] = []

        def start() -> None:
            try:
                server.start()
            except OSError as error:
                raised.append(error)

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        starting.join(60)
        assert [error.errno for error in raised] == [errno.EADDRINUSE]


def test_a_server_that_leaves_still_answers_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_version(tmp_path)
    seen: dict[str, Any] = {}
    server = ModelServer(tmp_path, ServerConfig(lame_duck_seconds=7.0)).start()

    def linger(seconds: float) -> None:
        with grpc.insecure_channel(server.address) as channel, ServerClient(server.address) as ask:
            ready = channel.unary_unary("/inference.GRPCInferenceService/ServerReady")(b"", timeout=20)
            seen["seconds"] = seconds
            seen["health"] = is_healthy(server)
            seen["ready"] = messages.ServerReadyResponse.FromString(ready).ready
            seen["scores"] = ask(INPUTS)["logits"].shape

    monkeypatch.setattr("megalith.serving.server.model_server.linger", linger)
    server.stop()
    assert seen == {"seconds": 7.0, "health": False, "ready": False, "scores": (2,)}


def test_version_0_is_a_version(tmp_path: Path) -> None:
    for version in (0, 1):
        export_version(tmp_path, version=version)
    with serving(tmp_path, keep_versions=2) as (_, ask):
        asked = [ask.send(request_of(INPUTS, version=version))[1] for version in (0, 1, None)]
        assert [spec.version.value for spec in asked] == [0, 1, 1]


def test_version_0_is_the_newest_where_there_is_none(ask: ServerClient) -> None:
    newest = ask.send(request_of(INPUTS))[1].version.value
    found = ask.send(request_of(INPUTS, version=0))[1].version.value
    assert found == newest != 0


def test_a_call_without_a_deadline_has_none() -> None:
    def context(seconds: float | None) -> Any:
        return SimpleNamespace(time_remaining=lambda: seconds)

    assert [remaining(context(each)) for each in (None, 9.2e18, 2.5)] == [None, None, 2.5]
