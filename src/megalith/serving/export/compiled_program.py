"""Compiled program: the dense part as a library that AOTInductor makes, with its exported weights.

`export_model(compile=True)` writes the library next to the program. Its name is a digest of the program, of
torch's version and of the CPU, so another machine does not load it. A library is code: a server loads one
only on request (`ServerConfig.compiled`), for exports that it trusts. It is used once its outputs have been
compared with those of the program; otherwise the program itself answers.

A compiled program computes in another order of operations: outputs may differ in the last digits.
"""

from __future__ import annotations

import hashlib
import logging
import platform
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.export import ExportedProgram

from megalith.errors import ExportError
from megalith.serving.export.dense_program import DenseProgram, Runner, flatten

logger = logging.getLogger(__name__)

CHECKED_SIZES = (1, 2, 5, 33)
RELATIVE, ABSOLUTE = 1e-4, 1e-4  # Largest differences from the outputs of the program
CPU_INFO = Path("/proc/cpuinfo")
_CPU_FIELDS = {"vendor_id", "cpu family", "model", "model name", "flags"}
_CPU_FIELDS |= {"CPU implementer", "CPU part", "Features", "isa"}
Inputs = Callable[[int], tuple[dict[str, Any], Tensor | None]]  # Makes rows and dense values of a batch size


def library_name(program: bytes) -> str:
    """Return the file name of the library of a program on this machine."""
    digest = hashlib.sha256(program)
    for part in (torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu()):
        digest.update(b"\0" + part.encode())
    return f"compiled-{digest.hexdigest()[:32]}.pt2"


def _cpu() -> str:
    """Return what the system reports about the CPU: the compiler uses all of its instructions."""
    try:
        first = CPU_INFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS)


def write_library(program: ExportedProgram, archive: bytes, inputs: tuple[Any, ...], directory: Path) -> Path:
    """Compile a program, with inputs as those of the trace, and run the library once."""
    # The default cache has a name in /tmp that anyone can guess, and the compiler runs what it finds there.
    from torch._inductor.utils import fresh_cache

    path = directory / library_name(archive)
    program.example_inputs = (inputs, {})
    try:
        # fresh_cache keeps its directory after an error
        with (
            tempfile.TemporaryDirectory() as work,
            fresh_cache(dir=work),
            torch._inductor.config.patch(compile_threads=1),
        ):
            torch._inductor.aoti_compile_and_package(program, package_path=str(path))
            _load(path)(flatten(*inputs))
    except Exception as error:  # torch raises many types
        raise ExportError(
            f"export: the dense part cannot be compiled, which needs a C++ compiler; export without it "
            f"({error})"
        ) from error
    return path


def _load(path: Path) -> Runner:
    loader: Any = torch._inductor.aoti_load_package(str(path)).loader

    def run(flat: list[Tensor]) -> Sequence[Tensor]:
        outputs: Sequence[Tensor] = loader.run(flat)
        return outputs

    return run


def use_library(program: DenseProgram, path: Path, inputs: Inputs) -> None:
    """Compute with the library next to a program, if there is one for this machine with equal outputs."""
    library = path.with_name(library_name(path.read_bytes()))
    if not library.exists():
        logger.warning("%s has no compiled program for this CPU and this version of torch", path.parent)
        return
    try:
        run = _load(library)
        with torch.inference_mode():
            for size in CHECKED_SIZES:
                rows, dense = inputs(size)
                if not _are_close(program(rows, dense), run(flatten(rows, dense))):
                    logger.error("%s is not used: its outputs differ from those of the program", library)
                    return
    except Exception as error:  # torch raises many types for a library that does not fit
        logger.warning("%s is not used: %s", library, error)
        return
    program.use_compiled(run)


def _are_close(expected: Sequence[Tensor], found: Sequence[Tensor]) -> bool:
    return all(
        a.shape == b.shape
        and a.dtype == b.dtype
        and torch.allclose(a.double(), b.double(), RELATIVE, ABSOLUTE, equal_nan=True)
        for a, b in zip(expected, found, strict=True)
    )
