"""ModelParts: what an export takes from a model, its collections and its dense part.

Two kinds of models are exported. An `Exportable` has one collection and a `score`. Any other `nn.Module` is
called as it is: its EmbeddingCollections are replaced by stand-ins for the time of the trace, which return
the rows that the program gets as inputs. So the program holds everything except the lookups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from types import MappingProxyType
from typing import Any, NoReturn, Protocol

from torch import Tensor, nn

from megalith.errors import InputError
from megalith.nn import EmbeddingCollection, Layout, Slice
from megalith.nn.feature_plan import FeaturePlan
from megalith.ops import checks
from megalith.shards import Shards
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
