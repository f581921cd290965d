"""Outputs of an exported model: their names, dtypes and shapes, and the activations applied to them.

A model returns a tensor, a list or tuple of tensors, or a dict of tensors by name. The exporter gives each a
name and traces its activation into the program, so that a server only returns what the program computes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalith.errors import InputError

LOGITS, PROBABILITIES = "logits", "probabilities"
"""Outputs of a model whose `score` returns one logit for each row."""
OUTPUT = "output"
"""Name of a tensor that has none; tensors of a tuple are `output_0`, `output_1` and so on."""
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda values: torch.softmax(values, -1),
    "exp": torch.exp,
    "tanh": torch.tanh,
}
OUTPUT_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "int8": torch.int8,
    "int16": torch.int16,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "bool": torch.bool,
}
MAX_OUTPUTS, MAX_RANK, MAX_VALUES = 256, 8, 1 << 24
"""Limits of a model: outputs, dimensions of one, and values for each row."""


@dataclass(frozen=True)
class OutputSpec:
    """An output: a tensor [B, *shape]."""

    name: str
    dtype: str = "float32"
    """One of OUTPUT_DTYPES."""
    shape: tuple[int, ...] = ()
    """The sizes after the batch dimension."""


LOGIT_OUTPUTS = (OutputSpec(LOGITS), OutputSpec(PROBABILITIES))
"""The outputs of exports of format version 1."""


def name_tensors(result: Any, names: Sequence[str] | None) -> dict[str, Any]:
    """Give names to what a model returns."""
    if isinstance(result, Mapping):
        if names is not None:
            raise InputError("export: the model names its outputs itself, so `outputs` must not be given")
        named = dict(result)
    else:
        values = list(result) if isinstance(result, list | tuple) else [result]
        if names is None:
            single = not isinstance(result, list | tuple)
            names = [OUTPUT] if single else [f"{OUTPUT}_{k}" for k in range(len(values))]
        if len(names) != len(values) or len(set(names)) != len(names):
            raise InputError(
                f"export: `outputs` must have a different name for each of the model's {len(values)} tensors"
            )
        named = dict(zip(names, values, strict=True))
    if not 1 <= len(named) <= MAX_OUTPUTS:
        raise InputError(f"export: the model returns {len(named)} outputs, not 1 to {MAX_OUTPUTS}")
    for name, value in named.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 1000 or not name.isprintable():
            raise InputError(f"export: the name of an output must be printable text, not {repr(name)[:100]}")
        if not isinstance(value, Tensor):
            raise InputError(
                f"export: output {name!r} must be a tensor, got {type(value).__name__}; return a tensor, a "
                "tuple of tensors, or a dict of tensors by name"
            )
    return named


def activate(named: Mapping[str, Tensor], activations: Mapping[str, str]) -> dict[str, Tensor]:
    """Apply activations, and turn half precision into float32."""
    for name in activations:
        if name not in named:
            raise InputError(
                f"export: activations: the model has no output {name!r}; it has {', '.join(named)}"
            )
    result = {}
    for name, tensor in named.items():
        value = tensor.float() if tensor.dtype in (torch.float16, torch.bfloat16) else tensor
        if value.dtype not in OUTPUT_DTYPES.values():
            raise InputError(f"export: output {name!r} has dtype {value.dtype}, which servers do not return")
        result[name] = ACTIVATIONS[activations[name]](value) if name in activations else value
    return result


def describe_outputs(named: Mapping[str, Tensor], size: int) -> tuple[OutputSpec, ...]:
    """Describe the outputs of one run of a program."""
    known = {dtype: text for text, dtype in OUTPUT_DTYPES.items()}
    specs = []
    for name, tensor in named.items():
        if tensor.dim() < 1 or tensor.dim() > MAX_RANK or tensor.shape[0] != size:
            raise InputError(
                f"export: output {name!r} is {list(tensor.shape)} for a batch of {size} rows: the first "
                "dimension of every output must be the batch"
            )
        specs.append(OutputSpec(name, known[tensor.dtype], tuple(tensor.shape[1:])))
    return tuple(specs)


def read_output(data: Mapping[str, Any]) -> OutputSpec:
    """Validate the description of an output."""
    name, dtype, shape = data["name"], data["dtype"], data["shape"]
    if not isinstance(name, str) or not 1 <= len(name) <= 1000:
        raise ValueError(f"the name of an output must be a string, got {repr(name)[:100]}")
    if not isinstance(dtype, str) or dtype not in OUTPUT_DTYPES:
        raise ValueError(f"output {name!r} has dtype {repr(dtype)[:100]}")
    if not isinstance(shape, list) or len(shape) >= MAX_RANK:
        raise ValueError(f"output {name!r} has shape {repr(shape)[:100]}")
    values = 1
    for size in shape:
        if isinstance(size, bool) or not isinstance(size, int) or not 0 <= size <= MAX_VALUES:
            raise ValueError(f"output {name!r} has shape {repr(shape)[:100]}")
        values *= max(1, size)
    if values > MAX_VALUES:
        raise ValueError(f"output {name!r} has {values} values for each row, more than {MAX_VALUES}")
    return OutputSpec(name, dtype, tuple(shape))
