"""Other people's clients: recorded requests of ovmsclient and tritonclient are answered."""

from __future__ import annotations

import json
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
