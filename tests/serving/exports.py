"""What tests of the server share: a small model, its exports, and requests to it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith import Mean, Ragged, Sum
from megalith.models import EmbeddingConfig, Model, build_model
from megalith.serving.client.channels import Connection
from megalith.serving.export.exporter import export_model
from megalith.serving.proto.message_types import DataType, Message, PredictRequest
from megalith.serving.proto.tf_tensors import (
    Strings,
    from_tensor_proto,
    strings_to_tensor_proto,
    to_tensor_proto,
)

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

    def __enter__(self) -> ServerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()
