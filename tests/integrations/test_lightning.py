"""Lightning: fit and checkpoints, in one process and at two ranks."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from megalith import Adagrad, EmbeddingCollection, Feature, SyncShards, TableConfig
from megalith.errors import UsageError
from tests.distributed.ranks import run_ranks
from tests.table.support import assert_same_tables, whole

L = pytest.importorskip("lightning.pytorch")
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


def test_gradient_accumulation_needs_update_step(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r'second backward.*update="step"'):
        trainer(tmp_path, accumulate_grad_batches=2).fit(Model(), loader())
    allowed = Model(allow_micro_steps=True)
    trainer(tmp_path, accumulate_grad_batches=2).fit(allowed, loader())
    assert allowed.embeddings.global_step == 6


def on_a_rank(path: Path, port: int) -> dict[str, Any]:
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
            ["ModelCheckpoint saves the state_dict of rank 0 alone", "enable_checkpointing=False"],
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
