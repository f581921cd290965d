"""Trains DeepFM on a Dataset of Hugging Face, offline; it needs `pip install datasets pyarrow`."""

from __future__ import annotations

import argparse

import numpy as np
import torch

from megalith.data import Schema, TableReader
from megalith.models import DeepFM, EmbeddingConfig, forward_batch


def main(rows: int) -> None:
    from datasets import Dataset

    torch.manual_seed(0)
    draw = np.random.default_rng(0)
    users = draw.integers(0, 50, rows)
    dataset = Dataset.from_dict(
        {
            "user": [f"user {number}" for number in users],
            "seen": [draw.integers(0, 30, number % 3).tolist() for number in users],
            "clicked": (users % 2).tolist(),
        }
    )
    schema = Schema(label="clicked", features=["user", "seen"])
    reader = TableReader(dataset, schema, batch_size=64, shuffle=0)
    model = DeepFM(EmbeddingConfig(reader.feature_names, dim=8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for epoch in range(3):
        total = 0.0
        for batch in reader:
            logits = forward_batch(model, batch)
            loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item() * len(batch)
        print(f"epoch {epoch}: loss {total / len(dataset):.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train DeepFM on a Dataset of Hugging Face.")
    parser.add_argument("--rows", type=int, default=2000, help="rows of synthetic clicks")
    main(parser.parse_args().rows)
