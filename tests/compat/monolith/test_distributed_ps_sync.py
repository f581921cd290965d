"""Monolith's synchronous tables, over real ranks, and the fused calls of one owner."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megalith import SGD, Adagrad, LocalShards, OneBit, SyncShards, TableConfig, Zeros
from megalith.compat import monolith
from megalith.compat.monolith import (
    distributed_ps_sync,
    distribution_ops,
    distribution_utils,
    fused_apply_gradients,
    fused_lookup,
)
from megalith.errors import InputError, UsageError
from tests.distributed.ranks import error_of, run_ranks


def ids(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows(*values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def zeros(name: str, dim: int) -> TableConfig:
    return TableConfig(name, dim=dim, optimizer=SGD(1.0), initializer=Zeros())


def filled(engine: str) -> LocalShards:
    shards = LocalShards([zeros("slot0", 1), zeros("slot1", 2), zeros("slot2", 2)], engine=engine)
    shards.assign_add(
        {
            "slot0": (ids(0), rows([1])),
            "slot1": (ids(1), rows([2, 2])),
            "slot2": (ids(2, 3), rows([4, 4], [8, 8])),
        }
    )
    return shards


@pytest.mark.parametrize(
    ("asked", "sizes", "expected"),
    [
        ([0, 1, 2, 3], [[1, 1, 2]], [[1, 2, 2, 4, 4, 8, 8], [7], [0, 1, 2, 4], [0, 1, 3, 7]]),
        (
            [0, 2, 1, 3],
            [[1, 0, 1], [0, 1, 1]],
            [[1, 4, 4, 2, 2, 8, 8], [3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 1, 3, 3, 5, 7]],
        ),
    ],
    ids=["one shard", "two shards"],
)
def test_fused_lookup(engine: str, asked: list[int], sizes: list[list[int]], expected: Any) -> None:
    found = fused_lookup(filled(engine), ids(*asked), torch.tensor(sizes).flatten(), len(sizes))
    assert [x.tolist() for x in found] == [*expected, asked]


def test_rows_of_one_bit_need_the_step_that_trains_them(engine: str) -> None:
    config = TableConfig("t", dim=1, optimizer=SGD(1.0), serving=OneBit(0.5))
    shards = LocalShards([config], engine=engine)
    shards.assign_add({"t": (ids(1), rows([0.25]))})
    sizes = torch.tensor([1])

    with pytest.raises(UsageError, match="pass global_step to fused_lookup"):
        fused_lookup(shards, ids(1), sizes, 1)
    found = fused_lookup(shards, ids(1), sizes, 1, global_step=torch.tensor(400))

    assert torch.equal(found.embeddings[None], shards.local["t"].lookup(ids(1), step=400))


def fused_apply(shards: LocalShards, of: Tensor, sizes: Tensor, grads: Tensor, num_of_shards: int) -> None:
    found = fused_lookup(shards, of, sizes, num_of_shards)
    fused_apply_gradients(
        shards, of, found.indices, sizes, grads, found.id_offsets, found.emb_offsets, 0, 0, num_of_shards
    )


def slots(engine: str = "cpu", first: TableConfig = zeros("slot0", 1)) -> LocalShards:  # noqa: B008
    return LocalShards([first, zeros("slot1", 2)], engine=engine)


def test_fused_apply(engine: str) -> None:
    shards, sizes = slots(engine), torch.tensor([1, 2])
    fused_apply(shards, ids(0, 1, 2), sizes, torch.tensor([2.0, 1, 3, 2, 4]), 1)
    assert fused_lookup(shards, ids(0, 1, 2), sizes, 1).embeddings.tolist() == [-2, -1, -3, -2, -4]


def test_fused_apply_makes_one_summed_step_for_an_id_of_two_shards(engine: str) -> None:
    # With SGD two steps give the same result, with Adagrad they do not: n = (1 + 2)^2 = 9, w = -lr * 3 / 3.
    # (Monolith makes two steps.)
    adagrad = TableConfig("slot0", dim=1, optimizer=Adagrad(1.0, eps=0.0), initializer=Zeros())
    for first, row in ((zeros("slot0", 1), -3), (adagrad, -1)):
        shards, sizes = slots(engine, first), torch.tensor([1, 0, 1, 0])
        fused_apply(shards, ids(1, 1), sizes, torch.tensor([1.0, 2.0]), 2)
        assert fused_lookup(shards, ids(1, 1), sizes, 2).embeddings.tolist() == [row, row]


@pytest.mark.parametrize(
    ("sizes", "num_of_shards", "message"),
    [([1, 1], 2, "2 shards x 2 tables"), ([1, 5], 1, "add up to 2"), ([-1, 3], 1, "negative")],
)
def test_fused_slot_sizes_must_match_the_ids(sizes: list[int], num_of_shards: int, message: str) -> None:
    with pytest.raises(InputError, match=message):
        fused_lookup(slots(), ids(1, 2), torch.tensor(sizes), num_of_shards)


def test_fused_gradients_and_offsets_must_be_those_of_the_lookup() -> None:
    shards, sizes, of = slots(), torch.tensor([1, 1]), ids(1, 2)
    found = fused_lookup(shards, of, sizes, 1)
    with pytest.raises(InputError, match="id_grads"):
        fused_apply(shards, of, sizes, torch.ones(4), 1)
    offsets = found.id_offsets[:-1], found.emb_offsets
    with pytest.raises(InputError, match="id_offsets"):
        fused_apply_gradients(shards, of, found.indices, sizes, torch.ones(3), *offsets, 0, 0, 1)
    assert [len(shards.local[name]) for name in shards.configs] == [0, 0]


# ---- DistributedMultiTypeHashTableMpi


def configs(rank: int) -> dict[str, TableConfig]:
    decay = monolith.PolynomialDecay(1.0, 10, 2.0)
    return {
        "2": TableConfig("any", dim=2, optimizer=SGD(decay), initializer=Zeros()),
        "1": TableConfig("any", dim=1, optimizer=SGD(1.0), initializer=Zeros()),
    }


def pack_of(slots: dict[str, Tensor], num_of_shards: int) -> tuple[Any, ...]:
    ordered = [slots[k] for k in sorted(slots)]
    found = distribution_ops.fused_reorder_by_indices(ordered, num_of_shards, [1, 2])
    return (*found, None)


BUNDLE = {
    *("shard_sizes", "fused_embedding_offsets", "emb_offset_sz", "id_flat_t", "id_size_flat_t"),
    *("embedding_splits", "id_offsets", "emb_offsets", "indices", "recv_emb_splits", "recv_embeddings_size"),
}
SLOTS = {"1": ids(1, 1), "2": ids(2)}
GRADS = {"1": rows([0.5], [0.5]), "2": rows([0.5, 1.0])}


def the_case(queue_configs: dict[str, int] | None = None, make: Any = configs) -> list[Any]:
    """Monolith's test of its synchronous table."""
    size = dist.get_world_size() if dist.is_initialized() else 1
    table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(size, make, queue_configs)
    grads = {slot: each.to(table.shards.device) for slot, each in GRADS.items()}
    found: list[Any] = [table.get_table_dim_sizes(), table.as_op() is table]
    for step in range(2):
        auxiliary_bundle: dict[str, Any] = {}
        slot_to_embedding, bundle = table.lookup(SLOTS, auxiliary_bundle, pack_of(SLOTS, size))
        found.append({k: v.tolist() for k, v in slot_to_embedding.items()})
        assert bundle is auxiliary_bundle
        assert set(bundle) > BUNDLE
        table = table.apply_gradients(grads, bundle, torch.tensor(0), req_time=torch.tensor(step), scale=1)
        found.append(sorted(bundle))
        for hook in table.get_queue_hooks():
            hook.end()
    return found


def expected_of(size: int) -> list[Any]:
    first = {"1": [[0.0], [0.0]], "2": [[0.0, 0.0]]}
    second = {"1": [[-1.0 * size]] * 2, "2": [[-0.5 * size, -1.0 * size]]}
    return [[1, 2], True, first, ["emb_offset_sz"], second, ["emb_offset_sz"]]


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("queues", [{}, {"enable_async_optimize": 1, "enable_pipelined_bwda2a": 1}])
def test_sparse_lookup_and_update(size: int, queues: dict[str, int]) -> None:
    assert run_ranks(the_case, queues, world_size=size) == [expected_of(size)] * size


def bundle_of_a_rank() -> dict[str, Any]:
    rank = dist.get_rank()
    table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(2, configs)
    table.assign({"1": (ids(1, 2, 3, 4), rows([1], [2], [3], [4]))} if rank == 0 else {})
    slots = {"1": ids(1, 2, 3), "2": ids(2)} if rank == 0 else {"1": ids(4), "2": ids()}
    embeddings, bundle = table.lookup(slots, {}, pack_of(slots, 2))
    assert embeddings["1"].flatten().tolist() == slots["1"].tolist()
    return {k: _plain(bundle[k]) for k in BUNDLE}


def _plain(value: Any) -> Any:
    return (
        [x.tolist() for x in value] if isinstance(value, list) else getattr(value, "tolist", lambda: value)()
    )


def test_the_bundle_holds_what_travels() -> None:
    # Rank 0 asks for 1, 2, 3 and 2 of slot "2", rank 1 for 4. Rank 0 owns the even ids.
    on_0, on_1 = run_ranks(bundle_of_a_rank)
    assert on_0["shard_sizes"] == [2, 2]
    assert (on_0["id_flat_t"], on_0["id_size_flat_t"]) == ([2, 2, 4], [1, 1, 1, 0])
    assert (on_1["id_flat_t"], on_1["id_size_flat_t"]) == ([1, 3], [2, 0, 0, 0])
    assert (on_0["embedding_splits"], on_0["recv_emb_splits"]) == ([3, 1], [3, 2])
    assert (on_0["id_offsets"], on_0["emb_offsets"]) == ([0, 1, 2, 3, 3], [0, 1, 3, 4, 4])
    assert (on_0["recv_embeddings_size"], on_1["recv_embeddings_size"]) == (5, 1)
    assert on_0["fused_embedding_offsets"] == [[3, 0, 4], [1]]
    assert on_0["emb_offset_sz"] == [3, 1]
    assert on_0["indices"] == on_0["id_flat_t"]


def prefetched(queues: dict[str, int]) -> list[list[float]]:
    """The rows of slot "1" that each of three lookups reads, if two are started before the first update."""
    size = dist.get_world_size()
    table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(size, configs, queues)
    started = [table.lookup(SLOTS, {}, pack_of(SLOTS, size)) for _ in range(2)]
    seen = []
    for step in range(3):
        embeddings, bundle = started.pop(0)
        assert list(embeddings) == ["1", "2"]
        seen.append(embeddings["1"].flatten().tolist())
        table.apply_gradients(GRADS, bundle, step)
        started.append(table.lookup(SLOTS, {}, pack_of(SLOTS, size)))
    return [[dist.get_rank()], *seen]


def failing(queues: dict[str, int]) -> list[Any]:
    """A lookup that fails on rank 0 fails on both, twice in a row, and the next one works."""
    size, rank = dist.get_world_size(), dist.get_rank()
    table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(size, configs, queues)
    found = []
    for _ in range(2):
        pack = (1,) if rank == 0 else pack_of(SLOTS, size)
        found.append(error_of(lambda pack=pack: table.lookup(SLOTS, {}, pack)[0]["1"]).partition(":")[0])
    return [*found, table.lookup(SLOTS, {}, pack_of(SLOTS, size))[0]["1"].tolist()]


def test_a_lookup_ahead_that_fails_fails_on_all_ranks() -> None:
    zero = [[0.0], [0.0]]
    expected = [["InputError", "InputError", zero], ["RankFailedError", "RankFailedError", zero]]
    assert run_ranks(failing, {"enable_pipelined_fwda2a": 1}) == expected


def test_prefetch_queues_start_lookups_ahead() -> None:
    expected = {
        # ids travel ahead: rows are those after the update before
        "enable_pipelined_fwda2a": [[0.0, 0.0], [-2.0, -2.0], [-4.0, -4.0]],
        # rows travel ahead: they miss the updates in between
        "embedding_prefetch_capacity": [[0.0, 0.0], [0.0, 0.0], [-2.0, -2.0]],
    }
    for name, seen in expected.items():
        assert run_ranks(prefetched, {name: 2}) == [[[0], *seen], [[1], *seen]]


def other_calls() -> list[Any]:
    rank, size = dist.get_rank(), dist.get_world_size()
    mpi = distributed_ps_sync.DistributedMultiTypeHashTableMpi
    table = mpi(size, lambda rank: SyncShards(list(map(named, *zip(*configs(rank).items(), strict=True)))))
    wrong = [
        error_of(mpi, size + 1, configs),
        error_of(mpi, size, configs, {"enable_pipelined": 1}),
        error_of(mpi, size, lambda rank: 3),
        error_of(mpi, size, lambda rank: LocalShards([zeros("1", 1)])) if size > 1 else "",
        error_of(table.lookup, SLOTS, {}),
        error_of(table.lookup, {"1": ids(1)}, {}, pack_of(SLOTS, size)),
        error_of(table.lookup, SLOTS, {}, pack_of(SLOTS, size + 1)),
        error_of(table.apply_gradients, GRADS, {}, 0),
    ]
    _, bundle = table.lookup(SLOTS, {}, pack_of(SLOTS, size))
    wrong.append(error_of(table.apply_gradients, {"1": GRADS["1"]} if rank == 0 else GRADS, bundle, 0))
    _, bundle = table.lookup(SLOTS, {}, pack_of(SLOTS, size))
    del bundle["recv_emb_splits"]
    wrong.append(error_of(table.apply_gradients, GRADS, bundle, 0))
    table.assign({"1": (ids(7), rows([7]))} if rank == 0 else {})
    table.assign_add({"1": (ids(7), rows([1]))} if rank == 0 else {})
    again, status = table.reinitialize("1", ids(7, 8) if rank == 0 else ids())
    assert again is table
    return [wrong, status.tolist(), table.reinitialize("9", ids(1))[1].tolist()]


def named(name: str, config: TableConfig) -> TableConfig:
    return replace(config, name=name, missing="zeros")


def test_other_calls_and_wrong_ones() -> None:
    found = run_ranks(other_calls)
    for (wrong, *_), failed in zip(found, ["slot_to_grad must have", "rank 0"], strict=True):
        for text, message in zip(
            wrong,
            [
                "shard_num is 3, but there are 2 ranks",
                "queue_configs must be a dict with keys of enable_pipelined_fwda2a",
                "table_factory must return TableConfigs",
                "must return shards over 2 ranks",
                "early_reorder_indicies_res_pack must be",
                "slot_to_id must have the slots ['1', '2']",
                "sharded_slot_sizes",
                "the one that lookup has filled",
                failed,
                "auxiliary_bundle lacks recv_emb_splits",
            ],
            strict=True,
        ):
            assert message in text
    assert [each[1:] for each in found] == [[[1, 0], [-1]], [[], [-1]]]


def wire_of_a_rank() -> tuple[str, str]:
    os.environ["MONOLITH_WITH_BYTEPS_BWD_CAST"] = "16"
    table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(1, configs)
    assert isinstance(table.shards, SyncShards)
    return table.shards.wire


def test_the_cast_variable_selects_the_float16_wire() -> None:
    assert run_ranks(wire_of_a_rank, world_size=1) == [("float32", "float16")]


def test_module_variables_are_read_when_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (distributed_ps_sync.enable_hvd, distributed_ps_sync.enable_bps_bwd_cast) == (None, 32)
    monkeypatch.setenv("MONOLITH_WITH_HOROVOD", "1")
    monkeypatch.setenv("MONOLITH_WITH_BYTEPS_FWD_GDR", "1")
    assert (distributed_ps_sync.enable_hvd, distributed_ps_sync.enable_bps_fwd_gdr) == ("1", 1)
    with pytest.raises(AttributeError):
        _ = distributed_ps_sync.enable_nothing


class Written:
    """A summary writer that keeps what it gets."""

    def __init__(self) -> None:
        self.found: dict[str, Any] = {}

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.found[name] = value

    def add_histogram(self, name: str, values: Tensor, step: int) -> None:
        self.found[name] = values.tolist()


def summaries(directory: str) -> dict[str, Any]:
    distribution_utils.FLAGS.enable_alltoall_metrics = True
    distribution_utils.FLAGS.enable_alltoall_metrics_for_slot = "1"
    distribution_utils.FLAGS.model_dir = directory
    rank = dist.get_rank()
    slots = {"1": ids(1, 2, 3), "2": ids(2)} if rank == 0 else {"1": ids(4), "2": ids()}
    table = distributed_ps_sync.DistributedMultiTypeHashTableMpi(2, configs)
    writer: Any = Written()
    for table.summary_writer in (writer, None):  # the second is TensorBoard's own
        embeddings, bundle = table.lookup(slots, {}, pack_of(slots, 2))
        table.apply_gradients({k: torch.ones_like(v) for k, v in embeddings.items()}, bundle, 3)
    table.summary_writer.close()
    found: dict[str, Any] = writer.found
    return found


def test_summaries_have_monoliths_names(tmp_path: Path) -> None:
    # Not at the top: the machine with the GPU, which imports this file, may lack it.
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    on_0, on_1 = run_ranks(summaries, str(tmp_path))
    # What rank 0 keeps is left out, as in Monolith, and indices count from rank 1.
    assert on_0 == {
        "all_fids_size": 4,
        "shard_sizes": [2, 2],
        "sharded_slot_sizes": [1, 1, 2, 0],
        "1_size": 3,
        "fused_embedding_splits": [3, 1],
        "Alltoall_id_dist": [2, 0],
        "Alltoall_emb_dist": [2, 0],
        "Alltoall_id_splits": [2],
        "Alltoall_emb_splits": [2],
        "Alltoall_grad_splits": [1],
        "Alltoall_id_sizes": 2,
        "Alltoall_emb_sizes": 2,
        "Alltoall_grad_sizes": 1,
        **{f"Alltoall_{kind}_{which}_idx": 0 for kind in ("id", "emb") for which in ("min", "max")},
        **{f"Alltoall_{kind}_{which}_size": 2 for kind in ("id", "emb") for which in ("min", "max")},
    }
    assert set(on_1) == {name for name in on_0 if not re.match("Alltoall.*(s|es|idx|size)$", name)}
    events = EventAccumulator(str(tmp_path), size_guidance={}).Reload()
    assert {"all_fids_size", "Alltoall_id_max_size"} <= set(events.Tags()["scalars"])
    assert {"Alltoall_id_dist", "shard_sizes"} <= set(events.Tags()["histograms"])
