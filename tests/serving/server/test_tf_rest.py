"""TF Serving's REST interface: rows and columns, status, metadata, gzip and HEAD."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import Ragged, hash_strings
from megalith.errors import InputError
from megalith.models import Model
from megalith.serving.proto.message_types import PredictResponse, TensorProto
from megalith.serving.proto.tf_tensors import fill_tensor_proto, from_tensor_proto
from megalith.serving.server.http import MIN_GZIP_BYTES, decompress_body
from megalith.serving.server.inputs import InputReader
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.request_errors import RequestError
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.server.tf_serving import TFBody
from megalith.serving.server.versions import write_labels
from tests.serving.exports import DENSE, FEATURES, INPUTS, export_version, logits, request_of
from tests.serving.server.test_rest import Rest

PREDICT = "/v1/models/movies:predict"
Made = tuple[Model, ModelServer]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    out = tmp_path_factory.mktemp("exports")
    model = export_version(out, version=3)
    write_labels(out, {"stable": 3})
    config = ServerConfig(http_port=0, max_request_bytes=2**20, accept_compressed=True)
    with ModelServer(out, config) as server:
        yield model, server


@pytest.fixture
def rest(made: Made) -> Iterator[Rest]:
    client = Rest(made[1])
    yield client
    client.connection.close()


def instances() -> list[dict[str, Any]]:
    return [
        {**{name: int(ids[row]) for name, ids in FEATURES.items()}, "dense": DENSE[row].tolist()}
        for row in range(2)
    ]


def columns() -> dict[str, Any]:
    return {**{name: ids.tolist() for name, ids in FEATURES.items()}, "dense": DENSE.tolist()}


def post(rest: Rest, body: Any, path: str = PREDICT, **headers: str) -> tuple[int, Any]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    return rest("POST", path, data, headers)[:2]


# ---- scores


@pytest.mark.parametrize("selected", ["", "/versions/3", "/labels/stable"])
def test_rows_and_columns(made: Made, rest: Rest, selected: str) -> None:
    expected = logits(made[0], FEATURES, DENSE)
    path = f"/v1/models/movies{selected}:predict"
    status, reply = post(rest, {"signature_name": "serving_default", "instances": instances()}, path)
    assert status == 200, reply
    found = torch.tensor([each["logits"] for each in reply["predictions"]])
    torch.testing.assert_close(found, expected)
    assert reply["predictions"][0].keys() == {"logits", "probabilities"}

    status, reply = post(rest, {"inputs": columns()}, path)
    assert status == 200, reply
    torch.testing.assert_close(torch.tensor(reply["outputs"]["logits"]), expected)


def test_lists_of_any_length_strings_and_bytes(made: Made, rest: Rest) -> None:
    model = made[0]
    words = [b"word", b"\xff\x00"]
    model.embeddings.shards.local["item"].lookup(hash_strings(words))  # they have no rows: zeros
    encoded = {"b64": base64.b64encode(words[1]).decode()}
    body = instances()
    for row, tags, item in ((0, [3], "word"), (1, [1, -1, 2], encoded)):  # -1 is padding
        body[row] |= {"tags": tags, "item": item}
    status, reply = post(rest, {"instances": body})
    assert status == 200, reply
    features = {
        "user": FEATURES["user"],
        "item": Ragged.from_lists([[], []]),
        "tags": Ragged.from_lists([[3], [1, 2]]),
    }
    found = torch.tensor([each["logits"] for each in reply["predictions"]])
    torch.testing.assert_close(found, logits(model, features, DENSE))

    split = columns() | {"tags": [3, 1, 2], "tags:row_splits": [0, 1, 3], "tags:weights": [1, 1, 1]}
    split["item"] = ["word", encoded]
    status, reply = post(rest, {"inputs": split})
    assert status == 200, reply
    torch.testing.assert_close(torch.tensor(reply["outputs"]["logits"]), found)


def test_unsigned_ids_and_ids_without_a_row(rest: Rest) -> None:
    body = instances()
    body[0]["user"] = 2**64 - 1
    rest.connection.request("POST", PREDICT, json.dumps({"instances": body}), {"Megalith-Missing-Ids": "1"})
    answer = rest.connection.getresponse()
    assert json.loads(answer.read())["missing_ids"] == {"user": 1}
    assert answer.headers["Megalith-Model-Version"] == "3"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "either"),
        (b"{}", "either"),
        (b'{"instances": [], "inputs": {}}', "either"),
        (b'{"instances": [], "extra": 1}', "'extra' is unknown"),
        (b'{"instances": []}', "a value for each row"),
        (b'{"instances": 3}', "a value for each row"),
        (b'{"instances": [1, 2]}', "must name them"),
        (b'{"inputs": [1]}', "must name them"),
        (b'{"instances": [{"user": 1}, {"item": 2}]}', "instance 1 must be an object with the same inputs"),
        (b'{"instances": [{"user": 1}, 2]}', "instance 1"),
        (b'{"instances": [{"user": null}]}', "numbers or strings"),
        (b'{"instances": [{"user": true}]}', "numbers or strings"),
        (b'{"instances": [{"user": [1, [2]]}]}', "mixes lists and values"),
        (b'{"instances": [{"user": [[1], [2, 3]]}]}', "different lengths within a row"),
        (
            b'{"instances": [{"user": 1, "dense": [1, 2, 3]}, {"user": 2, "dense": [4]}]}',
            "'dense' has lists of different lengths in its rows",
        ),
        (
            b'{"inputs": {"tags": [[1, 2], [3]], "tags:weights": [[0.5], [1, 2]]}}',
            "row 0 has 1 weights for 2 ids",
        ),
        (b'{"instances": [{"user": {"b64": "?"}}]}', "base64"),
        ('{"instances": [{"user": {"b64": "\u00e9"}}]}'.encode(), "base64"),
        (b'{"instances": [{"user": {"a": 1}}]}', "base64"),
        (b'{"instances": [{"user": 36893488147419103232}]}', "is not within"),
        (b'{"inputs": {"user": 3}}', "a value for each row"),
        (b'{"inputs": {"other": [3]}}', "'other' is unknown"),
        (b'{"signature_name": "lookup", "inputs": {"user": [1]}}', "use gRPC"),
    ],
)
def test_bad_bodies_are_refused_and_the_connection_lives(rest: Rest, body: bytes, message: str) -> None:
    status, reply = post(rest, body)
    assert (status, message in reply["error"]) == (400, True), reply
    assert rest("GET", "/v2/health/live")[0] == 200


def test_a_long_list_is_not_padded_to_any_size(rest: Rest) -> None:
    body = {"instances": [{"tags": [1] * 50_000}, *({"tags": [1]} for _ in range(5000))]}
    status, reply = post(rest, body)
    assert status == 400
    assert "row_splits" in reply["error"]


def test_padding_makes_no_request_larger_than_the_largest_body(made: Made) -> None:
    (model,) = made[1].models
    assert model.newest is not None
    reader = InputReader(model.newest.signature)  # with the default limit, 64 MiB
    body = {"instances": [{"tags": [1] * 3000}, *({"tags": [1]} for _ in range(1000))]}
    request = TFBody(json.dumps(body).encode())
    with pytest.raises(InputError, match="row_splits"):
        request.read(reader)


def test_empty_lists_of_strings(made: Made) -> None:
    (model,) = made[1].models
    assert model.newest is not None
    signature = model.newest.signature
    features = tuple(replace(feature, ids="xxhash64") for feature in signature.features)
    reader = InputReader(replace(signature, features=features))
    body = {"instances": [{"tags": [], "dense": [0, 1, 2]}, {"tags": [], "dense": [0, 1, 2]}]}
    request = TFBody(json.dumps(body).encode())
    column = request.read(reader).columns[list(reader.names).index("tags")]
    assert column is not None
    assert (column.ids, column.lengths) == (b"", bytes(16))


# ---- status and metadata


def test_status_and_metadata(rest: Rest) -> None:
    expected = {
        "model_version_status": [
            {"version": "3", "state": "AVAILABLE", "status": {"error_code": "OK", "error_message": ""}}
        ]
    }
    for path in ("/v1/models/movies", "/v1/models/movies/versions/3", "/v1/models/movies/labels/stable"):
        assert rest("GET", path)[:2] == (200, expected)
    for path in ("/v1/models/movies/metadata", "/v1/models/movies/labels/stable/metadata"):
        status, reply, _ = rest("GET", path)
        assert status == 200
        assert reply["model_spec"] == {"name": "movies", "signature_name": "", "version": "3"}
        signature = reply["metadata"]["signature_def"]["signature_def"]["serving_default"]
        dense = signature["inputs"]["dense"]
        assert (dense["name"], dense["dtype"]) == ("dense", "DT_FLOAT")
        assert [each["size"] for each in dense["tensor_shape"]["dim"]] == ["-1", "3"]
        assert signature["method_name"] == "tensorflow/serving/predict"


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/models/other", 404),
        ("GET", "/v1/models/movies/versions/9", 404),
        ("GET", "/v1/models/movies/labels/other/metadata", 404),
        ("GET", "/v1/models/movies/versions/x", 404),
        ("GET", "/v1/models", 404),
        ("GET", "*", 404),
        ("GET", "movies", 404),
        ("POST", "http://host", 404),
        ("GET", "/v1/models/movies:predict", 400),
        ("POST", "/v1/models/movies", 404),
        ("POST", "/v1/models/movies:classify", 501),
        ("POST", "/v1/models/movies/labels/other:predict", 404),
        ("POST", "/v1/models/other:predict", 404),
    ],
)
def test_other_paths(rest: Rest, method: str, path: str, status: int) -> None:
    found, reply, _ = rest(method, path, b'{"inputs": {}}' if method == "POST" else None)
    assert (found, set(reply)) == (status, {"error"})


# ---- HEAD and gzip


@pytest.mark.parametrize("path", ["/v2", "/v2/health/ready", "/v1/models/movies", "/v2/models/other"])
def test_head_is_get_without_a_body(rest: Rest, path: str) -> None:
    rest.connection.request("GET", path)
    answer = rest.connection.getresponse()
    status, size = answer.status, len(answer.read())
    rest.connection.request("HEAD", path)
    answer = rest.connection.getresponse()
    assert (answer.status, answer.read(), int(answer.headers["Content-Length"])) == (status, b"", size)


def test_gzip_both_ways(rest: Rest) -> None:
    body = {"inputs": {name: values * 100 for name, values in columns().items()}}
    plain = post(rest, body)[1]
    data = gzip.compress(json.dumps(body).encode())
    headers = {"Content-Encoding": "gzip", "Accept-Encoding": "deflate;q=0.5, gzip;q=1.0"}
    rest.connection.request("POST", PREDICT, data, headers)
    answer = rest.connection.getresponse()
    received = answer.read()
    assert answer.headers["Content-Encoding"] == "gzip"
    assert json.loads(gzip.decompress(received)) == plain
    assert len(gzip.decompress(received)) >= MIN_GZIP_BYTES
    for accepts in ("gzip;q=0", "*, gzip;q=0", "identity", "br"):
        rest.connection.request("POST", PREDICT, json.dumps(body), {"Accept-Encoding": accepts})
        answer = rest.connection.getresponse()
        assert json.loads(answer.read()) == plain


@pytest.mark.parametrize(
    ("body", "encoding", "status"),
    [
        (gzip.compress(bytes(64 << 20)), "gzip", 413),
        (gzip.compress(b'{"inputs": {}}')[:-4], "gzip", 400),
        (gzip.compress(b'{"inputs": {}}') * 2, "gzip", 400),
        (b"not gzip", "gzip", 400),
        (b"{}", "deflate", 400),
    ],
    ids=["a bomb", "cut", "two", "not gzip", "deflate"],
)
def test_compressed_bodies_are_bounded(made: Made, body: bytes, encoding: str, status: int) -> None:
    client = Rest(made[1])
    assert client("POST", PREDICT, body, {"Content-Encoding": encoding})[0] == status
    client.connection.close()


@pytest.mark.parametrize("size", [0, 1, 2**14, 2**18, 2**18 + 1, 10**6])
def test_bodies_of_any_size_are_decompressed(size: int) -> None:
    for data in (b" " * size, random.Random(size).randbytes(size)):
        compressed = gzip.compress(data, mtime=0)
        assert decompress_body(compressed, max(size, len(compressed))) == data
        for wrong in (compressed[:-1], compressed + b"x", compressed + bytes(40_000)):
            with pytest.raises(RequestError, match="not one complete gzip stream"):
                decompress_body(wrong, 2 * 10**6)
        if size > len(compressed):
            with pytest.raises(RequestError, match="once decompressed"):
                decompress_body(compressed, size - 1)


def test_a_body_that_becomes_too_large_takes_no_memory() -> None:
    bomb = gzip.compress(bytes(64 << 20))
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="once decompressed"):
            decompress_body(bomb, 32 << 20)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_compressed_bodies_are_refused_by_default(tmp_path: Path) -> None:
    export_version(tmp_path)
    with ModelServer(tmp_path, ServerConfig(http_port=0)) as server:
        client = Rest(server)
        status, reply, _ = client("POST", PREDICT, gzip.compress(b"{}"), {"Content-Encoding": "gzip"})
        assert status == 400
        assert "ServerConfig(accept_compressed=True)" in reply["error"]
        client.connection.close()


# ---- typed fields


def test_scores_are_in_typed_fields(made: Made) -> None:
    import grpc

    model, server = made
    request = request_of(INPUTS)
    with grpc.insecure_channel(server.address) as channel:
        call = channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
        answer = PredictResponse.FromString(call(request.SerializeToString(), timeout=20))
    output = answer.outputs["logits"]
    assert not output.tensor_content
    torch.testing.assert_close(torch.tensor(list(output.float_val)), logits(model, FEATURES, DENSE))


@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([[1.5, -math.inf], [0.0, 3e38]]),
        torch.tensor([1e300, math.pi], dtype=torch.float64),
        torch.tensor([-(2**63), 2**63 - 1]),
        torch.tensor([-128, 127], dtype=torch.int8),
        torch.tensor([0, 255], dtype=torch.uint8),
        torch.tensor([True, False]),
        torch.zeros(0, 3),
        torch.arange(100.0),
    ],
    ids=["float32", "float64", "int64", "int8", "uint8", "bool", "empty", "a long length"],
)
def test_every_type_of_output(tensor: torch.Tensor, typed: bool) -> None:
    proto = TensorProto()
    fill_tensor_proto(proto, tensor.numpy(), typed=typed)
    assert bool(proto.tensor_content) is (not typed and tensor.numel() > 0)
    found = from_tensor_proto(TensorProto.FromString(proto.SerializeToString()))
    assert found.dtype == tensor.dtype
    assert torch.equal(found, tensor)
