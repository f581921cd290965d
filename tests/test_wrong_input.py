"""Every public function, constructor and method, called with wrong input, raises a MegalithError or works.

`tests/valid_calls` lists calls with valid arguments. Each argument in turn is replaced by the values of
`WRONG` that `wrong_for` chooses by the kind of the valid value: types that users confuse with it, and values
of its type at the edges. A raw TypeError, AttributeError, RuntimeError or torch error is a bug: the caller
cannot see what was wrong. A call that works is fine here; other tests check results. Methods are found by
reflection, and `test_every_public_name_is_swept` compares the calls with what the packages export, so a new
name is either called or listed in `CANNOT_BE_CALLED` with a reason.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import megalith
from megalith.data import movielens
from megalith.data.movielens import DownloadSource, fetch_movielens
from megalith.errors import DiscoveryError, MegalithError, RemoteError, UsageError
from megalith.storage.store import Store
from tests.test_docstrings import PUBLIC
from tests.valid_calls import core, data_and_training, gathering, monolith_ops, saving, serving
from tests.valid_calls.sweep import (
    CANNOT_BE_CALLED,
    ON_SERVERS,
    Arguments,
    Call,
    call_with,
    complete,
    named,
    names_of,
    public_names,
)

# ---- wrong values


class Opaque:
    """An object that is nothing Megalith knows."""

    def __repr__(self) -> str:
        return "Opaque()"


WRONG: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "text": lambda: "x",
    "bad URL": lambda: "nosuch://x",
    "missing path": lambda: Path("missing/file"),
    "empty text": lambda: "",
    "bytes": lambda: b"x",
    "-1": lambda: -1,
    "3": lambda: 3,
    "1.5": lambda: 1.5,
    "nan": lambda: math.nan,
    "True": lambda: True,
    "complex": lambda: 1j,
    "empty list": lambda: [],
    "ints": lambda: [1, 2],
    "floats": lambda: [[1.5]],
    "texts": lambda: ["a", "b"],
    "nested Nones": lambda: [None, [None]],
    "list of tensors": lambda: [torch.ones(2), torch.ones(2, 2)],
    "pair": lambda: (1, "x"),
    "empty dict": dict,
    "dict of ints": lambda: {"a": 1},
    "dict of tensors": lambda: {"a": torch.tensor([1, 2])},
    "dict of floats": lambda: {"a": torch.ones(2, 2)},
    "dict of pairs": lambda: {"a": (torch.tensor([1]), [1.0])},
    "dict by int": lambda: {1: torch.tensor([1])},
    "set": lambda: {1},
    "object": Opaque,
    "0-d tensor": lambda: torch.tensor(1.5),
    "int tensor": lambda: torch.tensor([5, -7, 9]),
    "float tensor": lambda: torch.tensor([0.5, math.nan]),
    "3-d tensor": lambda: torch.ones(2, 3, 4),
    "empty tensor": lambda: torch.empty(0, 3),
    "bool tensor": lambda: torch.tensor([True, False]),
    "complex tensor": lambda: torch.ones(2, dtype=torch.complex64),
    "uint64 tensor": lambda: torch.ones(2, dtype=torch.uint64),
    "sparse tensor": lambda: torch.eye(2).to_sparse(),
    "meta ints": lambda: torch.ones(2, dtype=torch.int64, device="meta"),
    "meta floats": lambda: torch.ones(2, 2, device="meta"),
    "array": lambda: np.array([1.5, 2.5]),
    "Ragged of floats": lambda: megalith.Ragged(torch.ones(3), torch.tensor([0, 1, 3])),
    "Ragged on meta": lambda: megalith.Ragged(
        torch.ones(3, device="meta"), torch.zeros(2, dtype=torch.int64, device="meta")
    ),
}

ANYTHING = ("None", "text", "3", "ints", "dict of ints", "float tensor", "object")
OPTIONAL = (
    *("text", "empty text", "bad URL", "-1", "1.5", "ints", "texts", "pair", "dict by int", "object"),
    *("dict of tensors", "0-d tensor", "int tensor", "float tensor", "3-d tensor", "meta ints"),
)
"""For an argument that is not given, so that its kind is unknown."""
NUMBERS = ("None", "text", "-1", "1.5", "nan", "True", "complex", "ints", "int tensor", "object")
TEXTS = ("None", "empty text", "bad URL", "bytes", "3", "texts", "missing path", "object")
TENSORS = (
    *("None", "3", "floats", "dict of tensors", "array", "0-d tensor", "float tensor", "3-d tensor"),
    *("empty tensor", "bool tensor", "complex tensor", "uint64 tensor", "sparse tensor", "meta ints"),
    *("meta floats", "object"),
)
COLUMNS = (*TENSORS, "nested Nones", "int tensor", "Ragged of floats", "Ragged on meta")
SEQUENCES = (
    *("None", "text", "3", "empty list", "ints", "floats", "texts", "nested Nones", "list of tensors"),
    *("pair", "set", "dict of tensors", "object"),
)
MAPPINGS = (
    *("None", "text", "ints", "empty dict", "dict of ints", "dict of tensors", "dict of floats"),
    *("dict of pairs", "dict by int", "object"),
)
FUNCTIONS = ("None", "text", "3", "int tensor", "object")
KINDS: list[tuple[type | tuple[type, ...], tuple[str, ...]]] = [
    ((bool, int, float), NUMBERS),
    ((str, bytes, Path), TEXTS),
    (torch.Tensor, TENSORS),
    (megalith.Ragged, COLUMNS),
    (Mapping, MAPPINGS),
    ((list, tuple, set), SEQUENCES),
]


def wrong_for(valid: object) -> tuple[str, ...]:
    """The wrong values to try instead of a valid one: names in `WRONG`."""
    if valid is None:
        return OPTIONAL
    fitting = (names for kind, names in KINDS if isinstance(valid, kind))
    return next(fitting, FUNCTIONS if callable(valid) and not isinstance(valid, type) else ANYTHING)


# ---- valid calls

PARTS = (core, monolith_ops, saving, data_and_training, serving, gathering)
GROUPS: dict[str, Callable[[], Iterator[Call]]] = {
    name.removesuffix("_calls"): function
    for part in PARTS
    for name, function in vars(part).items()
    if name.endswith("_calls") and function.__module__ == part.__name__ and not signature(function).parameters
}
"""Functions of `tests/valid_calls` that yield calls."""

SECONDS = {"timeout", "max_rpc_deadline_millis", "seconds"}
"""Arguments for which a positive number is valid, and only makes a call wait longer."""


def calls(group: str) -> Iterator[Call]:
    """Returns the calls of a group with a value for every argument."""
    for call, arguments in GROUPS[group]():
        yield call, complete(call, arguments)


# ---- tests


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    """A process group of one rank, for SyncShards; what serving shares is closed at the end."""
    dist.init_process_group("gloo", store=torch._C._distributed_c10d.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    serving.clean_up()


@pytest.fixture(autouse=True)
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that write to a wrong path write here, and downloads come from a port without a server."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "downloads"))
    nobody = DownloadSource(f"http://{serving.CLOSED}/ml-1m.zip", "0", ())
    monkeypatch.setattr(movielens, "fetch_movielens", lambda cache: fetch_movielens(cache, sources=(nobody,)))


def attempt(call: Callable[..., Any], arguments: Arguments) -> Exception | None:
    """Returns the error of a call, or of the use of its result, unless it is a MegalithError."""
    try:
        call_with(call, arguments)
    except MegalithError:
        return None
    except FileNotFoundError as error:
        return None if isinstance(getattr(call, "__self__", None), Store) else error  # as its contract says
    except Exception as error:
        return error
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("group", GROUPS)
def test_calls_are_valid_and_a_wrong_argument_raises_a_megalith_error_or_works(group: str) -> None:
    for call, arguments in calls(group):
        try:
            call_with(call, arguments)
        except (DiscoveryError, RemoteError, UsageError):
            assert group in ("client", "discovery", "zookeeper"), named(call)  # there is nobody to answer
    raw = raw_errors(calls(group))
    assert not raw, f"{len(raw)} raw errors:\n" + "\n".join(line[:200] for line in raw)


def raw_errors(calls: Iterable[Call]) -> list[str]:
    """Makes each call with the wrong values of each argument; returns the errors that users must not see."""
    raw = []
    for call, arguments in calls:
        for argument, valid in arguments.items():
            for kind in wrong_for(valid):
                value = WRONG[kind]()
                if argument in SECONDS and kind in ("3", "1.5"):
                    continue
                error = attempt(call, arguments | {argument: value})
                if error is not None:
                    raw.append(f"{named(call)}({argument}={kind}): {type(error).__name__}: {error}")
    return raw


JUNK = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=3),
        st.sampled_from(sorted(WRONG)).map(lambda kind: WRONG[kind]()),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(st.sampled_from(["a", "b", "f"]), inner, max_size=2),
    ),
    max_leaves=4,
)
PURE = {group: list(calls(group)) for group in ("ops", "metrics", "monolith")}
"""Calls without state and without a process group, so examples do not depend on each other."""


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_any_two_wrong_arguments_raise_a_megalith_error_or_work(data: st.DataObject) -> None:
    calls = PURE[data.draw(st.sampled_from(sorted(PURE)))]
    call, arguments = data.draw(st.sampled_from([each for each in calls if each[1]]))
    changed = data.draw(st.lists(st.sampled_from(sorted(arguments)), min_size=1, max_size=2))
    sizes = {"size", "num_rows", "length", "num_of_shards", "num_shards", "num_splits", "num_bins", "dim"}
    wrong = {name: data.draw(JUNK) for name in changed if name not in sizes}  # a huge size is not wrong

    error = attempt(call, arguments | wrong)

    assert error is None, f"{named(call)}({wrong}): {type(error).__name__}: {error}"


@pytest.mark.filterwarnings("ignore")
def test_every_public_name_is_swept() -> None:
    swept = {name for group in GROUPS for call, _ in calls(group) for name in names_of(call)}
    found = {name for package in (*PUBLIC, "megalith.metrics") for name in public_names(package)}

    found_here = {name for name in found if name.partition(".")[0] not in ON_SERVERS}
    missing = sorted(found_here - swept - CANNOT_BE_CALLED.keys())
    stale = sorted(CANNOT_BE_CALLED.keys() - found)

    assert not missing, f"list these in tests/valid_calls: {missing}"
    assert not stale, f"these do not exist: {stale}"
