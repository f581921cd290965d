"""Online learning on one machine: a model trains on clicks while a server answers with the trained rows.

The true weights drift, and a fifth of the views are of new items. Every second the rows and weights that
changed are pushed to the server. Each batch is scored by the server and by a copy that stays as exported,
before the model trains on it. `megalith train --publish` and `megalith serve --follow` do the same in
separate processes. Requires `pip install '.[serve]'` in a checkout.

    python examples/online.py [--seconds 20]
"""

import argparse
import itertools
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from megalith import Adagrad
from megalith.data import Batch, SyntheticFeature, SyntheticReader
from megalith.metrics import auc
from megalith.models import DeepFM, EmbeddingConfig, forward_batch
from megalith.serving import ModelServer, PredictClient, Publisher, Servable, ServerConfig
from megalith.serving.export.exporter import Provenance, export_model

WARM_UP = 300  # batches before the model is exported
DRIFT = 8_000  # batches of a period of the true weights; after half of it they are inverted
FEATURES = [
    SyntheticFeature(name="user", num_ids=5_000, exponent=1.05),
    SyntheticFeature(name="item", num_ids=2_000, new_per_batch=0.5, fresh=0.2),
    SyntheticFeature(name="tags", num_ids=200, max_length=4),
]


class Trainer:
    """A DeepFM and its optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        names = [feature.name for feature in FEATURES]
        self.model = DeepFM(EmbeddingConfig(names, dim=8, optimizer=Adagrad(0.1)), hidden=(32,))
        self.optimizer = torch.optim.Adam(self.model.parameters(), 0.002)
        self.steps = 0

    def learn(self, batch: Batch) -> None:
        logits = forward_batch(self.model, batch)
        self.optimizer.zero_grad()
        nn.functional.binary_cross_entropy_with_logits(logits, batch.labels).backward()
        self.optimizer.step()
        self.steps += 1

    @torch.no_grad()
    def score(self, batch: Batch) -> Tensor:
        return forward_batch(self.model.eval(), batch)


def show(trainer: Trainer, publisher: Publisher, labels: list[Tensor], *scored: list[Tensor]) -> None:
    """Prints a line of the table: the AUC of the latest batches."""
    (target,) = publisher.report()
    stale = "" if target.staleness is None else f"{target.staleness:.2f} s"
    found = [auc(torch.cat(scores), torch.cat(labels)) for scores in scored]
    cells = [
        f"{trainer.steps:6}",
        f"{target.rows:11,}",
        f"{stale:>9}",
        *(f"{value:10.4f}" for value in found),
    ]
    print("   ".join(cells), flush=True)


def main(seconds: float) -> None:
    torch.set_num_threads(1)
    batches = iter(SyntheticReader(FEATURES, batch_size=256, drift_period=DRIFT))
    trainer = Trainer()
    for batch in itertools.islice(batches, WARM_UP):
        trainer.learn(batch)

    with tempfile.TemporaryDirectory() as folder:
        # The export records its save; a publisher that starts from it sends only changes.
        export_model(trainer.model, folder, name="feed", version=1, source=Provenance("start", trainer.steps))
        copy = Servable(Path(folder) / "1")
        with (
            ModelServer(folder, ServerConfig(allow_writes=True)) as server,
            PredictClient(f"static:{server.address}", "feed", "standalone", timeout=5) as client,
            Publisher(
                trainer.model, f"static:{server.address}", model_name="feed", interval=1.0, base="start"
            ) as publisher,
        ):
            print("  step   rows pushed   staleness   AUC served   AUC frozen")
            end = time.monotonic() + seconds
            while time.monotonic() < end:
                latest: tuple[list[Tensor], ...] = ([], [], [])
                labels, served, frozen = latest
                line = min(time.monotonic() + 2.0, end)
                while not labels or time.monotonic() < line:
                    batch = next(batches)
                    labels.append(batch.labels)
                    served.append(client.predict(batch.features, outputs=["logits"])["logits"])
                    frozen.append(copy.predict(batch.features)["logits"])
                    trainer.learn(batch)
                    publisher.step()  # pushes once a second in its own thread
                show(trainer, publisher, *latest)
            publisher.flush()  # the last second of training
            answer = client.predict(batch.features, outputs=["logits"])["logits"]
            difference = (trainer.score(batch) - answer).abs().max().item()
            print(f"all rows are pushed: served and trained logits differ by {difference:.0e} at most")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=20.0, help="how long to train and serve")
    main(parser.parse_args().seconds)
