"""A rating model on tables that grow."""

import torch
from torch import nn

from megalith import Adam, MinCount, Normal
from megalith.compat.dynamicemb import export_dynamicemb
from megalith.compat.torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

KEYS = ["user", "movie"]


class Ratings(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        rows = self.embeddings(ids)
        return self.head(torch.cat([rows[key].values() for key in KEYS], 1)).squeeze(1)


device = torch.device("cpu")
torch.manual_seed(0)
configs = [
    EmbeddingConfig(name=key, embedding_dim=16, num_embeddings=1_000_000, feature_names=[key]) for key in KEYS
]
options = {
    "initializer": Normal(0.0, 1.0),
    "admission": MinCount(2, max_ids=100_000),
    "dist_type": "hash_roundrobin",
}
model = Ratings(
    EmbeddingCollection(tables=configs, optimizer=Adam(0.01), table_options=dict.fromkeys(KEYS, options))
)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for _ in range(50):
    ids = torch.randint(0, 2**40, (2, 256), device=device) % 997
    keyed = KeyedJaggedTensor(KEYS, ids.flatten(), lengths=torch.ones(512, dtype=torch.int64, device=device))
    loss = nn.functional.mse_loss(model(keyed), (ids[0] % 5).float())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
export_dynamicemb(model.embeddings, "dump/model.embeddings")
