"""Export of the dense part: traces it with torch.export, runs it, and writes it.

The traced program is run before it is written, with several batch sizes. So an output without a batch
dimension is refused when the model is exported, not when a server computes the first request.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megalith.distributed.dense_parameters import ANCHOR
from megalith.errors import InputError, MegalithError
from megalith.serving.export.model_parts import ModelParts
from megalith.serving.export.program_safety import guard_divisions, write_archive
from megalith.serving.export.signature import (
    LOGITS,
    MAX_OUTPUTS,
    MAX_RANK,
    OUTPUT_DTYPES,
    PROBABILITIES,
    OutputSpec,
)
from megalith.storage.store import StoredFile, checksum

TRACED_SIZE = 3
RUN_SIZES = (5, 1, 2)
"""Batch sizes with which the program is run; the first is the largest."""


@dataclass(frozen=True)
class WrittenProgram:
    """A program on disk, and what it computes."""

    file: StoredFile
    outputs: tuple[OutputSpec, ...]
    joint_rows: bool
    """Whether the outputs of a row depend on the other rows of its batch."""


def export_program(
    parts: ModelParts,
    path: Path,
    *,
    names: Sequence[str] | None = None,
    activations: Mapping[str, str] | None = None,
    joint_rows: bool | None = None,
) -> WrittenProgram:
    """Trace the dense part with torch.export, for any batch size, run it, and write it."""
    dense_part = _DensePart(parts, names, activations)
    model = parts.module
    training = [module for module in model.modules() if module.training]
    # The anchors of collections are not weights of the dense part.
    anchors = [(each, each._parameters.pop(ANCHOR)) for each in parts.collections]
    try:
        model.eval()
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            rows, dense = _inputs(parts, TRACED_SIZE)
            # Any size: torch.export would fix the size of a batch that it saw as 0 or 1.
            any_size = {0: torch.export.Dim("batch", min=0)}
            sizes = {
                name: [any_size] * len(each) if isinstance(each, list) else any_size
                for name, each in rows.items()
            }
            dynamic = (sizes, None if dense is None else any_size)
            program = torch.export.export(dense_part, (rows, dense), dynamic_shapes=dynamic, strict=False)
            traced = program.module(check_guards=False)
            guard_divisions(traced)
            outputs, found_joint = _run(parts, traced, dense_part.names)
            data = write_archive(program)
    except MegalithError:
        raise
    except Exception as error:  # torch raises many types
        raise InputError(
            f"{type(model).__name__} cannot be exported: its dense part must compute tensors from tensors, "
            f"without branches on values ({error})"
        ) from error
    finally:
        for each, anchor in anchors:
            each.register_parameter(ANCHOR, anchor)
        for module in training:
            module.training = True
    path.write_bytes(data)
    file = StoredFile(path.name, len(data), checksum(zlib.crc32(data)))
    return WrittenProgram(file, outputs, found_joint if joint_rows is None else joint_rows)


class _FoundNames:
    """The names of a traced call. Not in the module, whose attributes torch.export restores after a trace."""

    names: Sequence[str] = ()


class _DensePart(nn.Module):
    """The dense part as a module that returns a list of tensors; `names` are known once it has run."""

    def __init__(
        self, parts: ModelParts, names: Sequence[str] | None, activations: Mapping[str, str] | None
    ) -> None:
        super().__init__()
        self.model = parts.module  # its attribute's name begins the names of the weights in the program
        self._parts = parts
        self._given, self._activations = names, activations
        self._found = _FoundNames()

    def forward(self, rows: dict[str, Any], dense: Tensor | None) -> list[Tensor]:
        result = self._parts.run(rows, dense)
        if self._is_logit(result):
            named = {LOGITS: result, PROBABILITIES: torch.sigmoid(result.float())}
        else:
            named = name_tensors(result, self._given)
        named = activate(named, self._activations or {})
        self._found.names = list(named)
        return list(named.values())

    @property
    def names(self) -> Sequence[str]:
        return self._found.names

    def _is_logit(self, result: Any) -> bool:
        """Return whether a `score` returned [B] or [B, 1], and the exporter was not told what it is."""
        if not self._parts.is_scorer or self._given is not None or self._activations:
            return False
        if not isinstance(result, Tensor) or not result.is_floating_point():
            return False
        return result.dim() == 1 or (result.dim() == 2 and result.shape[1] == 1)


def _inputs(parts: ModelParts, size: int) -> tuple[dict[str, Any], Tensor | None]:
    """Return rows and dense values of a size; equal rows for equal positions, whatever the size."""
    random = torch.Generator().manual_seed(0)
    rows: dict[str, Any] = {}
    for output in parts.plan.outputs:
        rows.setdefault(output.name, []).append(
            torch.randn(max(RUN_SIZES), *output.shape, generator=random, device="cpu")
        )
    lists = {layout.name for layout in parts.plan.layouts or () if layout.kind == "none"}
    rows = {
        name: [each[:size] for each in found] if name in lists else found[0][:size]
        for name, found in rows.items()
    }
    for name, feature in parts.masks.items():
        inner = parts.plan.features[feature].combiner.inner  # type: ignore[union-attr]
        rows[name] = torch.ones(size, inner, dtype=torch.bool, device="cpu")
    dense = None
    if parts.num_dense:
        dense = torch.randn(max(RUN_SIZES), parts.num_dense, generator=random, device="cpu")[:size]
    return rows, dense


def _run(parts: ModelParts, module: nn.Module, names: Sequence[str]) -> tuple[tuple[OutputSpec, ...], bool]:
    """Run a program with several sizes; return its outputs, and whether rows depend on each other."""
    found: list[list[Tensor]] = []
    specs: list[tuple[OutputSpec, ...]] = []
    for size in RUN_SIZES:
        tensors: list[Tensor] = module.forward(*_inputs(parts, size))
        specs.append(describe_outputs(dict(zip(names, tensors, strict=True)), size))
        found.append(tensors)
    for other in specs:
        if other != specs[0]:
            changed = next(a.name for a, b in zip(specs[0], other, strict=True) if a != b)
            raise InputError(
                f"export: output {changed!r} has another shape in a batch of another size: only its first "
                "dimension may vary"
            )
    joint = any(
        not torch.allclose(whole[: part.shape[0]].double(), part.double(), 1e-3, 1e-4, equal_nan=True)
        for tensors in found[1:]
        for whole, part in zip(found[0], tensors, strict=True)
    )
    return specs[0], joint


OUTPUT = "output"
"""Name of a tensor that has none; tensors of a tuple are `output_0`, `output_1` and so on."""


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "softmax": lambda values: torch.softmax(values, -1),
    "exp": torch.exp,
    "tanh": torch.tanh,
}


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
