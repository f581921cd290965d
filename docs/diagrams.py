"""Draws the diagrams of the documentation: `python docs/diagrams.py` writes docs/images/*.svg.

A diagram is a list of boxes, arrows and labels in pixels. Colours are CSS variables, and every picture has
its own background: it is readable on light and on dark pages. A test compares the files with what this draws.
"""

from __future__ import annotations

import argparse
import sys
from html import escape
from pathlib import Path

IMAGES = Path(__file__).parent / "images"
STYLE = """
.d { --ink:#1b2a3a; --soft:#4a5a6b; --line:#37587a; --page:#ffffff; --blue:#e8f0f8; --blue-line:#37587a;
  --green:#e6f3e8; --green-line:#3c7a46; --sand:#f7efdd; --sand-line:#8a6d2f; --plain:#f3f4f6;
  --plain-line:#7b8794; }
@media (prefers-color-scheme: dark) { .d { --ink:#eef2f6; --soft:#b4c0cc; --line:#9db8d3; --page:#14171c;
  --blue:#1d2f42; --blue-line:#6c9cc9; --green:#1b3522; --green-line:#62a870; --sand:#3a311a;
  --sand-line:#c7a552;  --plain:#252a31; --plain-line:#8a95a1; } }
.d { background:var(--page); font-family:"DejaVu Sans",Verdana,system-ui,sans-serif; }
.d text { fill:var(--ink); font-size:12.5px; text-anchor:middle; }
.d .name { font-size:15px; font-weight:bold; } .d .soft { fill:var(--soft); } .d .left { text-anchor:start; }
.d .halo { stroke:var(--page); stroke-width:6; paint-order:stroke; }
.d rect { stroke-width:1.2; } .d .blue { fill:var(--blue); stroke:var(--blue-line); }
.d .green { fill:var(--green); stroke:var(--green-line); }
.d .sand { fill:var(--sand); stroke:var(--sand-line); }
.d .plain { fill:var(--plain); stroke:var(--plain-line); }
.d .frame { fill:none; stroke:var(--plain-line); stroke-dasharray:5 4; }
.d .arrow { fill:none; stroke:var(--line); stroke-width:1.6; marker-end:url(#head); }
.d .dashed { stroke-dasharray:5 4; } .d marker path { fill:var(--line); }
""".strip()


class Diagram:
    """A picture of boxes and arrows; coordinates are pixels from the upper left corner."""

    def __init__(self, width: int, height: int, title: str, text: str) -> None:
        self.width, self.height, self.title, self.text = width, height, title, text
        self.parts: list[str] = []

    def box(self, x: float, y: float, w: float, h: float, name: str, *lines: str, kind: str = "blue") -> None:
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="7"/>')
        rows = ([(name, "name", 19)] if name else []) + [(line, "soft", 17) for line in lines]
        top = y + (h - sum(step for *_, step in rows)) / 2 - 4
        for row, style, step in rows:
            top += step
            self.label(x + w / 2, top, row, style)

    def label(self, x: float, y: float, text: str, style: str = "soft") -> None:
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        path = "M" + " L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path class="arrow{" dashed" if dashed else ""}" d="{path}"/>')

    def frame(self, x: float, y: float, w: float, h: float, name: str) -> None:
        self.parts.append(f'<rect class="frame" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="9"/>')
        self.label(x + 12, y + 20, name, "soft left")

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="d" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">'
        )
        marker = (
            '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" '
            'orient="auto"><path d="M0 0L10 5L0 10z"/></marker></defs>'
        )
        about = f"<title>{escape(self.title)}</title>\n<desc>{escape(self.text)}</desc>"
        return "\n".join([head, f"<style>{STYLE}</style>", about, marker, *self.parts, "</svg>", ""])


def system() -> Diagram:
    d = Diagram(
        900,
        330,
        "Megalith: training, checkpoints and serving",
        "Data goes into training: a PyTorch model whose tables live in one process, over ranks, or on "
        "parameter servers. Training pushes changed rows to model servers within seconds and writes "
        "checkpoints, from which servers start. Clients send requests to the servers.",
    )
    d.box(20, 70, 150, 90, "your data", "DataFrame, Parquet,", "CSV, your own loop", kind="sand")
    d.frame(210, 20, 330, 190, "training")
    d.box(230, 52, 290, 54, "PyTorch model", "your layers, loss and optimizer", kind="plain")
    d.box(
        230,
        132,
        290,
        64,
        "embedding tables",
        "any 64-bit id has its own row:",
        "CPU, GPU, ranks, parameter servers",
    )
    d.arrow((170, 115), (208, 115))
    d.arrow((330, 132), (330, 108))
    d.arrow((420, 106), (420, 130))
    d.label(288, 124, "rows")
    d.label(470, 124, "gradients")
    d.frame(660, 20, 220, 190, "serving")
    d.box(
        680,
        52,
        180,
        144,
        "model servers",
        "gRPC and REST",
        "TF Serving's API",
        "Open Inference Protocol",
        kind="green",
    )
    d.arrow((540, 100), (658, 100))
    d.label(600, 78, "changed rows")
    d.label(600, 93, "every second")
    d.box(230, 250, 290, 60, "checkpoints", "safetensors, a manifest, deltas", kind="blue")
    d.arrow((375, 210), (375, 248))
    d.arrow((520, 280), (740, 280), (740, 212))
    d.label(625, 272, "export")
    d.box(770, 250, 110, 60, "clients", kind="sand")
    d.arrow((825, 250), (825, 212))
    return d


def packages() -> Diagram:
    layers = [
        [("cli", "one file per command")],
        [
            ("training", "a run: config, loop, evaluation"),
            ("reporting", "report, charts, inspection, planning"),
        ],
        [("data", "schemas, readers, columns"), ("models", "DeepFM, DLRM, DCNv2, DIN")],
        [("serving", "export, server, client, sync, discovery")],
        [("checkpoint", "save, load, deltas, resharding")],
        [("nn", "features, layouts, EmbeddingCollection")],
        [("ps", "all tables of a model, on parameter servers")],
        [("shards", "all tables of a model, local or over ranks")],
        [("table", "config, optimizers, engines")],
        [
            ("storage", "stores, tensor files, strict JSON"),
            ("distributed", "process groups, exchange, agreement"),
        ],
        [("ops", "pure functions on ids and rows")],
        [("ragged, routing", "a batch column; id to owner shard")],
        [("hashing", "ids of text")],
        [("errors, units, metrics, bits, library", "import errors at most")],
    ]
    text = "A package imports only packages below it. From top to bottom: "
    text += "; ".join(" and ".join(name for name, _ in layer) for layer in layers)
    text += (
        ". gather needs storage, distributed, ops, units and errors. compat and integrations may import any."
    )
    d = Diagram(860, 20 + 62 * len(layers), "The packages of Megalith", text)
    for row, layer in enumerate(layers):
        width = (600 - 20 * (len(layer) - 1)) / len(layer)
        for column, (name, about) in enumerate(layer):
            d.box(20 + column * (width + 20), 20 + 62 * row, width, 46, name, about)
        if row:
            d.arrow((320, 62 * row + 4), (320, 62 * row + 19))
    d.box(
        660,
        20,
        180,
        170,
        "compat",
        "Monolith, TorchRec,",
        "DynamicEmb, Templar",
        "imports any package;",
        "loaded by name",
        kind="sand",
    )
    d.box(660, 206, 180, 108, "integrations", "imports any package;", "loaded by name", kind="sand")
    d.box(660, 454, 180, 170, "gather", "needs storage,", "distributed, ops,", "units, errors", kind="green")
    d.arrow((660, 105), (622, 105))
    d.arrow((660, 601), (622, 601))
    return d


def batch_path() -> Diagram:
    d = Diagram(
        890,
        376,
        "The path of a training batch",
        "A batch of id columns is compiled into ids per table and a Pooling (nn). The shards look the ids "
        "up: an index per occurrence into the table or into rows received from other ranks. One kernel "
        "reads the rows into pooled outputs. The dense model and the loss follow. Backward gives output "
        "gradients, which are summed per distinct id, sent to the owner, summed across ranks, and applied "
        "as one optimizer step. Touched ids go to the Publisher and to delta checkpoints.",
    )
    for x, package in ((115, "data"), (335, "nn"), (555, "shards"), (775, "table engines")):
        d.label(x, 20, package)
    top = [("batch", "columns of ids"), ("compiled batch", "ids per table, a Pooling")]
    top += [("Lookup", "an index per occurrence"), ("pooled outputs", "one kernel reads rows")]
    for column, (name, about) in enumerate(top):
        d.box(20 + 220 * column, 30, 190, 56, name, about)
        if column:
            d.arrow((220 * column - 10, 58), (18 + 220 * column, 58))
    d.label(555, 104, "over ranks: ids travel")
    d.label(555, 120, "to their owners, rows back")
    d.box(680, 120, 190, 56, "dense model, loss", "your torch code", kind="sand")
    d.arrow((775, 86), (775, 118))
    d.arrow((775, 176), (775, 208))
    back = [("optimizer step", "one per distinct id"), ("owner of the id", "summed across ranks")]
    back += [("summed gradients", "one per distinct id"), ("output gradients", "backward")]
    for column, (name, about) in enumerate(back):
        d.box(20 + 220 * column, 210, 190, 56, name, about, kind="green")
        if column:
            d.arrow((20 + 220 * column, 238), (212 + 220 * (column - 1), 238))
    d.arrow((115, 266), (115, 298))
    d.box(20, 300, 190, 56, "touched ids", "tracked per consumer")
    d.box(260, 294, 300, 30, "", "Publisher: rows reach servers")
    d.box(260, 334, 300, 30, "", "delta checkpoints")
    d.arrow((210, 318), (258, 310))
    d.arrow((210, 338), (258, 348))
    return d


def tables() -> Diagram:
    d = Diagram(
        860,
        300,
        "A table: ids, an index and rows of segments",
        "The index maps any 64-bit id to the number of its row. A row has two segments in this example, "
        "each with its own width and optimizer, then the optimizer state of each segment and the time of "
        "the last update. Ids without a row read as their initial row, which is computed from the seed, the"
        " table and the id.",
    )
    d.label(90, 28, "id (int64)", "name")
    for row, text in enumerate(("7", "-3602343008258721771", "4611686018427387904")):
        y = 44 + 56 * row
        d.box(15, y, 165, 40, "", text, kind="sand")
        d.arrow((180, y + 20), (228, y + 20))
    d.box(230, 44, 110, 152, "index", "hash table", "id to row")
    d.frame(390, 8, 455, 200, "rows: one allocation that grows with the data")
    for row in range(3):
        y = 44 + 56 * row
        d.arrow((340, y + 20), (398, y + 20))
        d.box(400, y, 60, 40, "", "bias", kind="green")
        d.box(460, y, 150, 40, "", "vector (16)", kind="green")
        d.box(610, y, 60, 40, "", "state", kind="plain")
        d.box(670, y, 100, 40, "", "state", kind="plain")
        d.box(770, y, 65, 40, "", "time", kind="plain")
    d.label(505, 226, "segments with their own optimizers")
    d.label(722, 226, "optimizer state, last update")
    d.box(
        15,
        240,
        325,
        46,
        "",
        "an id without a row reads as its initial row,",
        "f(seed, table, id); nothing is stored",
        kind="plain",
    )
    d.box(
        400,
        240,
        435,
        46,
        "",
        "policies decide which ids get a row (MinCount, Probability)",
        "and which rows leave (TTL, MinNorm, Capacity)",
        kind="plain",
    )
    return d


def ranks() -> Diagram:
    d = Diagram(
        900,
        400,
        "A step over two ranks",
        "Each rank compiles its own batch, removes duplicate ids and sends each distinct id to the rank "
        "that owns it. Owners read rows and send them back. Each rank pools the rows, computes its dense "
        "model and backward, sums gradients per distinct id and sends them to the owners. The owner sums "
        "over ranks and makes one optimizer step. Dense gradients are averaged by DDP.",
    )
    columns = [
        ("batch", "own share", "of the data"),
        ("distinct ids", "sorted", "by owner"),
        ("read rows", "as owner of", "half of the ids"),
        ("model", "pool, forward,", "loss, backward"),
        ("sum gradients", "one per", "distinct id"),
        ("update", "sum over ranks,", "one step per id"),
    ]
    for rank, y in ((0, 40), (1, 270)):
        d.label(14, y - 12, f"rank {rank}", "name left")
        for column, (name, *lines) in enumerate(columns):
            kind = {2: "green", 5: "green", 3: "sand"}.get(column, "blue")
            d.box(10 + 150 * column, y, 130, 84, name, *lines, kind=kind)
            if column:
                d.arrow((150 * column - 10, y + 42), (8 + 150 * column, y + 42))
    for column, what in ((1, "ids"), (2, "rows"), (4, "gradients")):
        x = 150 + 150 * column
        d.arrow((x - 22, 126), (x + 22, 268), dashed=True)
        d.arrow((x - 22, 268), (x + 22, 126), dashed=True)
        d.label(x, 196, f"exchange {what}", "name halo")
        d.label(x, 213, "all-to-all", "soft halo")
    d.label(75, 190, "sizes and errors", "soft")
    d.label(75, 206, "are exchanged first", "soft")
    d.label(450, 382, "dense weights: DDP or FSDP2 averages their gradients, as in any torch model", "soft")
    return d


def publish() -> Diagram:
    d = Diagram(
        900,
        360,
        "Train, publish, serve",
        "Every training step marks the ids that it wrote. Once per interval the publisher collects the "
        "marked ids, reads their current rows and sends them as numbered messages to every server that "
        "discovery lists. The server applies each message once and in order, and acknowledges it. A server "
        "that restarts loads the export of a checkpoint and receives the changes since that checkpoint.",
    )
    d.frame(15, 15, 400, 215, "training process")
    d.box(35, 48, 150, 66, "training step", "writes rows", kind="sand")
    d.box(240, 48, 155, 66, "touched ids", "each id once")
    d.arrow((185, 81), (238, 81))
    d.box(240, 146, 155, 66, "Publisher", "one thread per server")
    d.arrow((318, 114), (318, 144))
    d.label(213, 134, "once per interval")
    d.frame(600, 15, 285, 215, "model server")
    d.box(625, 146, 235, 66, "Subscriber", "applies messages once, in order", kind="green")
    d.box(625, 48, 235, 66, "rows in service", "export + pushed rows", kind="green")
    d.arrow((742, 146), (742, 116))
    d.arrow((395, 166), (623, 166))
    d.arrow((625, 194), (397, 194))
    d.label(508, 140, "numbered messages:")
    d.label(508, 157, "rows, removals, dense")
    d.label(508, 213, "acknowledged")
    d.box(35, 275, 360, 62, "checkpoint", "a save every few minutes, deltas between")
    d.arrow((110, 114), (110, 273))
    d.arrow((395, 306), (880, 306), (880, 250), (840, 250), (840, 232))
    d.label(620, 298, "export: a server starts from it, then receives later changes")
    return d


def deltas() -> Diagram:
    d = Diagram(
        860,
        270,
        "A chain of deltas",
        "A full save is the base. Each delta holds the rows that changed and the ids that were removed "
        "since the save before it, and names that save. Loading reads the base, then every delta in order. "
        "Compaction merges the chain into a new base without a model.",
    )
    chain = [
        ("base", "all rows"),
        ("delta 1", "changed rows,", "removed ids"),
        ("delta 2", "changed rows,", "removed ids"),
    ]
    for number, (name, *lines) in enumerate(chain):
        d.box(20 + 195 * number, 60, 150, 74, name, *lines, kind="green" if number == 0 else "blue")
        if number:
            d.arrow((20 + 195 * number, 97), (172 + 195 * (number - 1), 97))
            d.label(192.5 + 195 * (number - 1), 88, "after")
    d.label(20, 36, "save", "name left")
    d.label(215, 36, "save_delta", "name left")
    d.label(410, 36, "save_delta", "name left")
    d.box(
        640,
        60,
        200,
        74,
        "manifest.json",
        "written last: a reader sees",
        "all of a save or none of it",
        kind="plain",
    )
    d.arrow((640, 97), (564, 97))
    d.box(20, 185, 345, 62, "load", "base, then each delta in order; a gap is an error", kind="sand")
    d.arrow((95, 134), (95, 183))
    d.arrow((290, 134), (290, 183))
    d.box(410, 185, 430, 62, "compact", "merges the chain into a new base, without a model", kind="green")
    d.arrow((485, 134), (485, 183))
    return d


def gather() -> Diagram:
    d = Diagram(
        900,
        370,
        "A gather window",
        "During a window each peer trains locally, compresses its update and uploads it to a bucket. When "
        "the window ends, every node fetches the payloads that the plan names, checks them and merges the "
        "accepted ones within a memory budget. One decision names the peers of the window. All nodes apply "
        "the same outer update, so their weights stay equal. A peer that is late, missing or invalid has a "
        "status, and reserves replace it.",
    )
    d.label(30, 28, "during the window", "name left")
    for row, (peer, what) in enumerate(
        (("peer 1", "payload in time"), ("peer 2", "payload in time"), ("peer 4", "no payload"))
    ):
        y = 44 + 66 * row
        d.box(20, y, 190, 52, peer, "local steps, compress", kind="sand")
        d.box(300, y, 170, 52, "bucket", what, kind="plain")
        d.arrow((210, y + 26), (298, y + 26), dashed=row == 2)
    d.label(530, 28, "after the window, on each node", "name left")
    d.box(530, 44, 160, 60, "fetch", "until the deadline")
    d.box(720, 44, 160, 60, "check", "a status per peer")
    d.box(720, 138, 160, 60, "merge", "within a budget")
    d.box(530, 138, 160, 60, "decision", "one for all nodes", kind="green")
    d.arrow((470, 70), (528, 70))
    d.arrow((470, 136), (500, 136), (500, 88), (528, 88))
    d.arrow((690, 74), (718, 74))
    d.arrow((800, 104), (800, 136))
    d.arrow((720, 168), (692, 168))
    d.box(530, 232, 350, 60, "outer update", "one step, the same bits on every node", kind="green")
    d.arrow((610, 198), (610, 230))
    d.box(
        20,
        260,
        450,
        84,
        "",
        "peer 4 is NOT_FOUND: a reserve replaces it.",
        "Fewer accepted peers than min_peers: the window is skipped,",
        "and weights do not change.",
        kind="plain",
    )
    d.label(705, 322, "a node that was away reads the decisions and catches up")
    return d


def servers() -> Diagram:
    d = Diagram(
        900,
        350,
        "Parameter servers",
        "Workers read rows from servers and send summed gradients to them, over sockets or shared memory. "
        "Each id has one owner among the servers. Servers apply each write once and in order, and write it "
        "to a log. Ray starts, places and restarts all processes. A server that is restarted loads the last"
        " checkpoint and replays its log.",
    )
    for row, name in enumerate(("worker 0", "worker 1", "worker 2")):
        y = 30 + 90 * row
        d.box(20, y, 190, 66, name, "batch, model, gradients", kind="sand")
        for target in (75, 225):
            d.arrow((210, y + 33), (418, target))
    for row, name in enumerate(("server 0", "server 1")):
        y = 40 + 150 * row
        d.box(420, y, 210, 74, name, "rows of half of the ids", "one optimizer step per id", kind="green")
        d.box(690, y, 190, 74, "log", "every write since", "the last checkpoint", kind="plain")
        d.arrow((630, y + 37), (688, y + 37))
    d.label(312, 22, "ids: rows come back")
    d.label(312, 262, "gradients: one per id")
    d.box(
        420, 280, 460, 54, "checkpoint", "each server writes its rows; loads on servers, ranks or one process"
    )
    d.arrow((500, 264), (500, 278))
    d.box(20, 290, 350, 44, "", "Ray starts, places and restarts the processes", kind="plain")
    return d


DIAGRAMS = {
    "system": system,
    "packages": packages,
    "batch-path": batch_path,
    "tables": tables,
    "ranks": ranks,
    "publish": publish,
    "deltas": deltas,
    "gather-window": gather,
    "parameter-servers": servers,
}


def pictures() -> dict[str, str]:
    """Return the text of every picture, by file name."""
    return {f"{name}.svg": draw().svg() for name, draw in DIAGRAMS.items()}


if __name__ == "__main__":
    argparse.ArgumentParser(
        description="Write the diagrams of the documentation to docs/images."
    ).parse_args()
    for name, svg in pictures().items():
        (IMAGES / name).write_text(svg)
    sys.exit(0)
