"""The Open Inference Protocol, version 2, over gRPC.

Methods:

    ServerLive, ServerReady        whether the server runs; whether a model is available
    ModelReady                     whether a version of a model is available
    ServerMetadata, ModelMetadata  name and version; inputs and outputs
    ModelInfer                     scores
"""

from __future__ import annotations

from typing import Any

import torch

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.export.output_specs import OUTPUT_DTYPES
from megalith.serving.export.signature import Signature
from megalith.serving.proto import (
    ModelInferRequest,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
    datatype_of,
)
from megalith.serving.proto.infer_tensors import BYTES, DATATYPES
from megalith.serving.proto.score_responses import encode_infer_response
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.methods import (
    GrpcScoreRequest,
    parse,
    remaining,
    report_missing,
    request_options,
    serialize,
)
from megalith.serving.server.request_errors import RequestError
from megalith.serving.server.score_messages import read_infer_message
from megalith.serving.server.security import Permission, authorization_of
from megalith.serving.server.tf_metadata import inputs_of

SERVICE = "inference.GRPCInferenceService"
SERVER, PLATFORM = "megalith", "megalith"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
"""Of the repository only the index."""


class OIPService:
    """The methods of GRPCInferenceService."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def methods(self) -> dict[str, Any]:
        """Return the methods by name."""
        return {
            "ServerLive": self.server_live,
            "ServerReady": self.server_ready,
            "ModelReady": self.model_ready,
            "ServerMetadata": self.server_metadata,
            "ModelMetadata": self.model_metadata,
            "ModelInfer": self.model_infer,
        }

    def server_live(self, data: bytes, context: Any) -> bytes:
        """Return that the server runs."""
        return serialize(ServerLiveResponse(live=True))

    def server_ready(self, data: bytes, context: Any) -> bytes:
        """Return whether some model is available."""
        return serialize(ServerReadyResponse(ready=self._dispatcher.ready))

    def model_ready(self, data: bytes, context: Any) -> bytes:
        """Return whether a version of a model is available."""
        request = parse(self._dispatcher, ModelReadyRequest, data)
        ready = model_ready(self._dispatcher, request.name, request.version)
        return serialize(ModelReadyResponse(ready=ready))

    def server_metadata(self, data: bytes, context: Any) -> bytes:
        """Return name and version of this server."""
        return serialize(ServerMetadataResponse(name=SERVER, version=__version__, extensions=EXTENSIONS))

    def model_metadata(self, data: bytes, context: Any) -> bytes:
        """Return the inputs and outputs of a version."""
        request = parse(self._dispatcher, ModelMetadataRequest, data)
        described = describe(self._dispatcher, request.name, request.version)
        return serialize(ModelMetadataResponse(**described))

    def model_infer(self, data: bytes, context: Any) -> bytes:
        """Return the scores of the request's rows."""
        self._dispatcher.permit(authorization_of(context.invocation_metadata()), Permission.READ)
        self._dispatcher.check_size(len(data))
        message = read_infer_message(data)
        if message is None:
            request = parse(self._dispatcher, ModelInferRequest, data)
            asked = request.model_name, request.model_version, [each.name for each in request.outputs]
            request_id: str = request.id
        else:
            asked, request_id = (message.model, message.version_text, message.outputs), message.id

        def read(reader: InputReader) -> Rows:
            if message is None:
                return reader.read_infer(request)
            return reader.read_message(message) or reader.read_infer(ModelInferRequest.FromString(data))

        model, version, outputs = asked
        scored = self._dispatcher.predict(
            GrpcScoreRequest(
                model,
                self._version(version),
                outputs,
                remaining(context),
                context.is_active,
                read,
                *request_options(context),
            )
        )
        report_missing(context, scored.missing_ids)
        return encode_infer_response(model, scored.version, request_id, scored.outputs)

    def _version(self, text: str) -> int | None:
        try:
            return parse_version(text)
        except InputError as error:
            raise self._dispatcher.reject(error) from None


def parse_version(text: str) -> int | None:
    """Parse a version of the protocol."""
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise InputError(f"version {text[:100]!r} is not a number")
    return int(text)


def model_ready(dispatcher: Dispatcher, name: str, version: str) -> bool:
    """Return whether a version of a model is available."""
    try:
        number = parse_version(version)
        model = dispatcher.repository.find(name)
    except (InputError, RequestError):
        return False
    return dispatcher.ready and (model.available if number is None else number in model.versions)


def describe(dispatcher: Dispatcher, name: str, version: str) -> dict[str, Any]:
    """Return the metadata of a model in the form of the protocol."""
    with dispatcher.admit(name, "metadata") as model, model.version(parse_version(version)) as found:
        return {
            "name": name,
            "versions": [str(number) for number in model.versions],
            "platform": PLATFORM,
            "inputs": [
                {"name": given, "datatype": _datatype(dtype), "shape": _sizes(shape)}
                for given, dtype, shape in inputs_of(found.signature)
            ],
            "outputs": _outputs(found.signature),
        }


def _outputs(signature: Signature) -> list[dict[str, Any]]:
    return [
        {"name": each.name, "datatype": datatype_of_output(each.dtype), "shape": [-1, *each.shape]}
        for each in (signature.outputs if signature.predicts else ())
    ]


def datatype_of_output(dtype: str) -> str:
    """Return the protocol's name of an output's type."""
    return DATATYPES[OUTPUT_DTYPES[dtype]]


def _datatype(dtype: torch.dtype | None) -> str:
    return BYTES if dtype is None else datatype_of(dtype)


def _sizes(shape: list[int | None]) -> list[int]:
    return [-1 if size is None else size for size in shape]
