"""Program safety: an exported program can only compute, so that an untrusted export cannot run code.

`torch.export.load` trusts its file: it unpickles, evaluates expressions, calls any function that a node
names, and loads native libraries. `check_archive` validates the archive first, with the same reader, and
accepts only graphs of aten ops over tensors stored as bytes. `write_archive` writes such an archive, without
the source paths that torch would include.

A program that only computes can still end the process: the CPU raises SIGFPE where the smallest integer is
divided by -1, and torch does not check for it in `div` with the rounding mode "trunc". A canary (canary.py)
finds it in the examples of a version; where a request divides so, the parent of several processes starts the
process again (server_processes.py).
"""

from __future__ import annotations

import io
import json
import re
import struct
import zipfile
from collections.abc import Callable
from typing import Any

import torch
from torch.export import ExportedProgram

from megalith.errors import ExportError
from megalith.storage.json_codec import parse_json

MAX_JSON = 1 << 26
_FILES = re.compile(
    r"data/weights/weight_\d+|data/constants/tensor_\d+|\.data/(version|serialization_id)"
    r"|archive_format|archive_version|byteorder"
)
_END = struct.Struct("<4s4H2LH")  # of a zip file, without a comment
_LOCATOR = struct.Struct("<4sLQL")
_LONG_END = struct.Struct("<4sQ2H2L4Q")
_GRAPH = "models/model.json"
_SAMPLES = "data/sample_inputs/model.pt"
_CONFIGS = ("data/weights/model_weights_config.json", "data/constants/model_constants_config.json")
_STORED = re.compile(r"(weight|tensor)_\d+")
_NAME = re.compile(r"[A-Za-z0-9_.]*")
_PLAIN = re.compile(r"[\w .,:;=<>+*/()-]*")  # no character that ends a string in source code
_BITWISE = re.compile(r"__i?(and|or|xor|lshift|rshift)__")  # the operators & | ^ << >>
_TARGET = re.compile(
    r"torch\.ops\.aten\.(?P<op>[a-z0-9][a-z0-9_]*|mT|mH|_assert_scalar|_assert_tensor_metadata"
    rf"|{_BITWISE.pattern})"
    r"\.[A-Za-z0-9][A-Za-z0-9_]*|torch\.sym_[a-z]+"
    r"|_operator\.(getitem|add|sub|mul|floordiv|truediv|mod|neg|eq|ne|lt|le|gt|ge)"
)
# Ops of aten whose names begin with _ are internal to torch and check little, so _TARGET excludes them. Also
# denied: ops on files and logs; on state that the process shares; on uninitialized memory, or memory of
# another size than its tensor; tensor formats with unchecked indices; and gradient kernels, which no score
# needs.
_DENIED = re.compile(
    r"from_file|save|warn|wait|(manual_|initial_)?seed|set|set_|set_data|set_grad_enabled|requires_grad_"
    r"|retain_grad|record_stream|pin_memory|segment_reduce|q_.*|int_repr|choose_qparams.*"
    r"|.*(empty|resize|unsafe|sparse|nested|padded_tensor|quant|backward|mkldnn|cudnn|miopen|mps|fbgemm).*"
)
_EXPRESSION = re.compile(
    r"(Symbol\('[a-z]+\d+'(, [a-z]+=True)*\)|Integer\(-?\d{1,19}\)"
    r"|[su]\d+|Add|Mul|Max|Min|Mod|FloorDiv|CleanDiv|PythonMod|[(), ])*"
)
_MAX_EXPRESSION = 1000
_FLOAT = re.compile(r"-?Infinity|NaN")  # JSON has no numbers for them
_DAMAGE = (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError, zipfile.BadZipFile)
_CONTAINERS = (None, "builtins.dict", "builtins.list", "builtins.tuple")


def write_archive(program: ExportedProgram) -> bytes:
    """Serialize a program."""
    for module in program.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta = {name: value for name, value in node.meta.items() if name == "val"}
    program.example_inputs = None
    # Source code that checks sizes; the inputs from a Servable have one batch size.
    program._guards_code = []
    file = io.BytesIO()
    torch.export.save(program, file)
    data = file.getvalue()
    check_archive(data, "the program")
    return data


def check_archive(data: bytes, where: str) -> None:
    """Raise ExportError unless an archive holds a program that only computes."""
    from torch.export.pt2_archive._package import PT2ArchiveReader

    try:
        _check_directory(data)
        _check_stored(data)
        with PT2ArchiveReader(io.BytesIO(data)) as archive:
            files = archive.get_file_names()
            for name in files:
                if name not in (_GRAPH, _SAMPLES, *_CONFIGS) and not _FILES.fullmatch(name):
                    raise ValueError(f"it holds {name[:200]!r}")
            if archive.read_bytes(_SAMPLES):
                raise ValueError("it holds sample inputs, which are pickled")
            for name in _CONFIGS:
                _check_config(_parse(archive.read_bytes(name)))
            graph = _parse(archive.read_bytes(_GRAPH))
            if graph.get("guards_code"):
                raise ValueError("it holds source code")
            _check_inside(graph, "")
    except _DAMAGE as error:
        raise ExportError(f"{where} is not a program that a server may run: {error}") from None


def _check_directory(data: bytes) -> None:
    """Raise ValueError unless the one directory of a zip file stands where its end says, right before it."""
    # Two readers of zip files can find two directories otherwise: one that we check, and one that torch
    # reads.
    at = len(data) - _END.size
    if at < 0:
        raise ValueError("it is not a zip file")
    mark, *_, size, offset, comment = _END.unpack_from(data, at)
    if at >= _LONG_END.size and data[at - _LOCATOR.size : at].startswith(b"PK\6\7"):  # torch writes this form
        at -= _LOCATOR.size + _LONG_END.size
        _, _, place, _ = _LOCATOR.unpack_from(data, at + _LONG_END.size)
        long_mark, *_, long_size, long_offset = _LONG_END.unpack_from(data, at)
        if (long_mark, place, long_size, long_offset) != (b"PK\6\6", at, size, offset):
            raise ValueError("its end is not that of a zip file")
    if mark != b"PK\5\6" or comment or offset + size != at:
        raise ValueError("its directory is not where its end says")


def _check_stored(data: bytes) -> None:
    """Raise ValueError for a compressed entry: a small file could take any amount of memory."""
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED or entry.compress_size != entry.file_size:
                raise ValueError(f"its entry {entry.filename[:200]!r} is compressed")


def load_archive(data: bytes) -> ExportedProgram:
    """Load the program of an archive that passed `check_archive`."""
    # It does not use torch.export.load: when that fails, it tries an older, pickled format with another zip
    # reader, and one file can look like different archives to two readers.
    from torch.export.pt2_archive._package import load_pt2

    program: ExportedProgram = load_pt2(io.BytesIO(data)).exported_programs["model"]
    return program


def _parse(text: bytes) -> Any:
    if len(text) > MAX_JSON:
        raise ValueError(f"a description has more than {MAX_JSON} bytes")
    return parse_json(text)


def _check_config(data: Any) -> None:
    for name, entry in data["config"].items():
        if entry["use_pickle"] is not False or not _STORED.fullmatch(entry["path_name"]):
            raise ValueError(f"{name[:200]!r} is not stored as plain bytes")


def _check_inside(data: Any, key: str) -> None:
    """Check each string by how torch uses it, which depends on its key."""
    if isinstance(data, dict):
        for name, each in data.items():
            if not _PLAIN.fullmatch(name):
                raise ValueError(f"a name {name[:200]!r}")
            _check_inside(each, name)
    elif isinstance(data, list):
        for each in data:
            _check_inside(each, key)
    elif isinstance(data, str) and not _RULES.get(key, _NAME.fullmatch)(data):
        if key in ("target", "as_operator"):
            raise ValueError(f"it uses {data[:200]!r}, which is not one of the ops that a server runs")
        raise ValueError(f"{key} is {data[:200]!r}")


def _is_target(text: str) -> bool:
    found = _TARGET.fullmatch(text)
    op = found["op"] or "" if found else ""
    if found is None or _DENIED.fullmatch(op):
        return False
    return "__" not in (text.replace(op, "", 1) if _BITWISE.fullmatch(op) else text)


def _is_expression(text: str) -> bool:
    return len(text) <= _MAX_EXPRESSION and bool(_EXPRESSION.fullmatch(text))


def _is_structure(text: str) -> bool:
    """Return whether a tree spec has only dicts, lists and tuples; other types would be imported by name."""
    level = [parse_json(text)[1]]
    while level:
        if any(each["type"] not in _CONTAINERS for each in level):
            return False
        contexts = [json.loads(each["context"]) for each in level if each["context"] is not None]
        if not all(context is None or isinstance(context, list) for context in contexts):
            return False
        if not all(isinstance(key, str) for context in contexts for key in context or ()):
            return False
        level = [child for each in level for child in each["children_spec"]]
    return True


_RULES: dict[str, Callable[[str], object]] = {
    "target": _is_target,
    "as_operator": _is_target,
    "as_float": _FLOAT.fullmatch,
    "expr_str": _is_expression,
    "in_spec": _is_structure,
    "out_spec": _is_structure,
    **dict.fromkeys(
        ("as_string", "torch_version", "fqn", "parameter_name", "buffer_name", "tensor_constant_name"),
        _PLAIN.fullmatch,
    ),
}
