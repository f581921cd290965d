"""import_torchrec and export_torchrec on state_dicts made by hand; tests/integrations has TorchRec's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, Adagrad, Adam, RowWiseAdagrad, TableConfig
from megalith.compat.torchrec import export_torchrec, import_torchrec
from megalith.errors import InputError, UnknownNameError
from tests.compat.importing import collection, rows, state

PLAIN = TableConfig("t1", dim=2, optimizer=SGD(0.1))
WEIGHT = torch.arange(8.0).view(4, 2)
DENSE = {"model.ebc.embedding_bags.t1.weight": WEIGHT, "model.over.weight": torch.ones(1)}
PREFIX = "ebc._managed_collision_collection._managed_collision_modules.t1."
WEIGHTS = {"ebc._embedding_module.embedding_bags.t1.weight": WEIGHT}
NONE = 2**63 - 1
ZCH = WEIGHTS | {
    PREFIX + "_mch_sorted_raw_ids": torch.tensor([-3, 2**40, NONE, NONE]),
    PREFIX + "_mch_remapped_ids_mapping": torch.tensor([2, 0, 1, 3]),
    PREFIX + "_mch_counts": torch.tensor([5, 6, 0, 0]),
}
MPZCH = WEIGHTS | {PREFIX + "_hash_zch_identities": torch.tensor([[-1], [9], [-1], [2**40]])}


def test_a_dense_weight_has_the_ids_of_its_rows() -> None:
    made = collection(PLAIN)
    report = import_torchrec(made, DENSE)
    assert rows(made, "t1") == {0: [0, 1], 1: [2, 3], 2: [4, 5], 3: [6, 7]}
    assert (report.rows, report.left_out) == ({"t1": 4}, {})
    made = collection(PLAIN)
    import_torchrec(made, {"embeddings.t_user.weight": WEIGHT[:1]}, tables={"t1": "t_user"})
    assert rows(made, "t1") == {0: [0, 1]}


def test_zch() -> None:
    made = collection(PLAIN)
    report = import_torchrec(made, ZCH)
    assert rows(made, "t1") == {-3: [4, 5], 2**40: [0, 1]}
    assert report.left_out == {
        "t1: rows without an id": "the rows that unseen ids share: here each has its own"
    }
    made.shards.remove({"t1": torch.tensor([2**40])})
    made.shards.assign({"t1": (torch.tensor([9, -7]), torch.tensor([[1.0, 2.0], [3.0, 4.0]]))})

    written = export_torchrec(made, ZCH)

    assert written.keys() == ZCH.keys()
    assert written[PREFIX + "_mch_sorted_raw_ids"].tolist() == [-7, -3, 9, NONE]
    assert written[PREFIX + "_mch_remapped_ids_mapping"].tolist() == [0, 1, 2, 3]
    assert written[PREFIX + "_mch_counts"].tolist() == [1, 1, 1, 0]
    assert written[next(iter(WEIGHTS))].tolist() == [[3, 4], [4, 5], [1, 2], [6, 7]]
    assert torch.equal(ZCH[next(iter(WEIGHTS))], WEIGHT)
    again = collection(PLAIN)
    import_torchrec(again, written)
    assert rows(again, "t1") == rows(made, "t1")

    made.shards.assign({"t1": (torch.tensor([1]), torch.ones(1, 2))})
    with pytest.raises(InputError, match="has 4 rows, of which ZCH gives 3 to ids, but the table has 4 ids"):
        export_torchrec(made, ZCH)


def test_mpzch() -> None:
    made = collection(PLAIN)
    import_torchrec(made, MPZCH)
    assert rows(made, "t1") == {9: [2, 3], 2**40: [6, 7]}
    made.shards.assign({"t1": (torch.tensor([9]), torch.tensor([[0.5, 0.25]]))})
    assert export_torchrec(made, MPZCH)[next(iter(WEIGHTS))].tolist() == [[0, 1], [0.5, 0.25], [4, 5], [6, 7]]
    made.shards.assign({"t1": (torch.tensor([10]), torch.ones(1, 2))})
    with pytest.raises(
        InputError, match="1 ids such as 10 have no row there: MPZCH chooses the row of an id"
    ):
        export_torchrec(made, MPZCH)


def test_a_dense_export_has_a_row_for_each_index() -> None:
    made = collection(PLAIN)
    made.shards.assign({"t1": (torch.tensor([2]), torch.tensor([[7.0, 8.0]]))})
    written = export_torchrec(made, DENSE)
    found = written["model.ebc.embedding_bags.t1.weight"]
    assert torch.equal(found, made.tables["t1"].lookup(torch.arange(4)))
    assert found[2].tolist() == [7, 8]
    assert written["model.over.weight"] is DENSE["model.over.weight"]
    made.shards.assign({"t1": (torch.tensor([4, -1]), torch.ones(2, 2))})
    with pytest.raises(InputError, match=r"has 4 rows, too few for 2 ids such as .*: raise num_embeddings"):
        export_torchrec(made, DENSE)


FRESH = "optimizer_state was not given, so it starts fresh"


@pytest.mark.parametrize(
    ("optimizer", "given", "key", "expected"),
    [
        (Adagrad(0.1), {"t1.momentum1": WEIGHT + 1}, "0/sum", [3, 4]),
        (Adagrad(0.1), {"sum": WEIGHT + 1, "step": torch.tensor(3.0)}, "0/sum", [3, 4]),
        (RowWiseAdagrad(0.1), {"t1.momentum1": torch.arange(4.0)}, "0/sum", [1]),
        (RowWiseAdagrad(0.1), {"sum": torch.arange(4.0)[:, None]}, "0/sum", [1]),
        (Adam(0.1), {"momentum1": WEIGHT, "momentum2": WEIGHT + 1, "step": 3}, "0/v", [3, 4]),
    ],
)
@pytest.mark.parametrize(("saved", "id"), [(DENSE, 1), (MPZCH, 9)], ids=["dense", "mpzch"])
def test_state_of_an_optimizer(
    optimizer: Any, given: dict[str, Tensor], key: str, expected: list[float], saved: Any, id: int
) -> None:
    made = collection(TableConfig("t1", dim=2, optimizer=optimizer))
    report = import_torchrec(made, saved, optimizer_state={"t1": given})
    assert state(made, "t1", key)[id] == expected
    assert FRESH not in report.left_out.values()


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no key": ({"other.weight": WEIGHT}, r"embedding_bags.t1.weight or embeddings.t1.weight, got \[\]"),
    "two keys": (DENSE | WEIGHTS, "pass the part of one collection"),
    "dim": ({"embeddings.t1.weight": torch.ones(4, 3)}, r"is \[4, 3\], the table needs \[rows, 2\]"),
    "row": (ZCH | {PREFIX + "_mch_remapped_ids_mapping": torch.tensor([2, 9, 1, 3])}, "a row 9 of 4"),
    "ids": (MPZCH | {PREFIX + "_hash_zch_identities": torch.tensor([9, 9, -1, 8])}, "9 occurs twice"),
    "other": (WEIGHTS | {PREFIX + "_other": WEIGHT}, "managed collisions are not converted: .'_other'"),
}


@pytest.mark.parametrize(("saved", "message"), WRONG.values(), ids=WRONG)
def test_errors_before_anything_is_written(saved: dict[str, Any], message: str) -> None:
    made = collection(PLAIN)
    with pytest.raises(InputError, match=message):
        import_torchrec(made, saved)
    assert rows(made, "t1") == {}


def test_unknown_tables() -> None:
    with pytest.raises(UnknownNameError, match="'t2'"):
        import_torchrec(collection(PLAIN), DENSE, tables={"t2": "t1"})
    with pytest.raises(InputError, match=r"optimizer_state is given for \['t2'\]"):
        import_torchrec(collection(PLAIN), DENSE, optimizer_state={"t2": {}})
