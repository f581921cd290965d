"""A complete model: features, a dense part, training, evaluation, a checkpoint.

The data is synthetic clicks with known probabilities. Ids are arbitrary 64-bit integers without a vocabulary,
and new items keep appearing. A row has two segments: a bias trained by FTRL and a vector trained by Adagrad.

    python examples/quickstart.py [directory]
"""

import argparse
import tempfile
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor, nn

from megalith import (
    FTRL,
    Adagrad,
    EmbeddingCollection,
    Feature,
    Layout,
    Mean,
    Segment,
    Slice,
    TableConfig,
    Zeros,
    checkpoint,
)
from megalith.data import Batch, SyntheticReader
from megalith.metrics import auc

DIM, BATCH, STEPS = 8, 512, 400
NAMES = ["user", "item", "tags", "context"]


class ClickModel(nn.Module):
    """Biases and vectors of four features, and an MLP on the vectors."""

    def __init__(self) -> None:
        super().__init__()
        segments = [
            Segment(1, optimizer=FTRL(0.1, beta=1.0), initializer=Zeros()),
            Segment(DIM, optimizer=Adagrad(0.1)),
        ]
        self.embeddings = EmbeddingCollection(
            tables=[TableConfig(name, segments=segments) for name in NAMES],
            features=[Feature(name, table=name, combiner=Mean()) for name in NAMES],
            layouts=[
                Layout("bias", [Slice(name, 0, 1) for name in NAMES], kind="add"),
                Layout("vectors", [Slice(name, 1, 1 + DIM) for name in NAMES], kind="concat"),
            ],
        )
        self.mlp = nn.Sequential(nn.Linear(len(NAMES) * DIM, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, batch: Batch) -> Tensor:
        rows = self.embeddings(batch.features, time=batch.time)
        logits: Tensor = (rows["bias"] + self.mlp(rows["vectors"])).squeeze(1)
        return logits


def train(model: ClickModel, optimizer: torch.optim.Optimizer, reader: SyntheticReader) -> None:
    model.train()
    for batch in track(reader, "training", total=STEPS):
        loss = nn.functional.binary_cross_entropy_with_logits(model(batch), batch.labels)
        optimizer.zero_grad()
        loss.backward()  # updates the tables, one step per distinct id
        optimizer.step()  # updates the dense weights


@torch.no_grad()
def evaluate(model: ClickModel, reader: SyntheticReader) -> None:
    model.eval()  # the tables are not changed in eval mode
    batches = [reader.batch(STEPS + i) for i in range(40)]  # later than all training batches
    scores = torch.cat([model(batch) for batch in batches])
    labels = torch.cat([batch.labels for batch in batches])
    best = torch.cat([batch.true_probability for batch in batches])
    print(f"AUC {auc(scores, labels):.4f}; the true probabilities have {auc(best, labels):.4f}")


def main(directory: Path) -> None:
    torch.manual_seed(0)
    reader = SyntheticReader(batch_size=BATCH, num_batches=STEPS)
    model = ClickModel()
    optimizer = torch.optim.Adam(model.mlp.parameters(), 0.002)
    train(model, optimizer, reader)
    evaluate(model, reader)
    for name, stats in model.embeddings.shards.stats().items():
        print(f"  table {name}: {stats.rows:,} rows")

    checkpoint.save(model, directory / "checkpoint", optimizer=optimizer)
    again = ClickModel()
    checkpoint.load(again, directory / "checkpoint")
    print(f"saved to {directory / 'checkpoint'} and loaded:")
    evaluate(again, reader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a click model, evaluate it, save it and load it.")
    parser.add_argument(
        "directory", type=Path, nargs="?", help="where the checkpoint is saved; default: removed at the end"
    )
    directory = parser.parse_args().directory
    if directory is not None:
        main(directory)
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
