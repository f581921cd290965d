"""TF Serving's services over gRPC: Predict, GetModelMetadata and GetModelStatus.

The signature of a PredictRequest selects what Predict does:

    serving_default                                      scores of the request's rows
    lookup, raw_lookup                                   rows of ids
    hashtable_assign, raw_assign, NAME/raw_assign        write rows and dense weights
    sync_position, sync_begin, sync_end, sync_reload     position and control of parameter sync

Status and metadata are messages that tf_rest.py returns as JSON.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers
from megalith.serving.export.signature import ENTRY, OUTPUT_DTYPES, Signature
from megalith.serving.proto.message_bytes import (
    LARGE,
    cut_contents,
    encode_predict_response,
    read_predict_message,
)
from megalith.serving.proto.message_types import (
    ErrorCode,
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    Message,
    ModelSpec,
    PredictRequest,
    PredictResponse,
    SignatureDefMap,
)
from megalith.serving.proto.tf_tensors import (
    Strings,
    fill_tensor_proto,
    from_tensor_protos,
    strings_to_tensor_proto,
    tensor_info,
    to_tensor_proto,
)
from megalith.serving.server.dispatcher import FLAT_ROWS, Dispatcher, unknown_signature
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
from megalith.serving.wire_names import (
    HASHTABLE_ASSIGN,
    LOOKUP,
    PREDICT,
    RAW_ASSIGN,
    RAW_LOOKUP,
    write_signature,
)

METHOD = "tensorflow/serving/predict"


def model_status(dispatcher: Dispatcher, name: str, wanted: int | str | None) -> Message:
    with dispatcher.admit(name, "status") as model:
        response = GetModelStatusResponse()
        for number, status in model.statuses_of(wanted).items():
            added = response.model_version_status.add(version=number, state=int(status.state))
            added.status.error_code = ErrorCode.UNKNOWN if status.error else ErrorCode.OK
            added.status.error_message = status.error
        return response


def model_metadata(dispatcher: Dispatcher, name: str, wanted: int | str | None) -> tuple[Message, Message]:
    with dispatcher.admit(name, "metadata") as model, model.version(wanted) as version:
        spec = ModelSpec(name=name)
        spec.version.value = version.number
        return spec, signatures_of(version.signature, dispatcher.allow_writes)


def signatures_of(signature: Signature, writes: bool) -> Message:
    made = SignatureDefMap()

    def define(name: str, inputs: dict[str, Message], outputs: dict[str, Message]) -> None:
        definition = made.signature_def[name]
        definition.method_name = METHOD
        for given, target in ((inputs, definition.inputs), (outputs, definition.outputs)):
            for key, info in given.items():
                target[key].CopyFrom(info)

    if signature.predicts:
        inputs = {name: tensor_info(name, dtype, shape) for name, dtype, shape in inputs_of(signature)}
        outputs = {
            each.name: tensor_info(each.name, OUTPUT_DTYPES[each.dtype], [None, *each.shape])
            for each in signature.outputs
        }
        define(PREDICT, inputs, outputs)
    if signature.part != ENTRY:
        dims = signature.dims
        ids = {table: tensor_info(table, torch.int64, [None]) for table in dims}
        rows = {table: tensor_info(table, torch.float32, [None, dim]) for table, dim in dims.items()}
        define(LOOKUP, ids, rows)
        raw = {name: tensor_info(name, torch.int64, [None]) for name in ("id", "id_split")}
        define(RAW_LOOKUP, raw, {FLAT_ROWS: tensor_info(FLAT_ROWS, torch.float32, [None])})
        if writes:
            pushed, results = {}, {}
            for table, dim in dims.items():
                pushed[f"{table}_id"] = tensor_info(f"{table}_id", torch.int64, [None])
                pushed[f"{table}_value"] = tensor_info(f"{table}_value", torch.float32, [None, dim])
                results[f"{table}_result"] = tensor_info(f"{table}_result", torch.int64, [1])
            define(HASHTABLE_ASSIGN, pushed, results)
            flat = {"flat_value": tensor_info("flat_value", torch.float32, [None])}
            define(RAW_ASSIGN, {**raw, **flat}, {"result": tensor_info("result", torch.int64, [1])})
    return made


PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
METADATA_FIELD = "signature_def"
METADATA_PREFIX = "megalith-"
"""Prefix of the metadata that parameter sync uses."""
_LARGEST = 16 << 20
"""Bytes of a tensor whose memory is kept for the next message."""


class TFService:
    """The methods of PredictionService and ModelService."""

    def __init__(self, dispatcher: Dispatcher, *, write_refusal: str = "") -> None:
        self._dispatcher = dispatcher
        self._write_refusal = write_refusal
        self._buffers = MessageBuffers(_LARGEST)

    def handlers(self) -> list[Any]:
        return [
            grpc_handler(
                PREDICTION_SERVICE,
                {"Predict": self.predict, "GetModelMetadata": self.get_model_metadata},
                self._dispatcher.access_log,
            ),
            grpc_handler(
                MODEL_SERVICE, {"GetModelStatus": self.get_model_status}, self._dispatcher.access_log
            ),
        ]

    def predict(self, data: bytes, context: Any) -> bytes:
        """Return scores, rows, or the response to a write, depending on the signature."""
        message = read_predict_message(data)
        if message is not None and (message.signature or PREDICT) == PREDICT:
            return self._scores(
                message.model,
                message.version_text or message.version,
                message.outputs,
                # Inputs in the usual form are read from the bytes, others by protobuf.
                lambda reader: reader.read_message(message) or _read_protos(reader, data),
                len(data),
                context,
            )
        small, contents = cut_contents(data, _is_large) if len(data) >= LARGE else (data, {})
        if len(small) >= LARGE:  # a parsed message takes up to twenty times its bytes
            self._dispatcher.check_size(len(small))
        request = parse(self._dispatcher, PredictRequest, small)
        spec = request.model_spec
        signature = spec.signature_name or PREDICT
        if signature == PREDICT:
            return self._scores(
                spec.name,
                version_of(spec),
                request.output_filter,
                lambda reader: _read_protos(reader, data) if contents else reader.read_protos(request.inputs),
                len(data),
                context,
            )
        timeout = remaining(context)
        read_inputs = functools.partial(self._read_inputs, request, contents)
        self._permit(signature, context)
        if signature in (LOOKUP, RAW_LOOKUP):
            number, rows = self._dispatcher.lookup(
                spec.name,
                version_of(spec),
                read_inputs,
                signature=signature,
                outputs=request.output_filter,
                timeout=timeout,
            )
            response = _response(spec, signature, rows, number)
        elif (write := write_signature(signature)) is not None:
            if self._write_refusal:
                raise self._dispatcher.reject(RequestError(Code.PERMISSION_DENIED, self._write_refusal))
            metadata = {
                key: value
                for key, value in context.invocation_metadata()
                if key.startswith(METADATA_PREFIX) and isinstance(value, str)
            }
            outputs = self._dispatcher.write(spec.name, write, read_inputs, metadata, timeout=timeout)
            response = _response(spec, signature, outputs)
        else:
            raise self._dispatcher.reject(unknown_signature(signature))
        return serialize(response)

    def get_model_metadata(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, GetModelMetadataRequest, data)
        if list(request.metadata_field) != [METADATA_FIELD]:
            raise self._dispatcher.reject(InputError(f"metadata_field must be [{METADATA_FIELD!r}]"))
        spec = request.model_spec
        response = GetModelMetadataResponse()
        found, signatures = model_metadata(self._dispatcher, spec.name, version_of(spec))
        response.model_spec.CopyFrom(found)
        response.metadata[METADATA_FIELD].Pack(signatures)
        return serialize(response)

    def get_model_status(self, data: bytes, context: Any) -> bytes:
        """Return the state of each version, or of the one that the request names (0 names none)."""
        request = parse(self._dispatcher, GetModelStatusRequest, data)
        spec = request.model_spec
        return serialize(model_status(self._dispatcher, spec.name, version_of(spec)))

    def _permit(self, signature: str, context: Any) -> None:
        permission = Permission.READ
        if signature in (LOOKUP, RAW_LOOKUP):
            permission = Permission.LOOKUP
        elif write_signature(signature) is not None:
            permission = Permission.WRITE
        self._dispatcher.permit(authorization_of(context.invocation_metadata()), permission)

    def _scores(
        self,
        model: str,
        version: int | str | None,
        outputs: Sequence[str],
        read: Callable[[InputReader], Rows],
        size: int,
        context: Any,
    ) -> bytes:
        self._permit(PREDICT, context)
        self._dispatcher.check_size(size)
        timeout = remaining(context)
        scored = self._dispatcher.predict(
            GrpcScoreRequest(
                model, version, outputs, timeout, context.is_active, read, wants_missing(context)
            )
        )
        report_missing(context, scored.missing_ids)
        typed = self._dispatcher.typed_outputs
        data = encode_predict_response(model, PREDICT, scored.version, scored.outputs, typed=typed)
        if data is not None:
            return data
        response = PredictResponse()
        _fill_spec(response, model, PREDICT, scored.version)
        for name, array in scored.outputs.items():
            fill_tensor_proto(response.outputs[name], array, typed=typed)
        return serialize(response)

    def _read_inputs(
        self, request: Message, contents: Mapping[str, memoryview]
    ) -> dict[str, Tensor | Strings]:
        limit = self._dispatcher.max_bytes
        return from_tensor_protos(request.inputs, max_bytes=limit, contents=contents, buffers=self._buffers)


def _read_protos(reader: InputReader, data: bytes) -> Rows:
    return reader.read_protos(PredictRequest.FromString(data).inputs)


def _is_large(signature: str) -> bool:
    """Return whether requests of a signature have few, large tensors."""
    return signature in (LOOKUP, RAW_LOOKUP) or write_signature(signature) is not None


def version_of(spec: Message) -> int | str | None:
    if spec.version_label:
        label: str = spec.version_label
        return label
    return spec.version.value if spec.HasField("version") else None


def _response(
    spec: Message, signature: str, outputs: Mapping[str, Tensor | Strings], version: int | None = None
) -> Message:
    response = PredictResponse()
    _fill_spec(response, spec.name, signature, version)
    for name, value in outputs.items():
        proto = to_tensor_proto(value) if isinstance(value, Tensor) else strings_to_tensor_proto(value)
        response.outputs[name].CopyFrom(proto)
    return response


def _fill_spec(response: Message, name: str, signature: str, version: int | None) -> None:
    spec = response.model_spec
    spec.name = name
    spec.signature_name = signature
    if version is not None:
        spec.version.value = version
