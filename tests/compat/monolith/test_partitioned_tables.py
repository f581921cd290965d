"""PartitionedHashTable: Monolith's numeric vectors (reference 1.5) on tables in this process.

`tests/ps/worker/changes_tests.py` runs the same vectors on two real servers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from megalith import FTRL, SGD, Adagrad, LocalShards, Ragged, Segment, Shards, TableConfig, Zeros
from megalith.compat import monolith
from megalith.compat.monolith import PartitionedHashTable
from megalith.compat.monolith.distributed_ps import FAKE_TABLE
from megalith.errors import InputError, UnknownNameError, UsageError
from tests.table.support import ints

Factory = Callable[[int, list[TableConfig]], Shards]
SLICES = {"uid": [1, 4], "gid": [1, 4, 8], "cid": [1, 4, 8]}
UID, REST = "9871d3a2c554b27151cacf1422eec048", "c4a398dea30b21551ae4c09454001dba"


def layouts() -> dict[str, Any]:
    """bias, vec and deep: the first, second and third slices of the features."""
    outs = {}
    for number, name in enumerate(("bias", "vec", "deep")):
        cuts = [
            monolith.SliceConfig(feature, sum(dims[:number]), sum(dims[: number + 1]))
            for feature, dims in SLICES.items()
            if len(dims) > number
        ]
        outs[name] = monolith.OutConfig(tuple(cuts), monolith.OutType.CONCAT)
    return outs


def config(dims: list[int]) -> TableConfig:
    ftrl = FTRL(1.0, initial_accumulator_value=0.1, beta=0.0)
    adagrad = Adagrad(1.0, initial_accumulator_value=0.1, eps=0.0)
    optimizers = [ftrl, *[adagrad] * (len(dims) - 1)]
    parts = zip(dims, optimizers, strict=True)
    return TableConfig("any", segments=[Segment(d, optimizer=o, initializer=Zeros()) for d, o in parts])


def params(native: bool, num_ps: int = 2, **options: Any) -> Any:
    return PartitionedHashTable.gen_feature_configs(
        num_ps,
        {name: config(dims) for name, dims in SLICES.items()},
        layouts(),
        SLICES,
        {name: monolith.ReduceSum() for name in SLICES},
        native,
        **options,
    )


def made(factory: Factory, native: bool) -> PartitionedHashTable:
    context = SimpleNamespace(sharding_sparse_fids_op_params=params(native))
    return PartitionedHashTable(2, factory, native, parser_ctx=context)


def batch() -> dict[str, Ragged]:
    """Row i has uid 3i, gid 3i + 1, cid 3i + 2."""
    return {
        name: Ragged.from_lists([[3 * i + n] for i in range(6)])
        for n, name in enumerate(("uid", "gid", "cid"))
    }


def data(table: PartitionedHashTable, value: Callable[[int, int], Tensor]) -> dict[int, dict[str, Any]]:
    """Ids p, p + 2, ... on server p, as many as the table has columns."""
    return {
        ps: {
            name: (torch.arange(each.dim) * 2 + ps, value(each.dim, each.dim))
            for name, each in table.shards.configs.items()
        }
        for ps in range(2)
    }


def constant(x: float) -> Callable[[int, int], Tensor]:
    return lambda rows, dim: torch.full((rows, dim), x)


# ---- the vectors


def assign_and_add(table: PartitionedHashTable) -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        data(table, lambda n, d: torch.rand(n, d, generator=generator) * 2 - 1) for _ in range(2)
    )
    assert table.assign(first).assign_add(second) is table
    found = table._lookup_raw({ps: {n: ids for n, (ids, _) in own.items()} for ps, own in first.items()})
    for ps, own in found.items():
        for name, rows in own.items():
            assert torch.equal(rows, first[ps][name][1] + second[ps][name][1])


def look_up(table: PartitionedHashTable) -> None:
    table.assign(data(table, constant(2.0)))
    found = table.lookup(batch())
    bias, vec = torch.full((6, 3), 2.0), torch.full((6, 12), 2.0)
    bias[4:, 0] = 0  # uids 12 and 15 have no row
    vec[4:, :4] = 0
    assert list(found) == ["bias", "deep", "vec"]
    for name, expected in {"bias": bias, "vec": vec, "deep": torch.full((6, 16), 2.0)}.items():
        assert torch.equal(found[name].detach(), expected)
    fids = {key: x.tolist() for key, x in table.shard(batch()).fid_list.items()}  # type: ignore[union-attr]
    uids, others = ([0, 6, 12], [3, 9, 15]), ([2, 8, 14, 4, 10, 16], [5, 11, 17, 1, 7, 13])
    if table.params.use_native_multi_hash_table:
        assert fids == {f"{FAKE_TABLE}:{ps}": others[ps] + uids[ps] for ps in range(2)}
    else:
        assert fids == {f"{t}:{ps}": own[ps] for t, own in ((UID, uids), (REST, others)) for ps in range(2)}


def apply_gradients(table: PartitionedHashTable) -> None:
    assigned = data(table, constant(3.0))
    table.assign(assigned)
    bundle: dict[str, Any] = {}
    flat = table.flatten_layout(table.lookup(batch(), bundle))
    pairs = [(torch.full_like(x, 2.0), x) for x in flat]
    assert table.apply_gradients(pairs, 0, req_time=torch.tensor([3, 7]), auxiliary_bundle=bundle) is table
    n = 0.1 + 2.0**2
    z = 2.0 - (sqrt(n) - sqrt(0.1)) * 3.0
    touched = {"uid": range(0, 18, 3), "gid": range(1, 18, 3), "cid": range(2, 18, 3)}
    for ps, own in assigned.items():
        for name, (ids, _) in own.items():
            rows = table._lookup_raw({ps: {name: ids}})[ps][name]
            features = [name] if name in touched else (["uid"] if name == UID else ["gid", "cid"])
            for id, row in zip(ids.tolist(), rows.tolist(), strict=True):
                if any(id in touched[feature] for feature in features):
                    assert row[0] == pytest.approx(-z / sqrt(n), rel=1e-6)
                    assert row[1:] == pytest.approx([3.0 - 2.0 / sqrt(n)] * (len(row) - 1), rel=1e-6)
                else:
                    assert row == [3.0] * len(row)
    with pytest.raises(UsageError):
        table.apply_gradients(pairs, 1, auxiliary_bundle=bundle)


VECTORS = [assign_and_add, look_up, apply_gradients]


def local(count: int, configs: list[TableConfig]) -> Shards:
    return LocalShards(configs)


@pytest.mark.parametrize("native", [False, True], ids=["merged", "native"])
@pytest.mark.parametrize("vector", VECTORS, ids=["assign", "lookup", "gradients"])
def test_vectors(vector: Callable[[PartitionedHashTable], None], native: bool) -> None:
    vector(made(local, native))


# ---- grouping


def test_features_with_equal_configs_share_a_table() -> None:
    merged, native = params(False), params(True)
    assert list(merged.sub_table_name_to_config) == [UID, REST]
    tables = {n: c.table for n, c in merged.feature_configs.feature_configs.items()}
    assert tables == {"uid": UID, "gid": REST, "cid": REST}
    assert list(native.sub_table_name_to_config) == ["cid", "gid", "uid"]
    assert {c.table for c in native.feature_configs.feature_configs.values()} == {FAKE_TABLE}
    assert native.use_native_multi_hash_table
    assert not params(True, transfer_float16=True).use_native_multi_hash_table
    assert params(False, num_ps=0).num_ps == 1
    assert monolith.get_sub_table_name(["cid", "gid"]) == ("cid,gid", REST)


def test_combiners_become_poolings_and_slots_other_names() -> None:
    table = TableConfig("t", dim=2, optimizer=SGD(1.0))
    combiners = {
        "fc_slot_1": monolith.ReduceSum(),
        "fc_slot_2": monolith.ReduceMean(),
        "x": monolith.FirstN(3),
    }
    found = PartitionedHashTable.gen_feature_configs(
        1, dict.fromkeys(combiners, table), {}, dict.fromkeys(combiners, (2,)), combiners, False
    )
    features = found.feature_configs.feature_configs.values()
    kinds = [(each.pooling_type.name, each.max_sequence_length) for each in features]
    assert kinds == [("SUM", 0), ("MEAN", 0), ("FIRSTN", 3)]
    (name,) = found.sub_table_name_to_config
    assert found.extra_restore_names == {name: (monolith.get_sub_table_name(["slot_1", "slot_2", "x"])[1],)}
    assert found.sub_table_name_to_config[name].missing == "zeros"


# ---- layouts and functions


def test_layouts_of_several_tensors_are_nested() -> None:
    cuts = (monolith.SliceConfig("f", 0, 1), monolith.SliceConfig("f", 1, 3))
    outs = {"b": monolith.OutConfig(cuts, monolith.OutType.NONE)}
    outs["a"] = monolith.OutConfig((monolith.SliceConfig("f", 0, 3),))
    config = {"f": TableConfig("t", dim=3, optimizer=SGD(1.0))}
    found = PartitionedHashTable.gen_feature_configs(
        0, config, outs, {"f": [1, 2]}, {"f": monolith.ReduceMean()}, True
    )
    table = PartitionedHashTable(0, None, True, parser_ctx=found)
    table.assign({0: {"f": (ints(1, 2), torch.tensor([[1.0, 2.0, 3.0], [3.0, 4.0, 5.0]]))}})
    later = table.lookup({}, ret_lookup_callable_fn=True)
    bundle: dict[str, Any] = {}
    features = {"f": Ragged.from_lists([[1, 2], [], [2]])}
    assemble = table.lookup(features, bundle, ret_fused_layout_callable_fn=True)
    for nested in (later({}, features), assemble(bundle, features)):
        assert nested["a"].tolist() == [[2, 3, 4], [0, 0, 0], [3, 4, 5]]
        assert [x.tolist() for x in nested["b"]] == [[[2], [0], [3]], [[3, 4], [0, 0], [4, 5]]]
        flat = table.flatten_layout(nested)
        assert [x.shape[1] for x in flat] == [3, 1, 2]
        assert list(table.nest_layout(flat)) == ["a", "b"]
    sum(x.sum() for x in flat).backward()
    table.apply_gradients([(x.grad, x) for x in flat], 0, auxiliary_bundle=bundle, grad_scale=0.5)
    # each column is in two layouts: 2 for id 2 alone, 1 for each id of the mean, times 0.5
    assert table._lookup_raw({0: {"f": ints(1, 2)}})[0]["f"].tolist() == [[0.5, 1.5, 2.5], [1.5, 2.5, 3.5]]
    assert table.get_queue_hooks() == []


def test_wrong_calls_raise() -> None:
    table = made(local, False)
    for wrong in ({0: {UID: (ints(1), torch.ones(1, 5))}}, {2: {}}, {0: 3}, 3):
        with pytest.raises(InputError):
            table.assign(wrong)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError):
        table.assign({0: {"x": (ints(0), torch.ones(1, 5))}})
    with pytest.raises(UsageError, match="that lookup has filled"):
        table.apply_gradients([], 0, auxiliary_bundle={})
    with pytest.raises(InputError, match="num_ps is 3"):
        PartitionedHashTable(3, local, False, parser_ctx=params(False))
    with pytest.raises(InputError, match="enable_gpu_emb"):
        params(False, enable_gpu_emb=True)
    other = LocalShards([TableConfig("x", dim=1, optimizer=SGD(1.0))])
    with pytest.raises(InputError, match="must make the tables"):
        PartitionedHashTable(2, lambda count, configs: other, False, parser_ctx=params(False))
