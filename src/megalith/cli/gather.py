"""megalith gather: run a script as ranks that outlive each other, look at payloads and windows, simulate."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from megalith.cli.console import errors, exit_on_error
from megalith.cli.output import console, print_json
from megalith.errors import InputError, StoreError
from megalith.gather.artifact import read_artifact_manifest
from megalith.gather.body import FileBody
from megalith.gather.faultserver import FaultServer
from megalith.gather.launcher import Ended, launch
from megalith.gather.manifest import FORMAT, MAX_BYTES, Manifest
from megalith.gather.payload import Header, read_header
from megalith.gather.publish import peek
from megalith.gather.simulation import DEFAULT_FAULTS, FAULTS, Simulation, write_job
from megalith.gather.status import Fault
from megalith.gather.store import Store, local_store, open_store, persist, wait
from megalith.units import show_bytes, show_number

app = typer.Typer(
    no_args_is_help=True, help="Gather peers' updates: run ranks, look at windows, simulate a run."
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_MAGIC = b"MEGAGATH"


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
    ranks: Annotated[int, typer.Option(min=1, help="How many ranks to start on this machine.")] = 2,
    least: Annotated[int, typer.Option(min=1, help="How many must end well.")] = 1,
) -> None:
    """Runs a script as several ranks, and lets the others go on when one dies.

    Ranks find RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, as under torchrun; `Ranks.join()` makes
    them meet. The command fails if fewer than --least ranks ended well.

    \b
    Example:
      megalith gather run --ranks 4 train.py --windows 100
      megalith gather run --ranks 4 --least 3 -m my.package.train
    """

    def told_of(ended: Ended) -> None:
        if ended.code:
            how = f"was killed by signal {-ended.code}" if ended.code < 0 else f"ended with code {ended.code}"
            errors.print(
                f"[bold yellow]warning:[/] rank {ended.rank} {how}; the others go on", highlight=False
            )

    with exit_on_error():
        ended = launch([sys.executable, script, *context.args], ranks, on_end=told_of)
    good = sum(each.code == 0 for each in ended)
    if good < least:
        errors.print(f"[bold red]error:[/] {good} of {ranks} ranks ended well, {least} must", highlight=False)
        raise typer.Exit(1)


@app.command()
def inspect(
    place: Annotated[
        str,
        typer.Argument(
            help="A payload or a manifest; or a store: a directory, or an address like s3://bucket/x.",
            show_default=False,
        ),
    ],
    run: Annotated[str | None, typer.Option(help="Of a store: the run.")] = None,
    window: Annotated[int | None, typer.Option(min=0, help="Of a store: the window.")] = None,
    endpoint: Annotated[str | None, typer.Option(help="Of an S3 store that is not Amazon's.")] = None,
    as_json: AsJson = False,
) -> None:
    """Shows a payload, an artifact's manifest, or a window of a store. Only headers are read.

    \b
    Example:
      megalith gather inspect 7.gather
      megalith gather inspect artifacts/demo/5/manifest.json
      megalith gather inspect s3://bucket/peers --run demo --window 5
    """
    with exit_on_error():
        if run is not None and window is not None:
            data = _store_window(_open(place, endpoint), run, window)
        elif Path(place).is_file():
            data = _file(Path(place))
        else:
            raise InputError(f"{place!r} is no file; a store needs --run and --window, too")
    if as_json:
        print_json(data)
    else:
        _print(data)


@app.command()
def simulate(
    peers: Annotated[int, typer.Option(min=1, help="Peers of a window; one in five is a reserve.")] = 16,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks that gather.")] = 2,
    seed: Annotated[int, typer.Option(help="What peers send and what goes wrong follows from it.")] = 0,
    windows: Annotated[int, typer.Option(min=1, help="Windows, one after another.")] = 1,
    latency: Annotated[float, typer.Option(min=0.0, help="Seconds before each answer.")] = 0.05,
    in_flight: Annotated[int, typer.Option(min=1, help="Downloads at once on a rank.")] = 4,
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
    """Starts an object server, peers and ranks on this machine, and gathers.

    Ends with a line `weights HASH`: the same for any number of ranks.

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
        if each["excluded"]:
            out.print(Text(f"  left out for copying: {', '.join(map(str, each['excluded']))}"))
    typer.echo(f"weights {weights}")


def _simulate(simulation: Simulation, ranks: int, folder: Path, *, quiet: bool) -> None:
    with FaultServer(latency=simulation.latency) as server:
        simulation.fill(server)
        job = write_job(folder, simulation, server.endpoint)
        command = [sys.executable, "-m", "megalith.gather.simulation", str(job)]
        screen = console(stderr=True)
        if quiet or not screen.is_terminal:
            ended = launch(command, ranks)
        else:
            with Live(_statuses(folder, simulation), console=screen, refresh_per_second=8) as live:
                ended = launch(command, ranks, on_wait=lambda: live.update(_statuses(folder, simulation)))
                live.update(_statuses(folder, simulation), refresh=True)
    bad = [each for each in ended if each.code]
    if bad:
        raise StoreError(f"rank {bad[0].rank} ended with code {bad[0].code}: see its messages above")


def _statuses(folder: Path, simulation: Simulation) -> Table:
    """What became of each peer so far, from the files that ranks write."""
    table = Table(title=f"{simulation.peers} peers, {simulation.windows} windows", title_justify="left")
    for column in ("rank", "done", "last", "statuses"):
        table.add_column(column, justify="right" if column in ("rank", "done") else "left")
    for path in sorted(folder.glob("statuses-*")):
        seen = [line.split() for line in path.read_text().splitlines() if line.count(" ") == 1]
        counts: dict[str, int] = {}
        for _, status in seen:
            counts[status] = counts.get(status, 0) + 1
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


def _open(place: str, endpoint: str | None) -> Store:
    if "://" in place:
        return open_store(place, **({} if endpoint is None else {"endpoint": endpoint}))
    if not Path(place).is_dir():
        raise InputError(f"{place!r} is no directory and no address")
    return local_store(place)


def _file(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(len(_MAGIC))
    if start == _MAGIC:
        body = FileBody(path)
        try:
            return _payload(read_header(body))
        except Fault as fault:
            raise InputError(f"{path}: {fault.detail}") from None
        finally:
            body.close()
    if start[:1] != b"{" or path.stat().st_size > MAX_BYTES:
        raise InputError(f"{path} is neither a payload nor a manifest ({FORMAT})")
    return _manifest(Manifest.from_bytes(path.read_bytes(), str(path)))


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
        "parameters": [entry.spec.to_json() for entry in header.parameters],
        "tables": [{**entry.spec.to_json(), "rows": entry.num_rows} for entry in header.tables],
    }


def _manifest(manifest: Manifest) -> dict[str, Any]:
    return {
        "kind": "artifact",
        "run": manifest.plan.run,
        "window": manifest.plan.window,
        "reason": manifest.reason.name,
        "outer_step": manifest.outer_step,
        "uids": list(manifest.uids),
        "skipped": {str(uid): status.value for uid, status in manifest.skipped},
        "excluded": list(manifest.excluded),
        "plan": manifest.plan.digest,
        "weights_before": manifest.weights_before,
        "weights": manifest.weights,
    }


def _store_window(store: Store, run: str, window: int) -> dict[str, Any]:
    prefix = f"payloads/{run}/{window}"
    try:
        listed = wait(persist(lambda limit: store.list(prefix, timeout=limit), deadline=60.0))
    except Fault as fault:
        raise StoreError(f"{prefix!r} cannot be listed: {fault.detail}") from None
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
    return {
        "kind": "window",
        "run": run,
        "window": window,
        "payloads": found,
        "artifact": None if manifest is None else _manifest(manifest),
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
