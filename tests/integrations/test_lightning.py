"""Lightning: fit and checkpoints, in one process and at two ranks."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalith import SGD, Adagrad, EmbeddingCollection, Feature, SyncShards, TableConfig, TableLR, checkpoint
from megalith.errors import CheckpointError, UsageError
from tests.distributed.ranks import run_ranks
from tests.table.support import assert_same_tables, whole

L = pytest.importorskip("lightning.pytorch")
from lightning.pytorch.callbacks import ModelCheckpoint  # noqa: E402
from lightning.pytorch.plugins import MixedPrecision  # noqa: E402
from lightning.pytorch.tuner import Tuner  # noqa: E402

from megalith.integrations.lightning import TablesStrategy  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


class Model(L.LightningModule):  # type: ignore[misc,name-defined]
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [TableConfig("t", dim=4, optimizer=Adagrad(0.5))]
        self.embeddings = EmbeddingCollection(tables, [Feature("a", "t")], **options)
        self.head = nn.Linear(4, 1)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embeddings({"a": ids}, time=1)["a"])
        return logits

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        return self(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.head.parameters(), lr=0.1)


def loader() -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(24) % 10), batch_size=4)


def trainer(path: Path, **options: Any) -> Any:
    usual: dict[str, Any] = {"devices": 1, "max_epochs": 1, "enable_checkpointing": False}
    return L.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=True,
        default_root_dir=path,
        **(usual | options),
    )


def test_a_checkpoint_of_one_process_continues_exactly(tmp_path: Path) -> None:
    model, other = Model(), Model()
    fit = trainer(tmp_path)
    fit.fit(model, loader())
    fit.save_checkpoint(tmp_path / "last.ckpt")
    for each, resume in ((Model(), None), (other, tmp_path / "last.ckpt")):
        trainer(tmp_path, max_epochs=2).fit(each, loader(), ckpt_path=resume, weights_only=True)
        if resume is None:
            expected = each

    assert other.embeddings.global_step == expected.embeddings.global_step == 12
    assert_same_tables(whole(other.embeddings.tables["t"]), whole(expected.embeddings.tables["t"]))
    assert torch.equal(other.head.weight, expected.head.weight)


class Following(Model):
    """The recipe of docs/guides/frameworks.md: rows make their steps with the optimizer."""

    def __init__(self) -> None:
        super().__init__(update="step")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.embeddings.follow(optimizer)
        return optimizer


def by_hand(scale: float = 1.0, clip: float | None = None) -> Model:
    """What two accumulated batches per step must give, in plain torch."""
    torch.manual_seed(0)
    model = Model(update="step")
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    for number, batch in enumerate(loader()):
        (model(batch[0]).square().mean() / 2).backward()
        if number % 2:
            factor = 1.0
            if clip is not None:
                norm = float(nn.utils.clip_grad_norm_(model.head.parameters(), clip))
                factor = min(1.0, clip / (norm + 1e-6))
            optimizer.step()
            optimizer.zero_grad()
            model.embeddings.step(scale=factor)
    return model


def assert_close(model: Model, expected: Model) -> None:
    assert model.embeddings.global_step == expected.embeddings.global_step
    torch.testing.assert_close(model.head.weight, expected.head.weight)
    mine, other = (whole(each.embeddings.tables["t"]) for each in (model, expected))
    assert torch.equal(mine.ids, other.ids)
    torch.testing.assert_close(mine.rows, other.rows, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", [None, 0.01])
def test_accumulation_and_clipping_reach_the_rows(tmp_path: Path, clip: float | None) -> None:
    model = Following()
    trainer(tmp_path, accumulate_grad_batches=2, gradient_clip_val=clip).fit(model, loader())
    assert_close(model, by_hand(clip=clip))


def test_a_grad_scaler_of_lightning_sees_an_overflow_of_the_rows(tmp_path: Path) -> None:
    class Overflowing(Following):
        steps: tuple[int, ...] = ()

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.steps += (self.embeddings.global_step,)
            out = self.embeddings({"a": batch[0]}, time=1)["a"]
            loss = self.head(out).float().square().mean()
            return loss + (out * 3e38).sum() if index == 2 else loss

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    plugin = MixedPrecision("bf16-mixed", "cpu")
    plugin.scaler = scaler  # Lightning makes one itself for float16, which it allows on a GPU alone
    model = Overflowing()
    trainer(tmp_path, plugins=[plugin]).fit(model, loader())
    assert model.steps == (0, 1, 2, 2, 3, 4)
    assert scaler.get_scale() == 2.0**9


def test_the_lr_finder_changes_the_rates_of_tables_and_restores_the_rows(tmp_path: Path) -> None:
    class Tuned(Model):
        def __init__(self) -> None:
            self.lr, self.rate = 0.01, TableLR(0.01)
            rates: list[float] = []
            super().__init__()
            tables = [TableConfig("t", dim=4, optimizer=SGD(self.rate))]
            self.embeddings = EmbeddingCollection(tables, [Feature("a", "t")])
            self.rates = rates

        def training_step(self, batch: list[Tensor], index: int) -> Tensor:
            self.rates.append(self.rate())
            return super().training_step(batch, index)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            parts = [{"params": self.head.parameters()}, {"params": [self.rate.parameter]}]
            optimizer = torch.optim.SGD(parts, lr=self.lr)
            self.rate.follow(optimizer)
            return optimizer

    model = Tuned()
    model.embeddings.tables["t"].assign(torch.tensor([1]), torch.ones(1, 4))
    tuner = Tuner(trainer(tmp_path, max_epochs=10, enable_checkpointing=True))
    found = tuner.lr_find(model, loader(), num_training=20, early_stop_threshold=None)
    assert model.rates[0] < 1e-6
    assert model.rates[-1] > 0.1
    assert model.rates == sorted(model.rates)
    assert model.lr == found.suggestion()
    assert model.embeddings.global_step == 0
    assert whole(model.embeddings.tables["t"]).ids.tolist() == [1]


def test_gradient_accumulation_needs_update_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'second backward.*update="step"'):
        trainer(tmp_path, accumulate_grad_batches=2).fit(Model(), loader())
    allowed = Model(allow_micro_steps=True)
    trainer(tmp_path, accumulate_grad_batches=2).fit(allowed, loader())
    assert allowed.embeddings.global_step == 6


def as_torchrun(port: int) -> int:
    """Lightning builds the process group in fit, after the model; the environment is that of torchrun."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0",
        "TORCHELASTIC_RUN_ID": "test",
    }
    return rank


class Watched(Following):
    """Logs a loss that is lowest after the first epoch."""

    def validation_step(self, batch: list[Tensor], _: int) -> None:
        assert not self.embeddings.training
        self.log("val", float(self.current_epoch), sync_dist=True)


def contents(model: Model) -> dict[str, Any]:
    rows = model.embeddings.shards.lookup({"t": torch.arange(10)}).rows["t"]
    return {
        "rows": rows.tolist(),
        "head": model.head.weight.tolist(),
        "step": model.embeddings.global_step,
        "ids": whole(model.embeddings.tables["t"]).ids.tolist(),
    }


def with_tables(path: Path, **options: Any) -> Any:
    callback = ModelCheckpoint(path, "{epoch}", monitor="val", save_top_k=1, save_last=True)
    return trainer(
        path, strategy=TablesStrategy(), enable_checkpointing=True, callbacks=[callback], **options
    )


def saved_by_lightning(path: Path, port: int) -> dict[str, Any]:
    as_torchrun(port)
    model, resumed, whole_run, best = Watched(), Watched(), Watched(), Watched()
    fit = with_tables(path / "run", devices=2, max_epochs=2)
    fit.fit(model, loader(), loader())
    after_2 = contents(model)
    fit.validate(model, loader(), ckpt_path="best", weights_only=True)
    with_tables(path / "resumed", devices=2, max_epochs=3).fit(
        resumed, loader(), loader(), ckpt_path=path / "run" / "last.ckpt", weights_only=True
    )
    with_tables(path / "whole", devices=2, max_epochs=3).fit(whole_run, loader(), loader())
    checkpoint.load(best, path / "run" / "epoch=0.ckpt" / "megalith")
    return {
        "after 2 epochs": after_2,
        "best": contents(model),
        "best without Lightning": contents(best),
        "resumed": contents(resumed),
        "whole": contents(whole_run),
    }


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    path = tmp_path_factory.mktemp("tables")
    return run_ranks(saved_by_lightning, path, free_port()), path


def test_checkpoints_of_two_ranks_hold_all_tables(saved: tuple[list[dict[str, Any]], Path]) -> None:
    (first, second), path = saved
    for key in first:
        assert first[key]["rows"] == second[key]["rows"]
        assert sorted(first[key]["ids"] + second[key]["ids"]) == list(range(10))
    assert first["resumed"] == first["whole"]
    assert first["best"] == first["best without Lightning"]
    assert (first["best"]["step"], first["after 2 epochs"]["step"], first["whole"]["step"]) == (3, 6, 9)
    # Those of epochs that are not the best are removed with their tables.
    assert sorted(p.name for p in (path / "run").glob("*.ckpt")) == ["epoch=0.ckpt", "last.ckpt"]


def test_a_checkpoint_of_two_ranks_loads_in_one_process(
    saved: tuple[list[dict[str, Any]], Path], tmp_path: Path
) -> None:
    (first, _), path = saved
    model = Watched()
    fit = with_tables(tmp_path, devices=1, max_epochs=1)
    try:
        fit.validate(model, loader(), ckpt_path=path / "run" / "last.ckpt", weights_only=True)
        found = contents(model)
    finally:
        dist.destroy_process_group()
    expected = first["best"]  # Lightning writes last.ckpt whenever it writes the best one
    assert (found["rows"], found["head"], found["step"]) == (expected["rows"], expected["head"], 3)
    assert sorted(found["ids"]) == list(range(10))


def test_an_interrupted_save_is_not_loaded(saved: tuple[list[dict[str, Any]], Path], tmp_path: Path) -> None:
    path = saved[1] / "run"
    shutil.copytree(path / "last.ckpt", tmp_path / "torn.ckpt")
    shutil.rmtree(tmp_path / "torn.ckpt" / "megalith")
    shutil.copytree(path / "epoch=0.ckpt" / "megalith", tmp_path / "torn.ckpt" / "megalith")
    with pytest.raises(CheckpointError, match="a save was interrupted"):
        TablesStrategy().load_checkpoint(tmp_path / "torn.ckpt", weights_only=True)
    (tmp_path / "plain.ckpt").touch()
    with pytest.raises(CheckpointError, match="not a checkpoint that TablesStrategy has saved"):
        TablesStrategy().load_checkpoint(tmp_path / "plain.ckpt")


def on_a_rank(path: Path, port: int) -> dict[str, Any]:
    as_torchrun(port)
    model, refused = Model(), Model()

    def said(call: Callable[[], object]) -> str:
        with pytest.raises(UsageError) as raised:
            call()
        return str(raised.value)

    before = said(lambda: model(torch.arange(3)))
    usual: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    callback = said(lambda: trainer(path, **usual, enable_checkpointing=True).fit(refused, loader()))
    fit = trainer(path, **usual)
    fit.fit(model, loader())
    saved = said(lambda: fit.save_checkpoint(path / "last.ckpt"))
    rows = model.embeddings.shards.lookup({"t": torch.arange(10)}).rows["t"]
    return {
        "before": before,
        "saved": saved,
        "callback": callback,
        "steps before the callback's error": refused.embeddings.global_step,
        "kind": type(model.embeddings.shards).__name__,
        "rows": rows.tolist(),
        "ids": whole(model.embeddings.tables["t"]).ids.tolist(),
        "head": model.head.weight.tolist(),
    }


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
    return port


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(on_a_rank, tmp_path_factory.mktemp("lightning"), free_port())


def test_fit_spreads_the_tables_of_a_model_that_is_built_first(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks
    assert first["kind"] == second["kind"] == SyncShards.__name__
    assert first["rows"] == second["rows"]
    assert first["head"] == second["head"]
    assert sorted(first["ids"] + second["ids"]) == list(range(10))
    assert all(number % 2 == 0 for number in first["ids"])


@pytest.mark.parametrize(
    ("when", "texts"),
    [
        ("before", ["init_process_group"]),
        (
            "saved",
            ["Lightning saves the state_dict of rank 0 alone", "megalith.checkpoint.save(model, path)"],
        ),
        (
            "callback",
            [
                "ModelCheckpoint saves the state_dict of rank 0 alone",
                "strategy=megalith.integrations.lightning.TablesStrategy()",
            ],
        ),
    ],
)
def test_what_a_rank_must_not_do_names_the_remedy(
    ranks: list[dict[str, Any]], when: str, texts: list[str]
) -> None:
    for rank in ranks:
        assert [text for text in texts if text not in rank[when]] == []
        assert rank["steps before the callback's error"] == 0


def forked(path: Path) -> str:
    dist.destroy_process_group()
    try:
        trainer(path, devices=2, strategy="ddp_fork").fit(Model(), loader())
    except Exception as error:  # of torch.multiprocessing, with the traceback of a rank
        return str(error)
    return "no error"


def test_a_strategy_that_forks_names_ddp(tmp_path: Path) -> None:
    (said,) = run_ranks(forked, tmp_path, world_size=1)
    assert 'UsageError: the tables are spread over 2 ranks of Lightning: use strategy="ddp"' in said
