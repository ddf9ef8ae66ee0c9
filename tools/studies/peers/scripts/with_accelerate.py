"""accelerate: `prepare` wraps the model (by DDP), and the loop stays."""

import torch
from accelerate import Accelerator  # type: ignore[import-not-found]  # it need not be here

from tools.studies.peers import peer_model as gpt
from tools.studies.peers.scripts.told import RANK, STEPS, tell

torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
model = gpt.model()
model, optimizer = accelerator.prepare(model, gpt.optimizer(model.named_parameters()))
for step, whole in zip(range(STEPS), gpt.batches(0), strict=False):
    with accelerator.split_between_processes(whole) as batch:
        loss = gpt.loss(model(batch["tokens"]), batch)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    tell(RANK, step, loss.item())
accelerator.end_training()
