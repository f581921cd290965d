"""TF Serving's services over gRPC and REST: Predict, metadata and status.

The signature of a PredictRequest selects what Predict does:

    serving_default                                      scores of the request's rows
    lookup, raw_lookup                                   rows of ids
    hashtable_assign, raw_assign, NAME/raw_assign        write rows and dense weights
    sync_position, sync_begin, sync_end, sync_reload     position and control of parameter sync

Paths, where SELECTED is /v1/models/NAME, /v1/models/NAME/versions/NUMBER or /v1/models/NAME/labels/LABEL:

    POST  SELECTED:predict     scores
    GET   SELECTED             state of the versions
    GET   SELECTED/metadata    signatures of a version

In the row format a request has `instances`, a list with an object for each row, and the response has
`predictions`. In the columnar format it has `inputs`, an object with a list for each input, and the response
has `outputs`. The names may be left out where there is one input, and are left out where there is one output.
Lists of different lengths are padded, which the reader of inputs removes again. Numbers that are not finite
become null.
"""

from __future__ import annotations

import base64
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.library import MessageBuffers
from megalith.serving.export.signature import ENTRY, OUTPUT_DTYPES, Signature
from megalith.serving.proto.infer_tensors import BYTES, from_values
from megalith.serving.proto.limits import MAX_RANK, POINTER_BYTES
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
    protobuf,
)
from megalith.serving.proto.tf_tensors import (
    Strings,
    fill_tensor_proto,
    from_tensor_protos,
    strings_to_tensor_proto,
    tensor_info,
    to_tensor_proto,
)
from megalith.serving.server.dispatcher import (
    FLAT_ROWS,
    MAX_JSON_BYTES,
    Dispatcher,
    ScoreRequest,
    ScoreResult,
    unknown_signature,
)
from megalith.serving.server.grpc_calls import (
    Calls,
    parse,
    remaining,
    score,
    serialize,
)
from megalith.serving.server.inputs import SPLITS, WEIGHTS, InputReader, Rows, inputs_of
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.security import Permission, authorization_of
from megalith.serving.server.served_model import Array
from megalith.serving.wire_names import (
    HASHTABLE_ASSIGN,
    LOOKUP,
    PREDICT,
    RAW_ASSIGN,
    RAW_LOOKUP,
    write_signature,
)
from megalith.storage.json_codec import parse_json

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

    def add_to(self, calls: Calls) -> None:
        predict, metadata = self.predict, self.get_model_metadata
        calls.add(PREDICTION_SERVICE, {"Predict": predict, "GetModelMetadata": metadata})
        calls.add(MODEL_SERVICE, {"GetModelStatus": self.get_model_status})

    async def predict(self, data: bytes, context: Any) -> bytes:
        """Return scores, rows, or the response to a write, depending on the signature."""
        message = read_predict_message(data)
        if message is not None and (message.signature or PREDICT) == PREDICT:
            request = ScoreRequest(
                message.model,
                message.version_text or message.version,
                len(data),
                # Inputs in the usual form are read from the bytes, others by protobuf.
                lambda reader: reader.read_message(message) or _read_protos(reader, data),
                message.outputs,
            )
        else:
            parsed, contents = await self._dispatcher.in_thread(lambda: self._parse(data), len(data))
            spec = parsed.model_spec
            if (spec.signature_name or PREDICT) != PREDICT:
                return await self._look_up_or_write(parsed, contents, context)
            request = ScoreRequest(
                spec.name,
                version_of(spec),
                len(data),
                lambda reader: _read_protos(reader, data) if contents else reader.read_protos(parsed.inputs),
                parsed.output_filter,
            )
        scored = await score(self._dispatcher, request, context)
        typed = self._dispatcher.typed_outputs
        response = encode_predict_response(
            request.model, PREDICT, scored.version, scored.outputs, typed=typed
        )
        if response is not None:
            return response
        filled = PredictResponse()
        _fill_spec(filled, request.model, PREDICT, scored.version)
        for name, array in scored.outputs.items():
            fill_tensor_proto(filled.outputs[name], array, typed=typed)
        return serialize(filled)

    async def _look_up_or_write(
        self, request: Message, contents: dict[str, memoryview], context: Any
    ) -> bytes:
        spec = request.model_spec
        signature, write = spec.signature_name, write_signature(spec.signature_name)
        timeout = remaining(context)
        read_inputs = functools.partial(self._read_inputs, request, contents)
        if self._dispatcher.requires_token:
            permission = Permission.READ if write is None else Permission.WRITE
            permission = Permission.LOOKUP if signature in (LOOKUP, RAW_LOOKUP) else permission
            self._dispatcher.permit(authorization_of(context.invocation_metadata()), permission)
        if signature in (LOOKUP, RAW_LOOKUP):
            number, rows = await self._dispatcher.lookup(
                spec.name,
                version_of(spec),
                read_inputs,
                signature=signature,
                outputs=request.output_filter,
                timeout=timeout,
            )
            return await self._dispatcher.in_thread(
                lambda: serialize(_response(spec, signature, rows, number)),
                sum(each.nbytes for each in rows.values()),
            )
        if write is not None:
            if self._write_refusal:
                raise self._dispatcher.reject(RequestError(Code.PERMISSION_DENIED, self._write_refusal))
            metadata = {
                key: value
                for key, value in context.invocation_metadata()
                if key.startswith(METADATA_PREFIX) and isinstance(value, str)
            }
            outputs = await self._dispatcher.write(spec.name, write, read_inputs, metadata, timeout=timeout)
            return serialize(_response(spec, signature, outputs))
        raise self._dispatcher.reject(unknown_signature(signature))

    def _parse(self, data: bytes) -> tuple[Message, dict[str, memoryview]]:
        """Parse a message; the content of its large tensors stays where it is."""
        small, contents = cut_contents(data, _is_large) if len(data) >= LARGE else (data, {})
        if len(small) >= LARGE:  # a parsed message takes up to twenty times its bytes
            self._dispatcher.check_size(len(small))
        return parse(self._dispatcher, PredictRequest, small), contents

    async def get_model_metadata(self, data: bytes, context: Any) -> bytes:
        request = parse(self._dispatcher, GetModelMetadataRequest, data)
        if list(request.metadata_field) != [METADATA_FIELD]:
            raise self._dispatcher.reject(InputError(f"metadata_field must be [{METADATA_FIELD!r}]"))
        spec = request.model_spec
        response = GetModelMetadataResponse()
        found, signatures = model_metadata(self._dispatcher, spec.name, version_of(spec))
        response.model_spec.CopyFrom(found)
        response.metadata[METADATA_FIELD].Pack(signatures)
        return serialize(response)

    async def get_model_status(self, data: bytes, context: Any) -> bytes:
        """Return the state of each version, or of the one that the request names (0 names none)."""
        request = parse(self._dispatcher, GetModelStatusRequest, data)
        spec = request.model_spec
        return serialize(model_status(self._dispatcher, spec.name, version_of(spec)))

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


# ---- REST

_FIELDS = {"signature_name", "instances", "inputs"}
_MAX_INT64 = 2**63 - 1
_MAX_VALUES = MAX_JSON_BYTES // 2
"""Maximum number of values of a request; padding must not make it larger than the largest body."""


@dataclass(frozen=True)
class TFPath:
    """What a path selects: a model, a version by number or label, and what to do with it."""

    model: str
    version: int | str | None
    action: str
    """"predict", "metadata" or ""; "": status."""

    @classmethod
    def parse(cls, parts: Sequence[str]) -> TFPath:
        """Parse a path."""
        names = list(parts)
        action = ""
        if names and names[-1] == "metadata" and len(names) > 1:
            names, action = names[:-1], "metadata"
        elif names:
            names[-1], _, verb = names[-1].rpartition(":")
            if verb == "predict" and names[-1]:
                action = "predict"
            elif verb in ("classify", "regress"):
                raise RequestError(Code.UNIMPLEMENTED, f"{verb} is not supported; use predict")
            else:  # a name may hold a colon
                names = list(parts)
        match names:
            case [model]:
                return cls(model, None, action)
            case [model, "versions", number] if number.isascii() and number.isdecimal() and len(number) < 20:
                return cls(model, int(number), action)
            case [model, "labels", label]:
                return cls(model, label, action)
        raise RequestError(
            Code.NOT_FOUND,
            "unknown path; /v1/models/NAME[/versions/NUMBER or /labels/LABEL] is followed by :predict, "
            "/metadata or nothing",
        )

    def describe(self, dispatcher: Dispatcher) -> dict[str, Any]:
        """Return the status or the metadata of what the path selects."""
        if self.action == "predict":
            raise RequestError(Code.INVALID_ARGUMENT, "predict needs a POST")
        if self.action == "":
            return _to_json(model_status(dispatcher, self.model, self.version))
        spec, signatures = model_metadata(dispatcher, self.model, self.version)
        described = {"name": spec.name, "signature_name": "", "version": str(spec.version.value)}
        return {"model_spec": described, "metadata": {"signature_def": _to_json(signatures)}}


def _to_json(message: Message) -> dict[str, Any]:
    json_format = protobuf("json_format")
    made: dict[str, Any] = json_format.MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return made


class TFBody:
    """The body of a request for scores."""

    def __init__(self, body: bytes) -> None:
        self._body = body
        self._in_rows = False

    def read(self, reader: InputReader) -> Rows:
        """Parse the body and read the rows."""
        if len(self._body) > MAX_JSON_BYTES:
            raise RequestError(
                Code.OUT_OF_RANGE,
                f"the body has {len(self._body)} bytes of JSON, more than {MAX_JSON_BYTES}; send fewer rows",
            )
        request = parse_json(self._body, lambda problem: InputError(f"the body {problem[:200]}"))
        if not isinstance(request, dict) or ("instances" in request) == ("inputs" in request):
            raise InputError('the body must be a JSON object with either "instances" or "inputs"')
        if unknown := request.keys() - _FIELDS:
            raise InputError(f"{min(unknown)[:100]!r} is unknown; a request has {', '.join(sorted(_FIELDS))}")
        if request.get("signature_name") not in (None, "", PREDICT):
            raise InputError(f"over REST only the signature {PREDICT!r} is answered; use gRPC for others")
        self._in_rows = "instances" in request
        if self._in_rows:
            columns = _columns(request["instances"], reader)
        else:
            columns = _named(request["inputs"], reader)
        return reader.read(_inputs(columns, reader))

    def response(self, scored: ScoreResult) -> dict[str, Any]:
        """Return the response to the request."""
        outputs = {name: _values(array) for name, array in scored.outputs.items()}
        reply: dict[str, Any]
        if len(outputs) == 1:
            reply = {"predictions" if self._in_rows else "outputs": next(iter(outputs.values()))}
        elif self._in_rows:
            rows = zip(*outputs.values(), strict=True)
            reply = {"predictions": [dict(zip(outputs, row, strict=True)) for row in rows]}
        else:
            reply = {"outputs": outputs}
        if scored.missing_ids is not None:
            reply["missing_ids"] = scored.missing_ids
        return reply


def _values(array: Array) -> list[Any]:
    """Return nested lists; None where a number is not finite."""
    values: list[Any] = array.tolist()
    if array.dtype.kind != "f" or np.isfinite(array).all():
        return values
    return [_finite(each) for each in values]


def _finite(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if math.isfinite(value) else None


# ---- inputs


def _input_names(reader: InputReader) -> tuple[str, ...]:
    return reader.names + ((reader.dense_name,) if reader.num_dense else ())


def _columns(instances: Any, reader: InputReader) -> dict[str, Any]:
    """Return the values of each input, one for each row."""
    if not isinstance(instances, list) or not instances:
        raise InputError('"instances" must be a list with a value for each row')
    if not any(_is_object(each) for each in instances):
        return _named(instances, reader)
    first = instances[0]
    for number, each in enumerate(instances):
        if not _is_object(each) or each.keys() != first.keys():
            raise InputError(f"instance {number} must be an object with the same inputs as the first one")
    return {name: [each[name] for each in instances] for name in first}


def _named(values: Any, reader: InputReader) -> dict[str, Any]:
    """Return inputs by name; without names there must be one."""
    if _is_object(values):
        return dict(values)
    names = _input_names(reader)
    if len(names) != 1:
        raise InputError(f"the model has {len(names)} inputs, so the request must name them")
    return {names[0]: values}


def _is_object(value: Any) -> bool:
    """Return whether a value is an object with inputs; {"b64": text} is a string of bytes."""
    return isinstance(value, dict) and not (len(value) == 1 and isinstance(value.get("b64"), str))


def _inputs(columns: Mapping[str, Any], reader: InputReader) -> dict[str, Tensor | Strings]:
    pads = {feature.name: feature.pad for feature in reader.features}
    texts = {feature.name for feature in reader.features if feature.ids == "xxhash64"}
    read: dict[str, Tensor | Strings] = {}
    left = min(reader.max_bytes, _MAX_VALUES * POINTER_BYTES)
    for key, column in columns.items():
        name = f"input {key[:100]!r}"
        is_float = key.endswith(WEIGHTS) or (key == reader.dense_name and reader.num_dense > 0)
        if key.endswith(WEIGHTS):
            _check_lengths(column, columns.get(key.removesuffix(WEIGHTS)), name)
        pad = None if key == reader.dense_name else 0.0 if is_float else pads.get(key, 0)
        values, shape = _flatten(column, pad, left, name)
        datatype = _datatype(values, is_float, name) if values or key not in texts else BYTES
        value = from_values(datatype, shape, values, name=name, max_bytes=left)
        read[key] = value
        left -= value.nbytes if isinstance(value, Tensor) else value.size * POINTER_BYTES
    return read


def _check_lengths(weights: Any, ids: Any, name: str) -> None:
    """Raise InputError if rows have another number of weights than of ids: padding would hide it."""
    if not isinstance(weights, list) or not isinstance(ids, list):
        return
    for row, (own, other) in enumerate(zip(weights, ids, strict=False)):
        if isinstance(own, list) and isinstance(other, list) and len(own) != len(other):
            raise InputError(f"{name}: row {row} has {len(own)} weights for {len(other)} ids")


def _flatten(column: Any, pad: float | None, max_bytes: int, name: str) -> tuple[list[Any], list[int]]:
    """Return values in row-major order and their shape; lists of the rows are padded to one length."""
    if not isinstance(column, list):
        raise InputError(f"{name} must be a list with a value for each row")
    values: list[Any] = column
    shape = [len(values)]
    while any(isinstance(each, list) for each in values):
        if not all(isinstance(each, list) for each in values):
            raise InputError(f"{name} mixes lists and values")
        if len(shape) == MAX_RANK:
            raise InputError(f"{name} is nested too deeply")
        length = max(map(len, values))
        if any(len(each) != length for each in values):
            if len(shape) > 1 or pad is None:
                within = "within a row" if len(shape) > 1 else "in its rows"
                raise InputError(f"{name} has lists of different lengths {within}")
            if len(values) * length * POINTER_BYTES > max_bytes:
                raise InputError(
                    f"{name}: the longest list has {length} values, too many for {len(values)} rows; send "
                    f"values and {SPLITS[1:]} in the columnar format"
                )
            is_text = any(isinstance(item, str | dict) for each in values for item in each)
            filler: Any = "" if is_text else pad
            values = [each + [filler] * (length - len(each)) for each in values]
        shape.append(length)
        values = [item for each in values for item in each]
    return [_decoded(each, name) if isinstance(each, str | dict) else each for each in values], shape


def _decoded(value: str | dict[str, Any], name: str) -> bytes:
    try:
        if isinstance(value, str):
            return value.encode()
        return base64.b64decode(value["b64"], validate=True)
    except (KeyError, TypeError, ValueError):
        raise InputError(f'{name}: a string must be text, or {{"b64": base64 of its bytes}}') from None


def _datatype(values: Sequence[Any], is_float: bool, name: str) -> str:
    kinds = set(map(type, values))
    if is_float or float in kinds:
        return "FP32"
    if kinds == {bytes}:
        return BYTES
    if kinds <= {int}:
        return "UINT64" if any(each > _MAX_INT64 for each in values) else "INT64"
    raise InputError(f"{name} must be numbers or strings")
