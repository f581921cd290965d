"""A click model."""

import torch
from torch import nn

from megalith import Adagrad, EmbeddingCollection, Feature, Mean, Normal, Ragged, TableConfig


class Clicks(nn.Module):
    def __init__(self):
        super().__init__()
        item = TableConfig("item", dim=16, optimizer=Adagrad(0.1), initializer=Normal(0.0, 1.0))
        self.items = EmbeddingCollection([item], [Feature("items", "item", Mean())])
        self.head = nn.Linear(16, 1)

    def forward(self, ids, offsets):
        items = self.items({"items": Ragged(ids, offsets)})["items"]
        return self.head(items).squeeze(1)


torch.manual_seed(0)
model = Clicks()
optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
for _ in range(50):
    ids, offsets = torch.randint(0, 1000, (512,)), torch.arange(0, 513, 2)
    labels = (ids[::2] % 2).float()
    loss = nn.functional.binary_cross_entropy_with_logits(model(ids, offsets), labels)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
