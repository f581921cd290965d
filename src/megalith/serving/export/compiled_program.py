"""Compiled program: the dense part as a library that AOTInductor makes, with its exported weights.

A library is code, so none is ever loaded from an export. A server compiles the program of an export itself,
in a child process with a low priority, and keeps the library in a private directory: it belongs to this user,
and nobody else may write to it. The name of a library is a digest of the program, of torch's version and of
the CPU. A library is used once its outputs have been compared with those of the program. Whatever fails, the
program itself continues to answer.

A compiled program has the bits of another order of operations: outputs may differ in the last digits.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalith.errors import ExportError
from megalith.serving.export.archive import check_archive, load_archive

logger = logging.getLogger(__name__)

COMPILE_SECONDS = 1800.0
CHECKED_SIZES = (1, 2, 5, 33)
RELATIVE, ABSOLUTE = 1e-4, 1e-4
"""Largest differences from the outputs of the program."""
_TRACED_SIZE = 3
Runner = Callable[[list[Tensor]], Sequence[Tensor]]
Inputs = Callable[[int], tuple[dict[str, Any], Tensor | None]]
"""Makes rows and dense values of a batch size."""


def default_cache() -> Path:
    """Return the directory of this user's libraries."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "megalith" / "compiled"


def open_cache(directory: Path) -> Path:
    """Create the directory of libraries, and check that it is private.

    Args:
        directory: The directory.

    Returns:
        It.

    Raises:
        ExportError: It belongs to someone else, or others may write to it.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
    except OSError as error:
        raise ExportError(f"{directory} cannot hold compiled programs: {error}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ExportError(
            f"{directory} holds code that this server would run: it must belong to this user, and "
            "nobody else may write to it (chmod 700)"
        )
    return directory


def library_name(program: bytes) -> str:
    """Return the name of the library of a program.

    Args:
        program: The archive of torch.export.

    Returns:
        A digest of the program, the version of torch and the CPU, with a suffix.
    """
    digest = hashlib.sha256(program)
    for part in (torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability()):
        digest.update(b"\0" + part.encode())
    return f"{digest.hexdigest()}.pt2"


def find_library(program: Path, cache: Path) -> Path | None:
    """Return the library of a program; compile it first, in a child process, if there is none.

    Args:
        program: The archive of an export that is trusted.
        cache: The directory of libraries.

    Returns:
        The library; None if it cannot be compiled, for example without a C++ compiler.

    Raises:
        ExportError: The directory is not private.
    """
    open_cache(cache)
    path = cache / library_name(program.read_bytes())
    if path.exists():
        return path
    command = [sys.executable, "-P", "-m", __name__, str(program), str(path)]
    search = os.pathsep.join(each for each in sys.path if each)
    environment = {**os.environ, "PYTHONPATH": search, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    try:
        ended = subprocess.run(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=COMPILE_SECONDS,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        logger.warning("%s is not compiled: %s", program, error)
        return None
    if ended.returncode or not path.exists():
        reason = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
        logger.warning("%s is not compiled: %s", program, reason[0][:500])
        return None
    return path


def load_library(path: Path, reference: Callable[..., Sequence[Tensor]], inputs: Inputs) -> Runner | None:
    """Load a library and compare its outputs with those of the program.

    Args:
        path: What `find_library` returned.
        reference: Runs the program with rows and dense values.
        inputs: Makes rows and dense values of a batch size.

    Returns:
        Computes the outputs from the program's inputs in flat order; None if the outputs differ.
    """
    loader: Any = torch._inductor.aoti_load_package(str(path)).loader

    def run(flat: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = loader.run(flat)
        return outputs

    with torch.inference_mode():
        for size in CHECKED_SIZES:
            rows, dense = inputs(size)
            expected, found = reference(rows, dense), run(flatten(rows, dense))
            for a, b in zip(expected, found, strict=True):
                same = a.shape == b.shape and a.dtype == b.dtype
                if not same or not torch.allclose(a.double(), b.double(), RELATIVE, ABSOLUTE, equal_nan=True):
                    logger.error("%s is not used: its outputs differ from those of the program", path)
                    return None
    return run


def flatten(rows: dict[str, Any], dense: Tensor | None) -> list[Tensor]:
    """Return the inputs of a program in the order in which torch.export flattens them.

    Args:
        rows: Tensors, or lists of tensors, by name.
        dense: The dense values.

    Returns:
        The tensors.
    """
    flat: list[Tensor] = []
    for each in rows.values():
        if isinstance(each, Tensor):
            flat.append(each)
        else:
            flat += each
    return flat if dense is None else [*flat, dense]


def compile_archive(program: Path, path: Path) -> None:
    """Compile a program, and write the library in one step.

    Args:
        program: The archive of torch.export.
        path: The new library.

    Raises:
        ExportError: The archive is not valid.
    """
    os.nice(10)
    data = program.read_bytes()
    check_archive(data, str(program))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = load_archive(data)
        exported.example_inputs = (_example(exported), {})
        part = path.with_name(f"{path.stem}.{os.getpid()}.pt2")
        torch._inductor.aoti_compile_and_package(exported, package_path=str(part))
    part.chmod(0o600)
    part.replace(path)


def _example(exported: Any) -> tuple[Any, ...]:
    """Return inputs of a program: its symbolic sizes are those of the batch."""
    values = []
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in exported.graph_signature.user_inputs:
            traced = node.meta["val"]
            shape = [size if isinstance(size, int) else _TRACED_SIZE for size in traced.shape]
            values.append(torch.zeros(shape, dtype=traced.dtype))
    args, _ = torch.utils._pytree.tree_unflatten(values, exported.call_spec.in_spec)
    return tuple(args)


if __name__ == "__main__":
    compile_archive(Path(sys.argv[1]), Path(sys.argv[2]))
