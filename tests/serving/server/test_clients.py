"""Other people's clients: what ovmsclient and tritonclient send is answered as the model does."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch

from megalith import Ragged, hash_strings
from megalith.models import Model
from megalith.serving.export.exporter import export_model
from megalith.serving.proto.message_types import (
    GetModelMetadataResponse,
    GetModelStatusResponse,
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataResponse,
    ModelReadyResponse,
    PredictResponse,
)
from megalith.serving.proto.tf_tensors import from_tensor_proto
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from tests.serving.exports import logits, make_model

RECORDED = {
    name: bytes.fromhex(data)
    for name, data in json.loads(Path(__file__).parents[1].joinpath("clients.json").read_text())[
        "messages"
    ].items()
}
DENSE = torch.arange(6.0).reshape(2, 3)
EMPTY = Ragged.from_lists([[], []])
WORDS = [b"a", b"\xff\x00"]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Model, ModelServer]]:
    """A model of the columns that were recorded: ids and words, three dense values."""
    out = tmp_path_factory.mktemp("exports")
    model = make_model(names=("ids", "words"))
    model.embeddings.shards.local["words"].assign(hash_strings(WORDS), torch.randn(2, 5))
    export_model(model, out, name="movies", version=3)
    with ModelServer(out, ServerConfig(http_port=0)) as server:
        yield model, server


def call(server: ModelServer, method: str, data: bytes) -> bytes:
    with grpc.insecure_channel(server.address) as channel:
        answer: bytes = channel.unary_unary(f"/{method}")(data, timeout=20)
        return answer


def test_a_predict_of_ovmsclient(made: tuple[Model, ModelServer]) -> None:
    model, server = made
    data = RECORDED["tensorflow.serving.PredictRequest"]
    answer = PredictResponse.FromString(call(server, "tensorflow.serving.PredictionService/Predict", data))
    features = {"ids": torch.arange(6).reshape(2, 3), "words": EMPTY}
    expected = logits(model, features, DENSE)
    torch.testing.assert_close(from_tensor_proto(answer.outputs["logits"]), expected)
    assert answer.model_spec.version.value == 3


def test_metadata_and_status_of_ovmsclient(made: tuple[Model, ModelServer]) -> None:
    data = RECORDED["tensorflow.serving.GetModelMetadataRequest"]
    answer = call(made[1], "tensorflow.serving.PredictionService/GetModelMetadata", data)
    assert GetModelMetadataResponse.FromString(answer).model_spec.version.value == 3
    # It asks for version 0 where it means any.
    data = RECORDED["tensorflow.serving.GetModelStatusRequest"]
    status = GetModelStatusResponse.FromString(
        call(made[1], "tensorflow.serving.ModelService/GetModelStatus", data)
    )
    assert [(each.version, each.state) for each in status.model_version_status] == [(3, 30)]


def test_an_inference_of_tritonclient(made: tuple[Model, ModelServer]) -> None:
    model, server = made
    request = ModelInferRequest.FromString(RECORDED["inference.ModelInferRequest"])
    with pytest.raises(grpc.RpcError, match="output 'p' is unknown; the model returns logits, probabilities"):
        call(server, "inference.GRPCInferenceService/ModelInfer", request.SerializeToString())
    request.outputs[0].name = "logits"
    data = call(server, "inference.GRPCInferenceService/ModelInfer", request.SerializeToString())
    answer = ModelInferResponse.FromString(data)
    assert (answer.id, answer.model_version, len(answer.outputs)) == ("r1", "3", 1)
    expected = logits(model, {"ids": EMPTY, "words": hash_strings(WORDS)}, DENSE)
    got = torch.frombuffer(bytearray(answer.raw_output_contents[0]), dtype=torch.float32)
    torch.testing.assert_close(got, expected)


def test_readiness_and_metadata_of_tritonclient(made: tuple[Model, ModelServer]) -> None:
    data = call(made[1], "inference.GRPCInferenceService/ModelReady", RECORDED["inference.ModelReadyRequest"])
    assert ModelReadyResponse.FromString(data).ready
    data = call(
        made[1], "inference.GRPCInferenceService/ModelMetadata", RECORDED["inference.ModelMetadataRequest"]
    )
    assert ModelMetadataResponse.FromString(data).versions == ["3"]


SCRIPT = """
import json, sys
import numpy as np
import tritonclient.grpc, tritonclient.http
from ovmsclient import make_grpc_client

grpc_address, http_address = sys.argv[1:]
ids = np.arange(6).reshape(2, 3)
dense = np.arange(6, dtype=np.float32).reshape(2, 3)
words = np.array([b"a", b"\\xff\\x00"], dtype=object)
scores = {}

client = make_grpc_client(grpc_address)
assert client.get_model_status("movies")[3]["state"] == "AVAILABLE"
metadata = client.get_model_metadata("movies")
assert sorted(metadata["inputs"]) == ["dense", "ids", "words"], metadata
scores["ovmsclient"] = client.predict({"ids": ids, "dense": dense}, "movies")

def given(triton, **options):
    inputs = []
    for name, array, kind in (("ids", ids, "INT64"), ("dense", dense, "FP32"), ("words", words, "BYTES")):
        made = triton.InferInput(name, list(array.shape), kind)
        made.set_data_from_numpy(array, **options)
        inputs.append(made)
    return inputs

with tritonclient.grpc.InferenceServerClient(grpc_address) as client:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("movies")
    assert client.get_model_metadata("movies").platform == "megalith"
    assert client.get_server_metadata().name == "megalith"
    answer = client.infer("movies", given(tritonclient.grpc))
    scores["triton grpc"] = {name: answer.as_numpy(name) for name in ("logits", "probabilities")}

with tritonclient.http.InferenceServerClient(http_address) as client:
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("movies", "3")
    assert client.get_model_metadata("movies")["platform"] == "megalith"
    answer = client.infer("movies", given(tritonclient.http), model_version="3")
    scores["triton http"] = {name: answer.as_numpy(name) for name in ("logits", "probabilities")}
    wanted = [tritonclient.http.InferRequestedOutput("probabilities", binary_data=False)]
    answer = client.infer("movies", given(tritonclient.http), outputs=wanted)
    scores["triton http, json"] = {"probabilities": answer.as_numpy("probabilities")}

print(json.dumps({who: {k: np.asarray(v).tolist() for k, v in each.items()} for who, each in scores.items()}))
"""


@pytest.mark.soak
def test_the_clients_themselves(made: tuple[Model, ModelServer], tmp_path: Path) -> None:
    model, server = made
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True, timeout=120)
    python = tmp_path / "venv" / "bin" / "python"
    wanted = ["ovmsclient==2023.1", "tritonclient[grpc,http]==2.73.0"]
    subprocess.run([python, "-m", "pip", "install", "-q", *wanted], check=True, timeout=600)
    command = [python, "-c", textwrap.dedent(SCRIPT), server.address, str(server.http_address)]
    output = subprocess.run(command, check=True, timeout=120, capture_output=True, text=True).stdout
    scores = json.loads(output)

    ids = torch.arange(6).reshape(2, 3)
    without = logits(model, {"ids": ids, "words": EMPTY}, DENSE)
    torch.testing.assert_close(torch.tensor(scores["ovmsclient"]["logits"]), without)
    expected = logits(model, {"ids": ids, "words": hash_strings(WORDS)}, DENSE)
    for client in ("triton grpc", "triton http"):
        torch.testing.assert_close(torch.tensor(scores[client]["logits"]), expected)
        torch.testing.assert_close(torch.tensor(scores[client]["probabilities"]), expected.sigmoid())
    torch.testing.assert_close(torch.tensor(scores["triton http, json"]["probabilities"]), expected.sigmoid())
