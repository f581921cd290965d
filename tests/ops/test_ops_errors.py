"""Wrong inputs of ops: an InputError that names the argument, never a crash, never a silent result."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import SGD, EmbeddingCollection, Feature, Ragged, Router, Table, TableConfig, ops
from megalith.errors import InputError
from megalith.ops import Bags, OutputSlice
from tests.ops.support import ints

Case = tuple[Callable[[], Any], str]


I3, F32, ROUND = ints(0, 1, 2), torch.ones(3, 2), Router("roundrobin", 2)
EMPTY = ints()
COLUMN = Ragged(I3, ints(0, 1, 3))
SPARSE = torch.eye(3).to_sparse_coo()


def bag(*offsets: int, part: OutputSlice = OutputSlice(0, 0, 0, 2), **options: Any) -> list[Bags]:  # noqa: B008
    return [Bags(ints(*offsets), (part,), **options)]


def pooled(bags: Any, outputs: Any = ((1, 2),), source: Any = F32, index: Any = I3, **options: Any) -> Any:
    return ops.pool_rows(source, index, bags, list(outputs), **options)


ROWS: dict[str, Case] = {
    "gather beyond": (lambda: ops.gather(F32, ints(0, 3)), r"index\[1\] = 3 .* 0 to 2"),
    "gather below": (lambda: ops.gather(F32, ints(-1)), r"index\[0\] = -1"),
    "gather overflowing": (lambda: ops.gather(F32, ints(2**62)), r"index\[0\]"),
    "gather of no columns": (lambda: ops.gather(F32[:, :0], ints(3)), "index is out of range"),
    "gather floats": (lambda: ops.gather(F32, torch.ones(1)), "index must be an int64 or int32"),
    "gather from a vector": (lambda: ops.gather(torch.ones(3), I3), r"rows must have the shape \[\?, \?\]"),
    "gather from sparse": (lambda: ops.gather(SPARSE, I3), "rows must be a dense tensor"),
    "scatter beyond": (lambda: ops.scatter_sum(F32, I3, 2), r"index\[2\] = 2"),
    "scatter ints": (lambda: ops.scatter_sum(F32.long(), I3, 3), "rows must be a float tensor"),
    "scatter into less than none": (lambda: ops.scatter_sum(F32, I3, -1), "num_rows"),
    "pieces beyond": (lambda: ops.gather_pieces(torch.ones(4), [ints(3)], [2]), r"index\[0\] = 3 .* 0 to 2"),
    "pieces unequal": (lambda: ops.gather_pieces(torch.ones(4), [ints(0)], [2, 1]), "indices has 1, widths"),
    "indices no list": (lambda: ops.gather_pieces(torch.ones(4), I3, [1]), "indices must be a list"),  # type: ignore[arg-type]
    "scatter pieces beyond": (lambda: ops.scatter_pieces([F32], [I3], 3), r"index\[2\] = 2 .* 0 to 1"),
}

BUCKETS: dict[str, Case] = {
    "dedup floats": (lambda: ops.dedup(F32[:, 0]), "ids must be"),
    "dedup falling splits": (lambda: ops.dedup(I3, ints(0, 2, 1, 3)), "splits: must ascend"),
    "dedup no splits": (lambda: ops.dedup(I3, EMPTY), r"splits must have the shape \[lists \+ 1\]"),
    "dedup owner beyond": (lambda: ops.dedup(I3, owners=I3, num_shards=2), r"owners\[2\] = 2 .* 0 to 1"),
    "dedup owner wraps": (
        lambda: ops.dedup(I3, owners=I3 * 2**32, num_shards=2),
        r"owners\[1\] = 4294967296",
    ),
    "dedup twofold": (lambda: ops.dedup(I3, None, ROUND, owners=I3), "not both"),
    "dedup other shards": (lambda: ops.dedup(I3, None, ROUND, num_shards=3), "num_shards is 3"),
    "dedup no router": (lambda: ops.dedup(I3, None, 2), "router must be a Router"),  # type: ignore[arg-type]
    "dedup bad widths": (lambda: ops.dedup(I3, widths=[-1]), r"widths\[0\]"),
    "match unknown": (lambda: ops.match(I3, ints(0, 7)), r"queries: id 7 \(position 1\)"),
    "bucketize tensor": (lambda: ops.bucketize(I3, ROUND), "ragged must be a Ragged"),  # type: ignore[arg-type]
    "bucketize few weights": (lambda: ops.bucketize(COLUMN, ROUND, torch.ones(2)), "weights must have"),
    "bucketize int weights": (lambda: ops.bucketize(COLUMN, ROUND, I3), "weights must be a float"),
    "split beyond": (lambda: ops.split_rows(F32, I3, 2), r"indices\[2\] = 2"),
    "split wraps": (lambda: ops.split_rows(F32, I3 + 2**32, 3), r"indices\[0\] = 4294967296"),
    "split into none": (lambda: ops.split_rows(F32, I3, 0), "num_splits must be"),
    "place twice": (lambda: ops.place_rows(F32, ints(0, 0, 1)), "place must be a permutation"),
    "take beyond": (lambda: ops.take(COLUMN, ints(2)), r"rows\[0\] = 2 .* 0 to 1"),
    "take from a tensor": (lambda: ops.take(I3, I3), "ragged must be a Ragged"),  # type: ignore[arg-type]
    "move from beyond": (lambda: ops.move_runs(F32[:, 0], ints(2), ints(0), ints(2), 9), r"source\[0\] = 2"),
    "move less than none": (lambda: ops.move_runs(F32[:, 0], ints(0), ints(0), ints(-1), 3), "widths"),
    "move too much": (lambda: ops.move_runs(F32[:, 0], ints(0), ints(0), ints(2**62), 3), r"source\[0\]"),
    "pad a number": (lambda: ops.pad_rows(torch.ones(()), ints(0), 2), "values"),
    "pad too few": (lambda: ops.pad_rows(F32, ints(0, 2), 2), "splits"),
    "pad to less than none": (lambda: ops.pad_rows(F32, ints(0, 3), -1), "length"),
    "move into less than none": (lambda: ops.move_runs(F32[:, 0], EMPTY, EMPTY, EMPTY, -1), "size"),
}

NAN = torch.tensor([1.0, float("nan"), 1.0])
POOLS: dict[str, Case] = {
    "pool beyond": (lambda: pooled(bag(0, 3), index=ints(0, 1, 3)), r"index\[2\] = 3"),
    "pool beyond a flat end": (
        lambda: pooled(bag(0, 3), source=torch.ones(4), index=ints(0, 3, 2), dim=2),
        r"index\[1\] = 3 .* 0 to 2",
    ),
    "pool floats": (lambda: pooled(bag(0, 3), index=F32[:, 0]), "index must be"),
    "pool ints": (lambda: pooled(bag(0, 3), source=F32.long()), "source must be a float"),
    "pool a flat matrix": (lambda: pooled(bag(0, 3), dim=2), "source must be"),
    "pool past the index": (lambda: pooled(bag(0, 4)), "offsets: beyond the number of ids"),
    "pool falling": (lambda: pooled(bag(2, 1), ((1, 2),)), "offsets: must ascend"),
    "pool no offsets": (lambda: pooled(bag(), ((0, 2),)), "offsets: expected"),
    "pool no bags": (lambda: pooled([I3]), r"bags\[0\] must be Bags"),
    "pool bad shape": (lambda: pooled(bag(0, 3), ((1, -2),)), r"outputs\[0\]\[1\]"),
    "pool other rows": (lambda: pooled(bag(0, 3), ((2, 2),)), "rows and the bags differ"),
    "pool other output": (lambda: pooled(bag(0, 3, part=OutputSlice(1, 0, 0, 2))), "no such output"),
    "pool wide part": (lambda: pooled(bag(0, 3, part=OutputSlice(0, 0, 0, 3))), "slice lies outside the row"),
    "pool step": (
        lambda: pooled(bag(0, 1, 3, part=OutputSlice(0, 0, 0, 2, 2, step=1)), ((1, 9),)),
        "bad step",
    ),
    "pool inner": (
        lambda: pooled(bag(0, 3, part=OutputSlice(0, 0, 0, 1, 2))),
        "bags do not fill output rows",
    ),
    "pool shared rows": (lambda: pooled(bag(0, 1, 3, shared=True), ((3, 2),)), "rows and the bags differ"),
    "pool few weights": (lambda: pooled(bag(0, 3, weights=torch.ones(2))), "weights: expected length 3"),
    "pool nan weights": (lambda: pooled(bag(0, 3, weights=NAN)), "weights: NaN or Inf"),
    "pool int weights": (lambda: pooled(bag(0, 3, weights=I3)), r"bags\[0\].weights must be a float"),
    "pool two weights": (
        lambda: pooled(bag(0, 1, weights=torch.ones(3)) + bag(1, 3, weights=torch.ones(3))),
        "weights: all features of a call must share one tensor",
    ),
    "pool few divisors": (lambda: pooled(bag(0, 3, divisor=torch.ones(2))), r"bags\[0\].divisor must have"),
    "pool zero divisor": (lambda: pooled(bag(0, 3, divisor=torch.zeros(1))), "divisor: zero"),
    "pool nan divisor": (lambda: pooled(bag(0, 3, divisor=NAN[1:2])), "divisor: NaN or Inf"),
    "segments falling": (lambda: ops.segment_sum(F32, ints(0, 2, 1, 3)), "splits must ascend from 0"),
    "segments none": (lambda: ops.segment_sum(F32, EMPTY), r"splits must have the shape \[rows \+ 1\]"),
    "segments of ints": (lambda: ops.segment_sum(F32.long(), ints(0, 3)), "values must be a float"),
}


CASES = ROWS | BUCKETS | POOLS


def check(call: Callable[[], Any], message: str, implementation: str) -> None:
    with pytest.raises(InputError) as caught:
        call()
    if implementation == "native":  # the references' words may differ
        assert re.search(message, str(caught.value)), str(caught.value)


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_named(name: str, implementation: str) -> None:
    check(*CASES[name], implementation)


UNSIGNED = TableConfig("t", dim=1, optimizer=SGD(0.1))


@pytest.mark.parametrize(
    "call",
    [
        ops.dedup,
        lambda ids: ops.match(I3, ids),
        lambda ids: ops.fid(1, ids),
        ops.slot_of,
        ROUND.owner,
        lambda ids: Table(UNSIGNED).lookup(ids),
        lambda ids: EmbeddingCollection([UNSIGNED], [Feature("f", "t")])({"f": ids}),
    ],
    ids=["dedup", "match", "fid", "slot_of", "Router", "Table", "collection"],
)
def test_unsigned_ids_are_rejected_with_the_remedy(call: Callable[[Tensor], Any]) -> None:
    with pytest.raises(InputError, match=r"torch.uint64 \(ids.view\(torch.int64\) keeps all 64 bits\)"):
        call(I3.view(torch.uint64))
