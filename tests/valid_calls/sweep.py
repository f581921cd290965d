"""The public API as a list of calls: which names are public, their arguments, and the use of results."""

from __future__ import annotations

import asyncio
import importlib
import inspect
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
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
    "consumer": lambda: "sync",
    "device": lambda: "cpu",
    "ids": ids,
    "model_name": lambda: "movies",
    "service": lambda: "movies:entry",
    "sub_graph": lambda: "ps_0",
    "table": lambda: "a",
    **dict.fromkeys(("epoch", "rank", "step"), lambda: 0),
    **dict.fromkeys(("batch_size", "parts"), lambda: 2),
    **dict.fromkeys(("now", "time", "world_size"), lambda: 1),
    "timeout": lambda: 5.0,
}
"""A valid value of a required argument, by its name, for calls that give none."""
CALLBACKS = {"attach", "callback", "cancel", "on_batch", "on_bytes", "on_complete", "on_rows"}
"""Arguments that take a function, for which `count` is valid."""

_RESULT = "a result, and data that the calls which take it validate"
_RESULTS = """
Bags Batch Bucketized CalibrationBins Chunk CommReport DataSource Deduped Difference Evaluation FusedLookup
FusedReorder GatherResult HostTierUse ImportReport ListedCheckpoint LoadReport Manifest MemoryUse
MergeCounts MovieLens OffsetMap Partial Pooling PreparedIds RowCounters ShardedFids
ShardingSparseFidsOpParams ShardsPart State SyntheticBatch TableReport TableStats UniqueKeys Verification
WindowReport
"""
_BASES = """
Admission Combiner Discovery Eviction Initializer Lookup Model MonolithCombiner Optimizer Reader
ServingPrecision Shards SyncBackend
"""


def _methods(owners: str, names: str) -> list[str]:
    return [f"{owner}.{name}" for owner in owners.split() for name in names.split()]


_REASONS: Mapping[str, Iterable[str]] = {
    _RESULT: _RESULTS.split(),
    "an abstract class, swept through its subclasses": _BASES.split(),
    "needs servers; tests/ps passes wrong input, and its base class is swept": [
        "ServerPublisher",
        *_methods("ServerPublisher", "checkpoint_taken close flush lagging publish report"),
    ],
    "an integer starts processes; tests/ps passes wrong input": ["ServerShards.resize"],
    "parts of `OuterUpdate.apply` and `run_window`, which have validated the input": _methods(
        "OuterUpdate", "local_tensors prepare step"
    ),
    "exchanges of `gather`, which has validated what it sends": [
        *_methods("Ranks ElasticRanks", "agree all_to_all gather"),
        *_methods("ElasticRanks", "exchange from_one reform total"),
        "Ranks.broadcast",
    ],
    "a field, whose value is a function": ["RankOptions.now"],
    "waits for the processes that a launcher has started": ["ElasticRanks.join"],
    "made by a method that is swept": ["LocalLookup", "SyncLookup", "ServerLookup", "SaveHandle"],
    "called by shards and engines, which have validated the input": _methods(
        "CommMetrics Recorder", "created read requested sent waited"
    ),
    "takes entries of a manifest, which is validated when it is read": [
        "ObjectStore.local_copy",
        *_methods("Store", "local_copy read_file read_part read_verified verify"),
    ],
    "reads what `FeatureConfigs.encoded` returned, inside torch ops": ["FeatureConfigs.from_encoded"],
    "raises UsageError; SyncShards overrides it": ["Shards.add_recorder"],
    "for readers of files, which override it or are opened by path": ["Reader.from_config"],
    "raises the error that it is given": [
        *_methods(
            "EmbeddingCollection Lookup Shards SyncLookup SyncShards ServerShards ServerLookup", "fail"
        ),
    ],
    "starts processes; its own tests pass wrong arguments": ["Servers"],
    "takes no arguments": ["Servers.close"],
    "makes a process group or sets variables; its own tests pass wrong arguments": [
        *("bps_init", "bps_comm_benchmark", "byteps_benchmark_a2a", "byteps_benchmark_ar"),
        *("init_sync_train_and_update_conf", "try_init_cuda", "update_session_config_for_gpu"),
    ],
    "needs a run on parameter servers: tests/distributed/test_server_training.py": ["Run.set_workers"],
    "called by torch.distributed.checkpoint": ["TablesLoadPlanner.set_up_planner"],
    "needs a service; tests/integrations": ["MLflowTracker", "OpenTelemetryTracker", "WandbTracker"],
    "called by a run, which passes numbers": [
        *_methods("MLflowTracker PrometheusTracker WandbTracker", "close log"),
        "OpenTelemetryTracker.log",
    ],
    "needs an accelerator": _methods("Batch Ragged", "pin_memory"),
    "checks nothing, on purpose: for columns that were validated before": ["Ragged.trusted"],
    "checks nothing, on purpose: for arguments that passed Servable.check": ["Servable.write"],
    "for `predict`; opening the files finds columns that they lack": [
        *_methods("TableReader", "carrying carried_column")
    ],
    "for the subscriber, whose message has checked the form of the tensors": ["Servable.check_values"],
    "for the sender, with the layout that a server reports": ["Publisher.find_parts"],
    "the dense part, for torch.compile and torch.export; `forward` validates its input": _methods(
        "Model DeepFM DLRM DCNv2 DIN", "score"
    ),
    "passes its arguments to torch.compile": ["Model.compile"],
    "calls the closure that it is given, as torch's optimizers do": ["TableLR.step"],
}
CANNOT_BE_CALLED = {name: reason for reason, names in _REASONS.items() for name in names}
"""Public names that the sweep leaves out, and why."""
ON_SERVERS = ("ServerShards", "ServerLookup", "Servers")
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


def calls(*functions: Callable[..., Any], **values: Any) -> Iterator[Call]:
    """Yields functions, each with those of the values that it takes."""
    taken = [values.keys() & inspect.signature(function).parameters.keys() for function in functions]
    assert set().union(*taken) == values.keys(), f"{functions} do not take all of {sorted(values)}"
    for function, names in zip(functions, taken, strict=True):
        yield function, {name: value for name, value in values.items() if name in names}


def complete(call: Callable[..., Any], given: Arguments, shared: Mapping[str, Any] = {}) -> Arguments:
    """Returns a value for every argument of a call, so that a new argument is varied too."""
    filled = dict(given)
    for name, parameter in inspect.signature(call).parameters.items():
        if name in filled or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        if name in shared:
            filled[name] = shared[name]
        elif name in CALLBACKS:
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
        given: Arguments by method, and under "*" those of all methods, which `VALUES` and defaults do not
            provide; or a function of the object that returns them.
    """
    for name in public_methods(type(made := make())):
        owner = next(base for base in type(made).__mro__ if name in vars(base))
        if not is_swept(owner, name):
            continue
        made = make()
        arguments = given(made) if callable(given) else given or {}
        call = getattr(made, name)
        yield call, complete(call, arguments.get(name, {}), arguments.get("*", {}))
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
