"""update="backward" over ranks: accumulated dense gradients raise under DDP and FSDP, other loops do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megalith import SGD, EmbeddingCollection, Feature, TableConfig
from tests.distributed.ranks import error_of, run_ranks


def ddp(dense: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(dense, **options)


def fsdp1(dense: nn.Module, **options: Any) -> nn.Module:
    return FullyShardedDataParallel(dense, device_id=torch.device("cpu"), **options)


def fsdp2(dense: nn.Module) -> nn.Module:
    fully_shard(dense, mesh=init_device_mesh("cpu", (2,)))
    return dense


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": ddp,
    "DDP, views": lambda dense: ddp(dense, gradient_as_bucket_view=True),
    "FSDP1": fsdp1,
    "FSDP1, original": lambda dense: fsdp1(dense, use_orig_params=True),
    "FSDP2": fsdp2,
}


class Loop:
    """A model of a table and a wrapped dense part, and its optimizer."""

    def __init__(self, wrap: Callable[[nn.Module], nn.Module]) -> None:
        torch.manual_seed(0)
        table = TableConfig("t", dim=4, optimizer=SGD(0.1))
        self.embeddings = EmbeddingCollection([table], [Feature("a", "t")])
        self.dense = wrap(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 1)))
        self.optimizer = torch.optim.SGD(self.dense.parameters(), lr=0.01)

    def backward(self) -> None:
        self.dense(self.embeddings({"a": torch.arange(4)})["a"]).square().mean().backward()

    def steps(self, *backwards: int, set_to_none: bool = True, sync: bool = True) -> None:
        """Make a step after each number of backwards."""
        for count in backwards:
            for number in range(count):
                with nullcontext() if sync or number == count - 1 else self.without_sync():
                    self.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=set_to_none)

    def with_dropped_gradients(self) -> None:
        """Now and then there is no step, as after a loss that is not finite."""
        for step in (True, False, True, True, False, False, True, True):
            self.backward()
            if step:
                self.optimizer.step()
            self.optimizer.zero_grad()

    @contextmanager
    def without_sync(self) -> Iterator[None]:
        dense: Any = self.dense
        if hasattr(dense, "no_sync"):
            with dense.no_sync():
                yield
            return
        dense.set_requires_gradient_sync(False)  # FSDP2
        yield
        dense.set_requires_gradient_sync(True)


def loops() -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = {}
    for name, wrap in WRAPPERS.items():
        found[name] = {
            "one": error_of(Loop(wrap).steps, 1, 1, 1, 1),
            "zeroed in place": error_of(Loop(wrap).steps, 1, 1, 1, set_to_none=False),
            "accumulated": error_of(Loop(wrap).steps, 2, 2, 2),
            "accumulated in place": error_of(Loop(wrap).steps, 2, 2, 2, set_to_none=False),
            "without sync": error_of(Loop(wrap).steps, 2, 2, 2, sync=False),
            "some dropped": error_of(Loop(wrap).with_dropped_gradients),
        }
    return found


def test_accumulation_raises_on_all_ranks() -> None:
    for rank in run_ranks(loops):
        for name, found in rank.items():
            said = "2 backwards before each step" if "FSDP" in name else "second backward before the step"
            for case in ("accumulated", "accumulated in place", "without sync"):
                assert said in found[case], (name, case, found[case])
                assert 'update="step"' in found[case]
            for case in ("one", "zeroed in place", "some dropped"):
                assert not found[case], (name, case, found[case])
