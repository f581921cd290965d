"""What tests of the server share: a small model, its exports, and requests to it."""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from megalith import Mean, Ragged, Sum
from megalith.errors import RemoteError
from megalith.models import EmbeddingConfig, Model, build_model
from megalith.serving.client.channels import Connection
from megalith.serving.discovery import Discovery
from megalith.serving.export.exporter import export_model
from megalith.serving.proto.infer_tensors import datatype_of
from megalith.serving.proto.limits import bytes_of_tensor
from megalith.serving.proto.message_types import (
    DataType,
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    Message,
    ModelInferRequest,
    PredictRequest,
)
from megalith.serving.proto.tf_tensors import (
    Strings,
    from_tensor_proto,
    strings_to_tensor_proto,
    to_tensor_proto,
)
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig

NAMES = ("user", "item", "tags")
NUM_IDS = 50
NUM_DENSE = 3


def make_model(
    seed: int = 0, *, names: tuple[str, ...] = NAMES, num_dense: int = NUM_DENSE, dist_type: str | None = None
) -> Model:
    """A DeepFM that knows the ids 0 to 49 of each feature."""
    torch.manual_seed(seed)
    combiners = {name: Sum() if name == "tags" else Mean() for name in names}
    model = build_model(
        "deepfm", EmbeddingConfig(combiners, dim=4, dist_type=dist_type), num_dense=num_dense, hidden=(8,)
    )
    for name in names:
        rows = torch.randn(NUM_IDS, 5)
        model.embeddings.shards.local[name].assign(torch.arange(NUM_IDS), rows)
    return model.eval()


def export_version(
    out: Path, *, version: int = 1, seed: int = 0, name: str = "movies", **options: Any
) -> Model:
    """Exports a version of the model below `out`, with weights of a seed."""
    model = make_model(seed)
    export_model(model, out, name=name, version=version, **options)
    return model


@torch.no_grad()
def logits(model: Model, features: Mapping[str, Tensor | Ragged], dense: Tensor) -> Tensor:
    """The logits of the module itself."""
    scores: Tensor = model(dict(features), dense)
    return scores


def rows(count: int, seed: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Features with an id each, and dense values."""
    generator = torch.Generator().manual_seed(seed)
    features = {name: torch.randint(0, NUM_IDS, (count,), generator=generator) for name in NAMES}
    return features, torch.randn(count, NUM_DENSE, generator=generator)


FEATURES, DENSE = rows(2)
INPUTS = {**FEATURES, "dense": DENSE}
"""A request of two rows that the model knows."""


def request_of(
    inputs: Mapping[str, Tensor | Strings | list[bytes]],
    *,
    model: str = "movies",
    version: int | None = None,
    signature: str = "",
    outputs: tuple[str, ...] = (),
) -> Message:
    """A PredictRequest."""
    request = PredictRequest(output_filter=outputs)
    request.model_spec.name = model
    request.model_spec.signature_name = signature
    if version is not None:
        request.model_spec.version.value = version
    for name, value in inputs.items():
        is_tensor = isinstance(value, Tensor)
        request.inputs[name].CopyFrom(to_tensor_proto(value) if is_tensor else strings_to_tensor_proto(value))
    return request


def to_infer_request(
    inputs: Mapping[str, Any], *, model_name: str, model_version: str = "", id: str = ""
) -> Any:
    """A ModelInferRequest with raw contents, of tensors and arrays of bytes."""
    request = ModelInferRequest(model_name=model_name, model_version=model_version, id=id)
    for name, value in inputs.items():
        request.inputs.add(name=name, datatype=datatype_of(value, name), shape=value.shape)
        if isinstance(value, Tensor):
            raw = bytes_of_tensor(value, name)
        else:
            raw = b"".join(struct.pack("<I", len(each)) + each for each in value.flat)
        request.raw_input_contents.append(raw)
    return request


class ServerClient:
    """A connection that sends PredictRequests."""

    def __init__(self, address: str, **options: Any) -> None:
        self.connection = Connection(address, **options)

    def __call__(
        self, inputs: Mapping[str, Any], *, timeout: float = 20.0, **options: Any
    ) -> dict[str, Tensor]:
        """The outputs of a request."""
        return self.send(request_of(inputs, **options), timeout=timeout)[0]

    def send(self, request: Message, *, timeout: float = 20.0) -> tuple[dict[str, Tensor], Message]:
        """The outputs that are tensors, and the model_spec they came with."""
        answer = self.connection.predict(request, timeout=timeout)
        tensors = {
            name: from_tensor_proto(proto)
            for name, proto in answer.outputs.items()
            if proto.dtype != DataType.DT_STRING
        }
        return tensors, answer.model_spec

    def metadata(self, model: str = "movies") -> Message:
        """Version and signatures of a model."""
        request = GetModelMetadataRequest(metadata_field=["signature_def"])
        request.model_spec.name = model
        method = "/tensorflow.serving.PredictionService/GetModelMetadata"
        return self.call(method, request, GetModelMetadataResponse)

    def call(self, method: str, request: Message, response: Any) -> Message:
        """Another unary method; its failure is a RemoteError too."""
        send = self.connection.channel.unary_unary(method, response_deserializer=response.FromString)
        try:
            return send(request.SerializeToString(), timeout=20.0, metadata=self.connection._metadata)
        except grpc.RpcError as error:
            raise RemoteError(error.details(), code=error.code().name) from None

    def status(
        self, model: str = "movies", *, version: int | None = None, label: str | None = None
    ) -> dict[int, tuple[int, str]]:
        """State and error of each version, or of one that is named."""
        request = GetModelStatusRequest()
        request.model_spec.name = model
        if version is not None:
            request.model_spec.version.value = version
        if label is not None:
            request.model_spec.version_label = label
        method = "/tensorflow.serving.ModelService/GetModelStatus"
        answer = self.call(method, request, GetModelStatusResponse)
        return {each.version: (each.state, each.status.error_message) for each in answer.model_version_status}

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()


@contextmanager
def serving(
    directory: Path, *, discovery: Discovery | None = None, **options: Any
) -> Iterator[tuple[ModelServer, ServerClient]]:
    """A server of the exports below a directory, and a client of it."""
    with (
        ModelServer(directory, ServerConfig(**options), discovery=discovery) as server,
        ServerClient(server.address) as ask,
    ):
        yield server, ask


@contextmanager
def fails(code: str, text: str | None = None) -> Iterator[None]:
    """Expect a RemoteError with a status and a text."""
    with pytest.raises(RemoteError, match=text) as raised:
        yield
    assert raised.value.code == code


@contextmanager
def silent(server: ModelServer, method: str, count: int = 1) -> Iterator[list[grpc.Future]]:
    """Calls that send their headers and then nothing."""
    end = threading.Event()

    def nothing() -> Iterator[bytes]:
        end.wait()
        yield from ()

    with grpc.insecure_channel(server.address) as channel:
        call = channel.stream_unary(method)
        try:
            yield [call.future(nothing(), timeout=20) for _ in range(count)]
        finally:
            end.set()


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60.0
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def is_healthy(server: ModelServer, service: str = "") -> bool:
    with grpc.insecure_channel(server.address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=20)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)
