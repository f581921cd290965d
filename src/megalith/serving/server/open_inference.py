"""The Open Inference Protocol, version 2, over gRPC, with Triton's extensions.

    ServerLive, ServerReady        whether the server runs; whether a model is available
    ModelReady                     whether a version of a model is available
    ServerMetadata, ModelMetadata  name and version; inputs and outputs
    ModelInfer                     scores
    ModelConfig                    Triton: inputs, outputs and versions
    ModelStatistics                Triton: statistics of the loaded versions
    RepositoryIndex                Triton: every version, and whether it is ready

The same messages are the responses over gRPC and, as JSON, over REST (rest.py):

    GET   /v2/models/NAME[/versions/VERSION]/config    inputs, outputs and versions
    GET   /v2/models/NAME[/versions/VERSION]/stats     statistics of the loaded versions
    GET   /v2/models/stats                             of all models
    POST  /v2/repository/index                         every version, and whether it is ready

Models are loaded and unloaded by their directory, not by requests. `max_batch_size` is 0, because shapes hold
the batch dimension.
"""

from __future__ import annotations

from typing import Any

import torch

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.export.signature import OUTPUT_DTYPES, Signature
from megalith.serving.proto.infer_tensors import BYTES, DATATYPES, datatype_of
from megalith.serving.proto.message_bytes import encode_infer_response, read_infer_message
from megalith.serving.proto.message_types import (
    POOL,
    Message,
    ModelConfigRequest,
    ModelConfigResponse,
    ModelInferRequest,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
    ServerLiveResponse,
    ServerMetadataResponse,
    ServerReadyResponse,
)
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.grpc_calls import (
    GrpcScoreRequest,
    grpc_handler,
    parse,
    remaining,
    report_missing,
    serialize,
    wants_missing,
)
from megalith.serving.server.inputs import InputReader, Rows, inputs_of
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.security import Permission, authorization_of
from megalith.serving.server.served_model import ServedModel
from megalith.serving.wire_names import ModelState

OIP_SERVICE = "inference.GRPCInferenceService"
SERVER, PLATFORM = "megalith", "megalith"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
"""Of the repository only the index."""


class OIPService:
    """The methods of GRPCInferenceService, those that Triton adds included."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def handlers(self) -> list[Any]:
        methods = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
            "ModelInfer": self._model_infer,
            "ModelConfig": self._model_config,
            "ModelStatistics": self._model_statistics,
            "RepositoryIndex": self._repository_index,
        }
        return [grpc_handler(OIP_SERVICE, methods, self._dispatcher.access_log)]

    def _server_live(self, data: bytes, context: Any) -> bytes:
        return serialize(ServerLiveResponse(live=True))

    def _server_ready(self, data: bytes, context: Any) -> bytes:
        return serialize(ServerReadyResponse(ready=self._dispatcher.ready))

    def _model_ready(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelReadyRequest, data)
        ready = model_ready(self._dispatcher, request.name, request.version)
        return serialize(ModelReadyResponse(ready=ready))

    def _server_metadata(self, data: bytes, context: Any) -> bytes:
        return serialize(ServerMetadataResponse(name=SERVER, version=__version__, extensions=EXTENSIONS))

    def _model_metadata(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelMetadataRequest, data)
        described = describe(self._dispatcher, request.name, request.version)
        return serialize(ModelMetadataResponse(**described))

    def _model_config(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelConfigRequest, data)
        return serialize(model_config(self._dispatcher, request.name, request.version))

    def _model_statistics(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelStatisticsRequest, data)
        return serialize(model_statistics(self._dispatcher, request.name, request.version))

    def _repository_index(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, RepositoryIndexRequest, data)
        return serialize(repository_index(self._dispatcher, ready_only=request.ready))

    def _model_infer(self, data: bytes, context: Any) -> bytes:
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
        try:
            number = parse_version(version)
        except InputError as error:
            raise self._dispatcher.reject(error) from None
        scored = self._dispatcher.predict(
            GrpcScoreRequest(
                model,
                number,
                outputs,
                remaining(context),
                context.is_active,
                read,
                wants_missing(context),
            )
        )
        report_missing(context, scored.missing_ids)
        return encode_infer_response(model, scored.version, request_id, scored.outputs)


def parse_version(text: str) -> int | None:
    if not text:
        return None
    if not text.isascii() or not text.isdecimal() or len(text) > 19:
        raise InputError(f"version {text[:100]!r} is not a number")
    return int(text)


def model_ready(dispatcher: Dispatcher, name: str, version: str) -> bool:
    try:
        number = parse_version(version)
        model = dispatcher.repository.find(name)
    except (InputError, RequestError):
        return False
    return dispatcher.ready and (model.available if number is None else number in model.versions)


def describe(dispatcher: Dispatcher, name: str, version: str) -> dict[str, Any]:
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


READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
_STATES = {
    ModelState.AVAILABLE: READY,
    ModelState.LOADING: LOADING,
    ModelState.START: LOADING,
    ModelState.UNLOADING: UNLOADING,
}
_TYPES = POOL.FindEnumTypeByName("inference.DataType").values_by_name


def model_config(dispatcher: Dispatcher, name: str, version: str) -> Message:
    described = describe(dispatcher, name, version)
    response = ModelConfigResponse()
    config = response.config
    config.name, config.platform, config.backend = name, PLATFORM, PLATFORM
    config.version_policy.specific.versions.extend(int(each) for each in described["versions"])
    for given, target in ((described["inputs"], config.input), (described["outputs"], config.output)):
        for each in given:
            kind = "STRING" if each["datatype"] == BYTES else each["datatype"]
            target.add(name=each["name"], data_type=_TYPES[f"TYPE_{kind}"].number, dims=each["shape"])
    for each in config.input:  # a feature that is not sent counts as empty lists; dense values must be sent
        each.optional = each.data_type != _TYPES["TYPE_FP32"].number
    return response


def model_statistics(dispatcher: Dispatcher, name: str, version: str) -> Message:
    response = ModelStatisticsResponse()
    if not name:
        for model in dispatcher.repository.models:
            for number in model.versions:
                _add_statistics(response, model, model.name, number)
        return response
    with dispatcher.admit(name, "statistics") as model:
        wanted = parse_version(version)
        if wanted is not None and wanted not in model.versions:
            raise RequestError(Code.NOT_FOUND, f"model {name!r} has no version {wanted}")
        for number in model.versions if wanted is None else [wanted]:
            _add_statistics(response, model, name, number)
    return response


def _add_statistics(response: Message, model: ServedModel, name: str, number: int) -> None:
    version = model.versions.get(number)
    if version is None:  # it was retired meanwhile
        return
    sums = version.statistics.sums()
    added = response.model_stats.add(
        name=name,
        version=str(number),
        last_inference=sums.last_ms,
        inference_count=sums.rows,
        execution_count=sums.batches,
    )
    for key, count, nanoseconds in (
        ("success", sums.successes, sums.success_ns),
        ("fail", sums.failures, sums.fail_ns),
        ("queue", sums.successes, sums.queue_ns),
        ("compute_input", sums.successes, sums.input_ns),
        ("compute_infer", sums.successes, sums.infer_ns),
    ):
        duration = getattr(added.inference_stats, key)
        duration.count, duration.ns = count, nanoseconds


def repository_index(dispatcher: Dispatcher, *, ready_only: bool) -> Message:
    response = RepositoryIndexResponse()
    for model in dispatcher.repository.models:
        for number, status in reversed(model.statuses.items()):
            state = _STATES.get(status.state, UNAVAILABLE)
            if state == READY or not ready_only:
                response.models.add(name=model.name, version=str(number), state=state, reason=status.error)
    return response


def message_to_json(message: Message) -> dict[str, Any]:
    """Return a message as JSON in Triton's form: every field, and integers as numbers."""
    made: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if field.containing_oneof is not None and not message.HasField(field.name):
            continue
        if field.enum_type is not None:
            made[field.name] = field.enum_type.values_by_number[value].name
        elif field.message_type is None:
            made[field.name] = list(value) if field.is_repeated else value
        elif field.is_repeated:
            made[field.name] = [message_to_json(each) for each in value]
        else:
            made[field.name] = message_to_json(value)
    return made
