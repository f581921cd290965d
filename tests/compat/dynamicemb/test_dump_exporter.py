"""export_dynamicemb: its files, read back by a few lines of numpy and by our importer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megalith import (
    FTRL,
    SGD,
    Adagrad,
    Adam,
    Capacity,
    EmbeddingCollection,
    MinCount,
    Optimizer,
    RowWiseAdagrad,
    Segment,
    TableConfig,
)
from megalith.compat.dynamicemb import export_dynamicemb, import_dynamicemb
from megalith.errors import InputError, UnknownNameError
from tests.compat.importing import collection, rows, state, times

NOW = 1_700_000_000
IDS = [0, 1, 2, 7, 8, 12345, 2**62 + 1, -5]


def read(folder: Path, name: str) -> dict[int, dict[str, Any]]:
    """All keys of a table of a dump: their file, row, score and state. It knows nothing of Megalith."""
    found: dict[int, dict[str, Any]] = {}
    files = sorted(folder.glob(f"{name}_emb_keys.rank_*.world_size_*"))
    for rank, path in enumerate(files):
        assert path.name == f"{name}_emb_keys.rank_{rank}.world_size_{len(files)}"
        keys = np.fromfile(path, "<i8")

        def column(kind: str, dtype: str, path: Path = path, n: int = len(keys)) -> Any:
            file = path.with_name(path.name.replace("_emb_keys.", f"_emb_{kind}."))
            return np.fromfile(file, dtype).reshape(n, -1).tolist() if file.exists() and n else [None] * n

        columns = column("values", "<f4"), column("scores", "<i8"), column("opt_values", "<f4")
        for key, row, score, kept in zip(keys.tolist(), *columns, strict=True):
            assert key not in found
            found[key] = {"rank": rank, "row": row, "score": score and score[0], "state": kept}
    return found


def meta(folder: Path, name: str = "t") -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((folder / f"{name}_opt_args.json").read_text())
    return parsed


def trained(optimizer: Optimizer, **options: Any) -> EmbeddingCollection:
    """Rows [k, -k] of each id, after one update with gradient 1 at time NOW - 3."""
    made = collection(TableConfig("t", dim=2, optimizer=optimizer, **options))
    ids = torch.tensor(IDS)
    made.shards.assign({"t": (ids, torch.stack([ids, -ids], 1).float())})
    made.shards.apply_gradients({"t": ids}, {"t": torch.ones(len(IDS), 2)}, step=0, time=NOW - 3)
    made.global_step = 1
    return made


@pytest.mark.parametrize("dist_type", ["roundrobin", "hash_roundrobin"])
def test_keys_are_in_the_files_of_their_owners(tmp_path: Path, dist_type: str) -> None:
    made = trained(SGD(1.0), dist_type=dist_type)
    written = export_dynamicemb(made, tmp_path / "model.ebc", ranks=3, time=NOW + 0.5)  # as clocks return it
    assert written == {"t": len(IDS)}

    found = read(tmp_path / "model.ebc", "t")
    assert found.keys() == set(IDS)
    unsigned = {id: id % 2**64 for id in IDS}
    owner = {id: (mixed(u) if dist_type == "hash_roundrobin" else u) % 3 for id, u in unsigned.items()}
    assert {id: each["rank"] for id, each in found.items()} == owner
    assert {id: each["row"] for id, each in found.items()} == rows(made, "t")
    assert {each["score"] for each in found.values()} == {3_000_000_000}  # the age in nanoseconds
    assert meta(tmp_path / "model.ebc") == {
        "opt_type": "sgd",
        "lr": 1.0,
        "evict_strategy": "EvictStrategy.KLru",
        "dist_type": dist_type,
    }
    assert len(list((tmp_path / "model.ebc").iterdir())) == 3 * 4 + 1  # nothing temporary is left


def mixed(x: int) -> int:
    """The finalizer of MurmurHash3."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        x ^= x >> 33
        x = x * factor % 2**64
    return x ^ x >> 33


def test_continuous_keys_are_indices_within_blocks(tmp_path: Path) -> None:
    made = trained(SGD(1.0))
    made.shards.remove({"t": torch.tensor([-5])})
    export_dynamicemb(made, tmp_path, ranks=2, dist_type="continuous", num_embeddings={"t": 8})
    files = [np.fromfile(tmp_path / f"t_emb_keys.rank_{r}.world_size_2", "<i8").tolist() for r in (0, 1)]
    # Blocks of 4: 0, 1, 2 and 7 = 4 + 3; beyond 8, u mod 2 is the rank and u div 2 the key.
    assert [sorted(keys) for keys in files] == [[0, 1, 2, 4], [3, 6172, 2**61]]
    fresh = collection(made.configs["t"])
    import_dynamicemb(fresh, tmp_path, num_embeddings={"t": 8})
    assert rows(fresh, "t") == rows(made, "t")


STATES = {
    "adagrad": (
        Adagrad(0.5, 0.25, 1e-8),
        {"opt_type": "exact_adagrad", "eps": 1e-8, "initial_accumulator_value": 0.25},
    ),
    "rowwise": (
        RowWiseAdagrad(0.5),
        {"opt_type": "exact_row_wise_adagrad", "eps": 1e-8, "initial_accumulator_value": 0},
    ),
    "adam": (
        Adam(0.5, (0.5, 0.75)),
        {"opt_type": "adam", "iters": 1, "beta1": 0.5, "beta2": 0.75, "eps": 1e-8, "weight_decay": 0},
    ),
}


@pytest.mark.parametrize(("optimizer", "expected"), STATES.values(), ids=STATES)
def test_state_goes_there_and_back(tmp_path: Path, optimizer: Optimizer, expected: dict[str, Any]) -> None:
    made = trained(optimizer)
    export_dynamicemb(made, tmp_path, ranks=2, time=NOW)
    assert meta(tmp_path).items() >= (expected | {"lr": 0.5}).items()

    found = read(tmp_path, "t")
    wanted = [state(made, "t", c.key) for c in made.configs["t"].state_columns]
    assert {id: each["state"] for id, each in found.items()} == {
        id: [x for column in wanted for x in column[id]] for id in IDS
    }
    fresh = collection(made.configs["t"])
    import_dynamicemb(fresh, tmp_path, time=NOW)
    assert rows(fresh, "t") == rows(made, "t")
    assert [state(fresh, "t", c.key) for c in made.configs["t"].state_columns] == wanted
    assert times(fresh, "t") == times(made, "t") == dict.fromkeys(IDS, NOW - 3)


def test_the_state_of_segments_is_that_of_whole_rows(tmp_path: Path) -> None:
    split = TableConfig("t", segments=[Segment(1, optimizer=Adam(0.5))] * 2)
    made = collection(split)
    made.shards.apply_gradients({"t": torch.tensor([1])}, {"t": torch.tensor([[1.0, 2.0]])}, step=0)
    export_dynamicemb(made, tmp_path)
    m1, m2, v1, v2 = read(tmp_path, "t")[1]["state"]
    assert (m1, m2) == pytest.approx((0.1, 0.2))
    assert (v1, v2) == pytest.approx((0.001, 0.004))
    fresh = collection(split)
    import_dynamicemb(fresh, tmp_path)
    assert state(fresh, "t", "1/v") == {1: [v2]}


@pytest.mark.parametrize(
    ("score", "strategy", "value"), [("lfu", "KLfu", 2), ("step", "KCustomized", 0), (None, "KLfu", 2)]
)
def test_scores(tmp_path: Path, score: str | None, strategy: str, value: int) -> None:
    made = trained(SGD(1.0), eviction=Capacity(100, score="lfu"))
    export_dynamicemb(made, tmp_path, score=score)
    assert meta(tmp_path)["evict_strategy"] == f"EvictStrategy.{strategy}"
    assert meta(tmp_path).get("step_score") == (2 if score == "step" else None)
    assert {each["score"] for each in read(tmp_path, "t").values()} == {value}


def test_an_empty_table_and_another_name(tmp_path: Path) -> None:
    made = collection(
        TableConfig("t", dim=2, optimizer=Adagrad(0.1)), TableConfig("u", dim=2, optimizer=SGD(0.1))
    )
    assert export_dynamicemb(made, tmp_path, tables={"t": "items[0]"}, ranks=2) == {"t": 0}
    assert len(list(tmp_path.iterdir())) == 9
    assert read(tmp_path, "u") == {}
    fresh = collection(made.configs["t"])
    assert import_dynamicemb(fresh, tmp_path, tables={"t": "items[0]"}).rows == {"t": 0}
    with pytest.raises(InputError, match=r"items.0._emb_keys.rank_0.world_size_2 exists: choose another dir"):
        export_dynamicemb(made, tmp_path, tables={"t": "items[0]"})


WRONG: dict[str, tuple[Optimizer, dict[str, Any], str]] = {
    "optimizer": (FTRL(0.1), {}, r"DynamicEmb cannot continue with FTRL\(.*drop_optimizer_state=True"),
    "weight decay": (Adagrad(0.1, weight_decay=0.1), {}, "DynamicEmb cannot continue with Adagrad"),
    "row form": (Adam(0.1, bias_correction="row"), {}, "DynamicEmb cannot continue with Adam"),
    "score": (SGD(0.1), {"score": "lfu"}, "does not count updates, which score='lfu' needs"),
    "no block": (SGD(0.1), {"dist_type": "continuous"}, "num_embeddings of 't' must be an integer"),
    "mode": (SGD(0.1), {"dist_type": "zigzag"}, "dist_type must be one of continuous, roundrobin"),
}


@pytest.mark.parametrize(("optimizer", "options", "message"), WRONG.values(), ids=WRONG)
def test_what_dynamicemb_has_no_counterpart_of(
    tmp_path: Path, optimizer: Optimizer, options: dict[str, Any], message: str
) -> None:
    made = trained(optimizer)
    with pytest.raises(InputError, match=message):
        export_dynamicemb(made, tmp_path / "dump", **options)
    assert not (tmp_path / "dump").exists()
    if not options:
        export_dynamicemb(made, tmp_path / "dump", drop_optimizer_state=True)
        assert meta(tmp_path / "dump").keys() == {"evict_strategy", "dist_type"}
        assert not list(tmp_path.rglob("*opt_values*"))


def test_reserved_keys_and_unknown_tables(tmp_path: Path) -> None:
    made = collection(TableConfig("t", dim=2, optimizer=SGD(0.1)))
    made.shards.assign({"t": (torch.tensor([1, -4]), torch.ones(2, 2))})
    with pytest.raises(
        InputError, match="table 't': id -4 is a key that DynamicEmb reserves: remove it first"
    ):
        export_dynamicemb(made, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UnknownNameError, match="'nobody'"):
        export_dynamicemb(made, tmp_path, tables={"nobody": "t"})


def test_counts_of_a_table_with_admission(tmp_path: Path) -> None:
    made = collection(TableConfig("t", dim=2, optimizer=SGD(0.1), admission=MinCount(2)))
    ids = {"t": torch.tensor([1, 1, 2])}
    made.shards.apply_gradients(ids, {"t": torch.ones(3, 2)}, step=0)
    export_dynamicemb(made, tmp_path, score="lfu")
    assert {id: each["score"] for id, each in read(tmp_path, "t").items()} == {1: 1}  # one update
