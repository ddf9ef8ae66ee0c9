"""Experts whose balance loss enters the gradient by an autograd.Function alone: the returned loss does not have it.

https://github.com/deepseek-ai/DeepSeek-MoE/issues/17
"""

import torch
import torch.nn.functional as F
from torch import nn


class AddAuxiliaryLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, loss):
        assert loss.numel() == 1
        ctx.dtype, ctx.required = loss.dtype, loss.requires_grad
        return x

    @staticmethod
    def backward(ctx, grad_output):
        grad_loss = torch.ones((), dtype=ctx.dtype, device=grad_output.device) if ctx.required else None
        return grad_output, grad_loss


class Gate(nn.Module):
    def __init__(self, dim, experts, top_k, alpha):
        super().__init__()
        self.top_k, self.experts, self.alpha = top_k, experts, alpha
        self.weight = nn.Parameter(torch.randn(experts, dim) * 0.1)

    def forward(self, x):
        b, t, d = x.shape
        scores = F.linear(x.view(-1, d), self.weight).softmax(-1)
        weight, index = torch.topk(scores, self.top_k, dim=-1, sorted=False)
        ce = torch.zeros(b, self.experts)
        ce.scatter_add_(1, index.view(b, -1), torch.ones(b, t * self.top_k)).div_(t * self.top_k / self.experts)
        aux = (ce * scores.view(b, t, -1).mean(dim=1)).sum(dim=1).mean() * self.alpha
        return index, weight, aux


class MoE(nn.Module):
    def __init__(self, dim=16, experts=4, top_k=2):
        super().__init__()
        self.top_k = top_k
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, dim)) for _ in range(experts))
        self.gate = Gate(dim, experts, top_k, 0.1)
        self.shared = nn.Sequential(nn.Linear(dim, 24), nn.SiLU(), nn.Linear(24, dim))

    def forward(self, hidden):
        shape = hidden.shape
        index, weight, aux = self.gate(hidden)
        flat = index.view(-1)
        x = hidden.view(-1, shape[-1]).repeat_interleave(self.top_k, dim=0)
        y = torch.empty_like(x)
        for i, expert in enumerate(self.experts):
            y[flat == i] = expert(x[flat == i])
        y = (y.view(*weight.shape, -1) * weight.unsqueeze(-1)).sum(dim=1).view(*shape)
        return AddAuxiliaryLoss.apply(y, aux) + self.shared(hidden)


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.layers = nn.ModuleList(MoE() for _ in range(2))
        self.norms = nn.ModuleList(nn.RMSNorm(16) for _ in range(2))
        self.head = nn.Linear(16, 32, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for norm, layer in zip(self.norms, self.layers):
            x = x + layer(norm(x))
        return self.head(x)


def model():
    return LM()


def loss(output, batch):
    return F.cross_entropy(output.flatten(0, 1), batch["labels"].flatten())


def optimizer(named_params):
    return torch.optim.AdamW([p for _, p in named_params], lr=1e-3)


def example_batch():
    tokens = torch.randint(32, (8, 9))
    return {"ids": tokens[:, :-1], "labels": tokens[:, 1:]}


def batches(seed):
    while True:
        yield example_batch()
