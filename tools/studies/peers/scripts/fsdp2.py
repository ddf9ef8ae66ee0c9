"""FSDP2, `fully_shard`: weights, gradients and optimizer are divided among the processes."""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tools.studies.peers import peer_model as gpt
from tools.studies.peers.scripts.told import RANK, STEPS, tell

torch.manual_seed(0)
dist.init_process_group("gloo")
model = gpt.GPT()
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = gpt.optimizer(model.named_parameters())
for step, whole in zip(range(STEPS), gpt.batches(0), strict=False):
    batch = {name: rows.chunk(dist.get_world_size())[RANK] for name, rows in whole.items()}
    loss = gpt.loss(model(batch["tokens"]), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell(RANK, step, loss.item())
dist.destroy_process_group()
