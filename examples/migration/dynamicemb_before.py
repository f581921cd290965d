"""A rating model on tables that grow."""

import torch
import torch.distributed as dist
from dynamicemb import (
    DynamicEmbDump,
    DynamicEmbInitializerArgs,
    DynamicEmbInitializerMode,
    DynamicEmbScoreStrategy,
    DynamicEmbTableOptions,
    FrequencyAdmissionStrategy,
    KVCounter,
)
from dynamicemb.optimizer import EmbOptimType
from dynamicemb.planner import (
    DynamicEmbeddingEnumerator,
    DynamicEmbeddingShardingPlanner,
    DynamicEmbParameterConstraints,
)
from dynamicemb.shard import DynamicEmbeddingCollectionSharder
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import Topology
from torchrec.distributed.types import ShardingType

KEYS = ["user", "movie"]


class Ratings(nn.Module):
    def __init__(self, embeddings):
        super().__init__()
        self.embeddings = embeddings
        self.head = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, ids):
        rows = self.embeddings(ids)
        return self.head(torch.cat([rows[key].values() for key in KEYS], 1)).squeeze(1)


def distributed(model, configs, device):
    options = DynamicEmbTableOptions(
        global_hbm_for_values=1 << 30,
        initializer_args=DynamicEmbInitializerArgs(mode=DynamicEmbInitializerMode.NORMAL),
        score_strategy=DynamicEmbScoreStrategy.STEP,
        admit_strategy=FrequencyAdmissionStrategy(threshold=2),
        admission_counter=KVCounter(capacity=100_000),
        dist_type="hash_roundrobin",
    )
    constraints = {
        config.name: DynamicEmbParameterConstraints(
            sharding_types=[ShardingType.ROW_WISE.value], use_dynamicemb=True, dynamicemb_options=options
        )
        for config in configs
    }
    topology = Topology(world_size=dist.get_world_size(), compute_device="cuda")
    planner = DynamicEmbeddingShardingPlanner(
        eb_configs=configs,
        topology=topology,
        constraints=constraints,
        enumerator=DynamicEmbeddingEnumerator(topology=topology, constraints=constraints),
    )
    sharder = DynamicEmbeddingCollectionSharder(
        fused_params={"optimizer": EmbOptimType.ADAM, "learning_rate": 0.01, "eps": 1e-8}
    )
    plan = planner.collective_plan(model, [sharder], dist.GroupMember.WORLD)
    return DistributedModelParallel(module=model, device=device, sharders=[sharder], plan=plan)


dist.init_process_group("nccl")
device = torch.device("cuda", dist.get_rank())
torch.cuda.set_device(device)
torch.manual_seed(0)
configs = [
    EmbeddingConfig(name=key, embedding_dim=16, num_embeddings=1_000_000, feature_names=[key]) for key in KEYS
]
model = distributed(
    Ratings(EmbeddingCollection(tables=configs, device=torch.device("meta"))), configs, device
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
DynamicEmbDump("dump", model, optim=True)
