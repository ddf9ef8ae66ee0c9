"""DistributedDataParallel: the whole model in each process, each with rows of its own."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tools.studies.peers import peer_model as gpt
from tools.studies.peers.scripts.told import RANK, STEPS, tell

torch.manual_seed(0)
dist.init_process_group("gloo")
model = DistributedDataParallel(gpt.model())
optimizer = gpt.optimizer(model.named_parameters())
for step, whole in zip(range(STEPS), gpt.batches(0), strict=False):
    batch = {name: rows.chunk(dist.get_world_size())[RANK] for name, rows in whole.items()}
    loss = gpt.loss(model(batch["tokens"]), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell(RANK, step, loss.item())
dist.destroy_process_group()
