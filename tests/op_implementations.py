"""The fixture `implementation`: each op in native code, in torch, and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
import torch

# By their paths: megalith.ops.pooling is also the name of a function.
MODULES = [
    import_module(f"megalith.{name}")
    for name in (
        "compat.monolith.distribution_ops",
        "compat.monolith.layout_ops",
        "compat.monolith.parsers",
        "ops.bucketing",
        "ops.gather_rows",
        "ops.move_runs",
        "ops.pooling",
    )
]
OPS = [
    *["bucketize", "dedup", "gather", "layout", "layout_grad", "locate", "match", "move", "place", "pool"],
    *["scatter", "take", "unpool"],
]


def use_references(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs the torch reference of each op, also for tensors on the CPU."""
    references = {
        op: getattr(m, f"_{op}_reference") for m in MODULES for op in OPS if hasattr(m, f"_{op}_reference")
    }
    assert sorted(references) == OPS
    for module in MODULES:
        for op in OPS:
            if hasattr(module, f"_{op}"):
                monkeypatch.setattr(module, f"_{op}", references[op])


@pytest.fixture(params=["native", "reference", *(["cuda"] if torch.cuda.is_available() else [])])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each implementation in turn: the native kernels, and the plain torch that other devices run.

    With "cuda", tensors that a test makes are on the GPU.
    """
    name: str = request.param
    if name == "reference":
        use_references(monkeypatch)
    if name == "cuda":
        torch.set_default_device("cuda")
    yield name
    torch.set_default_device(None)
