"""EmbeddingBagCollection and EmbeddingCollection with TorchRec's arguments and results.

Each is a `megalith.EmbeddingCollection`, so checkpoints, ranks, freezing and policies work as there. What
they add: TorchRec's configs become tables, a KeyedJaggedTensor becomes columns, and the result has the class
that stands next to the class of the input: TorchRec's own KeyedTensor for TorchRec's own KeyedJaggedTensor.
TorchRec is never imported.

The optimizer is an argument, or comes from `apply_optimizer_in_backward`, which is called after construction:

    state       optimizer                                        tables
    open        not known                                        none; a use of the tables raises UsageError
    applied     that of apply_optimizer_in_backward              created at the first use
    given       the argument `optimizer`                         as in megalith.EmbeddingCollection
"""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from math import sqrt
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from megalith.compat.torchrec import jagged_tensor
from megalith.distributed.dense_parameters import ANCHOR
from megalith.errors import InputError, UnknownNameError, UsageError
from megalith.nn import EmbeddingCollection as Tables
from megalith.nn import Feature, Layout, Mean, Slice, Sum
from megalith.nn.collection import StartedBatch
from megalith.nn.compiled_batch import CompiledBatch, FeaturePlan
from megalith.ops import checks
from megalith.ragged import Ragged
from megalith.shards import Lookup, Shards
from megalith.table import (
    SGD,
    Adagrad,
    Adam,
    Constant,
    Initializer,
    Normal,
    Ones,
    Optimizer,
    RowWiseAdagrad,
    TableConfig,
    Uniform,
    Zeros,
)


class PoolingType(Enum):
    """How the rows of an example are reduced."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


@dataclass
class EmbeddingConfig:
    """A table, with TorchRec's names. TorchRec's own configs are accepted as well.

    Args:
        num_embeddings: Only the default of the initial rows depends on it: the table grows, and takes any id.
        embedding_dim: Number of weights of a row.
        name: Name of the table.
        data_type: "FP32", "FP16" or "BF16", or the member of TorchRec's DataType.
        feature_names: The keys that are looked up in the table; without any, its name.
        weight_init_max: Largest weight of an initial row; None: sqrt(1 / num_embeddings).
        weight_init_min: Smallest weight of an initial row.
        init_fn: One of uniform_, normal_, constant_, zeros_ and ones_ of torch.nn.init, or a partial of it.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: Any = "FP32"
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    init_fn: Any = None


@dataclass
class EmbeddingBagConfig(EmbeddingConfig):
    """A table of a collection that pools.

    Args:
        pooling: SUM or MEAN.
    """

    pooling: Any = PoolingType.SUM


class _KeyedTables(Tables):
    """What both collections share."""

    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None,
        optimizer: Optimizer | None,
        table_options: Mapping[str, Mapping[str, Any]] | None,
        options: dict[str, Any],
        weighted: bool | None,
    ) -> None:
        where = type(self).__name__
        self._configs = checks.as_list(tables, f"{where}: tables")
        if optimizer is not None and not isinstance(optimizer, Optimizer):
            raise InputError(
                f"{where}: optimizer must be one of Megalith, such as megalith.Adagrad(0.1), got "
                f"{checks.kind(optimizer)}"
            )
        chosen = checks.mapping(table_options or {}, f"{where}: table_options", '{"t1": {"eviction": ...}}')
        names = [_read_names(config, where) for config in self._configs]
        if twice := sorted({table for table, _ in names if [name for name, _ in names].count(table) > 1}):
            raise InputError(f"{where}: several tables are named {', '.join(map(repr, twice))}")
        if unknown := sorted(set(chosen) - {table for table, _ in names}):
            raise UnknownNameError(f"{where}: table_options are given for {unknown}, which are not in tables")
        self._names_by_table = _embedding_names(names)
        self._inputs: dict[str, str] = {}
        features = []
        for config, (table, inputs), outputs in zip(self._configs, names, self._names_by_table, strict=True):
            combiner = None if weighted is None else _combiner(config, weighted)
            features += [Feature(output, table, combiner) for output in outputs]
            self._inputs |= dict(zip(outputs, inputs, strict=True))
        self._choices = {
            table: dict(checks.mapping(chosen.get(table, {}), f"{where}: table_options", '{"t1": {}}'))
            for table, _ in names
        }
        self._open = optimizer is None and not all("optimizer" in own for own in self._choices.values())
        self._applied: Optimizer | None = None
        configs = self._tables_with(optimizer or SGD(0.0))
        dims = {config.name: config.dim for config in configs}
        slices = [Slice(f.name, 0, dims[f.table]) for f in features]
        self._widths = [each.end for each in slices]
        layouts = None if weighted is None else [Layout(_POOLED, slices)]
        try:
            self._device = torch.device("cpu" if device is None else device)
        except (RuntimeError, TypeError):
            raise InputError(f"{where}: device must be a torch.device, got {device!r}") from None
        if self._device.type == "cuda":
            options.setdefault("engine", "cuda")
        self._built = False
        super().__init__(configs, features, layouts=layouts, **options)
        # Optimizers that keep one number per row take matrices only.
        self.register_parameter(ANCHOR, nn.Parameter(torch.zeros_like(self._anchor)[None]))
        self._built = True
        self.plan: _KeyedPlan = _KeyedPlan(features, layouts, self.configs, self._inputs, bool(weighted))

    @property
    def device(self) -> torch.device:
        """The device that was given."""
        return self._device

    def _tables_with(self, optimizer: Optimizer) -> list[TableConfig]:
        return [
            _table(config, name, {"optimizer": optimizer, **own})
            for config, (name, own) in zip(self._configs, self._choices.items(), strict=True)
        ]

    def _choose_shards(self) -> Shards:
        if self._open:
            if not self._built:
                return None  # type: ignore[return-value]  # the first use chooses
            self._take_applied()
            if self._applied is None:
                raise UsageError(
                    f"{type(self).__name__}: its tables have no optimizer: pass "
                    "optimizer=megalith.Adagrad(0.1), or call apply_optimizer_in_backward with the "
                    "parameters of this module, before its first use; an optimizer of torch for all "
                    "parameters does not reach the rows"
                )
            tables = self._tables_with(self._applied)
            self.configs = MappingProxyType({table.name: table for table in tables})
            self._open = False
        return super()._choose_shards()

    def _take_applied(self) -> None:
        """Take what apply_optimizer_in_backward left at the parameter of this module."""
        left: dict[str, Any] = vars(self._anchor)
        if "_optimizer_classes" not in left:
            return
        if not self._open or self._applied is not None or len(left["_optimizer_classes"]) > 1:
            raise UsageError(
                f"{type(self).__name__}: its rows have an optimizer already: call "
                "apply_optimizer_in_backward once, before the first use, and without optimizer="
            )
        # Without its attribute and its hook, the parameter is one of the dense part again, as DDP needs it.
        (kind,), (settings,) = left.pop("_optimizer_classes"), left.pop("_optimizer_kwargs")
        (made,) = left.pop("_in_backward_optimizers")
        hooks = sys.modules["torch.distributed.optim.apply_optimizer_in_backward"]
        for hook in hooks.param_to_optim_hook_handle_map.pop(self._anchor, ()):
            hook.remove()
        self._applied = _optimizer_of(kind, {**getattr(made, "defaults", {}), **settings})

    def named_parameters(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Parameter]]:
        # DDP asks each module for its parameters; later it would make the steps of the optimizer itself.
        self._take_applied()
        return super().named_parameters(*args, **options)

    def _load_from_state_dict(self, state_dict: Mapping[str, Any], prefix: str, *args: Any) -> None:
        keys = [
            key for key in state_dict if key.startswith((f"{prefix}embedding_bags.", f"{prefix}embeddings."))
        ]
        if keys:
            args[-1].append(
                f"{keys[0]} is a weight of TorchRec: fill the tables with "
                "megalith.compat.torchrec.import_torchrec"
            )
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _start(self, batch: Any) -> Lookup:
        if self.trains:
            self._take_applied()  # it raises if the optimizer would be ignored
        return super()._start(batch)

    def _call(self, features: Any, time: float | None) -> Any:
        """Return the result of a forward: the part that torch.fx and torch.compile do not trace."""
        if isinstance(features, torch.fx.Proxy):  # TorchRec's train pipelines trace a model
            tracer: Any = features.tracer
            return tracer.create_proxy("call_module", tracer.path_of_module(self), (features,), {})
        call = type(self)._result
        if torch.compiler.is_compiling():  # not before: the import of torch's compiler takes a second
            call = torch.compiler.disable(call)
        return call(self, features, super().forward, time)

    @abstractmethod
    def _result(self, features: Any, look_up: Callable[..., dict[str, Any]], time: float | None) -> Any:
        """Look up a batch, and give the outputs the classes of TorchRec."""


class EmbeddingBagCollection(_KeyedTables):
    """Pooled embeddings of many features, with the arguments and the result of TorchRec's class.

    F is the number of features, B the batch size, L the number of ids of an example, D the dim of a table.

        input     KeyedJaggedTensor [F, B, (L)], of TorchRec or of `megalith.compat.torchrec`; or a mapping of
                  columns, as for `megalith.EmbeddingCollection`
        output    KeyedTensor [B, sum of D], float32

    A feature of several tables is called "feature@table" in the output. If keys have different numbers of
    rows, `inverse_indices` of the input say which row belongs to an example.

    Example:
        >>> import torch
        >>> from megalith import SGD, Ones
        >>> from megalith.compat.torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
        >>> t1 = EmbeddingBagConfig(name="t1", embedding_dim=2, num_embeddings=10, feature_names=["f1"])
        >>> options = {"t1": {"initializer": Ones()}}
        >>> ebc = EmbeddingBagCollection([t1], optimizer=SGD(0.1), table_options=options)
        >>> features = KeyedJaggedTensor(["f1"], torch.tensor([7, 9, 2**40]), lengths=torch.tensor([2, 0, 1]))
        >>> ebc(features).values().detach()
        tensor([[2., 2.],
                [0., 0.],
                [1., 1.]])

    Args:
        tables: A list of EmbeddingBagConfig, of TorchRec or of `megalith.compat.torchrec`.
        is_weighted: Whether the weights of the input multiply the rows; without, they are ignored.
        device: A cuda device selects the engine "cuda"; otherwise it has no effect.
        optimizer: The optimizer of all tables. None: that of `apply_optimizer_in_backward`, called with the
            parameters of this module before its first use.
        table_options: Further arguments of `TableConfig` by table: optimizer, initializer, admission, ...
        options: Further arguments of `megalith.EmbeddingCollection`: update, reduction, seed, ...

    Raises:
        InputError: A config has a value without counterpart.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        *,
        optimizer: Optimizer | None = None,
        table_options: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self._is_weighted = checks.flag(is_weighted, "EmbeddingBagCollection: is_weighted")
        super().__init__(tables, device, optimizer, table_options, options, is_weighted)

    def forward(self, features: Any, *, time: float | None = None) -> Any:
        """Look up and pool the embeddings of a batch.

        Args:
            features: A KeyedJaggedTensor, or a mapping of columns by feature.
            time: As for `megalith.EmbeddingCollection.forward`.

        Returns:
            A KeyedTensor.
        """
        return self._call(features, time)

    def _result(self, features: Any, look_up: Callable[..., dict[str, Any]], time: float | None) -> Any:
        values = look_up(features, time=time)[_POOLED]
        make = _class_next_to(features, "KeyedTensor")
        names = [name for names in self._names_by_table for name in names]
        return make(keys=names, length_per_key=list(self._widths), values=values)

    def embedding_bag_configs(self) -> list[Any]:
        """Return the configs that the tables were made of."""
        return self._configs

    def is_weighted(self) -> bool:
        """Return whether the weights of the input multiply the rows."""
        return self._is_weighted


class EmbeddingCollection(_KeyedTables):
    """Embeddings of each id of many features, with the arguments and the result of TorchRec's class.

        input     as for `EmbeddingBagCollection`; weights are ignored
        output    per feature a JaggedTensor [B, (L), D], float32

    Args:
        tables: A list of EmbeddingConfig, of TorchRec or of `megalith.compat.torchrec`, all of one dim.
        device: As for `EmbeddingBagCollection`.
        need_indices: Whether the weights of the result are the ids.
        optimizer: As for `EmbeddingBagCollection`.
        table_options: As for `EmbeddingBagCollection`.
        options: As for `EmbeddingBagCollection`.

    Raises:
        InputError: A config has a value without counterpart, or dims differ.
    """

    def __init__(
        self,
        tables: Sequence[Any],
        device: torch.device | str | None = None,
        need_indices: bool = False,
        *,
        optimizer: Optimizer | None = None,
        table_options: Mapping[str, Mapping[str, Any]] | None = None,
        **options: Any,
    ) -> None:
        self._need_indices = checks.flag(need_indices, "EmbeddingCollection: need_indices")
        super().__init__(tables, device, optimizer, table_options, options, None)
        dims = {name: config.dim for name, config in self.configs.items()}
        if len(set(dims.values())) > 1:
            raise InputError(f"EmbeddingCollection: all tables need the same embedding_dim, got {dims}")

    def forward(self, features: Any, *, time: float | None = None) -> Any:
        """Look up the embeddings of a batch.

        Args:
            features: A KeyedJaggedTensor, or a mapping of columns by feature.
            time: As for `megalith.EmbeddingCollection.forward`.

        Returns:
            A dict of a JaggedTensor per feature.
        """
        return self._call(features, time)

    def _result(self, features: Any, look_up: Callable[..., dict[str, Any]], time: float | None) -> Any:
        make = _class_next_to(features, "JaggedTensor")
        ids = self.plan.read_columns(features) if self._need_indices else {}
        return {
            name: make(
                values=rows.values,
                lengths=rows.lengths(),
                weights=ids[name].values if self._need_indices else None,
            )
            for name, rows in look_up(features, time=time).items()
        }

    def embedding_configs(self) -> list[Any]:
        """Return the configs that the tables were made of."""
        return self._configs

    def embedding_names_by_table(self) -> list[list[str]]:
        """Return the names of the outputs of each table."""
        return self._names_by_table

    def embedding_dim(self) -> int:
        """Return the dim of all tables."""
        return next(iter(self.configs.values())).dim

    def need_indices(self) -> bool:
        """Return whether the weights of the result are the ids."""
        return self._need_indices


_POOLED = "pooled"
_PRECISIONS = {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}
_ADAGRAD = ("lr", "eps", "initial_accumulator_value", "weight_decay")
_OPTIMIZERS: dict[str, tuple[type[Optimizer], tuple[str, ...]]] = {
    "SGD": (SGD, ("lr",)),
    "Adagrad": (Adagrad, _ADAGRAD),
    "RowWiseAdagrad": (RowWiseAdagrad, _ADAGRAD),
    "Adam": (Adam, ("lr", "betas", "eps")),
    "SparseAdam": (Adam, ("lr", "betas", "eps")),
}
"""Classes for apply_optimizer_in_backward, by name: ours, and the settings that both have."""
_INITIALIZERS: dict[str, tuple[Callable[..., Initializer] | None, dict[str, float]]] = {
    "uniform_": (Uniform, {"a": 0.0, "b": 1.0}),
    "normal_": (Normal, {"mean": 0.0, "std": 1.0}),
    "constant_": (Constant, {"val": 0.0}),
    "zeros_": (Zeros, {}),
    "ones_": (Ones, {}),
}
"""Functions of torch.nn.init: ours, and their arguments in its order."""
_NO_EFFECT = ("foreach", "fused", "capturable", "differentiable")
"""Settings of torch's optimizers that do not change the step."""


class _KeyedPlan(FeaturePlan):
    """A plan that finds the column of each output among the keys of the input."""

    def __init__(
        self,
        features: Sequence[Feature],
        layouts: Sequence[Layout] | None,
        configs: Mapping[str, TableConfig],
        inputs: Mapping[str, str],
        weighted: bool,
    ) -> None:
        super().__init__(features, layouts, configs)
        self._inputs, self._weighted = inputs, weighted

    def read_columns(self, batch: Any) -> Mapping[str, Ragged]:
        """Return the column of each output, of anything that `forward` accepts."""
        source = batch.columns if isinstance(batch, StartedBatch) else batch
        return source.columns if isinstance(source, CompiledBatch) else self._columns(source, False)

    def _columns(self, batch: Any, absent_ok: bool) -> dict[str, Ragged]:
        given = batch if isinstance(batch, Mapping) else Ragged.from_keyed(batch)
        inverse = None if isinstance(batch, Mapping) else _inverse_indices(batch)
        columns = {}
        for output, name in self._inputs.items():
            if name not in given:
                continue
            column = given[name]
            weights = getattr(column, "weights", None)
            if self._weighted and weights is None:
                raise InputError(f"feature {name!r} has no weights, but the collection has is_weighted=True")
            if not self._weighted and weights is not None:
                column = Ragged.trusted(column.values, column.row_splits)
            columns[output] = column if inverse is None or self.layouts is None else column[inverse[name]]
        if len({len(column) for column in columns.values()}) > 1 and self.layouts is not None:
            rows = {name: len(column) for name, column in columns.items()}
            raise InputError(f"the keys have {rows} rows: pass the inverse_indices of the KeyedJaggedTensor")
        return super()._columns(columns, absent_ok)

    def _batch_size(self, columns: Mapping[str, Ragged]) -> int:
        # Without pooling, keys may have different numbers of rows.
        return 1 if self.layouts is None else super()._batch_size(columns)


def _inverse_indices(batch: Any) -> dict[str, Tensor] | None:
    """Return which row of each key belongs to an example, if the input says so."""
    found = batch.inverse_indices_or_none() if hasattr(batch, "inverse_indices_or_none") else None
    return None if found is None else dict(zip(found[0], found[1], strict=True))


def _class_next_to(features: Any, name: str) -> Any:
    """Return a class of the module that defines the class of the input."""
    source = features.columns if isinstance(features, StartedBatch) else features
    modules = [sys.modules.get(base.__module__) for base in type(source).__mro__]
    return next((vars(m)[name] for m in modules if m and name in vars(m)), vars(jagged_tensor)[name])


def _read_names(config: Any, where: str) -> tuple[str, list[str]]:
    """Return the name of a table and the keys that are looked up in it."""
    name, features = getattr(config, "name", None), getattr(config, "feature_names", None)
    if not isinstance(name, str) or not isinstance(features, list | tuple):
        raise InputError(
            f"{where}: tables must be a list of EmbeddingBagConfig or EmbeddingConfig, got {config!r}"
        )
    return name, list(features) or [name]


def _embedding_names(tables: Sequence[tuple[str, Sequence[str]]]) -> list[list[str]]:
    """Name the outputs of each table: by their key, or "key@table" for a key of several tables."""
    keys = [key for _, features in tables for key in features]
    return [[f"{key}@{table}" if keys.count(key) > 1 else key for key in own] for table, own in tables]


def _combiner(config: Any, weighted: bool) -> Sum | Mean:
    if not hasattr(config, "pooling"):
        raise InputError(
            f"table {config.name!r}: EmbeddingBagCollection needs an EmbeddingBagConfig, got {config!r}"
        )
    pooling = getattr(config.pooling, "value", config.pooling)
    if pooling == "SUM":
        return Sum()
    if pooling != "MEAN" or weighted:
        raise InputError(
            f"table {config.name!r}: pooling must be SUM, or MEAN without is_weighted, got {pooling!r}; for "
            "a weighted mean use SUM, and divide the weights"
        )
    return Mean()


def _table(config: Any, name: str, options: Mapping[str, Any]) -> TableConfig:
    kind = str(getattr(config.data_type, "value", config.data_type))
    if kind not in _PRECISIONS:
        raise InputError(f"table {name!r}: data_type must be {', '.join(_PRECISIONS)}, got {kind!r}")
    policy = getattr(config, "virtual_table_eviction_policy", None)
    if policy is not None and type(policy).__name__ != "NoEvictionPolicy":
        raise InputError(
            f"table {name!r}: {type(policy).__name__} is not converted: leave it out, and pass "
            f'table_options={{{name!r}: {{"eviction": megalith.TTL(...)}}}} or another policy'
        )
    ours = {"dim": config.embedding_dim, "precision": _PRECISIONS[kind], **options}
    if "initializer" not in ours and "segments" not in ours:
        ours["initializer"] = _initializer(config, name)
    try:
        return TableConfig(name, **ours)
    except TypeError as error:
        raise InputError(f"table {name!r}: table_options: {error}") from None


def _initializer(config: Any, name: str) -> Initializer:
    init: Any = config.init_fn
    if init is None:
        bound = sqrt(1 / checks.integer(config.num_embeddings, f"table {name!r}: num_embeddings"))
        low, high = config.weight_init_min, config.weight_init_max
        return Uniform(-bound if low is None else low, bound if high is None else high)
    given: dict[str, Any] = init.keywords if isinstance(init, partial) else {}
    function = init.func if isinstance(init, partial) else init
    ours, defaults = _INITIALIZERS.get(getattr(function, "__name__", ""), (None, {}))
    if ours is None or getattr(function, "__module__", "") != "torch.nn.init" or given.keys() - defaults:
        raise InputError(
            f"table {name!r}: init_fn {init!r} fills a whole weight, but a row must follow from its id: use "
            f"{', '.join(_INITIALIZERS)} of torch.nn.init, or pass "
            f"table_options={{{name!r}: {{'initializer': ...}}}}"
        )
    return ours(*{**defaults, **given}.values())


def _optimizer_of(theirs: type, settings: Mapping[str, Any]) -> Optimizer:
    """Return our optimizer for a class that apply_optimizer_in_backward was given."""
    remedy = "pass optimizer= to the collection instead"
    if theirs.__name__ not in _OPTIMIZERS:
        raise InputError(
            f"apply_optimizer_in_backward: {theirs.__name__} is not converted (known: "
            f"{', '.join(_OPTIMIZERS)}); {remedy}"
        )
    ours, names = _OPTIMIZERS[theirs.__name__]
    settings = dict(settings)
    if "learning_rate" in settings:  # the names of FBGEMM
        settings["lr"] = settings.pop("learning_rate")
    if "beta1" in settings or "beta2" in settings:
        settings["betas"] = settings.pop("beta1", 0.9), settings.pop("beta2", 0.999)
    extra = {k: v for k, v in settings.items() if v and k not in names and k not in _NO_EFFECT}
    if extra:
        raise InputError(
            f"apply_optimizer_in_backward: {theirs.__name__} with {extra} is not converted; {remedy}"
        )
    return ours(**{name: settings[name] for name in names if name in settings})
