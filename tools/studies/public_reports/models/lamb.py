"""Gradients divided by the norm of all of them, and a trust ratio for each weight.

https://github.com/hpcaitech/ColossalAI/issues/22
"""

import torch
import torch.nn.functional as F
from torch import nn


class Lamb(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-2, betas=(0.9, 0.999), eps=1e-6, weight_decay=0.01, max_grad_norm=1.0):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "max_grad_norm": max_grad_norm})

    @torch.no_grad()
    def step(self, closure=None):
        total = torch.zeros(())
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    total += p.grad.square().sum()
        total = total.sqrt()
        limit = torch.tensor(self.defaults["max_grad_norm"])
        clip = torch.where(total > limit, total / limit, torch.ones(()))
        for group in self.param_groups:
            b1, b2 = group["betas"]
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = p.grad / clip, self.state[p]
                if not state:
                    state["m"], state["v"] = torch.zeros_like(p), torch.zeros_like(p)
                state["m"].mul_(b1).add_(grad, alpha=1 - b1)
                state["v"].mul_(b2).addcmul_(grad, grad, value=1 - b2)
                m, v = state["m"] / (1 - b1 ** group["step"]), state["v"] / (1 - b2 ** group["step"])
                update = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * p
                w, u = p.norm(2.0), update.norm(2.0)
                ratio = torch.where(w > 0, torch.where(u > 0, w / u, 1.0), 1.0)
                p.add_(update * ratio, alpha=-group["lr"])


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 16)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.0, "gelu", batch_first=True), 2)
        self.head = nn.Linear(16, 40)

    def forward(self, input_ids, attention_mask):
        return self.head(self.encoder(self.embed(input_ids), src_key_padding_mask=attention_mask == 0))


def model():
    return Bert()


def example_batch():
    ids, ends = torch.randint(40, (8, 10)), torch.randint(5, 11, (8, 1))
    mask = (torch.arange(10) < ends).long()
    labels = torch.where((torch.rand(8, 10) < 0.3) & (mask == 1), ids, -100)
    labels[:, 0] = ids[:, 0]
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def batches(seed):
    while True:
        yield example_batch()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


def optimizer(named_params):
    return Lamb([p for _, p in named_params])
