"""One process of plain PyTorch: its losses and its lines are what the others are held to."""

import torch

from tools.studies.peers import peer_model as gpt
from tools.studies.peers.scripts.told import RANK, STEPS, tell

torch.manual_seed(0)
model = gpt.model()
optimizer = gpt.optimizer(model.named_parameters())
for step, batch in zip(range(STEPS), gpt.batches(0), strict=False):
    loss = gpt.loss(model(batch["tokens"]), batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    tell(RANK, step, loss.item())
