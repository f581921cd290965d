"""TF Serving's services over gRPC: Predict, GetModelMetadata and GetModelStatus.

The signature of a PredictRequest selects what Predict does:

    serving_default                                      scores of the request's rows
    lookup, raw_lookup                                   rows of ids
    hashtable_assign, raw_assign, NAME/raw_assign        write rows and dense weights
    sync_position, sync_begin, sync_end, sync_reload     position and control of parameter sync
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers
from megalith.serving.export.output_specs import OUTPUT_DTYPES
from megalith.serving.export.signature import ENTRY, Signature
from megalith.serving.proto import (
    ErrorCode,
    GetModelMetadataRequest,
    GetModelMetadataResponse,
    GetModelStatusRequest,
    GetModelStatusResponse,
    Message,
    PredictRequest,
    PredictResponse,
    SignatureDefMap,
    Strings,
    from_tensor_protos,
    strings_to_tensor_proto,
    tensor_info,
    to_tensor_proto,
)
from megalith.serving.proto.contents import LARGE, cut_contents
from megalith.serving.proto.tf_tensors import DTYPES
from megalith.serving.server.dispatcher import Dispatcher, unknown_signature
from megalith.serving.server.methods import (
    GrpcScoreRequest,
    asks_for_missing,
    grpc_handler,
    parse,
    remaining,
    report_missing,
    serialize,
)
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.row_lookup import FLAT_ROWS
from megalith.serving.server.security import Permission, authorization_of
from megalith.serving.wire_names import (
    HASHTABLE_ASSIGN,
    LOOKUP,
    PREDICT,
    RAW_ASSIGN,
    RAW_LOOKUP,
    write_signature,
)

PREDICTION_SERVICE = "tensorflow.serving.PredictionService"
MODEL_SERVICE = "tensorflow.serving.ModelService"
METHOD = "tensorflow/serving/predict"
METADATA_FIELD = "signature_def"
METADATA_PREFIX = "megalith-"
"""Prefix of the metadata that parameter sync uses."""
_DTYPES = {name: DTYPES[dtype] for name, dtype in OUTPUT_DTYPES.items()}
_LARGEST = 16 << 20
"""Bytes of a tensor whose memory is kept for the next message."""


class TFService:
    """The methods of PredictionService and ModelService.

    Args:
        dispatcher: Answers the requests.
    """

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._buffers = MessageBuffers(_LARGEST)

    def handlers(self) -> list[Any]:
        """Return the handlers to register with a gRPC server."""
        return [
            grpc_handler(
                PREDICTION_SERVICE,
                {"Predict": self.predict, "GetModelMetadata": self.get_model_metadata},
            ),
            grpc_handler(MODEL_SERVICE, {"GetModelStatus": self.get_model_status}),
        ]

    def predict(self, data: bytes, context: Any) -> bytes:
        """Return scores, rows, or the response to a write, depending on the signature.

        Args:
            data: The serialized PredictRequest.
            context: The `grpc.ServicerContext` of the call: its deadline and metadata, and
                whether the client waits.

        Returns:
            The serialized PredictResponse.

        Raises:
            RequestError: The request cannot be answered.
        """
        small, contents = cut_contents(data, _is_large) if len(data) >= LARGE else (data, {})
        if len(small) >= LARGE:  # a parsed message takes up to twenty times its bytes
            self._dispatcher.check_size(len(small))
        request = self._parse(PredictRequest, small)
        spec = request.model_spec
        signature = spec.signature_name or PREDICT
        timeout = remaining(context)
        read_inputs = functools.partial(self._read_inputs, request, contents)
        self._permit(signature, context)
        if signature == PREDICT:
            self._dispatcher.check_size(len(data))
            whole = self._parse(PredictRequest, data) if contents else request
            response = self._scores(whole, timeout, context)
        elif signature in (LOOKUP, RAW_LOOKUP):
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
        """Return the signatures of a version.

        Args:
            data: The serialized GetModelMetadataRequest.
            context: The `grpc.ServicerContext` of the call; not used.

        Returns:
            The serialized GetModelMetadataResponse.

        Raises:
            RequestError: The request is malformed, or the model or the version is unknown.
        """
        request = self._parse(GetModelMetadataRequest, data)
        if list(request.metadata_field) != [METADATA_FIELD]:
            error = InputError(f"metadata_field must be [{METADATA_FIELD!r}]")
            raise self._dispatcher.reject(error)

        spec = request.model_spec
        with (
            self._dispatcher.admit(spec.name, "metadata") as model,
            model.version(version_of(spec)) as version,
        ):
            response = GetModelMetadataResponse()
            response.model_spec.name = spec.name
            response.model_spec.version.value = version.number
            signatures = _signatures(version.signature, self._dispatcher.allow_writes)
            response.metadata[METADATA_FIELD].Pack(signatures)
        return serialize(response)

    def get_model_status(self, data: bytes, context: Any) -> bytes:
        """Return the state of each version, or of the one that the request names (0 names none).

        Args:
            data: The serialized GetModelStatusRequest.
            context: The `grpc.ServicerContext` of the call; not used.

        Returns:
            The serialized GetModelStatusResponse.

        Raises:
            RequestError: The request is malformed, or the model or the version is unknown.
        """
        request = self._parse(GetModelStatusRequest, data)
        number = version_of(request.model_spec)

        with self._dispatcher.admit(request.model_spec.name, "status") as model:
            response = GetModelStatusResponse()
            for each, status in model.statuses.items():
                if number and each != number:
                    continue
                added = response.model_version_status.add(version=each, state=int(status.state))
                added.status.error_code = ErrorCode.UNKNOWN if status.error else ErrorCode.OK
                added.status.error_message = status.error
            if number and not response.model_version_status:
                raise RequestError(Code.NOT_FOUND, f"model {model.name!r} has no version {number}")
        return serialize(response)

    def _permit(self, signature: str, context: Any) -> None:
        permission = Permission.READ
        if signature in (LOOKUP, RAW_LOOKUP):
            permission = Permission.LOOKUP
        elif write_signature(signature) is not None:
            permission = Permission.WRITE
        self._dispatcher.permit(authorization_of(context.invocation_metadata()), permission)

    def _scores(self, request: Message, timeout: float | None, context: Any) -> Message:
        spec = request.model_spec
        scored = self._dispatcher.predict(
            GrpcScoreRequest(
                spec.name,
                version_of(spec),
                request.output_filter,
                timeout,
                context.is_active,
                lambda reader: reader.read_protos(request.inputs),
                asks_for_missing(context),
            )
        )
        report_missing(context, scored.missing_ids)
        response = PredictResponse()
        _fill_spec(response, spec.name, PREDICT, scored.version)
        for name, array in scored.outputs.items():
            proto = response.outputs[name]
            proto.dtype = _DTYPES[array.dtype.name]
            for size in array.shape:
                proto.tensor_shape.dim.add(size=size)
            proto.tensor_content = array.tobytes()
        return response

    def _read_inputs(
        self, request: Message, contents: Mapping[str, memoryview]
    ) -> dict[str, Tensor | Strings]:
        limit = self._dispatcher.max_bytes
        return from_tensor_protos(request.inputs, max_bytes=limit, contents=contents, buffers=self._buffers)

    def _parse(self, kind: Any, data: bytes) -> Message:
        request = parse(self._dispatcher, kind, data)
        try:
            version_of(request.model_spec)
        except RequestError as error:
            raise self._dispatcher.reject(error) from None
        return request


def _is_large(signature: str) -> bool:
    """Return whether requests of a signature have few, large tensors."""
    return signature in (LOOKUP, RAW_LOOKUP) or write_signature(signature) is not None


def version_of(spec: Message) -> int | None:
    """Return the version that a ModelSpec names.

    Args:
        spec: The message.

    Returns:
        The number; None if it names none.

    Raises:
        RequestError: It names a version by a label.
    """
    if spec.version_label:
        raise RequestError(Code.NOT_FOUND, f"version label {spec.version_label[:100]!r} is unknown")
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


def _signatures(signature: Signature, writes: bool) -> Message:
    """Return the SignatureDefMap of a version."""
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


def inputs_of(signature: Signature) -> list[tuple[str, torch.dtype | None, list[int | None]]]:
    """Return the inputs of serving_default.

    Args:
        signature: The model.

    Returns:
        Name, dtype and shape of each input. The dtype None is that of strings; None in a shape is a size
        that varies.
    """
    described: list[tuple[str, torch.dtype | None, list[int | None]]] = []
    for feature in signature.features:
        length: list[int | None] = [] if feature.single or feature.max_length == 1 else [None]
        dtype = None if feature.ids == "xxhash64" else torch.int64
        described.append((feature.name, dtype, [None, *length]))
    if signature.num_dense:
        described.append((signature.dense_name, torch.float32, [None, signature.num_dense]))
    return described
