"""Compiling: gives a servable the compiled form of its dense part (compiled_program.py)."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

from megalith.errors import UsageError
from megalith.serving.export.compiled_program import find_library, load_library
from megalith.serving.export.integer_division import divides_integers
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
