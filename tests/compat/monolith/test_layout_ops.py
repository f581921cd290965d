"""Monolith's layout ops: its worked example, every out type by hand, its random tests against a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from megalith import Ragged, Router
from megalith.compat.monolith import (
    FeatureConfig,
    FeatureConfigs,
    OutConfig,
    OutType,
    PoolingType,
    ShardedFids,
    SliceConfig,
)
from megalith.compat.monolith import fused_embedding_to_layout as to_layout
from megalith.compat.monolith import fused_embedding_to_layout_grad as to_layout_grad
from megalith.compat.monolith import sharding_sparse_fids as shard
from megalith.errors import InputError

pytestmark = pytest.mark.usefixtures("implementation")
SUM, MEAN, FIRSTN = PoolingType.SUM, PoolingType.MEAN, PoolingType.FIRSTN
Rows = Mapping[str, list[list[int]]]
Values = Callable[[str, int], Sequence[float]]
"""A row of a feature's table by id."""


def columns(rows: Rows) -> dict[str, Ragged]:
    return {name: Ragged.from_lists(lists) for name, lists in rows.items()}


def embeddings(
    cfgs: FeatureConfigs, found: ShardedFids, ps: int, values: Values, dtype: Any = torch.float32
) -> list[Tensor]:
    """The flat rows of each list, as a lookup would give them."""
    lists = []
    for number, (fids, splits) in enumerate(zip(found.lists, row_splits(found), strict=True)):
        table = cfgs.table_names[number // ps]
        flat: list[float] = []
        features = [name for name in cfgs.feature_names if cfgs.feature_configs[name].table == table]
        for name, (a, b) in zip(features, pairwise(splits.tolist()), strict=True):
            flat += [x for id in fids[a:b].tolist() for x in values(name, id)]
        lists.append(torch.tensor(flat, dtype=dtype))
    return lists


def row_splits(found: ShardedFids) -> list[Tensor]:
    assert isinstance(found.fid_list_row_splits, dict)
    return list(found.fid_list_row_splits.values())


def encoding(found: ShardedFids) -> tuple[Any, ...]:
    """The arguments of the layout op after the embeddings."""
    return row_splits(found), found.fid_offset, found.feature_offset, found.nfl_offset, found.batch_size


def layouts(
    cfgs: FeatureConfigs, rows: Rows, values: Values, *, ps: int = 2, shared: Sequence[str] = ()
) -> list[Tensor]:
    found = shard(columns(rows), ps, cfgs, shared=shared)
    return to_layout(embeddings(cfgs, found, ps, values), *encoding(found), "example_batch", cfgs, ps)


# ---- the worked example

UID, REST = "9871d3a2c554b27151cacf1422eec048", "c4a398dea30b21551ae4c09454001dba"
EXAMPLE = {"uid": [[3 * i] for i in range(6)], "gid": [[3 * i + 1] for i in range(6)]}
EXAMPLE["cid"] = [[3 * i + 2] for i in range(6)]
DIMS = {"uid": (1, 4), "gid": (1, 4, 8), "cid": (1, 4, 8)}


def example_configs(tables: Mapping[str, str]) -> FeatureConfigs:
    def layout(start: int, end: int, names: Sequence[str]) -> OutConfig:
        width = len(names) * (end - start)
        return OutConfig(tuple(SliceConfig(n, start, end) for n in names), OutType.CONCAT, ((-1, width),))

    return FeatureConfigs(
        {name: FeatureConfig(tables[name], SUM, dims) for name, dims in DIMS.items()},
        {
            "bias": layout(0, 1, ["uid", "gid", "cid"]),
            "vec": layout(1, 5, ["uid", "gid", "cid"]),
            "deep": layout(5, 13, ["gid", "cid"]),
        },
    )


MERGED = example_configs({"uid": UID, "gid": REST, "cid": REST})
NATIVE = example_configs(dict.fromkeys(DIMS, "native_multi_hash_table_fake_table"))


def pairs(fid_offset: Tensor) -> list[tuple[int, int]]:
    return [(x >> 32, x & 0xFFFFFFFF) for x in fid_offset.tolist()]


def test_the_worked_example_with_merged_tables() -> None:
    """The eleven tensors of version 5, in the order of Monolith's tuple."""
    found = shard(columns(EXAMPLE), ps_num=2, feature_cfgs=MERGED, unique=True, input_type="example")

    shards, fid_offset, feature_offset, nfl_offset, batch_size, nfl_size, feature_size, fid_size = found[:8]
    emb_size, shards_row_split, shards_row_split_size, *of_version_4 = found[8:]

    assert {key: ids.tolist() for key, ids in shards.items()} == {
        f"{UID}:0": [0, 6, 12],
        f"{UID}:1": [3, 9, 15],
        f"{REST}:0": [2, 8, 14, 4, 10, 16],
        f"{REST}:1": [5, 11, 17, 1, 7, 13],
    }
    assert {key: s.tolist() for key, s in shards_row_split.items()} == {
        **{f"{UID}:{p}": [0, 3] for p in (0, 1)},
        **{f"{REST}:{p}": [0, 3, 6] for p in (0, 1)},
    }
    assert [s.tolist() for s in shards_row_split_size.values()] == [[2], [2], [3], [3]]
    assert pairs(fid_offset) == [
        *[(2, 0), (3, 0), (2, 13), (3, 13), (2, 26), (3, 26)],
        *[(3, 39), (2, 39), (3, 52), (2, 52), (3, 65), (2, 65)],
        *[(0, 0), (1, 0), (0, 5), (1, 5), (0, 10), (1, 10)],
    ]
    assert feature_offset.tolist() == list(range(19))
    assert nfl_offset.tolist() == [0, 6, 12, 19]
    assert [t.tolist() for t in (batch_size, nfl_size, feature_size, fid_size)] == [[6], [4], [19], [18]]
    assert emb_size.tolist() == [15, 15, 78, 78]
    assert of_version_4 == [None, None, None]


def test_the_worked_example_with_one_table() -> None:
    found = shard(columns(EXAMPLE), 2, NATIVE)

    assert found.lists[0].tolist() == [2, 8, 14, 4, 10, 16, 0, 6, 12]
    assert found.lists[1].tolist() == [5, 11, 17, 1, 7, 13, 3, 9, 15]
    assert [s.tolist() for s in row_splits(found)] == [[0, 3, 6, 9], [0, 3, 6, 9]]
    assert found.emb_size.tolist() == [93, 93]
    assert min(e for _, e in pairs(found.fid_offset)[6:12]) == 39
    assert min(e for _, e in pairs(found.fid_offset)[12:]) == 78


@pytest.mark.parametrize("cfgs", [MERGED, NATIVE], ids=["merged", "native"])
def test_the_worked_example_looks_up_what_was_assigned(cfgs: FeatureConfigs) -> None:
    known = {"uid": 5, "gid": 13, "cid": 13}  # ids of a server that were assigned

    def twos(name: str, id: int) -> list[float]:
        return [2.0 if id // 2 < known[name] else 0.0] * sum(DIMS[name])

    bias, deep, vec = layouts(cfgs, EXAMPLE, twos)

    assert bias.tolist() == [[2, 2, 2]] * 4 + [[0, 2, 2]] * 2
    assert vec.tolist() == [[2] * 12] * 4 + [[0] * 4 + [2] * 8] * 2
    assert deep.tolist() == [[2] * 16] * 6


def test_ids_travel_once_per_feature_and_server_or_once_per_occurrence() -> None:
    rows = {"uid": [[4, 6, 4], [7]], "gid": [[6], []], "cid": [[], []]}
    once, every = (shard(columns(rows), 2, NATIVE, unique) for unique in (True, False))
    assert [f.tolist() for f in once.lists] == [[6, 4, 6], [7]]  # gid, then uid
    assert pairs(once.fid_offset) == [(0, 0), (0, 13), (0, 18), (0, 13), (1, 0)]
    assert [f.tolist() for f in every.lists] == [[6, 4, 6, 4], [7]]
    assert pairs(every.fid_offset) == [(0, 0), (0, 13), (0, 18), (0, 23), (1, 0)]


def test_shared_and_missing_features_have_one_row() -> None:
    rows = {"uid": [[1], [2], [3]], "gid": [[5, 6]], "unknown": [[9], [9], [9]]}
    found = shard(columns(rows), 0, NATIVE, shared=["gid"])  # 0 servers count as 1
    assert found.lists[0].tolist() == [5, 6, 1, 2, 3]
    assert found.feature_offset.tolist() == [0, 0, 2, 3, 4, 5]
    assert found.nfl_offset.tolist() == [2**31, 2**31 + 1, 2, 6]
    assert found.batch_size == 3


def test_a_feature_that_is_missing_in_examples_has_an_empty_row_in_each() -> None:
    rows = {"uid": [[1], [2], [3]], "gid": [[5], [], [6]]}
    found = shard(columns(rows), 1, NATIVE, True, "example")
    assert found.feature_offset.tolist() == [0, 0, 0, 0, 1, 1, 2, 3, 4, 5]
    assert found.nfl_offset.tolist() == [0, 3, 6, 10]
    batch = shard(columns(rows), 1, NATIVE, True, "example_batch")
    assert batch.nfl_offset.tolist() == [2**31, 1, 4, 8]
    lists = embeddings(NATIVE, found, 1, lambda name, id: [float(id)] * sum(DIMS[name]))
    for x, y in zip(
        to_layout(lists, *encoding(found), "example", NATIVE, 1),
        to_layout(lists, *encoding(batch), "example_batch", NATIVE, 1),
        strict=True,
    ):
        assert torch.equal(x, y)
    with pytest.raises(InputError, match="only an example_batch has shared features"):
        shard(columns(rows), 1, NATIVE, True, "instance", shared=["uid"])


def test_ids_count_as_unsigned_and_a_router_decides() -> None:
    rows = {"uid": [[-1, 7]], "gid": [[]], "cid": [[]]}
    assert [f.tolist() for f in shard(columns(rows), 3, NATIVE).lists] == [[-1], [7], []]
    hashed = Router("hash_roundrobin", 3, skip_first=True)
    owners = hashed.owner(torch.tensor([-1, 7])).tolist()
    lists = [f.tolist() for f in shard(columns(rows), hashed, NATIVE).lists]
    assert lists == [[id for id, o in zip([-1, 7], owners, strict=True) if o == s] for s in range(3)]


# ---- each out type by hand


def feature(pooling: PoolingType, *dims: int, length: int = 0) -> FeatureConfig:
    return FeatureConfig("t", pooling, dims, length)


def slices(*cuts: tuple[str, int, int]) -> tuple[SliceConfig, ...]:
    return tuple(SliceConfig(*cut) for cut in cuts)


def by_id(name: str, id: int) -> list[float]:
    return [id + 0.5, 10.0 * id]


TWO = {"a": [[1, 2, 2], []], "b": [[3], [4, 5]]}


def two_features(pooling: PoolingType, length: int = 2, names: str = "ab") -> dict[str, FeatureConfig]:
    return {n: feature(pooling, 1, 1, length=length if pooling == FIRSTN else 0) for n in names}


def pooled(a: PoolingType, kind: OutType, *cuts: tuple[str, int, int], length: int = 2) -> list[Tensor]:
    cfgs = FeatureConfigs(two_features(a, length), {"out": OutConfig(slices(*cuts), kind)})
    return layouts(cfgs, TWO, by_id)


BOTH = (("a", 0, 2), ("b", 0, 2))


def test_sum_and_mean() -> None:
    (out,) = pooled(SUM, OutType.CONCAT, ("a", 1, 2), ("b", 0, 2))
    assert out.tolist() == [[50, 3.5, 30], [0, 10, 90]]
    (out,) = pooled(MEAN, OutType.CONCAT, *BOTH)
    torch.testing.assert_close(out, torch.tensor([[6.5 / 3, 50 / 3, 3.5, 30], [0, 0, 5, 45]]))


def test_stack_add_and_none() -> None:
    (stack,) = pooled(SUM, OutType.STACK, *BOTH)
    (added,) = pooled(SUM, OutType.ADDN, *BOTH)
    one, two = pooled(SUM, OutType.NONE, *BOTH)
    assert stack.tolist() == [[[6.5, 50], [3.5, 30]], [[0, 0], [10, 90]]]
    assert added.tolist() == [[10, 80], [10, 90]]
    assert one.tolist() == [[6.5, 50], [0, 0]]
    assert two.tolist() == [[3.5, 30], [10, 90]]


def test_first_n_with_every_out_type_that_makes_sense() -> None:
    one, two = pooled(FIRSTN, OutType.NONE, *BOTH)
    assert one.tolist() == [[[1.5, 10], [2.5, 20]], [[0, 0], [0, 0]]]
    assert two.tolist() == [[[3.5, 30], [0, 0]], [[4.5, 40], [5.5, 50]]]
    (stack,) = pooled(FIRSTN, OutType.STACK, *BOTH)
    assert torch.equal(stack, torch.stack([one, two], 1))
    (concat,) = pooled(FIRSTN, OutType.CONCAT, ("b", 0, 2), ("a", 1, 2))
    assert torch.equal(concat, torch.cat([two, one[:, :, 1:]], 2))
    (longer,) = pooled(FIRSTN, OutType.NONE, ("a", 0, 1), length=5)
    assert longer.tolist() == [[[1.5], [2.5], [2.5], [0], [0]], [[0]] * 5]


@pytest.mark.parametrize("pooling", [SUM, MEAN, FIRSTN])
@pytest.mark.parametrize("kind", [OutType.CONCAT, OutType.STACK, OutType.ADDN, OutType.NONE])
def test_a_shared_feature_is_the_same_in_every_row(pooling: PoolingType, kind: OutType) -> None:
    if (pooling, kind) == (FIRSTN, OutType.ADDN):
        return
    cfgs = FeatureConfigs(two_features(pooling), {"out": OutConfig(slices(*BOTH), kind)})
    once = {"a": [[1, 2, 2]], "b": [[3], [4, 5], []]}
    written_out = {"a": [[1, 2, 2]] * 3, "b": [[3], [4, 5], []]}
    actual = layouts(cfgs, once, by_id, shared=["a"])
    for x, y in zip(actual, layouts(cfgs, written_out, by_id), strict=True):
        assert torch.equal(x, y)


def test_outputs_are_zero_where_a_feature_is_missing() -> None:
    features = two_features(SUM, names="abc")
    outs = {"x": OutConfig(slices(*BOTH, ("c", 0, 2)), OutType.ADDN), "y": OutConfig(slices(("c", 0, 2)))}
    added, missing = layouts(FeatureConfigs(features, outs), TWO, by_id)
    assert added.tolist() == [[10, 80], [10, 90]]
    assert missing.tolist() == [[0, 0], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_rows_of_any_float_type_flat_or_not(dtype: torch.dtype) -> None:
    cfgs = FeatureConfigs(two_features(SUM), {"out": OutConfig(slices(*BOTH), OutType.NONE)})
    found = shard(columns(TWO), 2, cfgs)
    rows = [e.view(-1, 2).requires_grad_() for e in embeddings(cfgs, found, 2, by_id, dtype)]

    one, two = to_layout(rows, *encoding(found), "instance", cfgs, 2)

    assert one.dtype == two.dtype == dtype
    assert one.tolist() == [[6.5, 50], [0, 0]]
    grads = torch.autograd.grad(one.sum() + 2 * two.sum(), rows)
    assert [g.shape for g in grads] == [r.shape for r in rows]
    # server 0 holds ids 2 and 4, server 1 holds 1, 3 and 5
    assert [g.tolist() for g in grads] == [[[2, 2], [2, 2]], [[1, 1], [2, 2], [2, 2]]]


def test_offsets_in_monolith_s_own_types() -> None:
    cfgs = FeatureConfigs(two_features(SUM), {"out": OutConfig(slices(*BOTH))})
    found = shard({"a": Ragged.from_lists([[1, 2]]), "b": columns(TWO)["b"]}, 2, cfgs, shared=["a"])
    rows = embeddings(cfgs, found, 2, by_id)
    offsets = found.fid_offset.to(torch.uint64), found.feature_offset.int(), found.nfl_offset.to(torch.uint32)
    (plain,) = to_layout(rows, *encoding(found), "example", cfgs, 2)
    (theirs,) = to_layout(rows, None, *offsets, torch.tensor([2]), "examplebatch", cfgs, 2, version=3)
    assert plain.tolist() == [[4, 30, 3.5, 30], [4, 30, 10, 90]]
    assert torch.equal(plain, theirs)


# ---- gradients


def test_the_gradient_op_is_the_gradient_and_scales_it_first() -> None:
    features = {"a": feature(MEAN, 1, 1), "b": feature(FIRSTN, 1, 1, length=2)}
    outs = {
        "x": OutConfig(slices(("a", 0, 2), ("a", 1, 2))),
        "y": OutConfig(slices(("b", 1, 2)), OutType.NONE),
    }
    cfgs = FeatureConfigs(features, outs)
    found = shard(columns(TWO), 2, cfgs)
    rows = [e.requires_grad_() for e in embeddings(cfgs, found, 2, by_id, torch.float64)]

    outputs = to_layout(rows, *encoding(found), "example", cfgs, 2)
    upstream = [torch.randn_like(o) for o in outputs]
    expected = torch.autograd.grad(outputs, rows, upstream)

    row_split, fid_offset, feature_offset, nfl_offset, batch = encoding(found)
    for scale in (None, 0.5):
        actual = to_layout_grad(
            nfl_offset, feature_offset, fid_offset, batch, rows, row_split, upstream, "example", cfgs, 2,
            layout_tensors_grad_scale=scale,
        )  # fmt: skip
        for a, e in zip(actual, expected, strict=True):
            assert torch.equal(a, e * (scale or 1))


@pytest.mark.parametrize("pooling", [SUM, MEAN, FIRSTN])
def test_gradcheck_of_a_feature_in_several_layouts(pooling: PoolingType) -> None:
    length = 2 if pooling == FIRSTN else 0
    features = {"a": feature(pooling, 1, 2, length=length), "b": feature(pooling, 1, 2, length=length)}
    outs = {
        "w": OutConfig(slices(("a", 0, 2), ("b", 1, 3))),
        "x": OutConfig(slices(("a", 1, 3), ("a", 0, 2), ("b", 0, 2)), OutType.STACK),
        "y": OutConfig(slices(("a", 0, 3), ("b", 0, 3)), OutType.NONE if length else OutType.ADDN),
    }
    cfgs = FeatureConfigs(features, outs)
    found = shard({"a": Ragged.from_lists([[1, 2, 2]]), "b": columns(TWO)["b"]}, 2, cfgs, shared=["a"])
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    rows = [
        torch.randn(n, dtype=torch.float64, generator=generator).requires_grad_()
        for n in found.emb_size.tolist()
    ]

    assert torch.autograd.gradcheck(lambda *r: to_layout(r, *encoding(found), "example", cfgs, 2), rows)


# ---- Monolith's random tests


def random_configs(slots: int, first: int, second: int) -> FeatureConfigs:
    """Slots below `first` SUM, below `second` MEAN, the others FIRSTN of 3; layouts as in Monolith's test."""
    kinds = [
        FeatureConfig("table_one", SUM, (1, 4, 8)),
        FeatureConfig("table_two", MEAN, (1, 4, 16)),
        FeatureConfig("table_one", FIRSTN, (1, 4, 16), 3),
    ]
    features = {f"slot_{slot:03}": kinds[(slot >= first) + (slot >= second)] for slot in range(slots)}
    names = list(features)

    def cut(chosen: list[str], start: int, end: int, kind: OutType) -> OutConfig:
        return OutConfig(tuple(SliceConfig(n, start, end) for n in chosen), kind)

    layouts = {
        "bias": cut(names[:second], 0, 1, OutType.ADDN),
        "vec": cut(names[:second], 1, 5, OutType.CONCAT),
        "ffm1": cut(names[:first], 5, 13, OutType.STACK),
        "ffm2": cut(names[first:second], 5, 21, OutType.NONE),
        "firstN": cut(names[second:], 1, 21, OutType.NONE),
    }
    return FeatureConfigs(features, layouts)


def random_rows(cfgs: FeatureConfigs, batch: int, seed: int) -> tuple[dict[str, list[list[int]]], list[str]]:
    """Up to five ids a row, with repeats; features of even slots are shared."""
    random = np.random.default_rng(seed)
    shared = [n for n in cfgs.feature_names if int(n[-3:]) % 2 == 0]
    rows = {
        n: [
            random.integers(0, 40, random.integers(0, 6)).tolist() for _ in range(1 if n in shared else batch)
        ]
        for n in cfgs.feature_names
    }
    return rows, shared


def values_of(cfgs: FeatureConfigs) -> Values:
    return lambda name, id: [float(id + j) for j in range(cfgs.feature_configs[name].dim)]


def test_random_layouts_against_a_plain_model() -> None:
    batch, ps, cfgs = 256, 5, random_configs(199, 50, 100)
    rows, shared = random_rows(cfgs, batch, seed=3)

    outputs = layouts(cfgs, rows, values_of(cfgs), ps=ps, shared=shared)

    pooled: dict[str, np.ndarray] = {}  # of each feature, [batch, dim] or [batch, 3, dim]
    for name, config in cfgs.feature_configs.items():
        model = np.zeros((batch, 3, config.dim))
        for b in range(batch):
            ids = rows[name][0 if name in shared else b]
            vectors = np.array([[id + j for j in range(config.dim)] for id in ids])
            if config.pooling_type == FIRSTN:
                model[b, : len(ids[:3])] = vectors[:3] if ids else 0
            elif ids:
                model[b, 0] = vectors.sum(0) / (len(ids) if config.pooling_type == MEAN else 1)
        pooled[name] = model if config.pooling_type == FIRSTN else model[:, 0]
    expected: list[np.ndarray] = []
    for layout in sorted(cfgs.out_configs):
        out = cfgs.out_configs[layout]
        parts = [pooled[c.feature_name][..., c.start : c.end] for c in out.slice_configs]
        if out.out_type == OutType.NONE:
            expected += parts
        elif out.out_type == OutType.STACK:
            expected.append(np.stack(parts, 1))
        else:
            expected.append(np.concatenate(parts, 1) if out.out_type == OutType.CONCAT else sum(parts))  # type: ignore[arg-type]
    assert len(outputs) == len(expected) == 3 + 50 + 99
    for actual, model in zip(outputs, expected, strict=True):
        np.testing.assert_allclose(actual.cpu().numpy(), model, rtol=1e-4)


def test_random_gradients_count_uses() -> None:
    batch, ps, cfgs = 64, 3, random_configs(29, 10, 20)
    rows, shared = random_rows(cfgs, batch, seed=4)
    found = shard(columns(rows), ps, cfgs, shared=shared)
    lists = [e.requires_grad_() for e in embeddings(cfgs, found, ps, values_of(cfgs))]

    outputs = to_layout(lists, *encoding(found), "example", cfgs, ps)
    grads = torch.autograd.grad(sum(o.sum() for o in outputs), lists)  # type: ignore[arg-type]

    uses = {n: np.zeros((40, c.dim)) for n, c in cfgs.feature_configs.items()}
    for out in cfgs.out_configs.values():
        for c in out.slice_configs:
            kind = cfgs.feature_configs[c.feature_name].pooling_type
            for ids in rows[c.feature_name]:
                for id in ids[:3] if kind == FIRSTN else ids:
                    share = 1 / len(ids) if kind == MEAN else 1
                    uses[c.feature_name][id, c.start : c.end] += share * (
                        batch if c.feature_name in shared else 1
                    )
    expected = embeddings(cfgs, found, ps, lambda name, id: uses[name][id].tolist())
    for actual, model in zip(grads, expected, strict=True):
        torch.testing.assert_close(actual, model, rtol=1e-4, atol=1e-6)
