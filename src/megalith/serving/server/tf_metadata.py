"""Status and metadata of models as messages of TF Serving, for gRPC and REST."""

from __future__ import annotations

import torch

from megalith.serving.export.output_specs import OUTPUT_DTYPES
from megalith.serving.export.signature import ENTRY, Signature
from megalith.serving.proto import (
    ErrorCode,
    GetModelStatusResponse,
    Message,
    ModelSpec,
    SignatureDefMap,
    tensor_info,
)
from megalith.serving.server.dispatcher import Dispatcher
from megalith.serving.server.row_lookup import FLAT_ROWS
from megalith.serving.wire_names import HASHTABLE_ASSIGN, LOOKUP, PREDICT, RAW_ASSIGN, RAW_LOOKUP

METHOD = "tensorflow/serving/predict"


def model_status(dispatcher: Dispatcher, name: str, wanted: int | str | None) -> Message:
    """Return the state of each version of a model, or of one version."""
    with dispatcher.admit(name, "status") as model:
        response = GetModelStatusResponse()
        for number, status in model.statuses_of(wanted).items():
            added = response.model_version_status.add(version=number, state=int(status.state))
            added.status.error_code = ErrorCode.UNKNOWN if status.error else ErrorCode.OK
            added.status.error_message = status.error
        return response


def model_metadata(dispatcher: Dispatcher, name: str, wanted: int | str | None) -> tuple[Message, Message]:
    """Return the signatures of a version."""
    with dispatcher.admit(name, "metadata") as model, model.version(wanted) as version:
        spec = ModelSpec(name=name)
        spec.version.value = version.number
        return spec, signatures_of(version.signature, dispatcher.allow_writes)


def signatures_of(signature: Signature, writes: bool) -> Message:
    """Return the signatures of a version."""
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
    """Return the inputs of serving_default."""
    described: list[tuple[str, torch.dtype | None, list[int | None]]] = []
    for feature in signature.features:
        length: list[int | None] = [] if feature.single or feature.max_length == 1 else [None]
        dtype = None if feature.ids == "xxhash64" else torch.int64
        described.append((feature.name, dtype, [None, *length]))
    if signature.num_dense:
        described.append((signature.dense_name, torch.float32, [None, signature.num_dense]))
    return described
