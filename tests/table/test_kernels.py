"""Sets of native kernels, one per instruction set: equal bits, and the choice between them."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import cache

import pytest
import torch

import megalith
from megalith import Normal, TableConfig, _native
from megalith.table import Chunk
from megalith.table.engines.cpu import CpuEngine
from tests.table.support import OPTIMIZERS, assert_same_tables, cpu_table, life

WIDE = ("avx2", "avx512")


@cache
def portable_life(name: str, dim: int) -> Chunk:
    return life(cpu_table(config(name, dim), kernels="portable"))


def config(name: str, dim: int) -> TableConfig:
    return TableConfig("t", dim=dim, optimizer=OPTIMIZERS[name], initializer=Normal())


@pytest.fixture(params=WIDE)
def wide(request: pytest.FixtureRequest) -> str:
    """A set of kernels besides the portable one."""
    name: str = request.param
    if name not in _native.kernel_sets():
        pytest.skip(f"this CPU or build has no {name}")
    return name


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_set_of_kernels_gives_the_bits_of_the_portable_one(name: str, wide: str) -> None:
    for dim in (1, 3, 8, 16, 20, 32, 64, 100):
        assert_same_tables(life(cpu_table(config(name, dim), kernels=wide)), portable_life(name, dim))


@pytest.mark.parametrize("n", [0, 1, 7, 63, 64, 65, 127, 128, 1000, 5000])
def test_every_set_of_kernels_finds_the_same_rows(n: int, wide: str) -> None:
    """Known and unknown ids, also while the index grows; blocks that are not full."""
    generator = torch.Generator().manual_seed(n)
    ids = torch.randint(0, 2 * n + 1, (n,), generator=generator) * 0x5851F42D4C957F2D
    tables = [cpu_table(config("sgd", 1), kernels=name) for name in (wide, "portable")]
    for table in tables:
        known = torch.arange(n) * 0x5851F42D4C957F2D
        table.assign(known, torch.zeros(n, 1))
        torch.testing.assert_close(table.find(known), torch.arange(n, dtype=torch.int32))
    first, second = (table.find(ids) for table in tables)
    assert torch.equal(first, second)


def test_a_table_reports_the_kernels_it_uses_and_unknown_ones_raise() -> None:
    for name in _native.kernel_sets():
        assert CpuEngine(config("sgd", 1), kernels=name)._native.kernels == name
    assert CpuEngine(config("sgd", 1))._native.kernels == _native.kernels()
    with pytest.raises(ValueError, match="kernels"):
        CpuEngine(config("sgd", 1), kernels="abacus")


# ---- MEGALITH_KERNELS


def chosen(variable: str | None) -> tuple[str, str]:
    """The kernels that a new process uses, and its error. It does not import torch."""
    code = f"""
import sys, types
package = sys.modules["megalith"] = types.ModuleType("megalith")
package.__path__ = {megalith.__path__!r}
from megalith import _native
print(_native.kernels(), "torch" in sys.modules)
"""
    environment = {k: v for k, v in os.environ.items() if k != "MEGALITH_KERNELS"}
    if variable is not None:
        environment["MEGALITH_KERNELS"] = variable
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    return done.stdout.strip().removesuffix(" False"), done.stderr


def test_a_variable_forces_a_set_of_kernels_and_the_best_is_the_default() -> None:
    for name in _native.kernel_sets():
        assert chosen(name)[0] == name
    assert chosen(None)[0] == _native.kernel_sets()[0]


def test_a_wrong_variable_raises_with_the_remedy() -> None:
    output, error = chosen("abacus")
    assert not output
    assert "InputError: MEGALITH_KERNELS=abacus" in error
    assert "unset it" in error
