"""The payloads of all accepted peers under the keys that earlier consumers know, read when asked for.

For each parameter NAME: `NAMEidxs` and `NAMEvals` (uint8), `NAMEquant_params`; each a sequence with one
entry per peer in canonical order. Nothing is held: an entry is read from its payload at each access.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor

from megalith.errors import UnknownNameError
from megalith.gather.packing import unpack_codes
from megalith.gather.payload import Payload
from megalith.gather.schema import ParameterSpec, Schema

QuantParams = tuple[Tensor, float, int, Tensor, torch.dtype]


class PerPeer(Sequence[Any]):
    """One entry per peer, made when asked for."""

    def __init__(self, payloads: Sequence[Payload], read: Callable[[Payload], Any]) -> None:
        self._payloads = payloads
        self._read = read

    def __len__(self) -> int:
        return len(self._payloads)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self._read(payload) for payload in self._payloads[index]]
        return self._read(self._payloads[index])


class StateView(Mapping[str, PerPeer]):
    """A mapping, and an object with the same names as attributes."""

    def __init__(self, schema: Schema, payloads: Sequence[Payload]) -> None:
        self._payloads = payloads
        self._readers: dict[str, Callable[[Payload], Any]] = {}
        for number, spec in enumerate(schema.parameters):
            self._readers[spec.name + "idxs"] = _indices(number, spec)
            self._readers[spec.name + "vals"] = _codes(number, spec)
            self._readers[spec.name + "quant_params"] = _settings(number, spec)

    def __getitem__(self, key: str) -> PerPeer:
        if key not in self._readers:
            raise UnknownNameError(
                f"unknown key {key!r}: keys are a parameter's name and idxs, vals or quant_params"
            )
        return PerPeer(self._payloads, self._readers[key])

    def __getattr__(self, key: str) -> PerPeer:
        if key.startswith("_") or key not in self._readers:
            raise AttributeError(key)
        return self[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._readers)

    def __len__(self) -> int:
        return len(self._readers)


def _indices(number: int, spec: ParameterSpec) -> Callable[[Payload], Tensor]:
    return lambda payload: payload.indices(number, 0, spec.rows).flatten()


def _codes(number: int, spec: ParameterSpec) -> Callable[[Payload], Tensor]:
    shape = (spec.bands[1], spec.keep) if len(spec.shape) < 2 else (*spec.bands, spec.keep)
    return lambda payload: unpack_codes(payload.codes(number, 0, spec.rows), spec.keep, spec.bits).reshape(
        shape
    )


def _settings(number: int, spec: ParameterSpec) -> Callable[[Payload], QuantParams]:
    return lambda payload: (
        torch.zeros(()),
        1.0,
        spec.bins // 2,
        payload.lookup(number),
        torch.float32,
    )
