"""Program export: takes the dense part of a model, traces it with torch.export, runs it, and writes it.

Two kinds of models are exported. An `Exportable` has one collection and a `score`. Any other `nn.Module` is
called as it is. During the trace its EmbeddingCollections are replaced by stand-ins, which return the rows
that the program gets as inputs. So the program contains everything except the lookups.

The traced program is run with several batch sizes before it is written. So an output without a batch
dimension is refused when the model is exported, not when a server computes the first request.
"""

from __future__ import annotations

import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor, nn

from megalith.distributed.dense_parameters import ANCHOR
from megalith.errors import InputError, MegalithError
from megalith.nn import EmbeddingCollection, Layout, Slice
from megalith.nn.compiled_batch import FeaturePlan
from megalith.ops import checks
from megalith.serving.export.compiled_program import write_library
from megalith.serving.export.program_safety import write_archive
from megalith.serving.export.signature import (
    LOGITS,
    MAX_OUTPUTS,
    MAX_RANK,
    OUTPUT_DTYPES,
    PROBABILITIES,
    OutputSpec,
)
from megalith.shards import Shards
from megalith.storage.store import StoredFile, checksum
from megalith.table import TableConfig

_PARTS = ("embeddings", "masks", "num_dense", "score")
Call = Callable[[nn.Module, dict[str, Any], Tensor | None], Any]


class Exportable(Protocol):
    """A model with a dense part of its own, such as a `megalith.models.Model`."""

    embeddings: EmbeddingCollection
    masks: Mapping[str, str]
    num_dense: int

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Any:
        """Compute the outputs; traced by torch.export, with any batch size B."""
        # rows: embeddings by name of the feature or layout, [B, ...], and masks, bool [B, n]; dense: dense
        # values, float32 [B, num_dense].


class ServingModule:
    """Any `nn.Module` with EmbeddingCollections, and how it is called, for `export_model`.

    The module is called with a dict of features, which it must pass to its collections: a server has the rows
    of ids, not the ids, so the module must not read the columns itself. Every collection must be called once.

    Example: `export_model(ServingModule(model, num_dense=3), "exports/movies", name="movies")`.

    Args:
        module: The model.
        num_dense: Number of float values of each row that the module takes in addition to the features.
        call: Calls the module with the features by name and the dense values float32 [B, num_dense]. None:
            `module(features)`, or `module(features, dense)` if `num_dense` is above 0.

    Raises:
        InputError: The module has no EmbeddingCollection, or an argument has a wrong type.
    """

    def __init__(self, module: nn.Module, *, num_dense: int = 0, call: Call | None = None) -> None:
        if not isinstance(module, nn.Module):
            raise InputError(f"export: expected a model or Shards, got {checks.kind(module)}")
        checks.integer(num_dense, "ServingModule: num_dense", least=0)
        checks.callback(call, "ServingModule: call")
        self.module = module
        self.num_dense = num_dense
        self.collections = [each for each in module.modules() if isinstance(each, EmbeddingCollection)]
        if not self.collections:
            raise InputError(f"export: {type(module).__name__} has no EmbeddingCollection")
        self._call: Call = call or _default_call


def _default_call(module: nn.Module, features: dict[str, Any], dense: Tensor | None) -> Any:
    return module(features) if dense is None else module(features, dense)


class ModelParts:
    """The collections and the dense part of a model."""

    def __init__(self, model: Any) -> None:
        self.is_scorer = isinstance(model, nn.Module) and all(hasattr(model, name) for name in _PARTS)
        if self.is_scorer:
            self.module: nn.Module = model
            self.num_dense: int = model.num_dense
            self.masks: Mapping[str, str] = model.masks
            self.collections = [_only_collection(model)]
            self._run: Callable[[dict[str, Any], Tensor | None], Any] = lambda rows, dense: model.score(
                rows, dense
            )
            return
        if isinstance(model, EmbeddingCollection):
            raise InputError(
                "export: expected a model or Shards, got EmbeddingCollection; to export its rows alone, pass "
                "its `shards`"
            )
        served = model if isinstance(model, ServingModule) else ServingModule(model)
        self.module, self.num_dense, self.masks = served.module, served.num_dense, MappingProxyType({})
        self.collections = served.collections
        self._run = lambda rows, dense: _run_module(served, rows, dense)

    @property
    def step(self) -> int:
        """The number of applied steps."""
        return max(each.global_step for each in self.collections)

    @cached_property
    def shards(self) -> dict[str, Shards]:
        """The shards of each table; raise InputError if two collections have a table of one name."""
        found: dict[str, Shards] = {}
        for collection in self.collections:
            for table in collection.shards.configs:
                if found.setdefault(table, collection.shards) is not collection.shards:
                    raise InputError(
                        f"export: two EmbeddingCollections have a table {table!r}: give them different names"
                    )
        return found

    @cached_property
    def plan(self) -> FeaturePlan:
        """The features and layouts of all collections."""
        if len(self.collections) == 1:
            return self.collections[0].plan
        features = [feature for collection in self.collections for feature in collection.features]
        names = [feature.name for feature in features]
        for name in names:
            if names.count(name) > 1:
                raise InputError(
                    f"export: two EmbeddingCollections have a feature {name!r}: give them different names"
                )
        layouts = None
        if any(collection.plan.layouts is not None for collection in self.collections):
            layouts = [each for collection in self.collections for each in _layouts_of(collection)]
        configs: dict[str, TableConfig] = {}
        for collection in self.collections:
            configs |= collection.configs
        return FeaturePlan(features, layouts, configs)

    def routing(self, table: str) -> Mapping[str, Any]:
        """Return the routing that a loaded checkpoint recorded for the tables of a table's collection."""
        owner = next(each for each in self.collections if table in each.configs)
        return owner.checkpoint_state.routing

    def run(self, rows: dict[str, Any], dense: Tensor | None) -> Any:
        """Compute the outputs from rows, as the traced program does."""
        # dense: float32 [B, num_dense].
        return self._run(rows, dense)


def _only_collection(model: Any) -> EmbeddingCollection:
    collections = [each for each in model.modules() if isinstance(each, EmbeddingCollection)]
    if len(collections) != 1 or collections[0] is not model.embeddings:
        raise InputError(
            f"export: {type(model).__name__} has {len(collections)} EmbeddingCollections; a model with "
            "`score` must have exactly one, `embeddings`; to export its `forward`, pass ServingModule(model)"
        )
    only: EmbeddingCollection = collections[0]
    return only


def _layouts_of(collection: EmbeddingCollection) -> list[Layout]:
    """Return the layouts of a collection; without any, one for each feature, with the same tensor."""
    if collection.plan.layouts is not None:
        return list(collection.plan.layouts)
    dims = {name: config.dim for name, config in collection.configs.items()}
    return [Layout(each.name, [Slice(each.name, 0, dims[each.table])]) for each in collection.features]


# ---- stand-ins for collections


class _Column:
    """A feature of the traced call; the module may pass it on, but not read it."""

    def __init__(self, feature: str) -> None:
        object.__setattr__(self, "_feature", feature)

    def __getattr__(self, name: str) -> NoReturn:
        _refuse_read(self._feature)

    def __len__(self) -> NoReturn:
        _refuse_read(self._feature)

    def __getitem__(self, _: object) -> NoReturn:
        _refuse_read(self._feature)


def _refuse_read(feature: str) -> NoReturn:
    raise InputError(
        f"export: the model reads feature {feature!r} itself; servers have the rows of its ids only, so pass "
        "the feature to an EmbeddingCollection and compute from the result (such as the batch size)"
    )


def _run_module(served: ServingModule, rows: dict[str, Any], dense: Tensor | None) -> Any:
    features = {
        feature.name: _Column(feature.name) for each in served.collections for feature in each.features
    }
    with _stand_ins(served.collections, features, rows):
        return served._call(served.module, dict(features), dense)


@contextmanager
def _stand_ins(
    collections: list[EmbeddingCollection], features: Mapping[str, _Column], rows: Mapping[str, Any]
) -> Iterator[None]:
    """Let collections return given rows; raise InputError unless each is called once with the features."""
    calls = dict.fromkeys(collections, 0)

    def stand_in(collection: EmbeddingCollection) -> Callable[..., dict[str, Any]]:
        def forward(batch: Any, *, time: float | None = None) -> dict[str, Any]:
            calls[collection] += 1
            if calls[collection] > 1:
                raise InputError(
                    "export: the model calls an EmbeddingCollection twice; a server looks up every feature "
                    "once, so use one call with all features"
                )
            for feature in collection.features:
                if not isinstance(batch, Mapping) or batch.get(feature.name) is not features[feature.name]:
                    raise InputError(
                        f"export: the model must pass feature {feature.name!r} to its EmbeddingCollection "
                        "unchanged and under its own name"
                    )
            return {output.name: rows[output.name] for output in collection.plan.outputs}

        return forward

    try:
        for collection in collections:
            collection.forward = stand_in(collection)  # type: ignore[method-assign]
        yield
        for collection in collections:
            if not calls[collection]:
                names = ", ".join(feature.name for feature in collection.features)
                raise InputError(f"export: the model does not call its EmbeddingCollection of {names[:200]}")
    finally:
        for collection in collections:
            collection.__dict__.pop("forward", None)


TRACED_SIZE = 3
RUN_SIZES = (5, 1, 2)  # Batch sizes with which the program is run; the first is the largest


@dataclass(frozen=True)
class WrittenProgram:
    """A program on disk, and what it computes."""

    file: StoredFile
    outputs: tuple[OutputSpec, ...]
    joint_rows: bool  # Whether the outputs of a row depend on the other rows of its batch


def export_program(
    parts: ModelParts,
    path: Path,
    *,
    names: Sequence[str] | None = None,
    activations: Mapping[str, str] | None = None,
    joint_rows: bool | None = None,
    compile: bool = False,
) -> WrittenProgram:
    """Trace the dense part with torch.export, for any batch size, run it, and write it, also compiled."""
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
            outputs, found_joint = _run(parts, traced, dense_part.found.names)
            data = write_archive(program)
            if compile:
                write_library(program, data, (rows, dense), path.parent)
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


class _DensePart(nn.Module):
    """The dense part as a module that returns a list of tensors; `found.names` are known once it has run."""

    def __init__(
        self, parts: ModelParts, names: Sequence[str] | None, activations: Mapping[str, str] | None
    ) -> None:
        super().__init__()
        self.model = parts.module  # its attribute's name begins the names of the weights in the program
        self._parts = parts
        self._given, self._activations = names, activations
        # Not in the module itself, whose attributes torch.export restores after a trace.
        self.found = SimpleNamespace(names=())

    def forward(self, rows: dict[str, Any], dense: Tensor | None) -> list[Tensor]:
        result = self._parts.run(rows, dense)
        if self._is_logit(result):
            named = {LOGITS: result, PROBABILITIES: torch.sigmoid(result.float())}
        else:
            named = name_tensors(result, self._given)
        named = activate(named, self._activations or {})
        self.found.names = list(named)
        return list(named.values())

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


OUTPUT = "output"  # Name of a tensor that has none; tensors of a tuple are `output_0`, `output_1` and so on


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
