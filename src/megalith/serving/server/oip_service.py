"""The Open Inference Protocol, version 2, over gRPC: live, ready, metadata, infer."""

from __future__ import annotations

from typing import Any

import torch

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.export.signature import Signature
from megalith.serving.proto import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
    datatype_of,
)
from megalith.serving.server.dispatcher import Dispatcher, Question
from megalith.serving.server.methods import handler_of, parsed, remaining, serialised
from megalith.serving.server.request_errors import RequestError
from megalith.serving.server.served_model import ServedModel
from megalith.serving.server.tf_service import inputs_of

SERVICE = "inference.GRPCInferenceService"
SERVER, PLATFORM = "megalith", "megalith"
EXTENSIONS = ("binary_tensor_data",)


class OIPService:
    """The methods of GRPCInferenceService."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def handlers(self) -> list[Any]:
        """What a gRPC server needs of them."""
        methods = {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }
        return [handler_of(SERVICE, methods)]

    def server_live(self, data: bytes, context: Any) -> bytes:
        """That it answers at all."""
        return serialised(ServerLiveResponse(live=True))

    def server_ready(self, data: bytes, context: Any) -> bytes:
        """Whether some model answers."""
        return serialised(ServerReadyResponse(ready=self._dispatcher.ready))

    def model_ready(self, data: bytes, context: Any) -> bytes:
        """Whether a version of a model answers."""
        request = parsed(self._dispatcher, ModelReadyRequest, data)
        ready = model_ready(self._dispatcher, request.name, request.version)
        return serialised(ModelReadyResponse(ready=ready))

    def server_metadata(self, data: bytes, context: Any) -> bytes:
        """Name and version of this server."""
        return serialised(ServerMetadataResponse(name=SERVER, version=__version__, extensions=EXTENSIONS))

    def model_metadata(self, data: bytes, context: Any) -> bytes:
        """Inputs and outputs of a version."""
        request = parsed(self._dispatcher, ModelMetadataRequest, data)
        described = describe(self._dispatcher, request.name, request.version)
        return serialised(ModelMetadataResponse(**described))

    def model_infer(self, data: bytes, context: Any) -> bytes:
        """Scores."""
        request = parsed(self._dispatcher, ModelInferRequest, data)
        question = Question(
            lambda reader: reader.read_infer(request),
            [output.name for output in request.outputs],
            remaining(context),
        )
        version = self._version(request.model_version)
        scored = self._dispatcher.predict(
            request.model_name, version, lambda: question, alive=context.is_active
        )
        response = ModelInferResponse(
            model_name=request.model_name, model_version=str(scored.version), id=request.id
        )
        for name, array in scored.outputs.items():
            response.outputs.add(name=name, datatype="FP32", shape=array.shape)
            response.raw_output_contents.append(array.tobytes())
        return serialised(response)

    def _version(self, text: str) -> int | None:
        try:
            return parse_version(text)
        except InputError as error:
            raise self._dispatcher.refused(error) from None


def parse_version(text: str) -> int | None:
    """A version as the protocol writes it; "" is the newest. Raises InputError."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise InputError(f"version {text[:100]!r} is no whole number")
    return int(text)


def model_ready(dispatcher: Dispatcher, name: str, version: str) -> bool:
    """Whether a version of a model answers."""
    try:
        number = parse_version(version)
        model = dispatcher.repository.find(name)
    except (InputError, RequestError):
        return False
    return dispatcher.ready and (model.available if number is None else number in model.versions)


def describe(dispatcher: Dispatcher, name: str, version: str) -> dict[str, Any]:
    """A model's metadata as the protocol has it. Raises RequestError."""

    def work(model: ServedModel) -> dict[str, Any]:
        with model.version(parse_version(version)) as found:
            return {
                "name": name,
                "versions": [str(number) for number in model.versions],
                "platform": PLATFORM,
                "inputs": [
                    {"name": given, "datatype": datatype_of(dtype), "shape": _sizes(shape)}
                    for given, dtype, shape in inputs_of(found.signature)
                ],
                "outputs": _outputs(found.signature),
            }

    return dispatcher.run(name, "metadata", work)


def _outputs(signature: Signature) -> list[dict[str, Any]]:
    names = signature.outputs if signature.predicts else ()
    return [{"name": name, "datatype": datatype_of(torch.float32), "shape": [-1]} for name in names]


def _sizes(shape: list[int | None]) -> list[int]:
    return [-1 if size is None else size for size in shape]
