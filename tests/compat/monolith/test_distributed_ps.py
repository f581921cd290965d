"""Monolith's test of distributed_ps, case by case, on tables in this process.

`tests/ps/changes_tests.py` runs the same cases on two real servers, and `gpu_monolith.py` those of a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from math import sqrt
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import FTRL, SGD, Adagrad, LocalShards, Ragged, Segment, Shards, SyncShards, TableConfig, Zeros
from megalith.compat import monolith
from megalith.compat.monolith import export_context
from megalith.compat.monolith.distributed_ps import (
    FAKE_TABLE,
    DistributedHashTable,
    DistributedMultiTypeHashTable,
    PartitionedHashTable,
)
from megalith.compat.monolith.export_context import ExportContext, ExportMode, enter_export_mode
from megalith.compat.monolith.parsers import (
    ParserCtx,
    get_default_parser_ctx,
    sharding_sparse_fids_with_context,
)
from megalith.errors import InputError, UnknownNameError, UsageError
from tests.distributed.ranks import error_of, run_ranks
from tests.table.support import ints

Factory = Callable[[int, dict[str, TableConfig]], Shards]
Make = Callable[..., Shards]
"""Makes shards of TableConfigs."""
SLICES = {"uid": [1, 4], "gid": [1, 4, 8], "cid": [1, 4, 8]}
UID, REST = "9871d3a2c554b27151cacf1422eec048", "c4a398dea30b21551ae4c09454001dba"


def sgd(lr: Any = 1.0, dim: int = 2) -> TableConfig:
    """Monolith's table of these tests: one segment, SGD, zeros."""
    return TableConfig("table", dim=dim, optimizer=SGD(lr), initializer=Zeros())


def vectors(*rows: float, dim: int = 2) -> Tensor:
    return torch.tensor(rows).float()[:, None].expand(-1, dim).contiguous()


def gradient(values: Tensor, factor: float = 2.0) -> Tensor:
    """The gradient of factor * values."""
    (found,) = torch.autograd.grad(factor * values.sum(), values)
    return found


# ---- DistributedHashTable


def one(make: Make, config: TableConfig) -> DistributedHashTable:
    return DistributedHashTable(2, config, lambda i, config: make(config))


def table_basic(make: Make) -> None:
    table = one(make, sgd())
    assert (table.dim_size, table.as_op() is table) == (2, True)
    table = table.assign_add(ints(1, 2, 3), vectors(1, 2, 3))
    assert table.lookup(ints(1, 2, 3)).tolist() == vectors(1, 2, 3).tolist()


def table_assign(make: Make) -> None:
    table = one(make, sgd()).assign(ints(1, 2, 3), vectors(1, 2, 3)).assign(ints(2, 3, 4), vectors(1, 2, 3))
    assert table.lookup(ints(1, 2, 3, 4)).tolist() == vectors(1, 1, 2, 3).tolist()
    table.assign(ints(5, 5), vectors(7, 8), req_time=3)  # the last of repeated ids
    table.assign_add(ints(6, 6), vectors(1, 2))  # all of them
    assert table.lookup(ints(5, 6, 9), use_multi_threads=True).tolist() == vectors(8, 3, 0).tolist()


def table_lookup_dedup(make: Make) -> None:
    table = one(make, sgd()).assign_add(ints(1, 2, 3), vectors(1, 2, 3))
    assert table.lookup(ints(1, 1, 3)).tolist() == vectors(1, 1, 3).tolist()


def table_apply_gradients(make: Make) -> None:
    table = one(make, sgd(dim=1))
    grads = gradient(table.lookup(ints(0, 1)))
    table = table.apply_gradients(ints(0, 1), grads, global_step=torch.tensor(0), req_time=0)
    assert table.lookup(ints(0, 1)).tolist() == [[-2], [-2]]


def table_learning_rate_function(make: Make) -> None:
    table = one(make, sgd(monolith.PolynomialDecay(1.0, 10, 2.0), dim=1))
    for step, expected in ((0, -2.0), (1, -4.2)):
        table.apply_gradients(ints(0, 1), gradient(table.lookup(ints(0, 1))), step)
        torch.testing.assert_close(table.lookup(ints(0, 1)).detach(), torch.full((2, 1), expected))


def table_duplicates(make: Make) -> None:
    table, asked = one(make, sgd(dim=1)), ints(0, 3, 0, 1)
    table.apply_gradients(asked, gradient(table.lookup(asked)), 0)
    assert table.lookup(asked).tolist() == [[-4], [-2], [-4], [-2]]


def table_different_ids(make: Make) -> None:
    table = one(make, sgd(dim=1))
    table.apply_gradients(ints(1, 1), gradient(table.lookup(ints(1, 0)), -2.0), 0)
    assert table.lookup(ints(1, 0)).tolist() == [[4], [0]]


# ---- DistributedMultiTypeHashTable


def multi(make: Make, native: bool, second: Any = 1.0, first: Any = 1.0, **options: Any) -> Any:
    configs = {"1": sgd(first, 1), "2": sgd(second, 2)}
    return DistributedMultiTypeHashTable(
        2,
        configs,
        lambda i, configs: make(*configs.values()),
        use_native_multi_hash_table=native,
        **options,
    )


VALUES = {"1": (ints(1, 2), torch.tensor([[-1.0], [-2.0]])), "2": (ints(3), torch.tensor([[-3.0, -3.0]]))}
HALVES = {slot: (each, values / 2) for slot, (each, values) in VALUES.items()}
ASKED = {slot: each for slot, (each, _) in VALUES.items()}


def read(table: Any, **asked: Tensor) -> dict[str, Any]:
    return {slot: rows.tolist() for slot, rows in table.lookup(ASKED | asked).items()}


def multi_basic(make: Make, native: bool) -> None:
    table = multi(make, native).assign_add(VALUES)
    assert table.get_table_dim_sizes() == [1, 2]
    assert read(table) == {slot: values.tolist() for slot, (_, values) in VALUES.items()}
    table = table.apply_gradients(HALVES, global_step=0)
    assert read(table) == {"1": [[-0.5], [-1.0]], "2": [[-1.5, -1.5]]}


def multi_assign_and_reinitialize(make: Make, native: bool) -> None:
    table = multi(make, native).assign(VALUES)
    table.assign(HALVES)
    assert read(table) == {"1": [[-0.5], [-1.0]], "2": [[-1.5, -1.5]]}
    table, status = table.reinitialize("1", ints(1, 2, 3))
    assert status.tolist() == [1, 1, 0]
    assert table.reinitialize("3", ints(1, 2, 3))[1].tolist() == [-1, -1, -1]
    if native:  # an unknown slot is left out
        assert read(table, **{"3": ints(1)}) == {"1": [[0], [0]], "2": [[-1.5, -1.5]]}
    else:
        with pytest.raises(KeyError, match="'3'"):
            read(table, **{"3": ints(1)})


def multi_learning_rate_function(make: Make, native: bool) -> None:
    decay = monolith.PolynomialDecay(1.0, 10, 2.0)
    table = multi(make, native, second=lambda: 1.0, first=decay).assign_add(VALUES)
    for step, expected in (
        (0, {"1": [[-0.5], [-1.0]], "2": [[-1.5, -1.5]]}),
        (1, {"1": [[0.05], [0.1]], "2": [[0, 0]]}),
    ):
        table.apply_gradients(HALVES, torch.tensor(step))
        for slot, rows in read(table).items():
            torch.testing.assert_close(torch.tensor(rows).float(), torch.tensor(expected[slot]).float())


def multi_float16(make: Make, native: bool) -> None:
    table = multi(lambda *configs: make(*configs, wire="float16"), native, transfer_float16=True)
    grads = {"1": (ints(1, 2), torch.full((2, 1), 2.0)), "2": (ints(3), torch.full((1, 2), 3.0))}
    table.apply_gradients(grads, 0)
    assert read(table) == {"1": [[-2], [-2]], "2": [[-3, -3]]}


CASES = [
    table_basic,
    table_assign,
    table_lookup_dedup,
    table_apply_gradients,
    table_learning_rate_function,
    table_duplicates,
    table_different_ids,
]
MULTI_CASES = [multi_basic, multi_assign_and_reinitialize, multi_learning_rate_function, multi_float16]


def in_this_process(*configs: TableConfig, wire: str = "float32") -> Shards:
    return LocalShards(configs)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_distributed_hash_table(case: Callable[[Make], None]) -> None:
    case(in_this_process)


@pytest.mark.parametrize("native", [False, True], ids=["not native", "native"])
@pytest.mark.parametrize("case", MULTI_CASES, ids=lambda case: case.__name__)
def test_distributed_multi_type_hash_table(case: Callable[[Make, bool], None], native: bool) -> None:
    case(in_this_process, native)


@pytest.mark.parametrize("native", [False, True], ids=["not native", "native"])
def test_export_model(native: bool) -> None:
    """Monolith's test of exports: DISTRIBUTED, then STANDALONE, then training."""

    def table(num_ps: int) -> DistributedMultiTypeHashTable:
        own = {"1": sgd(dim=1), "2": sgd()}
        return DistributedMultiTypeHashTable(
            num_ps, own, lambda i, configs: configs, use_native_multi_hash_table=native
        )

    for mode, parts in ((ExportMode.DISTRIBUTED, 2), (ExportMode.STANDALONE, 0)):
        context = ExportContext()
        with enter_export_mode(mode, context) as entered:
            exported = table(2)
            assert context.sub_graph_num == parts
            assert exported.lookup({"1": ints(1, 2)})["1"].shape == (2, 1)
            assert entered is context is export_context.get_current_export_ctx()
            with pytest.raises(UsageError, match="cannot be nested"):
                enter_export_mode(mode, context).__enter__()
        if parts:
            assert sorted(context.sub_graph("ps_1").signatures) == ["lookup", "raw_lookup"][: 1 + native]
            assert (context.sub_graph_num, context.with_remote_gpu) == (2, False)
    assert not export_context.is_exporting()
    assert table(0).lookup({"1": ints(1)})["1"].tolist() == [[0]]


def test_wrong_factories_raise() -> None:
    with pytest.raises(InputError, match="the same configs for every server"):
        DistributedHashTable(2, sgd(), lambda i, config: sgd(dim=i + 1))
    with pytest.raises(InputError, match="must return TableConfigs"):
        DistributedHashTable(2, sgd(), lambda i, config: None)
    with pytest.raises(InputError, match="must make the tables"):
        DistributedMultiTypeHashTable(2, {"1": sgd()}, lambda i, configs: in_this_process(sgd()))
    with pytest.raises(InputError, match="slot_to_config must be a dict"):
        DistributedMultiTypeHashTable(2, {})
    with pytest.raises(InputError, match="slot_to_id_and_grad must hold"):
        multi(in_this_process, True).apply_gradients({"1": ints(1)}, 0)


# ---- PartitionedHashTable


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


def context_of(own: Any) -> ParserCtx:
    context = ParserCtx(True)
    context.parser_type = "example"
    context.sharding_sparse_fids_op_params = own
    return context


def made(factory: Factory, native: bool) -> PartitionedHashTable:
    return PartitionedHashTable(2, factory, native, parser_ctx=context_of(params(native)))


def layouts_of(table: PartitionedHashTable, bundle: dict[str, Any] | None = None) -> Any:
    """The layouts of the batch, whose ids Monolith's parser splits."""
    features: dict[str, Any] = {}
    sharding_sparse_fids_with_context(batch(), features, context_of(table.params))
    found = table.lookup(features, auxiliary_bundle=bundle)
    assert all(x.is_cuda == (table.params.use_gpu and torch.cuda.is_available()) for x in found.values())
    return found


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
    found = layouts_of(table)
    bias, vec = torch.full((6, 3), 2.0), torch.full((6, 12), 2.0)
    bias[4:, 0] = 0  # uids 12 and 15 have no row
    vec[4:, :4] = 0
    assert list(found) == ["bias", "deep", "vec"]
    for name, expected in {"bias": bias, "vec": vec, "deep": torch.full((6, 16), 2.0)}.items():
        assert torch.equal(found[name].detach().cpu(), expected)
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
    flat = table.flatten_layout(layouts_of(table, bundle))
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


def local(server: int, configs: dict[str, TableConfig]) -> Shards:
    return LocalShards(list(configs.values()))


@pytest.mark.parametrize("native", [False, True], ids=["merged", "native"])
@pytest.mark.parametrize("vector", VECTORS, ids=["assign", "lookup", "gradients"])
def test_vectors(vector: Callable[[PartitionedHashTable], None], native: bool) -> None:
    vector(made(local, native))


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


def test_sharded_features_and_sizes() -> None:
    """Features that a data worker has split ahead: all keys, popped from features, in all three forms."""
    for native, on_gpu in ((False, False), (True, False), (False, True)):
        own = params(native)._replace(enable_gpu_emb=on_gpu)
        plain = made(local, native)
        plain.assign(data(plain, constant(2.0)))
        with ParserCtx() as context:
            context.sharding_sparse_fids_op_params = own
            assert get_default_parser_ctx() is context
            features: dict[str, Any] = {"label": torch.ones(6)}
            sharding_sparse_fids_with_context(batch(), features)
        prefix = "__sharding_sparse_fids__"
        if on_gpu:
            assert {f"{prefix}shards_value", f"{prefix}fid_list_emb_row_lenth"} < set(features)
        else:
            table = FAKE_TABLE if native else UID
            keys = {f"{prefix}shards/{table}:1", f"{prefix}nfl_size", f"{prefix}emb_size"}
            assert keys | ({f"{prefix}shards_row_split/{table}:0"} if native else set()) < set(features)
        plain.params = own
        bundle: dict[str, Any] = {}
        expected = plain.lookup(batch())
        found = plain.lookup(features, bundle)
        assert list(features) == ["label"]
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        sizes = ["fid_list_emb_row_lenth"] if on_gpu else ["nfl_size", "feature_size", "fid_size", "emb_size"]
        assert {f"{prefix}{name}" for name in (*sizes, "nfl_offset", "batch_size")} < set(bundle)
        assert {
            f"{prefix}{table}:{ps}:{x}" for table in (UID, REST) for ps in (0, 1) for x in ("embs", "fids")
        } < set(bundle) or native
        plain.apply_gradients([(x, x) for x in plain.flatten_layout(found)], 0, auxiliary_bundle=bundle)
    with pytest.raises(InputError, match="sharding_sparse_fids_op_params must be what gen_feature_configs"):
        sharding_sparse_fids_with_context(batch(), {}, ParserCtx())
    features = {}
    with ParserCtx() as context:
        context.sharding_sparse_fids_op_params = params(True)
        sharding_sparse_fids_with_context(batch(), features)
    del features[f"{prefix}shards_row_split/{FAKE_TABLE}:0"]
    with pytest.raises(InputError, match="shards_row_split of every list of native tables"):
        made(local, True).lookup(features)
    with pytest.raises(InputError, match="features must have __sharding_sparse_fids__shards"):
        plain.lookup({"__sharding_sparse_fids__fid_offset": ints(0)})


def test_queues_and_other_members() -> None:
    context = SimpleNamespace(sharding_sparse_fids_op_params=params(True))
    queues = {"enable_async_optimize": 1, "embedding_prefetch_capacity": 1}
    table = PartitionedHashTable(2, local, True, queue_configs=queues, parser_ctx=context)
    bundles: list[dict[str, Any]] = [{}, {}]
    started = [table.lookup(batch(), bundle) for bundle in bundles]
    table.assign(data(table, constant(2.0)))
    # With a capacity of 1 the second lookup has fetched the first; both began before the assignment.
    assert started[0]["bias"].sum() == 0
    assert list(started[1]) == ["bias", "deep", "vec"]
    pairs = [(torch.ones_like(x), x) for x in table.flatten_layout(dict(started[0]))]
    table.apply_gradients(pairs, 0, auxiliary_bundle=bundles[0])
    table.add_queue_hook(hook := SimpleNamespace(end=list))
    assert [type(each).__name__ for each in table.get_queue_hooks()] == ["FlushHook", "SimpleNamespace"]
    for each in table.get_queue_hooks():
        each.end()
    assert table.get_queue_hooks()[1] is hook
    assert (table.as_op() is table, table.get_table_dim_sizes()) == (True, [13, 13, 5])
    assert table.slot_mapping == {"cid": "cid", "gid": "gid", "uid": "uid"}
    assert made(local, False).slot_mapping == {"cid": REST, "gid": REST, "uid": UID}
    moved: dict[str, Any] = {"a": ints(1), "b": 3}
    table.tensor_move_to_gpu(((moved, ["a"]),))
    assert moved["a"].is_cpu


def fail_on_rank_0(queues: dict[str, int]) -> list[str]:
    """The errors of a lookup and an update that rank 0 cannot make; then layouts that both ranks look up."""
    rank, size = dist.get_rank(), dist.get_world_size()
    table = PartitionedHashTable(
        size,
        lambda _, configs: SyncShards(list(configs.values()), router="roundrobin"),
        False,
        queue_configs=queues,
        parser_ctx=context_of(params(False, num_ps=size)),
    )

    def outcome(call: Callable[[], Any]) -> str:
        return error_of(call).partition(":")[0]

    wrong = {"uid": 3} if rank == 0 else batch()
    found = [outcome(lambda: table.flatten_layout(dict(table.lookup(wrong))))]
    found.append(outcome(lambda: table.lookup(wrong, {}, True)({}, {})))
    bundle: dict[str, Any] = {}
    flat = table.flatten_layout(dict(table.lookup(batch(), bundle)))
    pairs = [(x, x) for x in flat][rank == 0 :]
    found.append(outcome(lambda: table.apply_gradients(pairs, 0, auxiliary_bundle=bundle)))
    return [*found, str(layouts_of(table)["bias"].shape)]


@pytest.mark.parametrize("queues", [{}, {"enable_pipelined_fwda2a": 1}], ids=["", "ahead"])
def test_an_error_of_one_rank_is_raised_on_all(queues: dict[str, int]) -> None:
    shape = "torch.Size([6, 3])"
    assert run_ranks(fail_on_rank_0, queues) == [
        ["InputError"] * 3 + [shape],
        ["RankFailedError"] * 3 + [shape],
    ]


def test_merging_and_not_merging() -> None:
    configs = {name: config(dims) for name, dims in SLICES.items()}
    tables, of = PartitionedHashTable.merge_feature_config(configs)
    assert (list(tables), of) == ([UID, REST], {"uid": UID, "gid": REST, "cid": REST})
    for same in (False, True):
        tables, of = PartitionedHashTable.no_merge_feature_config(configs, use_same_table=same)
        assert list(tables) == ["cid", "gid", "uid"]
        assert of == {name: FAKE_TABLE if same else name for name in tables}


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
    with pytest.raises(InputError, match="with enable_gpu_emb the tables need the engine 'cuda' on 2 ranks"):
        PartitionedHashTable(2, local, False, parser_ctx=params(False, enable_gpu_emb=True))
    with pytest.raises(InputError, match="queue_configs must be a dict with keys of"):
        PartitionedHashTable(2, local, False, queue_configs={"x": 1}, parser_ctx=params(False))
    other = LocalShards([TableConfig("x", dim=1, optimizer=SGD(1.0))])
    with pytest.raises(InputError, match="must make the tables"):
        PartitionedHashTable(2, lambda server, configs: other, False, parser_ctx=params(False))
