"""Wrong inputs of Monolith's ops: an InputError that names the argument.

`tests/test_wrong_input.py` passes arguments of wrong types.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from megalith import Ragged
from megalith.compat import monolith
from tests.ops.test_ops_errors import COLUMN, EMPTY, F32, I3, check, ints

KEYS = monolith.unique_key_with_value_and_offset(Ragged.from_lists([[5, 5], [6]]), [1, 2])
WHERE = KEYS.value_offset
POS = Ragged.from_lists([[0], [1]])


def fill(pos: Any = POS, value: Any = F32[:, 0], where: Any = WHERE, dims: Any = (1, 2)) -> Any:
    return monolith.fill_with_offset_map(pos, value, where, monolith.SharedBuffer(4), dims)


def reduce(index: Any, values: Any = F32, length: Any = 3) -> Any:
    """All three reductions, which check the same."""
    reductions = monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn
    return [each(index, values, length) for each in reductions]


WRONG: dict[Callable[..., Any], list[tuple[tuple[Any, ...], str]]] = {
    monolith.split_by_indices: [((I3, F32, 2), r"indices\[2\] = 2")],
    monolith.ragged_split_by_indices: [
        ((I3[:2], COLUMN, 3), "indices must have"),
        ((I3, COLUMN, 2), r"indices\[2\] = 2"),
    ],
    monolith.reorder_by_indices: [
        ((I3, I3, 2), r"shard_ids\[2\] = 2"),
        ((I3, I3[:1], 3), "shard_ids must have"),
    ],
    monolith.fused_reorder_by_indices: [
        (([I3], 2, [2, 2]), "inputs has 1, dim_sizes has 2"),
        (([I3], 2, [0]), r"dim_sizes\[0\]"),
        (([], 2, []), "inputs is empty"),
        (([I3], 0, [2]), "num_of_shards"),
    ],
    monolith.unique_key_with_value_and_offset: [
        ((COLUMN, [1]), "dims has 1 sizes for 2 rows of key"),
        ((COLUMN, [1, 0]), r"dims\[1\]"),
    ],
    fill: [
        ((POS, torch.ones(2)), "value is too short"),
        ((Ragged.from_lists([[0], [2]]),), "pos holds a number"),
        ((Ragged.from_lists([[0], [-1]]),), "pos holds a number"),
        ((POS, F32[:, 0], WHERE, [1]), "dims has 1 sizes for 2 rows of pos"),
        ((POS, torch.ones(9), WHERE, [1, 4]), "value_offset_map exceeds value_buffer"),
    ],
    monolith.fill_with_offset_map_gradient: [((POS, torch.ones(3), WHERE, [1, 2]), "value_offset_map")],
    monolith.finalize_shared_tensor: [
        (([],), "shared_tensor_handles is empty"),
        (([monolith.SharedBuffer(1), monolith.SharedBuffer(1)],), r"handles\[1\] is not the buffer"),
    ],
    monolith.map_id_to_embedding: [
        (([I3], [F32], ints(0, 9)), "input: id 9"),
        (([I3], [F32, F32], I3), "ids has 1, embeddings has 2"),
        (([I3], [F32[:2]], I3), r"embeddings\[0\] must have"),
        (([I3, I3], [F32, F32[:, :1]], I3), r"embeddings\[1\]"),
        (([], [], I3), "ids is empty"),
    ],
    monolith.map_id_to_embedding_gradient_back_prop: [
        (([I3], ints(9), F32[:1]), "input: id 9"),
        (([I3], I3, F32[:2]), "grads must have one row for each of the 3 ids"),
    ],
    monolith.gather_embeddings_by_input: [
        ((I3, F32, ints(5)), "input: id 5"),
        ((I3, F32[:2], I3), "embeddings must have"),
    ],
    monolith.gather_embeddings_by_ids_gradient_back_prop: [((I3[:2], F32, I3), r"index_mapping\[2\] = 2")],
    monolith.fused_gather_embeddings_by_input: [
        ((torch.ones(4), [ints(0, 3)], [2]), r"fused_embedding_offsets\[1\] = 3"),
        ((torch.ones(4), [ints(0)], [2, 2]), "fused_embedding_offsets has 1, embedding_dims has 2"),
        ((F32, [I3], [2]), "fused_embeddings"),
    ],
    monolith.fused_gather_embeddings_by_input_gradient: [
        ((3, [F32], [I3], [2]), r"embedding_offsets\[2\] = 2"),
        ((9, [], [I3], [2]), "grads has 0"),
        ((9, [F32], [I3], [3]), r"grads\[0\] must have the shape \[3, 3\]"),
    ],
    reduce: [
        ((ints(0, 1, 3),), r"id_indices\[2\] = 3"),
        ((ints(0, 1, -1),), r"id_indices\[2\] = -1"),
        ((I3[:2],), "id_indices must have the shape"),
        ((I3.view(3, 1).repeat(1, 2),), "id_indices must have the shape"),
        ((I3, F32, -1), "id_length must be"),
    ],
    monolith.fused_sorted_segment_sum: [
        (([I3], [F32], []), "shapes has 0"),
        (([I3], [F32], [(3,)]), r"shapes\[0\] must be"),
        (([I3], [F32], [I3]), r"shapes\[0\] must have the shape \[2\]"),
        (([I3], [F32], [(3, 3)]), r"values\[0\]"),
        (([I3], [F32], [(2, 2)]), r"indices\[0\]\[2\] = 2"),
    ],
    monolith.fused_reduce_sum_and_split: [((I3, F32, 3, [1]), "split_dims add up to 1")],
    monolith.fused_reduce_and_split: [
        (([ints(0, 2)], [F32], [[2]]), r"splits\[0\] must ascend"),
        (([ints(0, 3, 1, 3)], [F32], [[2]]), r"splits\[0\] must ascend"),
        (([ints(0, 3)], [F32], [[1]]), r"embeddings\[0\] must have the shape \[\?, 1\]"),
        (([ints(0, 3)], [F32], []), "slice_dims has 0"),
    ],
    monolith.normalize_merged_split: [
        ((ints(0, 1), ints(3)), "size must add up"),
        ((ints(0, 1, 1, 2), ints(2, 2)), "begin at 0"),
        ((ints(0, 2, 1), ints(3)), "row_split must not descend"),
        ((EMPTY, EMPTY), "size is empty"),
    ],
    monolith.aligned_flat_concat: [
        (([],), "inputs is empty"),
        (([F32, F32.double()],), r"inputs\[1\] is torch.float64"),
        (([F32], 1.0, 6), "alignment must be a multiple of 4"),
    ],
    monolith.aligned_flat_split: [(([F32], torch.ones(6)), r"flat must have the shape \[16\]")],
}
CASES = {
    f"{function.__name__} {number}": (function, *case)
    for function, cases in WRONG.items()
    for number, case in enumerate(cases)
}


@pytest.mark.parametrize(("function", "arguments", "message"), CASES.values(), ids=CASES)
def test_wrong_input(
    function: Callable[..., Any], arguments: tuple[Any, ...], message: str, implementation: str
) -> None:
    check(lambda: function(*arguments), message, implementation)
