"""bigbrain-fx: a model in memory on the devices of a cluster file."""

import torch

import bigbrain_fx as bb
from tools.studies.peers import peer_model as gpt
from tools.studies.peers.scripts.told import RANK, STEPS, tell

torch.manual_seed(0)
model = gpt.model()
machine = bb.machine("cluster.json")
with machine(
    model, example_batch=gpt.example_batch(), loss=gpt.loss, optimizer=gpt.optimizer
) as session:
    for step, batch in zip(range(STEPS), gpt.batches(0), strict=False):
        loss = session.step(batch)
        tell(RANK, step, loss)
