"""The Open Inference Protocol, version 2, over gRPC, with Triton's extensions.

    ServerLive, ServerReady        whether the server runs; whether a model is available
    ModelReady                     whether a version of a model is available
    ServerMetadata, ModelMetadata  name and version; inputs and outputs
    ModelInfer                     scores
    ModelConfig                    Triton: inputs, outputs and versions
    ModelStatistics                Triton: statistics of the loaded versions
    RepositoryIndex                Triton: every version, and whether it is ready

Inference requests and responses as JSON have the binary data extension: if the header HEADER_LENGTH gives the
length of the JSON in a body, the bytes of tensors follow it. The other messages are the responses over gRPC
and, as JSON, over REST (rest.py):

    GET   /v2/models/NAME[/versions/VERSION]/config    inputs, outputs and versions
    GET   /v2/models/NAME[/versions/VERSION]/stats     statistics of the loaded versions
    GET   /v2/models/stats                             of all models
    POST  /v2/repository/index                         every version, and whether it is ready

Models are loaded and unloaded by their directory, not by requests. `max_batch_size` is 0, because shapes hold
the batch dimension.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith import __version__
from megalith.errors import InputError
from megalith.serving.export.signature import OUTPUT_DTYPES, Signature
from megalith.serving.proto.infer_tensors import BYTES, DATATYPES, datatype_of, from_raw, from_values
from megalith.serving.proto.limits import MAX_RANK, POINTER_BYTES
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
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.dispatcher import MAX_JSON_BYTES, Dispatcher, ScoreRequest, ScoreResult
from megalith.serving.server.grpc_calls import Calls, parse, score, serialize
from megalith.serving.server.inputs import InputReader, Rows, inputs_of
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.served_model import Array, ServedModel
from megalith.serving.wire_names import ModelState
from megalith.storage.json_codec import parse_json

OIP_SERVICE = "inference.GRPCInferenceService"
SERVER, PLATFORM = "megalith", "megalith"
EXTENSIONS = ("binary_tensor_data", "model_configuration", "model_repository", "statistics")
"""Of the repository only the index."""


class OIPService:
    """The methods of GRPCInferenceService, those that Triton adds included."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def add_to(self, calls: Calls) -> None:
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
        calls.add(OIP_SERVICE, methods)

    async def _server_live(self, data: bytes, context: Any) -> bytes:
        return serialize(ServerLiveResponse(live=True))

    async def _server_ready(self, data: bytes, context: Any) -> bytes:
        return serialize(ServerReadyResponse(ready=self._dispatcher.ready))

    async def _model_ready(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelReadyRequest, data)
        ready = model_ready(self._dispatcher, request.name, request.version)
        return serialize(ModelReadyResponse(ready=ready))

    async def _server_metadata(self, data: bytes, context: Any) -> bytes:
        return serialize(ServerMetadataResponse(name=SERVER, version=__version__, extensions=EXTENSIONS))

    async def _model_metadata(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelMetadataRequest, data)
        described = describe(self._dispatcher, request.name, request.version)
        return serialize(ModelMetadataResponse(**described))

    async def _model_config(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelConfigRequest, data)
        return serialize(model_config(self._dispatcher, request.name, request.version))

    async def _model_statistics(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelStatisticsRequest, data)
        return serialize(model_statistics(self._dispatcher, request.name, request.version))

    async def _repository_index(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, RepositoryIndexRequest, data)
        return serialize(repository_index(self._dispatcher, ready_only=request.ready))

    async def _model_infer(self, data: bytes, context: Any) -> bytes:
        message = read_infer_message(data)
        if message is None:
            self._dispatcher.check_size(len(data))
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
        wanted = ScoreRequest(model, number, len(data), read, outputs)
        scored = await score(self._dispatcher, wanted, context)
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
    if version is None:  # it has been retired since
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


# ---- requests for scores as JSON

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header that gives the number of bytes of JSON in a body; tensors follow."""


class InferBody:
    """The body of a request for scores."""

    def __init__(self, body: bytes, header: str | None) -> None:
        self._body, self._header = body, header
        self._request: dict[str, Any] = {}
        self._binary: dict[str, bool] = {}
        self.request: ScoreRequest

    def read(self, reader: InputReader) -> Rows:
        """Parse the body and read the rows; sets the outputs and the timeout of the request."""
        self._request, tensors = _split(self._body, self._header)
        self._binary = _wanted_outputs(self._request)
        self.request.outputs, self.request.timeout = list(self._binary), _timeout(self._request)
        return reader.read(_json_inputs(self._request, tensors, reader.max_bytes))

    def response(self, scored: ScoreResult) -> tuple[dict[str, Any], bytes]:
        given = _parameters(self._request).get("binary_data_output") is True
        reply: dict[str, Any] = {"model_name": self.request.model, "model_version": str(scored.version)}
        if isinstance(self._request.get("id"), str):
            reply["id"] = self._request["id"]
        if scored.missing_ids is not None:
            reply["parameters"] = {"missing_ids": scored.missing_ids}
        outputs, binary = [], []
        for output, array in scored.outputs.items():
            datatype = DATATYPES[OUTPUT_DTYPES[array.dtype.name]]
            described: dict[str, Any] = {"name": output, "datatype": datatype, "shape": list(array.shape)}
            if self._binary.get(output, given):
                described["parameters"] = {"binary_data_size": array.nbytes}
                binary.append(array.tobytes())
            else:
                described["data"] = _numbers(array)
            outputs.append(described)
        return {**reply, "outputs": outputs}, b"".join(binary)


def _split(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    """Split a body into its JSON and the bytes of the tensors that follow."""
    length = len(body)
    if header is not None:
        if not header.isascii() or not header.isdecimal() or len(header) > 18 or int(header) > length:
            raise InputError(f"{HEADER_LENGTH} must be at most the body's {length} bytes")
        length = int(header)
    if length > MAX_JSON_BYTES:
        raise RequestError(
            Code.OUT_OF_RANGE,
            f"the body has {length} bytes of JSON, more than {MAX_JSON_BYTES}; send tensors as bytes",
        )
    request = parse_json(body[:length], _body_error)
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise InputError('the body must be a JSON object with "inputs", a list')
    return request, body[length:]


def _body_error(problem: str) -> InputError:
    return InputError(f"the body {problem[:200]}")


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError("parameters must be a JSON object")
    return parameters


def _timeout(request: Mapping[str, Any]) -> float | None:
    """Return the timeout in seconds; the parameter is in microseconds, as in Triton."""
    given = _parameters(request).get("timeout")
    if given is None:
        return None
    if type(given) is not int or given < 0:
        raise InputError("timeout must be an integer number of microseconds")
    return given / 1e6


def _wanted_outputs(request: Mapping[str, Any]) -> dict[str, bool]:
    """Return the requested outputs, and whether each is returned as bytes."""
    default = _parameters(request).get("binary_data_output") is True
    outputs = request.get("outputs", [])
    if not isinstance(outputs, list):
        raise InputError("outputs must be a list")
    wanted = {}
    for output in outputs:
        if not isinstance(output, dict) or not isinstance(output.get("name"), str):
            raise InputError("an output must be a JSON object with a name")
        wanted[output["name"]] = _parameters(output).get("binary_data", default) is True
    return wanted


def _json_inputs(request: Mapping[str, Any], tensors: bytes, max_bytes: int) -> dict[str, Tensor | Strings]:
    read: dict[str, Tensor | Strings] = {}
    at, left = 0, max_bytes
    for given in request["inputs"]:
        if not isinstance(given, dict) or not isinstance(given.get("name"), str):
            raise InputError("an input must be a JSON object with a name")
        name = f"input {given['name'][:100]!r}"
        datatype, shape = given.get("datatype"), given.get("shape")
        if not isinstance(datatype, str) or not isinstance(shape, list) or not _are_integers(shape):
            raise InputError(f"{name} needs a datatype and a shape, a list of integers")
        if given["name"] in read:
            raise InputError(f"{name} is given twice")
        size = _parameters(given).get("binary_data_size")
        if size is not None:
            if type(size) is not int or not 0 <= size <= len(tensors) - at or "data" in given:
                raise InputError(f"{name}: binary_data_size {str(size)[:30]} does not fit the body")
            value = from_raw(datatype, shape, tensors[at : at + size], name=name, max_bytes=left)
            at += size
        else:
            values = _flat(given.get("data"), name)
            if datatype == BYTES:
                values = _encoded(values, name)
            value = from_values(datatype, shape, values, name=name, max_bytes=left)
        read[given["name"]] = value
        left -= value.nbytes if isinstance(value, Tensor) else value.size * POINTER_BYTES
    if at != len(tensors):
        raise InputError(f"{len(tensors) - at} bytes after the last tensor")
    return read


def _encoded(values: list[Any], name: str) -> list[Any]:
    try:
        return [value.encode() if isinstance(value, str) else value for value in values]
    except UnicodeEncodeError:
        raise InputError(f"{name}: contains an unpaired surrogate") from None


def _are_integers(sizes: list[Any]) -> bool:
    return all(type(size) is int for size in sizes)


def _flat(data: Any, name: str) -> list[Any]:
    """Return values in row-major order, from a flat list or from nested lists."""
    if not isinstance(data, list):
        raise InputError(f"{name} needs data, a list")
    values: list[Any] = data
    for _ in range(MAX_RANK):
        if not any(isinstance(item, list) for item in values):
            return values
        if not all(isinstance(item, list) for item in values):
            raise InputError(f"{name}: data mixes lists and values")
        values = [value for item in values for value in item]
    raise InputError(f"{name}: data is nested too deeply")


def _numbers(array: Array) -> list[float | None]:
    """Return values for JSON in row-major order: null where they are not finite."""
    return [value if math.isfinite(value) else None for value in array.reshape(-1).tolist()]
