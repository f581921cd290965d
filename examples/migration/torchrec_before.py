"""TorchRec's DLRM with a fused optimizer, on random data."""

import torch
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward
from torchrec.datasets.random import RandomRecDataset
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

KEYS = ["user", "item", "shop"]

torch.manual_seed(0)
tables = [
    EmbeddingBagConfig(name=f"t_{key}", embedding_dim=16, num_embeddings=1000, feature_names=[key])
    for key in KEYS
]
model = DLRMTrain(
    DLRM(
        embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("cpu")),
        dense_in_features=4,
        dense_arch_layer_sizes=[32, 16],
        over_arch_layer_sizes=[32, 1],
    )
)
apply_optimizer_in_backward(RowWiseAdagrad, model.model.sparse_arch.parameters(), {"lr": 0.1})
dense = dict(in_backward_optimizer_filter(model.named_parameters()))
optimizer = KeyedOptimizerWrapper(dense, lambda parameters: torch.optim.Adagrad(parameters, lr=0.1))
batches = iter(RandomRecDataset(KEYS, batch_size=256, hash_size=1000, ids_per_feature=3, num_dense=4))
for _ in range(50):
    loss, _ = model(next(batches))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
