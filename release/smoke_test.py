"""An installed wheel works: run this with the Python of an environment that has nothing but the wheel.

    python release/smoke_test.py [--without-torch]

It checks that the native module is part of the installation, trains a table, saves and loads it, and trains a
model with the command line. `--without-torch` checks what needs no torch: the commands' help and native code
that takes bytes. It must not run in the checkout's own environment, whose sources it would test.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

MEGALITH = [sys.executable, "-m", "megalith"]
LIMIT = 300


def command(*arguments: str) -> str:
    done = subprocess.run([*MEGALITH, *arguments], capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def check_installation() -> None:
    import megalith
    from megalith import _native

    sources = Path(__file__).parents[1] / "src"
    assert sources not in Path(megalith.__file__).parents, "this is the checkout, not an installed wheel"
    assert Path(_native.__file__).parent == Path(megalith.__file__).parent
    assert metadata.version("megalith") == megalith.__version__
    assert command("--version").split() == ["megalith", megalith.__version__]
    assert "train" in command("--help")
    assert _native.crc32c(b"123456789") == 0xE3069283
    compilers = [name for name in ("cc", "c++", "gcc", "g++", "clang", "nvcc") if shutil.which(name)]
    print(f"megalith {megalith.__version__}, {Path(_native.__file__).name}, kernels: {_native.kernels()}")
    print(f"compilers on the path: {', '.join(compilers) or 'none'}")


def check_training() -> None:
    import torch

    from megalith import Adagrad, EmbeddingCollection, Feature, Mean, Ragged, TableConfig, checkpoint

    def new_collection() -> EmbeddingCollection:
        tables = [TableConfig("item", dim=16, optimizer=Adagrad(0.05))]
        return EmbeddingCollection(tables, [Feature("clicked", table="item", combiner=Mean())])

    embeddings = new_collection()
    batch = {"clicked": Ragged.from_lists([[31337, -1, 31337], [2**62], []])}
    losses = []
    for _ in range(20):
        loss = (embeddings(batch)["clicked"].sum(dim=1) - 1.0).square().sum()
        loss.backward()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2, losses
    assert len(embeddings.tables["item"]) == 3

    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(embeddings, folder)
        loaded = new_collection()
        checkpoint.load(loaded, folder)
    assert torch.equal(embeddings.eval()(batch)["clicked"], loaded.eval()(batch)["clicked"])
    print(f"torch {torch.__version__}: loss {losses[0]:.3f} -> {losses[-1]:.3f}, saved and loaded")

    with tempfile.TemporaryDirectory() as folder:
        run = str(Path(folder) / "run")
        command("train", "--data", "synthetic", "--max-steps", "20", "--run", run)
        assert (Path(run) / "report.html").exists()
    print("megalith train: 20 steps, a checkpoint and a report")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--without-torch", action="store_true", help="only what needs no torch")
    options = parser.parse_args()
    check_installation()
    if not options.without_torch:
        check_training()
    print("the wheel works")


if __name__ == "__main__":
    main()
