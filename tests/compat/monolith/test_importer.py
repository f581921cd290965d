"""Monolith checkpoints into tables: files laid out from its formats, optimizer state, names, damage."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megalith import (
    FTRL,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    AMSGrad,
    DynamicWdAdagrad,
    GroupAdagrad,
    GroupFTRL,
    Momentum,
    Optimizer,
    RMSProp,
    RMSPropV2,
    RowWiseAdagrad,
    Segment,
    TableConfig,
)
from megalith.compat.monolith import import_monolith
from megalith.compat.monolith.importer import counts
from megalith.errors import CheckpointError, InputError, MegalithError, UnknownNameError, UsageError
from tests.compat.importing import (
    adagrad,
    adam,
    collection,
    contents,
    entry,
    floats,
    ftrl,
    message,
    meta,
    momentum,
    rows,
    sgd,
    snappy,
    state,
    tfrecords,
    times,
    write,
)

USER = TableConfig("user", dim=2, optimizer=Adagrad(0.1, initial_accumulator_value=0.1, eps=0))
PLAIN = TableConfig("user", dim=2, optimizer=SGD(0.1))
NOW = 1_700_000_000


def assets(root: Path, files: dict[str, bytes]) -> Path:
    directory = root / "model.ckpt-7.assets"
    for name, data in files.items():
        write(directory / name, data)
    return directory


# ---- single tables


def test_a_table_of_two_shards(tmp_path: Path, engine: str) -> None:
    path = assets(
        tmp_path,
        {
            "user-00000-of-00002": tfrecords(
                entry(7, (1, 2), adagrad(0.5, 0.25), time=1000), entry(-7, (3, 4), adagrad(1, 2), time=2000)
            ),
            "user-00001-of-00002": tfrecords(entry(2**62, (5, 6), adagrad(3, 4))),
            "checkpoint": b"something else",
        },
    )
    made = collection(USER, engine=engine)

    report = import_monolith(made, path, time=NOW)

    assert rows(made, "user") == {-7: [3, 4], 7: [1, 2], 2**62: [5, 6]}
    assert state(made, "user", "0/sum") == {-7: [1, 2], 7: [0.5, 0.25], 2**62: [3, 4]}
    assert times(made, "user") == {-7: 2000, 7: 1000, 2**62: NOW}
    assert (report.rows, report.kept, report.left_out) == ({"user": 3}, {"user": 3}, {})


def test_the_checkpoints_name_stands_for_its_assets(tmp_path: Path) -> None:
    assets(tmp_path, {"user-00000-of-00001": tfrecords(entry(1, (1, 2), sgd()))})
    made = collection(PLAIN)
    import_monolith(made, tmp_path / "model.ckpt-7")
    assert rows(made, "user") == {1: [1, 2]}


def test_names_with_colons_and_slashes(tmp_path: Path) -> None:
    path = assets(tmp_path, {"hash-user-0-00000-of-00001": tfrecords(entry(1, (1, 2), sgd()))})
    made = collection(PLAIN)
    import_monolith(made, path, tables={"user": "hash/user:0"})
    assert rows(made, "user") == {1: [1, 2]}


def test_the_tables_of_several_parameter_servers_become_one(tmp_path: Path) -> None:
    path = assets(
        tmp_path,
        {
            "user_0-00000-of-00001": tfrecords(entry(0, (1, 2), sgd())),
            "user_1-00000-of-00001": tfrecords(entry(1, (3, 4), sgd())),
        },
    )
    made = collection(PLAIN)
    report = import_monolith(made, path, tables={"user": ["user_0", "user_1"]})
    assert rows(made, "user") == {0: [1, 2], 1: [3, 4]}
    assert report.rows == {"user": 2}


def test_an_id_that_comes_again_is_told(tmp_path: Path) -> None:
    path = assets(tmp_path, {"user-00000-of-00001": tfrecords(entry(1, (1, 2)), entry(1, (3, 4)))})
    made = collection(PLAIN)
    report = import_monolith(made, path)
    assert rows(made, "user") == {1: [3, 4]}
    assert (report.rows["user"], report.kept["user"]) == (2, 1)
    assert report.left_out == {"user: 1 rows": "their ids occur again, and the last row of an id is kept"}


def test_files_of_a_save_that_was_interrupted_are_left_alone(tmp_path: Path) -> None:
    path = assets(
        tmp_path,
        {
            "user-00000-of-00001": tfrecords(entry(1, (1, 2))),
            "user-tmp-123456-00000-of-00002": b"half a rec",
        },
    )
    made = collection(PLAIN)
    assert import_monolith(made, path).left_out == {}


# ---- multi-tables


def test_a_native_multi_table(tmp_path: Path) -> None:
    """Two shards, Snappy; each holds the tables one after the other, as its .meta file lists them."""
    item = TableConfig("item", dim=1, optimizer=SGD(0.1))
    path = assets(
        tmp_path,
        {
            "multi-00000-of-00002": snappy(
                tfrecords(
                    entry(1, (9, 9, 9), sgd()),
                    entry(5, (1,), sgd(), time=50),
                    entry(1, (1, 2), adagrad(1, 1)),
                    entry(2, (3, 4), adagrad(2, 2)),
                ),
                block=100,
            ),
            "multi.meta-00000-of-00002": tfrecords(meta("ad", 1), meta("item", 1), meta("user", 2)),
            "multi-00001-of-00002": snappy(tfrecords(entry(3, (5, 6), adagrad(3, 3)))),
            "multi.meta-00001-of-00002": tfrecords(meta("ad", 0), meta("item", 0), meta("user", 1)),
        },
    )
    made = collection(USER, item)

    report = import_monolith(made, path, time=NOW)

    assert rows(made, "user") == {1: [1, 2], 2: [3, 4], 3: [5, 6]}
    assert state(made, "user", "0/sum") == {1: [1, 1], 2: [2, 2], 3: [3, 3]}
    assert rows(made, "item") == {5: [1]}
    assert times(made, "item") == {5: 50}
    assert report.rows == report.kept == {"user": 3, "item": 1}
    assert report.left_out == {"table 'ad' of the checkpoint": "not requested, 1 rows"}


def test_multi_tables_of_several_parameter_servers_are_joined(tmp_path: Path) -> None:
    files = {}
    for server in range(3):
        files[f"multi_{server}-00000-of-00001"] = snappy(tfrecords(entry(server, (server, 0))))
        files[f"multi_{server}.meta-00000-of-00001"] = tfrecords(meta("user", 1))
    made = collection(PLAIN)
    import_monolith(made, assets(tmp_path, files))
    assert rows(made, "user") == {0: [0, 0], 1: [1, 0], 2: [2, 0]}


# ---- optimizer state


def test_every_optimizer_that_both_have(tmp_path: Path) -> None:
    config = TableConfig(
        "t",
        segments=[
            Segment(1, optimizer=FTRL(0.1)),
            Segment(2, optimizer=Adam(0.1, betas=(0.9, 0.99), bias_correction="row")),
            Segment(1, optimizer=Momentum(0.1)),
            Segment(1, optimizer=SGD(0.1)),
            Segment(2, optimizer=Adagrad(0.1)),
        ],
    )
    dumps = (
        ftrl((-0.5,), (1.1,)),
        adam((1, 2), (3, 4), 0.9**4, 0.99**4),
        momentum(0.75),
        b"",
        adagrad(8, 9),
    )
    path = assets(tmp_path, {"t-00000-of-00001": tfrecords(entry(1, range(7), *dumps))})
    made = collection(config)
    import_monolith(made, path)
    assert rows(made, "t") == {1: list(range(7))}
    (kept,) = ({key: value.tolist()[0] for key, value in contents(made, "t").state.items()},)
    assert kept == {
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
    tensors = {
        "one": entry(1, (-0.00990099,), adam((1.0,), (1.0,), 0.81, 0.9801)),
    }
    path = assets(tmp_path, {"t-00000-of-00001": tfrecords(tensors["one"])})
    made = collection(
        TableConfig("t", dim=1, optimizer=Adam(0.01, betas=(0.9, 0.99), eps=0.01, bias_correction="row"))
    )
    import_monolith(made, path)
    made.shards.apply_gradients({"t": torch.tensor([1])}, {"t": torch.tensor([[10.0]])}, step=1)
    assert rows(made, "t")[1][0] == pytest.approx(-0.01983060, rel=1e-5)


@pytest.mark.parametrize(
    ("config", "dumps", "said"),
    [
        (PLAIN, (adagrad(1, 2),), "segment 0 holds the state of adagrad, but the table keeps that of sgd"),
        (USER, (), "it has optimizer state for 0 segments, but the table has 1"),
        (USER, (sgd(),), "segment 0 holds the state of sgd, but the table keeps that of adagrad"),
    ],
)
def test_other_state_is_refused_or_dropped(
    tmp_path: Path, config: TableConfig, dumps: tuple[bytes, ...], said: str
) -> None:
    path = assets(tmp_path, {"user-00000-of-00001": tfrecords(entry(1, (1, 2), *dumps))})
    made = collection(config)
    with pytest.raises(CheckpointError, match=rf"user-00000-of-00001: the entry at byte 12: {said}"):
        import_monolith(made, path)
    assert rows(made, "user") == {}
    report = import_monolith(made, path, drop_optimizer_state=True)
    assert rows(made, "user") == {1: [1, 2]}
    if config is USER:
        assert state(made, "user", "0/sum") == {1: [pytest.approx(0.1)] * 2}
    assert report.left_out == {"user: optimizer state": "drop_optimizer_state=True, so it starts fresh"}


def test_an_optimizer_that_monolith_lacks(tmp_path: Path) -> None:
    path = assets(tmp_path, {"user-00000-of-00001": tfrecords(entry(1, (1, 2), sgd()))})
    made = collection(TableConfig("user", dim=2, optimizer=RowWiseAdagrad(0.1)))
    with pytest.raises(InputError, match="table 'user': Monolith has no rowwise_adagrad"):
        import_monolith(made, path)
    import_monolith(made, path, drop_optimizer_state=True)
    assert state(made, "user", "0/sum") == {1: [0]}


def test_betas_that_are_not_those_it_was_trained_with(tmp_path: Path) -> None:
    path = assets(
        tmp_path, {"t-00000-of-00001": tfrecords(entry(4, (1,), adam((1,), (1,), 0.9**6, 0.99**6)))}
    )
    made = collection(TableConfig("t", dim=1, optimizer=Adam(0.1, betas=(0.9, 0.999), bias_correction="row")))
    with pytest.raises(
        CheckpointError, match=r"the beta powers of id 4 \(table 't'\) are not powers of betas"
    ):
        import_monolith(made, path)


@pytest.mark.parametrize(
    ("optimizer", "dump", "expected"),
    [
        (
            AMSGrad(0.1, betas=(0.9, 0.99), bias_correction="row"),
            message(8, floats(1, 1), floats(2, 2), floats(3, 3), floats(4, 0.9**4), floats(5, 0.99**4)),
            {"m": [1], "v": [2], "v_max": [3], "count": [3]},
        ),
        (Adadelta(), message(6, floats(1, 1), floats(2, 2)), {"square_avg": [1], "acc_delta": [2]}),
        (RMSProp(), message(11, floats(1, 5)), {"square_avg": [5]}),
        (RMSPropV2(), message(12, floats(1, 5)), {"square_avg": [5]}),
        (DynamicWdAdagrad(), message(4, floats(1, 5)), {"sum": [5]}),
        (GroupFTRL(), message(13, floats(1, 1), floats(2, 2)), {"z": [1], "sum": [2]}),
        (GroupAdagrad(), message(15, floats(1, 7)), {"sum": [7]}),
    ],
)
def test_the_state_of_other_optimizers(
    tmp_path: Path, optimizer: Optimizer, dump: bytes, expected: dict[str, list[float]]
) -> None:
    path = assets(tmp_path, {"t-00000-of-00001": tfrecords(entry(4, (0.5,), dump))})
    made = collection(TableConfig("t", dim=1, optimizer=optimizer))
    import_monolith(made, path)
    assert {name: state(made, "t", f"0/{name}")[4] for name in expected} == expected
    assert len(expected) == len(optimizer.states(1))


def test_adam_is_imported_into_the_row_form(tmp_path: Path) -> None:
    path = assets(
        tmp_path, {"t-00000-of-00001": tfrecords(entry(4, (1,), adam((1,), (1,), 0.9**4, 0.99**4)))}
    )
    made = collection(TableConfig("t", dim=1, optimizer=Adam(0.1, betas=(0.9, 0.99))))
    with pytest.raises(InputError, match=r'Adam\(bias_correction="row"\)'):
        import_monolith(made, path)
    import_monolith(made, path, drop_optimizer_state=True)
    assert rows(made, "t") == {4: [1]}


def test_the_powers_that_monoliths_restore_mixes_up(tmp_path: Path) -> None:
    """Its restore writes beta2's power where beta1's belongs and begins beta2's anew."""
    path = assets(
        tmp_path,
        {"t-00000-of-00001": tfrecords(entry(4, (1,), adam((1,), (1,), 0.99**50 * 0.9**2, 0.99**3)))},
    )
    made = collection(TableConfig("t", dim=1, optimizer=Adam(0.1, betas=(0.9, 0.99), bias_correction="row")))
    report = import_monolith(made, path)
    assert state(made, "t", "0/count") == {4: [2]}
    assert list(report.left_out) == ["t: beta1_power of 1 rows"]


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


def files(*names: str) -> dict[str, bytes]:
    return dict.fromkeys(names, tfrecords(entry(1, (1, 2), sgd())))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({}, "no files NAME-SSSSS-of-NNNNN"),
        (files("user-00001-of-00002"), "user lacks shard 0 of 2"),
        (files("user-00000-of-00002"), "user lacks shard 1 of 2"),
        (files("user-00000-of-00001", "user-00001-of-00001"), "user has shard 1, beyond the 1 of its set"),
        (files("user-00000-of-00001", "user-00000-of-00002"), r"user has files of saves with \[1, 2\]"),
        (files("user-00000-of-00000"), "user has shard 0, beyond the 0 of its set"),
        (files("other-00000-of-00001"), "there is no table 'user' for 'user' .tables: 'first', 'other'."),
        (
            files("user-00000-of-00001") | {"m.meta-00000-of-00001": tfrecords(meta("x", 1))},
            "m.meta has no entries",
        ),
        (
            files("m-00000-of-00002", "m-00001-of-00002")
            | {"m.meta-00000-of-00001": tfrecords(meta("user", 1))},
            "m has 2 shards, m.meta has 1",
        ),
        (
            files("m-00000-of-00001") | {"m.meta-00000-of-00001": tfrecords(meta("user", 2))},
            "m-00000-of-00001: the file ends after 1 of 2 entries",
        ),
        (
            files("m-00000-of-00001") | {"m.meta-00000-of-00001": tfrecords(meta("user", 0))},
            "m-00000-of-00001: there are more entries at byte 0 than its .meta file lists",
        ),
        (
            files("m-00000-of-00001")
            | {"m.meta-00000-of-00001": tfrecords(meta("user", 1), meta("user", 0))},
            "m.meta-00000-of-00001: the table at byte .* is listed twice",
        ),
        (
            files("m-00000-of-00001") | {"m.meta-00000-of-00001": tfrecords(meta("user", 2**63))},
            "m.meta-00000-of-00001: the table at byte .* too large",
        ),
        (
            files("m-00000-of-00001") | {"m.meta-00000-of-00001": tfrecords(b"\xff")},
            "m.meta-00000-of-00001: the record at byte 12: MultiHashTableMetadata: .* not a valid",
        ),
        (
            files("m-00000-of-00001") | {"m.meta-00000-of-00001": b"xyz"},
            "m.meta-00000-of-00001: the file ends",
        ),
        ({"user-00000-of-00001": tfrecords(entry(1, (1, 2, 3)))}, "field 2 has more than 2 weights"),
        (
            {"user-00000-of-00001": tfrecords(entry(1, (1, math.nan)))},
            r"the row of id 1 \(table 'user'\) contains NaN",
        ),
        ({"user-00000-of-00001": tfrecords(entry(9, (1, 2), time=-1))}, "the last-update time of id 9"),
        ({"user-00000-of-00001": tfrecords(entry(9, (1, 2), time=2**32))}, "the last-update time of id 9"),
    ],
)
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
    bodies = (
        entry(1, (1, math.inf), adagrad(1, 1)),
        entry(2, (1, 2), adagrad(1, math.nan)),
        entry(3, (1, 2), adagrad(1, 1)),
    )
    path = assets(tmp_path, {"user-00000-of-00001": tfrecords(*bodies)})
    made = collection(USER)
    report = import_monolith(made, path, on_error="skip")
    assert rows(made, "user") == {3: [1, 2]}
    assert (report.rows, report.kept) == ({"user": 3}, {"user": 1})
    assert report.left_out == {"user: 2 rows": "they contain NaN or Inf"}


def test_arguments(tmp_path: Path) -> None:
    path = assets(tmp_path, files("user-00000-of-00001"))
    made = collection(PLAIN)
    with pytest.raises(UnknownNameError, match="unknown table 'item'"):
        import_monolith(made, path, tables={"item": "user"})
    with pytest.raises(InputError, match="time must be seconds"):
        import_monolith(made, path, time=-1)
    with pytest.raises(InputError, match="on_error must be"):
        import_monolith(made, path, on_error="ignore")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="needs an EmbeddingCollection"):
        import_monolith(made.shards, path)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tables must map tables to names in the source"):
        import_monolith(made, path, tables={})
    with pytest.raises(CheckpointError, match=r"nowhere: there is no such directory, and no nowhere\.assets"):
        import_monolith(made, tmp_path / "nowhere")
    both = collection(PLAIN, TableConfig("item", dim=2, optimizer=SGD(0.1)))
    with pytest.raises(InputError, match="tables maps 'user' to both 'user' and 'item'"):
        import_monolith(both, path, tables={"user": "user", "item": "user"})
    import_monolith(made, path)
    with pytest.raises(UsageError, match="table 'user' already holds 1 rows: import into a new collection"):
        import_monolith(made, path)


@given(damage=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_files_give_an_error_or_nothing_strange(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    data = bytearray(snappy(tfrecords(*(entry(i, (1, 2), adagrad(1, 1)) for i in range(20))), block=200))
    for at, byte in damage:
        data[at % len(data)] = byte
    root = tmp_path_factory.mktemp("damaged")
    path = assets(
        root,
        {"m-00000-of-00001": bytes(data), "m.meta-00000-of-00001": tfrecords(meta("user", 20))},
    )
    made = collection(USER)
    told, expected = "m-00000-of-00001", {i: [1.0, 2.0] for i in range(20)}
    try:
        import_monolith(made, path)
    except MegalithError as error:
        told, expected = str(error), {}
    assert "m-00000-of-00001" in told
    assert rows(made, "user") == expected
