"""megalith gather: run a script as ranks that survive each other, inspect payloads and windows, simulate."""

from __future__ import annotations

import json
import signal
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megalith.cli.output import AsJson, console, error_console, exit_on_error, grid, print_json
from megalith.distributed.elastic_ranks import EndedRank, launch_ranks
from megalith.errors import InputError, StoreError
from megalith.gather.artifact import (
    FORMAT,
    MAX_MANIFEST_BYTES,
    ArtifactManifest,
    Artifacts,
    read_artifact_manifest,
    weights_of_nodes,
)
from megalith.gather.compress import peek
from megalith.gather.payload import MAGIC, Header, read_header
from megalith.gather.plan import Fault
from megalith.gather.simulation import DEFAULT_FAULTS, FAULTS, Simulation, write_job
from megalith.storage.bodies import Body, FileBody, ObjectBody
from megalith.storage.json_codec import to_json
from megalith.storage.object_store import ObjectStore, StoreRequestError, open_object_store
from megalith.storage.retries import persist, run_async
from megalith.storage.torch_files import StoredTensor, TorchFile, TorchFileError
from megalith.units import show_bytes, show_number

app = typer.Typer(
    no_args_is_help=True, help="Gather the updates of peers: run ranks, inspect windows, simulate a run."
)


@app.command(
    context_settings={
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "allow_interspersed_args": False,
    }
)
def run(
    context: typer.Context,
    script: Annotated[
        str, typer.Argument(help="A Python file, or -m; its arguments follow.", show_default=False)
    ],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks to start on this machine.")] = 2,
    least: Annotated[int, typer.Option(min=1, help="Number of ranks that must succeed.")] = 1,
) -> None:
    """Run a script as several ranks, and let the others continue when one dies.

    RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set, as under torchrun; `ElasticRanks.join()` connects
    the ranks. The command fails if fewer than --least ranks succeeded. SIGTERM ends all ranks.

    \b
    Example:
      megalith gather run --ranks 4 train.py --windows 100
      megalith gather run --ranks 4 --least 3 -m my.package.train
    """

    def report(ended: EndedRank) -> None:
        if ended.code:
            how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"ended with code {ended.code}"
            rest = f"; {ended.running} others continue" if ended.running else ""
            error_console.print(f"[bold yellow]warning:[/] rank {ended.rank} {how}{rest}", highlight=False)

    def end(number: int, frame: object) -> NoReturn:
        raise typer.Exit(128 + number)  # `launch` ends the ranks

    before = signal.signal(signal.SIGTERM, end)
    try:
        with exit_on_error():
            ended = launch_ranks([sys.executable, script, *context.args], ranks, on_end=report)
    finally:
        signal.signal(signal.SIGTERM, before)
    good = sum(each.code == 0 for each in ended)
    if good < least:
        message = f"{good} of {ranks} ranks succeeded, {least} must"
        error_console.print(f"[bold red]error:[/] {message}", highlight=False)
        raise typer.Exit(1)


@app.command()
def inspect(
    place: Annotated[
        str,
        typer.Argument(
            help="A payload, a torch file of Templar or a manifest, as a file or as an object such as "
            "s3://bucket/7.gather; or, with --run and --window, a store: a directory or s3://bucket/prefix.",
            show_default=False,
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Of a store: the run.")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Of a store: the window.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="URL of an S3 server that is not Amazon's.")] = None,
    region: Annotated[str | None, typer.Option(help="Region of the bucket.")] = None,
    access_key_id: Annotated[
        str | None, typer.Option(help="Credentials; AWS_ACCESS_KEY_ID and others if not given.")
    ] = None,
    secret_access_key: Annotated[str | None, typer.Option(help="See --access-key-id.")] = None,
    anonymous: Annotated[bool, typer.Option("--anonymous", help="Do not sign requests.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a payload, an artifact's manifest, or a window of a store. Only headers are read.

    Credentials of a store come from the AWS_* environment variables or from options.

    \b
    Example:
      megalith gather inspect 7.gather
      megalith gather inspect gradient-5-7-v2.1.pt
      megalith gather inspect artifacts/demo/decisions/4.json
      megalith gather inspect s3://bucket/peers --run demo --window 5
    """
    with exit_on_error():
        if "://" not in place and Path(place).is_file():
            data = _file(Path(place))
        elif "://" not in place and not Path(place).is_dir():
            raise InputError(f"{place!r} is not a file, a directory or the URL of a store")
        else:
            given = {
                "endpoint": endpoint,
                "region": region,
                "access_key_id": access_key_id,
                "secret_access_key": secret_access_key,
            }
            options: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
            options |= {"anonymous": True} if anonymous else {}
            if run is not None and window is not None:
                data = _store_window(open_object_store(place, **options), run, window)
            elif Path(place).suffix and "://" in place:
                folder, _, name = place.rpartition("/")
                data = _body(ObjectBody(open_object_store(folder, **options), name), name)
            else:
                raise InputError(f"{place!r} is a store: pass --run and --window too")
    if as_json:
        print_json(data)
    else:
        _print(data)


@app.command()
def simulate(
    peers: Annotated[int, typer.Option(min=1, help="Peers of a window; one in five is a reserve.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2,
    seed: Annotated[int, typer.Option(help="Determines what peers send and which faults occur.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="Number of windows.")] = 1,
    latency: Annotated[float, typer.Option(min=0.0, help="Seconds before each answer.")] = 0.05,
    in_flight: Annotated[int, typer.Option(min=1, help="Concurrent downloads on a rank.")] = 4,
    faults: Annotated[
        str | None,
        typer.Option(
            help=f"Shares of peers, such as corrupt=0.1,copy=0.2, or none. Known: {', '.join(FAULTS)}. "
            "0.05 each if not given.",
            show_default=False,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Simulate peers with faults, and gather them with ranks on this machine.

    The last line is `weights HASH`, which is equal for any number of ranks.

    \b
    Example:
      megalith gather simulate --peers 20 --ranks 4 --seed 1
      megalith gather simulate --peers 20 --ranks 1 --seed 1 --faults corrupt=0.2,copy=0.1
      megalith gather simulate --peers 8 --ranks 2 --faults none --windows 3
    """
    with exit_on_error(), tempfile.TemporaryDirectory(prefix="gather-simulation-") as name:
        folder = Path(name)
        simulation = Simulation(
            peers=peers,
            seed=seed,
            windows=windows,
            latency=latency,
            in_flight=in_flight,
            faults=_shares(faults),
        )
        _simulate(simulation, ranks, folder, quiet=as_json)
        found = [json.loads((folder / f"window-{w}.json").read_text()) for w in range(windows)]
        weights = (folder / "weights").read_text()
    if as_json:
        print_json({"windows": found, "weights": weights})
        return
    out = console()
    for number, each in enumerate(found):
        out.print(Text(f"window {number}: {each['reason']}, {len(each['uids'])} peers", style="bold"))
        for key, value in each["metrics"].items():
            out.print(Text(f"  {key:<32} {value:g}"))
        for uid, (status, detail) in each["skipped"].items():
            out.print(Text(f"  skipped uid {uid}: {status}: {detail}"))
        if each["excluded"]:
            out.print(Text(f"  left out for copying: {', '.join(map(str, each['excluded']))}"))
    typer.echo(f"weights {weights}")


def _simulate(simulation: Simulation, ranks: int, folder: Path, *, quiet: bool) -> None:
    command = [sys.executable, "-m", "megalith.gather.simulation", str(write_job(folder, simulation))]
    screen = console(stderr=True)
    if quiet or not screen.is_terminal:
        ended = launch_ranks(command, ranks)
    else:
        with Live(_statuses(folder, simulation), console=screen, refresh_per_second=8) as live:
            ended = launch_ranks(command, ranks, on_wait=lambda: live.update(_statuses(folder, simulation)))
            live.update(_statuses(folder, simulation), refresh=True)
    bad = [each for each in ended if each.code]
    if bad:
        raise StoreError(f"rank {bad[0].rank} ended with code {bad[0].code}: see its messages above")


def _statuses(folder: Path, simulation: Simulation) -> Table:
    """What became of each peer so far, from the files that ranks write."""
    title = f"{simulation.peers} peers, {simulation.windows} windows"
    table = grid(("rank", "done", "last", "statuses"), left=("last", "statuses"), title=title)
    for path in sorted(folder.glob("statuses-*")):
        seen = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 1]
        counts = Counter(status for _, status in seen)
        last = f"uid {seen[-1][0]}: {seen[-1][1]}" if seen else ""
        listed = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
        table.add_row(path.name.partition("-")[2], str(len(seen)), last, listed)
    return table


def _shares(text: str | None) -> dict[str, float]:
    if text is None:
        return dict(DEFAULT_FAULTS)
    if text == "none":
        return {}
    found = {}
    for part in text.split(","):
        name, _, share = part.partition("=")
        try:
            found[name.strip()] = float(share)
        except ValueError:
            raise InputError(f"--faults: {part!r} is not NAME=SHARE, such as corrupt=0.1") from None
    return found


# ---- inspect


def _file(path: Path) -> dict[str, Any]:
    body = FileBody(path.open("rb"))
    try:
        return _body(body, str(path))
    finally:
        body.close()


def _body(body: Body, where: str) -> dict[str, Any]:
    start = bytes(body.read(0, min(len(MAGIC), body.size)))
    try:
        if start == MAGIC:
            return _payload(read_header(body))
        if start[:4] == b"PK\x03\x04":
            return _torch_file(TorchFile(body, longest_pickle=min(body.size, 1 << 28)))
    except (Fault, TorchFileError) as error:
        raise InputError(f"{where}: {error}") from None
    if start[:1] != b"{" or body.size > MAX_MANIFEST_BYTES:
        raise InputError(f"{where} is neither a payload, a torch file nor a manifest ({FORMAT})")
    return _manifest(ArtifactManifest.from_bytes(bytes(body.read(0, body.size)), where))


def _torch_file(file: TorchFile) -> dict[str, Any]:
    saved = file.value if isinstance(file.value, dict) else {}
    state = saved.get("state_dict")
    tensors = {name: each for name, each in (state or {}).items() if isinstance(each, StoredTensor)}
    uids = saved.get("uids")
    return {
        "kind": "aggregator" if isinstance(uids, list) else "templar payload",
        "global_step": saved.get("global_step"),
        "metadata": (state or {}).get("metadata"),
        "uids": uids if isinstance(uids, list) else [],
        "keys": sorted(state or {}),
        "bytes": sum(each.numel * each.storage.dtype.itemsize for each in tensors.values()),
    }


def _payload(header: Header) -> dict[str, Any]:
    label = header.label
    return {
        "kind": "payload",
        "run": label.run,
        "window": label.window,
        "uid": label.uid,
        "global_step": label.global_step,
        "bytes": header.size,
        "digest": header.digest,
        "schema": header.schema_digest,
        "parameters": [to_json(entry.spec) for entry in header.parameters],
        "tables": [{**to_json(entry.spec), "rows": entry.num_rows} for entry in header.tables],
    }


def _manifest(manifest: ArtifactManifest) -> dict[str, Any]:
    return {
        "kind": "artifact",
        "run": manifest.plan.run,
        "window": manifest.plan.window,
        "reason": manifest.reason.name,
        "outer_step": manifest.outer_step,
        "uids": list(manifest.uids),
        "skipped": {str(uid): status.value for uid, status in manifest.skipped.items()},
        "excluded": list(manifest.excluded),
        "plan": manifest.plan.digest,
        "weights_before": manifest.weights_before,
    }


def _store_window(store: ObjectStore, run: str, window: int) -> dict[str, Any]:
    prefix = f"payloads/{run}/{window}"
    try:
        listing = persist(lambda limit: store.list(prefix, timeout=limit), deadline=60.0)
        listed = run_async(listing, f"listing {prefix!r}", deadline=60.0)
    except StoreRequestError as error:
        raise StoreError(f"{prefix!r} cannot be listed: {error}") from None
    found = []
    for info in sorted(listed, key=lambda each: each.key):
        entry: dict[str, Any] = {
            "key": info.key,
            "bytes": info.size,
            "written": info.last_modified.isoformat(),
        }
        try:
            header = peek(store, info.key)
            entry |= {"uid": header.label.uid, "digest": header.digest, "problem": ""}
        except Fault as fault:
            entry |= {"uid": None, "digest": None, "problem": str(fault)}
        found.append(entry)
    manifest = read_artifact_manifest(store, run, window)
    nodes = weights_of_nodes(Artifacts(store), run, window)
    return {
        "kind": "window",
        "run": run,
        "window": window,
        "payloads": found,
        "artifact": None if manifest is None else _manifest(manifest),
        "weights": {node: sorted(hashes) for node, hashes in nodes.items()},
    }


def _print(data: dict[str, Any]) -> None:
    out = console()
    if data["kind"] == "window":
        out.print(Text(f"run {data['run']}, window {data['window']}: {len(data['payloads'])} payloads"))
        if data["payloads"]:
            table = Table("uid", "bytes", "written", "digest", "problem")
            for each in data["payloads"]:
                uid = "?" if each["uid"] is None else str(each["uid"])
                size, digest = show_bytes(each["bytes"]), (each["digest"] or "")[:12]
                table.add_row(*map(Text, (uid, size, each["written"], digest, each["problem"])))
            out.print(table)
        if data["artifact"] is None:
            out.print("no artifact")
        else:
            _print(data["artifact"])
        for node, hashes in data["weights"].items():
            out.print(Text(f"weights of {node}: {', '.join(hashes)}"))
        return
    for key, value in data.items():
        if key == "parameters":
            table = Table("parameter", "shape", "chunk", "keep", "bins", "dct")
            for each in value:
                cells = (each["name"], each["shape"], each["chunk"], each["keep"], each["bins"], each["dct"])
                table.add_row(*(Text(str(cell)) for cell in cells))
            out.print(table)
        elif key == "tables":
            for each in value:
                out.print(Text(f"table {each['name']}: {show_number(each['rows'])} rows of {each['dim']}"))
        elif key == "skipped":
            listed = ", ".join(f"{uid} {status}" for uid, status in value.items()) or "none"
            out.print(Text(f"{key:<16} {listed}"))
        else:
            shown = ", ".join(map(str, value)) or "none" if isinstance(value, list) else value
            out.print(Text(f"{key:<16} {shown}"))
