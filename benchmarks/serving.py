"""Serving: requests per second against plain handlers, rows per second of parameter sync, and staleness.

    python benchmarks/serving.py [--quick] [--only requests,sync,staleness] [--output PATH]
        [--before CHECKOUT]

All parts run as separate processes (serving_roles.py) on loopback, with one thread for torch, OpenMP and MKL
each. 1, 8 and 32 clients (grpc_load.py) query a DeepFM with 26 features, 13 dense values and dim 16; each
sends a request when it has the response to the last one. `ModelServer`, without and with pushed rows in every
table, is compared with the same model in a plain gRPC handler, and with a handler written by hand that has
all rows in one tensor; both with their best number of threads. Requests are those of TF Serving, and for
the variants with "infer" those of Triton with raw contents. Servers are pinned to the first core, clients to
the last one; two server processes have both. Variants take turns in every round; a ratio is the median of the
paired ratios of the rounds. --before adds the server of another checkout, which has its own .venv. A full run
saves results/serving-DATE.json. `--only protocols --before CHECKOUT` compares only these two servers, with
Predict, ModelInfer and the JSON of ModelInfer over REST.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
from harness import (
    Bar,
    Spread,
    command_line,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from serving_roles import (
    DIM,
    INFER,
    MAX_STEPS,
    NAME,
    PREDICT,
    PROBES,
    REST,
    SYNC_NAME,
    SYNC_TABLE,
    WORKERS,
    Process,
    probe_ids,
    processes,
    random_ids,
    scoring_model,
    sync_model,
)

from megalith.models import Model
from megalith.serving.discovery import StaticDiscovery
from megalith.serving.export.exporter import Provenance, export_model
from megalith.serving.sync.publisher import Publisher
from megalith.serving.sync.push_messages import MAX_PUSH_BYTES

OURS, PLAIN, LEAN = "megalith", "plain", "lean"
COMPILED, PUSHED, TWO, BEFORE = "compiled", "pushed", "two processes", "before"
INFERS = {"infer": OURS, "infer before": BEFORE}
"""Variant that gets requests of Triton -> variant whose server it uses."""
BASE = "a-save"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the measurement."""

    rows: int = 100_000
    """Rows of each of the 26 tables."""
    requests: int = 4096
    """Number of different requests."""
    pushed: int = 10_000
    """Rows of each table that are pushed."""
    loads: tuple[tuple[int, int], ...] = ((1, 1), (8, 1), (32, 1), (32, 32))
    """Pairs of the number of clients and the rows per request."""
    rounds: int = 5
    seconds: float = 2.0
    """Seconds of one variant in one round."""
    sync_rows: int = 1_000_000
    sync_rounds: int = 10
    interval: float = 1.0
    """Seconds between pushes while staleness is measured."""
    train_seconds: float = 20.0
    train_batch: int = 4096
    train_ids: int = 200_000


QUICK = Sizes(
    rows=2_000,
    requests=256,
    pushed=500,
    loads=((1, 1), (32, 1)),
    rounds=1,
    seconds=0.5,
    sync_rows=50_000,
    sync_rounds=1,
    interval=0.5,
    train_seconds=2.0,
    train_batch=512,
)


# ---- requests


@dataclass(frozen=True)
class Load:
    """The result of one variant with a number of clients, medians over rounds."""

    clients: int
    batch: int
    variant: str
    per_second: float
    p50_ms: float
    p99_ms: float
    client_cpu: float
    """Number of cores that the clients' process used."""
    ratio: Spread
    """Our requests per second / those of this variant, paired by round."""
    p50_ratio: Spread
    """Our p50 / that of this variant, paired by round."""


def measure_requests(
    sizes: Sizes, folder: Path, before: Path | None = None
) -> tuple[list[Load], dict[str, int]]:
    """Measures all loads of all variants, and the best number of threads of the handlers."""
    with ExitStack() as stack:
        others = (("handlers", sizes.rows), ("clients", sizes.rows, sizes.requests))
        handlers, clients = stack.enter_context(processes(*others))
        model = scoring_model(sizes.rows)
        export_model(model, folder, name=NAME, version=1, compile=True)  # while the others start
        roles: dict[str, tuple[object, ...]] = {
            OURS: ("model_server", folder, "-"),
            COMPILED: ("compiled_server", folder),
            PUSHED: ("pushed_server", folder, sizes.rows, sizes.pushed),
            TWO: ("server_processes", folder, 2),
        }
        if before is not None:
            roles[BEFORE] = (f"before:{before}:model_server", folder, "-")
        servers = stack.enter_context(processes(*roles.values()))
        addresses = {name: server.wait()["address"] for name, server in zip(roles, servers, strict=True)}
        offered = handlers.wait()["addresses"]
        clients.wait()
        addresses |= {name: addresses[own] for name, own in INFERS.items() if own in addresses}
        threads = {}
        for name in (PLAIN, LEAN):
            found = {each: _load(clients, each, PREDICT, 32, 1, sizes.seconds / 2) for each in offered[name]}
            addresses[name] = max(found, key=lambda each: found[each]["per_second"])
            threads[name] = WORKERS[offered[name].index(addresses[name])]
        _compare_scores(clients, addresses)
        measured = []
        for count, batch in sizes.loads:
            progress(f"{count} clients, batch {batch}")
            measured += _compare(clients, addresses, count, batch, sizes)
    return measured, threads


def _compare_scores(clients: Process, addresses: dict[str, str]) -> None:
    """Checks that all variants return the same scores."""
    scores = {
        name: clients.ask(scores=address, method=_method(name), count=32)["scores"]
        for name, address in addresses.items()
    }
    for name, found in scores.items():
        assert np.allclose(found, scores[PLAIN], rtol=1e-4, atol=1e-5), f"{name} gives other scores"
    assert len(set(scores[PLAIN])) > 1, "all scores are alike"


def measure_protocols(sizes: Sizes, folder: Path, before: Path) -> dict[str, list[Load]]:
    """Measures the server of another checkout and ours with every protocol."""
    found: dict[str, list[Load]] = {}
    with processes(("clients", sizes.rows, sizes.requests)) as (clients,):
        export_model(scoring_model(sizes.rows), folder, name=NAME, version=1)
        roles = (("model_server", folder, "-"), (f"before:{before}:model_server", folder, "-"))
        with processes(*roles) as servers:
            ready = [server.wait() for server in servers]
            clients.wait()
            for method in (PREDICT, INFER, REST):
                field = "http_address" if method == REST else "address"
                addresses = {OURS: ready[0][field], BEFORE: ready[1][field]}
                scores = [
                    clients.ask(scores=address, method=method, count=32)["scores"]
                    for address in addresses.values()
                ]
                assert np.allclose(*scores, rtol=1e-4, atol=1e-5), "the servers give different scores"
                found[method] = []
                for count in (1, 32):
                    progress(f"{method}, {count} clients")
                    found[method] += _compare(clients, addresses, count, 1, sizes, method)
    return found


def _compare(
    clients: Process, addresses: dict[str, str], count: int, batch: int, sizes: Sizes, method: str = ""
) -> list[Load]:
    names = list(addresses)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for r in range(sizes.rounds):
        for v in range(len(names)):
            name = names[(r + v) % len(names)]
            path = method or _method(name)
            found[name].append(_load(clients, addresses[name], path, count, batch, sizes.seconds))

    def spread(field: str, name: str) -> Spread:
        pairs = zip(found[OURS], found[name], strict=True)
        return Spread.of([ours[field] / its[field] for ours, its in pairs])

    def median(name: str, field: str) -> float:
        return float(statistics.median(each[field] for each in found[name]))

    return [
        Load(
            count,
            batch,
            name,
            per_second=median(name, "per_second"),
            p50_ms=median(name, "p50_ms"),
            p99_ms=median(name, "p99_ms"),
            client_cpu=median(name, "client_cpu"),
            ratio=spread("per_second", name),
            p50_ratio=spread("p50_ms", name),
        )
        for name in names
    ]


def _load(
    clients: Process, address: str, method: str, count: int, batch: int, seconds: float
) -> dict[str, Any]:
    return clients.ask(address=address, method=method, clients=count, batch=batch, seconds=seconds)


def _method(variant: str) -> str:
    return INFER if variant in INFERS else PREDICT


# ---- parameter sync


@dataclass(frozen=True)
class Sync:
    """Rows per second until acknowledged: the first push, the later ones, and raw bytes."""

    first: float
    one: float
    two: float
    """To each of two servers at once."""
    raw: float
    ratio: Spread
    """Later pushes to one server / raw, paired by round."""


def measure_sync(sizes: Sizes, folder: Path) -> Sync:
    """Measures pushes of a whole table, in turns with the same number of raw bytes."""
    model = sync_model()
    ids = random_ids(1, sizes.sync_rows)
    gradients = torch.randn(sizes.sync_rows, DIM)
    shards = model.embeddings.shards
    shards.apply_gradients({SYNC_TABLE: ids}, {SYNC_TABLE: gradients}, step=0)
    _export_sync(model, folder)
    found: dict[str, list[float]] = {"one": [], "two": [], "raw": []}
    roles = (*(("model_server", folder, "follow") for _ in range(3)), ("sink",))
    with processes(*roles) as (*servers, sink):
        addresses = [server.wait()["address"] for server in servers]
        raw = sink.wait()["address"]
        with _publisher(model, addresses[:1]) as one, _publisher(model, addresses[1:]) as two:
            pushers = {"one": lambda: _push(one, sizes.sync_rows), "two": lambda: _push(two, sizes.sync_rows)}
            with grpc.insecure_channel(raw) as channel:
                send, pieces = channel.unary_unary(PREDICT), _raw_pieces(sizes.sync_rows)
                ways = {**pushers, "raw": lambda: _send_raw(send, pieces)}
                for r in range(sizes.sync_rounds + 1):
                    progress(f"parameter sync, round {r}")
                    shards.apply_gradients({SYNC_TABLE: ids}, {SYNC_TABLE: gradients}, step=0)
                    names = list(ways)
                    for v in range(len(names)):
                        name = names[(r + v) % len(names)]
                        time.sleep(0.2)  # so that cleanup of one push does not count for the next
                        found[name].append(sizes.sync_rows / ways[name]())
    later = {name: rates[1:] for name, rates in found.items()}
    pairs = zip(later["one"], later["raw"], strict=True)
    return Sync(
        first=found["one"][0],
        **{name: statistics.median(rates) for name, rates in later.items()},
        ratio=Spread.of([ours / its for ours, its in pairs]),
    )


def _export_sync(model: Model, folder: Path) -> None:
    export_model(
        model, folder, name=SYNC_NAME, version=1, source=Provenance(BASE, model.embeddings.global_step)
    )


def _publisher(model: Model, addresses: Sequence[str], *, interval: float = 3600.0) -> Publisher:
    publisher = Publisher(
        model, StaticDiscovery(addresses), model_name=SYNC_NAME, interval=interval, base=BASE
    )
    assert publisher.flush(60.0), publisher.lagging()
    return publisher


def _push(publisher: Publisher, rows: int) -> float:
    """Measures the seconds until every target has acknowledged the changed rows."""
    before = [report.rows for report in publisher.report()]
    start = time.perf_counter()
    assert publisher.flush(120.0), publisher.lagging()
    took = time.perf_counter() - start
    sent = [report.rows - old for report, old in zip(publisher.report(), before, strict=True)]
    assert sent == [rows] * len(before), f"{sent} rows were sent, not {rows}"
    return took


def _raw_pieces(rows: int) -> list[bytes]:
    """Returns as many bytes as the ids and rows have, in pieces of the size of a push."""
    each = MAX_PUSH_BYTES // (8 + 4 * DIM)
    sizes = [min(each, rows - begin) for begin in range(0, rows, each)]
    return [torch.randn(size, 2 + DIM).numpy().tobytes() for size in sizes]


def _send_raw(send: Any, pieces: Sequence[bytes]) -> float:
    """Measures the seconds to send the pieces in sequence."""
    start = time.perf_counter()
    for piece in pieces:
        send(piece, timeout=30.0)
    return time.perf_counter() - start


# ---- staleness


@dataclass(frozen=True)
class Staleness:
    """Seconds from the write of a row in training until the server returns it."""

    p50: float
    p99: float
    most: float
    rows: int
    steps: int
    interval: float


def measure_staleness(sizes: Sizes, folder: Path) -> Staleness:
    """Trains steadily while another process queries the server for the rows."""
    progress(f"staleness, {sizes.train_seconds:g} s of training")
    model = sync_model()
    _export_sync(model, folder)
    with processes(("model_server", folder, "follow"), ("prober",)) as (server, prober):
        address = server.wait()["address"]
        prober.wait()
        prober.ask(address=address)
        with _publisher(model, [address], interval=sizes.interval) as publisher:
            written = _train(model, publisher, prober, sizes)
            end = time.monotonic() + 60.0
            while prober.ask(steps=len(written), times=False)["first"] < len(written):
                assert time.monotonic() < end, "some rows never arrived"
                time.sleep(0.01)
            seen = np.array(prober.ask(steps=len(written), times=True)["seen"])
    ages = (seen - np.array(written)[:, None]).reshape(-1)
    p50, p99 = np.percentile(ages, (50, 99))
    return Staleness(float(p50), float(p99), float(ages.max()), ages.size, len(written), sizes.interval)


def _train(model: Model, publisher: Publisher, prober: Process, sizes: Sizes) -> list[float]:
    """Returns when the rows of each step were written; the last step ends an interval."""
    known = random_ids(2, sizes.train_ids)
    labels = (torch.rand(sizes.train_batch) < 0.3).float()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    loss_of = torch.nn.BCEWithLogitsLoss()
    written: list[float] = []
    end = time.monotonic() + sizes.train_seconds
    while len(written) < MAX_STEPS:
        ids = known[torch.randint(0, sizes.train_ids, (sizes.train_batch,))]
        ids[:PROBES] = probe_ids(len(written))
        optimizer.zero_grad()
        loss = loss_of(model({SYNC_TABLE: ids}), labels)
        written.append(time.monotonic())
        loss.backward()
        optimizer.step()
        prober.ask(steps=len(written), times=False)
        if publisher.step() and time.monotonic() > end:
            break
    return written


# ---- report


def requests(sizes: Sizes, folder: Path, before: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    loads, threads = measure_requests(sizes, folder, before)
    columns = (
        "clients",
        "batch",
        "variant",
        "requests/s",
        "p50 ms",
        "p99 ms",
        "ours / its",
        "client cores",
    )
    rows = [
        (
            str(load.clients),
            str(load.batch),
            f"{load.variant}, {threads[load.variant]} threads" if load.variant in threads else load.variant,
            f"{load.per_second:.0f}",
            f"{load.p50_ms:.2f}",
            f"{load.p99_ms:.2f}",
            "" if load.variant == OURS else str(load.ratio),
            f"{load.client_cpu:.2f}",
        )
        for load in loads
    ]
    print_table("Requests", columns, rows)
    by = {(load.clients, load.batch, load.variant): load for load in loads}
    busy = by[32, 1, OURS]

    def over_lean(variant: str, clients: int) -> float:
        """Returns the requests per second of a variant of ours, divided by those of the lean handler."""
        return by[clients, 1, LEAN].ratio.median / by[clients, 1, variant].ratio.median

    bars = [
        Bar("requests/s, 1 client: compiled / lean", over_lean(COMPILED, 1), 1.3),
        Bar("requests/s, 1 client: ours / lean", over_lean(OURS, 1)),
        Bar("requests/s, 32 clients: compiled / lean", over_lean(COMPILED, 32), 2.0),
        Bar("requests/s, 32 clients: ours / lean", over_lean(OURS, 32)),
        Bar("requests/s, 32 clients: ours / plain", by[32, 1, PLAIN].ratio.median, 1.5),
        Bar("requests/s, 32 clients: two processes / one", 1 / by[32, 1, TWO].ratio.median, 1.7),
        Bar(
            "p50, 1 client: with pushed rows / without",
            1 / by[1, 1, PUSHED].p50_ratio.median,
            1.15,
            at_most=True,
        ),
        Bar("requests/s, 32 clients: infer / ours", 1 / by[32, 1, "infer"].ratio.median),
        Bar("p99 / p50, 32 clients", busy.p99_ms / busy.p50_ms, 3.0, at_most=True),
    ]
    if before is not None:
        bars.append(
            Bar("p50, 1 client: ours / before", by[1, 1, BEFORE].p50_ratio.median, 0.75, at_most=True)
        )
    return {"threads": threads, "requests": [asdict(load) for load in loads]}, bars


def protocols(sizes: Sizes, folder: Path, before: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    assert before is not None, "give the other checkout: --before"
    found = measure_protocols(sizes, folder, before)
    bars = []
    for method, loads in found.items():
        name = method.rpartition("/")[2] + (" (REST)" if method == REST else "")
        rows = [
            (
                str(each.clients),
                each.variant,
                f"{each.per_second:.0f}",
                f"{each.p50_ms:.2f}",
                f"{each.p99_ms:.2f}",
                "" if each.variant == OURS else str(each.ratio),
            )
            for each in loads
        ]
        print_table(name, ("clients", "variant", "requests/s", "p50 ms", "p99 ms", "ours / its"), rows)
        for ours, its in zip(loads[::2], loads[1::2], strict=True):
            least = 1.0 if method != REST else 0.99 if its.clients == 1 else 0.91
            bars.append(Bar(f"{name}, {its.clients} clients: requests/s / before", its.ratio.median, least))
            p99 = ours.p99_ms / its.p99_ms
            bars.append(Bar(f"{name}, {its.clients} clients: p99 / before", p99, 1.0, at_most=True))
    return {"protocols": {method: [asdict(each) for each in loads] for method, loads in found.items()}}, bars


def parameter_sync(sizes: Sizes, folder: Path, before: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    sync = measure_sync(sizes, folder)
    pushed = {"first push": sync.first, "one server": sync.one, "each of two": sync.two, "raw": sync.raw}
    print_table("Parameter sync", ("", "rows/s"), [(name, f"{rate:,.0f}") for name, rate in pushed.items()])
    bars = [
        Bar("parameter sync, rows/s: ours / raw", sync.ratio.median, 0.7, note=f"raw {sync.raw:,.0f} rows/s"),
        Bar("first push into an empty server: ours / raw", sync.first / sync.raw, 0.5),
        Bar("parameter sync to two servers: ours / raw to one", sync.two / sync.raw),
    ]
    return {"sync": asdict(sync)}, bars


def staleness(sizes: Sizes, folder: Path, before: Path | None) -> tuple[dict[str, Any], list[Bar]]:
    stale = measure_staleness(sizes, folder)
    over = f"{stale.rows} rows of {stale.steps} steps, interval {stale.interval:g} s"
    p50, p99 = stale.p50 / stale.interval, stale.p99 / stale.interval
    bars = [
        Bar("staleness p99 / interval", p99, 2.0, at_most=True, strict=True, note=over),
        Bar("staleness p50 / interval", p50, note=over),
    ]
    return {"staleness": asdict(stale)}, bars


SECTIONS = {"requests": requests, "protocols": protocols, "sync": parameter_sync, "staleness": staleness}


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="little of everything; nothing is saved")
    parser.add_argument("--only", default="requests,sync,staleness", help="some of these sections")
    parser.add_argument("--output", type=Path, help="where to save the result")
    parser.add_argument("--before", type=Path, help="a checkout whose server is measured too")
    options = parser.parse_args(arguments)
    sizes = QUICK if options.quick else Sizes()
    here = machine()
    torch.set_num_threads(1)
    bars: list[Bar] = []
    sections: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for section in options.only.split(","):
            found, own = SECTIONS[section](sizes, Path(name) / section, options.before)
            sections |= found
            bars += own
    print_bars(bars)
    content = {
        "benchmark": "serving",
        "command": command_line(arguments),
        "machine": here,
        "versions": versions(["torch", "grpcio", "protobuf", "megalith"]),
        "settings": asdict(sizes),
        **sections,
        "bars": bars,
    }
    whole = options.only == parser.get_default("only") and not options.quick
    if options.output or whole:
        write_result(options.output or result_path("serving"), content)


if __name__ == "__main__":
    main(sys.argv[1:])
