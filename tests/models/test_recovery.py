"""A DeepFM learns nearly everything there is to learn from the synthetic data."""

from __future__ import annotations

import pytest
import torch

from megalith import FTRL, Adagrad, Normal
from megalith.data import SyntheticReader
from megalith.metrics import auc
from megalith.models import DeepFM, EmbeddingConfig, forward_batch


@pytest.mark.soak  # `make test` shows that training lowers the loss (test_models.py)
def test_a_deepfm_nearly_reaches_the_auc_of_the_true_probabilities() -> None:
    """Its AUC above 0.5 is at least 95 % of that of the true probabilities, on later batches than trained on.

    The data is the default: 7,000 ids and new ones, a fifth of the signal from pairs of ids. The model is
    trained on 1.4 million rows.
    """
    torch.manual_seed(0)
    reader, num_batches = SyntheticReader(batch_size=4096), 350
    model = DeepFM(
        EmbeddingConfig(
            ["user", "item", "tags", "context"],
            dim=8,
            optimizer=Adagrad(0.3, initial_accumulator_value=1.0),
            initializer=Normal(std=0.05),
        ),
        weight_optimizer=FTRL(0.2, initial_accumulator_value=1.0, beta=1.0),
    )
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for index in range(num_batches):
        batch = reader.batch(index)
        # Summed: an id's gradient counts its clicks, and initial_accumulator_value is one click's worth.
        loss = torch.nn.functional.binary_cross_entropy_with_logits(
            forward_batch(model, batch), batch.labels, reduction="sum"
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    later = [reader.batch(num_batches + i) for i in range(12)]
    labels = torch.cat([batch.labels for batch in later])
    with torch.no_grad():
        learnt = auc(torch.cat([forward_batch(model.eval(), batch) for batch in later]), labels)
    best = auc(torch.cat([batch.true_probability for batch in later]), labels)
    assert (learnt - 0.5) / (best - 0.5) >= 0.95, f"AUC {learnt:.4f}, of the true probabilities {best:.4f}"
