"""The processes of serving.py: servers, the handlers they are compared with, and the clients.

    python benchmarks/serving_roles.py ROLE ARGUMENT...

Each role prints one line of JSON when it is ready, then responds to every line of its standard input with
one line; it ends when its input ends. The model, its ids and its requests are derived from seeds, so that
processes agree on them without files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from grpc_load import load as load_of
from torch import Tensor

from megalith import Adagrad
from megalith.models import EmbeddingConfig, Model, build_model
from megalith.serving.proto.infer_tensors import datatype_of
from megalith.serving.proto.limits import bytes_of_tensor
from megalith.serving.proto.message_types import (
    DataType,
    ModelInferRequest,
    ModelInferResponse,
    PredictRequest,
    PredictResponse,
)
from megalith.serving.proto.tf_tensors import from_tensor_proto, from_tensor_protos, to_tensor_proto
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import Batching, ServerConfig
from megalith.serving.server.server_processes import ServerProcesses

NAME = "scores"
PREDICT = "/tensorflow.serving.PredictionService/Predict"
INFER = "/inference.GRPCInferenceService/ModelInfer"
REST = f"/v2/models/{NAME}/infer"
FEATURES = [f"f{number}" for number in range(26)]
DENSE, DIM, HIDDEN = 13, 16, (64, 32)
WORKERS = (1, 4, 32)
"""Numbers of threads of a handler's server; the fastest is used."""
OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", -1),
    ("grpc.so_reuseport", 0),
)
SYNC_NAME, SYNC_TABLE = "synced", "item"
CORES = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]
PROBES, MAX_STEPS, PROBE_SECONDS = 4, 20_000, 0.01
"""Rows of each step that are queried at the server, and how often."""


# ---- shared by all roles


def table_ids(feature: int, rows: int) -> Tensor:
    """Returns the ids that have a row."""
    return random_ids(1000 + feature, rows)


def random_ids(seed: int, count: int) -> Tensor:
    return torch.randint(-(2**62), 2**62, (count,), generator=torch.Generator().manual_seed(seed))


def scoring_model(rows: int) -> Model:
    """Returns the scoring model in eval mode, with random rows and weights."""
    torch.manual_seed(0)
    config = EmbeddingConfig(FEATURES, dim=DIM, optimizer=Adagrad(0.05))
    model = build_model("deepfm", config, num_dense=DENSE, hidden=HIDDEN)
    for number, name in enumerate(FEATURES):
        ids = table_ids(number, rows)
        model.embeddings.shards.assign({name: (ids, torch.randn(rows, DIM + 1) * 0.05)})
    return model.eval()


def requests_of(batch: int, count: int, rows: int) -> list[bytes]:
    """Returns serialised PredictRequests with different ids."""
    generator = torch.Generator().manual_seed(batch)
    columns = [table_ids(number, rows) for number in range(len(FEATURES))]
    made = []
    for _ in range(count):
        request = PredictRequest()
        request.model_spec.name = NAME
        for name, ids in zip(FEATURES, columns, strict=True):
            chosen = ids[torch.randint(0, rows, (batch,), generator=generator)]
            request.inputs[name].CopyFrom(to_tensor_proto(chosen))
        request.inputs["dense"].CopyFrom(to_tensor_proto(torch.randn(batch, DENSE, generator=generator)))
        made.append(request.SerializeToString())
    return made


def infer_request_of(data: bytes) -> bytes:
    """Returns the ModelInferRequest with the inputs of a PredictRequest."""
    request = ModelInferRequest(model_name=NAME)
    for name, tensor in from_tensor_protos(PredictRequest.FromString(data).inputs).items():
        assert isinstance(tensor, Tensor)
        request.inputs.add(name=name, datatype=datatype_of(tensor), shape=tensor.shape)
        request.raw_input_contents.append(bytes_of_tensor(tensor, name))
    made: bytes = request.SerializeToString()
    return made


def rest_request_of(data: bytes) -> bytes:
    """Returns the JSON with the inputs of a PredictRequest."""
    inputs = [
        {"name": name, "datatype": "FP32" if tensor.is_floating_point() else "INT64"}
        | {"shape": list(tensor.shape), "data": tensor.tolist()}
        for name, tensor in from_tensor_protos(PredictRequest.FromString(data).inputs).items()
    ]
    return json.dumps({"inputs": inputs, "outputs": [{"name": "logits"}]}).encode()


def sync_model() -> Model:
    """Returns the model that parameter sync trains: one table whose rows have DIM columns."""
    torch.manual_seed(0)
    return build_model("dcnv2", EmbeddingConfig([SYNC_TABLE], dim=DIM, optimizer=Adagrad(0.05)))


def probe_ids(step: int) -> Tensor:
    """Returns the ids that are trained for the first time in a step."""
    return random_ids(1_000_000 + step, PROBES)


# ---- roles


def answer(ready: dict[str, Any], reply: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    print(json.dumps(ready), flush=True)
    for line in sys.stdin:
        print(json.dumps(reply(json.loads(line))), flush=True)


def model_server(directory: str, follow: str) -> None:
    torch.set_num_threads(1)
    with ModelServer(directory, _config(allow_writes=follow == "follow", http_port=0)) as server:
        answer({"address": server.address, "http_address": server.http_address}, lambda _: {})


def compiled_server(directory: str) -> None:
    """Runs a server whose dense part is compiled."""
    torch.set_num_threads(1)
    with ModelServer(directory, _config(compiled=True)) as server:
        version = server.models[0].newest
        assert version is not None
        program = version.servable.dense_program
        assert program is not None
        assert program.front.compiled is not None, "the compiled library is not used; see the messages"
        answer({"address": server.address}, lambda _: {})


def pushed_server(directory: str, rows: str, pushed: str) -> None:
    """Runs a server of the scoring model that has got pushed rows of every table."""
    torch.set_num_threads(1)
    with ModelServer(directory, _config(allow_writes=True)) as server:
        version = server.models[0].newest
        assert version is not None
        for number, name in enumerate(FEATURES):
            ids = table_ids(number, int(rows))[: int(pushed)]
            version.servable.apply({name: (ids, version.servable.lookup(name, ids))})
        answer({"address": server.address}, lambda _: {})


def server_processes(directory: str, processes: str) -> None:
    """Runs several server processes on one port."""
    with ServerProcesses(directory, _config(processes=int(processes))) as server:
        answer({"address": server.address}, lambda _: {})


def _config(**options: Any) -> ServerConfig:
    return ServerConfig(poll_seconds=60.0, freeze_gc=True, batching=Batching(threads=1), **options)


class PlainHandler:
    """A straightforward handler for a trained model with grpcio."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def predict(self, request: Any, context: Any) -> Any:
        inputs = request.inputs
        features = {name: _tensor(inputs[name], torch.int64) for name in FEATURES}
        dense = _tensor(inputs["dense"], torch.float32).view(-1, DENSE)
        with torch.inference_mode():
            return _response(request, self._model(features, dense))


class LeanHandler:
    """The same scores with hand-written code: rows of all tables in one tensor, ids in dictionaries."""

    def __init__(self, model: Model, rows: int) -> None:
        self._model = model
        self._numbers: list[dict[int, int]] = []
        found = [torch.zeros(1, DIM + 1)]
        for number, name in enumerate(FEATURES):
            ids = table_ids(number, rows)
            self._numbers.append({each: 1 + number * rows + k for k, each in enumerate(ids.tolist())})
            found.append(model.embeddings.shards.local[name].lookup(ids))
        self._rows = torch.cat(found)

    def predict(self, request: Any, context: Any) -> Any:
        inputs = request.inputs
        content = b"".join([inputs[name].tensor_content for name in FEATURES])
        ids = np.frombuffer(content, np.int64).reshape(len(FEATURES), -1).tolist()
        numbers = [[own.get(each, 0) for each in of] for own, of in zip(self._numbers, ids, strict=True)]
        dense = _tensor(inputs["dense"], torch.float32).view(-1, DENSE)
        with torch.inference_mode():
            rows = self._rows[torch.tensor(numbers).T]
            logits = self._model.score({"bias": rows[..., :1].sum(1), "factors": rows[..., 1:]}, dense)
            return _response(request, logits)


def _tensor(proto: Any, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(proto.tensor_content), dtype=dtype)


def _response(request: Any, logits: Tensor) -> Any:
    response = PredictResponse()
    response.model_spec.name = request.model_spec.name
    for name, scores in (("logits", logits), ("probabilities", torch.sigmoid(logits))):
        proto = response.outputs[name]
        proto.dtype = int(DataType.DT_FLOAT)
        proto.tensor_shape.dim.add(size=scores.numel())
        proto.tensor_content = scores.numpy().tobytes()
    return response


def handlers(rows: str) -> None:
    """Runs both handlers, each on several ports, one for each number of threads."""
    torch.set_num_threads(1)
    model = scoring_model(int(rows))
    made = {"plain": PlainHandler(model).predict, "lean": LeanHandler(model, int(rows)).predict}
    addresses = {}
    with ExitStack() as stack:
        for name, predict in made.items():
            handler = grpc.unary_unary_rpc_method_handler(
                predict,
                request_deserializer=PredictRequest.FromString,
                response_serializer=PredictResponse.SerializeToString,
            )
            addresses[name] = stack.enter_context(_servers(handler, WORKERS))
        answer({"addresses": addresses}, lambda _: {})


def sink() -> None:
    """Receives bytes and drops them."""
    drop = grpc.unary_unary_rpc_method_handler(lambda data, context: b"")
    with _servers(drop, (4,)) as addresses:
        answer({"address": addresses[0]}, lambda _: {})


@contextmanager
def _servers(predict: Any, threads: tuple[int, ...]) -> Iterator[list[str]]:
    service = grpc.method_handlers_generic_handler(
        "tensorflow.serving.PredictionService", {"Predict": predict}
    )
    servers = [grpc.server(ThreadPoolExecutor(count), (service,), options=OPTIONS) for count in threads]
    addresses = [f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for server in servers]
    for server in servers:
        server.start()
    try:
        yield addresses
    finally:
        for server in servers:
            server.stop(None).wait()


def clients(rows: str, count: str) -> None:
    """Runs closed-loop clients; see grpc_load.py."""
    requests = {
        (PREDICT, batch): requests_of(batch, max(64, int(count) // batch), int(rows)) for batch in (1, 32)
    }
    for other, convert in ((INFER, infer_request_of), (REST, rest_request_of)):
        requests |= {(other, batch): [*map(convert, requests[PREDICT, batch])] for batch in (1, 32)}

    def load(order: dict[str, Any]) -> dict[str, Any]:
        method = order["method"]
        if "scores" in order:
            return {"scores": _scores(order["scores"], method, requests[method, 1][: order["count"]])}
        messages = requests[method, order["batch"]]
        return load_of(order["address"], method, messages, order["clients"], order["seconds"])

    answer({}, load)


def _scores(address: str, method: str, requests: list[bytes]) -> list[float]:
    if method == REST:
        found = []
        for request in requests:
            with urllib.request.urlopen(f"http://{address}{REST}", request, timeout=30.0) as response:
                found.append(float(json.load(response)["outputs"][0]["data"][0]))
        return found
    with grpc.insecure_channel(address) as channel:
        call = channel.unary_unary(method)
        return [_first_logit(method, call(request, timeout=30.0)) for request in requests]


def _first_logit(method: str, response: bytes) -> float:
    if method == PREDICT:
        return float(from_tensor_proto(PredictResponse.FromString(response).outputs["logits"])[0])
    message = ModelInferResponse.FromString(response)
    number = [output.name for output in message.outputs].index("logits")
    return float(np.frombuffer(message.raw_output_contents[number], np.float32)[0])


def prober() -> None:
    """Queries a server for rows repeatedly, and reports when it first returned each of them.

    The first line of input is the server's address. The others have the number of training steps so far; the
    response has the first step whose rows are not all present, and on request the times.
    """
    ids = torch.stack([probe_ids(step) for step in range(MAX_STEPS)])
    seen = np.zeros((MAX_STEPS, PROBES))
    lock, end = threading.Lock(), threading.Event()
    state = {"first": 0, "steps": 0}

    def look(call: Any, first: int, steps: int) -> None:
        request = PredictRequest()
        request.model_spec.name, request.model_spec.signature_name = SYNC_NAME, "lookup"
        request.inputs[SYNC_TABLE].CopyFrom(to_tensor_proto(ids[first:steps].reshape(-1)))
        content = call(request.SerializeToString(), timeout=30.0).outputs[SYNC_TABLE].tensor_content
        now = time.monotonic()
        there = (np.frombuffer(content, np.float32).reshape(steps - first, PROBES, DIM) != 0).any(2)
        times = seen[first:steps]
        times[there & (times == 0)] = now
        absent = np.flatnonzero((times == 0).any(1))
        with lock:
            state["first"] = first + int(absent[0]) if absent.size else steps

    def ask(address: str) -> None:
        with grpc.insecure_channel(address, options=OPTIONS) as channel:
            call = channel.unary_unary(PREDICT, response_deserializer=PredictResponse.FromString)
            while not end.wait(PROBE_SECONDS):
                with lock:
                    first, steps = state["first"], state["steps"]
                if first < steps:
                    look(call, first, steps)

    def reply(order: dict[str, Any]) -> dict[str, Any]:
        if "address" in order:
            asking.append(threading.Thread(target=ask, args=(order["address"],), daemon=True))
            asking[0].start()
            return {}
        assert asking[0].is_alive(), "the server did not answer"
        with lock:
            state["steps"] = order["steps"]
            first = state["first"]
        return {"first": first, **({"seen": seen[: order["steps"]].tolist()} if order["times"] else {})}

    asking: list[threading.Thread] = []
    try:
        answer({}, reply)
    finally:
        end.set()


ROLES: dict[str, Callable[..., None]] = {
    "model_server": model_server,
    "compiled_server": compiled_server,
    "pushed_server": pushed_server,
    "server_processes": server_processes,
    "handlers": handlers,
    "sink": sink,
    "clients": clients,
    "prober": prober,
}


# ---- used by serving.py


_SOURCE = """
sys.path.insert(0, {source!r})
import megalith
assert megalith.__file__.startswith({source!r}), "--before: make .venv/dev in that checkout first"
"""


class Process:
    """A role in a child process."""

    def __init__(
        self, role: str, *arguments: object, core: int | None = None, checkout: Path | None = None
    ) -> None:
        script = Path(__file__) if checkout is None else checkout / "benchmarks" / Path(__file__).name
        # Another checkout brings its own package along. An editable install of this one would come first.
        python, source = sys.executable, ""
        if checkout is not None:
            own = checkout / ".venv" / "bin" / "python"
            python = str(own) if own.exists() else python
            source = _SOURCE.format(source=str(checkout / "src"))
        pin = "" if core is None else f"os.sched_setaffinity(0, {{{core}}})"
        run = f"sys.path.insert(0, {str(script.parent)!r})", source, pin, "del sys.argv[0]"
        code = "\n".join(("import os, runpy, sys", *run, "runpy.run_path(sys.argv[0], run_name='__main__')"))
        command = [python, "-c", code, str(script), role, *map(str, arguments)]
        # torch.set_num_threads does not reach the threads in which handlers run.
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._role = role

    def wait(self) -> dict[str, Any]:
        """Returns its next line."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"{self._role} ended; see its output"
        found: dict[str, Any] = json.loads(line)
        return found

    def ask(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self.wait()

    def end(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def processes(*roles: tuple[object, ...]) -> Iterator[list[Process]]:
    """Starts processes for these roles and arguments in parallel; ends all of them on exit.

    With two cores or more, servers run on the first one and clients on the last one; several server processes
    have all cores. A role that begins with "before:CHECKOUT:" is that of another checkout.
    """
    started: list[Process] = []
    try:
        for name, *arguments in roles:
            checkout, _, role = str(name).removeprefix("before:").rpartition(":")
            core = None if len(CORES) < 2 or role == "server_processes" else CORES[-(role == "clients")]
            started.append(
                Process(role, *arguments, core=core, checkout=Path(checkout) if checkout else None)
            )
        yield started
    finally:
        for process in started:
            process.end()


if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
