"""Control calls: sync_position, sync_begin and sync_reload, which a server answers with its position."""

from __future__ import annotations

from megalith.errors import RemoteError
from megalith.serving.client.channels import Connection
from megalith.serving.proto.message_types import PredictRequest
from megalith.serving.proto.tf_tensors import from_tensor_protos, strings_to_tensor_proto
from megalith.serving.sync import message_header as headers
from megalith.serving.sync.message_header import MessageHeader, Position

MAX_ANSWER_BYTES = 1 << 23
"""The maximum number of bytes of the tensors of an answer."""


def ask_position(
    connection: Connection,
    model: str,
    signature: str,
    *,
    timeout: float,
    header: MessageHeader | None = None,
    base: str | None = None,
) -> Position:
    """Make a control call."""
    request = PredictRequest()
    request.model_spec.name = model
    request.model_spec.signature_name = signature
    if base is not None:
        request.inputs["base"].CopyFrom(strings_to_tensor_proto(headers.string(base)))
    metadata = () if header is None else header.metadata()
    answer = connection.predict(request, timeout=timeout, metadata=metadata)
    if not answer.outputs:
        raise RemoteError(
            f"{connection.address}: the answer to {signature} has no outputs: it is not a server of Megalith",
            code="UNIMPLEMENTED",
        )
    return Position.read(from_tensor_protos(answer.outputs, max_bytes=MAX_ANSWER_BYTES))
