"""EmbeddingCollection: from output gradients to rows, in backward and in step()."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megalith import (
    Adagrad,
    EmbeddingCollection,
    Feature,
    FirstN,
    Mean,
    PolynomialDecay,
    Ragged,
    Sum,
    TableConfig,
)
from megalith.errors import InputError, UsageError
from tests.fixed_examples import fixed_examples
from tests.nn.support import assign, collection, column, contents, floats, ints, times, zeros
from tests.table.support import assert_close, whole

# ---- a forgotten step()


def test_a_forgotten_step_warns_once_and_raises_at_the_limit() -> None:
    made = collection(update="step", max_pending=70)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(70):
            made({"a": ints(1)})["a"].sum().backward()
    assert [str(each.message).partition(":")[0] for each in caught] == ['EmbeddingCollection(update="step")']
    assert "64 backwards wait for step()" in str(caught[0].message)
    with pytest.raises(UsageError, match=r"collection\.step\(\).*zero_grad\(\).*max_pending"):
        made({"a": ints(1)})["a"].sum().backward()
    made.step()  # what was pending is not lost
    assert contents(made) == {1: [-70]}
    for _ in range(70):
        made({"a": ints(1)})["a"].sum().backward()
    made.zero_grad()
    made({"a": ints(1)})["a"].sum().backward()
    made.step()
    assert contents(made) == {1: [-71]}


def test_forwards_of_one_backward_count_once_and_max_pending_is_a_positive_integer() -> None:
    made = collection(update="step", max_pending=2)
    for _ in range(2):
        sum(made({"a": ints(1)})["a"].sum() for _ in range(5)).backward()  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="2 backwards"):
        made({"a": ints(1)})["a"].sum().backward()
    made.step()
    assert contents(made) == {1: [-10]}

    for limit in (0, -1, 2.5, True, "many"):
        with pytest.raises(InputError, match="max_pending"):
            collection(update="step", max_pending=limit)


# ---- update="backward"


@pytest.mark.parametrize("update", ["backward", "step"])
def test_a_second_backward_through_one_forward_raises(update: str) -> None:
    made = collection(Feature("a", "t"), Feature("b", "t"), update=update)
    out = made({"a": ints(1), "b": ints(2)})
    loss = out["a"].sum()
    loss.backward(retain_graph=True)
    with pytest.raises(UsageError, match="backward has already run"):
        loss.backward()
    with pytest.raises(UsageError, match="backward has already run"):
        out["b"].sum().backward()  # the other output of the same forward
    if update == "step":
        made.step()
    assert contents(made) == {1: [-1]}
    assert made.global_step == 1


def test_only_what_leads_to_the_rows_updates_them() -> None:
    made = collection()
    weight = torch.ones(1, requires_grad=True)
    loss = (made({"a": ints(1)})["a"] * weight).sum()
    torch.autograd.grad(loss, weight, retain_graph=True)  # a gradient of the dense part alone
    assert contents(made) == {}
    loss.backward()
    assert contents(made) == {1: [-1]}


def test_the_step_is_that_of_forward_and_then_advances(engine: str) -> None:
    # The predecessor's vector: rates 1.0 at step 0 and 1.1 at step 1, gradients of 2: -2, then -4.2.
    decay = PolynomialDecay(1.0, decay_steps=10, end=2.0)
    made = EmbeddingCollection([zeros(lr=decay)], [Feature("a", "t")], engine=engine)
    (2 * made({"a": ints(0, 1)})["a"]).sum().backward()
    assert contents(made) == {0: [-2], 1: [-2]}
    (2 * made({"a": ints(0, 1)})["a"]).sum().backward()
    torch.testing.assert_close(floats(*contents(made).values()), floats([-4.2], [-4.2]))
    assert made.global_step == 2

    early, late = made({"a": ints(5)})["a"], made({"a": ints(6)})["a"]  # both forwards at step 2
    early.sum().backward()
    late.sum().backward()
    torch.testing.assert_close(floats(contents(made)[5], contents(made)[6]), floats([-1.2], [-1.2]))
    assert made.global_step == 4


def test_gradients_that_are_not_finite_write_nothing(engine: str) -> None:
    made = EmbeddingCollection(
        [zeros("t"), zeros("u")], [Feature("a", "t"), Feature("b", "u")], engine=engine
    )
    out = made({"a": ints(1), "b": ints(1)})
    with pytest.raises(InputError, match="hold NaN or Inf"):
        (out["a"] + out["b"] * math.nan).sum().backward()
    assert contents(made) == contents(made, "u") == {}
    assert made.global_step == 0


# ---- update="step"


def test_backward_waits_for_step_and_zero_grad_drops_what_was_collected(engine: str) -> None:
    made = collection(update="step", engine=engine)
    made({"a": ints(1)})["a"].sum().backward()
    assert contents(made) == {}
    made.step()
    assert contents(made) == {1: [-1]}
    made.step()  # nothing collected since
    assert contents(made) == {1: [-1]}
    assert made.global_step == 1

    made = collection(update="step")
    made({"a": ints(1)})["a"].sum().backward()
    made.zero_grad()
    made({"a": ints(2)})["a"].sum().backward()
    made.step()
    assert contents(made) == {2: [-1]}

    with pytest.raises(UsageError, match='step\\(\\) is for EmbeddingCollection\\(update="step"\\)'):
        collection().step()


def adagrad(update: str, *features: Feature, engine: str = "cpu") -> EmbeddingCollection:
    tables = [TableConfig(name, dim=3, optimizer=Adagrad(0.1)) for name in ("t", "u")]
    return EmbeddingCollection(tables, list(features), update=update, engine=engine)


def train(made: EmbeddingCollection, batches: list[dict[str, Any]], factors: list[dict[str, Tensor]]) -> None:
    """A forward and backward of each batch; the gradient of output k is factors[k]."""
    for batch, factor in zip(batches, factors, strict=True):
        out = made(batch)
        sum((out[name] * factor[name]).sum() for name in factor).backward()


@fixed_examples(40)
@given(
    cut=st.integers(0, 6),
    ids=st.lists(st.lists(st.integers(0, 3), max_size=3), min_size=6, max_size=6),
    combiner=st.sampled_from([Sum(), Mean(), FirstN(2)]),
    weighted=st.booleans(),
    engine=st.sampled_from(["cpu", "reference"]),
)
def test_two_forwards_and_one_step_are_one_joined_batch(
    cut: int, ids: list[list[int]], combiner: Any, weighted: bool, engine: str
) -> None:
    weights = [[0.5 + k for k, _ in enumerate(row)] for row in ids] if weighted else None
    joined = {"a": column(*ids, weights=weights), "b": column(*reversed(ids))}
    parts = [{name: c[s] for name, c in joined.items()} for s in (slice(0, cut), slice(cut, 6))]
    # Each forward is summed by itself first, so the order of a sum may differ.
    features = [Feature("a", "t", combiner), Feature("b", "u", combiner)]
    twice, once = (adagrad(update, *features, engine=engine) for update in ("step", "backward"))
    shape = (6, *combiner.output_shape(3))
    # Numbers above 0: no sum of them cancels, so its relative error stays small.
    factor = {name: 0.1 + torch.rand(shape, generator=torch.Generator().manual_seed(0)) for name in joined}

    train(once, [joined], [factor])
    train(twice, parts, [{n: f[:cut] for n, f in factor.items()}, {n: f[cut:] for n, f in factor.items()}])
    twice.step()

    assert twice.global_step == once.global_step == 1
    for table in ("t", "u"):
        expected, actual = (whole(each.shards.local[table]) for each in (once, twice))
        assert actual.ids.tolist() == expected.ids.tolist()
        assert_close(actual.rows, expected.rows)
        assert_close(actual.state["0/sum"], expected.state["0/sum"])


def test_micro_batches_of_which_some_have_weights(engine: str) -> None:
    made = collection(Feature("a", "t"), Feature("b", "t"), update="step", engine=engine)
    for batch in (
        {"a": column([1, 2], weights=[[2.0, 3.0]]), "b": column([3])},
        {"a": column([1, 2]), "b": column([3], weights=[[4.0]])},
    ):
        out = made(batch)
        (out["a"] + out["b"]).sum().backward()
    made.step()
    assert contents(made) == {1: [-3], 2: [-4], 3: [-5]}


@pytest.mark.parametrize(
    "scale", [0.5, np.float32(0.5), torch.tensor(0.5), torch.tensor(0.5, requires_grad=True)]
)
def test_scale_is_a_finite_number_and_clips_are_any_number(scale: Any) -> None:
    made = collection(update="step", clip_value=torch.tensor(0.75), clip_norm=np.float32(0.75))
    made({"a": ints(1)})["a"].sum().backward()
    (made({"a": ints(2)})["a"].sum() * 10).backward()
    made.step(scale=scale)
    assert contents(made) == {1: [-0.5], 2: [-0.75]}

    made = collection(update="step")
    made({"a": ints(1)})["a"].sum().backward()
    for scale in (math.nan, math.inf, "1", None, True, torch.ones(2), torch.tensor(math.nan)):
        with pytest.raises(InputError, match="scale must be a finite number"):
            made.step(scale=scale)  # type: ignore[arg-type]
    made.step()
    assert contents(made) == {1: [-1]}


def test_a_step_that_fails_writes_nothing_and_keeps_what_was_collected() -> None:
    broken = {"now": True}
    rate: Callable[[int], float] = lambda step: math.nan if broken["now"] else 1.0  # noqa: E731
    made = EmbeddingCollection([zeros(lr=rate)], [Feature("a", "t")], update="step")
    made({"a": ints(1)})["a"].sum().backward()
    made({"a": ints(2)})["a"].sum().backward()
    with pytest.raises(InputError, match="learning rate"):
        made.step()
    assert contents(made) == {}
    assert made.global_step == 0
    broken["now"] = False
    made.step()
    assert contents(made) == {1: [-1], 2: [-1]}


def test_collected_gradients_belong_to_the_collection_alone() -> None:
    # bias.grad and the output's gradient are one piece of memory in the engine's eyes.
    made = collection(update="step", dim=2)
    bias = nn.Parameter(torch.zeros(2))
    ((made({"a": ints(1)})["a"] + bias.view(1, 2)) * floats([2, 3])).sum().backward()
    assert bias.grad is not None
    bias.grad.zero_()
    made.step()
    assert contents(made) == {1: [-2, -3]}


# ---- scale and clipping


def test_clip_value_bounds_output_gradients(engine: str) -> None:
    made = collection(Feature("a", "t", Mean()), dim=2, clip_value=1.0, engine=engine)
    (made({"a": column([1, 2], [1])})["a"] * floats([4, -0.5], [-8, 0.25])).sum().backward()
    assert contents(made) == {1: [-0.5 + 1, 0.25 - 0.25], 2: [-0.5, 0.25]}


@pytest.mark.parametrize("clip", [{"clip_value": 1.0}, {"clip_norm": 1.0}], ids=["value", "norm"])
def test_clipping_sees_scaled_gradients(engine: str, clip: Any) -> None:
    # A loss scaled by 1024 and step(scale=1 / 1024) train as if nothing had been scaled.
    made = collection(update="step", engine=engine, **clip)
    (1024 * floats([0.5], [8.0]) * made({"a": ints(1, 2)})["a"]).sum().backward()
    made.step(scale=1 / 1024)
    assert contents(made) == {1: [-0.5], 2: [-1]}


def test_clip_value_hides_no_infinity() -> None:
    made = collection(update="step", clip_value=1.0)
    (made({"a": ints(1)})["a"] * math.inf).sum().backward()
    assert not made.grads_finite()
    with pytest.raises(InputError, match="output gradients contain NaN or Inf"):
        made.step()
    made.zero_grad()
    with pytest.raises(InputError, match="output gradients contain NaN or Inf"):
        (collection(clip_value=1.0)({"a": ints(1)})["a"] * math.inf).sum().backward()


def test_norm_and_finiteness_of_collected_gradients() -> None:
    made = collection(dim=2, update="step", clip_value=1.0)
    assert made.grad_norm().item() == 0
    assert made.grads_finite()
    (made({"a": ints(1)})["a"] * floats([2, 4])).sum().backward()
    (made({"a": ints(2)})["a"] * floats([5, 6])).sum().backward()
    assert made.grad_norm().item() == pytest.approx(9)  # before clipping
    assert made.grads_finite()
    (made({"a": ints(3)})["a"] * math.nan).sum().backward()
    assert not made.grads_finite()
    made.zero_grad()
    assert made.grads_finite()


# ---- time


def test_time_reaches_the_rows_and_the_latest_time_of_a_step_counts(engine: str) -> None:
    made = collection(engine=engine)
    made({"a": ints(1)}, time=1000)["a"].sum().backward()
    made({"a": ints(2)}, time=2000.9)["a"].sum().backward()
    assert times(made) == {1: 1000, 2: 2000}

    made = collection(update="step")
    for id, time in ((1, 3000), (2, None), (3, 1000)):
        made({"a": ints(id)}, time=time)["a"].sum().backward()
    made.step()
    assert times(made) == {1: 3000, 2: 3000, 3: 3000}


# ---- changes between forward and update


@pytest.mark.parametrize("update", ["backward", "step", "step of two"])
@pytest.mark.parametrize("change", ["remove", "clear", "evict", "grow", "restore"])
def test_changes_between_forward_and_update(engine: str, update: str, change: str) -> None:
    made = collection(update=update.split()[0], engine=engine)
    assign(made, {n: [10 * n] for n in (1, 2, 3)})
    losses = [made({"a": ints(1, 3)})["a"].sum()]
    if update == "step of two":
        losses.append(made({"a": ints(3, 4)})["a"].sum())

    if change == "remove":
        made.shards.remove({"t": ints(1, 2)})
        assign(made, {7: [70]})  # takes a row that became free
    elif change == "clear":
        made.shards.clear()
    elif change == "evict":
        made.shards.evict(now=2**32 - 1)
    elif change == "grow":
        made.shards.assign({"t": (torch.arange(100, 800), torch.ones(700, 1))})
    else:
        chunk = next(made.shards.scan("t"))
        made.shards.clear()
        made.shards.restore("t", chunk)

    for loss in losses:
        loss.backward()
    if made.update == "step":
        made.step()

    before = {"remove": {3: 30, 7: 70}, "clear": {}}.get(change, {1: 10, 2: 20, 3: 30})
    expected = dict(before)
    for id in (1, 3) if len(losses) == 1 else (1, 3, 3, 4):
        expected[id] = expected.get(id, 0) - 1
    rows = {id: row[0] for id, row in contents(made).items() if not 100 <= id < 800}
    assert rows == expected


@pytest.mark.parametrize("pending", [1, 2])
def test_ids_changed_in_place_after_forward_raise(pending: int) -> None:
    made = collection(update="step")
    batches = [ints(1, 2), ints(3, 4)][:pending]
    for batch in batches:
        made({"a": batch})["a"].sum().backward()
    batches[-1].fill_(9)
    with pytest.raises(UsageError, match="table 't': its ids were changed in place"):
        made.step()
    assert contents(made) == {}


def test_ids_that_were_copied_may_change() -> None:
    made = collection(Feature("a", "t"), Feature("b", "t"))
    a, b = ints(1), ints(2).int()
    out = made({"a": a, "b": b})
    a.fill_(9)
    b.fill_(9)
    (out["a"] + out["b"]).sum().backward()
    assert contents(made) == {1: [-1], 2: [-1]}


def test_row_splits_changed_in_place_after_forward_raise() -> None:
    made = collection()
    splits = ints(0, 1, 3)
    loss = made({"a": Ragged(ints(1, 2, 3), splits)})["a"].sum()
    splits[1] = 2
    with pytest.raises(UsageError, match="feature 'a': its row_splits were changed in place"):
        loss.backward()
    assert contents(made) == {}


def test_a_sparse_output_gradient_names_the_table(engine: str) -> None:
    made = collection(Feature("a", "t", None), engine=engine)
    rows = made({"a": column([1, 2])})["a"].values
    with pytest.raises(InputError, match="table 't': grads must be dense"):
        rows.backward(torch.ones(2, 1).to_sparse())
    assert contents(made) == {}


def test_clip_norm_may_be_set_and_is_checked() -> None:
    made = collection(clip_norm=2.0)
    made.clip_norm = 0.5
    made({"a": ints(1)})["a"].backward(torch.full((1, 1), 8.0))
    assert contents(made) == {1: [-0.5]}
    for wrong in (-1.0, float("nan"), float("inf")):
        with pytest.raises(InputError, match="clip_norm must be a positive, finite number"):
            made.clip_norm = wrong
