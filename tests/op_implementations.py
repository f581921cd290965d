"""The fixture `implementation`: each op once in native code and once as its torch twin."""

from __future__ import annotations

from importlib import import_module

import pytest

# By their paths: megalith.ops.pool_rows is also the name of a function.
MODULES = [
    import_module(f"megalith.{name}")
    for name in (
        "compat.monolith.buffer_ops",
        "compat.monolith.distribution_ops",
        "compat.monolith.fid_sharding",
        "compat.monolith.layout_ops",
        "compat.monolith.reduce_ops",
        "ops.bucketing",
        "ops.gather_rows",
        "ops.move_runs",
        "ops.pool_rows",
    )
]
OPS = [
    *["bucketize", "dedup", "gather", "layout", "layout_grad", "locate", "match", "move", "place", "pool"],
    *["scatter", "take", "unpool"],
]


@pytest.fixture(params=["native", "twin"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Each implementation in turn: the native kernels, and the plain torch that other devices run."""
    name: str = request.param
    if name == "twin":
        twins = {op: getattr(m, f"_{op}_twin") for m in MODULES for op in OPS if hasattr(m, f"_{op}_twin")}
        assert sorted(twins) == OPS
        for module in MODULES:
            for op in OPS:
                if hasattr(module, f"_{op}"):
                    monkeypatch.setattr(module, f"_{op}", twins[op])
    return name
