"""The protocol of parameter sync: message headers, positions, and the control calls.

A header travels as gRPC metadata with every message of a publisher; messages of a Monolith client have none.

    metadata key       | value
    -------------------+------------------------------------------------------------------------
    megalith-session   | 32 hex digits; all publishers of one training session share it
    megalith-number    | the number of the session; a server that followed a higher one refuses it
    megalith-publisher | "r/n": publisher r of n
    megalith-sequence  | the sequence number of the message, from 1; absent: not numbered
    megalith-complete  | seconds since 1970; everything trained until then has been sent

A server answers the control calls sync_position, sync_begin and sync_reload with its position, as outputs:

    output             | value
    -------------------+------------------------------------------------------------------------
    session            | the session that the subscriber follows; "" for none
    base               | the id of the save below the pushed rows; "" while rows are being replaced
    sequence, step     | the last sequence number of the asking publisher; the step of the export
    rows_id            | 32 hex digits, new whenever pushed rows were dropped, also by a restart
    layout             | JSON of `ModelLayout`: the part served, its tables and dense weights

Headers and positions are untrusted until validated here. The content of messages is in `push_messages`.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError, RemoteError
from megalith.routing import Router
from megalith.serving.client.channels import Connection
from megalith.serving.export.row_format import RowFormat
from megalith.serving.proto.message_types import PredictRequest
from megalith.serving.proto.tf_tensors import Strings, from_tensor_protos, strings_to_tensor_proto
from megalith.storage.json_codec import parse_json

SESSION, PUBLISHER = "megalith-session", "megalith-publisher"
SEQUENCE, COMPLETE, NUMBER = "megalith-sequence", "megalith-complete", "megalith-number"
# The beginning of the refusal of an older session
NEWER_SESSION = "a newer training session pushes to this model"
WINDOW = 2  # The number of messages of a publisher that may be in flight; they are applied in order
MAX_PUBLISHERS = 65536
MAX_LAYOUT = 1 << 22
MAX_PARTS = 4096  # The maximum number of ps parts of a served model; a publisher watches each of them
MAX_SEQUENCE = 10**15
_SESSION = re.compile(r"[0-9a-f]{32}")
_PUBLISHER = re.compile(r"([0-9]{1,5})/([0-9]{1,5})")
_INTEGER = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class MessageHeader:
    """The sender and the sequence number of a message."""

    session: str  # The session, 32 hex digits
    index: int = 0  # The number of the publisher in the session, from 0
    count: int = 1  # The number of publishers in the session
    sequence: int = 0  # The sequence number of the message; 0 if it has none
    # Everything trained until this time (seconds since 1970) is in the messages up to this one
    complete: float | None = None
    number: int = 0  # The number of the session, which orders sessions of one model; 0: it has none

    def __post_init__(self) -> None:
        if not _SESSION.fullmatch(self.session):
            raise InputError(f"{SESSION} must be 32 hex digits, got {self.session[:100]!r}")
        if not 0 <= self.index < self.count <= MAX_PUBLISHERS:
            raise InputError(f"{PUBLISHER} must be r/n with r below n, got {self.index}/{self.count}")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the gRPC metadata."""
        pairs = [(SESSION, self.session), (PUBLISHER, f"{self.index}/{self.count}")]
        if self.sequence:
            pairs.append((SEQUENCE, str(self.sequence)))
        if self.number:
            pairs.append((NUMBER, str(self.number)))
        if self.complete is not None:
            pairs.append((COMPLETE, repr(self.complete)))
        return tuple(pairs)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> MessageHeader | None:
        """Read a header from gRPC metadata."""
        if SESSION not in metadata:
            return None
        publisher = _PUBLISHER.fullmatch(metadata.get(PUBLISHER, "0/1"))
        if publisher is None:
            raise InputError(f"{PUBLISHER} must be r/n, got {metadata[PUBLISHER][:100]!r}")
        sequence, number = metadata.get(SEQUENCE, "0"), metadata.get(NUMBER, "0")
        for key, value in ((SEQUENCE, sequence), (NUMBER, number)):
            if not _INTEGER.fullmatch(value):
                raise InputError(f"{key} must be an integer, got {value[:100]!r}")
        complete = None
        if COMPLETE in metadata:
            try:
                complete = float(metadata[COMPLETE])
            except ValueError:
                complete = math.nan
            if not math.isfinite(complete):
                raise InputError(f"{COMPLETE} must be seconds since 1970, got {metadata[COMPLETE][:100]!r}")
        return cls(
            metadata[SESSION], int(publisher[1]), int(publisher[2]), int(sequence), complete, int(number)
        )


class SequenceCounter:
    """Numbers the messages to a target, each number once per session. Safe to share between threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.last = 0

    def next(self) -> int:
        """Return the number of the next message."""
        with self._lock:
            self.last += 1
            return self.last

    def skip(self, used: int) -> None:
        """Continue after a number that is known to be used."""
        with self._lock:
            self.last = max(self.last, used)


@dataclass(frozen=True)
class TableLayout:
    """A served table: the number of columns, the router that assigns ids to parts, and its codes, if any."""

    dim: int
    router: Router
    codes: RowFormat | None = None


@dataclass(frozen=True)
class ModelLayout:
    """What a server serves of a model."""

    part: str = "standalone"  # One of "standalone", "entry", or "ps_0" and so on
    sub_graph_num: int = 0  # The number of ps parts of the model
    tables: Mapping[str, TableLayout] = field(default_factory=dict)  # The served tables
    dense: frozenset[str] = frozenset()  # The names of the dense weights

    @property
    def takes_rows(self) -> bool:
        """Whether the part holds rows."""
        return self.part != "entry"

    @property
    def codes(self) -> dict[str, RowFormat]:
        """The formats of the tables with codes."""
        return {name: each.codes for name, each in self.tables.items() if each.codes is not None}

    def keep(self, table: str, ids: Tensor) -> Tensor:
        """Select the ids that belong to this part."""
        # ids: the ids, int64 [n]; returns: some of the ids in their order, int64 [k].
        if table not in self.tables or not self.takes_rows:
            return ids[:0]
        if not self.part.startswith("ps_"):
            return ids
        return ids[self.tables[table].router.owner(ids) == int(self.part.removeprefix("ps_"))]

    def to_json(self) -> bytes:
        """Return the wire format."""
        tables = {}
        for name, each in self.tables.items():
            to = each.router
            tables[name] = [each.dim, to.mode, to.num_shards, to.block_size, to.skip_first]
        return json.dumps(
            {
                "part": self.part,
                "sub_graph_num": self.sub_graph_num,
                "tables": tables,
                "dense": sorted(self.dense),
                "codes": {name: format.to_data() for name, format in self.codes.items()},
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ModelLayout:
        """Read the wire format."""
        try:
            found = parse_json(data, max_bytes=MAX_LAYOUT)
            part = found["part"]
            if not isinstance(part, str) or not re.fullmatch(r"standalone|entry|ps_[0-9]{1,9}", part):
                raise ValueError(f"part {part!r}")
            count = found["sub_graph_num"]
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
                raise ValueError(f"sub_graph_num {count!r}")
            tables = {}
            codes = {name: RowFormat.from_data(each) for name, each in found.get("codes", {}).items()}
            for name, (dim, mode, shards, block, skip) in found["tables"].items():
                if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= 2**20:
                    raise ValueError(f"table {name!r} with {dim!r} columns")
                router = Router(mode, shards, block_size=block, skip_first=bool(skip))
                format = codes.pop(name, None)
                if format is not None and format.dim != dim:
                    raise ValueError(f"codes of {format.dim} columns for table {name!r}")
                tables[name] = TableLayout(dim, router, format)
            if codes:
                raise ValueError(f"codes of unknown table {min(codes)!r}")
            dense = frozenset(map(str, found["dense"]))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError(f"malformed layout of a server: {str(error)[:200]}") from None
        return cls(part, count, tables, dense)


@dataclass(frozen=True)
class Position:
    """The position of a subscriber.

    Args:
        session: The session it follows; "" for none.
        base: The id of the save below the pushed rows; "" while all rows are being replaced.
        sequence: The last sequence number of the asking publisher.
        step: The training step of the served export.
        layout: What is served.
        rows_id: Identifies the set of pushed rows: it is new whenever they were dropped. A client without a
            session learns from it that what it pushed is gone.
    """

    session: str
    base: str
    sequence: int
    step: int
    layout: ModelLayout
    rows_id: str = ""

    def outputs(self) -> dict[str, Tensor | Strings]:
        """Return the outputs of a control signature."""
        return {
            "session": string_array(self.session),
            "base": string_array(self.base),
            "sequence": torch.tensor([self.sequence], device="cpu"),
            "step": torch.tensor([self.step], device="cpu"),
            "layout": _bytes_array(self.layout.to_json()),
            "rows_id": string_array(self.rows_id),
        }

    @classmethod
    def read(cls, outputs: Mapping[str, Tensor | Strings]) -> Position:
        """Read the outputs of a control signature.

        Args:
            outputs: The outputs by name.

        Returns:
            The position.

        Raises:
            InputError: An output is missing or malformed; the message names it.
        """
        sequence = _read_int(outputs, "sequence")
        if not 0 <= sequence <= MAX_SEQUENCE:
            raise InputError(f"'sequence' must be 0 to {MAX_SEQUENCE}, got {sequence}")
        return cls(
            read_string(outputs, "session"),
            read_string(outputs, "base"),
            sequence,
            _read_int(outputs, "step"),
            ModelLayout.from_json(_read_bytes(outputs, "layout")),
            read_string(outputs, "rows_id"),
        )


def string_array(text: str) -> Strings:
    """Encode a string."""
    return _bytes_array(text.encode())


def read_string(tensors: Mapping[str, Tensor | Strings], name: str, longest: int = 4096) -> str:
    """Read a tensor that holds one string."""
    try:
        return _read_bytes(tensors, name)[:longest].decode()
    except UnicodeDecodeError:
        raise InputError(f"{name!r} must be text") from None


def _bytes_array(data: bytes) -> Strings:
    return np.array([data], dtype=object)


def _read_bytes(tensors: Mapping[str, Tensor | Strings], name: str) -> bytes:
    value = tensors.get(name)
    if value is None or isinstance(value, Tensor) or value.size != 1:
        raise InputError(f"{name!r} must be one string")
    data = value.reshape(-1)[0]
    assert isinstance(data, bytes)
    return data


def _read_int(tensors: Mapping[str, Tensor | Strings], name: str) -> int:
    value = tensors.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.numel() != 1:
        raise InputError(f"{name!r} must be one int64")
    return int(value)


MAX_ANSWER_BYTES = 1 << 23  # The maximum number of bytes of the tensors of an answer


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
        request.inputs["base"].CopyFrom(strings_to_tensor_proto(string_array(base)))
    metadata = () if header is None else header.metadata()
    answer = connection.predict(request, timeout=timeout, metadata=metadata)
    if not answer.outputs:
        raise RemoteError(
            f"{connection.address}: the answer to {signature} has no outputs: it is not a server of Megalith",
            code="UNIMPLEMENTED",
        )
    return Position.read(from_tensor_protos(answer.outputs, max_bytes=MAX_ANSWER_BYTES))
