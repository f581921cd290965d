"""Monolith's PushRequest messages: splitting one, and converting it to a PredictRequest."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.serving.proto.message_types import Message, PredictRequest, PushRequest
from megalith.serving.proto.tf_tensors import to_tensor_proto
from megalith.serving.sync.push_messages import MAX_PUSH_BYTES, splits_of


def split_push(request: Message, limit: int = MAX_PUSH_BYTES) -> list[Message]:
    """Split a PushRequest that is larger than a limit."""
    count = math.ceil(request.ByteSize() / limit)
    if count <= 1:
        return [request]
    pieces = []
    for number in range(count):
        piece = PushRequest()
        piece.CopyFrom(request)
        for deltas in (piece.delta_hash_tables, piece.delta_multi_hash_tables):
            for delta in deltas:
                each = len(delta.fids) // count
                begin, end = number * each, (number + 1) * each if number < count - 1 else len(delta.fids)
                ids, values = delta.fids[begin:end], delta.embeddings
                del delta.fids[:]
                delta.fids.extend(ids)
                kept = values[begin * delta.dim_size : end * delta.dim_size]
                del delta.embeddings[:]
                delta.embeddings.extend(kept)
        pieces.append(piece)
    return pieces


def to_predict_request(request: Message) -> Message:
    """Convert a PushRequest to a PredictRequest."""
    predict = PredictRequest()
    predict.model_spec.name = request.model_name
    predict.model_spec.signature_name = request.signature_name
    inputs: dict[str, Tensor] = {}
    for delta in request.delta_hash_tables:
        ids, rows = _delta(delta)
        inputs |= {f"{delta.unique_id}_id": ids, f"{delta.unique_id}_value": rows}
    if request.delta_multi_hash_tables:
        deltas = [_delta(delta) for delta in request.delta_multi_hash_tables]
        inputs["id"] = torch.cat([ids for ids, _ in deltas])
        inputs["id_split"] = splits_of(ids.numel() for ids, _ in deltas)
        inputs["flat_value"] = torch.cat([rows.reshape(-1) for _, rows in deltas])
    for name, tensor in inputs.items():
        predict.inputs[name].CopyFrom(to_tensor_proto(tensor))
    return predict


def _delta(delta: Message) -> tuple[Tensor, Tensor]:
    count, dim = len(delta.fids), delta.dim_size
    if dim < 0 or len(delta.embeddings) != count * dim:
        raise InputError(
            f"table {delta.unique_id[:100]!r}: {len(delta.embeddings)} values for {count} ids of dim {dim}"
        )
    ids = torch.from_numpy(np.fromiter(delta.fids, np.int64, count))
    rows = torch.from_numpy(np.fromiter(delta.embeddings, np.float32, count * dim))
    return ids, rows.view(count, dim)
