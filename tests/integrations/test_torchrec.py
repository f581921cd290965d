"""TorchRec: its DLRM on our tables reaches the losses of its own tables, and state_dicts go both ways."""

from __future__ import annotations

import runpy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from megalith import SGD, Adagrad, Adam
from megalith.compat.torchrec import (
    EmbeddingBagCollection,
    EmbeddingCollection,
    export_torchrec,
    import_torchrec,
)
from tests.distributed.ranks import run_ranks

torchrec = pytest.importorskip("torchrec")

from torchrec.datasets.random import RandomRecDataset  # noqa: E402
from torchrec.distributed import TrainPipelineSparseDist  # noqa: E402
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder  # noqa: E402
from torchrec.distributed.model_parallel import DistributedModelParallel  # noqa: E402
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology  # noqa: E402
from torchrec.models.dlrm import DLRM, DLRMTrain  # noqa: E402
from torchrec.optim.keyed import KeyedOptimizerWrapper  # noqa: E402
from torchrec.optim.optimizers import in_backward_optimizer_filter  # noqa: E402
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad  # noqa: E402

KEYS = ["user", "item", "shop"]
ROWS, STEPS = 200, 40


def configs(dim: int = 8) -> list[Any]:
    return [
        torchrec.EmbeddingBagConfig(
            name=f"t_{key}", embedding_dim=dim, num_embeddings=ROWS, feature_names=[key]
        )
        for key in KEYS
    ]


def dlrm(collection: nn.Module) -> DLRMTrain:
    torch.manual_seed(1)
    return DLRMTrain(
        DLRM(
            embedding_bag_collection=collection,
            dense_in_features=4,
            dense_arch_layer_sizes=[16, 8],
            over_arch_layer_sizes=[16, 1],
        )
    )


def batches(seed: int = 2) -> list[Any]:
    data = RandomRecDataset(
        KEYS, 32, ROWS, ids_per_feature=3, num_dense=4, manual_seed=seed, num_generated_batches=4
    )
    return list(islice(data, STEPS))


def dense_optimizer(model: nn.Module) -> KeyedOptimizerWrapper:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    return KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))


def losses(
    collection: nn.Module, optimizer: type, settings: dict[str, Any], weights: Any = None
) -> list[float]:
    """Trains as TorchRec's examples do, in one process."""
    model = dlrm(collection)
    apply_optimizer_in_backward(optimizer, model.model.sparse_arch.parameters(), settings)
    if weights is not None:
        import_torchrec(collection, weights)
    dense = dense_optimizer(model)
    found = []
    for batch in batches():
        loss, _ = model(batch)
        dense.zero_grad()
        loss.backward()
        dense.step()
        found.append(loss.item())
    return found


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (RowWiseAdagrad, {"lr": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1, "initial_accumulator_value": 0.1}),
        (torch.optim.SGD, {"lr": 0.5}),
    ],
)
def test_dlrm_reaches_the_same_losses(optimizer: type, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    theirs = torchrec.EmbeddingBagCollection(tables=configs())
    weights = {name: value.clone() for name, value in theirs.state_dict().items()}
    expected = losses(theirs, optimizer, settings)

    found = losses(EmbeddingBagCollection(tables=configs()), optimizer, settings, weights)

    assert found == pytest.approx(expected, rel=1e-4)
    assert expected[-1] < 0.7 * expected[0]


@pytest.mark.parametrize("which", ["before", "after"])
def test_the_migration_example(which: str, capsys: pytest.CaptureFixture[str]) -> None:
    """docs/coming-from-torchrec.md shows their difference."""
    runpy.run_path(str(Path(__file__).parents[2] / "examples" / "migration" / f"torchrec_{which}.py"))
    assert float(capsys.readouterr().out.split()[1]) < 0.1


def golden(kind: type, path: Path) -> list[float]:
    """examples/golden_training/train_dlrm.py of TorchRec, smaller, with the class of the collection."""
    torch.manual_seed(0)
    collection = kind(tables=configs(), device=torch.device("meta"))
    model = dlrm(collection)
    apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.1})
    device = torch.device("cpu")
    fused = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    planner = EmbeddingShardingPlanner(
        topology=Topology(dist.get_world_size(), "cpu"), constraints={f"t_{key}": fused for key in KEYS}
    )
    sharder = EmbeddingBagCollectionSharder()
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    parallel = DistributedModelParallel(module=model, device=device, sharders=[sharder], plan=plan)
    optimizer = dense_optimizer(parallel)
    weights = torch.load(path, weights_only=True)
    if kind is EmbeddingBagCollection:
        import_torchrec(collection, weights)
    else:
        load_sharded(parallel, weights)
    pipeline = TrainPipelineSparseDist(parallel, optimizer, device)
    data = iter(batches(seed=2 + dist.get_rank()))
    return [pipeline.progress(data)[0].item() for _ in range(STEPS)]


def load_sharded(parallel: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    for name, value in parallel.state_dict().items():
        for key, weight in weights.items():
            if name.endswith(key):
                for shard in value.local_shards():
                    shard.tensor.copy_(weight)


def on_a_rank(path: Path) -> list[list[float]]:
    return [golden(kind, path) for kind in (torchrec.EmbeddingBagCollection, EmbeddingBagCollection)]


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_distributed_example(tmp_path: Path, ranks: int) -> None:
    torch.manual_seed(0)
    torch.save(torchrec.EmbeddingBagCollection(tables=configs()).state_dict(), tmp_path / "weights")
    for expected, found in run_ranks(on_a_rank, tmp_path / "weights", world_size=ranks):
        assert found == pytest.approx(expected, rel=1e-3, abs=1e-5)
        assert found[-1] < 0.1 * found[0]


# ---- one call


def both(theirs: nn.Module, ours: Any) -> tuple[nn.Module, Any]:
    """Gives our collection the rows of theirs."""
    import_torchrec(ours, theirs.state_dict())
    return theirs, ours


def features(weighted: bool = False, **fields: Any) -> Any:
    return torchrec.KeyedJaggedTensor(
        keys=["f1", "f2"],
        values=torch.tensor([1, 2, 3, 4, 5, 6, 1], dtype=torch.int64),
        lengths=torch.tensor([2, 0, 1, 1, 1, 2], dtype=torch.int32),
        weights=torch.tensor([0.5, 1.0, 2.0, -1.0, 0.1, 3.0, 0.25]) if weighted else None,
        **fields,
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_the_pooled_rows_are_theirs(weighted: bool) -> None:
    tables = [
        torchrec.EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=9, feature_names=["f1"]),
        torchrec.EmbeddingBagConfig(
            name="t2",
            embedding_dim=3,
            num_embeddings=9,
            feature_names=["f2", "f1"],
            pooling=torchrec.PoolingType.SUM if weighted else torchrec.PoolingType.MEAN,
        ),
    ]
    theirs, ours = both(
        torchrec.EmbeddingBagCollection(tables, weighted),
        EmbeddingBagCollection(tables, weighted, optimizer=SGD(0.1)),
    )
    expected, found = theirs(features(weighted)), ours(features(weighted))
    assert type(found) is torchrec.KeyedTensor
    assert found.keys() == expected.keys() == ["f1@t1", "f2", "f1@t2"]
    assert found.length_per_key() == expected.length_per_key()
    torch.testing.assert_close(found.values(), expected.values(), rtol=1e-6, atol=1e-7)
    assert all(torch.equal(found[k], v) for k, v in found.to_dict().items())


def test_a_variable_batch_per_key() -> None:
    tables = [
        torchrec.EmbeddingBagConfig(name=f"t{i}", embedding_dim=4, num_embeddings=9, feature_names=[f"f{i}"])
        for i in (1, 2)
    ]
    batch = torchrec.KeyedJaggedTensor(
        keys=["f1", "f2"],
        values=torch.tensor([1, 2, 3, 4, 5], dtype=torch.int64),
        lengths=torch.tensor([2, 1, 2], dtype=torch.int64),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["f2", "f1"], torch.tensor([[0, 0, 0], [1, 0, 1]])),
    )
    theirs, ours = both(
        torchrec.EmbeddingBagCollection(tables), EmbeddingBagCollection(tables, optimizer=SGD(0.1))
    )
    torch.testing.assert_close(ours(batch).values(), theirs(batch).values(), rtol=1e-6, atol=1e-7)


def test_the_unpooled_rows_are_theirs() -> None:
    tables = [
        torchrec.EmbeddingConfig(name=name, embedding_dim=4, num_embeddings=9, feature_names=names)
        for name, names in (("t1", ["f1"]), ("t2", ["f1", "f2"]))
    ]
    theirs, ours = both(
        torchrec.EmbeddingCollection(tables, need_indices=True),
        EmbeddingCollection(tables, need_indices=True, optimizer=SGD(0.1)),
    )
    expected, found = theirs(features(True)), ours(features(True))
    assert found.keys() == expected.keys()
    for name, jagged in found.items():
        assert type(jagged) is torchrec.JaggedTensor
        assert torch.equal(jagged.values(), expected[name].values())
        assert torch.equal(jagged.weights(), expected[name].weights())
        assert jagged.lengths().tolist() == expected[name].lengths().tolist()


def test_a_compiled_model_trains_equally() -> None:
    def made() -> DLRM:
        torch.manual_seed(3)
        return dlrm(EmbeddingBagCollection(configs(), optimizer=Adagrad(0.1))).model

    plain, model = made(), made()
    compiled = torch.compile(model, backend="aot_eager")
    for batch in batches()[:4]:
        expected, found = (each(batch.dense_features, batch.sparse_features) for each in (plain, compiled))
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7)
        for each in (expected, found):
            each.square().sum().backward()


# ---- state_dicts


def test_dense_weights_and_state_go_both_ways() -> None:
    """Both continue to train from the same weights and Adagrad sums."""
    torch.manual_seed(0)
    theirs = torchrec.EmbeddingBagCollection(tables=configs())
    apply_optimizer_in_backward(RowWiseAdagrad, theirs.parameters(), {"lr": 0.1})
    first, second, *_ = batches()
    theirs(first.sparse_features).values().square().sum().backward()
    state = {
        name: dict(bag.weight._in_backward_optimizers[0].state[bag.weight])
        for name, bag in theirs.embedding_bags.items()
    }
    ours = EmbeddingBagCollection(tables=configs())
    apply_optimizer_in_backward(RowWiseAdagrad, ours.parameters(), {"lr": 0.1})
    assert import_torchrec(ours, theirs.state_dict(), optimizer_state=state).left_out == {}

    before = torchrec.EmbeddingBagCollection(tables=configs())
    before.load_state_dict(export_torchrec(ours, before.state_dict()))
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), theirs.parameters(), strict=True))
    for collection in (theirs, ours):
        collection(second.sparse_features).values().square().sum().backward()
    after = torchrec.EmbeddingBagCollection(tables=configs())
    after.load_state_dict(export_torchrec(ours, after.state_dict()))
    for a, b in zip(after.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def managed(kind: type, modules: Any, tables: list[Any]) -> nn.Module:
    from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
    from torchrec.modules.mc_modules import ManagedCollisionCollection

    return ManagedCollisionEmbeddingBagCollection(
        torchrec.EmbeddingBagCollection(tables),
        ManagedCollisionCollection({"t1": modules}, tables),
    )


def test_zch_goes_both_ways() -> None:
    from torchrec.modules.mc_modules import DistanceLFU_EvictionPolicy, MCHManagedCollisionModule

    tables = [
        torchrec.EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=20, feature_names=["f1"])
    ]

    def made() -> nn.Module:
        policy = DistanceLFU_EvictionPolicy()
        module = MCHManagedCollisionModule(20, torch.device("cpu"), policy, eviction_interval=1)
        return managed(MCHManagedCollisionModule, module, tables)

    def batch(ids: list[int]) -> Any:
        return torchrec.KeyedJaggedTensor(
            keys=["f1"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
        )

    ids = [2**40 + 7 * k for k in range(15)]
    theirs = made()
    for start in (5, 10, 15):  # ids arrive in several batches, so rows are not in the order of ids
        theirs(batch(ids[start - 5 : start][::-1]))
    theirs.eval()
    expected = theirs(batch(ids))[0].values()

    ours = EmbeddingBagCollection(tables, optimizer=Adagrad(0.1))
    report = import_torchrec(ours, theirs.state_dict())
    assert report.rows == {"t1": 15}
    assert "t1: rows without an id" in report.left_out
    assert torch.equal(ours(batch(ids)).values(), expected)

    ours(batch([5])).values().sum().backward()  # a new id
    back = made()
    back.load_state_dict(export_torchrec(ours, back.state_dict()))
    back.eval()
    assert torch.equal(back(batch([*ids, 5]))[0].values(), ours.eval()(batch([*ids, 5])).values())


def test_mpzch_goes_both_ways() -> None:
    """On a CPU its kernel only reads: the ids are put where it looks for them."""
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

    tables = [
        torchrec.EmbeddingBagConfig(name="t1", embedding_dim=4, num_embeddings=64, feature_names=["f1"])
    ]

    def made() -> nn.Module:
        module = HashZchManagedCollisionModule(64, torch.device("cpu"), total_num_buckets=1)
        return managed(HashZchManagedCollisionModule, module, tables).eval()

    def batch(ids: list[int]) -> Any:
        return torchrec.KeyedJaggedTensor(
            keys=["f1"], values=torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64)
        )

    theirs = made()
    state = theirs.state_dict()
    (key,) = [key for key in state if key.endswith("_hash_zch_identities")]
    places: dict[int, int] = {}
    for id in range(2**40, 2**40 + 100):
        (slot,) = slot_of(theirs, batch([id]))
        places.setdefault(slot, id)
    for slot, id in places.items():
        state[key].view(-1)[slot] = id
    theirs.load_state_dict(state)
    ids = sorted(places.values())
    expected = theirs(batch(ids))[0].values()

    ours = EmbeddingBagCollection(tables, optimizer=Adam(0.1))
    assert import_torchrec(ours, theirs.state_dict()).rows == {"t1": len(ids)}
    assert torch.equal(ours(batch(ids)).values(), expected)

    ours(batch(ids[:3])).values().sum().backward()
    back = made()
    back.load_state_dict(export_torchrec(ours, theirs.state_dict()))
    assert torch.equal(back(batch(ids))[0].values(), ours.eval()(batch(ids)).values())


def slot_of(model: Any, batch: Any) -> list[int]:
    """The rows in which an MPZCH table looks for the ids of a batch."""
    slots: list[int] = model._managed_collision_collection(batch).values().tolist()
    return slots
