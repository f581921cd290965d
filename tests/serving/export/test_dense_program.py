"""The dense program: any batch size, weights swapped whole, and archives that would run code are refused."""

from __future__ import annotations

import builtins
import io
import json
import pickle
import re
import struct
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from megalith import SGD, EmbeddingCollection, Feature, Layout, Slice, TableConfig
from megalith.checkpoint.model_state import dense_state
from megalith.distributed.dense_parameters import dense_parameters
from megalith.errors import ExportError, InputError, RemoteError
from megalith.models import Model
from megalith.serving.export import dense_program
from megalith.serving.export.dense_program import DenseProgram
from megalith.serving.export.program_export import ModelParts, export_program
from megalith.serving.export.program_safety import check_archive
from tests.serving.exported import trained
from tests.serving.exports import export_version


class Wide(Model):
    """logit = weight . rows + bias: simple enough to see from outside which weights were used."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__()
        tables = [TableConfig("t", dim=dim, optimizer=SGD(0.1))]
        layouts = [Layout("rows", [Slice("f", 0, dim)])]
        self.embeddings = EmbeddingCollection(tables, [Feature("f", "t")], layouts=layouts)
        self.deep = nn.Linear(dim, 1)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return self.deep(rows["rows"]).squeeze(1)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "dense.pt2"
    export_program(ModelParts(Wide()), path)
    return path


@pytest.fixture
def program(archive: Path) -> DenseProgram:
    return DenseProgram(archive)


def run(program: DenseProgram, size: int = 1) -> Tensor:
    with torch.inference_mode():
        return program({"rows": torch.ones(size, 2)}, None)[0]


def constant(value: float) -> dict[str, Tensor]:
    return {"deep.weight": torch.full((1, 2), value), "deep.bias": torch.full((1,), value)}


@pytest.mark.parametrize("size", [0, 1, 2, 3, 100])
def test_any_batch_size(program: DenseProgram, size: int) -> None:
    assert run(program, size).shape == (size,)


def test_weights_have_the_models_names(program: DenseProgram) -> None:
    assert program.names == {"deep.weight": (1, 2), "deep.bias": (1,)}
    assert program.names.keys() == program.weights.keys() == dict(dense_parameters(Wide())).keys()


def test_weights_are_replaced_and_reset(program: DenseProgram) -> None:
    before = run(program)
    program.set(constant(2.0))
    assert run(program).tolist() == [6.0]
    program.set({"deep.bias": torch.tensor([0.5])})
    assert run(program).tolist() == [4.5]
    assert program.weights["deep.bias"].tolist() == [0.5]
    program.reset()
    assert torch.equal(run(program), before)


def test_the_callers_tensor_is_not_kept(program: DenseProgram) -> None:
    mine = constant(2.0)
    program.set(mine)
    mine["deep.weight"].fill_(9.0)
    program.set({"deep.bias": torch.zeros(1)})
    assert run(program).tolist() == [4.0]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"deep.scale": torch.ones(1)}, "'deep.scale' is unknown"),
        ({"deep.bias": torch.ones(2)}, r"float32 \[2\], not torch.float32 \[1\]"),
        ({"deep.bias": torch.ones(1).double()}, "float64"),
        ({"deep.bias": torch.tensor([float("nan")])}, "NaN or Inf"),
    ],
)
def test_wrong_weights_change_nothing(
    program: DenseProgram, weights: dict[str, Tensor], message: str
) -> None:
    before = run(program)
    with pytest.raises(InputError, match=message):
        program.check(constant(3.0) | weights)
    assert torch.equal(run(program), before)


def test_no_run_sees_half_of_the_weights(program: DenseProgram) -> None:
    """With all weights v the logit of ones is 3v: a mixture of two v would give another number."""
    program.set(constant(1.0))
    done = threading.Event()
    seen: list[float] = []

    def predict() -> None:
        while not done.is_set():
            seen.append(float(run(program)))

    threads = [threading.Thread(target=predict) for _ in range(2)]
    for thread in threads:
        thread.start()
    for value in range(1, 201):
        program.set(constant(float(value)))
    done.set()
    for thread in threads:
        thread.join(60)
    assert seen
    assert {each % 3 for each in seen} == {0.0}
    assert run(program).tolist() == [600.0]


def test_weights_do_not_wait_for_ever_for_a_request(
    program: DenseProgram, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = program.front
    held.hold()
    program.set(constant(1.0))
    monkeypatch.setattr(dense_program, "IDLE_SECONDS", 0.05)
    with pytest.raises(RemoteError, match="a request has computed with earlier weights"):
        program.set(constant(2.0))
    assert run(program).tolist() == [3.0]
    monkeypatch.setattr(dense_program, "IDLE_SECONDS", 60.0)
    setting = threading.Thread(target=program.set, args=(constant(3.0),))
    setting.start()
    end = time.monotonic() + 60
    while held._waiting != 1:
        assert time.monotonic() < end
    held.release()
    setting.join(60)  # ends once the request has
    assert run(program).tolist() == [9.0]


class Shared(Wide):
    """One weight under three names, and a buffer that no checkpoint has."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tied = self.deep
        self.own = nn.Linear(2, 1, bias=False)
        self.own.weight = self.deep.weight
        self.register_buffer("scale", torch.full((2,), 3.0), persistent=False)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        logits: Tensor = self.tied(rows["rows"] * self.scale) + self.own(rows["rows"])
        return logits.squeeze(1)


@pytest.mark.parametrize("name", ["deep.weight", "tied.weight", "own.weight"])
def test_a_weight_with_several_names_is_one_weight(tmp_path: Path, name: str) -> None:
    """What a checkpoint saves, or a trainer pushes, under any of them is what both layers then use."""
    model = Shared()
    export_program(ModelParts(model), tmp_path / "dense.pt2")
    program = DenseProgram(tmp_path / "dense.pt2")
    assert list(program.names) == ["deep.weight", "deep.bias"]
    assert program.names.keys() <= dense_state(model).keys()
    for value in (1.0, 5.0):
        program.set({name: torch.full((1, 2), value), "deep.bias": torch.zeros(1)})
        assert run(program).tolist() == [8 * value]
        assert program.weights["deep.weight"].tolist() == [[value, value]]
    with pytest.raises(InputError, match="'scale' is unknown"):
        program.check({"scale": torch.ones(2)})


def test_the_statistics_of_batch_norm_are_weights(tmp_path: Path) -> None:
    class Normed(Wide):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(2)

        def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
            logits: Tensor = self.deep(self.norm(rows["rows"])).squeeze(1)
            return logits

    model = Normed()
    export_program(ModelParts(model), tmp_path / "dense.pt2")
    program = DenseProgram(tmp_path / "dense.pt2")
    assert program.names.keys() == dense_state(model).keys()
    model.norm.running_mean = torch.ones(2)
    program.set(dense_state(model))
    assert torch.equal(run(program), model.eval().score({"rows": torch.ones(1, 2)}, None).detach())


def padded(rows: Tensor, attention: nn.Module) -> Tensor:
    out: Tensor = attention(rows, rows, rows, key_padding_mask=rows[..., 0] > 1)[0]
    return out


def written_in_place(rows: Tensor) -> Tensor:
    rows = rows.clone()
    rows[:, 0] = 1.0
    return rows.mul_(2.0).relu_()


PARTS: dict[str, tuple[Callable[..., Tensor], list[nn.Module]]] = {
    "attention": (lambda x, m: m(x, x, x)[0], [nn.MultiheadAttention(8, 2, batch_first=True)]),
    "attention with padding": (padded, [nn.MultiheadAttention(8, 2, batch_first=True)]),
    "transformer": (
        lambda x, m: m(x),
        [nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)],
    ),
    "gru": (lambda x, m: m(x)[0], [nn.GRU(8, 4, batch_first=True)]),
    "lstm": (lambda x, m: m(x)[0], [nn.LSTM(8, 4, batch_first=True)]),
    "batch norm": (lambda x, m: m(x), [nn.BatchNorm1d(4)]),
    "layer norm": (lambda x, m: m(x), [nn.LayerNorm(8)]),
    "convolution": (lambda x, m: m(x), [nn.Conv1d(4, 3, 3)]),
    "einsum": (lambda x: torch.einsum("bij,bkj->bik", x, x), []),
    "top-k": (lambda x: x.topk(2, 1).values, []),
    "transposed": (lambda x: x @ x.mT, []),
    "a table": (lambda x, m: m((x[..., 0] > 0).long()), [nn.Embedding(2, 4)]),
    "in place": (written_in_place, []),
    "masks": (lambda x: x * (((x > 0) & (x < 1)) | (x < -1) ^ (x > 2)), []),
    "integers": (lambda x: ((x * 8).long() << 2 >> 1).div(3, rounding_mode="trunc").float(), []),
}


class Sequences(Wide):
    """Rows as a sequence of four, through what people put into models."""

    def __init__(self, part: str) -> None:
        super().__init__(32)
        self.part, modules = PARTS[part]
        self.inner = nn.ModuleList(modules)

    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        logits: Tensor = self.part(rows["rows"].view(-1, 4, 8), *self.inner).flatten(1).sum(1)
        return logits


@pytest.mark.parametrize("part", PARTS)
def test_what_people_put_into_models_is_let_through(tmp_path: Path, part: str) -> None:
    torch.manual_seed(0)
    model = Sequences(part)
    export_program(ModelParts(model), tmp_path / "dense.pt2")
    program = DenseProgram(tmp_path / "dense.pt2")
    rows = {"rows": torch.randn(5, 32)}
    with torch.inference_mode():
        torch.testing.assert_close(program(dict(rows), None)[0], model.eval().score(rows, None))


def test_source_paths_are_not_exported(archive: Path) -> None:
    for name in ("din", "dlrm"):
        path = archive.with_name(f"{name}.pt2")
        export_program(ModelParts(trained(name)), path)
        with zipfile.ZipFile(path) as file:
            text = b"".join(file.read(each) for each in file.namelist())
        assert b".py" not in text


def test_the_mode_of_every_module_is_as_before(archive: Path) -> None:
    model = Wide()
    model.train()
    model.deep.eval()
    export_program(ModelParts(model), archive.with_name("modes.pt2"))
    assert (model.training, model.deep.training) == (True, False)


class Branches(Wide):
    def score(self, rows: dict[str, Tensor], dense: Tensor | None) -> Tensor:
        return rows["rows"].sum(1) if float(rows["rows"].sum()) > 0 else rows["rows"][:, 0]


def test_what_cannot_be_traced_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"Branches cannot be exported"):
        export_program(ModelParts(Branches()), tmp_path / "dense.pt2")


# ---- malicious archives


def test_the_source_of_a_program_holds_no_text_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names of weights, arguments and constants reach the function as objects, even if they are code."""
    text = "x'\"\\n: 1})) or exec('import os')"
    graph = torch.fx.Graph()
    given, weight = graph.placeholder(text), graph.get_attr(text)
    added = graph.call_function(torch.ops.aten.add.Tensor, (given, weight), {"alpha": 2})
    named = graph.call_function(dict, (), {text: added})
    graph.output(([named, text],))
    module = SimpleNamespace(graph=graph)
    setattr(module, text, torch.ones(2))
    sources: list[str] = []
    monkeypatch.setattr(
        dense_program, "exec", lambda *given: (sources.append(given[0]), exec(*given)), raising=False
    )
    run = dense_program._function_of(cast("torch.fx.GraphModule", module))
    ((found, kept),) = run(torch.ones(2))
    assert torch.equal(found[text], torch.full((2,), 3.0))  # type: ignore[call-overload]
    assert kept == text
    assert set(re.findall(r"[A-Za-z]\w*", sources[0])) <= {"def", "run", "return", "None"} | {
        f"{kind}{number}" for kind in "vc" for number in range(10)
    }


class Evil:
    """Pickled, it writes a file when it is loaded."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (exec, ("import builtins; builtins.megalith_was_hacked = True",))


Change = Callable[[dict[str, bytes]], None]


def in_graph(change: Callable[[Any], None]) -> Change:
    """A change of the description of the graph."""

    def changed(files: dict[str, bytes]) -> None:
        (name,) = [each for each in files if each.endswith("models/model.json")]
        data = json.loads(files[name])
        change(data)
        files[name] = json.dumps(data).encode()

    return changed


def with_target(target: str) -> Change:
    return in_graph(lambda data: data["graph_module"]["graph"]["nodes"][0].update(target=target))


def with_expression(text: str) -> Change:
    def change(data: Any) -> None:
        for value in data["graph_module"]["graph"]["tensor_values"].values():
            for size in value["sizes"]:
                if "as_expr" in size:
                    size["as_expr"]["expr_str"] = text

    return in_graph(change)


def with_structure(text: str) -> Change:
    return in_graph(
        lambda data: data["graph_module"]["module_call_graph"][0]["signature"].update(in_spec=text)
    )


def with_file(name: str, content: bytes) -> Change:
    return lambda files: files.update({f"archive/{name}": content})


def pickled(files: dict[str, bytes]) -> None:
    (name,) = [each for each in files if each.endswith("weights_config.json")]
    data = json.loads(files[name])
    next(iter(data["config"].values()))["use_pickle"] = True
    files[name] = json.dumps(data).encode()
    files["archive/data/weights/weight_0"] = pickle.dumps(Evil())


def torch_pickled() -> bytes:
    buffer = io.BytesIO()
    torch.save(Evil(), buffer)
    return buffer.getvalue()


MALICIOUS: dict[str, Change] = {
    "a function of the system": with_target("torch.os.system"),
    "a function of python": with_target("torch.load"),
    "a library": with_target("torch.ops.load_library.__func__.__call__"),
    "a file": with_target("torch.ops.aten.from_file.default"),
    **{
        f"aten.{name}": with_target(f"torch.ops.aten.{name}")
        for name in (
            "save.default",
            "_print.default",
            "__class__.default",
            "__and__.__call__",
            "warn.default",
            "manual_seed.default",
            "set_.source_Tensor",
            "set_data.default",
            "set_grad_enabled.default",
            "resize_.default",
            "resize_as_.default",
            "empty.memory_format",
            "new_empty.default",
            "_sparse_csr_tensor_unsafe.default",
            "sparse_coo_tensor.indices",
            "_unsafe_index_put.default",
            "unsafe_split.Tensor",
            "segment_reduce.default",
            "max_pool2d_with_indices_backward.default",
            "_embedding_bag.default",
            "quantize_per_tensor.default",
        )
    },
    "another namespace": with_target("torch.ops.megalith.route.default"),
    "an operator's call": with_target("_operator.methodcaller"),
    "an expression": with_expression("__import__('os').system('true')"),
    "a built-in function": with_expression("eval(chr(49))"),
    "a power": with_expression("9**9**9**9"),
    "source code": in_graph(lambda data: data.update(guards_code=["exec('1')"])),
    "the name of an input": in_graph(
        lambda data: data["graph_module"]["graph"]["inputs"][0]["as_tensor"].update(name="x=exec('1')")
    ),
    "a type of its own": with_structure('[1, {"type": "os.system", "context": null, "children_spec": []}]'),
    "an enum": with_structure(
        '[1, {"type": "builtins.dict", "context": "{\\"__enum__\\": true, \\"fqn\\": \\"os:x\\"}", '
        '"children_spec": []}]'
    ),
    "no structure": with_structure("[]"),
    "pickled samples": with_file("data/sample_inputs/model.pt", torch_pickled()),
    "pickled weights": pickled,
    "native code": with_file("data/aotinductor/model/x.so", b"\x7fELF"),
    "another model": with_file("models/other.json", b"{}"),
    "a custom object": with_file("data/constants/custom_obj_0", pickle.dumps(Evil())),
    "no json": with_file("models/model.json", b"{"),
    "a list": with_file("models/model.json", b"[]"),
    "nothing": lambda files: files.clear(),
}


def rewritten(archive: Path, path: Path, change: Change) -> Path:
    """The archive with some of its files changed."""
    with zipfile.ZipFile(archive) as file:
        files = {"archive/" + name.partition("/")[2]: file.read(name) for name in file.namelist()}
    change(files)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as file:
        for name, content in files.items():
            file.writestr(name, content)
    return path


def test_an_archive_that_was_packed_again_is_still_one(archive: Path, tmp_path: Path) -> None:
    program = DenseProgram(rewritten(archive, tmp_path / "dense.pt2", lambda files: None))
    assert program.names.keys() == {"deep.weight", "deep.bias"}


@pytest.mark.parametrize("name", MALICIOUS)
def test_an_archive_that_does_more_than_compute_is_refused(archive: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(ExportError, match="a server may run"):
        DenseProgram(rewritten(archive, tmp_path / "dense.pt2", MALICIOUS[name]))
    assert not hasattr(builtins, "megalith_was_hacked")


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 0.9, 0.999])
def test_an_archive_that_ends_early_or_is_missing_is_refused(
    archive: Path, tmp_path: Path, share: float
) -> None:
    with pytest.raises(ExportError):
        DenseProgram(tmp_path / "dense.pt2")
    data = archive.read_bytes()
    (tmp_path / "dense.pt2").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ExportError):
        DenseProgram(tmp_path / "dense.pt2")


# ---- an archive that is two zip files at once, one for each of torch's readers

END = "<4s4H2LH"
"""The end of a zip file: among others the number of entries, and the size and place of the directory."""


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> tuple[bytes, bytes, int]:
    """The files, their directory, and how many there are."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    data = out.getvalue()
    *_, count, size, place, _ = struct.unpack(END, data[-22:])
    return data[:place], data[place : place + size], count


def two_in_one(shown: dict[str, bytes], hidden: dict[str, bytes]) -> bytes:
    """A zip file whose end names the directory of `shown`, while that of `hidden` stands right before it.

    torch's reader goes by the place in the file's end. Python's takes what stands before the end, and thinks
    that all places are as much off as that one.
    """
    files, directory, count = zipped(shown)
    hidden_files, hidden_directory, _ = zipped(hidden, zipfile.ZIP_DEFLATED)
    off = len(directory) + len(hidden_files)
    entries = bytearray(hidden_directory)
    at = last = 0
    while at < len(entries):
        (place,) = struct.unpack_from("<L", entries, at + 42)
        struct.pack_into("<L", entries, at + 42, place + len(files) + len(directory) - off)
        last, at = at, at + 46 + sum(struct.unpack_from("<3H", entries, at + 28))
    fill = len(directory) - len(entries)
    struct.pack_into("<H", entries, last + 32, fill)
    end = struct.pack(END, b"PK\5\6", 0, 0, count, count, len(directory), len(files), 0)
    return files + directory + hidden_files + bytes(entries) + bytes(fill) + end


def test_the_older_format_is_never_read(tmp_path: Path) -> None:
    export_version(tmp_path / "out", version=1)
    with zipfile.ZipFile(tmp_path / "out" / "1" / "dense.pt2") as archive:
        good = {name: archive.read(name) for name in archive.namelist()}
    graph = next(content for name, content in good.items() if name.endswith("models/model.json"))
    version = json.loads(graph)["schema_version"]
    bomb = torch_pickled()
    older = {
        "version": f"{version['major']}.{version['minor']}".encode(),
        "serialized_exported_program.json": graph,
        "serialized_state_dict.pt": bomb,
        "serialized_constants.pt": bomb,
        "serialized_example_inputs.pt": b"",
    }
    # A weight that is too short: torch fails with what makes it look for the older format.
    short = {name: content[:4] if name.endswith("weight_0") else content for name, content in good.items()}
    path = tmp_path / "dense.pt2"
    path.write_bytes(two_in_one(short, older))

    with pytest.raises(ExportError, match="directory is not where its end says"):
        check_archive(path.read_bytes(), "here")
    with zipfile.ZipFile(path) as seen:
        assert seen.namelist() == list(older)
    with pytest.raises(ExportError, match="is not a program"):
        DenseProgram(path)
    assert not hasattr(builtins, "megalith_was_hacked")
