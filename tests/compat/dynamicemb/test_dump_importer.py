"""import_dynamicemb: raw files in its format, every routing mode, optimizer state, ages."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megalith import FTRL, SGD, Adagrad, Adam, Optimizer, RowWiseAdagrad, Segment, TableConfig
from megalith.compat.dynamicemb import import_dynamicemb
from megalith.errors import CheckpointError, InputError
from tests.compat.importing import collection, rows, state, times, write

NOW = 1_700_000_000
SECOND = 1_000_000_000


def table(optimizer: Optimizer) -> TableConfig:
    return TableConfig("t", dim=2, optimizer=optimizer)


PLAIN = table(SGD(0.1))
LRU = {"opt_type": "sgd", "lr": 0.1, "evict_strategy": "EvictStrategy.KLru", "dist_type": "roundrobin"}
CONTINUOUS = LRU | {"dist_type": "continuous"}


def dump(
    root: Path,
    keys: list[list[int]],
    values: list[Any] | None = None,
    *,
    name: str = "t",
    meta: dict[str, Any] | None = None,
    scores: list[list[int]] | None = None,
    state: list[Any] | None = None,
) -> Path:
    """Files of as many ranks as there are lists; a row of key k is [k, -k] by default."""
    values = [[[k, -k] for k in rank] for rank in keys] if values is None else values
    columns = {"keys": ("<i8", keys), "values": ("<f4", values)}
    columns |= {"scores": ("<i8", scores)} if scores is not None else {}
    columns |= {"opt_values": ("<f4", state)} if state is not None else {}
    for kind, (dtype, ranks) in columns.items():
        for rank, data in enumerate(ranks):
            write(root / part(kind, rank, len(keys), name), np.asarray(data, dtype).tobytes())
    write(root / f"model.ebc/{name}_opt_args.json", json.dumps(meta or LRU).encode())
    return root


def part(kind: str, rank: int, ranks: int = 2, name: str = "t") -> str:
    """The path of a file of a dump."""
    return f"model.ebc/{name}_emb_{kind}.rank_{rank}.world_size_{ranks}"


# ---- rows and routing


def test_a_dump_of_two_ranks(tmp_path: Path, engine: str) -> None:
    scores = [[0, 5 * SECOND], [1, 2 * SECOND, 10**18 * 9]]
    path = dump(tmp_path, [[2, -4], [1, 2**62 + 1, -1]], scores=scores)
    made = collection(PLAIN, engine=engine)

    report = import_dynamicemb(made, path, time=NOW)

    assert rows(made, "t") == {id: [float(id), -float(id)] for id in (-4, -1, 1, 2, 2**62 + 1)}
    assert times(made, "t") == {-4: NOW - 5, -1: 0, 1: NOW, 2: NOW, 2**62 + 1: NOW - 2}
    assert (report.rows, report.kept, report.left_out) == ({"t": 5}, {"t": 5}, {})


def test_a_dump_without_dist_type_was_routed_by_roundrobin(tmp_path: Path) -> None:
    meta = {"opt_type": "sgd"}
    made = collection(PLAIN)
    import_dynamicemb(made, dump(tmp_path / "a", [[2, 4], [1, 3]], meta=meta))
    assert sorted(rows(made, "t")) == [1, 2, 3, 4]
    wrong = dump(tmp_path / "b", [[2], [1, 4]], meta=meta)
    message = r"rank_1.world_size_2: key 4 does not belong to rank 1 of 2 under dist_type 'roundrobin'"
    with pytest.raises(CheckpointError, match=message):
        import_dynamicemb(collection(PLAIN), wrong)
    made = collection(PLAIN)
    import_dynamicemb(made, wrong, check_owners=False)
    assert sorted(rows(made, "t")) == [1, 2, 4]


def test_hash_roundrobin_keeps_global_ids(tmp_path: Path) -> None:
    """fmix64 of 0, 1, 7, 8: 0x0, ...cb2c, ...d1dd, ...c687; so by 3 shards: 0, 2, 1 and 2."""
    hashes = {0: 0x0, 1: 0xB456BCFC34C2CB2C, 7: 0x740729CBE468D1DD, 8: 0x46ABCCA593A3C687}
    ranks = [[key for key, mixed in hashes.items() if mixed % 3 == rank] for rank in range(3)]
    made = collection(PLAIN)
    import_dynamicemb(made, dump(tmp_path, ranks, meta=LRU | {"dist_type": "hash_roundrobin"}))
    assert rows(made, "t") == {k: [k, -k] for k in (0, 1, 7, 8)}


@given(
    ids=st.lists(st.integers(0, 60) | st.integers(-(2**63), 2**63 - 1), unique=True, max_size=30),
    num=st.integers(1, 50),
    world=st.integers(1, 5),
)
def test_continuous_keys_become_global_ids_again(
    tmp_path_factory: pytest.TempPathFactory, ids: list[int], num: int, world: int
) -> None:
    """Below block * ranks: rank u div block, key u mod block; beyond: rank u mod ranks, key u div ranks."""
    block = -(-num // world)
    keys: list[list[int]] = [[] for _ in range(world)]
    values: list[list[list[float]]] = [[] for _ in range(world)]
    for number, id in enumerate(ids):
        u = id % 2**64
        rank, key = divmod(u, block) if u < block * world else (u % world, u // world)
        keys[rank].append(key - 2**64 if key >= 2**63 else key)
        values[rank].append([number, 0])
    path = dump(tmp_path_factory.mktemp("dump"), keys, values, meta=CONTINUOUS)
    made = collection(PLAIN)
    import_dynamicemb(made, path, num_embeddings={"t": num})
    assert rows(made, "t") == {id: [number, 0] for number, id in enumerate(ids)}


def test_continuous_needs_the_number_of_embeddings(tmp_path: Path) -> None:
    path = dump(tmp_path, [[0, 1], [0, 5]], meta=CONTINUOUS)
    with pytest.raises(InputError, match=r"pass the original num_embeddings=.'t': \.\.\.., got None"):
        import_dynamicemb(collection(PLAIN), path)
    wrong = dump(tmp_path / "wrong", [[-1], [0]], meta=CONTINUOUS)
    with pytest.raises(CheckpointError, match="key -1 does not belong to rank 0 of 2 under dist_type 'cont"):
        import_dynamicemb(collection(PLAIN), wrong, num_embeddings={"t": 6})


def test_other_names_other_tables_and_counters(tmp_path: Path) -> None:
    dump(tmp_path, [[1]], name="users_emb")
    dump(tmp_path, [[1]], name="items")
    write(tmp_path / "model.ebc" / "users_emb_counter_keys.rank_0.world_size_1", b"12345678")
    made = collection(PLAIN)
    report = import_dynamicemb(made, tmp_path, tables={"t": "users_emb"})
    assert rows(made, "t") == {1: [1, -1]}
    assert report.left_out == {
        "users_emb: admission counters": "they are not imported",
        "table 'items' of the dump": "not requested",
    }


def test_empty_ranks_and_no_scores(tmp_path: Path) -> None:
    made = collection(PLAIN)
    report = import_dynamicemb(made, dump(tmp_path, [[2], []], [[[1, 2]], []]), time=5)
    assert (rows(made, "t"), times(made, "t"), report.left_out) == ({2: [1, 2]}, {2: 5}, {})


@pytest.mark.parametrize(
    ("strategy", "scores"),
    [("KLfu", [123]), ("KEpochLru", [123]), ("KCustomized", [123]), ("KLru", [1, 2])],  # 2: of two words
)
def test_scores_that_are_not_ages(tmp_path: Path, strategy: str, scores: list[int]) -> None:
    strategy = f"EvictStrategy.{strategy}"
    path = dump(tmp_path, [[1]], scores=[scores], meta=LRU | {"evict_strategy": strategy})
    made = collection(PLAIN)
    report = import_dynamicemb(made, path, time=NOW)
    assert times(made, "t") == {1: NOW}
    assert report.left_out == {"t: scores": f"those of {strategy} are not times"}


# ---- optimizer state


def test_adam(tmp_path: Path) -> None:
    meta = LRU | {"opt_type": "adam", "iters": 17, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    path = dump(tmp_path, [[4], [1]], meta=meta, state=[[[1, 2, 3, 4]], [[5, 6, 7, 8]]])
    by_row = Adam(0.1, bias_correction="row")
    split = TableConfig("t", segments=[Segment(1, optimizer=by_row)] * 2)
    for config in (table(Adam(0.1)), table(by_row), split):
        made = collection(config)
        report = import_dynamicemb(made, path)
        assert rows(made, "t") == {1: [1, -1], 4: [4, -4]}
        if config.segments[0].optimizer == by_row:
            assert state(made, "t", "0/count") == {1: [17], 4: [17]}
            assert "t: iters" not in report.left_out
        else:
            assert report.left_out["t: iters"].endswith("set global_step to 17")
        width = config.segments[0].dim
        assert state(made, "t", "0/m") == {1: [5, 6][:width], 4: [1, 2][:width]}
        assert state(made, "t", "0/v") == {1: [7, 8][:width], 4: [3, 4][:width]}
    assert state(made, "t", "1/v") == {1: [8], 4: [4]}


@pytest.mark.parametrize(
    ("optimizer", "opt_type", "kept"),
    [(Adagrad(0.1), "exact_adagrad", [1, 2]), (RowWiseAdagrad(0.1), "exact_row_wise_adagrad", [3])],
    ids=["adagrad", "rowwise_adagrad"],
)
def test_both_adagrads(tmp_path: Path, optimizer: Optimizer, opt_type: str, kept: list[float]) -> None:
    made = collection(table(optimizer))
    import_dynamicemb(made, dump(tmp_path, [[4]], meta=LRU | {"opt_type": opt_type}, state=[[kept]]))
    assert state(made, "t", "0/sum") == {4: kept}


TWO_ROWWISE = TableConfig("t", segments=[Segment(1, optimizer=RowWiseAdagrad(0.1))] * 2)
OTHER_STATE = {
    "none": (table(Adam(0.1)), "adam", None, "'t' was dumped without optimizer state"),
    "adam": (table(Adagrad(0.1)), "adam", [[1, 2, 3, 4]], "'adam', table 't' uses adagrad"),
    "adagrad": (PLAIN, "exact_adagrad", [[1, 2]], "trained with 'exact_adagrad', table 't' uses sgd"),
    "lamb": (table(FTRL(0.1)), "lamb", [[1, 2]], "trained with 'lamb', table 't' uses ftrl"),
    "rowwise": (TWO_ROWWISE, "exact_row_wise_adagrad", [[1]], "table 't' uses rowwise_adagrad"),
    "sgd": (PLAIN, "sgd", [[1]], r"opt_values.rank_0.*: 4 bytes, but 1 keys need 0 \(0 floats per row"),
    "short": (table(Adagrad(0.1)), "exact_adagrad", [[1]], "4 bytes, but 1 keys need 8"),
}


@pytest.mark.parametrize(("config", "opt_type", "kept", "message"), OTHER_STATE.values(), ids=OTHER_STATE)
def test_other_state_raises_or_is_dropped(
    tmp_path: Path, config: TableConfig, opt_type: str, kept: Any, message: str
) -> None:
    path = dump(tmp_path, [[4]], meta=LRU | {"opt_type": opt_type, "iters": 1}, state=kept and [kept])
    made = collection(config)
    with pytest.raises(CheckpointError, match=message):
        import_dynamicemb(made, path)
    assert rows(made, "t") == {}
    report = import_dynamicemb(made, path, drop_optimizer_state=True)
    assert rows(made, "t") == {4: [4, -4]}
    assert report.left_out == {"t: optimizer state": "drop_optimizer_state=True, so it starts fresh"}


@pytest.mark.parametrize("iters", [None, -1, "3", True, 2**53])
def test_adams_counter_must_be_a_number(tmp_path: Path, iters: Any) -> None:
    path = dump(tmp_path, [[4]], meta=LRU | {"opt_type": "adam", "iters": iters}, state=[[[1, 2, 3, 4]]])
    with pytest.raises(CheckpointError, match=r"t_opt_args.json: iters must be Adam's number of steps"):
        import_dynamicemb(collection(table(Adam(0.1))), path)


# ---- errors

ARGS = "model.ebc/t_opt_args.json"
NAN = np.float32([1, math.nan]).tobytes()
DAMAGED: dict[str, tuple[dict[str, bytes | None], str]] = {
    "no keys": ({part("keys", 1): None}, "t_emb_keys with 2 ranks lacks rank 1"),
    "third rank": ({part("keys", 2): b""}, "t_emb_keys with 2 ranks also has rank 2"),
    "two dumps": ({part("keys", 0, 1): b""}, r"table 't' has files of dumps with \[1, 2\] ranks"),
    "some scores": ({part("scores", 0): b"12345678"}, "t_emb_scores with 2 ranks lacks rank 1"),
    "half a key": ({part("keys", 0): b"1234567"}, "rank_0.world_size_2: 7 bytes are not a multiple of 8"),
    "a float": ({part("values", 0): b"1234"}, r"values.rank_0.*: 4 bytes, but 1 keys need 8 \(2 floats per"),
    "long scores": (
        {part("scores", rank): bytes(9) for rank in (0, 1)},
        "scores.rank_0.world_size_2: 9 bytes, but 1 keys need 8",
    ),
    "nan": ({part("values", 1): NAN}, "the row of id 1 .* contains NaN"),
    "no arguments": ({ARGS: None}, "t_opt_args.json cannot be read, but it defines how"),
    "half a JSON": ({ARGS: b"{"}, "t_opt_args.json is not valid JSON"),
    "a list": ({ARGS: b"[]"}, "t_opt_args.json is not a JSON object"),
    "long": ({ARGS: b" " * (1 << 21)}, "t_opt_args.json cannot be read, .* more than 1048576 bytes"),
    "routing": ({ARGS: b'{"dist_type": "zigzag"}'}, "unknown dist_type 'zigzag'; known: continuous"),
    "two folders": (
        {"other/t_emb_keys.rank_0.world_size_1": b""},
        "table 't' is in .*model.ebc, .*other: pass one of them",
    ),
}


@pytest.mark.parametrize(("changes", "message"), DAMAGED.values(), ids=DAMAGED)
def test_errors_before_anything_is_written(
    tmp_path: Path, changes: dict[str, bytes | None], message: str
) -> None:
    dump(tmp_path, [[2], [1]])
    dump(tmp_path, [[5]], name="first")
    for name, data in changes.items():
        if data is None:
            (tmp_path / name).unlink()
        else:
            write(tmp_path / name, data)
    made = collection(TableConfig("first", dim=2, optimizer=SGD(0.1)), PLAIN)
    with pytest.raises(CheckpointError, match=message):
        import_dynamicemb(made, tmp_path)
    assert rows(made, "first") == rows(made, "t") == {}


def test_a_missing_table_or_directory(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"table 't' is not in the dump \(it has 'items'\)"):
        import_dynamicemb(collection(PLAIN), dump(tmp_path, [[1]], name="items"))
    with pytest.raises(CheckpointError, match="nowhere: no such directory"):
        import_dynamicemb(collection(PLAIN), tmp_path / "nowhere")


def test_rows_that_are_not_finite_can_be_skipped(tmp_path: Path) -> None:
    path = dump(tmp_path, [[1, 2, 3]], [[[1, 2], [math.nan, 0], [3, math.inf]]])
    made = collection(PLAIN)
    report = import_dynamicemb(made, path, on_error="skip")
    assert rows(made, "t") == {1: [1, 2]}
    assert report.left_out == {"t: 2 rows": "they contain NaN or Inf"}
