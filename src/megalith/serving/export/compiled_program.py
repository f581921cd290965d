"""Compiled program: the dense part as a library that AOTInductor makes, with its exported weights.

A library is code, so none is ever loaded from an export. A server compiles the program of an export itself,
in a child process with a low priority, and keeps the library in a private directory: it belongs to this user,
and nobody else may write to it. The name of a library is a digest of the program, of torch's version and of
the CPU. The child process runs the library first, and exits with the server. A library is used once its
outputs have been compared with those of the program. If any step fails, the program itself continues to
answer.

A compiled program computes in another order of operations: outputs may differ in the last digits. This module
is also the program of the child process.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import logging
import os
import platform
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalith.errors import ExportError, UsageError
from megalith.serving.export.dense_program import Runner, flatten
from megalith.serving.export.program_safety import check_archive, divides_integers, load_archive
from megalith.storage.local_files import crc32
from megalith.storage.store import checksum as checksum_of

if TYPE_CHECKING:
    from megalith.serving.export.servable import Servable

logger = logging.getLogger(__name__)


def compile_servable(servable: Servable, cache: Path, *, stopped: threading.Event | None = None) -> bool:
    """Compile the dense part of a trusted export, or load the library of an earlier time."""
    program, file = servable.dense_program, servable.signature.program
    if program is None or file is None:
        return False
    if divides_integers(program.front.module):
        logger.warning("%s is not compiled: compiled divisions of integers can end the process", file.path)
        return False
    path = servable.directory / file.path
    library = find_library(path, cache, checksum=file.checksum, stopped=stopped)
    if library is None:
        return False
    try:
        compiled = load_library(library, program, servable.random_inputs)
    except UsageError:
        return False
    except Exception as error:  # torch raises many types for a library that does not fit
        logger.warning("%s is not used: %s", library, error)
        return False
    if compiled is not None:
        program.use_compiled(compiled)
    return compiled is not None


COMPILE_SECONDS = 1800.0
CHECKED_SIZES = (1, 2, 5, 33)
RELATIVE, ABSOLUTE = 1e-4, 1e-4  # Largest differences from the outputs of the program
CPU_INFO = Path("/proc/cpuinfo")
_CPU_FIELDS = {"vendor_id", "cpu family", "model", "model name", "flags"}
_CPU_FIELDS |= {"CPU implementer", "CPU part", "Features", "isa"}
_TRACED_SIZE = 3
_WORK = "work-"
_POLL_SECONDS = 0.25
_PR_SET_PDEATHSIG = 1
Inputs = Callable[[int], tuple[dict[str, Any], Tensor | None]]  # Makes rows and dense values of a batch size


def default_cache() -> Path:
    """Return the directory of this user's libraries."""
    home = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(home) / "megalith" / "compiled"


def open_cache(directory: Path) -> Path:
    """Create the directory of libraries, and check that it is private."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.stat()
        # Everyone may rename what is in a directory that is open to all and not sticky.
        modes = {each: each.stat().st_mode for each in directory.resolve().parents}
        above = [each for each, mode in modes.items() if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
    except OSError as error:
        raise ExportError(f"{directory} cannot hold compiled programs: {error}") from None
    if status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ExportError(
            f"{directory} holds code that this server would run: it must belong to this user, and "
            "nobody else may write to it (chmod 700)"
        )
    if above:
        raise ExportError(f"{directory} cannot hold compiled programs: anyone may replace it in {above[0]}")
    return directory


def library_name(program: bytes) -> str:
    digest = hashlib.sha256(program)
    for part in (torch.__version__, platform.machine(), torch.backends.cpu.get_cpu_capability(), _cpu()):
        digest.update(b"\0" + part.encode())
    return f"{digest.hexdigest()}.pt2"


def _cpu() -> str:
    """Return what the system reports about the CPU: the compiler uses all of its instructions."""
    try:
        first = CPU_INFO.read_text(errors="replace").partition("\n\n")[0]
    except OSError:
        return platform.processor()
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS)


def find_library(
    program: Path, cache: Path, *, checksum: str | None = None, stopped: threading.Event | None = None
) -> Path | None:
    """Return the library of a program; compile it first, in a child process, if there is none."""
    open_cache(cache)
    stopped = threading.Event() if stopped is None else stopped
    data = program.read_bytes()
    if checksum is not None and checksum != checksum_of(crc32(data)):
        logger.warning("%s is not compiled: it changed since it was loaded", program)
        return None
    path = cache / library_name(data)
    try:
        with _alone(cache, stopped):
            if not path.exists():
                _compile(program, path, stopped)
    except InterruptedError:
        return None
    except (OSError, subprocess.SubprocessError) as error:
        logger.warning("%s is not compiled: %s", program, error)
        return None
    return path


@contextmanager
def _alone(cache: Path, stopped: threading.Event) -> Iterator[None]:
    """Compile one program at a time, of all processes; raise InterruptedError once `stopped` is set."""
    descriptor = os.open(cache, os.O_RDONLY)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if stopped.wait(_POLL_SECONDS):
                    raise InterruptedError from None
        for left in cache.glob(f"{_WORK}*"):  # of a process that was killed
            shutil.rmtree(left, ignore_errors=True)
        yield
    finally:
        os.close(descriptor)


def _compile(program: Path, path: Path, stopped: threading.Event) -> None:
    """Compile a program in a child process; raise SubprocessError with the reason if that fails."""
    with tempfile.TemporaryDirectory(prefix=_WORK, dir=path.parent, ignore_cleanup_errors=True) as work:
        made = Path(work) / path.name
        command = [sys.executable, "-P", "-m", __name__, str(program), str(made), str(os.getpid())]
        search = os.pathsep.join(each for each in sys.path if each)
        environment = {
            **os.environ,
            "PYTHONPATH": search,
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            # Its default has a name that anyone can guess in /tmp, and it runs what it finds there.
            "TORCHINDUCTOR_CACHE_DIR": work,
            "TRITON_CACHE_DIR": work,
        }
        code, errors = _run(command, environment, stopped)
        if code or not made.exists():
            reason = errors.decode(errors="replace").strip().splitlines()[-1:] or ["no reason"]
            raise subprocess.SubprocessError(reason[0][:500])
        made.replace(path)


def _run(command: list[str], environment: dict[str, str], stopped: threading.Event) -> tuple[int, bytes]:
    """Run a child process and its own children until they end; return its status and its errors."""
    end = time.monotonic() + COMPILE_SECONDS
    with subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    ) as process:
        try:
            while True:
                try:
                    _, errors = process.communicate(timeout=_POLL_SECONDS)
                    return process.returncode, errors
                except subprocess.TimeoutExpired:
                    if stopped.is_set():
                        raise InterruptedError from None
                    if time.monotonic() > end:
                        raise
        except BaseException:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            raise


def load_library(path: Path, reference: Callable[..., Sequence[Tensor]], inputs: Inputs) -> Runner | None:
    """Load a library and compare its outputs with those of the program."""
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


def compile_archive(program: Path, path: Path) -> None:
    """Compile a program, and write the library once it has run."""
    data = program.read_bytes()
    if library_name(data) != path.name:
        raise ExportError(f"{program} changed meanwhile")
    check_archive(data, str(program))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = load_archive(data)
        example = _example(exported)
        exported.example_inputs = (example, {})
        part = path.with_name(f"part-{path.name}")
        torch._inductor.aoti_compile_and_package(exported, package_path=str(part))
        flat, _ = torch.utils._pytree.tree_flatten(example)
        loader: Any = torch._inductor.aoti_load_package(str(part)).loader
        # If this ends a process, it is not the server.
        loader.run([each for each in flat if each is not None])
    part.chmod(0o600)
    part.replace(path)


def _die_with(parent: int) -> None:
    """End this process when its parent ends, even if that is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the server has ended")


def _example(exported: Any) -> tuple[Any, ...]:
    """Return inputs of a program: its symbolic sizes are those of the batch."""
    values = []
    for node in exported.graph.nodes:
        if node.op == "placeholder" and node.name in exported.graph_signature.user_inputs:
            traced = node.meta["val"]
            shape = [size if isinstance(size, int) else _TRACED_SIZE for size in traced.shape]
            values.append(torch.zeros(shape, dtype=traced.dtype, device="cpu"))
    args, _ = torch.utils._pytree.tree_unflatten(values, exported.call_spec.in_spec)
    return tuple(args)


if __name__ == "__main__":
    _die_with(int(sys.argv[3]))
    os.nice(10)
    compile_archive(Path(sys.argv[1]), Path(sys.argv[2]))
