"""How often to sync servers: one model trains on a stream; its replicas are synced at several intervals.

    python benchmarks/sync_interval.py [--quick] [--seeds N] [--output PATH] [--plots FOLDER]
    python benchmarks/sync_interval.py --draw RESULT [--plots FOLDER]

This is the experiment of the Monolith paper, on synthetic clicks. A batch is 5 seconds of a stream with 100
views per second. Four servers start from one export, made after an hour of training: three receive the
trained rows every 10 seconds, every minute and every 10 minutes of the stream, one receives nothing. For
two hours all of them score each batch over gRPC before the model trains on it. Pushes use Publisher and
ModelServer on loopback; the stream pauses until a push is acknowledged, so the speed of the machine does
not matter.

In the stream a new item appears every 5 seconds, and a fifth of the views are of recent items, most of them
of the newest; preferences change so that a weight is negated after 12 hours (15 degrees per hour). Two more
streams have only one of the two changes. A full run saves results/sync_interval-DATE.json and the plots of
the docs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from harness import (
    Bar,
    command_line,
    machine,
    print_bars,
    print_table,
    progress,
    result_path,
    versions,
    write_result,
)
from torch import Tensor, nn

from megalith import Adagrad
from megalith.data import Batch, SyntheticFeature, SyntheticReader
from megalith.metrics import auc
from megalith.models import DeepFM, EmbeddingConfig, forward_batch
from megalith.reporting.charts import Axis, Series, as_file, line_chart
from megalith.serving.client.predict_client import PredictClient
from megalith.serving.export.exporter import Provenance, export_model
from megalith.serving.server.model_server import ModelServer
from megalith.serving.server.server_config import ServerConfig
from megalith.serving.sync.publisher import Publisher
from megalith.units import HOUR, MINUTE

PACKAGES = ("megalith", "torch", "numpy", "grpcio", "protobuf")
PLOTS = Path(__file__).parent.parent / "docs" / "images"
BATCH_SECONDS, DIM, LR, TABLE_LR = 5, 8, 0.002, 0.1
INTERVALS: dict[str, int | None] = {"10 s": 10, "1 min": MINUTE, "10 min": 10 * MINUTE, "no sync": None}
TRAINER = "trainer"
"""The trainer itself: what a server without delay would return."""
WINDOW = 10 * MINUTE
FOREVER = 1e9
"""Seconds; long, so that publishers push only when this benchmark calls them."""
START = "start"
"""The name of the export that all servers start from."""


@dataclass(frozen=True)
class Feed:
    """new_items: share of views of recent items. drift_hours: the period of the change of preferences."""

    name: str
    new_items: float
    drift_hours: float | None


FEEDS = [Feed("new items and drift", 0.2, 24), Feed("new items", 0.2, None), Feed("drift", 0.0, 24)]


@dataclass(frozen=True)
class Size:
    batch: int = 512
    warm_up: int = HOUR
    measured: int = 2 * HOUR


QUICK = Size(256, 5 * MINUTE, 20 * MINUTE)


def reader_of(feed: Feed, size: Size, seed: int) -> SyntheticReader:
    drift = None if feed.drift_hours is None else feed.drift_hours * HOUR / BATCH_SECONDS
    features = (
        SyntheticFeature(name="user", num_ids=5_000, exponent=1.05),
        SyntheticFeature(name="item", num_ids=2_000, exponent=1.1, new_per_batch=1, fresh=feed.new_items),
        SyntheticFeature(name="tags", num_ids=200, max_length=4),
        SyntheticFeature(name="context", num_ids=50),
    )
    return SyntheticReader(
        features,
        batch_size=size.batch,
        seed=seed,
        drift_period=drift,
        seconds_per_batch=BATCH_SECONDS,
    )


class Trainer:
    """A DeepFM that trains batch by batch."""

    def __init__(self, names: Sequence[str], seed: int) -> None:
        torch.manual_seed(seed)
        config = EmbeddingConfig(names, dim=DIM, optimizer=Adagrad(TABLE_LR), seed=seed)
        self.model = DeepFM(config, hidden=(32,))
        self._optimizer = torch.optim.Adam(self.model.parameters(), LR)

    def step(self, batch: Batch) -> None:
        self._optimizer.zero_grad()
        logits = forward_batch(self.model.train(), batch)
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        self._optimizer.step()

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        return forward_batch(self.model.eval(), batch)


class Replica:
    """A server of the export, a client that queries it, and a publisher that updates it.

    seconds: stream time between pushes; None for a server without pushes.
    """

    def __init__(self, directory: Path, model: nn.Module, seconds: int | None, stack: ExitStack) -> None:
        self._seconds = seconds
        server = ModelServer(directory, ServerConfig(allow_writes=seconds is not None, poll_seconds=FOREVER))
        stack.enter_context(server)
        target = f"static:{server.address}"
        self._client = stack.enter_context(PredictClient(target, "feed", "standalone", timeout=60))
        self._publisher: Publisher | None = None
        if seconds is not None:
            self._publisher = stack.enter_context(
                Publisher(model, target, model_name="feed", interval=FOREVER, base=START, timeout=60.0)
            )

    def score(self, batch: Batch) -> Tensor:
        return self._client.predict(batch.features, outputs=["logits"])["logits"]

    def after(self, seconds: int) -> None:
        """Pushes if an interval has ended at this time of the stream."""
        if self._publisher is None or self._seconds is None or seconds % self._seconds:
            return
        if not self._publisher.flush(timeout=120.0):
            raise SystemExit(f"a push was not acknowledged: {self._publisher.report()}")

    @property
    def pushed(self) -> int:
        """Returns the number of rows pushed."""
        return 0 if self._publisher is None else sum(each.rows for each in self._publisher.report())


@dataclass(frozen=True)
class Outcome:
    """AUC of each replica over the whole measured time and over each window; number of rows pushed."""

    seed: int
    auc: dict[str, float]
    windows: dict[str, list[float]]
    rows_pushed: dict[str, int]


def measure(feed: Feed, size: Size, seed: int) -> Outcome:
    reader = reader_of(feed, size, seed)
    trainer = Trainer([feature.name for feature in reader.features], seed)
    warm_up = size.warm_up // BATCH_SECONDS
    for i in range(warm_up):
        trainer.step(reader.batch(i))
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        source = Provenance(START, trainer.model.embeddings.global_step)
        export_model(trainer.model, directory, name="feed", version=1, source=source)
        replicas = {
            name: Replica(directory, trainer.model, seconds, stack) for name, seconds in INTERVALS.items()
        }
        scores: dict[str, list[Tensor]] = {name: [] for name in (TRAINER, *replicas)}
        labels = []
        for i in range(size.measured // BATCH_SECONDS):
            batch = reader.batch(warm_up + i)
            labels.append(batch.labels)
            scores[TRAINER].append(trainer.score(batch))
            for name, replica in replicas.items():
                scores[name].append(replica.score(batch))
            trainer.step(batch)
            for replica in replicas.values():
                replica.after((i + 1) * BATCH_SECONDS)
        check_arrived(trainer, replicas, batch)
        pushed = {name: replica.pushed for name, replica in replicas.items()}
    window = WINDOW // BATCH_SECONDS
    return Outcome(
        seed,
        {name: auc(torch.cat(own), torch.cat(labels)) for name, own in scores.items()},
        {
            name: [
                auc(torch.cat(own[at : at + window]), torch.cat(labels[at : at + window]))
                for at in range(0, len(labels), window)
            ]
            for name, own in scores.items()
        },
        pushed,
    )


def check_arrived(trainer: Trainer, replicas: Mapping[str, Replica], batch: Batch) -> None:
    """Checks that, after the last interval, each synced replica returns the trainer's scores."""
    expected = trainer.score(batch)
    for name, replica in replicas.items():
        equal = torch.allclose(replica.score(batch), expected, atol=1e-4)
        if equal != (INTERVALS[name] is not None):
            raise SystemExit(f"the replica synced by {name!r} answers {'as' if equal else 'unlike'} training")


# ---- results


def differences(outcomes: Sequence[Outcome]) -> dict[str, list[float]]:
    """Returns the AUC lost from each interval to the next longer one, for each seed."""
    names = [*INTERVALS]
    return {
        f"AUC({short}) - AUC({long})": [each.auc[short] - each.auc[long] for each in outcomes]
        for short, long in pairwise(names)
    }


def bars_of(feed: Feed, outcomes: Sequence[Outcome], required: float | None) -> list[Bar]:
    bars = []
    for name, lost in differences(outcomes).items():
        spread = statistics.stdev(lost) if len(lost) > 1 else 0.0
        note = f"{feed.name}; seeds: {len(lost)}, mean {statistics.mean(lost):.5f}, deviation {spread:.5f}"
        bars.append(Bar(f"{name}, worst seed", min(lost), required, strict=True, note=note))
    return bars


def report(feed: Feed, outcomes: Sequence[Outcome]) -> None:
    print_table(
        f"AUC of replicas over the same views: {feed.name}",
        ("synced every", "mean AUC", *(f"seed {each.seed}" for each in outcomes), "rows pushed"),
        [
            (
                name,
                f"{statistics.mean(each.auc[name] for each in outcomes):.4f}",
                *(f"{each.auc[name]:.4f}" for each in outcomes),
                f"{statistics.mean(each.rows_pushed.get(name, 0) for each in outcomes):,.0f}",
            )
            for name in (TRAINER, *INTERVALS)
        ],
    )


def draw(result: Mapping[str, Any]) -> dict[str, str]:
    """Draws the plots of a saved result as SVG by file name: the first stream, means over its seeds."""
    outcomes = result["feeds"][0]["outcomes"]
    hours = [(i + 1) * result["window_seconds"] / HOUR for i in range(len(outcomes[0]["windows"][TRAINER]))]

    def means(name: str, less: str | None = None) -> list[tuple[float, float]]:
        return [
            (
                hour,
                statistics.mean(
                    o["windows"][name][i] - (o["windows"][less][i] if less else 0) for o in outcomes
                ),
            )
            for i, hour in enumerate(hours)
        ]

    x = Axis("hours of the stream since the export", low=0.0)
    by_time = line_chart(
        "AUC of replicas that are synced every so often",
        [Series(name, means(name), "line and points") for name in INTERVALS],
        x,
        Axis("AUC"),
    )
    lost = line_chart(
        "AUC that a delay costs",
        [Series(name, means(TRAINER, name), "line and points", colour=i) for i, name in enumerate(INTERVALS)],
        x,
        Axis("AUC below the trainer's", log=True),
    )
    return {"sync-interval.svg": as_file(by_time), "sync-interval-lost.svg": as_file(lost)}


def write_plots(result: Path, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, svg in draw(json.loads(result.read_text())).items():
        (folder / name).write_text(svg)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="20 minutes of one stream; nothing is saved")
    parser.add_argument("--seeds", type=int, default=3, help="streams of each feed")
    parser.add_argument("--output", type=Path, help="where to save the result")
    parser.add_argument("--plots", type=Path, help="folder to draw the plots into")
    parser.add_argument("--draw", type=Path, help="measure nothing: draw the plots of this result")
    options = parser.parse_args(arguments)
    if options.draw:
        write_plots(options.draw, options.plots or PLOTS)
        return
    torch.set_num_threads(1)
    size = QUICK if options.quick else Size()
    seeds = range(1 if options.quick else options.seeds)
    bars, feeds = [], []
    for feed in FEEDS[:1] if options.quick else FEEDS:
        outcomes = []
        for seed in seeds:
            outcomes.append(measure(feed, size, seed))
            progress(
                f"{feed.name}, seed {seed}: " + ", ".join(f"{k} {v:.5f}" for k, v in outcomes[-1].auc.items())
            )
        report(feed, outcomes)
        bars += bars_of(feed, outcomes, 0.0 if feed is FEEDS[0] else None)
        feeds.append(
            {
                **asdict(feed),
                "outcomes": [asdict(each) for each in outcomes],
                "differences": differences(outcomes),
            }
        )
    print_bars(bars)
    output = options.output or (None if options.quick else result_path("sync_interval"))
    if output is None:
        return
    content = {
        "benchmark": "sync_interval",
        "command": command_line(arguments),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "batch_seconds": BATCH_SECONDS,
        "window_seconds": WINDOW,
        "size": asdict(size),
        "feeds": feeds,
        "bars": bars,
    }
    write_result(output, content)
    if options.plots or not options.quick:
        write_plots(output, options.plots or PLOTS)


if __name__ == "__main__":
    main(sys.argv[1:])
