"""Requests for scores in the usual form of both protocols, and changes to them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.checkpoint.manifest import Routing
from megalith.serving.export.signature import ExportedTable, FeatureSpec, Signature
from megalith.serving.proto.message_types import DataType
from megalith.serving.proto.tf_tensors import to_tensor_proto
from megalith.serving.server.inputs import InputReader
from tests.serving.exports import request_of, to_infer_request

NAMES = ("user", "tags")
Inputs = Mapping[str, Tensor]
INPUTS: Inputs = {
    "user": torch.tensor([-7, 2]),
    "tags": torch.tensor([3, 2**63 - 1]),
    "dense": torch.ones(2, 1),
}
SIGNATURE = Signature(
    model="movies",
    version=1,
    part="standalone",
    sub_graph_num=0,
    base="b",
    step=0,
    created="now",
    megalith="0",
    precision="float32",
    tables={name: ExportedTable((2,), (1.0,), Routing("roundrobin", 1)) for name in NAMES},
    features=tuple(FeatureSpec(name, name, "sum", pad=-7) for name in NAMES),
    num_dense=1,
)
READER = InputReader(SIGNATURE)
CONTENTS = {"INT64": "int64_contents", "FP32": "fp32_contents", "INT32": "int_contents"}


def predict_request(inputs: Inputs = INPUTS) -> Any:
    request = request_of(inputs)
    request.output_filter.extend(["logits", "é"])
    request.model_spec.version.value = 7
    return request


def typed_predict_request() -> Any:
    request = predict_request()
    request.model_spec.version_label = "stable"
    for name in NAMES:
        request.inputs[name].ClearField("tensor_content")
        request.inputs[name].int64_val.extend(INPUTS[name].tolist())
    request.inputs["dense"].ClearField("tensor_content")
    request.inputs["dense"].float_val.extend([1.0, 1.0])
    return request


def infer_request(inputs: Inputs = INPUTS) -> Any:
    request = to_infer_request(inputs, model_name="movies", model_version="7", id="é1")
    request.outputs.add(name="logits").parameters["classification"].int64_param = 3
    request.outputs.add(name="é")
    for tensor in request.inputs:
        tensor.parameters["x"].double_param = 0.5
    request.parameters["flag"].bool_param = True
    request.parameters["priority"].uint64_param = 2**64 - 1
    request.parameters["timeout"].int64_param = -1
    request.parameters["name"].string_param = "é"
    return request


def typed_infer_request(inputs: Inputs = INPUTS) -> Any:
    request = infer_request(inputs)
    request.ClearField("raw_input_contents")
    for tensor in request.inputs:
        values = inputs[tensor.name]
        getattr(tensor.contents, CONTENTS[tensor.datatype]).extend(values.reshape(-1).tolist())
    return request


def first(request: Any) -> Any:
    return request.inputs[0]


PREDICT_CHANGES: dict[str, Callable[[Any], object]] = {
    "both": lambda request: request.inputs["user"].int64_val.append(1),
    "empty": lambda request: request.inputs["user"].ClearField("tensor_content"),
    "absent": lambda request: request.inputs.__delitem__("user"),
    "unknown": lambda request: request.inputs["more"].CopyFrom(request.inputs["user"]),
    "rank": lambda request: request.inputs["user"].tensor_shape.dim.add(size=1),
    "twice": lambda request: request.inputs["user"].MergeFrom(to_tensor_proto(torch.ones(2))),
    "negative": lambda request: setattr(request.inputs["user"].tensor_shape.dim[0], "size", -1),
    "width": lambda request: setattr(request.inputs["dense"].tensor_shape.dim[1], "size", 2),
    "dtype": lambda request: setattr(request.inputs["user"], "dtype", DataType.DT_UINT64),
}
INFER_CHANGES: dict[str, Callable[[Any], object]] = {
    "both": lambda request: first(request).contents.int64_contents.append(1),
    "raw short": lambda request: request.raw_input_contents.pop(),
    "raw more": lambda request: request.raw_input_contents.append(b"12345678"),
    "empty": lambda request: request.raw_input_contents.__setitem__(0, b""),
    "half": lambda request: request.raw_input_contents.__setitem__(0, b"1234"),
    "absent": lambda request: (request.inputs.pop(0), request.raw_input_contents.pop(0)),
    "twice": lambda request: (request.inputs.append(first(request)), request.raw_input_contents.append(b"")),
    "unknown": lambda request: setattr(first(request), "name", "more"),
    "rank": lambda request: first(request).shape.append(1),
    "ranks": lambda request: first(request).shape.extend([1, 1]),
    "scalar": lambda request: first(request).ClearField("shape"),
    "negative": lambda request: first(request).shape.__setitem__(0, -1),
    "huge": lambda request: first(request).shape.__setitem__(0, 2**62),
    "width": lambda request: request.inputs[-1].shape.__setitem__(1, 2),
    "dtype": lambda request: setattr(first(request), "datatype", "UINT64"),
    "no dtype": lambda request: setattr(first(request), "datatype", ""),
    "floats": lambda request: setattr(first(request), "datatype", "FP64"),
    "no rows": lambda request: (
        [tensor.shape.__setitem__(0, 0) for tensor in request.inputs],
        [request.raw_input_contents.__setitem__(k, b"") for k in range(len(request.inputs))],
    ),
}


def damaged(whole: bytes, dice: random.Random) -> bytes:
    """A few bytes changed, repeated, inserted or cut out, or the end cut off."""
    data = bytearray(whole)
    for _ in range(dice.randrange(1, 4)):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << dice.randrange(8)
            case 1:
                del data[at : at + dice.randrange(1, 9)]
            case 2:
                data[at:at] = data[at : at + dice.randrange(1, 40)]
            case 3 if at < len(data):
                data[at] = dice.randrange(256)
            case 4:
                data[at:at] = b"\xff" * dice.randrange(1, 12)  # a huge length, or a varint without an end
            case 5:
                del data[dice.randrange(len(data) + 1) :]
            case 6:
                data[at:at] = dice.randbytes(dice.randrange(1, 10))
    return bytes(data)


def damaged_messages(whole: bytes, count: int) -> Iterator[bytes]:
    dice = random.Random(0)
    return (damaged(whole, dice) for _ in range(count))
