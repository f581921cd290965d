"""Monolith checkpoints into tables: files laid out from its formats, optimizer state, names, damage."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import SGD, Adagrad, Adam, EmbeddingCollection, Optimizer, RowWiseAdagrad, TableConfig, table
from megalith.checkpoint.importers import ImportReport
from megalith.compat.monolith import import_monolith
from megalith.compat.monolith.importer import counts
from megalith.errors import CheckpointError, InputError, MegalithError, UsageError
from tests.compat import importing as wire
from tests.compat.importing import adagrad, adam, collection, entry, floats, meta, rows, sgd, state, tfrecords

USER = TableConfig("user", dim=2, optimizer=Adagrad(0.1, initial_accumulator_value=0.1, eps=0))
PLAIN = TableConfig("user", dim=2, optimizer=SGD(0.1))
NOW = 1_700_000_000


def assets(root: Path, files: dict[str, bytes]) -> Path:
    for name, data in files.items():
        wire.write(root / "model.ckpt-7.assets" / name, data)
    return root / "model.ckpt-7.assets"


def saved(root: Path, *entries: bytes, name: str = "user") -> Path:
    """Assets of one table with one shard."""
    return assets(root, {f"{name}-00000-of-00001": tfrecords(*entries)})


def imported(path: Path, config: TableConfig, **options: Any) -> tuple[EmbeddingCollection, ImportReport]:
    made = collection(config)
    return made, import_monolith(made, path, **options)


def adam_by_row(beta2: float = 0.99, **options: Any) -> TableConfig:
    optimizer = Adam(0.01, betas=(0.9, beta2), bias_correction="row", **options)
    return TableConfig("t", dim=1, optimizer=optimizer)


# ---- single tables


def test_a_table_of_two_shards(tmp_path: Path, engine: str) -> None:
    first = entry(7, (1, 2), adagrad(0.5, 0.25), time=1000), entry(-7, (3, 4), adagrad(1, 2), time=2000)
    files = {"user-00000-of-00002": tfrecords(*first), "checkpoint": b"something else"}
    files["user-00001-of-00002"] = tfrecords(entry(2**62, (5, 6), adagrad(3, 4)))
    made = collection(USER, engine=engine)

    report = import_monolith(made, assets(tmp_path, files), time=NOW)

    assert rows(made, "user") == {-7: [3, 4], 7: [1, 2], 2**62: [5, 6]}
    assert state(made, "user", "0/sum") == {-7: [1, 2], 7: [0.5, 0.25], 2**62: [3, 4]}
    assert wire.times(made, "user") == {-7: 2000, 7: 1000, 2**62: NOW}
    assert (report.rows, report.kept, report.left_out) == ({"user": 3}, {"user": 3}, {})


def test_the_checkpoints_name_stands_for_its_assets(tmp_path: Path) -> None:
    path = saved(tmp_path, entry(1, (1, 2), sgd()))
    wire.write(path / "user-tmp-123456-00000-of-00002", b"half a rec")  # of a save that was interrupted
    made, report = imported(tmp_path / "model.ckpt-7", PLAIN)
    assert (rows(made, "user"), report.left_out) == ({1: [1, 2]}, {})


def test_names_with_colons_and_slashes_and_of_several_parameter_servers(tmp_path: Path) -> None:
    saved(tmp_path, entry(1, (1, 2), sgd()), name="hash-user-0")
    path = saved(tmp_path, entry(0, (3, 4), sgd()), name="user_1")
    made, _ = imported(path, PLAIN, tables={"user": "hash/user:0"})
    assert rows(made, "user") == {1: [1, 2]}
    made, report = imported(path, PLAIN, tables={"user": ["hash/user:0", "user_1"]})
    assert (rows(made, "user"), report.rows) == ({0: [3, 4], 1: [1, 2]}, {"user": 2})


def test_an_id_that_comes_again_is_told(tmp_path: Path) -> None:
    made, report = imported(saved(tmp_path, entry(1, (1, 2)), entry(1, (3, 4))), PLAIN)
    assert rows(made, "user") == {1: [3, 4]}
    assert (report.rows["user"], report.kept["user"]) == (2, 1)
    assert report.left_out == {"user: 1 rows": "their ids occur again, and the last row of an id is kept"}


# ---- multi-tables


def test_a_native_multi_table(tmp_path: Path) -> None:
    """Two shards, Snappy; each holds the tables one after the other, as its .meta file lists them."""
    item = TableConfig("item", dim=1, optimizer=SGD(0.1))
    first = entry(1, (9, 9, 9), sgd()), entry(5, (1,), sgd(), time=50)
    first += entry(1, (1, 2), adagrad(1, 1)), entry(2, (3, 4), adagrad(2, 2))
    files = {
        "multi-00000-of-00002": wire.snappy(tfrecords(*first), block=100),
        "multi.meta-00000-of-00002": tfrecords(meta("ad", 1), meta("item", 1), meta("user", 2)),
        "multi-00001-of-00002": wire.snappy(tfrecords(entry(3, (5, 6), adagrad(3, 3)))),
        "multi.meta-00001-of-00002": tfrecords(meta("ad", 0), meta("item", 0), meta("user", 1)),
    }
    made = collection(USER, item)

    report = import_monolith(made, assets(tmp_path, files), time=NOW)

    assert rows(made, "user") == {1: [1, 2], 2: [3, 4], 3: [5, 6]}
    assert state(made, "user", "0/sum") == {1: [1, 1], 2: [2, 2], 3: [3, 3]}
    assert (rows(made, "item"), wire.times(made, "item")) == ({5: [1]}, {5: 50})
    assert report.rows == report.kept == {"user": 3, "item": 1}
    assert report.left_out == {"table 'ad' of the checkpoint": "not requested, 1 rows"}


def test_multi_tables_of_several_parameter_servers_are_joined(tmp_path: Path) -> None:
    for server in range(3):
        assets(
            tmp_path, {f"multi_{server}-00000-of-00001": wire.snappy(tfrecords(entry(server, (server, 0))))}
        )
        path = saved(tmp_path, meta("user", 1), name=f"multi_{server}.meta")
    made, _ = imported(path, PLAIN)
    assert rows(made, "user") == {0: [0, 0], 1: [1, 0], 2: [2, 0]}


# ---- optimizer state


def test_every_optimizer_that_both_have(tmp_path: Path) -> None:
    by_row = Adam(0.1, betas=(0.9, 0.99), bias_correction="row")
    optimizers = [
        (1, table.FTRL(0.1)),
        (2, by_row),
        (1, table.Momentum(0.1)),
        (1, SGD(0.1)),
        (2, Adagrad(0.1)),
    ]
    config = TableConfig("t", segments=[table.Segment(dim, optimizer=own) for dim, own in optimizers])
    dumps = wire.ftrl((-0.5,), (1.1,)), adam((1, 2), (3, 4), 0.9**4, 0.99**4), wire.momentum(0.75), b""
    path = saved(tmp_path, entry(1, range(7), *dumps, adagrad(8, 9)), name="t")
    made, _ = imported(path, config)
    assert rows(made, "t") == {1: list(range(7))}
    assert {key: value.tolist()[0] for key, value in wire.contents(made, "t").state.items()} == {
        "0/sum": [pytest.approx(1.1)],
        "0/z": [-0.5],
        "1/m": [1, 2],
        "1/v": [3, 4],
        "1/count": [3],
        "2/velocity": [0.75],
        "4/sum": [8, 9],
    }


def test_training_goes_on_as_monolith_would(tmp_path: Path) -> None:
    """Adam with lr .01, betas .9 and .99, eps .01, gradients 10 and 10: -0.00990099, then -0.01983060."""
    path = saved(tmp_path, entry(1, (-0.00990099,), adam((1.0,), (1.0,), 0.81, 0.9801)), name="t")
    made, _ = imported(path, adam_by_row(eps=0.01))
    made.shards.apply_gradients({"t": torch.tensor([1])}, {"t": torch.tensor([[10.0]])}, step=1)
    assert rows(made, "t")[1][0] == pytest.approx(-0.01983060, rel=1e-5)


def test_other_state_is_refused_or_dropped(tmp_path: Path) -> None:
    path = saved(tmp_path, entry(1, (1, 2), sgd()))
    made = collection(USER)
    said = "segment 0 holds the state of sgd, but the table keeps that of adagrad"
    with pytest.raises(CheckpointError, match=rf"user-00000-of-00001: the entry at byte 12: {said}"):
        import_monolith(made, path)
    assert rows(made, "user") == {}
    report = import_monolith(made, path, drop_optimizer_state=True)
    assert rows(made, "user") == {1: [1, 2]}
    assert state(made, "user", "0/sum") == {1: [pytest.approx(0.1)] * 2}
    assert report.left_out == {"user: optimizer state": "drop_optimizer_state=True, so it starts fresh"}


@pytest.mark.parametrize(
    ("optimizer", "said"),
    [
        (RowWiseAdagrad(0.1), "table 'user': Monolith has no rowwise_adagrad"),
        (Adam(0.1, betas=(0.9, 0.99)), r'Adam\(bias_correction="row"\)'),
    ],
    ids=["rowwise_adagrad", "adam by step"],
)
def test_an_optimizer_that_monolith_lacks(tmp_path: Path, optimizer: Optimizer, said: str) -> None:
    path = saved(tmp_path, entry(1, (1, 2), adam((1, 2), (1, 2), 0.9**4, 0.99**4)))
    config = TableConfig("user", dim=2, optimizer=optimizer)
    with pytest.raises(InputError, match=said):
        imported(path, config)
    made, _ = imported(path, config, drop_optimizer_state=True)
    assert rows(made, "user") == {1: [1, 2]}
    assert all(not value.any() for value in wire.contents(made, "user").state.values())


POWERS = [floats(1, 1), floats(2, 2), floats(3, 3), floats(4, 0.9**4), floats(5, 0.99**4)]
OTHERS: dict[str, tuple[Optimizer, bytes, dict[str, list[float]]]] = {
    "amsgrad": (
        table.AMSGrad(0.1, betas=(0.9, 0.99), bias_correction="row"),
        wire.message(8, *POWERS),
        {"m": [1], "v": [2], "v_max": [3], "count": [3]},
    ),
    "adadelta": (table.Adadelta(), wire.message(6, *POWERS[:2]), {"square_avg": [1], "acc_delta": [2]}),
    "rmsprop": (table.RMSProp(), wire.message(11, floats(1, 5)), {"square_avg": [5]}),
    "rmsprop v2": (table.RMSPropV2(), wire.message(12, floats(1, 5)), {"square_avg": [5]}),
    "dynamic": (table.DynamicWdAdagrad(), wire.message(4, floats(1, 5)), {"sum": [5]}),
    "group ftrl": (table.GroupFTRL(), wire.message(13, *POWERS[:2]), {"z": [1], "sum": [2]}),
    "group adagrad": (table.GroupAdagrad(), wire.message(15, floats(1, 7)), {"sum": [7]}),
}


@pytest.mark.parametrize(("optimizer", "dump", "expected"), OTHERS.values(), ids=OTHERS)
def test_the_state_of_other_optimizers(
    tmp_path: Path, optimizer: Optimizer, dump: bytes, expected: dict[str, list[float]]
) -> None:
    path = saved(tmp_path, entry(4, (0.5,), dump), name="t")
    made, _ = imported(path, TableConfig("t", dim=1, optimizer=optimizer))
    assert {name: state(made, "t", f"0/{name}")[4] for name in expected} == expected
    assert len(expected) == len(optimizer.states(1))


def test_powers_that_are_mixed_up_or_of_other_betas(tmp_path: Path) -> None:
    """Monolith's restore writes beta2's power where beta1's belongs and starts beta2's again."""
    path = saved(tmp_path, entry(4, (1,), adam((1,), (1,), 0.99**50 * 0.9**2, 0.99**3)), name="t")
    made, report = imported(path, adam_by_row())
    assert state(made, "t", "0/count") == {4: [2]}
    assert list(report.left_out) == ["t: beta1_power of 1 rows"]
    path = saved(tmp_path, entry(4, (1,), adam((1,), (1,), 0.9**6, 0.99**6)), name="t")
    with pytest.raises(
        CheckpointError, match=r"the beta powers of id 4 \(table 't'\) are not powers of betas"
    ):
        imported(path, adam_by_row(beta2=0.999))


@given(
    updates=st.integers(0, 20_000),
    betas=st.sampled_from([(0.9, 0.999), (0.9, 0.99), (0.5, 0.9), (0.0, 0.99), (0.9, 0.0), (0.95, 0.9999)]),
)
def test_counts_correct_as_the_powers_did(updates: int, betas: tuple[float, float]) -> None:
    """What matters is the bias correction of the next step."""
    powers = [np.full((), beta, np.float32) for beta in betas]
    for k, beta in enumerate(betas):  # as Monolith does: a multiplication an update, rounded each time
        powers[k] = np.multiply.accumulate(np.full(updates + 1, beta, np.float32))[-1]
    count, odd = counts(*(torch.tensor([[float(p)]]) for p in powers), betas)
    assert odd == 0
    t = count.item() + 1
    theirs = math.sqrt(1 - float(powers[1])) / (1 - float(powers[0]))
    ours = math.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t)
    assert ours == pytest.approx(theirs, rel=2e-3)
    if updates < 500 and betas == (0.9, 0.999):
        assert count.item() == updates


# ---- what is refused


def files(*names: str, **tables: bytes) -> dict[str, bytes]:
    """Files of these names with a row, and of a multi-table "m" with these contents."""
    found = dict.fromkeys(names, tfrecords(entry(1, (1, 2), sgd())))
    return found | {f"m.{kind}-00000-of-00001": data for kind, data in tables.items()}


def multi(*tables: bytes) -> dict[str, bytes]:
    return files("m-00000-of-00001", meta=tfrecords(*tables))


def one(*entries: bytes) -> dict[str, bytes]:
    return {"user-00000-of-00001": tfrecords(*entries)}


BOTH = {"m.meta-00000-of-00001": tfrecords(meta("user", 1))}
META = "m.meta-00000-of-00001: the"
REFUSED: dict[str, tuple[dict[str, bytes], str]] = {
    "nothing": ({}, "no files NAME-SSSSS-of-NNNNN"),
    "no shard 0": (files("user-00001-of-00002"), "user lacks shard 0 of 2"),
    "two saves": (files("user-00000-of-00001", "user-00000-of-00002"), r"files of saves with \[1, 2\]"),
    "shard 0 of 0": (files("user-00000-of-00000"), "user has shard 0, beyond the 0 of its set"),
    "no user": (files("other-00000-of-00001"), "no table 'user' for 'user' .tables: 'first', 'other'."),
    "meta alone": (files("user-00000-of-00001", meta=tfrecords(meta("x", 1))), "m.meta has no entries"),
    "two shards": (files("m-00000-of-00002", "m-00001-of-00002") | BOTH, "m has 2 shards, m.meta has 1"),
    "too few": (multi(meta("user", 2)), "m-00000-of-00001: the file ends after 1 of 2 entries"),
    "too many": (multi(meta("user", 0)), "there are more entries at byte 0 than its .meta file lists"),
    "twice": (multi(meta("user", 1), meta("user", 0)), f"{META} table at byte .* is listed twice"),
    "too large": (multi(meta("user", 2**63)), f"{META} table at byte .* too large"),
    "no meta": (multi(b"\xff"), f"{META} record at byte 12: MultiHashTableMetadata: .* not a valid"),
    "cut": (files("m-00000-of-00001", meta=b"xyz"), f"{META} file ends"),
    "nan": (one(entry(1, (1, math.nan))), r"the row of id 1 \(table 'user'\) contains NaN"),
    "past": (one(entry(9, (1, 2), time=-1)), "the last-update time of id 9"),
    "future": (one(entry(9, (1, 2), time=2**32)), "the last-update time of id 9"),
}


@pytest.mark.parametrize(("content", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_refused_before_anything_is_written(
    tmp_path: Path, content: dict[str, bytes], said: str
) -> None:
    good = tfrecords(*(entry(i, (1, 2)) for i in range(3)))
    (tmp_path / "model.ckpt-7.assets").mkdir()
    path = assets(tmp_path, {"first-00000-of-00001": good} | content if content else {})
    made = collection(PLAIN, TableConfig("first", dim=2, optimizer=SGD(0.1)))
    with pytest.raises(CheckpointError, match=said):
        import_monolith(made, path)
    assert rows(made, "first") == rows(made, "user") == {}


def test_rows_that_are_not_finite_can_be_skipped(tmp_path: Path) -> None:
    bodies = entry(1, (1, math.inf), adagrad(1, 1)), entry(2, (1, 2), adagrad(1, math.nan))
    path = saved(tmp_path, *bodies, entry(3, (1, 2), adagrad(1, 1)))
    made, report = imported(path, USER, on_error="skip")
    assert rows(made, "user") == {3: [1, 2]}
    assert (report.rows, report.kept) == ({"user": 3}, {"user": 1})
    assert report.left_out == {"user: 2 rows": "they contain NaN or Inf"}


def test_arguments(tmp_path: Path) -> None:
    path = saved(tmp_path, entry(1, (1, 2), sgd()))
    made = collection(PLAIN, TableConfig("item", dim=2, optimizer=SGD(0.1)))
    for options, said in (
        ({"time": -1}, "time must be seconds"),
        ({"on_error": "ignore"}, "on_error must be"),
        ({"tables": {"user": "user", "item": "user"}}, "tables maps 'user' to both 'user' and 'item'"),
    ):
        with pytest.raises(InputError, match=said):
            import_monolith(made, path, **options)
    with pytest.raises(InputError, match="needs an EmbeddingCollection"):
        import_monolith(made.shards, path)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such directory, and no nowhere\.assets"):
        import_monolith(made, tmp_path / "nowhere")
    import_monolith(made, path, tables={"user": "user"})
    with pytest.raises(UsageError, match="table 'user' already holds 1 rows: import into a new collection"):
        import_monolith(made, path, tables={"user": "user"})


@given(damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_files_give_an_error_or_nothing_strange(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(wire.snappy(tfrecords(*(entry(i, (1, 2), adagrad(1, 1)) for i in range(20))), block=200))
    for at, byte in damage:
        data[at % len(data)] = byte
    files = {"m-00000-of-00001": bytes(data), "m.meta-00000-of-00001": tfrecords(meta("user", 20))}
    path = assets(tmp_path_factory.mktemp("damaged"), files)
    made = collection(USER)
    told, expected = "m-00000-of-00001", {i: [1.0, 2.0] for i in range(20)}
    try:
        import_monolith(made, path)
    except MegalithError as error:
        told, expected = str(error), {}
    assert "m-00000-of-00001" in told
    assert rows(made, "user") == expected
