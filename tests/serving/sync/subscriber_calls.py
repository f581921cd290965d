"""Messages to a subscriber, and what it serves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megalith.serving.export.servable import Servable
from megalith.serving.sync.protocol import MessageHeader, Position, string_array
from megalith.serving.sync.subscriber import Subscriber
from tests.serving.sync_support import SESSION

OTHER = "f" * 32


def header(sequence: int = 0, *, session: str = SESSION, **options: Any) -> dict[str, str]:
    return dict(MessageHeader(session, sequence=sequence, **options).metadata())


def user(*ids: int, value: float) -> dict[str, Tensor]:
    return {"user_id": torch.tensor(ids), "user_value": torch.full((len(ids), 5), value)}


def begin(subscriber: Subscriber, base: str = "one", sequence: int = 1, **options: Any) -> Position:
    outputs = subscriber.handle("sync_begin", {"base": string_array(base)}, header(sequence, **options))
    return Position.read(outputs)


def push(subscriber: Subscriber, inputs: Mapping[str, Any], sequence: int, **options: Any) -> Any:
    return subscriber.handle("hashtable_assign", inputs, header(sequence, **options))


def first(servable: Servable, id: int) -> float:
    return float(servable.lookup("user", torch.tensor([id]))[0, 0])
