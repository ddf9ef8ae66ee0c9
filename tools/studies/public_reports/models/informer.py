"""ProbSparse attention: sampled keys pick the queries, whose rows are written into a cumulative mean; scales of each series.

https://github.com/zhouhaoyi/Informer2020/blob/main/models/attn.py
"""

import math

import torch
import torch.nn.functional as F
from torch import nn


class ProbAttention(nn.Module):
    def __init__(self, dim=16, heads=2, factor=2):
        super().__init__()
        self.heads, self.factor = heads, factor
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x):
        B, L, D = x.shape
        Q, K, V = (f(x).view(B, L, self.heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        u = min(self.factor * int(math.ceil(math.log(L))), L)
        index_sample = torch.randint(L, (L, u))
        K_sample = K.unsqueeze(-3).expand(-1, -1, L, -1, -1)[:, :, torch.arange(L).unsqueeze(1), index_sample, :]
        QK = torch.matmul(Q.unsqueeze(-2), K_sample.transpose(-2, -1)).squeeze(-2)
        M_top = (QK.max(-1)[0] - torch.div(QK.sum(-1), L)).topk(u, sorted=False)[1]
        rows, heads = torch.arange(B)[:, None, None], torch.arange(self.heads)[None, :, None]
        scores = torch.matmul(Q[rows, heads, M_top, :], K.transpose(-2, -1)) * (1.0 / math.sqrt(D // self.heads))
        causal = torch.ones(L, L, dtype=torch.bool).triu(1)[None, None].expand(B, self.heads, L, L)[rows, heads, M_top, :]
        scores.masked_fill_(causal, -float("inf"))
        context = V.cumsum(dim=-2)
        context[rows, heads, M_top, :] = torch.matmul(torch.softmax(scores, dim=-1), V).type_as(context)
        return self.out(context.transpose(1, 2).reshape(B, L, D))


class Forecaster(nn.Module):
    def __init__(self):
        super().__init__()
        self.token = nn.Conv1d(1, 16, 3, padding=1, padding_mode="circular", bias=False)
        self.month, self.attns = nn.Embedding(13, 16), nn.ModuleList(ProbAttention() for _ in range(2))
        self.convs = nn.ModuleList(nn.Sequential(nn.Conv1d(16, 16, 3, padding=1, padding_mode="circular"), nn.BatchNorm1d(16), nn.ELU(), nn.MaxPool1d(3, 2, 1)) for _ in range(2))
        self.head, self.total_count = nn.Linear(64, 8), nn.Linear(64, 4)

    def forward(self, past, marks):
        scale = past.abs().mean(1, keepdim=True).clamp(min=1e-3)
        x = self.token((past / scale).unsqueeze(1)).transpose(1, 2) + self.month(marks)
        for attn, conv in zip(self.attns, self.convs):
            x = conv((x + attn(x)).transpose(1, 2)).transpose(1, 2)
        loc, raw = self.head(x.flatten(1)).chunk(2, -1)
        return loc * scale, F.softplus(raw) * scale, self.total_count(x.flatten(1))


def loss(output, batch):
    loc, std, quantiles = output
    nll = -torch.distributions.StudentT(torch.tensor(4.0), loc, std + 1e-3).log_prob(batch["future"])
    weight = (batch["future"] != 0).float()
    error = batch["future"] - quantiles
    pinball = torch.max(0.9 * error, (0.9 - 1) * error)
    smape = 2 * (loc - batch["future"]).abs() / (loc.abs().detach() + batch["future"].abs() + 1e-3)
    return (nll * weight).sum() / weight.sum().clamp(min=1) + pinball.mean() + smape.mean()


def model():
    return Forecaster()


def optimizer(named_params):
    return torch.optim.Adam([p for _, p in named_params], lr=1e-3)


def scheduler(optimizer):
    return torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(optimizer, 0.5, 2), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]
    )


def example_batch():
    return {"past": torch.rand(8, 16) * 10, "marks": torch.randint(13, (8, 16)), "future": torch.randint(0, 3, (8, 4)).float()}


def batches(seed):
    while True:
        yield example_batch()
