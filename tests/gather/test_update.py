"""The outer update: bit for bit the reference, for any blocks and any split, within its budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from megalith import SGD, LocalShards, OneBit, TableConfig
from megalith.distributed.tensor_parts import fingerprint
from megalith.errors import BudgetError, InputError, UsageError
from megalith.gather.fetch import RankOptions
from megalith.gather.payload import Payload
from megalith.gather.payload_schema import PayloadSchema
from megalith.gather.plan import UpdateConfig
from megalith.gather.reduce import Travel, clip_factors, row_bytes
from megalith.gather.result import GatherResult
from megalith.gather.table_rows import PeerTables
from megalith.gather.update import OuterUpdate
from megalith.ops.matrix_chunks import STEP_BYTES
from tests.gather import naive
from tests.gather.support import gathered, peer_bytes, small_schema, weights

SCHEMA = small_schema()
SEEDS = (3, 1, 8, 6, 2)


def window(
    schema: PayloadSchema = SCHEMA, seeds: Sequence[int] = SEEDS, **plan: Any
) -> tuple[GatherResult, list[naive.NaivePayload]]:
    data = {uid: peer_bytes(schema, uid, seed=uid) for uid in seeds}
    result = gathered(schema, data, **plan)
    return result, [naive.read(data[uid]) for uid in result.uids]


def stepped(
    result: GatherResult, start: dict[str, Tensor] | None = None, **options: Any
) -> dict[str, Tensor]:
    tensors = {name: t.clone() for name, t in (start or weights()).items()}
    OuterUpdate(result.schema).apply(tensors, result, **options)
    return tensors


def later(result: GatherResult, windows: int = 1) -> GatherResult:
    """The same result, as of a later window."""
    return replace(result, plan=replace(result.plan, window=result.plan.window + windows))


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# ---- against the reference


@pytest.mark.parametrize("mean", ["contributors", "peers"])
@pytest.mark.parametrize("rule", ["mean", "trimmed", "median"])
@pytest.mark.parametrize("clip", ["median", "none"])
def test_weights_are_the_references(mean: Any, rule: Any, clip: Any) -> None:
    config = UpdateConfig(lr=0.3, mean=mean, rule=rule, clip=clip, trim=0.2)
    result, read = window(update=config)
    found = stepped(result)
    for name, before in weights().items():
        gradient = naive.aggregate(
            read, name, clip=clip == "median", rule=rule, mean=mean, trim=Fraction("0.2")
        )
        expected = before.numpy() - gradient * np.float32(0.3)
        assert np.array_equal(found[name].numpy(), expected), name


def test_a_transformed_model_is_close_to_the_reference() -> None:
    schema = small_schema(dct=True)
    result, read = window(schema)
    found = stepped(result)
    for name, before in weights().items():
        expected = before - torch.from_numpy(np.asarray(naive.aggregate(read, name)))
        torch.testing.assert_close(found[name], expected, atol=1e-5, rtol=1e-5)


def test_sign_and_nesterov() -> None:
    result, read = window(update=UpdateConfig(optimizer="sign", lr=0.25))
    found = stepped(result)
    name = "linear.weight"
    gradient = naive.aggregate(read, name)
    assert np.array_equal(found[name].numpy(), weights()[name].numpy() - np.sign(gradient) * np.float32(0.25))

    result, _ = window(update=UpdateConfig(optimizer="nesterov", lr=0.7, momentum=0.9))
    tensors, update = weights(), OuterUpdate(SCHEMA)
    reference = nn.Parameter(weights()[name].clone())
    optimizer = torch.optim.SGD([reference], lr=0.7, momentum=0.9, nesterov=True)
    for number in range(3):
        update.apply(tensors, later(result, number))
        reference.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    torch.testing.assert_close(tensors[name], reference.detach(), rtol=1e-6, atol=1e-6)
    assert update.outer_step == 3


def test_excluded_peers_count_for_nothing() -> None:
    result, _ = window()
    without, _ = window(seeds=[uid for uid in SEEDS if uid != 8])
    assert_same(stepped(result, exclude=[8]), stepped(without))
    report = OuterUpdate(SCHEMA).apply(weights(), result, exclude=[8, 77])
    assert (report.uids, report.excluded) == ((1, 2, 3, 6), (8,))


# ---- blocks and splits


CONFIGS = [
    UpdateConfig(lr=0.3),
    UpdateConfig(optimizer="nesterov", mean="peers"),
    UpdateConfig(rule="trimmed", trim=0.25),
    UpdateConfig(rule="median"),
]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda c: f"{c.optimizer}-{c.rule}")
@pytest.mark.parametrize("dct", [False, True])
def test_budgets_change_nothing(config: UpdateConfig, dct: bool) -> None:
    schema = small_schema(dct=dct)
    whole = stepped(window(schema, update=config)[0])
    least = least_budget(schema, config)
    for budget in (least, least + 777, least + 50_000):
        result, _ = window(schema, update=config, memory_budget=budget)
        tensors = weights()
        report = OuterUpdate(schema).apply(tensors, result)
        assert_same(tensors, whole)
        assert report.peak_bytes <= budget


def least_budget(schema: PayloadSchema, config: UpdateConfig) -> int:
    """A budget in which one row of each parameter fits."""
    rows = [row_bytes(spec, config, len(SEEDS), Travel(0, 0)) for spec in schema.parameters]
    return STEP_BYTES + max(rows) + 8192


@pytest.mark.parametrize("config", CONFIGS[1::2], ids=lambda c: f"{c.optimizer}-{c.rule}")
def test_threads_change_nothing(config: UpdateConfig, restore_threads: None) -> None:
    schema = PayloadSchema.of({"w": torch.zeros(320, 320)}, dct=True)
    data = {uid: peer_bytes(schema, uid) for uid in range(5)}
    found = []
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        result = gathered(schema, data, update=config)
        found.append((stepped(result, {"w": torch.ones(320, 320)}), result.accepted))
    for tensors, accepted in found[1:]:
        assert_same(tensors, found[0][0])
        assert accepted == found[0][1]


def test_low_precision_weights_are_stepped_in_float32() -> None:
    result, _ = window(update=UpdateConfig(lr=0.1))
    start = {name: t.to(torch.bfloat16) for name, t in weights().items()}
    found = stepped(result, start)
    exact = stepped(result, {name: t.float() for name, t in start.items()})
    for name, tensor in found.items():
        assert tensor.dtype is torch.bfloat16
        assert torch.equal(tensor, exact[name].to(torch.bfloat16))


# ---- tables


TABLES = small_schema(users=3, items=1)


def rows_of(result: GatherResult, **options: Any) -> dict[str, dict[int, np.ndarray]]:
    taken: dict[str, dict[int, np.ndarray]] = {"users": {}, "items": {}}

    def take(table: str, ids: Tensor, rows: Tensor) -> None:
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert not set(ids.tolist()) & set(taken[table])
        assert not taken[table] or ids[0] > max(taken[table])
        taken[table] |= dict(zip(ids.tolist(), rows.numpy(), strict=True))

    stepped(result, tables=take, **options)
    return taken


@pytest.mark.parametrize("mean", ["contributors", "peers"])
def test_table_rows_are_the_references(mean: Any) -> None:
    result, read = window(TABLES, update=UpdateConfig(lr=0.5, mean=mean))
    taken = rows_of(result)
    for name in ("users", "items"):
        expected = naive.aggregate_table(read, name, mean=mean)
        assert sorted(taken[name]) == list(expected)
        for key, row in expected.items():
            np.testing.assert_array_equal(taken[name][key], row * np.float32(-0.5))


@pytest.mark.parametrize("rule", ["mean", "median"])
def test_budgets_do_not_change_table_rows(rule: Any) -> None:
    config = UpdateConfig(rule=rule)
    whole = rows_of(window(TABLES, update=config)[0])
    small = rows_of(window(TABLES, update=config, memory_budget=least_budget(TABLES, config))[0])
    for name, rows in whole.items():
        assert rows.keys() == small[name].keys()
        assert all(np.array_equal(row, small[name][key]) for key, row in rows.items())


def test_table_rows_need_a_taker() -> None:
    result, _ = window(TABLES)
    before = weights()
    tensors = weights()
    with pytest.raises(InputError, match="rows of table 'users': pass tables"):
        OuterUpdate(TABLES).apply(tensors, result)
    assert_same(tensors, before)


# ---- refusals and torn steps


def test_refusals_leave_everything_as_it_was() -> None:
    result, _ = window()
    update, tensors = OuterUpdate(SCHEMA), weights()
    transposed = {**tensors, "odd": torch.zeros(5, 7)}
    strided = {**tensors, "odd": torch.zeros(5, 7).T}
    cases: list[tuple[str, Any, GatherResult]] = [
        ("'odd' of the schema was not given", {k: v for k, v in tensors.items() if k != "odd"}, result),
        ("its schema has floating point", transposed, result),
        ("is not contiguous", strided, result),
        ("no peer to update with", tensors, gathered(SCHEMA, {})),
        ("another schema", tensors, window(small_schema(keep=4))[0]),
    ]
    for message, given_, gathered_ in cases:
        with pytest.raises(InputError, match=message):
            update.apply(given_, gathered_)
    with pytest.raises(BudgetError, match="raise memory_budget"):
        update.apply(tensors, window(memory_budget=100)[0])
    wide, median, ignore = small_schema(users=40_000), UpdateConfig(rule="median"), lambda *rows: None
    with pytest.raises(BudgetError, match="one row of table 'users' of 5 peers"):
        OuterUpdate(wide).apply(
            tensors, window(wide, update=median, memory_budget=16 << 20)[0], tables=ignore
        )
    assert_same(tensors, weights())
    assert update.outer_step == 0
    assert update.momentum == {}


class Broken(Exception):
    pass


def broken(result: GatherResult, monkeypatch: pytest.MonkeyPatch) -> GatherResult:
    """The same result; reading codes of the last parameter fails."""
    last = len(result.schema.parameters) - 1
    real = Payload.codes

    def codes(self: Payload, number: int, start: int, stop: int) -> Tensor:
        if number == last:
            raise Broken("disk gone")
        return real(self, number, start, stop)

    monkeypatch.setattr(Payload, "codes", codes)
    return result


@pytest.mark.parametrize("policy", ["host", "disk"])
def test_a_step_that_breaks_off_is_undone(
    policy: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    result, _ = window(update=UpdateConfig(optimizer="nesterov"))
    update, tensors = OuterUpdate(SCHEMA), weights()
    update.apply(tensors, result)
    result = later(result)
    before = {name: t.clone() for name, t in tensors.items()}
    momentum = {name: t.clone() for name, t in update.momentum.items()}
    broken(result, monkeypatch)
    with pytest.raises(Broken):
        update.apply(tensors, result, options=RankOptions(snapshot=policy, spool_directory=tmp_path / "s"))
    assert_same(tensors, before)
    assert_same(update.momentum, momentum)
    assert update.outer_step == 1


def test_a_torn_step_without_a_snapshot_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    result = broken(window()[0], monkeypatch)
    update = OuterUpdate(SCHEMA)
    with pytest.raises(UsageError, match="weights may be inconsistent: reload a checkpoint"):
        update.apply(weights(), result)
    assert update.outer_step == 0


def test_state_can_be_saved() -> None:
    result, _ = window(update=UpdateConfig(optimizer="nesterov"))
    a, tensors = OuterUpdate(SCHEMA), weights()
    a.apply(tensors, result)
    b, others = OuterUpdate(SCHEMA), {name: t.clone() for name, t in tensors.items()}
    state = a.state_dict()
    state["momentum"]["odd"] = state["momentum"]["odd"].t().contiguous().t()  # its strides do not matter
    b.load_state_dict(state)
    a.apply(tensors, later(result))
    b.apply(others, later(result))
    assert_same(tensors, others)
    assert b.outer_step == 2
    with pytest.raises(InputError, match="momentum of 'odd' has shape"):
        b.load_state_dict({"outer_step": 1, "momentum": {"odd": torch.zeros(2)}})


def test_a_window_is_applied_once_and_in_order() -> None:
    result, _ = window()
    update, tensors = OuterUpdate(SCHEMA), weights()
    update.apply(tensors, later(result))
    after = {name: t.clone() for name, t in tensors.items()}
    for again in (later(result), result):
        with pytest.raises(UsageError, match="window 4 was applied already"):
            update.apply(tensors, again)
    loaded = OuterUpdate(SCHEMA)
    loaded.load_state_dict(update.state_dict())
    with pytest.raises(UsageError, match="cannot be applied"):
        loaded.apply(tensors, later(result))
    assert_same(tensors, after)
    assert update.outer_step == 1
    update.apply(tensors, later(result, 2))


# ---- memory


def test_even_thousands_of_peers_need_little() -> None:
    spec = PayloadSchema.of({"w": torch.zeros(64, 64)}).parameters[0]
    assert row_bytes(spec, UpdateConfig(), 5000, Travel(3 * 1250, 3 * 1250)) < 2 << 20


def test_the_fast_exchange_of_one_process_gives_the_same_bits() -> None:
    for dct in (False, True):
        schema = small_schema(dct=dct)
        exact, fast = (window(schema, update=UpdateConfig(lr=0.3, exchange=e))[0] for e in ("exact", "fast"))
        assert_same(stepped(fast), stepped(exact))
    with pytest.raises(InputError, match='exchange="fast" needs rule="mean"'):
        UpdateConfig(exchange="fast", rule="median")


def test_fingerprints_tell_weights_apart() -> None:
    base = weights()
    moved = {**base, "odd": base["odd"] + 1e-7}
    other = {**base, "odd": base["odd"].to(torch.float64)}
    prints = [fingerprint(each) for each in (base, moved, other)]
    assert len({p.hash for p in prints}) == 3
    assert fingerprint(dict(reversed(base.items()))) == prints[0]
    each = prints[0].parameters["odd"]
    assert each.norm == pytest.approx(float(base["odd"].double().norm()))
    assert each.mean == pytest.approx(float(base["odd"].double().mean()))
    assert prints[0].norm == pytest.approx(
        float(torch.cat([t.flatten() for t in base.values()]).double().norm())
    )
    bad = fingerprint({"x": torch.tensor([float("nan")])})
    assert bad.to_json()["x"][0] is None


def test_norms_are_clipped_to_the_lower_of_two_medians() -> None:
    norms = torch.tensor([[4.0], [1.0], [3.0], [2.0]], dtype=torch.float64)
    assert clip_factors(norms, UpdateConfig())[0].item() == pytest.approx(2.0 / 4.0)
    assert clip_factors(norms, replace(UpdateConfig(), clip="none")).tolist() == [[1.0]] * 4


def test_a_peer_exchanges_stored_rows_not_those_of_a_serving_precision() -> None:
    config = TableConfig("t", dim=2, optimizer=SGD(1.0), serving=OneBit(0.5))
    local, shared = LocalShards([config], seed=3), LocalShards([config], seed=3)
    rows = PeerTables(local, shared)
    ids, change = torch.tensor([4, 9]), torch.tensor([[0.25, -0.5], [0.125, 2.0]])
    before = shared.local["t"].lookup(ids, stored=True)
    local.assign_add({"t": (ids, -change)})

    sent = rows.changes()["t"]
    shared.assign_add({"t": (ids[:1], change[:1])})
    rows.adopt()

    after = torch.stack([before[0] + change[0], before[1]])
    assert torch.allclose(sent[1][sent[0].argsort()], change)
    assert torch.equal(local.local["t"].lookup(ids, stored=True), after)
