"""Score messages: requests for scores in the usual form, read from the bytes that a client sent.

Most requests have one id for each feature and row as int64 [rows], and dense values as float32 [rows, k]. One
native pass over the bytes finds them, and what the request asks for. A request in another form is left to
protobuf, which also finds what is wrong with a malformed one. Whatever is read here, protobuf can read too.

    function              message             values in
    read_predict_message  PredictRequest      tensor_content; int64_val, float_val
    read_infer_message    ModelInferRequest   raw_input_contents; int64_contents, fp32_contents
"""

from __future__ import annotations

from typing import Any, Protocol

from megalith.library import native_module


class ScoreMessage(Protocol):
    """A request in the usual form; `InputReader.read_message` reads its inputs."""

    @property
    def model(self) -> str:
        """Name of the model."""

    @property
    def signature(self) -> str:
        """Name of the signature; a ModelInferRequest has none."""

    @property
    def version(self) -> int | None:
        """Number of the version; None: not given as a number."""

    @property
    def version_text(self) -> str:
        """Label of the version, or its number as text in a ModelInferRequest; "": none."""

    @property
    def id(self) -> str:
        """Id of the request, which the response repeats."""

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs to return; empty: all."""


def read_predict_message(data: bytes) -> ScoreMessage | None:
    """Read a PredictRequest."""
    native: Any = native_module()
    message: ScoreMessage | None = None if native is None else native.read_predict_request(data)
    return message


def read_infer_message(data: bytes) -> ScoreMessage | None:
    """Read a ModelInferRequest."""
    native: Any = native_module()
    message: ScoreMessage | None = None if native is None else native.read_infer_request(data)
    return message
