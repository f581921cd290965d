"""Stamps: what a publisher writes beside each message, and what a subscriber says of where it stands.

A stamp travels as gRPC metadata. A Monolith client sends none. The position is the outputs of the control
signatures; both are hostile until read here.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megalith.errors import InputError
from megalith.routing import Router
from megalith.serving.proto.tf_tensors import Strings

SESSION, PUBLISHER = "megalith-session", "megalith-publisher"
SEQUENCE, COMPLETE = "megalith-sequence", "megalith-complete"
WINDOW = 2
"""Messages of a publisher that may be under way at once; they are applied in their order all the same."""
MAX_PUBLISHERS = 65536
MAX_LAYOUT = 1 << 22
MAX_PARTS = 4096
"""ps parts of a served model; a publisher looks for each of them."""
MAX_SEQUENCE = 10**15
_SESSION = re.compile(r"[0-9a-f]{32}")
_PUBLISHER = re.compile(r"([0-9]{1,5})/([0-9]{1,5})")
_WHOLE = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class MessageHeader:
    """Who sent a message: which of `count` publishers of a session; the how-manieth it is (0: not said).

    complete: everything trained up to then (seconds since 1970) is in the messages up to this one.
    """

    session: str
    index: int = 0
    count: int = 1
    sequence: int = 0
    complete: float | None = None

    def __post_init__(self) -> None:
        if not _SESSION.fullmatch(self.session):
            raise InputError(f"{SESSION} must be 32 hex digits, got {self.session[:100]!r}")
        if not 0 <= self.index < self.count <= MAX_PUBLISHERS:
            raise InputError(f"{PUBLISHER} must be r/n with r below n, got {self.index}/{self.count}")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """As gRPC metadata."""
        pairs = [(SESSION, self.session), (PUBLISHER, f"{self.index}/{self.count}")]
        if self.sequence:
            pairs.append((SEQUENCE, str(self.sequence)))
        if self.complete is not None:
            pairs.append((COMPLETE, repr(self.complete)))
        return tuple(pairs)

    @classmethod
    def read(cls, metadata: Mapping[str, str]) -> MessageHeader | None:
        """From gRPC metadata; None without a session. Raises InputError naming the key that is wrong."""
        if SESSION not in metadata:
            return None
        publisher = _PUBLISHER.fullmatch(metadata.get(PUBLISHER, "0/1"))
        if publisher is None:
            raise InputError(f"{PUBLISHER} must be r/n, got {metadata[PUBLISHER][:100]!r}")
        sequence = metadata.get(SEQUENCE, "0")
        if not _WHOLE.fullmatch(sequence):
            raise InputError(f"{SEQUENCE} must be a whole number, got {sequence[:100]!r}")
        complete = None
        if COMPLETE in metadata:
            try:
                complete = float(metadata[COMPLETE])
            except ValueError:
                complete = math.nan
            if not math.isfinite(complete):
                raise InputError(f"{COMPLETE} must be seconds since 1970, got {metadata[COMPLETE][:100]!r}")
        return cls(metadata[SESSION], int(publisher[1]), int(publisher[2]), int(sequence), complete)


@dataclass(frozen=True)
class TableLayout:
    """A served table: its columns, and which part has which id."""

    dim: int
    router: Router


@dataclass(frozen=True)
class ModelLayout:
    """Which part of a model a server has: "standalone", "entry" or "ps_0" ..., of how many ps parts."""

    part: str = "standalone"
    sub_graph_num: int = 0
    tables: Mapping[str, TableLayout] = field(default_factory=dict)
    dense: frozenset[str] = frozenset()
    """The names of its dense weights."""

    @property
    def takes_rows(self) -> bool:
        """Whether rows are for it."""
        return self.part != "entry"

    def keep(self, table: str, ids: Tensor) -> Tensor:
        """The ids of a table that are this part's."""
        if table not in self.tables or not self.takes_rows:
            return ids[:0]
        if not self.part.startswith("ps_"):
            return ids
        return ids[self.tables[table].router.owner(ids) == int(self.part.removeprefix("ps_"))]

    def to_json(self) -> bytes:
        """As it travels."""
        tables = {
            name: [
                each.dim,
                each.router.mode,
                each.router.num_shards,
                each.router.block_size,
                each.router.skip_first,
            ]
            for name, each in self.tables.items()
        }
        return json.dumps(
            {
                "part": self.part,
                "sub_graph_num": self.sub_graph_num,
                "tables": tables,
                "dense": sorted(self.dense),
            }
        ).encode()

    @classmethod
    def from_json(cls, data: bytes) -> ModelLayout:
        """Raises InputError for anything else."""
        try:
            if len(data) > MAX_LAYOUT:
                raise ValueError(f"{len(data)} bytes")
            found: Any = json.loads(data)
            part = found["part"]
            if not isinstance(part, str) or not re.fullmatch(r"standalone|entry|ps_[0-9]{1,9}", part):
                raise ValueError(f"part {part!r}")
            count = found["sub_graph_num"]
            if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= MAX_PARTS:
                raise ValueError(f"sub_graph_num {count!r}")
            tables = {}
            for name, (dim, mode, shards, block, skip) in found["tables"].items():
                if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= 2**20:
                    raise ValueError(f"table {name!r} of {dim!r} columns")
                tables[name] = TableLayout(dim, Router(mode, shards, block_size=block, skip_first=bool(skip)))
            dense = frozenset(map(str, found["dense"]))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise InputError(f"a server's layout cannot be read: {str(error)[:200]}") from None
        return cls(part, count, tables, dense)


@dataclass(frozen=True)
class Position:
    """Where a subscriber stands. base: the save its rows are of without what was pushed; "": being replaced.

    session: of the publishers it follows, "" for none. sequence: of the asking publisher's last message.
    """

    session: str
    base: str
    sequence: int
    step: int
    layout: ModelLayout

    def outputs(self) -> dict[str, Tensor | Strings]:
        """As outputs of a control signature."""
        return {
            "session": string(self.session),
            "base": string(self.base),
            "sequence": torch.tensor([self.sequence]),
            "step": torch.tensor([self.step]),
            "layout": _string(self.layout.to_json()),
        }

    @classmethod
    def read(cls, outputs: Mapping[str, Tensor | Strings]) -> Position:
        """Raises InputError naming what is missing or wrong."""
        sequence = _read_whole(outputs, "sequence")
        if not 0 <= sequence <= MAX_SEQUENCE:
            raise InputError(f"'sequence' must be 0 to {MAX_SEQUENCE}, got {sequence}")
        return cls(
            read_string(outputs, "session"),
            read_string(outputs, "base"),
            sequence,
            _read_whole(outputs, "step"),
            ModelLayout.from_json(_read_bytes(outputs, "layout")),
        )


def string(text: str) -> Strings:
    """A string as a tensor of one."""
    return _string(text.encode())


def read_string(tensors: Mapping[str, Tensor | Strings], name: str, longest: int = 4096) -> str:
    """The string of a tensor of one; raises InputError if it is none."""
    try:
        return _read_bytes(tensors, name)[:longest].decode()
    except UnicodeDecodeError:
        raise InputError(f"{name!r} must be text") from None


def _string(data: bytes) -> Strings:
    return np.array([data], dtype=object)


def _read_bytes(tensors: Mapping[str, Tensor | Strings], name: str) -> bytes:
    value = tensors.get(name)
    if value is None or isinstance(value, Tensor) or value.size != 1:
        raise InputError(f"{name!r} must be one string")
    data = value.reshape(-1)[0]
    assert isinstance(data, bytes)
    return data


def _read_whole(tensors: Mapping[str, Tensor | Strings], name: str) -> int:
    value = tensors.get(name)
    if not isinstance(value, Tensor) or value.dtype != torch.int64 or value.numel() != 1:
        raise InputError(f"{name!r} must be one whole number")
    return int(value)
