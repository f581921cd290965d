"""Triton's extensions of the Open Inference Protocol: model configuration, statistics and repository index.

The same messages are the responses over gRPC and, as JSON, over REST:

    GET   /v2/models/NAME[/versions/VERSION]/config    inputs, outputs and versions
    GET   /v2/models/NAME[/versions/VERSION]/stats     statistics of the loaded versions
    GET   /v2/models/stats                             of all models
    POST  /v2/repository/index                         every version, and whether it is ready

Models are loaded and unloaded by their directory, not by requests. `max_batch_size` is 0, because shapes hold
the batch dimension.
"""

from __future__ import annotations

from typing import Any

from megalith.serving.model_state import ModelState
from megalith.serving.proto import (
    Message,
    ModelConfigRequest,
    ModelConfigResponse,
    ModelStatisticsRequest,
    ModelStatisticsResponse,
    RepositoryIndexRequest,
    RepositoryIndexResponse,
)
from megalith.serving.proto.infer_tensors import BYTES
from megalith.serving.proto.message_types import POOL
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.methods import parse, serialize
from megalith.serving.server.oip_service import PLATFORM, describe, parse_version
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.served_model import ServedModel

READY, UNAVAILABLE, LOADING, UNLOADING = "READY", "UNAVAILABLE", "LOADING", "UNLOADING"
_STATES = {
    ModelState.AVAILABLE: READY,
    ModelState.LOADING: LOADING,
    ModelState.START: LOADING,
    ModelState.UNLOADING: UNLOADING,
}
_TYPES = POOL.FindEnumTypeByName("inference.DataType").values_by_name


class TritonExtensions:
    """The methods of GRPCInferenceService that Triton adds."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher

    def methods(self) -> dict[str, Any]:
        """Return the methods by name."""
        return {
            "ModelConfig": self._config,
            "ModelStatistics": self._statistics,
            "RepositoryIndex": self._index,
        }

    def _config(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelConfigRequest, data)
        return serialize(model_config(self._dispatcher, request.name, request.version))

    def _statistics(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, ModelStatisticsRequest, data)
        return serialize(model_statistics(self._dispatcher, request.name, request.version))

    def _index(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, RepositoryIndexRequest, data)
        return serialize(repository_index(self._dispatcher, ready_only=request.ready))


def model_config(dispatcher: Dispatcher, name: str, version: str) -> Message:
    """Return the configuration of a model."""
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
    """Return the statistics of loaded versions."""
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
    """Return the versions of all models."""
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
