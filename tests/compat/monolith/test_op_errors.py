"""Wrong inputs of Monolith's ops: an InputError that names the argument."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megalith import Ragged
from megalith.compat import monolith
from tests.ops.test_ops_errors import COLUMN, EMPTY, F32, I3, Case, check, ints

KEYS = monolith.unique_key_with_value_and_offset(Ragged.from_lists([[5, 5], [6]]), [1, 2])
POS = Ragged.from_lists([[0], [1]])


def fill(pos: Any = POS, value: Any = F32[:, 0], where: Any = KEYS.value_offset, dims: Any = (1, 2)) -> Any:
    return monolith.fill_with_offset_map(pos, value, where, monolith.SharedBuffer(4), dims)


def mean(index: Any, values: Any = F32, length: Any = 3) -> Any:
    return [
        reduce(index, values, length)
        for reduce in (monolith.reduce_sum, monolith.reduce_mean, monolith.reduce_sqrtn)
    ]


MONOLITH: dict[str, Case] = {
    "split_by_indices": (lambda: monolith.split_by_indices(I3, F32, 2), r"indices\[2\] = 2"),
    "ragged_split lengths": (
        lambda: monolith.ragged_split_by_indices(I3[:2], COLUMN, 3),
        "indices must have",
    ),
    "ragged_split beyond": (lambda: monolith.ragged_split_by_indices(I3, COLUMN, 2), r"indices\[2\] = 2"),
    "ragged_split tensor": (lambda: monolith.ragged_split_by_indices(I3, I3, 2), "num must be a Ragged"),  # type: ignore[arg-type]
    "reorder beyond": (lambda: monolith.reorder_by_indices(I3, I3, 2), r"shard_ids\[2\] = 2"),
    "reorder few": (lambda: monolith.reorder_by_indices(I3, I3[:1], 3), "shard_ids must have"),
    "reorder cube": (
        lambda: monolith.reorder_by_indices(torch.ones(1, 1, 1), I3[:1], 3),
        "input must be numbers",
    ),
    "reorder list": (lambda: monolith.reorder_by_indices([1], I3, 3), "input must be a tensor"),  # type: ignore[arg-type]
    "fused_reorder dims": (
        lambda: monolith.fused_reorder_by_indices([I3], 2, [2, 2]),
        "inputs has 1, dim_sizes has 2",
    ),
    "fused_reorder zero": (lambda: monolith.fused_reorder_by_indices([I3], 2, [0]), r"dim_sizes\[0\]"),
    "fused_reorder none": (lambda: monolith.fused_reorder_by_indices([], 2, []), "inputs is empty"),
    "fused_reorder shards": (lambda: monolith.fused_reorder_by_indices([I3], 0, [2]), "num_of_shards"),
    "fused_reorder tensor": (lambda: monolith.fused_reorder_by_indices(I3, 2, [2]), "inputs must be a list"),  # type: ignore[arg-type]
    "fused_reorder floats": (
        lambda: monolith.fused_reorder_by_indices([I3, F32], 2, [2, 2]),
        r"inputs\[1\] must be",
    ),
    "unique rows": (
        lambda: monolith.unique_key_with_value_and_offset(COLUMN, [1]),
        "dims has 1 sizes for 2 rows of key",
    ),
    "unique zero": (lambda: monolith.unique_key_with_value_and_offset(COLUMN, [1, 0]), r"dims\[1\]"),
    "unique number": (lambda: monolith.unique_key_with_value_and_offset(COLUMN, 1), "dims must be a list"),  # type: ignore[arg-type]
    "fill short": (lambda: fill(value=torch.ones(2)), "value is too short"),
    "fill unknown": (lambda: fill(Ragged.from_lists([[0], [2]])), "pos holds a number"),
    "fill below": (lambda: fill(Ragged.from_lists([[0], [-1]])), "pos holds a number"),
    "fill rows": (lambda: fill(dims=[1]), "dims has 1 sizes for 2 rows of pos"),
    "fill ints": (lambda: fill(value=I3), "value must be a float"),
    "fill other map": (lambda: fill(where=[[0]]), "value_offset_map an OffsetMap"),
    "fill tensor": (lambda: fill(pos=I3), "pos must be a Ragged"),
    "fill wide": (
        lambda: fill(value=torch.ones(9), dims=[1, 4]),
        "value_offset_map exceeds value_buffer",
    ),
    "fill no buffer": (
        lambda: monolith.fill_with_offset_map(POS, torch.ones(3), KEYS.value_offset, None, [1, 2]),  # type: ignore[arg-type]
        "value_buffer must be",
    ),
    "fill gradient short": (
        lambda: monolith.fill_with_offset_map_gradient(POS, torch.ones(3), KEYS.value_offset, [1, 2]),
        "value_offset_map",
    ),
    "finalize none": (lambda: monolith.finalize_shared_tensor([]), "shared_tensor_handles is empty"),
    "finalize two": (
        lambda: monolith.finalize_shared_tensor([monolith.SharedBuffer(1), monolith.SharedBuffer(1)]),
        r"shared_tensor_handles\[1\] is not the buffer",
    ),
    "finalize shape": (
        lambda: monolith.finalize_shared_tensor([monolith.SharedBuffer(4)], shape=[3]),
        "shape",
    ),
    "map_id unknown": (lambda: monolith.map_id_to_embedding([I3], [F32], ints(0, 9)), "input: id 9"),
    "map_id lists": (
        lambda: monolith.map_id_to_embedding([I3], [F32, F32], I3),
        "ids has 1, embeddings has 2",
    ),
    "map_id rows": (lambda: monolith.map_id_to_embedding([I3], [F32[:2]], I3), r"embeddings\[0\] must have"),
    "map_id dims": (
        lambda: monolith.map_id_to_embedding([I3, I3], [F32, F32[:, :1]], I3),
        r"embeddings\[1\]",
    ),
    "map_id none": (lambda: monolith.map_id_to_embedding([], [], I3), "ids is empty"),
    "map_id number": (
        lambda: monolith.map_id_to_embedding([I3], [torch.tensor(1.0)], I3),
        r"embeddings\[0\]",
    ),
    "map_id back unknown": (
        lambda: monolith.map_id_to_embedding_gradient_back_prop([I3], ints(9), F32[:1]),
        "input: id 9",
    ),
    "map_id back rows": (
        lambda: monolith.map_id_to_embedding_gradient_back_prop([I3], I3, F32[:2]),
        "grads must have one row for each of the 3 ids",
    ),
    "gather_by_input unknown": (lambda: monolith.gather_embeddings_by_input(I3, F32, ints(5)), "input: id 5"),
    "gather_by_input rows": (
        lambda: monolith.gather_embeddings_by_input(I3, F32[:2], I3),
        "embeddings must have",
    ),
    "gather back beyond": (
        lambda: monolith.gather_embeddings_by_ids_gradient_back_prop(I3[:2], F32, I3),
        r"index_mapping\[2\] = 2",
    ),
    "gather back list": (
        lambda: monolith.gather_embeddings_by_ids_gradient_back_prop(I3, F32, [0, 1, 2]),  # type: ignore[arg-type]
        "index_mapping must be",
    ),
    "fused_gather beyond": (
        lambda: monolith.fused_gather_embeddings_by_input(torch.ones(4), [ints(0, 3)], [2]),
        r"fused_embedding_offsets\[1\] = 3",
    ),
    "fused_gather dims": (
        lambda: monolith.fused_gather_embeddings_by_input(torch.ones(4), [ints(0)], [2, 2]),
        "fused_embedding_offsets has 1, embedding_dims has 2",
    ),
    "fused_gather matrix": (
        lambda: monolith.fused_gather_embeddings_by_input(F32, [I3], [2]),
        "fused_embeddings",
    ),
    "fused_gradient beyond": (
        lambda: monolith.fused_gather_embeddings_by_input_gradient(3, [F32], [I3], [2]),
        r"embedding_offsets\[2\] = 2",
    ),
    "fused_gradient grads": (
        lambda: monolith.fused_gather_embeddings_by_input_gradient(9, [], [I3], [2]),
        "grads has 0",
    ),
    "fused_gradient shape": (
        lambda: monolith.fused_gather_embeddings_by_input_gradient(9, [F32], [I3], [3]),
        r"grads\[0\] must have the shape \[3, 3\]",
    ),
    "fused_gradient size": (
        lambda: monolith.fused_gather_embeddings_by_input_gradient(I3, [F32], [I3], [2]),
        "fused_embeddings must be one integer",
    ),
    "reduce beyond": (lambda: mean(ints(0, 1, 3)), r"id_indices\[2\] = 3"),
    "reduce below": (lambda: mean(ints(0, 1, -1)), r"id_indices\[2\] = -1"),
    "reduce few": (lambda: mean(I3[:2]), "id_indices must have the shape"),
    "reduce pairs": (lambda: mean(I3.view(3, 1).repeat(1, 2)), "id_indices must have the shape"),
    "reduce ints": (lambda: mean(I3, F32.long()), "id_values must be a float"),
    "reduce length": (lambda: mean(I3, F32, -1), "id_length must be"),
    "reduce lengths": (lambda: mean(I3, F32, I3), "id_length must be one integer"),
    "sorted_sum lists": (lambda: monolith.fused_sorted_segment_sum([I3], [F32], []), "shapes has 0"),
    "sorted_sum shape": (
        lambda: monolith.fused_sorted_segment_sum([I3], [F32], [(3,)]),
        r"shapes\[0\] must be",
    ),
    "sorted_sum columns": (lambda: monolith.fused_sorted_segment_sum([I3], [F32], [(3, 3)]), r"values\[0\]"),
    "sorted_sum beyond": (
        lambda: monolith.fused_sorted_segment_sum([I3], [F32], [(2, 2)]),
        r"indices\[0\]\[2\] = 2",
    ),
    "sum_and_split": (lambda: monolith.fused_reduce_sum_and_split(I3, F32, 3, [1]), "split_dims add up to 1"),
    "reduce_and_split short": (
        lambda: monolith.fused_reduce_and_split([ints(0, 2)], [F32], [[2]]),
        r"splits\[0\] must ascend",
    ),
    "reduce_and_split falling": (
        lambda: monolith.fused_reduce_and_split([ints(0, 3, 1, 3)], [F32], [[2]]),
        r"splits\[0\] must ascend",
    ),
    "reduce_and_split dims": (
        lambda: monolith.fused_reduce_and_split([ints(0, 3)], [F32], [[1]]),
        r"embeddings\[0\] must have the shape \[\?, 1\]",
    ),
    "reduce_and_split lists": (
        lambda: monolith.fused_reduce_and_split([ints(0, 3)], [F32], []),
        "slice_dims has 0",
    ),
    "merged sizes": (
        lambda: monolith.normalize_merged_split(ints(0, 1), ints(3)),
        "size must add up",
    ),
    "merged starts": (lambda: monolith.normalize_merged_split(ints(0, 1, 1, 2), ints(2, 2)), "begin at 0"),
    "merged falling": (
        lambda: monolith.normalize_merged_split(ints(0, 2, 1), ints(3)),
        "row_split must not descend",
    ),
    "merged none": (lambda: monolith.normalize_merged_split(EMPTY, EMPTY), "size is empty"),
    "aligned none": (lambda: monolith.aligned_flat_concat([]), "inputs is empty"),
    "aligned ints": (lambda: monolith.aligned_flat_concat([F32, I3]), r"inputs\[1\] must be a float"),
    "aligned types": (
        lambda: monolith.aligned_flat_concat([F32, F32.double()]),
        r"inputs\[1\] is torch.float64",
    ),
    "aligned odd": (
        lambda: monolith.aligned_flat_concat([F32], alignment=6),
        "alignment must be a multiple of 4",
    ),
    "aligned short": (
        lambda: monolith.aligned_flat_split([F32], torch.ones(6)),
        r"flat must have the shape \[16\]",
    ),
}


@pytest.mark.parametrize("case", MONOLITH.values(), ids=MONOLITH.keys())
def test_wrong_input(case: Case, implementation: str) -> None:
    check(*case, implementation)
