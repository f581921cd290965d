"""Options of a save or load that are wrong on one rank, or differ between ranks, raise on every rank.

All ranks are threads of one process (`logical_ranks`). A rank that waited for another would fail with
BrokenBarrierError, which is not a MegalithError.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megalith import checkpoint
from megalith.errors import CheckpointError, InputError
from megalith.routing import Router
from tests.checkpoint.logical_ranks import RankModel, new_models, on_all, outcomes_on_all
from tests.checkpoint.memory import MemoryStore

SAVES: list[dict[str, Any]] = [
    {"path": 7},
    {"optimizer": 3},
    {"progress": [1]},
    {"progress": {"x": {1}}},
    {"precision": 16},
    {"precision": "int8"},
    {"deltas": "yes"},
    {"on_rows": 1},
    {"timeout": "long"},
    {"timeout": 0},
]
LOADS: list[dict[str, Any]] = [
    {"path": 7},
    {"path": "nothing://here"},
    {"optimizer": 3},
    {"reroute": 1},
    {"rename": ["t"]},
    {"drop_optimizer_state": 1},
    {"allow_missing": None},
    {"deltas": 2},
    {"on_rows": 3},
]


def _name(value: object) -> str:
    """The name of a test: equal in every process, so without addresses."""
    if callable(value):
        return str(getattr(value, "__name__", "function"))
    if isinstance(value, dict):
        return ",".join(value)
    return str(value)


def on_rank(wrong: int, call: Callable[..., Any], options: dict[str, Any]) -> list[Any]:
    """Return what each of two ranks raises if one of them passes these options."""
    models = new_models(Router("roundrobin", 2))
    store = MemoryStore()
    on_all(models, lambda model: checkpoint.save(model, store))
    before = dict(store.files)

    def work(model: RankModel) -> Any:
        own: dict[str, Any] = options if model.ranks.rank == wrong else {}
        return call(model, **{"path": store, **own})

    outcomes = outcomes_on_all(models, work)

    assert store.files == before
    on_all(models, lambda model: checkpoint.save(model, store))  # nothing is left in progress
    return outcomes


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("options", SAVES, ids=_name)
@pytest.mark.parametrize("call", [checkpoint.save, checkpoint.async_save])
def test_a_wrong_option_of_a_save_raises_on_every_rank(
    call: Callable[..., Any], options: dict[str, Any], wrong: int
) -> None:
    outcomes = on_rank(wrong, call, options)
    assert isinstance(outcomes[wrong], InputError)
    assert isinstance(outcomes[1 - wrong], CheckpointError)
    assert str(outcomes[1 - wrong]).startswith(f"rank {wrong}: InputError: ")


@pytest.mark.parametrize("wrong", [0, 1])
@pytest.mark.parametrize("options", LOADS, ids=_name)
def test_a_wrong_option_of_a_load_raises_on_every_rank(options: dict[str, Any], wrong: int) -> None:
    outcomes = on_rank(wrong, checkpoint.load, options)
    assert isinstance(outcomes[wrong], InputError)
    assert isinstance(outcomes[1 - wrong], CheckpointError)


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (checkpoint.save, {"precision": "float16"}),
        (checkpoint.save, {"deltas": False}),
        (checkpoint.save, {"path": MemoryStore(where="another place")}),
        (checkpoint.async_save, {"delta": True}),
        (checkpoint.load, {"reroute": True}),
        (checkpoint.load, {"rename": {"embeddings.t": "t"}}),
        (checkpoint.load, {"drop_optimizer_state": ["embeddings.t"]}),
        (checkpoint.load, {"allow_missing": True}),
        (checkpoint.load, {"deltas": False}),
        (checkpoint.load, {"optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])}),
    ],
    ids=_name,
)
def test_options_that_differ_between_ranks_raise_on_every_rank(
    call: Callable[..., Any], options: dict[str, Any]
) -> None:
    for outcome in on_rank(1, call, options):
        assert isinstance(outcome, InputError)
        assert f"rank 0 passes {next(iter(options))}=" in str(outcome)


@pytest.mark.parametrize("step", ["3", -1, 5])
def test_a_rotation_raises_on_every_rank_unless_all_save_the_same_step(tmp_path: Path, step: Any) -> None:
    rotation = checkpoint.Rotation(tmp_path)
    models = new_models(Router("roundrobin", 2))

    outcomes = outcomes_on_all(models, lambda model: rotation.save(model, step if model.ranks.rank else 4))

    assert all(isinstance(outcome, InputError | CheckpointError) for outcome in outcomes)
    assert list(tmp_path.iterdir()) == []
