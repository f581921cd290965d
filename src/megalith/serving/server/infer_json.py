"""Inference requests and responses as JSON, with the binary data extension of the Open Inference Protocol.

A body is JSON. If the header HEADER_LENGTH gives the length of the JSON, the bytes of tensors follow it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from megalith.errors import InputError
from megalith.serving.export.signature import OUTPUT_DTYPES
from megalith.serving.proto.infer_tensors import BYTES, DATATYPES, from_raw, from_values
from megalith.serving.proto.limits import MAX_RANK, POINTER_BYTES
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.batching import Alive
from megalith.serving.server.dispatcher import ScoreResult
from megalith.serving.server.inputs import InputReader, Rows
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.served_model import Array
from megalith.storage.json_codec import parse_json

HEADER_LENGTH = "Inference-Header-Content-Length"
"""Header that gives the number of bytes of JSON in a body; tensors follow."""
MAX_JSON_BYTES = 4 << 20
"""Parsed JSON takes up to 25 times its size in memory, so large tensors must be sent as bytes."""


class InferRequest:
    """A request for scores; see ScoreRequest. `read` parses the body."""

    alive: Alive | None = None

    def __init__(
        self,
        model: str,
        version: int | str | None,
        body: bytes,
        header: str | None,
        reports_missing: bool = False,
    ) -> None:
        self.model, self.version = model, version
        self.reports_missing = reports_missing
        self.outputs: Sequence[str] = ()
        self.timeout: float | None = None
        self._body, self._header = body, header
        self._request: dict[str, Any] = {}
        self._binary: dict[str, bool] = {}

    def read(self, reader: InputReader) -> Rows:
        """Parse the body and read the rows; sets `outputs` and `timeout`."""
        self._request, tensors = _split(self._body, self._header)
        self._binary = _outputs(self._request)
        self.outputs, self.timeout = list(self._binary), _timeout(self._request)
        return reader.read(_inputs(self._request, tensors, reader.max_bytes))

    def response(self, scored: ScoreResult) -> tuple[dict[str, Any], bytes]:
        given = _parameters(self._request).get("binary_data_output") is True
        reply: dict[str, Any] = {"model_name": self.model, "model_version": str(scored.version)}
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


def _outputs(request: Mapping[str, Any]) -> dict[str, bool]:
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


def _inputs(request: Mapping[str, Any], tensors: bytes, max_bytes: int) -> dict[str, Tensor | Strings]:
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
