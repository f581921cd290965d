"""The public API as a list of calls: which names are public, their arguments, and the use of results."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Coroutine, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from megalith import Pipeline, TableConfig
from megalith.checkpoint import SaveHandle
from megalith.data import EqualBatchLoader, Reader
from megalith.table import Admission, Eviction, ServingPrecision
from megalith.table.optimizers import SGD, Optimizer

Arguments = dict[str, Any]
Call = tuple[Callable[..., Any], Arguments]
Given = Mapping[str, Arguments]


@dataclass(frozen=True)
class Fresh:
    """An argument that is made anew for each call, because a call changes it."""

    make: Callable[[], Any]


def call_with(call: Callable[..., Any], arguments: Arguments) -> None:
    """Makes a call and uses its result."""
    values = {name: x.make() if isinstance(x, Fresh) else x for name, x in arguments.items()}
    use(call(**values), getattr(call, "__self__", None))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values or (1, 2, 3), dtype=torch.int64)


def config(name: str = "a", dim: int = 2) -> TableConfig:
    return TableConfig(name, dim=dim, optimizer=SGD(0.1))


def count(*_: object) -> None:
    """A callback, such as one to which long calls report their progress."""


VALUES: Mapping[str, Callable[[], Any]] = {
    "base": lambda: SGD(0.1),
    "batch_size": lambda: 2,
    "consumer": lambda: "sync",
    "device": lambda: "cpu",
    "ids": ids,
    "model_name": lambda: "movies",
    "now": lambda: 1.0,
    "parts": lambda: 2,
    "rank": lambda: 0,
    "service": lambda: "movies:entry",
    "step": lambda: 0,
    "sub_graph": lambda: "ps_0",
    "table": lambda: "a",
    "time": lambda: 1.0,
    "timeout": lambda: 5.0,
    "world_size": lambda: 1,
}
"""A valid value of a required argument, by its name, for calls that give none."""
CALLBACKS = {"attach", "callback", "cancel", "on_batch", "on_bytes", "on_complete", "on_rows"}
"""Arguments that take a function, for which `count` is valid."""

_RESULT = "a result, and data that the calls which take it validate"
_BASE = "an abstract class, swept through its subclasses"
CANNOT_BE_CALLED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "ArtifactManifest",
            "Bags",
            "Batch",
            "Bucketized",
            "CalibrationBins",
            "CatchUp",
            "Chunk",
            "CommReport",
            "Compressed",
            "DataSource",
            "Decision",
            "Deduped",
            "Difference",
            "Evaluation",
            "Fingerprint",
            "FusedLookup",
            "FusedReorder",
            "GatherResult",
            "Header",
            "ImportReport",
            "ListedCheckpoint",
            "LoadReport",
            "Manifest",
            "MemoryUse",
            "MergeCounts",
            "MovieLens",
            "OffsetMap",
            "Overlap",
            "Partial",
            "Payload",
            "Pooling",
            "PreparedIds",
            "Published",
            "Record",
            "HostTierUse",
            "RowCounters",
            "ShardedFids",
            "ShardingSparseFidsOpParams",
            "SyntheticBatch",
            "TableReport",
            "TableStats",
            "State",
            "UniqueKeys",
            "UpdateReport",
            "Verification",
            "WindowReport",
        ),
        _RESULT,
    ),
    **dict.fromkeys(
        (
            "Admission",
            "Combiner",
            "Discovery",
            "Eviction",
            "Initializer",
            "Lookup",
            "Model",
            "Optimizer",
            "Reader",
            "ServingPrecision",
            "Shards",
            "SyncBackend",
        ),
        _BASE,
    ),
    "MonolithCombiner": _BASE,
    **dict.fromkeys(
        (
            "ServerPublisher",
            *(
                f"ServerPublisher.{name}"
                for name in ("checkpoint_taken", "close", "flush", "lagging", "publish", "report")
            ),
        ),
        "needs servers; tests/ps passes wrong input, and its base class is swept",
    ),
    "ServerShards.resize": "an integer starts processes; tests/ps passes wrong input",
    **dict.fromkeys(
        ("OuterUpdate.local_tensors", "OuterUpdate.prepare", "OuterUpdate.step"),
        "parts of `OuterUpdate.apply` and `run_window`, which have validated the input",
    ),
    **dict.fromkeys(
        [
            f"ElasticRanks.{name}"
            for name in ("agree", "all_to_all", "exchange", "from_one", "messages", "reform", "total")
        ],
        "exchanges of `gather`, which has validated what it sends",
    ),
    **dict.fromkeys(
        ("TableShards", *(f"TableShards.{n}" for n in ("assign_add", "drain_touched", "router", "track"))),
        "a protocol, satisfied by Shards",
    ),
    "FetchOptions.now": "a field, whose value is a function",
    "ElasticRanks.join": "waits for the processes that a launcher has started",
    "LocalLookup": "made by LocalShards.lookup",
    "SyncLookup": "made by SyncShards.lookup",
    "SaveHandle": "made by async_save",
    **dict.fromkeys(
        (
            f"{owner}.{method}"
            for owner in ("CommMetrics", "Recorder")
            for method in ("created", "read", "requested", "sent", "waited")
        ),
        "called by shards and engines, which have validated the input",
    ),
    **dict.fromkeys(
        (
            "ObjectStore.local_copy",
            "Store.local_copy",
            "Store.read_file",
            "Store.read_part",
            "Store.read_verified",
            "Store.verify",
        ),
        "takes entries of a manifest, which is validated when it is read",
    ),
    "FeatureConfigs.from_encoded": "reads what `FeatureConfigs.encoded` returned, inside torch ops",
    "Shards.add_recorder": "raises UsageError; SyncShards overrides it",
    "Reader.from_config": "for readers of files, which override it or are opened by path",
    "EmbeddingCollection.fail": "raises the error that it is given",
    "Lookup.fail": "raises the error that it is given",
    "Shards.fail": "raises the error that it is given",
    "SyncLookup.fail": "raises the error that it is given",
    "SyncShards.fail": "raises the error that it is given",
    "SyncShards.fail_update": "raises the error that it is given",
    "ServerShards.fail": "raises the error that it is given",
    "ServerLookup": "made by ServerShards.lookup",
    "ServerLookup.fail": "raises the error that it is given",
    "Servers": "starts processes; its own tests pass wrong arguments",
    "Servers.close": "takes no arguments",
    "Run.set_workers": "needs a run on parameter servers: tests/distributed/test_server_training.py",
    "ShardsPart": _RESULT,
    "Batch.pin_memory": "needs an accelerator",
    "Ragged.pin_memory": "needs an accelerator",
    "Ragged.trusted": "checks nothing, on purpose: for columns that were validated before",
    "Servable.write": "checks nothing, on purpose: for arguments that passed Servable.check",
    **dict.fromkeys(
        [f"{name}.score" for name in ("Model", "DeepFM", "DLRM", "DCNv2", "DIN")],
        "the dense part, for torch.compile and torch.export; `forward` validates its input",
    ),
    "Model.compile": "passes its arguments to torch.compile",
}
"""Public names that the sweep leaves out, and why."""
ON_SERVERS = ("ServerShards", "ServerRows", "ServerLookup", "Servers")
"""Classes that need Ray; `tests/ps` sweeps them."""
FORMULAS = {"correction", "expired", "state", "states", "step", "update"} | {
    *("code_bytes", "decode", "encode", "from_unit", "gradient", "native_view", "scale", "served", "slope"),
    "trained",
}
"""Methods of optimizers, policies and serving precisions that engines call with what they have validated."""


def is_swept(owner: type, method: str) -> bool:
    """Returns whether a method that a class defines can be called with wrong arguments."""
    formula = issubclass(owner, Optimizer | Admission | Eviction | ServingPrecision) and method in FORMULAS
    return not formula and f"{owner.__name__}.{method}" not in CANNOT_BE_CALLED


def complete(call: Callable[..., Any], given: Arguments) -> Arguments:
    """Returns a value for every argument of a call, so that a new argument is varied too."""
    filled = dict(given)
    for name, parameter in inspect.signature(call).parameters.items():
        if name in filled or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in CALLBACKS:
            filled[name] = count
        elif parameter.default is not parameter.empty:
            filled[name] = parameter.default
        else:
            assert name in VALUES, f"{named(call)}: give a valid value for {name} in tests/valid_calls"
            filled[name] = VALUES[name]()
    return filled


def public_methods(kind: type) -> list[str]:
    """Returns the names of the public methods that Megalith's classes define, inherited ones included."""
    names = {
        name: None
        for base in kind.__mro__
        if base.__module__.startswith("megalith")
        for name, member in vars(base).items()
        if not name.startswith("_") and inspect.isfunction(getattr(member, "__func__", member))
    }
    return list(names)


def public_names(package: str) -> Iterator[str]:
    """Yields the functions and classes that a package exports, and the public methods of the classes."""
    module = importlib.import_module(package)
    own = (x.__name__ for x in vars(module).values() if getattr(x, "__module__", None) == package)
    for name in getattr(module, "__all__", None) or [name for name in own if not name.startswith("_")]:
        value = getattr(module, name)
        if inspect.isfunction(value):
            yield value.__qualname__
        elif inspect.isclass(value) and not issubclass(value, Exception | Enum):
            yield value.__name__
            yield from (
                f"{base.__name__}.{method}"
                for base in value.__mro__
                if base.__module__.startswith("megalith")
                for method in public_methods(base)
                if method in vars(base)
                and (is_swept(base, method) or f"{base.__name__}.{method}" in CANNOT_BE_CALLED)
            )


def methods(make: Callable[[], Any], given: Given | Callable[[Any], Given] | None = None) -> Iterator[Call]:
    """Yields every public method of an object with valid arguments; each has its own object, closed after it.

    Args:
        make: Returns a new object.
        given: Arguments by method, for those that `VALUES` and defaults do not provide, or a function of the
            object that returns them.
    """
    for name in public_methods(type(made := make())):
        owner = next(base for base in type(made).__mro__ if name in vars(base))
        if not is_swept(owner, name):
            continue
        made = make()
        arguments = given(made) if callable(given) else given or {}
        call = getattr(made, name)
        yield call, complete(call, arguments.get(name, {}))
        release(made)


def named(call: Callable[..., Any]) -> str:
    """Returns "function", "Class" or "Class.method"."""
    owner = getattr(call, "__self__", None)
    if owner is not None and not inspect.isclass(owner) and not inspect.ismodule(owner):
        return f"{type(owner).__name__}.{call.__name__}"
    return str(getattr(call, "__qualname__", type(call).__name__))


def names_of(call: Callable[..., Any]) -> set[str]:
    """Returns `named(call)` and, for a method, its name in every class that defines it."""
    owner = getattr(call, "__self__", None)
    if owner is None or inspect.ismodule(owner):
        return {named(call)}
    kind = owner if inspect.isclass(owner) else type(owner)
    name = call.__name__
    return {named(call)} | {f"{base.__name__}.{name}" for base in kind.__mro__ if name in vars(base)}


def use(result: Any, owner: object = None) -> None:
    """Uses the result of a call where errors show only then, and closes what the call opened."""
    if isinstance(result, Coroutine):
        asyncio.run(result)
    elif isinstance(result, Iterator):
        next(result, None)
    elif isinstance(result, Reader | EqualBatchLoader | Pipeline):
        next(iter(result), None)
    elif isinstance(result, SaveHandle):
        result.wait()
    elif isinstance(result, AbstractContextManager) and type(result).__module__ == "contextlib":
        with result:
            pass
    for each in result if isinstance(result, list) else [result]:
        release(each, owner)


def release(made: object, owner: object = None) -> None:
    """Closes an object that has threads, connections or trackers."""
    if made is owner or not type(made).__module__.startswith("megalith"):
        return
    for closing in ("close", "shutdown", "stop"):
        if callable(getattr(made, closing, None)):
            getattr(made, closing)()
            return
