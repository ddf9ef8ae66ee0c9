"""torch.distributed.pipelining: the model is traced, and cut where the user says."""

import torch
import torch.distributed as dist
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline

from tools.studies.peers import peer_model as gpt
from tools.studies.peers.scripts.told import RANK, STEPS, tell

torch.manual_seed(0)
dist.init_process_group("gloo")
model, micro_batches = gpt.model(), 8
example = gpt.example_batch()["tokens"].chunk(micro_batches)[0]
pipe = pipeline(model, (example,), split_spec={f"blocks.{gpt.BLOCKS // 2}": SplitPoint.BEGINNING})
stage = pipe.build_stage(RANK, torch.device("cpu"))
schedule = Schedule1F1B(
    stage, micro_batches, loss_fn=lambda output, targets: gpt.loss(output, {"targets": targets})
)
optimizer = gpt.optimizer(stage.submod.named_parameters())
for step, batch in zip(range(STEPS), gpt.batches(0), strict=False):
    if RANK == 0:
        schedule.step(batch["tokens"])
    else:
        losses: list[torch.Tensor] = []
        schedule.step(target=batch["targets"], losses=losses)
        tell(RANK, step, torch.stack(losses).mean().item())
    optimizer.step()
    optimizer.zero_grad()
dist.destroy_process_group()
