"""A PredictionService in a few lines, for tests: a function from a decoded request to outputs."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from torch import Tensor

from megalith.serving.proto.message_types import Message, PredictRequest, PredictResponse
from megalith.serving.proto.tf_tensors import (
    Strings,
    from_tensor_protos,
    strings_to_tensor_proto,
    to_tensor_proto,
)

LIMIT = 30.0
"""Seconds after which a wait of a test has failed."""


class Refused(Exception):
    """Raised by a function: the name of the status to answer with, and its message."""


@dataclass
class Seen:
    """A request as a plain server saw it."""

    message: Message
    inputs: dict[str, Tensor | Strings]
    metadata: dict[str, Any]
    time_remaining: float | None


Answer = Callable[[Seen], Mapping[str, Any] | bytes]  # tensors and strings by name, or a message


@dataclass
class PlainServer:
    """Where it listens, what it has seen, and `released`, which a function may wait for."""

    address: str
    seen: list[Seen] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)
    stop: Callable[[], None] = lambda: None


@contextmanager
def plain_server(answer: Answer, *, credentials: Any = None, port: int = 0) -> Iterator[PlainServer]:
    """A server on loopback; what `answer` returns as bytes is sent as it is."""

    def predict(data: bytes, context: Any) -> bytes:
        message = PredictRequest.FromString(data)
        metadata = dict(context.invocation_metadata())
        seen = Seen(message, from_tensor_protos(message.inputs), metadata, context.time_remaining())
        server.seen.append(seen)
        try:
            outputs = answer(seen)
        except Refused as refused:
            code, message = (*refused.args, "requested by the test")[:2]
            context.abort(grpc.StatusCode[code], message)
        if isinstance(outputs, bytes):
            return outputs
        protos = {
            name: to_tensor_proto(value) if isinstance(value, Tensor) else strings_to_tensor_proto(value)
            for name, value in outputs.items()
        }
        response: bytes = PredictResponse(outputs=protos).SerializeToString()
        return response

    with ThreadPoolExecutor(8) as threads:
        options = [("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 64 << 20)]
        running = grpc.server(threads, options=options)
        methods = {"Predict": grpc.unary_unary_rpc_method_handler(predict)}
        service = grpc.method_handlers_generic_handler("tensorflow.serving.PredictionService", methods)
        running.add_generic_rpc_handlers((service,))
        if credentials is None:
            port = running.add_insecure_port(f"127.0.0.1:{port}")
            server = PlainServer(f"127.0.0.1:{port}")
        else:
            port = running.add_secure_port("localhost:0", credentials)
            server = PlainServer(f"localhost:{port}")
        server.stop = lambda: running.stop(None).wait(LIMIT)
        running.start()
        try:
            yield server
        finally:
            server.released.set()
            server.stop()
