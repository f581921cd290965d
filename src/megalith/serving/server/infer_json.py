"""Inference requests and answers as JSON: the Open Inference Protocol's, with tensors as bytes behind them.

A body is JSON; where a header says how long that is, the bytes of tensors follow it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.infer_tensors import BYTES, from_raw, from_values
from megalith.serving.proto.limits import MAX_RANK, POINTER_BYTES
from megalith.serving.proto.tf_tensors import Strings
from megalith.serving.server.dispatcher import Question, ScoreResult
from megalith.serving.server.request_errors import Code, RequestError
from megalith.serving.server.served_model import Array

HEADER_LENGTH = "Inference-Header-Content-Length"
"""How many bytes of a body are JSON; tensors follow."""
MAX_JSON_BYTES = 4 << 20
"""JSON takes up to 25 times its size in memory; large tensors are sent as bytes."""


class InferRequest:
    """A body that was read. header: what HEADER_LENGTH says. Raises InputError or RequestError."""

    def __init__(self, body: bytes, header: str | None) -> None:
        self._request, self._tensors = _split(body, header)
        self._wanted = _outputs(self._request)
        self._timeout = _timeout(self._request)

    def question(self) -> Question:
        """What it asks."""
        return Question(
            lambda reader: reader.read(_inputs(self._request, self._tensors, reader.max_bytes)),
            list(self._wanted),
            self._timeout,
        )

    def answer(self, name: str, scored: ScoreResult) -> tuple[dict[str, Any], bytes]:
        """The JSON and bytes that answer it. name: what it called the model."""
        given = _parameters(self._request).get("binary_data_output") is True
        reply: dict[str, Any] = {"model_name": name, "model_version": str(scored.version)}
        if isinstance(self._request.get("id"), str):
            reply["id"] = self._request["id"]
        outputs, binary = [], []
        for output, array in scored.outputs.items():
            described: dict[str, Any] = {"name": output, "datatype": "FP32", "shape": list(array.shape)}
            if self._wanted.get(output, given):
                described["parameters"] = {"binary_data_size": array.nbytes}
                binary.append(array.tobytes())
            else:
                described["data"] = _numbers(array)
            outputs.append(described)
        return {**reply, "outputs": outputs}, b"".join(binary)


def _split(body: bytes, header: str | None) -> tuple[dict[str, Any], bytes]:
    """The JSON of a body, and the bytes of tensors behind it."""
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
    try:
        request = json.loads(body[:length], parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(request, dict) or not isinstance(request.get("inputs"), list):
        raise InputError('the body must be a JSON object with "inputs", a list')
    return request, body[length:]


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON")


def _parameters(given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = given.get("parameters", {})
    if not isinstance(parameters, dict):
        raise InputError("parameters must be a JSON object")
    return parameters


def _timeout(request: Mapping[str, Any]) -> float | None:
    """Seconds until nobody waits for the answer; the parameter is microseconds, as Triton has it."""
    given = _parameters(request).get("timeout")
    if given is None:
        return None
    if type(given) is not int or given < 0:
        raise InputError("timeout must be a whole number of microseconds")
    return given / 1e6


def _outputs(request: Mapping[str, Any]) -> dict[str, bool]:
    """The outputs wanted, and whether as bytes."""
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
        if not isinstance(datatype, str) or not isinstance(shape, list) or not _whole(shape):
            raise InputError(f"{name} needs a datatype and a shape, a list of whole numbers")
        if given["name"] in read:
            raise InputError(f"{name} is there twice")
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
        raise InputError(f"{len(tensors) - at} bytes behind the last tensor")
    return read


def _encoded(values: list[Any], name: str) -> list[Any]:
    try:
        return [value.encode() if isinstance(value, str) else value for value in values]
    except UnicodeEncodeError:
        raise InputError(f"{name}: half of a surrogate pair is no text") from None


def _whole(sizes: list[Any]) -> bool:
    return all(type(size) is int for size in sizes)


def _flat(data: Any, name: str) -> list[Any]:
    """Values in row-major order, from a flat list or lists in lists."""
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
    """Values as JSON has them; it has no name for what is not finite."""
    return [value if math.isfinite(value) else None for value in array.tolist()]
