"""A user's own optimizer, in torch: row by row on the reference engine, batched on the cpu engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megalith import (
    SGD,
    Adagrad,
    Adam,
    DelayCompensated,
    EmbeddingCollection,
    Feature,
    Momentum,
    Ragged,
    Segment,
    Table,
    TableConfig,
    Uniform,
    checkpoint,
)
from megalith.errors import CheckpointError, InputError, UsageError
from megalith.ops import Pooling
from megalith.table import Optimizer, State
from megalith.table.optimizers import native_rule
from tests.checkpoint.memory import MemoryStore
from tests.fixed_examples import fixed_examples
from tests.table.support import (
    assert_close,
    assert_same_tables,
    dyadic,
    ints,
    sgd_table,
    state_of,
    unchanged,
    whole,
)


class SignSGD(Optimizer):
    """The shortest one: w -= lr * sign(g)."""

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows -= lr * grads.sign()


@dataclass(frozen=True)
class Yogi(Optimizer):
    """Two states, a setting, the step and a state per row."""

    beta: float = 0.9

    def states(self, dim: int) -> tuple[State, ...]:
        return (State("v", dim, 0.25), State("updates", 1))

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        square = grads * grads
        state["v"].sub_((1 - self.beta) * (state["v"] - square).sign() * square)
        state["updates"].add_(1)
        rows.sub_(lr / (1 + step) * grads / (state["v"].sqrt() + 1e-3))


class MyAdagrad(Adagrad):
    """Derived from an optimizer of the library, with its own step: the native step must not replace it."""

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows += lr * grads


class CopiedAdagrad(Optimizer):
    """The formula of Adagrad once more, to compare a step in torch with the native one."""

    name: ClassVar[str] = "adagrad"  # a name that the library uses

    def states(self, dim: int) -> tuple[State, ...]:
        return (State("sum", dim),)

    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        state["sum"] += grads * grads
        rows -= lr * grads / (state["sum"].sqrt() + 1e-10)


CUSTOM = [SignSGD(0.5), Yogi(0.1), MyAdagrad(0.5), CopiedAdagrad(0.1), DelayCompensated(Yogi(0.1), 0.5)]


def test_a_few_lines_are_an_optimizer(engine: str) -> None:
    table = sgd_table(engine, 3, optimizer=SignSGD(0.5))

    table.apply_gradients(ints(7, 8, 7), torch.tensor([[1.0, -2, 0], [4, 4, 4], [1.0, 0, 0]]), step=0, time=9)

    assert table.lookup(ints(7, 8)).tolist() == [[-0.5, 0.5, 0.0], [-0.5] * 3]
    assert whole(table).time.tolist() == [9, 9]
    assert SignSGD(0.5).name == "SignSGD"


def test_a_derived_optimizer_runs_its_own_step(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=MyAdagrad(0.5))
    table.apply_gradients(ints(1), torch.ones(1, 1), step=0)
    assert table.lookup(ints(1)).item() == 0.5
    assert native_rule(MyAdagrad(0.5)) is None
    assert native_rule(CopiedAdagrad(0.5)) is None
    assert native_rule(DelayCompensated(Yogi(0.1))) is None
    assert native_rule(DelayCompensated(Adam())) is not None


@fixed_examples(30)
@given(
    which=st.sampled_from(range(len(CUSTOM))),
    dim=st.sampled_from([1, 3, 8]),
    pooled=st.booleans(),
    calls=st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=4),
    clip=st.sampled_from([None, 1.0]),
    missing=st.sampled_from(["initial", "zeros"]),
)
def test_one_row_at_a_time_equals_all_at_once(
    which: int, dim: int, pooled: bool, calls: list[list[int]], clip: float | None, missing: str
) -> None:
    tables = []
    for engine in ("reference", "cpu"):
        config = TableConfig("t", dim=dim, optimizer=CUSTOM[which], initializer=Uniform(), missing=missing)
        table = Table(config, engine=engine)
        table.track("watch")
        for step, ids in enumerate(calls):
            pooling = Pooling.sum("t", torch.tensor([0, len(ids)]), dim) if pooled else None
            grads = dyadic(step, 1 if pooled else len(ids), dim)
            given_grads = [grads] if pooled else grads
            table.update(
                None, ints(*ids), given_grads, pooling, step=step, time=step, scale=0.5, clip_norm=clip
            )
        tables.append(table)
    reference, cpu = (whole(table) for table in tables)
    assert reference.ids.tolist() == cpu.ids.tolist()
    assert reference.time.tolist() == cpu.time.tolist()
    assert_close(cpu.rows, reference.rows)
    for key in reference.state:
        assert_close(cpu.state[key], reference.state[key])
    touched = [set(table.drain_touched("watch")[0].tolist()) for table in tables]
    assert touched[0] == touched[1] == set(reference.ids.tolist())


def test_segments_in_torch_and_native_ones_share_a_row(engine: str) -> None:
    segments = [
        Segment(1, optimizer=SGD(1.0), initializer=Uniform(0, 0)),
        Segment(2, optimizer=Yogi(0.1), initializer=Uniform(0, 0)),
        Segment(1, optimizer=Momentum(1.0, momentum=0.5), initializer=Uniform(0, 0)),
    ]
    table = Table(TableConfig("t", segments=segments), engine=engine)
    table.reinitialize(ints(1))
    epoch, rows = table.epoch, table.find(ints(1))
    for step in range(2):
        table.update(rows, ints(1), torch.tensor([[1.0, 0.0, 0.0, 1.0]]), step=step, epoch=epoch)
    assert table.epoch == epoch
    assert table.lookup(ints(1)).tolist() == [[-2.0, 0.0, 0.0, -2.5]]
    assert state_of(table, 1)["1/updates"] == [2.0]


# ---- what goes wrong


class Raises(SignSGD):
    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> None:
        rows += 1
        raise RuntimeError("broken")


class Rebinds(SignSGD):
    def update(self, rows: Tensor, grads: Tensor, state: Mapping[str, Tensor], lr: float, step: int) -> Any:
        rows = rows - lr * grads
        return rows if lr > 0.5 else None


def test_nothing_is_written_if_a_step_raises(engine: str) -> None:
    table = sgd_table(engine, 1, optimizer=Raises(1.0))
    table.assign(ints(1), torch.zeros(1, 1))
    with unchanged(table), pytest.raises(RuntimeError, match="broken"):
        table.apply_gradients(ints(1, 2), torch.ones(2, 1), step=0)
    with unchanged(table):
        table.apply_gradients(ints(), torch.ones(0, 1), step=0)


@pytest.mark.parametrize("lr", [1.0, 0.5], ids=["returns", "rebinds"])
def test_an_update_that_is_not_in_place_raises(engine: str, lr: float) -> None:
    table = sgd_table(engine, 1, optimizer=Rebinds(lr))
    table.assign(ints(1), torch.zeros(1, 1))
    with unchanged(table), pytest.raises(UsageError, match=r"Rebinds.update must change .* in place"):
        table.apply_gradients(ints(1), torch.ones(1, 1), step=0)


def test_states_are_distinct_and_an_optimizer_has_an_update() -> None:
    class Wrong(SignSGD):
        returned: ClassVar[Any]

        def states(self, dim: int) -> Any:
            return self.returned

    for Wrong.returned in (None, 3, ("v",), (("v", 2),), (State("v", 1), State("v", 2)), {"v": 2}):
        with pytest.raises(InputError, match=r"Wrong: states\(\)"):
            Segment(2, optimizer=Wrong(0.1))

    class Nothing(Optimizer):
        pass

    with pytest.raises(TypeError, match="update"):
        Nothing(0.1)  # type: ignore[abstract]


# ---- with other calls


def test_a_collection_trains_and_saves_it() -> None:
    def collection() -> EmbeddingCollection:
        tables = [TableConfig("t", dim=2, optimizer=Yogi(0.1))]
        return EmbeddingCollection(tables, [Feature("f", "t")], seed=3)

    made, store = collection(), MemoryStore()
    batch = {"f": Ragged.from_lists([[1, 2], [1]])}
    for _ in range(2):
        made(batch)["f"].sum().backward()
    checkpoint.save(made, store)
    loaded = collection()
    checkpoint.load(loaded, store)

    assert_same_tables(whole(loaded.tables["t"]), whole(made.tables["t"]))
    assert state_of(made.tables["t"], 1)["0/updates"] == [2.0]
    other = EmbeddingCollection([TableConfig("t", dim=2, optimizer=SignSGD(0.1))], [Feature("f", "t")])
    with pytest.raises(CheckpointError, match="was trained with Yogi, but the model uses SignSGD"):
        checkpoint.load(other, store)
