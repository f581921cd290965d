"""The server answers any bytes with a status, and answers the next valid request correctly."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megalith.errors import RemoteError
from megalith.serving.proto.message_types import PredictRequest
from megalith.serving.server import open_inference
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import (
    DENSE,
    FEATURES,
    INPUTS,
    NUM_IDS,
    ServerClient,
    export_version,
    logits,
    request_of,
    serving,
    to_infer_request,
)
from tests.serving.score_requests import INFER_CHANGES, damaged, damaged_messages, typed_infer_request
from tests.serving.server.test_rest import Rest, inputs

FLIPS = 300
"""Damaged requests of each kind."""
ANSWERS = {
    "OK",
    "INVALID_ARGUMENT",
    "NOT_FOUND",
    "PERMISSION_DENIED",
    "RESOURCE_EXHAUSTED",
    "FAILED_PRECONDITION",
}
RECORDED = json.loads(Path(__file__).parents[1].joinpath("clients.json").read_text())["messages"]
METHODS = {
    "tensorflow.serving.PredictionService/Predict": [
        request_of(INPUTS).SerializeToString(),
        request_of({"user": FEATURES["user"]}, signature="lookup").SerializeToString(),
        request_of(
            {"id": FEATURES["user"], "id_split": torch.tensor([0, 0, 0, 2])}, signature="raw_lookup"
        ).SerializeToString(),
        request_of(
            {"user_id": FEATURES["user"], "user_value": torch.zeros(2, 5)}, signature="hashtable_assign"
        ).SerializeToString(),
        bytes.fromhex(RECORDED["tensorflow.serving.PredictRequest"]),
    ],
    "tensorflow.serving.PredictionService/GetModelMetadata": [
        bytes.fromhex(RECORDED["tensorflow.serving.GetModelMetadataRequest"])
    ],
    "tensorflow.serving.ModelService/GetModelStatus": [
        bytes.fromhex(RECORDED["tensorflow.serving.GetModelStatusRequest"])
    ],
    "inference.GRPCInferenceService/ModelInfer": [
        to_infer_request(INPUTS, model_name="movies").SerializeToString(),
        bytes.fromhex(RECORDED["inference.ModelInferRequest"]),
        bytes.fromhex(RECORDED["inference.ModelInferRequest/contents"]),
    ],
    "inference.GRPCInferenceService/ModelMetadata": [
        bytes.fromhex(RECORDED["inference.ModelMetadataRequest"])
    ],
    "inference.GRPCInferenceService/ModelReady": [bytes.fromhex(RECORDED["inference.ModelReadyRequest"])],
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModelServer]:
    out = tmp_path_factory.mktemp("exports")
    expected = logits(export_version(out, version=3), FEATURES, DENSE)
    with ModelServer(out, ServerConfig(http_port=0, allow_writes=False)) as made:
        yield made
        with ServerClient(made.address) as ask:
            torch.testing.assert_close(ask(INPUTS)["logits"], expected)


@pytest.fixture(scope="module")
def call(server: ModelServer) -> Iterator[Callable[[str, bytes], str]]:
    with grpc.insecure_channel(server.address) as channel:

        def status(method: str, data: bytes) -> str:
            try:
                channel.unary_unary(f"/{method}")(data, timeout=60)
            except grpc.RpcError as error:
                name: str = error.code().name
                return name
            return "OK"

        yield status


@pytest.mark.parametrize("method", METHODS)
def test_damaged_requests(call: Callable[[str, bytes], str], method: str) -> None:
    dice = random.Random(method)
    for _ in range(FLIPS):
        data = damaged(dice.choice(METHODS[method]), dice)
        status = call(method, data)
        assert status in ANSWERS, (status, data.hex())


def test_infer_requests_read_from_bytes_and_by_protobuf_get_equal_answers(
    server: ModelServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[Callable[[Any], object]] = [
        lambda request: setattr(request, "model_name", "none"),
        lambda request: setattr(request, "model_version", "x"),
        lambda request: setattr(request, "model_version", "8"),
        lambda request: request.outputs.add(name="none"),
        lambda request: request.outputs.add(name="logits"),
        lambda request: request.outputs.add(),
    ]
    usual = to_infer_request(INPUTS, model_name="movies", id="r").SerializeToString()
    typed = typed_infer_request(INPUTS)
    typed.model_version = "3"
    del typed.outputs[1]
    sent = [usual, typed.SerializeToString()]
    for change in (*INFER_CHANGES.values(), *names):
        request = to_infer_request(INPUTS, model_name="movies")
        change(request)
        sent.append(request.SerializeToString())
    sent += [data for each in sent[:2] for data in damaged_messages(each, 60)]
    with grpc.insecure_channel(server.address) as channel:
        ask = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")

        def answer(data: bytes) -> tuple[str, Any]:
            try:
                return "OK", ask(data, timeout=60)
            except grpc.RpcError as error:
                return error.code().name, error.details()

        read = [answer(data) for data in sent]
        monkeypatch.setattr(open_inference, "read_infer_message", lambda data: None)
        assert read == [answer(data) for data in sent]
    assert [code for code, _ in read[:2]] == ["OK", "OK"]
    assert len({details for code, details in read if code != "OK"}) > 15


def test_damaged_writes(tmp_path: Path) -> None:
    model = export_version(tmp_path)
    dice = random.Random(1)
    ids, values = FEATURES["user"], torch.zeros(2, 5)
    raw = {"id": ids, "id_split": torch.tensor([0, 0, 0, 2]), "flat_value": values.flatten(), "removed": ids}
    pushes = [
        request_of({"user_id": ids, "user_value": values, "user:removed": ids}, signature="hashtable_assign"),
        request_of({**raw, "removed_split": torch.tensor([0, 0, 0, 2])}, signature="raw_assign"),
        request_of({"dense:deep.0.bias": torch.zeros(8)}, signature="hashtable_assign"),
        *(
            request_of({"base": [b""]}, signature=name)
            for name in ("sync_begin", "sync_end", "sync_position")
        ),
    ]
    with serving(tmp_path, allow_writes=True) as (_, ask):
        for _ in range(FLIPS):
            data = damaged(dice.choice(pushes).SerializeToString(), dice)
            sent = (("megalith-session", "0" * 32), ("megalith-publisher", "0/1"))
            sequence = ("megalith-sequence", dice.choice(["1", "2", "-1", "x", "9" * 30]))
            code = "OK"
            try:
                ask.connection.predict(data, timeout=60, metadata=dice.choice([(), sent, (*sent, sequence)]))
            except RemoteError as error:
                code = error.code
            assert code in ANSWERS, (code, data.hex())
        item = ask({"item": torch.arange(NUM_IDS)}, signature="lookup")["item"]
        assert torch.equal(item, model.embeddings.shards.local["item"].lookup(torch.arange(NUM_IDS)))


tensors = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([1, 3, 7, 9, 23, 10, 0, 14, 99]),
        "shape": st.lists(st.sampled_from([-1, 0, 1, 2, 3, 2**31, 2**62]), max_size=3),
        "content": st.binary(max_size=64),
        "strings": st.lists(st.binary(max_size=4), max_size=4),
        "int64s": st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4),
        "floats": st.lists(st.floats(width=32), max_size=4),
    }
)
names = st.sampled_from(["user", "item", "dense", "user:row_splits", "tags:weights", "id", "id_split"])


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    inputs=st.dictionaries(names, tensors, max_size=5),
    signature=st.sampled_from(["", "lookup", "raw_lookup", "raw_assign", "sync_begin", "nope"]),
    version=st.sampled_from([0, 3, -1, 2**62]),
    outputs=st.lists(st.sampled_from(["logits", "nope"]), max_size=2),
)
def test_requests_of_any_tensors(
    call: Callable[[str, bytes], str],
    inputs: dict[str, Any],
    signature: str,
    version: int,
    outputs: list[str],
) -> None:
    request = PredictRequest(output_filter=outputs)
    request.model_spec.name = "movies"
    request.model_spec.signature_name = signature
    request.model_spec.version.value = version
    for name, given_ in inputs.items():
        proto = request.inputs[name]
        proto.dtype = given_["dtype"]
        proto.tensor_content = given_["content"]
        proto.string_val.extend(given_["strings"])
        proto.int64_val.extend(given_["int64s"])
        proto.float_val.extend(given_["floats"])
        for size in given_["shape"]:
            proto.tensor_shape.dim.add(size=size)
    status = call("tensorflow.serving.PredictionService/Predict", request.SerializeToString())
    assert status in ANSWERS


def rest_request(
    server: ModelServer, body: bytes, headers: dict[str, str], path: str = "/v2/models/movies/infer"
) -> int:
    client = Rest(server)
    try:
        return client("POST", path, body, headers)[0]
    finally:
        client.connection.close()


def rest_body() -> bytes:
    dense = {"name": "dense", "datatype": "FP32", "shape": [2, 3], "parameters": {"binary_data_size": 24}}
    return json.dumps(
        {"id": "1", "inputs": [*inputs()[:-1], dense], "outputs": [{"name": "logits"}]}
    ).encode()


def test_damaged_rest_bodies(server: ModelServer) -> None:
    text, dice = rest_body(), random.Random(0)
    tensor = DENSE.numpy().tobytes()
    good = {"Inference-Header-Content-Length": str(len(text))}
    assert rest_request(server, text + tensor, good) == 200
    for _ in range(FLIPS):
        changed = damaged(text, dice)
        header = str(len(changed) if dice.random() < 0.8 else dice.randrange(2 * len(text)))
        body = changed + (tensor if dice.random() < 0.8 else damaged(tensor, dice))
        status = rest_request(server, body, {"Inference-Header-Content-Length": header})
        assert status in (200, 400, 404), (status, body)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
rest_inputs = st.lists(
    st.fixed_dictionaries(
        {
            "name": names | values,
            "datatype": st.sampled_from(["INT64", "FP32", "BYTES", "BOOL", "?"]) | values,
        },
        optional={
            "shape": st.lists(st.integers(-1, 3), max_size=3) | values,
            "data": values,
            "parameters": st.just({"binary_data_size": 8}) | values,
        },
    )
    | values,
    max_size=4,
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    request=st.fixed_dictionaries(
        {"inputs": rest_inputs | values}, optional={"outputs": values, "id": values}
    )
)
def test_json_of_any_shape(server: ModelServer, request: Any) -> None:
    body = json.dumps(request, allow_nan=True).encode()
    assert rest_request(server, body, {}) in (200, 400)


columns = st.dictionaries(
    names, values | st.lists(st.lists(st.integers(-2, 60), max_size=3), max_size=3), max_size=4
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    request=st.fixed_dictionaries(
        {},
        optional={
            "instances": st.lists(columns, max_size=3) | values,
            "inputs": columns | values,
            "x": values,
        },
    )
)
def test_json_of_tf_serving_of_any_shape(server: ModelServer, request: Any) -> None:
    body = json.dumps(request, allow_nan=True).encode()
    assert rest_request(server, body, {}, "/v1/models/movies:predict") in (200, 400)
